"""Polling of one rank on a simulated clock: the duration of polling, and yields to other processes and tasks."""

from __future__ import annotations

import contextvars
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from aiocoll.engine.polling import DOUBT, TURN, Polling
from aiocoll.runtime import BUDGET

#: Seconds after which a rank stops polling if nothing has arrived, and simulated seconds of one poll.
SPIN, LOOK = 50e-6, 1e-6


class Clock:
    """A runtime whose clock advances by `LOOK` seconds at every reading."""

    may_spin = True
    due = False

    def __init__(self) -> None:
        self.now = 0.0
        self.turns: list[Callable[[], None]] = []
        self.call_soon = self.turns.append

    def ticks(self) -> float:
        self.now += LOOK
        return self.now

    def turn(self) -> None:
        turns, self.turns[:] = list(self.turns), []
        for each in turns:
            each()


class Bench:
    """A stand-in for a rank with one link; polls of the link return the values in `results`, and then False."""

    def __init__(self, results: list[bool], *, crowded: bool = False, spin: float = SPIN) -> None:
        self.clock = Clock()
        self.results = results
        self.polls = 0
        self.pending: list[Any] = []
        self.completion: Any = SimpleNamespace(done=False)
        self.ends_at = 0
        # Whether the peer runs on the same core; None if the peer shares no memory.
        self.same_core: bool | None = None
        self.context: Any = SimpleNamespace(runtime=self.clock, quiet=contextvars.copy_context())
        self.polling = Polling(self.context, {1: self}, spin, crowded)  # type: ignore[dict-item]
        self.polling.links = (self,)  # type: ignore[assignment]

    @property
    def in_flight(self) -> list[Any]:
        return self.pending

    @property
    def shared(self) -> Bench | None:
        return None if self.same_core is None else self

    def shares_core(self) -> bool:
        return bool(self.same_core)

    def poll(self) -> bool:
        self.polls += 1
        if self.polls == self.ends_at:
            self.completion.done = True
            self.pending.clear()
        return self.polls <= len(self.results) and self.results[self.polls - 1]


def test_await_polls_links_until_its_work_is_done() -> None:
    bench = Bench([])
    bench.ends_at = 3
    bench.polling.spin(bench.completion)
    assert bench.polls == 3
    bench.polling.spin(bench.completion)
    assert bench.polls == 4, "an await whose work is done may poll again in the same iteration"


def test_unsuccessful_await_polls_briefly_once_per_loop_iteration() -> None:
    bench = Bench([])
    bench.polling.spin(bench.completion)
    first = bench.polls
    assert first == pytest.approx(SPIN / LOOK, abs=1)
    bench.polling.spin(bench.completion)
    assert bench.polls == first
    bench.clock.turn()
    bench.polling.spin(bench.completion)
    assert bench.polls == 2 * first


def test_arriving_data_extends_polling_up_to_the_callback_time_limit() -> None:
    bench = Bench([True] * 20)
    bench.polling.spin(bench.completion)
    assert bench.polls == pytest.approx(20 + SPIN / LOOK, abs=1)
    bench = Bench([True] * 1000)
    bench.polling.spin(bench.completion)
    assert bench.polls == pytest.approx(BUDGET / LOOK, abs=1)


def test_time_while_the_core_is_yielded_does_not_count_as_polling_time(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Bench] = []

    def yield_core() -> None:
        given[0].clock.now += SPIN

    monkeypatch.setattr("os.sched_yield", yield_core, raising=False)
    bench = Bench([], crowded=True)
    given.append(bench)
    bench.polling.spin(bench.completion)
    assert bench.polls == pytest.approx(BUDGET / SPIN, abs=1), "only the budget of a callback bounds the polling"


def test_ranks_sharing_cores_yield_before_each_poll(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that the first yield precedes the first poll, since the caller has polled just before the await."""
    given: list[int] = []
    monkeypatch.setattr("os.sched_yield", lambda: given.append(bench.polls), raising=False)
    bench = Bench([], crowded=True)
    bench.ends_at = 3
    bench.polling.spin(bench.completion)
    assert given == [0, 1, 2]


@pytest.mark.parametrize("same_core", [None, False, True])
def test_await_yields_the_core_soon_to_a_peer_on_the_same_core(
    same_core: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench([])
    bench.same_core = same_core
    given: list[int] = []

    def yield_core() -> None:
        given.append(bench.polls)
        if len(given) == 3:
            bench.completion.done = True

    monkeypatch.setattr("os.sched_yield", yield_core, raising=False)
    bench.polling = Polling(bench.context, {1: bench}, SPIN, False)  # type: ignore[dict-item]
    bench.polling.links = (bench,)  # type: ignore[assignment]
    bench.polling.spin(bench.completion)
    if not same_core:
        assert given == []
        return
    assert given[0] == pytest.approx(DOUBT / LOOK, abs=2)
    bench.completion.done = False
    before = bench.polls
    bench.polling.spin(bench.completion)
    assert given[3] == before, "while the peer is on this core, an await yields before its first poll"
    bench.clock.turn()
    bench.same_core = False
    yields = len(given)
    bench.polling.spin(bench.completion)
    assert len(given) - yields == pytest.approx(DOUBT / LOOK / 2, abs=2), (
        "the rank must stop yielding once the peer has left the core"
    )


@pytest.mark.parametrize(("spin", "links"), [(0.0, True), (SPIN, False)])
def test_polling_does_nothing_without_links_or_time(spin: float, links: bool) -> None:
    bench = Bench([True], spin=spin)
    if not links:
        bench.polling.links = ()
    bench.polling.spin(bench.completion)
    assert bench.polls == 0


def test_loop_iteration_with_progress_polls_until_an_operation_ends() -> None:
    bench = Bench([True] * 1000)
    bench.pending += ["one"]
    bench.ends_at = 5
    assert not bench.polling.keep_polling(False)
    assert bench.polling.keep_polling(True)
    assert bench.polls == 5
    assert bench.polling.keep_polling(True), "the next iteration must poll, and this one must not"
    assert bench.polls == 5


def test_polling_stops_after_a_loop_iteration_without_progress() -> None:
    bench = Bench([True] * 3)
    bench.pending += ["one"]
    assert bench.polling.keep_polling(True)
    assert bench.polls == pytest.approx(3 + SPIN / LOOK, abs=1)
    assert not bench.polling.keep_polling(False)


def test_polling_continues_in_the_next_iteration_after_the_time_limit() -> None:
    bench = Bench([True] * 100_000)
    bench.pending += ["one"]
    assert bench.polling.keep_polling(True)
    first = bench.polls
    assert first == pytest.approx(BUDGET / LOOK, abs=1)
    assert bench.polling.keep_polling(False), "the iteration after a busy one must poll"
    assert bench.polls > first


def test_await_yields_to_the_loop_if_the_last_iteration_was_long_ago() -> None:
    bench = Bench([])
    bench.clock.now = TURN
    assert bench.polling.turn_is_due()
    assert not bench.polling.turn_is_due()
    bench.clock.now += TURN
    assert bench.polling.turn_is_due()
