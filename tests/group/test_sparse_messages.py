"""Messages of sparse arrays: sends, receives, probes and errors."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
import scipy.sparse

from aiocoll import PROC_NULL, CollectiveMismatchError, GroupError, ProcessGroup, Recv, Send, process_group
from aiocoll import distributed as dist

from ..internals import Limits
from ..ranks import LINKS, parametrize_transports, run_ranks

FORMATS = ("coo_array", "coo_matrix", "csr_array", "csr_matrix", "csc_array", "csc_matrix")
SHAPE = (12, 7)


def dense(rank: int, dtype: str = "float64") -> Any:
    x = np.zeros(SHAPE, dtype)
    x[0] = rank + 1
    x[1 + rank, 2:] = 10
    return x


def rank_array(rank: int, form: str = "csr_array", dtype: str = "float64") -> Any:
    return getattr(scipy.sparse, form)(dense(rank, dtype))


@pytest.fixture(params=["loop", "thread"])
def place(request: pytest.FixtureRequest, limits: Limits) -> str:
    """Force whether the event loop or a worker thread reads and builds the sparse arrays."""
    limits(max_sparse_inline=-1 if request.param == "thread" else 1 << 30)
    return str(request.param)


@parametrize_transports(*LINKS)
@pytest.mark.ranks(1, 2, 3, 4, 7)
async def test_sparse_messages_can_be_sent_around_a_ring(pg: ProcessGroup, place: str) -> None:
    """Let each rank send to the next one; a single rank sends to itself."""
    rank, size = pg.rank(), pg.size()
    before, after = (rank - 1) % size, (rank + 1) % size
    for number, form in enumerate(FORMATS):
        x, y = rank_array(rank, FORMATS[number - 1], "float32"), rank_array(6, form, "float32")
        sending = pg.send(x, after, tag=number)
        receiving = pg.recv(y, before, number) if number % 2 else pg.recv_anysource(y, number)
        assert (sending.op, receiving.op[-7:]) == ("SEND_SPARSE", "_SPARSE")
        assert await receiving is y
        assert await sending is x
        assert receiving.source_rank() == before
        assert type(y).__name__ == form
        assert y.has_canonical_format
        assert np.array_equal(y.toarray(), dense(before, "float32"))
        assert np.array_equal(x.toarray(), dense(rank, "float32"))


@parametrize_transports(*LINKS)
@pytest.mark.ranks(2)
async def test_large_sparse_messages_keep_their_order(pg: ProcessGroup) -> None:
    """Send a large array, which a worker thread must first read, and then arrays that could be sent at once."""
    shape = 2000, 2000
    large = scipy.sparse.random_array(shape, density=0.05, format="coo", rng=np.random.default_rng(1))
    for tag, (src, dst) in enumerate(((0, 1), (1, 1))):
        work = []
        if pg.rank() == src:
            work += [pg.send(large, dst, tag), pg.send(np.ones(3), dst, tag), pg.send(rank_array(1), dst, tag)]
        if pg.rank() == dst:
            first, second, third = scipy.sparse.coo_array(shape), np.zeros(3), rank_array(0)
            await pg.recv(first, src, tag)
            await pg.recv(second, src, tag)
            await pg.recv(third, src, tag)
            assert (first != large).nnz == 0
            assert second.tolist() == [1, 1, 1]
            assert np.array_equal(third.toarray(), dense(1))
        await asyncio.gather(*work)


@pytest.mark.ranks(2)
async def test_sparse_send_completes_only_after_a_thread_has_read_its_array(pg: ProcessGroup, limits: Limits) -> None:
    limits(max_sparse_inline=-1)
    x = rank_array(0)
    if pg.rank() == 0:
        work = pg.send(x, 1)
        assert not work.done()
        await work
        x.data[:] = 0
        await pg.send_object("sent", 1, tag=1)
    else:
        waiting = pg.recv_object(0, 1)
        y = rank_array(1)
        await asyncio.gather(pg.recv(y, 0), waiting)
        assert np.array_equal(y.toarray(), dense(0))


@pytest.mark.ranks(2)
async def test_duplicate_entries_of_a_sparse_message_are_summed(pg: ProcessGroup, place: str) -> None:
    """Send a sparse array that has more entries than elements."""
    x = scipy.sparse.coo_array((np.arange(1.0, 7), ([0, 1, 0, 1, 0, 1], [0] * 6)), shape=(2, 2))
    if pg.rank() == 0:
        await pg.send(x, 1)
    else:
        y = scipy.sparse.csr_array((2, 2))
        with pytest.raises(TypeError, match=r"pass tensor.tocsr\(\)"):
            pg.recv(scipy.sparse.lil_array((2, 2)), 0)
        await pg.recv(y, 0)
        assert y.toarray().tolist() == [[9, 0], [12, 0]]


@pytest.mark.ranks(2)
async def test_sparse_messages_support_arrays_without_entries_and_proc_null(pg: ProcessGroup, place: str) -> None:
    x = scipy.sparse.coo_array((3, 3)) if pg.rank() == 0 else scipy.sparse.coo_array(np.eye(3))
    if pg.rank() == 0:
        await pg.send(x, 1)
    else:
        await pg.recv(x, 0)
    assert x.nnz == 0
    assert await pg.send(x, PROC_NULL) is x
    y = rank_array(0)
    work = pg.recv(y, PROC_NULL)
    assert await work is y
    assert work.source_rank() == PROC_NULL
    assert np.array_equal(y.toarray(), dense(0))


@pytest.mark.ranks(2)
async def test_sparse_messages_can_be_probed_planned_and_coalesced(pg: ProcessGroup, place: str) -> None:
    rank = pg.rank()
    x, y = rank_array(rank), rank_array(rank)
    plan = pg.plan(pg.send, x, 1) if rank == 0 else pg.plan(pg.recv, x, 0)
    for turn in range(3):
        if rank == 0:
            x.data[:] = turn
        await plan.start()
        assert (x.data == turn).all()
    if rank == 0:
        await pg.send(y, 1, 3)
    else:
        envelope = await pg.probe(0, 3)
        assert (envelope.source, envelope.tag, envelope.dtype, envelope.count) == (0, 3, None, 1)
        assert envelope.sparse
        with pytest.raises(TypeError, match=r"rank 0, is a sparse array, .* await pg.recv\(array, 0, 3\)"):
            await anext(pg.incoming(3))
        await pg.recv(y, envelope.source, envelope.tag)
    assert np.array_equal(y.toarray(), dense(0))
    async with pg.coalescing():
        y = rank_array(rank + 2)
        work: Any = pg.send(y, 1) if rank == 0 else pg.recv(y, 0)
    assert await work is y
    assert np.array_equal(y.toarray(), dense(2))
    with process_group(pg):
        assert await (dist.isend(x, 1) if rank == 0 else dist.irecv(y, 0)) is (x if rank == 0 else y)
        if rank == 0:
            await dist.send(x, 1)
        else:
            assert await dist.recv(y) == 0
    sent = sum(row.nbytes for row in pg.stats().operations if row.op.endswith("_SPARSE"))
    assert sent == 0


async def finish_and_check(pg: ProcessGroup, work: Any) -> None:
    """Await the work and a barrier, because a send may complete before the receiver checks the message."""
    await work
    await pg.barrier()


OTHERS: dict[str, tuple[Any, str]] = {
    "dtype": (lambda: rank_array(1, dtype="float32"), r"following: dtype. .*float32"),
    "shape": (lambda: scipy.sparse.csr_array((7, 12)), r"following: counts, shape. .*\[7, 12\]"),
    "dense": (lambda: dense(1), r"following: op, .*SEND_SPARSE\(.* called RECV\("),
}


@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.ranks(2)
async def test_mismatched_sparse_message_raises_an_error(pg: ProcessGroup, other: str) -> None:
    make, text = OTHERS[other]
    work = pg.send(rank_array(0), 1) if pg.rank() == 0 else pg.recv(make(), 0)
    with pytest.raises(GroupError, match=text):
        await finish_and_check(pg, work)
    await pg.drain()


@pytest.mark.parametrize("kind", ["dense", "object"])
@pytest.mark.ranks(2)
async def test_sparse_receive_refuses_messages_of_dense_arrays_and_objects(pg: ProcessGroup, kind: str) -> None:
    if pg.rank():
        work: Any = pg.recv(rank_array(0), 0)
    else:
        work = pg.send(dense(0), 1) if kind == "dense" else pg.send_object({}, 1)
    with pytest.raises(CollectiveMismatchError, match="RECV_SPARSE"):
        await finish_and_check(pg, work)


@pytest.mark.ranks(2)
async def test_unsupported_sparse_message_is_refused(pg: ProcessGroup) -> None:
    x, peer = rank_array(0), 1 - pg.rank()
    for batch in ([Send(x, peer)], [Recv(x, peer)]):  # type: ignore[type-var]
        with pytest.raises(
            TypeError,
            match=r"operations\[0\]\.tensor must be a dense array, not a csr_array: .*and recv outside of a batch",
        ):
            pg.batch(batch)
    with pytest.raises(TypeError, match=r"tensor must be .*, not list"):
        pg.send([1], peer)
    wrong = scipy.sparse.coo_array(np.eye(2))
    wrong.coords = (np.array([0, 5]), np.array([0, 1]))
    with pytest.raises(ValueError, match="tensor has indices in dimension 0 outside the range 0 to 1"):
        pg.send(wrong, peer)
    huge = scipy.sparse.coo_array(np.eye(2))
    huge.data = np.broadcast_to(np.float64(1), 1 << 29)
    huge.coords = tuple(np.broadcast_to(np.int32(0), 1 << 29) for _ in range(2))
    huge._shape = (1 << 15, 1 << 15)
    with pytest.raises(ValueError, match="a message holds at most 4294967295: send it in parts"):
        pg.send(huge, peer)


async def test_unreadable_entries_of_an_announced_message_fail_the_group(limits: Limits) -> None:
    """Send an array with invalid indices, which the sender finds only after it has announced the message."""
    limits(max_sparse_inline=-1)

    async def rank(pg: ProcessGroup) -> None:
        wrong = scipy.sparse.coo_array(np.eye(2))
        wrong.coords = (np.array([0, 5]), np.array([0, 1]))
        with pytest.raises(GroupError):
            await (pg.recv(scipy.sparse.coo_array((2, 2)), 0) if pg.rank() else pg.send(wrong, 1))

    await run_ranks(2, rank)


@pytest.mark.torch
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.ranks(2)
async def test_sparse_messages_support_torch_tensors(pg: ProcessGroup, place: str) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed: sparse tensors of torch are not tested")
    rank = pg.rank()
    for dtype in (torch.float32, torch.bfloat16, torch.int32):
        for layout in ("coo", "hybrid", "csr"):
            if layout == "csr" and dtype != torch.float32:
                continue
            parts = []
            for each in range(2):
                x = torch.zeros(4, 3, dtype=dtype)
                x[each], x[3, 0] = each + 1, 2
                parts.append(x)
            mine = parts[rank]
            x = (
                mine.to_sparse_csr()
                if layout == "csr"
                else mine.to_sparse(1)
                if layout == "hybrid"
                else mine.to_sparse()
            )
            if rank == 0:
                await pg.send(x, 1)
            else:
                y = await pg.recv(x, 0)
                assert (y is x) == (layout != "csr")
                assert torch.equal(y.to_dense(), parts[0])
    with pytest.raises(TypeError, match=r"operations\[0\]\.tensor"):
        pg.batch([Send(torch.eye(2).to_sparse(), 1 - rank)])
