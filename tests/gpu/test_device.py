"""What is launched on a device: its order, who waits for whom, and how long references live."""

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
from ..ranks import until
from .devices import Batch, Gated, Kept, begin, hold_up, nothing


async def test_calls_are_launched_done_and_told_in_their_order(cuda: FakeCuda, device: Device) -> None:
    launched: list[int] = []
    ran: list[int] = []
    told: list[int] = []
    threads: set[int] = set()
    stream = device.stream()

    def call(number: int) -> None:
        threads.add(threading.get_ident())
        assert cuda.current() == 0
        launched.append(number)
        cuda.kernel(stream, partial(ran.append, number))

    for number in range(300):
        device.launch(stream, partial(call, number), None, lambda error, number=number: told.append(number))
    _, last = begin(device, stream)
    await last
    assert launched == ran == told == list(range(300))
    assert len(threads) == 1
    assert threading.get_ident() not in threads


async def test_the_end_is_told_when_the_device_is_done_and_on_stream_when_it_is_enqueued(
    cuda: FakeCuda, device: Device
) -> None:
    comm, user = device.stream(), cuda.stream_create()
    held = Gated(cuda, comm)
    launched, ended = begin(device, comm, held, before=user)
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
    await launched.on_stream(user)  # it has ended: nothing to wait for
    cuda.stream_synchronize(user)


async def test_what_is_on_the_callers_stream_at_the_call_comes_first(cuda: FakeCuda, device: Device) -> None:
    comm, user = device.stream(), cuda.stream_create()
    ran: list[str] = []
    before = cuda.gate(user)
    cuda.kernel(user, lambda: ran.append("before"))
    launched, ended = begin(device, comm, lambda: cuda.kernel(comm, lambda: ran.append("call")), before=user)
    after = cuda.gate(user)
    await until(lambda: launched.enqueued)
    assert ran == []
    before.open()
    await ended
    assert ran == ["before", "call"]
    after.open()


async def test_a_call_may_wait_for_nothing(cuda: FakeCuda, device: Device) -> None:
    user = cuda.gate(0)
    _, ended = begin(device, device.stream(), before=None)
    await ended
    user.open()


async def test_the_callers_thread_stays_on_its_device(cuda: FakeCuda) -> None:
    """The default stream is one of each device; an event of one device cannot be recorded on another's."""
    cuda.use(0)
    ordinal, other = 1, Device.of(cuda, 1)
    stream = other.stream()
    gate = cuda.gate(0, device=ordinal)
    ran: list[int] = []
    launched, ended = begin(other, stream, lambda: cuda.kernel(stream, lambda: ran.append(cuda.calls["use"])))
    assert cuda.current() == 0
    await launched.on_stream(0)
    assert cuda.current() == 0
    assert ran == []
    gate.open()
    await ended
    assert len(ran) == 1
    cuda.fail("broken", device=ordinal)
    with pytest.raises(DeviceError, match="broken"):
        begin(other, stream)
    assert cuda.current() == 0


async def test_a_call_that_is_launched_later_comes_after_a_mark(cuda: FakeCuda, device: Device) -> None:
    stream = device.stream()
    ran: list[str] = []
    first = cuda.gate(0)
    mark, unused = device.mark(0), device.mark(0)
    second = cuda.gate(0)

    def call() -> None:
        device.make_streams_wait([mark], stream)
        cuda.kernel(stream, lambda: ran.append("call"))

    launched, ended = begin(device, stream, call, before=None)
    await until(lambda: launched.enqueued)
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


async def test_marks_that_cannot_be_waited_for_are_given_back(cuda: FakeCuda, device: Device) -> None:
    stream = device.stream()
    for _ in range(3):
        marks = [device.mark(0) for _ in range(2)]
        cuda.fail_next("stream_wait", "busy")
        _, ended = begin(device, stream, partial(device.make_streams_wait, marks, stream), before=None)
        with pytest.raises(DeviceError, match="busy"):
            await ended
    assert cuda.live()["events"] <= 3


async def test_nothing_is_launched_behind_a_stream_that_is_captured(cuda: FakeCuda, device: Device) -> None:
    stream = device.stream()
    cuda.capture(0, True)
    for call in (partial(begin, device, stream), partial(device.mark, 0), partial(device.check_capture, 0)):
        with pytest.raises(RuntimeError, match="call them before the capture begins"):
            call()
    cuda.capture(0, False)
    device.check_capture(0)
    await begin(device, stream)[1]


def test_without_a_loop_nothing_is_launched(cuda: FakeCuda, device: Device) -> None:
    stream = device.stream()
    with pytest.raises(RuntimeError, match="no running event loop"):
        device.launch(stream, nothing, None, lambda error: None)
    assert cuda.live()["events"] == 0


# -- on_stream


async def test_on_stream_waits_for_a_launcher_that_is_busy(cuda: FakeCuda, device: Device) -> None:
    stream = device.stream()
    busy = threading.Event()
    begin(device, stream, lambda: busy.wait(10) and None)
    launched, ended = begin(device, stream)
    waiting = [asyncio.ensure_future(launched.on_stream(0)) for _ in range(3)]
    await asyncio.sleep(0)
    waiting[1].cancel()
    await asyncio.sleep(0)
    assert [each.done() for each in waiting] == [False, True, False]
    busy.set()
    await waiting[0]
    await waiting[2]
    await ended


async def test_on_stream_hears_of_a_launch_in_its_midst(cuda: FakeCuda, device: Device) -> None:
    stream = device.stream()
    busy = threading.Event()
    begin(device, stream, lambda: busy.wait(10) and None)
    launched, ended = begin(device, stream)

    class Wanted(list[Any]):
        """Lets the launcher go, and goes on only when it is through."""

        def append(self, waiting: Any) -> None:
            busy.set()
            while not launched.enqueued:
                time.sleep(0)
            super().append(waiting)

    launched._wanted = Wanted()
    await launched.on_stream(0)
    await ended


# -- who finds out


async def test_a_short_call_ends_without_a_thread_that_waits(cuda: FakeCuda, device: Device) -> None:
    stream = device.stream()
    for _ in range(10):
        await begin(device, stream)[1]
    assert cuda.calls["event_done"] == 10
    assert cuda.calls["event_synchronize"] == 0


async def test_the_launcher_looks_no_longer_when_it_is_wanted(cuda: FakeCuda, device: Device, limits: Limits) -> None:
    looks = 1 << 14  # a second or more
    limits(device_looks=looks)
    stream = device.stream()
    held = Gated(cuda, stream)
    launched, ended = begin(device, stream, held)
    await until(lambda: launched.enqueued and cuda.calls["event_done"])
    assert cuda.calls["event_synchronize"] == 0
    other, done = begin(device, device.stream())
    await done
    assert other.enqueued
    assert cuda.calls["event_done"] < looks
    await until(lambda: cuda.calls["event_synchronize"])
    held.open()
    await ended


async def test_what_comes_while_the_thread_waits_is_left_to_it(cuda: FakeCuda, device: Device) -> None:
    stream = device.stream()
    held = Gated(cuda, stream)
    first, second = begin(device, stream, held)[1], begin(device, stream)[1]
    await until(lambda: cuda.calls["event_synchronize"])
    looks = cuda.calls["event_done"]
    third = begin(device, stream)[1]
    await begin(device, device.stream())[1]
    assert cuda.calls["event_done"] == looks + 1, "at that of another stream"
    held.open()
    await third
    assert first.done()
    assert second.done()
    waiter = waiter_of(device, stream)
    await until(lambda: not waiter._is_awake)
    waits = cuda.calls["event_synchronize"]
    await begin(device, stream)[1]
    assert cuda.calls["event_synchronize"] == waits


async def at_once(device: Device, stream: int, calls: list[int], count: int) -> list[asyncio.Future[None]]:
    """Launch calls in this thread, which `calls` notes."""
    ended = [asyncio.get_running_loop().create_future() for _ in range(count)]
    for each in ended:
        call = lambda: calls.append(threading.get_ident())  # noqa: E731
        device.launch(stream, call, None, each.set_result, at_once=True)
    return ended


async def test_a_loop_does_not_overtake_what_the_launcher_is_about_to_call(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock, go_on = threading.Lock(), threading.Event()

    class Late:
        """A lock that the launcher takes late."""

        acquire, release = lock.acquire, lock.release

        def __enter__(self) -> None:
            assert go_on.wait(10)
            lock.acquire()

        def __exit__(self, *_: object) -> None:
            lock.release()

    monkeypatch.setattr(device._launcher, "_calling", Late())
    stream, called = device.stream(), list[int]()
    over = asyncio.get_running_loop().create_future()
    device.launch(stream, partial(called.append, 1), None, lambda _: None)
    device.launch(stream, partial(called.append, 2), None, over.set_result, at_once=True)
    go_on.set()
    await over
    assert called == [1, 2]


async def test_calls_that_a_turn_launches_wake_the_thread_when_it_is_over(
    cuda: FakeCuda, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it would want the interpreter while they are launched."""
    stream, wakes = device.stream(), list[int]()
    waiter = waiter_of(device, stream)
    waken = waiter._wake_thread
    monkeypatch.setattr(waiter, "_wake_thread", lambda: (wakes.append(len(calls)), waken()))
    for several in (1, 5, 5, 1):
        await until(lambda: not waiter._is_awake)
        wakes.clear()
        calls: list[int] = []
        await asyncio.gather(*await at_once(device, stream, calls, several))
        assert set(calls) == {threading.get_ident()}
        assert wakes[0] == several


def test_a_loop_that_is_held_up_does_not_hide_the_ends_of_another(cuda: FakeCuda, device: Device) -> None:
    stream = device.stream()
    go_on = threading.Event()
    told: list[str] = []

    async def held_up() -> None:
        _, ended = begin(device, stream)
        hold_up(device)
        other.start()
        assert go_on.wait(10)
        await ended
        told.append("held up")

    async def loop() -> None:
        await begin(device, stream)[1]
        told.append("other")
        go_on.set()

    other = threading.Thread(target=lambda: asyncio.run(loop()))
    asyncio.run(held_up())
    other.join(10)
    assert told == ["other", "held up"]


# -- references


async def test_references_live_until_the_device_is_done_though_nobody_waits(cuda: FakeCuda, device: Device) -> None:
    kept = Kept()
    stream = device.stream()
    held = Gated(cuda, stream)

    async def wait() -> None:
        first, second = kept.new(), kept.new()
        begin(device, stream, held)
        _, ended = begin(device, stream, partial(id, first), keep=(first, second))
        del first, second
        await ended

    waiting = asyncio.create_task(wait())
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    del waiting
    gc.collect()
    assert kept.gone == []
    await until(lambda: hasattr(held, "gate"))
    held.open()
    await until(lambda: len(kept.gone) == 2)
    await begin(device, stream)[1]


async def test_the_last_reference_ends_in_the_loop(cuda: FakeCuda, device: Device) -> None:
    kept = Kept()
    stream = device.stream()
    for _ in range(50):
        array = kept.new()
        _, ended = begin(device, stream, partial(id, array), keep=array)
        del array
        await ended
    assert set(kept.gone) == {threading.get_ident()}
    assert len(kept.gone) == 50


async def test_the_memory_of_an_array_is_there_until_the_device_is_done(cuda: FakeCuda, device: Device) -> None:
    """The fake says so: work on memory that is gone takes the device with it."""
    stream = device.stream()
    array, target = FakeArray(cuda, np.arange(4)), FakeArray(cuda, np.zeros(4, int))
    gate = cuda.gate(0)
    _, ended = begin(device, stream, partial(cuda.copy, target.ptr, array.ptr, 32, stream), keep=array)
    del array
    gc.collect()
    gate.open()
    await ended
    assert list(target.numpy(stream)) == [0, 1, 2, 3]
    assert cuda.live()["memory"] == 32


# -- many


class Counting:
    """A loop that counts how it is called."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.told = 0
        self.turns = 0

    def call_soon_threadsafe(self, call: Callable[..., None], *args: Any) -> None:
        self.told += 1
        self._loop.call_soon_threadsafe(call, *args)

    def call_soon(self, call: Callable[..., None], *args: Any) -> None:
        self.turns += 1
        self._loop.call_soon(call, *args)


async def test_a_batch_wakes_the_loop_once_and_is_told_in_several_turns(cuda: FakeCuda, device: Device) -> None:
    stream = device.stream()
    loop = Counting(asyncio.get_running_loop())
    batch = Batch(cuda, device, stream)
    calls = [begin(device, stream, call) for call in [batch, *[nothing] * (AT_MOST - 1)]]
    await batch.waited_for(AT_MOST)
    for launched, _ in calls:
        launched.loop = loop  # type: ignore[assignment]
    batch.open()
    await asyncio.gather(*(ended for _, ended in calls))
    assert (loop.told, loop.turns) == (1, 2)


@pytest.mark.parametrize("by", ["thread", "launcher"])
async def test_a_batch_that_is_told_in_several_turns_keeps_its_place(cuda: FakeCuda, device: Device, by: str) -> None:
    stream = device.stream()
    waiter, told = waiter_of(device, stream), list[int]()
    batch = Batch(cuda, device, stream)
    more: list[asyncio.Future[None]] = []

    def first(error: object) -> None:
        """Let more come before the rest of this batch, which the thread or the launcher finds has ended."""
        told.append(0)
        while waiter._is_awake:
            time.sleep(0)
        device.launch(stream, nothing, None, lambda error: told.append(AT_MOST))
        more.append(begin(device, stream)[1])
        # What tells of it comes in the loop's queue before the rest does.
        if by == "launcher":
            hold_up(device)
        else:
            ran = threading.Event()
            device._launcher.put(lambda: waiter.stop(ran.set))
            assert ran.wait(10)

    device.launch(stream, batch, None, first)
    for number in range(1, AT_MOST):
        device.launch(stream, nothing, None, lambda error, number=number: told.append(number))
    await batch.waited_for(AT_MOST)
    batch.open()
    await until(lambda: more)
    await more[0]
    assert told == list(range(AT_MOST + 1))


async def test_thousands_of_calls_leave_nothing(cuda: FakeCuda, device: Device) -> None:
    stream = device.stream()
    alive: weakref.WeakSet[Launched] = weakref.WeakSet()

    async def several(number: int) -> None:
        calls = []
        for _ in range(number):
            block = device.staging.take(100)
            launched, ended = begin(device, stream, nothing, keep=block)
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
    await begin(device, stream)[1]  # the threads hold on to the last one they have seen
    assert len(alive) <= 2


async def test_the_loop_turns_while_a_kernel_runs(cuda: FakeCuda, device: Device) -> None:
    stream = device.stream()
    held: list[float] = []
    turns = 0
    gc.disable()  # the garbage of other tests
    try:
        _, ended = begin(device, stream, lambda: cuda.kernel(stream, nothing, seconds=0.2))
        while not ended.done():
            # The time of this thread: that of other processes is not ours.
            began = time.thread_time()
            await asyncio.sleep(0)
            held.append(time.thread_time() - began)
            turns += 1
        await ended
    finally:
        gc.enable()
    assert turns > 200
    assert max(held) <= 1e-3


# -- several loops and threads


def test_loops_of_several_threads_share_a_device(cuda: FakeCuda, device: Device) -> None:
    streams = [device.stream(), device.stream()]
    before = threading.active_count()
    told: list[list[int]] = [[] for _ in range(4)]

    async def loop(mine: list[int], stream: int) -> None:
        me = threading.get_ident()
        assert Device.of(cuda, 0) is device
        for number in range(100):
            ended = asyncio.get_running_loop().create_future()

            def done(error: object, number: int = number, ended: asyncio.Future[None] = ended) -> None:
                assert threading.get_ident() == me
                mine.append(number)
                ended.set_result(None)

            device.launch(stream, partial(device.make_streams_wait, stream, device.mark(2)), None, done)
            if number % 10 == 9:
                await ended
        assert threading.active_count() <= before + 4 + 6  # the loops, and what the fake plays streams with

    threads = [
        threading.Thread(target=lambda n=n: asyncio.run(loop(told[n], streams[n % 2]))) for n in range(4)
    ]  # fmt: skip
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert told == [list(range(100))] * 4


async def test_streams_do_not_hide_the_ends_of_each_other(cuda: FakeCuda, device: Device) -> None:
    """Else a collective that waits for another rank could wait for ever: that rank may wait for the other stream."""
    first, second = device.stream(), device.stream()
    held = Gated(cuda, first)
    _, later = begin(device, first, held)
    await begin(device, second)[1]
    assert not later.done()
    held.open()
    await later
