"""Works in asyncio functions: `gather`, `wait`, `wait_for`, `as_completed`, `shield`, and in task groups."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest

from aiocoll import CollectiveTimeoutError, GroupError, ProcessGroup, Work

from ..internals import callbacks_of
from ..ranks import parametrize_transports, run_ranks, wait_until

Wait = Callable[[list[Work[Any]]], Awaitable[set[Work[Any]]]]


async def done_by_as_completed(works: list[Work[Any]]) -> set[Work[Any]]:
    results = [await each for each in asyncio.as_completed(works)]
    assert len(results) == len(works)
    return set(works)


async def done_by_gather(works: list[Work[Any]]) -> set[Work[Any]]:
    await asyncio.gather(*works)
    return set(works)


async def done_by_wait(works: list[Work[Any]]) -> set[Work[Any]]:
    done, pending = await asyncio.wait(works)
    assert not pending
    return done


async def done_by_wait_for(works: list[Work[Any]]) -> set[Work[Any]]:
    for work in works:
        await asyncio.wait_for(work, 20)
    return set(works)


async def done_by_shield(works: list[Work[Any]]) -> set[Work[Any]]:
    for work in works:
        await asyncio.shield(work)
    return set(works)


async def done_by_task_group(works: list[Work[Any]]) -> set[Work[Any]]:
    async with asyncio.TaskGroup() as tasks:
        for work in works:
            tasks.create_task(work.join())
    return set(works)


WAYS = [done_by_as_completed, done_by_gather, done_by_wait, done_by_wait_for, done_by_shield, done_by_task_group]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.ranks(1, 2, 3)
@parametrize_transports("memory", "shm")
async def test_every_wait_function_of_asyncio_accepts_works(pg: ProcessGroup, way: Wait) -> None:
    for count in (1, 3):
        works: list[Work[Any]] = [pg.allreduce(np.ones(count + index)) for index in range(count)]
        assert await way(works) == set(works)
        assert all(work.result()[0] == pg.size() for work in works)
        assert await way(works) == set(works)  # wait again for works that have already ended
        assert [callbacks_of(work) for work in works] == [None] * count


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.ranks(2)
async def test_waiting_for_works_of_a_block_starts_the_block(pg: ProcessGroup, way: Wait) -> None:
    async with pg.coalescing():
        works: list[Work[Any]] = [pg.allreduce(np.ones(3)), pg.allreduce(2)]
        assert await way(works) == set(works)
        assert works[1].result() == 4


@pytest.mark.ranks(2)
async def test_asyncio_wait_on_works_supports_return_when_and_timeout(pg: ProcessGroup) -> None:
    other = 1 - pg.rank()
    later = pg.recv_object(other, tag=2)
    first = pg.recv_object(other, tag=1)
    await pg.send_object("first", other, tag=1)
    done, pending = await asyncio.wait([later, first], return_when=asyncio.FIRST_COMPLETED)
    assert (done, pending) == ({first}, {later})
    done, pending = await asyncio.wait([later], timeout=0)
    assert (done, pending) == (set(), {later})
    assert callbacks_of(later) is None  # both waits have removed their callbacks
    await pg.barrier()
    await pg.send_object("later", other, tag=2)
    done, _ = await asyncio.wait([later, first], return_when=asyncio.FIRST_EXCEPTION)
    assert done == {later, first}
    assert [work.result() for work in (first, later)] == ["first", "later"]


@pytest.mark.ranks(2)
async def test_asyncio_wait_returns_at_the_first_failure(pg: ProcessGroup) -> None:
    """Check also that the group still works after the timeout of a receive."""
    never = pg.recv_object(1 - pg.rank(), tag=1)
    fails = pg.recv_object(1 - pg.rank(), tag=2, timeout=0.01)
    done, pending = await asyncio.wait([never, fails], return_when=asyncio.FIRST_EXCEPTION)
    assert (done, pending) == ({fails}, {never})
    assert isinstance(fails.exception(), GroupError)
    assert not fails.cancelled()
    waiting = asyncio.ensure_future(never.join())
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.wait([never])
    assert never.cancelled()
    assert (waiting.cancelled(), never.done()) == (True, True)
    with pytest.raises(asyncio.CancelledError):
        await never
    await pg.barrier()  # keeps the other rank in the group, so that nothing else fails


@pytest.mark.ranks(2)
async def test_cancelled_asyncio_wait_does_not_cancel_its_works(pg: ProcessGroup) -> None:
    other = 1 - pg.rank()
    work = pg.recv_object(other)
    waiting = asyncio.ensure_future(asyncio.wait([work]))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert callbacks_of(work) is None
    await pg.send_object("still", other)
    assert await work == "still"


@pytest.mark.parametrize("retrieves", [False, True])
async def test_failed_work_is_still_logged_as_never_retrieved_after_asyncio_wait(
    retrieves: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async def rank(pg: ProcessGroup) -> None:
        if pg.rank() == 0:
            works: list[Work[Any]] = [pg.allreduce(1, timeout=0.01)]
            for _ in range(2):
                done, _ = await asyncio.wait(works)
            if retrieves:
                assert isinstance(done.pop().exception(), CollectiveTimeoutError)
            del works, done
            gc.collect()
        else:
            await pg.wait_revoked()

    await run_ranks(2, rank, allow_unretrieved=not retrieves)
    assert ("was never retrieved" in caplog.text) is not retrieves


@pytest.mark.ranks(2)
async def test_remove_done_callback_removes_equal_callbacks(pg: ProcessGroup) -> None:
    called: list[str] = []

    class Owner:
        def method(self, work: Work[Any]) -> None:
            called.append("method")

    owner = Owner()
    work = pg.recv_object(1 - pg.rank())
    for _ in range(2):
        work.add_done_callback(owner.method)
    work.add_done_callback(lambda _: called.append("kept"))
    assert work.remove_done_callback(owner.method) == 2
    assert work.remove_done_callback(owner.method) == 0
    await pg.send_object(1, 1 - pg.rank())
    await work
    await wait_until(lambda: called)
    assert called == ["kept"]
    assert work.remove_done_callback(print) == 0


@pytest.mark.ranks(1, 2)
async def test_done_callbacks_run_in_the_given_context(pg: ProcessGroup) -> None:
    variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="")
    context = contextvars.copy_context()
    context.run(variable.set, "given")
    found: list[str] = []
    work = pg.allreduce(1)
    work.add_done_callback(lambda _: found.append(variable.get()), context=context)
    variable.set("own")
    work.add_done_callback(lambda _: found.append(variable.get()))
    variable.set("later")
    await work
    work.add_done_callback(lambda _: found.append(variable.get()), context=context)
    await wait_until(lambda: len(found) == 3)
    assert found == ["given", "own", "given"]


@pytest.mark.ranks(1)
async def test_asyncio_wait_in_another_event_loop_is_refused(pg: ProcessGroup) -> None:
    works: list[Work[Any]] = [pg.allreduce(1), pg.recv_object(0)]
    errors: list[BaseException] = []

    async def main() -> None:
        for work in works:
            with pytest.raises(RuntimeError, match="belongs to another event loop") as caught:
                await asyncio.wait([work])
            errors.append(caught.value)

    other = threading.Thread(target=asyncio.run, args=(main(),))
    other.start()
    await asyncio.to_thread(other.join)
    assert len(errors) == 2
    await pg.send_object(1, 0)
    await works[1]
