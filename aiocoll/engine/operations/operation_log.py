"""What one rank did last in one group: two rings of entries, made at entry and completed at the end.

An entry is a list, the cheapest thing that can be completed later: `Communicator.enter` makes it, the operation holds
it, `Communicator.ended` notes in it when the operation ended. Of the caller's it keeps no array, no work and no
traceback, only the code that called, as in `aiocoll.work`; file and line are looked up when somebody asks.

Messages between two ranks have a ring of their own: there may be thousands of them between two collectives.

Memory: at most `NBYTES` in a group, reached after as many operations as the rings hold. On top comes what an entry
keeps alive of a call: a key, and counts per rank where ranks have different ones.
"""

from __future__ import annotations

from collections import deque
from types import CodeType
from typing import Any, NamedTuple

from aiocoll.engine.operations.signature import Signature, description

__all__ = ["ENDED", "ENTERED", "ERROR", "HISTORY", "MESSAGES", "NBYTES", "PEER", "STARTED", "OperationLog", "Record"]

#: Collectives remembered after their end, and messages.
HISTORY = 1024
MESSAGES = 256
#: Bytes of full rings on a 64-bit machine, if no two entries share a signature, as equal calls do: list, numbers,
#: signature and a shape of four dimensions take that much.
NBYTES = (HISTORY + MESSAGES) * 640

#: Places in an entry: when it was entered, and those that are filled in later; all are those of `Record`.
ENTERED, ENDED, ERROR, PEER, STARTED = 1, 8, 9, 10, 11


class Record(NamedTuple):
    """One operation of this rank; an entry has the same fields in the same order.

    Attributes:
        op: its id; of a receive only the tag in it counts.
        entered: when, on `Runtime.stamp`.
        signature: what the ranks must agree on.
        shape: of the caller's main array.
        key: of a keyed collective.
        seq: its number, or the count of its key; None of a message.
        code: that called.
        instruction: of `code`.
        ended: when it ended; None while it is pending.
        error: name of the class it failed with.
        peer: of a message, the other rank; None of a receive from any rank that has not ended.
        started: of a message that moved in several parts, when the first of them had; of a collective of several
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
        """Say what `rank`, this one, called."""
        return description(rank, self.signature, self.shape, self.key, self.seq)


class OperationLog:
    """The rings of one membership.

    Attributes:
        collectives: entries of collectives, oldest first.
        messages: entries of sends and receives, oldest first.
        hint: tells in the log, when the group fails, where to find them.
    """

    def __init__(self) -> None:
        self.collectives: deque[list[Any]] = deque(maxlen=HISTORY)
        self.messages: deque[list[Any]] = deque(maxlen=MESSAGES)
        self.hint = "pg.recorder.dump() has what was called last; with AIOCOLL_DUMP_DIR it is written to a file"

    def started(self, entry: list[Any], now: float) -> list[Any]:
        """Note that a part of what an operation consists of is under way; return the entry."""
        if len(entry) == PEER:
            entry += None, now
        else:
            entry[STARTED] = now
        return entry

    def find(self, op: int) -> Record | None:
        """Return the record of a collective, if it is remembered."""
        return next((Record(*entry) for entry in reversed(self.collectives) if entry[0] == op), None)

    def last(self) -> Record | None:
        """Return the record of the last collective."""
        return Record(*self.collectives[-1]) if self.collectives else None

    def snapshot(self) -> list[Record]:
        """Return all records, oldest first: a copy that nothing changes any more.

        Each ring is copied by one call into C, so a signal handler or another thread may do this at any time.
        """
        entries = [*list(self.collectives), *list(self.messages)]
        return sorted((Record(*entry) for entry in entries), key=lambda record: record.entered)
