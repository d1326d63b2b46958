"""The journal of one rank in one group: records of the last operations, and counters of all operations.

`Journal.ended` is the only method that writes. `Communicator.ended` calls it once per operation. Pending operations
have no record: readers make one from the operation itself.

Only the event loop's thread writes. Signal handlers and other threads may read at any time. A reader copies each array
by one call into C, and uses a record only if its number equals the number in its objects. A record keeps the calling
code object alive, but no array, work or traceback of the caller.

All arrays are in native byte order, so that code in C can also write them.

A record has `RECORD_NBYTES` bytes. Record n is at index n mod the size of its ring; records are numbered from 1. At the
same index of `Ring.objects` is a tuple: the record's number, the signature, the shape, the key, the calling code object
and the name of the exception class, or None.

    byte  0  uint64  op           id of the operation
          8  int64   number       of the record; 0 of a record that was never written
         16  double  entered      entry time
         24  double  ended        end time
         32  double  started      time at which the first part had moved, or the last part was started; NaN without
         parts 40  int64   seq          sequence number, or the count of its key; -1 if it has none
         48  int32   peer         the peer of a message; -1 if it has none, or if the peer is not known
         52  int32   instruction  position in the calling code object

A row of counters has `ROW` doubles, which hold counts up to 2**53 exactly. There is one row for each combination of
operation, algorithm and transport.

    double  0  NBYTES_MOVED  bytes of the completed operations
            1  FAILURES      number of failed operations
            2  SECONDS       total duration of the completed operations, each from its start to its end
            3  BUCKET        number of completed operations by duration, in `BUCKETS` buckets: see `SHIFT`

A row of waits has `WAIT` doubles. There is one row for each rank for which this rank has waited.

    double  0  TIMES         number of collectives for which the rank's data arrived last
            1  WAITED        seconds from the start of these collectives until that data arrived
            2  MARK          `MINUTE` marks of three numbers each, at index second mod `MINUTE`: a second in which this
                             rank waited for any rank, and TIMES and WAITED before the first wait in that second

Memory: none at first. Records take at most `NBYTES` when the rings are full. In addition, a record keeps parts of its
call alive: a key, and counts per rank if they differ. A row of counters takes 0.5 KB, a row of waits 1.5 KB. `KNOWN`
signatures are kept alive.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable, Iterable, Sequence
from math import frexp, inf, isnan
from struct import Struct
from types import CodeType
from typing import Any, Final, NamedTuple

from aiocoll.algorithms.spec import SPECS
from aiocoll.engine.links.channel import Channel
from aiocoll.engine.operations.base import Operation, carriers_of
from aiocoll.engine.operations.plan import Plan
from aiocoll.engine.operations.signature import P2P, Signature, description

__all__ = [
    "HISTORY",
    "KNOWN",
    "MESSAGES",
    "MINUTE",
    "NBYTES",
    "SHIFT",
    "CallCounters",
    "Journal",
    "Record",
    "Ring",
    "Table",
    "WaitCounters",
]

#: Number of records kept of collectives, and of messages. Separate rings keep both, because thousands of messages may
#: lie between two collectives.
HISTORY: Final = 1024
MESSAGES: Final = 256
#: Memory in bytes of both ring buffers when full, on a 64-bit machine, if each record has its own objects, signature
#: and four-dimensional shape. Equal calls share a signature and take less.
NBYTES: Final = (HISTORY + MESSAGES) * 512

RECORD: Final = Struct("=Qqdddqii")
_write_record: Final = RECORD.pack_into
RECORD_NBYTES: Final = 56
#: Number of records for which a ring allocates memory at the start.
FIRST: Final = 16

#: Column indices in a row of call counters.
NBYTES_MOVED: Final = 0
FAILURES: Final = 1
SECONDS: Final = 2
BUCKET: Final = 3
#: Number of buckets of a duration histogram. Bucket i counts durations from 2**(i - 1 - SHIFT) to 2**(i - SHIFT)
#: seconds, by the exponent of `frexp`. The first bucket is below the duration of any call. The last ends at 17,000
#: years, enough for a virtual clock.
BUCKETS: Final = 64
SHIFT: Final = 24
ROW: Final = BUCKET + BUCKETS
#: Added to each duration, because `frexp` returns the exponent 0 for a duration of exactly 0.
SMALLEST_DURATION: Final = 2.0**-SHIFT
#: Column index of the histogram bucket for the `frexp` exponent 0.
ONE: Final = BUCKET + SHIFT

#: Column indices in a row of the table of waits.
TIMES: Final = 0
WAITED: Final = 1
MARK: Final = 2
#: The recent period, in seconds, for which waits are also counted.
MINUTE: Final = 60
WAIT: Final = MARK + 3 * MINUTE

#: Indices in the array that holds the state of a table.
COUNT: Final = 0
GENERATION: Final = 1
SIZE: Final = 2

#: Maximum number of call signatures in the row cache: more than a program uses at a time.
KNOWN: Final = 256


#: The Python objects of a record: number, signature, shape, key, code object of the caller, and exception class name.
Objects = tuple[int, Signature, tuple[int, ...], str | None, CodeType, str | None]


class Record(NamedTuple):
    """The record of one operation of this rank, in the form that programs read.

    Attributes:
        op: operation id. In the id of a receive, only the tag is meaningful.
        entered: entry time, by `Runtime.stamp`.
        signature: signature of the call.
        shape: shape of the caller's main array.
        key: key of a keyed collective, else None.
        seq: sequence number, or the count of the key; None for a message.
        code: the calling code object.
        instruction: position in `code`.
        ended: end time; None while the operation is pending.
        error: name of the exception class if the operation failed, else None.
        peer: peer of a message; None for a collective, and for a pending receive from any rank.
        started: for a message in several parts, the time at which the first part had moved. For a collective of several
            operations, the time at which the last of these was started. Else None.
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

    @classmethod
    def of(cls, operation: Operation) -> Record:
        """Return the record of a pending operation."""
        op, call = operation.id, operation.completion
        seq = call.seq if op < P2P else None
        made = call.shape, call.key, seq, call.code, call.instruction
        started = None if isnan(operation.started) else operation.started
        return cls(op, operation.entered, operation.signature, *made, None, None, operation.peer, started)

    def describe(self, rank: int) -> dict[str, Any]:
        """Return the recorded call as plain data; `rank` is this rank."""
        return description(rank, self.signature, self.shape, self.key, self.seq)


class CallCounters(NamedTuple):
    """Counters of one kind of operation: failures, bytes and durations.

    Attributes:
        kind: operation, algorithm and transport.
        failures: number of failed operations.
        nbytes: bytes of the completed operations.
        seconds: total duration of the completed operations.
        buckets: histogram of these durations: the number of completed operations in each bucket.
    """

    kind: tuple[str, str | None, str]
    failures: int
    nbytes: int
    seconds: float
    buckets: list[int]


class WaitCounters(NamedTuple):
    """The number and total seconds of this rank's waits for one peer: in total, and in the last minute."""

    times: int
    seconds: float
    recent_times: int
    recent_seconds: float


_NO_DOUBLES: Final = memoryview(b"").cast("d")


class Table:
    """A table of doubles, in memory that grows as rows are added.

    Args:
        row: number of doubles in a row.

    Attributes:
        memory: the rows as bytes.
        doubles: the same memory as doubles.
        state: three integers. `COUNT` is the number of records written, `GENERATION` the number of times that the
            memory was replaced, and `SIZE` the maximum number of records in a ring.
    """

    __slots__ = ("_row", "_used", "doubles", "memory", "state")

    def __init__(self, row: int) -> None:
        self._row = row
        self._used = 0
        self.state = array("q", [0, 0, 0])
        self.memory = bytearray()
        self.doubles = _NO_DOUBLES

    def resize(self, rows: int) -> None:
        """Move the rows to new memory with room for `rows` rows."""
        memory = bytearray(rows * self._row * 8)
        memory[: len(self.memory)] = self.memory
        self.doubles = memoryview(memory).cast("d")
        self.memory = memory
        self.state[GENERATION] += 1

    def add(self) -> int:
        """Add a row of zeros; return the index of its first double."""
        place, self._used = self._used, self._used + self._row
        if self._used > len(self.doubles):
            self.resize(2 * self._used // self._row)
        return place


class Ring(Table):
    """A ring buffer with the records of the last collectives, or of the last messages.

    Args:
        size: maximum number of records.

    Attributes:
        size: as given.
        room: number of records for which memory is allocated.
        objects: the objects of each record.
    """

    __slots__ = ("objects", "room", "size")

    def __init__(self, size: int) -> None:
        super().__init__(RECORD_NBYTES // 8)
        self.size = self.state[SIZE] = size
        self.room = 0
        self.objects: list[Objects | None] = []

    @property
    def count(self) -> int:
        """The number of records written so far, which is the number of the last record."""
        return self.state[COUNT]

    def __len__(self) -> int:
        return min(self.count, self.size)

    def grow(self) -> None:
        """Allocate memory for more records."""
        rows = min(max(FIRST, 2 * self.room), self.size)
        self.resize(rows)
        self.objects += [None] * (rows - self.room)
        self.room = rows

    def records(self, op: int | None = None) -> list[Record]:
        """Return copies of all records, or of those of operation `op`, in the order in which the operations ended."""
        memory, objects = bytes(self.memory), list(self.objects)
        found = [
            (fields, others)
            for fields, others in zip(RECORD.iter_unpack(memory), objects, strict=False)
            if others is not None and others[0] == fields[1] and (op is None or op == fields[0])
        ]
        found.sort(key=lambda each: each[1][0])
        return [_record(*each) for each in found]


class Journal:
    """The records and counters of the operations of one rank in one group.

    Args:
        channels: the channels to the ranks of the group.
        pending: returns the pending operations of this rank.
        since: start time of the journal.
        counts: whether operations are counted.

    Attributes:
        since, counts: as given.
        collectives: records of ended collectives.
        messages: records of ended sends and receives.
        hint: text for the log message of a failed group: the place of the records.
    """

    __slots__ = (
        "_calls",
        "_carrier",
        "_channels",
        "_pending",
        "_rows",
        "_wait_rows",
        "collectives",
        "counters",
        "counts",
        "due",
        "hint",
        "messages",
        "since",
        "waits",
    )

    def __init__(
        self, channels: Sequence[Channel], pending: Callable[[], list[Operation]], since: float, counts: bool
    ) -> None:
        self._channels = channels
        self._pending = pending
        self.since = since
        self.counts = counts
        self.collectives = Ring(HISTORY)
        self.messages = Ring(MESSAGES)
        self.hint = "pg.recorder.dump() returns the last calls; set AIOCOLL_DUMP_DIR to have them written to a file"
        self.counters = Table(ROW)
        self._rows: dict[tuple[str, str | None, str], int] = {}
        self.waits = Table(WAIT)
        self._wait_rows: dict[int, int] = {}
        # The time at which `_mark` must run next: the start of the next second. An array, because C code writes to it.
        self.due = array("d", [-inf])
        # Cache of the journal row and byte count of a call. The key of a collective is the `id` of its signature. The
        # key of a message also contains the peer. The cache holds the signature, so that its `id` is not reused.
        self._calls: dict[int | tuple[int, int], tuple[int, float, Signature]] = {}
        # Cached media of collectives; None if a link has been opened since the last lookup.
        self._carrier: str | None = None

    # -- writing

    def ended(self, operation: Operation, error: BaseException | None, now: float) -> None:
        """Record and count an operation that has ended. Ignore the child of another operation."""
        if operation.parent is not None:
            return
        call, identity, peer = operation.completion, operation.id, operation.waited_for
        is_collective = identity < P2P
        if is_collective:
            ring, other = self.collectives, -1
            seq = -1 if call.seq is None else call.seq
        else:
            ring, seq, other = self.messages, -1, peer if operation.peer is None else operation.peer
        state = ring.state
        state[COUNT] = number = state[COUNT] + 1
        index = number % ring.size
        if index >= ring.room:
            ring.grow()
        failed = None if error is None else type(error).__name__
        ring.objects[index] = number, operation.signature, call.shape, call.key, call.code, failed
        _write_record(
            ring.memory,
            index * RECORD_NBYTES,
            identity,
            number,
            operation.entered,
            now,
            operation.started,
            seq,
            other,
            call.instruction,
        )
        if error is not None:
            if self.counts and not isinstance(error, asyncio.CancelledError):  # not for a withdrawn receive
                row = self._row(operation, other)  # find the row first, because that may move the table to new memory
                self.counters.doubles[row + FAILURES] += 1.0
        elif self.counts:
            call_id = id(operation.signature) if is_collective else (id(operation.signature), other)
            try:
                row, nbytes, _ = self._calls[call_id]
            except KeyError:
                row, nbytes, _ = self._find_row(operation, other, call_id)
            seconds = now - operation.entered
            counters = self.counters.doubles
            counters[row] += nbytes
            counters[row + SECONDS] += seconds
            counters[row + ONE + frexp(seconds + SMALLEST_DURATION)[1]] += 1.0
            if peer >= 0 and is_collective:
                row = self.wait_row(peer, now)
                waits = self.waits.doubles
                waits[row] += 1.0
                waits[row + WAITED] += seconds

    def wait_row(self, peer: int, now: float) -> int:
        """Return the table row of the waits for `peer`. Once per second, first save the counts of all rows."""
        try:
            row = self._wait_rows[peer]
        except KeyError:
            row = self._wait_rows[peer] = self.waits.add()
            self._mark([row], now)
        if now >= self.due[0]:
            self._mark(self._wait_rows.values(), now)
            self.due[0] = now // 1 + 1.0
        return row

    def _mark(self, rows: Iterable[int], now: float) -> None:
        """Save the counts of `rows` at the start of a second, to compute the waits of the last minute later."""
        waits, second = self.waits.doubles, now // 1
        for row in rows:
            place = row + MARK + int(second) % MINUTE * 3
            waits[place], waits[place + 1], waits[place + 2] = second, waits[row], waits[row + WAITED]

    def linked(self) -> None:
        """Clear cached media after a link was opened, because operations may use another medium from now on."""
        self._calls.clear()
        self._carrier = None

    def _find_row(self, operation: Operation, other: int, call: int | tuple[int, int]) -> tuple[int, float, Signature]:
        """Return an operation's counter row and number of bytes; cache both if they hold for all equal calls."""
        signature = operation.signature
        found = self._row(operation, other), float(_nbytes(signature, operation.completion.shape)), signature
        # Do not cache an algorithm that may differ between equal calls (several operations, or a device), or a size
        # that the signature does not determine (no counts).
        fixed = signature.debug is None and signature.members is None
        sized = signature.dtype is None or signature.counts or signature.sends or signature.receives
        if operation.id >= P2P or (fixed and sized):
            if len(self._calls) >= KNOWN:
                self._calls.clear()
            self._calls[call] = found
        return found

    def row_of_plan(self, plan: Plan, shape: tuple[int, ...]) -> tuple[int, float]:
        """Return the counter row and the number of bytes of a plan's call in shared memory.

        `shape` is the shape of the call's main array.
        """
        row = self._row_of(plan.signature.op, plan.algorithm, self._common_carrier())
        return row, float(_nbytes(plan.signature, shape))

    def _row(self, operation: Operation, other: int) -> int:
        return self._row_of(operation.signature.op, operation.algorithm(), self._carrier_of(operation, other))

    def _row_of(self, op: str, algorithm: str | None, carrier: str) -> int:
        name = op, algorithm, carrier
        row = self._rows.get(name)
        if row is None:
            row = self.counters.add()  # first, because readers in other threads look rows up by name
            self._rows[name] = row
        return row

    def _carrier_of(self, operation: Operation, other: int) -> str:
        """Return the medium of an operation, such as "shm" or "tcp"."""
        if other >= 0:  # the operation is a message
            return self._channels[other].carrier
        if operation.signature.device != "cpu":  # the medium differs from call to call: the device itself, or links
            return operation.carriers()
        return self._common_carrier()

    def _common_carrier(self) -> str:
        """Return the media of all channels. The result is cached until the next link is opened."""
        if self._carrier is None:
            self._carrier = carriers_of(self._channels)
        return self._carrier

    # -- reading

    def snapshot(self) -> list[Record]:
        """Return the records of pending operations and of the last ended ones, ordered by entry time."""
        # Read the pending operations before the records: an operation stays pending until its record has been written.
        pending = [each for each in self._pending() if each.parent is None]
        found: list[Record] = []
        for ring, is_message in ((self.collectives, False), (self.messages, True)):
            ended = ring.records()
            calls = {(record.op, record.entered) for record in ended}
            found += [
                *ended,
                *(
                    Record.of(each)
                    for each in pending
                    if (each.id >= P2P) == is_message and not (each.done and (each.id, each.entered) in calls)
                ),
            ][-ring.size :]
        return sorted(found, key=lambda record: record.entered)

    def find(self, op: int) -> Record | None:
        """Return the record of a collective or a send; None if it is unknown, or ended too long ago."""
        for operation in self._pending():
            if operation.id == op and operation.parent is None:
                return Record.of(operation)
        return next(reversed((self.messages if op & P2P else self.collectives).records(op)), None)

    def last(self) -> Record | None:
        """Return the record of the last called collective; None if there is none."""
        return next((record for record in reversed(self.snapshot()) if record.op < P2P), None)

    def counted(self) -> list[CallCounters]:
        """Return a copy of the counters of all kinds of operations."""
        rows = list(self._rows.items())  # copied before the numbers: the writer first adds memory, then the row
        copy = memoryview(bytes(self.counters.memory)).cast("d")
        found = [(kind, list(copy[row : row + ROW])) for kind, row in rows]
        return [
            CallCounters(kind, int(row[FAILURES]), int(row[NBYTES_MOVED]), row[SECONDS], list(map(int, row[BUCKET:])))
            for kind, row in found
        ]

    def waited(self, now: float) -> dict[int, WaitCounters]:
        """Return a copy of the counters of waits, by rank."""
        rows = list(self._wait_rows.items())
        doubles = memoryview(bytes(self.waits.memory)).cast("d")
        return {rank: _waited(list(doubles[row : row + WAIT]), now) for rank, row in rows}


def _record(fields: tuple[Any, ...], objects: Objects) -> Record:
    """Return a `Record` made from fields and objects in the ring buffer."""
    op, _, entered, ended, started, seq, peer, instruction = fields
    _, signature, shape, key, code, error = objects
    return Record(
        op,
        entered,
        signature,
        shape,
        key,
        None if seq < 0 else seq,
        code,
        instruction,
        ended,
        error,
        None if peer < 0 else peer,
        None if isnan(started) else started,
    )


def _waited(row: Sequence[float], now: float) -> WaitCounters:
    """Return the `WaitCounters` from a row of the wait table. The last minute starts at a whole second."""
    times, seconds = row[TIMES], row[WAITED]
    marks = zip(row[MARK::3], row[MARK + 1 :: 3], row[MARK + 2 :: 3], strict=True)
    # A mark holds the counts at the start of a second. A mark that was never set holds zeros: no waits at second 0,
    # which is correct.
    _, before, spent = min((mark for mark in marks if mark[0] > now // 1 - MINUTE), default=(now, times, seconds))
    return WaitCounters(int(times), seconds, int(times - before), seconds - spent)


def _nbytes(signature: Signature, shape: tuple[int, ...]) -> int:
    """Return the number of bytes of an operation's elements; 0 if unknown."""
    spec = SPECS.get(signature.op.lower())
    return signature.nbytes(shape) or 0 if spec is None or spec.sized else 0
