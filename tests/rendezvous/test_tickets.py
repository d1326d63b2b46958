"""Tests of `Meeting`, which a process without a rank holds, and of ranks that the store assigns."""

from __future__ import annotations

import asyncio
import pickle
from pathlib import Path
from typing import Any

import pytest

from aiocoll import (
    AiocollError,
    FileStore,
    GroupError,
    GroupOptions,
    HashStore,
    Meeting,
    PeerLostError,
    ProcessGroup,
    RendezvousError,
    StoreUnavailableError,
    TCPStore,
    Ticket,
    new_group,
)

from ..internals import comm_of

LIMIT = 20.0


async def join_and_reduce(ticket: Ticket, **given: Any) -> tuple[int, int, float]:
    async with ticket.join(timeout=LIMIT, **given) as pg:
        return pg.rank(), pg.size(), await pg.allreduce(1.0)


@pytest.mark.parametrize("world_size", [1, 2, 3, 7])
@pytest.mark.parametrize("given", [True, False], ids=["given", "assigned"])
async def test_ranks_meet_with_tickets(world_size: int, given: bool) -> None:
    async with Meeting(world_size) as meeting:
        tickets = [meeting.ticket(rank if given else None) for rank in range(world_size)]
        met = await asyncio.gather(*(join_and_reduce(pickle.loads(pickle.dumps(ticket))) for ticket in tickets))
        assert (met if given else sorted(met)) == [(rank, world_size, world_size) for rank in range(world_size)]


def test_meeting_can_be_held_without_an_event_loop() -> None:
    with Meeting(1) as meeting:
        assert asyncio.run(join_and_reduce(meeting.ticket(0))) == (0, 1, 1.0)


async def test_tickets_are_small_and_do_not_show_the_job_key() -> None:
    async with Meeting(3) as meeting:
        for ticket in meeting.ticket(2), meeting.ticket(), meeting.newcomer():
            assert len(pickle.dumps(ticket)) < 400
            assert "key" not in repr(ticket)
            assert repr(ticket.key)[2:-1] not in repr(ticket)
            assert pickle.loads(pickle.dumps(ticket)) == ticket


async def test_groups_from_one_ticket_belong_to_the_same_job() -> None:
    async def rank(ticket: Ticket) -> bool:
        async with ticket.join(timeout=LIMIT) as pg, ticket.join(timeout=LIMIT, name="second") as second:
            await asyncio.gather(pg.barrier(), second.barrier())
            return comm_of(pg).endpoint is comm_of(second).endpoint

    async with Meeting(2) as meeting:
        assert await asyncio.gather(*(rank(meeting.ticket(number)) for number in range(2))) == [True, True]


async def test_ranks_can_meet_again_with_their_tickets() -> None:
    async with Meeting(2) as meeting:
        for _ in range(3):
            met = await asyncio.gather(*(join_and_reduce(meeting.ticket()) for _ in range(2)))
            assert sorted(met) == [(0, 2, 2.0), (1, 2, 2.0)]


async def test_newcomer_with_a_ticket_replaces_a_rank() -> None:
    async def rank(ticket: Ticket) -> tuple[int, float]:
        async with ticket.join(timeout=LIMIT) as pg:
            if pg.rank() == 0:  # without a meeting, rank 0 of a group would host the store
                return 0, 0.0
            old = pg
            pg = await old.shrink()
            await old.shutdown()
            old, pg = pg, await pg.grow(1)
            await old.shutdown()
            async with pg:
                return pg.size(), await pg.allreduce(1.0)

    async def newcomer(ticket: Ticket) -> tuple[int, float]:
        async with ticket.join(timeout=LIMIT) as pg:
            return pg.size(), await pg.allreduce(1.0)

    async with Meeting(3) as meeting:
        joining = (newcomer(meeting.newcomer()), *(rank(meeting.ticket(number)) for number in range(3)))
        assert await asyncio.gather(*joining) == [(3, 3.0), (0, 0.0), (3, 3.0), (3, 3.0)]


async def test_process_beyond_the_world_size_is_refused() -> None:
    async with Meeting(2) as meeting:
        came = [asyncio.create_task(join_and_reduce(meeting.ticket())) for _ in range(3)]
        results = await asyncio.gather(*came, return_exceptions=True)
        (error,) = (each for each in results if isinstance(each, BaseException))
        assert isinstance(error, RendezvousError)
        assert "is taken: another process joined as rank" in str(error)


async def test_waiting_rank_is_notified_when_the_meeting_ends() -> None:
    async with Meeting(2) as meeting:
        waiting = asyncio.create_task(join_and_reduce(meeting.ticket(0)))
        ticket = meeting.ticket()
        async with ticket.where().open(LIMIT, ticket.key, GroupOptions.resolve(None, {})) as store:
            await store.wait(["aiocoll/1/card/0"])
    with pytest.raises(StoreUnavailableError, match=r"its process \(.*the owner of the meeting\) has ended"):
        async with asyncio.timeout(LIMIT / 4):
            await waiting


async def test_ticket_of_an_ended_or_another_meeting_is_refused() -> None:
    async with Meeting(1) as meeting:
        ticket = meeting.ticket()
        other = Ticket(ticket.host, ticket.port, ticket.job, b"?" * 32, 1, 0)
        with pytest.raises(AiocollError, match="key"):
            await other.join(timeout=LIMIT)
    with pytest.raises(StoreUnavailableError, match="nothing listens there"):
        await ticket.join(timeout=0.1)


@pytest.mark.parametrize(
    ("rank", "error", "message"),
    [
        (2, ValueError, r"rank=2: must be from 0 to 1"),
        (-1, ValueError, r"rank=-1: must be from 0 to 1"),
        ("0", TypeError, "rank must be an int or None, not str"),
        (True, TypeError, "rank must be an int or None, not bool"),
    ],
)
async def test_tickets_for_invalid_ranks_are_refused(rank: Any, error: type[Exception], message: str) -> None:
    async with Meeting(2) as meeting:
        with pytest.raises(error, match=message):
            meeting.ticket(rank)


@pytest.mark.parametrize(("size", "error"), [(0, ValueError), (-1, ValueError), (1.0, TypeError), (True, TypeError)])
def test_meetings_with_invalid_world_sizes_are_refused(size: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="world_size"):
        Meeting(size)


def test_ticket_of_a_meeting_that_was_not_entered_is_refused() -> None:
    for make_ticket in (Meeting(1).ticket, Meeting(1).newcomer):
        with pytest.raises(ValueError, match="the meeting has not been entered: use"):
            make_ticket()


@pytest.mark.parametrize("given", [{"rank": 0}, {"world_size": 1}, {"join": True}, {"store": HashStore()}])
async def test_rank_and_world_size_arguments_with_a_ticket_are_refused(given: dict[str, Any]) -> None:
    async with Meeting(1) as meeting:
        with pytest.raises(ValueError, match=r"leave out rank, world_size and join|exclude each other"):
            new_group(init_method=meeting.ticket(0), **given)


# -- ranks that the store assigns


@pytest.mark.parametrize("world_size", [1, 2, 4])
async def test_store_assigns_ranks(world_size: int) -> None:
    async def rank(store: HashStore) -> tuple[int, float]:
        async with new_group(store=store, world_size=world_size, timeout=LIMIT) as pg:
            return pg.rank(), await pg.allreduce(1.0)

    async with HashStore() as store:
        for _ in range(2):
            met = await asyncio.gather(*(rank(store) for _ in range(world_size)))
            assert sorted(met) == [(number, world_size) for number in range(world_size)]


async def test_file_store_assigns_ranks(tmp_path: Path) -> None:
    async def rank() -> tuple[int, float]:
        async with new_group(init_method=f"file://{tmp_path}/store", world_size=3, timeout=LIMIT) as pg:
            return pg.rank(), await pg.allreduce(1.0)

    assert sorted(await asyncio.gather(*(rank() for _ in range(3)))) == [(0, 3.0), (1, 3.0), (2, 3.0)]


async def test_store_of_the_launcher_assigns_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    async with TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) as store:
        for name, value in {
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "AIOCOLL_STORE": "launcher", "WORLD_SIZE": "2"
        }.items():  # fmt: skip
            monkeypatch.setenv(name, value)

        async def rank() -> tuple[int, float]:
            async with new_group(timeout=LIMIT) as pg:
                return pg.rank(), await pg.allreduce(1.0)

        assert sorted(await asyncio.gather(rank(), rank())) == [(0, 2.0), (1, 2.0)]


async def test_rank_is_required_if_rank_0_hosts_the_store() -> None:
    with pytest.raises(ValueError, match=r"rank is missing: give rank= with init_method='tcp://127\.0\.0\.1:1'"):
        new_group(init_method="tcp://127.0.0.1:1", world_size=2)


@pytest.mark.parametrize("size", [0, -3])
async def test_world_size_below_one_is_refused(size: int) -> None:
    with pytest.raises(ValueError, match=rf"world_size={size}: world_size must be positive"):
        new_group(store=FileStore("/nowhere"), world_size=size)


# -- a program without a launcher


async def test_aiocoll_singleton_variable_makes_a_group_of_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIOCOLL_SINGLETON", "1")
    async with new_group() as pg, new_group() as second:
        assert (pg.rank(), pg.size(), await pg.allreduce(3.0)) == (0, 1, 3.0)
        assert pg.group_name != second.group_name
        assert isinstance(pg, ProcessGroup)


@pytest.mark.parametrize("value", ["yes", "2", ""])
async def test_invalid_value_of_the_aiocoll_singleton_variable_is_refused(
    value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AIOCOLL_SINGLETON", value)
    with pytest.raises(ValueError, match=rf"AIOCOLL_SINGLETON='{value}': must be 1"):
        new_group()


@pytest.mark.parametrize("variable", ["RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"])
async def test_launcher_variables_prevent_a_singleton_group(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIOCOLL_SINGLETON", "1")
    monkeypatch.setenv(variable, "1")
    with pytest.raises(ValueError, match="missing"):
        new_group()


async def test_program_without_a_launcher_gets_a_hint() -> None:
    with pytest.raises(
        ValueError,
        match=r"start the ranks with `aiocoll run`, torchrun, mpiexec or srun, or set AIOCOLL_SINGLETON=1 to run",
    ):
        new_group()


# -- deaths, and programs without tickets


@pytest.mark.parametrize("hosts", [pytest.param(1, marks=pytest.mark.slow), 3])
async def test_meeting_reports_the_death_of_a_rank_to_the_other_ranks(hosts: int) -> None:
    """Check that a reported death reaches all ranks of a grown group, and the reported process itself."""
    came: asyncio.Queue[None] = asyncio.Queue()

    async def rank(number: int, ticket: Ticket) -> str:
        options = GroupOptions(transport="tcp", host_id=f"{number % hosts}", encryption="none")
        pg = await ticket.join(timeout=LIMIT, options=options)
        if ticket.world_size:
            small, pg = pg, await pg.grow(1)
            await small.shutdown()
        async with pg:
            came.put_nowait(None)
            cause = await pg.wait_revoked()
            assert isinstance(cause, PeerLostError)
            assert (cause.how, cause.ranks) == ("killed", (1,))
            if pg.rank() == 1:
                with pytest.raises(GroupError, match=r"rank 1 was declared dead .* it was preempted"):
                    await pg.shrink()
                return "out"
            async with await pg.shrink() as group:
                return f"{await group.allreduce(1)} of {group.size()}"

    async with Meeting(2) as meeting, asyncio.timeout(LIMIT):
        tickets = [meeting.ticket(0), meeting.ticket(1), meeting.newcomer()]
        ranks = [asyncio.create_task(rank(*each)) for each in enumerate(tickets)]
        assert not any(map(meeting.has_arrived, tickets))
        for _ in ranks:
            await came.get()
        assert all(map(meeting.has_arrived, tickets))
        meeting.report_death(meeting.ticket(1), "unused ticket")
        meeting.report_death(tickets[1], "it was preempted")
        assert await asyncio.gather(*ranks) == ["2 of 2", "out", "2 of 2"]
    meeting.report_death(tickets[0], "after the end")


async def test_death_report_about_a_ticket_of_another_meeting_is_refused() -> None:
    async with Meeting(1) as meeting, Meeting(1) as other:
        with pytest.raises(ValueError, match="belongs to another meeting"):
            meeting.report_death(other.ticket(0), "gone")


async def test_group_continues_after_its_meeting_has_ended() -> None:
    async with Meeting(1) as meeting:
        pg = await meeting.ticket(0).join(timeout=LIMIT)
    assert await pg.allreduce(1.0) == 1.0
    await pg.shutdown()


async def test_ticket_takes_precedence_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIOCOLL_SINGLETON", "1")

    async def program() -> tuple[int, int]:
        async with new_group() as pg, new_group(name="second") as second:
            await second.barrier()
            return pg.rank(), pg.size()

    async def rank(ticket: Ticket) -> list[tuple[int, int]]:
        with ticket.as_default():
            met = [await program()]
            async with HashStore() as store, new_group(store=store, rank=0, world_size=1) as pg:
                met.append((pg.rank(), pg.size()))
            async with new_group("fake", rank=2, world_size=7) as pg:
                met.append((pg.rank(), pg.size()))
        async with new_group() as pg:
            return [*met, (pg.rank(), pg.size())]

    async with Meeting(2) as meeting:
        met = await asyncio.gather(*(rank(meeting.ticket(number)) for number in range(2)))
        assert met == [[(0, 2), (0, 1), (2, 7), (0, 1)], [(1, 2), (0, 1), (2, 7), (0, 1)]]
