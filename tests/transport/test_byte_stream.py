"""The contract of byte streams, and checks that links, handshakes and heartbeats rely only on this contract."""

from __future__ import annotations

import asyncio
import random
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from aiocoll.engine.failure import watchdog
from aiocoll.engine.failure.watchdog import Watchdog
from aiocoll.security.tls import make_own_contexts
from aiocoll.transport.byte_stream import ByteStream, OpenStream, receive_message, send_message
from aiocoll.transport.stream.plain_stream import PlainStream, open_plain
from aiocoll.transport.stream.striped_stream import StripedStream
from aiocoll.transport.stream.tls_stream import open_tls

from ..internals import Limits
from .links import sockets
from .record_stream import SOME, RecordStream, open_records
from .test_stream import send_number, settle, started

STREAMS: dict[str, OpenStream] = {
    "plain": open_plain,
    "records": open_records,
    "tls": lambda loop, sock, dialled: open_tls(make_own_contexts(), loop, sock, dialled=dialled),
}
#: Kinds of streams over several connections, with the kind of stream of each connection.
STRIPED = {"striped": "plain", "striped records": "records", "striped tls": "tls"}
#: The number of connections in a striped stream.
STRIPES = 3
each_stream = pytest.mark.parametrize("kind", [*STREAMS, *STRIPED])


async def opened(kind: str) -> list[ByteStream]:
    """Return both ends of a connection as byte streams of kind `kind`."""
    loop = asyncio.get_running_loop()
    opening = (STREAMS[kind](loop, sock, dialled=bool(end)) for end, sock in enumerate(sockets("unix")))
    return await asyncio.gather(*opening)


def striped_pair(connections: Sequence[Sequence[ByteStream]]) -> list[StripedStream]:
    """Return both ends of a striped stream over the given connections."""
    ends = [StripedStream(asyncio.get_running_loop(), end) for end in connections[0]]
    for both in connections[1:]:
        for end, stream in zip(ends, both, strict=True):
            end.add(stream)
    return ends


@asynccontextmanager
async def stream_ends(kind: str) -> AsyncIterator[tuple[ByteStream, ByteStream]]:
    ends: Sequence[ByteStream]
    if kind in STRIPED:
        ends = striped_pair([await opened(STRIPED[kind]) for _ in range(STRIPES)])
    else:
        ends = await opened(kind)
    try:
        yield ends[0], ends[1]
    finally:
        for end in ends:
            end.close()


def random_bytes(nbytes: int) -> bytes:
    return np.random.default_rng(1).integers(0, 256, nbytes, np.uint8).tobytes()


class Reader:
    """A reader of a stream that receives at most `most` bytes per callback until the stream ends."""

    def __init__(self, stream: ByteStream, most: int = 1 << 20) -> None:
        self.received = bytearray()
        self.calls = 0
        self._stream = stream
        self._space = memoryview(bytearray(most))
        self._changed = asyncio.Event()
        self._ended = False
        stream.start_reading(self._read)

    def _read(self) -> None:
        self.calls += 1
        try:
            nbytes = self._stream.receive_into(self._space)
        except BlockingIOError:
            return
        self.received += self._space[:nbytes]
        self._changed.set()
        if not nbytes:
            self._stream.stop_reading()
            self._ended = True

    async def wait_for(self, nbytes: int) -> None:
        async with asyncio.timeout(20):
            while len(self.received) < nbytes and not self._ended:
                self._changed.clear()
                await self._changed.wait()

    async def all(self) -> bytes:
        await self.wait_for(1 << 40)
        return bytes(self.received)


def fill(stream: ByteStream, message: bytes) -> int:
    """Send parts of `message` until the stream accepts no more data; return the number of accepted bytes."""
    sent = 0
    with suppress(BlockingIOError):
        while sent < len(message):
            sent += stream.send(memoryview(message)[sent:])
    return sent


async def write(stream: ByteStream, message: bytes, parts: Callable[[memoryview], list[memoryview]]) -> list[int]:
    """Send all of `message` from writable callbacks; return the number of bytes that each call accepted."""
    rest, done, taken = memoryview(message), asyncio.Event(), []

    def writable() -> None:
        nonlocal rest
        try:
            taken.append(stream.send_parts(parts(rest)))
        except BlockingIOError:
            return
        rest = rest[taken[-1] :]
        if not rest:
            stream.stop_writing()
            done.set()

    stream.start_writing(writable)
    async with asyncio.timeout(20):
        await done.wait()
    return taken


@each_stream
async def test_receive_without_data_raises_blocking_io_error(kind: str) -> None:
    async with stream_ends(kind) as (near, _):
        with pytest.raises(BlockingIOError):
            near.receive_into(memoryview(bytearray(10)))


@each_stream
async def test_slow_reader_stops_the_sender_without_loss(kind: str) -> None:
    message = random_bytes(1 << 20)
    async with stream_ends(kind) as (near, far):
        sent = fill(near, message)
        assert 0 < sent < len(message)
        reader = Reader(far, 5000)
        await write(near, message[sent:], lambda rest: [rest])
        near.shutdown()
        assert await reader.all() == message


@each_stream
@pytest.mark.parametrize(("nbytes", "most"), [(3000, 1), (20_000, 100), (1 << 20, 1 << 18)])
async def test_large_data_is_sent_in_both_directions_at_once(kind: str, nbytes: int, most: int) -> None:
    message = [random_bytes(nbytes)[:: 1 - 2 * end] for end in range(2)]
    chance = random.Random(1)

    def parts(rest: memoryview) -> list[memoryview]:
        cuts = [0, *sorted(chance.randrange(len(rest) + 1) for _ in range(3)), len(rest)]
        return [rest[start:stop] for start, stop in pairwise(cuts)]

    async with stream_ends(kind) as ends:
        readers = [Reader(end, most) for end in ends]
        taken = await asyncio.gather(*(write(end, each, parts) for end, each in zip(ends, message, strict=True)))
        for end in ends:
            end.shutdown()
        assert [await reader.all() for reader in readers] == message[::-1]
    if most > 100:
        assert all(len(each) > 1 for each in taken)


@each_stream
async def test_readable_callback_is_called_until_all_data_is_received(kind: str) -> None:
    """Pause reading while the stream still has data; a second reader must get all of it."""
    async with stream_ends(kind) as (near, far):
        near.send(random_bytes(900))
        reader = Reader(far, 10)
        await reader.wait_for(30)
        far.stop_reading()
        calls = reader.calls
        for _ in range(5):
            await asyncio.sleep(0)
        assert reader.calls == calls
        near.shutdown()
        rest = Reader(far, 2 * SOME)
        assert bytes(reader.received) + await rest.all() == random_bytes(900)


@each_stream
async def test_stream_continues_to_send_after_the_peer_has_stopped_sending(kind: str) -> None:
    async with stream_ends(kind) as (near, far):
        near.send(b"question")
        near.shutdown()
        assert await Reader(far).all() == b"question"
        far.send(b"answer")
        far.shutdown()
        assert await Reader(near).all() == b"answer"


@each_stream
async def test_closed_stream_ends_its_peer_and_runs_no_callback(kind: str) -> None:
    async with stream_ends(kind) as (near, far):
        near.start_reading(lambda: pytest.fail("closed"))
        near.start_writing(lambda: pytest.fail("closed"))
        near.close()
        near.close()
        assert near.sock.fileno() == -1
        assert await Reader(far).all() == b""
        with pytest.raises(ConnectionError):
            fill(far, bytes(1 << 20))


@each_stream
async def test_handshake_message_can_arrive_in_pieces(kind: str) -> None:
    async with stream_ends(kind) as (near, far):
        reading = asyncio.create_task(receive_message(far, 300))
        for piece in range(30):
            await write(near, bytes([piece]) * 10, lambda rest: [rest])
        assert await reading == b"".join(bytes([piece]) * 10 for piece in range(30))
        near.send(b"not all")
        near.shutdown()
        with pytest.raises(ConnectionResetError, match="during the handshake"):
            await receive_message(far, 300)


@each_stream
async def test_handshake_message_without_buffer_space_raises_blocking_io_error(kind: str) -> None:
    async with stream_ends(kind) as (near, _):
        fill(near, bytes(1 << 20))
        with pytest.raises(BlockingIOError):
            send_message(near, b"one more")


async def test_plain_byte_streams_call_socket_methods_directly() -> None:
    near, far = socket.socketpair()
    with near, far:
        stream = await open_plain(asyncio.get_running_loop(), near, dialled=True)
        assert [stream.send, stream.send_parts, stream.receive_into] == [near.send, near.sendmsg, near.recv_into]


@pytest.mark.parametrize("flavour", ["unix", "tcp"])
async def test_transport_sends_and_receives_only_through_its_byte_streams(flavour: str) -> None:
    """Use a stream of records, with which handshakes, frames and heartbeats that bypass the stream would fail."""
    opened: list[bool] = []

    async def opening(loop: asyncio.AbstractEventLoop, sock: socket.socket, *, dialled: bool) -> RecordStream:
        opened.append(dialled)
        return await open_records(loop, sock, dialled=dialled)

    async with started(2, flavour, open_stream=opening) as (one, other):
        link = await one.connect(other)
        assert link is not None
        await other.until(lambda: other.accepted)
        for number in range(100):
            send_number(link, number)
            send_number(other.accepted[0], number)
        await one.until(lambda: len(one.received) == 100)
        await other.until(lambda: len(other.received) == 100)
        assert one.received == [(1, number) for number in range(100)]
        accepted: asyncio.Queue[tuple[int, ByteStream]] = asyncio.Queue()
        one.transport.heartbeat_accepted = lambda *given: accepted.put_nowait(given)
        heartbeat = await other.transport.connect_heartbeat(0, one.card)
        assert heartbeat is not None
        rank, accepted_heartbeat = await accepted.get()
        assert (rank, type(accepted_heartbeat)) == (1, RecordStream)
        heartbeat.send(b"\0")
        accepted_heartbeat.send(b"\0")
        assert await receive_message(heartbeat, 1) == await receive_message(accepted_heartbeat, 1) == b"\0"
        heartbeat.close()
        accepted_heartbeat.close()
        assert sorted(opened) == [False, False, True, True]


async def test_connection_whose_stream_fails_to_open_is_dialled_again() -> None:
    """Let the stream of an accepted connection fail to open; the dialling rank must dial once more."""
    failing = [True]

    async def opening(loop: asyncio.AbstractEventLoop, sock: socket.socket, *, dialled: bool) -> PlainStream:
        if not dialled and failing:
            failing.clear()
            sock.close()
            raise ConnectionResetError("no certificate")
        return await open_plain(loop, sock, dialled=dialled)

    async with started(2, "tcp", open_stream=opening) as (one, other):
        assert await one.connect(other) is not None
        await settle(one, other)
        assert len(other.accepted) == 1
    assert not failing


@each_stream
async def test_watchdogs_exchange_heartbeats_through_any_kind_of_byte_stream(kind: str, limits: Limits) -> None:
    """Check that heartbeats arrive while the event loop is blocked, since watchdog threads exchange them."""
    limits(
        watchdog_interval=watchdog.ROUND / 20,
        unreachable_after=watchdog.UNREACHABLE_AFTER / 20,
        blocked_after=watchdog.BLOCKED_AFTER / 20,
    )
    lost: list[Any] = []
    loop = asyncio.get_running_loop()
    watchdogs = [
        Watchdog(rank, loop, time.perf_counter, {}.__getitem__, lambda *received: lost.append(received), lost.append)
        for rank in range(2)
    ]
    async with stream_ends(kind) as ends:
        for each, end in zip(watchdogs, ends, strict=True):
            each.start()
            each.add_heartbeat(7, end)
        time.sleep(2 * watchdog.UNREACHABLE_AFTER)  # noqa: ASYNC251 - blocks the loop on purpose
        await asyncio.sleep(0)
        silences = [each.silence(7) for each in watchdogs]
        for each in watchdogs:
            each.stop()
    assert all(silence is not None and silence < watchdog.UNREACHABLE_AFTER for silence in silences)
    assert not lost
    assert not [thread for thread in threading.enumerate() if "aiocoll" in thread.name]


@each_stream
async def test_readable_callback_reports_data_left_by_a_receive_outside_the_loop(kind: str) -> None:
    """Receive a part of the data outside of the callback, as a polling await does before it suspends."""
    async with stream_ends(kind) as (near, far):
        rest, received = bytearray(), asyncio.Event()

        def readable() -> None:
            space = memoryview(bytearray(1000))
            with suppress(BlockingIOError):
                rest.extend(space[: near.receive_into(space)])
            received.set()

        near.start_reading(readable)
        await asyncio.sleep(0)
        assert far.send(b"x" * 100) == 100
        first = memoryview(bytearray(10))
        got = 0
        while not got:
            with suppress(BlockingIOError):
                got = near.receive_into(first)
        async with asyncio.timeout(10):
            while got + len(rest) < 100:
                received.clear()
                await received.wait()
