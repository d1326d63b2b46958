"""The frame ring, compared with a queue: with any delay of the reader, no frame is lost, torn or overwritten."""

from __future__ import annotations

import mmap
import random
from collections import deque

import pytest

from aiocoll.transport.frame import HEADER, SEGMENT
from aiocoll.transport.shm.fence import Fences
from aiocoll.transport.shm.layout import ENTRIES, LINE, LinkLayout
from aiocoll.transport.shm.region import SharedRegion
from aiocoll.transport.shm.ring import ENTRY, RingWriter

#: Payload sizes in bytes: 0, and sizes near the limits for inline payloads, for one line and for the largest frame.
SIZES = (0, 1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 4096, SEGMENT - 64, SEGMENT - 1, SEGMENT)
#: Two world sizes: with the first, the data area of a frame ring holds two segments; with the second, only one.
WORLDS = (2, 64)


class Ring:
    """Both ends of a frame ring, and a queue of the frames that were written but not read yet."""

    def __init__(self, ranks: int, number: int = 0) -> None:
        layout = LinkLayout(ranks)
        self.direction = layout.directions[number]
        region = SharedRegion(mmap.mmap(-1, layout.nbytes), [], reserved=True)
        self.memory = memoryview(region.memory)
        self.words = self.memory.cast("Q")
        self.out = RingWriter(region, self.direction, Fences(None, lambda: None))
        self.written: deque[tuple[bytes, bytes]] = deque()
        self.sent = self.read = 0

    def put(self, nbytes: int, nothing: bool = False) -> bool:
        payload = None if nothing else memoryview(bytes([self.sent % 251 + 1]) * nbytes)
        header = HEADER.pack(1, 0, 0, 7, self.sent, 0, 0, nbytes, nbytes)
        if not self.out.put(header, payload):
            return False
        self.sent += 1
        self.written.append((header, b"" if payload is None else bytes(payload)))
        return True

    def take(self) -> bool:
        """Read the next ring entry as a link does; return whether there was an entry."""
        at = self.direction.ring + self.read % ENTRIES * LINE
        if self.words[at >> 3] != self.read + 1:
            assert not self.written
            return False
        place, *fields = ENTRY.unpack_from(self.memory, at + 8)
        header, payload = self.written.popleft()
        assert HEADER.pack(*fields) == header
        assert self.direction.ring <= place <= self.direction.data_end - len(payload)
        assert self.memory[place : place + len(payload)] == payload
        self.read += 1
        self.words[self.direction.taken] = self.read
        return True

    def drain(self) -> None:
        while self.take():
            pass
        assert self.sent == self.read


@pytest.mark.parametrize("ranks", WORLDS)
@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("nbytes", SIZES)
def test_frames_of_each_size_wrap_around_the_frame_ring(ranks: int, number: int, nbytes: int) -> None:
    ring = Ring(ranks, number)
    for _ in range(3 * ENTRIES if nbytes <= 4096 else 40):
        assert ring.put(nbytes, nothing=not nbytes)
        assert ring.take()
        assert not ring.take()


@pytest.mark.parametrize("nbytes", [0, 1, 8])
def test_full_frame_ring_refuses_frames(nbytes: int) -> None:
    ring = Ring(2)
    for _ in range(3):
        for _ in range(ENTRIES):
            assert ring.put(nbytes)
        assert not ring.put(nbytes)
        assert ring.take()
        assert ring.put(nbytes)
        assert not ring.put(nbytes)
        ring.drain()


@pytest.mark.parametrize("ranks", WORLDS)
@pytest.mark.parametrize("nbytes", [9, 64, 65, 8192, SEGMENT // 3, SEGMENT - 1, SEGMENT])
def test_frame_ring_with_a_full_data_area_refuses_frames(ranks: int, nbytes: int) -> None:
    """Check that the data area takes every frame that fits, and that a full data area still lets small frames pass."""
    ring = Ring(ranks)
    lines = -(-nbytes // LINE) * LINE
    room = min(ENTRIES, ring.direction.data_nbytes // lines)
    for _ in range(3):
        count = 0
        while ring.put(nbytes):
            count += 1
        assert count == room
        if count < ENTRIES:
            assert ring.put(8), "a payload that fits in the line needs no room"
        ring.drain()


@pytest.mark.parametrize("ranks", WORLDS)
def test_data_area_of_a_frame_ring_wraps_around_at_every_offset(ranks: int) -> None:
    """Keep half of the data area unread, so that frames of random sizes wrap around at every offset."""
    ring = Ring(ranks)
    chance = random.Random(ranks)
    half = ring.direction.data_nbytes // 2
    for _ in range(4000):
        nbytes = chance.randrange(9, half // 3)
        while not ring.put(nbytes):
            assert ring.take()
        while sum(len(payload) for _, payload in ring.written) > half:
            assert ring.take()
    ring.drain()


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("ranks", WORLDS)
def test_frames_of_any_size_arrive_at_a_reader_with_any_delay(ranks: int, seed: int) -> None:
    ring = Ring(ranks, seed % 2)
    chance = random.Random(seed)
    refused = 0
    for _ in range(4000):
        if chance.random() < 0.5:
            nbytes = chance.choice(SIZES) if chance.random() < 0.2 else chance.randrange(300)
            refused += not ring.put(nbytes, nothing=not nbytes and chance.random() < 0.5)
        else:
            for _ in range(chance.choice((1, 1, 3, 50))):
                ring.take()
    ring.drain()
    assert refused
    assert ring.put(SEGMENT), "an empty ring refused the largest frame"


def test_frame_stamp_is_written_last() -> None:
    """Check the order of writes, and the memory fence before the stamp, which weakly ordered machines need."""
    ring = Ring(2)
    seen_words: list[int] = []
    at = ring.direction.ring
    ring.out._order = lambda: seen_words.append(ring.words[at >> 3]) or seen_words.append(ring.words[(at >> 3) + 1])
    assert ring.put(100)
    assert seen_words[0] == 0
    assert seen_words[1] == ring.direction.data
    assert ring.take()
