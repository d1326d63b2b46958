"""The one decision of a shrinking group when notes are lost or come late: promises are kept, acceptances remembered.

Ranks run on a virtual clock with links that are whole. What is lost or late are the notes of the agreement alone.
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

from ..internals import comm_of, replaced

#: Seconds a frame takes at least and at most.
LATENCY = (0.0005, 0.02)

Say = Callable[[Voter, int, dict[str, Any]], None]
Ranks = tuple[int, ...]

say: Say = Voter.send


def shrunk(
    world_size: int,
    between: Say,
    monkeypatch: pytest.MonkeyPatch,
    seed: int = 0,
    late: Callable[[], float] = float,
    tries: int = 1,
) -> list[Ranks | None]:
    """Shrink a group of which nobody has died; return the group that each rank goes on in, None if in none.

    Args:
        world_size: number of ranks.
        between: called for each note in place of `say`.
        monkeypatch: of the test.
        seed: of the latencies.
        late: seconds after which a rank calls `shrink`.
        tries: how often it does, if there is no quorum.
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
        # Nobody ends before all have decided: who has ended has no say.
        await asyncio.sleep(200)
        if small is None:
            return None
        await small.shutdown()
        return small.global_ranks

    with monkeypatch.context() as patch:
        replaced(patch, vote_said=between)
        return run_virtual(world_size, rank, seed=seed, latency=LATENCY)


@pytest.mark.parametrize(("world_size", "reached"), [(3, [1]), (3, [2]), (4, [2, 3]), (5, [1, 2]), (5, [3, 4])])
def test_value_that_may_be_decided_is_proposed_again(
    world_size: int, reached: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 decides by the acceptances of a bare quorum and falls silent; another coordinator takes over."""
    silent = False

    def between(self: Voter, rank: int, note: dict[str, Any]) -> None:
        nonlocal silent
        if self.rank == 0 and rank:
            silent = silent or note["what"] == "decided"
            if silent or (note["what"] == "propose" and rank not in reached):
                return
        say(self, rank, note)

    everybody = tuple(range(world_size))
    assert shrunk(world_size, between, monkeypatch) == [everybody] * world_size
    assert silent


@pytest.mark.parametrize("world_size", [3, 5])
def test_voter_accepts_no_ballot_below_its_promise(world_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The proposals of rank 0 are late: all others have passed it over, and voted at rank 1."""
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
                # When all these votes have come, and before rank 1 has waited long enough for that of rank 0.
                self.parts.context.runtime.call_later(1, lambda: [say(*each) for each in kept])
        say(self, rank, note)

    first, *others = shrunk(world_size, between, monkeypatch)
    assert len(kept) >= world_size - 2
    assert voted == set(range(1, world_size))
    assert others == [tuple(range(1, world_size))] * (world_size - 1)
    assert first is None


def test_latest_accepted_value_is_proposed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 4 alone accepts what rank 0 proposes, then ranks 1 to 3 decide something else, and rank 1 falls silent."""
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
        say(self, rank, note)

    results = shrunk(5, between, monkeypatch)
    assert silent
    assert results[1:4] == [(1, 2, 3)] * 3
    assert {results[0], results[4]} == {None}


def test_voter_keeps_its_latest_acceptance(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 has accepted its own proposal alone, then accepts, unasked before, what decides for ranks 1 and 2."""
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
        say(self, rank, note)

    first, *others = shrunk(3, between, monkeypatch, tries=9)
    assert decided
    assert others == [(1, 2)] * 2
    assert first is None


def test_new_coordinator_requests_votes_of_ranks_that_voted_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of rank 0 only rank 2 hears anything, so it alone would stay there, and be left out by the others."""

    def between(self: Voter, rank: int, note: dict[str, Any]) -> None:
        if self.rank != 0 or rank in (0, 2):
            say(self, rank, note)

    everybody = (0, 1, 2, 3, 4)
    assert shrunk(5, between, monkeypatch) == [everybody] * 5


def test_coordinator_learns_dead_ranks_from_a_vote() -> None:
    """Only rank 2 has seen the end of rank 3: the others need not wait for its vote."""

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
def test_agreement_yields_one_group_despite_lost_and_late_notes(seeds: range, monkeypatch: pytest.MonkeyPatch) -> None:
    went_on = 0
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
                say(self, rank, note)
            elif chance.random() >= loss:
                self.parts.context.runtime.call_later(chance.uniform(0, delay), say, self, rank, note)

        results = shrunk(
            world_size, between, monkeypatch, seed, late=lambda chance=chance: chance.choice([0.0, 0.1, 4.0, 9.0])
        )
        groups = {result for result in results if result is not None}
        assert len(groups) <= 1, f"seed {seed}: {results}"
        went_on += bool(groups)
    assert went_on > len(seeds) / 2
