"""Allreduce of scipy.sparse arrays; for torch's sparse tensors, see `test_sparse_torch.py`."""

from __future__ import annotations

import asyncio
import threading
from itertools import product
from typing import Any

import numpy as np
import pytest
import scipy.sparse

from aiocoll import GroupOptions, ProcessGroup, ReduceOp, testing
from aiocoll.algorithms.machine import Tuning
from aiocoll.completion import Completion
from aiocoll.elements.dtypes import by_name, from_float32, to_float32
from aiocoll.elements.entries import Entries, coalesce_entries, merge_entries, pack, unpack
from aiocoll.errors import CollectiveMismatchError, CollectiveTimeoutError, GroupError, GroupRevokedError
from aiocoll.group import sparse_reduce
from aiocoll.group.prepared_call import PreparedCall
from aiocoll.testing.virtual import run_virtual
from aiocoll.work import Work, completion_of

from ..internals import Limits, comm_of, dispatcher_of, make_calls_fail, replace_parts
from ..ranks import LINKS, parametrize_transports, run_ranks, wait_until
from .sparse_ways import every_way

FORMATS = ("coo_array", "coo_matrix", "csr_array", "csr_matrix", "csc_array", "csc_matrix")
DTYPES = ("bool", *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)),
          "float32", "float64", "complex64", "complex128")  # fmt: skip
SHAPE = (12, 7)


def rank_array(rank: int, form: str = "csr_array", dtype: str = "float64", shape: tuple[int, int] = SHAPE) -> Any:
    """Return a sparse array with entries in the first row, which all ranks share, and in a row of this rank."""
    dense = np.zeros(shape, dtype)
    dense[0] = rank + 1
    dense[1 + rank % (shape[0] - 1)] = 100
    return getattr(scipy.sparse, form)(dense)


def total(size: int, dtype: str = "float64", shape: tuple[int, int] = SHAPE) -> Any:
    dense = np.zeros(shape, dtype)
    dense[0] = size * (size + 1) // 2
    for rank in range(size):
        dense[1 + rank % (shape[0] - 1)] += np.array(100, dtype)
    return dense


def entry_count(array: Any) -> int:
    return int(array.data.size)


async def reduce_one(pg: ProcessGroup, form: str, dtype: str) -> Any:
    array = rank_array(pg.rank(), form, dtype)
    work = pg.allreduce(array)
    assert (work.op, work.seq) == ("ALLREDUCE_SPARSE", 1)
    assert pg.pending() == ([] if work.done() else [work])
    assert await work is array
    assert pg.pending() == []
    assert type(array).__name__ == form
    assert array.dtype == dtype
    array.check_format() if hasattr(array, "check_format") else None
    assert array.has_canonical_format
    assert np.array_equal(array.toarray(), total(pg.size(), dtype))
    assert entry_count(array) == SHAPE[1] * (1 + min(pg.size(), SHAPE[0] - 1))
    after = np.ones(3)
    work = pg.allreduce(after)
    await work
    assert work.seq == 2
    assert after[0] == pg.size()
    return array.toarray().tobytes()


@every_way
@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
async def test_sparse_allreduce_returns_the_summed_entries_of_all_ranks(size: int, way: str) -> None:
    first, *others = await run_ranks(size, reduce_one, "csr_array", "float64")
    assert all(each == first for each in others)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.ranks(3)
async def test_sparse_allreduce_writes_the_result_in_place_for_every_format(
    pg: ProcessGroup, form: str, way: str
) -> None:
    await reduce_one(pg, form, "float32")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.ranks(4)
async def test_sparse_allreduce_supports_every_dtype(pg: ProcessGroup, dtype: str, way: str) -> None:
    await reduce_one(pg, "coo_array", dtype)


@pytest.mark.ranks(3)
@parametrize_transports(*LINKS)
async def test_sparse_allreduce_works_over_every_transport(pg: ProcessGroup, way: str) -> None:
    await reduce_one(pg, "csc_array", "int64")


@pytest.mark.ranks(3)
async def test_sparse_allreduce_wraps_integers_and_combines_bools_by_or(pg: ProcessGroup, way: str) -> None:
    small = scipy.sparse.coo_array(np.array([[100, 0, 1]], np.int8))
    flags = scipy.sparse.coo_array(np.array([[True, False, pg.rank() == 1]]))
    await pg.allreduce(small)
    await pg.allreduce(flags)
    assert small.toarray().tolist() == [[300 - 256, 0, 3]]
    assert flags.toarray().tolist() == [[True, False, True]]


@pytest.mark.ranks(2)
async def test_sparse_allreduce_sums_duplicates_and_keeps_zero_sums(pg: ProcessGroup, way: str) -> None:
    sign = 1 if pg.rank() else -1
    rows, columns = np.array([1, 0, 1, 1]), np.array([2, 0, 2, 2])
    array = scipy.sparse.coo_array((np.array([1.0, sign * 5, 2, 3]), (rows, columns)), shape=(2, 3))
    await pg.allreduce(array)
    assert (array.coords[0].tolist(), array.coords[1].tolist()) == ([0, 1], [0, 2])
    assert array.data.tolist() == [0.0, 12.0]


@pytest.mark.ranks(2)
async def test_sparse_allreduce_accepts_unsorted_columns_and_data_arrays_with_spare_space(
    pg: ProcessGroup, way: str
) -> None:
    # The columns of a row are in descending order, and the data arrays are longer than `indptr` states.
    array = scipy.sparse.csr_array((2, 4))
    array.indptr = np.array([0, 2, 3], array.indptr.dtype)
    array.indices = np.array([3, 1, 0, 9, 9], array.indices.dtype)
    array.data = np.array([1.0, 2.0, 3.0, 9.0, 9.0])
    await pg.allreduce(array)
    assert array.toarray().tolist() == [[0, 4, 0, 2], [6, 0, 0, 0]]


@pytest.mark.ranks(4)
async def test_sparse_allreduce_sums_in_rank_order(pg: ProcessGroup) -> None:
    array = scipy.sparse.coo_array(np.array([[(1e16, 1.0, -1e16, 1.0)[pg.rank()]]]))
    await pg.allreduce(array)
    assert array.data[0] == 1.0  # pairwise sums would give 0 or 2


@pytest.mark.ranks(3)
@pytest.mark.parametrize("shape", [(4, 5), (0, 5), (5, 0), (0, 0)])
@pytest.mark.parametrize("holder", [None, 1])
async def test_sparse_allreduce_accepts_ranks_without_entries(
    pg: ProcessGroup, shape: tuple[int, int], holder: int | None, way: str
) -> None:
    for form in FORMATS:
        array = getattr(scipy.sparse, form)(shape, dtype=np.float32)
        holds = holder is not None and 0 not in shape
        if holds and pg.rank() == holder:
            dense = np.zeros(shape, np.float32)
            dense[2, 3] = 5
            array = getattr(scipy.sparse, form)(dense)
        assert await pg.allreduce(array) is array
        assert array.shape == shape
        assert array.toarray().sum() == (5 if holds else 0)
        assert entry_count(array) == (1 if holds else 0)


@pytest.mark.ranks(2)
async def test_sparse_allreduce_supports_one_and_three_dimensions(pg: ProcessGroup, way: str) -> None:
    flat = scipy.sparse.coo_array((np.array([2.0, 3.0]), (np.array([4, pg.rank()]),)), shape=(5,))
    await pg.allreduce(flat)
    assert flat.toarray().tolist() == [3, 3, 0, 0, 4]
    row = scipy.sparse.csr_array(np.array([0, pg.rank(), 7]))
    await pg.allreduce(row)
    assert row.shape == (3,)
    assert row.toarray().tolist() == [0, 1, 14]
    if tuple(map(int, scipy.__version__.split(".")[:2])) >= (1, 15):
        cube = scipy.sparse.coo_array((np.array([1]), ([1], [0], [pg.rank()])), shape=(2, 3, 2))
        await pg.allreduce(cube)
        assert [each.tolist() for each in cube.coords] == [[1, 1], [0, 0], [0, 1]]


@pytest.mark.ranks(2)
async def test_sparse_allreduce_supports_positions_beyond_32_bits(pg: ProcessGroup) -> None:
    shape = (3_000_000, 3_000_000)
    last = np.array([2_999_999, pg.rank()])
    array = scipy.sparse.coo_array((np.array([1.0, 2.0]), (last, last)), shape=shape)
    await pg.allreduce(array)
    assert array.coords[1].tolist() == [0, 1, 2_999_999]
    assert array.data.tolist() == [2.0, 2.0, 2.0]
    huge = scipy.sparse.coo_array((1 << 40, 1 << 40))
    with pytest.raises(ValueError, match="do not fit in 64-bit indices"):
        pg.allreduce(huge)


async def mismatch_text(pg: ProcessGroup, *arrays: Any) -> str:
    with pytest.raises(CollectiveMismatchError) as caught:
        await pg.allreduce(arrays[pg.rank()])
    with pytest.raises(GroupRevokedError):
        pg.allreduce(np.ones(1))
    return str(caught.value)


@pytest.mark.ranks(2)
@parametrize_transports(*LINKS)
@pytest.mark.parametrize(
    ("one", "other", "words"),
    [
        (rank_array(0), rank_array(1, shape=(7, 12)), ("shape=[12, 7]", "shape=[7, 12]")),
        (rank_array(0), rank_array(1, dtype="float32"), ("dtype=float64", "dtype=float32")),
        (rank_array(0), np.zeros(SHAPE), ("ALLREDUCE_SPARSE(shape=[12, 7]", "ALLREDUCE(shape=[12, 7]")),
    ],
    ids=["shape", "dtype", "dense"],
)
async def test_mismatched_sparse_allreduces_raise_an_error(
    pg: ProcessGroup, one: Any, other: Any, words: tuple[str, ...]
) -> None:
    message = await mismatch_text(pg, one, other)
    assert "Collectives differ in the following:" in message
    assert all(word in message for word in words), message


@pytest.mark.ranks(3)
async def test_sparse_formats_may_differ_between_ranks(pg: ProcessGroup, way: str) -> None:
    array = rank_array(pg.rank(), FORMATS[pg.rank() * 2])
    await pg.allreduce(array)
    assert np.array_equal(array.toarray(), total(3))


@pytest.mark.ranks(2)
async def test_unsupported_sparse_array_is_refused_at_the_call(pg: ProcessGroup) -> None:
    array = rank_array(pg.rank())
    for op in ("PRODUCT", "MIN", "MAX"):
        with pytest.raises(ValueError, match=f"op=ReduceOp.{op} is not defined on sparse arrays, since"):
            pg.allreduce(array, getattr(ReduceOp, op))
    with pytest.raises(TypeError, match="op BAND is not defined on float64"):
        pg.allreduce(array, ReduceOp.BAND)
    with pytest.raises(TypeError, match="op must be a ReduceOp"):
        pg.allreduce(array, "sum")  # type: ignore[arg-type]
    for form in ("lil", "dok", "dia", "bsr"):
        with pytest.raises(TypeError, match=rf"in format '{form}'; pass tensor.tocsr\(\)"):
            pg.allreduce(array.asformat(form))
    with pytest.raises(TypeError, match=r"tensor: dtype .* is not supported"):
        pg.allreduce(array.astype(np.longdouble))
    with pytest.raises(TypeError, match="tensor must be a dense array, not a csr_array: only allreduce, reduce"):
        pg.scan(array)
    with pytest.raises(TypeError, match=r"outputs\[0\] must be a dense array"):
        pg.allgather([array] * 2, np.ones(3))
    with pytest.raises(TypeError, match="key must be a str"):
        pg.allreduce(array, key=1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="timeout"):
        pg.allreduce(array, timeout=-1)
    wrong = scipy.sparse.coo_array(np.eye(3))
    wrong.coords = (np.array([0, 1, 3]), np.array([0, 1, 2]))
    with pytest.raises(ValueError, match="tensor has indices in dimension 0 outside the range 0 to 2"):
        pg.allreduce(wrong)
    work = pg.allreduce(array)  # the refused calls have not taken a number
    assert work.seq == 1
    await work


async def test_wrong_indices_of_a_large_sparse_array_fail_the_call_on_all_ranks(limits: Limits) -> None:
    limits(max_sparse_inline=-1)

    async def run_rank(pg: ProcessGroup) -> None:
        array = scipy.sparse.csr_array(np.eye(3))
        if pg.rank() == 1:
            array.indices = np.array([0, 1, -1], array.indices.dtype)
        with pytest.raises(
            GroupError, match=r"ALLREDUCE_SPARSE \(sequence 1\) .* failed on rank 1: ValueError: tensor has"
        ):
            await pg.allreduce(array)
        assert array.indices[0] == 0

    await run_ranks(3, run_rank)


@pytest.mark.parametrize("step", ["first", "last"])
async def test_step_of_a_sparse_call_that_fails_on_one_rank_fails_the_call_on_all_ranks(
    step: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = {"first": ("unpack_entries", "scatter_entries"), "last": ("merge_entries", "gather_entries")}[step]
    make_calls_fail(monkeypatch, MemoryError("no room"), *parts)

    async def run_rank(pg: ProcessGroup) -> None:
        with pytest.raises(GroupError, match=r"failed on rank \d: MemoryError: no room"):
            await pg.allreduce(rank_array(pg.rank()))
        assert not pg.pending()

    await run_ranks(2, run_rank)


@pytest.mark.ranks(2)
@parametrize_transports(*LINKS)
async def test_keyed_sparse_calls_match_in_opposite_orders(pg: ProcessGroup, way: str) -> None:
    arrays = [rank_array(pg.rank()) for _ in range(4)]
    order = range(4) if pg.rank() % 2 else reversed(range(4))
    works = {index: pg.allreduce(arrays[index], key=f"layer{index}") for index in order}
    dense = np.full(5, 1.0)
    await pg.allreduce(dense)
    for index, work in works.items():
        assert await work is arrays[index]
        assert (work.key, work.seq) == (f"layer{index}", 1)
        assert np.array_equal(arrays[index].toarray(), total(2))
    assert dense[0] == 2


@pytest.mark.ranks(3)
async def test_drain_waits_for_concurrent_sparse_calls(pg: ProcessGroup, way: str) -> None:
    arrays = [rank_array(pg.rank()) for _ in range(20)]
    works = [pg.allreduce(array) for array in arrays]
    pending = pg.pending()
    assert len(pending) == len({id(work) for work in pending})
    await pg.drain()
    assert all(work.is_success() for work in works)
    assert all(np.array_equal(array.toarray(), total(3)) for array in arrays)


@pytest.mark.ranks(2)
async def test_cancelled_await_does_not_cancel_the_sparse_call(pg: ProcessGroup, way: str) -> None:
    array = rank_array(pg.rank())
    if pg.rank() == 0:
        work = pg.allreduce(array)
        waiting = asyncio.ensure_future(work.join())
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait([waiting])
        assert not work.done()
        await pg.send(np.zeros(1), 1)
        await pg.drain()
        assert work.result() is array
    else:
        await pg.recv(np.zeros(1), 0)
        await pg.allreduce(array)
    assert np.array_equal(array.toarray(), total(2))


async def test_abort_fails_a_sparse_call_during_its_calculation(
    monkeypatch: pytest.MonkeyPatch, limits: Limits
) -> None:
    limits(max_sparse_inline=-1)
    held = threading.Event()
    started: list[int] = []

    def wait_and_merge(parts: Any, dtype: Any, divide: Any = None) -> Entries:
        started.append(1)
        assert held.wait(20)
        return merge_entries(parts, dtype, divide)

    replace_parts(monkeypatch, merge_entries=wait_and_merge)
    monkeypatch.setattr(sparse_reduce, "is_dense_faster", lambda *_: False)

    async def run_rank(pg: ProcessGroup) -> None:
        array = rank_array(pg.rank())
        work = pg.allreduce(array)
        await wait_until(lambda: len(started) == 2)
        assert pg.pending() == [work]
        if pg.rank() == 0:
            work.abort()
        with pytest.raises(GroupError, match="ALLREDUCE_SPARSE was aborted by rank 0"):
            await work
        assert not pg.pending()
        await pg.shutdown()  # the shutdown drops the result of the thread
        held.set()
        assert np.array_equal(array.toarray(), rank_array(pg.rank()).toarray())

    await run_ranks(2, run_rank)


@pytest.mark.ranks(3)
async def test_sparse_call_that_fails_in_a_later_step_is_not_reported_as_completed(
    pg: ProcessGroup, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    await pg.allreduce(rank_array(pg.rank()))
    await pg.allreduce(rank_array(pg.rank()), key="k")
    await pg.barrier()
    make_calls_fail(monkeypatch, MemoryError("no room"), "merge_entries", "gather_entries")
    works = [pg.allreduce(rank_array(pg.rank()), key="k"), pg.allreduce(rank_array(pg.rank()))]
    for work in works:
        with pytest.raises(GroupError):
            await work
    async with await pg.shrink() as again:
        for completed in (again.completed_everywhere, again.completed_somewhere):
            assert completed.through == 2
            assert 3 not in completed
            assert ("k", 1) in completed
            assert ("k", 2) not in completed


@pytest.mark.ranks(2)
@pytest.mark.parametrize("form", ["coo_array", "csr_array"])
async def test_sparse_result_does_not_share_memory_with_received_data(pg: ProcessGroup, form: str) -> None:
    """Let only one rank have entries, which are not aligned in the received frame."""
    array = getattr(scipy.sparse, form)((5, 5), dtype="complex128")
    if pg.rank() == 1:
        array = getattr(scipy.sparse, form)(np.diag([1j, 0, 1j, 1j, 0]))
    await pg.allreduce(array)
    assert np.array_equal(array.toarray(), np.diag([1j, 0, 1j, 1j, 0]))
    for each in (array.data, *(array.coords if form == "coo_array" else (array.indices, array.indptr))):
        assert each.flags.aligned
        assert each.flags.writeable
        assert each.base is None or each.base.nbytes == each.nbytes


@pytest.mark.ranks(2)
async def test_sparse_call_fails_if_a_rank_leaves(pg: ProcessGroup) -> None:
    if pg.rank() == 1:
        await pg.shutdown()
        return
    with pytest.raises(ConnectionError, match="needs rank 1, which has left"):
        await pg.allreduce(rank_array(0))


def test_timeout_of_a_sparse_call_covers_all_its_steps() -> None:
    async def run_rank(pg: ProcessGroup) -> float:
        loop = asyncio.get_running_loop()
        array = rank_array(pg.rank())
        began = loop.time()
        await pg.allreduce(array)
        took = loop.time() - began
        assert took >= 2.0  # the call takes two steps of one second each
        began = loop.time()
        with pytest.raises(CollectiveTimeoutError, match=r"ALLREDUCE_SPARSE .* did not complete within 1.5 s"):
            await pg.allreduce(array, timeout=1.5)
        return loop.time() - began

    for took in run_virtual(2, run_rank, latency=(1.0, 1.0)):
        assert 1.5 <= took < 2.0


def test_timeout_error_of_a_sparse_call_names_the_missing_rank() -> None:
    async def run_rank(pg: ProcessGroup) -> None:
        if pg.rank() < 2:
            with pytest.raises(CollectiveTimeoutError, match="ALLREDUCE_SPARSE") as caught:
                await pg.allreduce(rank_array(pg.rank()), timeout=5)
            assert list(caught.value.ranks) == [2]
        else:
            with pytest.raises(CollectiveTimeoutError):
                await pg.recv(np.zeros(1), 0, timeout=60)

    run_virtual(3, run_rank)


def test_sparse_run_on_a_virtual_clock_is_reproducible() -> None:
    async def run_rank(pg: ProcessGroup) -> tuple[bytes, float]:
        random = np.random.default_rng(pg.rank())
        array = scipy.sparse.random_array((300, 300), density=0.2, format="csr", rng=random)
        await pg.allreduce(array)
        return array.data.tobytes(), asyncio.get_running_loop().time()

    once = run_virtual(3, run_rank, seed=5, latency=(0.001, 0.01))
    assert run_virtual(3, run_rank, seed=5, latency=(0.001, 0.01)) == once
    assert len({data for data, _ in once}) == 1


async def test_interceptor_can_start_a_sparse_call_later() -> None:
    class DelayingInterceptor:
        moves_nothing = records = False

        def __init__(self) -> None:
            self.calls: list[tuple[PreparedCall, Completion]] = []

        def take(self, call: PreparedCall) -> Work[Any]:
            completion = Completion(comm_of(group).endpoint, call.op, 1, call.key, dispatcher_of(group))
            call.expect(completion)
            self.calls.append((call, completion))
            return Work(completion)

    async def run_rank(pg: ProcessGroup) -> None:
        nonlocal group
        later, array = DelayingInterceptor(), rank_array(pg.rank())
        group = pg
        with dispatcher_of(pg).scoped(later):
            work = pg.allreduce(array)
        ((call, completion),) = later.calls
        assert completion is completion_of(work)
        assert call.op == "ALLREDUCE_SPARSE"
        assert call.result is array
        identity, _ = dispatcher_of(pg).numbered(call.key)
        comm_of(pg).enter(call.operation(comm_of(pg), identity, completion))
        assert await work is array
        assert np.array_equal(array.toarray(), total(2))

    group: Any = None
    await run_ranks(2, run_rank)


# -- arithmetic on entries, and the choice of the algorithm


@pytest.mark.parametrize(("name", "many"), [("float16", 4096), ("bfloat16", 4096), ("float8_e4m3fn", 256)])
def test_sparse_sums_of_narrow_floats_are_rounded_once(name: str, many: int) -> None:
    """Sum so many ones that rounding after each addition would no longer change the sum."""
    dtype = by_name(name)
    one, got = np.zeros(1, dtype.storage), np.empty(1, np.float32)
    from_float32(dtype)(np.ones(1, np.float32), one)
    places = np.zeros(many, np.int32)
    for summed in (
        merge_entries([Entries(places[:1], one)] * many, dtype),
        coalesce_entries(places, np.repeat(one, many), dtype),
    ):
        to_float32(dtype)(summed.values, got)
        assert got[0] == many


@pytest.mark.parametrize("dense", [(), (3,), (0,)])
def test_packed_sparse_entries_are_unpacked_unchanged(dense: tuple[int, ...]) -> None:
    for count in (0, 1, 5):
        shape = (count, *dense)
        values = np.arange(np.prod(shape, dtype=int), dtype=np.float64)
        entries = Entries(np.arange(count, dtype=np.int32), values.reshape(shape))
        again = unpack(pack(entries), count, entries)
        assert np.array_equal(again.places, entries.places)
        assert again.values.shape == shape
        assert np.array_equal(again.values, entries.values)


def test_dense_exchange_of_sparse_arrays_is_selected_only_for_many_entries() -> None:
    machine = Tuning().machine
    for size, world_size in product((1000, 10**7), (2, 3, 4, 7, 64)):
        pays = [
            sparse_reduce.is_dense_faster(world_size * int(size * density), 8, size, 4, world_size, machine)
            for density in (0, 0.0001, 0.001, 0.01, 0.1, 0.5, 1.0)
        ]
        assert pays == sorted(pays)
        assert not pays[1]
        assert pays[-1]
    assert not sparse_reduce.is_dense_faster(10**6, 8, 10**12, 4, 4, machine)
    assert not sparse_reduce.is_dense_faster(1000, 8, 1000, 4, 1, machine)


@pytest.mark.parametrize("debug", ["off", "detail"])
@pytest.mark.parametrize("in_block", [False, True])
async def test_sparse_allreduce_works_inside_coalescing_and_with_debug_detail(in_block: bool, debug: Any) -> None:

    async def run_rank(pg: ProcessGroup) -> None:
        arrays = [rank_array(pg.rank(), kind) for kind in FORMATS[:3]]
        if in_block:
            async with pg.coalescing():
                works = [pg.allreduce(array) for array in arrays]
                dense = pg.allreduce(pg.rank())
            assert dense.result() == 3
        else:
            works = [pg.allreduce(array) for array in arrays]
        for array, work in zip(arrays, works, strict=True):
            assert await work is array
            assert np.array_equal(array.toarray(), total(3))

    await testing.run_ranks(3, run_rank, options=GroupOptions(debug=debug))
