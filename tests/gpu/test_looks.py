"""An await that polls sees itself that the device is done with a call, if nobody else looks for that."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import Callable
from itertools import count

import pytest

from aiocoll import ProcessGroup
from aiocoll.gpu import end_word
from aiocoll.gpu.api import DeviceError
from aiocoll.gpu.device import Device
from aiocoll.gpu.end_word import EndWord

from ..fakes.cuda import FakeCuda
from ..internals import Limits, comm_of, dispatcher_of, waiter_of
from ..ranks import run_ranks, until
from .devices import Gated, hold_up, nothing
from .groups import Gpus, gpus, host, launcher_rests, looped


@pytest.fixture
def device(device: Device) -> Device:
    """Give a device that is ready for calls of NCCL."""
    device.prepare(True)
    return device


Done = Callable[[DeviceError | None], None]


def launch(device: Device, stream: int, done: Done, call: Callable[[], None] = nothing) -> None:
    """Launch a call in this thread."""
    assert device.launch(stream, call, None, done, at_once=True).enqueued


def finish(cuda: FakeCuda, stream: int) -> None:
    """Hold the loop up until the device is done with what is on a stream."""
    event = cuda.event_create()
    cuda.event_record(event, stream)
    cuda.event_synchronize(event)
    cuda.event_destroy(event)


def notice(device: Device, stream: int) -> None:
    """Hold the loop up until it is known elsewhere that all calls on a stream have ended."""
    waiter = waiter_of(device, stream)
    while not waiter.is_idle or waiter._is_awake:
        time.sleep(0)
    hold_up(device)


async def test_calls_that_have_ended_are_reported_though_cuda_is_not_asked(cuda: FakeCuda, device: Device) -> None:
    stream, told, loop = device.stream(), list[int](), asyncio.get_running_loop()
    asked: list[str] = []
    cuda.hooks.append(lambda call: asked.append(call) if threading.current_thread() is thread else None)
    thread = threading.current_thread()
    assert device.look(stream, loop) is None, "there is nothing to look for"
    for number in range(5):
        launch(device, stream, lambda _, number=number: told.append(number))  # type: ignore[misc]
        finish(cuda, stream)
        assert asked
        asked.clear()
        assert device.look(stream, loop) is True
        assert told == list(range(number + 1))
        assert asked == []
    await asyncio.sleep(0)
    assert waiter_of(device, stream).is_idle
    assert not waiter_of(device, stream)._is_awake


async def test_what_has_not_ended_is_left_to_the_thread(cuda: FakeCuda, device: Device) -> None:
    stream, loop = device.stream(), asyncio.get_running_loop()
    over = loop.create_future()
    held = Gated(cuda, stream)
    launch(device, stream, over.set_result, held)
    assert device.look(stream, loop) is False
    await until(lambda: waiter_of(device, stream)._is_awake)
    assert device.look(stream, loop) is None
    held.open()
    await over


async def test_the_device_writes_only_behind_a_call_that_has_none_before_it(cuda: FakeCuda, device: Device) -> None:
    """To write takes time: of many calls in a row, only the first is looked for."""
    stream, told, loop = device.stream(), list[int](), asyncio.get_running_loop()
    for number in range(5):
        launch(device, stream, lambda _, number=number: told.append(number))  # type: ignore[misc]
    finish(cuda, stream)
    assert cuda.calls["stream_write"] == 1
    assert device.look(stream, loop) is True
    assert told == [0]
    assert device.look(stream, loop) is None
    await until(lambda: told == list(range(5)))
    other, held = loop.create_future(), Gated(cuda, stream)
    notice(device, stream)
    device.launch(stream, held, None, other.set_result)  # in the launcher, which looks itself
    await until(lambda: waiter_of(device, stream)._is_awake)
    held.open()
    await other
    assert cuda.calls["stream_write"] == 1


async def test_what_the_thread_has_found_is_reported_first(cuda: FakeCuda, device: Device) -> None:
    stream, told, loop = device.stream(), list[int](), asyncio.get_running_loop()
    device.launch(stream, nothing, None, lambda _: told.append(1))
    notice(device, stream)
    launch(device, stream, lambda _: told.append(2))
    finish(cuda, stream)
    assert device.look(stream, loop) is None
    assert told == []
    await until(lambda: told == [1, 2])


async def test_a_stream_that_is_closed_is_not_looked_at(device: Device) -> None:
    stream = device.stream()
    assert await device.close_stream(stream, 10)
    assert device.look(stream, asyncio.get_running_loop()) is None


@pytest.mark.parametrize("why", ["refused", "nobody polls", "not ready"])
async def test_a_device_that_cannot_write_is_waited_for_by_the_thread(why: str, cuda: FakeCuda) -> None:
    device = Device.of(cuda, 0)
    if why != "not ready":
        device.prepare(why == "refused")
    if why == "refused":
        cuda.fail_next("stream_write", "operation not supported")
    stream, loop = device.stream(), asyncio.get_running_loop()
    for _ in range(2):
        over = loop.create_future()
        launch(device, stream, over.set_result)
        finish(cuda, stream)
        assert device.look(stream, loop) is None
        assert await over is None
        notice(device, stream)
    assert cuda.calls["stream_write"] == (why == "refused")


async def test_an_error_of_the_device_is_found_by_the_thread(cuda: FakeCuda, device: Device) -> None:
    stream, loop = device.stream(), asyncio.get_running_loop()
    over = loop.create_future()
    held = Gated(cuda, stream)
    launch(device, stream, over.set_result, held)
    cuda.fail("it is broken")
    held.open()
    assert device.look(stream, loop) is False
    assert "it is broken" in str(await over)


async def test_an_earlier_call_on_another_stream_hides_a_later_one(cuda: FakeCuda, device: Device) -> None:
    """The word is the device's: what was not seen is found by the thread."""
    first, second, loop = device.stream(), device.stream(), asyncio.get_running_loop()
    held = Gated(cuda, first)
    ends = [loop.create_future() for _ in range(2)]
    launch(device, first, ends[0].set_result, held)
    launch(device, second, ends[1].set_result)
    finish(cuda, second)
    held.open()
    finish(cuda, first)
    assert device.look(second, loop) is False
    assert device.look(first, loop) is True
    await asyncio.gather(*ends)


async def test_a_device_that_refuses_to_write_keeps_what_it_was_to_write_before(cuda: FakeCuda, device: Device) -> None:
    first, second, loop = device.stream(), device.stream(), asyncio.get_running_loop()
    held = Gated(cuda, first)
    ends = [loop.create_future() for _ in range(2)]
    launch(device, first, ends[0].set_result, held)
    locked = cuda.live()["pinned"]
    cuda.fail_next("stream_write", "out of memory")
    launch(device, second, ends[1].set_result)
    gc.collect()
    assert cuda.live()["pinned"] == locked
    held.open()
    finish(cuda, first)
    assert device.look(first, loop) is True
    await asyncio.gather(*ends)


def test_numbers_begin_again_and_none_is_0(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(end_word, "_MOST", 3)
    word, stream = EndWord(cuda), cuda.stream_create()
    assert word.follow(stream) == 0
    word.lock()
    numbers = []
    for _ in range(5):
        numbers.append(word.follow(stream))
        finish(cuda, stream)
        assert [number for number in range(5) if word.is_last_number(number)] == numbers[-1:]
    assert numbers == [1, 2, 3, 1, 2]
    word.free()
    assert not word.is_last_number(2)


def test_the_ends_of_another_loop_are_posted_to_it(cuda: FakeCuda, device: Device) -> None:
    stream, told = device.stream(), list[str]()
    launched, looked = threading.Event(), threading.Event()

    async def other() -> None:
        over = asyncio.get_running_loop().create_future()
        launch(device, stream, over.set_result)
        finish(cuda, stream)
        launched.set()
        assert looked.wait(10)
        assert not over.done()
        await over
        told.append("other")

    async def one() -> None:
        assert launched.wait(10)
        assert device.look(stream, asyncio.get_running_loop())
        assert told == []
        looked.set()

    thread = threading.Thread(target=lambda: asyncio.run(other()))
    thread.start()
    asyncio.run(one())
    thread.join(10)
    assert told == ["other"]


def slow_clock(pg: ProcessGroup) -> None:
    """Let an await poll for a million readings of the clock."""
    comm = comm_of(pg)
    reading = count()

    def ticks() -> float:
        time.sleep(0)  # the kernels of the fake need the interpreter
        return next(reading) * 1e-10

    comm.runtime.ticks = ticks
    comm.polling._spin = 1e-4


@pytest.fixture
def quiet(limits: Limits) -> None:
    """Let the launcher have nothing else to do than calls."""
    limits(device_ask_every=1000)


async def rest(pg: ProcessGroup, gpu: Gpus) -> None:
    """Wait until the launcher has nothing to do, and the thread that waits for NCCL's stream sleeps."""
    await launcher_rests(pg, gpu)
    communicator = dispatcher_of(pg).device_calls.state.communicator  # type: ignore[union-attr]
    waiter = waiter_of(gpu.engine(pg.rank()), communicator.stream)  # type: ignore[union-attr]
    await until(lambda: not waiter._is_awake)


@pytest.mark.usefixtures("quiet")
async def test_an_await_ends_in_the_turn_of_its_call() -> None:
    async def body(pg: ProcessGroup, gpu: Gpus) -> None:
        tensor = await looped(pg, gpu)
        slow_clock(pg)
        turns: list[int] = []
        for number in range(5):
            await rest(pg, gpu)
            asyncio.get_running_loop().call_soon(turns.append, number)
            await pg.allreduce(tensor)
            assert len(turns) == 0, "it has been suspended"
            await asyncio.sleep(0)
            turns.clear()
        assert host(tensor).tolist() == [1.0] * 3
        assert not comm_of(pg).polling.lookers

    with gpus(1) as gpu:
        await run_ranks(1, body, gpu)
        assert gpu.cuda.disturbed == []


@pytest.mark.usefixtures("quiet")
async def test_a_loop_does_not_look_while_a_thread_waits() -> None:
    async def body(pg: ProcessGroup, gpu: Gpus) -> None:
        tensor, polling = await looped(pg, gpu), comm_of(pg).polling
        await rest(pg, gpu)
        gate = gpu.cuda.gate(0)
        work = pg.allreduce(tensor)
        polling.look()
        assert polling.lookers, "the thread has not been woken yet"
        await asyncio.sleep(0)
        polling.look()
        assert not polling.lookers
        gate.open()
        await work

    with gpus(1) as gpu:
        await run_ranks(1, body, gpu)


@pytest.mark.usefixtures("quiet")
async def test_a_group_that_is_closed_does_not_look() -> None:
    async def body(pg: ProcessGroup, gpu: Gpus) -> None:
        sub = await pg.split_group([list(range(pg.size()))])
        assert sub is not None
        tensor = await looped(sub, gpu)
        await rest(sub, gpu)
        lookers = comm_of(pg).polling.lookers
        work = sub.allreduce(tensor)
        assert lookers
        await work
        await sub.shutdown()
        assert not lookers

    with gpus(2) as gpu:
        await run_ranks(2, body, gpu)
