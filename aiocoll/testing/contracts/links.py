"""The contract of links and transports: tests of the behaviour that the engine requires."""

from __future__ import annotations

import asyncio
import random
import socket
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import numpy as np
import pytest

from aiocoll.errors import ProtocolError
from aiocoll.group.process_group import ProcessGroup
from aiocoll.options import GroupOptions
from aiocoll.runtime import Runtime
from aiocoll.testing.ranks import run_ranks
from aiocoll.transport.base import Link
from aiocoll.transport.frame import HEADER, HEADER_SIZE, SEGMENT, FrameKind, Header
from aiocoll.transport.registry import CarrierRequest, find_transport
from aiocoll.transport.stream.plain_stream import PlainStream

__all__ = ["LinkContract", "Linked", "MakeLinks", "Recorder", "TransportContract", "frame", "payload"]

#: A function that makes both ends of a link, without starting them.
MakeLinks = Callable[[], Awaitable[Sequence[Any]]]
#: A context manager that makes both ends of a link, each with a `Recorder`, and closes them at its end.
Linked = Callable[[], AbstractAsyncContextManager[tuple[Any, Any]]]

#: Payload sizes at, below and above each size at which links change to another code path.
_SIZES = sorted(
    {0, 1, 2, 31, 32, 33, 1000, SEGMENT - 1, SEGMENT}
    | {edge + around for edge in (16 * 1024, 64 * 1024, 64 * 1024 - HEADER_SIZE) for around in (-1, 0, 1)}
)


def payload(op: int, nbytes: int) -> bytes:
    """Return `nbytes` bytes of test data that differ between operation numbers `op`."""
    return np.arange(op, op + nbytes, dtype="uint32").astype("uint8").tobytes()


class Recorder:
    """A link's sink that records frames as `(op, payload)`. `place(header)` may return memory for the payload."""

    def __init__(self, place: Callable[[Header], memoryview | None] | None = None) -> None:
        self.frames: list[tuple[int, bytes]] = []
        self.headers: list[Header] = []
        self.losses: list[Exception | None] = []
        self.withdrawals: list[Header] = []
        self.drains = 0
        self.routed = 0
        self.place = place
        self.error: Exception | None = None
        self._given: memoryview | None = None
        self._changed = asyncio.Event()

    def route(self, link: Link, header: Header) -> memoryview | None:
        self.routed += 1
        self._given = None if self.place is None else self.place(header)
        return self._given

    def deliver(self, link: Link, header: Header, payload: memoryview | None) -> None:
        if self.error is not None:
            raise self.error
        if payload is None:
            assert self._given is not None
            payload = self._given
        self._given = None
        assert payload.nbytes == header[7]
        self.headers.append(header)
        self.frames.append((header[4], bytes(payload)))
        self._changed.set()

    def withdrawn(self, link: Link, header: Header) -> None:
        self.withdrawals.append(header)

    def drained(self, link: Link) -> None:
        self.drains += 1
        self._changed.set()

    def lost(self, link: Link, error: Exception | None) -> None:
        self.losses.append(error)
        self._changed.set()

    async def until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(20):
            while not condition():
                self._changed.clear()
                await self._changed.wait()

    async def frames_are(self, count: int) -> None:
        await self.until(lambda: len(self.frames) >= count)


def frame(op: int, payload: bytes = b"", kind: int = FrameKind.DATA) -> tuple[bytes, memoryview | None]:
    """Return the arguments of ``Link.write`` for a frame of operation `op`."""
    header = HEADER.pack(kind, 0, 0, 7, op, 0, 0, len(payload), len(payload))
    return header, memoryview(payload) if payload else None


class LinkContract:
    """Tests that every link must pass.

    A subclass defines the fixture `make_links`, which returns an async function that makes both ends of a link.
    """

    @pytest.fixture
    def copies_frames(self) -> bool:
        """Return whether a link accepts any number of frames that are not read, as a link in memory does."""
        return False

    @pytest.fixture
    def linked(self, make_links: MakeLinks) -> Linked:
        """Return a context manager that makes both ends of a link, and closes them at its end."""

        @asynccontextmanager
        async def linked() -> AsyncIterator[tuple[Any, Any]]:
            near, far = ends = await make_links()
            for end in ends:
                end.sink = Recorder()
            try:
                yield near, far
            finally:
                for end in ends:
                    end.close()
                for _ in range(3):
                    await asyncio.sleep(0)

        return linked

    @pytest.mark.parametrize("routed", ["nowhere", "to a place", "now and then"])
    async def test_frames_of_any_size_arrive_whole_and_in_order(self, linked: Linked, routed: str) -> None:
        chance = random.Random(1)
        room = memoryview(bytearray(SEGMENT))

        def place(header: Header) -> memoryview | None:
            wanted = {"nowhere": False, "to a place": True, "now and then": chance.random() < 0.5}[routed]
            return room[: header[7]] if wanted else None

        async with linked() as (near, far):
            sizes = _SIZES * 4
            chance.shuffle(sizes)
            far.sink = Recorder(place)
            near.start()
            far.start()
            for op, nbytes in enumerate(sizes):
                near.write(*frame(op, payload(op, nbytes)))
            await far.sink.frames_are(len(sizes))
            assert far.sink.frames == [(op, payload(op, nbytes)) for op, nbytes in enumerate(sizes)]

    async def test_thousands_of_small_frames_both_ways(self, linked: Linked) -> None:
        count = 5000
        async with linked() as (near, far):
            near.start()
            far.start()
            for op in range(count):
                near.write(*frame(op, payload(op, op % 9)))
                far.write(*frame(op, payload(op + 1, op % 7)))
            await far.sink.frames_are(count)
            await near.sink.frames_are(count)
            assert far.sink.frames == [(op, payload(op, op % 9)) for op in range(count)]
            assert near.sink.frames == [(op, payload(op + 1, op % 7)) for op in range(count)]

    async def test_headers_travel_unchanged(self, linked: Linked) -> None:
        given = (FrameKind.GRANT, 1, 0xFFFF, 0xFFFFFFFF, (1 << 64) - 1, 0xFFFFFFFE, 0xFFFFFFFD, 0, 0xFFFFFFFC)
        async with linked() as (near, far):
            near.start()
            far.start()
            assert near.write(HEADER.pack(*given))
            await far.sink.frames_are(1)
            assert far.sink.headers == [given]

    async def test_nothing_is_handed_out_before_the_start(self, linked: Linked) -> None:
        async with linked() as (near, far):
            near.start()
            near.write(*frame(1, b"early"))
            for _ in range(5):
                await asyncio.sleep(0)
            first = far.sink
            far.sink = Recorder()
            far.start()
            await far.sink.frames_are(1)
            assert far.sink.frames == [(1, b"early")]
            assert first.frames == []

    async def test_memory_that_was_handed_over_may_be_overwritten(self, linked: Linked) -> None:
        async with linked() as (near, far):
            near.start()
            data = bytearray(b"before")
            assert near.write(frame(1, bytes(6))[0], memoryview(data))
            data[:] = b"after!"
            far.start()
            await far.sink.frames_are(1)
            assert far.sink.frames == [(1, b"before")]

    async def test_a_peer_that_does_not_read_holds_frames_back_and_loses_none(
        self, linked: Linked, copies_frames: bool
    ) -> None:
        async with linked() as (near, far):
            near.start()
            assert near.writable
            data = [payload(op, SEGMENT) for op in range(40)]
            whole = [near.write(*frame(op, each)) for op, each in enumerate(data)]
            assert near.writable == all(whole)
            # Frames must stay in order: after one frame had to be queued, all later frames must be queued as well.
            assert whole == sorted(whole, reverse=True)
            if not copies_frames:
                assert Counter(whole)[False] > 10
            assert near.sink.drains == 0
            far.start()
            await far.sink.frames_are(len(data))
            assert far.sink.frames == list(enumerate(data))
            assert near.sink.drains == (not all(whole))
            assert near.writable
            assert near.write(*frame(99, b"again"))
            await far.sink.frames_are(len(data) + 1)
            assert far.sink.frames[-1] == (99, b"again")

    async def test_polling_moves_what_can_be_moved(self, linked: Linked, copies_frames: bool) -> None:
        async with linked() as (near, far):
            near.start()
            far.start()
            assert not far.poll()
            near.write(*frame(1, b"x"))
            if copies_frames:
                await asyncio.sleep(0)
                assert far.sink.frames == [(1, b"x")]
            else:
                while not far.poll():
                    pass
                assert far.sink.frames == [(1, b"x")]
            assert not far.poll()

    async def test_both_ends_finish_in_order(self, linked: Linked) -> None:
        async with linked() as (near, far):
            near.start()
            data = [payload(op, SEGMENT) for op in range(10)]
            for op, each in enumerate(data):
                near.write(*frame(op, each))
            near.finish()
            assert near.write(*frame(99, b"too late"))
            far.start()
            await far.sink.until(lambda: far.sink.losses)
            assert far.sink.frames == list(enumerate(data))
            await near.sink.until(lambda: near.sink.losses)
            for _ in range(5):
                await asyncio.sleep(0)
            assert far.sink.losses == near.sink.losses == [None]

    async def test_both_ends_finish_at_once(self, linked: Linked) -> None:
        async with linked() as (near, far):
            near.start()
            far.start()
            near.finish()
            far.finish()
            await far.sink.until(lambda: far.sink.losses)
            await near.sink.until(lambda: near.sink.losses)
            for _ in range(5):
                await asyncio.sleep(0)
            assert far.sink.losses == near.sink.losses == [None]

    async def test_closing_is_noticed_once_and_by_the_other_end_only(self, linked: Linked) -> None:
        async with linked() as (near, far):
            near.start()
            far.start()
            near.close()
            near.close()
            await far.sink.until(lambda: far.sink.losses)
            far.write(*frame(1, b"into nothing"))
            for _ in range(5):
                await asyncio.sleep(0)
            assert len(far.sink.losses) == 1
            assert near.sink.losses == []
            assert near.write(*frame(2, b"from nowhere"))
            near.finish()
            assert not near.poll()
            far.close()
            assert far.sink.frames == []

    @pytest.mark.parametrize("error", [ProtocolError, KeyError, MemoryError, RecursionError])
    async def test_frame_that_the_sink_refuses_is_delivered_once_and_the_peer_gets_the_error(
        self, linked: Linked, error: type[Exception]
    ) -> None:
        """The peer receives the error of the sink after all frames in flight, and before the end of the link."""
        async with linked() as (near, far):
            near.start()
            far.start()
            raised = error("nonsense")
            given: list[int] = []
            deliver = far.sink.deliver

            def refuse(link: object, header: Header, payload: memoryview | None) -> None:
                deliver(far, header, payload)
                given.append(header[4])
                raise raised

            far.sink.deliver = refuse
            data = bytes(SEGMENT)
            for op in range(20):
                far.write(*frame(op, data))
            for op in range(3):
                near.write(*frame(op, b"x"))
            await far.sink.until(lambda: far.sink.losses)
            near.write(*frame(3, data))
            far.write(*frame(20, b"why"))
            far.finish()
            await near.sink.until(lambda: near.sink.losses)
            assert far.sink.losses == [raised]
            assert near.sink.losses == [None]
            assert given == [0]
            assert near.sink.frames == [*((op, data) for op in range(20)), (20, b"why")]
            for _ in range(5):
                await asyncio.sleep(0)
            far.close()
            assert len(far.sink.losses) == 1

    async def test_closing_while_a_frame_is_handed_out_stops_there(self, linked: Linked) -> None:
        async with linked() as (near, far):
            near.start()
            near.write(*frame(1, b"first"))
            near.write(*frame(2, b"second"))
            sink = far.sink
            deliver = sink.deliver

            def close(link: object, header: Header, data: memoryview | None) -> None:
                deliver(far, header, data)
                far.close()

            sink.deliver = close
            far.start()
            await near.sink.until(lambda: near.sink.losses)
            assert sink.frames == [(1, b"first")]
            assert sink.losses == []


class TransportContract(LinkContract):
    """Tests that every transport with a carrier must pass.

    A subclass defines the fixture `transport`, which returns the name of the transport.
    """

    @pytest.fixture
    async def make_links(self, transport: str) -> AsyncIterator[MakeLinks]:
        """Yield a function that makes a link between the carriers of two ranks."""
        runtime = Runtime.of(asyncio.get_running_loop())
        make = find_transport(transport).make_carrier
        assert make is not None, f"{transport} has no carrier"
        carriers = [make(CarrierRequest(runtime, rank, 2)) for rank in range(2)]

        async def make_links() -> Sequence[Any]:
            pair = socket.socketpair()
            for each in pair:
                each.setblocking(False)
            streams = [PlainStream(runtime.loop, each) for each in pair]
            opening = (
                carrier.open(stream, 1 - rank, dialled=rank == 0)
                for rank, (carrier, stream) in enumerate(zip(carriers, streams, strict=True))
            )
            links = await asyncio.gather(*opening)
            assert None not in links, f"the carriers of {transport} do not reach each other"
            return links

        yield make_links
        for carrier in carriers:
            carrier.close()
            carrier.close()

    async def test_a_link_that_fails_reports_the_error_once(self, linked: Linked) -> None:
        async with linked() as (near, far):
            near.start()
            far.start()
            error = ConnectionResetError("a test")
            assert not near.closed
            near.fail(error)
            near.fail(error)
            assert near.closed
            await far.sink.until(lambda: far.sink.losses)
            assert near.sink.losses == [error]
            assert far.closed

    @pytest.mark.parametrize("size", [2, 3])
    async def test_a_group_uses_it_for_data(self, transport: str, size: int) -> None:
        async def main(pg: ProcessGroup) -> set[str]:
            carriers = _Carriers()
            pg.add_hook(carriers)
            for count in (1, 1000, 300_000):
                total = await pg.allreduce(np.full(count, pg.rank() + 1))
                assert (total == size * (size + 1) // 2).all()
            assert await pg.allgather_object(pg.rank()) == list(range(size))
            return carriers.found

        found = await run_ranks(size, main, options=GroupOptions(transport=transport))
        assert len(set.union(*found)) == 1, found
        assert not set.union(*found) & {"", "memory", "shm", "unix", "tcp"}, found


class _Carriers:
    """A hook that collects the names of the carriers that a group's operations use."""

    def __init__(self) -> None:
        self.found: set[str] = set()

    def on_end(self, info: Any) -> None:
        self.found.add(info.transport)
