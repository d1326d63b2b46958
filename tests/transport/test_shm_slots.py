"""Outboxes and chunk queues in one process, where the peer acts between any two memory accesses of a rank.

A slot behaves the same in every lane. So most tests get a `Box`, which posts through the common lane or a peer's lane.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aiocoll.errors import ProtocolError
from aiocoll.transport.shared_memory import SMALL_SLOTS
from aiocoll.transport.shm.chunk_queue import ChunkQueueReader, ChunkQueueWriter
from aiocoll.transport.shm.fence import Fences
from aiocoll.transport.shm.layout import CHUNKED, CHUNKS, LINE, POSTS, SLOTS, LinkLayout, OutboxLayout
from aiocoll.transport.shm.outbox import Outbox, PeerOutbox
from aiocoll.transport.shm.region import PAGE, OwnRegion, SharedRegion, open_readable
from aiocoll.transport.shm.slots import SlotReader

from .outboxes import STRONG, Host

OLD, NEW = 7, 7 | 1 << 61
"""Numbers of two groups: one has ended, the other continues."""


class Stepwise:
    """Words of shared memory that call `Steps.step` before each access to a word."""

    def __init__(self, words: memoryview, steps: Steps) -> None:
        self.words = words
        self.steps = steps

    def __getitem__(self, index: int) -> int:
        self.steps.step()
        return self.words[index]

    def __setitem__(self, index: int, value: int) -> None:
        self.steps.step()
        self.words[index] = value


class Steps:
    """A counter of accesses to words of shared memory; runs a callback of the test before a chosen access."""

    def __init__(self) -> None:
        self.until = -1
        self.other: Callable[[], Any] = lambda: None

    def interrupt(self, steps: int, other: Callable[[], Any]) -> None:
        self.until, self.other = steps, other

    def step(self) -> None:
        self.until -= 1
        if self.until == -1:
            self.other()


#: Names of the attributes that hold words of shared memory.
WORDS = ("_words", "_lines", "_named", "_consumed", "common_named", "common_consumed", "consumed", "words")


def watch_steps(*parts: Any) -> Steps:
    """Return a `Steps` that counts all accesses of the given objects to words of shared memory."""
    steps = Steps()
    for part in parts:
        for name in WORDS:
            if isinstance(getattr(part, name, None), memoryview):
                setattr(part, name, Stepwise(getattr(part, name), steps))
    return steps


#: The fingerprint with which the tests make all posts and chunks.
PRINT = 1 << 31 | 1


class Box:
    """A lane of rank 0's outbox, with the writer on rank 0 and a reader on rank 1."""

    def __init__(self, host: Host, is_common: bool) -> None:
        self.host = host
        host.used.append(self)
        self.is_common = is_common
        self.outbox = host.readers[1]
        self.reader: SlotReader = self.outbox.common if is_common else self.outbox.lane
        self.writer: Any = host.boxes[0].common if is_common else host.lanes[1]
        #: The lanes of rank 0 for all its readers, which are also the readers of the common lane.
        self.lanes = list(host.lanes.values())

    def post(self, slot: int, identity: int, group: int, array: np.ndarray, length: int = 0) -> bool:
        arguments = slot, identity, group, PRINT, array, length
        return bool(self.writer.post(*arguments, *((self.lanes,) if self.is_common else ())))

    def step_writer(self) -> Steps:
        return watch_steps(self.writer, *(self.lanes if self.is_common else ()))

    def step_reader(self) -> Steps:
        return watch_steps(self.reader)


@pytest.fixture(params=["common", "lane"])
def make_box(request: pytest.FixtureRequest) -> Iterator[Callable[..., Box]]:
    hosts: list[Host] = []

    def make(fences: Fences = STRONG, ranks: int = 2) -> Box:
        hosts.append(Host(ranks, fences))
        return Box(hosts[-1], request.param == "common")

    yield make
    for host in hosts:
        host.close()


@pytest.fixture
def box(make_box: Callable[..., Box]) -> Box:
    return make_box()


@pytest.fixture
def make_host() -> Iterator[Callable[..., Host]]:
    hosts: list[Host] = []

    def make(ranks: int = 3, fences: Fences = STRONG) -> Host:
        hosts.append(Host(ranks, fences))
        return hosts[-1]

    yield make
    for host in hosts:
        host.close()


def chunk_queue_ends(fences: Fences = STRONG, ranks: int = 2) -> tuple[ChunkQueueWriter, ChunkQueueReader]:
    layout = LinkLayout(ranks)
    region, direction = SharedRegion(mmap.mmap(-1, layout.nbytes), [], reserved=True), layout.directions[0]
    return ChunkQueueWriter(region, direction, fences), ChunkQueueReader(memoryview(region.memory), direction, fences)


@contextmanager
def suppress_abandoned() -> Iterator[None]:
    try:
        yield
    except ProtocolError as error:
        if "rank 0 no longer waits for this rank" not in str(error):
            raise


def block_of(number: float) -> np.ndarray:
    return np.full(3, number, "f8")


def take(reader: SlotReader, slot: int, identity: int, group: int) -> float | None:
    """Read the contribution to an operation and free its slot; return its value, or None without a contribution."""
    if reader.look(slot, identity, group) != PRINT:
        return None
    got = reader.view(slot, np.dtype("f8"), 3).copy()
    assert (got == got[0]).all()
    reader.free(slot, group)
    return float(got[0])


@pytest.mark.parametrize("slot", [0, SMALL_SLOTS - 1, SMALL_SLOTS, SLOTS - 1])
@pytest.mark.parametrize("count", [1, 4, 5, 6, 16])
def test_freed_slot_is_reused(slot: int, count: int, box: Box) -> None:
    for identity in range(1, 4):
        array = np.arange(count) + 0.5 * identity
        assert box.reader.look(slot, identity, NEW) == -1
        assert box.post(slot, identity, NEW, array, array.nbytes)
        assert not box.post(slot, identity + 64, NEW, array)
        assert box.reader.look(slot, identity, NEW) == PRINT
        assert box.reader.look(slot, identity, OLD) == -1
        assert box.reader.look(slot, identity + 1, NEW) == -1
        assert box.reader.length(slot) == array.nbytes
        np.testing.assert_array_equal(box.reader.view(slot, array.dtype, count), array)
        box.reader.free(slot, NEW)
        assert box.reader.look(slot, identity, NEW) == -1


def test_lanes_do_not_share_slots(make_host: Callable[..., Host]) -> None:
    host = make_host(3)
    boxes = [Box(host, is_common) for is_common in (True, False)]
    for slot in (0, SMALL_SLOTS):
        for number, box in enumerate(boxes):
            assert box.post(slot, 5, NEW, np.full(100, number))
        assert host.lanes[2].post(slot, 5, NEW, PRINT, np.full(100, 2))
        common, lane = host.readers[2].common, host.readers[2].lane
        for reader, number in ((boxes[0].reader, 0), (boxes[1].reader, 1), (common, 0), (lane, 2)):
            assert reader.look(slot, 5, NEW) == PRINT
            assert set(reader.view(slot, np.dtype(int), 100)) == {number}


@pytest.mark.parametrize("ranks", [2, 8, 9, 64, 1000])
def test_parts_of_the_memory_layouts_do_not_overlap(ranks: int) -> None:
    layout = OutboxLayout(ranks)
    for lane in layout.common, layout.lane:
        assert lane.lines % LINE == 0
        assert lane.lines + SLOTS * LINE <= lane.small
        spans = [lane.slot(slot) for slot in range(SLOTS)]
        assert spans[0][0] == lane.small
        gaps = [following - start - size for (start, size), (following, _) in pairwise(spans)]
        assert gaps.pop(SMALL_SLOTS - 1) == 64
        assert set(gaps) == {0}
        assert lane.end == -(-sum(spans[-1]) // PAGE) * PAGE
    lanes = [layout.lane_span(number) for number in range(layout.lanes)]
    assert len(lanes) > ranks
    assert lanes[0][0] == layout.common.end
    assert all(end == start for (_, end), (start, _) in pairwise(lanes))
    assert lanes[-1][1] == layout.nbytes
    link = LinkLayout(ranks)
    words = [set(), set()]
    for found, direction in zip(words, link.directions, strict=True):
        found |= {direction.writer_waiting, direction.taken, direction.chunk_writer_waiting, direction.chunks_taken}
        found |= {direction.pieces, *range(direction.lines // 8, direction.lines // 8 + CHUNKS * 8)}
        assert len({word // 8 for word in found}) == 5 + CHUNKS, "two words share a cache line"
        assert max(found) * 8 < direction.ring
        assert direction.data_end <= direction.chunks
        assert direction.chunks + CHUNKS * direction.chunk_nbytes <= direction.end
    assert link.directions[0].end <= link.directions[1].ring
    assert not words[0] & words[1]


def test_memory_words_of_a_lane_do_not_overlap(box: Box) -> None:
    """Write each kind of word, and check that no word of another kind has changed."""
    lane, reader = box.host.lanes[1], box.outbox
    rows = [lane._named, lane.common_named]
    for number, row in enumerate(rows, 1):
        for slot in range(SLOTS):
            row[slot] = number
    lane.words[0] = 99
    assert set(lane._named) == {1}
    assert set(lane.common_named) == {2}
    assert (set(reader.lane._named), set(reader.common._named), reader.words[0]) == ({1}, {2}, 99)
    assert set(lane.consumed) == set(lane.common_consumed) == {0}
    reader.lane._consumed[0], reader.common._consumed[0] = 3, 4
    assert (lane.consumed[0], lane.common_consumed[0]) == (3, 4)


@pytest.mark.parametrize("order", [None, lambda: None])
@pytest.mark.parametrize("step", range(10))
def test_end_of_an_old_group_during_a_post_keeps_the_new_post(
    step: int, order: Any, make_box: Callable[..., Box]
) -> None:
    """Free the slots of an old group while the writer reuses one of these slots for a post of a new group."""
    box = make_box(Fences(order, lambda: None))
    assert box.post(5, 5, OLD, block_of(1))
    assert take(box.reader, 5, 5, OLD) == 1
    steps = box.step_writer()
    steps.interrupt(step, lambda: box.reader.purge(OLD))
    assert box.post(5, 5, NEW, block_of(2))
    box.reader.purge(OLD)
    assert not box.post(5, 69, NEW, block_of(3)), "the slot was reused before it was read"
    assert take(box.reader, 5, 5, NEW) == 2
    assert box.post(5, 69, NEW, block_of(3))
    assert take(box.reader, 5, 69, NEW) == 3


@pytest.mark.parametrize("step", range(7))
def test_post_during_the_end_of_another_group_is_kept(step: int, box: Box) -> None:
    assert box.post(0, 5, OLD, block_of(1))
    assert take(box.reader, 0, 5, OLD) == 1
    steps = box.step_reader()
    steps.interrupt(step, lambda: box.post(0, 5, NEW, block_of(2)))
    box.reader.purge(OLD)
    if steps.until >= 0:
        steps.other()
    steps.interrupt(-1, list)
    assert not box.post(0, 69, NEW, block_of(3))
    assert take(box.reader, 0, 5, NEW) == 2
    assert box.post(0, 69, NEW, block_of(3))


@pytest.mark.parametrize("step", range(10))
def test_equal_operation_numbers_of_two_groups_are_distinguished(step: int, box: Box) -> None:
    """Let the reader look for an equal operation number of the new group at any step of a post."""
    assert box.post(5, 5, OLD, block_of(1))
    assert take(box.reader, 5, 5, OLD) == 1
    got: list[float | None] = []
    steps = box.step_writer()
    steps.interrupt(step, lambda: got.append(take(box.reader, 5, 5, NEW)))
    assert box.post(5, 5, NEW, block_of(2))
    steps.interrupt(-1, list)
    assert got in ([], [None], [2.0])
    if got != [2.0]:
        assert take(box.reader, 5, 5, NEW) == 2
    box.reader.purge(OLD)
    assert box.post(5, 69, NEW, block_of(3))
    assert take(box.reader, 5, 69, NEW) == 3


@pytest.mark.parametrize("step", range(10))
def test_unfinished_post_is_not_reported_as_the_previous_operation(step: int, box: Box) -> None:
    """List the unread posts at any step of a post to a slot whose previous operation has ended."""
    assert box.post(5, 5, NEW, block_of(1))
    assert take(box.reader, 5, 5, NEW) == 1
    seen: list[list[tuple[int, int, int]]] = []
    steps = box.step_writer()
    steps.interrupt(step, lambda: seen.append(box.outbox.unread()))
    assert box.post(5, 133, NEW, block_of(2))
    steps.interrupt(-1, list)
    assert seen in ([], [[]], [[(133, NEW, PRINT)]])
    assert box.outbox.unread() == [(133, NEW, PRINT)]
    assert take(box.reader, 5, 133, NEW) == 2
    assert box.outbox.unread() == []


@pytest.mark.parametrize("step", range(10))
def test_slot_that_is_read_during_a_write_is_consistent(step: int, box: Box) -> None:
    got: list[float | None] = []
    steps = box.step_writer()
    steps.interrupt(step, lambda: got.append(take(box.reader, 5, 6, NEW)))
    assert box.post(5, 6, NEW, block_of(2))
    steps.interrupt(-1, list)
    if got != [2.0]:
        assert got in ([], [None])
        assert take(box.reader, 5, 6, NEW) == 2
    assert box.post(5, 70, NEW, block_of(3))


@pytest.mark.parametrize("step", range(10))
def test_new_posts_flag_is_not_lost_if_it_is_read_during_a_post(step: int, box: Box) -> None:
    """Check that a reader that reads the flag finds the new post, or finds the flag set again later."""
    found: list[bool] = []
    steps = box.step_writer()
    steps.interrupt(step, lambda: found.append(box.outbox.has_news() and take(box.reader, 5, 6, NEW) == 2))
    assert box.post(5, 6, NEW, block_of(2))
    steps.interrupt(-1, list)
    assert box.outbox.has_news() != (found == [True])
    assert not box.outbox.has_news()


def test_post_for_a_finished_group_is_freed_when_its_slot_is_needed(box: Box) -> None:
    box.reader.purge(OLD)
    assert box.post(5, 5, OLD, block_of(1))
    assert not box.post(5, 69, NEW, block_of(2))
    assert box.reader.reclaim(5)
    assert box.post(5, 69, NEW, block_of(2))
    assert not box.reader.reclaim(5)
    assert take(box.reader, 5, 69, NEW) == 2


def test_post_for_a_finished_group_is_not_listed_as_unread(box: Box) -> None:
    box.outbox.purge(OLD)
    assert box.post(5, 5, OLD, block_of(1))
    assert box.post(6, 6, NEW, block_of(2))
    assert box.outbox.unread() == [(6, NEW, PRINT)]
    assert box.post(5, 69, NEW, block_of(3)), "the slot of the ended group was not freed"
    box.outbox.release(OLD)
    assert not box.reader._closed_groups


def test_read_slot_is_not_freed_again_after_its_group_ended(box: Box) -> None:
    """End the group of a slot that was already read; the reader must then neither read nor change the slot's line."""
    assert box.post(5, 5, OLD, block_of(1))
    assert take(box.reader, 5, 5, OLD) == 1
    box.reader.purge(OLD)
    events: list[str] = []
    box.reader._lines = RecordedWords(box.reader._lines, events, "line")  # type: ignore[assignment]
    box.reader._consumed = RecordedWords(box.reader._consumed, events, "consumed")  # type: ignore[assignment]
    assert not box.reader.reclaim(5)
    assert events == []


def test_withdrawn_post_is_not_freed(make_host: Callable[..., Host]) -> None:
    """Withdraw a post for a reader, and check that the reader does not count the post as consumed."""
    host = make_host(3)
    common, lanes, reader = host.boxes[0].common, list(host.lanes.values()), host.readers[2].common
    assert common.post(5, 5, OLD, PRINT, block_of(1), 24, lanes)
    assert take(reader, 5, 5, OLD) == 1
    assert take(host.readers[1].common, 5, 5, OLD) == 1
    assert common.post(5, 133, OLD, PRINT, block_of(2), 24, lanes)
    common.withdraw(host.lanes[2], OLD)
    reader.purge(OLD)
    assert not reader.reclaim(5)
    assert reader._consumed[5] == 1


def test_slot_without_reserved_memory_accepts_contributions_that_fit_in_its_line(
    box: Box, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert box.post(0, 1, NEW, block_of(1)), "the first post reserves the lines"
    monkeypatch.setattr(OwnRegion, "reserve", lambda region, start, end: False)
    for slot in (5, SMALL_SLOTS):
        assert not box.post(slot, 5, NEW, np.ones(6))
        assert box.reader.look(slot, 5, NEW) == -1
        assert box.post(slot, 5, NEW, block_of(1))
        assert take(box.reader, slot, 5, NEW) == 1


def test_lane_without_reserved_memory_for_its_lines_accepts_no_post(
    make_host: Callable[..., Host], monkeypatch: pytest.MonkeyPatch
) -> None:
    lane = make_host().lanes[1]
    with monkeypatch.context() as patch:
        patch.setattr(OwnRegion, "reserve", lambda region, start, end: False)
        assert not lane.post(5, 5, NEW, PRINT, block_of(1))
    assert lane.post(5, 5, NEW, PRINT, block_of(1))


class RecordedWords:
    """Words of shared memory that record the name of each written word."""

    def __init__(self, words: Any, events: list[str], name: str) -> None:
        self.words, self.events, self.name = words, events, name

    def __getitem__(self, index: int) -> int:
        return int(self.words[index])

    def __setitem__(self, index: int, value: int) -> None:
        self.events.append(self.name if self.name != "line" else ["id", "group", "length", "fingerprint"][index % 8])
        self.words[index] = value


def test_memory_fence_separates_a_contribution_from_its_published_number(make_box: Callable[..., Box]) -> None:
    events: list[str] = []
    box = make_box(Fences(lambda: events.append("fence"), lambda: None), ranks=3)
    readers = 2 if box.is_common else 1
    box.writer._lines = RecordedWords(box.writer._lines, events, "line")
    for lane in box.lanes:
        lane.common_named = RecordedWords(lane.common_named, events, "named")  # type: ignore[assignment]
        lane._named = RecordedWords(lane._named, events, "named")  # type: ignore[assignment]
        lane.words = RecordedWords(lane.words, events, "posts")  # type: ignore[assignment]
    assert box.post(5, 5, NEW, block_of(1))
    written = ["group", "fence", "id", "length", "fingerprint", "fence", *["named", "fence", "posts"] * readers]
    assert events == written
    del events[:]
    assert box.outbox.has_news()
    assert events == ["fence"], "without this fence a rank may load the line too early and miss the post"
    assert box.reader.look(5, 5, NEW) == PRINT
    assert events == ["fence"] * 2
    box.reader.free(5, NEW)
    assert events == ["fence"] * 3
    assert not box.outbox.has_news()
    assert box.reader.look(5, 5, NEW) == -1
    assert events == ["fence"] * 3


# -- several readers


def test_slot_of_the_common_lane_is_free_when_all_its_readers_have_read(make_host: Callable[..., Host]) -> None:
    host = make_host(4)
    common, lanes = host.boxes[0].common, [host.lanes[rank] for rank in (1, 3)]
    assert common.post(5, 5, NEW, PRINT, block_of(1), 24, lanes)
    for rank in (3, 1):
        assert not common.post(5, 133, NEW, PRINT, block_of(2), 24, [host.lanes[2]])
        assert take(host.readers[rank].common, 5, 5, NEW) == 1
    assert not host.readers[2].has_news()
    assert host.readers[2].unread() == []
    assert common.post(5, 133, NEW, PRINT, block_of(2), 24, [host.lanes[2]])
    assert take(host.readers[2].common, 5, 133, NEW) == 2
    assert [host.readers[rank].common.look(5, 133, NEW) for rank in (1, 3)] == [-1, -1]


def test_reader_without_a_link_blocks_no_slot(make_host: Callable[..., Host]) -> None:
    host = make_host(4)
    common, lanes = host.boxes[0].common, list(host.lanes.values())
    assert common.post(5, 5, NEW, PRINT, block_of(1), 24, lanes)
    assert take(host.readers[1].common, 5, 5, NEW) == 1
    host.unlink(2)
    assert not common.post(5, 133, NEW, PRINT, block_of(2), 24, lanes[:1]), "rank 3 has not read the slot"
    host.unlink(3)
    assert host.readers[2].common.look(5, 5, NEW) == PRINT, "the post must stay until the slot is needed"
    assert common.post(5, 133, NEW, PRINT, block_of(2), 24, lanes[:1])
    assert take(host.readers[1].common, 5, 133, NEW) == 2
    for rank in (2, 3):
        assert host.readers[rank].common.look(5, 5, NEW) == -1
        assert host.readers[rank].unread() == []


@pytest.mark.parametrize("step", range(12))
def test_reader_given_up_by_the_writer_detects_overwritten_data(step: int, make_host: Callable[..., Host]) -> None:
    """Overwrite the slot at each step of the reader, after the writer has closed the link to this reader."""
    host = make_host(3)
    common, lanes = host.boxes[0].common, list(host.lanes.values())
    reader = host.readers[2].common
    assert common.post(5, 5, OLD, PRINT, block_of(1), 24, lanes)
    assert take(host.readers[1].common, 5, 5, OLD) == 1
    steps = watch_steps(reader)

    def overwrite() -> None:
        host.unlink(2)
        assert common.post(5, 5, NEW, PRINT, block_of(2), 24, lanes[:1])

    steps.interrupt(step, overwrite)
    got: list[float | None] = []
    with suppress_abandoned():
        got.append(take(reader, 5, 5, OLD))
    assert got in ([], [None], [1])


def test_reader_that_has_left_the_group_blocks_no_slot(make_host: Callable[..., Host]) -> None:
    host = make_host(3)
    common, lanes = host.boxes[0].common, list(host.lanes.values())
    assert common.post(5, 5, OLD, PRINT, block_of(1), 24, lanes)
    assert common.post(6, 6, NEW, PRINT, block_of(1), 24, lanes)
    common.withdraw(host.lanes[2], OLD)
    assert not common.post(5, 133, NEW, PRINT, block_of(2), 24, lanes), "rank 1 has not read the slot"
    assert take(host.readers[1].common, 5, 5, OLD) == 1
    assert take(host.readers[1].common, 6, 6, NEW) == 1
    assert common.post(5, 133, NEW, PRINT, block_of(2), 24, lanes)
    assert not common.post(6, 134, NEW, PRINT, block_of(2), 24, lanes), "rank 2 has not left this group"
    assert take(host.readers[2].common, 5, 133, NEW) == 2
    assert take(host.readers[2].common, 6, 6, NEW) == 1


def test_new_link_to_a_rank_finds_no_posts_of_the_old_link(make_host: Callable[..., Host]) -> None:
    host = make_host(3)
    common, lanes = host.boxes[0].common, list(host.lanes.values())
    for slot in range(3):
        assert common.post(slot, 5, NEW, PRINT, block_of(1), 24, lanes)
        assert host.lanes[2].post(slot, 5, NEW, PRINT, block_of(1))
    assert take(host.readers[2].lane, 0, 5, NEW) == 1
    host.unlink(2)
    host.boxes[2].close()
    host.boxes[2] = Outbox(host.layout, STRONG)
    host.link(2)
    again = host.readers[2]
    assert again.unread() == []
    assert not again.has_news()
    for slot in range(3):
        assert host.lanes[2].post(slot, 5, NEW, PRINT, block_of(3))
        assert take(again.lane, slot, 5, NEW) == 3
        assert take(host.readers[1].common, slot, 5, NEW) == 1
        assert common.post(slot, 133, NEW, PRINT, block_of(4), 24, list(host.lanes.values()))
        assert take(again.common, slot, 133, NEW) == 4


def test_posts_are_kept_if_a_link_is_opened_twice_at_once(make_host: Callable[..., Host]) -> None:
    """Open further lanes for the same peer, as when both ranks dial at once; they must not reuse the first lane."""
    host = make_host(2)
    old, box = host.lanes[1], host.boxes[0]
    assert old.post(5, 5, NEW, PRINT, block_of(1))
    more = [box.open_lane(1) for _ in range(host.layout.lanes - 2)]
    assert None not in more
    assert len({lane.number for lane in more if lane is not None} | {0, old.number}) == host.layout.lanes
    assert box.open_lane(1) is None, "an outbox gave more lanes than it has"
    for lane in more:
        assert lane is not None
        box.close_lane(lane)
    assert old.is_linked
    assert take(host.readers[1].lane, 5, 5, NEW) == 1
    assert old.post(5, 6, NEW, PRINT, block_of(2))
    assert take(host.readers[1].lane, 5, 6, NEW) == 2


def test_reader_of_a_closed_link_does_not_affect_the_next_link(make_host: Callable[..., Host]) -> None:
    """Let a reader of the old link read late, and release slots after a new link has been opened."""
    host = make_host(2)
    old = host.readers[1]
    for slot in (5, 6):
        assert host.lanes[1].post(slot, slot, OLD, PRINT, block_of(1))
    old.detach()
    host.boxes[1].close_lane(host.peer_lanes[1])
    host.unlink(1)
    assert take(old.lane, 5, 5, OLD) == 1
    host.boxes[0].close()
    host.boxes[0] = Outbox(host.layout, STRONG)
    host.link(1)
    assert host.peer_lanes[1].number == 0
    old.purge(OLD)
    again = host.readers[1]
    assert host.lanes[1].post(6, 7, NEW, PRINT, block_of(2))
    assert not host.lanes[1].post(6, 8, NEW, PRINT, block_of(3)), "the slot was reused before it was read"
    assert take(again.lane, 6, 7, NEW) == 2


def test_closed_outbox_is_unmapped_while_its_lanes_are_referenced(make_host: Callable[..., Host]) -> None:
    """Keep references to the lanes, as a traceback can do that keeps cached plans alive."""
    host = make_host(2)
    inode = f" {os.fstat(host.boxes[0].fd).st_ino} "
    outbox, reader = host.boxes[0], host.readers[1]
    assert host.lanes[1].post(5, 5, NEW, PRINT, block_of(1))
    assert take(reader.lane, 5, 5, NEW) == 1
    kept = [outbox.common, host.lanes[1], reader.common, reader.lane]
    host.boxes[1].close_lane(host.peer_lanes[1])
    for each in (outbox, reader):
        assert inode in Path("/proc/self/maps").read_text()
        each.close()
    assert inode not in Path("/proc/self/maps").read_text()
    host.boxes[0] = Outbox(host.layout, STRONG)
    assert len(kept) == 4


def test_lane_number_outside_of_the_peers_outbox_is_refused(make_host: Callable[..., Host]) -> None:
    host = make_host(2)
    memory = open_readable(os.dup(host.boxes[0].fd), host.layout.nbytes)
    with pytest.raises(ProtocolError, match="rank 0 offered lane 10 of an outbox of 10 lanes"):
        PeerOutbox(memory, host.layout, host.layout.lanes, host.peer_lanes[1], 0, STRONG)
    memory.close()


@pytest.mark.parametrize("value", [0, 1, 2**63, 2**64 - 1])
def test_malformed_lane_of_a_peer_is_tolerated(value: int, box: Box) -> None:
    """Write arbitrary words, as a faulty peer can; lookups may succeed or fail, but must not read other memory."""
    for words in (*(lane._named for lane in box.lanes), *(lane.common_named for lane in box.lanes), box.writer._lines):
        for index in range(len(words)):
            words[index] = value
    box.host.lanes[1].words[0] = value
    box.outbox.has_news()
    for slot in (0, SMALL_SLOTS, SLOTS - 1):
        found = box.reader.look(slot, 5, NEW)
        assert found == -1
        assert box.reader.length(slot) == value
        assert len(box.reader.view(slot, np.dtype("u1"), 8)) == 8
    box.outbox.purge(OLD)
    assert len(box.outbox.unread()) in (0, SLOTS, 2 * SLOTS)


@pytest.mark.parametrize("value", [0, 2, 2**63, 2**64 - 1])
def test_slot_with_an_invalid_consumed_number_is_not_free(value: int, box: Box) -> None:
    assert box.post(5, 5, NEW, block_of(1))
    box.reader._consumed[5] = value
    assert not box.post(5, 133, NEW, block_of(1))


def test_counters_of_a_lane_wrap_around_to_zero(box: Box) -> None:
    for lane in box.lanes:
        lane.words[POSTS] = lane.words[CHUNKED] = 2**64 - 1
        lane.count_chunked()
    assert box.outbox.has_news()
    assert box.post(5, 5, NEW, block_of(1))
    assert box.outbox.has_news()
    assert {(lane.total, lane.words[CHUNKED]) for lane in box.lanes} == {(0, 0)}
    assert take(box.reader, 5, 5, NEW) == 1


# -- chunk queues


def put(writer: ChunkQueueWriter, number: int, group: int = NEW, identity: int = 3) -> bool:
    return writer.put(identity, group, PRINT, memoryview(bytes([number]) * 16))


def take_chunk(reader: ChunkQueueReader, group: int = NEW, identity: int = 3) -> int | None:
    if reader.look(identity, group) != PRINT:
        return None
    piece = reader.read(np.dtype("u1"), 16).copy()
    assert (piece == piece[0]).all()
    reader.free()
    return int(piece[0])


def test_chunks_are_delivered_in_order_and_only_to_their_operation() -> None:
    writer, reader = chunk_queue_ends()
    assert writer.take(3, NEW)
    assert not writer.take(4, NEW)
    for start in range(0, 40, CHUNKS):
        for number in range(CHUNKS):
            assert put(writer, start + number)
        assert not put(writer, 99)
        assert reader.look(4, NEW) == -1
        assert reader.look(3, OLD) == -1
        for number in range(CHUNKS):
            assert take_chunk(reader) == start + number
        assert take_chunk(reader) is None


def test_reader_of_a_chunk_queue_wakes_a_waiting_writer() -> None:
    writer, reader = chunk_queue_ends()
    assert writer.take(3, NEW)
    for number in range(CHUNKS):
        assert put(writer, number)
    assert reader.look(3, NEW) == PRINT
    assert not reader.free()
    assert put(writer, CHUNKS)
    assert not put(writer, 99)
    assert reader.free()
    assert not reader.free()


@pytest.mark.parametrize("step", range(8))
def test_chunk_freed_while_the_writer_starts_waiting_is_detected(step: int) -> None:
    """Check that the writer finds the freed chunk, or that the reader knows that it must notify the writer."""
    writer, reader = chunk_queue_ends()
    assert writer.take(3, NEW)
    for number in range(CHUNKS):
        assert put(writer, number)
    events: list[bool] = []
    steps = watch_steps(writer)
    steps.interrupt(step, lambda: events.append(reader.free()))
    assert put(writer, CHUNKS) or events in ([], [True])


def test_chunk_of_a_released_group_is_freed_when_it_becomes_the_next_chunk() -> None:
    writer, reader = chunk_queue_ends()
    assert writer.take(3, NEW)
    assert put(writer, 1, OLD)
    assert put(writer, 2, NEW)
    reader.end(NEW)
    assert reader.reclaim() == (False, False)
    reader.release(NEW)
    assert take_chunk(reader, OLD) == 1
    assert reader.reclaim()[0]
    assert put(writer, 3, OLD)
    assert take_chunk(reader, OLD) == 3
    assert not reader._closed_groups
    reader.reclaim()
    assert not reader._last_chunks


def test_chunk_queue_of_a_failed_operation_is_reused_only_after_its_chunks_are_read() -> None:
    writer, reader = chunk_queue_ends()
    assert writer.take(3, NEW)
    assert put(writer, 1, OLD)
    assert put(writer, 2, OLD)
    writer.leave(failed=True)
    assert not writer.take(4, NEW)
    assert take_chunk(reader, OLD) == 1
    assert not writer.take(4, NEW)
    reader.end(OLD)
    reader.reclaim()
    assert writer.take(4, NEW)
    assert put(writer, 3, NEW, 4)
    assert take_chunk(reader, NEW, 4) == 3


def test_chunk_queue_with_unread_chunks_is_given_only_to_the_next_ordered_operation() -> None:
    writer, _ = chunk_queue_ends()
    assert writer.take(3, NEW, ordered=True)
    assert put(writer, 1)
    writer.leave(failed=False)
    assert not writer.take(4, NEW)
    assert not writer.take(4, OLD, ordered=True)
    assert not writer.take(2, NEW, ordered=True)
    assert writer.take(4, NEW, ordered=True)
    assert put(writer, 2, identity=4)
    writer.leave(failed=True)
    assert not writer.take(5, NEW, ordered=True)


def test_chunk_queue_is_given_to_any_operation_once_the_last_operation_is_read() -> None:
    writer, reader = chunk_queue_ends()
    for identity in (3, 4):
        assert writer.take(identity, NEW, ordered=True)
        assert put(writer, 1, identity=identity)
        assert put(writer, 2, identity=identity)
        writer.leave(failed=False)
    for identity, number in ((3, 1), (3, 2)):
        assert take_chunk(reader, identity=identity) == number
        assert not writer.take(9, OLD)
    assert take_chunk(reader, identity=4) == 1
    assert writer.take(9, OLD)


def test_chunks_for_a_finished_group_are_freed_when_their_space_is_needed() -> None:
    writer, reader = chunk_queue_ends()
    assert writer.take(3, NEW)
    reader.end(OLD)
    reader.reclaim()
    assert put(writer, 1, OLD)
    writer.leave(failed=True)
    assert not writer.take(4, NEW)
    reader.reclaim()
    assert writer.take(4, NEW)
    assert put(writer, 2, NEW, 4)
    reader.reclaim()
    assert take_chunk(reader, NEW, 4) == 2
