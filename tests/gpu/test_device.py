"""Device calls: launch order, waits between streams and threads, detection of their ends, and references."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

from aiocoll.gpu.api import DeviceError
from aiocoll.gpu.device import Device
from aiocoll.gpu.launcher import Launched
from aiocoll.gpu.waiter import AT_MOST

from ..fakes.arrays import FakeArray
from ..fakes.cuda import FakeCuda
from ..internals import Limits, waiter_of
from ..ranks import wait_until
from .devices import Batch, GatedCall, TrackedObjects, block_until_launched, do_nothing, launch_call


async def test_device_calls_are_launched_executed_and_reported_in_the_order_of_the_calls(
    cuda: FakeCuda, device: Device
) -> None:
    launched: list[int] = []
    ran: list[int] = []
    reported: list[int] = []
    threads: set[int] = set()
    stream = device.stream()

    def call(number: int) -> None:
        threads.add(threading.get_ident())
        assert cuda.current() == 0
        launched.append(number)
        cuda.kernel(stream, partial(ran.append, number))

    for number in range(300):
        device.launch(stream, partial(call, number), None, lambda error, number=number: reported.append(number))
    _, last = launch_call(device, stream)
    await last
    assert launched == ran == reported == list(range(300))
    assert len(threads) == 1
    assert threading.get_ident() not in threads


async def test_on_stream_returns_after_the_launch_and_an_await_returns_after_the_device_work(
    cuda: FakeCuda, device: Device
) -> None:
    comm, user = device.stream(), cuda.stream_create()
    held = GatedCall(cuda, comm)
    launched, ended = launch_call(device, comm, held, before=user)
    await launched.on_stream(user)
    assert launched.enqueued
    after = cuda.event_create()
    ran: list[int] = []
    cuda.kernel(user, lambda: ran.append(1))
    cuda.event_record(after, user)
    await asyncio.sleep(0.01)
    assert not ended.done()
    assert not cuda.event_done(after)
    held.open()
    await ended
    cuda.event_synchronize(after)
    assert ran == [1]
    await launched.on_stream(user)  # `on_stream` returns at once, since the call has ended
    cuda.stream_synchronize(user)


async def test_device_call_runs_after_earlier_work_on_the_callers_stream(cuda: FakeCuda, device: Device) -> None:
    comm, user = device.stream(), cuda.stream_create()
    ran: list[str] = []
    before = cuda.gate(user)
    cuda.kernel(user, lambda: ran.append("before"))
    launched, ended = launch_call(device, comm, lambda: cuda.kernel(comm, lambda: ran.append("call")), before=user)
    after = cuda.gate(user)
    await wait_until(lambda: launched.enqueued)
    assert ran == []
    before.open()
    await ended
    assert ran == ["before", "call"]
    after.open()


async def test_device_call_without_a_stream_mark_waits_for_no_stream(cuda: FakeCuda, device: Device) -> None:
    user = cuda.gate(0)
    _, ended = launch_call(device, device.stream(), before=None)
    await ended
    user.open()


async def test_device_call_does_not_change_the_current_device_of_the_callers_thread(cuda: FakeCuda) -> None:
    """Make a call on another device than the current one; the call uses the default stream and events of its device."""
    cuda.use(0)
    ordinal, other = 1, Device.of(cuda, 1)
    stream = other.stream()
    gate = cuda.gate(0, device=ordinal)
    ran: list[int] = []
    launched, ended = launch_call(other, stream, lambda: cuda.kernel(stream, lambda: ran.append(cuda.calls["use"])))
    assert cuda.current() == 0
    await launched.on_stream(0)
    assert cuda.current() == 0
    assert ran == []
    gate.open()
    await ended
    assert len(ran) == 1
    cuda.fail("broken", device=ordinal)
    with pytest.raises(DeviceError, match="broken"):
        launch_call(other, stream)
    assert cuda.current() == 0


async def test_deferred_device_call_runs_after_the_work_before_its_stream_mark(cuda: FakeCuda, device: Device) -> None:
    stream = device.stream()
    ran: list[str] = []
    first = cuda.gate(0)
    mark, unused = device.mark(0), device.mark(0)
    second = cuda.gate(0)

    def call() -> None:
        device.make_streams_wait([mark], stream)
        cuda.kernel(stream, lambda: ran.append("call"))

    launched, ended = launch_call(device, stream, call, before=None)
    await wait_until(lambda: launched.enqueued)
    assert ran == []
    first.open()
    await ended
    assert ran == ["call"]
    second.open()
    device.unmark(unused)
    events = cuda.live()["events"]
    for _ in range(10):
        device.unmark(device.mark(0))
    assert cuda.live()["events"] == events


async def test_stream_marks_are_released_if_waiting_for_them_fails(cuda: FakeCuda, device: Device) -> None:
    stream = device.stream()
    for _ in range(3):
        marks = [device.mark(0) for _ in range(2)]
        cuda.fail_next("stream_wait", "busy")
        _, ended = launch_call(device, stream, partial(device.make_streams_wait, marks, stream), before=None)
        with pytest.raises(DeviceError, match="busy"):
            await ended
    assert cuda.live()["events"] <= 3


async def test_launch_that_would_wait_for_a_captured_stream_is_refused(cuda: FakeCuda, device: Device) -> None:
    stream = device.stream()
    cuda.capture(0, True)
    for call in (partial(launch_call, device, stream), partial(device.mark, 0), partial(device.check_capture, 0)):
        with pytest.raises(RuntimeError, match="call them before the capture begins"):
            call()
    cuda.capture(0, False)
    device.check_capture(0)
    await launch_call(device, stream)[1]


def test_launch_without_a_running_event_loop_is_refused(cuda: FakeCuda, device: Device) -> None:
    stream = device.stream()
    with pytest.raises(RuntimeError, match="no running event loop"):
        device.launch(stream, do_nothing, None, lambda error: None)
    assert cuda.live()["events"] == 0


# -- on_stream


async def test_on_stream_waits_until_a_busy_launcher_thread_has_launched_the_call(
    cuda: FakeCuda, device: Device
) -> None:
    stream = device.stream()
    busy = threading.Event()
    launch_call(device, stream, lambda: busy.wait(10) and None)
    launched, ended = launch_call(device, stream)
    waiting = [asyncio.ensure_future(launched.on_stream(0)) for _ in range(3)]
    await asyncio.sleep(0)
    waiting[1].cancel()
    await asyncio.sleep(0)
    assert [each.done() for each in waiting] == [False, True, False]
    busy.set()
    await waiting[0]
    await waiting[2]
    await ended


async def test_on_stream_detects_a_launch_that_finishes_concurrently(cuda: FakeCuda, device: Device) -> None:
    stream = device.stream()
    busy = threading.Event()
    launch_call(device, stream, lambda: busy.wait(10) and None)
    launched, ended = launch_call(device, stream)

    class LateList(list[Any]):
        """A list whose `append` first lets the launcher finish the launch."""

        def append(self, waiting: Any) -> None:
            busy.set()
            while not launched.enqueued:
                time.sleep(0)
            super().append(waiting)

    launched._wanted = LateList()
    await launched.on_stream(0)
    await ended


# -- detection of ends


async def test_end_of_a_short_device_call_is_detected_without_the_completion_thread(
    cuda: FakeCuda, device: Device
) -> None:
    stream = device.stream()
    for _ in range(10):
        await launch_call(device, stream)[1]
    assert cuda.calls["event_done"] == 10
    assert cuda.calls["event_synchronize"] == 0


async def test_launcher_thread_stops_polling_for_call_ends_when_a_new_call_is_queued(
    cuda: FakeCuda, device: Device, limits: Limits
) -> None:
    looks = 1 << 14  # so many polls take a second or more
    limits(device_poll_count=looks)
    stream = device.stream()
    held = GatedCall(cuda, stream)
    launched, ended = launch_call(device, stream, held)
    await wait_until(lambda: launched.enqueued and cuda.calls["event_done"])
    assert cuda.calls["event_synchronize"] == 0
    other, done = launch_call(device, device.stream())
    await done
    assert other.enqueued
    assert cuda.calls["event_done"] < looks
    await wait_until(lambda: cuda.calls["event_synchronize"])
    held.open()
    await ended


async def test_waiting_completion_thread_also_detects_the_ends_of_later_calls(cuda: FakeCuda, device: Device) -> None:
    stream = device.stream()
    held = GatedCall(cuda, stream)
    first, second = launch_call(device, stream, held)[1], launch_call(device, stream)[1]
    await wait_until(lambda: cuda.calls["event_synchronize"])
    looks = cuda.calls["event_done"]
    third = launch_call(device, stream)[1]
    await launch_call(device, device.stream())[1]
    assert cuda.calls["event_done"] == looks + 1, "the completion thread's stream was queried"
    held.open()
    await third
    assert first.done()
    assert second.done()
    waiter = waiter_of(device, stream)
    await wait_until(lambda: not waiter._is_awake)
    waits = cuda.calls["event_synchronize"]
    await launch_call(device, stream)[1]
    assert cuda.calls["event_synchronize"] == waits


async def launch_at_once(device: Device, stream: int, calls: list[int], count: int) -> list[asyncio.Future[None]]:
    """Launch calls in this thread, each of which appends the thread's id to `calls`; return futures for their ends."""
    ended = [asyncio.get_running_loop().create_future() for _ in range(count)]
    for each in ended:
        call = lambda: calls.append(threading.get_ident())  # noqa: E731
        device.launch(stream, call, None, each.set_result, at_once=True)
    return ended


async def test_call_launched_by_the_event_loop_does_not_overtake_a_queued_call_of_the_launcher(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock, go_on = threading.Lock(), threading.Event()

    class SlowLock:
        """A lock that the launcher thread acquires only after `go_on` is set."""

        acquire, release = lock.acquire, lock.release

        def __enter__(self) -> None:
            assert go_on.wait(10)
            lock.acquire()

        def __exit__(self, *_: object) -> None:
            lock.release()

    monkeypatch.setattr(device._launcher, "_calling", SlowLock())
    stream, called = device.stream(), list[int]()
    ended = asyncio.get_running_loop().create_future()
    device.launch(stream, partial(called.append, 1), None, lambda _: None)
    device.launch(stream, partial(called.append, 2), None, ended.set_result, at_once=True)
    go_on.set()
    await ended
    assert called == [1, 2]


async def test_completion_thread_is_woken_once_at_the_end_of_a_loop_iteration(
    cuda: FakeCuda, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that calls do not wake the completion thread earlier: it would compete with launches for the GIL."""
    stream, wakes = device.stream(), list[int]()
    waiter = waiter_of(device, stream)
    waken = waiter._wake_thread
    monkeypatch.setattr(waiter, "_wake_thread", lambda: (wakes.append(len(calls)), waken()))
    for several in (1, 5, 5, 1):
        await wait_until(lambda: not waiter._is_awake)
        wakes.clear()
        calls: list[int] = []
        await asyncio.gather(*await launch_at_once(device, stream, calls, several))
        assert set(calls) == {threading.get_ident()}
        assert wakes[0] == several


def test_blocked_event_loop_does_not_delay_the_call_ends_of_another_event_loop(cuda: FakeCuda, device: Device) -> None:
    stream = device.stream()
    go_on = threading.Event()
    reported: list[str] = []

    async def wait_in_blocked_loop() -> None:
        _, ended = launch_call(device, stream)
        block_until_launched(device)
        other.start()
        assert go_on.wait(10)
        await ended
        reported.append("held up")

    async def loop() -> None:
        await launch_call(device, stream)[1]
        reported.append("other")
        go_on.set()

    other = threading.Thread(target=lambda: asyncio.run(loop()))
    asyncio.run(wait_in_blocked_loop())
    other.join(10)
    assert reported == ["other", "held up"]


# -- references


async def test_references_of_an_unawaited_call_live_until_the_device_is_done(cuda: FakeCuda, device: Device) -> None:
    kept = TrackedObjects()
    stream = device.stream()
    held = GatedCall(cuda, stream)

    async def wait() -> None:
        first, second = kept.new(), kept.new()
        launch_call(device, stream, held)
        _, ended = launch_call(device, stream, partial(id, first), keep=(first, second))
        del first, second
        await ended

    waiting = asyncio.create_task(wait())
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    del waiting
    gc.collect()
    assert kept.freed_in == []
    await wait_until(lambda: hasattr(held, "gate"))
    held.open()
    await wait_until(lambda: len(kept.freed_in) == 2)
    await launch_call(device, stream)[1]


async def test_last_reference_of_a_device_call_is_released_in_the_event_loop_thread(
    cuda: FakeCuda, device: Device
) -> None:
    kept = TrackedObjects()
    stream = device.stream()
    for _ in range(50):
        array = kept.new()
        _, ended = launch_call(device, stream, partial(id, array), keep=array)
        del array
        await ended
    assert set(kept.freed_in) == {threading.get_ident()}
    assert len(kept.freed_in) == 50


async def test_array_memory_of_a_device_call_lives_until_the_device_is_done(cuda: FakeCuda, device: Device) -> None:
    """Rely on the fake device, which fails if a call uses freed memory."""
    stream = device.stream()
    array, target = FakeArray(cuda, np.arange(4)), FakeArray(cuda, np.zeros(4, int))
    gate = cuda.gate(0)
    _, ended = launch_call(device, stream, partial(cuda.copy, target.ptr, array.ptr, 32, stream), keep=array)
    del array
    gc.collect()
    gate.open()
    await ended
    assert list(target.numpy(stream)) == [0, 1, 2, 3]
    assert cuda.live()["memory"] == 32


# -- many calls


class Counting:
    """An event loop wrapper that counts scheduled callbacks, separately for each scheduling method."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.woken = 0
        self.iterations = 0

    def call_soon_threadsafe(self, call: Callable[..., None], *args: Any) -> None:
        self.woken += 1
        self._loop.call_soon_threadsafe(call, *args)

    def call_soon(self, call: Callable[..., None], *args: Any) -> None:
        self.iterations += 1
        self._loop.call_soon(call, *args)


async def test_batch_of_ended_calls_wakes_the_loop_once_and_is_reported_over_several_iterations(
    cuda: FakeCuda, device: Device
) -> None:
    stream = device.stream()
    loop = Counting(asyncio.get_running_loop())
    batch = Batch(cuda, device, stream)
    calls = [launch_call(device, stream, call) for call in [batch, *[do_nothing] * (AT_MOST - 1)]]
    await batch.wait_until_queued(AT_MOST)
    for launched, _ in calls:
        launched.loop = loop  # type: ignore[assignment]
    batch.open()
    await asyncio.gather(*(ended for _, ended in calls))
    assert (loop.woken, loop.iterations) == (1, 2)


@pytest.mark.parametrize("by", ["thread", "launcher"])
async def test_batch_of_ended_calls_is_reported_before_calls_that_end_later(
    cuda: FakeCuda, device: Device, by: str
) -> None:
    stream = device.stream()
    waiter, reported = waiter_of(device, stream), list[int]()
    batch = Batch(cuda, device, stream)
    more: list[asyncio.Future[None]] = []

    def first(error: object) -> None:
        """Launch more calls, before the rest of the batch is reported."""
        reported.append(0)
        while waiter._is_awake:
            time.sleep(0)
        device.launch(stream, do_nothing, None, lambda error: reported.append(AT_MOST))
        more.append(launch_call(device, stream)[1])
        # Make sure that the report of these calls is in the event loop's queue before the rest of the batch.
        if by == "launcher":
            block_until_launched(device)
        else:
            ran = threading.Event()
            device._launcher.put(lambda: waiter.stop(ran.set))
            assert ran.wait(10)

    device.launch(stream, batch, None, first)
    for number in range(1, AT_MOST):
        device.launch(stream, do_nothing, None, lambda error, number=number: reported.append(number))
    await batch.wait_until_queued(AT_MOST)
    batch.open()
    await wait_until(lambda: more)
    await more[0]
    assert reported == list(range(AT_MOST + 1))


async def test_thousands_of_device_calls_leave_no_objects(cuda: FakeCuda, device: Device) -> None:
    stream = device.stream()
    alive: weakref.WeakSet[Launched] = weakref.WeakSet()

    async def several(number: int) -> None:
        calls = []
        for _ in range(number):
            block = device.staging.take(100)
            launched, ended = launch_call(device, stream, do_nothing, keep=block)
            alive.add(launched)
            ended.add_done_callback(lambda _, block=block: device.staging.give(block))
            calls.append(ended)
        await asyncio.gather(*calls)
        await asyncio.sleep(0)

    await several(50)
    threads, live = threading.active_count(), cuda.live()
    del live["events"]
    for _ in range(100):
        await several(50)
    assert threading.active_count() == threads
    after = cuda.live()
    assert after.pop("events") <= 2 * 50 + 1
    assert after == live
    await launch_call(device, stream)[1]  # make another call, since the threads keep a reference to the last call
    assert len(alive) <= 2


async def test_event_loop_is_not_blocked_while_a_kernel_runs(cuda: FakeCuda, device: Device) -> None:
    stream = device.stream()
    held: list[float] = []
    iterations = 0
    gc.disable()  # so that garbage of other tests is not collected meanwhile
    try:
        _, ended = launch_call(device, stream, lambda: cuda.kernel(stream, do_nothing, seconds=0.2))
        while not ended.done():
            # Use the CPU time of this thread, because other processes do not affect it.
            began = time.thread_time()
            await asyncio.sleep(0)
            held.append(time.thread_time() - began)
            iterations += 1
        await ended
    finally:
        gc.enable()
    assert iterations > 200
    assert max(held) <= 1e-3


# -- several loops and threads


def test_event_loops_in_several_threads_can_share_a_device(cuda: FakeCuda, device: Device) -> None:
    streams = [device.stream(), device.stream()]
    before = threading.active_count()
    reported: list[list[int]] = [[] for _ in range(4)]

    async def loop(own: list[int], stream: int) -> None:
        me = threading.get_ident()
        assert Device.of(cuda, 0) is device
        for number in range(100):
            ended = asyncio.get_running_loop().create_future()

            def done(error: object, number: int = number, ended: asyncio.Future[None] = ended) -> None:
                assert threading.get_ident() == me
                own.append(number)
                ended.set_result(None)

            device.launch(stream, partial(device.make_streams_wait, stream, device.mark(2)), None, done)
            if number % 10 == 9:
                await ended
        assert threading.active_count() <= before + 4 + 6  # 4 threads of the event loops, and 6 of the fake streams

    threads = [
        threading.Thread(target=lambda n=n: asyncio.run(loop(reported[n], streams[n % 2]))) for n in range(4)
    ]  # fmt: skip
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert reported == [list(range(100))] * 4


async def test_stuck_stream_does_not_delay_the_call_ends_of_other_streams(cuda: FakeCuda, device: Device) -> None:
    """Check that a call on one stream ends while another stream is stuck. Otherwise, ranks could deadlock."""
    first, second = device.stream(), device.stream()
    held = GatedCall(cuda, first)
    _, later = launch_call(device, first, held)
    await launch_call(device, second)[1]
    assert not later.done()
    held.open()
    await later
