"""Tests of `Membership`, which keeps the processes of Ray or Dask in one group; objects stand in for processes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from aiocoll import GroupError, Meeting, PeerLostError, Ticket
from aiocoll.errors import RendezvousError, StoreError
from aiocoll.integrations.membership import Membership, Memberships, State

from ..ranks import wait_until

LIMIT = 20.0


class Engine:
    """A fake engine (Ray or Dask) with numbered processes, each with a `Membership` or None."""

    def __init__(self, n: int) -> None:
        self.processes: dict[int, Membership | None] = dict.fromkeys(range(n))
        self.tickets: list[tuple[int, int]] = []
        self.memberships = Memberships(self.join, self.abort, {"host": "127.0.0.1"})

    async def join(self, number: int, ticket: Ticket) -> None:
        await self.leave(number)
        self.tickets.append((number, ticket.world_size))
        self.processes[number] = Membership(ticket)

    async def abort(self, number: int, reason: str) -> None:
        membership = self.processes[number]
        assert membership is not None
        membership.abort(reason)

    async def lose(self, number: int) -> None:
        """End a process, and report its loss to the other processes."""
        self.memberships.report(number, "the engine has lost it")
        await self.leave(number)

    async def leave(self, number: int) -> None:
        membership, self.processes[number] = self.processes[number], None
        if membership is not None:
            await membership.leave()

    def states(self) -> dict[int, State | None]:
        return {
            number: None if membership is None else membership.state() for number, membership in self.processes.items()
        }

    async def complete_group(self) -> list[tuple[int, int]]:
        """Wait until one group has all processes; return process number and world size of each issued ticket."""
        self.tickets.clear()
        async with asyncio.timeout(LIMIT):
            while not await self.memberships.ensure_one_group(self.states()):  # noqa: ASYNC110 - engines poll as well
                await asyncio.sleep(0.01)
        return self.tickets

    async def total(self) -> list[Any]:
        """Allreduce `rank + 1` in each process, and return the results."""
        groups = [membership.group for membership in self.processes.values() if membership is not None]
        return await asyncio.gather(*(group.allreduce(group.rank() + 1) for group in groups if group is not None))


@asynccontextmanager
async def engine(n: int) -> AsyncIterator[Engine]:
    made = Engine(n)
    try:
        yield made
    finally:
        await made.memberships.end()
        for number in made.processes:
            await made.leave(number)


@pytest.mark.parametrize("n", [1, 2, 4])
async def test_engine_processes_form_one_group_in_the_order_of_their_numbers(n: int) -> None:
    async with engine(n) as engine_:
        assert await engine_.complete_group() == [(number, n) for number in range(n)]
        assert [
            membership.group.rank() for membership in engine_.processes.values() if membership and membership.group
        ] == list(range(n))
        assert await engine_.total() == [n * (n + 1) // 2] * n
        assert await engine_.complete_group() == []


@pytest.mark.parametrize("lost", [(0,), (2,), (0, 2)])
async def test_new_engine_processes_replace_lost_processes(lost: tuple[int, ...]) -> None:
    async with engine(3) as engine_:
        await engine_.complete_group()
        for number in lost:
            await engine_.lose(number)
        assert await engine_.complete_group() == [(number, 0) for number in lost]
        assert await engine_.total() == [6] * 3


async def test_remaining_engine_processes_shrink_the_group_between_calls() -> None:
    async with engine(3) as engine_:
        await engine_.complete_group()
        old = engine_.processes[0]
        assert old is not None
        assert old.group is not None
        failed = old.group.wait_revoked()
        engine_.memberships.report(1, "the engine has lost it")
        assert isinstance(await failed, PeerLostError)
        await wait_until(lambda: old.state() == State(True, "world:0~1", 2))
        await wait_until(lambda: engine_.states()[1] is None)


async def test_engine_processes_form_a_new_group_after_the_loss_of_all_processes() -> None:
    async with engine(2) as engine_:
        await engine_.complete_group()
        for number in range(2):
            await engine_.leave(number)
        assert await engine_.complete_group() == [(0, 2), (1, 2)]
        assert await engine_.total() == [3, 3]


async def test_engine_process_lost_before_the_rendezvous_does_not_delay_the_group() -> None:
    async with engine(3) as engine_:
        assert not await engine_.memberships.ensure_one_group(engine_.states())
        await engine_.leave(1)
        assert sorted(await engine_.complete_group()) == [(0, 3), (1, 3), (2, 3)]
        assert await engine_.total() == [6] * 3


async def test_group_continues_without_a_lost_engine_process_that_is_not_replaced() -> None:
    async with engine(3) as engine_:
        await engine_.complete_group()
        await engine_.lose(0)
        del engine_.processes[0]
        assert await engine_.complete_group() == []
        assert await engine_.total() == [3, 3]


async def test_aborted_group_is_replaced_by_a_group_of_the_same_engine_processes() -> None:
    async with engine(2) as engine_:
        await engine_.complete_group()
        first = engine_.processes[0]
        assert first is not None
        group = first.group
        assert group is not None
        first.abort("the test does not like it")
        assert first.group is None, "an aborted group is still available"
        with pytest.raises(GroupError, match="the test does not like it"):
            await group.barrier()
        assert await engine_.complete_group() == []
        assert first.state() == State(True, "world:0~1", 2)


async def test_membership_state_raises_a_permanent_failure() -> None:
    membership = Membership("nonsense")  # type: ignore[arg-type]
    assert membership.state() == State(False, "", 0)
    await asyncio.wait([membership._task])
    with pytest.raises(ValueError, match="nonsense"):
        membership.state()


@pytest.mark.parametrize("error", [GroupError, RendezvousError, StoreError])
async def test_membership_state_is_none_after_a_failure_of_the_group(
    error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(**given: Any) -> AsyncIterator[Any]:
        raise error("of the others")
        yield

    monkeypatch.setattr("aiocoll.integrations.membership.elastic", fail)
    membership = Membership("unused")  # type: ignore[arg-type]
    await asyncio.wait([membership._task])
    assert membership.state() is None


async def test_membership_has_no_group_after_its_group_has_failed() -> None:
    async with engine(2) as engine_:
        await engine_.complete_group()
        first = engine_.processes[0]
        assert first is not None
        assert first.group is not None
        first.group.abort("one of its ranks does not like it")
        await wait_until(lambda: first.group is None)
        assert first.state() == State(True, "", 0)
        await engine_.complete_group()
        assert first.state() == State(True, "world:0~1", 2)


async def test_death_of_a_replaced_engine_process_is_reported_to_the_meeting(monkeypatch: pytest.MonkeyPatch) -> None:
    report, reports = Meeting.report_death, []

    def record_report(meeting: Meeting, ticket: Ticket, reason: str) -> None:
        reports.append((ticket.rank, reason))
        report(meeting, ticket, reason)

    monkeypatch.setattr(Meeting, "report_death", record_report)
    async with engine(2) as engine_:
        await engine_.complete_group()
        await engine_.leave(1)
        await engine_.complete_group()
    assert reports == [(1, "a new rank replaces it")]
