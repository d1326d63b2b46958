"""Parts: how the processes of an engine stay in one group; here, the processes are objects."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from aiocoll import GroupError, Meeting, PeerLostError, Ticket
from aiocoll.errors import RendezvousError, StoreError
from aiocoll.integrations.parts import Part, Parts, State

from ..ranks import wait_until

LIMIT = 20.0


class Engine:
    """An engine with numbered processes, each of which has a part or none."""

    def __init__(self, n: int) -> None:
        self.processes: dict[int, Part | None] = dict.fromkeys(range(n))
        self.tickets: list[tuple[int, int]] = []
        self.parts = Parts(self.join, self.abort, {"host": "127.0.0.1"})

    async def join(self, number: int, ticket: Ticket) -> None:
        await self.leave(number)
        self.tickets.append((number, ticket.world_size))
        self.processes[number] = Part(ticket)

    async def abort(self, number: int, reason: str) -> None:
        part = self.processes[number]
        assert part is not None
        part.abort(reason)

    async def lose(self, number: int) -> None:
        """End a process, and report its loss to the others."""
        self.parts.report(number, "the engine has lost it")
        await self.leave(number)

    async def leave(self, number: int) -> None:
        part, self.processes[number] = self.processes[number], None
        if part is not None:
            await part.leave()

    def states(self) -> dict[int, State | None]:
        return {number: None if part is None else part.state() for number, part in self.processes.items()}

    async def complete_group(self) -> list[tuple[int, int]]:
        """Complete the group; return number and world size of each issued ticket."""
        self.tickets.clear()
        async with asyncio.timeout(LIMIT):
            while not await self.parts.are_whole(self.states()):  # noqa: ASYNC110 - engines poll as well
                await asyncio.sleep(0.01)
        return self.tickets

    async def total(self) -> list[Any]:
        """Return the sum of all ranks' `rank + 1`, once per process."""
        groups = [part.group for part in self.processes.values() if part is not None]
        return await asyncio.gather(*(group.allreduce(group.rank() + 1) for group in groups if group is not None))


@asynccontextmanager
async def engine(n: int) -> AsyncIterator[Engine]:
    made = Engine(n)
    try:
        yield made
    finally:
        await made.parts.end()
        for number in made.processes:
            await made.leave(number)


@pytest.mark.parametrize("n", [1, 2, 4])
async def test_parts_form_one_group_in_order(n: int) -> None:
    async with engine(n) as engine_:
        assert await engine_.complete_group() == [(number, n) for number in range(n)]
        assert [part.group.rank() for part in engine_.processes.values() if part and part.group] == list(range(n))
        assert await engine_.total() == [n * (n + 1) // 2] * n
        assert await engine_.complete_group() == []


@pytest.mark.parametrize("lost", [(0,), (2,), (0, 2)])
async def test_newcomers_replace_lost_parts(lost: tuple[int, ...]) -> None:
    async with engine(3) as engine_:
        await engine_.complete_group()
        for number in lost:
            await engine_.lose(number)
        assert await engine_.complete_group() == [(number, 0) for number in lost]
        assert await engine_.total() == [6] * 3


async def test_remaining_parts_repair_the_group_between_calls() -> None:
    async with engine(3) as engine_:
        await engine_.complete_group()
        old = engine_.processes[0]
        assert old is not None
        assert old.group is not None
        failed = old.group.wait_revoked()
        engine_.parts.report(1, "the engine has lost it")
        assert isinstance(await failed, PeerLostError)
        await wait_until(lambda: old.state() == State(True, "world:0~1", 2))
        await wait_until(lambda: engine_.states()[1] is None)


async def test_parts_meet_again_if_none_is_left() -> None:
    async with engine(2) as engine_:
        await engine_.complete_group()
        for number in range(2):
            await engine_.leave(number)
        assert await engine_.complete_group() == [(0, 2), (1, 2)]
        assert await engine_.total() == [3, 3]


async def test_part_lost_before_the_rendezvous_is_not_waited_for() -> None:
    async with engine(3) as engine_:
        assert not await engine_.parts.are_whole(engine_.states())
        await engine_.leave(1)
        assert sorted(await engine_.complete_group()) == [(0, 3), (1, 3), (2, 3)]
        assert await engine_.total() == [6] * 3


async def test_unreplaced_part_is_missing() -> None:
    async with engine(3) as engine_:
        await engine_.complete_group()
        await engine_.lose(0)
        del engine_.processes[0]
        assert await engine_.complete_group() == []
        assert await engine_.total() == [3, 3]


async def test_aborted_group_has_a_successor_of_the_same_ranks() -> None:
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


async def test_permanent_failure_of_a_part_is_raised() -> None:
    part = Part("nonsense")  # type: ignore[arg-type]
    assert part.state() == State(False, "", 0)
    await asyncio.wait([part._task])
    with pytest.raises(ValueError, match="nonsense"):
        part.state()


@pytest.mark.parametrize("error", [GroupError, RendezvousError, StoreError])
async def test_failure_of_another_part_is_not_raised(error: type[Exception], monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(**given: Any) -> AsyncIterator[Any]:
        raise error("of the others")
        yield

    monkeypatch.setattr("aiocoll.integrations.parts.elastic", fail)
    part = Part("unused")  # type: ignore[arg-type]
    await asyncio.wait([part._task])
    assert part.state() is None


async def test_failed_group_is_not_current() -> None:
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


async def test_parts_are_notified_of_a_replaced_part(monkeypatch: pytest.MonkeyPatch) -> None:
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
