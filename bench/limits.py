"""What the library promises of its speed, and whether it was kept: cell by cell."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from inflight import Case
from markdown import name_of
from results import Results

from aiocoll.cli.workload import KINDS

KIB, MIB = 1 << 10, 1 << 20
MPI = ("mpich", "open mpi")
#: Any larger size.
INF = 1 << 62


class Limit(NamedTuple):
    """At a collective and from one size to another, `system` is so many times faster than the fastest of `others`."""

    system: str
    others: tuple[str, ...]
    world_size: int
    kind: str
    low: int
    high: int
    times: float
    inflight: int = 1


class Verdict(NamedTuple):
    what: str
    limit: str
    measured: str
    met: bool | None


LIMITS = (
    *(
        Limit("aiocoll auto", ("gloo",), world_size, "allreduce", low, high, times)
        for world_size, each in ((2, (20, 5, 5)), (4, (12, 5, 4)))
        for (low, high), times in zip(((1, 64 * KIB), (MIB, MIB), (16 * MIB, INF)), each, strict=True)
    ),
    Limit("aiocoll auto", MPI, 2, "allreduce", 8, 8, 1 / 5),
    *(
        Limit("aiocoll auto", MPI, 2, "allreduce", low, high, times)
        for low, high, times in (
            (16 * KIB, 256 * KIB, 1),
            (MIB, MIB, 1.2),
            (4 * MIB, 4 * MIB, 1),
            (16 * MIB, 16 * MIB, 1.2),
            (64 * MIB, 64 * MIB, 1),
            (256 * MIB, 256 * MIB, 1.7),
        )
    ),
    Limit("aiocoll auto", MPI, 4, "allreduce", MIB, INF, 1),
    *(
        Limit("aiocoll auto", MPI, world_size, kind, low, high, times)
        for world_size, low, high, times in ((2, 4 * KIB, 64 * KIB, 1 / 2), (2, MIB, INF, 1), (4, MIB, INF, 1))
        for kind in KINDS[1:]
        if kind != "barrier"
    ),
    *(
        Limit("aiocoll tcp", ("gloo",), 2, "allreduce", low, high, times)
        for low, high, times in ((1, 64 * KIB, 5), (MIB, MIB, 1.3), (16 * MIB, INF, 1.3))
    ),
    *(
        Limit("aiocoll auto", ("gloo awaited",), world_size, "allreduce", 4 * KIB, 4 * KIB, 30, inflight=64)
        for world_size in (2, 4)
    ),
    *(
        Limit("aiocoll auto", ("gloo",), world_size, kind, size, size, 2)
        for world_size in (2, 4)
        for kind in KINDS[1:]
        if kind != "scan"  # Gloo has none
        for size in (0, 4 * KIB, 16 * MIB)
    ),
)
#: Times the bound that a large allreduce may take, and what is large.
OF_BOUND, LARGE = 2.0, 16 * MIB
#: Milliseconds of thread CPU that a callback may take at p99.
CALLBACK = 1.0


def verdicts(all_results: Sequence[Results]) -> Iterator[Verdict]:
    """Yield one for each limit and each size in it that was asked for."""
    for results in all_results:
        for limit in LIMITS:
            if results.world_size == limit.world_size and limit.system in results.systems:
                yield from _verdicts(results, limit)


def _verdicts(results: Results, limit: Limit) -> Iterator[Verdict]:
    def within(case: Case) -> bool:
        return (case.kind, case.inflight) == (limit.kind, limit.inflight) and limit.low <= case.nbytes <= limit.high

    for case in results.cases(within):
        ratio = results.ratio(case, limit.system, *limit.others)
        yield Verdict(
            f"{limit.system}, {name_of(case)}, {limit.world_size} ranks, against {' / '.join(limit.others)}",
            f"≥ {limit.times:g}×",
            "not measured" if ratio is None else f"{ratio.median:.2f}× ({ratio.least:.2f} to {ratio.most:.2f})",
            None if ratio is None else ratio.median >= limit.times,
        )
