"""Frames by reference: the peer reads the payload in place, from a shared segment or from the writer's memory."""

from __future__ import annotations

import asyncio
import itertools
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest

from aiocoll.errors import ProtocolError
from aiocoll.runtime import Runtime
from aiocoll.transport.frame import HEADER, SEGMENT, FrameKind, Header
from aiocoll.transport.shared_memory import MOST_BY_REFERENCE
from aiocoll.transport.shm.link import PIECE_TIME, ShmLink
from aiocoll.transport.shm.process_memory import can_read
from aiocoll.transport.shm.references import UnreadableError
from aiocoll.transport.shm.registered_memory import RegisteredMemory
from aiocoll.transport.shm.ring import RingWriter

from ..ranks import wait_until
from .links import Recorder, frame, linked, shm_ends

PROCESS = pytest.param(
    "process", marks=pytest.mark.skipif(can_read() is not None, reason=f"cannot read memory of processes: {can_read()}")
)
#: Payload sizes in bytes: near the segment size, and the largest payload of a frame by reference.
SIZES = (1, SEGMENT - 1, SEGMENT, SEGMENT + 1, MOST_BY_REFERENCE)


@pytest.fixture(params=["segment", PROCESS])
def where(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def reference_header(op: int, nbytes: int, kind: int = FrameKind.DATA, offset: int = 0) -> bytes:
    return HEADER.pack(kind, 0, 0, 7, op, 0, offset, nbytes, nbytes & 0xFFFFFFFF)


def registered_memory(link: ShmLink) -> RegisteredMemory:
    """Return the registered memory of the rank that owns the link."""
    return link.references._registered_memory  # type: ignore[return-value]


class Ends:
    """Both ends of a started link, with functions that make and send arrays of the near end."""

    def __init__(self, near: ShmLink, far: ShmLink, where: str) -> None:
        self.near, self.far = near, far
        self.sent: Recorder = near.sink  # type: ignore[assignment]
        self.got: Recorder = far.sink  # type: ignore[assignment]
        self.read: list[object] = []
        self._where = where

    async def array(self, nbytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """Return an array of known bytes in memory that the far end can read."""
        if self._where == "segment":
            array = await registered_memory(self.near).make(nbytes)
        else:
            array = np.empty(nbytes, np.uint8)
        array[:] = np.arange(nbytes) % 251
        await wait_until(lambda: self.place(array) is not None)
        return array

    def place(self, array: np.ndarray[Any, np.dtype[np.uint8]]) -> tuple[int, int] | None:
        return self.near.references.find(memoryview(array), attach=self._where == "process")

    def write(self, array: np.ndarray[Any, np.dtype[np.uint8]], op: int = 1, owner: object = None) -> bool:
        place = self.place(array)
        assert place is not None
        assert (place[0] == 0) == (self._where == "process")
        return self.near.references.write(
            reference_header(op, array.nbytes), place, owner, lambda: self.read.append(op)
        )


@asynccontextmanager
async def linked_ends(where: str, runtime: Runtime | None = None) -> AsyncIterator[Ends]:
    async with linked("shm", runtime) as (near, far):
        near.start()
        far.start()
        try:
            yield Ends(near, far, where)
        finally:
            registered_memory(near).close()


def known_bytes(nbytes: int) -> bytes:
    return (np.arange(nbytes) % 251).astype(np.uint8).tobytes()


@pytest.mark.parametrize("nbytes", SIZES)
@pytest.mark.parametrize("placed", [False, True])
async def test_payload_sent_by_reference_arrives_in_pieces_unless_routed_into_an_array(
    where: str, nbytes: int, placed: bool
) -> None:
    async with linked_ends(where) as both:
        found = bytearray(nbytes)

        def place(header: Header) -> memoryview:
            return memoryview(found)[header[6] : header[6] + header[7]]

        if placed:
            both.got.place = place
        array = await both.array(nbytes)
        assert both.write(array)
        assert both.read == [], "the peer read before it polled"
        await wait_until(lambda: both.read)
        assert both.read == [1]
        assert b"".join(payload for _, payload in both.got.frames) == known_bytes(nbytes)
        assert not placed or found == known_bytes(nbytes)
        most = min(nbytes, 4 * SEGMENT) if placed else SEGMENT
        assert [header[7] for header in both.got.headers] == [most] * (nbytes // most) + [nbytes % most] * (
            nbytes % most > 0
        )
        assert [header[6] for header in both.got.headers] == list(range(0, nbytes, most))
        assert {header[8] for header in both.got.headers} == {nbytes}


async def test_offset_of_a_long_message_wraps_around_at_32_bits(where: str) -> None:
    async with linked_ends(where) as both:
        array = await both.array(2 * SEGMENT)
        header = reference_header(1, array.nbytes, offset=(1 << 32) - SEGMENT)
        place = both.place(array)
        assert place is not None
        assert both.near.references.write(header, place, None, lambda: None)
        await both.got.frames_are(2)
        assert [each[6] for each in both.got.headers] == [(1 << 32) - SEGMENT, 0]


async def test_frames_by_reference_keep_their_order(where: str) -> None:
    async with linked_ends(where) as both:
        array = await both.array(100_000)
        both.near.write(*frame(1, b"before"))
        assert both.write(array, 2)
        both.near.write(*frame(3, b"between"))
        assert both.write(array, 4)
        both.near.write(*frame(5, b"after"))
        await both.got.frames_are(5)
        expected = [b"before", known_bytes(100_000), b"between", known_bytes(100_000), b"after"]
        assert both.got.frames == list(enumerate(expected, 1))


async def test_writer_has_at_most_two_unread_references(where: str) -> None:
    """Check that the link is not writable with two unread references, and notifies its sink when it is again."""
    async with linked_ends(where) as both:
        array = await both.array(SEGMENT)
        assert both.near.writable
        assert both.write(array, 1)
        assert both.near.writable
        assert both.write(array, 2)
        assert not both.near.writable
        await both.sent.until(lambda: both.sent.drains)
        assert both.near.writable
        await wait_until(lambda: both.read == [1, 2])


async def test_reader_that_reads_a_reference_at_once_wakes_the_writer(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Let the peer read the frame before the writer continues: the writer must have requested a wake-up earlier."""
    async with linked_ends(where) as both:
        array = await both.array(1000)
        doorbell, point = both.far._peer_doorbell, RingWriter.point
        rung: list[object] = []

        def read_at_once(self: RingWriter, header: bytes, segment: int, address: int) -> int:
            number = point(self, header, segment, address)
            both.far.poll()
            return number

        monkeypatch.setattr(RingWriter, "point", read_at_once)
        monkeypatch.setattr(type(doorbell), "ring", lambda self: rung.append(self))
        assert both.write(array)
        assert doorbell in rung


async def test_reference_waits_for_space_in_the_frame_ring(where: str) -> None:
    async with linked_ends(where) as both:
        array = await both.array(1000)
        while both.near.write(*frame(0)):
            pass
        assert not both.write(array)
        both.near.write(*frame(9, b"last"))
        await both.got.until(lambda: both.got.frames[-1:] == [(9, b"last")])
        assert both.write(array)
        await wait_until(lambda: both.read == [1])


async def test_withdrawn_reference_is_not_delivered(where: str) -> None:
    """Withdraw a frame whose call has failed and whose memory may change; the reader must not deliver this frame."""
    async with linked_ends(where) as both:
        array, owner = await both.array(SEGMENT), object()
        assert both.write(array, 1, owner)
        assert both.write(array, 2)
        both.near.references.invalidate(owner)
        both.near.write(*frame(3, b"next"))
        await both.got.frames_are(2)
        assert [op for op, _ in both.got.frames] == [2, 3]
        assert [header[4] for header in both.got.withdrawals] == [1]
        await wait_until(lambda: both.read == [1, 2])


@pytest.mark.parametrize("placed", [False, True])
async def test_reference_withdrawn_during_its_read_is_not_delivered(where: str, placed: bool) -> None:
    """Withdraw the frame and change its memory in `route`, between the two checks that enclose each read."""
    async with linked_ends(where) as both:
        array, owner = await both.array(3 * SEGMENT), object()
        found = bytearray(array.nbytes)
        before = 0 if placed else SEGMENT

        def place(header: Header) -> memoryview | None:
            if header[6] == before:
                both.near.references.invalidate(owner)
                array[:] = 255
            return memoryview(found)[header[6] : header[6] + header[7]] if placed else None

        both.got.place = place
        assert both.write(array, 1, owner)
        both.near.write(*frame(2, b"next"))
        await both.got.until(lambda: both.got.frames[-1:] == [(2, b"next")] or both.got.losses)
        assert both.got.frames == [(1, known_bytes(3 * SEGMENT)[:before])] * (not placed) + [(2, b"next")]
        assert [header[4] for header in both.got.withdrawals] == [1]
        assert both.got.losses == []


async def test_withdrawal_of_a_read_reference_does_not_affect_later_references(where: str) -> None:
    async with linked_ends(where) as both:
        array, owner = await both.array(1000), object()
        assert both.write(array, 1, owner)
        await wait_until(lambda: both.read == [1])
        both.near.references.invalidate(owner)
        for op in range(2, 600):  # enough frames to use every entry of the ring again
            assert both.write(array, op)
            both.near.references.invalidate(owner)
            await wait_until(lambda op=op: both.read[-1] == op)
        assert [op for op, _ in both.got.frames] == list(range(1, 600))


async def test_readable_callback_stops_within_a_frame_at_its_time_limit(where: str) -> None:
    milliseconds = itertools.count()
    slow = Runtime(asyncio.get_running_loop(), lambda: next(milliseconds) / 1000)
    async with linked_ends(where, slow) as both:
        array = await both.array(4 * SEGMENT)
        assert both.write(array)
        for pieces in range(1, 5):
            both.far.poll()
            assert len(both.got.frames) == pieces
        await wait_until(lambda: both.read)
        assert b"".join(payload for _, payload in both.got.frames) == known_bytes(4 * SEGMENT)


async def test_writer_knows_whether_its_reference_is_being_read(where: str) -> None:
    async with linked_ends(where) as both:
        array = await both.array(3 * SEGMENT)
        found: list[bool] = []

        def place(header: Header) -> None:
            found.append(both.near.is_being_read())

        both.got.place = place
        for op in (1, 2):
            assert both.write(array, op)
            assert not both.near.is_being_read()
            await wait_until(lambda op=op: op in both.read)
            assert not both.near.is_being_read()
        assert found == [True] * 6


async def test_writer_does_not_wait_forever_for_a_stopped_reader() -> None:
    now = 1.0
    runtime = Runtime(asyncio.get_running_loop(), lambda: now)
    async with linked_ends("segment", runtime) as both:
        near, reader = both.near, both.far.reference_reader
        for _ in range(2):
            reader.begin_read()
            assert near.is_being_read()
            now += PIECE_TIME / 2
            assert near.is_being_read()
            now += PIECE_TIME
            assert not near.is_being_read()
            reader.begin_read()  # the read of a voided frame has no end
            assert not near.is_being_read()
            reader.end_read()
            assert not near.is_being_read()
        reader.end_read()
        assert not near.is_being_read()
        array = await both.array(SEGMENT)
        assert both.write(array)
        assert near.poll() is False
        reader.begin_read()
        assert near.poll() is True
        now += 2 * PIECE_TIME
        assert near.poll() is False
        reader.end_read()
        reader.begin_read()
        near.close()
        assert not near.is_being_read()


async def test_sink_may_close_the_link_within_a_frame(where: str) -> None:
    timeless = Runtime(asyncio.get_running_loop(), lambda: 0.0)
    async with linked_ends(where, timeless) as both:
        array = await both.array(4 * SEGMENT)

        def place(header: Header) -> None:
            if header[6]:
                both.far.close()

        both.got.place = place
        assert both.write(array)
        await both.sent.until(lambda: both.sent.losses)
        assert both.got.losses == []
        assert len(both.got.frames) == 2, "frames were delivered after the close"
        assert both.read == []


async def test_reference_is_not_read_after_the_writer_closed(where: str) -> None:
    """Close the writer's end, after which its memory may change; the reader must report a lost link."""
    async with linked_ends(where) as both:
        array = await both.array(1000)
        both.write(array)
        both.near.close()
        assert both.near.writable
        both.near.references.invalidate(None)
        await both.got.until(lambda: both.got.losses)


# -- memory that cannot be read


@pytest.mark.skipif(can_read() is not None, reason="cannot read memory of processes")
async def test_reference_to_an_ended_process_fails_the_link() -> None:
    async with linked_ends("process") as both:
        await both.array(1)
        assert both.near.references.write(reference_header(1, 1000), (0, 8), None, lambda: None)
        await both.got.until(lambda: both.got.losses)
        (error,) = both.got.losses
        assert isinstance(error, UnreadableError)
        assert both.got.frames == []


async def test_unreadable_memory_of_a_withdrawn_reference_causes_no_failure(where: str) -> None:
    """Use a reference whose memory was unmapped after its operation had failed."""
    async with linked_ends(where) as both:
        await both.array(1)
        owner = object()
        place = (0, 8) if where == "process" else (99, 0)

        def void(header: Header) -> None:
            both.near.references.invalidate(owner)

        both.got.place = void
        assert both.near.references.write(reference_header(1, 1000), place, owner, lambda: both.read.append(1))
        both.near.write(*frame(2, b"next"))
        await both.got.frames_are(1)
        assert both.got.frames == [(2, b"next")]
        assert both.got.losses == []


async def test_reference_to_a_missing_segment_fails_the_link() -> None:
    async with linked_ends("segment") as both:
        array = await both.array(1000)
        place = both.place(array)
        assert place is not None
        for number, offset in ((place[0] + 1, 0), (place[0], 1 << 40)):
            async with linked_ends("segment") as other:
                assert other.near.references.write(reference_header(1, 1000), (number, offset), None, lambda: None)
                await other.got.until(lambda other=other: other.got.losses)
                assert isinstance(other.got.losses[0], UnreadableError)


@pytest.mark.parametrize(
    "header",
    [
        reference_header(1, 0),
        reference_header(1, MOST_BY_REFERENCE + 1),
        reference_header(1, 1000, FrameKind.CONTROL),
        struct.pack("<B", 99) + reference_header(1, 1000)[1:],
    ],
)
async def test_malformed_reference_header_fails_the_link(header: bytes) -> None:
    async with linked_ends("segment") as both:
        array = await both.array(1000)
        place = both.place(array)
        assert place is not None
        assert both.near.references.write(header, place, None, lambda: None)
        await both.got.until(lambda: both.got.losses)
        assert isinstance(both.got.losses[0], ProtocolError)


@pytest.mark.parametrize("single_copy", [(True, False), (False, True), (False, False)])
async def test_payloads_are_sent_by_reference_only_if_both_ends_allow_references(
    single_copy: tuple[bool, bool],
) -> None:
    runtime = Runtime.of(asyncio.get_running_loop())
    near, far = await shm_ends(runtime, single_copy)
    near.sink, far.sink = Recorder(), Recorder()
    near.start()
    far.start()
    view = memoryview(bytearray(100))
    assert near.references.find(view, attach=True) is None
    assert far.references.find(view, attach=True) is None
    # Write a frame by reference although the ends have agreed on none: the link must detect this.
    assert near.references.write(reference_header(1, 1000), (0, 4096), None, lambda: None)
    await far.sink.until(lambda: far.sink.losses)  # type: ignore[attr-defined]
    for each in (near, far):
        each.close()


@pytest.mark.skipif(can_read() is not None, reason="cannot read memory of processes")
async def test_memory_that_other_processes_cannot_read_is_not_sent_by_reference(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Simulate memory that a device driver has mapped into this process: its data must be copied into frames."""
    async with linked_ends("process") as both:
        array = await both.array(1000)
        memory = both.near.references._memory
        assert memory is not None
        monkeypatch.setattr(type(memory), "can_show", lambda self, address: False)
        assert both.place(np.frombuffer(bytearray(1000), np.uint8)) is None
        assert both.place(array[10:20]) is not None  # NumPy allocated this memory, so no check of the memory is needed
