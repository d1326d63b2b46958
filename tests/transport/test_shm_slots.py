"""Slots and the chunk queue, in memory of this process, with the other side's steps between any two of one side's."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from aiocoll.transport.shared_memory import MIDDLE_SLOTS, SMALL_SLOTS
from aiocoll.transport.shm.chunk_queue import ChunkQueueReader, ChunkQueueWriter
from aiocoll.transport.shm.fence import Fences
from aiocoll.transport.shm.layout import CHUNKS, SLOTS, LinkLayout
from aiocoll.transport.shm.region import SharedRegion
from aiocoll.transport.shm.slots import SlotReader, SlotWriter

OLD, NEW = 7, 7 | 1 << 61
"""Groups: one that is over, and one that goes on."""


#: As of x86-64, in one thread.
STRONG = Fences(None, lambda: None)


class Stepwise:
    """Words of a region; between any two accesses to them the other side may do something."""

    def __init__(self, words: memoryview) -> None:
        self.words = words
        self.until = -1
        self.other: Callable[[], Any] = lambda: None

    def interrupt(self, steps: int, other: Callable[[], Any]) -> None:
        self.until, self.other = steps, other

    def _step(self) -> None:
        self.until -= 1
        if self.until == -1:
            self.other()

    def __getitem__(self, index: int) -> int:
        self._step()
        return self.words[index]

    def __setitem__(self, index: int, value: int) -> None:
        self._step()
        self.words[index] = value


def step_by_step(end: Any) -> Stepwise:
    """Let something happen between any two accesses of an end to the words that both share."""
    end._words = words = Stepwise(end._words)
    return words


#: The fingerprint of all posts and chunks.
PRINT = 1 << 31 | 1


def both(fences: Fences = STRONG, ranks: int = 2) -> tuple[SlotWriter, SlotReader, ChunkQueueWriter, ChunkQueueReader]:
    layout = LinkLayout(ranks)
    region, direction = SharedRegion(mmap.mmap(-1, layout.nbytes), [], whole=True), layout.directions[0]
    memory = memoryview(region.memory)
    found = [each(region, direction, fences) for each in (SlotWriter, ChunkQueueWriter)]
    found[1:1] = [SlotReader(memory, direction, fences)]
    found.append(ChunkQueueReader(memory, direction, fences))
    return tuple(found)  # type: ignore[return-value]


def block_of(number: float) -> np.ndarray:
    return np.full(3, number, "f8")


def take(slot_reader: SlotReader, block: int, identity: int, group: int) -> float | None:
    """Read and free what was posted for an operation, if it was."""
    if slot_reader.look(block, identity, group) != PRINT:
        return None
    got = slot_reader.view(block, np.dtype("f8"), 3).copy()
    assert (got == got[0]).all()
    slot_reader.free(block)
    return float(got[0])


@pytest.mark.parametrize("block", [0, SMALL_SLOTS - 1, SMALL_SLOTS, SLOTS - 1])
@pytest.mark.parametrize("count", [1, 5, 6, 16])
def test_a_block_is_used_again_when_it_was_freed(block: int, count: int) -> None:
    slot_writer, slot_reader, *_ = both()
    for identity in range(1, 4):
        array = np.arange(count) + 0.5 * identity
        assert slot_reader.look(block, identity, NEW) == -1
        assert slot_writer.post(block, identity, NEW, PRINT, array)
        assert not slot_writer.post(block, identity + 64, NEW, PRINT, array)
        assert slot_reader.look(block, identity, NEW) == PRINT
        assert slot_reader.look(block, identity, OLD) == -1
        np.testing.assert_array_equal(slot_reader.view(block, array.dtype, count), array)
        slot_reader.free(block)


@pytest.mark.parametrize("ranks", [2, 8, 9, 64, 1000])
def test_blocks_do_not_overlap(ranks: int) -> None:
    layout = LinkLayout(ranks)
    for direction in layout.directions:
        small, middle = direction.small_nbytes, direction.middle_nbytes
        assert direction.lines + (SLOTS + CHUNKS) * 64 <= direction.small
        assert direction.small + SMALL_SLOTS * small <= direction.middle
        assert direction.middle + MIDDLE_SLOTS * middle <= direction.chunks
        assert direction.chunks + CHUNKS * direction.chunk_nbytes <= direction.end
    assert layout.directions[0].end <= layout.directions[1].ring
    words = [set(), set()]
    for found, direction in zip(words, layout.directions, strict=True):
        found |= {direction.writer_waiting, direction.taken, direction.chunk_writer_waiting, direction.chunks_taken}
        found |= set(range(direction.freed, direction.freed + SLOTS))
        assert len(found) == 4 + SLOTS
        assert max(found) * 8 < direction.ring
    assert not words[0] & words[1]


@pytest.mark.parametrize("order", [None, lambda: None])
@pytest.mark.parametrize("step", range(7))
def test_a_group_ends_while_another_posts(step: int, order: Any) -> None:
    """Its blocks are given back; not the one in which the other's tensor is just appearing."""
    slot_writer, slot_reader, *_ = both(Fences(order, lambda: None))
    assert slot_writer.post(5, 5, OLD, PRINT, block_of(1))
    assert take(slot_reader, 5, 5, OLD) == 1
    words = step_by_step(slot_writer)
    words.interrupt(step, lambda: slot_reader.purge(OLD))
    assert slot_writer.post(5, 5, NEW, PRINT, block_of(2))
    slot_reader.purge(OLD)
    assert not slot_writer.post(5, 69, NEW, PRINT, block_of(3)), "nobody has read it yet"
    assert take(slot_reader, 5, 5, NEW) == 2
    assert slot_writer.post(5, 69, NEW, PRINT, block_of(3))
    assert take(slot_reader, 5, 69, NEW) == 3


@pytest.mark.parametrize("step", range(7))
def test_another_group_posts_while_one_ends(step: int) -> None:
    slot_writer, slot_reader, *_ = both()
    assert slot_writer.post(0, 5, OLD, PRINT, block_of(1))
    assert take(slot_reader, 0, 5, OLD) == 1
    words = step_by_step(slot_reader)
    words.interrupt(step, lambda: slot_writer.post(0, 5, NEW, PRINT, block_of(2)))
    slot_reader.purge(OLD)
    words.interrupt(-1, list)
    assert not slot_writer.post(0, 69, NEW, PRINT, block_of(3))
    assert take(slot_reader, 0, 5, NEW) == 2
    assert slot_writer.post(0, 69, NEW, PRINT, block_of(3))


@pytest.mark.parametrize("step", range(7))
def test_operations_of_two_groups_have_the_same_number(step: int) -> None:
    """The id in the block is right before anything of the new tensor is there."""
    slot_writer, slot_reader, *_ = both()
    assert slot_writer.post(5, 5, OLD, PRINT, block_of(1))
    assert take(slot_reader, 5, 5, OLD) == 1
    got: list[float | None] = []
    words = step_by_step(slot_writer)
    words.interrupt(step, lambda: got.append(take(slot_reader, 5, 5, NEW)))
    assert slot_writer.post(5, 5, NEW, PRINT, block_of(2))
    words.interrupt(-1, list)
    assert got in ([], [None], [2.0])
    if got != [2.0]:
        assert take(slot_reader, 5, 5, NEW) == 2
    slot_reader.purge(OLD)
    assert slot_writer.post(5, 69, NEW, PRINT, block_of(3))
    assert take(slot_reader, 5, 69, NEW) == 3


@pytest.mark.parametrize("step", range(8))
def test_unfinished_post_is_not_reported_as_unread_operation_before(step: int) -> None:
    """The writer may be preempted for long: the operation whose slot it was has ended, and matches no call."""
    slot_writer, slot_reader, *_ = both()
    assert slot_writer.post(5, 5, NEW, PRINT, block_of(1))
    assert take(slot_reader, 5, 5, NEW) == 1
    seen: list[list[tuple[int, int, int]]] = []
    words = step_by_step(slot_writer)
    words.interrupt(step, lambda: seen.append(slot_reader.unread()))
    assert slot_writer.post(5, 133, NEW, PRINT, block_of(2))
    words.interrupt(-1, list)
    assert seen in ([], [[]], [[(133, NEW, PRINT)]])
    assert slot_reader.unread() == [(133, NEW, PRINT)]
    assert take(slot_reader, 5, 133, NEW) == 2


@pytest.mark.parametrize("step", range(7))
def test_the_block_is_looked_at_while_it_is_written(step: int) -> None:
    slot_writer, slot_reader, *_ = both()
    got: list[float | None] = []
    words = step_by_step(slot_writer)
    words.interrupt(step, lambda: got.append(take(slot_reader, 5, 6, NEW)))
    assert slot_writer.post(5, 6, NEW, PRINT, block_of(2))
    words.interrupt(-1, list)
    if got != [2.0]:
        assert got in ([], [None])
        assert take(slot_reader, 5, 6, NEW) == 2
    assert slot_writer.post(5, 70, NEW, PRINT, block_of(3))


def test_what_comes_for_a_group_that_is_over_is_given_back_when_it_is_in_the_way() -> None:
    slot_writer, slot_reader, *_ = both()
    slot_reader.purge(OLD)
    assert slot_writer.post(5, 5, OLD, PRINT, block_of(1))
    assert not slot_writer.post(5, 69, NEW, PRINT, block_of(2))
    slot_reader.reclaim(5)
    assert slot_writer.post(5, 69, NEW, PRINT, block_of(2))
    slot_reader.reclaim(5)
    assert take(slot_reader, 5, 69, NEW) == 2


def test_what_comes_for_a_group_that_is_over_is_not_unread() -> None:
    slot_writer, slot_reader, *_ = both()
    slot_reader.purge(OLD)
    assert slot_writer.post(5, 5, OLD, PRINT, block_of(1))
    assert slot_writer.post(6, 6, NEW, PRINT, block_of(2))
    assert slot_reader.unread() == [(6, NEW, PRINT)]
    assert slot_writer.post(5, 69, NEW, PRINT, block_of(3)), "it was given back"


def test_a_slot_without_memory_takes_what_fits_in_its_line(monkeypatch: pytest.MonkeyPatch) -> None:
    slot_writer, slot_reader, *_ = both()
    monkeypatch.setattr(SharedRegion, "reserve", lambda region, start, end: False)
    for slot in (5, SMALL_SLOTS):
        assert not slot_writer.post(slot, 5, NEW, PRINT, np.ones(6))
        assert slot_reader.look(slot, 5, NEW) == -1
        assert slot_writer.post(slot, 5, NEW, PRINT, block_of(1))
        assert take(slot_reader, slot, 5, NEW) == 1


def test_what_tells_of_something_is_written_after_it() -> None:
    """On machines that keep no order, one fence is before the group is written, and one after it."""
    told: list[str] = []
    slot_writer, slot_reader, *_ = both(Fences(lambda: told.append("fence"), lambda: None))
    words, line, posts = slot_writer._words, slot_writer._lines[5], slot_writer._posts

    class Telling:
        def __getitem__(self, index: int) -> int:
            return words[index]

        def __setitem__(self, index: int, value: int) -> None:
            told.append("posts" if index == posts else ["id", "group", "times", "fingerprint"][index - line])
            words[index] = value

    slot_writer._words = Telling()  # type: ignore[assignment]
    assert slot_writer.post(5, 5, NEW, PRINT, block_of(1))
    assert told == ["id", "fingerprint", "fence", "group", "fence", "times", "id", "fence", "posts"]
    del told[:]
    assert slot_reader.look(5, 5, NEW) == PRINT
    assert told == ["fence", "fence"]


def test_reader_puts_fence_between_count_of_posts_and_what_was_posted() -> None:
    """Without it, a machine may load the line first: the news is gone, and the post is never found."""
    told: list[str] = []
    slot_writer, slot_reader, *_ = both(Fences(lambda: told.append("fence"), lambda: None))
    assert not slot_reader.has_news()
    assert slot_writer.post(5, 5, NEW, PRINT, block_of(1))
    del told[:]
    assert slot_reader.has_news()
    assert told == ["fence"]
    assert not slot_reader.has_news()


# -- chunk queues


def put(writer: ChunkQueueWriter, number: int, group: int = NEW, identity: int = 3) -> bool:
    return writer.put(identity, group, PRINT, memoryview(bytes([number]) * 16))


def got(reader: ChunkQueueReader, group: int = NEW, identity: int = 3) -> int | None:
    if reader.look(identity, group) != PRINT:
        return None
    piece = reader.read(np.dtype("u1"), 16).copy()
    assert (piece == piece[0]).all()
    reader.free()
    return int(piece[0])


def test_pieces_arrive_in_order_and_only_for_their_operation() -> None:
    *_, writer, reader = both()
    assert writer.take("one")
    assert not writer.take("two")
    for start in range(0, 40, CHUNKS):
        for number in range(CHUNKS):
            assert put(writer, start + number)
        assert not put(writer, 99)
        assert reader.look(4, NEW) == -1
        assert reader.look(3, OLD) == -1
        for number in range(CHUNKS):
            assert got(reader) == start + number
        assert got(reader) is None


def test_a_reader_tells_a_writer_that_waits() -> None:
    *_, writer, reader = both()
    assert writer.take("one")
    for number in range(CHUNKS):
        assert put(writer, number)
    assert reader.look(3, NEW) == PRINT
    assert not reader.free()
    assert put(writer, CHUNKS)
    assert not put(writer, 99)
    assert reader.free()
    assert not reader.free()


@pytest.mark.parametrize("step", range(8))
def test_space_comes_while_the_writer_begins_to_wait(step: int) -> None:
    """It finds the space, or it is told."""
    *_, writer, reader = both()
    assert writer.take("one")
    for number in range(CHUNKS):
        assert put(writer, number)
    told: list[bool] = []
    words = step_by_step(writer)
    words.interrupt(step, lambda: told.append(reader.free()))
    assert put(writer, CHUNKS) or told in ([], [True])


def test_chunk_of_a_released_group_behind_another_is_freed_when_its_turn_comes() -> None:
    *_, writer, reader = both()
    assert writer.take("one")
    assert put(writer, 1, OLD)
    assert put(writer, 2, NEW)
    reader.end(NEW)
    assert reader.reclaim() == (False, False)
    reader.release(NEW)
    assert got(reader, OLD) == 1
    assert reader.reclaim()[0]
    assert put(writer, 3, OLD)
    assert got(reader, OLD) == 3
    assert not reader._over
    reader.reclaim()
    assert not reader._last


def test_a_lane_on_which_an_operation_failed_waits_for_its_pieces() -> None:
    *_, writer, reader = both()
    assert writer.take("one")
    assert put(writer, 1, OLD)
    assert put(writer, 2, OLD)
    writer.leave(failed=True)
    assert not writer.take("two")
    assert got(reader, OLD) == 1
    assert not writer.take("two")
    reader.end(OLD)
    reader.reclaim()
    assert writer.take("two")
    assert put(writer, 3, NEW, 4)
    assert got(reader, NEW, 4) == 3


def test_pieces_for_a_group_that_is_over_are_given_back_when_they_are_in_the_way() -> None:
    *_, writer, reader = both()
    assert writer.take("one")
    reader.end(OLD)
    reader.reclaim()
    assert put(writer, 1, OLD)
    writer.leave(failed=True)
    assert not writer.take("two")
    reader.reclaim()
    assert writer.take("two")
    assert put(writer, 2, NEW, 4)
    reader.reclaim()
    assert got(reader, NEW, 4) == 2
