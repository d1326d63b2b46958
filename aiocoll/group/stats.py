"""Snapshots of one rank's counters in one group, for `ProcessGroup.stats`: as objects, text and plain data."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from aiocoll.engine.communicator import Communicator
from aiocoll.engine.failure.deadlines import REPORT_AFTER
from aiocoll.engine.journal import SHIFT, CallCounters, WaitCounters
from aiocoll.engine.operations.base import Operation

__all__ = ["GroupStats", "OperationStats", "PeerStats", "add_stats", "stats_of"]


@dataclass(frozen=True, slots=True)
class OperationStats:
    """The counters of one kind of operation on this rank.

    A block of `ProcessGroup.coalescing` counts as one operation, COALESCED.

    Attributes:
        op: name of the operation in capitals.
        algorithm: name of the algorithm; None if there is only one, as for messages.
        transport: transport of the data: "memory", "shm", "unix", "tcp", "nccl", or several joined by "+"; "" if no
            data was sent.
        calls: number of completed operations.
        failures: number of failed operations; withdrawn receives count neither as completed nor as failed.
        nbytes: bytes of the caller's main arrays in completed operations, which may differ from the bytes sent. For a
            block, the sum over its calls; 0 for objects and sparse arrays.
        seconds: sum of the durations of completed operations; may exceed the elapsed time if operations overlap.
        histogram: pairs of a bound in seconds, a power of two, and a count: the number of operations that took less
            than the bound, but at least half of it. Pairs with a count of 0 are left out.
    """

    op: str
    algorithm: str | None
    transport: str
    calls: int
    failures: int
    nbytes: int
    seconds: float
    histogram: tuple[tuple[float, int], ...]

    def quantile(self, q: float) -> float | None:
        """Estimate a quantile of the operation's durations from their histogram.

        Args:
            q: share of operations, from 0 to 1: 0.5 for the median.

        Returns:
            Seconds, within a factor of two of the true value; None if no operation has completed.

        Raises:
            ValueError: `q` is not between 0 and 1.
        """
        if not 0 <= q <= 1:
            raise ValueError(f"q={q!r}: must be from 0 to 1")
        wanted, before = q * self.calls, 0
        for bound, calls in self.histogram:
            if before + calls >= wanted:  # assume that durations are evenly distributed within a bucket
                return bound / 2 * (1 + (wanted - before) / calls)
            before += calls
        return None

    @property
    def p50(self) -> float | None:
        """The estimated median duration in seconds; see `quantile`."""
        return self.quantile(0.5)

    @property
    def p99(self) -> float | None:
        """The estimated 99th percentile of the durations in seconds; see `quantile`."""
        return self.quantile(0.99)


@dataclass(frozen=True, slots=True)
class PeerStats:
    """The time that this rank has waited for one other rank in collectives.

    Each collective counts as a wait for the rank whose data arrived last and completed it here. The wait lasts from the
    start of the collective on this rank until then. If all ranks exchange data directly, this is the rank that made the
    call last. That holds between two ranks, and for most small operations in shared memory. In a ring or a tree it is a
    neighbour, and if rank 0 reduces for all ranks, it is rank 0; these may have waited themselves. So look for the rank
    that others wait for, and that has waited least itself.

    Attributes:
        rank: the other rank, as numbered in the group.
        times: number of collectives in which this rank has waited for the other one.
        seconds: sum of these waits.
        recent_times: number of these waits in the last minute.
        recent_seconds: sum of the waits in the last minute.
        missing: number of pending collectives in which the rank is known to be missing; this is known after 0.25 s.
    """

    rank: int
    times: int
    seconds: float
    recent_times: int
    recent_seconds: float
    missing: int


@dataclass(frozen=True, slots=True)
class GroupStats:
    """A snapshot of one rank's counters in one group, made by `ProcessGroup.stats`.

    Counters of a group only grow. So the difference of two snapshots counts the events between them; divided by the
    difference of `time`, it is a rate. ``print(pg.stats())`` shows a table.

    Attributes:
        group: name of the group.
        rank: this rank.
        size: number of ranks.
        time: time of the snapshot, in seconds on the clock of the group.
        since: time when the group was made and counting began, in seconds on the same clock.
        pending: number of operations in flight, including messages.
        oldest: age of the oldest pending operation in seconds; 0 if there is none.
        operations: counters by kind of operation, sorted by name.
        peers: ranks that this rank has waited for or that are missing, sorted by rank.
    """

    group: str
    rank: int
    size: int
    time: float
    since: float
    pending: int
    oldest: float
    operations: tuple[OperationStats, ...]
    peers: tuple[PeerStats, ...]

    @property
    def calls(self) -> int:
        """The number of all completed operations."""
        return sum(each.calls for each in self.operations)

    @property
    def failures(self) -> int:
        """The number of all failed operations."""
        return sum(each.failures for each in self.operations)

    @property
    def nbytes(self) -> int:
        """The number of bytes in all completed operations."""
        return sum(each.nbytes for each in self.operations)

    @property
    def waited(self) -> float:
        """The seconds that this rank has waited for other ranks in collectives."""
        return sum(each.seconds for each in self.peers)

    def slowest(self) -> PeerStats | None:
        """Return the rank for which this rank waited longest in the last minute.

        Returns:
            The counters of that rank; None without waits.
        """
        late = [each for each in self.peers if each.recent_times]
        return max(late, key=lambda each: each.recent_seconds, default=None)

    def as_dict(self) -> dict[str, Any]:
        """Return the snapshot as plain data that can be written as JSON.

        Returns:
            A dict with the attributes. `operations` and `peers` are lists of dicts; those of `operations` also have p50
            and p99.
        """
        data = asdict(self)
        for row, each in zip(data["operations"], self.operations, strict=True):
            row["histogram"] = [list(pair) for pair in each.histogram]
            row["p50"], row["p99"] = each.p50, each.p99
        return {**data, "operations": list(data["operations"]), "peers": list(data["peers"])}

    def __str__(self) -> str:
        return "\n".join(_lines(self))


def stats_of(comm: Communicator) -> GroupStats:
    """Return a snapshot of this rank's counters in a group. Any thread may call this function.

    Raises:
        RuntimeError: the group has no counters.
    """
    if not comm.journal.counts:
        raise RuntimeError(
            f"group {comm.name!r} does not count its operations: it was made with GroupOptions(stats=False), or "
            "AIOCOLL_STATS=0"
        )
    counted = comm.journal.counted()
    pending = comm.in_flight.snapshot()
    in_flight = [each for each in pending if each.parent is None]
    now = comm.stamp()
    return GroupStats(
        comm.name,
        comm.rank,
        len(comm.ranks),
        now,
        comm.journal.since,
        len(in_flight),
        now - in_flight[0].entered if in_flight else 0.0,
        tuple(sorted(map(_operation, counted), key=_order)),
        tuple(_peers(comm, pending, now)),
    )


def _order(each: OperationStats) -> tuple[str, str, str]:
    return each.op, each.algorithm or "", each.transport


def _operation(row: CallCounters) -> OperationStats:
    histogram = tuple((2.0 ** (number - SHIFT), calls) for number, calls in enumerate(row.buckets) if calls)
    completed = sum(calls for _, calls in histogram)
    return OperationStats(*row.kind, completed, row.failures, row.nbytes, row.seconds, histogram)


def _peers(comm: Communicator, pending: list[Operation], now: float) -> Iterable[PeerStats]:
    missing: dict[int, int] = {}
    for operation in pending:
        if operation.peer is not None or now - operation.entered < REPORT_AFTER:
            continue
        finding = comm.stalls.finding(operation.id)
        for rank in () if finding is None else finding.ranks(now):
            missing[rank] = missing.get(rank, 0) + 1
    waited = comm.journal.waited(now)
    for rank in sorted({*waited, *missing}):
        yield PeerStats(rank, *waited.get(rank, WaitCounters(0, 0.0, 0, 0.0)), missing.get(rank, 0))


def add_stats(first: GroupStats, second: GroupStats) -> GroupStats:
    """Add up the counters of two groups. Other values, such as the name, are taken from the second group."""
    operations = {(each.op, each.algorithm, each.transport): each for each in first.operations}
    for each in second.operations:
        kind = each.op, each.algorithm, each.transport
        operations[kind] = _add_operations(operations[kind], each) if kind in operations else each
    peers = {each.rank: each for each in first.peers}
    for peer in second.peers:
        peers[peer.rank] = _add_peers(peers[peer.rank], peer) if peer.rank in peers else peer
    return replace(
        second,
        pending=first.pending + second.pending,
        oldest=max(first.oldest, second.oldest),
        operations=tuple(sorted(operations.values(), key=_order)),
        peers=tuple(peers[rank] for rank in sorted(peers)),
    )


def _add_operations(first: OperationStats, second: OperationStats) -> OperationStats:
    histogram = dict(first.histogram)
    for bound, calls in second.histogram:
        histogram[bound] = histogram.get(bound, 0) + calls
    return replace(
        second,
        calls=first.calls + second.calls,
        failures=first.failures + second.failures,
        nbytes=first.nbytes + second.nbytes,
        seconds=first.seconds + second.seconds,
        histogram=tuple(sorted(histogram.items())),
    )


def _add_peers(first: PeerStats, second: PeerStats) -> PeerStats:
    return PeerStats(
        second.rank,
        first.times + second.times,
        first.seconds + second.seconds,
        first.recent_times + second.recent_times,
        first.recent_seconds + second.recent_seconds,
        first.missing + second.missing,
    )


# -- as text

_OPERATIONS = ("operation", "algorithm", "transport", "calls", "failed", "bytes", "seconds", "p50", "p99")
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_PEERS = ("waited for", "times", "seconds", "last minute", "seconds", "missing in")


def _lines(stats: GroupStats) -> Iterable[str]:
    pending = f", {stats.pending} pending for up to {_time(stats.oldest)}" if stats.pending else ""
    yield (
        f"group {stats.group}, rank {stats.rank} of {stats.size}: {stats.calls} operations, {stats.failures} failed, "
        f"in {_time(stats.time - stats.since)}{pending}"
    )
    if stats.operations:
        yield from _table(_OPERATIONS, 3, [_row(each) for each in stats.operations])
    if stats.peers:
        yield from _table(_PEERS, 1, [_waits(each) for each in stats.peers])


def _row(each: OperationStats) -> Sequence[str]:
    return (
        each.op,
        each.algorithm or "-",
        each.transport or "-",
        str(each.calls),
        str(each.failures),
        _size(each.nbytes),
        f"{each.seconds:.6g}",
        "-" if each.p50 is None else _time(each.p50),
        "-" if each.p99 is None else _time(each.p99),
    )


def _waits(each: PeerStats) -> Sequence[str]:
    return (
        f"rank {each.rank}",
        str(each.times),
        f"{each.seconds:.6g}",
        str(each.recent_times),
        f"{each.recent_seconds:.6g}",
        str(each.missing),
    )


def _table(head: Sequence[str], words: int, rows: Sequence[Sequence[str]]) -> Iterable[str]:
    """Yield the lines of a text table. The first `words` columns contain text, the others numbers."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    for row in (head, *rows):
        cells = [
            cell.ljust(width) if number < words else cell.rjust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield "  ".join(cells).rstrip()


def _time(seconds: float) -> str:
    if seconds < 1e-3:
        return f"{seconds * 1e6:.3g} µs"
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.6g} s"


def _size(nbytes: int) -> str:
    step = min(max(nbytes.bit_length() - 1, 0) // 10, len(_UNITS) - 1)
    return f"{nbytes / 1024**step:.4g} {_UNITS[step]}"
