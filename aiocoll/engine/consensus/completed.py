"""Completed operations of a revoked group: the report of each rank, and the combination of all reports."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from aiocoll.engine.communicator import Communicator


__all__ = ["Completed", "Report", "combine", "report"]

Report = dict[str, Any]

#: Maximum number of unfinished operations in one report. A control frame has room for twice as many numbers, plus the
#: keys.
LISTED = 10_000
#: Maximum size of all keys in one report, in bytes. A control frame has at most 256 KiB.
KEY_NBYTES = 32 * 1024


@dataclass(frozen=True, slots=True)
class Completed:
    """The collectives of a revoked group that completed on every continuing rank, or on at least one of them.

    ``7 in completed`` looks up the ordered operation whose `Work.seq` is 7. ``("grad", 3) in completed`` looks up the
    third operation with ``key="grad"``. Each rank reports only the keyed operations among its last 1,024 operations,
    with at most 32 KiB of keys. Older keyed operations are absent although they completed.

    Attributes:
        upto: the highest sequence number that can be in this set.
        missing: the sequence numbers up to `upto` that are not in this set.
        keyed: the key and count of each keyed operation in this set.
    """

    upto: int
    missing: frozenset[int]
    keyed: frozenset[tuple[str, int]]

    @property
    def through(self) -> int:
        """Return the highest sequence number up to which all ordered operations have completed."""
        return min(self.missing, default=self.upto + 1) - 1

    def __contains__(self, operation: object) -> bool:
        if isinstance(operation, int):
            return 1 <= operation <= self.upto and operation not in self.missing
        return operation in self.keyed

    @classmethod
    def of(cls, encoded: Report) -> Completed:
        """Decode a rank's report into a set of completed operations."""
        keyed = frozenset((key, count) for key, count in encoded["keyed"])
        return cls(encoded["upto"], frozenset(encoded["missing"]), keyed)

    def as_data(self) -> Report:
        """Encode this set as a report that can be sent."""
        return _encode(self.upto, self.missing, sorted(self.keyed))


def report(group: Communicator) -> Report:
    """Return this rank's report: the operations of a revoked group that have completed on this rank."""
    upto = group.entered
    unfinished = group.unfinished
    entered = [
        (record.key, record.seq)
        for record in reversed(group.journal.collectives.records())
        if record.key is not None and record.seq is not None
    ]
    # A collective that ran as several operations has several records: remove the duplicates.
    keyed = [each for each in dict.fromkeys(entered) if each not in unfinished]
    return _encode(upto, [number for number in unfinished if isinstance(number, int)], keyed)


def combine(reports: Sequence[Report]) -> tuple[Completed, Completed]:
    """Combine reports into two sets: the operations completed on all reporting ranks, and on at least one."""
    each = [Completed.of(encoded) for encoded in reports]
    least = min(one.upto for one in each)
    furthest = max(each, key=lambda one: one.upto)
    everywhere = Completed(
        least,
        frozenset(op for one in each for op in one.missing if op <= least),
        frozenset.intersection(*(one.keyed for one in each)),
    )
    # An operation that completed on no rank is missing on all ranks, also on the rank that entered the most operations.
    nowhere = frozenset(op for op in furthest.missing if not any(op in one for one in each))
    return everywhere, Completed(furthest.upto, nowhere, frozenset.union(*(one.keyed for one in each)))


def _encode(upto: int, missing: Iterable[int], keyed: Sequence[tuple[str, int]]) -> Report:
    listed = sorted(missing)
    if len(listed) > LISTED:
        upto = listed[LISTED] - 1
    return {"upto": upto, "missing": listed[:LISTED], "keyed": _fit_into_report(keyed)}


def _fit_into_report(keyed: Sequence[tuple[str, int]]) -> list[tuple[str, int]]:
    """Return the longest prefix of `keyed` that fits into a report."""
    room = KEY_NBYTES
    for number, (key, _) in enumerate(keyed):
        room -= len(key.encode()) + 8
        if room < 0:
            return list(keyed[:number])
    return list(keyed)
