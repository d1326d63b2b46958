"""Segment sharing: a link offers a memory segment; the peer maps the segment, reads from it and releases it."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import numpy as np
import pytest

from aiocoll.errors import ProtocolError
from aiocoll.transport.shared_memory import Segment
from aiocoll.transport.shm import segment_sharing
from aiocoll.transport.shm.link import ShmLink
from aiocoll.transport.shm.region import PAGE, create_mapped
from aiocoll.transport.shm.registered_memory import RegisteredMemory
from aiocoll.transport.shm.segment_sharing import _ENDED, _MESSAGE, _OFFER, _TAKEN

from ..internals import socket_of
from ..ranks import wait_until
from .links import linked

NBYTES = 4 * PAGE
FLOAT = np.dtype(np.float64)


class Ends:
    """Both ends of a shared-memory link, and the registered memory of the near end."""

    def __init__(self, near: ShmLink, far: ShmLink) -> None:
        self.near, self.far = near, far
        self.registered_memory = RegisteredMemory(asyncio.get_running_loop())

    async def share(self) -> tuple[Any, Segment]:
        """Return an array of ascending numbers and its segment; wait until the far end has mapped the segment."""
        array, segment = await self.make()
        await wait_until(lambda: self.near.segment_sharing.can_map(segment))
        return array, segment

    async def make(self) -> tuple[Any, Segment]:
        array = (await self.registered_memory.make(NBYTES)).view(FLOAT)
        array[:] = np.arange(len(array))
        found = self.registered_memory.find(array)
        assert found is not None
        return array, found[0]

    def read_by_peer(self, segment: Segment, offset: int = 0, count: int = 1) -> Any:
        return self.far.segment_sharing.read(segment.number, offset, FLOAT, count)


def fill(sock: socket.socket) -> None:
    """Fill the socket buffer with messages that the peer ignores."""
    with suppress(BlockingIOError):
        while True:
            sock.send(_MESSAGE.pack(_ENDED, 77, 0))


@pytest.fixture
async def ends() -> AsyncIterator[Ends]:
    async with linked("shm") as (near, far):
        near.start(), far.start()
        both = Ends(near, far)
        yield both
        both.registered_memory.close()
    del near, far
    vars(both).clear()  # clear the object, which pytest references for a while


async def test_shared_segment_can_be_read_until_it_ends(ends: Ends) -> None:
    array, segment = await ends.share()
    assert np.array_equal(ends.read_by_peer(segment, 80, 10), array[10:20])
    array[10] = -1
    assert ends.read_by_peer(segment, 80)[0] == -1
    del array
    await wait_until(lambda: ends.read_by_peer(segment) is None)
    assert segment.fd == -1
    assert not ends.far.sink.losses


async def test_memory_segment_is_not_read_beyond_its_end(ends: Ends) -> None:
    _array, segment = await ends.share()
    assert len(ends.read_by_peer(segment, NBYTES - 16, 2)) == 2
    assert ends.read_by_peer(segment, NBYTES - 16, 3) is None
    assert ends.read_by_peer(segment, NBYTES, 1) is None


async def test_memory_segment_is_offered_to_a_peer_once(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    sent = []
    send = socket.send_fds
    monkeypatch.setattr(segment_sharing.socket, "send_fds", lambda *given: sent.append(given) or send(*given))
    _first, segment = await ends.make()
    assert not any(ends.near.segment_sharing.can_map(segment) for _ in range(5))
    await wait_until(lambda: ends.near.segment_sharing.can_map(segment))
    assert len(sent) == 1


async def test_segment_offer_that_exceeds_the_socket_buffer_is_sent_later(ends: Ends) -> None:
    """Fill the socket buffer; the offer and the notices about ended segments must arrive later."""
    segments = [await ends.share() for _ in range(3)]
    _array, late = await ends.make()
    fill(socket_of(ends.near))
    assert not ends.near.segment_sharing.can_map(late)
    assert not late.readers
    numbers = [segment for _, segment in segments]
    segments.clear()
    for segment in numbers:
        ends.near.segment_sharing.withdraw(segment.number)
    await wait_until(lambda: not any(ends.read_by_peer(segment) is not None for segment in numbers))
    await wait_until(lambda: ends.near.segment_sharing.can_map(late))


async def test_link_can_close_with_unsent_segment_offers(ends: Ends) -> None:
    _array, segment = await ends.share()
    fill(socket_of(ends.near))
    ends.near.segment_sharing.withdraw(segment.number)
    ends.near.close()
    await wait_until(lambda: ends.far.sink.losses)
    ends.near.segment_sharing.withdraw(segment.number)  # the link is already closed


async def test_lost_file_descriptor_does_not_affect_other_segments(ends: Ends) -> None:
    _array, segment = await ends.make()
    socket_of(ends.near).send(_MESSAGE.pack(_OFFER, segment.number, segment.nbytes))
    ends.near.segment_sharing._offered.add(segment.number)
    _other, other = await ends.share()
    assert ends.read_by_peer(segment) is None
    assert not ends.near.segment_sharing.can_map(segment)
    assert ends.read_by_peer(other) is not None


async def test_unmappable_segment_does_not_fail_the_link(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(fd: int, nbytes: int) -> Any:
        os.close(fd)
        raise OSError("no memory")

    _array, segment = await ends.make()
    with monkeypatch.context() as patch:
        patch.setattr(segment_sharing, "open_region", refuse)
        ends.near.segment_sharing.can_map(segment)
        for _ in range(5):
            await asyncio.sleep(0)
    _other, _ = await ends.share()
    assert not ends.near.segment_sharing.can_map(segment)
    assert ends.read_by_peer(segment) is None


async def test_late_answer_to_a_segment_offer_is_ignored(ends: Ends) -> None:
    _array, segment = await ends.make()
    ends.near.segment_sharing.can_map(segment)
    ends.near.segment_sharing.withdraw(segment.number)
    socket_of(ends.far).send(_MESSAGE.pack(_TAKEN, 99, 0))
    _other, _ = await ends.share()
    assert ends.near.segment_sharing._taken.isdisjoint({segment.number, 99})


MALFORMED_OFFERS = {
    "short": (b"x", 0),
    "unknown": (_MESSAGE.pack(9, 1, PAGE), 0),
    "zero": (bytes(_MESSAGE.size), 0),
    "another size": (_MESSAGE.pack(_OFFER, 1, 2 * PAGE), 1),
}


@pytest.mark.parametrize("what", MALFORMED_OFFERS)
async def test_malformed_segment_offer_ends_the_link(ends: Ends, what: str) -> None:
    message, fds = MALFORMED_OFFERS[what]
    fd, _memory = await create_mapped(PAGE)
    try:
        socket.send_fds(socket_of(ends.near), [message], [fd] * fds)
    finally:
        os.close(fd)
    await wait_until(lambda: ends.far.sink.losses)
    assert isinstance(ends.far.sink.losses[0], ProtocolError)


async def test_offer_of_unsealed_memory_ends_the_link(ends: Ends) -> None:
    zeros = os.open("/dev/zero", os.O_RDWR)
    socket.send_fds(socket_of(ends.near), [_MESSAGE.pack(_OFFER, 1, PAGE)], [zeros])
    os.close(zeros)
    await wait_until(lambda: ends.far.sink.losses)
    assert isinstance(ends.far.sink.losses[0], ProtocolError)


async def test_repeated_segment_number_ends_the_link(ends: Ends) -> None:
    _array, segment = await ends.share()
    socket.send_fds(socket_of(ends.near), [_MESSAGE.pack(_OFFER, segment.number, segment.nbytes)], [segment.fd])
    await wait_until(lambda: ends.far.sink.losses)
    assert isinstance(ends.far.sink.losses[0], ProtocolError)


# -- chunks in the queue


def put(ends: Ends, segment: Segment, offset: int, identity: int = 5) -> None:
    assert ends.near.chunks.writer.point(identity, 7, 0, segment.number, offset)


async def test_chunks_by_reference_and_copied_chunks_arrive_in_order(ends: Ends) -> None:
    array, segment = await ends.share()
    put(ends, segment, 0)
    assert ends.near.chunks.writer.put(5, 7, 0, memoryview(np.full(2, 8.0)).cast("B"))
    put(ends, segment, 16)
    for expected in (array[:2], [8, 8], array[2:4]):
        assert ends.far.chunks.reader.look(5, 7) == 0
        assert np.array_equal(ends.far.chunks.read(FLOAT, 2), expected)
        assert not ends.far.chunks.reader.is_void()
        ends.far.chunks.reader.free()
    assert ends.near.chunks.writer.is_taken(3)


@pytest.mark.parametrize(("number", "offset"), [(99, 0), (1, NBYTES), (1, 1 << 63)])
async def test_reference_outside_the_segments_ends_the_link(ends: Ends, number: int, offset: int) -> None:
    _array, _segment = await ends.share()
    ends.near.chunks.writer.point(5, 7, 0, number, offset)
    assert ends.far.chunks.read(FLOAT, 1) is None
    await wait_until(lambda: ends.far.sink.losses)
    with pytest.raises(ProtocolError, match="sent the address of a chunk in memory that it has not shared"):
        raise ends.far.sink.losses[0]


async def test_withdrawn_chunk_in_a_segment_is_not_read(ends: Ends) -> None:
    _array, segment = await ends.share()
    put(ends, segment, 0)
    put(ends, segment, 8, identity=6)
    put(ends, segment, 16)
    assert ends.far.chunks.read(FLOAT, 1) is not None
    ends.near.chunks.writer.invalidate(5, 7)
    assert ends.far.chunks.reader.is_void()
    assert ends.far.chunks.read(FLOAT, 1) is None
    ends.far.chunks.reader.free()
    assert np.array_equal(ends.far.chunks.read(FLOAT, 1), [1]), "the void hit another operation"
    ends.far.chunks.reader.free()
    assert ends.far.chunks.reader.is_void()
    await asyncio.sleep(0)
    assert not ends.far.sink.losses


async def test_end_of_a_group_reclaims_withdrawn_chunks(ends: Ends) -> None:
    _array, segment = await ends.share()
    put(ends, segment, 0)
    ends.near.chunks.writer.invalidate(5, 7)
    ends.far.chunks.reader.end(7)
    assert ends.far.chunks.reader.reclaim() == (True, False)
    assert ends.near.chunks.writer.is_taken(1)


async def test_writer_that_waits_until_all_chunks_are_read_is_woken(ends: Ends) -> None:
    _array, segment = await ends.share()
    put(ends, segment, 0)
    assert not ends.near.chunks.writer.is_taken(1)
    assert ends.far.chunks.reader.free(), "the waiting writer must be woken"
    assert ends.near.chunks.writer.is_taken(1)
