"""Coalescing blocks: recording and fusing of calls, their results and their failures."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from itertools import cycle, product
from typing import Any

import numpy as np
import pytest

from aiocoll import (
    GroupClosedError,
    GroupError,
    GroupRevokedError,
    HashStore,
    ProcessGroup,
    Recv,
    ReduceOp,
    Send,
    Work,
    new_group,
)
from aiocoll.completion import Completion
from aiocoll.engine.links.channel import Channel
from aiocoll.group.interceptors.fuse import LARGE
from aiocoll.group.prepared_call import PreparedCall
from aiocoll.testing.virtual import run_virtual
from aiocoll.transport.frame import FrameKind
from aiocoll.work import finished_work

from ..internals import comm_of, dispatcher_of, observe_methods
from ..pairwise import Case
from ..ranks import LINKS, parametrize_transports, run_ranks, wait_until
from ..reductions import DTYPES, OPS, equal
from ..waits import WAITS
from .test_collectives import COUNTS, MOVING, REDUCING, ROOTED, SIZES, Call, label, valid

SUM = ReduceOp.SUM


class Frames:
    """A counter of the data frames that all ranks receive."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        observe_methods(monkeypatch, Channel, deliver=self._counted)

    def _counted(self, _: Any, __: Any, header: Any, ___: Any) -> None:
        self.count += header[0] == FrameKind.DATA and header[7] > 0

    def take_count(self) -> int:
        count, self.count = self.count, 0
        return count


@pytest.fixture
def frames(monkeypatch: pytest.MonkeyPatch) -> Frames:
    return Frames(monkeypatch)


def ones(count: int = 4, value: float = 1.0) -> Any:
    return np.full(count, value, float)


# -- results


def mixed_cases(world_size: int) -> Iterator[Case]:
    """Yield collective calls of every kind, dtype and op, with different counts and roots."""
    counts, roots = cycle(each for each in COUNTS if each != "1000000"), cycle(range(world_size))
    for kind, dtype, op in product(REDUCING + MOVING, DTYPES, OPS):
        if kind in MOVING and op != "SUM":
            continue
        case = {"kind": kind, "dtype": dtype, "op": op, "world_size": world_size, "count": next(counts)}
        if valid(case):
            yield case | {"root": next(roots) if kind in ROOTED else 0}


async def run_all_calls(pg: ProcessGroup) -> list[bytes]:
    """Make all calls in one block, each in a separate task; check results and return the allreduce results as bytes."""
    calls = [(case, Call(case, pg.rank())) for case in mixed_cases(pg.size())]
    async with pg.coalescing() as batch:
        found = await asyncio.gather(*(call.run(pg) for _, call in calls))
    assert comm_of(pg).entered == batch.seq == 1
    for (case, call), arrays in zip(calls, found, strict=True):
        for array, right in zip(arrays, call.expected(), strict=True):
            assert equal(array, right), f"{label(case)} on rank {pg.rank()}: {array} instead of {right}"
    return [arrays[0].tobytes() for (case, _), arrays in zip(calls, found, strict=True) if case["kind"] == "allreduce"]


@pytest.mark.parametrize(
    ("world_size", "transport"),
    [(1, "memory"), (3, "memory"), (2, "shm")]
    + [pytest.param(size, transport, marks=pytest.mark.matrix) for size in SIZES for transport in LINKS],
)
async def test_block_can_contain_calls_of_every_kind_dtype_and_op(world_size: int, transport: str) -> None:
    first, *others = await run_ranks(world_size, run_all_calls, transport=transport)
    assert all(each == first for each in others), "ranks have sums with different bits"


@pytest.mark.ranks(3)
@parametrize_transports(*LINKS)
async def test_block_can_contain_calls_on_small_large_strided_and_scalar_data(pg: ProcessGroup) -> None:
    size, mine = pg.size(), pg.rank() + 1.0
    total = size * (size + 1) / 2
    small, large = ones(5, mine), ones(LARGE // 8 + 1, mine)
    matrix = np.arange(12.0).reshape(3, 4)
    strided = matrix.T[::2]
    async with pg.coalescing() as batch:
        works: list[Work[Any]] = [
            pg.allreduce(small),
            pg.allreduce(2.5),
            pg.allreduce(large),
            pg.allreduce(strided),
            pg.allreduce(pg.rank() + 1, ReduceOp.MAX),
            pg.barrier(),
            pg.barrier(),
            pg.broadcast_object({"from": pg.rank()}, 1),
            pg.allgather_object(pg.rank()),
            pg.monitored_barrier(),
        ]
        assert all(work.seq is None and work.group is pg for work in works)
        assert pg.pending() == works
    assert (small == total).all()
    assert (large == total).all()
    assert works[3].result() is strided
    assert strided.tolist() == (np.arange(12.0).reshape(3, 4).T[::2] * size).tolist()
    assert [work.result() for work in works[4:]] == [size, None, None, {"from": 1}, list(range(size)), None]
    assert works[1].result() == 2.5 * size
    assert isinstance(works[4].result(), int)
    assert pg.pending() == []
    assert batch.seq == 1
    assert pg.barrier().seq == 2


@pytest.mark.parametrize("kind", ["gather", "scatter", "alltoall"])
async def test_block_of_uneven_alltoall_gather_or_scatter_calls_returns_correct_results(kind: str) -> None:
    """Use 16 MiB, whose packing takes several loop iterations on the virtual clock."""

    async def rank(pg: ProcessGroup) -> None:
        size, rank = pg.size(), pg.rank()

        def block(source: int, target: int, number: int) -> Any:
            return np.full(number * 100_000 + source * 7 + target, source * 100 + target * 10 + number)

        works, expected = [], []
        async with pg.coalescing():
            for number in range(4):
                incoming = [np.zeros_like(block(peer, rank, number)) for peer in range(size)]
                outgoing = [block(rank, peer, number) for peer in range(size)]
                if kind == "alltoall":
                    works.append(pg.alltoall(incoming, outgoing))
                    expected.append([block(peer, rank, number) for peer in range(size)])
                elif kind == "gather":
                    gathered = [np.zeros_like(block(peer, 1, number)) for peer in range(size)]
                    works.append(pg.gather(gathered if rank == 1 else None, block(rank, 1, number), 1))
                    expected.append([block(peer, 1, number) for peer in range(size)] if rank == 1 else [])
                else:
                    works.append(pg.scatter(incoming[2], outgoing if rank == 2 else None, 2))
                    expected.append([block(2, rank, number)])
        for work, right in zip(works, expected, strict=True):
            result = work.result()
            for array, each in zip([result] if kind == "scatter" else result or [], right, strict=True):
                assert np.array_equal(array, each)

    run_virtual_in_thread(3, rank)


def run_virtual_in_thread(world_size: int, fn: Any, **how: Any) -> Any:
    """Run ranks on a virtual event loop in a thread, because the calling test runs in an event loop."""
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(run_virtual, world_size, fn, **how).result()


# -- messages and numbers


@pytest.mark.parametrize("transport", ["tcp", "unix", "memory"])
async def test_block_of_many_allreduces_takes_as_many_frames_as_one_large_allreduce(
    transport: str, frames: Frames
) -> None:
    counted = []

    async def rank(pg: ProcessGroup) -> None:
        tensors = [ones(1024, pg.rank() + 1.0).astype("float32") for _ in range(1000)]
        whole = np.ones(1024 * 1000, "float32")
        for way in ("whole", "block"):
            await pg.barrier()
            frames.take_count()
            await pg.barrier()
            if way == "whole":
                await pg.allreduce(whole)
            else:
                async with pg.coalescing():
                    for tensor in tensors:
                        pg.allreduce(tensor)
            await pg.barrier()
            if pg.rank() == 0:
                counted.append(frames.take_count())
        assert all((tensor == 3).all() for tensor in tensors)

    await run_ranks(2, rank, transport=transport)
    assert counted[0] == counted[1]


async def test_small_allreduces_and_broadcasts_of_a_block_take_one_frame_per_peer_and_kind(frames: Frames) -> None:
    async def rank(pg: ProcessGroup) -> None:
        async with pg.coalescing():
            for number in range(50):
                pg.allreduce(ones(3, number))
            for number in range(50):
                pg.broadcast(ones(3, number), 0)
        assert comm_of(pg).entered == 1

    await run_ranks(2, rank, transport="tcp")
    # Each of the two ranks sends its allreduce inputs in one frame, and rank 0 sends the broadcast tensors in a third.
    assert frames.count == 3


async def test_empty_coalescing_block_takes_no_sequence_number(frames: Frames) -> None:
    async def rank(pg: ProcessGroup) -> None:
        async with pg.coalescing() as batch:
            pass
        assert batch.seq is None
        assert comm_of(pg).entered == 0

    await run_ranks(2, rank)
    assert frames.count == 0


@pytest.mark.ranks(3)
async def test_custom_ops_with_the_same_name_are_not_fused(pg: ProcessGroup) -> None:
    def adding_op() -> ReduceOp:
        return ReduceOp.custom(lambda a, b, out: np.add(a, b, out=out))

    def maximum_op() -> ReduceOp:
        return ReduceOp.custom(lambda a, b, out: np.maximum(a, b, out=out))

    x, y, z = ones(3, pg.rank()), ones(3, pg.rank()), ones(3, pg.rank())
    async with pg.coalescing():
        for tensor, op in ((x, adding_op()), (y, maximum_op()), (z, adding_op())):
            pg.allreduce(tensor, op)
    assert x.tolist() == z.tolist() == [3, 3, 3]
    assert y.tolist() == [2, 2, 2]


# -- awaiting inside


@pytest.mark.ranks(2)
@pytest.mark.parametrize("how", WAITS)
async def test_await_inside_a_block_starts_the_recorded_calls(pg: ProcessGroup, how: str) -> None:
    async with pg.coalescing() as batch:
        first, second = pg.allreduce(ones()), pg.allreduce(ones())
        assert not first.done()
        await WAITS[how](pg, first)
        assert first.result().tolist() == second.result().tolist() == [2.0] * 4
        assert batch.seq == comm_of(pg).entered == 1
        third = pg.allreduce(ones())
    assert third.result().tolist() == [2.0] * 4
    assert batch.seq == 2


@pytest.mark.ranks(2)
async def test_awaited_block_calls_of_several_tasks_in_one_loop_iteration_start_together(pg: ProcessGroup) -> None:
    async def check_sum(pg: ProcessGroup, number: int) -> None:
        assert (await pg.allreduce(ones(2, number))).tolist() == [2.0 * number] * 2

    async with pg.coalescing() as batch, asyncio.TaskGroup() as tasks:
        for number in range(10):
            tasks.create_task(check_sum(pg, number))
    assert batch.seq == comm_of(pg).entered == 1


@pytest.mark.ranks(2)
async def test_adding_a_done_callback_does_not_start_the_block(pg: ProcessGroup) -> None:
    notified: list[Work[Any]] = []
    async with pg.coalescing() as batch:
        work = pg.allreduce(ones())
        work.add_done_callback(notified.append)
        for _ in range(5):
            await asyncio.sleep(0)
        assert batch.seq is None
    await wait_until(lambda: notified)
    assert notified == [work]


@pytest.mark.ranks(2)
async def test_coalescing_block_ends_when_all_its_calls_have_completed(pg: ProcessGroup) -> None:
    async with pg.coalescing():
        works = [pg.allreduce(ones(LARGE)), pg.allreduce(ones()), *(pg.allgather_object(1) for _ in range(3))]
        awaited = asyncio.ensure_future(works[0].join())
        await asyncio.sleep(0)
        works.append(pg.barrier())
    assert all(work.done() for work in works)
    await awaited


# -- keys, messages, other groups


@pytest.mark.ranks(2)
async def test_keyed_calls_of_a_block_match_keyed_calls_outside_of_a_block(pg: ProcessGroup) -> None:
    if pg.rank() == 0:
        async with pg.coalescing() as batch:
            keyed = pg.allreduce(ones(), key="k")
            plain = pg.allreduce(ones())
            assert (keyed.key, keyed.seq) == ("k", None)
        assert batch.seq == 1
        assert plain.result().tolist() == [2.0] * 4
    else:
        async with pg.coalescing():
            pg.allreduce(ones())
        keyed = pg.allreduce(ones(), key="k")
        await keyed
    assert keyed.seq == 1
    assert keyed.result().tolist() == [2.0] * 4


@pytest.mark.ranks(1)
async def test_wrong_key_in_a_block_is_refused_at_the_call(pg: ProcessGroup) -> None:
    async with pg.coalescing():
        with pytest.raises(TypeError, match="key must be a str"):
            pg.allreduce(ones(), key=3)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="lone surrogate"):
            pg.allreduce(ones(), key="\ud800")
        with pytest.raises(TypeError, match="tensor must be"):
            pg.allreduce("text")
    assert comm_of(pg).entered == 0


@pytest.mark.ranks(2)
@parametrize_transports(*LINKS)
async def test_messages_of_a_block_are_sent_when_the_block_starts(pg: ProcessGroup) -> None:
    peer = 1 - pg.rank()
    incoming, other, third = ones(3, 0), ones(3, 0), ones(2, 0)
    async with pg.coalescing() as batch:
        sent = pg.send(ones(3, pg.rank()), peer)
        received = pg.recv(incoming, peer)
        together = pg.batch([Send(ones(3, 7), peer, 1), Recv(other, peer, 1)])
        anything = pg.recv_anysource(third, 2)
        pg.send(ones(2, 9), peer, 2)
        objects = pg.recv_object(peer, 3)
        pg.send_object({"a": 1}, peer, 3)
        assert not sent.done()
        assert len(pg.pending()) == 8
    assert batch.seq is None
    assert (incoming == peer).all()
    assert received.result() is incoming
    assert together.result()[1] is other
    assert (other == 7).all()
    assert anything.source_rank() == peer
    assert (third == 9).all()
    assert objects.result() == {"a": 1}
    # A batch inside the block can also be awaited there.
    async with pg.coalescing():
        result = await pg.batch([Send(ones(3, 5), peer), Recv(incoming, peer)])
        assert result[1] is incoming
        assert (incoming == 5).all()


@pytest.mark.ranks(2)
async def test_receive_inside_coalescing_is_withdrawn_when_its_only_awaiter_is_cancelled(pg: ProcessGroup) -> None:
    async with pg.coalescing():
        if pg.rank() == 0:
            work = pg.recv(ones(), 1)
            waiter = asyncio.ensure_future(work.get_future())
            waiter.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiter
            await wait_until(work.done)
            assert pg.pending() == []
    if pg.rank() == 0:
        await pg.send(ones(), 1)
    else:
        await pg.recv(ones(), 0)


@pytest.mark.ranks(2)
async def test_end_of_a_block_raises_the_error_of_a_receive_unless_the_block_has_awaited_it(pg: ProcessGroup) -> None:
    async with pg.coalescing():
        with pytest.raises(TimeoutError):
            await pg.recv(ones(), 1 - pg.rank(), timeout=0.01)
    with pytest.raises(TimeoutError):
        async with pg.coalescing():
            pg.recv(ones(), 1 - pg.rank(), timeout=0.01)
    await pg.barrier()


@pytest.mark.ranks(2)
async def test_block_inside_a_block_of_the_same_group_is_refused(pg: ProcessGroup) -> None:
    async with pg.coalescing():
        with pytest.raises(
            RuntimeError, match="already has a coalescing block here, and blocks of one group do not nest"
        ):
            async with pg.coalescing():
                pass

        async def task() -> None:
            async with pg.coalescing():
                pass

        with pytest.raises(RuntimeError, match="do not nest"):
            await asyncio.create_task(task())
        work = pg.allreduce(ones())
    assert work.result().tolist() == [2.0] * 4
    async with pg.coalescing():
        pg.allreduce(ones())


async def test_blocks_of_two_groups_can_be_nested_within_a_task() -> None:
    store = HashStore()

    async def rank(pg: ProcessGroup) -> None:
        other = new_group(store=store, rank=pg.rank(), world_size=2, name="other")
        async with other as second:
            async with pg.coalescing() as outer, second.coalescing() as inner:
                one, two = pg.allreduce(ones()), second.allreduce(ones())
                assert (outer.seq, inner.seq) == (None, None)
            assert one.result().tolist() == two.result().tolist() == [2.0] * 4
            opened, closed = asyncio.Event(), asyncio.Event()

            async def block() -> None:
                async with pg.coalescing():
                    opened.set()
                    await closed.wait()

            task = asyncio.create_task(block())
            await opened.wait()
            # This task is not in the block of the other task, so its calls start at once.
            assert (await pg.allreduce(ones())).tolist() == [2.0] * 4
            closed.set()
            await task

    await run_ranks(2, rank)


@pytest.mark.ranks(2)
async def test_task_that_outlives_its_block_makes_calls_outside_of_the_block(pg: ProcessGroup) -> None:
    go = asyncio.Event()

    async def make_late_call() -> tuple[int | None, Any]:
        await go.wait()
        work = pg.allreduce(ones())
        return work.seq, await work

    async with pg.coalescing():
        task = asyncio.create_task(make_late_call())
        pg.allreduce(ones())
    go.set()
    async with pg.coalescing():
        # This second block does not record the task's call, because the task belongs to the first block.
        seq, result = await task
    assert (seq, result.tolist()) == (2, [2.0] * 4)


# -- memory


async def test_block_calls_that_share_memory_are_refused_before_anything_is_sent(frames: Frames) -> None:
    async def check_refusals(pg: ProcessGroup) -> None:
        whole, raw = np.zeros(10), bytearray(16)
        pairs: list[tuple[Any, Any]] = [
            (whole, whole),
            (whole[:6], whole[5:]),
            (np.arange(6.0).reshape(2, 3),) * 2,
            (memoryview(raw), memoryview(raw)[15:]),
        ]
        for first, second in pairs:
            with pytest.raises(ValueError, match=r"members 0 \(ALLREDUCE\) and 2 \(ALLREDUCE\) .* share memory"):
                async with pg.coalescing():
                    works = [pg.allreduce(each) for each in (first, ones(), second)]
            assert all(isinstance(work.exception(), ValueError) for work in works)
        with pytest.raises(ValueError, match=r"members 0 \(ALLGATHER_ALLOCATED\) and 1 \(ALLR"):  # noqa: PT012
            async with pg.coalescing():
                pg.allgather(None, whole)
                await pg.allreduce(whole[2:3])
        assert comm_of(pg).entered == 0
        assert pg.pending() == []
        # Allowed: two calls of a block read the same memory, or write to adjacent memory.
        async with pg.coalescing():
            works = [pg.allgather(None, whole), pg.allgather(None, whole), pg.gather(None, whole, 0)]
        async with pg.coalescing():
            pg.allreduce(whole[:5])
            pg.allreduce(whole[5:])
            # Allowed: a call has one of its outputs as its input.
            outputs = [np.zeros(2) for _ in range(pg.size())]
            pg.allgather(outputs, outputs[pg.rank()])
            pg.allgather(None, ones(1))

    await run_ranks(2, check_refusals)
    assert frames.count > 0


# -- leaving by an exception


@pytest.mark.ranks(2)
@parametrize_transports(*LINKS)
async def test_exception_inside_a_block_drops_the_recorded_calls(pg: ProcessGroup, frames: Frames) -> None:
    await pg.barrier()
    await pg.barrier()
    frames.take_count()
    tensor = ones()
    with pytest.raises(KeyError, match="mine"):  # noqa: PT012
        async with pg.coalescing() as batch:
            works: list[Work[Any]] = [
                pg.allreduce(tensor),
                pg.allreduce(tensor, key="k"),
                pg.allgather_object(1),
                pg.send(tensor, 1 - pg.rank()),
                pg.allreduce_coalesced([tensor]),
            ]
            raise KeyError("mine")
    assert frames.take_count() == 0
    assert batch.seq is None
    assert pg.pending() == []
    for work in works:
        with pytest.raises(GroupError, match=r"call was not sent: .* its coalescing block .* KeyError: 'mine'") as e:
            await work
        assert isinstance(e.value.__cause__, KeyError)
    assert tensor.tolist() == [1.0] * 4
    assert comm_of(pg).entered == 2
    assert (await pg.allreduce(tensor)).tolist() == [2.0] * 4


async def test_works_of_a_failed_block_are_not_logged_as_never_retrieved(caplog: pytest.LogCaptureFixture) -> None:
    async def rank(pg: ProcessGroup) -> None:
        with pytest.raises(KeyError):  # noqa: PT012
            async with pg.coalescing():
                pg.allreduce(ones())
                raise KeyError("mine")
        x = ones()
        with pytest.raises(ValueError, match="share memory"):  # noqa: PT012
            async with pg.coalescing():
                pg.allreduce(x)
                pg.allreduce(x)

    await run_ranks(1, rank)
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


@pytest.mark.ranks(2)
async def test_block_calls_started_before_an_exception_continue(pg: ProcessGroup) -> None:
    with pytest.raises(KeyError):  # noqa: PT012
        async with pg.coalescing():
            sent = pg.allreduce(ones())
            await asyncio.wait([sent.get_future()], timeout=0)
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            late = pg.allreduce(ones())
            raise KeyError
    assert isinstance(late.exception(), GroupError)
    assert (await sent).tolist() == [2.0] * 4


@pytest.mark.ranks(2)
async def test_cancelled_block_leaves_no_pending_calls(pg: ProcessGroup) -> None:
    works: list[Work[Any]] = []

    async def record_calls() -> None:
        async with pg.coalescing():
            works.append(pg.allreduce(ones()))
            await asyncio.Event().wait()

    async def record_receives() -> None:
        async with pg.coalescing():
            works.append(pg.recv(ones(), 1 - pg.rank()))
            works.append(pg.batch([Recv(ones(), 1 - pg.rank(), 5)]))

    for body in (record_calls, record_receives):
        task = asyncio.create_task(body())
        await wait_until(lambda: works)
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await wait_until(lambda: all(work.done() for work in works))
        assert pg.pending() == []
        works.clear()
    assert (await pg.allreduce(ones())).tolist() == [2.0] * 4


# -- the end of the group


async def test_revocation_of_the_group_fails_recorded_calls() -> None:
    recorded = asyncio.Barrier(2)

    async def rank(pg: ProcessGroup) -> None:
        with pytest.raises(GroupError, match="aborted by rank 0: enough"):  # noqa: PT012
            async with pg.coalescing():
                works = [pg.allreduce(ones()), pg.allgather_object(1), pg.send(ones(), 1 - pg.rank())]
                await recorded.wait()
                if pg.rank() == 0:
                    pg.abort("enough")
                else:
                    await pg.wait_revoked()
                assert all(work.done() for work in works)
                with pytest.raises(GroupRevokedError):
                    pg.allreduce(ones())
        assert {type(work.exception()) for work in works} == {GroupError}

    await run_ranks(2, rank)


@pytest.mark.ranks(2)
async def test_closing_a_group_starts_recorded_calls_first(pg: ProcessGroup) -> None:
    async with pg.coalescing():
        work = pg.allreduce(ones())
        await pg.shutdown()
        assert work.result().tolist() == [2.0] * 4


async def test_closing_a_group_with_timeout_zero_fails_recorded_calls() -> None:
    store = HashStore()
    closed = asyncio.Event()

    async def rank(number: int) -> None:
        pg = await new_group(store=store, rank=number, world_size=2, timeout=0.05)
        if number == 0:
            received = pg.recv(ones(), 1, timeout=30)
            with pytest.raises(GroupClosedError):  # noqa: PT012
                async with pg.coalescing():
                    work = pg.allreduce(ones())
                    await pg.shutdown()
            assert isinstance(work.exception(), GroupClosedError)
            assert isinstance(received.exception(), GroupClosedError)
            closed.set()
        await closed.wait()
        await pg.shutdown()

    await asyncio.gather(*map(rank, range(2)))


@pytest.mark.ranks(2)
async def test_block_times_out_after_the_shortest_timeout_of_its_calls(pg: ProcessGroup) -> None:
    if pg.rank() == 1:
        error = await pg.wait_revoked()
    else:
        with pytest.raises(TimeoutError, match=r"COALESCED .* did not complete within 0.1 s .*ALLREDUCE"):  # noqa: PT012
            async with pg.coalescing():
                work = pg.allreduce(ones(), timeout=0.1)
                pg.allreduce(ones())
        error = work.exception()
    assert error.ranks == (1,)


@pytest.mark.ranks(3)
async def test_shrunk_group_does_not_report_an_incomplete_block_as_completed(pg: ProcessGroup) -> None:
    async with pg.coalescing() as batch:
        pg.allreduce(ones())
        pg.allgather_object(1)
    assert batch.seq == 1
    if pg.rank() == 2:
        pg.abort()
        return
    with pytest.raises(GroupError):  # noqa: PT012
        async with pg.coalescing() as batch:
            # The broadcast completes on rank 0 at once, but the allreduce does not complete.
            pg.broadcast(ones(), 0)
            pg.allreduce(ones())
    assert batch.seq in (2, None)
    group = await pg.shrink(exclude=[2])
    assert group.completed_everywhere is not None
    assert 1 in group.completed_everywhere
    assert 2 not in group.completed_everywhere
    await group.shutdown()


# -- calls on lists


@pytest.mark.ranks(2)
@parametrize_transports(*LINKS)
async def test_block_of_list_calls_returns_their_results(pg: ProcessGroup, frames: Frames) -> None:
    size, rank = pg.size(), pg.rank()
    total = size * (size + 1) // 2
    tensors = [ones(3, rank + 1), np.full((2, 2), rank + 1, "int32"), ones(LARGE // 8, rank + 1)]
    work = pg.allreduce_coalesced(tensors)
    assert (work.op, work.seq) == ("ALLREDUCE_COALESCED", 1)
    assert pg.pending() in ([work], [])
    result = await work
    assert all(a is b for a, b in zip(result, tensors, strict=True))
    assert all((tensor == total).all() for tensor in tensors)
    inputs = [ones(2, rank), ones(3, rank * 10)]
    outputs = [ones(2 * size, -1), ones(3 * size, -1)]
    assert (await pg.allgather_into_tensor_coalesced(outputs, inputs))[1] is outputs[1]
    assert outputs[0].tolist() == np.repeat(np.arange(size), 2).tolist()
    assert outputs[1].tolist() == np.repeat(np.arange(size) * 10, 3).tolist()
    outputs, inputs = [ones(1, -1), ones(2, -1)], [np.arange(1.0 * size), np.arange(2.0 * size)]
    await pg.reduce_scatter_tensor_coalesced(outputs, inputs, ReduceOp.MAX)
    assert [each.tolist() for each in outputs] == [[rank], [2 * rank, 2 * rank + 1]]
    assert await pg.allreduce_coalesced([]) == []
    assert comm_of(pg).entered == 4
    keyed = pg.allreduce_coalesced([ones(), ones(2)], key="k")
    assert (keyed.key, keyed.seq, [each[0] for each in await keyed]) == ("k", 1, [size, size])
    assert comm_of(pg).entered == 4
    async with pg.coalescing() as batch:
        one = pg.allreduce_coalesced([ones(), ones(2)])
        two = pg.allreduce(ones())
        assert pg.pending() == [one, two]
        assert await pg.allreduce_coalesced([]) == []
        assert one.result()[0].tolist() == two.result().tolist() == [size] * 4
    assert batch.seq == comm_of(pg).entered == 5


@pytest.mark.ranks(2)
async def test_wrong_tensor_in_a_list_call_is_refused_before_sending(pg: ProcessGroup) -> None:
    with pytest.raises(TypeError, match="tensor must be"):
        pg.allreduce_coalesced([ones(), "text"])
    with pytest.raises(TypeError, match="tensors must be a list of arrays, not ndarray"):
        pg.allreduce_coalesced(ones())
    with pytest.raises(ValueError, match="outputs has 1 arrays, inputs has 2"):
        pg.allgather_into_tensor_coalesced([ones()], [ones(), ones()])
    with pytest.raises(ValueError, match="share memory"):
        pg.reduce_scatter_tensor_coalesced([ones()] * 2, [ones(pg.size() * 4), ones(pg.size() * 4)])
    async with pg.coalescing():
        with pytest.raises(TypeError, match="tensor must be"):
            pg.allreduce_coalesced([ones(), "text"])
        work = pg.allreduce(ones())
        assert pg.pending() == [work]
    assert comm_of(pg).entered == 1
    assert work.result().tolist() == [2.0] * 4


# -- interceptors


class StartingInterceptor:
    """An interceptor that starts all calls without changes."""

    moves_nothing = False
    records = False

    def __init__(self, pg: ProcessGroup) -> None:
        self.pg = pg
        self.ops: list[str] = []

    def take(self, call: PreparedCall) -> Work[Any]:
        pg = self.pg
        self.ops.append(call.op)
        identity, seq = (2 << 62, None) if call.signature is None else dispatcher_of(pg).numbered(call.key)
        completion = Completion(comm_of(pg).endpoint, call.op, seq, call.key, dispatcher_of(pg))
        call.expect(completion)
        work: Work[Any] = Work(completion)
        dispatcher_of(pg).enter(call.operation(comm_of(pg), identity, completion))
        return work


class IdleInterceptor(StartingInterceptor):
    """An interceptor that completes all calls without transferring data."""

    def take(self, call: PreparedCall) -> Work[Any]:
        return finished_work(comm_of(self.pg).endpoint, call.op, dispatcher_of(self.pg), call.result)


@pytest.mark.ranks(2)
async def test_group_interceptor_receives_the_fused_calls(pg: ProcessGroup) -> None:
    interceptor = StartingInterceptor(pg)
    dispatcher_of(pg).intercept(interceptor)
    outputs = [ones(2, -1) for _ in range(pg.size())]
    async with pg.coalescing():
        works = [pg.allreduce(ones(2, number)) for number in range(3)]
        pg.alltoall(outputs, [ones(2, 10 * pg.rank() + peer) for peer in range(pg.size())])
        pg.alltoall([ones(1) for _ in range(pg.size())], [ones(1) for _ in range(pg.size())])
        pg.allgather_object(1)
        keyed = pg.allreduce(3, key="k")
        assert len(pg.pending()) == 7
    assert sorted(interceptor.ops) == ["ALLGATHER_OBJECT", "ALLREDUCE", "ALLREDUCE", "ALLTOALL"]
    assert [work.result()[0] for work in works] == [0, 2, 4]
    assert [each[0] for each in outputs] == [pg.rank(), 10 + pg.rank()]
    assert keyed.result() == 6
    assert pg.pending() == []


@pytest.mark.ranks(2)
async def test_interceptor_that_completes_calls_without_data_leaves_arrays_unchanged(pg: ProcessGroup) -> None:
    dispatcher_of(pg).intercept(IdleInterceptor(pg))
    tensors = [ones(2, 5), ones(3, 6)]
    outputs = [[ones(2, -1) for _ in range(pg.size())] for _ in range(2)]
    async with pg.coalescing():
        works: list[Work[Any]] = [pg.allreduce(each) for each in tensors]
        works += [pg.alltoall(each, [ones(2) for _ in range(pg.size())]) for each in outputs]
    assert all(work.done() for work in works)
    assert [each[0] for each in tensors] == [5, 6]
    assert all((array == -1).all() for each in outputs for array in each)


@pytest.mark.ranks(2)
async def test_message_that_fails_the_group_fails_the_whole_block(pg: ProcessGroup) -> None:
    """Let a message with another dtype arrive before the block posts its receive."""
    if pg.rank() == 1:
        pg.send(np.zeros(3, np.int32), 0)
        await pg.wait_revoked()
        return
    await wait_until(lambda: comm_of(pg).matching._waiting)
    works: list[Work[Any]] = []

    async def block() -> None:
        async with pg.coalescing():
            works.extend([pg.recv(ones(3), 1), pg.recv(ones(3), 1, tag=4)])
            works.extend([pg.allreduce(ones(3)), pg.allreduce(ones(3), key="x")])

    with pytest.raises(GroupError):
        await block()
    assert all(isinstance(work.exception(), GroupError) for work in works)
    assert not comm_of(pg).in_flight.pending


@pytest.mark.ranks(1, 2)
async def test_keyed_list_call_in_a_block_can_have_many_tensors(pg: ProcessGroup) -> None:
    """Use more tensors than one loop iteration can pack, in a block that ends in the next iteration."""
    tensors = [np.ones(1000) for _ in range(1000)]
    async with pg.coalescing():
        work = pg.allreduce_coalesced(tensors, key="many")
    assert await work is not None
    assert all((tensor == pg.size()).all() for tensor in tensors)
    assert pg.pending() == []
