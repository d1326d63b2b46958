"""`Work`, the awaitable handle of an operation: await, wait, callbacks, futures, cancellation and abort."""

from __future__ import annotations

import asyncio
import gc
import random
import threading
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import numpy as np
import pytest

from aiocoll import CollectiveTimeoutError, GroupError, GroupOptions, ProcessGroup, Recv, Send, testing

from .ranks import parametrize_transports


@pytest.mark.ranks(2)
@parametrize_transports("memory", "unix")
async def test_thousand_works_can_be_awaited_in_reverse_order(pg: ProcessGroup) -> None:
    works = [pg.allreduce(np.full(3, number)) for number in range(1000)]
    assert [work.seq for work in works] == list(range(1, 1001))
    for number, work in reversed(list(enumerate(works))):
        assert (await work == 2 * number).all()


@pytest.mark.ranks(3)
@parametrize_transports("memory", "unix")
async def test_calls_with_keys_match_in_any_order(pg: ProcessGroup) -> None:
    keys = [f"layer{number % 50}" for number in range(200)]
    random.Random(pg.rank()).shuffle(keys)
    works = []
    for place, key in enumerate(keys):
        count = keys[:place].count(key)
        work = pg.allreduce(np.full(2, int(key[5:]) * 10 + count), key=key)
        assert (work.key, work.seq) == (key, count + 1)
        works.append((work, int(key[5:]) * 10 + count))
    for work, value in works:
        assert (await work == 3 * value).all()
    # Calls with keys use no sequence numbers of the group, so the barrier has sequence number 1.
    assert pg.barrier().seq == 1
    await pg.drain()


@pytest.mark.ranks(1)
async def test_timeout_around_a_loop_of_immediately_finished_calls_expires(pg: ProcessGroup) -> None:
    tensor = np.ones(3)
    done = 0

    async def work_on() -> None:
        nonlocal done
        while True:
            await pg.allreduce(tensor)
            done += 1

    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.02):
            await work_on()
    assert done > 3


@pytest.mark.ranks(1)
async def test_awaiting_a_finished_work_does_not_suspend(pg: ProcessGroup) -> None:
    work = pg.allreduce(np.ones(2))
    await work
    await asyncio.sleep(0)
    await work  # only the first await may yield to the loop
    turns = 0

    def count_turn() -> None:
        nonlocal turns
        turns += 1

    suspended = 0
    for _ in range(5):
        asyncio.get_running_loop().call_soon(count_turn)
        turns = 0
        await work
        suspended += turns
        await asyncio.sleep(0)
    assert suspended < 5
    assert await work is work.result()


@pytest.mark.ranks(2)
@parametrize_transports("memory", "unix")
async def test_work_can_have_any_number_of_awaiters(pg: ProcessGroup) -> None:
    tensor = np.ones(10)
    work = pg.broadcast(tensor, 0) if pg.rank() else pg.recv_object(1)
    waiting = [asyncio.ensure_future(work.join()) for _ in range(10)]
    await asyncio.sleep(0)
    waiting[3].cancel()
    if pg.rank():
        await pg.send_object("all wait", 0)
        results = await asyncio.gather(*waiting, return_exceptions=True)
        assert isinstance(results.pop(3), asyncio.CancelledError)
        assert all(each is tensor for each in results)
    else:
        assert set(await asyncio.gather(*(waiting[:3] + waiting[4:]))) == {"all wait"}
        await pg.broadcast(tensor, 0)
    assert waiting[3].cancelled()


@pytest.mark.ranks(2)
async def test_cancelled_await_does_not_stop_the_collective(pg: ProcessGroup) -> None:
    tensor = np.ones(4)
    if pg.rank() == 0:
        work = pg.allreduce(tensor)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await work
        assert pg.pending() == [work]
        await pg.send_object("go", 1)
        await pg.drain()
    else:
        await pg.recv_object(0)
        await pg.allreduce(tensor)
    assert (tensor == 2).all()


@pytest.mark.ranks(2)
async def test_result_of_a_work_is_available_only_after_completion(pg: ProcessGroup) -> None:
    peer = 1 - pg.rank()
    tensor = np.zeros(1)
    work = pg.recv(tensor, peer)
    assert (work.done(), work.is_completed(), work.is_success()) == (False, False, False)
    for early in (work.result, work.exception):
        with pytest.raises(asyncio.InvalidStateError, match="has not ended; await it"):
            early()
    assert repr(work) == f"<Work RECV src={peer} tag=0 pending>"
    await pg.send(np.ones(1), peer)
    await work
    assert (work.done(), work.is_completed(), work.is_success()) == (True, True, True)
    assert work.result() is tensor
    assert work.exception() is None
    assert repr(work) == f"<Work RECV src={peer} tag=0 done>"
    late = pg.recv(tensor, peer, timeout=0.01)
    with pytest.raises(CollectiveTimeoutError):
        await late
    assert (late.done(), late.is_success()) == (True, False)
    assert isinstance(late.exception(), CollectiveTimeoutError)
    with pytest.raises(CollectiveTimeoutError):
        late.result()
    assert (work.op, work.group, work.key) == ("RECV", pg, None)
    keyed = pg.barrier(key="step")
    assert repr(keyed).startswith("<Work BARRIER seq=1 key='step' ")
    await keyed


@pytest.mark.parametrize("debug", ["off", "detail"])
async def test_work_of_a_message_stores_source_and_destination(debug: Any) -> None:
    async def rank(pg: ProcessGroup) -> None:
        peer = 1 - pg.rank()
        works = [
            pg.recv(np.zeros(1), peer, 7),
            pg.recv_object(peer, 8),
            pg.recv_anysource(np.zeros(1), 9),
            pg.recv_object(tag=10),
            pg.send(np.ones(1), peer, 7),
            pg.send_object("x", peer, 8),
        ]
        assert list(map(repr, works[:4])) == [
            f"<Work RECV src={peer} tag=7 pending>",
            f"<Work RECV_OBJECT src={peer} tag=8 pending>",
            "<Work RECV_ANYSOURCE src=any tag=9 pending>",
            "<Work RECV_OBJECT src=any tag=10 pending>",
        ]
        await pg.batch([Send(np.ones(1), peer, 9), Recv(np.zeros(1), peer, 11), Send(np.ones(1), peer, 11)])
        await pg.send_object("y", peer, 10)
        await pg.drain()
        assert list(map(repr, works[2:])) == [
            f"<Work RECV_ANYSOURCE src={peer} tag=9 done>",
            f"<Work RECV_OBJECT src={peer} tag=10 done>",
            f"<Work SEND dst={peer} tag=7 done>",
            f"<Work SEND_OBJECT dst={peer} tag=8 done>",
        ]
        async with pg.coalescing():
            works = [pg.send(np.ones(1), peer, 3), pg.recv(np.zeros(1), peer, 3)]
            assert list(map(repr, works)) == [
                f"<Work SEND dst={peer} tag=3 pending>",
                f"<Work RECV src={peer} tag=3 pending>",
            ]

    await testing.run_ranks(2, rank, options=GroupOptions(debug=debug))


@pytest.mark.ranks(2)
async def test_work_offers_its_result_by_future_coroutine_and_callback(pg: ProcessGroup) -> None:
    called: list[Any] = []
    tensor = np.ones(1)
    work = pg.allreduce(tensor)
    work.add_done_callback(called.append)
    future = work.get_future()
    dropped = work.get_future()
    dropped.cancel()
    async with asyncio.TaskGroup() as group:
        task = group.create_task(work.join())
    assert task.result() is tensor
    done, _ = await asyncio.wait([future])
    assert done.pop().result() is tensor
    work.add_done_callback(called.append)
    assert len(called) < 2, "the callback ran before the next loop iteration"
    await asyncio.sleep(0)
    assert called == [work, work]
    failing = pg.recv(tensor, 1 - pg.rank(), timeout=0.01)
    (error,) = await asyncio.gather(failing.get_future(), return_exceptions=True)
    assert isinstance(error, CollectiveTimeoutError)
    await pg.barrier()


@pytest.mark.ranks(2)
async def test_other_threads_can_wait_for_a_work(pg: ProcessGroup) -> None:
    peer = 1 - pg.rank()
    work = pg.recv(np.zeros(2), peer)
    with pytest.raises(RuntimeError, match=r"would block the event loop .*: use `await work`"):
        work.wait()
    failed = pg.recv(np.zeros(2), peer, tag=1, timeout=0.01)
    loop = asyncio.get_running_loop()
    outcomes: asyncio.Queue[Any] = asyncio.Queue()

    def report(call: Callable[[], Any]) -> None:
        try:
            outcome = call()
        except Exception as error:
            outcome = error
        loop.call_soon_threadsafe(outcomes.put_nowait, outcome)

    def wait_in_thread() -> None:
        report(lambda: work.wait(timedelta(seconds=0.01)))
        report(work.wait)
        report(failed.wait)

    thread = threading.Thread(target=wait_in_thread)
    thread.start()
    early = await outcomes.get()
    assert isinstance(early, TimeoutError)
    assert "has not ended within 0.01 s" in str(early)
    await pg.barrier()
    await pg.send(np.ones(2), peer)
    assert (await outcomes.get()).tolist() == [1, 1]
    assert isinstance(await outcomes.get(), CollectiveTimeoutError)
    thread.join()
    await pg.barrier()


@pytest.mark.ranks(2)
async def test_callback_added_by_another_thread_runs_in_the_event_loop(pg: ProcessGroup) -> None:
    asyncio.get_running_loop().set_debug(True)  # in debug mode, `call_soon` refuses other threads
    work = pg.recv(np.zeros(2), 1 - pg.rank())
    called: asyncio.Queue[int] = asyncio.Queue()
    await asyncio.to_thread(work.add_done_callback, lambda _: called.put_nowait(threading.get_ident()))
    await pg.send(np.ones(2), 1 - pg.rank())
    assert await called.get() == threading.get_ident()
    await asyncio.to_thread(work.add_done_callback, lambda _: called.put_nowait(threading.get_ident()))
    assert await called.get() == threading.get_ident()
    await pg.barrier()


@pytest.mark.ranks(2)
async def test_get_future_from_another_thread_is_refused(pg: ProcessGroup) -> None:
    work = pg.recv(np.zeros(2), 1 - pg.rank())
    with pytest.raises(RuntimeError, match="thread"):
        await asyncio.to_thread(work.get_future)
    await pg.send(np.ones(2), 1 - pg.rank())
    assert (await work).tolist() == [1, 1]
    await pg.barrier()


@pytest.mark.ranks(2)
async def test_abort_fails_a_pending_work(pg: ProcessGroup) -> None:
    work = pg.allreduce(np.ones(1)) if pg.rank() == 0 else pg.recv(np.ones(1), 0)
    await pg.batch([Send(np.ones(1), 1 - pg.rank(), 1), Recv(np.ones(1), 1 - pg.rank(), 1)])
    if pg.rank() == 0:
        work.abort()
    with pytest.raises(GroupError, match="ALLREDUCE was aborted by rank 0"):
        await work
    work.abort()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("timeout", [None, 7.0])
@parametrize_transports("memory", "unix")
async def test_finished_operation_releases_its_buffers(pg: ProcessGroup, timeout: float | None) -> None:
    kept = []
    for count in (1, 10_000, 1_000_000):
        tensor, wait_in_thread = np.ones(count), np.ones(count)
        kept += [weakref.ref(tensor), weakref.ref(wait_in_thread)]
        await pg.allreduce(tensor, timeout=timeout)
        await pg.broadcast(tensor, 1, timeout=timeout)
        if pg.rank() == 0:
            await pg.send(tensor, 1, timeout=timeout)
        else:
            await pg.recv(wait_in_thread, 0, timeout=timeout)
        del tensor, wait_in_thread
    await pg.barrier()
    gc.collect()
    assert [each() for each in kept] == [None] * 6
