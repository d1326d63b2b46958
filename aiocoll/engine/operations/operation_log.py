"""The log of one rank's last operations in one group: two rings of entries, added at entry and completed at the end.

An entry is a list, the cheapest object that can be completed later: `Communicator.enter` makes it, the operation holds
it, `Communicator.ended` adds the end time. It keeps no array, no work and no traceback of the caller alive, only the
calling code object, as in `aiocoll.completion`; file and line are looked up on demand.

Messages between two ranks have their own ring: there may be thousands of them between two collectives.

Memory: at most `NBYTES` in a group, reached after as many operations as the rings hold. In addition, an entry keeps
parts of a call alive: a key, and counts per rank where ranks have different ones.
"""

from __future__ import annotations

from collections import deque
from types import CodeType
from typing import Any, Final, NamedTuple

from aiocoll.engine.operations.signature import P2P, Signature, description

__all__ = [
    "ENDED",
    "ENTERED",
    "ERROR",
    "HISTORY",
    "MESSAGES",
    "NBYTES",
    "PEER",
    "SIGNATURE",
    "STARTED",
    "OperationLog",
    "Record",
]

#: Collectives remembered after their end, and messages.
HISTORY = 1024
MESSAGES = 256
#: Bytes of full rings on a 64-bit machine, if no two entries share a signature, as equal calls do: list, numbers,
#: signature and a shape of four dimensions take that much.
NBYTES = (HISTORY + MESSAGES) * 640

#: Indices of fields in an entry, which has those of `Record`: the entry time, the signature, and what comes later.
ENTERED: Final = 1
SIGNATURE: Final = 2
ENDED: Final = 8
ERROR: Final = 9
PEER: Final = 10
STARTED: Final = 11


class Record(NamedTuple):
    """One operation of this rank; an entry has the same fields in the same order.

    Attributes:
        op: its id; of a receive only the tag in it is meaningful.
        entered: entry time, by `Runtime.stamp`.
        signature: what the ranks must agree on.
        shape: of the caller's main array.
        key: for a keyed collective.
        seq: its number, or the count of its key; None for a message.
        code: the calling code object.
        instruction: position in `code`.
        ended: end time; None while it is pending.
        error: name of the exception class if it failed.
        peer: for a message, the other rank; None for a pending receive from any rank.
        started: for a message that moved in several parts, when the first had moved; for a collective of several
            operations, when the last of these was started.
    """

    op: int
    entered: float
    signature: Signature
    shape: tuple[int, ...]
    key: str | None
    seq: int | None
    code: CodeType
    instruction: int
    ended: float | None
    error: str | None
    peer: int | None = None
    started: float | None = None

    def describe(self, rank: int) -> dict[str, Any]:
        """Return the call of `rank`, this one, as plain data."""
        return description(rank, self.signature, self.shape, self.key, self.seq)


class OperationLog:
    """The rings of one rank in one group.

    Attributes:
        collectives: entries of collectives, oldest first.
        messages: entries of sends and receives, oldest first.
        hint: text for the log, when the group fails: where to find the records.
    """

    def __init__(self) -> None:
        self.collectives: deque[list[Any]] = deque(maxlen=HISTORY)
        self.messages: deque[list[Any]] = deque(maxlen=MESSAGES)
        self.hint = "pg.recorder.dump() has what was called last; with AIOCOLL_DUMP_DIR it is written to a file"

    def started(self, entry: list[Any], now: float) -> list[Any]:
        """Record that a child of an operation was started; return the parent's entry."""
        if len(entry) == PEER:
            entry += None, now
        else:
            entry[STARTED] = now
        return entry

    def find(self, op: int) -> Record | None:
        """Return the record of a collective, or of a send, if it is still in the log."""
        ring = self.messages if op & P2P else self.collectives
        return next((Record(*entry) for entry in reversed(ring) if entry[0] == op), None)

    def last(self) -> Record | None:
        """Return the record of the last collective."""
        return Record(*self.collectives[-1]) if self.collectives else None

    def snapshot(self) -> list[Record]:
        """Return all records, oldest first, as a copy.

        Each ring is copied by one call into C, so a signal handler or another thread may call this at any time.
        """
        entries = [*list(self.collectives), *list(self.messages)]
        return sorted((Record(*entry) for entry in entries), key=lambda record: record.entered)
