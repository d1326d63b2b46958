"""What one rank has done in one group, in numbers: operations by kind, and the ranks they waited for.

`Communicator.ended` counts each collective that has completed, in half a microsecond at most: a look-up by the identity
of the signature, which calls alike share, and some additions (``python bench/counting.py``). All numbers only ever
grow, and there is one writer, the loop's thread: other threads may read them at any time.

Memory: a row of half a kilobyte for each operation, algorithm and transport that has been used; up to `KNOWN`
signatures; for each rank that was waited for, `MINUTE` marks.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from math import frexp, inf
from typing import Any, Final

from aiocoll.algorithms.spec import SPECS
from aiocoll.engine.links.channel import Channel
from aiocoll.engine.operations.base import Operation
from aiocoll.engine.operations.operation_log import ENTERED, PEER
from aiocoll.engine.operations.signature import Signature

__all__ = ["SHIFT", "TRIFLE", "Counters", "Kind", "Row", "Waits"]

#: Buckets of a histogram: bucket i has the durations from 2**(i - 1 - SHIFT) to 2**(i - SHIFT) seconds, by the exponent
#: of `frexp`. The first of them is below what a call takes; the last ends after 17,000 years, also virtual ones.
BUCKETS: Final = 64
SHIFT: Final = 24
#: Added to each duration, so that there is none of 0, whose exponent would be another.
TRIFLE: Final = 2.0**-SHIFT
#: Signatures whose kind is known; more than a program uses at a time.
KNOWN: Final = 256
#: Seconds over which waits are also counted by themselves.
MINUTE: Final = 60


class Row:
    """All operations of one kind.

    Attributes:
        failures: that ended with an error.
        nbytes: of those that completed.
        seconds: that these took together, each from its start to its end.
        buckets: how many of these took how long; their sum is how many there were.
    """

    __slots__ = ("buckets", "failures", "nbytes", "seconds")

    def __init__(self) -> None:
        self.failures = 0
        self.nbytes = 0
        self.seconds = 0.0
        self.buckets = [0] * BUCKETS


class Waits:
    """How often, and for how long, this rank has waited for one other.

    Attributes:
        times: collectives that its arrival has completed.
        seconds: from their start on this rank until then, together.
        due: when the next mark is due.
    """

    __slots__ = ("_marks", "due", "seconds", "times")

    def __init__(self) -> None:
        self.times = 0
        self.seconds = 0.0
        self.due = -inf
        # The totals at the beginning of each second in which there was something to add.
        self._marks: deque[tuple[float, int, float]] = deque(maxlen=MINUTE)

    def mark(self, now: float) -> None:
        """Begin a new second."""
        begun = float(now // 1)
        self._marks.append((begun, self.times, self.seconds))
        self.due = begun + 1.0

    def recent(self, now: float) -> tuple[int, float]:
        """Return times and seconds of the last minute, which begins with a whole second."""
        marks = list(self._marks)  # before the totals, which may grow meanwhile
        times, seconds = self.times, self.seconds
        first = bisect_left(marks, (float(now // 1) - MINUTE + 1,))
        if first == len(marks):
            return 0, 0.0
        _, before, spent = marks[first]
        return times - before, seconds - spent


class Kind:
    """Operations with one signature.

    Attributes:
        signature: held here, so that its identity is not used again.
        nbytes: of each of them.
        row: where they are counted.
    """

    __slots__ = ("nbytes", "row", "signature")

    def __init__(self, signature: Signature, nbytes: int, row: Row) -> None:
        self.signature = signature
        self.nbytes = nbytes
        self.row = row


class Counters:
    """The counters of one rank in one group.

    Args:
        channels: to the ranks of the group.
        since: when counting began.

    Attributes:
        since: as given.
        rows: by operation, algorithm and transport.
        waits: by rank in the job.
        kinds: of collectives, by the identity of their signature.
    """

    __slots__ = ("_channels", "_is_known", "_messages", "_transport", "kinds", "rows", "since", "waits")

    def __init__(self, channels: Sequence[Channel], since: float) -> None:
        self.since = since
        self.rows: dict[tuple[str, str | None, str], Row] = {}
        self.waits: dict[int, Waits] = {}
        self._channels = channels
        self.kinds: dict[int, Kind] = {}
        self._messages: dict[tuple[int, int], Kind] = {}
        # Of collectives: what carries their bytes, and whether that has been looked up since the last link was opened.
        self._transport = ""
        self._is_known = False

    def count_message(self, operation: Operation, entry: list[Any], now: float) -> None:
        """Count a message that this rank has sent or received."""
        signature = operation.signature
        call = id(signature), entry[PEER]
        kind = self._messages.get(call)
        if kind is None:
            kind = Kind(signature, _nbytes(operation), self._row(operation))
            if len(self._messages) >= KNOWN:
                self._messages.clear()
            self._messages[call] = kind
        seconds = now - entry[ENTERED]
        row = kind.row
        row.nbytes += kind.nbytes
        row.seconds += seconds
        row.buckets[frexp(seconds + TRIFLE)[1] + SHIFT] += 1

    def count_failure(self, operation: Operation, error: BaseException) -> None:
        """Count an operation that has failed; not a receive that was withdrawn."""
        if not isinstance(error, asyncio.CancelledError):
            self._row(operation).failures += 1

    def wait(self, rank: int) -> Waits:
        """Begin to count the waits for a rank of the job."""
        waits = self.waits[rank] = Waits()
        return waits

    def linked(self) -> None:
        """A link has been opened: what carries the bytes may have changed. Of one that has ended, nothing has."""
        self.kinds.clear()
        self._messages.clear()
        self._is_known = False

    def learn(self, operation: Operation) -> Kind:
        """Return the row of a collective, and keep it for those with the same signature, if it is that of all."""
        signature = operation.signature
        kind = Kind(signature, _nbytes(operation), self._row(operation))
        # Of what consists of several operations, or runs on a device, the algorithm may differ from call to call; of
        # what has no counts, the size.
        fixed = signature.debug is None and signature.members is None
        if fixed and (signature.dtype is None or signature.counts or signature.sends or signature.receives):
            if len(self.kinds) >= KNOWN:
                self.kinds.clear()
            self.kinds[id(signature)] = kind
        return kind

    def _row(self, operation: Operation) -> Row:
        name = operation.signature.op, operation.algorithm(), self._carrier(operation)
        row = self.rows.get(name)
        if row is None:
            row = self.rows[name] = Row()
        return row

    def _carrier(self, operation: Operation) -> str:
        """Return what carries the bytes of an operation."""
        if operation.signature.device != "cpu" and (carriers := operation.carriers()) == "nccl":
            return carriers
        entry = operation.entry
        peer: Any = entry[PEER] if len(entry) > PEER else None
        if peer is not None:
            link = self._channels[peer].link
            return "" if link is None else link.carrier
        if not self._is_known:
            self._is_known = True
            self._transport = operation.carriers() or self._transport
        return self._transport


def _nbytes(operation: Operation) -> int:
    """Return the bytes of the elements of an operation, as far as they are known."""
    signature = operation.signature
    spec = SPECS.get(signature.op.lower())
    return signature.nbytes(operation.completion.shape) or 0 if spec is None or spec.sized else 0
