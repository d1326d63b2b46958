"""Which messages from device to device begin as one, and when."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from aiocoll.gpu.calls.matching import MAX_WAIT, BatchMatching, Match, MessageBatch


class Timer:
    """What cancels a call."""

    def __init__(self, call: Callable[[], None]) -> None:
        self.call: Callable[[], None] | None = call

    def cancel(self) -> None:
        self.call = None


class Timers:
    """Timers that go off by hand."""

    def __init__(self) -> None:
        self.due: list[Timer] = []

    def call_later(self, seconds: float, call: Callable[[], None]) -> Any:
        assert seconds == MAX_WAIT
        self.due.append(Timer(call))
        return self.due[-1]

    def go_off(self) -> int:
        """Let all go off that were not cancelled; return how many."""
        due, self.due = [each.call for each in self.due if each.call is not None], []
        for call in due:
            call()
        return len(due)


class World:
    """A matching, and what has begun."""

    def __init__(self) -> None:
        self.begun: list[list[Match]] = []
        self.timers = Timers()
        self.matching = BatchMatching(self.begun.append, self.timers.call_later)

    def is_empty(self) -> bool:
        return not self.matching._units and not self.timers.go_off()


@pytest.fixture
def world() -> World:
    return World()


def ring(size: int, number: int = 1) -> Iterator[tuple[Match, list[MessageBatch]]]:
    """Return the messages of a ring: each rank sends to the next and receives from the one before, as a batch."""
    for rank in range(size):
        other = (rank + 1) % size
        yield Match(rank, other, rank), [MessageBatch(rank, number, 2), MessageBatch(other, number, 2)]


def test_a_message_by_itself_begins_at_once(world: World) -> None:
    for number in range(3):
        world.matching.matched(Match(1, 2, number), [MessageBatch(1, 0, 1), MessageBatch(2, 0, 1)])
    assert world.begun == [[Match(1, 2, number)] for number in range(3)]
    assert world.is_empty()


@pytest.mark.parametrize("size", [2, 3, 4, 7])
def test_a_ring_begins_as_one(world: World, size: int) -> None:
    messages = list(ring(size))
    for match, batches in messages:
        assert not world.begun
        world.matching.matched(match, batches)
    assert [sorted(unit) for unit in world.begun] == [[match for match, _ in messages]]
    assert world.is_empty()


def test_a_batch_begins_with_messages_of_no_batch(world: World) -> None:
    world.matching.matched(Match(0, 1, 1), [MessageBatch(0, 5, 2), MessageBatch(1, 0, 1)])
    assert not world.begun
    world.matching.matched(Match(0, 2, 2), [MessageBatch(0, 5, 2), MessageBatch(2, 0, 1)])
    assert world.begun == [[Match(0, 1, 1), Match(0, 2, 2)]]
    assert world.is_empty()


def test_a_message_that_goes_another_way_is_not_waited_for(world: World) -> None:
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


def test_what_is_matched_does_not_wait_for_ever(world: World) -> None:
    messages = list(ring(4))
    for match, batches in messages[:2]:
        world.matching.matched(match, batches)
    assert world.timers.go_off() == 1
    assert world.begun == [[match for match, _ in messages[:2]]]
    world.matching.matched(*messages[2])
    assert world.timers.go_off() == 1
    assert world.begun[1:] == [[messages[2][0]]]
    world.matching.matched(*messages[3])
    assert world.begun[2:] == [[messages[3][0]]]
    assert world.is_empty()


def test_the_end_of_a_group_is_the_end_of_all_that_waits(world: World) -> None:
    world.matching.matched(*next(ring(3)))
    world.matching.clear()
    assert world.is_empty()
    assert not world.begun


@pytest.mark.parametrize("seed", range(20))
def test_any_order_of_any_batches_begins_each_message_once(world: World, seed: int) -> None:
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
            world.timers.go_off()
    assert sorted(match for unit in world.begun for match in unit) == sorted(match for match, _ in messages)
    assert world.is_empty()


def test_many_messages_of_large_batches_cost_little_each(world: World) -> None:
    """Each of 40 ranks exchanges with all others: 1,560 messages that begin as one, in well under a second."""
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
    # Each batch moves when its unit doubles at least.
    assert moves <= size * size.bit_length()
    assert world.is_empty()
