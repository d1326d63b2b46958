"""Warnings about works that a program never awaits, when the event loop is in debug mode."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import inspect
import warnings
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest

import aiocoll.distributed as dist
from aiocoll import CollectiveMismatchError, GroupError, ProcessGroup, Recv, Send, Work

from .internals import replace_parts
from .ranks import run_ranks, wait_until


def forget(pg: ProcessGroup) -> None:
    pg.allreduce(np.ones(3))


#: The line number of the allreduce call in `forget`.
LINE = inspect.getsourcelines(forget)[1] + 1


def warnings_of(rank: Callable[[ProcessGroup], Awaitable[Any]], *, debug: bool = True) -> list[str]:
    """Run two ranks in a new event loop; return the warnings about unawaited works."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        asyncio.run(run_ranks(2, rank, allow_unretrieved=True), debug=debug)
        gc.collect()
    assert all(each.category is RuntimeWarning for each in found), [str(each.message) for each in found]
    assert all((each.filename, each.lineno) == (__file__, LINE) for each in found)
    return sorted(str(each.message) for each in found)


def warning(rank: int, times: str = "") -> str:
    return f"group 'world:0', rank {rank}: ALLREDUCE (sequence 1) called at {__file__}:{LINE} was never awaited{times}"


async def forget_and_go_on(pg: ProcessGroup) -> None:
    forget(pg)
    await pg.barrier()


async def forget_at_the_end(pg: ProcessGroup) -> None:
    forget(pg)


async def forget_before_distributed_barrier(pg: ProcessGroup) -> None:
    """Run `dist.barrier`, which waits for earlier collectives but does not count as awaiting their works."""
    forget(pg)
    await dist.barrier()


async def query_pending_work(pg: ProcessGroup) -> None:
    forget(pg)
    (work,) = pg.pending()
    assert not work.done()
    del work
    await pg.barrier()


@pytest.mark.parametrize(
    "rank", [forget_and_go_on, forget_at_the_end, forget_before_distributed_barrier, query_pending_work]
)
def test_unawaited_work_is_reported_with_the_line_of_its_call(rank: Callable[[ProcessGroup], Awaitable[Any]]) -> None:
    assert warnings_of(rank) == [warning(0), warning(1)]


def test_unawaited_works_of_one_line_are_reported_with_a_count() -> None:
    async def rank(pg: ProcessGroup) -> None:
        for _ in range(3):
            forget(pg)
        await pg.barrier()

    assert warnings_of(rank) == [warning(0, ", 3 times"), warning(1, ", 3 times")]


def test_unawaited_work_that_is_deleted_after_its_group_was_closed_is_reported() -> None:
    kept: list[Any] = []

    async def rank(pg: ProcessGroup) -> None:
        forget(pg)
        kept.extend(pg.pending())

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        asyncio.run(run_ranks(2, rank), debug=True)
    with pytest.warns(RuntimeWarning, match="was never awaited") as caught:
        kept.clear()
    assert sorted(str(each.message) for each in caught) == [warning(0), warning(1)]


def test_unawaited_call_with_a_list_of_tensors_is_reported_once() -> None:
    """Expect one warning per rank, although the call has two tensors."""

    async def rank(pg: ProcessGroup) -> None:
        pg.allreduce_coalesced([np.ones(2), np.ones(3)])
        await pg.barrier()

    with pytest.warns(RuntimeWarning, match="ALLREDUCE_COALESCED .* was never awaited$") as caught:
        asyncio.run(run_ranks(2, rank), debug=True)
    assert len(caught) == 2


def test_failed_call_with_a_list_of_tensors_is_not_reported_as_unawaited() -> None:
    async def rank(pg: ProcessGroup) -> None:
        with pytest.raises(CollectiveMismatchError):
            await pg.allreduce_coalesced([np.ones(2), np.ones(3 + pg.rank())])

    assert warnings_of(rank) == []


def test_unawaited_works_are_reported_if_debug_mode_starts_after_earlier_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    replace_parts(monkeypatch, is_watching=False)
    assert warnings_of(forget_and_go_on, debug=False) == []
    assert warnings_of(forget_and_go_on) == [warning(0), warning(1)]


def test_unawaited_work_is_not_reported_without_debug_mode() -> None:
    assert warnings_of(forget_and_go_on, debug=False) == []


def test_failure_of_an_unawaited_work_is_logged_without_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    async def rank(pg: ProcessGroup) -> None:
        pg.recv(np.zeros(1), 1 - pg.rank(), timeout=0.01)
        with pytest.raises(GroupError):  # another possible error is that the other rank has left
            await pg.recv(np.zeros(1), 1 - pg.rank(), tag=1, timeout=0.05)

    assert warnings_of(rank) == []
    assert sum("was never retrieved" in record.getMessage() for record in caplog.records) == 2


async def wait_for(pg: ProcessGroup, how: str) -> None:
    """Wait for an allreduce in the way that `how` names in `WAYS` or `BLOCKS`."""
    if how in WAYS:
        work = pg.allreduce(np.ones(3))
        await WAYS[how](work)
    else:
        await BLOCKS[how](pg)


async def _join(work: Work[Any]) -> None:
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(work.join())


async def _call_back(work: Work[Any]) -> None:
    called: list[Any] = []
    work.add_done_callback(called.append)
    await wait_until(lambda: called)


async def _give_up(work: Work[Any]) -> None:
    """Cancel the wait for a work, then wait until the work is no longer pending."""
    waiting = asyncio.ensure_future(work)
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.wait([waiting])
    while work in work.group.pending():  # noqa: ASYNC110
        await asyncio.sleep(0)


async def _result(work: Work[Any]) -> None:
    while work in work.group.pending():  # noqa: ASYNC110
        await asyncio.sleep(0)
    work.result()


async def _drain(pg: ProcessGroup) -> None:
    forget(pg)
    await pg.drain()


async def _drain_later(pg: ProcessGroup) -> None:
    forget(pg)
    await pg.barrier()  # by now, the work has ended and is deleted
    await pg.drain()


async def _coalesce(pg: ProcessGroup) -> None:
    async with pg.coalescing():
        forget(pg)
        pg.allreduce(1)
        pg.allreduce(1, key="k")
        pg.allreduce_coalesced([np.ones(2), np.ones(3)])
        await pg.barrier()
        forget(pg)


async def _leave_a_block(pg: ProcessGroup) -> None:
    with contextlib.suppress(LookupError):
        async with pg.coalescing():
            forget(pg)
            raise LookupError


async def _coalesce_a_list(pg: ProcessGroup) -> None:
    await pg.allreduce_coalesced([np.ones(2), np.ones(3)])


async def _batch(pg: ProcessGroup) -> None:
    await pg.batch([Send(np.ones(1), 1 - pg.rank()), Recv(np.ones(1), 1 - pg.rank())])


async def _estimate(pg: ProcessGroup) -> None:
    with pg.time_estimator():
        forget(pg)


async def _objects(pg: ProcessGroup) -> None:
    await dist.all_gather_object([None, None], pg.rank())
    await dist.all_gather([np.ones(1), np.ones(1)], np.ones(1))


async def _split(pg: ProcessGroup) -> None:
    await (await pg.split_group([0, 1])).shutdown()


WAYS: dict[str, Callable[[Work[Any]], Awaitable[Any]]] = {
    "await": lambda work: work.join(),
    "task": _join,
    "gather": lambda work: asyncio.gather(work),
    "asyncio.wait": lambda work: asyncio.wait([work]),
    "wait_for": lambda work: asyncio.wait_for(work, 30),
    "future": lambda work: work.get_future(),
    "callback": _call_back,
    "thread": lambda work: asyncio.to_thread(work.wait),
    "done": lambda work: wait_until(work.done),
    "is_success": lambda work: wait_until(work.is_success),
    "result": _result,
    "stream": lambda work: work.on_stream(),
    "a cancelled await": _give_up,
}
BLOCKS: dict[str, Callable[[ProcessGroup], Awaitable[Any]]] = {
    "drain": _drain,
    "a late drain": _drain_later,
    "coalescing": _coalesce,
    "a block that fails": _leave_a_block,
    "a list": _coalesce_a_list,
    "batch": _batch,
    "estimate": _estimate,
    "distributed": _objects,
    "split": _split,
}


@pytest.mark.parametrize("how", [*WAYS, *BLOCKS])
def test_awaited_work_is_not_reported_as_unawaited(how: str) -> None:
    async def rank(pg: ProcessGroup) -> None:
        await wait_for(pg, how)
        await pg.barrier()

    assert warnings_of(rank) == []
