"""Awaits of works, drain and futures, and the state that cancelled waits leave."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from aiocoll import GroupClosedError, GroupError, ProcessGroup, Recv, ReduceOp, Send, Work

from ..internals import callbacks_of, comm_of
from ..ranks import parametrize_transports, wait_until

#: The time in seconds after which a test cancels a wait.
SOON = 0.01


async def give_up(waiting: Any) -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(SOON):
            await waiting


@pytest.mark.ranks(2)
async def test_cancelled_drain_does_not_withdraw_a_receive(pg: ProcessGroup) -> None:
    peer = 1 - pg.rank()
    work = pg.recv(np.zeros(1), peer)
    await give_up(pg.drain())
    assert pg.pending() == [work]
    assert callbacks_of(work) == []
    # If the last task that awaits a receive gives up, the receive is withdrawn, even while `drain` waits for it.
    draining = asyncio.ensure_future(pg.drain())
    await give_up(work)
    await draining
    assert isinstance(work.exception(), asyncio.CancelledError)
    await pg.barrier()


@pytest.mark.ranks(2)
async def test_future_of_a_receive_prevents_its_withdrawal_until_it_is_cancelled(pg: ProcessGroup) -> None:
    peer = 1 - pg.rank()
    works = [pg.recv(np.zeros(1), peer, tag) for tag in range(2)]
    futures = [work.get_future() for work in works]
    for work in works:
        await give_up(work)
    assert pg.pending() == works
    futures[0].cancel()
    await wait_until(works[0].done)
    assert isinstance(works[0].exception(), asyncio.CancelledError)
    await pg.barrier()
    await pg.send(np.ones(1), peer, tag=1)
    assert await futures[1] == 1
    assert works[1].is_success()


@pytest.mark.ranks(2)
async def test_batch_without_awaiters_ends_with_the_error_of_its_messages(pg: ProcessGroup) -> None:
    peer = 1 - pg.rank()
    withdrawn = pg.batch([Recv(np.zeros(1), peer, 1), Recv(np.zeros(5), None, 2)])
    await give_up(withdrawn)
    await wait_until(withdrawn.done)
    assert isinstance(withdrawn.exception(), asyncio.CancelledError)
    await pg.barrier()
    work = pg.batch([Recv(np.zeros(1), peer, 1), Send(np.zeros(1_000_000), peer, 3)])
    await give_up(work)
    assert not work.done(), "the batch completed before the peer received its message"
    await pg.barrier()
    pg.abort("for a test")
    await wait_until(work.done)
    assert isinstance(work.exception(), GroupError)


@pytest.mark.ranks(2)
async def test_pending_lists_all_unfinished_works(pg: ProcessGroup) -> None:
    if pg.rank() == 0:
        tensor = np.ones(3)
        works: list[Work[Any]] = [pg.allreduce(tensor, key="first"), pg.recv_object(1, 7), pg.barrier()]
        assert pg.pending() == works
        await give_up(works[0])
        assert pg.pending() == works
        await pg.send_object("go on", 1)
        await pg.drain()
        assert pg.pending() == []
        assert (tensor == 2).all()
    else:
        await pg.recv_object(0)
        await asyncio.gather(pg.allreduce(np.ones(3), key="first"), pg.send_object(None, 0, 7), pg.barrier())


@pytest.mark.ranks(2)
@parametrize_transports("unix")
@pytest.mark.parametrize("way", ["sibling", "gather", "timeout", "first"])
async def test_collective_continues_after_every_kind_of_cancelled_wait(pg: ProcessGroup, way: str) -> None:
    async def fail(_: Any) -> None:
        raise KeyError(way)

    async def with_sibling(works: list[Work[Any]]) -> None:
        async with asyncio.TaskGroup() as tasks:
            for work in works:
                tasks.create_task(work.join())
            tasks.create_task(fail(works))

    async def wait(works: list[Work[Any]]) -> None:
        match way:
            case "sibling":
                with pytest.raises(ExceptionGroup):
                    await with_sibling(works)
            case "gather":
                gathered = asyncio.gather(*works)
                await asyncio.sleep(0)
                gathered.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await gathered
            case "timeout":
                await give_up(asyncio.gather(*works))
            case "first":
                done, rest = await asyncio.wait([work.get_future() for work in works], timeout=SOON)
                assert not done
                for future in rest:
                    future.cancel()
                await asyncio.sleep(0)

    tensors = [np.full(n, 1.0) for n in (1, 1000, 1_000_000)]
    if pg.rank():
        await pg.recv_object(0)
    works = [pg.allreduce(tensor) for tensor in tensors]
    works += [pg.allreduce(tensor, ReduceOp.MAX, key="k") for tensor in tensors]
    if pg.rank() == 0:
        await wait(works)
        assert pg.pending() == works
        assert all((tensor == 1).all() for tensor in tensors)
        await pg.send_object("go", 1)
    await pg.drain()
    assert all(work.is_success() for work in works)


@pytest.mark.ranks(2)
async def test_wait_revoked_ends_when_it_is_cancelled_or_the_group_is_closed(pg: ProcessGroup) -> None:
    await give_up(pg.wait_revoked())
    assert comm_of(pg).on_revoked == []
    watching = asyncio.ensure_future(pg.wait_revoked())
    await pg.barrier()
    await pg.shutdown()
    with pytest.raises(GroupClosedError, match="was closed by this rank"):
        await watching
    with pytest.raises(GroupClosedError):
        await pg.wait_revoked()


@pytest.mark.ranks(2)
async def test_wait_revoked_reports_the_revocation_to_all_waiting_tasks(pg: ProcessGroup) -> None:
    watching = [asyncio.ensure_future(pg.wait_revoked()) for _ in range(4)]
    await asyncio.sleep(0)
    watching.pop().cancel()
    await pg.barrier()
    if pg.rank():
        pg.abort("for a test")
    causes = await asyncio.gather(*watching)
    assert len({id(cause) for cause in causes}) == 1
    assert isinstance(causes[0], GroupError)
    assert await pg.wait_revoked() is causes[0]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("taking", ["receives", "incoming", "early message"])
async def test_message_tag_that_was_used_once_leaves_no_records(pg: ProcessGroup, taking: str) -> None:
    peer = 1 - pg.rank()
    for tag in range(100):
        if taking == "early message":
            await pg.send_object(tag, peer, tag)
        waiting = pg.recv_object(peer, tag).join() if taking != "incoming" else anext(pg.incoming(tag))
        task = asyncio.ensure_future(waiting)
        await asyncio.sleep(0)
        if tag % 2 and taking != "early message":
            task.cancel()
        else:
            if taking != "early message":
                await pg.send_object(tag, peer, tag)
            await task
        await asyncio.wait([task])
    matching = comm_of(pg).matching
    for table in (matching._waiting, matching._posted, matching._listeners, matching._active, matching.outgoing):
        assert not table
    await pg.barrier()


@pytest.mark.ranks(2)
async def test_event_loop_runs_while_a_thousand_messages_wait(pg: ProcessGroup) -> None:
    count = 3000
    if pg.rank():
        for number in range(count):
            pg.send_object(number, 0)
        await pg.drain()
        await pg.barrier()
        return
    await pg.barrier()
    ticks = 0
    loop = asyncio.get_running_loop()

    def tick() -> None:
        nonlocal ticks
        ticks += 1
        loop.call_soon(tick) if ticks < count else None

    tick()
    incoming = pg.incoming()
    assert [(await anext(incoming))[1] for _ in range(count)] == list(range(count))
    assert 1 < ticks < count
    ticks = count
