"""Polling of the end word: a number in host memory that the device writes at the end of a call."""

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
from ..ranks import run_ranks, wait_until
from .devices import GatedCall, block_until_launched, do_nothing
from .groups import Gpus, gpus, host, repeat_allreduce, run_with_gpus, wait_for_idle_launcher


@pytest.fixture
def device(device: Device) -> Device:
    """Return a device that is prepared to write end words."""
    device.prepare(True)
    return device


Done = Callable[[DeviceError | None], None]


def launch(device: Device, stream: int, done: Done, call: Callable[[], None] = do_nothing) -> None:
    """Launch a call in this thread, without the launcher thread."""
    assert device.launch(stream, call, None, done, at_once=True).enqueued


def finish(cuda: FakeCuda, stream: int) -> None:
    """Block the event loop until the work on a stream is done."""
    event = cuda.event_create()
    cuda.event_record(event, stream)
    cuda.event_synchronize(event)
    cuda.event_destroy(event)


def wait_until_seen(device: Device, stream: int) -> None:
    """Block the event loop until the completion thread has seen the ends of all calls on a stream."""
    waiter = waiter_of(device, stream)
    while not waiter.is_idle or waiter._is_awake:
        time.sleep(0)
    block_until_launched(device)


async def test_polling_the_end_word_reports_ended_calls_without_a_cuda_query(cuda: FakeCuda, device: Device) -> None:
    stream, reported, loop = device.stream(), list[int](), asyncio.get_running_loop()
    queries: list[str] = []
    cuda.hooks.append(lambda call: queries.append(call) if threading.current_thread() is thread else None)
    thread = threading.current_thread()
    assert device.look(stream, loop) is None, "the device found a word to poll on an idle stream"
    for number in range(5):
        launch(device, stream, lambda _, number=number: reported.append(number))  # type: ignore[misc]
        finish(cuda, stream)
        assert queries
        queries.clear()
        assert device.look(stream, loop) is True
        assert reported == list(range(number + 1))
        assert queries == []
    await asyncio.sleep(0)
    assert waiter_of(device, stream).is_idle
    assert not waiter_of(device, stream)._is_awake


async def test_end_of_an_unfinished_call_is_detected_by_the_completion_thread(cuda: FakeCuda, device: Device) -> None:
    stream, loop = device.stream(), asyncio.get_running_loop()
    ended = loop.create_future()
    held = GatedCall(cuda, stream)
    launch(device, stream, ended.set_result, held)
    assert device.look(stream, loop) is False
    await wait_until(lambda: waiter_of(device, stream)._is_awake)
    assert device.look(stream, loop) is None
    held.open()
    await ended


async def test_device_writes_its_end_word_only_after_the_first_of_consecutive_calls(
    cuda: FakeCuda, device: Device
) -> None:
    """Check that several consecutive calls need only one write, because a write takes time."""
    stream, reported, loop = device.stream(), list[int](), asyncio.get_running_loop()
    for number in range(5):
        launch(device, stream, lambda _, number=number: reported.append(number))  # type: ignore[misc]
    finish(cuda, stream)
    assert cuda.calls["stream_write"] == 1
    assert device.look(stream, loop) is True
    assert reported == [0]
    assert device.look(stream, loop) is None
    await wait_until(lambda: reported == list(range(5)))
    other, held = loop.create_future(), GatedCall(cuda, stream)
    wait_until_seen(device, stream)
    device.launch(stream, held, None, other.set_result)  # the launcher thread launches this call and polls for its end
    await wait_until(lambda: waiter_of(device, stream)._is_awake)
    held.open()
    await other
    assert cuda.calls["stream_write"] == 1


async def test_call_ends_found_by_the_completion_thread_are_reported_first(cuda: FakeCuda, device: Device) -> None:
    stream, reported, loop = device.stream(), list[int](), asyncio.get_running_loop()
    device.launch(stream, do_nothing, None, lambda _: reported.append(1))
    wait_until_seen(device, stream)
    launch(device, stream, lambda _: reported.append(2))
    finish(cuda, stream)
    assert device.look(stream, loop) is None
    assert reported == []
    await wait_until(lambda: reported == [1, 2])


async def test_closed_device_stream_is_not_polled(device: Device) -> None:
    stream = device.stream()
    assert await device.close_stream(stream, 10)
    assert device.look(stream, asyncio.get_running_loop()) is None


@pytest.mark.parametrize("why", ["refused", "no polling", "not ready"])
async def test_completion_thread_detects_call_ends_if_the_device_cannot_write_end_words(
    why: str, cuda: FakeCuda
) -> None:
    device = Device.of(cuda, 0)
    if why != "not ready":
        device.prepare(why == "refused")
    if why == "refused":
        cuda.fail_next("stream_write", "operation not supported")
    stream, loop = device.stream(), asyncio.get_running_loop()
    for _ in range(2):
        ended = loop.create_future()
        launch(device, stream, ended.set_result)
        finish(cuda, stream)
        assert device.look(stream, loop) is None
        assert await ended is None
        wait_until_seen(device, stream)
    assert cuda.calls["stream_write"] == (why == "refused")


async def test_device_error_is_found_by_the_completion_thread(cuda: FakeCuda, device: Device) -> None:
    stream, loop = device.stream(), asyncio.get_running_loop()
    ended = loop.create_future()
    held = GatedCall(cuda, stream)
    launch(device, stream, ended.set_result, held)
    cuda.fail("it is broken")
    held.open()
    assert device.look(stream, loop) is False
    assert "it is broken" in str(await ended)


async def test_overwritten_end_word_of_another_stream_is_found_by_the_completion_thread(
    cuda: FakeCuda, device: Device
) -> None:
    """Let two streams share the end word of their device, so that the later end overwrites the earlier one."""
    first, second, loop = device.stream(), device.stream(), asyncio.get_running_loop()
    held = GatedCall(cuda, first)
    ends = [loop.create_future() for _ in range(2)]
    launch(device, first, ends[0].set_result, held)
    launch(device, second, ends[1].set_result)
    finish(cuda, second)
    held.open()
    finish(cuda, first)
    assert device.look(second, loop) is False
    assert device.look(first, loop) is True
    await asyncio.gather(*ends)


async def test_refused_end_word_write_does_not_free_the_memory_of_earlier_writes(
    cuda: FakeCuda, device: Device
) -> None:
    first, second, loop = device.stream(), device.stream(), asyncio.get_running_loop()
    held = GatedCall(cuda, first)
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


def test_end_word_numbers_wrap_around_and_skip_zero(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_poll_posts_call_ends_of_another_event_loop_to_that_loop(cuda: FakeCuda, device: Device) -> None:
    stream, reported = device.stream(), list[str]()
    launched, looked = threading.Event(), threading.Event()

    async def other() -> None:
        ended = asyncio.get_running_loop().create_future()
        launch(device, stream, ended.set_result)
        finish(cuda, stream)
        launched.set()
        assert looked.wait(10)
        assert not ended.done()
        await ended
        reported.append("other")

    async def one() -> None:
        assert launched.wait(10)
        assert device.look(stream, asyncio.get_running_loop())
        assert reported == []
        looked.set()

    thread = threading.Thread(target=lambda: asyncio.run(other()))
    thread.start()
    asyncio.run(one())
    thread.join(10)
    assert reported == ["other"]


def slow_clock(pg: ProcessGroup) -> None:
    """Slow the group's clock down, so that an await can poll a million times before its time limit."""
    comm = comm_of(pg)
    reading = count()

    def ticks() -> float:
        time.sleep(0)  # yield the GIL to the threads of the fake kernels
        return next(reading) * 1e-10

    comm.runtime.ticks = ticks
    comm.polling._spin = 1e-4


@pytest.fixture
def no_error_queries(limits: Limits) -> None:
    """Disable NCCL error queries, so that the launcher thread only launches calls."""
    limits(device_check_interval=1000)


async def wait_until_idle(pg: ProcessGroup, gpu: Gpus) -> None:
    """Wait until the launcher thread is idle and the completion thread sleeps."""
    await wait_for_idle_launcher(pg, gpu)
    communicator = dispatcher_of(pg).device_calls.state.communicator  # type: ignore[union-attr]
    waiter = waiter_of(gpu.shared_device(pg.rank()), communicator.stream)  # type: ignore[union-attr]
    await wait_until(lambda: not waiter._is_awake)


@pytest.mark.usefixtures("no_error_queries")
async def test_await_of_a_short_device_call_polls_and_ends_in_the_same_loop_iteration() -> None:
    async def body(pg: ProcessGroup, gpu: Gpus) -> None:
        tensor = await repeat_allreduce(pg, gpu)
        slow_clock(pg)
        turns: list[int] = []
        for number in range(5):
            await wait_until_idle(pg, gpu)
            asyncio.get_running_loop().call_soon(turns.append, number)
            await pg.allreduce(tensor)
            assert len(turns) == 0, "the await was suspended"
            await asyncio.sleep(0)
            turns.clear()
        assert host(tensor).tolist() == [1.0] * 3
        assert not comm_of(pg).polling.lookers

    with gpus(1) as gpu:
        await run_ranks(1, body, gpu)
        assert gpu.cuda.disturbed == []


@pytest.mark.usefixtures("no_error_queries")
async def test_event_loop_does_not_poll_while_the_completion_thread_waits() -> None:
    async def body(pg: ProcessGroup, gpu: Gpus) -> None:
        tensor, polling = await repeat_allreduce(pg, gpu), comm_of(pg).polling
        await wait_until_idle(pg, gpu)
        gate = gpu.cuda.gate(0)
        work = pg.allreduce(tensor)
        polling.look()
        assert polling.lookers, "the completion thread was woken too early"
        await asyncio.sleep(0)
        polling.look()
        assert not polling.lookers
        gate.open()
        await work

    await run_with_gpus(1, body)


@pytest.mark.usefixtures("no_error_queries")
async def test_closed_group_does_not_poll_the_device() -> None:
    async def body(pg: ProcessGroup, gpu: Gpus) -> None:
        sub = await pg.split_group([list(range(pg.size()))])
        assert sub is not None
        tensor = await repeat_allreduce(sub, gpu)
        await wait_until_idle(sub, gpu)
        lookers = comm_of(pg).polling.lookers
        work = sub.allreduce(tensor)
        assert lookers
        await work
        await sub.shutdown()
        assert not lookers

    await run_with_gpus(2, body)
