"""The contract of `Work` objects of the accelerator and of Python: awaits, waits and inspection."""

from __future__ import annotations

import asyncio
import gc
import pickle
import sys
import threading
import warnings
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

import aiocoll
from aiocoll import ProcessGroup
from aiocoll.work import Work

from ..internals import comm_of, is_native, native_calls_of
from ..ranks import run_in_fork, wait_until
from .groups import WORKS, await_work, group_of_ranks, pending_in_python, start_allreduce

Ranks = tuple[ProcessGroup, ProcessGroup]


@pytest.fixture(params=WORKS)
def kind(request: pytest.FixtureRequest) -> str:
    """Return the kind of `Work` that the test starts on rank 0, one of `WORKS`."""
    return str(request.param)


@pytest.fixture
async def ranks(kind: str) -> AsyncIterator[Ranks]:
    """Yield two ranks, on which the test can start works of the kind under test on rank 0."""
    async with group_of_ranks([kind != "completion", True]) as (zero, one):
        yield zero, one


def ones() -> np.ndarray:
    return np.ones(3)


async def finish_calls(ranks: Ranks, **named: Any) -> None:
    """Make the matching call on rank 1, and wait until all calls of rank 0 have finished."""
    await ranks[1].allreduce(ones(), **named)
    await wait_until(lambda: not len(comm_of(ranks[0]).in_flight))


async def test_work_has_the_public_class_and_can_be_subscripted(kind: str, ranks: Ranks) -> None:
    zero, _one = ranks
    work = start_allreduce(kind, zero, ones())
    assert type(work) is Work is aiocoll.Work
    assert isinstance(work, aiocoll.Work)
    assert aiocoll.Work[int].__origin__ is aiocoll.Work  # type: ignore[attr-defined]
    assert hash(work) == hash(work)
    assert work == work
    assert not hasattr(work, "__dict__")
    with pytest.raises(AttributeError):
        work.other = 1  # type: ignore[attr-defined]
    with pytest.raises(TypeError):
        pickle.dumps(work)
    await finish_calls(ranks)
    await work


async def test_work_attributes_are_equal_before_and_after_completion(kind: str, ranks: Ranks) -> None:
    zero, _one = ranks
    work = start_allreduce(kind, zero, ones())
    seq = work.seq if kind != "native" else None  # not read for a native work, since this hands the call over to Python
    assert not work.done()
    assert not work.is_completed()
    assert not work.is_success()
    assert is_native(work) is (kind == "native")
    await finish_calls(ranks)
    assert work.done()
    assert work.is_completed()
    assert work.is_success()
    assert not work.cancelled()
    assert (work.op, work.key, work.group) == ("ALLREDUCE", None, zero)
    assert seq in (None, work.seq)
    assert repr(work) == f"<Work ALLREDUCE seq={work.seq} done>"
    with pytest.raises(ValueError, match="has no source rank"):
        work.source_rank()
    keyed = zero.allreduce(ones(), key="step")
    assert repr(keyed) == "<Work ALLREDUCE seq=1 key='step' pending>"
    assert (keyed.op, keyed.seq, keyed.key, keyed.group) == ("ALLREDUCE", 1, "step", zero)
    await finish_calls(ranks, key="step")
    await keyed
    assert repr(keyed) == "<Work ALLREDUCE seq=1 key='step' done>"


async def test_work_attributes_can_be_read_before_completion(kind: str, ranks: Ranks) -> None:
    zero, _one = ranks
    work = start_allreduce(kind, zero, ones())
    assert repr(work) == f"<Work ALLREDUCE seq={work.seq} pending>"
    assert (work.op, work.key, work.group) == ("ALLREDUCE", None, zero)
    await finish_calls(ranks)
    assert (await work == 2).all()


async def test_work_result_is_available_only_after_completion(kind: str, ranks: Ranks) -> None:
    zero, _one = ranks
    array = ones()
    work = start_allreduce(kind, zero, array)
    for early in (work.result, work.exception):
        with pytest.raises(
            asyncio.InvalidStateError, match=r"<Work ALLREDUCE seq=\d+ pending> has not ended; await it"
        ):
            early()
    await finish_calls(ranks)
    assert work.result() is array
    assert work.exception() is None
    assert (array == 2).all()


async def test_work_can_be_awaited_repeatedly_by_any_task(kind: str, ranks: Ranks) -> None:
    zero, _one = ranks
    array = ones()
    work = start_allreduce(kind, zero, array)

    tasks = [asyncio.create_task(await_work(work)) for _ in range(20)]
    await asyncio.sleep(0)
    assert is_native(work) is (kind == "native"), "an await handed the call over to Python"
    for task in tasks[::3]:
        task.cancel()
    await asyncio.sleep(0)
    await finish_calls(ranks)
    results = await asyncio.gather(*tasks, return_exceptions=True)
    for number, result in enumerate(results):
        assert isinstance(result, asyncio.CancelledError) if number % 3 == 0 else result is array
    assert await work is await work is array


async def test_cancelled_await_does_not_stop_the_operation(kind: str, ranks: Ranks) -> None:
    zero, _one = ranks
    array = ones()
    work = start_allreduce(kind, zero, array)
    for _ in range(3):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.001):
                await work
    assert not work.done()
    assert not work.cancelled()
    await finish_calls(ranks)
    assert await work is array
    assert (array == 2).all()


async def test_work_can_be_awaited_after_all_awaiters_were_cancelled(kind: str, ranks: Ranks) -> None:
    zero, _one = ranks
    work = start_allreduce(kind, zero, ones())
    tasks = [asyncio.create_task(await_work(work)) for _ in range(3)]
    await asyncio.sleep(0)
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    assert all(task.cancelled() for task in tasks)
    late = asyncio.create_task(await_work(work))
    await asyncio.sleep(0)
    await finish_calls(ranks)
    assert (await late == 2).all()


async def test_cancelled_await_leaves_no_future_behind(kind: str, ranks: Ranks) -> None:
    zero, _one = ranks
    work = start_allreduce(kind, zero, ones())
    for _ in range(50):
        task = asyncio.create_task(await_work(work))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
    del task
    futures = [each for each in reachable(work, 3) if isinstance(each, asyncio.Future)]
    assert len(futures) < 5
    await finish_calls(ranks)
    await work


def reachable(start_at: Any, depth: int) -> list[Any]:
    """Return the lists, futures and completions that an object references over chains of up to `depth` references."""
    found, level = [], [start_at]
    for _ in range(depth):
        level = [
            each
            for holder in level
            for each in gc.get_referents(holder)
            if isinstance(each, (list, asyncio.Future)) or type(each).__name__ == "Completion"
        ]
        found += level
    return found


async def test_asyncio_functions_accept_works_like_futures(kind: str, ranks: Ranks) -> None:
    zero, one = ranks
    loop = asyncio.get_running_loop()
    for way in (gather, wait, wait_first, wait_for, shield, as_completed, task_group, get_future, ensure_future):
        array = ones()
        work = start_allreduce(kind, zero, array)
        task = asyncio.create_task(way(work))
        await asyncio.sleep(0)
        assert not task.done()
        loop.call_soon(one.allreduce, ones())
        async with asyncio.timeout(10):
            assert await task is array, way.__name__
        assert await way(work) is array, f"{way.__name__} after the end"


async def gather(work: Any) -> Any:
    first, second, three = await asyncio.gather(work, work, asyncio.sleep(0, 3))
    assert first is second
    assert three == 3
    return first


async def wait(work: Any) -> Any:
    done, pending = await asyncio.wait([work])
    assert (done, pending) == ({work}, set())
    return work.result()


async def wait_first(work: Any) -> Any:
    never = asyncio.get_running_loop().create_future()
    done, pending = await asyncio.wait([work, never], return_when=asyncio.FIRST_COMPLETED)
    assert (done, pending) == ({work}, {never})
    return work.result()


async def wait_for(work: Any) -> Any:
    return await asyncio.wait_for(work, 10)


async def shield(work: Any) -> Any:
    return await asyncio.shield(work)


async def as_completed(work: Any) -> Any:
    (first,) = asyncio.as_completed([work])
    return await first


async def task_group(work: Any) -> Any:
    async with asyncio.TaskGroup() as group:
        task = group.create_task(await_work(work))
    return task.result()


async def get_future(work: Any) -> Any:
    future = work.get_future()
    assert isinstance(future, asyncio.Future)
    return await future


async def ensure_future(work: Any) -> Any:
    return await asyncio.ensure_future(work)


async def test_expired_wait_for_cancels_only_the_await_of_a_work(kind: str, ranks: Ranks) -> None:
    zero, _one = ranks
    array = ones()
    work = start_allreduce(kind, zero, array)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(work, 0.01)
    done, pending = await asyncio.wait([work], timeout=0.01)
    assert (done, pending) == (set(), {work})
    future = work.get_future()
    future.cancel()
    outer = asyncio.shield(work)
    outer.cancel()
    await asyncio.sleep(0)
    assert not work.done()
    await finish_calls(ranks)
    assert await work is array


async def test_done_callbacks_are_called_once_in_a_separate_loop_iteration(kind: str, ranks: Ranks) -> None:
    zero, _one = ranks
    called: list[Any] = []

    def removed(_: object) -> None:
        called.append("removed")

    work = start_allreduce(kind, zero, ones())
    work.add_done_callback(called.append)
    work.add_done_callback(removed)
    work.add_done_callback(removed)
    assert work.remove_done_callback(removed) == 2
    assert work.remove_done_callback(removed) == 0
    assert called == []
    await finish_calls(ranks)
    await work
    await asyncio.sleep(0)
    assert called == [work]
    work.add_done_callback(called.append)
    assert called == [work], "the callback ran in the iteration that added it"
    await asyncio.sleep(0)
    assert called == [work, work]


async def test_thread_outside_the_event_loop_can_wait_for_a_work(kind: str, ranks: Ranks) -> None:
    zero, _one = ranks
    array = ones()
    work = start_allreduce(kind, zero, array)
    with pytest.raises(RuntimeError, match=r"would block the event loop .*: use `await work`"):
        work.wait()
    with pytest.raises(TimeoutError, match=r"has not ended within 0.01 s"):
        await asyncio.to_thread(work.wait, 0.01)
    threads = [asyncio.create_task(asyncio.to_thread(work.wait, 10)) for _ in range(3)]
    await asyncio.sleep(0.02)
    await finish_calls(ranks)
    for each in await asyncio.gather(*threads):
        assert each is array
    assert await asyncio.to_thread(work.wait) is array


async def test_thread_outside_the_event_loop_can_inspect_a_work(kind: str, ranks: Ranks) -> None:
    zero, _one = ranks
    array = ones()
    work = start_allreduce(kind, zero, array)

    def inspect() -> tuple[Any, ...]:
        with pytest.raises(asyncio.InvalidStateError):
            work.result()
        with pytest.raises(asyncio.InvalidStateError):
            work.exception()
        return work.done(), work.is_success(), work.op, repr(work).endswith(" pending>"), work.group is zero

    assert await asyncio.to_thread(inspect) == (False, False, "ALLREDUCE", True, True)
    await finish_calls(ranks)
    assert await asyncio.to_thread(lambda: (work.done(), work.result() is array, work.exception())) == (
        True,
        True,
        None,
    )


async def test_inspection_by_another_thread_does_not_hand_native_calls_over(ranks: Ranks, kind: str) -> None:
    """Check that other threads hand no call over, since only the thread of the event loop may use the engine."""
    zero, _one = ranks
    work = start_allreduce(kind, zero, ones())

    def inspect() -> None:
        repr(work)
        assert work.seq is not None
        with pytest.raises(asyncio.InvalidStateError):
            work.result()

    await asyncio.to_thread(inspect)
    assert is_native(work) is (kind == "native")
    assert pending_in_python(zero) == (kind != "native")
    await finish_calls(ranks)
    assert (await work == 2).all()


async def test_inspection_by_a_forked_child_does_not_hand_native_calls_over(kind: str, ranks: Ranks) -> None:
    zero, _one = ranks
    work = start_allreduce(kind, zero, ones())

    def inspect() -> None:
        assert repr(work).endswith(" pending>")
        assert is_native(work) is (kind == "native")
        work.wait(1)

    assert "forked" in run_in_fork(inspect) or "would block the event loop" in run_in_fork(inspect)
    assert is_native(work) is (kind == "native")
    await finish_calls(ranks)
    assert (await work == 2).all()


async def test_await_of_a_work_in_another_event_loop_is_refused(kind: str, ranks: Ranks) -> None:
    zero, _one = ranks
    work = start_allreduce(kind, zero, ones())

    async def other() -> None:
        with pytest.raises(RuntimeError, match="belongs to another event loop"):
            await work
        with pytest.raises(RuntimeError, match="belongs to another event loop"):
            work.add_done_callback(print)

    await asyncio.to_thread(asyncio.run, other())
    await finish_calls(ranks)
    assert (await work == 2).all()


async def test_weak_references_to_a_work_end_with_the_work(kind: str, ranks: Ranks) -> None:
    zero, _one = ranks
    ended: list[str] = []
    array = ones()
    work = start_allreduce(kind, zero, array)
    reference = weakref.ref(work, lambda _: ended.append("work"))
    weakref.finalize(array, ended.append, "array")
    del array
    assert reference() is work
    del work
    assert ended == [], "the operation in flight lost its work or array"
    gc.disable()
    try:
        await finish_calls(ranks)
        await asyncio.sleep(0)
        assert sorted(ended) == ["array", "work"], "a reference cycle keeps the work or array"
    finally:
        gc.enable()


async def test_completed_work_references_only_its_result(kind: str, ranks: Ranks) -> None:
    zero, one = ranks
    for _ in range(3):  # plans and views of the first call are cached
        whole, part = np.ones(6), np.ones(3)
        work = zero.allgather_into_tensor(whole, part)
        if kind == "taken over":
            native_calls_of(zero).hand_over()
        await one.allgather_into_tensor(np.ones(6), np.ones(3))
        assert await work is whole
        await asyncio.sleep(0)
        reference = weakref.ref(part)
        del part
        assert reference() is None, "the finished work still keeps its input"
        assert work.result() is whole


async def test_reference_counts_of_works_are_balanced(kind: str, ranks: Ranks) -> None:
    zero, one = ranks
    array, mine = ones(), ones()
    sizes, counts = [], []
    for _ in range(6):
        for _ in range(50):
            work = start_allreduce(kind, zero, array)
            task = asyncio.create_task(await_work(work))
            await asyncio.sleep(0)
            await one.allreduce(mine)
            await task
            work.result()
            work.exception()
        del work, task
        array[:] = mine[:] = 1
        await asyncio.sleep(0)
        gc.collect()
        sizes.append(sys.getrefcount(array))
        counts.append(len([each for each in gc.get_objects() if isinstance(each, Work)]))
    assert sizes[2:] == sizes[2:3] * 4
    assert counts[2:] == counts[2:3] * 4


async def test_works_leave_no_reference_cycles(kind: str, ranks: Ranks) -> None:
    zero, _one = ranks
    for flags in (0, gc.DEBUG_SAVEALL):
        gc.collect()
        gc.set_debug(flags)
        try:
            for _ in range(20):
                work = start_allreduce(kind, zero, ones())
                task = asyncio.create_task(await_work(work))
                cancelled = asyncio.create_task(await_work(work))
                await asyncio.sleep(0)
                cancelled.cancel()
                await finish_calls(ranks)
                await task
            del work, task, cancelled
            await asyncio.sleep(0)
            gc.collect()
            found = [each for each in gc.garbage if isinstance(each, (Work, np.ndarray, ProcessGroup))]
        finally:
            gc.set_debug(0)
            gc.garbage.clear()
    assert found == []


async def test_await_iterator_of_a_work_cannot_be_restarted(kind: str, ranks: Ranks) -> None:
    zero, _one = ranks
    work = start_allreduce(kind, zero, ones())
    iterator = work.__await__()
    future = next(iterator)
    assert asyncio.isfuture(future)
    future._asyncio_future_blocking = False  # a task sets this flag on a future that it waits for
    await finish_calls(ranks)
    with pytest.raises(StopIteration) as ended:
        next(iterator)
    assert (ended.value.value == 2).all()
    if hasattr(iterator, "close"):
        iterator.close()


async def test_deleted_await_iterator_does_not_cancel_the_operation(kind: str, ranks: Ranks) -> None:
    zero, _one = ranks
    work = start_allreduce(kind, zero, ones())
    iterator = work.__await__()
    next(iterator)._asyncio_future_blocking = False
    del iterator
    await finish_calls(ranks)
    assert (await work == 2).all()


@pytest.mark.skipif(sys.version_info < (3, 12), reason="eager tasks come with Python 3.12")
async def test_eager_tasks_can_await_works(kind: str, ranks: Ranks) -> None:
    loop = asyncio.get_running_loop()
    eager: Any = partial(asyncio.Task, loop=loop, eager_start=True)  # uvloop does not accept an eager task factory
    work = start_allreduce(kind, ranks[0], ones())
    tasks = [eager(await_work(work)) for _ in range(3)]
    assert not any(task.done() for task in tasks)
    await finish_calls(ranks)
    for each in await asyncio.gather(*tasks):
        assert (each == 2).all()
    late = eager(await_work(work))
    assert (await late == 2).all()


async def test_work_that_is_never_awaited_emits_a_warning_in_debug_mode(kind: str) -> None:
    uses = (None, await_use, call_done, call_result, add_callback, inspect_too_early)
    for use in uses:
        texts = await warnings_of(kind, use)
        assert len(texts) == (use in (None, inspect_too_early)), (use, texts)
        assert not texts or "rank 0: ALLREDUCE (sequence 2) called at " in texts[0]
        assert not texts or "native/groups.py:" in texts[0]


async def warnings_of(kind: str, use: Callable[[Any], Awaitable[object]] | None) -> list[str]:
    """Return the warnings about a work that the test passes to `use` and then deletes."""
    loop = asyncio.get_running_loop()
    before = loop.get_debug()
    loop.set_debug(True)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            async with group_of_ranks([kind != "completion", True], "debug") as ranks:
                work = start_allreduce(kind, ranks[0], ones())
                if use is inspect_too_early:
                    await use(work)
                await finish_calls(ranks)
                if use is not None and use is not inspect_too_early:
                    await use(work)
                del work
                await asyncio.sleep(0)
            gc.collect()
    finally:
        loop.set_debug(before)
    return [str(each.message) for each in caught if "ALLREDUCE" in str(each.message)]


async def inspect_too_early(work: Any) -> None:
    """Read the result before the work is done; this attempt does not count as a use of the work."""
    assert not work.done()
    with pytest.raises(asyncio.InvalidStateError):
        work.result()


async def await_use(work: Any) -> None:
    await work


async def call_done(work: Any) -> None:
    assert work.done()


async def call_result(work: Any) -> None:
    work.result()


async def add_callback(work: Any) -> None:
    work.add_done_callback(lambda _: None)


async def test_threads_can_inspect_works_during_calls(kind: str, ranks: Ranks) -> None:
    """Check that each call finishes correctly while two threads inspect works in flight."""
    zero, one = ranks
    shown: list[Any] = []
    stop = threading.Event()
    failures: list[BaseException] = []

    def inspect() -> None:
        queries: list[Callable[[Any], Any]] = [
            repr,
            lambda work: work.seq,
            lambda work: work.done(),
            lambda work: work.key,
        ]
        try:
            while not stop.is_set():
                for work in shown[-3:]:
                    for query in queries:
                        query(work)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=inspect) for _ in range(2)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    for thread in threads:
        thread.start()
    try:
        for _ in range(300):
            array = ones()
            work = zero.allreduce(array)
            shown.append(work)
            await one.allreduce(ones())
            assert await work is array
            assert (array == 2).all()
            del shown[:-3]
    finally:
        sys.setswitchinterval(interval)
        stop.set()
        for thread in threads:
            thread.join()
    assert failures == []


class Named(Work):  # type: ignore[type-arg]
    """A subclass of `Work` that a program defines."""

    __slots__ = ("name",)


async def test_subclass_of_work_can_wrap_a_completion(kind: str, ranks: Ranks) -> None:
    zero, _one = ranks
    work = start_allreduce(kind, zero, ones())
    named = Named(work._completion)  # the only way for a program to get a completion
    named.name = "mine"
    assert isinstance(named, Work)
    await finish_calls(ranks)
    assert await named is await work
    assert named.result() is work.result()


def test_work_cannot_be_made_without_a_completion() -> None:
    with pytest.raises(TypeError):
        Work()  # type: ignore[call-arg]
    empty = Work.__new__(Work)
    for query in (lambda: empty.result(), lambda: repr(empty), lambda: empty.op, lambda: next(empty.__await__())):
        with pytest.raises((RuntimeError, AttributeError)):
            query()


async def test_native_works_can_be_used_after_their_group_is_closed(kind: str) -> None:
    async with group_of_ranks([kind != "completion", True]) as ranks:
        works = [start_allreduce(kind, ranks[0], ones())]
        await finish_calls(ranks)
        works += [start_allreduce(kind, ranks[0], ones())]
        await finish_calls(ranks)
        zero = ranks[0]
    for work in works:
        assert (await work == 2).all()
        assert (work.result() == 2).all()
    assert repr(works[1]) == "<Work ALLREDUCE seq=3 done>"
    assert works[1].group is zero
    called: list[Any] = []
    works[0].add_done_callback(called.append)
    assert await works[0].get_future() is works[0].result()
    assert called == [works[0]]
