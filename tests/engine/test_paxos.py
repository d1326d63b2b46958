"""The agreement on one shrunk group when messages are lost or late: voters keep their promises and acceptances.

Ranks run on a virtual clock, and their links never break. Only messages of the agreement are lost or late.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

import pytest

from aiocoll import GroupError, PeerLostError, ProcessGroup
from aiocoll.engine.consensus.voter import Voter
from aiocoll.testing.virtual import run_virtual

from ..internals import comm_of

#: Shortest and longest latency of a frame in seconds.
LATENCY = (0.0005, 0.02)

SendMessage = Callable[[Voter, int, dict[str, Any]], None]
Ranks = tuple[int, ...]

send_message: SendMessage = Voter.send


def shrunk_groups(
    world_size: int,
    between: SendMessage,
    monkeypatch: pytest.MonkeyPatch,
    seed: int = 0,
    late: Callable[[], float] = float,
    tries: int = 1,
) -> list[Ranks | None]:
    """Shrink a group without deaths; return the members of each rank's new group, or None for an excluded rank.

    Args:
        world_size: number of ranks.
        between: called for each message in place of `send_message`.
        monkeypatch: the fixture.
        seed: seed of the latencies.
        late: returns the seconds after which a rank calls `shrink`.
        tries: number of calls of each rank while there is no quorum.
    """

    async def rank(pg: ProcessGroup) -> Ranks | None:
        if pg.rank() == 0:
            pg.abort("to shrink")
        await pg.wait_revoked()
        await asyncio.sleep(late())
        small = None
        for _ in range(tries):
            try:
                small = await pg.shrink()
            except PeerLostError:
                continue
            except GroupError:
                pass
            break
        # Stay until all ranks have decided, since a rank that has ended has no vote.
        await asyncio.sleep(200)
        if small is None:
            return None
        await small.shutdown()
        return small.global_ranks

    with monkeypatch.context() as patch:
        patch.setattr(Voter, "send", between)
        return run_virtual(world_size, rank, seed=seed, latency=LATENCY)


@pytest.mark.parametrize(("world_size", "reached"), [(3, [1]), (3, [2]), (4, [2, 3]), (5, [1, 2]), (5, [3, 4])])
def test_value_that_may_already_be_decided_is_proposed_again(
    world_size: int, reached: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Let rank 0 decide with the acceptances of a minimal quorum, and then send nothing; another rank takes over."""
    silent = False

    def between(self: Voter, rank: int, note: dict[str, Any]) -> None:
        nonlocal silent
        if self.rank == 0 and rank:
            silent = silent or note["what"] == "decided"
            if silent or (note["what"] == "propose" and rank not in reached):
                return
        send_message(self, rank, note)

    all_ranks = tuple(range(world_size))
    assert shrunk_groups(world_size, between, monkeypatch) == [all_ranks] * world_size
    assert silent


@pytest.mark.parametrize("world_size", [3, 5])
def test_voter_accepts_no_ballot_below_its_promise(world_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Delay rank 0's proposals until all other ranks have skipped rank 0 and sent their votes to rank 1."""
    kept: list[tuple[Voter, int, dict[str, Any]]] = []
    voted: set[int] = set()

    def between(self: Voter, rank: int, note: dict[str, Any]) -> None:
        me = self.rank
        if me == 0 and rank:
            if note["what"] == "propose" and rank > 1:
                kept.append((self, rank, note))
            return
        if rank == 1 and note["what"] == "vote" and note["ballot"] % world_size == 1:
            voted.add(me)
            if len(voted) == world_size - 1:
                # Resend after these votes have arrived, but before rank 1 stops waiting for the vote of rank 0.
                self.parts.context.runtime.call_later(1, lambda: [send_message(*each) for each in kept])
        send_message(self, rank, note)

    first, *others = shrunk_groups(world_size, between, monkeypatch)
    assert len(kept) >= world_size - 2
    assert voted == set(range(1, world_size))
    assert others == [tuple(range(1, world_size))] * (world_size - 1)
    assert first is None


def test_latest_accepted_value_is_proposed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let only rank 4 accept rank 0's proposal. Then ranks 1 to 3 decide another value, and rank 1 sends no more."""
    silent = False

    def between(self: Voter, rank: int, note: dict[str, Any]) -> None:
        nonlocal silent
        me, what = self.rank, note["what"]
        if me == 0 and rank and (what != "propose" or rank != 4):
            return
        if me == 4 and rank in (1, 2, 3) and (rank == 1 or not silent):
            return
        if me == 1 and rank != 1:
            silent = silent or what == "decided"
            if silent or (what == "propose" and rank == 4):
                return
        send_message(self, rank, note)

    results = shrunk_groups(5, between, monkeypatch)
    assert silent
    assert results[1:4] == [(1, 2, 3)] * 3
    assert {results[0], results[4]} == {None}


def test_voter_keeps_its_latest_acceptance(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let rank 0 first accept its own proposal, and later the proposal on which ranks 1 and 2 decide."""
    decided = False

    def between(self: Voter, rank: int, note: dict[str, Any]) -> None:
        nonlocal decided
        me, what = self.rank, note["what"]
        decided = decided or (me == 1 and what == "decided")
        if me != rank:
            if me == 0 and not decided and what != "accept":
                return
            if me == 1 and (decided or (rank == 0) != (what == "propose")):
                return
        send_message(self, rank, note)

    first, *others = shrunk_groups(3, between, monkeypatch, tries=9)
    assert decided
    assert others == [(1, 2)] * 2
    assert first is None


def test_new_coordinator_requests_votes_of_ranks_that_voted_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let only rank 2 receive rank 0's messages; the other ranks must not decide on a group without rank 2."""

    def between(self: Voter, rank: int, note: dict[str, Any]) -> None:
        if self.rank != 0 or rank in (0, 2):
            send_message(self, rank, note)

    all_ranks = (0, 1, 2, 3, 4)
    assert shrunk_groups(5, between, monkeypatch) == [all_ranks] * 5


def test_coordinator_learns_dead_ranks_from_a_vote() -> None:
    """Let only rank 2 know that rank 3 is dead; after rank 2's vote, no rank waits for rank 3."""

    async def rank(pg: ProcessGroup) -> Ranks | None:
        if pg.rank() == 3:
            await asyncio.sleep(60)
            return None
        if pg.rank() == 2:
            comm_of(pg).endpoint.roster.record_loss(3, "its process is gone", notify=False, how="killed")
        await pg.wait_revoked()
        start = asyncio.get_running_loop().time()
        small = await pg.shrink()
        assert asyncio.get_running_loop().time() - start < 1
        assert set(comm_of(pg).endpoint.roster.dead) == {3}
        await small.shutdown()
        return small.global_ranks

    assert run_virtual(4, rank, latency=LATENCY) == [(0, 1, 2)] * 3 + [None]


@pytest.mark.slow
@pytest.mark.parametrize(
    "seeds", [range(100), pytest.param(range(100, 3000), marks=pytest.mark.soak)], ids=["few", "many"]
)
def test_agreement_yields_one_group_despite_lost_and_late_messages(
    seeds: range, monkeypatch: pytest.MonkeyPatch
) -> None:
    trials_continued = 0
    for seed in seeds:
        chance = random.Random(seed)
        world_size = chance.randrange(2, 7)
        loss, delay = chance.choice([0.05, 0.2, 0.4]), chance.choice([0.05, 2.0, 5.0])

        def between(
            self: Voter,
            rank: int,
            note: dict[str, Any],
            chance: random.Random = chance,
            loss: float = loss,
            delay: float = delay,
        ) -> None:
            if rank == self.rank:
                send_message(self, rank, note)
            elif chance.random() >= loss:
                self.parts.context.runtime.call_later(chance.uniform(0, delay), send_message, self, rank, note)

        results = shrunk_groups(
            world_size, between, monkeypatch, seed, late=lambda chance=chance: chance.choice([0.0, 0.1, 4.0, 9.0])
        )
        groups = {result for result in results if result is not None}
        assert len(groups) <= 1, f"seed {seed}: {results}"
        trials_continued += bool(groups)
    assert trials_continued > len(seeds) / 2
