"""Time estimates of calls with `pg.time_estimator`: predicted times without side effects."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from aiocoll import GroupClosedError, GroupOptions, ProcessGroup, Recv, ReduceOp, Send, new_group
from aiocoll.algorithms import predict
from aiocoll.algorithms.load import Load, seconds_of
from aiocoll.algorithms.machine import Machine, Tuning
from aiocoll.algorithms.two_level import select as two_level
from aiocoll.codec import dumps
from aiocoll.group.interceptors.estimate import Estimate
from aiocoll.transport.memory import MemoryLink
from aiocoll.work import Work

from ..internals import comm_of, observe_methods
from ..ranks import LINKS, parametrize_transports, run_ranks
from ..rendezvous.test_fake import ARRAYS

WORLDS = [1, 2, 3, 4, 7]


def seconds(pg: ProcessGroup, call: Callable[[], Any]) -> float:
    with pg.time_estimator() as estimate:
        call()
    return estimate.seconds


# -- predictions


@pytest.mark.ranks(*WORLDS)
@pytest.mark.parametrize("count", [0, 1, 1000, 100_000, 1_000_000])
@parametrize_transports("memory", "shm")
async def test_estimated_time_equals_the_predicted_time_of_the_algorithm(pg: ProcessGroup, count: int) -> None:
    p = pg.size()
    one, whole = np.zeros(count, np.float32), np.zeros(count * p, np.float32)
    none = [one] * p if pg.rank() == 0 else None
    calls: list[tuple[str, int, Callable[[], Any]]] = [
        ("allreduce", count, lambda: pg.allreduce(one)),
        ("reduce", count, lambda: pg.reduce(one, 0)),
        ("broadcast", count, lambda: pg.broadcast(one, 0)),
        ("scan", count, lambda: pg.scan(one)),
        ("exscan", count, lambda: pg.exscan(one)),
        ("allgather", count * p, lambda: pg.allgather_into_tensor(whole, one)),
        ("reduce_scatter", count * p, lambda: pg.reduce_scatter_tensor(one, whole)),
        ("alltoall", count * p, lambda: pg.alltoall_base(whole, whole.copy())),
        ("gather", count * p, lambda: pg.gather(none and [each.copy() for each in none], one, 0)),
        ("scatter", count * p, lambda: pg.scatter(one.copy(), none, 0)),
        ("barrier", 0, lambda: pg.barrier()),
        ("monitored_barrier", 0, lambda: pg.monitored_barrier()),
    ]
    with pg.time_estimator() as estimate:
        for _, _, call in calls:
            call()
    assert [each.op for each in estimate.calls] == [kind.upper() for kind, _, _ in calls]
    for (kind, elements, _), each in zip(calls, estimate.calls, strict=True):
        assert each.nbytes == 4 * elements
        if p == 1:
            assert each.seconds == 0
        else:
            assert each.algorithm is not None
            machine = comm_of(pg).tuning.machine
            assert each.seconds == predict(each.algorithm, kind, each.nbytes, p, machine)
    assert estimate.seconds == sum(each.seconds for each in estimate.calls)


@pytest.mark.ranks(*WORLDS)
async def test_estimate_includes_messages_and_objects(pg: ProcessGroup) -> None:
    machine, others, peer = comm_of(pg).tuning.machine, pg.size() - 1, (pg.rank() + 1) % pg.size()
    tensor, obj = np.zeros(1000), {"some": "object"}
    nbytes = len(dumps(obj, allow_pickle=False))
    if others:
        message = seconds_of(Load(1, 1, 1, 8000, 8000, 0), machine)
        assert message == machine.alpha + 8000 * machine.beta
        for call in (pg.send, pg.recv):
            assert seconds(pg, lambda call=call: call(tensor, peer)) == message
        assert seconds(pg, lambda: pg.recv_anysource(tensor)) == message
        both = [Send(tensor, peer), Recv(tensor.copy(), None)]
        assert seconds(pg, lambda: pg.batch(both)) == 2 * message
    exchanged = Load(min(others, 1), others, others, others * nbytes, 0, 0)
    assert seconds(pg, lambda: pg.allgather_object(obj)) == seconds_of(exchanged, machine)
    assert seconds(pg, lambda: pg.alltoall_object([obj] * pg.size())) == seconds_of(exchanged, machine)
    sent = exchanged._replace(receives=0)
    assert seconds(pg, lambda: pg.broadcast_object(obj, pg.rank())) == seconds_of(sent, machine)
    assert seconds(pg, lambda: pg.scatter_object([obj] * pg.size(), pg.rank())) == seconds_of(sent, machine)
    received = exchanged._replace(sends=0, sent=0)
    assert seconds(pg, lambda: pg.gather_object(obj, pg.rank())) == seconds_of(received, machine)


@pytest.mark.ranks(3)
async def test_estimate_includes_sparse_arrays(pg: ProcessGroup) -> None:
    sparse = pytest.importorskip("scipy.sparse")
    tensor = sparse.coo_array(np.eye(100))
    with pg.time_estimator() as estimate:
        assert await pg.allreduce(tensor) is tensor
    (one,) = estimate.calls
    # The estimate has 100 indices and 100 values for each of the two other ranks.
    assert (one.op, one.nbytes) == ("ALLREDUCE_SPARSE", 2 * 100 * 16)
    assert one.seconds == seconds_of(Load(1, 2, 2, one.nbytes, 0, 0), comm_of(pg).tuning.machine)


@pytest.mark.ranks(3)
async def test_allgather_without_outputs_in_a_block_can_be_estimated(pg: ProcessGroup) -> None:
    with pg.time_estimator() as estimate:
        async with pg.coalescing():
            pg.allgather(None, np.zeros(5))
    (one,) = estimate.calls
    assert one.op == "ALLGATHER_ALLOCATED"
    assert one.seconds == seconds_of(Load(1, 2, 2, 2 * 40, 0, 0), comm_of(pg).tuning.machine)


@pytest.mark.ranks(3)
@parametrize_transports(*LINKS)
async def test_estimate_grows_with_the_bytes(pg: ProcessGroup) -> None:
    for call in (pg.allreduce, pg.scan, lambda tensor: pg.broadcast(tensor, 1)):
        times = [seconds(pg, lambda n=n, call=call: call(np.zeros(n))) for n in (1, 100, 10_000, 1_000_000)]
        assert times == sorted(times)
        assert 0 < times[0] < times[2] < times[3]
    once = seconds(pg, lambda: pg.allreduce(np.zeros(1000)))
    assert seconds(pg, lambda: [pg.allreduce(np.zeros(1000)) for _ in range(2)]) == 2 * once
    assert seconds(pg, lambda: None) == 0


@pytest.mark.ranks(3)
@parametrize_transports("shm")
async def test_estimate_for_shared_memory_uses_separate_formulas(pg: ProcessGroup) -> None:
    a, v, b, g = 1000.0, 100.0, 0.5, 0.25
    comm_of(pg).tuning = Tuning(shm=Machine(a, v, b, g), medium="shm")
    with pg.time_estimator() as estimate:
        pg.allreduce(np.zeros(16))
        pg.barrier()
        pg.allreduce(np.zeros(1 << 20))
    assert [each.algorithm for each in estimate.calls] == ["oneshot", "oneshot", "relay"]
    small, barrier, large = (each.seconds for each in estimate.calls)
    # The formula for "oneshot": two copies, the sum of three arrays of 128 bytes, and the cost `v` per peer.
    assert small == a + 2 * v + (2 + 3) * 128 * g
    assert barrier == a + 2 * v
    assert large == predict("ring", "allreduce", 8 << 20, 3, Machine(a, v, b, g))


@pytest.mark.ranks(4)
@pytest.mark.parametrize("hosts", [(0, 0, 1, 1), (0, 1, 1, 1)])
async def test_estimate_supports_several_hosts(pg: ProcessGroup, hosts: tuple[int, ...]) -> None:
    comm_of(pg).hosts = hosts
    machine = comm_of(pg).tuning.machine
    for count in (1000, 80_000, 1_000_000):
        with pg.time_estimator() as estimate:
            pg.allreduce(np.zeros(count))
        (one,) = estimate.calls
        assert one.algorithm in ("leaders", "lanes", "lines")
        assert one.seconds == two_level.predict(one.algorithm, "allreduce", 8 * count, hosts, machine) > 0
    assert seconds(pg, lambda: pg.alltoall_object([1] * 4)) > 0


@pytest.mark.parametrize("world_size", [1, 2, 1024])
async def test_dry_run_group_returns_estimates(world_size: int) -> None:
    async with new_group("fake", rank=world_size - 1, world_size=world_size) as pg:
        with pg.time_estimator() as estimate:
            for call in ARRAYS.values():
                assert call(pg, np.ones(6)).done()
            assert await pg.allgather_object(7) == [7] * world_size
        assert (estimate.seconds > 0) == (world_size > 1)
        assert pg.barrier().seq == 1


# -- no side effects


@parametrize_transports(*LINKS)
@pytest.mark.ranks(2, 3)
async def test_estimate_sends_nothing_and_changes_no_array(pg: ProcessGroup) -> None:
    history = len(comm_of(pg).journal.collectives)
    with pg.time_estimator() as estimate:
        for name, call in ARRAYS.items():
            x = np.arange(6.0)
            work = call(pg, x)
            assert (work.done(), work.seq, work.group) == (True, None, pg), name
            await work
            assert x.tolist() == [0, 1, 2, 3, 4, 5], name
        peer = 1 - pg.rank() if pg.rank() < 2 else 0
        works = [pg.send(x, peer), pg.recv(x, peer), pg.send_object(1, peer), pg.recv_object()]
        works += [pg.allreduce(1, key="a"), pg.batch([Send(x, peer)]), pg.broadcast_object(None, 1)]
        assert all(work.done() for work in works)
        assert await pg.allreduce(2.5, ReduceOp.MAX) == 2.5
    assert len(estimate.calls) == len(ARRAYS) + len(works) + 1
    assert (len(comm_of(pg).journal.collectives), pg.pending()) == (history, [])
    # The estimate has taken no sequence number, for ordered calls or for keyed calls.
    assert (pg.barrier().seq, pg.allreduce(1, key="a").seq) == (1, 1)
    await pg.drain()


async def test_estimate_writes_no_frame_to_open_links(monkeypatch: pytest.MonkeyPatch) -> None:
    frames: list[Any] = []
    observe_methods(monkeypatch, MemoryLink, write=lambda *args: frames.append(args))

    async def rank(pg: ProcessGroup) -> None:
        await pg.alltoall([np.zeros(1) for _ in range(3)], [np.ones(1)] * 3)
        await pg.barrier()
        frames.clear()
        with pg.time_estimator():
            for call in ARRAYS.values():
                await call(pg, np.ones(6))
        await asyncio.sleep(0)
        assert frames == []
        # Wait until all ranks have checked the frames, before any rank continues.
        looked[pg.rank()].set()
        for each in looked:
            await each.wait()

    looked = [asyncio.Event() for _ in range(3)]
    await run_ranks(3, rank)


@pytest.mark.ranks(2)
async def test_calls_with_wrong_arguments_are_refused_and_not_estimated(pg: ProcessGroup) -> None:
    with pg.time_estimator() as estimate:
        with pytest.raises(TypeError, match="op"):
            pg.allreduce(np.ones(1), "sum")  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="root=2 is not a rank"):
            pg.broadcast(np.ones(1), 2)
    assert (estimate.calls, estimate.seconds) == ([], 0)


# -- scope of an estimate


@pytest.mark.ranks(2)
async def test_other_tasks_and_groups_make_real_calls_during_an_estimate(pg: ProcessGroup) -> None:
    start, done = asyncio.Event(), asyncio.Event()

    async def real_call() -> Any:
        await start.wait()
        result = await pg.allreduce(1)
        done.set()
        return result

    async def estimated_call() -> Work[Any]:
        return pg.allreduce(1)

    other = asyncio.create_task(real_call())
    with pg.time_estimator() as estimate:
        start.set()
        await done.wait()
        assert await other == 2
        assert estimate.calls == []
        assert (await asyncio.create_task(estimated_call())).seq is None
        assert len(estimate.calls) == 1
    assert await pg.allreduce(1) == 2


def failed_estimate(pg: ProcessGroup) -> Estimate:
    with contextlib.suppress(LookupError), pg.time_estimator() as estimate:
        pg.allreduce(1)
        raise LookupError
    return estimate


@pytest.mark.ranks(2)
async def test_estimate_blocks_can_be_nested(pg: ProcessGroup) -> None:
    with pg.time_estimator() as outer:
        pg.barrier()
        inner = failed_estimate(pg)
        pg.barrier()
    assert [each.op for each in outer.calls] == ["BARRIER", "BARRIER"]
    assert [each.op for each in inner.calls] == ["ALLREDUCE"]
    assert await pg.allreduce(1) == 2


@pytest.mark.ranks(2, options=GroupOptions(debug="detail"))
async def test_estimated_calls_are_not_compared_between_ranks(pg: ProcessGroup) -> None:
    if pg.rank() == 0:
        with pg.time_estimator() as estimate:
            await pg.allreduce(np.ones(3))
            await pg.allgather_object(1)
            with pytest.raises(ValueError, match="objs needs exactly one object per rank"):
                pg.scatter_object([1], 0)
        assert len(estimate.calls) == 2
    assert await pg.allreduce(1) == 2


@pytest.mark.ranks(2)
async def test_coalesced_calls_are_estimated_as_one_fused_call(pg: ProcessGroup) -> None:
    with pg.time_estimator() as whole, pg.time_estimator() as estimate:
        async with pg.coalescing():
            works = [pg.allreduce(np.ones(3)) for _ in range(4)]
    assert all(work.done() for work in works)
    assert [(each.op, each.nbytes) for each in estimate.calls] == [("ALLREDUCE", 4 * 24)]
    async with pg.coalescing():
        with pg.time_estimator() as inside:
            pg.allreduce(np.ones(3))
    assert [(each.op, each.nbytes) for each in inside.calls] == [("ALLREDUCE", 24)]
    assert (whole.calls, pg.barrier().seq) == ([], 1)


@pytest.mark.ranks(1, 2)
async def test_estimate_of_many_coalesced_tensors_leaves_them_unchanged(pg: ProcessGroup) -> None:
    """Use more tensors than one loop iteration can pack."""
    tensors = [np.zeros(1000) for _ in range(1000)]
    with pg.time_estimator() as estimate:
        work = pg.allreduce_coalesced(tensors)
    assert sum(each.nbytes for each in estimate.calls) == 8_000_000
    assert (work.done(), pg.pending()) == (True, [])
    for tensor in tensors:
        tensor[:] = 1
    await asyncio.sleep(0)
    assert all((tensor == 1).all() for tensor in tensors)


@pytest.mark.ranks(2)
async def test_estimate_requires_an_open_group(pg: ProcessGroup) -> None:
    refused: list[BaseException] = []

    def estimate_in_thread() -> None:
        try:
            with pg.time_estimator():
                pass
        except RuntimeError as error:
            refused.append(error)

    thread = threading.Thread(target=estimate_in_thread)
    thread.start()
    thread.join()
    assert "belongs to another event loop" in str(refused[0])
    await pg.barrier()
    await pg.shutdown()
    with pytest.raises(GroupClosedError), pg.time_estimator():
        pass
