"""The contract of failed `Work` objects: every awaiter gets the error, and an unretrieved error is logged."""

from __future__ import annotations

import asyncio
import gc
import logging
import re
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest

from aiocoll import (
    CollectiveMismatchError,
    CollectiveTimeoutError,
    GroupClosedError,
    GroupError,
    GroupRevokedError,
    PeerLostError,
    ProcessGroup,
    Work,
)

from ..internals import comm_of
from ..ranks import wait_until
from .groups import WORKS, await_work, group_of_ranks, start_allreduce

#: A timeout in seconds: about the shortest timeout with which the accelerator still carries out calls.
TIMEOUT = 0.3


@pytest.fixture(params=WORKS)
def kind(request: pytest.FixtureRequest) -> str:
    """Return the kind of `Work` that the test starts on rank 0, one of `WORKS`."""
    return str(request.param)


async def make_mismatch(zero: ProcessGroup, one: ProcessGroup) -> None:
    """Make a different call on rank 1, so that the calls mismatch."""
    with pytest.raises(CollectiveMismatchError):
        await one.broadcast(np.ones(3), 0)


async def make_no_call(zero: ProcessGroup, one: ProcessGroup) -> None:
    """Make no call on rank 1, so that the timeout expires."""


async def close_on_peer(zero: ProcessGroup, one: ProcessGroup) -> None:
    """Close the group on rank 1."""
    await one.shutdown()


async def abort_group(zero: ProcessGroup, one: ProcessGroup) -> None:
    """Abort the group on rank 0."""
    zero.abort("out of patience")


async def abort_on_peer(zero: ProcessGroup, one: ProcessGroup) -> None:
    """Abort the group on rank 1."""
    one.abort("out of patience")


async def close_group(zero: ProcessGroup, one: ProcessGroup) -> None:
    """Close the group on rank 0."""
    await zero.shutdown()


#: Functions that make a call of rank 0 fail, with the class and the text of the error.
FAILURES = [
    (make_mismatch, CollectiveMismatchError, r"ALLREDUCE[\s\S]*BROADCAST|BROADCAST[\s\S]*ALLREDUCE"),
    (make_no_call, CollectiveTimeoutError, r"ALLREDUCE[\s\S]* rank 1|rank 1[\s\S]*ALLREDUCE"),
    (close_on_peer, PeerLostError, r"ALLREDUCE[\s\S]*rank 1"),
    (abort_group, GroupError, "out of patience"),
    (abort_on_peer, GroupError, "out of patience"),
    (close_group, GroupClosedError, "closed"),
]
Fail = Callable[[ProcessGroup, ProcessGroup], Awaitable[None]]
each_failure = pytest.mark.parametrize(("fail", "error", "text"), FAILURES, ids=[each[0].__name__ for each in FAILURES])


@each_failure
async def test_failure_of_a_work_is_raised_in_every_awaiting_task(
    kind: str, fail: Fail, error: type[Exception], text: str
) -> None:
    async with group_of_ranks([kind != "completion", True], timeout=TIMEOUT) as (zero, one):
        called: list[Any] = []
        work = start_allreduce(kind, zero, np.ones(3))
        tasks = [asyncio.create_task(await_work(work)) for _ in range(5)]
        await asyncio.sleep(0)
        if kind == "taken over":
            work.add_done_callback(called.append)
            tasks.append(asyncio.create_task(asyncio.to_thread(work.wait)))
        tasks[2].cancel()
        await fail(zero, one)
        async with asyncio.timeout(5):
            results = await asyncio.gather(*tasks, return_exceptions=True)
        assert isinstance(results.pop(2), asyncio.CancelledError)
        assert {type(each) for each in results} <= {error, *error.__subclasses__()}
        assert len(set(map(id, results))) == 1, "awaiters got different exceptions"
        assert re.search(text, str(results[0])), results[0]
        check_failed(work, results[0])
        with pytest.raises(type(results[0])):
            await work
        (shown,) = await asyncio.gather(asyncio.wait_for(work, 1), return_exceptions=True)
        assert shown is results[0]
        assert called == [work] * (kind == "taken over")


def check_failed(work: Work[Any], error: BaseException) -> None:
    """Check the state, the exception and the repr of a failed work."""
    assert work.done()
    assert not work.is_success()
    assert not work.cancelled()
    assert work.exception() is error
    with pytest.raises(type(error)) as raised:
        work.result()
    assert raised.value is error
    assert repr(work) == f"<Work ALLREDUCE seq={work.seq} failed>"


@each_failure
async def test_group_is_revoked_by_the_first_failure(kind: str, fail: Fail, error: type[Exception], text: str) -> None:
    async with group_of_ranks([kind != "completion", True], timeout=TIMEOUT) as (zero, one):
        works = [start_allreduce(kind, zero, np.ones(3))]
        works += [zero.allreduce(np.ones(3)) for _ in range(4)]
        await fail(zero, one)
        async with asyncio.timeout(5):
            found = await asyncio.gather(*works, return_exceptions=True)
        assert all(isinstance(each, GroupError) for each in found), found
        assert zero.pending() == []
        with pytest.raises(GroupClosedError if fail is close_group else (GroupRevokedError, GroupError)):
            await zero.allreduce(np.ones(3))


@each_failure
async def test_unretrieved_failure_of_a_work_is_logged_with_the_line_of_the_call(
    kind: str, fail: Fail, error: type[Exception], text: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR, "aiocoll")
    async with group_of_ranks([kind != "completion", True], timeout=TIMEOUT) as (zero, one):
        work = start_allreduce(kind, zero, np.ones(3))
        await fail(zero, one)
        await wait_until(work.done)
        del work
        await wait_until(lambda: not len(comm_of(zero).in_flight))
    gc.collect()
    logged = [each.getMessage() for each in caplog.records if "rank 0: exception of ALLREDUCE" in each.getMessage()]
    expected = fail is not abort_group  # no log record if the program on rank 0 aborted the group itself
    assert len(logged) == expected, logged
    if expected:
        assert re.search(r"ALLREDUCE \(sequence 2\) called at \S*native/groups.py:\d+ was never retrieved", logged[0])


@pytest.mark.parametrize("when", ["in flight", "after the failure"])
async def test_retrieved_failure_of_a_work_is_not_logged(
    kind: str, when: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR, "aiocoll")
    async with group_of_ranks([kind != "completion", True], timeout=TIMEOUT) as (zero, one):
        work = start_allreduce(kind, zero, np.ones(3))
        task = asyncio.create_task(await_work(work)) if when == "in flight" else None
        await asyncio.sleep(0)
        one.abort("a test")
        await wait_until(work.done)
        with pytest.raises(GroupError):
            await (work if task is None else task)
        del work, task
    gc.collect()
    assert [each for each in caplog.records if "rank 0: exception of" in each.getMessage()] == []


async def test_failed_works_leave_no_reference_cycles(kind: str) -> None:
    async with group_of_ranks([kind != "completion", True], timeout=TIMEOUT) as (zero, one):
        work = start_allreduce(kind, zero, np.ones(3))
        one.abort("a test")
        await wait_until(work.done)
        assert isinstance(work.exception(), GroupError)
        gc.collect()
        gc.disable()
        try:
            del work
            await asyncio.sleep(0)
            assert [each for each in gc.get_objects() if isinstance(each, Work) and each.group is zero] == []
        finally:
            gc.enable()


async def test_failed_works_of_a_closed_loop_can_be_inspected(kind: str) -> None:
    kept: list[Work[Any]] = []

    async def program() -> None:
        async with group_of_ranks([kind != "completion", True], timeout=TIMEOUT) as (zero, one):
            kept.append(start_allreduce(kind, zero, np.ones(3)))
            await one.allreduce(np.ones(3))
            await kept[0]
            kept.append(start_allreduce(kind, zero, np.ones(3)))
            kept.append(start_second(zero))
            one.abort("a test")
            await wait_until(kept[1].done)

    def start_second(zero: ProcessGroup) -> Work[Any]:
        return zero.allreduce(np.ones(3))

    await asyncio.to_thread(asyncio.run, program())
    assert (kept[0].result() == 2).all()
    assert repr(kept[0]).endswith(" done>")
    for work in kept[1:]:
        assert isinstance(work.exception(), GroupError)
        assert repr(work).endswith(" failed>")
    with pytest.raises(GroupError):
        kept[1].wait()
    assert (kept[0].wait() == 2).all()
