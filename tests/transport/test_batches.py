"""Batches of small frames: a single frame is sent at once, and frames in quick succession share a system call."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from aiocoll.runtime import Runtime
from aiocoll.security.handshake import ConnKind
from aiocoll.testing.contracts.links import payload
from aiocoll.transport.buffer_pool import BufferPool
from aiocoll.transport.frame import HEADER_SIZE, SEGMENT
from aiocoll.transport.stream.link import BATCH, CLOSELY, GATHER, JOIN, StreamLink
from aiocoll.transport.stream.plain_stream import PlainStream

from .links import Recorder, frame, linked, sockets

pytestmark = pytest.mark.parametrize("kind", ["unix", "tcp"])


class CountingSocket(socket.socket):
    """A socket that records the number of bytes of each sending system call."""

    calls: list[int]

    def send(self, data: Any, flags: int = 0) -> int:
        self.calls.append(super().send(data, flags))
        return self.calls[-1]

    def sendmsg(self, buffers: Any, *rest: Any) -> int:
        self.calls.append(super().sendmsg(buffers, *rest))
        return self.calls[-1]


class ManualClock(Runtime):
    """A runtime whose clock shows the time that the test sets."""

    def __init__(self) -> None:
        super().__init__(asyncio.get_running_loop())
        self.now = 1.0
        self.ticks = lambda: self.now


class Ends:
    """Both ends of a link with one clock; the system calls of the near end are counted."""

    def __init__(self, kind: str) -> None:
        self.clock = ManualClock()
        near, far = sockets(kind)
        counting = CountingSocket(fileno=near.detach())
        self.calls = counting.calls = []
        self.near = StreamLink(self.clock, PlainStream(self.clock.loop, counting), 1, ConnKind.DATA, BufferPool())
        self.far = StreamLink(self.clock, PlainStream(self.clock.loop, far), 0, ConnKind.DATA, BufferPool())
        self.near.sink = Recorder()
        self.sink = self.far.sink = Recorder()
        self.written: list[tuple[int, bytes]] = []

    def write(self, *sizes: int) -> None:
        """Write frames with these payload sizes; assert that the link accepts all frames."""
        for nbytes in sizes:
            op = len(self.written)
            self.written.append((op, payload(op, nbytes)))
            assert self.near.write(*frame(op, payload(op, nbytes)))

    async def wait_for_arrival(self) -> None:
        """Wait until all written frames have arrived in order."""
        self.far.start()
        await self.sink.frames_are(len(self.written))
        assert self.sink.frames == self.written


@asynccontextmanager
async def counted_ends(kind: str) -> AsyncIterator[Ends]:
    ends = Ends(kind)
    try:
        yield ends
    finally:
        ends.near.close()
        ends.far.close()


async def loop_iteration() -> None:
    await asyncio.sleep(0)


async def test_64_small_frames_of_one_loop_iteration_are_sent_in_two_system_calls(kind: str) -> None:
    async with counted_ends(kind) as ends:
        ends.write(*[64] * 64)
        assert ends.calls == [HEADER_SIZE + 64], "the first frame was not sent alone, or the others were not batched"
        await loop_iteration()
        assert ends.calls == [HEADER_SIZE + 64, 63 * (HEADER_SIZE + 64)]
        await loop_iteration()
        assert len(ends.calls) == 2
        await ends.wait_for_arrival()


async def test_first_frame_is_sent_at_once(kind: str) -> None:
    async with counted_ends(kind) as ends:
        ends.write(8)
        assert ends.far.poll()
        assert ends.sink.frames == ends.written


async def test_next_frame_after_a_poll_is_sent_at_once(kind: str) -> None:
    async with counted_ends(kind) as ends:
        for number in range(1, 10):
            ends.write(number)
            assert len(ends.calls) == number
            ends.near.poll()
        await ends.wait_for_arrival()


async def test_poll_of_a_link_sends_batched_frames(kind: str) -> None:
    async with counted_ends(kind) as ends:
        ends.write(0, 1, 2, GATHER)
        assert ends.calls == [HEADER_SIZE]
        ends.near.poll()
        assert ends.calls[1:] == [3 * HEADER_SIZE + 1 + 2 + GATHER]
        await loop_iteration()
        assert len(ends.calls) == 2
        await ends.wait_for_arrival()


async def test_end_of_an_await_sends_batched_frames(kind: str) -> None:
    async with counted_ends(kind) as ends:
        ends.write(1, 1, 1)
        ends.clock.settle()
        assert len(ends.calls) == 2
        ends.write(1)
        ends.clock.settle()
        assert len(ends.calls) == 3
        await loop_iteration()
        assert len(ends.calls) == 3
        await ends.wait_for_arrival()


async def test_frame_after_a_pause_is_not_added_to_an_earlier_batch(kind: str) -> None:
    async with counted_ends(kind) as ends:
        for number in range(1, 5):
            ends.write(1)
            assert len(ends.calls) == number
            ends.clock.now += 1.01 * CLOSELY
        ends.write(1)
        ends.clock.now += 0.99 * CLOSELY
        ends.write(1)
        ends.clock.now += 10 * CLOSELY
        ends.write(1)
        assert len(ends.calls) == 5, "a frame overtook the batch"
        await loop_iteration()
        assert len(ends.calls) == 6
        await ends.wait_for_arrival()


async def test_full_batch_of_frames_is_sent_at_once(kind: str) -> None:
    each = 1000
    count = BATCH // each + 2
    async with counted_ends(kind) as ends:
        ends.write(*[each - HEADER_SIZE] * (count + 1))
        assert ends.calls[0] == each
        assert len(ends.calls) == 2
        assert BATCH <= ends.calls[1] < BATCH + each
        await loop_iteration()
        assert len(ends.calls) == 3
        assert sum(ends.calls) == (count + 1) * each
        await ends.wait_for_arrival()


@pytest.mark.parametrize("nbytes", [GATHER + 1, JOIN, JOIN + 1, SEGMENT // 2])
async def test_large_frame_is_sent_together_with_batched_frames(kind: str, nbytes: int) -> None:
    async with counted_ends(kind) as ends:
        ends.write(1, 2, 3, nbytes)
        assert ends.calls == [HEADER_SIZE + 1, 3 * HEADER_SIZE + 2 + 3 + nbytes]
        ends.write(4)
        await loop_iteration()
        await ends.wait_for_arrival()


async def test_payload_of_a_batched_frame_can_be_overwritten_at_once(kind: str) -> None:
    data = bytearray(b"before")
    async with counted_ends(kind) as ends:
        ends.write(1)
        assert ends.near.write(frame(1, bytes(6))[0], memoryview(data))
        data[:] = b"after!"
        ends.written.append((1, b"before"))
        await ends.wait_for_arrival()


@pytest.mark.parametrize("how", ["finish", "close"])
async def test_batched_frames_are_sent_when_the_link_ends(kind: str, how: str) -> None:
    async with counted_ends(kind) as ends:
        ends.write(1, 2, 3)
        getattr(ends.near, how)()
        await ends.wait_for_arrival()
        await ends.sink.until(lambda: ends.sink.losses)
        await loop_iteration()
        assert len(ends.calls) == 2


async def test_batched_frames_beyond_the_socket_buffer_are_kept_and_reported(kind: str) -> None:
    async with linked(kind) as (near, far):
        near.start()
        written: list[tuple[int, bytes]] = []
        near.write(*frame(0))
        while near.writable:  # the link accepts frames into the kernel buffer and the batch
            op = len(written)
            written.append((op + 1, payload(op, 700)))
            assert near.write(*frame(op + 1, payload(op, 700)))
        last = len(written) + 1
        assert not near.write(*frame(last, b"kept"))
        assert near.sink.drains == 0
        far.start()
        await far.sink.frames_are(last + 1)
        assert far.sink.frames == [(0, b""), *written, (last, b"kept")]
        assert (near.sink.drains, near.writable) == (1, True)


async def test_link_that_breaks_with_a_batch_is_reported_lost_once(kind: str) -> None:
    async with counted_ends(kind) as ends:
        ends.near.start()
        ends.write(1, 2, 3)
        ends.far.close()
        await ends.near.sink.until(lambda: ends.near.sink.losses)
        await loop_iteration()
        assert len(ends.near.sink.losses) == 1
