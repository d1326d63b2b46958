"""`ProcessGroup.stats`: the counters of one rank in one group at one moment, as objects, as text and as plain data."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from aiocoll.engine.communicator import Communicator
from aiocoll.engine.failure.deadlines import REPORT_AFTER
from aiocoll.engine.journal import SHIFT, Counted, Waited
from aiocoll.engine.operations.base import Operation

__all__ = ["GroupStats", "OperationStats", "PeerStats", "add_stats", "stats_of"]


@dataclass(frozen=True, slots=True)
class OperationStats:
    """All operations of one kind that this rank has ended in the group.

    What ranks carry out as one is one: a block of `ProcessGroup.coalescing` is a COALESCED, whatever it holds.

    Attributes:
        op: name of the operation in capitals.
        algorithm: what carries it out; None where there is only one way, as for messages.
        transport: what carries the bytes: "memory", "shm", "unix", "tcp", "nccl", or several with "+" between; "" if
            none of them was needed.
        calls: how many have completed.
        failures: how many have failed; receives that were withdrawn count in neither.
        nbytes: bytes of the caller's main arrays, of those that have completed, not what was sent for them; of a block
            those of all its calls; 0 for objects and sparse arrays.
        seconds: that these took together, each from its start to its end: where they overlap, more than has passed.
        histogram: how many took how long: pairs of a bound in seconds, which is a power of two, and how many took less
            than it, but at least half of it; those in which there are none are left out.
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
        """Estimate the seconds that a share of them did not exceed, from the histogram.

        Args:
            q: the share, from 0 to 1: 0.5 for the median.

        Returns:
            Seconds, within a factor of two of the true value; None if none has completed.

        Raises:
            ValueError: `q` is not between 0 and 1.
        """
        if not 0 <= q <= 1:
            raise ValueError(f"q={q!r}: must be from 0 to 1")
        wanted, before = q * self.calls, 0
        for bound, calls in self.histogram:
            if before + calls >= wanted:  # as if those of a bucket were spread evenly
                return bound / 2 * (1 + (wanted - before) / calls)
            before += calls
        return None

    @property
    def p50(self) -> float | None:
        """Median of their seconds, estimated; see `quantile`."""
        return self.quantile(0.5)

    @property
    def p99(self) -> float | None:
        """Seconds that 99 of 100 did not exceed, estimated; see `quantile`."""
        return self.quantile(0.99)


@dataclass(frozen=True, slots=True)
class PeerStats:
    """How this rank has waited for another one in collectives.

    It has waited for the rank whose data came last and completed the collective here: the wait lasted from the start on
    this rank until then. Where each rank hears directly of each other, which is the case between two ranks and for most
    small operations in shared memory, that is the one that came last. In a ring or a tree it is a neighbour, and where
    rank 0 reduces for all it is that one, which may itself have waited: look for the rank that others wait for, and
    that has waited least itself.

    Attributes:
        rank: of the other one, in the group.
        times: collectives that this rank has waited for it.
        seconds: together, from the start to its arrival.
        recent_times: the same in the last minute.
        recent_seconds: the same in the last minute.
        missing: collectives pending now in which it is known to be missing, which ranks find out after a quarter of a
            second.
    """

    rank: int
    times: int
    seconds: float
    recent_times: int
    recent_seconds: float
    missing: int


@dataclass(frozen=True, slots=True)
class GroupStats:
    """What one rank has done in one group; `ProcessGroup.stats` makes it.

    Numbers of the same group only grow: the difference of two is what happened between them, divided by that of `time`
    a rate. ``print(pg.stats())`` shows a table.

    Attributes:
        group: its name.
        rank: this rank.
        size: number of ranks.
        time: seconds on the clock of the group, when the numbers were read.
        since: seconds on that clock, when counting began: when the group was made.
        pending: operations in flight, messages too.
        oldest: seconds for which the oldest of these has been; 0 if there is none.
        operations: by kind, sorted by name.
        peers: ranks that this one has waited for or that are missing, sorted by rank.
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
        """All operations that have completed."""
        return sum(each.calls for each in self.operations)

    @property
    def failures(self) -> int:
        """All operations that have failed."""
        return sum(each.failures for each in self.operations)

    @property
    def nbytes(self) -> int:
        """Bytes of all operations that have completed."""
        return sum(each.nbytes for each in self.operations)

    @property
    def waited(self) -> float:
        """Seconds for which this rank has waited for others in collectives."""
        return sum(each.seconds for each in self.peers)

    def slowest(self) -> PeerStats | None:
        """Return the rank that was waited for longest in the last minute.

        Returns:
            What is known of it; None if none was waited for.
        """
        late = [each for each in self.peers if each.recent_times]
        return max(late, key=lambda each: each.recent_seconds, default=None)

    def as_dict(self) -> dict[str, Any]:
        """Return it as plain data, which JSON can hold.

        Returns:
            A dict with the attributes; in `operations` and `peers` are dicts, the former with p50 and p99.
        """
        data = asdict(self)
        for row, each in zip(data["operations"], self.operations, strict=True):
            row["histogram"] = [list(pair) for pair in each.histogram]
            row["p50"], row["p99"] = each.p50, each.p99
        return {**data, "operations": list(data["operations"]), "peers": list(data["peers"])}

    def __str__(self) -> str:
        return "\n".join(_lines(self))


def stats_of(comm: Communicator) -> GroupStats:
    """Return the stats of this rank's part in a group; any thread may ask.

    Raises:
        RuntimeError: the group does not count.
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


def _operation(row: Counted) -> OperationStats:
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
        yield PeerStats(rank, *waited.get(rank, Waited(0, 0.0, 0, 0.0)), missing.get(rank, 0))


def add_stats(first: GroupStats, second: GroupStats) -> GroupStats:
    """Add up the stats of two groups; the rest, such as the name, is that of the second."""
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
    """Yield the lines of a table; the first columns are words, the others numbers."""
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
