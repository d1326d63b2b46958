"""Fuzz tests of the frame protocol: invalid frames from a peer, and damaged byte streams."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest
from hypothesis import strategies as st

from aiocoll.engine.job.ids import hash62
from aiocoll.engine.operations.signature import KEYED, P2P
from aiocoll.errors import ProtocolError
from aiocoll.runtime import Runtime
from aiocoll.security.handshake import ConnKind
from aiocoll.transport.buffer_pool import BufferPool
from aiocoll.transport.frame import EAGER, HEADER, HEADER_SIZE, SEGMENT, FrameKind, Header
from aiocoll.transport.stream.link import StreamLink
from aiocoll.transport.stream.plain_stream import PlainStream

from ..internals import comm_of
from .budget import fuzz
from .world import run_attack

#: Placeholder group ids in frames: the group of all ranks, and the group of ranks 0 and 1.
ALL, PAIR = 1001, 1002
U16, U32 = (1 << 16) - 1, (1 << 32) - 1

sizes = st.sampled_from([0, 1, 7, 8, 16, 32, 100, 4096, SEGMENT - 8, SEGMENT])
totals = st.sampled_from([0, 1, 8, 32, 100, 4096, SEGMENT, SEGMENT + 8, 1_600_000, U32])
tags = st.sampled_from([1, 1, 2])
#: Operation ids of calls in flight and of unknown calls. The id -1 stands for the broadcast with the key "k".
operations = st.one_of(
    st.sampled_from([0, 1, 2, 3, 1000, KEYED | 5, KEYED | P2P, P2P, (1 << 64) - 1]),
    st.builds(lambda tag, number: P2P | tag << 32 | number, tags, st.integers(0, 3)),
    st.just(-1),
)
frames = st.tuples(
    st.sampled_from([FrameKind.DATA] * 6 + [FrameKind.READY, FrameKind.GRANT, FrameKind.WINDOW, FrameKind.CONTROL]),
    st.sampled_from([EAGER, EAGER, EAGER, 0, 2, 255]),
    st.sampled_from([0, 0, 0, 1, 2, 3, U16]),
    st.sampled_from([ALL, ALL, ALL, PAIR, 77, 0, U32]),
    operations,
    st.sampled_from([0, 11, 255, 200, U32, -1, -1, -1]),
    st.sampled_from([0, 0, 0, 8, 128, SEGMENT, U32]),
    sizes,
    totals,
    st.integers(1, 40),
)


@pytest.mark.slow
@fuzz(st.lists(st.tuples(frames, st.integers(0, 1)), min_size=1, max_size=6), examples=150)
def test_works_end_for_any_frames_that_a_peer_sends(sent: list[tuple[tuple[int, ...], int]]) -> None:
    def attack(pg: Any, pair: int) -> None:
        member = comm_of(pg)
        names = {ALL: member.id, PAIR: pair}
        keyed = KEYED | hash62("k\0001")
        prints = fingerprints(pg)
        for (kind, flags, step, group, op, dtype, offset, length, total, times), to in sent:
            link = member.channels[to].link
            if link is None:
                continue
            op = keyed if op == -1 else op
            known = prints[op % 3] if dtype == -1 else dtype
            header = HEADER.pack(kind, flags, step, names.get(group, group), op, known, offset, length, total)
            for _ in range(times):
                link.write(header, memoryview(bytes(length)) if length else None)

    run_attack(attack)


def fingerprints(pg: Any) -> list[int]:
    """Start the same calls as the other ranks, and return the fingerprints of these operations."""
    import numpy as np

    found = []
    for call in (lambda: pg.allreduce(np.ones(4), key="x"), lambda: pg.broadcast(np.ones(200_000), 2, key="y")):
        before = set(comm_of(pg).in_flight._operations)
        call().add_done_callback(lambda _: None)
        found += [each.fingerprint for op, each in comm_of(pg).in_flight._operations.items() if op not in before]
    return [*found, 11, 11, 11][:3]


class Sink:
    """A frame sink that records received headers, and the errors with which the link ends."""

    def __init__(self) -> None:
        self.headers: list[Header] = []
        self.losses: list[Exception | None] = []
        self.nbytes = 0

    def route(self, link: object, header: Header) -> memoryview | None:
        return memoryview(bytearray(header[7])) if header[4] % 2 else None

    def deliver(self, link: object, header: Header, payload: memoryview | None) -> None:
        assert payload is None or payload.nbytes == header[7]
        self.headers.append(header)

    def withdrawn(self, link: object, header: Header) -> None:
        pass

    def drained(self, link: object) -> None:
        pass

    def lost(self, link: StreamLink, error: Exception | None) -> None:
        self.losses.append(error)
        if isinstance(error, ProtocolError):
            link.finish()


@st.composite
def streams(draw: st.DrawFn) -> tuple[bytes, list[int]]:
    """Draw a byte stream of frames with some wrong bytes, and the offsets at which to split the stream."""
    stream = bytearray()
    for _ in range(draw(st.integers(1, 5))):
        length = draw(st.sampled_from([0, 1, 31, 5000, 20_000, 70_000]))
        stream += HEADER.pack(draw(st.integers(1, 5)), 0, 0, 7, draw(st.integers(0, 9)), 0, 0, length, length)
        stream += bytes(length)
    for _ in range(draw(st.integers(0, 4))):
        stream[draw(st.integers(0, len(stream) - 1))] = draw(st.integers(0, 255))
    cuts = draw(st.lists(st.integers(0, len(stream)), max_size=4))
    return bytes(stream[: draw(st.integers(0, len(stream)))]), sorted(cuts)


@fuzz(streams(), examples=200)
def test_mutated_stream_delivers_valid_frames_until_the_link_fails(stream: tuple[bytes, list[int]]) -> None:
    """Check that the link delivers exactly the frames before the first invalid frame, and ends once."""
    data, cuts = stream

    async def read() -> Sink:
        near, far = socket.socketpair()
        near.setblocking(False)
        far.setblocking(False)
        runtime = Runtime(asyncio.get_running_loop())
        link = StreamLink(runtime, PlainStream(runtime.loop, far), 3, ConnKind.DATA, BufferPool())
        sink = link.sink = Sink()  # type: ignore[assignment]
        link.start()
        for start, end in zip([0, *cuts], [*cuts, len(data)], strict=True):
            await asyncio.get_running_loop().sock_sendall(near, data[start:end])
            await asyncio.sleep(0)
        near.close()
        while not link.closed:  # noqa: ASYNC110
            await asyncio.sleep(0)
        return sink

    sink = asyncio.run(read())
    expected, whole = split(data)
    assert sink.headers == expected
    assert [type(error) for error in sink.losses] == [type(None) if whole else ProtocolError]


def split(data: bytes) -> tuple[list[Header], bool]:
    """Return the headers before the first invalid or incomplete frame, and whether all frames are valid."""
    found: list[Header] = []
    at = 0
    while len(data) - at >= HEADER_SIZE:
        header: Header = HEADER.unpack_from(data, at)
        if header[7] > SEGMENT or header[0] not in set(FrameKind):
            return found, False
        at += HEADER_SIZE + header[7]
        if at > len(data):
            break
        found.append(header)
    return found, True
