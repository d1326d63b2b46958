"""`LoopThread`: a thread that runs an event loop, in which other threads start calls."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import aiocoll
from aiocoll import GroupClosedError, Meeting
from aiocoll.loops import LoopThread, Started

from .ranks import run_in_fork

LOOPS = {"default": None, "asyncio": asyncio.new_event_loop}


@pytest.fixture(params=LOOPS)
def thread(request: pytest.FixtureRequest) -> Iterator[LoopThread]:
    made = LoopThread("loop of a test", LOOPS[request.param])
    yield made
    made.close()


def interrupt() -> None:
    """Send SIGINT to the main thread, which waits for a call."""
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)


def test_loop_thread_is_not_started_before_the_first_call(thread: LoopThread) -> None:
    assert not any(each.name == "loop of a test" for each in threading.enumerate())
    assert thread.start(lambda: threading.current_thread().name).result(20) == "loop of a test"


def test_loop_thread_runs_uvloop_by_default() -> None:
    uvloop = pytest.importorskip("uvloop")
    thread = LoopThread()
    assert isinstance(thread.loop, uvloop.Loop)
    thread.close()


def test_loop_thread_runs_calls_in_order(thread: LoopThread) -> None:
    done: list[int] = []
    for number in range(100):
        thread.post(done.append, number)
    thread.start(lambda: None).result(20)
    assert done == list(range(100))


def test_loop_thread_awaits_the_coroutine_that_a_started_function_returns(thread: LoopThread) -> None:
    async def twice(value: int) -> int:
        await asyncio.sleep(0)
        return 2 * value

    assert thread.start(lambda: twice(4)).result(20) == 8
    assert thread.start(lambda: 7).result(20) == 7


def test_loop_thread_can_run_a_collective() -> None:
    def rank(number: int) -> float:
        thread = LoopThread()
        with_group = aiocoll.new_group(init_method=meeting.ticket(number), timeout=20)
        pg = thread.start(with_group.__aenter__).result(20)
        total = thread.start(lambda: pg.allreduce(float(number))).result(20)
        thread.run(pg.shutdown())
        thread.close()
        return total

    with Meeting(3) as meeting, ThreadPoolExecutor(3) as pool:
        assert list(pool.map(rank, range(3))) == [3.0, 3.0, 3.0]


def test_result_of_a_loop_thread_call_raises_the_error_of_the_call(thread: LoopThread) -> None:
    async def fail() -> None:
        await asyncio.sleep(0)
        raise KeyError("later")

    assert isinstance(thread.start(lambda: 1 / 0).exception(20), ZeroDivisionError)  # type: ignore[func-returns-value]
    for _ in range(2):
        with pytest.raises(KeyError, match="later"):
            thread.run(fail())


def test_wait_for_a_loop_thread_call_ends_at_its_timeout_and_the_call_continues(thread: LoopThread) -> None:
    event = asyncio.Event()
    started = thread.start(event.wait)
    assert not started.wait(0.0)
    with pytest.raises(TimeoutError, match=r"within 0\.001 s"):
        started.result(0.001)
    thread.post(event.set)
    assert started.result(20) is True
    assert started.wait()


def test_many_threads_can_wait_for_one_loop_thread_call(thread: LoopThread) -> None:
    event = asyncio.Event()
    started = thread.start(event.wait)
    with ThreadPoolExecutor(8) as pool:
        results = [pool.submit(started.result, 20) for _ in range(8)]
        thread.post(event.set)
        assert [each.result(20) for each in results] == [True] * 8


def test_done_callback_runs_in_the_loop_thread_or_at_once_if_the_call_has_ended(thread: LoopThread) -> None:
    event, called = asyncio.Event(), threading.Event()
    seen: list[Any] = []

    def record_end(ended: Started[Any]) -> None:
        seen.append((ended.result(), thread.is_current()))
        called.set()

    started = thread.start(event.wait)
    started.add_done_callback(record_end)
    thread.post(event.set)
    assert called.wait(20)
    started.add_done_callback(record_end)
    assert seen == [(True, True), (True, False)]


def test_loop_thread_refuses_to_wait_for_a_call_that_runs_in_it(thread: LoopThread) -> None:
    async def nothing() -> None:
        pass

    def waits() -> None:
        thread.run(nothing())

    with pytest.raises(RuntimeError, match="would block the event loop"):
        thread.start(waits).result(20)
    with pytest.raises(RuntimeError, match="would block the event loop"):
        thread.start(lambda: thread.start(nothing).result()).result(20)


def test_keyboard_interrupt_ends_the_wait_for_a_started_call_but_not_the_call(thread: LoopThread) -> None:
    event = asyncio.Event()

    started = thread.start(event.wait)
    interrupting = threading.Thread(target=interrupt)

    def wait() -> None:
        interrupting.start()
        started.result(20)

    with pytest.raises(KeyboardInterrupt):
        wait()
    interrupting.join()
    thread.post(event.set)
    assert started.result(20) is True


def test_keyboard_interrupt_during_run_cancels_the_coroutine(thread: LoopThread) -> None:
    ended: list[str] = []

    async def wait() -> None:
        try:
            await asyncio.to_thread(interrupt)
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            ended.append("cleaned up")

    with pytest.raises(KeyboardInterrupt):
        thread.run(wait())
    assert ended == ["cleaned up"]


def test_unfinished_calls_fail_when_the_loop_thread_is_closed(thread: LoopThread) -> None:
    async def forever() -> None:
        await asyncio.Event().wait()

    started = thread.start(forever)
    thread.start(lambda: None).result(20)
    gc.collect()
    thread.close()
    thread.close()
    for failed in (started.result, lambda: thread.start(forever), lambda: thread.post(gc.collect)):
        with pytest.raises(GroupClosedError, match="the group was closed"):
            failed()
    assert thread.is_closed()
    assert not any(each.name == "loop of a test" for each in threading.enumerate())


def test_call_on_a_closing_loop_thread_is_refused(thread: LoopThread) -> None:
    """Start a call after the last iteration of the event loop, and before the event loop is closed."""
    made: list[Started[None]] = []
    ending, call_made = threading.Event(), threading.Event()

    def wait() -> None:
        ending.set()
        call_made.wait(20)

    async def end() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            wait()

    thread.start(end)
    thread.start(lambda: None).result(20)
    closing = threading.Thread(target=thread.close)
    closing.start()
    assert ending.wait(20)
    made.append(thread.start(lambda: asyncio.sleep(60)))
    call_made.set()
    closing.join()
    with pytest.raises(GroupClosedError, match="the group was closed"):
        made[0].result(20)


def test_forked_child_starts_its_own_loop_thread(thread: LoopThread) -> None:
    parent = thread.start(threading.get_native_id).result(20)
    never = thread.start(asyncio.Event().wait)

    def child() -> None:
        found = thread.start(lambda: (os.getpid(), threading.get_native_id())).result(20)
        thread.close()
        raise SystemExit(str(found[0] == os.getpid() and found[1] != parent))

    assert run_in_fork(child) == "True"
    assert not never.done()
    assert thread.start(threading.get_native_id).result(20) == parent


def test_loop_thread_keeps_no_reference_to_the_result_of_a_finished_call(thread: LoopThread) -> None:
    made = weakref.ref(thread.start(threading.Event).result(20))
    thread.start(lambda: None).result(20)  # make another call, since the loop may reference its last call
    gc.collect()
    assert made() is None
