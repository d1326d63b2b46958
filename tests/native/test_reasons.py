"""Log messages that explain why collectives of a group run in Python although the accelerator is available."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import numpy as np
import pytest

from aiocoll import GroupOptions, HashStore, ProcessGroup, hooks, new_group
from aiocoll.testing import run_ranks
from aiocoll.testing.virtual import run_virtual

from ..internals import is_native, native_calls_of
from ..ranks import options
from .groups import group_of_ranks

REASON = "collectives run in Python: "


class Quiet:
    """A hook that does nothing."""

    def on_end(self, info: Any) -> None:
        pass


class Other(Quiet):
    """A hook of another type."""


@pytest.fixture(autouse=True)
def _debug_level(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "aiocoll")


def reasons(caplog: pytest.LogCaptureFixture, level: int = logging.INFO) -> list[str]:
    """Return the reasons that rank 0 has logged since the last check; check that all have the given log level."""
    found = [
        record
        for record in caplog.records
        if REASON in record.getMessage() and record.rank == 0  # type: ignore[attr-defined]
    ]
    caplog.clear()
    assert {record.levelno for record in found} <= {level}
    return [record.getMessage().partition(REASON)[2] for record in found]


async def check_calls(pgs: list[ProcessGroup], *, native: bool) -> None:
    works = [pg.allreduce(np.ones(3)) for pg in pgs]
    assert [is_native(work) for work in works] == [native for _ in works]
    await asyncio.gather(*works)


async def test_group_that_runs_natively_logs_no_reason_against_native_calls(caplog: pytest.LogCaptureFixture) -> None:
    async with group_of_ranks([True, True]) as pgs:
        await check_calls(pgs, native=True)
        pgs[0].timeout = 50.0
        await check_calls(pgs, native=True)
    assert reasons(caplog) == []


async def test_log_names_once_a_hook_that_prevents_native_calls(caplog: pytest.LogCaptureFixture) -> None:
    async with group_of_ranks([True, True], "watched") as pgs:
        handles = [pg.add_hook(Quiet()) for pg in pgs]
        (record, _) = [each for each in caplog.records if REASON in each.getMessage()]
        assert record.getMessage().startswith("group 'watched', rank 0: ")
        assert (record.group, record.rank) == ("watched", 0)  # type: ignore[attr-defined]
        assert reasons(caplog) == ["hook Quiet observes them, until it is removed"]
        await check_calls(pgs, native=False)
        for handle in handles:
            handle.remove()
        await check_calls(pgs, native=True)
        pgs[0].add_hook(Quiet()).remove()
        assert reasons(caplog) == []
        pgs[0].add_hook(Other()).remove()
        assert reasons(caplog) == ["hook Other observes them, until it is removed"]


async def test_log_of_each_group_names_a_global_hook_that_prevents_native_calls(
    caplog: pytest.LogCaptureFixture,
) -> None:
    handle = hooks.add_hook(Quiet())
    try:
        async with group_of_ranks([True, True]) as pgs:
            assert reasons(caplog) == ["hook Quiet observes them, until it is removed"]
            await check_calls(pgs, native=False)
    finally:
        handle.remove()
    async with group_of_ranks([True, True]):
        assert reasons(caplog) == []
        handle = hooks.add_hook(Quiet())
        handle.remove()
        assert reasons(caplog) == ["hook Quiet observes them, until it is removed"]


async def test_log_names_a_short_timeout_that_prevents_native_calls(caplog: pytest.LogCaptureFixture) -> None:
    async with group_of_ranks([True, True]) as pgs:
        pgs[0].timeout = 0.1
        pgs[0].timeout = 0.2
        assert reasons(caplog) == ["the timeout of the group is less than 0.25 s"]
    async with group_of_ranks([True, True], timeout=0.2, linked=False):
        assert reasons(caplog) == ["the timeout of the group is less than 0.25 s"]


async def check_pure_group(pg: ProcessGroup) -> None:
    assert native_calls_of(pg) is None
    assert (await pg.allreduce(np.ones(3)) == pg.size()).all()


@pytest.mark.parametrize(
    ("group", "reason"),
    [
        (GroupOptions(), "the ranks do not use shared memory"),
        (GroupOptions(transport="unix"), "the ranks do not use shared memory"),
        (GroupOptions(transport="shm", debug="detail"), "debug='detail' compares all calls"),
    ],
    ids=["memory", "unix", "compared"],
)
async def test_group_without_the_accelerator_logs_the_reason(
    group: GroupOptions, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def rank(pg: ProcessGroup) -> None:
        await check_pure_group(pg)
        pg.add_hook(Quiet())

    await run_ranks(2, rank, options=group)
    assert reasons(caplog, logging.DEBUG) == [reason]


async def test_group_of_one_rank_logs_why_calls_are_not_native(caplog: pytest.LogCaptureFixture) -> None:
    await run_ranks(1, check_pure_group, options=options("shm"))
    assert reasons(caplog, logging.DEBUG) == ["the group has one rank"]


def test_group_in_virtual_time_logs_why_calls_are_not_native(caplog: pytest.LogCaptureFixture) -> None:
    run_virtual(2, check_pure_group)
    assert reasons(caplog, logging.DEBUG) == ["time is virtual"]


async def test_group_on_several_hosts_logs_why_calls_are_not_native(caplog: pytest.LogCaptureFixture) -> None:
    async def rank(store: HashStore, number: int) -> None:
        group = GroupOptions(host_id=f"host {number}", bind="127.0.0.1", encryption="none")
        async with await new_group(store=store, rank=number, world_size=2, options=group) as pg:
            await check_pure_group(pg)

    async with HashStore() as store:
        await asyncio.gather(rank(store, 0), rank(store, 1))
    assert reasons(caplog, logging.DEBUG) == ["the ranks are on several hosts"]
