"""Promised speeds of aiocoll, and verdicts whether a benchmark run has met them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from inflight import Case
from markdown import name_of
from results import Results
from systems import AWAITED, MPI_BLOCKING

from aiocoll.cli.workload import KINDS

KIB, MIB = 1 << 10, 1 << 20
#: Bytes that no array exceeds: the upper end of a size range without an upper limit.
INF = 1 << 62
GLOO = ("gloo blocking",)


class Limit(NamedTuple):
    """A promise: for a collective and a range of sizes, `system` is `times` times faster than the fastest of `others`.

    Attributes:
        system: one of aiocoll.
        against: a name for `others`.
        others: the systems that it is compared with.
        world_size: number of ranks.
        kind: the collective.
        low: bytes of the smallest size.
        high: bytes of the largest size.
        times: the least ratio.
        inflight: calls in flight.
    """

    system: str
    against: str
    others: tuple[str, ...]
    world_size: int
    kind: str
    low: int
    high: int
    times: float
    inflight: int = 1


class Verdict(NamedTuple):
    """The verdict for one case: the limit and the measured value; `met` is None if the case was not measured."""

    what: str
    limit: str
    measured: str
    met: bool | None


#: Promised speedups by size: minimum size, maximum size, and how many times faster than the peers aiocoll must be.
Steps = tuple[tuple[int, int, float], ...]
_AWAITED: Steps = (
    (0, 4 * KIB - 1, 5),
    (4 * KIB, 64 * KIB - 1, 4),
    (64 * KIB, MIB - 1, 2),
    (MIB, MIB, 1.5),
    (MIB + 1, INF, 1.2),
)
_MPI_ALLREDUCE: Steps = (
    (0, 64 * KIB, 2),
    (64 * KIB + 1, 256 * KIB, 1.7),
    (256 * KIB + 1, MIB, 1.5),
    (MIB + 1, INF, 1.4),
)
_MPI_BROADCAST: Steps = ((0, 64 * KIB, 2), (64 * KIB + 1, INF, 1))
_MPI_OTHERS: Steps = ((0, 4 * KIB - 1, 1.5), (4 * KIB, 64 * KIB - 1, 1.2), (64 * KIB, INF, 1))
#: Promises against MPI with four ranks on two cores.
_MPI_OF_FOUR: Steps = ((0, 64 * KIB, 1.5),)
_MPI_ALLREDUCE_OF_FOUR: Steps = (*_MPI_OF_FOUR, (64 * KIB + 1, MIB, 1.3), (MIB + 1, INF, 1))
#: Promises against blocking Gloo.
_GLOO_ALLREDUCE: Steps = ((0, 64 * KIB - 1, 100), (64 * KIB, 64 * KIB, 50), (64 * KIB + 1, INF, 1))
_GLOO_TCP: Steps = ((0, MIB, 1.5), (MIB + 1, 16 * MIB, 1.3), (16 * MIB + 1, INF, 1.2))


def _mpi(kind: str, world_size: int) -> Steps:
    """Return the promised speed of a collective relative to the faster of two MPI libraries, by size."""
    if world_size == 4:
        return _MPI_ALLREDUCE_OF_FOUR if kind == "allreduce" else _MPI_OF_FOUR
    if kind == "allreduce":
        return _MPI_ALLREDUCE
    return _MPI_BROADCAST if kind in ("broadcast", "barrier") else _MPI_OTHERS


LIMITS = (
    *(Limit("aiocoll auto", "awaited peers", AWAITED, 2, kind, *step) for kind in KINDS for step in _AWAITED),
    *(
        Limit("aiocoll auto", "blocking MPI", MPI_BLOCKING, world_size, kind, *step)
        for world_size in (2, 4)
        for kind in KINDS
        for step in _mpi(kind, world_size)
    ),
    *(Limit("aiocoll auto", "blocking Gloo", GLOO, 2, "allreduce", *step) for step in _GLOO_ALLREDUCE),
    *(
        Limit("aiocoll pure", "blocking Gloo", GLOO, 2, "allreduce", *step)
        for step in ((0, 64 * KIB, 10), (64 * KIB + 1, INF, 1))
    ),
    *(
        Limit(system, "blocking Gloo", GLOO, world_size, kind, 0, INF, 1)
        for system in ("aiocoll auto", "aiocoll pure")
        for world_size in (2, 4)
        for kind in KINDS
        if kind != "scan" and (world_size, kind) != (2, "allreduce")  # Gloo has no scan
    ),
    *(Limit("aiocoll tcp", "blocking Gloo", GLOO, 2, "allreduce", *step) for step in _GLOO_TCP),
    *(
        Limit(
            "aiocoll auto", "gloo future", ("gloo future",), world_size, "allreduce", 4 * KIB, 4 * KIB, 30, inflight=64
        )
        for world_size in (2, 4)
    ),
)
#: Maximum ratio of the time of a large allreduce to its lower bound, and minimum bytes of a large allreduce.
OF_BOUND, LARGE = 2.0, 16 * MIB
#: Maximum milliseconds of thread CPU time of a callback, at p99.
CALLBACK = 1.0


def verdicts(all_results: Sequence[Results]) -> Iterator[Verdict]:
    """Yield a verdict for each limit and each case to which the limit applies."""
    for results in all_results:
        for limit in LIMITS:
            if results.world_size == limit.world_size and limit.system in results.systems:
                yield from _verdicts(results, limit)


def _verdicts(results: Results, limit: Limit) -> Iterator[Verdict]:
    def is_within(case: Case) -> bool:
        return (case.kind, case.inflight) == (limit.kind, limit.inflight) and limit.low <= case.nbytes <= limit.high

    for case in results.cases(is_within):
        ratio = results.ratio(case, limit.system, *limit.others)
        yield Verdict(
            f"{limit.system}, {name_of(case)}, {limit.world_size} ranks, against {limit.against}",
            f"≥ {limit.times:g}×",
            "not measured" if ratio is None else f"{ratio.median:.2f}× ({ratio.least:.2f} to {ratio.most:.2f})",
            None if ratio is None else ratio.median >= limit.times,
        )
