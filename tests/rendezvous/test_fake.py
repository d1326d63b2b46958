"""Tests of the fake backend: one rank of a group without real peers, whose calls complete at once without data."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from aiocoll import GroupClosedError, GroupError, GroupRevokedError, ProcessGroup, Recv, ReduceOp, Send, new_group
from aiocoll.work import Work

from ..group.test_wrong_input import WRONG, Row
from ..internals import channels_of, plans_of


def fake_group(rank: int, world_size: int, **given: Any) -> new_group:
    return new_group("fake", rank=rank, world_size=world_size, **given)


def other_rank(pg: ProcessGroup) -> int:
    return (pg.rank() + 1) % pg.size()


def copies(pg: ProcessGroup, x: Any) -> list[Any]:
    return [x.copy() for _ in range(pg.size())]


#: Functions that make a collective call in a group, with an array `x` of 6 elements.
ARRAYS: dict[str, Callable[[ProcessGroup, Any], Work[Any]]] = {
    "allreduce": lambda pg, x: pg.allreduce(x),
    "allreduce avg": lambda pg, x: pg.allreduce(x, ReduceOp.AVG),
    "allreduce premul": lambda pg, x: pg.allreduce(x, ReduceOp.PREMUL_SUM(2.0)),
    "allreduce custom": lambda pg, x: pg.allreduce(x, ReduceOp.custom(np.add, commutative=False)),
    "allreduce strided": lambda pg, x: pg.allreduce(x[::2]),
    "reduce": lambda pg, x: pg.reduce(x, pg.size() - 1),
    "broadcast": lambda pg, x: pg.broadcast(x, 0),
    "scan": lambda pg, x: pg.scan(x),
    "exscan": lambda pg, x: pg.exscan(x, ReduceOp.PREMUL_SUM(2.0)),
    "allgather": lambda pg, x: pg.allgather(copies(pg, x), x),
    "allgather into": lambda pg, x: pg.allgather_into_tensor(np.concatenate(copies(pg, x)), x),
    "gather": lambda pg, x: pg.gather(copies(pg, x) if pg.rank() == 0 else None, x, 0),
    "scatter": lambda pg, x: pg.scatter(x, copies(pg, x) if pg.rank() == 0 else None, 0),
    "reduce_scatter": lambda pg, x: pg.reduce_scatter(x, copies(pg, x)),
    "reduce_scatter premul": lambda pg, x: pg.reduce_scatter(x, copies(pg, x), ReduceOp.PREMUL_SUM(3.0)),
    "alltoall": lambda pg, x: pg.alltoall(copies(pg, x), copies(pg, x)),
    "alltoall base": lambda pg, x: pg.alltoall_base(np.concatenate(copies(pg, x)), np.concatenate(copies(pg, x))),
    "barrier": lambda pg, x: pg.barrier(),
    "monitored barrier": lambda pg, x: pg.monitored_barrier(),
}


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 7, 1024])
async def test_fake_collective_completes_at_once_without_changing_arrays(world_size: int) -> None:
    for rank in {0, world_size - 1}:
        async with fake_group(rank, world_size) as pg:
            assert (pg.rank(), pg.size(), pg.global_ranks) == (rank, world_size, tuple(range(world_size)))
            for number, (name, call) in enumerate(ARRAYS.items(), 1):
                x = np.arange(6.0)
                work = call(pg, x)
                assert (work.done(), work.seq, work.group) == (True, number, pg), name
                result = await work
                assert x.tolist() == [0, 1, 2, 3, 4, 5], name
                for each in result if isinstance(result, list) else [result]:
                    assert each is None or (np.resize(x[:: 2 if "strided" in name else 1], each.shape) == each).all()
            assert pg.pending() == []
            await pg.drain()


async def test_fake_results_have_the_types_of_real_results() -> None:
    async with fake_group(1, 4) as pg:
        x = np.ones(3)
        assert await pg.allreduce(x) is x
        assert await pg.allreduce(2.5) == 2.5
        assert await pg.allreduce(True, ReduceOp.BAND) is True
        assert await pg.barrier() is None
        assert [each.shape for each in await pg.allgather(None, x)] == [(3,)] * 4
        assert await pg.gather(None, x, 0) is None
        assert len(await pg.gather(None, x, 1) or ()) == 4


async def test_fake_calls_take_sequence_numbers_and_keys() -> None:
    async with fake_group(0, 3) as pg:
        assert [pg.barrier().seq, pg.allreduce(1, key="a").seq, pg.allreduce(1, key="a").seq] == [1, 1, 2]
        assert [pg.allgather_object(1, key="a").seq, pg.barrier().seq, pg.allgather_object(1).seq] == [3, 2, 3]
        assert pg.send(np.ones(1), 1).seq is None
        assert pg.barrier().seq == 4


async def test_fake_object_calls_return_the_objects_of_this_rank() -> None:
    mine = {"rank": 2, "numbers": (1, 2)}
    async with fake_group(2, 4) as pg:
        assert await pg.broadcast_object(mine, 2) is mine
        assert await pg.broadcast_object(mine, 0) is None
        gathered = await pg.allgather_object(mine)
        assert gathered == [mine] * 4
        assert len(set(map(id, gathered))) == 4
        assert await pg.gather_object(mine, 2) == [mine] * 4
        assert await pg.gather_object(mine, 0) is None
        assert await pg.scatter_object([0, 1, 2, 3], 2) == 2
        assert await pg.scatter_object(None, 0) is None
        assert await pg.alltoall_object(["to 0", "to 1", "to 2", "to 3"]) == ["to 0", "to 1", "to 2", "to 3"]
    async with fake_group(0, 1) as pg:
        assert await pg.allgather_object(mine) == await pg.gather_object(mine) == [mine]


@pytest.mark.parametrize(("rank", "lowest"), [(0, 1), (1, 0), (2, 0)])
async def test_fake_receive_reports_the_requested_source(rank: int, lowest: int) -> None:
    async with fake_group(rank, 3) as pg:
        x = np.arange(3.0)
        peer = other_rank(pg)
        for work, source in (
            (pg.recv(x, peer), peer),
            (pg.recv_anysource(x, tag=5), lowest),
            (pg.recv_object(peer), peer),
            (pg.recv_object(), lowest),
        ):
            assert (work.done(), work.source_rank()) == (True, source)
        assert await pg.recv_object() is None
        assert await pg.recv(x, peer) is x
        await pg.send(x, peer)
        await pg.send_object({"to": peer}, peer)
        assert await pg.batch([Send(x, peer), Recv(y := np.zeros(2), peer)]) == [x, y]
        assert (x.tolist(), y.tolist()) == ([0, 1, 2], [0, 0])


@pytest.mark.parametrize("row", WRONG, ids=lambda row: row[2][:40])
async def test_fake_calls_check_their_arguments(row: Row) -> None:
    call, error, message = row
    async with fake_group(0, 2) as pg:
        with pytest.raises(error, match=message):
            call(pg)
        assert pg.barrier().seq == 1


async def test_fake_incoming_waits_until_the_group_closes() -> None:
    async with fake_group(0, 2) as pg:
        coming = asyncio.ensure_future(anext(pg.incoming()))
        await asyncio.sleep(0)
        assert not coming.done()
    with pytest.raises(StopAsyncIteration):
        await coming


async def test_fake_group_closes_like_a_real_group() -> None:
    pg = await fake_group(0, 100)
    other_group = await fake_group(0, 100)
    revoked = asyncio.ensure_future(pg.wait_revoked())
    await asyncio.sleep(0)
    pg.abort("enough")
    assert "aborted by rank 0: enough" in str(await revoked)
    with pytest.raises(GroupRevokedError) as caught:
        pg.allreduce(1)
    assert isinstance(caught.value.__cause__, GroupError)
    await other_group.barrier()
    for each in (pg, other_group):
        await each.shutdown()
        await each.shutdown()
        with pytest.raises(GroupClosedError):
            each.barrier()


async def test_fake_group_shrinks_and_grows() -> None:
    async with fake_group(2, 5, name="jobs") as pg:
        await pg.allreduce(1)
        async with await pg.shrink([0, 4]) as smaller:
            assert (smaller.rank(), smaller.size(), smaller.global_ranks) == (1, 3, (1, 2, 3))
            assert smaller.completed_everywhere is not None
            assert 1 in smaller.completed_everywhere
            assert smaller.barrier().done()
            with pytest.raises(GroupError, match=r"shrink\(\) was already called"):
                await pg.shrink()
            async with await smaller.grow(3) as larger:
                assert (larger.rank(), larger.size(), larger.backend_for("cuda")) == (1, 6, "fake")
                assert (await larger.allgather_object(1)) == [1] * 6


async def test_fake_subgroups_have_the_given_ranks() -> None:
    async with fake_group(3, 1024) as pg:
        part = await pg.split_group([1, 3, 5])
        assert part is not None
        assert (part.rank(), part.global_ranks, part.backend_for("cuda")) == (1, (1, 3, 5), "fake")
        assert await part.allgather_object("mine") == ["mine"] * 3
        assert part.allreduce(1).seq == 2
        assert await pg.split_group([0, 1]) is None
        pair = await part.split_group([[0], [1, 2]])
        assert pair is not None
        assert pair.global_ranks == (3, 5)
        assert pair.barrier().done()
        assert pg.barrier().seq == 1
    with pytest.raises(GroupClosedError):
        pair.barrier()


async def test_fake_block_takes_one_sequence_number() -> None:
    async with fake_group(1, 1024) as pg:
        async with pg.coalescing():
            works = [pg.allreduce(np.ones(3)) for _ in range(4)]
        assert all(work.done() for work in works)
        assert [(await work).tolist() for work in works] == [[1, 1, 1]] * 4
        assert pg.barrier().seq == 2


async def test_fake_calls_are_recorded_in_the_flight_recorder() -> None:
    async with fake_group(0, 3) as pg:
        for call in ARRAYS.values():
            call(pg, np.ones(6))
        pg.allgather_object(1)
        pg.send(np.ones(1), 1)
        entries = pg.recorder.dump()["entries"]
        assert len(entries) == len(ARRAYS) + 2
        assert {entry["state"] for entry in entries} == {"finished"}


async def test_fake_rank_can_be_read_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "8")
    async with new_group("fake", device="cuda") as pg:
        assert (pg.rank(), pg.size(), pg.backend_for("cpu"), pg.backend_for("cuda")) == (3, 8, "fake", "fake")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"rank": 2, "world_size": 2}, "rank=2, world_size=2: world_size must be positive and rank 0 to"),
        ({"rank": 0}, "world_size is missing: give world_size= with backend='fake'"),
        ({"join": True}, "join=True: leave out rank, world_size, name and backend"),
    ],
)
def test_fake_group_without_rank_or_size_is_refused(
    given: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(ValueError, match=message):
        new_group("fake", **given)


async def test_fake_group_of_100000_ranks_takes_little_time_and_memory() -> None:
    async with fake_group(99_999, 100_000) as pg:
        for call in (pg.allreduce, pg.scan):
            assert call(x := np.ones(1_000_000)) is not None
            assert x.sum() == 1_000_000
        assert (await pg.allgather_into_tensor(np.zeros(100_000), np.ones(1))).sum() == 0
        # Plans must contain no schedule, since a schedule can have two steps per rank.
        assert all(plan.program == () for plan in plans_of(pg))
        assert len(channels_of(pg)) == 1
