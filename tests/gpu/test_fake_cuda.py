"""The fake CUDA: it follows the rules of real CUDA, and reports errors that real CUDA would not detect."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from aiocoll.elements.dtypes import by_name
from aiocoll.gpu.api import Cuda, DeviceError, Kernels, Nccl, NcclCommunicator

from ..fakes import memory as fake_memory
from ..fakes.arrays import FakeArray
from ..fakes.cuda import FakeCuda
from ..fakes.nccl import FakeNccl


@pytest.fixture
def cuda() -> Iterator[FakeCuda]:
    with FakeCuda(2) as made:
        yield made


def test_fake_cuda_and_nccl_have_all_methods_of_the_protocols(cuda: FakeCuda) -> None:
    nccl = FakeNccl(cuda)
    parts: list[tuple[Any, type]] = [
        (cuda, Cuda),
        (cuda.kernels, Kernels),
        (nccl, Nccl),
        (nccl.init(1, nccl.unique_id(), 0), NcclCommunicator),
    ]
    for made, protocol in parts:
        names = [name for name in vars(protocol) if not name.startswith("_")]
        assert names
        assert [name for name in names if not callable(getattr(made, name, None))] == []


def test_fake_devices_have_versions_ordinals_and_bus_ids(cuda: FakeCuda) -> None:
    assert cuda.version() >= 12000
    assert cuda.device_count() == 2
    assert cuda.bus_id(0) != cuda.bus_id(1)
    assert cuda.current() == 0
    cuda.use(1)
    assert cuda.current() == 1
    for call in (cuda.use, cuda.bus_id):
        with pytest.raises(DeviceError, match="ordinal 2"):
            call(2)
    assert FakeCuda(0).device_count() == 0


def test_current_fake_device_is_separate_for_each_thread(cuda: FakeCuda) -> None:
    cuda.use(1)
    seen: list[int] = []
    other = threading.Thread(target=lambda: seen.append(cuda.current()))
    other.start()
    other.join()
    assert seen == [0]


# -- streams and events


@pytest.mark.parametrize("stream", [0, 1, 2, None])
def test_fake_stream_executes_its_kernels_in_order(cuda: FakeCuda, stream: int | None) -> None:
    stream = cuda.stream_create() if stream is None else stream
    gate = cuda.gate(stream)
    done: list[int] = []
    for number in range(50):
        cuda.kernel(stream, lambda number=number: done.append(number))  # type: ignore[misc]
    assert gate.running.wait(10)
    assert done == []
    gate.open()
    cuda.stream_synchronize(stream)
    assert done == list(range(50))


def test_fake_streams_wait_for_each_other_only_through_events(cuda: FakeCuda) -> None:
    first, second = cuda.stream_create(), cuda.stream_create()
    event, later = cuda.event_create(), cuda.event_create()
    gate = cuda.gate(first)
    cuda.event_record(event, first)
    cuda.stream_synchronize(second)
    cuda.stream_wait(second, event)
    cuda.event_record(later, second)
    assert not cuda.event_done(event)
    assert not cuda.event_done(later)
    gate.open()
    cuda.event_synchronize(later)
    assert cuda.event_done(event)


def test_unrecorded_fake_event_counts_as_done(cuda: FakeCuda) -> None:
    event, stream = cuda.event_create(), cuda.stream_create()
    assert cuda.event_done(event)
    cuda.event_synchronize(event)
    cuda.stream_wait(stream, event)
    cuda.stream_synchronize(stream)


def test_fake_stream_waits_for_the_event_record_that_precedes_the_wait_call(cuda: FakeCuda) -> None:
    stream, other, event = cuda.stream_create(), cuda.stream_create(), cuda.event_create()
    cuda.event_record(event, stream)
    cuda.stream_wait(other, event)
    gate = cuda.gate(stream)
    cuda.event_record(event, stream)
    cuda.stream_synchronize(other)
    assert not cuda.event_done(event)
    gate.open()


def test_fake_events_on_an_idle_stream_are_done_at_once(cuda: FakeCuda) -> None:
    """Check also that these events start no stream thread, whose start would delay other threads."""
    stream, other, event = cuda.stream_create(), cuda.stream_create(), cuda.event_create()
    before = threading.active_count()
    cuda.event_record(event, stream)
    cuda.stream_wait(other, event)
    assert cuda.event_done(event)
    assert threading.active_count() == before
    gate = cuda.gate(stream)
    cuda.event_record(event, stream)
    assert not cuda.event_done(event)
    gate.open()
    cuda.event_synchronize(event)


def test_fake_stream_executes_the_requested_number_of_entries(cuda: FakeCuda) -> None:
    stream = cuda.stream_create()
    cuda.step(stream, 0)
    done: list[int] = []
    events = [cuda.event_create() for _ in range(3)]
    for number, event in enumerate(events):
        cuda.kernel(stream, lambda number=number: done.append(number))  # type: ignore[misc]
        cuda.event_record(event, stream)
    for number, event in enumerate(events[:2]):
        cuda.step(stream, 2)
        cuda.event_synchronize(event)
        assert done == list(range(number + 1))
        assert not cuda.event_done(events[2])
    cuda.step(stream, None)
    cuda.event_synchronize(events[2])


def test_fake_cuda_refuses_handles_of_destroyed_events_and_streams(cuda: FakeCuda) -> None:
    event, stream, good = cuda.event_create(), cuda.stream_create(), cuda.stream_create()
    gate = cuda.gate(stream)
    done: list[int] = []
    cuda.kernel(stream, lambda: done.append(1))
    cuda.event_record(event, stream)
    cuda.stream_wait(good, event)
    cuda.event_destroy(event)
    cuda.stream_destroy(stream)
    calls: list[Any] = [
        lambda: cuda.event_destroy(event),
        lambda: cuda.event_done(event),
        lambda: cuda.event_synchronize(event),
        lambda: cuda.event_record(event, good),
        lambda: cuda.stream_wait(good, event),
        lambda: cuda.stream_destroy(stream),
        lambda: cuda.gate(stream),
    ]
    for call in calls:
        with pytest.raises(DeviceError, match="invalid resource handle") as caught:
            call()
        assert not caught.value.fatal
    gate.open()
    cuda.stream_synchronize(good)
    assert done == [1], "work on a destroyed stream was lost"


def test_fake_event_cannot_be_recorded_on_a_stream_of_another_device(cuda: FakeCuda) -> None:
    event = cuda.event_create()
    cuda.use(1)
    for stream in (0, 1, 2, cuda.stream_create()):
        with pytest.raises(DeviceError, match="event of device 0, stream of 1"):
            cuda.event_record(event, stream)
    cuda.stream_wait(0, event)  # waiting across devices is allowed


def test_fake_cuda_counts_existing_events_streams_and_memory(cuda: FakeCuda) -> None:
    assert set(cuda.live().values()) == {0}
    event, stream, block = cuda.event_create(), cuda.stream_create(), cuda.pinned(100)
    array = FakeArray(cuda, np.zeros(3), 1)
    part = block[10:20]
    assert cuda.live() == {"events": 1, "streams": 1, "pinned": 100, "memory": 24}
    del block
    assert cuda.live()["pinned"] == 100
    cuda.event_destroy(event)
    cuda.stream_destroy(stream)
    del part, array
    assert set(cuda.live().values()) == {0}


def test_fake_cuda_refuses_work_on_a_captured_stream(cuda: FakeCuda) -> None:
    event = cuda.event_create()
    assert not cuda.is_capturing(0)
    cuda.capture(0, True)
    assert cuda.is_capturing(0)
    with pytest.raises(DeviceError, match="capturing"):
        cuda.event_record(event, 0)
    cuda.capture(0, False)
    cuda.event_record(event, 0)


# -- memory


def test_fake_copies_keep_the_order_of_their_stream(cuda: FakeCuda) -> None:
    stream = cuda.stream_create()
    source, target = FakeArray(cuda, np.arange(4)), FakeArray(cuda, np.zeros(4, int))
    block = cuda.pinned(32)
    gate = cuda.gate(stream)
    source.fill(7, stream)
    cuda.copy_to_host(block.ctypes.data, source.ptr, 32, stream)
    cuda.copy_to_device(target.ptr + 8, block.ctypes.data, 8, stream)
    cuda.copy(source.ptr, target.ptr, 16, stream)
    assert list(source.peek()) == [0, 1, 2, 3]
    gate.open()
    assert list(source.numpy(stream)) == [0, 7, 7, 7]
    assert list(block.view(int)) == [7] * 4


def test_fake_copies_refuse_wrong_addresses(cuda: FakeCuda) -> None:
    array, foreign = FakeArray(cuda, np.zeros(4)), FakeArray(cuda, np.zeros(4), 1)
    block, pageable = cuda.pinned(32), np.zeros(32, np.uint8)
    cases: list[Any] = [
        lambda: cuda.copy_to_host(pageable.ctypes.data, array.ptr, 32, 0),
        lambda: cuda.copy_to_host(block.ctypes.data, foreign.ptr, 32, 0),
        lambda: cuda.copy_to_host(block.ctypes.data + 1, array.ptr, 32, 0),
        lambda: cuda.copy_to_host(array.ptr, array.ptr, 32, 0),
        lambda: cuda.copy_to_device(array.ptr, pageable.ctypes.data, 32, 0),
        lambda: cuda.copy_to_device(block.ctypes.data, block.ctypes.data, 32, 0),
        lambda: cuda.copy(array.ptr, foreign.ptr, 32, 0),
        lambda: cuda.copy(array.ptr - 10**12, array.ptr, 32, 0),
    ]
    for call in cases:
        with pytest.raises(DeviceError, match="invalid argument") as caught:
            call()
        assert not caught.value.fatal
    cuda.copy_to_host(0, 0, 0, 0)
    assert len(cuda.pinned(0)) == 0


def test_kernel_that_uses_freed_memory_fails_the_fake_device(cuda: FakeCuda) -> None:
    array, block = FakeArray(cuda, np.zeros(4)), cuda.pinned(32)
    gate = cuda.gate(0)
    cuda.copy_to_host(block.ctypes.data, array.ptr, 32, 0)
    event = cuda.event_create()
    cuda.event_record(event, 0)
    del block
    gate.open()
    with pytest.raises(DeviceError, match="illegal memory access") as caught:
        cuda.event_synchronize(event)
    assert caught.value.fatal
    with pytest.raises(DeviceError, match="illegal memory access"):
        cuda.event_create()


@pytest.mark.parametrize("name", ["float32", "float64", "complex64", "complex128", "float16", "bfloat16"])
def test_fake_scale_kernel_multiplies_elements_in_stream_order(cuda: FakeCuda, name: str) -> None:
    dtype = by_name(name)
    one = 0x3F80 if name == "bfloat16" else 1
    source, target = FakeArray(cuda, np.full(3, one, dtype.storage), 0, dtype), FakeArray(
        cuda, np.zeros(3, dtype.storage), 0, dtype
    )  # fmt: skip
    cuda.kernels.scale(target.ptr, source.ptr, 2, name, 2 + 0j, 0)
    two = 0x4000 if name == "bfloat16" else 2
    assert list(target.numpy()) == [two, two, 0]
    cuda.kernels.scale(target.ptr, target.ptr, 3, name, 0.5, 0)
    assert list(target.numpy()) == [one, one, 0]


@pytest.mark.parametrize("name", ["int32", "bool", "float8_e5m2"])
def test_fake_scale_kernel_refuses_unsupported_dtypes(cuda: FakeCuda, name: str) -> None:
    array = FakeArray(cuda, np.zeros(1, by_name(name).storage), 0, name)
    with pytest.raises(DeviceError, match=f"dtype {name}") as caught:
        cuda.kernels.scale(array.ptr, array.ptr, 1, name, 2.0, 0)
    assert not caught.value.fatal


def test_fake_scale_kernel_refuses_streams_of_another_device_and_wrong_addresses(cuda: FakeCuda) -> None:
    array, stream = FakeArray(cuda, np.ones(1, np.float32)), cuda.stream_create()
    cuda.use(1)
    with pytest.raises(DeviceError, match="not of the thread's device"):
        cuda.kernels.scale(array.ptr, array.ptr, 1, "float32", 2.0, stream)
    cuda.use(0)
    with pytest.raises(DeviceError, match="no live allocation"):
        cuda.kernels.scale(array.ptr, array.ptr, 2, "float32", 2.0, stream)


def test_fake_cuda_returns_the_device_of_an_address(cuda: FakeCuda) -> None:
    array, block = FakeArray(cuda, np.zeros(4), 1), cuda.pinned(8)
    assert cuda.device_of(array.ptr) == cuda.device_of(array.ptr + 31) == 1
    for address in (array.ptr + 32, 1, block.ctypes.data):
        with pytest.raises(DeviceError, match="device_of: invalid argument") as caught:
            cuda.device_of(address)
        assert not caught.value.fatal


# -- failures


def test_failed_fake_device_stays_failed_and_wakes_waiting_threads(cuda: FakeCuda) -> None:
    stream, event = cuda.stream_create(), cuda.event_create()
    gate = cuda.gate(stream)
    ran: list[int] = []
    cuda.kernel(stream, lambda: ran.append(1))
    cuda.event_record(event, stream)
    errors: list[DeviceError] = []

    def wait() -> None:
        try:
            cuda.event_synchronize(event)
        except DeviceError as exc:
            errors.append(exc)

    waiting = threading.Thread(target=wait)
    waiting.start()
    cuda.fail("it is broken")
    waiting.join(10)
    assert str(errors[0]) == "event_synchronize: it is broken"
    gate.open()
    for call in (lambda: cuda.event_done(event), lambda: cuda.event_record(event, stream), cuda.stream_create):
        with pytest.raises(DeviceError, match="it is broken") as caught:
            call()
        assert caught.value.fatal
    cuda.event_destroy(event)
    cuda.stream_destroy(stream)
    cuda.use(1)
    cuda.stream_destroy(cuda.stream_create())
    assert ran == []


def test_fail_next_makes_one_call_of_a_fake_cuda_function_fail(cuda: FakeCuda) -> None:
    cuda.fail_next("event_create", "no memory")
    with pytest.raises(DeviceError, match="event_create: no memory") as caught:
        cuda.event_create()
    assert not caught.value.fatal
    event = cuda.event_create()
    cuda.event_record(event, 0)
    cuda.fail_next("event_synchronize", "out of order", fatal=True)
    for call in (cuda.event_synchronize, cuda.event_done):
        with pytest.raises(DeviceError, match="out of order") as caught:
            call(event)
        assert caught.value.fatal
    assert cuda.calls["event_create"] == 2


def test_event_record_on_a_failed_fake_device_is_done_at_once() -> None:
    with FakeCuda() as cuda:
        stream = cuda._stream(cuda.stream_create(), "test")
        cuda.fail()
        assert stream.mark().passed.is_set()


def test_close_of_the_fake_cuda_wakes_waiting_threads_and_leaves_no_threads() -> None:
    before = threading.active_count()
    with FakeCuda() as cuda:
        cuda.gate(0)
        cuda.step(cuda.stream_create(), 0)
        waiting = threading.Thread(target=cuda.stream_synchronize, args=(0,))
        waiting.start()
    waiting.join(10)
    assert threading.active_count() == before
    cuda.kernel(0, lambda: None)  # kernels on a closed fake are not carried out
    cuda.gate(2)


def test_latency_of_the_fake_cuda_delays_copies(cuda: FakeCuda) -> None:
    array = FakeArray(cuda, np.zeros(1))
    cuda.latency = 0.02
    event = cuda.event_create()
    cuda.copy(array.ptr, array.ptr, 8, 0)
    cuda.event_record(event, 0)
    assert not cuda.event_done(event)
    cuda.event_synchronize(event)


# -- arrays


def test_fake_array_has_a_cuda_array_interface(cuda: FakeCuda) -> None:
    array = FakeArray(cuda, np.arange(6, dtype=np.int16).reshape(2, 3), 1, stream=7)
    assert array.__cuda_array_interface__ == {
        "shape": (2, 3), "typestr": "<i2", "data": (array.ptr, False), "strides": None, "version": 3, "stream": 7,
    }  # fmt: skip
    assert (array.size, array.nbytes, array.device, array.dtype.name) == (6, 12, 1, "int16")
    assert array.numpy().tolist() == [[0, 1, 2], [3, 4, 5]]
    assert repr(array) == "FakeArray(shape=(2, 3), dtype=int16, device=1)"
    half = FakeArray(cuda, np.zeros(2, np.uint16), dtype="bfloat16")
    assert half.__cuda_array_interface__["typestr"] == "<V2"
    assert "stream" not in half.__cuda_array_interface__
    with pytest.raises(TypeError, match="bfloat16 is stored as uint16, not as float32"):
        FakeArray(cuda, np.zeros(2, np.float32), dtype="bfloat16")
    empty = FakeArray(cuda, np.zeros(0))
    assert empty.ptr == 0
    assert empty.numpy().shape == (0,)


def test_freed_memory_of_a_fake_array_is_overwritten(cuda: FakeCuda) -> None:
    array = FakeArray(cuda, np.zeros(4))
    held = array._bytes
    del array
    gc.collect()
    assert set(held.tolist()) == {0xDD}


@pytest.mark.parametrize("look", ["at", "where"])
def test_fake_memory_can_be_freed_during_an_address_lookup(look: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the garbage collector free another array during the lookup."""
    memory = fake_memory.FakeMemory()
    arrays = sorted((memory.new(8, device) for device in (0, 1, 2)), key=lambda each: each.ctypes.data)
    wheres = [memory.where(each.ctypes.data) for each in arrays]
    bisect_right = fake_memory.bisect_right

    def bisect_and_free(bases: list[int], address: int) -> int:
        found: int = bisect_right(bases, address)
        arrays[0] = None
        return found

    monkeypatch.setattr(fake_memory, "bisect_right", bisect_and_free)
    address = arrays[1].ctypes.data
    if look == "where":
        assert memory.where(address) == wheres[1]
    else:
        assert memory.at(address, 8, wheres[1]).ctypes.data == address
    monkeypatch.undo()
    with pytest.raises(fake_memory.BadAddressError, match="in no live allocation"):
        memory.where(1)
    assert sum(memory.live(device) for device in (0, 1, 2)) == 16


def test_fake_event_query_fails_during_a_capture_unless_the_thread_is_relaxed(cuda: FakeCuda) -> None:
    stream, event = cuda.stream_create(), cuda.event_create()
    cuda.capture(stream, True, blocking=True)
    with pytest.raises(DeviceError, match="not permitted when stream is capturing") as caught:
        cuda.event_done(event)
    assert caught.value.status == 900
    assert cuda.disturbed == [f"event_done in {threading.current_thread().name}"]
    cuda.relax()
    assert cuda.event_done(event)
    with pytest.raises(DeviceError, match="legacy stream"):
        cuda.is_capturing(0)
    cuda.capture(stream, False)
    assert not cuda.is_capturing(0)
    with pytest.raises(DeviceError, match="is not in use"):
        cuda.scratch_free(5, stream)
