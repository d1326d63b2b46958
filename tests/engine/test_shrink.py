"""The agreement on who goes on, on a virtual clock: ranks die, are cut off or come late at every step of it."""

from __future__ import annotations

import asyncio
import errno
import itertools
import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import pytest

from aiocoll import GroupError, GroupRevokedError, PeerLostError, ProcessGroup, RendezvousError, new_group
from aiocoll.engine.coordinator import is_quorum
from aiocoll.engine.shrink import Agreement
from aiocoll.handshake import ConnKind
from aiocoll.testing.virtual import run_virtual
from aiocoll.transport.base import Link
from aiocoll.transport.frame import Header
from aiocoll.transport.memory import MemoryLink
from tests.ranks import hub

#: Seconds a frame takes at least and at most.
LATENCY = (0.0005, 0.02)

Body = Callable[[ProcessGroup], Any]


def now() -> float:
    return asyncio.get_running_loop().time()


class Job:
    """Ranks that can be killed: run `body` on each, and return None for those that were."""

    def __init__(self) -> None:
        self.groups: dict[int, ProcessGroup] = {}
        self.bodies: dict[int, asyncio.Task[Any]] = {}
        self.killed: set[int] = set()

    def run(self, world_size: int, body: Body, seed: int = 0) -> list[Any]:
        async def rank(pg: ProcessGroup) -> Any:
            self.groups[pg.rank()] = pg
            await pg.barrier()
            await asyncio.sleep(1)  # virtual: all have left the barrier
            task = self.bodies[pg.rank()] = asyncio.ensure_future(body(pg))
            await asyncio.wait([task])
            return None if pg.rank() in self.killed else task.result()

        return run_virtual(world_size, rank, seed=seed, latency=LATENCY)

    def kill(self, rank: int) -> None:
        """End `rank` as SIGKILL does: its links break, and it says nothing any more."""
        self.killed.add(rank)
        pg = self.groups[rank]
        endpoint = pg._member.endpoint
        endpoint.closed = True
        endpoint.transport.accepted = refuse
        for other in self.groups:
            if other != rank:
                hub(pg).cut(rank, other)
        self.bodies[rank].cancel()

    async def die(self, rank: int) -> None:
        """Kill `rank`, which is calling, when all others wait for it."""
        await asyncio.sleep(1)
        self.kill(rank)
        await asyncio.get_running_loop().create_future()

    def cut(self, one: Iterable[int], other: Iterable[int]) -> None:
        """Let nothing through between the ranks of both sides, which is not noticed."""
        pairs = {(min(a, b), max(a, b)) for a in one for b in other}
        for link in hub(self.groups[0]).links:
            if link.ends in pairs:
                link.write = lambda header, payload=None: True  # type: ignore[method-assign]


def refuse(link: Link) -> None:
    """Break a link to a dead rank as soon as the other end is in use."""
    assert isinstance(link, MemoryLink)
    link.sink = Nobody()
    asyncio.get_running_loop().call_soon(link.break_off, ConnectionResetError("killed"))


class Nobody:
    """The sink of links to a dead rank."""

    def route(self, link: Link, header: Header) -> None:
        pass

    def deliver(self, link: Link, header: Header, payload: memoryview | None) -> None:
        pass

    def drained(self, link: Link) -> None:
        pass

    def lost(self, link: Link, error: Exception | None) -> None:
        pass


async def works(pg: ProcessGroup) -> tuple[int, ...]:
    """Return the ranks of a group in which everything arrives."""
    tensor = np.full(30_000, 2.0 ** pg.rank())
    await pg.allreduce(tensor)
    assert (tensor == 2.0 ** pg.size() - 1).all()
    assert await pg.allgather_object(pg.rank()) == list(range(pg.size()))
    return pg.global_ranks


async def recover(pg: ProcessGroup) -> tuple[int, ...]:
    """Shrink until it works, as a program would."""
    while True:
        pg = await pg.shrink()
        try:
            return await works(pg)
        except (PeerLostError, GroupRevokedError):
            continue


# -- who has a say


@pytest.mark.parametrize(
    ("ranks", "electorate", "decides"),
    [
        ([0], [0], True),
        ([1], [0, 1], False),
        ([0], [0, 1], True),
        ([2, 3], [0, 1, 2, 3], False),
        ([0, 3], [0, 1, 2, 3], True),
        ([1, 2, 3], [0, 1, 2, 3], True),
        ([1, 2], [1, 2, 5], True),
        ([5], [1, 2, 5], False),
        ([7, 8, 9], [1, 2, 5], False),
        ([], [], False),
    ],
)
def test_a_quorum_is_more_than_half_or_half_with_the_lowest(
    ranks: list[int], electorate: list[int], decides: bool
) -> None:
    assert is_quorum(ranks, electorate) is decides


# -- ranks die


@pytest.mark.parametrize("world_size", [2, 3, 4, 5])
def test_the_living_go_on_whoever_dies(world_size: int) -> None:
    for victim in range(world_size):
        job = Job()

        async def body(pg: ProcessGroup, job: Job = job, victim: int = victim) -> Any:
            if pg.rank() == victim:
                await job.die(victim)
            with pytest.raises(PeerLostError) as raised:
                await pg.allreduce(np.ones(3))
            assert raised.value.ranks == (victim,)
            start = now()
            small = await pg.shrink()
            assert now() - start < 0.5
            assert small.group_name == "world:0~1"
            return await works(small)

        living = tuple(rank for rank in range(world_size) if rank != victim)
        assert job.run(world_size, body) == [None if rank == victim else living for rank in range(world_size)]


@pytest.mark.parametrize("also", ["sender", "receiver"])
@pytest.mark.parametrize("first", [0, 3])
def test_another_rank_dies_at_any_message_of_the_agreement(
    first: int, also: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    say = Agreement.say
    steps = 0

    def run(step: int, seed: int) -> bool:
        """Kill the sender or the receiver of message number `step`; return whether there was one."""
        job = Job()
        said = 0

        def watched(self: Agreement, rank: int, note: dict[str, Any]) -> None:
            nonlocal said
            me = self.endpoint.rank
            said += rank != me and not {me, rank} & job.killed
            if said == step and len(job.killed) == 1:
                job.kill(me if also == "sender" else rank)
            if me not in job.killed:
                say(self, rank, note)

        async def body(pg: ProcessGroup) -> Any:
            if pg.rank() == first:
                await job.die(first)
            with pytest.raises(PeerLostError):
                await pg.allreduce(np.ones(3))
            return await recover(pg)

        monkeypatch.setattr(Agreement, "say", watched)
        results = job.run(5, body, seed)
        living = tuple(rank for rank in range(5) if rank not in job.killed)
        assert [results[rank] for rank in living] == [living] * len(living), f"message {step}, seed {seed}"
        return len(job.killed) == 2

    while run(steps + 1, seed=steps):
        steps += 1
    assert steps >= 3 * 4  # a vote, an acceptance and two answers of each that is not the coordinator


def test_the_next_hub_dies_with_the_hub() -> None:
    job = Job()

    async def body(pg: ProcessGroup) -> Any:
        if pg.rank() == 0:
            await asyncio.sleep(1)
            job.kill(1)
            job.kill(0)
        with pytest.raises(PeerLostError):
            await pg.allreduce(np.ones(3))
        return await recover(pg)

    assert job.run(5, body) == [None, None, *[(2, 3, 4)] * 3]


def test_one_after_the_other_dies_until_one_is_left() -> None:
    job = Job()

    async def body(pg: ProcessGroup) -> Any:
        sizes = []
        while pg.size() > 1:
            if pg.rank() == pg.size() // 2:
                await job.die(pg.global_ranks[pg.rank()])
            with pytest.raises(GroupError):
                await pg.allreduce(np.ones(3))
            pg = await pg.shrink()
            sizes.append(pg.global_ranks)
        return sizes

    assert job.run(5, body)[0] == [(0, 1, 3, 4), (0, 1, 4), (0, 4), (0,)]


# -- ranks are cut off, come late, or do not come


def test_of_two_halves_that_of_the_lowest_goes_on() -> None:
    job = Job()

    async def body(pg: ProcessGroup) -> Any:
        if pg.rank() == 0:
            pg.abort("to shrink")
        await pg.wait_revoked()
        if pg.rank() == 0:
            await asyncio.sleep(1)
            job.cut([0, 1], [2, 3])
        await asyncio.sleep(2)
        start = now()
        try:
            return await works(await pg.shrink())
        except PeerLostError as error:
            assert now() - start < 15
            return error.how, error.ranks, str(error)

    here, also, *there = job.run(4, body)
    assert here == also == (0, 1)
    for how, missing, text in there:
        assert how == "unreachable"
        assert {0, 1} <= set(missing)
        assert "no quorum without ranks 0, 1" in text


@pytest.mark.parametrize("late", [0, 2])
def test_who_does_not_call_it_is_left_out_and_told(late: int) -> None:
    job = Job()

    async def body(pg: ProcessGroup) -> Any:
        if pg.rank() == 0:
            pg.abort("to shrink")
        await pg.wait_revoked()
        start = now()
        if pg.rank() == late:
            await asyncio.sleep(20)
            with pytest.raises(GroupError, match=f"rank {late} was taken for dead, or called .* went on without it"):
                await pg.shrink()
            return None
        small = await pg.shrink()
        assert 6 <= now() - start < 6.5
        return await works(small)

    living = tuple(rank for rank in range(4) if rank != late)
    assert job.run(4, body) == [None if rank == late else living for rank in range(4)]


def test_one_of_two_waits_for_the_other_and_gives_up_and_may_try_again() -> None:
    job = Job()

    async def body(pg: ProcessGroup) -> Any:
        pg.abort("to shrink")
        if pg.rank() == 1:
            start = now()
            with pytest.raises(PeerLostError, match=r"rank 1 cannot shrink .* no quorum without rank 0") as raised:
                await pg.shrink()
            assert raised.value.ranks == (0,)
            assert 6 <= now() - start < 6.5
        else:
            await asyncio.sleep(10)
        return await works(await pg.shrink())

    assert job.run(2, body) == [(0, 1), (0, 1)]


def test_a_coordinator_that_answers_nothing_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    heard = Agreement.heard

    def deaf(self: Agreement, peer: int, note: dict[str, Any]) -> None:
        if self.endpoint.rank != 1:
            heard(self, peer, note)

    async def body(pg: ProcessGroup) -> Any:
        if pg.rank() in (0, 1):
            await asyncio.sleep(60)
            return None
        start = now()
        small = await pg.shrink(exclude=[0])
        assert 8 <= now() - start < 8.5  # two seconds for an answer, six for the vote
        return await works(small)

    monkeypatch.setattr(Agreement, "heard", deaf)
    assert Job().run(4, body) == [None, None, (2, 3), (2, 3)]


def test_calling_it_again_after_a_cancellation_gives_the_group() -> None:
    job = Job()

    async def body(pg: ProcessGroup) -> Any:
        pg.abort("to shrink")
        if pg.rank() == 2:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.1):
                    await pg.shrink()
            await asyncio.sleep(5)
        elif pg.rank() == 1:
            await asyncio.sleep(1)
        return await works(await pg.shrink())

    assert job.run(3, body) == [(0, 1, 2)] * 3


def test_who_leaves_before_taking_the_group_is_not_waited_for() -> None:
    job = Job()

    async def body(pg: ProcessGroup) -> Any:
        pg.abort("to shrink")
        if pg.rank() == 2:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.1):
                    await pg.shrink()
            await pg.shutdown()
            return None
        await asyncio.sleep(pg.rank() * 3)
        return await recover(pg)

    assert job.run(3, body) == [(0, 1), (0, 1), None]


def test_who_has_left_the_group_has_no_say() -> None:
    job = Job()

    async def body(pg: ProcessGroup) -> Any:
        if pg.rank() in (0, 1):
            await pg.shutdown()
            return None
        with pytest.raises(PeerLostError):
            await pg.barrier()
        start = now()
        small = await pg.shrink()
        assert now() - start < 0.5
        return await works(small)

    assert job.run(4, body) == [None, None, (2, 3), (2, 3)]


@pytest.mark.parametrize(("suspects", "decide"), [({2, 3}, True), ({0, 1}, False)])
def test_suspected_ranks_are_not_waited_for_but_count(suspects: set[int], decide: bool) -> None:
    """Half of the ranks is lost without being proven dead: a quorum of all must go on, not of the rest."""
    job = Job()

    async def body(pg: ProcessGroup) -> Any:
        if pg.rank() in suspects:
            await asyncio.sleep(60)
            return None
        for rank in suspects:
            pg._member.endpoint.died(rank, "nothing has been heard of it", how="unreachable")
        start = now()
        if not decide:
            with pytest.raises(PeerLostError) as raised:
                await pg.shrink()
            assert raised.value.ranks == (0, 1)
            # It turns out that one of them was killed: now the others are a quorum.
            pg._member.endpoint.died(1, "its process is gone", how="killed")
        small = await pg.shrink()
        assert now() - start < 1
        return await works(small)

    living = tuple({0, 1, 2, 3} - suspects)
    assert job.run(4, body) == [living if rank in living else None for rank in range(4)]


@pytest.mark.parametrize(
    "seeds", [range(25), pytest.param(range(25, 3000), marks=pytest.mark.soak)], ids=["few", "many"]
)
def test_any_ranks_die_at_any_messages(seeds: range, monkeypatch: pytest.MonkeyPatch) -> None:
    say = Agreement.say
    for seed in seeds:
        chance = random.Random(seed)
        world_size = chance.randrange(3, 8)
        first = chance.randrange(world_size)
        doomed = {chance.randrange(1, 60): chance.randrange(world_size) for _ in range(chance.randrange(1, 4))}
        job = Job()
        messages = itertools.count()

        def watched(
            self: Agreement,
            rank: int,
            note: dict[str, Any],
            job: Job = job,
            doomed: dict[int, int] = doomed,
            messages: Iterator[int] = messages,
        ) -> None:
            victim = doomed.get(next(messages))
            if victim is not None and victim not in job.killed and len(job.killed) + 1 < len(job.groups):
                job.kill(victim)
            if self.endpoint.rank not in job.killed:
                say(self, rank, note)

        async def body(pg: ProcessGroup, job: Job = job, first: int = first, chance: random.Random = chance) -> Any:
            if pg.rank() == first:
                await job.die(first)
            await pg.wait_revoked()
            await asyncio.sleep(chance.choice([0, 0.01, 1.5]))
            return await recover(pg)

        monkeypatch.setattr(Agreement, "say", watched)
        results = job.run(world_size, body, seed)
        living = tuple(rank for rank in range(world_size) if rank not in job.killed)
        assert [results[rank] for rank in living] == [living] * len(living), f"seed {seed}"


# -- growing


def test_a_rank_dies_while_the_group_meets_newcomers() -> None:
    job = Job()

    async def body(pg: ProcessGroup) -> Any:
        where = {"store": pg._origin._place.store}  # type: ignore[attr-defined]
        newcomers = []

        def another() -> None:
            if pg.rank() == 0:
                newcomers.append(asyncio.ensure_future(new_group(join=True, timeout=20, **where)._make()))

        another()
        if pg.rank() == 2:
            pg._origin.meet_anew = lambda *_: job.die(2)  # type: ignore[method-assign]
        start = now()
        with pytest.raises(PeerLostError) as raised:
            await pg.grow(1)
        assert raised.value.ranks == (2,)
        assert now() - start < 3
        small = await pg.shrink()
        another()
        grown = await small.grow(1)
        if pg.rank():
            return await works(grown)
        lost, other = newcomers
        found, ranks = await asyncio.gather(works(await other), works(grown))
        await asyncio.gather((await other).shutdown(), grown.shutdown())
        with pytest.raises(RendezvousError, match=r"rank 3 waited 20 s for rank\(s\) 2 of 4, which have not come"):
            await lost
        assert found == ranks
        return ranks

    assert job.run(3, body) == [(0, 1, 2), (0, 1, 2), None]


@pytest.mark.parametrize(
    ("error", "how"),
    [
        (None, "killed"),
        (ConnectionResetError(errno.ECONNRESET, "reset"), "killed"),
        (BrokenPipeError(errno.EPIPE, "broken pipe"), "killed"),
        (TimeoutError(errno.ETIMEDOUT, "timed out"), "unreachable"),
        (OSError(errno.EHOSTUNREACH, "no route"), "unreachable"),
    ],
)
def test_only_the_end_of_a_connection_proves_a_death(error: Exception | None, how: str) -> None:
    job = Job()

    async def body(pg: ProcessGroup) -> Any:
        if pg.rank() == 1:
            await pg.wait_revoked()
            return None
        link = next(link for link in hub(pg).links if link._rank == 0 and link.kind is ConnKind.CONTROL)
        pg._member.endpoint.control.lost(link, error)
        cause = await pg.wait_revoked()
        assert isinstance(cause, PeerLostError)
        return cause.how

    assert job.run(2, body) == [how, None]
