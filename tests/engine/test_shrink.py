"""The agreement on the members of a shrunk group: ranks die, are cut off or come late at every step."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest

from aiocoll import GroupError, GroupRevokedError, PeerLostError, ProcessGroup, RendezvousError, new_group
from aiocoll.engine.consensus.quorum import can_decide, connected
from aiocoll.engine.consensus.voter import Voter
from aiocoll.group.parts import parts_of
from aiocoll.store import HashStore
from tests.engine.hosts import Hosts

from ..internals import comm_of, wrap_methods
from ..ranks import check_group, hub_of

Body = Callable[[ProcessGroup], Any]


def now() -> float:
    return asyncio.get_running_loop().time()


class Job:
    """A simulated job on a virtual clock, whose ranks can be killed. By default all ranks share one host."""

    def __init__(self, hosts: Hosts | None = None) -> None:
        self.hosts = hosts or Hosts([])
        self.groups: dict[int, ProcessGroup] = {}

    @property
    def killed(self) -> set[int]:
        return self.hosts.killed

    def run(self, world_size: int, body: Body, seed: int = 0, linked: bool = True) -> list[Any]:
        """Run `body` on each rank; return the result of each rank, or None for a killed rank."""
        if not self.hosts.hosts:
            self.hosts = Hosts([0] * world_size, seed)
        hosts = self.hosts

        async def program(rank: int, store: HashStore) -> Any:
            async with new_group(
                store=store, rank=rank, world_size=world_size, options=hosts.options(rank)
            ) as self.groups[rank]:
                pg = self.groups[rank]
                if linked:
                    await pg.barrier()
                    await asyncio.sleep(1)  # a virtual second, after which all ranks have left the barrier
                return await body(pg)

        async def main() -> list[Any]:
            async with HashStore() as store:
                tasks = [hosts.start(rank, partial(program, rank, store)) for rank in range(world_size)]
                await asyncio.wait(tasks)
                return [None if rank in self.killed else task.result() for rank, task in enumerate(tasks)]

        found: list[Any] = hosts.run(main)
        return found

    def kill(self, rank: int) -> None:
        """End the simulated process of `rank` as SIGKILL does."""
        self.hosts.kill(rank)

    async def die(self, rank: int) -> None:
        """Kill the calling rank, `rank`, once all other ranks wait for this rank."""
        await asyncio.sleep(1)
        self.kill(rank)
        await asyncio.get_running_loop().create_future()

    def cut(self, one: Iterable[int], other: Iterable[int]) -> None:
        """Hold back all frames between two sets of ranks, without a notice to any rank."""
        network = hub_of(self.groups[0])
        for a in one:
            for b in other:
                network.block(a, b)
                network.block(b, a)


async def wait_for_loss(pg: ProcessGroup) -> PeerLostError:
    """Repeat allreduces until the group fails; return the cause of the failure."""
    try:
        while True:
            await pg.allreduce(np.ones(30_000))
            await asyncio.sleep(0.5)
    except (PeerLostError, GroupRevokedError):
        cause = await pg.wait_revoked()
        assert isinstance(cause, PeerLostError)
        return cause


async def recover(pg: ProcessGroup) -> tuple[int, ...]:
    """Call `shrink` until the new group works, as programs do; return the ranks of this group."""
    while True:
        pg = await pg.shrink()
        try:
            return await check_group(pg)
        except (PeerLostError, GroupRevokedError):
            continue


# -- quorum


@pytest.mark.parametrize(
    ("ranks", "group", "away", "decide"),
    [
        ([0], [0], [], True),
        ([1], [0, 1], [], False),
        ([0], [0, 1], [], True),
        ([1], [0, 1], [0], True),
        ([2, 3], [0, 1, 2, 3], [], False),
        ([0, 3], [0, 1, 2, 3], [], True),
        ([1, 2, 3], [0, 1, 2, 3], [], True),
        ([2, 3], [0, 1, 2, 3], [0, 1], True),
        ([2, 3], [0, 1, 2, 3], [1], False),  # rank 0 may have continued with rank 1 before rank 1 died
        ([3, 4], [0, 1, 2, 3, 4], [0, 1], False),
        ([3], [0, 1, 2, 3, 4], [0, 1, 2, 4], True),
        ([1, 2], [1, 2, 5], [], True),
        ([5], [1, 2, 5], [], False),
        ([7, 8, 9], [1, 2, 5], [], False),
        ([], [0, 1], [0, 1], False),
        ([], [], [], False),
    ],
)
def test_quorum_is_a_majority_or_one_half_with_the_lowest_rank_or_all_living_ranks(
    ranks: list[int], group: list[int], away: list[int], decide: bool
) -> None:
    assert can_decide(ranks, group, away) is decide


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
def test_two_partitions_of_a_group_never_both_have_a_quorum(size: int) -> None:
    """Check all partitions, also with dead ranks, which may have belonged to either partition."""
    group = range(size)
    for parts in itertools.product(("here", "there", "dead, was there"), repeat=size):
        here, there, dead = ([rank for rank in group if parts[rank] == part] for part in ("here", "there", parts[-1]))
        dead = [rank for rank in group if parts[rank] == "dead, was there"]
        if there:
            assert not (can_decide(here, group, dead) and can_decide(there + dead, group, []))


@pytest.mark.parametrize(
    ("candidates", "lost", "kept"),
    [
        ([0, 1, 2], {}, [0, 1, 2]),
        ([0, 1, 2], {1: [2]}, [0, 1]),
        ([0, 1, 2], {0: [1], 1: [0]}, [0, 2]),
        ([0, 1, 2, 3], {0: [1, 2], 3: [0]}, [1, 2, 3]),
        ([0, 1], {0: [7]}, [0, 1]),
        ([], {}, []),
    ],
)
def test_ranks_that_reach_each_other_continue(
    candidates: list[int], lost: dict[int, list[int]], kept: list[int]
) -> None:
    assert connected(candidates, lost) == kept


# -- deaths


@pytest.mark.parametrize("world_size", [2, 3, 4, 5])
def test_living_ranks_continue_after_any_death(world_size: int) -> None:
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
            return await check_group(small)

        living = tuple(rank for rank in range(world_size) if rank != victim)
        assert job.run(world_size, body) == [None if rank == victim else living for rank in range(world_size)]


@pytest.mark.parametrize("also", ["sender", "receiver"])
@pytest.mark.parametrize("first", [0, 3])
def test_agreement_succeeds_despite_another_death_at_any_message(
    first: int, also: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    send = Voter.send
    steps = 0

    def run(step: int, seed: int) -> bool:
        """Kill the sender or the receiver of message number `step`; return whether so many messages were sent."""
        job = Job()
        sent = 0

        def send_and_kill(self: Voter, rank: int, note: dict[str, Any]) -> None:
            nonlocal sent
            me = self.rank
            sent += rank != me and not {me, rank} & job.killed
            if sent == step and len(job.killed) == 1:
                job.kill(me if also == "sender" else rank)
            if me not in job.killed:
                send(self, rank, note)

        async def body(pg: ProcessGroup) -> Any:
            if pg.rank() == first:
                await job.die(first)
            with pytest.raises(PeerLostError):
                await pg.allreduce(np.ones(3))
            return await recover(pg)

        monkeypatch.setattr(Voter, "send", send_and_kill)
        results = job.run(5, body, seed)
        living = tuple(rank for rank in range(5) if rank not in job.killed)
        assert [results[rank] for rank in living] == [living] * len(living), f"message {step}, seed {seed}"
        return len(job.killed) == 2

    while run(steps + 1, seed=steps):
        steps += 1
    assert steps >= 3 * 4  # each rank except the coordinator has a vote, an acceptance and two replies


def test_agreement_succeeds_after_the_deaths_of_the_hub_and_the_next_hub() -> None:
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


def test_shrinking_continues_until_one_rank_is_left() -> None:
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


# -- cut-off, late and absent ranks


def test_half_of_the_ranks_with_the_lowest_rank_continues() -> None:
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
            return await check_group(await pg.shrink())
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
def test_rank_that_does_not_call_shrink_is_excluded_and_notified(late: int) -> None:
    job = Job()

    async def body(pg: ProcessGroup) -> Any:
        if pg.rank() == 0:
            pg.abort("to shrink")
        await pg.wait_revoked()
        start = now()
        if pg.rank() == late:
            await asyncio.sleep(20)
            with pytest.raises(GroupError, match=f"rank {late} was unreachable .* or called .* continued without it"):
                await pg.shrink()
            return None
        small = await pg.shrink()
        assert 6 <= now() - start < 6.5
        return await check_group(small)

    living = tuple(rank for rank in range(4) if rank != late)
    assert job.run(4, body) == [None if rank == late else living for rank in range(4)]


def test_shrink_of_two_ranks_times_out_and_can_be_retried() -> None:
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
        return await check_group(await pg.shrink())

    assert job.run(2, body) == [(0, 1), (0, 1)]


def test_silent_coordinator_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    def drop_for_rank_1(send: Any, voter: Voter, rank: int, message: Any) -> None:
        if rank != 1:
            send(voter, rank, message)

    async def body(pg: ProcessGroup) -> Any:
        if pg.rank() in (0, 1):
            await asyncio.sleep(60)
            return None
        start = now()
        small = await pg.shrink(exclude=[0])
        assert 8 <= now() - start < 8.5  # two seconds for an answer of the silent coordinator, and six for its vote
        return await check_group(small)

    wrap_methods(monkeypatch, Voter, send=drop_for_rank_1)
    assert Job().run(4, body) == [None, None, (2, 3), (2, 3)]


def test_shrink_after_a_cancelled_shrink_returns_the_new_group() -> None:
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
        return await check_group(await pg.shrink())

    assert job.run(3, body) == [(0, 1, 2)] * 3


def test_new_group_does_not_wait_for_a_rank_that_left_during_the_agreement() -> None:
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


def test_rank_that_has_left_the_group_has_no_vote_in_the_agreement() -> None:
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
        return await check_group(small)

    assert job.run(4, body) == [None, None, (2, 3), (2, 3)]


@pytest.mark.parametrize("lost", [{2, 3}, {0, 1}])
def test_unreachable_ranks_are_dialled_again_and_count_toward_the_quorum(lost: set[int]) -> None:
    """Cut off half of the ranks without a proof of death: without rank 0, the other half needs `assume_dead`."""
    job = Job()

    async def body(pg: ProcessGroup) -> Any:
        if pg.rank() in lost:
            await asyncio.sleep(60)
            return None
        job.cut(lost, {0, 1, 2, 3} - lost)
        for rank in lost:
            comm_of(pg).endpoint.roster.record_loss(rank, "it has not answered", how="unreachable")
        start = now()
        if 0 in lost:
            with pytest.raises(PeerLostError, match=r"certainly dead, call shrink\(assume_dead=\[0, 1\]\)") as raised:
                await pg.shrink()
            assert raised.value.ranks == (0, 1)
            assert 2.5 <= now() - start < 5
        small = await pg.shrink(assume_dead=[0, 1] if 0 in lost else None)
        assert now() - start < 5
        return await check_group(small)

    living = tuple({0, 1, 2, 3} - lost)
    assert job.run(4, body) == [living if rank in living else None for rank in range(4)]


def test_death_of_a_rank_is_proven_by_a_process_on_the_same_host() -> None:
    """Let ranks 2 and 3, on the host of rank 1, report the death of rank 1 to rank 0 on another host."""
    hosts = Hosts([0, 1, 1, 1])

    async def body(pg: ProcessGroup) -> Any:
        if pg.rank() == 1:
            await asyncio.sleep(1)
            hosts.kill(1)
        start = now()
        cause = await pg.wait_revoked()
        assert isinstance(cause, PeerLostError)
        assert cause.ranks == (1,)
        assert now() - start < 2
        small = await pg.shrink()
        assert now() - start < 2.5  # at once, because no rank is dialled again
        assert [comm_of(pg).endpoint.roster.dead[1][0]] == ["killed"]
        return await check_group(small)

    assert Job(hosts).run(4, body) == [(0, 2, 3), None, (0, 2, 3), (0, 2, 3)]


def test_broken_connection_between_living_ranks_excludes_no_rank() -> None:
    for one, other in itertools.combinations(range(3), 2):
        for where in ([0, 0, 0], [0, 1, 2]):
            hosts = Hosts(where)

            async def body(
                pg: ProcessGroup, hosts: Hosts = hosts, one: int = one, other: int = other, where: list[int] = where
            ) -> Any:
                if pg.rank() == one:
                    asyncio.get_running_loop().call_later(1, hosts.reset, one, other)
                cause = await wait_for_loss(pg)
                assert cause.how == "unreachable"
                if len(set(where)) == 1:
                    pair = f"ranks {one} and {other} of group 'world:0'"
                    text = f"the connection between {pair} broke, although both ranks are alive"
                    assert (str(cause), cause.ranks) == (text, (one, other))
                else:
                    assert set(cause.ranks) <= {one, other}
                return await check_group(await pg.shrink())

            assert Job(hosts).run(3, body) == [(0, 1, 2)] * 3, (one, other, where)


def test_network_partition_between_two_ranks_excludes_one_rank() -> None:
    hosts = Hosts([0, 1, 2, 3])

    async def body(pg: ProcessGroup) -> Any:
        await pg.alltoall([np.empty(1) for _ in range(4)], [np.ones(1) for _ in range(4)])
        if pg.rank() == 1:
            hosts.cut(1, 2)
            hosts.cut(2, 1)
        await wait_for_loss(pg)
        try:
            small = await pg.shrink()
        except GroupError as error:
            return str(error)
        return await check_group(small)

    *others, left_out, other = Job(hosts).run(4, body)
    assert [*others, other] == [(0, 1, 3)] * 3
    assert left_out.startswith("rank 2 was unreachable for some ranks, was declared dead, or called shrink() after the")


@pytest.mark.parametrize(
    "seeds", [range(25), pytest.param(range(25, 3000), marks=pytest.mark.soak)], ids=["few", "many"]
)
def test_agreement_succeeds_despite_any_deaths_at_any_messages(seeds: range, monkeypatch: pytest.MonkeyPatch) -> None:
    send = Voter.send
    for seed in seeds:
        chance = random.Random(seed)
        world_size = chance.randrange(3, 8)
        first = chance.randrange(world_size)
        doomed = {chance.randrange(1, 60): chance.randrange(world_size) for _ in range(chance.randrange(1, 4))}
        job = Job()
        messages = itertools.count()

        def send_and_kill(
            self: Voter,
            rank: int,
            note: dict[str, Any],
            job: Job = job,
            doomed: dict[int, int] = doomed,
            messages: Iterator[int] = messages,
        ) -> None:
            victim = doomed.get(next(messages))
            if victim is not None and victim not in job.killed and len(job.killed) + 1 < len(job.groups):
                job.kill(victim)
            if self.rank not in job.killed:
                send(self, rank, note)

        async def body(pg: ProcessGroup, job: Job = job, first: int = first, chance: random.Random = chance) -> Any:
            if pg.rank() == first:
                await job.die(first)
            await pg.wait_revoked()
            await asyncio.sleep(chance.choice([0, 0.01, 1.5]))
            return await recover(pg)

        monkeypatch.setattr(Voter, "send", send_and_kill)
        results = job.run(world_size, body, seed)
        living = tuple(rank for rank in range(world_size) if rank not in job.killed)
        assert [results[rank] for rank in living] == [living] * len(living), f"seed {seed}"


# -- growing


def test_group_survives_a_death_while_it_meets_newcomers() -> None:
    job = Job()

    async def body(pg: ProcessGroup) -> Any:
        where = {"store": parts_of(pg).reconfigurer._origin._store_handle.store}  # type: ignore[attr-defined]
        newcomers = []

        def start_newcomer() -> None:
            if pg.rank() == 0:
                newcomers.append(asyncio.ensure_future(new_group(join=True, timeout=20, **where)._make()))

        start_newcomer()
        if pg.rank() == 2:
            parts_of(pg).reconfigurer._origin.rendezvous_again = lambda *_: job.die(2)  # type: ignore[method-assign]
        start = now()
        with pytest.raises(PeerLostError) as raised:
            await pg.grow(1)
        assert raised.value.ranks == (2,)
        assert now() - start < 3
        small = await pg.shrink()
        start_newcomer()
        grown = await small.grow(1)
        if pg.rank():
            return await check_group(grown)
        lost, other = newcomers
        found, ranks = await asyncio.gather(check_group(await other), check_group(grown))
        await asyncio.gather((await other).shutdown(), grown.shutdown())
        # A simulated death cancels the task of the rank, and a cancelled rank notifies the newcomers.
        with pytest.raises(RendezvousError, match="group that was to meet them does not: a rank was cancelled"):
            await lost
        assert found == ranks
        return ranks

    assert job.run(3, body) == [(0, 1, 2), (0, 1, 2), None]
