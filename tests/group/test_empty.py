"""Arrays in registered memory, from `pg.empty`: results, reading in place without a staging copy, and release."""

from __future__ import annotations

import asyncio
import errno
import gc
import logging
import os
from itertools import product
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from aiocoll import GroupClosedError, GroupError, GroupRevokedError, ProcessGroup, ReduceOp
from aiocoll.engine.communicator import Communicator
from aiocoll.engine.operations.shm_ring import order
from aiocoll.group.dispatch.planner import RING_RANKS
from aiocoll.testing import run_processes
from aiocoll.transport.frame import SEGMENT
from aiocoll.transport.shm.chunk_queue import ChunkQueueWriter, Chunks

from ..internals import comm_of, wrap_methods
from ..pairwise import Case, cover
from ..ranks import LINKS, parametrize_transports, run_ranks, wait_until
from ..redirected_files import redirect_files
from ..reductions import DTYPES, OPS, allowed, data, equal, reduce_op, reduced
from ..shared_memory import QUEUE

PIECE = QUEUE.chunk_nbytes
LARGE = 1_000_000
#: The number of calls after which the right neighbour reports that it has mapped the array.
WARM = 3

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="needs memfd_create")


class Puts:
    """Counts of writes to chunk queues: copied bytes, and chunks by reference."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.nbytes = self.places = 0
        self.lanes: set[int] = set()


@pytest.fixture
def puts(monkeypatch: pytest.MonkeyPatch) -> Puts:
    """Count the chunk queue writes of all links, without the accelerator, whose writes Python cannot observe."""
    counts, has = Puts(), Communicator.is_on_all_cards
    monkeypatch.setattr(Chunks, "connect", lambda *_: None)
    monkeypatch.setattr(Communicator, "is_on_all_cards", lambda comm, name: name != "native" and has(comm, name))

    def counted_put(
        put: Any, lane: ChunkQueueWriter, identity: int, group: int, fingerprint: int, piece: memoryview, length: int
    ) -> bool:
        done: bool = put(lane, identity, group, fingerprint, piece, length)
        counts.nbytes += piece.nbytes * done
        counts.lanes.add(id(lane))
        return done

    def counted_point(point: Any, lane: ChunkQueueWriter, *args: int) -> bool:
        done: bool = point(lane, *args)
        counts.places += done
        counts.lanes.add(id(lane))
        return done

    wrap_methods(monkeypatch, ChunkQueueWriter, put=counted_put, point=counted_point)
    return counts


def mappings() -> int:
    """Return the number of shared memory mappings of this process."""
    with open("/proc/self/maps", encoding="ascii") as lines:
        return sum("memfd:aiocoll" in line for line in lines)


def segment_count(pg: ProcessGroup) -> int:
    return len(comm_of(pg).endpoint.registered_memory.segments)


async def registered_array(pg: ProcessGroup, values: Any) -> Any:
    """Return an array from `pg.empty` that contains `values`."""
    array = await pg.empty(values.shape, values.dtype)
    array[:] = values
    return array


async def make_mapped(pg: ProcessGroup, array: Any) -> None:
    """Make calls on a registered array until the neighbouring ranks have mapped its memory."""
    for _ in range(WARM):
        await pg.allreduce(array, ReduceOp.MAX)


# -- results


SIZES = [2, 3, 4, 7]


def is_possible(case: Case) -> bool:
    op, dtype, world_size = case.get("op"), case.get("dtype"), case.get("world_size", 0)
    if world_size > RING_RANKS and op not in (None, "SUM"):
        return False  # arrays of groups this large are sent in frames
    return op is None or dtype is None or allowed(op, dtype)


COVER = list(cover({"world_size": SIZES, "op": OPS, "dtype": DTYPES}, is_possible))
FULL = [
    {"world_size": world_size, "op": op, "dtype": dtype}
    for world_size, op, dtype in product(SIZES, OPS, DTYPES)
    if is_possible({"world_size": world_size, "op": op, "dtype": dtype})
]


@pytest.mark.slow
@pytest.mark.parametrize("cases", [COVER, pytest.param(FULL, marks=pytest.mark.matrix)], ids=["cover", "all"])
@pytest.mark.ranks(*SIZES, timeout=240.0)
@parametrize_transports("shm")
async def test_registered_arrays_give_the_same_results_as_plain_arrays(pg: ProcessGroup, cases: list[Case]) -> None:
    """Compare the result bits with plain arrays, and the values with the closed form."""
    world_size = pg.size()
    count = world_size * 40_000 + 1
    for op, dtype in [(case["op"], case["dtype"]) for case in cases if case["world_size"] == world_size]:
        given = data(dtype, op, pg.rank(), 0, count)
        chosen = reduce_op(op, pg.rank())
        array, plain = await registered_array(pg, given), given.copy()
        assert await pg.allreduce(array, chosen) is array
        await pg.allreduce(plain, chosen)
        assert array.tobytes() == plain.tobytes(), f"{op} of {dtype}"
        inputs = [data(dtype, op, peer, 0, count) for peer in range(world_size)]
        assert equal(array, reduced(op, dtype, inputs, world_size)), f"{op} of {dtype}"


@pytest.mark.slow
@parametrize_transports(*LINKS)
@pytest.mark.ranks(1, 2, 3, 4, 7)
async def test_registered_arrays_work_with_counts_near_multiples_of_the_piece_size(pg: ProcessGroup) -> None:
    for pieces in (0, 1, 2, 2 * QUEUE.chunks_count + 1):
        for more in (-1, 0, 1):
            count = max(0, pieces * pg.size() * PIECE // 8 + more)
            array = await pg.empty(count, np.int64)
            for turn in range(2):  # in the second turn, the peers have already mapped the array
                array[:] = np.arange(count) + pg.rank() * turn
                await pg.allreduce(array)
                expected = np.arange(count) * pg.size() + turn * pg.size() * (pg.size() - 1) // 2
                assert np.array_equal(array, expected)


@pytest.mark.ranks(2, 3, 4)
@parametrize_transports("shm")
async def test_registered_arrays_work_with_plain_arrays_of_other_ranks(pg: ProcessGroup) -> None:
    mine = await pg.empty(LARGE, np.int32)
    plain = np.empty(LARGE, np.int32)
    for turn in range(2 * pg.size()):
        array = mine if turn % pg.size() == pg.rank() else plain
        array[:] = np.arange(LARGE) + pg.rank() + turn
        await pg.allreduce(array)
        total = sum(range(pg.size())) + turn * pg.size()
        assert np.array_equal(array, np.arange(LARGE) * pg.size() + total)


@pytest.mark.ranks(3)
@parametrize_transports("shm", "memory")
async def test_registered_arrays_are_accepted_by_all_other_calls(pg: ProcessGroup) -> None:
    rank, size = pg.rank(), pg.size()
    array = await registered_array(pg, np.full((size, 50_000), rank))
    assert np.all(await pg.broadcast(array, 1) == 1)
    array[:] = rank
    gathered = await pg.empty((size, size, 50_000), int)
    await pg.allgather_into_tensor(gathered, array)
    assert all(np.all(gathered[peer] == peer) for peer in range(size))
    mine = await pg.empty(50_000, int)
    await pg.reduce_scatter_tensor(mine, array)
    assert np.all(mine == sum(range(size)))
    if rank == 0:
        await pg.send(array, 1)
    elif rank == 1:
        assert np.all(await pg.recv(array, 0) == 0)


# -- no staging


@pytest.mark.ranks(2, 3, 4)
@parametrize_transports("shm")
async def test_registered_arrays_are_not_staged(pg: ProcessGroup, puts: Puts) -> None:
    """Check a registered array that the neighbouring ranks have mapped, and views of it."""
    array = await registered_array(pg, np.zeros((100, 10_000), np.float32))
    await make_mapped(pg, array)
    for part in (array, array[3:], array.reshape(-1)[7:], array.T.T, array.view(np.int32), memoryview(array)):
        await pg.barrier()
        puts.clear()
        await pg.barrier()
        await pg.allreduce(part)
        await pg.barrier()
        assert puts.nbytes == 0
        assert puts.places >= pg.size() * 2 * (pg.size() - 1)


@pytest.mark.ranks(2)
@parametrize_transports("shm")
async def test_array_outside_of_registered_memory_is_copied(pg: ProcessGroup, puts: Puts) -> None:
    array = await registered_array(pg, np.ones(LARGE))
    await make_mapped(pg, array)
    await pg.barrier()
    puts.clear()
    await pg.barrier()
    for other in (np.ones(LARGE), array[::2]):
        await pg.allreduce(other)
        assert np.all(other == 2)
    await pg.barrier()
    assert puts.places == 0
    assert puts.nbytes == 2 * (LARGE + LARGE // 2) * 8


def test_schedule_overwrites_no_piece_before_the_neighbour_has_read_the_piece() -> None:
    """Derive from the schedule alone which events precede each other."""
    for size in range(2, 8):
        for pieces in (1, 2, 3, 7):
            _check_hazard(size, order(2 * (size - 1), pieces))


def _check_hazard(size: int, entries: tuple[tuple[int, int, int], ...]) -> None:
    # The direct predecessors of each event. An event is a rank, "put" or "take", and a chunk number.
    causes: dict[tuple[int, str, int], set[tuple[int, str, int]]] = {}
    for rank in range(size):
        for number, (_, _, before) in enumerate(entries):
            causes[rank, "put", number] = {(rank, "put", number - 1), (rank, "take", before)}
            causes[rank, "take", number] = {((rank - 1) % size, "put", number), (rank, "take", number - 1)}
    known: dict[tuple[int, str, int], frozenset[tuple[int, str, int]]] = {}

    def history(event: tuple[int, str, int]) -> frozenset[tuple[int, str, int]]:
        if event[2] < 0:
            return frozenset()
        if event not in known:
            known[event] = frozenset({event}).union(*(history(cause) for cause in causes[event]))
        return known[event]

    for number in range(len(entries)):  # this order keeps the recursion shallow
        for rank in range(size):
            history((rank, "put", number)), history((rank, "take", number))
    for rank in range(size):
        for number, (step, piece, _) in enumerate(entries):
            part = (rank - step - 1) % size
            for later, (other, same, _) in enumerate(entries):
                if same == piece and (rank - other - 2) % size == part and other >= step:
                    # This rank overwrites the piece when it takes the left neighbour's put, so the right neighbour must
                    # have read the piece before this put.
                    assert ((rank + 1) % size, "take", number) in history(((rank - 1) % size, "put", later))


async def test_keyed_calls_on_registered_arrays_match_in_any_order(puts: Puts) -> None:
    async def rank(pg: ProcessGroup) -> None:
        arrays = {name: await pg.empty(LARGE // 2, np.float64) for name in "abcd"}
        for _ in range(WARM):
            for array in arrays.values():
                array[:] = 1 + pg.rank()
            names = sorted(arrays, reverse=pg.rank() % 2 == 1)
            for work in [pg.allreduce(arrays[name], key=name) for name in names]:
                await work
            assert all(np.all(array == 6) for array in arrays.values())

    await run_ranks(3, rank, transport="shm")
    assert puts.places


@pytest.mark.ranks(4)
@parametrize_transports("shm")
async def test_work_completes_after_all_ranks_have_read_its_array(pg: ProcessGroup) -> None:
    """Overwrite the array as soon as the work is done, which must not change the results of other ranks."""
    array = await pg.empty(LARGE, np.int64)
    for turn in range(30):
        array[:] = turn + pg.rank()
        await pg.allreduce(array)
        assert np.all(array == 4 * turn + 6)
        array[:] = -1
        await asyncio.sleep(0)


# -- failing in the middle


async def test_failed_operation_never_completes_with_data_written_after_the_failure(puts: Puts) -> None:
    """Overwrite a registered array after the group has failed; no rank may complete with the new data."""
    groups: dict[int, tuple[ProcessGroup, Any]] = {}

    async def rank(pg: ProcessGroup) -> None:
        array = await registered_array(pg, np.zeros(LARGE))
        await make_mapped(pg, array)
        groups[pg.rank()] = pg, array
        await pg.barrier()
        if pg.rank() == 0:
            # Run all steps in one loop iteration, so that rank 1 calls before it receives the abort.
            puts.clear()
            array[:] = 1
            works = [pg.allreduce(array)]
            assert puts.places
            pg.abort("over")
            array[:] = -1e300
            other, theirs = groups[1]
            theirs[:] = 1
            works.append(other.allreduce(theirs))
            assert np.all(theirs == 1)
            for work in works:
                with pytest.raises(GroupError, match="over"):
                    await work
        await pg.wait_revoked()

    await run_ranks(2, rank, transport="shm")


async def test_failed_operation_withdraws_unread_pieces(puts: Puts) -> None:
    """Let an operation fail after its last write to the chunk queue, before a peer has read all pieces."""
    groups: dict[int, tuple[ProcessGroup, Any]] = {}
    count = 2 * PIECE // 8  # each rank's part is one piece

    async def rank(pg: ProcessGroup) -> None:
        array = await registered_array(pg, np.zeros(count))
        await make_mapped(pg, array)
        groups[pg.rank()] = pg, array
        await pg.barrier()
        if pg.rank() == 0:
            other, theirs = groups[1]
            theirs[:] = array[:] = 1
            puts.clear()
            for each in (pg, other):  # stop the clock, so that no rank postpones a step
                comm_of(each).runtime.ticks = lambda: 0.0
            # Run all steps in one loop iteration, so that rank 0 fails before rank 1 polls its queue again.
            works = [other.allreduce(theirs), pg.allreduce(array)]
            assert puts.places == 3, f"{puts.places} pieces were put, not two of rank 0 and one of rank 1"
            pg.abort("over")
            array[:] = -1e300
            for work in works:
                with pytest.raises(GroupError, match="over"):
                    await work
            assert not (theirs == -1e300).any()
        await pg.wait_revoked()

    await run_ranks(2, rank, transport="shm")


@pytest.mark.ranks(3)
@parametrize_transports("shm")
async def test_ranks_with_registered_arrays_continue_after_an_abort(pg: ProcessGroup) -> None:
    array = await registered_array(pg, np.zeros(LARGE))
    await make_mapped(pg, array)
    await pg.barrier()
    work = pg.allreduce(array) if pg.rank() == 1 else None
    if pg.rank() == 1:
        pg.abort("over")
    with pytest.raises(GroupError):
        await (work or pg.allreduce(array))
    async with await pg.shrink() as again:
        for turn in range(4):
            array[:] = again.rank() + turn
            await again.allreduce(array)
            assert np.all(array == 3 + 3 * turn)


async def test_chunk_queue_stays_usable_after_a_reduce_function_raises(puts: Puts) -> None:
    """Check that the chunks of the failed group are freed exactly once, even if a rank was about to read one."""

    async def rank(pg: ProcessGroup) -> None:
        def fail(a: Any, b: Any, out: Any) -> None:
            raise ArithmeticError("no")

        array = await registered_array(pg, np.ones(LARGE))
        await make_mapped(pg, array)
        with pytest.raises(GroupError):
            await pg.allreduce(array, ReduceOp.custom(fail))
        async with await pg.shrink() as again:
            await again.barrier()
            puts.clear()
            await again.barrier()
            for _ in range(WARM):
                array[:] = 1
                await again.allreduce(array)
                assert np.all(array == 2)

    await run_ranks(2, rank, transport="shm", timeout=20.0)
    assert len(puts.lanes) == 2, f"{len(puts.lanes)} of 2 lanes were used"


# -- release


async def test_deleted_registered_arrays_release_their_memory() -> None:
    gc.collect()  # cycles of earlier tests may still hold mappings

    async def rank(pg: ProcessGroup) -> None:
        kept = await registered_array(pg, np.ones(LARGE))
        await make_mapped(pg, kept)
        await pg.barrier()
        before = len(os.listdir("/proc/self/fd")), mappings()
        await pg.barrier()
        for count in range(40):
            array = await registered_array(pg, np.ones(100_000 + count))
            await pg.allreduce(array)
            await pg.allreduce(array[1:])
        del array
        await wait_until(lambda: segment_count(pg) == 1)
        await pg.barrier()
        # Wait, because a message about released memory can arrive later than data in shared memory.
        await wait_until(lambda: (len(os.listdir("/proc/self/fd")), mappings()) == before)
        await pg.barrier()
        await pg.allreduce(kept)

    await run_ranks(3, rank, transport="shm")
    gc.collect()
    assert mappings() == 0


async def test_registered_array_outlives_its_group() -> None:
    async def rank(pg: ProcessGroup) -> Any:
        array = await registered_array(pg, np.arange(LARGE))
        await make_mapped(pg, array)
        return array[5:]

    first, second = await run_ranks(2, rank, transport="shm")
    assert np.array_equal(first, np.arange(5, LARGE))
    second[:] = 0
    assert np.array_equal(first, np.arange(5, LARGE))
    # Memory is referenced by the two views only, each of which has a mapping in its owner.
    gc.collect()  # frees the links
    assert mappings() == 2
    del first, second


@pytest.mark.ranks(2)
@parametrize_transports("shm")
async def test_last_view_of_a_registered_array_can_be_deleted_in_any_thread(pg: ProcessGroup) -> None:
    for _ in range(5):
        holder = [await registered_array(pg, np.ones(LARGE))]
        await pg.allreduce(holder[0])
        await asyncio.get_running_loop().run_in_executor(None, holder.clear)
    await wait_until(lambda: segment_count(pg) == 0)


@pytest.mark.ranks(2)
@parametrize_transports("shm")
async def test_address_of_a_deleted_registered_array_is_no_longer_registered(pg: ProcessGroup) -> None:
    """Check that aiocoll does not treat new memory at the same address as registered."""
    array = await registered_array(pg, np.ones(LARGE))
    registry = comm_of(pg).endpoint.registered_memory
    (segment,) = registry.segments
    assert registry.find(array[10:]) == (segment, 80)
    interface = dict(array.__array_interface__)
    del array
    assert registry.segments == [segment], "the segment was removed before the next loop iteration"
    reused = np.asarray(type("There", (), {"__array_interface__": interface})())
    assert registry.find(reused) is None


# -- results and errors of `pg.empty`


@pytest.mark.ranks(2)
@parametrize_transports("shm", "memory")
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        (0, "f4"),
        ((), "f8"),
        (5, bool),
        ((300, 0, 7), int),
        ((300, 700), np.complex64),
        ([3, 4], "int8"),
        (np.int64(LARGE), np.dtype("float16")),
        ((LARGE, 1), ml_dtypes.bfloat16),
    ],
)
async def test_empty_method_returns_an_array_of_the_given_shape_and_dtype(
    pg: ProcessGroup, shape: Any, dtype: Any
) -> None:
    array, like = await pg.empty(shape, dtype), np.empty(shape, dtype)
    assert type(array) is np.ndarray
    assert (array.shape, array.dtype, array.strides) == (like.shape, like.dtype, like.strides)
    assert array.flags.carray
    array[...] = 1
    assert np.all(array.astype(complex) == 1)


@pytest.mark.ranks(2)
@parametrize_transports("shm")
@pytest.mark.parametrize(
    ("shape", "dtype", "error", "message"),
    [
        ("3", "f4", TypeError, "shape must be an int or a tuple of ints, not '3'"),
        (2.0, "f4", TypeError, "shape must be an int or a tuple of ints, not 2.0"),
        ((2, None), "f4", TypeError, "shape must be an int or a tuple of ints"),
        (-1, "f4", ValueError, "shape=-1 has a negative number"),
        ((3, -4), "f4", ValueError, "has a negative number"),
        (1 << 62, "f4", ValueError, "which exceeds the address space"),
        (3, "no such", TypeError, "dtype='no such' is not a NumPy dtype"),
        (3, object, TypeError, "dtype object contains Python objects"),
        (3, ">f4", TypeError, "foreign byte order"),
        (3, ">i4", TypeError, "in foreign byte order"),
    ],
)
async def test_empty_method_refuses_invalid_shapes_and_dtypes(
    pg: ProcessGroup, shape: Any, dtype: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        await pg.empty(shape, dtype)


@pytest.mark.ranks(2)
@parametrize_transports("shm")
async def test_empty_method_of_a_closed_group_raises_an_error(pg: ProcessGroup) -> None:
    pg.abort("over")
    with pytest.raises(GroupRevokedError):
        await pg.empty(3, int)
    await pg.shutdown()
    with pytest.raises(GroupClosedError):
        await pg.empty(3, int)


async def test_empty_method_completes_although_the_group_ends_during_the_call() -> None:
    async def rank(pg: ProcessGroup) -> Any:
        making = asyncio.ensure_future(pg.empty(LARGE, np.float64))
        await asyncio.sleep(0)
        await pg.shutdown()
        array = await making
        array[:] = 1
        return array

    first, second = await run_ranks(2, rank, transport="shm")
    assert np.all(first + second == 2)


@pytest.mark.ranks(2)
@parametrize_transports("shm")
async def test_event_loop_runs_while_the_empty_method_reserves_memory(pg: ProcessGroup) -> None:
    making = asyncio.ensure_future(pg.empty(4 * LARGE, np.float64))
    turns = 0
    while not making.done():
        await asyncio.sleep(0)
        turns += 1
    assert turns >= 4 * LARGE * 8 // SEGMENT


@pytest.mark.parametrize("code", [errno.ENOMEM, errno.EPERM, errno.EMFILE])
async def test_empty_method_returns_an_ordinary_array_if_shared_memory_is_unavailable(
    code: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def memfd_create(*_: Any) -> int:
        raise OSError(code, os.strerror(code))

    async def rank(pg: ProcessGroup) -> None:
        await pg.barrier()  # the links need memory, too
        monkeypatch.setattr(os, "memfd_create", memfd_create)
        for _ in range(3):
            array = await registered_array(pg, np.ones(LARGE))
            await pg.allreduce(array)
            assert np.all(array == 2)
        assert not segment_count(pg)

    with caplog.at_level(logging.WARNING, "aiocoll"):
        await run_ranks(2, rank, transport="shm")
    warnings = [record.getMessage() for record in caplog.records if "returns ordinary memory" in record.getMessage()]
    assert len(warnings) == 2, f"{len(warnings)} warnings, not one per rank"
    assert os.strerror(code) in warnings[0]


async def test_empty_method_refuses_an_array_larger_than_the_available_memory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Check that the size is compared first: the kernel would accept the request and later kill a process."""
    (tmp_path / "meminfo").write_text(f"MemTotal: {4 * LARGE // 1024} kB\nMemAvailable: {LARGE // 1024} kB\n")
    redirect_files(monkeypatch, {"/proc/meminfo": tmp_path / "meminfo"})

    async def rank(pg: ProcessGroup) -> None:
        await pg.empty(LARGE, np.float64)
        assert not segment_count(pg)
        await pg.empty(LARGE // 2, np.uint8)
        assert segment_count(pg) == 1

    await run_ranks(2, rank, transport="shm")


@pytest.mark.ranks(2)
@parametrize_transports("shm")
@pytest.mark.parametrize("turns", range(1, 8))
async def test_cancelled_call_of_the_empty_method_leaves_no_memory(pg: ProcessGroup, turns: int) -> None:
    making = asyncio.ensure_future(pg.empty(LARGE, np.float64))
    for _ in range(turns):
        await asyncio.sleep(0)
    making.cancel()
    with pytest.raises(asyncio.CancelledError):
        await making
    assert not segment_count(pg)


async def _correct_by_turn(pg: ProcessGroup) -> list[bool]:
    """Allreduce several slices of a registered array; return whether each result is correct."""
    array = await pg.empty(3 * LARGE, np.float32)
    results = []
    for turn in range(6):
        part = array[turn * 1000 :]
        part[:] = np.arange(len(part)) % 100 + pg.rank()
        await pg.allreduce(part)
        size = pg.size()
        results.append(np.array_equal(part, np.arange(len(part)) % 100 * size + size * (size - 1) // 2))
    return results


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 4])
async def test_registered_arrays_work_between_processes(world_size: int) -> None:
    assert await run_processes(world_size, _correct_by_turn) == [[True] * 6] * world_size
