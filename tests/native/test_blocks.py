"""Coalescing blocks in groups with native and pure ranks: the accelerator carries out small calls one by one."""

from __future__ import annotations

import asyncio
import gc
import itertools
from collections.abc import Awaitable, Callable, Sequence
from math import inf
from typing import Any

import numpy as np
import pytest

from aiocoll import CollectiveMismatchError, GroupError, GroupRevokedError, ProcessGroup, ReduceOp, Work
from aiocoll.engine.fusion.packer import Flush
from aiocoll.hooks import OperationInfo
from aiocoll.transport.shared_memory import SMALL_SLOTS

from ..engine.test_flush_mismatch import CASES
from ..internals import comm_of, is_native, native_calls_of, set_limits
from ..ranks import wait_until
from ..waits import WAITS
from .cases import DTYPES, Case, cases, counts
from .groups import await_work, group_of_ranks, pending_in_python

#: Jobs, one letter per rank: N if the accelerator carries out the rank's calls (native), P for pure Python.
JOBS = ("NN", "NP", "PN", "PP", "NNN", "NPN", "NPNP", "NNNN")
SMALL = 4096


def native_ranks(job: str) -> list[bool]:
    return [letter == "N" for letter in job]


def ones(count: int = 4, value: float = 1.0) -> Any:
    return np.full(count, value, float)


async def run_on_all(pgs: Sequence[ProcessGroup], rank: Callable[[ProcessGroup], Awaitable[Any]]) -> list[Any]:
    async with asyncio.timeout(20):
        return await asyncio.gather(*map(rank, pgs))


@pytest.fixture
def started_by_python(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that gets the id of each call in a block if Python, not C, starts the call."""
    started: list[int] = []
    start = Flush.start_single

    def record_start(flush: Flush, position: int, identity: int) -> None:
        started.append(identity)
        start(flush, position, identity)

    monkeypatch.setattr(Flush, "start_single", record_start)
    return started


# -- results


async def results_of(pgs: Sequence[ProcessGroup], chosen: Sequence[Case], *, block: bool) -> list[list[bytes]]:
    """Make the calls in one block, or one after another; return the result bytes of each rank."""

    async def rank(pg: ProcessGroup) -> list[bytes]:
        if block:
            async with pg.coalescing():
                started = [case.call(pg) for case in chosen]
        else:
            started = [case.call(pg) for case in chosen]
            for work, _ in started:
                await work
        return [array.tobytes() for _, arrays in started for array in arrays]

    return await run_on_all(pgs, rank)


def chosen_cases(size: int, number: int) -> list[Case]:
    """Return calls of all kinds on arrays of all dtypes, with a different element count for each dtype."""
    turns = itertools.count(number)
    chosen = []
    for dtype in DTYPES:
        found = counts(size, dtype)
        chosen += list(cases(size, dtype, found[next(turns) % len(found)]))
    return chosen[number % 5 :: 5]  # these are still more calls than slots, so that some use frames


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("job", JOBS)
async def test_native_block_of_every_kind_of_call_gives_the_same_bits_as_single_calls(job: str) -> None:
    chosen = chosen_cases(len(job), JOBS.index(job))
    async with group_of_ranks(native_ranks(job)) as pgs:
        alone = await results_of(pgs, chosen, block=False)
        assert await results_of(pgs, chosen, block=True) == alone
        assert await results_of(pgs, chosen, block=True) == alone, (
            "the second block, which reuses the layout of the first, has other results"
        )
        assert [pending_in_python(pg) for pg in pgs] == [0] * len(job)


async def test_coalescing_block_in_a_group_of_one_rank_completes() -> None:
    async with group_of_ranks([True], linked=False) as (pg,):
        x = ones()
        async with pg.coalescing():
            work = pg.allreduce(x)
            pg.barrier()
        assert work.result() is x


@pytest.mark.parametrize("size", [2, 3, 4])
async def test_small_calls_of_a_block_are_carried_out_by_the_accelerator(
    size: int, started_by_python: list[int]
) -> None:
    async with group_of_ranks([True] * size) as pgs:

        async def rank(pg: ProcessGroup) -> None:
            tensors = [ones(count, pg.rank()) for count in (1, 5, SMALL // 8)]
            parts = ones(size), ones(1, pg.rank())
            async with pg.coalescing() as block:
                works: list[Work[Any]] = [pg.allreduce(tensor) for tensor in tensors]
                works += [pg.broadcast(ones(), 0), pg.allgather_into_tensor(*parts)]
                assert not any(work.done() for work in works)
                lists = pg.allgather([ones(2, -1) for _ in range(size)], ones(2, pg.rank()))
                number = pg.allreduce(pg.rank() + 1)
                pg.barrier()
            assert all(is_native(work) for work in works)
            assert block.seq == comm_of(pg).entered
            assert {work.seq for work in works} == {None}
            total = size * (size - 1) / 2
            assert all((tensor == total).all() for tensor in tensors)
            assert [each[0] for each in lists.result()] == parts[0].tolist() == [*range(size)]
            assert number.result() == total + size

        await run_on_all(pgs, rank)
    assert not started_by_python


async def test_larger_calls_and_python_reductions_of_a_block_are_fused_in_python(started_by_python: list[int]) -> None:
    add = ReduceOp.custom(lambda a, b, out: np.add(a, b, out=out))
    async with group_of_ranks([True, True]) as pgs:

        async def rank(pg: ProcessGroup) -> None:
            tensors = [ones(SMALL // 8 + 1) for _ in range(4)]
            halves = [np.ones(3, np.float16) for _ in range(4)]
            others = [ones() for _ in range(4)]
            small = ones()
            async with pg.coalescing():
                works: list[Work[Any]] = [pg.allreduce(each) for each in (*tensors, *halves)]
                works += [pg.allreduce(each, ReduceOp.AVG) for each in others]
                works += [pg.allreduce(each, add) for each in (ones(), ones())]
                alone = pg.allreduce(small)
            assert is_native(alone)
            assert not any(is_native(work) for work in works)
            assert all((each == 2).all() for each in (*tensors, *halves, small))
            assert all((each == 1).all() for each in others)

        await run_on_all(pgs, rank)
    assert not started_by_python


@pytest.mark.parametrize("job", ["NN", "NP", "PP", "NNN"])
async def test_block_with_more_calls_than_slots_completes(job: str) -> None:
    async with group_of_ranks(native_ranks(job)) as pgs:

        async def rank(pg: ProcessGroup) -> None:
            tensors = [ones(2, number) for number in range(300)]
            async with pg.coalescing():
                for tensor in tensors:
                    pg.allreduce(tensor)
            assert [tensor[0] for tensor in tensors] == [number * len(job) for number in range(300)]

        await run_on_all(pgs, rank)


@pytest.mark.parametrize("job", ["NN", "NP", "PP"])
async def test_native_block_of_list_calls_returns_their_results(job: str) -> None:
    async with group_of_ranks(native_ranks(job)) as pgs:

        async def rank(pg: ProcessGroup) -> None:
            tensors = [ones(3, number) for number in range(5)]
            work = pg.allreduce_coalesced(tensors)
            assert work.op == "ALLREDUCE_COALESCED"
            result = await work
            assert all(each is tensor for each, tensor in zip(result, tensors, strict=True))
            assert [tensor[0] for tensor in tensors] == [2 * number for number in range(5)]
            assert (await pg.allreduce_coalesced([ones(), ones(2)], key="k"))[1].tolist() == [2, 2]
            async with pg.coalescing() as block:
                one, two = pg.allreduce(ones()), pg.allreduce_coalesced([ones(), ones()])
                assert pg.pending() == [one, two]
                three = pg.allreduce(ones())
            assert block.seq == comm_of(pg).entered
            assert [each.tolist() for each in (*two.result(), one.result(), three.result())] == [[2.0] * 4] * 4

        await run_on_all(pgs, rank)


@pytest.mark.parametrize("count", [1, SMALL // 8, SMALL // 2, 20_000, 300_000])
@pytest.mark.parametrize("job", ["NN", "NP", "PP", "NNN"])
async def test_alltoall_gather_and_scatter_of_every_size_complete_in_a_native_block(job: str, count: int) -> None:
    size = len(job)
    async with group_of_ranks(native_ranks(job)) as pgs:

        async def rank(pg: ProcessGroup) -> None:
            me = pg.rank()
            exchanged, gathered = ([ones(count, -1) for _ in range(size)] for _ in range(2))
            scattered = ones(count, -1)
            async with pg.coalescing():
                pg.alltoall(exchanged, [ones(count, size * me + peer) for peer in range(size)])
                pg.gather(gathered if me == 0 else None, ones(count, me), 0)
                pg.scatter(scattered, [ones(count, peer) for peer in range(size)] if me == 1 else None, 1)
            assert all((array == size * peer + me).all() for peer, array in enumerate(exchanged))
            assert all((array == (peer if me == 0 else -1)).all() for peer, array in enumerate(gathered))
            assert (scattered == me).all()

        await run_on_all(pgs, rank)


async def test_native_block_is_one_operation_in_records_and_counters() -> None:
    async with group_of_ranks([True, True]) as pgs:

        async def rank(pg: ProcessGroup) -> None:
            async with pg.coalescing() as block:
                for _ in range(3):
                    pg.allreduce(ones())
            counted = {each.op: each for each in pg.stats().operations}
            assert {*counted} == {"ALLGATHER_ALLOCATED", "COALESCED"}
            block_stats = counted["COALESCED"]
            assert (block_stats.calls, block_stats.nbytes, block_stats.failures) == (1, 3 * 32, 0)
            assert (block_stats.algorithm, block_stats.transport) == ("oneshot", "shm")
            record = comm_of(pg).journal.snapshot()[-1]
            assert (record.signature.op, record.seq, record.error) == ("COALESCED", block.seq, None)
            assert record.entered <= record.started <= record.ended

        await run_on_all(pgs, rank)


@pytest.mark.parametrize("iterations", range(5))
async def test_handover_of_the_last_small_call_starts_no_packed_call(
    iterations: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_limits(monkeypatch, loop_budget=0.0)  # so that the flush starts one packed call per iteration of the loop
    async with group_of_ranks([True, True]) as pgs:
        arrays = [[ones(count, pg.rank() + 1) for count in (4, SMALL, SMALL)] for pg in pgs]

        async def rank(pg: ProcessGroup) -> None:
            async with pg.coalescing():
                for array in arrays[pg.rank()]:
                    pg.allreduce(array)

        first = asyncio.create_task(rank(pgs[0]))
        native = native_calls_of(pgs[0])
        await wait_until(lambda: native.count == 1)
        for _ in range(iterations):
            await asyncio.sleep(0)
        set_limits(monkeypatch, loop_budget=1.0)
        before = pending_in_python(pgs[0])
        native.hand_over()
        assert pending_in_python(pgs[0]) == before + 1
        async with asyncio.timeout(20):
            await asyncio.gather(first, rank(pgs[1]))
        assert all((array == 3).all() for array in itertools.chain(*arrays))


# -- works of a block


@pytest.mark.parametrize("how", WAITS)
@pytest.mark.parametrize("job", ["NN", "NP"])
async def test_await_inside_a_block_starts_the_recorded_calls(job: str, how: str) -> None:
    async with group_of_ranks(native_ranks(job)) as pgs:

        async def rank(pg: ProcessGroup) -> None:
            async with pg.coalescing() as block:
                first, second = pg.allreduce(ones()), pg.allreduce(ones())
                assert not first.done()
                await WAITS[how](pg, first)
                assert first.result().tolist() == (await second).tolist() == [2.0] * 4
                sent = block.seq
                assert sent == comm_of(pg).entered
                third = pg.allreduce(ones())
            assert third.result().tolist() == [2.0] * 4
            assert block.seq == sent + 1

        await run_on_all(pgs, rank)


async def test_works_of_a_native_block_can_be_inspected_before_the_block_starts() -> None:
    async with group_of_ranks([True, True]) as pgs:

        async def rank(pg: ProcessGroup) -> None:
            called: list[Any] = []
            async with pg.coalescing():
                works = [pg.allreduce(ones(4, number)) for number in range(4)]
                assert pg.pending() == works
                assert repr(works[0]) == "<Work ALLREDUCE pending>"
                assert (works[1].op, works[1].seq, works[1].key, works[1].group) == ("ALLREDUCE", None, None, pg)
                works[2].add_done_callback(called.append)
                with pytest.raises(asyncio.InvalidStateError):
                    works[3].result()
                works.append(pg.allreduce(ones(4, 4)))
            assert [work.result()[0] for work in works] == [2 * number for number in range(5)]
            assert pg.pending() == []
            assert repr(works[4]) == "<Work ALLREDUCE done>"
            await wait_until(lambda: called)
            assert called == [works[2]]

        await run_on_all(pgs, rank)


async def test_inspection_of_native_block_calls_in_flight_hands_them_over_to_python() -> None:
    async with group_of_ranks([True, True]) as (zero, one):
        tensors = [ones(4, number) for number in range(3)]

        async def block(pg: ProcessGroup, works: list[Work[Any]]) -> None:
            async with pg.coalescing():
                works += [pg.allreduce(each.copy()) for each in tensors]

        works: list[Work[Any]] = []
        task = asyncio.create_task(block(zero, works))
        await wait_until(lambda: native_calls_of(zero).count == 3)
        assert pending_in_python(zero) == 1, "more than the flush is pending in Python"
        assert repr(works[1]) == "<Work ALLREDUCE pending>"
        assert native_calls_of(zero).count == 2
        assert zero.pending() == works
        assert native_calls_of(zero).count == 0
        waiter = asyncio.create_task(await_work(works[2]))
        await block(one, [])
        await task
        assert (await waiter).tolist() == [4.0] * 4
        assert [work.result()[0] for work in works] == [0, 2, 4]


async def test_await_of_a_native_call_in_flight_does_not_hand_the_call_over() -> None:
    async with group_of_ranks([True, True]) as (zero, one):
        works: list[Work[Any]] = []

        async def block() -> None:
            async with zero.coalescing():
                works.append(zero.allreduce(ones()))

        task = asyncio.create_task(block())
        await wait_until(lambda: native_calls_of(zero).count == 1)
        waiter = asyncio.create_task(await_work(works[0]))
        await asyncio.sleep(0)
        async with one.coalescing():
            one.allreduce(ones())
        assert (await waiter).tolist() == [2.0] * 4
        await task
        assert is_native(works[0])


async def test_only_tasks_inside_a_native_block_record_their_calls() -> None:
    async with group_of_ranks([True, True]) as pgs:

        async def rank(pg: ProcessGroup) -> None:
            go = asyncio.Event()

            async def outside() -> int:
                await go.wait()
                work = pg.allreduce(ones(4, 3))
                assert (await work).tolist() == [6.0] * 4
                return work.seq

            task = asyncio.create_task(outside())
            await asyncio.sleep(0)
            before = comm_of(pg).entered
            async with pg.coalescing() as block:
                works = [pg.allreduce(ones())]
                go.set()
                await task
                await asyncio.create_task(await_work(works[0]))
            assert task.result() == before + 1
            assert block.seq == before + 2

        await run_on_all(pgs, rank)


async def test_native_block_of_calls_that_share_memory_is_refused() -> None:
    async with group_of_ranks([True, True]) as pgs:

        async def rank(pg: ProcessGroup) -> None:
            whole, before = np.zeros(10), comm_of(pg).entered
            for first, second in ((whole, whole), (whole[:6], whole[5:])):
                with pytest.raises(ValueError, match=r"members 0 \(ALLREDUCE\) and 2 \(ALLREDUCE\) .* share memory"):
                    async with pg.coalescing():
                        works = [pg.allreduce(each) for each in (first, ones(), second)]
                assert all(isinstance(work.exception(), ValueError) for work in works)
            assert comm_of(pg).entered == before
            assert pg.pending() == []
            outputs = ones(20, -1), ones(20, -1)
            async with pg.coalescing():  # allowed: two calls read the same memory
                pg.allgather_into_tensor(outputs[0], whole)
                pg.allgather_into_tensor(outputs[1], whole)
            assert not any(each.any() for each in outputs)

        await run_on_all(pgs, rank)


# -- blocks that fail


async def test_exception_inside_a_block_starts_no_calls() -> None:
    async with group_of_ranks([True, True]) as pgs:

        async def rank(pg: ProcessGroup) -> None:
            before = comm_of(pg).entered
            with pytest.raises(KeyError):  # noqa: PT012
                async with pg.coalescing():
                    works = [pg.allreduce(ones()), pg.allreduce_coalesced([ones()])]
                    raise KeyError("mine")
            for work in works:
                with pytest.raises(
                    GroupError, match=r"the call was not sent: .* its coalescing block .* KeyError: 'mine'"
                ):
                    await work
            assert comm_of(pg).entered == before
            assert native_calls_of(pg).count == 0
            assert pg.pending() == []
            assert (await pg.allreduce(ones())).tolist() == [2.0] * 4

        await run_on_all(pgs, rank)


@pytest.mark.parametrize("job", ["NN", "NP"])
async def test_cancelled_end_of_a_native_block_leaves_its_calls_in_flight(job: str) -> None:
    async with group_of_ranks(native_ranks(job)) as (zero, one):
        works: list[Work[Any]] = []

        async def block() -> None:
            async with zero.coalescing():
                works.extend(zero.allreduce(ones()) for _ in range(3))

        task = asyncio.create_task(block())
        await wait_until(lambda: native_calls_of(zero).count == 3)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        async with one.coalescing():
            for _ in range(3):
                one.allreduce(ones())
        for work in works:
            assert (await work).tolist() == [2.0] * 4


async def test_native_block_cancelled_during_recording_leaves_no_pending_calls() -> None:
    async with group_of_ranks([True, True]) as (zero, _):
        works: list[Work[Any]] = []

        async def block() -> None:
            async with zero.coalescing():
                works.append(zero.allreduce(ones()))
                await asyncio.Event().wait()

        task = asyncio.create_task(block())
        await wait_until(lambda: works)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert zero.pending() == []
        assert isinstance(works[0].exception(), GroupError)


@pytest.mark.parametrize("when", ["recorded", "in flight"])
async def test_revocation_of_the_group_fails_the_calls_of_a_native_block(when: str) -> None:
    async with group_of_ranks([True, True]) as (zero, one):
        works: list[Work[Any]] = []

        async def block() -> None:
            async with zero.coalescing():
                works.extend(zero.allreduce(ones()) for _ in range(3))
                if when == "recorded":
                    one.abort("enough")
                    await zero.wait_revoked()
                    with pytest.raises(GroupRevokedError):
                        zero.allreduce(ones())

        task = asyncio.create_task(block())
        if when == "in flight":
            await wait_until(lambda: native_calls_of(zero).count == 3)
            one.abort("enough")
        with pytest.raises(GroupError, match="aborted by rank 1: enough"):
            await task
        assert {type(work.exception()) for work in works} == {GroupError}
        assert native_calls_of(zero) is None or native_calls_of(zero).count == 0


async def test_native_block_times_out_after_the_shortest_timeout_of_its_calls() -> None:
    async with group_of_ranks([True, True]) as (zero, one):
        with pytest.raises(TimeoutError, match=r"COALESCED .* did not complete within 0.1 s .*ALLREDUCE"):  # noqa: PT012
            async with zero.coalescing():
                zero.allreduce(ones())
                works = [zero.allreduce(ones(), timeout=0.1), zero.allreduce(ones())]
        assert all(isinstance(work.exception(), TimeoutError) for work in works)
        assert (await one.wait_revoked()).ranks == (1,)


# -- ranks that differ


async def check_mismatch(pgs: Sequence[ProcessGroup], record: Callable[[ProcessGroup], object], text: str) -> None:
    """Check that all ranks get a mismatch error with `text` if each rank records a block with `record`."""

    async def rank(pg: ProcessGroup) -> None:
        start = asyncio.get_running_loop().time()
        with pytest.raises(CollectiveMismatchError, match=text):  # noqa: PT012
            async with pg.coalescing():
                record(pg)
            # The block may complete on this rank: only the receiver detects some mismatches, the sender does not.
            await pg.wait_revoked()
            raise comm_of(pg).cause  # type: ignore[misc]
        assert asyncio.get_running_loop().time() - start < 1.0
        assert pg.pending() == []

    await run_on_all(pgs, rank)


@pytest.mark.parametrize("job", ["NN", "NP", "PN", "PP", "NNN", "NPN"])
@pytest.mark.parametrize("name", CASES)
async def test_native_blocks_with_different_calls_are_reported_as_a_mismatch(name: str, job: str) -> None:
    most, one, text = CASES[name]
    async with group_of_ranks(native_ranks(job)) as pgs:
        odd = len(job) % 2
        await check_mismatch(pgs, lambda pg: (one if pg.rank() == odd else most)(pg), text)


@pytest.mark.parametrize("job", ["NN", "NP", "PN"])
async def test_shorter_native_block_that_reads_nothing_is_reported_as_a_mismatch(job: str) -> None:
    """Check that stall reports reveal the mismatch if each rank only sends messages, which its peer never reads."""
    async with group_of_ranks(native_ranks(job)) as pgs:

        def record(pg: ProcessGroup) -> None:
            for _ in range(3):
                pg.gather(None, ones(1), 1 - pg.rank())
            if pg.rank() == 0:
                pg.allreduce(ones())

        await check_mismatch(pgs, record, r"rank 0 called COALESCED\(members=\[3 x GATHER\(.*, ALLREDUCE\(")


@pytest.mark.parametrize("job", ["NN", "NP", "PN"])
@pytest.mark.parametrize("which", [0, 1])
async def test_native_block_against_plain_calls_is_reported_as_a_mismatch(job: str, which: int) -> None:
    async with group_of_ranks(native_ranks(job)) as pgs:

        async def rank(pg: ProcessGroup) -> None:
            tensors = [ones(4, 7) for _ in range(3)]
            with pytest.raises(CollectiveMismatchError, match="Collectives differ in the following: op"):  # noqa: PT012
                if pg.rank() == which:
                    async with pg.coalescing():
                        for tensor in tensors:
                            pg.allreduce(tensor)
                else:
                    for tensor in tensors:
                        await pg.allreduce(tensor)
            assert all((tensor == 7).all() for tensor in tensors)

        await run_on_all(pgs, rank)


async def test_one_native_block_against_two_shorter_blocks_is_reported_as_a_mismatch() -> None:
    """Let one rank make a block of four calls, and its peer two blocks of two calls."""
    async with group_of_ranks([True, True]) as pgs:

        async def rank(pg: ProcessGroup) -> None:
            with pytest.raises(CollectiveMismatchError, match="member 2 is"):  # noqa: PT012
                for count in (4,) if pg.rank() == 0 else (2, 2):
                    async with pg.coalescing():
                        for _ in range(count):
                            pg.allreduce(ones())

        await run_on_all(pgs, rank)


# -- references, counters and long blocks


async def test_native_block_leaves_no_reference_cycles() -> None:
    async with group_of_ranks([True, True]) as pgs:

        async def rank(pg: ProcessGroup) -> None:
            async with pg.coalescing():
                for _ in range(5):
                    pg.allreduce(ones())
                pg.allreduce_coalesced([ones(), ones()])
            async with pg.coalescing():
                pass
            await pg.allreduce_coalesced([ones()])

        await run_on_all(pgs, rank)
        gc.collect()
        gc.disable()
        try:
            await run_on_all(pgs, rank)
            gc.set_debug(gc.DEBUG_SAVEALL)
            gc.collect()
            kinds = {type(each).__name__ for each in gc.garbage}
        finally:
            gc.set_debug(0)
            gc.garbage.clear()
            gc.enable()
        assert not kinds & {"Work", "Block", "Recording", "Batch", "Flush", "ndarray", "DeferredCompletion"}


async def test_native_block_in_a_group_without_a_timeout_completes() -> None:
    async with group_of_ranks([True, True], timeout=inf) as pgs:

        async def rank(pg: ProcessGroup) -> None:
            async with pg.coalescing():
                work = pg.allreduce(ones())
            assert work.result().tolist() == [2.0] * 4

        await run_on_all(pgs, rank)


async def test_hooks_are_called_once_per_native_block() -> None:
    events: list[tuple[str, str]] = []

    class Recorder:
        def on_start(self, info: OperationInfo) -> None:
            events.append(("start", info.op))

        def on_end(self, info: OperationInfo) -> None:
            events.append(("end", info.op))

    async with group_of_ranks([True, True]) as pgs:

        async def rank(pg: ProcessGroup) -> None:
            if pg.rank() == 0:
                pg.add_hook(Recorder())
            async with pg.coalescing():
                works = [pg.allreduce(ones()) for _ in range(3)]
            assert all(map(is_native, works))

        await run_on_all(pgs, rank)
    assert events == [("start", "COALESCED"), ("end", "COALESCED")]


@pytest.mark.parametrize("job", ["NN", "NP", "PN"])
async def test_long_native_block_continues_when_its_late_peer_makes_the_calls(job: str) -> None:
    async with group_of_ranks(native_ranks(job)) as pgs:

        async def rank(pg: ProcessGroup) -> None:
            if pg.rank() == 1:
                await asyncio.sleep(0.05)
            tensors = [ones(2, number) for number in range(400)]
            async with pg.coalescing():
                for tensor in tensors:
                    pg.allreduce(tensor)
            assert [tensor[0] for tensor in tensors] == [2 * number for number in range(400)]

        async def check_few_in_flight() -> None:
            native = native_calls_of(pgs[0])
            await wait_until(lambda: native.count)
            assert native.count <= SMALL_SLOTS // 2
            assert not native.waiting

        checks = [check_few_in_flight()] if job.startswith("N") else []
        await asyncio.gather(run_on_all(pgs, rank), *checks)


async def test_long_native_block_fails_if_its_group_fails() -> None:
    async with group_of_ranks([True, True]) as (zero, one):
        works: list[Work[Any]] = []

        async def block() -> None:
            async with zero.coalescing():
                works.extend(zero.allreduce(ones()) for _ in range(400))

        task = asyncio.create_task(block())
        await wait_until(lambda: native_calls_of(zero).count)
        waiter = asyncio.create_task(await_work(works[-1]))  # this call is still queued
        await asyncio.sleep(0)
        one.abort("enough")
        with pytest.raises(GroupError, match="enough"):
            await task
        with pytest.raises(GroupError, match="enough"):
            await waiter
        assert {type(work.exception()) for work in works} == {GroupError}


async def test_queued_call_of_a_long_native_block_can_be_awaited() -> None:
    async with group_of_ranks([True, True]) as pgs:

        async def rank(pg: ProcessGroup) -> None:
            works: list[Work[Any]] = []

            async def block() -> None:
                async with pg.coalescing():
                    works.extend(pg.allreduce(ones()) for _ in range(400))

            task = asyncio.create_task(block())
            await wait_until(lambda: works)
            if pg.rank() == 1:
                await asyncio.sleep(0.01)
            assert (await works[-1]).tolist() == [2.0] * 4
            await task

        await run_on_all(pgs, rank)
