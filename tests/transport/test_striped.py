"""Striped data links: the number of connections, the order of blocks, pacing, and lost connections."""

from __future__ import annotations

import asyncio
import socket
import struct
import sys
from contextlib import suppress
from math import inf
from typing import Any

import pytest

from aiocoll.errors import ProtocolError
from aiocoll.security.handshake import ConnKind
from aiocoll.transport.frame import SEGMENT
from aiocoll.transport.stream.link_table import FAR, MOST_CONNECTIONS
from aiocoll.transport.stream.plain_stream import PlainStream
from aiocoll.transport.stream.striped_stream import AHEAD, BLOCK, StripedStream

from ..internals import replace_parts
from ..ranks import wait_until
from .links import Recorder, frame, sockets
from .test_stream import Rank, started

#: The value of SO_MAX_PACING_RATE in <asm-generic/socket.h>, which the module `socket` lacks.
SO_MAX_PACING_RATE = 47
LARGE = bytes(range(256)) * (SEGMENT // 256)


def connections(rank: Rank, peer: int) -> list[socket.socket]:
    """Return the sockets of the data link from `rank` to `peer`, or an empty list if the link is not striped."""
    striped = rank.transport._links._striped.get(peer)
    return [] if striped is None else [stripe.stream.sock for stripe in striped._stripes]


async def striped_ends(ranks: list[Rank], count: int) -> tuple[Any, Any]:
    """Let rank 0 dial a striped link; return both ends as soon as both have all `count` connections."""
    ranks[0].transport.connections = lambda host: count
    near = await ranks[0].connect(ranks[1], ConnKind.DATA)
    await wait_until(lambda: ranks[1].accepted and all(len(connections(ranks[r], 1 - r)) == count for r in range(2)))
    return near, ranks[1].accepted[0]


@pytest.mark.parametrize("flavour", ["tcp", "tls"])
@pytest.mark.parametrize("count", [2, 3, MOST_CONNECTIONS])
async def test_frames_of_a_striped_link_arrive_in_order_over_all_connections(flavour: str, count: int) -> None:
    async with started(2, flavour) as ranks:
        ends = await striped_ends(ranks, count)
        for end, other in (ends, ends[::-1]):
            other.sink = recorder = Recorder()
            for number in range(40):
                end.write(*frame(number, LARGE[number:]))
            await recorder.frames_are(40)
            assert recorder.frames == [(number, LARGE[number:]) for number in range(40)]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs a kernel with pacing")
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize(
    ("host", "rtt", "paced"),
    [
        ("127.0.0.1", 1.0, False),
        ("127.0.0.2", FAR, True),
        ("127.0.0.2", FAR - 1e-6, False),
        ("127.0.0.2", inf, False),  # the kernel has measured no round-trip time
    ],
)
async def test_connections_to_distant_hosts_are_paced(
    count: int, host: str, rtt: float, paced: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check pacing: without it, a fast link loses packets when it sends a burst after a pause."""
    replace_parts(monkeypatch, round_trip=lambda sock: rtt)
    async with started(2, "tcp") as ranks:
        ranks[1].card = await ranks[1].transport.listen_tcp(host)
        ends = (
            await striped_ends(ranks, count) if count > 1 else (await ranks[0].connect(ranks[1], ConnKind.DATA), None)
        )
        near_sockets, far_sockets = (connections(ranks[rank], 1 - rank) for rank in range(2))
        found = [is_paced(sock) for sock in [*near_sockets, *far_sockets] or [ends[0]._stream.sock]]
        assert found == [paced] * len(found)


def is_paced(sock: socket.socket) -> bool:
    return sock.getsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, 8) != b"\xff" * 8


@pytest.mark.parametrize("kind", [ConnKind.CONTROL, ConnKind.DATA])
async def test_only_data_links_have_several_connections(kind: ConnKind) -> None:
    async with started(2, "tcp") as ranks:
        ranks[0].transport.connections = lambda host: 1 if kind is ConnKind.DATA else 3
        await ranks[0].connect(ranks[1], kind)
        assert not connections(ranks[0], 1)
        assert not ranks[0].transport._background


async def test_additional_connection_for_a_closed_link_is_closed() -> None:
    async with started(2, "tcp") as ranks:
        ranks[0].transport.connections = lambda host: MOST_CONNECTIONS
        near = await ranks[0].connect(ranks[1], ConnKind.DATA)
        assert near is not None
        near.close()
        await wait_until(lambda: not ranks[0].transport._background)
        assert not ranks[0].transport._links.has((1, ConnKind.DATA))


async def test_number_of_connections_per_link_is_limited() -> None:
    async with started(2, "tcp") as ranks:
        ends = await striped_ends(ranks, 2)
        ranks[0].transport._start("more", ranks[0].transport._add_connections, 1, dial_target(ranks), 20)
        await wait_until(lambda: not ranks[0].transport._background)
        assert [len(connections(ranks[r], 1 - r)) for r in range(2)] == [MOST_CONNECTIONS] * 2
        assert not any(end.closed for end in ends)


def dial_target(ranks: list[Rank]) -> Any:
    return ranks[0].transport._addresses.find(1, ranks[1].card)


# -- blocks


class Ends:
    """A stream over three connections, and the raw sockets at their other ends."""

    def __init__(self, kind: str = "unix") -> None:
        loop = asyncio.get_running_loop()
        pairs = [sockets(kind) for _ in range(3)]
        self.far = [far for _, far in pairs]
        first, *others = (PlainStream(loop, near) for near, _ in pairs)
        self.stream = StripedStream(loop, first)
        for each in others:
            self.stream.add(each)
        self.space = memoryview(bytearray(BLOCK * 4))

    def __enter__(self) -> Ends:
        return self

    def __exit__(self, *_: object) -> None:
        self.stream.close()
        for sock in self.far:
            sock.close()

    def send_block(self, connection: int, block: int, data: bytes, announced: int | None = None) -> None:
        length = len(data) if announced is None else announced
        self.far[connection].sendall(struct.pack("!QI", block, length) + data)

    def drain(self, connection: int) -> None:
        self.far[connection].setblocking(False)
        with suppress(BlockingIOError):
            while True:
                self.far[connection].recv(1 << 20)

    def receive(self) -> bytes:
        return bytes(self.space[: self.stream.receive_into(self.space)])


async def test_blocks_of_a_striped_stream_are_delivered_in_order() -> None:
    with Ends() as ends:
        for connection, block in ((2, 1), (2, 2), (1, 3)):
            ends.send_block(connection, block, b"%d" % block)
            with pytest.raises(BlockingIOError):
                ends.receive()
        ends.send_block(0, 0, b"0")
        assert ends.receive() == b"0123"


async def test_block_received_early_can_be_read_in_parts() -> None:
    """Read a part of an early block; the loop must call the reader again, although the sockets have no more data."""
    with Ends() as ends:
        ends.send_block(1, 1, bytes(range(100)), announced=200)
        with pytest.raises(BlockingIOError):
            ends.receive()
        ends.space = ends.space[:7]
        found = bytearray()
        done = asyncio.Event()

        def readable() -> None:
            try:
                found.extend(ends.receive())
            except BlockingIOError:
                return
            if len(found) == 201:
                done.set()

        ends.stream.start_reading(readable)
        ends.send_block(0, 0, b"x")
        ends.far[1].sendall(bytes(range(100, 200)))
        async with asyncio.timeout(20):
            await done.wait()
        assert found == b"x" + bytes(range(200))


async def test_early_blocks_of_a_striped_stream_are_kept_up_to_a_limit() -> None:
    """Check that blocks beyond the limit wait in the kernel, except the block that is due next."""
    with Ends() as ends:
        block = 1
        full = False
        while not full:
            ends.far[1].setblocking(False)
            try:
                ends.send_block(1, block, bytes(BLOCK))
            except BlockingIOError:
                full = True
            block += 1
            with pytest.raises(BlockingIOError):
                ends.receive()
        assert AHEAD <= ends.stream._ahead < AHEAD + BLOCK
        ends.send_block(0, 0, b"first")
        assert ends.receive()[:5] == b"first"


@pytest.mark.parametrize("length", [0, BLOCK + 1, (1 << 32) - 1])
async def test_striped_stream_refuses_a_block_of_another_length(length: int) -> None:
    with Ends() as ends:
        ends.send_block(0, 0, b"", announced=length)
        with pytest.raises(ProtocolError, match=f"received a block of {length} bytes"):
            ends.receive()


@pytest.mark.parametrize("block", [0, 2])
async def test_striped_stream_refuses_a_repeated_block(block: int) -> None:
    """Send a block again whose first copy has already been delivered, or waits for earlier blocks."""
    with Ends() as ends:
        ends.send_block(0, 0, b"0")
        ends.send_block(1, 2, b"2")
        assert ends.receive() == b"0"
        ends.send_block(2, block, b"x")
        with pytest.raises(ProtocolError, match=f"received block {block} twice"):
            ends.receive()


async def test_writable_callback_of_a_striped_stream_follows_the_connection_in_use() -> None:
    """Let the stream switch to another connection, which has more free space for the next blocks."""
    with Ends() as ends:
        calls = 0

        def send() -> None:
            nonlocal calls
            calls += 1
            with suppress(BlockingIOError):
                while True:
                    ends.stream.send(bytes(BLOCK))

        send()
        streams = [stripe.stream for stripe in ends.stream._stripes]
        first = streams.index(ends.stream._current.stream)
        ends.drain((first + 1) % 3)
        ends.stream.start_writing(send)
        written = {first}
        for _ in range(30):
            before = calls
            number = streams.index(ends.stream._current.stream)
            written.add(number)
            ends.drain(number)
            await wait_until(lambda before=before: calls > before)
        assert len(written) > 1


@pytest.mark.parametrize("sent", [b"\0", struct.pack("!QI", 0, 5), struct.pack("!QI", 7, 5) + b"four"])
async def test_end_of_a_connection_within_a_block_is_reported_as_a_loss(sent: bytes) -> None:
    with Ends() as ends:
        ends.far[0].sendall(sent)
        ends.far[0].close()
        with pytest.raises(ConnectionResetError, match="in the middle of a block"):
            ends.receive()


@pytest.mark.parametrize("lost", range(3))
async def test_connection_reset_is_reported_as_a_loss_after_all_earlier_data(lost: int) -> None:
    with Ends("tcp") as ends:
        ends.send_block((lost + 1) % 3, 0, b"before")
        ends.far[lost].setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        ends.far[lost].close()
        assert ends.receive() == b"before"
        with pytest.raises(ConnectionResetError):
            ends.receive()


async def test_striped_stream_ends_when_all_its_connections_have_ended() -> None:
    with Ends() as ends:
        for sock in ends.far[:2]:
            sock.shutdown(socket.SHUT_WR)
            with pytest.raises(BlockingIOError):
                ends.receive()
        ends.send_block(2, 0, b"last")
        ends.far[2].shutdown(socket.SHUT_WR)
        assert ends.receive() == b"last"
        assert ends.receive() == b""
