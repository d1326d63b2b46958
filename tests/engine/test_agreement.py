"""Messages that one rank sends in the agreement on a new group after a failure, as coordinator and as voter."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from aiocoll.engine.consensus.agreements import Agreements
from aiocoll.engine.consensus.completed import Completed
from aiocoll.engine.consensus.parts import Parts
from aiocoll.engine.consensus.voter import PROMPT

GROUP = 7
#: The completion report of a rank that has completed no collective.
NOTHING = Completed(0, frozenset(), frozenset()).as_data()
Messages = list[tuple[int, dict[str, Any]]]


class LoneEndpoint:
    """A stand-in for a rank's endpoint, which records sent messages and has a clock that the test moves."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank = rank
        self.world_size = world_size
        self.loop = asyncio.get_running_loop()
        self.gone: set[int] = set()
        self.own_death: str | None = None
        self.dead: dict[int, tuple[str, str]] = {}
        self.doubted_ranks: set[int] = set()
        self.groups: dict[int, Any] = {}
        self.runtime = self
        self.sent: Messages = []
        self._timers: list[tuple[float, asyncio.TimerHandle, Any]] = []
        self._now = 0.0
        parts = Parts(self, self, self, self.flood, self.look, self.groups)  # type: ignore[arg-type]
        self.agreement = Agreements(parts, lambda identity, peer: None).voter(GROUP, 0, range(world_size))

    @property
    def suspected_ranks(self) -> set[int]:
        return {rank for rank, (how, _) in self.dead.items() if how != "killed"}

    def record_return(self, rank: int) -> None:
        self.dead.pop(rank, None)

    def send_direct(self, rank: int, note: dict[str, Any]) -> None:
        self.sent.append((rank, note))

    def flood(self, note: dict[str, Any], ranks: Sequence[int]) -> None:
        """Ignore messages to several ranks, which these tests do not check."""

    def probe(self, rank: int) -> None:
        """Skip the probe of an unreachable rank, since no rank is unreachable in these tests."""

    def look(self, rank: int) -> None:
        """Skip the check whether a rank's process runs, since all processes run in these tests."""

    def call_later(self, delay: float, callback: Any, *args: Any) -> asyncio.TimerHandle:
        handle = self.loop.call_later(1000, callback, *args)
        self._timers.append((self._now + delay, handle, lambda: callback(*args)))
        return handle

    def wait(self, seconds: float) -> None:
        """Move the clock forward, and call the due timers."""
        self._now += seconds
        due = [timer for timer in self._timers if timer[0] <= self._now]
        self._timers = [timer for timer in self._timers if timer[0] > self._now]
        for _, handle, call in due:
            if not handle.cancelled():
                call()

    def receive(self, peer: int, what: str, **more: Any) -> list[tuple[int, str, int]]:
        """Handle a message from `peer`; return the receiver, kind and ballot of each reply."""
        self.sent.clear()
        self.agreement.handle(peer, {"what": what, "dead": [], "assumed": [], **more})
        return self.sent_messages()

    def sent_messages(self) -> list[tuple[int, str, int]]:
        return [(rank, note["what"], note.get("ballot", -1)) for rank, note in self.sent]

    def vote(self, peer: int, ballot: int, **candidacy: Any) -> list[tuple[int, str, int]]:
        """Handle the vote of a rank that has called `shrink` or `grow`; return the replies."""
        candidacy = {"lost": [], **candidacy}
        if "exclude" in candidacy:
            candidacy["completed"] = NOTHING
        return self.receive(peer, "vote", ballot=ballot, accepted=None, candidacy=candidacy)

    def close(self) -> None:
        self.agreement.close()
        for _, handle, _ in self._timers:
            handle.cancel()


async def test_shrink_coordinator_requests_all_votes_after_the_first_vote() -> None:
    alone = LoneEndpoint(0, 4)
    assert alone.vote(2, 0, exclude=[]) == [(1, "ask", 0), (3, "ask", 0), (2, "ask", 0)]
    alone.close()


async def test_coordinator_counts_its_own_promise_before_its_program_calls_shrink() -> None:
    """Check that rank 1 does not wait for rank 2: of three ranks, the promises of ranks 0 and 1 are a quorum."""
    alone = LoneEndpoint(0, 3)
    sent = alone.vote(1, 0, exclude=[0, 2])
    assert [each for each in sent if each[1] == "propose"] == [(1, "propose", 0), (2, "propose", 0), (1, "propose", 0)]
    assert alone.sent[-1][1]["outcome"]["members"] == [1]
    alone.close()


async def test_voter_that_was_taken_for_dead_counts_as_alive_after_its_vote() -> None:
    alone = LoneEndpoint(0, 3)
    alone.dead[2] = "stopped", "it was silent"
    alone.vote(2, 0, exclude=[])
    assert not alone.dead
    alone.close()


@pytest.mark.parametrize("ballot", [0, 3])
async def test_voter_of_an_older_ballot_receives_the_newer_promised_ballot(ballot: int) -> None:
    alone = LoneEndpoint(0, 3)
    alone.vote(2, 3, exclude=[])
    assert alone.receive(1, "ask", ballot=4) == [(1, "vote", 4)]
    assert alone.vote(2, ballot, exclude=[]) == [(2, "ask", 4)]
    alone.close()


async def test_proposal_of_a_past_ballot_is_not_repeated() -> None:
    alone = LoneEndpoint(0, 3)
    alone.vote(1, 3, exclude=[0])
    assert (2, "propose", 3) in alone.vote(2, 3, exclude=[0])
    alone.receive(1, "ask", ballot=4)
    assert alone.vote(2, 3, exclude=[0]) == [(2, "ask", 4)]
    alone.close()


async def test_last_missing_acceptance_decides_the_ballot() -> None:
    alone = LoneEndpoint(0, 3)
    alone.vote(1, 0, exclude=[0])
    assert (2, "propose", 0) in alone.vote(2, 0, exclude=[0])
    assert [what for _, what, _ in alone.receive(1, "accept", ballot=0)] == ["decided"] * 2
    assert alone.agreement.outcome is not None
    assert alone.agreement.outcome["members"] == [1, 2]
    alone.close()


async def test_votes_for_two_grown_groups_are_refused_at_once() -> None:
    alone = LoneEndpoint(0, 3)
    alone.vote(1, 0, grown="one")
    assert alone.vote(2, 0, grown="one") == [(2, "ask", 0)]
    assert [each[:2] for each in alone.vote(2, 0, grown="other")[:2]] == [(1, "refuse"), (2, "refuse")]
    alone.close()


@pytest.mark.parametrize("answer", ["ask", "propose"])
async def test_coordinator_that_has_sent_a_message_is_not_skipped(answer: str) -> None:
    alone = LoneEndpoint(2, 3)
    waiting = asyncio.create_task(alone.agreement.shrink((), (), NOTHING))
    await asyncio.sleep(0)
    assert alone.sent_messages() == [(0, "vote", 0)]
    alone.receive(0, answer, ballot=0, outcome={"members": [0, 1], "excluded": [], "grown": ""})
    for coordinator in (0, 1):  # rank 0 has sent no further message by the second timeout
        alone.sent.clear()
        alone.wait(PROMPT)
        assert [each[0] for each in alone.sent_messages()] == [coordinator]
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    alone.close()
