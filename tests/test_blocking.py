"""`BlockingGroup`, for programs without an event loop: each rank is a thread that blocks in its calls."""

from __future__ import annotations

import asyncio
import gc
import inspect
import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import aiocoll
from aiocoll import BlockingGroup, GroupClosedError, GroupOptions, Meeting, ProcessGroup, Ticket, new_group

from .ranks import run_in_fork

#: `ProcessGroup` methods without a blocking counterpart: context managers, iterators, and renamed methods.
WITH_THE_LOOP = {"cart", "coalescing", "time_estimator", "incoming", "plan", "aclose"}


def on_ranks(world_size: int, rank: Callable[[BlockingGroup], Any]) -> list[Any]:
    """Run `rank(group)` in one thread per rank, each with a `BlockingGroup`; return the results in rank order."""
    with Meeting(world_size) as meeting, ThreadPoolExecutor(world_size) as pool:

        def run(number: int) -> Any:
            with BlockingGroup(init_method=meeting.ticket(number), timeout=20) as group:
                return rank(group)

        return list(pool.map(run, range(world_size)))


def calls() -> set[str]:
    return {name for name, _ in inspect.getmembers(ProcessGroup, inspect.isfunction) if name[0] != "_"}


def test_blocking_group_has_every_method_of_a_process_group() -> None:
    blocking = {name for name in vars(BlockingGroup) if name[0] != "_"}
    assert blocking == calls() - WITH_THE_LOOP | {"submit"}


@pytest.mark.parametrize("name", sorted(calls() - WITH_THE_LOOP - {"shutdown"}))
def test_blocking_method_has_the_signature_and_docstring_of_the_awaitable_method(name: str) -> None:
    blocking, awaited = getattr(BlockingGroup, name), getattr(ProcessGroup, name)
    assert inspect.signature(blocking) == inspect.signature(awaited)
    assert blocking.__doc__ == awaited.__doc__


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_blocking_calls_return_their_results(world_size: int) -> None:
    def rank(group: BlockingGroup) -> Any:
        x = np.full(5, group.rank() + 1.0)
        assert group.allreduce(x) is x
        group.barrier()
        names = group.allgather_object(f"rank {group.rank()}")
        return x.tolist(), names, group.size(), group.empty(3, "int8").shape

    total = world_size * (world_size + 1) / 2
    expected = ([total] * 5, [f"rank {rank}" for rank in range(world_size)], world_size, (3,))
    assert on_ranks(world_size, rank) == [expected] * world_size


def test_submitted_call_runs_in_the_background() -> None:
    def rank(group: BlockingGroup) -> Any:
        other = 1 - group.rank()
        got = group.submit(ProcessGroup.recv_object, other)
        assert not got.done()
        group.barrier()  # no rank sends before all ranks have called `iprobe`
        group.send_object(group.rank(), other)
        assert not got.cancel()
        return got.result(20)

    assert on_ranks(2, rank) == [1, 0]


def test_submitted_user_function_runs_in_the_event_loop_thread() -> None:
    async def both(pg: ProcessGroup, first: float, *, second: float) -> list[float]:
        async with pg.coalescing():
            works = [pg.allreduce(first), pg.allreduce(second)]
        return [await work for work in works]

    def rank(group: BlockingGroup) -> Any:
        thread = group.submit(lambda pg: threading.current_thread().name).result()
        return group.submit(both, 1.0, second=2.0).result(20), thread

    assert on_ranks(2, rank) == [([2.0, 4.0], "aiocoll-blocking")] * 2


def test_blocking_call_checks_arguments_in_the_calling_thread() -> None:
    def rank(group: BlockingGroup) -> None:
        with pytest.raises(ValueError, match="root"):
            group.submit(ProcessGroup.broadcast, np.ones(3), 7)
        with pytest.raises(TypeError, match="str"):
            group.submit(ProcessGroup.allreduce, "a")
        with pytest.raises(TypeError, match="unexpected keyword"):
            group.submit(ProcessGroup.barrier, tiemout=3)

    on_ranks(1, rank)
    with pytest.raises(TypeError, match="unexpected keyword argument 'wrold_size'"):
        BlockingGroup(wrold_size=3)
    with pytest.raises(ValueError, match="store 'mpi' is not known"):
        BlockingGroup(init_method="mpi://", rank=0, world_size=1)
    assert not any(thread.name == "aiocoll-blocking" for thread in threading.enumerate())


def test_blocking_group_can_be_used_by_many_threads() -> None:
    def rank(group: BlockingGroup) -> float:
        with ThreadPoolExecutor(4) as pool:
            futures = [pool.submit(group.allreduce, float(number), key=str(number)) for number in range(40)]
            return sum(future.result(20) for future in futures)

    assert on_ranks(2, rank) == [2.0 * sum(range(40))] * 2


def test_groups_split_from_a_blocking_group_are_blocking() -> None:
    def rank(group: BlockingGroup) -> Any:
        part = group.split_group([[0, 2], [1]])
        assert isinstance(part, BlockingGroup)
        total = part.allreduce(group.rank())
        part.shutdown()
        part.shutdown()
        return total, group.allreduce(1)

    assert on_ranks(3, rank) == [(2, 3), (1, 3), (2, 3)]


def test_blocking_call_raises_an_error_after_a_lost_rank_and_other_ranks_continue() -> None:
    def rank(group: BlockingGroup) -> Any:
        if group.rank() == 1:
            return None
        with pytest.raises(aiocoll.GroupError):
            group.allreduce(1)
        with group.shrink() as left:
            return left.size(), left.allreduce(1)

    assert on_ranks(3, rank) == [(2, 2), None, (2, 2)]


def test_closed_blocking_group_refuses_calls() -> None:
    kept: list[BlockingGroup] = []
    on_ranks(1, kept.append)
    (group,) = kept
    group.shutdown()
    with pytest.raises(GroupClosedError, match="closed"):
        group.allreduce(1)
    assert not any(thread.name == "aiocoll-blocking" for thread in threading.enumerate())


def test_unfinished_call_fails_when_its_blocking_group_is_closed() -> None:
    """Collect garbage while the call is pending, since only the event loop refers to its coroutine."""
    kept: list[Future[Any]] = []

    def rank(group: BlockingGroup) -> None:
        kept.append(group.submit(forever))
        group.submit(lambda pg: asyncio.sleep(0)).result(20)
        gc.collect()

    async def forever(pg: ProcessGroup) -> None:
        await asyncio.Event().wait()

    on_ranks(1, rank)
    with pytest.raises(GroupClosedError):
        kept[0].result(20)


def test_keyboard_interrupt_ends_the_wait_of_a_blocking_call_but_not_the_call() -> None:
    def interrupt(meeting: Meeting) -> None:
        with BlockingGroup(init_method=meeting.ticket(1), timeout=20) as group:
            begun = group.submit(ProcessGroup.recv_object, 0)
            assert begun.result(20) == "waiting"
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            assert group.recv_object(0) == "interrupted"
            group.allreduce(1)

    with Meeting(2) as meeting, ThreadPoolExecutor(1) as pool:
        other = pool.submit(interrupt, meeting)
        with BlockingGroup(init_method=meeting.ticket(0), timeout=20) as group:
            total = group.submit(ProcessGroup.allreduce, 1)

            def wait() -> None:
                group.send_object("waiting", 1)
                total.result(20)

            with pytest.raises(KeyboardInterrupt):
                wait()
            group.send_object("interrupted", 1)
            assert total.result(20) == 2
            other.result(20)


def test_keyboard_interrupt_during_the_rendezvous_leaves_no_thread_behind() -> None:
    async def interrupt(ticket: Ticket) -> None:
        async with ticket.where().open(20, ticket.key, GroupOptions.resolve(None, {})) as store:
            await store.wait(["aiocoll/1/card/0"])
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    with Meeting(2) as meeting, ThreadPoolExecutor(1) as pool:
        interrupting = pool.submit(asyncio.run, interrupt(meeting.ticket()))
        with pytest.raises(KeyboardInterrupt):
            BlockingGroup(init_method=meeting.ticket(0), timeout=20)
        interrupting.result(20)
    assert not any(thread.name == "aiocoll-blocking" for thread in threading.enumerate())


def test_blocking_call_in_the_event_loop_thread_is_refused() -> None:
    def rank(group: BlockingGroup) -> None:
        def waits(pg: ProcessGroup) -> None:
            group.allreduce(1)

        with pytest.raises(RuntimeError, match="would block the event loop"):
            group.submit(waits)

    on_ranks(1, rank)


def test_blocking_call_in_a_forked_child_is_refused() -> None:
    def rank(group: BlockingGroup) -> int:
        child = os.fork()
        if not child:
            try:
                group.allreduce(1)
            except RuntimeError as error:
                os._exit(7 if "belongs to the parent process" in str(error) else 1)
            os._exit(2)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    assert on_ranks(1, rank) == [7]


def test_exit_of_a_forked_child_does_not_close_its_parents_blocking_group() -> None:
    def rank(group: BlockingGroup) -> Any:
        def exits() -> None:
            with group:
                raise SystemExit("exits")

        assert group.rank() != 0 or run_in_fork(exits) == "exits"
        return group.allreduce(1)

    assert on_ranks(2, rank) == [2, 2]


async def test_blocking_ranks_work_together_with_asyncio_ranks() -> None:
    async def awaits(meeting: Meeting) -> float:
        async with new_group(init_method=meeting.ticket(0), timeout=20) as pg:
            return await pg.allreduce(1.0)

    def waits(meeting: Meeting) -> float:
        with BlockingGroup(init_method=meeting.ticket(1), timeout=20) as group:
            return group.allreduce(2.0)

    async with Meeting(2) as meeting:
        assert await asyncio.gather(awaits(meeting), asyncio.to_thread(waits, meeting)) == [3.0, 3.0]


class Exiting:
    """A hook that ends the program by `SystemExit`."""

    def on_end(self, info: object) -> None:
        raise SystemExit("for a test")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.filterwarnings("ignore:group 'world.0' was not shut down:ResourceWarning")
def test_system_exit_in_user_code_ends_the_loop_and_the_waiting_calls() -> None:
    with Meeting(1) as meeting, BlockingGroup(init_method=meeting.ticket(0), timeout=20) as group:
        never = group.submit(ProcessGroup.recv_object, tag=7)
        group.add_hook(Exiting())
        group.submit(ProcessGroup.barrier)
        with pytest.raises(GroupClosedError):
            never.result(20)
        group._loop.close()
        with pytest.raises(GroupClosedError):
            group.barrier()
