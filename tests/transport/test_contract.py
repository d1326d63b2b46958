"""What every link owes the engine, whatever carries it."""

from __future__ import annotations

import asyncio
import random
from collections import Counter

import numpy as np
import pytest

from aiocoll.errors import ProtocolError
from aiocoll.transport.frame import HEADER_SIZE, SEGMENT, FrameKind, Header

from .links import KINDS, Recorder, frame, linked

pytestmark = pytest.mark.parametrize("kind", KINDS)

#: Around every size at which a link changes its ways.
SIZES = sorted(
    {0, 1, 2, 31, 32, 33, 1000, SEGMENT - 1, SEGMENT}
    | {edge + around for edge in (16 * 1024, 64 * 1024, 64 * 1024 - HEADER_SIZE) for around in (-1, 0, 1)}
)


def payload(op: int, nbytes: int) -> bytes:
    return np.arange(op, op + nbytes, dtype="uint32").astype("uint8").tobytes()


@pytest.mark.parametrize("routed", ["nowhere", "to a place", "now and then"])
async def test_frames_of_any_size_arrive_whole_and_in_order(kind: str, routed: str) -> None:
    chance = random.Random(1)
    room = memoryview(bytearray(SEGMENT))

    def place(header: Header) -> memoryview | None:
        wanted = {"nowhere": False, "to a place": True, "now and then": chance.random() < 0.5}[routed]
        return room[: header[7]] if wanted else None

    async with linked(kind) as (near, far):
        sizes = SIZES * 4
        chance.shuffle(sizes)
        far.sink = Recorder(place)
        near.start()
        far.start()
        for op, nbytes in enumerate(sizes):
            near.write(*frame(op, payload(op, nbytes)))
        await far.sink.frames_are(len(sizes))
        assert far.sink.frames == [(op, payload(op, nbytes)) for op, nbytes in enumerate(sizes)]


async def test_thousands_of_small_frames_both_ways(kind: str) -> None:
    count = 5000
    async with linked(kind) as (near, far):
        near.start()
        far.start()
        for op in range(count):
            near.write(*frame(op, payload(op, op % 9)))
            far.write(*frame(op, payload(op + 1, op % 7)))
        await far.sink.frames_are(count)
        await near.sink.frames_are(count)
        assert far.sink.frames == [(op, payload(op, op % 9)) for op in range(count)]
        assert near.sink.frames == [(op, payload(op + 1, op % 7)) for op in range(count)]


async def test_headers_travel_unchanged(kind: str) -> None:
    from aiocoll.transport.frame import HEADER

    given = (FrameKind.GRANT, 1, 0xFFFF, 0xFFFFFFFF, (1 << 64) - 1, 0xFFFFFFFE, 0xFFFFFFFD, 0, 0xFFFFFFFC)
    async with linked(kind) as (near, far):
        near.start()
        far.start()
        assert near.write(HEADER.pack(*given))
        await far.sink.frames_are(1)
        assert far.sink.headers == [given]


async def test_nothing_is_handed_out_before_the_start(kind: str) -> None:
    async with linked(kind) as (near, far):
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


async def test_memory_that_was_handed_over_may_be_overwritten(kind: str) -> None:
    async with linked(kind) as (near, far):
        near.start()
        data = bytearray(b"before")
        assert near.write(frame(1, bytes(6))[0], memoryview(data))
        data[:] = b"after!"
        far.start()
        await far.sink.frames_are(1)
        assert far.sink.frames == [(1, b"before")]


async def test_a_peer_that_does_not_read_holds_frames_back_and_loses_none(kind: str) -> None:
    async with linked(kind) as (near, far):
        near.start()
        assert near.writable
        data = [payload(op, SEGMENT) for op in range(40)]
        whole = [near.write(*frame(op, each)) for op, each in enumerate(data)]
        assert near.writable == all(whole)
        # Once one was kept, so are all behind it.
        assert whole == sorted(whole, reverse=True)
        if kind != "memory":
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


async def test_polling_moves_what_can_be_moved(kind: str) -> None:
    async with linked(kind) as (near, far):
        near.start()
        far.start()
        assert not far.poll()
        near.write(*frame(1, b"x"))
        if kind == "memory":
            await asyncio.sleep(0)
            assert far.sink.frames == [(1, b"x")]
        else:
            while not far.poll():
                pass
            assert far.sink.frames == [(1, b"x")]
        assert not far.poll()


async def test_both_ends_finish_in_order(kind: str) -> None:
    async with linked(kind) as (near, far):
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


async def test_both_ends_finish_at_once(kind: str) -> None:
    async with linked(kind) as (near, far):
        near.start()
        far.start()
        near.finish()
        far.finish()
        await far.sink.until(lambda: far.sink.losses)
        await near.sink.until(lambda: near.sink.losses)
        for _ in range(5):
            await asyncio.sleep(0)
        assert far.sink.losses == near.sink.losses == [None]


async def test_closing_is_noticed_once_and_by_the_other_end_only(kind: str) -> None:
    async with linked(kind) as (near, far):
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
async def test_what_the_sink_cannot_take_is_handed_out_once_and_the_peer_hears_why(
    kind: str, error: type[Exception]
) -> None:
    """Behind all that is on its way to it, and before the end."""
    async with linked(kind) as (near, far):
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


async def test_closing_while_a_frame_is_handed_out_stops_there(kind: str) -> None:
    async with linked(kind) as (near, far):
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
