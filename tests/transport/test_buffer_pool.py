"""The pool of receive buffers that all links of a transport share."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from aiocoll.runtime import Runtime
from aiocoll.security.handshake import ConnKind
from aiocoll.testing.contracts.links import payload
from aiocoll.transport.buffer_pool import MOST, BufferPool
from aiocoll.transport.frame import SEGMENT
from aiocoll.transport.stream.link import StreamLink
from aiocoll.transport.stream.plain_stream import PlainStream

from .links import Recorder, frame, sockets

Fed = tuple[socket.socket, StreamLink, Recorder]


def frame_bytes(op: int, data: bytes) -> bytes:
    header, view = frame(op, data)
    return header + bytes(view or b"")


class CheckedPool(BufferPool):
    """A buffer pool that records which buffers are in use, and overwrites each returned buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.used: list[memoryview] = []

    def take(self) -> memoryview:
        buffer = super().take()
        assert not any(buffer is each for each in self.used), "the pool gave one buffer to two links"
        self.used.append(buffer)
        return buffer

    def give(self, buffer: memoryview) -> None:
        self.used = [each for each in self.used if each is not buffer]
        buffer[:] = b"\xff" * len(buffer)  # overwrite, so that a link that still reads the buffer gets wrong bytes
        super().give(buffer)


@asynccontextmanager
async def links_with_raw_ends(count: int, pool: BufferPool) -> AsyncIterator[list[Fed]]:
    """Yield links of one transport, each with the raw socket at its other end."""
    runtime = Runtime.of(asyncio.get_running_loop())
    made: list[Fed] = []
    try:
        for peer in range(count):
            raw, sock = sockets("unix")
            link = StreamLink(runtime, PlainStream(runtime.loop, sock), peer, ConnKind.DATA, pool)
            sink = Recorder()
            link.sink = sink
            made.append((raw, link, sink))
        yield made
    finally:
        for raw, link, _ in made:
            link.close()
            raw.close()


def feed(raw: socket.socket, link: StreamLink, data: bytes) -> None:
    while data:
        data = data[raw.send(data) :]
        while link.poll():
            pass


async def test_idle_link_holds_no_receive_buffer() -> None:
    pool = CheckedPool()
    async with links_with_raw_ends(20, pool) as links:
        for peer, (raw, link, sink) in enumerate(links):
            feed(raw, link, frame_bytes(1, payload(peer, 700)) + frame_bytes(2, payload(peer, SEGMENT)))
            assert sink.frames == [(1, payload(peer, 700)), (2, payload(peer, SEGMENT))]
            assert not pool.used
        assert len(pool._free) == 1, "links that read in turn used more than one buffer"


async def test_partial_frame_is_not_overwritten_by_other_links() -> None:
    pool = CheckedPool()
    async with links_with_raw_ends(3, pool) as links:
        for peer, (raw, link, _) in enumerate(links):
            feed(raw, link, frame_bytes(1, payload(peer, 20_000))[: 10_000 + peer])
        assert len(pool.used) == 3
        for peer, (raw, link, sink) in enumerate(links):
            feed(raw, link, frame_bytes(1, payload(peer, 20_000))[10_000 + peer :])
            assert sink.frames == [(1, payload(peer, 20_000))]
        assert not pool.used


async def test_payload_routed_into_an_array_takes_no_receive_buffer() -> None:
    pool = CheckedPool()
    room = memoryview(bytearray(SEGMENT))
    async with links_with_raw_ends(1, pool) as [(raw, link, sink)]:
        sink.place = lambda header: room[: header[7]]
        stream = frame_bytes(1, payload(1, SEGMENT))
        feed(raw, link, stream[:9000])
        assert not pool.used
        feed(raw, link, stream[9000:])
        assert sink.frames == [(1, payload(1, SEGMENT))]


async def test_diverted_payload_of_a_link_does_not_disturb_other_links() -> None:
    pool = CheckedPool()
    room = memoryview(bytearray(SEGMENT))
    async with links_with_raw_ends(2, pool) as [(raw, link, sink), (other_raw, other, other_sink)]:
        sink.place = lambda header: room[: header[7]]
        feed(raw, link, frame_bytes(1, b"\xaa" * 50_000)[:100])
        link.divert()
        feed(other_raw, other, frame_bytes(2, payload(2, 40_000))[:30_000])
        feed(raw, link, frame_bytes(1, b"\xaa" * 50_000)[100:])
        feed(other_raw, other, frame_bytes(2, payload(2, 40_000))[30_000:])
        assert [op for op, _ in sink.frames] == [1]
        assert other_sink.frames == [(2, payload(2, 40_000))]


async def test_link_that_ends_within_a_frame_returns_its_receive_buffer() -> None:
    ends: list[Callable[[socket.socket], object]] = [
        socket.socket.close,
        lambda raw: raw.send(b"\xff" * 40_000),  # the rest of the frame, then an invalid frame
    ]
    pool = CheckedPool()
    async with links_with_raw_ends(2, pool) as links:
        for (raw, link, sink), end in zip(links, ends, strict=True):
            feed(raw, link, frame_bytes(1, payload(1, 20_000))[:10_000])
            assert len(pool.used) == 1
            end(raw)
            while not sink.losses:
                link.poll()
            assert not pool.used


async def test_pool_keeps_a_limited_number_of_buffers_after_a_burst() -> None:
    pool = CheckedPool()
    async with links_with_raw_ends(MOST + 4, pool) as links:
        for raw, link, _ in links:
            feed(raw, link, frame_bytes(1, b"x" * 10)[:-1])
        assert len(pool.used) == MOST + 4
        for raw, link, sink in links:
            feed(raw, link, b"x")
            assert sink.frames == [(1, b"x" * 10)]
        assert len(pool._free) == MOST
