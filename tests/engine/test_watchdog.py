"""The watchdog thread with shortened time constants, and groups without a watchdog."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from unittest import mock

import pytest

from aiocoll import ProcessGroup
from aiocoll.engine.failure import watchdog
from aiocoll.engine.failure.watchdog import Watchdog
from aiocoll.process import GONE, STOPPED, UNKNOWN
from aiocoll.transport.stream.plain_stream import PlainStream

from ..internals import Limits
from ..ranks import LINKS, parametrize_transports


class Reports:
    """A recorder of the ranks that a watchdog reports as lost or ended."""

    def __init__(self) -> None:
        self.lost: list[tuple[int, str, float]] = []
        self.ended: list[int] = []
        self.anything = asyncio.Event()

    def on_lost(self, rank: int, how: str, seconds: float) -> None:
        self.lost.append((rank, how, seconds))
        self.anything.set()

    def on_ended(self, rank: int) -> None:
        self.ended.append(rank)
        self.anything.set()


def make_watchdog(reports: Reports, states: Callable[[int], str] = {}.__getitem__) -> Watchdog:
    return Watchdog(3, asyncio.get_running_loop(), time.perf_counter, states, reports.on_lost, reports.on_ended)


@asynccontextmanager
async def running_watchdog(states: Callable[[int], str] = {}.__getitem__) -> AsyncIterator[tuple[Watchdog, Reports]]:
    reports = Reports()
    made = make_watchdog(reports, states)
    made.start()
    try:
        yield made, reports
    finally:
        made.stop()


@pytest.fixture
def quick(limits: Limits) -> None:
    """Divide the time constants of the watchdog by twenty."""
    limits(
        watchdog_interval=watchdog.ROUND / 20,
        unreachable_after=watchdog.UNREACHABLE_AFTER / 20,
        blocked_after=watchdog.BLOCKED_AFTER / 20,
    )


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    near, far = socket.socketpair()
    near.setblocking(False)
    far.setblocking(False)
    with near, far:
        yield near, far


def plain_stream(sock: socket.socket) -> PlainStream:
    return PlainStream(asyncio.get_running_loop(), sock)


@pytest.mark.usefixtures("quick")
async def test_missing_heartbeats_are_reported_once_as_a_lost_rank(pair: tuple[socket.socket, socket.socket]) -> None:
    async with running_watchdog() as (watch, reports):
        watch.add_heartbeat(7, plain_stream(pair[0]))
        started_at = time.perf_counter()
        await reports.anything.wait()
        assert time.perf_counter() - started_at >= watchdog.UNREACHABLE_AFTER - watchdog.ROUND
        assert watch.silence(7) is None
    ((rank, how, seconds),) = reports.lost
    assert (rank, how) == (7, "unreachable")
    assert seconds >= watchdog.UNREACHABLE_AFTER
    assert pair[0].fileno() == -1
    assert len(pair[1].recv(1000)) >= watchdog.UNREACHABLE_AFTER / watchdog.ROUND / 2, (
        "the watchdog has sent too few heartbeats"
    )


@pytest.mark.usefixtures("quick")
async def test_watchdogs_exchange_heartbeats_while_the_event_loop_is_blocked(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    async with running_watchdog() as (one, reports), running_watchdog() as (two, other_reports):
        one.add_heartbeat(7, plain_stream(pair[0]))
        two.add_heartbeat(8, plain_stream(pair[1]))
        time.sleep(2 * watchdog.UNREACHABLE_AFTER)  # noqa: ASYNC251 - the injected fault
        await asyncio.sleep(0)
        assert one.silence(7) is not None
        assert two.silence(8) is not None
    assert reports.lost == other_reports.lost == []


@pytest.mark.usefixtures("quick")
async def test_closed_heartbeat_stream_is_not_reported_as_a_death(pair: tuple[socket.socket, socket.socket]) -> None:
    async with running_watchdog() as (watch, reports):
        watch.add_heartbeat(7, plain_stream(pair[0]))
        pair[1].close()
        await reports.anything.wait()
    assert (reports.ended, reports.lost) == ([7], [])


async def test_heartbeat_stream_added_after_the_stop_is_closed(pair: tuple[socket.socket, socket.socket]) -> None:
    async with running_watchdog() as (watch, _):
        watch.stop()
        watch.add_heartbeat(7, plain_stream(pair[0]))
    assert pair[0].fileno() == -1


@pytest.mark.usefixtures("quick")
async def test_watchdog_reports_an_ended_process() -> None:
    async with running_watchdog({1: "running", 2: GONE, 4: UNKNOWN}.__getitem__) as (watch, reports):
        watch.observe([1, 2, 4])
        await reports.anything.wait()
    assert {(rank, how) for rank, how, _ in reports.lost} == {(2, "killed")}


async def test_watchdog_reports_a_stopped_process_despite_missing_observations() -> None:
    """Check that an unknown process state neither counts as stopped nor resets the count."""
    reports = Reports()
    seen = iter([STOPPED, UNKNOWN] * 11)
    watch = make_watchdog(reports, lambda rank: next(seen))
    for _ in range(20):
        watch.observe([1])
        watch._check_processes(0.0, watchdog.ROUND)
    assert watchdog.STOPPED_AFTER / watchdog.ROUND == 9  # so the tenth observation is reported
    await asyncio.sleep(0)
    assert reports.lost == [(1, "stopped", watchdog.STOPPED_AFTER)]


@pytest.mark.usefixtures("quick")
async def test_watchdog_thread_continues_without_optional_features(
    pair: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run a watchdog that can start no log thread, read no process state and find no blocked line."""
    async with running_watchdog() as (watch, reports):  # each query of a process state raises KeyError
        monkeypatch.setattr(threading.Thread, "start", mock.Mock(side_effect=RuntimeError("can't start new thread")))
        monkeypatch.setattr(watchdog, "place", mock.Mock(side_effect=MemoryError))
        watch.add_heartbeat(7, plain_stream(pair[0]))
        watch.observe([1])
        time.sleep(2 * watchdog.BLOCKED_AFTER)  # noqa: ASYNC251 - the injected fault
        monkeypatch.undo()
        before = len(pair[1].recv(1000))
        assert before >= watchdog.BLOCKED_AFTER / watchdog.ROUND
        pair[1].close()
        await reports.anything.wait()
    assert (reports.ended, reports.lost) == ([7], [])


async def test_warning_is_logged_by_the_event_loop_if_no_thread_can_start(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    watch = make_watchdog(Reports())
    monkeypatch.setattr(threading.Thread, "start", mock.Mock(side_effect=RuntimeError("can't start new thread")))
    watch._check_itself(watchdog.ROUND + watchdog.BLOCKED_AFTER)
    assert not caplog.records
    await asyncio.sleep(0)
    assert "rank 3: for about 1.5 s no other thread of this process could run" in caplog.text


async def test_watchdog_can_stop_while_a_warning_thread_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate a busy host: `stop` returns before the thread that logs a warning has started."""
    begun, go_on, start = threading.Event(), threading.Event(), threading.Thread.start

    def start_late(thread: threading.Thread) -> None:
        if thread.name.startswith("aiocoll warning"):
            begun.set()
            go_on.wait()
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_late)
    async with running_watchdog() as (made, _):
        warning = threading.Thread(target=made._log, args=(logging.WARNING, "a warning of a test"))
        warning.start()
        begun.wait()
        try:
            made.stop()
        finally:
            go_on.set()
            warning.join()


@pytest.mark.usefixtures("quick")
def test_loop_that_does_not_run_is_not_reported_as_blocked(caplog: pytest.LogCaptureFixture) -> None:
    """Check that a closed event loop also ends the watchdog thread."""
    loop = asyncio.new_event_loop()

    async def start() -> Watchdog:
        made = make_watchdog(Reports())
        made.start()
        return made

    made = loop.run_until_complete(start())
    with caplog.at_level(logging.INFO, logger="aiocoll"):
        time.sleep(4 * watchdog.BLOCKED_AFTER)
    loop.close()
    made._thread.join(60)
    assert not made._thread.is_alive()
    assert not caplog.records


@pytest.mark.ranks(3)
@parametrize_transports(*LINKS)
async def test_ranks_of_one_process_have_no_watchdog(pg: ProcessGroup) -> None:
    await pg.barrier()
    assert not [thread.name for thread in threading.enumerate() if "watchdog" in thread.name]
