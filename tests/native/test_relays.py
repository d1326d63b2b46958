"""Collectives on large arrays through chunk queues, on native ranks alone and together with pure ranks."""

from __future__ import annotations

import asyncio
import mmap
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from aiocoll import CollectiveMismatchError, GroupError, ProcessGroup, ReduceOp
from aiocoll.engine.operations.shm_ring import LAG, ShmRing
from aiocoll.work import Work

from ..internals import Limits, comm_of, is_native, native_calls_of
from ..reductions import DTYPES, OPS, allowed, numpy_dtype, reduce_op
from .cases import bits
from .groups import group_of_ranks, open_links, pending_in_python

#: Jobs, one letter per rank: N if the accelerator carries out the rank's calls (native), P for pure Python.
JOBS = ("NN", "NP", "PN", "NPN", "NNNN", "PNNP")
#: The number of float64 elements in a chunk.
CHUNK = 16384
#: Dtypes and ops for which the accelerator can call the inner loops of NumPy.
WITH_LOOPS = ("int8", "int16", "int32", "uint64", "float32", "float64", "complex64", "complex128")
UFUNCS = ("SUM", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")


@pytest.fixture(autouse=True)
def _no_age_checks(limits: Limits) -> None:
    """Turn off the handover of slow calls to Python, since any call may be slow on a loaded machine."""
    limits(report_after=1000.0, report_strays_after=1000.0)


def native_ranks(job: str) -> list[bool]:
    return [letter == "N" for letter in job]


def start_allreduce(pg: ProcessGroup, count: int, key: str | None = None) -> tuple[Work[Any], np.ndarray]:
    array = np.full(count, 2.0 ** pg.rank())
    return pg.allreduce(array, key=key), array


async def check_sums(calls: Sequence[tuple[Work[Any], np.ndarray]], size: int) -> None:
    async with asyncio.timeout(20):
        for work, array in calls:
            await work
            assert (array == 2.0**size - 1).all()


def queue_writer(pg: ProcessGroup) -> Any:
    """Return this rank's writer of the chunk queue to its right neighbour."""
    shared = comm_of(pg).channels[(pg.rank() + 1) % pg.size()].shared
    assert shared is not None
    return shared.chunks.writer


def counts(size: int, chunk: int) -> list[int]:
    """Return element counts near multiples of the chunk size, and one count whose last chunk may have one element."""
    return [chunk * size + extra for extra in (-size - 1, -1, 0, 2 * size, size)] + [5 * chunk + 7]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("job", JOBS)
async def test_native_relay_gives_the_same_bits_as_pure_ranks(job: str) -> None:
    size = len(job)
    async with group_of_ranks(native_ranks(job)) as pgs, group_of_ranks([False] * size, "pure") as pure:
        for number, (dtype, op) in enumerate((dtype, op) for dtype in DTYPES for op in OPS if allowed(op, dtype)):
            if size > 2 and (number + JOBS.index(job)) % 3:
                continue
            chunk = CHUNK * 8 // numpy_dtype(dtype).itemsize
            count = counts(size, chunk)[number % 6]
            found: list[list[bytes]] = []
            for group in (pgs, pure):
                arrays = [bits(dtype, count, rank) for rank in range(size)]
                works = [pg.allreduce(x, reduce_op(op, pg.rank())) for pg, x in zip(group, arrays, strict=True)]
                async with asyncio.timeout(20):
                    for work in works:
                        await work
                found.append([array.tobytes() for array in arrays])
                ends = {(count * (part + 1) // size - count * part // size) % chunk for part in range(size)}
                if group is pgs and op in UFUNCS and dtype in WITH_LOOPS:
                    assert [is_native(work) for work in works] == [each and 1 not in ends for each in native_ranks(job)]
            assert found[0] == found[1], f"{op} of {count} {dtype}"
        assert [pending_in_python(pg) for pg in pgs] == [0] * size


def start_between_two(
    pg: ProcessGroup, kind: str, dtype: str, count: int, op: str
) -> tuple[Work[Any], list[np.ndarray]]:
    """Start a collective of kind `kind` between two ranks; return the work and the arrays of this rank."""
    rank = pg.rank()
    mine, other = bits(dtype, count, kind, rank), np.zeros(2 * count, numpy_dtype(dtype))
    reduce = reduce_op(op, rank)
    if kind.startswith("broadcast"):
        return pg.broadcast(mine, int(kind[-1])), [mine]
    if kind.startswith("reduce from"):
        return pg.reduce(mine, int(kind[-1]), reduce), [mine]
    if kind == "scan":
        return pg.scan(mine, reduce), [mine]
    if kind == "exscan":
        return pg.exscan(mine, reduce), [mine]
    if kind == "allgather_into_tensor":
        return pg.allgather_into_tensor(other, mine), [other, mine]
    if kind == "allgather":
        blocks = [other[: count - 5], other[count:]]
        return pg.allgather(blocks, mine[: len(blocks[rank])]), [other, mine]
    if kind == "alltoall_base":
        return pg.alltoall_base(other, bits(dtype, 2 * count, rank)), [other]
    if kind == "alltoall":
        counts = [[9, count], [count - 7, 0]]  # the element counts that each rank sends to each rank
        outputs = [np.zeros(counts[peer][rank], numpy_dtype(dtype)) for peer in range(2)]
        return pg.alltoall(outputs, [bits(dtype, counts[rank][peer], rank, peer) for peer in range(2)]), outputs
    if kind.startswith("gather"):
        root, blocks = int(kind[-1]), [other[: count - 5], other[count:]]
        return pg.gather(blocks if rank == root else None, mine[: len(blocks[rank])], root), [other]
    if kind.startswith("scatter"):
        root, blocks = int(kind[-1]), [other[: count - 5], other[count:]]
        block = mine[: len(blocks[rank])]
        given = [bits(dtype, len(each), number) for number, each in enumerate(blocks)]
        return pg.scatter(block, given if rank == root else None, root), [mine]
    half = mine[: count // 2]
    if kind == "reduce_scatter_tensor":
        return pg.reduce_scatter_tensor(half, other[: 2 * len(half)] + bits(dtype, 2 * len(half), rank), reduce), [half]
    inputs = [bits(dtype, len(half) - 3, rank, 0), bits(dtype, len(half), rank, 1)]
    return pg.reduce_scatter(half[: len(inputs[rank])], inputs, reduce), [half, *inputs]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(("job", "dtype"), [("NN", "float32"), ("NP", "complex64"), ("PN", "int16"), ("NN", "float16")])
async def test_large_native_collectives_between_two_ranks_give_the_same_bits_as_pure_ranks(
    job: str, dtype: str
) -> None:
    rooted = ("broadcast", "reduce", "gather", "scatter")
    kinds = [f"{name} from {root}" for name in rooted for root in range(2)]
    kinds += [
        "scan",
        "exscan",
        "alltoall_base",
        "alltoall",
        "allgather_into_tensor",
        "allgather",
        "reduce_scatter_tensor",
        "reduce_scatter",
    ]
    async with group_of_ranks(native_ranks(job)) as pgs, group_of_ranks([False] * 2, "pure") as pure:
        for kind in kinds:
            for count in (2 * CHUNK, 30 * CHUNK + 14):
                found = []
                for group in (pgs, pure):
                    started = [start_between_two(pg, kind, dtype, count, "SUM") for pg in group]
                    async with asyncio.timeout(20):
                        for work, _ in started:
                            await work
                    found.append([[array.tobytes() for array in arrays] for _, arrays in started])
                    if group is pgs and dtype in WITH_LOOPS:
                        assert [is_native(work) for work, _ in started] == native_ranks(job), kind
                assert found[0] == found[1], f"{kind} of {count} {dtype}"


async def test_large_native_collectives_between_two_ranks_give_closed_form_results() -> None:
    async with group_of_ranks([True, True]) as pgs:
        count = 30 * CHUNK + 14
        kinds = ("broadcast from 0", "reduce from 1", "allgather_into_tensor", "reduce_scatter_tensor")
        for kind in (*kinds, "scan", "exscan", "alltoall_base", "alltoall", "scatter from 0", "gather from 1"):
            started = [start_between_two(pg, kind, "int64", count, "SUM") for pg in pgs]
            for work, _ in started:
                await work
            (first, *_), (second, *_) = (arrays for _, arrays in started)
            given = [bits("int64", count, kind, rank) for rank in range(2)]
            if kind.startswith("broadcast"):
                assert (second == given[0]).all()
            elif kind.startswith("reduce from") or kind == "scan":
                assert (second == given[0] + given[1]).all()
                assert (first == given[0]).all()
            elif kind == "exscan":
                assert (second == given[0]).all()
                assert (first == given[0]).all()
            elif kind == "allgather_into_tensor":
                assert (first == np.concatenate(given)).all()
                assert (second == first).all()
            elif kind == "alltoall_base":
                sent = np.stack([bits("int64", 2 * count, rank).reshape(2, count) for rank in range(2)])
                assert (np.stack([first, second]).reshape(2, 2, count) == sent.swapaxes(0, 1)).all()
            elif kind == "alltoall":
                for rank, (_, outputs) in enumerate(started):
                    for peer, output in enumerate(outputs):
                        assert (output == bits("int64", len(output), peer, rank)).all()
            elif kind == "gather from 1":
                assert (second[: count - 5] == given[0][: count - 5]).all()
                assert (second[count:] == given[1]).all()
                assert not first.any()
            elif kind == "scatter from 0":
                assert (first[: count - 5] == bits("int64", count - 5, 0)).all()
                assert (second == bits("int64", count, 1)).all()
            else:
                whole = sum(bits("int64", 2 * len(first), rank) for rank in range(2))
                assert (np.concatenate([first, second]) == whole).all()


@pytest.mark.parametrize("turns", range(4))
@pytest.mark.parametrize(
    "kind", ["broadcast from 0", "reduce from 1", "allgather_into_tensor", "reduce_scatter_tensor"]
)
async def test_large_native_collectives_between_two_ranks_can_be_handed_over(kind: str, turns: int) -> None:
    count = 60 * CHUNK
    async with group_of_ranks([True, True]) as pgs, group_of_ranks([True, True], "other") as others:
        results = []
        for group in (pgs, others):
            started = []
            for pg in group:
                started.append(start_between_two(pg, kind, "int64", count, "SUM"))
                for _ in range(turns):
                    await asyncio.sleep(0)
                    if group is pgs:
                        native_calls_of(pg).hand_over()
            for work, _ in started:
                async with asyncio.timeout(20):
                    await work
            results.append([[array.tobytes() for array in arrays] for _, arrays in started])
        assert results[0] == results[1]


@pytest.mark.parametrize("job", ["NN", "NP", "NNN"])
async def test_concurrent_native_calls_wait_for_the_chunk_queue_in_order(job: str) -> None:
    async with group_of_ranks(native_ranks(job)) as pgs:
        calls = [start_allreduce(pg, (9 - number) * CHUNK) for pg in pgs for number in range(6)]
        calls += [start_allreduce(pg, 3) for pg in pgs]
        await check_sums(calls, len(job))
        if "P" not in job:
            assert all(is_native(work) for work, _ in calls)
        assert [pending_in_python(pg) for pg in pgs] == [0] * len(job)


@pytest.mark.parametrize("job", ["NN", "NP", "NNN"])
async def test_large_keyed_native_calls_match_in_any_order(job: str) -> None:
    async with group_of_ranks(native_ranks(job)) as pgs:
        calls, keys = [], list("abcde")
        for pg in pgs:
            for number, key in enumerate(keys[pg.rank() :] + keys[: pg.rank()]):
                calls.append(start_allreduce(pg, 5 * CHUNK, key))
                if number == 1:
                    calls.append(start_allreduce(pg, 4 * CHUNK))
        await check_sums(calls, len(job))


#: The chunk size in bytes, and message lengths in bytes near the sizes at which the algorithm changes.
BYTES = CHUNK * 8
LENGTHS = [0, 1, *(limit + extra for limit in (BYTES // 2, BYTES, 2 * BYTES, 11 * BYTES) for extra in (-1, 0, 1))]
LENGTHS += [3_000_017]


def start_gather(pg: ProcessGroup, root: int, lengths: Sequence[int], sized: bool, key: str | None = None) -> Work[Any]:
    """Start a gather of byte arrays; with `sized`, the root passes output arrays."""
    rank = pg.rank()
    outputs = [np.zeros(length, np.uint8) for length in lengths] if sized and rank == root else None
    return pg.gather(outputs, bits("uint8", lengths[rank], rank, lengths), root, key=key)


async def check_gather(works: Sequence[Work[Any]], root: int, lengths: Sequence[int]) -> None:
    async with asyncio.timeout(20):
        for rank, work in enumerate(works):
            outputs = await work
            if rank != root:
                assert outputs is None
                continue
            assert [len(each) for each in outputs] == list(lengths)
            for sender, each in enumerate(outputs):
                assert each.tobytes() == bits("uint8", lengths[sender], sender, lengths).tobytes()


@pytest.mark.parametrize("job", ["NN", "NP", "PN", "PP"])
@pytest.mark.parametrize("root", [0, 1])
@pytest.mark.parametrize("sized", [True, False], ids=["outputs", "no outputs"])
async def test_native_gather_of_two_ranks_returns_both_blocks(job: str, root: int, sized: bool) -> None:
    async with group_of_ranks(native_ranks(job)) as pgs:
        for number, length in enumerate(LENGTHS):
            lengths = [LENGTHS[number - 3]] * 2
            lengths[1 - root] = length
            before = queue_writer(pgs[1 - root]).number
            works = [start_gather(pg, root, lengths, sized) for pg in pgs]
            await check_gather(works, root, lengths)
            expected = [native and (rank != root or sized) for rank, native in enumerate(native_ranks(job))]
            if length > BYTES // 2:
                assert [is_native(work) for work in works] == expected
                assert queue_writer(pgs[1 - root]).number - before == -(-length // BYTES)
            else:
                assert queue_writer(pgs[1 - root]).number == before
        assert [pending_in_python(pg) for pg in pgs] == [0, 0]


@pytest.mark.parametrize("first", [0, 1], ids=["root last", "root first"])
@pytest.mark.parametrize("job", ["NN", "PN", "NP"])
async def test_native_gathers_of_all_kinds_complete_concurrently(job: str, first: int) -> None:
    lengths = [(number * 70_001 % 900_000, number * 90_001 % 1_000_000) for number in range(12)]
    async with group_of_ranks(native_ranks(job)) as pgs:
        for root in range(2):
            works: dict[int, list[Work[Any]]] = {0: [], 1: []}
            for rank in (1 - root, root) if first == 0 else (root, 1 - root):
                order = range(12) if rank else range(11, -1, -1)
                keyed = {
                    number: start_gather(pgs[rank], root, lengths[number], number % 4 == 1, f"{number}")
                    for number in order
                    if number % 2
                }
                for number in range(12):
                    plain = number % 2 == 0
                    works[rank].append(
                        start_gather(pgs[rank], root, lengths[number], number % 4 == 0) if plain else keyed[number]
                    )
                await asyncio.sleep(0)
            for number in range(12):
                await check_gather([works[rank][number] for rank in range(2)], root, lengths[number])


@pytest.mark.parametrize("job", ["NN", "PN", "NP"])
@pytest.mark.parametrize("sized", [True, False], ids=["outputs", "no outputs"])
async def test_native_gather_uses_frames_while_the_chunk_queue_is_in_use(job: str, sized: bool) -> None:
    async with group_of_ranks(native_ranks(job)) as pgs:
        for root in range(2):
            sender = queue_writer(pgs[1 - root])
            assert sender.take(1, 99)
            before = sender.number
            for length in LENGTHS[2:]:
                for late in range(2):
                    lengths = (length, length)
                    works = {}
                    for rank in (root, 1 - root) if late else (1 - root, root):
                        works[rank] = start_gather(pgs[rank], root, lengths, sized)
                        for _ in range(3):
                            await asyncio.sleep(0)
                    await check_gather([works[0], works[1]], root, lengths)
            assert sender.number == before
            sender.leave(failed=False)


@pytest.mark.parametrize("sized", [True, False], ids=["outputs", "no outputs"])
async def test_native_gather_without_an_open_link_completes(sized: bool) -> None:
    for root in range(2):
        async with group_of_ranks([True, True], linked=False) as pgs:
            works = [start_gather(pg, root, (3 * BYTES + 1, 5 * BYTES), sized) for pg in pgs]
            await check_gather(works, root, (3 * BYTES + 1, 5 * BYTES))


@pytest.mark.parametrize("turns", range(5))
@pytest.mark.parametrize("sized", [True, False], ids=["outputs", "no outputs"])
async def test_native_gather_can_be_handed_over_at_any_chunk(sized: bool, turns: int) -> None:
    async with group_of_ranks([True, True]) as pgs:
        for root in range(2):
            lengths = (40 * BYTES + 3, 40 * BYTES + 3)
            works = {}
            for rank in (1 - root, root):
                works[rank] = start_gather(pgs[rank], root, lengths, sized)
                for _ in range(turns):
                    await asyncio.sleep(0)
                native_calls_of(pgs[rank]).hand_over()
            await check_gather([works[0], works[1]], root, lengths)


@pytest.mark.parametrize("sized", [True, False], ids=["outputs", "no outputs"])
async def test_gather_chunks_of_a_failed_group_block_no_other_group(sized: bool) -> None:
    lengths = (20 * BYTES, 20 * BYTES)
    async with group_of_ranks([True, True]) as pgs:
        for aborted in range(2):
            for entered in ([0], [1], [0, 1]):
                others = await asyncio.gather(*(pg.split(0) for pg in pgs))
                await open_links(others)
                lost = [start_gather(others[rank], 0, lengths, sized) for rank in entered]
                others[aborted].abort("a test")
                for work in lost:
                    with pytest.raises(GroupError, match="a test"):
                        await work
                works = [start_gather(pg, 0, lengths, sized) for pg in pgs]
                await check_gather(works, 0, lengths)
                await asyncio.gather(*(pg.shutdown() for pg in others))


@pytest.mark.parametrize("job", ["NN", "NP", "PN"])
async def test_error_names_both_mismatched_native_gathers(job: str) -> None:
    dtypes = [np.float32, np.float64]
    for sized in (True, False):
        async with group_of_ranks(native_ranks(job)) as pgs:
            outputs = [np.zeros(3 * CHUNK, np.float32) for _ in pgs] if sized else None
            works = [
                pg.gather(None if pg.rank() else outputs, np.zeros(3 * CHUNK, dtype), 0)
                for pg, dtype in zip(pgs, dtypes, strict=True)
            ]
            with pytest.raises(CollectiveMismatchError, match=r"rank 0 called GATHER.*float32.*; rank 1 .*float64"):
                async with asyncio.timeout(20):
                    await works[0]


@pytest.mark.parametrize("job", ["NN", "NP", "PN"])
@pytest.mark.parametrize("kind", ["gather", "broadcast"])
async def test_mismatch_of_finished_native_calls_is_reported(job: str, kind: str, limits: Limits) -> None:
    """Make mismatched calls that finish on both ranks, since each rank only sends chunks and reads none."""
    limits(report_strays_after=0.01)
    async with group_of_ranks(native_ranks(job)) as pgs:
        zero, one = pgs
        array = np.ones(CHUNK)
        works = [
            zero.scatter(np.ones(1), [np.ones(1), array], 0),
            one.gather(None, array, 0) if kind == "gather" else one.broadcast(array, 1),
        ]
        async with asyncio.timeout(20):
            for work in works:
                await work
            for pg in pgs:
                cause = await pg.wait_revoked()
                assert isinstance(cause, CollectiveMismatchError)
                assert re.search(rf"rank 0 called SCATTER.*; rank 1 called {kind.upper()}", str(cause))


async def scatter_and_check(pg: ProcessGroup, count: int, value: float, key: str | None = None) -> None:
    """Scatter from rank 0 and check the result; rank 0 finishes as soon as all its chunks are in the queue."""
    target = np.zeros(count)
    async with asyncio.timeout(20):
        await pg.scatter(target, [np.full(count, float(value))] * 2 if pg.rank() == 0 else None, 0, key=key)
    assert (target == value).all()


@pytest.mark.parametrize("job", ["NN", "NP", "PN"])
async def test_unread_chunks_of_a_keyed_call_delay_no_other_call(job: str) -> None:
    async with group_of_ranks(native_ranks(job)) as pgs:
        for _ in range(3):
            sent = [asyncio.create_task(scatter_and_check(pgs[0], 2 * CHUNK, ord(key), key)) for key in "abc"]
            sent.append(asyncio.create_task(scatter_and_check(pgs[0], 2 * CHUNK, 7)))
            await asyncio.gather(*sent)
            await scatter_and_check(pgs[1], 2 * CHUNK, 7)
            for key in "cba":
                await scatter_and_check(pgs[1], 2 * CHUNK, ord(key), key)


@pytest.mark.parametrize("job", ["NN", "NP", "PN"])
async def test_unread_chunks_of_a_group_delay_no_other_group(job: str) -> None:
    async with group_of_ranks(native_ranks(job)) as pgs:
        others = await asyncio.gather(*(pg.split(0) for pg in pgs))
        await open_links(others)
        for _ in range(3):
            for group in (pgs, others):
                await scatter_and_check(group[0], 2 * CHUNK, 1.5)
            for group in (others, pgs):
                await scatter_and_check(group[1], 2 * CHUNK, 1.5)
        await asyncio.gather(*(pg.shutdown() for pg in others))


async def test_groups_that_share_a_chunk_queue_do_not_wait_for_each_other() -> None:
    """Let two ranks make their calls in two groups in opposite orders."""
    async with group_of_ranks([True, True]) as pgs:
        others = await asyncio.gather(*(pg.split(0) for pg in pgs))
        await open_links(others)

        first = [start_allreduce(pg, 6 * CHUNK) for pg in (pgs[0], others[1])]
        await asyncio.gather(
            check_sums([start_allreduce(others[0], 6 * CHUNK)], 2), check_sums([start_allreduce(pgs[1], 6 * CHUNK)], 2)
        )
        await check_sums(first, 2)
        await asyncio.gather(*(pg.shutdown() for pg in others))


@pytest.mark.parametrize("turns", range(0, 12, 2))
@pytest.mark.parametrize("size", [2, 3])
async def test_native_relay_can_be_handed_over_at_any_chunk(size: int, turns: int) -> None:
    async with group_of_ranks([True] * size) as pgs:
        calls = [start_allreduce(pg, 40 * CHUNK) for pg in pgs[1:]]
        for _ in range(turns):
            await asyncio.sleep(0)
        calls.append(start_allreduce(pgs[0], 40 * CHUNK))
        for pg in pgs:
            native_calls_of(pg).hand_over()
        (operation,) = comm_of(pgs[1]).in_flight.pending
        assert isinstance(operation, ShmRing)
        assert operation._put >= LAG
        assert operation._holds
        await check_sums(calls, size)
        assert not any(is_native(work) for work, _ in calls)
        later = [start_allreduce(pg, 4 * CHUNK) for pg in pgs]
        await check_sums(later, size)
        assert all(is_native(work) for work, _ in later)


async def test_native_call_that_waits_for_the_chunk_queue_can_be_handed_over() -> None:
    async with group_of_ranks([True, True]) as pgs:
        calls = [start_allreduce(pgs[0], 4 * CHUNK), start_allreduce(pgs[0], 4 * CHUNK)]
        assert native_calls_of(pgs[0]).count == 2
        native_calls_of(pgs[0]).hand_over()
        held = [operation._holds for operation in comm_of(pgs[0]).in_flight.pending]
        assert held == [True, False]
        await check_sums([*calls, start_allreduce(pgs[1], 4 * CHUNK), start_allreduce(pgs[1], 4 * CHUNK)], 2)


async def test_call_is_carried_out_in_python_while_the_chunk_queue_is_in_use() -> None:
    async with group_of_ranks([True, True]) as pgs:
        assert queue_writer(pgs[0]).take(1, 99)
        calls = [start_allreduce(pg, 4 * CHUNK) for pg in pgs]
        assert [is_native(work) for work, _ in calls] == [False, True]
        await check_sums(calls, 2)
        queue_writer(pgs[0]).leave(failed=False)
        calls = [start_allreduce(pg, 4 * CHUNK) for pg in pgs]
        await check_sums(calls, 2)
        assert all(is_native(work) for work, _ in calls)


async def test_chunks_of_a_failed_group_block_no_other_group() -> None:
    async with group_of_ranks([True, True]) as pgs:
        others = await asyncio.gather(*(pg.split(0) for pg in pgs))
        await open_links(others)
        lost, _ = start_allreduce(others[0], 8 * CHUNK)
        assert is_native(lost)
        others[0].abort("a test")
        with pytest.raises(GroupError, match="a test"):
            await lost
        calls = [start_allreduce(pg, 8 * CHUNK) for pg in pgs for _ in range(3)]
        await check_sums(calls, 2)
        later = [start_allreduce(pg, 8 * CHUNK) for pg in pgs]
        await check_sums(later, 2)
        assert all(is_native(work) for work, _ in later)
        await asyncio.gather(*(pg.shutdown() for pg in others))


@pytest.mark.parametrize("job", ["NN", "NP", "PN"])
async def test_error_names_both_mismatched_large_native_calls(job: str) -> None:
    async with group_of_ranks(native_ranks(job)) as pgs:
        arrays = [np.ones(8 * CHUNK) for _ in pgs]
        works = [pg.allreduce(x, op) for pg, x, op in zip(pgs, arrays, (ReduceOp.SUM, ReduceOp.MAX), strict=True)]
        for work in works:
            with pytest.raises(CollectiveMismatchError, match=r"rank 0 called ALLREDUCE.*SUM.*; rank 1 called .*MAX"):
                async with asyncio.timeout(20):
                    await work


async def test_native_and_python_relays_have_equal_counters_and_records() -> None:
    async with group_of_ranks([True, True]) as pgs, group_of_ranks([False, False], "pure") as pure:
        for group in (pgs, pure):
            await check_sums([start_allreduce(pg, 8 * CHUNK) for pg in group], 2)
        counted = [
            [line.split()[:7] for line in str(pg.stats()).splitlines() if line.startswith("ALLREDUCE ")]
            for pg in (*pgs, *pure)
        ]
        assert counted == [[["ALLREDUCE", "relay", "shm", "1", "0", "1", "MiB"]]] * 4
        waits = [re.findall(r"(?m)^rank (\d+) +(\d+)", str(pg.stats())) for pg in (*pgs, *pure)]
        assert waits[:2] == waits[2:]


async def test_native_relays_reduce_registered_arrays() -> None:
    for job in ("NN", "NP"):
        async with group_of_ranks(native_ranks(job)) as pgs:
            arrays = [await pg.empty(9 * CHUNK, np.float64) for pg in pgs]
            for _ in range(4):
                for pg, array in zip(pgs, arrays, strict=True):
                    array[:] = 2.0 ** pg.rank()
                await asyncio.gather(*(pg.allreduce(x).join() for pg, x in zip(pgs, arrays, strict=True)))
                assert all((array == 3).all() for array in arrays)


@pytest.mark.parametrize("distance", [0, 1, 16, 31, 32])
@pytest.mark.parametrize("count", [2000, 40_000, 300_001])
async def test_native_copies_are_exact_for_any_distance_within_a_page(count: int, distance: int) -> None:
    """Check copies of own blocks (first offset), copies from slots and chunks (second offset), and the bytes around."""
    async with group_of_ranks([True, True]) as pgs:
        for offset in (distance, 64 + distance):
            works, rooms = [], []
            for pg in pgs:
                _, source = place(count, 0)
                source[:] = np.arange(count) % 251 + pg.rank()
                room, target = place(2 * count, offset)
                works.append(pg.allgather_into_tensor(target, source))
                rooms.append((room, target))
            async with asyncio.timeout(20):
                for work in works:
                    await work
            assert [is_native(work) for work in works] == [True, True]
            for room, target in rooms:
                assert (target == np.concatenate([np.arange(count) % 251 + rank for rank in range(2)])).all()
                assert np.count_nonzero(room == 255) == len(room) - 2 * count


def place(count: int, offset: int) -> tuple[np.ndarray, np.ndarray]:
    """Return an array of bytes 255, and a view of it with `count` bytes, `offset` bytes after the start of a page."""
    room = np.full(count + 2 * mmap.PAGESIZE, 255, np.uint8)
    start = (offset - room.ctypes.data) % mmap.PAGESIZE
    return room, room[start : start + count]


@pytest.mark.parametrize("shift", [0, 1, 15])
async def test_non_temporal_stores_write_results_at_any_address(shift: int) -> None:
    """Check messages above 16 MiB, which use non-temporal stores, and the bytes around the target array."""
    count = (17 << 20) + 13
    async with group_of_ranks([True, True]) as pgs:
        given = [np.arange(count + rank, dtype=np.uint32).view(np.uint8)[: count + 40] for rank in range(2)]
        for name in ("broadcast", "allgather", "alltoall"):
            works, targets = [], []
            for pg, source in zip(pgs, given, strict=True):
                room = np.full(2 * count + 64, 255, np.uint8)
                mine, target = source[shift : shift + count], room[32 + shift : 32 + shift + 2 * count]
                if name == "broadcast":
                    target[:count] = mine
                    works.append(pg.broadcast(target[:count], 1))
                elif name == "allgather":
                    works.append(pg.allgather_into_tensor(target, mine))
                else:
                    works.append(pg.alltoall_base(target, np.concatenate([mine, mine[::-1]])))
                targets.append((room, target))
            async with asyncio.timeout(20):
                for work in works:
                    await work
            assert [is_native(work) for work in works] == [True, True]
            first, second = (source[shift : shift + count] for source in given)
            for rank, (room, target) in enumerate(targets):
                assert (room[: 32 + shift] == 255).all()
                assert (room[32 + shift + 2 * count :] == 255).all()
                if name == "broadcast":
                    assert (target[:count] == second).all()
                    assert (target[count:] == 255).all()
                else:
                    turned = name == "alltoall" and rank == 1
                    blocks = [each[::-1] if turned else each for each in (first, second)]
                    assert (target == np.concatenate(blocks)).all()


@pytest.mark.parametrize("job", ["NNN", "NPN", "PNNP", "NNNNN"])
@pytest.mark.parametrize("dtype", ["uint8", "float32", "complex128"])
async def test_native_broadcast_and_allgather_of_several_ranks_use_relays(job: str, dtype: str) -> None:
    size, itemsize = len(job), numpy_dtype(dtype).itemsize
    chunk = CHUNK * 8 // itemsize
    async with group_of_ranks(native_ranks(job)) as pgs:
        for count in (chunk // 2 + 1, chunk, chunk + 1, 9 * chunk - 1):
            for root in range(size):
                arrays = [bits(dtype, count, rank) for rank in range(size)]
                expected = arrays[root].tobytes()
                works = [pg.broadcast(array, root) for pg, array in zip(pgs, arrays, strict=True)]
                async with asyncio.timeout(20):
                    for work in works:
                        await work
                assert [is_native(work) for work in works] == native_ranks(job)
                assert [array.tobytes() for array in arrays] == [expected] * size
            arrays = [bits(dtype, count, rank) for rank in range(size)]
            wholes = [np.zeros(size * count, numpy_dtype(dtype)) for _ in range(size)]
            gathering = zip(pgs, wholes, arrays, strict=True)
            gathers = [pg.allgather_into_tensor(whole, array) for pg, whole, array in gathering]
            async with asyncio.timeout(20):
                for work in gathers:
                    await work
            assert [is_native(work) for work in gathers] == native_ranks(job)
            assert [whole.tobytes() for whole in wholes] == [b"".join(each.tobytes() for each in arrays)] * size
        assert [pending_in_python(pg) for pg in pgs] == [0] * size


async def test_native_allgather_of_uneven_blocks_does_not_use_a_relay() -> None:
    """Use blocks of different lengths, for which ranks would disagree on the number of chunks."""
    async with group_of_ranks([True] * 3) as pgs:
        lengths = [2 * CHUNK, 2 * CHUNK + 1, 5 * CHUNK]
        outputs = [[np.zeros(length) for length in lengths] for _ in pgs]
        works = [pg.allgather(outputs[pg.rank()], np.full(lengths[pg.rank()], 1.0 + pg.rank())) for pg in pgs]
        async with asyncio.timeout(20):
            for work in works:
                await work
        for each in outputs:
            assert all((block == 1.0 + rank).all() for rank, block in enumerate(each))
        assert not any(is_native(work) for work in works)
