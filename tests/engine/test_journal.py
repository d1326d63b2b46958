"""The journal of operations: layout and limits of its arrays, and reads by other threads."""

from __future__ import annotations

import gc
import struct
import sys
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from itertools import islice
from math import nan
from types import SimpleNamespace
from typing import Any

import pytest

from aiocoll.engine.journal import (
    BUCKET,
    BUCKETS,
    FAILURES,
    HISTORY,
    MARK,
    MESSAGES,
    MINUTE,
    NBYTES,
    NBYTES_MOVED,
    RECORD,
    RECORD_NBYTES,
    ROW,
    SECONDS,
    SHIFT,
    TIMES,
    WAIT,
    WAITED,
    Journal,
    Record,
)
from aiocoll.engine.operations.signature import KEYED, P2P, Signature

SIGNATURE = Signature("ALLREDUCE", "float64", (3,), None, "SUM")
SENT = Signature("SEND", "float64", (2,), None, None)
RECEIVED = Signature("RECV", "float64", (2,), None, None)
Operation = Any


class StandIn(SimpleNamespace):
    """A stand-in for an operation, with the attributes that the journal reads."""

    __hash__ = object.__hash__
    __eq__ = object.__eq__


def operation(
    op: int = 1,
    entered: float = 0.0,
    signature: Signature = SIGNATURE,
    shape: tuple[int, ...] = (3,),
    key: str | None = None,
    seq: int | None = 1,
    peer: int | None = None,
    waited_for: int = -1,
    parent: Operation | None = None,
) -> Operation:
    completion = SimpleNamespace(key=key, seq=seq, code=operation.__code__, instruction=12, shape=shape)
    return StandIn(
        id=op,
        entered=entered,
        signature=signature,
        completion=completion,
        peer=peer,
        waited_for=waited_for,
        parent=parent,
        started=nan,
        done=False,
        algorithm=lambda: "ring",
    )


class Group:
    """A stand-in for a communicator with a journal and channels to two ranks."""

    def __init__(self, counts: bool = True) -> None:
        self.pending: dict[Operation, None] = {}
        self.channels: Any = [SimpleNamespace(carrier=carrier) for carrier in ("tcp", "unix")]
        self.journal = Journal(self.channels, lambda: list(self.pending), 0.0, counts)

    def end(self, each: Operation, now: float, error: BaseException | None = None) -> None:
        self.journal.ended(each, error, now)


def test_journal_record_layout_matches_the_documentation() -> None:
    group = Group()
    failed = operation(KEYED | 77, 1.5, key="loss", seq=9, shape=(1, 3))
    failed.started = 1.75
    group.end(operation(1, 1.0), 2.0)
    group.end(failed, 2.5, ValueError("no"))
    ring = group.journal.collectives
    assert RECORD.size == RECORD_NBYTES == 56
    second = bytes(ring.memory[2 * RECORD_NBYTES : 3 * RECORD_NBYTES])
    assert struct.unpack_from("=Q", second, 0) == (KEYED | 77,)
    assert struct.unpack_from("=q", second, 8) == (2,)
    assert struct.unpack_from("=ddd", second, 16) == (1.5, 2.5, 1.75)
    assert struct.unpack_from("=q", second, 40) == (9,)
    assert struct.unpack_from("=ii", second, 48) == (-1, 12)
    assert ring.objects[2] == (2, SIGNATURE, (1, 3), "loss", operation.__code__, "ValueError")
    assert group.journal.snapshot() == [
        Record(1, 1.0, SIGNATURE, (3,), None, 1, operation.__code__, 12, 2.0, None),
        Record(KEYED | 77, 1.5, SIGNATURE, (1, 3), "loss", 9, operation.__code__, 12, 2.5, "ValueError", None, 1.75),
    ]


def test_journal_entry_of_a_pending_operation_equals_its_later_record() -> None:
    group = Group()
    for each in (operation(4, 3.0, key="k", seq=2), operation(P2P | 7 << 32, 2.0, RECEIVED, (2,), seq=None)):
        pending = Record.of(each)
        group.end(each, 4.0)
        (record,) = group.journal.snapshot()[-1:] if each.id < P2P else group.journal.snapshot()[:1]
        assert record._replace(ended=None) == pending
        assert record.ended == 4.0


def test_journal_counter_layout_matches_the_documentation() -> None:
    group = Group()
    for number in range(5):
        group.end(operation(number, waited_for=1), 0.75)
    group.end(operation(6), 0.25, ValueError())
    table = group.journal.counters.doubles
    assert ROW == BUCKET + BUCKETS == 67
    row = table[:ROW].tolist()
    assert (row[NBYTES_MOVED], row[FAILURES], row[SECONDS]) == (5 * 24, 1, 5 * 0.75)
    assert [(at, calls) for at, calls in enumerate(row[BUCKET:]) if calls] == [(SHIFT, 5)]
    waits = group.journal.waits.doubles
    assert WAIT == MARK + 3 * MINUTE == 182
    assert (waits[TIMES], waits[WAITED]) == (5, 5 * 0.75)
    assert waits[MARK : MARK + 3].tolist() == [0, 0, 0]


@pytest.mark.parametrize(("first", "size"), [(0, HISTORY), (P2P, MESSAGES)])
def test_journal_keeps_the_operations_that_ended_last(first: int, size: int) -> None:
    group = Group()
    for number in range(1, 3 * size + 5):
        group.end(operation(first | number, float(number), seq=number), number + 0.5)
        ring = group.journal.messages if first else group.journal.collectives
        assert len(ring) == min(number, size)
        if number in (1, 15, 16, 17, size - 1, size, size + 1, 3 * size + 4):
            kept = [each.op ^ first for each in group.journal.snapshot()]
            assert kept == list(range(max(1, number - size + 1), number + 1))
    assert group.journal.find(first | 2 * size + 4) is None
    found = group.journal.find(first | 2 * size + 5)
    assert found is not None
    assert (found.op ^ first, found.ended) == (2 * size + 5, 2 * size + 5.5)


def test_message_records_do_not_replace_collective_records() -> None:
    group = Group()
    group.end(operation(1, 0.5), 1.0)
    for number in range(5 * MESSAGES):
        group.end(operation(P2P | number, number + 1.0, SENT, (2,), peer=1), number + 2.0)
    records = group.journal.snapshot()
    assert (records[0].op, len(records)) == (1, 1 + MESSAGES)
    assert group.journal.last() == records[0]


def test_pending_operations_are_listed_and_never_replaced_in_the_journal() -> None:
    group, pending = Group(), operation(1, 0.5)
    group.pending[pending] = None
    for number in range(2, 2 * HISTORY):
        group.end(operation(number, float(number)), number + 0.5)
    records = group.journal.snapshot()
    assert (len(records), records[0].op, records[0].ended) == (HISTORY, 1, None)
    assert group.journal.find(1) == records[0]
    last = group.journal.last()
    assert last is not None
    assert last.op == 2 * HISTORY - 1


def test_operation_that_ends_during_a_journal_read_is_listed_once() -> None:
    """Read the journal after the record was written, but before the operation leaves the pending operations."""
    group, ending = Group(), operation(3, 1.0)
    group.pending[ending] = None
    ending.done = True
    assert [each.ended for each in group.journal.snapshot()] == [None]
    group.end(ending, 2.0)
    assert [each.ended for each in group.journal.snapshot()] == [2.0]


def test_equal_receives_have_separate_journal_records() -> None:
    group, tag = Group(), P2P | 5 << 32
    for number in range(2):
        pending = operation(tag, 1.0, RECEIVED, (2,), seq=None)
        group.pending[pending] = None
        if not number:
            group.end(pending, 1.0)
            del group.pending[pending]
    assert [each.ended for each in group.journal.snapshot()] == [1.0, None]


def test_child_operation_is_counted_in_the_record_of_its_parent() -> None:
    group, parent = Group(), operation(1, 1.0)
    child = operation(KEYED | 5, 1.25, parent=parent)
    group.pending |= {parent: None, child: None}
    parent.started = 1.25
    assert [(each.op, each.started) for each in group.journal.snapshot()] == [(1, 1.25)]
    group.end(child, 2.0)
    assert (len(group.journal.collectives), group.journal.counted()) == (0, [])
    group.end(parent, 3.0)
    del group.pending[parent], group.pending[child]
    (record,) = group.journal.snapshot()
    assert (record.op, record.started, record.ended) == (1, 1.25, 3.0)


def test_journal_record_of_a_receive_from_any_rank_contains_the_sender() -> None:
    group = Group()
    receive = operation(P2P | 9 << 32, 1.0, RECEIVED, (2,), seq=None)
    assert Record.of(receive).peer is None
    receive.waited_for = 1
    group.end(receive, 2.0)
    group.end(operation(P2P | 9 << 32, 1.0, RECEIVED, (2,), seq=None), 3.0, TimeoutError())
    assert [(each.peer, each.seq, each.error) for each in group.journal.snapshot()] == [
        (1, None, None),
        (None, None, "TimeoutError"),
    ]
    received = [each for each in group.journal.counted() if each.kind[2] == "unix"]
    assert [(each.nbytes, sum(each.buckets), each.failures) for each in received] == [(16, 1, 0)]
    assert group.journal.waited(9.0) == {}


@pytest.mark.parametrize("counts", [True, False])
def test_journal_counters_equal_the_expected_numbers(counts: bool) -> None:
    group = Group(counts)
    signatures = [Signature("ALLREDUCE", "float64", (n,), None, "SUM") for n in range(1, 11)]
    for number in range(1000):
        signature = signatures[number % 10]
        group.end(operation(number, 0.0, signature, signature.counts, waited_for=number % 3 - 1), 2.0 ** (number % 4))
    for number in range(30):
        group.end(operation(number), 1.0, ValueError())
    found = group.journal.counted()
    if not counts:
        assert (found, group.journal.waited(100.0)) == ([], {})
        return
    (row,) = found
    assert row.kind == ("ALLREDUCE", "ring", "tcp+unix")
    assert (row.failures, row.nbytes, row.seconds) == (30, 100 * 8 * 55, 250 * 15)
    assert [(at - SHIFT, calls) for at, calls in enumerate(row.buckets) if calls] == [
        (power + 1, 250) for power in range(4)
    ]
    waited = group.journal.waited(9.0)
    assert {rank: each.times for rank, each in waited.items()} == {0: 333, 1: 333}
    for rank, each in waited.items():
        seconds = sum(2.0 ** (number % 4) for number in range(1000) if number % 3 - 1 == rank)
        assert (each.seconds, each.recent_times, each.recent_seconds) == (seconds, 333, seconds)


def test_recent_waits_are_counted_per_whole_second() -> None:
    group, seconds = Group(), 0.25
    for now in range(1000):
        for part in (0.25, 0.75):
            for rank in (0, 1) if now < 980 else (1,):
                group.end(operation(1, now + part - seconds, waited_for=rank), now + part)
        expected = 2 * min(now + 1, MINUTE)
        each = group.journal.waited(now + 0.9)[1]
        assert (each.recent_times, each.recent_seconds) == (expected, expected * seconds)
    found = group.journal.waited(999 + MINUTE - 0.1)
    assert (found[0].recent_times, found[1].recent_times, found[1].recent_seconds) == (0, 2, 0.5)
    assert group.journal.waited(1000.0)[0][2:] == (2 * (MINUTE - 21), 2 * (MINUTE - 21) * seconds)
    assert group.journal.waited(999 + MINUTE)[1] == (2000, 500.0, 0, 0.0)


def test_recent_waits_include_ranks_whose_first_wait_ends_late_in_a_second() -> None:
    group = Group()
    for rank, now in ((0, 500.25), (1, 500.5), (0, 500.75), (1, 501.5)):
        group.end(operation(1, now - 0.25, waited_for=rank), now)
    found = group.journal.waited(501.75)
    assert {rank: tuple(each) for rank, each in found.items()} == {0: (2, 0.5, 2, 0.5), 1: (2, 0.5, 2, 0.5)}
    found = group.journal.waited(560.5)
    assert {rank: each.recent_times for rank, each in found.items()} == {0: 0, 1: 1}
    for rank, now in ((2, 502.25), (0, 502.5)):  # the first wait of this second is for a new rank
        group.end(operation(1, now - 0.25, waited_for=rank), now)
    found = group.journal.waited(561.5)
    assert {rank: each.recent_times for rank, each in found.items()} == {0: 1, 1: 0, 2: 1}


def test_journal_records_the_transport_of_a_new_link_for_later_calls() -> None:
    group = Group()
    for carrier in ("shm", "tcp"):
        for channel in group.channels:
            channel.carrier = carrier
        group.journal.linked()
        group.end(operation(), 1.0)
        group.end(operation(), 1.0)
    assert [(each.kind[2], sum(each.buckets)) for each in group.journal.counted()] == [("shm", 2), ("tcp", 2)]


def test_journal_records_read_by_another_thread_are_consistent() -> None:
    """Check that another thread never reads a record with fields of different operations."""
    group, failures, rounds = Group(), [], [0]
    ended = threading.Event()

    def read() -> None:
        try:
            while not ended.is_set():
                records = group.journal.snapshot()
                for each in records:
                    number = each.seq
                    assert number == each.op == each.shape[0] == each.entered
                    assert each.ended == each.op + 0.5
                    assert each.error == (None if each.op % 5 else "ValueError")
                assert len({each.op for each in records}) == len(records)
                (row,) = group.journal.counted() or [None]
                assert row is None or row.seconds <= 0.5 * sum(row.buckets) + 0.5
                rounds[0] += 1
        except BaseException as error:
            failures.append(error)

    reader = threading.Thread(target=read)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        reader.start()
        number = 0
        while rounds[0] < 30 and reader.is_alive():
            number += 1
            each = operation(number, float(number), shape=(number,), seq=number)
            group.end(each, number + 0.5, None if number % 5 else ValueError())
    finally:
        ended.set()
        sys.setswitchinterval(interval)
        reader.join()
    assert failures == []


def _operations(first: int) -> Iterator[Operation]:
    """Yield operations that share no objects; their numbers are too large for the cache of small integers."""
    for number in range(first + 1000, 1 << 40):
        shape = (number, 1000 + number, 2000 + number, 3000 + number)
        signature = Signature("ALLREDUCE", None, (number * 7,), None, "SUM", debug="detail")
        yield operation(first | number, number + 0.5, signature, shape, seq=number)


def test_journal_memory_is_bounded() -> None:
    def bytes_after(change: Callable[[Group], None]) -> int:
        group = Group()
        gc.collect()
        tracemalloc.start()
        try:
            change(group)
            gc.collect()
            return tracemalloc.get_traced_memory()[0]
        finally:
            tracemalloc.stop()

    def fill(group: Group) -> None:
        for each in islice(_operations(0), 3 * HISTORY):
            group.end(each, 1.0)
        for each in islice(_operations(P2P), 3 * MESSAGES):
            group.end(each, 1.0)

    def use(group: Group) -> None:
        group.end(operation(1), 1.0)

    assert NBYTES / 2 < bytes_after(fill) <= NBYTES
    assert bytes_after(use) <= 4096


def test_journal_of_an_unused_group_takes_little_memory() -> None:
    gc.collect()
    tracemalloc.start()
    try:
        journals = [Group().journal for _ in range(100)]
        assert tracemalloc.get_traced_memory()[0] <= 100 * 4096
    finally:
        tracemalloc.stop()
    assert len(journals) == 100
