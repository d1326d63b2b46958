"""The speed that the library promises, and whether a run has met it: cell by cell."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from inflight import Case
from markdown import name_of
from results import Results
from systems import AWAITED, MPI_BLOCKING

from aiocoll.cli.workload import KINDS

KIB, MIB = 1 << 10, 1 << 20
#: Any larger size.
INF = 1 << 62
GLOO = ("gloo blocking",)


class Limit(NamedTuple):
    """A promise: `system` is so many times faster than the fastest of `others`, for one collective and some sizes.

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
    """One cell: a limit and the measured value; `met` is None if it was not measured."""

    what: str
    limit: str
    measured: str
    met: bool | None


#: Sizes, and how many times faster than the fastest awaited peer.
_ON_THE_SAME_WORK = (
    (0, 4 * KIB - 1, 5),
    (4 * KIB, 64 * KIB - 1, 4),
    (64 * KIB, MIB - 1, 2),
    (MIB, MIB, 1.5),
    (MIB + 1, INF, 1.2),
)

LIMITS = (
    *(
        Limit("aiocoll auto", "awaited peers", AWAITED, world_size, kind, low, high, times)
        for world_size in (2, 4)
        for kind in KINDS
        for low, high, times in _ON_THE_SAME_WORK
    ),
    *(
        Limit(
            *("aiocoll auto", "blocking MPI", MPI_BLOCKING, world_size, kind, 0, INF),
            1.4 if kind == "allreduce" and world_size == 2 else 1,
        )
        for world_size in (2, 4)
        for kind in KINDS
    ),
    *(
        Limit("aiocoll auto", "blocking Gloo", GLOO, world_size, kind, low, high, times)
        for world_size in (2, 4)
        for kind in KINDS
        if kind != "scan"  # Gloo has none
        for low, high, times in ((0, 64 * KIB, 10 if kind == "allreduce" else 1), (64 * KIB + 1, INF, 1))
    ),
    *(Limit("aiocoll tcp", "blocking Gloo", GLOO, world_size, "allreduce", 0, INF, 1) for world_size in (2, 4)),
    *(
        Limit(
            "aiocoll auto", "gloo future", ("gloo future",), world_size, "allreduce", 4 * KIB, 4 * KIB, 30, inflight=64
        )
        for world_size in (2, 4)
    ),
)
#: Times the bound that a large allreduce may take, and the least bytes of a large one.
OF_BOUND, LARGE = 2.0, 16 * MIB
#: Milliseconds of thread CPU that a callback may take at p99.
CALLBACK = 1.0


def verdicts(all_results: Sequence[Results]) -> Iterator[Verdict]:
    """Yield one for each limit and each measured size within it."""
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
