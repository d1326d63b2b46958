"""Memory use of shared-memory links: the writer reserves memory before its first use, as the data grows."""

from __future__ import annotations

import asyncio
import errno
import mmap
import os
import random
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from aiocoll import ProcessGroup
from aiocoll.errors import PeerLostError
from aiocoll.native.layout import CHUNK_HOLDER
from aiocoll.runtime import Runtime
from aiocoll.testing.contracts.links import payload
from aiocoll.transport.frame import SEGMENT
from aiocoll.transport.shared_memory import SMALL_SLOTS
from aiocoll.transport.shm.chunk_queue import ChunkQueueReader, ChunkQueueWriter
from aiocoll.transport.shm.fence import Fences, fences
from aiocoll.transport.shm.layout import CHUNKS, FIRST, LINE, SLOTS, Direction, LinkLayout, OutboxLayout
from aiocoll.transport.shm.region import PAGE, SharedRegion, no_memory_error
from aiocoll.transport.shm.ring import RingWriter
from aiocoll.transport.shm.slots import SlotReader
from aiocoll.transport.shm.transport import Sharing

from ..internals import replace_parts, wrap_parts
from ..ranks import run_ranks
from .links import Idle, frame, linked, shm_ends, sockets
from .outboxes import Host

KIB = 1024
#: The maximum memory in bytes that an idle link takes on one rank (contract).
IDLE = 64 * KIB
#: World sizes below and above the sizes at which the memory layouts become smaller.
RANKS = (2, 8, 9, 1000)
REGIONS = {LinkLayout(ranks).nbytes for ranks in RANKS}
NO_MEMORY = "this host has no memory left to share"


class Kernel:
    """A stand-in for the system call that reserves memory: records the reserved spans, and fails on demand."""

    def __init__(self) -> None:
        self.spans: list[tuple[int, int, int]] = []
        self.code = 0
        #: The number of reservations that still succeed before all later reservations fail.
        self.left = 0

    def fail_with(self, code: int, after: int = 0) -> None:
        self.code, self.left = code, after

    def __call__(self, populate: Any, memory: mmap.mmap, start: int, nbytes: int) -> None:
        assert start % PAGE == 0
        if self.code and not self.left:
            raise OSError(self.code, os.strerror(self.code))
        self.left -= 1
        populate(memory, start, nbytes)
        # Count a link region only once, although both ends reserve it. An outbox is reserved only by its owner.
        which = 0 if len(memory) in REGIONS else id(memory)
        self.spans.append((which, start, start + nbytes))

    def reserved(self) -> int:
        """Return the number of bytes in all reserved pages of one link region and of all outboxes."""
        pages: set[tuple[int, int]] = set()
        for which, start, end in self.spans:
            pages.update((which, page) for page in range(start // PAGE, -(-end // PAGE)))
        return len(pages) * PAGE


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    kernel = Kernel()
    wrap_parts(monkeypatch, populate_memory=kernel)
    return kernel


class Ends(NamedTuple):
    """The shared region of a link, mapped by a writer and a reader, with the layout of one direction."""

    fd: int
    there: Direction
    fences: Fences
    writing: SharedRegion
    reading: memoryview

    def reserved(self) -> int:
        return os.fstat(self.fd).st_blocks * 512

    def outgoing(self) -> RingWriter:
        return RingWriter(self.writing, self.there, self.fences)

    def chunk_queue(self) -> tuple[ChunkQueueWriter, ChunkQueueReader]:
        return ChunkQueueWriter(self.writing, self.there, self.fences), ChunkQueueReader(
            self.reading, self.there, self.fences
        )


@pytest.fixture
def make_region_ends() -> Iterator[Callable[[int, int], Ends]]:
    """Yield a function that makes a link region for a number of ranks; in direction 0, the dialler writes."""
    known = fences()
    assert known is not None
    open_fds: list[int] = []

    def make(ranks: int, direction: int = 0) -> Ends:
        layout = LinkLayout(ranks)
        fd, region = asyncio.run(SharedRegion.create(layout.nbytes, layout.directions[0].first()))
        open_fds.append(fd)
        regions = region, SharedRegion.open(os.dup(fd), layout.nbytes, layout.directions[1].first())
        return Ends(
            fd, layout.directions[direction], known, regions[direction], memoryview(regions[1 - direction].memory)
        )

    yield make
    for fd in open_fds:
        os.close(fd)


MakeEnds = Callable[..., Ends]


@pytest.fixture
def make_host() -> Iterator[Callable[..., Host]]:
    """Yield a function that makes the outboxes of two ranks, with the memory layout for a given number of ranks."""
    known = fences()
    assert known is not None
    hosts: list[Host] = []

    def make(ranks: int = 2) -> Host:
        hosts.append(Host(ranks, known, linked=2))
        return hosts[-1]

    yield make
    for host in hosts:
        host.close()


MakeHost = Callable[[int], Host]


def post(host: Host, common: bool, slot: int, identity: int, array: np.ndarray) -> bool:
    """Post `array` to a slot of a lane; return whether memory for the slot could be reserved."""
    if common:
        return host.boxes[0].common.post(slot, identity, 7, 1, array, array.nbytes, [host.lanes[1]])
    return host.lanes[1].post(slot, identity, 7, 1, array, array.nbytes)


def reader_of(host: Host, common: bool) -> SlotReader:
    return host.readers[1].common if common else host.readers[1].lane


def in_whole_pages(nbytes: int) -> int:
    return -(-nbytes // PAGE) * PAGE


# -- an idle link


@pytest.mark.parametrize("ranks", RANKS)
def test_idle_link_reserves_little_memory(ranks: int, make_region_ends: MakeEnds, make_host: MakeHost) -> None:
    ends, host = make_region_ends(ranks), make_host(ranks)
    assert ends.reserved() <= 2 * 28 * KIB
    assert host.reserved() <= 2 * (OutboxLayout(ranks).common.small + 2 * PAGE)
    out = ends.outgoing()
    idle = ends.reserved()
    for number in range(64):
        assert out.put(*frame(number, b"x" * 100))
    assert ends.reserved() == idle, "small frames reserved more memory"


def resident_bytes(nbytes: int) -> list[int]:
    """Return the resident bytes of each mapping of `nbytes` bytes; a page that is mapped twice counts half."""
    found = []
    for part in Path("/proc/self/smaps").read_text().split("/memfd:aiocoll")[1:]:
        size, _, _, _, pss = (int(line.split()[1]) * KIB for line in part.splitlines()[1:6])
        if size == nbytes:
            found.append(pss)
    return found


async def test_idle_link_takes_less_memory_than_documented() -> None:
    """Count the accessed pages of the link region, and the Python objects of each end."""
    async with linked("shm") as (near, far):  # the first link makes the objects that all links share
        near.start()
    tracemalloc.start()
    try:
        async with linked("shm") as (near, far):
            before, _ = tracemalloc.get_traced_memory()
            runtime = Runtime.of(asyncio.get_running_loop())
            ends = await shm_ends(runtime)
            objects, _ = tracemalloc.get_traced_memory()
            for op in range(8):
                near.write(*frame(op, b"x" * 100))
                far.write(*frame(op, b"x" * 100))
            near.start()
            far.start()
            await asyncio.gather(near.sink.frames_are(8), far.sink.frames_are(8))
            resident = resident_bytes(LinkLayout(2).nbytes)
            assert len(resident) == 4
            assert max(resident) + (objects - before) / 2 <= IDLE
            for end in ends:
                end.close()
    finally:
        tracemalloc.stop()


# -- growth


@pytest.mark.parametrize("direction", [0, 1])
@pytest.mark.parametrize("ranks", RANKS)
def test_frame_ring_grows_by_doubling(ranks: int, direction: int, make_region_ends: MakeEnds) -> None:
    ends = make_region_ends(ranks, direction)
    idle, out = ends.reserved(), ends.outgoing()
    assert out.put(*frame(0, b"x" * FIRST))
    assert ends.reserved() == idle
    assert out.put(*frame(1, b"x" * 17))
    assert ends.reserved() == idle + FIRST
    assert out.put(*frame(2, b"x" * 50_000))
    assert ends.reserved() == idle + in_whole_pages(FIRST + 64 + 50_000) - FIRST
    while out.put(*frame(3, b"x" * 100_000)):
        pass
    while out.put(*frame(4, b"x" * 1000)):
        pass
    assert ends.reserved() <= idle + ends.there.data_nbytes - FIRST


@pytest.mark.parametrize("common", [True, False])
@pytest.mark.parametrize("ranks", RANKS)
def test_slot_memory_is_reserved_slot_by_slot(ranks: int, common: bool, make_host: MakeHost) -> None:
    host = make_host(ranks)
    idle, reader = host.reserved(), reader_of(host, common)
    layout = host.layout.common if common else host.layout.lane
    for slot in range(SLOTS):
        assert post(host, common, slot, 1 + slot, np.full(4, slot, np.float64))
        assert reader.look(slot, 1 + slot, 7) == 1
        reader.free(slot, 7)
    lines = 0 if common else in_whole_pages(layout.lines + SLOTS * LINE) - in_whole_pages(layout.lines)
    assert host.reserved() == idle + lines, "contributions that fit in their line reserved more than the lines"
    idle += lines
    for slot in range(SLOTS):
        _, nbytes = layout.slot(slot)
        count = 41 if slot % 2 else nbytes
        for times in range(3):
            assert post(host, common, slot, 1000 * times + slot, np.full(count, slot, np.uint8))
            assert reader.view(slot, np.dtype(np.uint8), count).tolist() == [slot] * count
            reader.free(slot, 7)
        end = sum(layout.slot(slot))
        assert host.reserved() == idle + in_whole_pages(end - layout.small)
    assert host.reserved() == idle + layout.end - layout.small


@pytest.mark.parametrize("direction", [0, 1])
@pytest.mark.parametrize("ranks", RANKS)
def test_chunk_queue_memory_is_reserved_at_its_first_use(
    ranks: int, direction: int, make_region_ends: MakeEnds
) -> None:
    ends = make_region_ends(ranks, direction)
    idle, (writer, reader) = ends.reserved(), ends.chunk_queue()
    assert reader.look(1, 7) == -1
    assert ends.reserved() == idle
    for number in range(1, 2 * CHUNKS):
        assert writer.take(1, 7)
        assert ends.reserved() == idle + CHUNKS * writer.nbytes + PAGE
        assert writer.put(1, 7, 1, memoryview(bytes([number]) * writer.nbytes))
        assert reader.look(1, 7) == 1
        assert set(reader.read(np.dtype(np.uint8), writer.nbytes).tolist()) == {number}
        reader.free()
        writer.leave(failed=False)
    assert ends.reserved() == idle + CHUNKS * writer.nbytes + PAGE


@pytest.mark.parametrize("ranks", RANKS)
def test_numpy_arrays_do_not_start_shortly_after_chunks_and_middle_slots_within_a_page(ranks: int) -> None:
    """Check the distances for which memmove is slow on some cores; see `copy_bytes` in native/copying.c."""
    array = np.empty(1 << 20).ctypes.data
    outbox, link = OutboxLayout(ranks), LinkLayout(ranks)
    starts = [direction.chunks for direction in link.directions]
    starts += [slots.slot(SMALL_SLOTS)[0] for slots in (outbox.common, outbox.lane)]
    assert [start for start in starts if 0 < (array - start) % PAGE < 32] == []
    assert {end % PAGE for end in (link.directions[0].end, link.nbytes, outbox.common.end, outbox.lane.end)} == {0}


@pytest.mark.parametrize("nbytes", [FIRST - 1, FIRST, FIRST + 1, 100_000, SEGMENT])
async def test_frames_arrive_intact_while_the_ring_grows(nbytes: int) -> None:
    async with linked("shm") as (near, far):
        for end in near, far:
            end.start()
        for op in range(20):
            near.write(*frame(op, payload(op, nbytes)))
            far.write(*frame(op, payload(op + 1, nbytes)))
        await asyncio.gather(near.sink.frames_are(20), far.sink.frames_are(20))
        assert far.sink.frames == [(op, payload(op, nbytes)) for op in range(20)]
        assert near.sink.frames == [(op, payload(op + 1, nbytes)) for op in range(20)]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("ranks", [8, 9])
def test_unreserved_memory_pages_are_never_accessed(
    ranks: int, seed: int, make_region_ends: MakeEnds, make_host: MakeHost, kernel: Kernel
) -> None:
    """Check the writer and the reader: an access to an unreserved page would allocate the page."""
    ends, host, chance = make_region_ends(ranks, seed % 2), make_host(ranks), random.Random(seed)
    out, (writer, reader) = ends.outgoing(), ends.chunk_queue()
    words = ends.reading.cast("Q")
    sent = 0
    for identity in range(1, 300):
        nbytes = chance.choice([0, 8, 9, 16, 32, 33, 500, 5_000, 50_000])
        slot, common = chance.randrange(SLOTS), chance.random() < 0.5
        box, (_, room) = reader_of(host, common), host.layout.lane.slot(slot)
        assert box.look(slot, identity, 7) == -1
        if nbytes <= room and post(host, common, slot, identity, np.zeros(nbytes, np.uint8)):
            assert box.look(slot, identity, 7) == 1
            box.view(slot, np.dtype(np.uint8), nbytes).tolist()
            box.free(slot, 7)
        sent += out.put(*frame(identity, bytes(nbytes)))
        if chance.random() < 0.1:
            words[ends.there.taken] = sent
        if chance.random() < 0.02 and writer.take(1, 7):
            assert writer.put(identity, 7, 1, memoryview(bytes(min(nbytes, writer.nbytes))))
            assert reader.look(identity, 7) == 1
            reader.free()
            writer.leave(failed=False)
        host.readers[1].has_news()
        host.readers[1].purge(3)
        host.readers[1].unread()
        reader.end(3)
        reader.reclaim()
        assert ends.reserved() + host.reserved() == kernel.reserved()


# -- a kernel without MADV_POPULATE_WRITE


@pytest.mark.parametrize("ranks", [8, 9])
def test_link_region_on_an_old_kernel_is_reserved_at_once(
    ranks: int, make_region_ends: MakeEnds, kernel: Kernel
) -> None:
    kernel.fail_with(errno.EINVAL)
    ends = make_region_ends(ranks, 1)
    assert ends.reserved() == LinkLayout(ranks).nbytes
    out, (writer, _) = ends.outgoing(), ends.chunk_queue()
    assert out.put(*frame(1, b"x" * 100_000))
    assert writer.take(1, 7)


@pytest.mark.parametrize("ranks", [8, 9])
def test_outbox_on_an_old_kernel_is_reserved_in_steps(ranks: int, make_host: MakeHost, kernel: Kernel) -> None:
    kernel.fail_with(errno.EINVAL)
    host = make_host(ranks)
    idle, layout = host.reserved(), host.layout
    assert idle <= 2 * (layout.common.small + 2 * PAGE)
    for common in (True, False):
        lane = layout.common if common else layout.lane
        assert all(post(host, common, slot, 1, np.ones(lane.small_nbytes, np.uint8)) for slot in range(SLOTS))
    lanes = sum(lane.end - lane.small for lane in (layout.common, layout.lane)) - 3 * (
        layout.lane.middle_nbytes - in_whole_pages(layout.lane.small_nbytes)
    )
    assert idle < host.reserved() <= idle + 2 * lanes


def test_old_kernel_without_free_memory_reserves_nothing(
    make_host: MakeHost, kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel.fail_with(errno.EINVAL)
    host = make_host(2)

    def fail(fd: int, start: int, nbytes: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", fail)
    assert not post(host, True, 5, 1, np.ones(100, np.uint8))
    assert post(host, True, 5, 1, np.ones(32, np.uint8))


async def test_all_calls_work_on_an_old_kernel(kernel: Kernel) -> None:
    kernel.fail_with(errno.EINVAL)
    assert await run_ranks(3, reduce_all, transport="shm") == [SUMS[3]] * 3


def test_process_that_cannot_reserve_memory_uses_no_shared_memory(kernel: Kernel, make_region_ends: MakeEnds) -> None:
    """Let the peer reserve its memory, but not this process."""
    ends, layout = make_region_ends(2), LinkLayout(2)
    kernel.fail_with(errno.EINVAL)
    with pytest.raises(OSError, match=NO_MEMORY):
        SharedRegion.open(os.dup(ends.fd), layout.nbytes, layout.directions[1].first())


# -- a host without memory

each_code = pytest.mark.parametrize("code", [errno.ENOMEM, errno.EFAULT])


@each_code
@pytest.mark.parametrize("after", range(11))
async def test_link_uses_the_socket_if_no_memory_can_be_reserved(
    code: int, after: int, kernel: Kernel, caplog: pytest.LogCaptureFixture
) -> None:
    kernel.fail_with(code, after)
    runtime, socks = Runtime.of(asyncio.get_running_loop()), sockets("unix")
    ranks = [Sharing(runtime, rank, 2, Idle(), wanted=True, single_copy=True) for rank in range(2)]
    assert await asyncio.gather(ranks[0].propose(socks[0], 1), ranks[1].accept(socks[1], 0)) == [None, None]
    assert any(rank.trouble is not None and NO_MEMORY in rank.trouble for rank in ranks)
    assert len(caplog.records) == len([rank for rank in ranks if rank.trouble is not None])
    for sock in socks:
        sock.close()


@each_code
@pytest.mark.parametrize("common", [True, False])
def test_slots_whose_memory_cannot_be_reserved_refuse_posts(
    common: bool, code: int, make_host: MakeHost, kernel: Kernel
) -> None:
    host = make_host(2)
    reader = reader_of(host, common)
    assert post(host, common, 1, 1, np.arange(100.0))
    reader.free(1, 7)
    kernel.fail_with(code)
    for slot in 0, SMALL_SLOTS:
        assert not post(host, common, slot, 5, np.arange(6.0))
        assert reader.look(slot, 5, 7) == -1
        assert post(host, common, slot, 6, np.arange(4.0)), "a contribution that fits in the line needs no memory"
        reader.free(slot, 7)
    assert post(host, common, 1, 7, np.arange(200.0)), "the slot was reserved before"
    kernel.fail_with(0)
    assert post(host, common, 0, 8, np.arange(6.0))
    assert reader.look(0, 8, 7) == 1
    assert reader.view(0, np.dtype(float), 6).tolist() == [0, 1, 2, 3, 4, 5]


@each_code
def test_chunk_queue_whose_memory_cannot_be_reserved_is_refused(
    code: int, make_region_ends: MakeEnds, kernel: Kernel
) -> None:
    ends = make_region_ends(2)
    writer, _ = ends.chunk_queue()
    kernel.fail_with(code)
    assert not writer.take(1, 7)
    assert writer.state[CHUNK_HOLDER] == 0
    kernel.fail_with(0)
    assert writer.take(1, 7)
    writer.leave(failed=False)
    kernel.fail_with(code)
    assert writer.take(1, 7)


@each_code
def test_frame_ring_that_cannot_grow_raises_enomem(code: int, make_region_ends: MakeEnds, kernel: Kernel) -> None:
    ends = make_region_ends(2)
    out = ends.outgoing()
    kernel.fail_with(code)
    with pytest.raises(OSError, match=NO_MEMORY) as caught:
        out.put(*frame(2, b"x" * (FIRST + 1)))
    assert caught.value.errno == errno.ENOMEM
    assert out.put(*frame(3, b"x" * FIRST)), "the failed call changed the ring"


@each_code
async def test_frames_that_fit_the_reserved_memory_are_sent_without_new_memory(code: int, kernel: Kernel) -> None:
    async with linked("shm") as (near, far):
        kernel.fail_with(code)
        for end in near, far:
            end.start()
        sizes = [FIRST, 17, FIRST, 5000, 5000, 0, FIRST]
        assert near.write(*frame(0, payload(0, sizes[0])))
        for op, nbytes in enumerate(sizes[1:], 1):
            assert not near.write(*frame(op, payload(op, nbytes)))
        await far.sink.frames_are(len(sizes))
        assert far.sink.frames == [(op, payload(op, nbytes)) for op, nbytes in enumerate(sizes)]
        assert near.sink.losses == []


@pytest.mark.parametrize("kept", [False, True])
async def test_frame_whose_memory_cannot_be_reserved_ends_the_link(kept: bool, kernel: Kernel) -> None:
    async with linked("shm") as (near, far):
        near.start()
        before = 0
        while kept and near.write(*frame(before, b"small")):
            before += 1
        kernel.fail_with(errno.ENOMEM)
        assert not near.write(*frame(1000, payload(1, 100_000)))
        assert not near.writable
        kernel.fail_with(0)
        if not kept:
            assert not near.write(*frame(1001, b"must not overtake it"))
            near.finish()
        else:
            kernel.fail_with(errno.ENOMEM)
        far.start()
        await near.sink.until(lambda: near.sink.losses)
        await far.sink.until(lambda: far.sink.losses)
        assert [(error.errno, str(error)) for error in near.sink.losses] == [(errno.ENOMEM, str(no_memory_error()))]
        assert near.sink.drains == 0
        assert near.write(*frame(1002, b"dropped"))
        assert [op for op, _ in far.sink.frames] == list(range(before + kept))
        assert all(data == b"small" for _, data in far.sink.frames)


async def test_frame_whose_memory_cannot_be_reserved_is_tried_once(kernel: Kernel) -> None:
    async with linked("shm") as (near, _):
        near.start()
        calls = 0

        def count(memory: mmap.mmap, start: int, nbytes: int) -> None:
            nonlocal calls
            calls += 1
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

        with pytest.MonkeyPatch.context() as patch:
            replace_parts(patch, populate_memory=count)
            near.write(*frame(1, payload(1, 100_000)))
            for _ in range(5):
                assert not near.poll()
            await near.sink.until(lambda: near.sink.losses)
        assert calls == 1
        assert len(near.sink.losses) == 1


# -- whole groups


#: Element counts for the 64-byte line of a slot, for small slots and for middle slots. All fit into an idle frame ring.
COUNTS = (1, 5, 6, 500, 600, 1024)
SUMS = {size: [[size * (size - 1) / 2] * count for count in COUNTS] for size in (2, 3)}


async def reduce_all(pg: ProcessGroup, kernel: Kernel | None = None) -> list[list[float]]:
    await pg.barrier()
    if kernel is not None:
        kernel.fail_with(errno.ENOMEM)
    return [(await pg.allreduce(np.full(count, float(pg.rank())))).tolist() for count in COUNTS]


@pytest.mark.parametrize("world_size", [2, 3])
async def test_group_continues_if_no_more_memory_can_be_reserved(world_size: int, kernel: Kernel) -> None:
    assert await run_ranks(world_size, reduce_all, kernel, transport="shm") == [SUMS[world_size]] * world_size


async def reduce_too_large(pg: ProcessGroup, kernel: Kernel) -> str:
    await pg.barrier()
    kernel.fail_with(errno.ENOMEM)
    with pytest.raises(PeerLostError) as caught:
        await pg.allreduce(np.zeros(FIRST // 8 + 1))
    return str(caught.value)


async def test_payload_whose_memory_cannot_be_reserved_fails_with_the_reason(kernel: Kernel) -> None:
    messages = await run_ranks(2, reduce_too_large, kernel, transport="shm")
    assert any(NO_MEMORY in each for each in messages)
