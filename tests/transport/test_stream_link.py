"""Links over byte streams: frames that arrive in pieces, invalid frames, resets, and polls of limited duration."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from aiocoll.errors import ProtocolError
from aiocoll.runtime import Runtime
from aiocoll.security.handshake import ConnKind
from aiocoll.testing.contracts.links import payload
from aiocoll.transport.buffer_pool import BufferPool
from aiocoll.transport.frame import HEADER, SEGMENT, Header
from aiocoll.transport.stream.link import BULK, StreamLink
from aiocoll.transport.stream.plain_stream import PlainStream

from .links import Recorder, frame, linked, sockets

BIG = BULK + 1000


def frame_bytes(op: int, data: bytes) -> bytes:
    header, view = frame(op, data)
    return header + bytes(view or b"")


class StoppedClock(Runtime):
    """A runtime whose clock stands still, so that polls never reach their time limit on a busy machine."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop)
        self.ticks = lambda: 0.0


@asynccontextmanager
async def link_with_raw_end(
    kind: str = "unix", runtime: Runtime | None = None
) -> AsyncIterator[tuple[socket.socket, StreamLink, Any]]:
    """Yield a link, the raw socket at its other end, and the sink of the link."""
    raw, sock = sockets(kind)
    runtime = runtime or StoppedClock(asyncio.get_running_loop())
    link = StreamLink(runtime, PlainStream(runtime.loop, sock), 3, ConnKind.DATA, BufferPool())
    sink = link.sink = Recorder()
    try:
        yield raw, link, sink
    finally:
        link.close()
        raw.close()


@pytest.mark.parametrize("routed", [False, True])
async def test_frames_sent_byte_by_byte_arrive_intact(routed: bool) -> None:
    room = memoryview(bytearray(SEGMENT))
    async with link_with_raw_end() as (raw, link, sink):
        if routed:
            sink.place = lambda header: room[: header[7]]
        sizes = (0, 1, 40, 0, 700)
        for byte in b"".join(frame_bytes(op, payload(op, nbytes)) for op, nbytes in enumerate(sizes)):
            raw.send(bytes([byte]))
            link.poll()
        assert sink.frames == [(op, payload(op, nbytes)) for op, nbytes in enumerate(sizes)]
        assert (sink.routed > 0) is True


@pytest.mark.parametrize("routed", [False, True])
@pytest.mark.parametrize("piece", [7, 31, 33, 1000, 20_000, 70_000])
async def test_frames_sent_in_pieces_of_any_length_arrive_intact(piece: int, routed: bool) -> None:
    room = memoryview(bytearray(SEGMENT))
    async with link_with_raw_end() as (raw, link, sink):
        if routed:
            sink.place = lambda header: room[: header[7]]
        sizes = (BIG, 5, SEGMENT, 0, 0, BULK, BULK - 1, 100_000, 1, SEGMENT)
        if piece < 1000:
            sizes = sizes[:2] + sizes[3:7]
        stream = b"".join(frame_bytes(op, payload(op, nbytes)) for op, nbytes in enumerate(sizes))
        for start in range(0, len(stream), piece):
            part = stream[start : start + piece]
            assert raw.send(part) == len(part)
            while link.poll():
                pass
        assert sink.frames == [(op, payload(op, nbytes)) for op, nbytes in enumerate(sizes)]


async def test_payload_routed_into_an_array_is_received_without_a_copy() -> None:
    room = bytearray(b"." * (BIG + 2))
    routed_headers: list[Header] = []

    def place(header: Header) -> memoryview:
        routed_headers.append(header)
        return memoryview(room)[1:-1]

    async with link_with_raw_end() as (raw, link, sink):
        sink.place = place
        stream = frame_bytes(5, payload(5, BIG))
        raw.send(stream[:9000])
        link.poll()
        assert len(routed_headers) == 1
        assert bytes(room[1:100]) == payload(5, 99), "the first part of the payload is not in its place yet"
        assert sink.frames == []
        raw.send(stream[9000:])
        link.poll()
        assert bytes(room) == b"." + payload(5, BIG) + b"."
        assert len(routed_headers) == 1
        assert routed_headers[0][7] == BIG


async def test_diverted_payload_is_not_written_to_its_array() -> None:
    room = bytearray(BIG)
    async with link_with_raw_end() as (raw, link, sink):
        sink.place = lambda header: memoryview(room)[: header[7]] if header[4] == 1 else None
        stream = frame_bytes(1, b"\xff" * BIG) + frame_bytes(2, b"next") + frame_bytes(1, b"")
        raw.send(stream[:5000])
        link.poll()
        room[:] = bytes(BIG)
        link.divert()
        raw.send(stream[5000:])
        while link.poll():
            pass
        assert room == bytes(BIG)
        assert [op for op, _ in sink.frames] == [1, 2, 1]
        assert sink.frames[1] == (2, b"next")
        link.divert()  # `divert` has no effect between frames


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (HEADER.pack(0, 0, 0, 0, 0, 0, 0, 0, 0), "rank 3 sent an invalid frame of kind 0 and length 0"),
        (HEADER.pack(6, 0, 0, 0, 0, 0, 0, 4, 4), "kind 6 and length 4"),
        (HEADER.pack(1, 0, 0, 0, 0, 0, 0, SEGMENT + 1, 0), f"length {SEGMENT + 1}"),
        (HEADER.pack(1, 0, 0, 0, 0, 0, 0, 0xFFFFFFFF, 0), "length 4294967295"),
        (b"GET / HTTP/1.1\r\nHost: example.org\r\n", "rank 3 sent an invalid frame of kind 71"),
    ],
)
async def test_malformed_header_ends_the_link(header: bytes, message: str) -> None:
    async with link_with_raw_end() as (raw, link, sink):
        raw.send(frame_bytes(1, b"fine") + header + frame_bytes(2, b"never"))
        assert link.poll()
        assert sink.frames == [(1, b"fine")]
        assert [type(each) for each in sink.losses] == [ProtocolError]
        assert message in str(sink.losses[0])
        link.write(frame_bytes(3, b"why"))
        link.finish()
        assert raw.recv(100) == frame_bytes(3, b"why")
        raw.send(frame_bytes(4, b"never, either"))
        assert link.poll()
        assert raw.recv(100) == b""
        raw.close()
        assert link.poll()
        assert link.closed
        assert not link.poll()
        assert (len(sink.losses), len(sink.frames)) == (1, 1)


async def test_end_of_a_stream_within_a_frame_is_reported_as_a_link_end() -> None:
    async with link_with_raw_end() as (raw, link, sink):
        raw.send(frame_bytes(1, b"whole") + frame_bytes(2, b"cut off")[:-3])
        raw.close()
        while not sink.losses:
            link.poll()
        assert sink.frames == [(1, b"whole")]
        assert sink.losses == [None]


async def test_connection_reset_is_reported_as_an_error() -> None:
    async with link_with_raw_end("tcp") as (raw, link, sink):
        link.start()
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        raw.close()
        await sink.until(lambda: sink.losses)
        assert isinstance(sink.losses[0], ConnectionResetError)


async def test_connection_reset_after_finish_is_reported_as_a_link_end() -> None:
    async with link_with_raw_end("tcp") as (raw, link, sink):
        link.start()
        link.finish()
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        raw.close()
        await sink.until(lambda: sink.losses)
        assert sink.losses == [None]


class ExhaustedClock(Runtime):
    """A runtime on which each reading of the clock shows that the callback's time limit has passed."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop)
        self.readings = 0
        self.ticks = self.read

    def read(self) -> float:
        self.readings += 1
        return float(self.readings)


async def test_poll_of_a_link_ends_at_its_time_limit() -> None:
    room = memoryview(bytearray(SEGMENT))
    async with link_with_raw_end("unix", ExhaustedClock(asyncio.get_running_loop())) as (raw, link, sink):
        sink.place = lambda header: room[: header[7]]
        raw.send(b"".join(frame_bytes(op, payload(op, BIG)) for op in range(8)))
        polls = 0
        while link.poll():
            polls += 1
        assert sink.frames == [(op, payload(op, BIG)) for op in range(8)]
        assert polls >= 5


async def test_waiting_frames_are_dropped_when_the_peer_is_gone() -> None:
    async with linked("unix") as (near, far):
        near.start()
        while near.write(*frame(1, payload(1, SEGMENT))):
            pass
        far.close()
        await near.sink.until(lambda: near.sink.losses)
        assert len(near.sink.losses) == 1
        assert near.write(*frame(2, b"x"))


class TickingClock(Runtime):
    """A runtime whose clock advances by 0.1 ms at each reading."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop)
        self._now = 0.0
        self.ticks = self._tick

    def _tick(self) -> float:
        self._now += 1e-4
        return self._now


async def test_many_small_frames_are_delivered_over_several_loop_iterations() -> None:
    count = 500
    async with link_with_raw_end(runtime=TickingClock(asyncio.get_running_loop())) as (raw, link, sink):
        raw.send(b"".join(frame_bytes(op, b"small") for op in range(count)))
        link.start()
        assert link.poll()
        first = len(sink.frames)
        assert 0 < first < 10
        await sink.frames_are(count)
        assert sink.frames == [(op, b"small") for op in range(count)]


async def test_end_of_a_link_is_reported_after_its_frames() -> None:
    count = 50
    async with link_with_raw_end(runtime=TickingClock(asyncio.get_running_loop())) as (raw, link, sink):
        raw.send(b"".join(frame_bytes(op, b"last words") for op in range(count)))
        raw.shutdown(socket.SHUT_WR)
        link.start()
        await sink.until(lambda: sink.losses)
        assert (len(sink.frames), sink.losses) == (count, [None])
