"""The thread that watches, with other seconds; and where there is none."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest

from aiocoll import ProcessGroup
from aiocoll.engine.failure import watchdog
from aiocoll.engine.failure.watchdog import Watchdog
from aiocoll.process import this_process
from aiocoll.transport.stream.plain_stream import PlainStream

from ..internals import Limits
from ..ranks import LINKS, over


class Heard:
    """What a watchdog has told."""

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


@asynccontextmanager
async def started() -> AsyncIterator[tuple[Watchdog, Heard]]:
    heard = Heard()
    made = Watchdog(3, asyncio.get_running_loop(), time.perf_counter, heard.on_lost, heard.on_ended)
    made.start()
    try:
        yield made, heard
    finally:
        made.stop()


@pytest.fixture
def quick(limits: Limits) -> None:
    """Let its seconds pass twenty times as fast."""
    limits(
        watchdog_round=watchdog.ROUND / 20,
        unreachable_after=watchdog.UNREACHABLE_AFTER / 20,
        blocked_after=watchdog.BLOCKED_AFTER / 20,
    )


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    theirs.setblocking(False)
    with ours, theirs:
        yield ours, theirs


def plain(sock: socket.socket) -> PlainStream:
    return PlainStream(asyncio.get_running_loop(), sock)


@pytest.mark.usefixtures("quick")
async def test_a_silent_heartbeat_is_a_lost_rank_once(pair: tuple[socket.socket, socket.socket]) -> None:
    async with started() as (watch, heard):
        watch.add_heartbeat(7, plain(pair[0]))
        started_at = time.perf_counter()
        await heard.anything.wait()
        assert time.perf_counter() - started_at >= watchdog.UNREACHABLE_AFTER - watchdog.ROUND
        assert watch.silence(7) is None
    ((rank, how, seconds),) = heard.lost
    assert (rank, how) == (7, "unreachable")
    assert seconds >= watchdog.UNREACHABLE_AFTER
    assert pair[0].fileno() == -1
    assert len(pair[1].recv(1000)) >= watchdog.UNREACHABLE_AFTER / watchdog.ROUND / 2, "it has sent its own bytes"


@pytest.mark.usefixtures("quick")
async def test_heartbeats_keep_each_other_alive_while_the_loop_is_blocked(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    async with started() as (one, heard), started() as (two, heard_too):
        one.add_heartbeat(7, plain(pair[0]))
        two.add_heartbeat(8, plain(pair[1]))
        time.sleep(2 * watchdog.UNREACHABLE_AFTER)  # noqa: ASYNC251 - that is the fault
        await asyncio.sleep(0)
        assert one.silence(7) is not None
        assert two.silence(8) is not None
    assert heard.lost == heard_too.lost == []


@pytest.mark.usefixtures("quick")
async def test_the_end_of_a_heartbeat_is_no_death(pair: tuple[socket.socket, socket.socket]) -> None:
    async with started() as (watch, heard):
        watch.add_heartbeat(7, plain(pair[0]))
        pair[1].close()
        await heard.anything.wait()
    assert (heard.ended, heard.lost) == ([7], [])


async def test_a_heartbeat_that_comes_too_late_is_closed(pair: tuple[socket.socket, socket.socket]) -> None:
    async with started() as (watch, _):
        watch.stop()
        watch.add_heartbeat(7, plain(pair[0]))
    assert pair[0].fileno() == -1


async def test_a_process_that_is_gone_is_told(quick: None) -> None:
    gone = this_process()._replace(started=0)
    async with started() as (watch, heard):
        watch.observe({1: this_process(), 2: gone})
        await heard.anything.wait()
    assert {(rank, how) for rank, how, _ in heard.lost} == {(2, "killed")}


@pytest.mark.usefixtures("quick")
def test_a_loop_that_does_not_run_is_not_blocked(caplog: pytest.LogCaptureFixture) -> None:
    """And a loop that is closed ends the thread."""
    loop = asyncio.new_event_loop()

    async def make() -> Watchdog:
        heard = Heard()
        made = Watchdog(3, asyncio.get_running_loop(), time.perf_counter, heard.on_lost, heard.on_ended)
        made.start()
        return made

    made = loop.run_until_complete(make())
    with caplog.at_level(logging.INFO, logger="aiocoll"):
        time.sleep(4 * watchdog.BLOCKED_AFTER)
    loop.close()
    made._thread.join(60)
    assert not made._thread.is_alive()
    assert not caplog.records


@pytest.mark.ranks(3)
@over(*LINKS)
async def test_ranks_of_one_process_have_none(pg: ProcessGroup) -> None:
    await pg.barrier()
    assert not [thread.name for thread in threading.enumerate() if "watchdog" in thread.name]
