"""`run_ranks`: results, failures, timeouts, and their reports."""

from __future__ import annotations

import asyncio
import unittest
from typing import Any

import pytest

from aiocoll import (
    GroupError,
    GroupOptions,
    HashStore,
    ProcessGroup,
    StoreUnavailableError,
    current_process_group,
)
from aiocoll.testing import run_ranks, run_virtual
from tests.testing.all_calls import make_all_calls


async def describe_rank(pg: ProcessGroup, *args: Any) -> tuple[Any, ...]:
    return pg.rank(), pg.size(), *args


async def test_results_are_returned_in_rank_order() -> None:
    assert await run_ranks(3, describe_rank, "a", 5) == [(0, 3, "a", 5), (1, 3, "a", 5), (2, 3, "a", 5)]


@pytest.mark.parametrize("transport", ["auto", "unix", "tcp"])
async def test_ranks_make_every_call_over_every_transport(transport: Any) -> None:
    assert await run_ranks(3, make_all_calls, (5, 70_000), options=GroupOptions(transport=transport)) == [2] * 3


async def test_each_rank_has_its_own_current_group() -> None:
    async def same(pg: ProcessGroup) -> bool:
        before = current_process_group() is pg
        await pg.barrier()
        return before and current_process_group() is pg

    assert await run_ranks(4, same) == [True] * 4
    assert current_process_group() is None


async def test_ranks_meet_in_the_given_store() -> None:
    async with HashStore() as store:
        await run_ranks(2, describe_rank, store=store)
        assert await store.get("aiocoll/world_size") == b"2"
        await run_ranks(2, describe_rank, store=store)


async def test_store_created_by_the_run_is_closed() -> None:
    stores = []

    class Seen(HashStore):
        def __init__(self) -> None:
            super().__init__()
            stores.append(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("aiocoll.testing.ranks.HashStore", Seen)
        await run_ranks(2, describe_rank)
    with pytest.raises(StoreUnavailableError):
        await stores[0].num_keys()


class GiveUp(Exception):
    """An error that only the ranks of these tests raise."""


async def test_first_failure_is_raised_unchanged_with_a_note_about_the_rank() -> None:
    error = GiveUp("enough")
    causes = []

    async def fail(pg: ProcessGroup) -> None:
        if pg.rank() == 2:
            raise error
        try:
            await pg.barrier()
        except GroupError as consequence:
            causes.append(str(consequence))
            raise

    with pytest.raises(GiveUp) as caught:
        await run_ranks(4, fail)
    assert caught.value is error
    assert error.__notes__ == ["rank 2 of 4 failed first"]
    assert [entry.name for entry in caught.traceback][-1] == "fail"
    assert len(causes) == 3
    assert all("was aborted by rank 2: GiveUp: enough" in cause for cause in causes)


async def test_failures_of_other_ranks_are_added_as_notes() -> None:
    async def fail(pg: ProcessGroup) -> None:
        if pg.rank() == 1:
            raise GiveUp
        try:
            await pg.barrier()
        except GroupError:
            if pg.rank() == 0:
                raise KeyError("other") from None
            raise

    with pytest.raises(GiveUp) as caught:
        await run_ranks(3, fail)
    assert caught.value.__notes__ == ["rank 1 of 3 failed first", "rank 0 of 3 failed too: KeyError: 'other'"]


def test_waiting_ranks_are_cancelled_after_a_failure() -> None:
    cancelled = []

    async def fail(pg: ProcessGroup) -> None:
        if pg.rank() == 0:
            raise GiveUp
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(pg.rank())
            raise

    with pytest.raises(GiveUp) as caught:
        run_virtual(3, fail)
    assert sorted(cancelled) == [1, 2]
    assert caught.value.__notes__ == [
        "rank 0 of 3 failed first",
        "ranks 1 and 2 of 3 continued, and had to be stopped",
    ]


async def test_timeout_scale_variable_applies_to_runs_in_real_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIOCOLL_TEST_TIMEOUT_SCALE", "0.25")

    async def wait(pg: ProcessGroup) -> None:
        await asyncio.Event().wait()

    with pytest.raises(TimeoutError, match=r"ranks 0 and 1 of 2 did not end within 0\.05 s"):
        await run_ranks(2, wait, timeout=0.2)


def test_timeout_scale_variable_does_not_apply_to_virtual_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIOCOLL_TEST_TIMEOUT_SCALE", "0.25")

    async def wait(pg: ProcessGroup) -> None:
        await asyncio.sleep(20)

    run_virtual(2, wait, timeout=30)


@pytest.mark.parametrize("scale", ["0", "-1", "inf", "nan", "twice", ""])
async def test_error_names_a_wrong_timeout_scale_variable(scale: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIOCOLL_TEST_TIMEOUT_SCALE", scale)
    with pytest.raises(ValueError, match=f"AIOCOLL_TEST_TIMEOUT_SCALE='{scale}': must be a number above 0"):
        await run_ranks(2, describe_rank)


async def test_pytest_skip_or_fail_of_a_rank_is_the_outcome_of_the_run() -> None:
    async def skip(pg: ProcessGroup) -> None:
        if pg.rank() == 1:
            pytest.skip("not here")
        await pg.barrier()

    with pytest.raises(pytest.skip.Exception, match="not here"):
        await run_ranks(2, skip)


async def test_skip_does_not_hide_a_failure() -> None:
    async def skip_or_fail(pg: ProcessGroup) -> None:
        if pg.rank() == 1:
            raise unittest.SkipTest("not here")
        try:
            await pg.barrier()
        except GroupError:
            if pg.rank() == 2:
                raise GiveUp from None
            raise

    with pytest.raises(GiveUp) as caught:
        await run_ranks(3, skip_or_fail)
    assert caught.value.__notes__ == [
        "rank 2 of 3 failed first",
        "rank 1 of 3 skipped the test: SkipTest: not here",
    ]


async def test_rank_that_cancels_itself_counts_as_failed() -> None:
    async def cancel(pg: ProcessGroup) -> None:
        if pg.rank() == 1:
            raise asyncio.CancelledError
        await pg.barrier()

    with pytest.raises(RuntimeError, match="fn was cancelled on rank 1, by itself"):
        await run_ranks(2, cancel)


async def test_cancelled_run_cancels_every_rank() -> None:
    ready = asyncio.Event()
    ended = []

    async def wait(pg: ProcessGroup) -> None:
        await pg.barrier()
        ready.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(pg.rank())

    running = asyncio.create_task(run_ranks(3, wait))
    await ready.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert ended == [0, 1, 2]


def test_timeout_error_names_waiting_ranks_and_their_source_lines() -> None:
    async def deeper(pg: ProcessGroup) -> None:
        await pg.recv_object(src=1)

    async def hang(pg: ProcessGroup) -> None:
        if pg.rank() == 0:
            await deeper(pg)
        elif pg.rank() == 1:
            await asyncio.Event().wait()

    with pytest.raises(TimeoutError) as caught:
        run_virtual(3, hang, timeout=10)
    text = str(caught.value)
    assert text.startswith(
        "ranks 0 and 1 of 3 did not end within 10 s\nrank 0\n  pending: <Work RECV_OBJECT src=1 tag=0 pending>"
    )
    first, second = text.split("rank 1\n")
    assert "await deeper(pg)" in first
    assert "await pg.recv_object(src=1)" in first
    assert second.startswith("  pending: no operation\n")
    assert "await asyncio.Event().wait()" in second
    assert "aiocoll/testing" not in text


def test_timeout_error_reports_an_unfinished_rendezvous() -> None:
    class Silent(HashStore):
        async def add(self, key: str, amount: int) -> int:
            if key == "aiocoll/rank/1":
                await asyncio.Event().wait()
            return await super().add(key, amount)

    with asyncio.Runner() as runner, pytest.raises(TimeoutError, match="rank 1\n  the group is not formed\n"):
        runner.run(run_ranks(2, describe_rank, store=Silent(), timeout=0.05))


@pytest.mark.parametrize(
    ("world_size", "fn", "error", "message"),
    [
        (0, describe_rank, ValueError, "world_size=0: give the number of ranks, at least 1"),
        ("2", describe_rank, TypeError, "world_size must be an int, not str"),
        (True, describe_rank, TypeError, "world_size must be an int, not bool"),
        (2, 5, TypeError, "fn must be an async function that takes a group, not int"),
        (2, lambda pg: 7, TypeError, "fn must be an async function: it returned int"),
    ],
)
async def test_error_names_wrong_arguments_of_the_run(
    world_size: Any, fn: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        await run_ranks(world_size, fn)


async def test_error_names_a_wrong_timeout() -> None:
    with pytest.raises(ValueError, match="timeout=-1: must be >= 0 seconds"):
        await run_ranks(2, describe_rank, timeout=-1)
