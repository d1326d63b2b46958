"""Groups used from several threads: threads wait for works, and make calls through the event loop."""

from __future__ import annotations

import asyncio
import gc
import os
import re
import signal
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aiocoll import (
    CollectiveTimeoutError,
    FileStore,
    GroupClosedError,
    GroupError,
    HashStore,
    ProcessGroup,
    TCPStore,
    new_group,
)
from aiocoll.work import Work

from .internals import callbacks_of
from .ranks import LINKS, options, parametrize_transports, run_in_fork


class Loop:
    """A thread with an event loop; with `tidy`, the loop also shuts down asynchronous generators at its end."""

    def __init__(self, *, tidy: bool = True) -> None:
        self.loop = asyncio.new_event_loop()
        self._tidy = tidy
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        self.loop.run_forever()
        if self._tidy:
            self.loop.run_until_complete(self.loop.shutdown_asyncgens())
        self.loop.run_until_complete(self.loop.shutdown_default_executor())
        self.loop.close()

    def __enter__(self) -> Loop:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def call(self, coro: Coroutine[Any, Any, Any]) -> Future[Any]:
        return asyncio.run_coroutine_threadsafe(coro, self.loop)

    def run(self, coro: Coroutine[Any, Any, Any]) -> Any:
        return self.call(coro).result(30)

    def stop(self) -> None:
        """Stop the event loop, and wait until the thread has closed the loop."""
        if self._thread.is_alive():
            self.loop.call_soon_threadsafe(self.loop.stop)
            self._thread.join()


async def make_call(call: Callable[..., Work[Any]], *args: Any, **kwargs: Any) -> Work[Any]:
    """Make a group call inside an event loop; return the work, for use by another thread."""
    return call(*args, **kwargs)


async def add_one(pg: ProcessGroup) -> int:
    """Allreduce the number 1; return the result."""
    return await pg.allreduce(1)


async def pair() -> list[ProcessGroup]:
    store = HashStore()
    return await asyncio.gather(*(new_group(store=store, rank=rank, world_size=2) for rank in range(2)))


async def close(groups: list[ProcessGroup]) -> None:
    await asyncio.gather(*(pg.shutdown() for pg in groups))


# -- waiting


@pytest.mark.ranks(2)
@parametrize_transports(*LINKS)
async def test_many_threads_can_wait_for_one_work(pg: ProcessGroup) -> None:
    loop = asyncio.get_running_loop()
    work = pg.allreduce(tensor := np.full(5, pg.rank())) if pg.rank() else pg.recv_object(1)
    with ThreadPoolExecutor(4) as threads:
        limits = [None, inf, 30.0, timedelta(seconds=30)]
        waiting = [loop.run_in_executor(threads, work.wait, limit) for limit in limits]
        if pg.rank():
            await pg.send_object("all of you", 0)
            tensors = await asyncio.gather(*waiting)
            assert all(each is tensor for each in tensors)
        else:
            assert await asyncio.gather(*waiting) == ["all of you"] * 4
            await pg.allreduce(np.zeros(5, int))
        # The work has ended, so `wait` with timeout 0 returns the result at once.
        assert await loop.run_in_executor(threads, work.wait, 0) is work.result()


@pytest.mark.ranks(3)
@parametrize_transports(*LINKS)
async def test_threads_can_make_calls_through_the_event_loop(pg: ProcessGroup) -> None:
    rounds = 10
    loop = asyncio.get_running_loop()

    def train(key: str) -> list[float]:
        sums = []
        for number in range(rounds):
            step = asyncio.run_coroutine_threadsafe(make_call(pg.allreduce, number, key=key), loop)
            sums.append(step.result(30).wait(30))
        return sums

    with ThreadPoolExecutor(3) as threads:
        found = await asyncio.gather(*(loop.run_in_executor(threads, train, key) for key in "abc"))
    assert found == [[3 * number for number in range(rounds)]] * 3


@pytest.mark.ranks(2)
async def test_thread_that_waits_for_a_work_gets_its_failure(pg: ProcessGroup) -> None:
    loop = asyncio.get_running_loop()
    work = pg.allreduce(1, timeout=0.05) if pg.rank() == 0 else None
    if work is not None:
        with pytest.raises(CollectiveTimeoutError, match="ALLREDUCE"):
            await loop.run_in_executor(None, work.wait)
        # The thread retrieves the failure, so that it is not logged.
        assert isinstance(await loop.run_in_executor(None, work.exception), CollectiveTimeoutError)
    else:
        await pg.wait_revoked()


async def test_failure_of_a_work_retrieved_by_a_thread_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    store = HashStore()
    loop = asyncio.get_running_loop()
    first, second = await asyncio.gather(*(new_group(store=store, rank=rank, world_size=2) for rank in range(2)))
    work = first.allreduce(1)
    waiting = loop.run_in_executor(None, work.wait)
    while callbacks_of(work) is None:  # noqa: ASYNC110 - until the thread waits
        await asyncio.sleep(0)
    second.abort("the test ends")
    await close([first, second])
    with pytest.raises(GroupError, match="the test ends"):
        await waiting
    assert not [record for record in caplog.records if record.levelname == "ERROR"]
    await store.aclose()


@pytest.mark.ranks(2)
async def test_expired_wait_of_a_thread_leaves_no_callback_on_the_work(pg: ProcessGroup) -> None:
    loop = asyncio.get_running_loop()
    work = pg.recv(np.zeros(1), 1 - pg.rank())
    for limit in (0, -1, 0.01, timedelta(milliseconds=1)):
        with pytest.raises(TimeoutError, match=r"<Work RECV src=[01] tag=0 pending> has not ended within"):
            await loop.run_in_executor(None, work.wait, limit)
    await pg.barrier()
    assert callbacks_of(work) is None
    await pg.send(np.ones(1), 1 - pg.rank())
    assert (await loop.run_in_executor(None, work.wait)).tolist() == [1]


# -- loops that end


@pytest.mark.filterwarnings("ignore:group 'world.0' was not shut down:ResourceWarning")
@pytest.mark.parametrize("tidy", [False, True])
def test_closing_the_event_loop_ends_the_waits_of_threads(tidy: bool) -> None:
    """End the event loop while threads wait, with and without a shutdown of asynchronous generators."""
    error = GroupClosedError if tidy else RuntimeError
    text = "was closed by this rank" if tidy else "has not ended, and its event loop was closed"
    with Loop(tidy=tidy) as elsewhere:
        groups = elsewhere.run(pair())
        work = elsewhere.run(make_call(groups[0].recv, np.zeros(1), 1))
        with ThreadPoolExecutor(2) as threads:
            waiting = [threads.submit(work.wait, limit) for limit in (None, 30)]
            elsewhere.run(wait_for_waiters(work))
            elsewhere.stop()
            for each in waiting:
                with pytest.raises(error, match=text):
                    each.result(30)
    with pytest.raises(error, match=text):
        work.wait()
    del groups, work
    gc.collect()


async def wait_for_waiters(work: Work[Any]) -> None:
    """Wait until two threads wait for `work`."""
    while len(callbacks_of(work) or ()) < 2:  # noqa: ASYNC110
        await asyncio.sleep(0)


def test_finished_work_can_be_read_after_the_event_loop_is_closed() -> None:
    with Loop() as elsewhere:
        groups = elsewhere.run(pair())
        works = [elsewhere.run(make_call(pg.allreduce, 2.5)) for pg in groups]
        failed = elsewhere.run(make_call(groups[0].recv, np.zeros(1), 1))
        assert [work.wait(30) for work in works] == [5, 5]
        elsewhere.run(close(groups))
    assert [work.wait(0) for work in works] == [5, 5]
    with pytest.raises(GroupError, match=r"was closed by this rank|has left"):
        failed.wait()


def test_thread_can_wait_for_a_work_while_the_event_loop_is_stopped_and_restarted() -> None:
    loop = asyncio.new_event_loop()
    groups = loop.run_until_complete(pair())
    work = loop.run_until_complete(make_call(groups[0].allreduce, 1))
    # A wait in the thread of the stopped event loop is refused, since this thread could not run the loop meanwhile.
    with pytest.raises(RuntimeError, match="its event loop belongs to this thread and does not run"):
        work.wait()
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(work.wait)
        assert loop.run_until_complete(add_one(groups[1])) == 2
        loop.run_until_complete(close(groups))
        assert waiting.result(30) == 2
    assert work.wait() == 2
    loop.close()


def test_wait_for_a_work_in_a_forked_child_is_refused() -> None:
    with Loop() as elsewhere:
        groups = elsewhere.run(pair())
        work = elsewhere.run(make_call(groups[0].allreduce, 1))
        assert "belongs to the parent process" in run_in_fork(work.wait)
        assert elsewhere.run(add_one(groups[1])) == work.wait(30) == 2
        elsewhere.run(close(groups))


def test_keyboard_interrupt_ends_only_the_wait_for_a_work() -> None:
    """Interrupt the main thread, which runs Python's signal handlers, while it waits."""
    with Loop() as elsewhere:
        groups = elsewhere.run(pair())
        work = elsewhere.run(make_call(groups[0].allreduce, 1))

        async def interrupt() -> None:
            while callbacks_of(work) is None:  # noqa: ASYNC110
                await asyncio.sleep(0)
            os.kill(os.getpid(), signal.SIGINT)

        interrupting = elsewhere.call(interrupt())
        with pytest.raises(KeyboardInterrupt):
            work.wait(30)
        interrupting.result(30)
        assert elsewhere.run(add_one(groups[1])) == work.wait(30) == 2
        assert callbacks_of(work) is None
        elsewhere.run(close(groups))


# -- other loops


@pytest.mark.parametrize("inside", [False, True])
def test_call_from_another_thread_is_refused_with_a_remedy(inside: bool) -> None:
    with Loop() as elsewhere:
        groups = elsewhere.run(pair())

        async def call() -> None:
            groups[0].allreduce(1)

        with pytest.raises(RuntimeError, match=r"belongs to another event loop .*run_coroutine_threadsafe"):
            asyncio.run(call()) if inside else groups[0].allreduce(1)
        # A wait that blocks this thread is allowed for works of an event loop in another thread.
        works = [elsewhere.run(make_call(pg.allreduce, 1)) for pg in groups]
        assert [work.wait(30) for work in works] == [2, 2]
        elsewhere.run(close(groups))


@pytest.mark.parametrize("transport", LINKS[1:])
def test_two_loops_in_two_threads_can_be_two_ranks(transport: str) -> None:
    async def rank(port: int, number: int) -> list[Any]:
        store = TCPStore("127.0.0.1", port, timeout=30)
        async with new_group(store=store, rank=number, world_size=4, options=options(transport)) as pg:
            tensor = np.full(100_000, number, np.float64)
            await pg.allreduce(tensor)
            small = [await pg.allreduce(number + step) for step in range(20)]
            everybody = await pg.allgather_object(number)
            await pg.barrier()
        await store.aclose()
        return [tensor[0], tensor[-1], small, everybody]

    async def ranks(port: int, *numbers: int) -> list[Any]:
        return await asyncio.gather(*(rank(port, number) for number in numbers))

    with Loop() as first, Loop() as second:

        async def serve() -> TCPStore:
            store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            await store.set("here", b"")
            return store

        store = first.run(serve())
        found = [first.call(ranks(store.port, 0, 3)), second.call(ranks(store.port, 1, 2))]
        expected = [6, 6, [6 + 4 * step for step in range(20)], [0, 1, 2, 3]]
        assert [each.result(30) for each in found] == [[expected] * 2] * 2
        first.run(store.aclose())


def code_in(error: BaseException) -> list[str]:
    """Return the code spans (in backticks) of an error message."""
    return re.findall("`([^`]+)`", str(error))


def test_remedy_in_the_error_for_a_call_from_another_thread_works() -> None:
    with Loop() as elsewhere:
        groups = elsewhere.run(pair())
        other = elsewhere.run(make_call(groups[1].allreduce, 2.0))
        with pytest.raises(RuntimeError, match="'world:0' belongs to another event loop") as raised:
            groups[0].allreduce(1.0)
        define, call = code_in(raised.value)
        names = {"asyncio": asyncio, "pg": groups[0], "x": 1.0, "loop": elsewhere.loop}
        exec(define, names)
        assert eval(call, names) == other.wait(30) == 3.0
        elsewhere.run(close(groups))


def test_remedy_in_the_error_for_an_await_in_another_loop_works() -> None:
    async def waits(work: Work[Any]) -> Any:
        return await work

    with Loop() as elsewhere:
        groups = elsewhere.run(pair())
        works = [elsewhere.run(make_call(pg.recv_object, 1 - pg.rank())) for pg in groups]
        with pytest.raises(RuntimeError, match="belongs to another event loop") as raised:
            asyncio.run(waits(works[0]))
        sends = [elsewhere.run(make_call(pg.send_object, number, 1 - number)) for number, pg in enumerate(groups)]
        for line in code_in(raised.value):
            names = {"asyncio": asyncio, "work": works[0], "loop": elsewhere.loop}
            assert eval(line, names) == 1
        assert works[1].wait(30) == 0
        assert [work.wait(30) for work in sends] == [None, None]
        elsewhere.run(close(groups))


# -- event loops of libraries other than asyncio


def _by_hand(main: Callable[[], Coroutine[Any, Any, Any]]) -> None:
    """Run a coroutine by `send`, without any event loop."""
    main().send(None)


def _by_trio(main: Callable[[], Coroutine[Any, Any, Any]]) -> None:
    pytest.importorskip("trio").run(main)


@pytest.mark.parametrize(
    ("run", "message"),
    [(_by_hand, r"no asyncio event loop is running; .* asyncio\.run\(main\(\)\)"), (_by_trio, "trio is running, but")],
)
@pytest.mark.parametrize("what", ["group", "hash", "tcp", "file"])
def test_error_names_the_library_of_an_unsupported_event_loop(
    what: str, run: Callable[[Any], None], message: str, tmp_path: Path
) -> None:
    async def main() -> None:
        if what == "group":
            await new_group(store=HashStore(), rank=0, world_size=1)
        store = {
            "hash": HashStore,
            "tcp": lambda: TCPStore("127.0.0.1", 1),
            "file": lambda: FileStore(tmp_path / "store"),
        }[what]()
        await store.get("key", timeout=0)

    with pytest.raises(RuntimeError, match=message):
        run(main)
