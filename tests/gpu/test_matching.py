"""Matching of device messages: messages of connected batches form one unit and start together."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from aiocoll.gpu.calls.matching import MAX_WAIT, BatchMatching, Match, MessageBatch


class Timer:
    """A fake timer handle."""

    def __init__(self, call: Callable[[], None]) -> None:
        self.call: Callable[[], None] | None = call

    def cancel(self) -> None:
        self.call = None


class Timers:
    """A collection of fake timers, which a test fires by hand."""

    def __init__(self) -> None:
        self.due: list[Timer] = []

    def call_later(self, seconds: float, call: Callable[[], None]) -> Any:
        assert seconds == MAX_WAIT
        self.due.append(Timer(call))
        return self.due[-1]

    def fire(self) -> int:
        """Fire all timers that were not cancelled; return the number of fired timers."""
        due, self.due = [each.call for each in self.due if each.call is not None], []
        for call in due:
            call()
        return len(due)


class World:
    """A `BatchMatching` with fake timers, and the units that it has started."""

    def __init__(self) -> None:
        self.begun: list[list[Match]] = []
        self.timers = Timers()
        self.matching = BatchMatching(self.begun.append, self.timers.call_later)

    def is_empty(self) -> bool:
        return not self.matching._units and not self.timers.fire()


@pytest.fixture
def world() -> World:
    return World()


def ring(size: int, number: int = 1) -> Iterator[tuple[Match, list[MessageBatch]]]:
    """Yield the messages of a ring exchange, in which each rank sends and receives one message as a batch."""
    for rank in range(size):
        other = (rank + 1) % size
        yield Match(rank, other, rank), [MessageBatch(rank, number, 2), MessageBatch(other, number, 2)]


def test_single_matched_message_starts_at_once(world: World) -> None:
    for number in range(3):
        world.matching.matched(Match(1, 2, number), [MessageBatch(1, 0, 1), MessageBatch(2, 0, 1)])
    assert world.begun == [[Match(1, 2, number)] for number in range(3)]
    assert world.is_empty()


@pytest.mark.parametrize("size", [2, 3, 4, 7])
def test_ring_of_batched_messages_starts_as_one_unit(world: World, size: int) -> None:
    messages = list(ring(size))
    for match, batches in messages:
        assert not world.begun
        world.matching.matched(match, batches)
    assert [sorted(unit) for unit in world.begun] == [[match for match, _ in messages]]
    assert world.is_empty()


def test_batch_can_match_single_messages_of_other_ranks(world: World) -> None:
    world.matching.matched(Match(0, 1, 1), [MessageBatch(0, 5, 2), MessageBatch(1, 0, 1)])
    assert not world.begun
    world.matching.matched(Match(0, 2, 2), [MessageBatch(0, 5, 2), MessageBatch(2, 0, 1)])
    assert world.begun == [[Match(0, 1, 1), Match(0, 2, 2)]]
    assert world.is_empty()


def test_batch_does_not_wait_for_its_staged_messages(world: World) -> None:
    world.matching.matched(Match(0, 1, 1), [MessageBatch(0, 5, 3), MessageBatch(1, 0, 1)])
    world.matching.record_uncarried(MessageBatch(0, 5, 3))
    assert not world.begun
    world.matching.record_uncarried(MessageBatch(0, 5, 3))
    assert world.begun == [[Match(0, 1, 1)]]
    world.matching.record_uncarried(MessageBatch(2, 0, 1))
    for _ in range(2):
        world.matching.record_uncarried(MessageBatch(2, 1, 2))
    assert len(world.begun) == 1
    assert world.is_empty()


def test_matched_messages_of_an_incomplete_batch_start_after_the_maximum_wait(world: World) -> None:
    messages = list(ring(4))
    for match, batches in messages[:2]:
        world.matching.matched(match, batches)
    assert world.timers.fire() == 1
    assert world.begun == [[match for match, _ in messages[:2]]]
    world.matching.matched(*messages[2])
    assert world.timers.fire() == 1
    assert world.begun[1:] == [[messages[2][0]]]
    world.matching.matched(*messages[3])
    assert world.begun[2:] == [[messages[3][0]]]
    assert world.is_empty()


def test_clear_drops_matched_messages_that_have_not_started(world: World) -> None:
    world.matching.matched(*next(ring(3)))
    world.matching.clear()
    assert world.is_empty()
    assert not world.begun


@pytest.mark.parametrize("seed", range(20))
def test_each_message_starts_once_for_any_order_of_matches(world: World, seed: int) -> None:
    choose = random.Random(seed)
    ends: dict[tuple[int, int], int] = {}
    messages = []
    for number in range(60):
        src, dst = choose.sample(range(5), 2)
        keys = [(src, choose.randrange(1, 5)), (dst, choose.randrange(1, 5))]
        for key in keys:
            ends[key] = ends.get(key, 0) + 1
        messages.append((Match(src, dst, number), keys))
    choose.shuffle(messages)
    for match, keys in messages:
        world.matching.matched(match, [MessageBatch(*key, ends[key]) for key in keys])
        if choose.random() < 0.1:
            world.timers.fire()
    assert sorted(match for unit in world.begun for match in unit) == sorted(match for match, _ in messages)
    assert world.is_empty()


def test_large_batches_cost_little_per_message(world: World) -> None:
    """Match 1,560 messages between 40 ranks, which start as one unit."""
    size = 40
    moves = 0
    update = dict.update

    class Counted(dict):  # type: ignore[type-arg]
        def update(self, *args: dict[object, object]) -> None:
            nonlocal moves
            moves += len(args[0])
            update(self, *args)

    world.matching._units = Counted()
    for src in range(size):
        for dst in range(size):
            if src != dst:
                match = Match(src, dst, src * size + dst)
                world.matching.matched(match, [MessageBatch(src, 1, 2 * size - 2), MessageBatch(dst, 1, 2 * size - 2)])
    assert [len(unit) for unit in world.begun] == [size * (size - 1)]
    # Each batch moves only to a unit at least twice as large as its own, so at most log2(size) times.
    assert moves <= size * size.bit_length()
    assert world.is_empty()
