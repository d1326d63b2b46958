"""`elastic`: after a lost rank, other ranks and newcomers form the next group and continue with the state."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from contextlib import aclosing, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aiocoll import (
    CollectiveMismatchError,
    GroupError,
    HashStore,
    Meeting,
    PeerLostError,
    ProcessGroup,
    RendezvousError,
    Ticket,
    elastic,
    new_group,
)

from .ranks import wait_until

LIMIT = 20.0
STEPS = 12

#: A function (process number, step) that each process calls in each step. A true result ends the process.
Fault = Callable[[int, int], bool]


def no_fault(process: int, step: int) -> bool:
    return False


class Program:
    """An elastic program whose processes count steps together, and its supervisor, which replaces lost processes.

    Attributes:
        groups: sizes of the groups of each process.
        lost: processes that have left.
        steps: the number of steps.
    """

    def __init__(self, meeting: Meeting, fault: Fault = no_fault, replaced: bool = True, **given: Any) -> None:
        self.groups: dict[int, list[int]] = {}
        self.lost: list[int] = []
        self._meeting = meeting
        self._fault = fault
        self._replaced = replaced
        self._given = {"wait": LIMIT, "timeout": LIMIT, **given}
        self.steps = STEPS
        self._processes: list[asyncio.Task[dict[str, Any] | None]] = []

    async def run(self) -> list[dict[str, Any]]:
        """Run all processes; return the final state of each process that finishes all steps."""
        for rank in range(self._meeting.world_size):
            self._start(self._meeting.ticket(rank))
        ended: list[dict[str, Any] | None] = []
        while len(ended) < len(self._processes):
            ended.append(await self._processes[len(ended)])
        return [state for state in ended if state is not None]

    def _start(self, ticket: Ticket) -> None:
        process = self._process(len(self._processes), ticket)
        self._processes.append(asyncio.create_task(process))

    async def _process(self, number: int, ticket: Ticket) -> dict[str, Any] | None:
        state = {"step": 0, "sum": 0.0, "weights": np.zeros(3)}
        async with aclosing(elastic(init_method=ticket, state=state, **self._given)) as groups:
            async for pg in groups:
                self.groups.setdefault(number, []).append(pg.size())
                with suppress(GroupError):
                    while state["step"] < self.steps:
                        if self._fault(number, state["step"]):
                            self.lost.append(number)
                            if self._replaced:
                                self._start(self._meeting.newcomer())
                            return None
                        total, ones = await pg.allreduce(1.0), await pg.allreduce(np.ones(3))
                        state["sum"] += total / pg.size()
                        state["weights"] += ones / pg.size()
                        state["step"] += 1
        return state


def check(state: dict[str, Any]) -> None:
    assert (state["step"], state["sum"], state["weights"].tolist()) == (STEPS, STEPS, [STEPS] * 3)


@pytest.mark.parametrize("world_size", [1, 2, 3])
async def test_elastic_run_without_a_loss_uses_one_group(world_size: int) -> None:
    async with Meeting(world_size) as meeting:
        program = Program(meeting)
        ended = await program.run()
        assert len(ended) == world_size
        for state in ended:
            check(state)
        assert program.groups == {number: [world_size] for number in range(world_size)}


@pytest.mark.parametrize("victim", [0, 1, 2])
async def test_newcomer_replaces_a_lost_rank_of_an_elastic_run(victim: int) -> None:
    async with Meeting(3) as meeting:
        program = Program(meeting, lambda number, step: number == victim and step == 5)
        ended = await program.run()
        assert len(ended) == 3
        for state in ended:
            check(state)
        assert program.groups == {number: [3] if number in (victim, 3) else [3, 3] for number in range(4)}


async def test_elastic_run_survives_consecutive_losses() -> None:
    """Let one of the processes 0 to 4 leave in every second step."""
    async with Meeting(3) as meeting:
        program = Program(meeting, lambda number, step: number < 5 and step == 2 * number)
        ended = await program.run()
        assert program.lost == [0, 1, 2, 3, 4]
        assert len(ended) == 3
        for state in ended:
            check(state)


async def test_elastic_run_survives_a_loss_during_recovery() -> None:
    """Let the first two newcomers leave as soon as each of them has joined the group."""
    seen: set[int] = set()

    def fault(number: int, step: int) -> bool:
        first = number not in seen
        seen.add(number)
        return (number == 1 and step == 4) or (number in (3, 4) and first)

    async with Meeting(3) as meeting:
        program = Program(meeting, fault)
        ended = await program.run()
        assert program.lost == [1, 3, 4]
        for state in ended:
            check(state)


async def test_elastic_run_continues_with_the_remaining_ranks() -> None:
    async with Meeting(3) as meeting:
        program = Program(meeting, lambda number, step: number == 2 and step == 3, replaced=False, wait=0.0)
        ended = await program.run()
        assert len(ended) == 2
        for state in ended:
            check(state)
        assert program.groups == {0: [3, 2], 1: [3, 2], 2: [3]}


async def test_elastic_ranks_make_one_agreement_per_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """Count the `allgather_object` calls by which the ranks of each group agree on the state."""
    allgather_object = ProcessGroup.allgather_object
    agreed: list[str] = []

    def record_call(pg: ProcessGroup, obj: Any) -> Any:
        agreed.append(f"{pg.group_name} {pg.rank()}")
        return allgather_object(pg, obj)

    monkeypatch.setattr(ProcessGroup, "allgather_object", record_call)
    async with Meeting(3) as meeting:
        program = Program(meeting, lambda number, step: number == 2 and step == 3, replaced=False, wait=0.0)
        await program.run()
    assert sorted(agreed) == [
        "world:0 0", "world:0 1", "world:0 2", "world:0~1 0", "world:0~1 1"
    ]  # fmt: skip


async def test_elastic_run_includes_all_newcomers_that_are_present() -> None:
    """Lose two ranks, and let one newcomer join."""

    def fault(number: int, step: int) -> bool:
        return number in (1, 2) and step == 3

    async with Meeting(3) as meeting:
        program = Program(meeting, fault, replaced=False, wait=1.0)
        running = asyncio.create_task(program.run())
        await wait_until(lambda: program.lost)
        program._start(meeting.newcomer())
        for state in await running:
            check(state)
        assert program.groups[0][-1] == 2


async def test_elastic_run_fails_after_more_losses_than_allowed() -> None:
    async with Meeting(2) as meeting:
        program = Program(meeting, lambda number, step: number == 1 and step == 3, replaced=False, max_mends=0)
        with pytest.raises(PeerLostError):
            await program.run()


async def test_elastic_run_fails_if_no_group_forms_in_time() -> None:
    async with Meeting(2) as meeting:
        program = Program(meeting, lambda number, step: number == 1 and step == 3, replaced=False, mend_timeout=0.3)
        with pytest.raises(TimeoutError):
            await program.run()


async def test_elastic_run_continues_with_fewer_ranks_when_its_store_is_closed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    met = asyncio.Event()

    def fault(number: int, step: int) -> bool:
        met.set()
        return number == 2 and not meeting_is_open

    meeting_is_open = True
    async with Meeting(3) as meeting:
        program = Program(meeting, fault, replaced=False)
        program.steps = 10**9
        running = asyncio.create_task(program.run())
        await met.wait()
    meeting_is_open = False
    await wait_until(lambda: program.groups[0] == program.groups[1] == [3, 2])
    program.steps = 0
    for state in await running:
        assert state["sum"] == state["step"]
    message = (
        "rank 0: continues with 2 of 3 ranks: group 'world:0~1' cannot grow: the store where its ranks met is gone"
    )
    assert message in caplog.text


async def test_late_newcomers_join_a_later_group_of_an_elastic_run() -> None:
    """Start with one rank; each of two newcomers then makes the group grow by one rank."""
    sizes: dict[int, list[int]] = {0: [], 1: []}

    async def rank(number: int, ticket: Ticket) -> None:
        async with aclosing(elastic(init_method=ticket, size=3, wait=0)) as groups:
            async for pg in groups:
                sizes[number].append(pg.size())
                with suppress(GroupError):
                    if pg.size() < 3:
                        await pg.recv_object()  # wait for the next group; a busy loop would starve the store's thread

    async def newcomer() -> int:
        async with aclosing(elastic(init_method=meeting.newcomer(), wait=0)) as groups:
            async for pg in groups:
                with suppress(GroupError):
                    if pg.size() < 3:
                        await pg.recv_object()  # wait for the next group; a busy loop would starve the store's thread
                size = pg.size()
        return size

    async with Meeting(1) as meeting:
        first = asyncio.create_task(rank(0, meeting.ticket()))
        await wait_until(lambda: sizes[0] == [1])
        second = asyncio.create_task(newcomer())
        await wait_until(lambda: sizes[0] == [1, 2])
        assert [await newcomer(), await second, await first] == [3, 3, None]
    assert sizes[0] == [1, 2, 3]


async def test_loss_of_the_state_sender_leaves_one_consistent_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the sender fail between two arrays; the other ranks must not mix its arrays with their own."""
    broadcast = ProcessGroup.broadcast
    sent: list[str] = []

    def failing_broadcast(pg: ProcessGroup, array: Any, root: int) -> Any:
        if pg.size() == 3 and pg.rank() == root and "~" in pg.group_name:
            sent.append(pg.group_name)
            if len(sent) == 2:
                raise KeyError("lost")
        return broadcast(pg, array, root)

    async def rank(number: int, ticket: Ticket) -> list[list[float]]:
        state = {name: np.full(2, float(number)) for name in "ab"}
        async with aclosing(elastic(init_method=ticket, state=state, wait=0)) as groups:
            async for pg in groups:
                with suppress(GroupError):
                    if pg.size() == 4:
                        state["a"][:] = state["b"][:] = number
                        if pg.rank() == 3:
                            return []
                        await pg.barrier()
                        await pg.barrier()
        return [state["a"].tolist(), state["b"].tolist()]

    monkeypatch.setattr(ProcessGroup, "broadcast", failing_broadcast)
    async with Meeting(4) as meeting:
        ended = await asyncio.gather(*(rank(n, meeting.ticket(n)) for n in range(4)), return_exceptions=True)
    assert isinstance(ended[0], KeyError)
    assert ended[1:3] == [[[1.0, 1.0]] * 2] * 2
    assert len(sent) == 2


async def test_newcomer_without_the_state_does_not_continue_alone() -> None:
    """End the only rank with the state before this rank can send the state to the newcomer."""
    async with Meeting(1) as meeting:
        left = new_group(init_method=meeting.ticket())
        async with left as pg:
            growing = asyncio.create_task(pg.grow(1))

            async def newcomer() -> None:
                async with aclosing(elastic(init_method=meeting.newcomer(), state={"step": 0})) as groups:
                    async for _ in groups:
                        pytest.fail("the newcomer got a group without the state")

            alone = asyncio.create_task(newcomer())
            await (await growing).shutdown()
            with pytest.raises(GroupError, match="rank 0: all ranks with the state are lost; restart the job"):
                await alone


async def test_newcomer_of_an_elastic_run_fails_if_no_group_grows_within_its_timeout() -> None:
    async with Meeting(1) as meeting, asyncio.timeout(LIMIT):
        with pytest.raises(RendezvousError, match="no group has grown"):
            await anext(elastic(init_method=meeting.newcomer(), timeout=0.1))


async def test_elastic_run_does_not_wait_for_newcomers_after_its_end() -> None:
    """Use a store that stays open, in which the first group could still look for newcomers."""
    store = HashStore()

    async def rank(number: int) -> list[int]:
        sizes = []
        async with aclosing(elastic(store=store, rank=number, world_size=2, size=3, wait=0)) as groups:
            async for pg in groups:
                sizes.append(pg.size())
                if number == 1:
                    return sizes
                with suppress(GroupError):
                    while pg.size() == 2:
                        await pg.allreduce(1)
        return sizes

    async with asyncio.timeout(LIMIT):
        assert await asyncio.gather(rank(0), rank(1)) == [[2, 1], [2]]
    await asyncio.sleep(0)
    assert not [task for task in asyncio.all_tasks() if task.get_name() == "aiocoll newcomers"]
    await store.aclose()


async def test_elastic_run_raises_a_programming_error_without_a_retry() -> None:
    async def rank(number: int, ticket: Ticket) -> None:
        async with aclosing(elastic(init_method=ticket)) as groups:
            async for pg in groups:
                with suppress(GroupError):
                    await (pg.allreduce(np.ones(2)) if number else pg.barrier())

    async with Meeting(2) as meeting, asyncio.timeout(LIMIT):
        ended = await asyncio.gather(*(rank(n, meeting.ticket(n)) for n in range(2)), return_exceptions=True)
    assert [type(each) for each in ended] == [CollectiveMismatchError] * 2


async def test_elastic_ranks_take_the_state_of_rank_0() -> None:
    async def rank(ticket: Ticket, number: int) -> dict[str, Any]:
        state = {"name": f"rank {number}", "array": np.full(2, number), "number": np.float64(number)}
        async with aclosing(elastic(init_method=ticket, state=state)) as groups:
            kept = state["array"]
            async for _ in groups:
                assert state["array"] is kept
        return state

    async with Meeting(2) as meeting:
        for state in await asyncio.gather(*(rank(meeting.ticket(number), number) for number in range(2))):
            assert (state["name"], state["array"].tolist(), state["number"]) == ("rank 0", [0, 0], 0.0)


async def test_elastic_run_refuses_states_with_different_arrays() -> None:
    async def rank(ticket: Ticket, state: dict[str, Any]) -> None:
        async with aclosing(elastic(init_method=ticket, state=state)) as groups:
            async for _ in groups:
                pass

    async with Meeting(2) as meeting:
        states = {"x": np.ones(1)}, {"y": np.ones(1)}
        came = (rank(meeting.ticket(number), state) for number, state in enumerate(states))
        errors = await asyncio.gather(*came, return_exceptions=True)
        assert any("state differs: rank 0 has arrays ['x'], rank 1 has ['y']" in str(error) for error in errors)


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"state": [1]}, TypeError, "state must be a dict or None, not list"),
        ({"wait": -1}, ValueError, "wait=-1: must be >= 0 seconds"),
        ({"wait": math.nan}, ValueError, "wait=nan: must be >= 0 seconds"),
        ({"max_mends": -1}, ValueError, "max_mends=-1: must not be negative"),
        ({"rank": 3, "world_size": 2}, ValueError, "rank=3, world_size=2"),
    ],
)
async def test_elastic_refuses_wrong_arguments(given: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        await anext(elastic(**{"init_method": "file:///nowhere", **given}))


# -- join=None: each process finds out whether it is one of the first ranks or a newcomer


async def run_worker(store: HashStore, world_size: int, ends: int | None = None) -> list[tuple[int, int]]:
    """Run `elastic(join=None)` as one process, up to step `ends`; return rank and size of each of its groups."""
    groups: list[tuple[int, int]] = []
    state = {"step": 0}
    where = {"store": store, "world_size": world_size, "join": None, "timeout": LIMIT}
    async with aclosing(elastic(**where, state=state, wait=LIMIT)) as made:
        async for pg in made:
            groups.append((pg.rank(), pg.size()))
            with suppress(GroupError):
                while state["step"] < STEPS:
                    if state["step"] == ends:
                        return groups
                    await pg.allreduce(1)
                    state["step"] += 1
    return groups


@pytest.mark.parametrize("world_size", [2, 3])
async def test_later_process_of_an_elastic_run_with_join_none_becomes_a_newcomer(world_size: int) -> None:
    store = HashStore()
    running = [asyncio.create_task(run_worker(store, world_size)) for _ in range(world_size - 1)]
    leaving = asyncio.create_task(run_worker(store, world_size, ends=4))
    [(rank, size)] = await leaving
    assert size == world_size
    later = asyncio.create_task(run_worker(store, world_size))
    assert await later == [(world_size - 1, world_size)]
    others = await asyncio.gather(*running)
    assert sorted(groups[0][0] for groups in others) == [each for each in range(world_size) if each != rank]
    assert [[size for _, size in groups] for groups in others] == [[world_size] * 2] * (world_size - 1)


async def test_store_file_of_an_elastic_run_stays_usable_for_many_newcomers(tmp_path: Path) -> None:
    """Let four newcomers join and leave a group of two ranks, one after the other."""
    place = tmp_path / "store"
    where = {"init_method": f"file://{place}", "world_size": 2, "join": None, "timeout": LIMIT}
    over = asyncio.Event()

    async def remain() -> None:
        async with aclosing(elastic(**where, wait=0)) as groups:
            async for pg in groups:
                with suppress(GroupError):
                    while not over.is_set():
                        await pg.allreduce(1)

    async def visit() -> int:
        async with aclosing(elastic(**where, wait=0)) as groups:
            async for pg in groups:
                with suppress(GroupError):
                    return await pg.allreduce(1)
        return 0

    remaining = asyncio.create_task(remain())
    for _ in range(4):
        assert await visit() == 2
        assert place.exists()
    over.set()
    await remaining


async def test_process_takes_the_rank_of_a_process_that_ended_before_the_rendezvous() -> None:
    store = HashStore()
    first, ended = (asyncio.create_task(run_worker(store, 3)) for _ in range(2))
    await store.wait(["aiocoll/1/card/0", "aiocoll/1/card/1"])
    ended.cancel()
    await asyncio.wait([ended])
    groups = await asyncio.gather(first, *(run_worker(store, 3) for _ in range(2)))
    assert sorted(groups) == [[(rank, 3)] for rank in range(3)]


async def test_process_beyond_the_world_size_becomes_a_newcomer_with_join_none() -> None:
    store = HashStore()
    where: dict[str, Any] = {"store": store, "world_size": 2, "join": None, "timeout": LIMIT}

    async def meet() -> ProcessGroup:
        pg = await new_group(**where)
        if pg.size() == 2:
            small, pg = pg, await pg.grow(1)
            await small.shutdown()
        return pg

    groups = await asyncio.gather(*(meet() for _ in range(3)))
    assert sorted(pg.rank() for pg in groups) == [0, 1, 2]
    await asyncio.gather(*(pg.allreduce(1) for pg in groups))
    await asyncio.gather(*(pg.shutdown() for pg in groups))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"store": HashStore(), "world_size": 2, "rank": 0}, "join=None: leave out rank"),
        ({"init_method": "tcp://127.0.0.1:9", "world_size": 2, "rank": 0}, "join=None: leave out rank"),
        ({"init_method": "tcp://127.0.0.1:9", "world_size": 2}, "rank is missing"),
        ({"store": HashStore()}, "world_size is missing"),
    ],
)
async def test_new_group_with_join_none_refuses_a_rank_or_missing_arguments(
    given: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        new_group(join=None, **given)


async def test_newcomer_error_names_an_earlier_job_on_the_same_store_as_the_cause() -> None:
    where: dict[str, Any] = {"store": HashStore(), "world_size": 1, "join": None, "timeout": 0.1}
    async with new_group(**where):
        pass
    with pytest.raises(
        RendezvousError, match=r"have met on this store before, .*no group has grown .*needs a new store"
    ):
        await new_group(**where)
