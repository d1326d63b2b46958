"""Blocked, stopped and unreachable ranks: all are reported, but only ranks that cannot continue are declared dead.

Ranks that pretend to be on different hosts cannot inspect the process of a peer, so they exchange heartbeats.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import signal
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from aiocoll import (
    AiocollError,
    CollectiveTimeoutError,
    FileStore,
    GroupOptions,
    PeerLostError,
    ProcessGroup,
    new_group,
)
from aiocoll.testing import run_processes

from ..internals import comm_of
from ..ranks import wait_until

#: Seconds by which a timeout may be late (contract).
LATE = 1.0
#: Seconds within which every survivor must be notified of a stopped or unreachable rank (contract).
LOST_WITHIN = 6.0


class WarningLog(logging.Handler):
    """A log handler that collects the library's warnings in this process."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []
        self.changed = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())
        self._loop.call_soon_threadsafe(self.changed.set)


@contextmanager
def warning_log() -> Iterator[WarningLog]:
    logger, log = logging.getLogger("aiocoll"), WarningLog()
    logger.addHandler(log)
    try:
        yield log
    finally:
        logger.removeHandler(log)


def block(seconds: float) -> None:
    time.sleep(seconds)


def hold_gil(seconds: float) -> None:
    """Hold the GIL for some seconds in a C call, in which the interpreter cannot switch threads."""
    all(map((time.monotonic() + seconds).__gt__, iter(time.monotonic, None)))


async def run_on_two_hosts(pg: ProcessGroup, path: Path, fn: Callable[..., Awaitable[Any]], *args: Any) -> Any:
    """Run `fn` on a group in which rank 0 pretends to be on one host, and all other ranks on another host."""
    options = GroupOptions(host_id="ab"[pg.rank() > 0], bind="127.0.0.1", job_key="of this test and no other")
    async with FileStore(str(path), pg.size()) as store:
        async with new_group(store=store, rank=pg.rank(), world_size=pg.size(), options=options) as inner:
            watchdog = comm_of(inner).endpoint.failure_detector._watchdog
            assert watchdog is not None
            watched = [0] if pg.rank() else range(1, pg.size())
            await wait_until(lambda: all(watchdog.silence(rank) is not None for rank in watched))
            await inner.barrier()
            result = await fn(inner, *args)
        watchdogs = [thread.name for thread in threading.enumerate() if "watchdog" in thread.name]
        assert len(watchdogs) == 1, "a watchdog of the closed group still runs"
    return result


async def wait_for_busy_rank(pg: ProcessGroup, victim: int, how: str, seconds: float) -> tuple[float, list[str]]:
    """Let all ranks wait in an allreduce for a busy rank; return the result of the call, and the warnings."""
    with warning_log() as log:
        await pg.barrier()
        if pg.rank() == victim:
            {"block": block, "hog": hold_gil}[how](seconds)
        total = await pg.allreduce(float(pg.rank()))
        assert isinstance(total, float)
        await pg.barrier()
        # Wait for the warning about this process, which a separate thread may log late.
        await log.changed.wait()
    return total, log.messages


async def reduce_while_stopped(pg: ProcessGroup, victim: int, seconds: float) -> tuple[str, float, list[str]]:
    """Stop a rank during an allreduce; return the outcome and the duration of the call, and the warnings."""
    pids = await pg.allgather_object(os.getpid())
    loop = asyncio.get_running_loop()
    started = loop.time()
    with warning_log() as log:
        if pg.rank() == victim:
            os.kill(os.getpid(), signal.SIGSTOP)
        elif pg.rank() == (victim + 1) % pg.size():
            loop.call_later(seconds, os.kill, pids[victim], signal.SIGCONT)
        try:
            assert await pg.allreduce(1, timeout=60) == pg.size()
            outcome = "right"
        except PeerLostError as error:
            outcome = f"{error.how} {error.ranks}"
        took = loop.time() - started
        # Keep this rank alive until its timer has continued the stopped rank.
        await asyncio.sleep(max(0.0, seconds + 0.1 - took))
    return outcome, took, log.messages


def check_busy(
    results: list[tuple[float, list[str]]], victim: int, seen: str, place: str | None, endpoints: int = 1
) -> None:
    """Check the sums. Check that each rank has warned once about the busy rank, and the busy rank about itself."""
    for rank, (total, messages) in enumerate(results):
        assert total == sum(range(len(results)))
        text = messages[0]
        assert len(messages) == 1 or (rank == victim and len(messages) == endpoints)
        if rank != victim:
            slow = rf"rank {rank}: rank {victim} is slow: it has not answered for [1-9]\.\d s{re.escape(seen)}"
            assert re.search(slow, text)
            assert "; ALLREDUCE(shape=[], dtype=float64, " in text
        elif place is None:
            assert text.startswith(f"rank {rank}: for about ")
            assert text.endswith("it was stopped, or one call held the GIL")
        else:
            assert text.startswith(f"rank {rank}: the event loop has been blocked for ")
            assert f" s, at {__file__}:" in text
            assert f" in {place}, called from {__file__}:" in text


def check_lost(results: list[tuple[str, float, list[str]]], victim: int, how: str) -> None:
    for rank, (outcome, took, _) in enumerate(results):
        if rank != victim:
            assert outcome == f"{how} ({victim},)"
            assert took <= LOST_WITHIN


@pytest.mark.slow
async def test_rank_with_a_blocked_loop_is_reported_as_slow_and_not_as_dead() -> None:
    """Block rank 0, which is the coordinator, or another rank."""
    both = await asyncio.gather(*(run_processes(3, wait_for_busy_rank, victim, "block", 3.0) for victim in (0, 2)))
    for victim, results in zip((0, 2), both, strict=True):
        check_busy(results, victim, ", its process is alive (sleeping)", "block")


async def join_without_watchdog(pg: ProcessGroup, path: Path, victim: int) -> tuple[str, str, float]:
    """Make a group in which one rank cannot start its watchdog; return the error, and the seconds until the error."""
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if "watchdog" in thread.name and pg.rank() == victim:
            raise RuntimeError("can't start new thread")
        start(thread)

    threading.Thread.start = refuse  # type: ignore[method-assign]
    began = time.monotonic()
    try:
        async with (
            FileStore(str(path), pg.size()) as store,
            new_group(store=store, rank=pg.rank(), world_size=pg.size(), timeout=60) as inner,
        ):
            await inner.allreduce(1)
    except AiocollError as error:
        return type(error).__name__, str(error), time.monotonic() - began
    finally:
        threading.Thread.start = start  # type: ignore[method-assign]
    return "", "", 0.0


@pytest.mark.parametrize("victim", [0, 2])
async def test_failed_start_of_a_watchdog_fails_the_group_at_once_on_every_rank(tmp_path: Path, victim: int) -> None:
    results = await run_processes(3, join_without_watchdog, tmp_path / "store", victim)
    cause = f"rank {victim} cannot start its watchdog thread (can't start new thread); allow this user or container"
    for rank, (error, text, seconds) in enumerate(results):
        assert error in ("RendezvousError", "PeerLostError", "GroupRevokedError")
        assert rank != victim or error == "RendezvousError"
        assert cause in text
        assert seconds < 5.0


async def time_out_on_blocked_rank(pg: ProcessGroup, victim: int, timeout: float) -> tuple[Any, float]:
    """Block the loop of `victim` past the timeout of a call that the last rank omits; return the error and its time."""
    await pg.barrier()
    if pg.rank() == victim:
        block(timeout + 1)
    if pg.rank() == pg.size() - 1:
        return await pg.wait_revoked(), timeout
    started = time.monotonic()
    try:
        await pg.allreduce(1, timeout=timeout)
    except CollectiveTimeoutError as error:
        return error, time.monotonic() - started
    return None, 0.0


@pytest.mark.slow
async def test_timeout_error_names_a_blocked_coordinator() -> None:
    results = await run_processes(4, time_out_on_blocked_rank, 0, 0.4)
    for error, took in results[1:]:
        assert error.ranks == (0, 3)
        assert re.search(r"it waits for rank 0 \(which has not answered for \d\.\d+ s", str(error))
        assert "rank 3 (last in BARRIER(" in str(error)
        assert 0.3 < took < 0.4 + LATE


@pytest.mark.slow
async def test_rank_that_holds_the_gil_is_reported_as_slow_and_not_as_dead(tmp_path: Path) -> None:
    one_host, two_hosts = await asyncio.gather(
        run_processes(2, wait_for_busy_rank, 1, "hog", 3.0),
        run_processes(3, run_on_two_hosts, tmp_path / "store", wait_for_busy_rank, 0, "hog", 3.0),
    )
    check_busy(one_host, 1, ", its process is alive (running)", None)
    check_busy(two_hosts, 0, "", None, 2)


@pytest.mark.slow
async def test_rank_that_is_stopped_for_two_seconds_continues() -> None:
    both = await asyncio.gather(*(run_processes(3, reduce_while_stopped, victim, 2.0) for victim in (0, 1)))
    for victim, results in zip((0, 1), both, strict=True):
        for rank, (outcome, _, messages) in enumerate(results):
            assert outcome == "right"
            if rank != victim:
                (text,) = messages
                slow = rf"rank {rank}: rank {victim} is slow: it has not answered for 1\.\d s, its process is alive "
                assert re.search(slow + re.escape("(stopped)"), text)


@pytest.mark.slow
async def test_rank_that_stays_stopped_is_reported_lost() -> None:
    both = await asyncio.gather(*(run_processes(3, reduce_while_stopped, victim, LOST_WITHIN) for victim in (0, 1)))
    for victim, results in zip((0, 1), both, strict=True):
        check_lost(results, victim, "stopped")


@pytest.mark.slow
async def test_silent_host_is_declared_dead_and_a_rank_with_a_blocked_loop_is_not(tmp_path: Path) -> None:
    """Block or stop ranks for a longer time than heartbeats may be missing."""
    cut = await asyncio.gather(
        run_processes(3, run_on_two_hosts, tmp_path / "a", reduce_while_stopped, 0, LOST_WITHIN),
        run_processes(3, run_on_two_hosts, tmp_path / "b", reduce_while_stopped, 2, LOST_WITHIN),
        run_processes(2, run_on_two_hosts, tmp_path / "c", wait_for_busy_rank, 1, "block", LOST_WITHIN),
    )
    check_lost(cut[0], 0, "unreachable")
    check_lost(cut[1], 2, "unreachable")
    check_busy(cut[2], 1, ", its process is alive", "block", 2)


@pytest.mark.soak
@pytest.mark.parametrize("victim", range(4))
async def test_rank_that_is_blocked_for_ten_seconds_is_not_declared_dead(victim: int, tmp_path: Path) -> None:
    check_busy(
        await run_processes(4, wait_for_busy_rank, victim, "block", 10.0), victim, ", its process is alive", "block"
    )
    check_lost(await run_processes(4, reduce_while_stopped, victim, 10.0), victim, "stopped")
    two_hosts = await run_processes(4, run_on_two_hosts, tmp_path / "a", wait_for_busy_rank, victim, "block", 10.0)
    check_busy(two_hosts, victim, "", "block", 2)
    two_hosts = await run_processes(4, run_on_two_hosts, tmp_path / "b", reduce_while_stopped, victim, 10.0)
    for rank, (outcome, took, _) in enumerate(two_hosts):
        if rank != victim:
            assert outcome in (f"stopped ({victim},)", f"unreachable ({victim},)")
            assert took <= LOST_WITHIN
