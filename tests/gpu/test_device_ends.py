"""Failed device calls, and the end of devices: closed event loops, stuck streams, forks and interpreter exit."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import subprocess
import sys
import threading
import warnings
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aiocoll.gpu import device as module
from aiocoll.gpu.api import DeviceError
from aiocoll.gpu.device import Device, close_devices
from aiocoll.gpu.waiter import AT_MOST

from ..fakes.arrays import FakeArray
from ..fakes.cuda import FakeCuda
from ..fakes.nccl import FakeNccl
from ..internals import Limits, waiter_of
from ..ranks import wait_until
from .devices import Batch, GatedCall, TrackedObjects, block_until_launched, do_nothing, launch_call

FLOAT32, SUM = 7, 0


# -- errors


@pytest.mark.parametrize("error", [DeviceError("ncclAllReduce", "no", fatal=False), ValueError("no"), SystemExit("no")])
async def test_failed_device_call_does_not_fail_other_calls(
    cuda: FakeCuda, device: Device, error: BaseException
) -> None:
    stream = device.stream()

    def fail() -> None:
        raise error

    _, first = launch_call(device, stream)
    launched, second = launch_call(device, stream, fail)
    _, third = launch_call(device, stream)
    await first
    with pytest.raises(DeviceError, match="no") as caught:
        await second
    assert not caught.value.fatal
    assert caught.value is error or caught.value.__cause__ is error
    await third
    with pytest.raises(DeviceError, match="no"):
        await launched.on_stream(0)


async def test_failed_device_call_keeps_references_until_its_enqueued_work_ends(cuda: FakeCuda, device: Device) -> None:
    kept = TrackedObjects()
    stream = device.stream()
    held = GatedCall(cuda, stream)

    def enqueue_and_fail() -> None:
        held()
        raise DeviceError("ncclGroupEnd", "no")

    launched, ended = launch_call(device, stream, enqueue_and_fail, keep=kept.new())
    with pytest.raises(DeviceError, match="no"):
        await launched.on_stream(0)
    gc.collect()
    assert kept.freed_in == []
    assert not ended.done()
    held.open()
    with pytest.raises(DeviceError, match="no"):
        await ended
    assert kept.freed_in == [threading.get_ident()]


@pytest.mark.parametrize("call", ["stream_wait", "event_record"])
async def test_device_call_whose_cuda_call_is_refused_raises_an_error(
    cuda: FakeCuda, device: Device, call: str
) -> None:
    stream = device.stream()
    ran: list[int] = []
    before = 0 if call == "stream_wait" else None
    cuda.fail_next(call, "busy")
    _, ended = launch_call(device, stream, lambda: ran.append(1), before=before)
    with pytest.raises(DeviceError, match=f"{call}: busy"):
        await ended
    assert ran == ([] if before == 0 else [1])
    await launch_call(device, stream)[1]


async def test_first_of_two_errors_of_a_device_call_is_reported(cuda: FakeCuda, device: Device) -> None:
    stream = device.stream()

    def fail() -> None:
        cuda.fail_next("event_record", "second")
        raise DeviceError("call", "first")

    _, ended = launch_call(device, stream, fail)
    with pytest.raises(DeviceError, match="first"):
        await ended


@pytest.mark.parametrize("call", ["event_record", "event_done", "event_synchronize"])
async def test_unexpected_error_in_a_cuda_call_does_not_end_the_device_threads(
    cuda: FakeCuda, device: Device, call: str
) -> None:
    stream = device.stream()
    held = GatedCall(cuda, stream)

    def fail(called: str) -> None:
        if called == call:
            raise KeyError(7)

    cuda.hooks.append(fail)
    _, ended = launch_call(device, stream, held, before=None)
    with pytest.raises(DeviceError, match=r"KeyError\(7\)"):
        await ended
    cuda.hooks.remove(fail)
    held.open()
    await launch_call(device, stream)[1]


async def test_failed_event_record_on_the_callers_stream_raises_an_error_at_the_launch(
    cuda: FakeCuda, device: Device
) -> None:
    stream = device.stream()
    for _ in range(3):
        cuda.fail_next("event_record", "busy")
        with pytest.raises(DeviceError, match="event_record: busy"):
            launch_call(device, stream)
    assert cuda.live()["events"] == 1, "a failed call did not reuse the event"
    await launch_call(device, stream)[1]


async def test_failed_device_fails_all_its_pending_calls(cuda: FakeCuda, device: Device) -> None:
    stream = device.stream()
    held = GatedCall(cuda, stream)
    calls = [launch_call(device, stream, held)] + [launch_call(device, stream) for _ in range(9)]
    await wait_until(lambda: calls[-1][0].enqueued)
    cuda.fail("unspecified launch failure")
    for _, ended in calls:
        with pytest.raises(DeviceError, match="unspecified launch failure") as caught:
            await ended
        assert caught.value.fatal
    with pytest.raises(DeviceError, match="unspecified launch failure"):
        launch_call(device, stream)
    _, ended = launch_call(device, stream, before=None)
    with pytest.raises(DeviceError, match="unspecified launch failure"):
        await ended
    held.open()
    assert await device.close_stream(stream, 10)


async def test_error_of_an_event_query_fails_only_the_queried_call(cuda: FakeCuda, device: Device) -> None:
    stream = device.stream()
    batch = Batch(cuda, device, stream)
    calls = [launch_call(device, stream, call) for call in (batch, do_nothing, do_nothing)]
    await batch.wait_until_queued(3)
    cuda.fail_next("event_done", "what")
    batch.open()
    errors = await asyncio.gather(*(ended for _, ended in calls), return_exceptions=True)
    assert [type(error) for error in errors] == [type(None), DeviceError, type(None)]


async def test_failed_callback_of_a_device_call_does_not_stop_other_callbacks(cuda: FakeCuda, device: Device) -> None:
    stream = device.stream()
    seen: list[Any] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda loop, context: seen.append(context["exception"]))

    def fail(error: DeviceError | None) -> None:
        raise ZeroDivisionError

    device.launch(stream, do_nothing, None, fail)
    await launch_call(device, stream)[1]
    loop.set_exception_handler(None)
    assert [type(each) for each in seen] == [ZeroDivisionError]


# -- closed loops


def test_closed_event_loop_keeps_no_objects_of_device_calls(
    cuda: FakeCuda, device: Device, caplog: pytest.LogCaptureFixture
) -> None:
    kept = TrackedObjects()
    stream = device.stream()
    held = GatedCall(cuda, stream)
    busy = threading.Event()

    async def main() -> None:
        await launch_call(device, stream, held, keep=kept.new())[0].on_stream(0)
        launch_call(device, stream, lambda: busy.wait(10) and None, keep=kept.new())
        launched, _ = launch_call(device, stream, keep=kept.new())
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0):
                await launched.on_stream(0)

    asyncio.run(main())
    busy.set()
    gc.collect()
    assert kept.freed_in == []
    held.open()
    assert device.close(10)
    assert len(kept.freed_in) == 3
    assert cuda.live()["events"] == 0
    assert caplog.records == []


def test_event_loop_closed_before_call_ends_are_reported_keeps_no_objects(cuda: FakeCuda, device: Device) -> None:
    kept = TrackedObjects()
    stream = device.stream()
    loop = asyncio.new_event_loop()
    busy = threading.Event()

    async def main() -> weakref.ref[Any]:
        return weakref.ref(launch_call(device, stream, lambda: busy.wait(10) and None, keep=kept.new())[0])

    launched = loop.run_until_complete(main())
    busy.set()
    stopped = threading.Event()
    device._launcher.put(lambda: waiter_of(device, stream).stop(stopped.set))
    assert stopped.wait(10)
    loop.close()
    gc.collect()
    assert launched() is None
    assert len(kept.freed_in) == 1
    assert device.close(10)
    assert cuda.live()["events"] == 0


def test_event_loop_closed_while_a_batch_is_reported_keeps_no_objects(cuda: FakeCuda, device: Device) -> None:
    kept = TrackedObjects()
    stream = device.stream()
    loop = asyncio.new_event_loop()
    batch = Batch(cuda, device, stream)

    async def main() -> None:
        device.launch(stream, batch, None, lambda error: loop.stop())
        for _ in range(AT_MOST - 1):
            launch_call(device, stream, keep=kept.new())
        await batch.wait_until_queued(AT_MOST)

    loop.run_until_complete(main())
    batch.open()
    loop.run_forever()
    assert 0 < len(kept.freed_in) < AT_MOST - 1
    loop.close()
    waiter = waiter_of(device, stream)
    assert device.close(10)  # the close waits for the thread, which may have held a batch
    gc.collect()
    assert len(kept.freed_in) == AT_MOST - 1
    assert not waiter._left
    assert cuda.live()["events"] == 0


# -- calls of the launcher


async def test_device_run_waits_for_the_launcher_thread_but_run_in_thread_does_not(
    cuda: FakeCuda, device: Device
) -> None:
    busy = threading.Event()
    first = device.run(lambda: busy.wait(10))
    second = device.run(cuda.current)
    assert await device.run_in_thread(threading.get_ident) != threading.get_ident()
    assert not second.done()
    busy.set()
    assert await first
    assert await second == 0


@pytest.mark.parametrize("error", [DeviceError("init", "no"), SystemExit("no")])
async def test_exception_of_a_function_in_the_launcher_thread_is_raised_to_the_caller(
    device: Device, error: BaseException
) -> None:
    def fail() -> None:
        raise error

    for run in (device.run, device.run_in_thread):
        future = run(fail)
        await asyncio.wait([future])
        assert future.exception() is error
    cancelled = device.run(fail)
    cancelled.cancel()
    assert await device.run(lambda: 1) == 1


async def test_process_exit_waits_for_device_functions_in_threads(device: Device, limits: Limits) -> None:
    """Check also that this wait is limited by `device_exit_timeout`."""
    go_on = threading.Event()
    call = device.run_in_thread(lambda: go_on.wait(10))
    limits(device_exit_timeout=0.01)
    module._wait_for_threads()
    assert not call.done()
    limits(device_exit_timeout=10.0)
    threading.Timer(0.02, go_on.set).start()
    module._wait_for_threads()
    assert go_on.is_set()
    assert await call


async def test_process_exit_does_not_wait_for_a_thread_that_could_not_start(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    before = set(module._threads)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", fail)
        with pytest.raises(RuntimeError, match="can't start"):
            device.run_in_thread(lambda: None)
    assert set(module._threads) == before


async def test_result_of_a_cancelled_launcher_function_is_released(
    device: Device, caplog: pytest.LogCaptureFixture
) -> None:
    busy = threading.Event()
    undone: list[tuple[int, bool]] = []
    loop = threading.get_ident()

    def release_result(result: int) -> None:
        undone.append((result, threading.get_ident() != loop))
        raise DeviceError("abort", "no")

    device.run(lambda: busy.wait(10))
    for call in (device.run(lambda: 7, release_result), device.run(lambda: 8)):
        call.cancel()
    busy.set()
    await wait_until(lambda: caplog.records)
    assert undone == [(7, True)]
    assert "ended after its cancellation: DeviceError('abort: no')" in caplog.text


def test_result_of_a_launcher_function_for_a_closed_event_loop_is_released(device: Device) -> None:
    busy = threading.Event()
    undone: list[int] = []

    async def main() -> None:
        device.run(lambda: busy.wait(10) and 7, undone.append)  # type: ignore[arg-type]

    asyncio.run(main())
    busy.set()
    assert device.close(10)
    assert undone == [7]


# -- the end of streams


async def test_device_stream_is_closed_only_after_its_pending_work(cuda: FakeCuda, device: Device) -> None:
    stream = device.stream()
    assert cuda.live()["streams"] == 1
    held = GatedCall(cuda, stream)
    _, ended = launch_call(device, stream, held)
    closing = asyncio.create_task(device.close_stream(stream, 10))
    await wait_until(lambda: hasattr(held, "gate"))
    assert not closing.done()
    with pytest.raises(ValueError, match=f"stream {stream:#x} is closed, or does not belong to CUDA device 0"):
        launch_call(device, stream)
    held.open()
    assert await closing
    assert ended.done()
    assert cuda.live()["streams"] == 0
    before = threading.active_count()
    assert await device.close_stream(device.stream(), 10)
    await wait_until(lambda: threading.active_count() <= before)


async def test_stuck_device_stream_is_abandoned(
    cuda: FakeCuda, device: Device, caplog: pytest.LogCaptureFixture
) -> None:
    kept = TrackedObjects()
    stream = device.stream()
    held = GatedCall(cuda, stream)
    _, ended = launch_call(device, stream, held, keep=kept.new())
    with caplog.at_level(logging.WARNING):
        assert not await device.close_stream(stream, 0.02)
    assert "CUDA device 0: calls on a closed stream have not ended within 0.02 s" in caplog.text
    assert kept.freed_in == []
    await launch_call(device, other := device.stream())[1]
    assert await device.close_stream(other, 10)
    held.open()
    await ended
    assert len(kept.freed_in) == 1


async def test_closed_device_destroys_a_stream_that_is_closing(cuda: FakeCuda, device: Device) -> None:
    stream = device.stream()
    await launch_call(device, stream)[1]
    closing = asyncio.create_task(device.close_stream(stream, 10))
    await asyncio.sleep(0)  # so that the close has started
    assert device.close(10)
    assert cuda.live()["streams"] == 0
    assert await closing


async def test_failed_stream_creation_leaves_no_device_thread(cuda: FakeCuda, device: Device) -> None:
    before = threading.active_count()
    cuda.fail_next("stream_create", "out of memory")
    with pytest.raises(DeviceError, match="out of memory"):
        device.stream()
    await wait_until(lambda: threading.active_count() == before)


async def test_abort_ends_a_waiting_device_call(cuda: FakeCuda) -> None:
    nccl = FakeNccl(cuda)
    devices = [Device.of(cuda, ordinal) for ordinal in range(2)]
    unique_id = nccl.unique_id()
    ends = await asyncio.gather(
        *(device.run(lambda rank=rank: nccl.init(2, unique_id, rank)) for rank, device in enumerate(devices))
    )
    array, stream = FakeArray(cuda, np.ones(4, np.float32)), devices[0].stream()
    launched, ended = launch_call(
        devices[0], stream, lambda: ends[0].all_reduce(array.ptr, array.ptr, 4, FLOAT32, SUM, stream), keep=array
    )
    await launched.on_stream(0)
    assert not ended.done()
    await devices[0].run_in_thread(ends[0].abort)
    await ended
    assert await devices[0].close_stream(stream, 10)


async def test_hanging_communicator_abort_does_not_block_the_closing_of_a_stream(
    cuda: FakeCuda, device: Device
) -> None:
    nccl = FakeNccl(cuda)
    end = await device.run(lambda: nccl.init(1, nccl.unique_id(), 0))
    end.fail("network is gone")
    array, stream = FakeArray(cuda, np.ones(4, np.float32)), device.stream()
    _, ended = launch_call(
        device, stream, lambda: end.all_reduce(array.ptr, array.ptr, 4, FLOAT32, SUM, stream), keep=array
    )
    nccl.abort_hangs = True
    aborting = device.run_in_thread(end.abort)
    assert not await device.close_stream(stream, 0.02)
    assert not aborting.done()
    assert not ended.done()


async def test_stuck_launcher_thread_does_not_block_the_event_loop(cuda: FakeCuda, device: Device) -> None:
    stream = device.stream()
    stuck = threading.Event()
    _, ended = launch_call(device, stream, lambda: stuck.wait(10) and None)
    assert not await device.close_stream(stream, 0.02)
    stuck.set()
    await ended


async def test_closing_a_device_with_a_stuck_stream_takes_bounded_time(cuda: FakeCuda, device: Device) -> None:
    streams = [device.stream(), device.stream()]
    held = GatedCall(cuda, streams[0])
    _, ended = launch_call(device, streams[0], held)
    block_until_launched(device)
    assert not close_devices(0.02)
    with pytest.raises(ValueError, match="is closed"):
        launch_call(device, streams[0])
    held.open()
    await ended
    assert device.close(10)


async def test_closing_a_device_does_not_need_the_event_loop_of_its_calls(cuda: FakeCuda, device: Device) -> None:
    _, ended = launch_call(device, device.stream())
    block_until_launched(device)
    assert device.close(10)
    assert not ended.done()
    await ended


async def test_closing_a_device_with_a_stuck_launcher_thread_takes_bounded_time(cuda: FakeCuda, device: Device) -> None:
    stream = device.stream()
    stuck = threading.Event()
    _, ended = launch_call(device, stream, lambda: stuck.wait(10) and None)
    assert not device.close(0.02)
    stuck.set()
    await ended


async def test_closing_devices_releases_all_cuda_objects_and_memory(cuda: FakeCuda) -> None:
    devices = [Device.of(cuda, ordinal) for ordinal in range(2)]
    for device in devices:
        stream = device.stream()
        await asyncio.gather(*(launch_call(device, stream)[1] for _ in range(20)))
        device.staging.give(device.staging.take(10))
    assert close_devices()
    assert set(cuda.live().values()) == {0}
    assert close_devices()
    assert Device.of(cuda, 0) is not devices[0]


# -- forks and exits


def test_device_calls_in_a_forked_child_raise_an_error(cuda: FakeCuda, device: Device) -> None:
    stream = device.stream()
    out, into = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # the test forks a process with threads on purpose
        child = os.fork()
    if child == 0:
        try:
            for call in (lambda: Device.of(cuda, 0), lambda: Device.of(cuda, 1), device.stream,
                         lambda: device.launch(stream, do_nothing, None, print)):  # fmt: skip
                try:
                    call()
                except RuntimeError as error:
                    os.write(into, str(error)[:39].encode())
        finally:
            os._exit(0)
    os.close(into)
    with os.fdopen(out, "rb") as pipe:
        assert pipe.read().decode() == "this process was forked from one that u" * 4
    os.waitpid(child, 0)
    assert device.stream() != stream, "the parent cannot make streams any more"


def test_device_cannot_be_used_after_a_fork(cuda: FakeCuda, device: Device) -> None:
    module._forked()
    for ordinal in range(2):
        with pytest.raises(RuntimeError, match=r"get_context\('spawn'\)"):
            Device.of(cuda, ordinal)
    device.forked = False


EXIT = """
import asyncio, sys, threading
import numpy as np
from aiocoll.gpu.device import Device
from tests.fakes.arrays import FakeArray
from tests.fakes.cuda import FakeCuda

cuda = FakeCuda()
device = Device.of(cuda, 0)
stream = device.stream()

async def main():
    array = FakeArray(cuda, np.zeros(4))
    device.launch(stream, lambda: cuda.gate(stream), array, print)
    launched = device.launch(stream, lambda: None, array, print)
    await launched.on_stream(0)
    if sys.argv[1] == "stuck":
        device.launch(stream, lambda: threading.Event().wait(), array, print)
    asyncio.get_running_loop().create_task(launched.on_stream(0))

asyncio.run(main())
print("end", flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["waiting", "stuck"])
def test_interpreter_exits_without_errors_while_device_calls_are_pending(how: str) -> None:
    done = subprocess.run(
        [sys.executable, "-X", "dev", "-W", "error", "-c", EXIT, how],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "end\n", "")
