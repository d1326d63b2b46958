"""The fake NCCL: it computes the same results as real NCCL, and hangs in the same cases."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from aiocoll.elements.dtypes import DType, from_float32, to_float32
from aiocoll.gpu.api import DeviceError

from ..fakes.arrays import FakeArray
from ..fakes.calls import DTYPES
from ..fakes.cuda import FakeCuda
from ..fakes.nccl import FakeNccl
from .fake_ranks import Rank, results_by_rank

WORLDS = [1, 2, 3, 4, 8]
SUM, PROD, MAX, MIN, AVG = range(5)
FLOAT32 = 7


@pytest.fixture
def cuda() -> Iterator[FakeCuda]:
    with FakeCuda(8) as made:
        yield made


@pytest.fixture
def nccl(cuda: FakeCuda) -> FakeNccl:
    return FakeNccl(cuda)


def to_storage(values: Any, dtype: DType) -> Any:
    """Return integers as stored bits of `dtype`: rounded once, or wrapped around."""
    if dtype.kind != "half":
        return np.asarray(values).astype(dtype.storage)
    out = np.empty(np.shape(values), dtype.storage)
    from_float32(dtype)(np.asarray(values, np.float32).reshape(-1), out.reshape(-1))
    return out


def from_storage(array: Any, dtype: DType) -> list[float]:
    if dtype.kind != "half":
        return list(array.astype(float))
    out = np.empty(array.shape, np.float32)
    to_float32(dtype)(array, out)
    return list(out.astype(float))


def expected_result(op: int, world_size: int) -> float:
    """Return the exact reduction result if rank 0 contributes 1 and all other ranks contribute 2."""
    total = 2 * world_size - 1
    return [total, 2 ** (world_size - 1), min(world_size, 2), 1, total // world_size][op]


def input_of(rank: int) -> int:
    return 1 if rank == 0 else 2


@pytest.mark.parametrize("world_size", WORLDS)
def test_fake_nccl_reductions_of_all_dtypes_and_ops_are_correct(
    cuda: FakeCuda, nccl: FakeNccl, world_size: int
) -> None:
    def rank(me: Rank) -> None:
        for code, dtype in DTYPES.items():
            for op in range(5):
                if op == AVG and dtype.kind in ("half", "float"):
                    continue
                [expected] = from_storage(to_storage([expected_result(op, world_size)], dtype), dtype)
                source = FakeArray(cuda, to_storage([input_of(me.rank)] * 3, dtype), me.rank, dtype)
                target = FakeArray(cuda, to_storage([0] * 3, dtype), me.rank, dtype)
                me.communicator.all_reduce(source.ptr, target.ptr, 3, code, op, me.stream)
                assert from_storage(target.numpy(me.stream), dtype) == [expected] * 3
                root = world_size - 1
                me.communicator.reduce(source.ptr, source.ptr, 3, code, op, root, me.stream)
                assert (
                    from_storage(source.numpy(me.stream), dtype)
                    == [expected if me.rank == root else input_of(me.rank)] * 3
                )
                whole = to_storage([input_of(me.rank)] * (2 * world_size), dtype)
                parts = FakeArray(cuda, whole, me.rank, dtype)
                me.communicator.reduce_scatter(parts.ptr, target.ptr, 2, code, op, me.stream)
                assert from_storage(target.numpy(me.stream), dtype) == [expected] * 3

    results_by_rank(cuda, nccl, world_size, rank)


@pytest.mark.parametrize("world_size", WORLDS)
def test_fake_nccl_averages_of_floats_are_correct(cuda: FakeCuda, nccl: FakeNccl, world_size: int) -> None:
    def rank(me: Rank) -> None:
        for code, dtype in DTYPES.items():
            if dtype.kind in ("half", "float"):
                # The average of 0, 2, 4, ..., 2(p - 1) over p ranks is p - 1.
                array = FakeArray(cuda, to_storage([2 * me.rank], dtype), me.rank, dtype)
                me.communicator.all_reduce(array.ptr, array.ptr, 1, code, AVG, me.stream)
                assert from_storage(array.numpy(me.stream), dtype) == [world_size - 1]  # exact in all float dtypes

    results_by_rank(cuda, nccl, world_size, rank)


@pytest.mark.parametrize("world_size", WORLDS)
def test_fake_nccl_transfers_of_all_dtypes_are_correct(cuda: FakeCuda, nccl: FakeNccl, world_size: int) -> None:
    def rank(me: Rank) -> None:
        for code, dtype in DTYPES.items():
            mine = FakeArray(cuda, to_storage([me.rank, me.rank], dtype), me.rank, dtype)
            whole = FakeArray(cuda, to_storage([0] * (2 * world_size), dtype), me.rank, dtype)
            me.communicator.all_gather(mine.ptr, whole.ptr, 2, code, me.stream)
            expected = [float(rank) for rank in range(world_size) for _ in range(2)]
            assert from_storage(whole.numpy(me.stream), dtype) == expected
            place = whole.ptr + me.rank * 2 * dtype.itemsize
            me.communicator.all_gather(place, whole.ptr, 2, code, me.stream)
            assert from_storage(whole.numpy(me.stream), dtype) == expected
            for root in range(world_size):
                target = FakeArray(cuda, to_storage([0, 0], dtype), me.rank, dtype)
                me.communicator.broadcast(mine.ptr, target.ptr, 2, code, root, me.stream)
                assert from_storage(target.numpy(me.stream), dtype) == [root, root]

    results_by_rank(cuda, nccl, world_size, rank)


@pytest.mark.parametrize("world_size", WORLDS)
def test_fake_nccl_exchanges_messages_between_all_ranks_in_a_call_group(
    cuda: FakeCuda, nccl: FakeNccl, world_size: int
) -> None:
    def rank(me: Rank) -> None:
        out = FakeArray(cuda, np.arange(world_size) + 10 * me.rank, me.rank)
        into = FakeArray(cuda, np.zeros(world_size, int), me.rank)
        nccl.group_start()
        nccl.group_start()
        for peer in range(world_size):
            me.communicator.send(out.ptr + 8 * peer, 1, 4, peer, me.stream)
            me.communicator.recv(into.ptr + 8 * peer, 1, 4, peer, me.stream)
        nccl.group_end()
        assert not me.communicator.in_flight
        nccl.group_end()
        assert list(into.numpy(me.stream)) == [10 * peer + me.rank for peer in range(world_size)]

    results_by_rank(cuda, nccl, world_size, rank)


def test_fake_nccl_messages_between_two_ranks_keep_their_order(cuda: FakeCuda, nccl: FakeNccl) -> None:
    def rank(me: Rank) -> list[int]:
        array = FakeArray(cuda, np.arange(100) if me.rank == 0 else np.zeros(100, int), me.rank)
        for place in range(100):
            move = me.communicator.send if me.rank == 0 else me.communicator.recv
            move(array.ptr + 8 * place, 1, 4, 1 - me.rank, me.stream)
        return list(array.numpy(me.stream))

    assert results_by_rank(cuda, nccl, 2, rank)[1] == list(range(100))


def test_fake_nccl_collectives_of_a_call_group_start_at_the_end_of_the_group(cuda: FakeCuda, nccl: FakeNccl) -> None:
    def rank(me: Rank) -> None:
        array = FakeArray(cuda, np.ones(1, np.float32), me.rank)
        nccl.group_start()
        for _ in range(3):
            me.communicator.all_reduce(array.ptr, array.ptr, 1, FLOAT32, SUM, me.stream)
        assert not me.communicator.in_flight
        nccl.group_end()
        assert array.numpy(me.stream) == 8.0

    results_by_rank(cuda, nccl, 2, rank)


def test_empty_fake_nccl_calls_start_no_kernel(cuda: FakeCuda, nccl: FakeNccl) -> None:
    def rank(me: Rank) -> None:
        if me.rank == 0:  # rank 1 makes no call
            me.communicator.all_reduce(0, 0, 0, FLOAT32, SUM, me.stream)
            me.communicator.send(0, 0, FLOAT32, 1, me.stream)
        me.finish()

    results_by_rank(cuda, nccl, 2, rank)


# -- hanging calls


HANGING = ["order", "count", "dtype", "op", "root", "bytes", "missing", "sends", "broken"]


def start_hanging_call(me: Rank, what: str, array: FakeArray) -> None:
    """Start an NCCL call of one of the kinds in `HANGING`, which never ends."""
    first, com = me.rank == 0, me.communicator
    ptr, stream = array.ptr, me.stream
    if what == "order":
        for call in (0, 1) if first else (1, 0):
            if call == 0:
                com.all_reduce(ptr, ptr, 4, FLOAT32, SUM, stream)
            else:
                com.broadcast(ptr, ptr, 4, FLOAT32, 0, stream)
    elif what == "bytes":
        (com.send if first else com.recv)(ptr, 4 if first else 3, FLOAT32, 1 - me.rank, stream)
    elif what == "sends":
        for move in (com.send, com.recv):  # without a call group, both ranks send first and so hang
            move(ptr, 4, FLOAT32, 1 - me.rank, stream)
    elif what == "root":
        com.broadcast(ptr, ptr, 4, FLOAT32, me.rank, stream)
    elif what == "broken":
        if first:
            com.fail("network is gone")
            assert com.async_error() == "network is gone"
        com.all_reduce(ptr, ptr, 4, FLOAT32, SUM, stream)
    elif first or what != "missing":
        count = 3 if what == "count" and first else 4
        dtype, op = (2 if what == "dtype" and first else FLOAT32), (MAX if what == "op" and first else SUM)
        com.all_reduce(ptr, ptr, count, dtype, op, stream)


@pytest.mark.parametrize("what", HANGING)
def test_mismatched_fake_nccl_calls_hang_until_abort(cuda: FakeCuda, nccl: FakeNccl, what: str) -> None:
    started = threading.Barrier(2)

    def rank(me: Rank) -> None:
        array = FakeArray(cuda, np.ones(4, np.float32), me.rank)
        hangs = me.rank == 0 or what != "missing"
        start_hanging_call(me, what, array)
        event = cuda.event_create()
        cuda.event_record(event, me.stream)
        # Wait until both calls are in the fake NCCL, which then records a complaint.
        while what not in ("missing", "sends", "broken") and not nccl.complaints:
            time.sleep(0)
        started.wait(10)
        if hangs:
            assert not cuda.event_done(event)
        else:
            cuda.event_synchronize(event)
        aborting = threading.Thread(target=me.communicator.abort)
        aborting.start()
        aborting.join()
        cuda.event_synchronize(event)
        assert not me.communicator.in_flight
        if hangs and not (what == "bytes" and me.rank == 0):  # a sender has no output that an abort could overwrite
            assert array.peek().tobytes().count(0xA5) >= 12, "the aborted call left a plausible result"
        with pytest.raises(DeviceError, match="aborted"):
            me.communicator.all_reduce(array.ptr, array.ptr, 4, FLOAT32, SUM, me.stream)

    results_by_rank(cuda, nccl, 2, rank)


def test_fake_nccl_complaint_describes_the_mismatch(cuda: FakeCuda, nccl: FakeNccl) -> None:
    def rank(me: Rank) -> None:
        array = FakeArray(cuda, np.ones(4, np.float32), me.rank)
        start_hanging_call(me, "op", array)
        while not nccl.complaints:
            time.sleep(0)
        me.communicator.abort()

    results_by_rank(cuda, nccl, 2, rank)
    assert nccl.complaints == [
        "collective 0: rank 0 ('all_reduce', 4, 'float32', 2, None), rank 1 ('all_reduce', 4, 'float32', 0, None)"
    ]


def test_fake_nccl_hangs_if_ranks_use_communicators_in_different_orders(cuda: FakeCuda, nccl: FakeNccl) -> None:
    other = nccl.unique_id()
    started = threading.Barrier(2)

    def rank(me: Rank) -> None:
        second = nccl.init(2, other, me.rank)
        array = FakeArray(cuda, np.ones(2, np.float32), me.rank)
        order = [me.communicator, second] if me.rank == 0 else [second, me.communicator]
        for place, each in enumerate(order):
            ptr = array.ptr + 4 * place
            each.all_reduce(ptr, ptr, 1, FLOAT32, SUM, me.stream)
        started.wait(10)
        assert second.in_flight == me.communicator.in_flight == 1
        second.abort()
        me.communicator.abort()
        me.finish()

    results_by_rank(cuda, nccl, 2, rank)


def test_fake_nccl_call_group_that_is_aborted_before_its_end_is_not_started(cuda: FakeCuda, nccl: FakeNccl) -> None:
    def body(me: Rank) -> None:
        array = FakeArray(cuda, np.ones(2, np.float32), me.rank)
        nccl.group_start()
        me.communicator.all_reduce(array.ptr, array.ptr, 2, FLOAT32, SUM, me.stream)
        me.communicator.abort()
        with pytest.raises(DeviceError, match="aborted"):
            nccl.group_end()
        me.finish()

    results_by_rank(cuda, nccl, 2, body)


# -- init, abort, destroy


def test_fake_nccl_init_refuses_two_ranks_on_one_device(cuda: FakeCuda, nccl: FakeNccl) -> None:
    cuda.bus_ids[1] = cuda.bus_ids[0]
    with pytest.raises(DeviceError, match="Duplicate GPU detected"):
        results_by_rank(cuda, nccl, 2, lambda me: None)


def test_fake_nccl_init_refuses_different_versions(cuda: FakeCuda) -> None:
    libraries = [FakeNccl(cuda, 22809), FakeNccl(cuda, 22203)]
    unique_id = libraries[0].unique_id()

    def join(rank: int) -> None:
        cuda.use(rank)
        with pytest.raises(DeviceError, match="Mismatched NCCL version"):
            libraries[rank].init(2, unique_id, rank)

    other = threading.Thread(target=join, args=(1,))
    other.start()
    join(0)
    other.join()


def test_fake_nccl_init_refuses_invalid_ranks_and_ids(cuda: FakeCuda, nccl: FakeNccl) -> None:
    with pytest.raises(DeviceError, match="rank 2 of 2"):
        nccl.init(2, nccl.unique_id(), 2)
    with pytest.raises(DeviceError, match="rank 0 of 1"):
        nccl.init(1, b"short", 0)
    hanging = threading.Thread(target=nccl.init, args=(2, unique_id := nccl.unique_id(), 0))
    hanging.start()
    while unique_id not in FakeNccl._worlds or not FakeNccl._worlds[unique_id].members:
        time.sleep(0)
    with pytest.raises(DeviceError, match="rank 0 of 2"):
        nccl.init(2, unique_id, 0)
    cuda.use(1)
    assert nccl.init(2, unique_id, 1).rank == 1
    hanging.join()


@pytest.mark.parametrize("call", ["init", "abort"])
def test_hanging_fake_nccl_call_ends_when_the_fake_cuda_is_closed(call: str) -> None:
    with FakeCuda(1) as cuda:
        nccl = FakeNccl(cuda)
        made = nccl.init(1, nccl.unique_id(), 0)
        nccl.init_hangs = nccl.abort_hangs = True
        hangs = made.abort if call == "abort" else lambda: nccl.init(1, nccl.unique_id(), 0)
        thread = threading.Thread(target=hangs)
        thread.start()
        assert thread.is_alive()
        assert not made.aborted
    thread.join(10)
    assert not thread.is_alive()


def test_fake_nccl_destroy_waits_for_all_ranks(cuda: FakeCuda, nccl: FakeNccl) -> None:
    order: list[int] = []

    def rank(me: Rank) -> None:
        if me.rank == 2:
            order.append(2)
            me.communicator.abort()
        else:
            me.communicator.destroy()
            order.append(me.rank)
            with pytest.raises(DeviceError, match="destroyed"):
                me.communicator.async_error()

    results_by_rank(cuda, nccl, 3, rank)
    assert order[0] == 2


def test_fake_nccl_destroy_refuses_calls_in_flight_and_abort_ends_them(cuda: FakeCuda, nccl: FakeNccl) -> None:
    def rank(me: Rank) -> None:
        if me.rank == 0:
            array = FakeArray(cuda, np.ones(1, np.float32), 0)
            me.communicator.all_reduce(array.ptr, array.ptr, 1, FLOAT32, SUM, me.stream)
            with pytest.raises(DeviceError, match="1 calls are in flight"):
                me.communicator.destroy()
            me.communicator.abort()
            me.finish()
        else:
            freeing = threading.Thread(target=me.communicator.abort)
            freeing.start()
            freeing.join()

    results_by_rank(cuda, nccl, 2, rank)


def test_fake_nccl_abort_ignores_freed_memory(cuda: FakeCuda, nccl: FakeNccl) -> None:
    def rank(me: Rank) -> None:
        if me.rank == 0:
            array = FakeArray(cuda, np.ones(1, np.float32), 0)
            me.communicator.all_reduce(array.ptr, array.ptr, 1, FLOAT32, SUM, me.stream)
            del array
        me.communicator.abort()
        me.finish()

    results_by_rank(cuda, nccl, 2, rank)


def test_memory_freed_before_the_end_of_a_call_fails_the_fake_device(cuda: FakeCuda, nccl: FakeNccl) -> None:
    gone = threading.Barrier(2)

    def rank(me: Rank) -> str | None:
        array = FakeArray(cuda, np.ones(1, np.float32), me.rank)
        gate = cuda.gate(me.stream)
        me.communicator.all_reduce(array.ptr, array.ptr, 1, FLOAT32, SUM, me.stream)
        del array
        gone.wait(10)
        gate.open()
        try:
            me.finish()
        except DeviceError as exc:
            return str(exc)
        return None

    failed = [error for error in results_by_rank(cuda, nccl, 2, rank) if error is not None]
    assert len(failed) == 1
    assert "illegal memory access" in failed[0]


# -- wrong arguments


def test_fake_nccl_refuses_wrong_arguments(cuda: FakeCuda, nccl: FakeNccl) -> None:
    def rank(me: Rank) -> None:
        array = FakeArray(cuda, np.ones(8, np.float32), me.rank)
        foreign = FakeArray(cuda, np.ones(8, np.float32), 1 - me.rank)
        ptr, com, stream = array.ptr, me.communicator, me.stream
        cases: list[tuple[str, Any]] = [
            ("dtype 12", lambda: com.all_reduce(ptr, ptr, 1, 12, SUM, stream)),
            ("op 5", lambda: com.all_reduce(ptr, ptr, 1, FLOAT32, 5, stream)),
            ("rank 2 of 2", lambda: com.broadcast(ptr, ptr, 1, FLOAT32, 2, stream)),
            ("rank -1 of 2", lambda: com.send(ptr, 1, FLOAT32, -1, stream)),
            ("no live allocation", lambda: com.all_reduce(ptr, ptr, 9, FLOAT32, SUM, stream)),
            ("no live allocation", lambda: com.all_reduce(8, ptr, 1, FLOAT32, SUM, stream)),
            ("memory of device", lambda: com.all_reduce(ptr, foreign.ptr, 1, FLOAT32, SUM, stream)),
            ("overlap", lambda: com.all_reduce(ptr, ptr + 4, 4, FLOAT32, SUM, stream)),
            ("overlap", lambda: com.all_gather(ptr, ptr + 4 - 4 * me.rank * 2, 2, FLOAT32, stream)),
            ("overlap", lambda: com.reduce_scatter(ptr, ptr + 4, 3, FLOAT32, SUM, stream)),
            ("no stream", lambda: com.all_reduce(ptr, ptr, 1, FLOAT32, SUM, 99)),
        ]
        for words, call in cases:
            if words == "overlap" and "all_gather" in call.__code__.co_names and me.rank:
                continue
            with pytest.raises(DeviceError, match=words) as caught:
                call()
            assert not caught.value.fatal
        with pytest.raises(DeviceError, match="no group_start"):
            nccl.group_end()

    results_by_rank(cuda, nccl, 2, rank)


def test_fake_communicator_refuses_concurrent_threads_and_other_devices(cuda: FakeCuda, nccl: FakeNccl) -> None:
    made = nccl.init(1, nccl.unique_id(), 0)
    errors: list[BaseException] = []

    def call() -> None:
        try:
            made.all_reduce(0, 0, 0, FLOAT32, SUM, 0)
        except DeviceError as exc:
            errors.append(exc)

    def call_from_another_thread(_: str) -> None:
        nccl.hooks.clear()
        other = threading.Thread(target=call)
        other.start()
        other.join()

    nccl.hooks.append(call_from_another_thread)
    made.all_reduce(0, 0, 0, FLOAT32, SUM, 0)
    assert "another thread" in str(errors[0])
    cuda.use(1)
    with pytest.raises(DeviceError, match="a stream of device 1"):
        made.all_reduce(0, 0, 0, FLOAT32, SUM, cuda.stream_create())


def test_fake_nccl_supports_float8_only_in_recent_versions(cuda: FakeCuda) -> None:
    early = FakeNccl(cuda, 22203)
    made = early.init(1, early.unique_id(), 0)
    array = FakeArray(cuda, np.zeros(1, np.uint8))
    with pytest.raises(DeviceError, match="dtype 10"):
        made.all_reduce(array.ptr, array.ptr, 1, 10, SUM, 0)
    made.all_reduce(array.ptr, array.ptr, 1, 1, SUM, 0)
    assert list(array.numpy()) == [0]


@pytest.mark.parametrize("call", ["unique_id", "init", "all_reduce", "group_start", "group_end", "abort", "destroy"])
def test_fail_next_makes_the_chosen_fake_nccl_function_fail(cuda: FakeCuda, nccl: FakeNccl, call: str) -> None:
    unique_id = nccl.unique_id()
    if call != "init":
        made = nccl.init(1, unique_id, 0)
    if call == "group_end":
        nccl.group_start()
    nccl.fail_next(call, "no way")
    calls: dict[str, Any] = {
        "unique_id": nccl.unique_id,
        "init": lambda: nccl.init(1, unique_id, 0),
        "all_reduce": lambda: made.all_reduce(0, 0, 0, FLOAT32, SUM, 0),
        "group_start": nccl.group_start,
        "group_end": nccl.group_end,
        "abort": lambda: made.abort(),
        "destroy": lambda: made.destroy(),
    }
    with pytest.raises(DeviceError, match="no way"):
        calls[call]()
    if call != "group_end":
        calls[call]()
