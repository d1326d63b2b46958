"""Overlapping groups that make calls in different orders, on devices that run one communicator at a time."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from aiocoll import GroupError, ProcessGroup, Recv, ReduceOp, Send
from aiocoll.engine.operations.plan import EAGER_WINDOW
from aiocoll.gpu.calls import slots as slots_module

from ..internals import Limits, comm_of, dispatcher_of, nccl_end, set_nccl_only
from ..ranks import run_ranks, wait_until
from .groups import Gpus, gpus, host, run_with_gpus, uses_nccl, wait_for_idle_launcher

LARGE = EAGER_WINDOW // 8 + 1
ROUNDS = 5


async def mesh(pg: ProcessGroup, rows: int, columns: int) -> tuple[ProcessGroup, ProcessGroup]:
    """Split a mesh of ranks into row groups and column groups; return this rank's two groups."""
    row = await pg.split_group([[r * columns + c for c in range(columns)] for r in range(rows)], group_name="row")
    column = await pg.split_group([[r * columns + c for r in range(rows)] for c in range(columns)], group_name="column")
    assert row is not None
    assert column is not None
    return row, column


def state_of(pg: ProcessGroup) -> Any:
    return dispatcher_of(pg).device_calls.state


@contextmanager
def no_staging(gpu: Gpus) -> Iterator[None]:
    """Check that no call is staged during the ``with`` block."""
    before = gpu.cuda.calls["copy_to_host"]
    yield
    assert gpu.cuda.calls["copy_to_host"] == before


@pytest.mark.parametrize("verify", ["behind", "before"])
@pytest.mark.parametrize(("rows", "columns"), [(1, 2), (2, 2), (2, 3)])
async def test_ranks_can_call_row_and_column_groups_in_opposite_orders(
    rows: int, columns: int, verify: str, limits: Limits, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Make calls that would deadlock without a common launch order, because the devices would wait in a cycle."""
    limits(device_slot_wait=60.0)
    monkeypatch.setenv("AIOCOLL_VERIFY", verify)

    async def body(pg: ProcessGroup, gpu: Gpus) -> None:
        rank = pg.rank()
        row, column = await mesh(pg, rows, columns)
        turned = sum(divmod(rank, columns)) % 2
        for number in range(ROUNDS):
            tensors = {group: gpu.tensor(np.full(3, rank), rank) for group in (row, column)}
            works = [
                group.allreduce(tensors[group], key=f"{number} {key}" if key else None)
                for group in ((row, column) if turned else (column, row))
                for key in ("", "a", "b")[: 1 + 2 * (number > 2)]
            ]
            await asyncio.gather(*(work.join() for work in works))
            for group, tensor in tensors.items():
                total = sum(group.global_ranks) * group.size() ** (len(works) // 2 - 1)
                assert host(tensor).tolist() == [total] * 3
        assert uses_nccl(row)
        assert uses_nccl(column)

    with gpus(rows * columns) as gpu, no_staging(gpu):
        await run_ranks(rows * columns, body, gpu)


@pytest.mark.parametrize("seed", range(6))
async def test_ranks_can_call_overlapping_groups_in_random_orders(seed: int, limits: Limits) -> None:
    """Call one group more often than the others, so that the launch times of the groups differ."""
    limits(device_slot_wait=60.0)

    async def body(pg: ProcessGroup, gpu: Gpus) -> None:
        rank = pg.rank()
        groups = {group: gpu.tensor(np.ones(2), rank) for group in (pg, *await mesh(pg, 2, 2))}
        often = {group: 2 + 9 * (number == seed % 3) for number, group in enumerate(groups)}
        for turn in range(3):
            own = random.Random(f"{seed} {turn} {rank}")
            calls = [group for group in groups for _ in range(often[group])]
            own.shuffle(calls)
            works = []
            for group in calls:
                works.append(group.allreduce(groups[group], ReduceOp.MAX))
                if own.random() < 0.3:
                    await asyncio.sleep(0)
            await asyncio.gather(*(work.join() for work in works))
        assert [host(tensor).tolist() for tensor in groups.values()] == [[1.0] * 2] * 3

    with gpus(4) as gpu, no_staging(gpu):
        await run_ranks(4, body, gpu)


async def test_all_kinds_of_calls_of_three_groups_complete(limits: Limits) -> None:
    """Make collectives, batches and blocks concurrently in the world group and in two subgroups."""
    limits(device_slot_wait=60.0)

    async def body(pg: ProcessGroup, gpu: Gpus) -> None:
        rank = pg.rank()
        groups = [pg, *await mesh(pg, 2, 2)]

        async def calls(group: ProcessGroup) -> None:
            own, size = group.rank(), group.size()
            members = group.global_ranks
            for number in range(ROUNDS):
                tensor = gpu.tensor(np.full(2, rank), rank)
                await group.allreduce(tensor)
                assert host(tensor).tolist() == [sum(members)] * 2
                out, into = gpu.tensor(np.full(LARGE, rank), rank), gpu.tensor(np.zeros(LARGE, int), rank)
                await group.batch([Send(out, (own + 1) % size), Recv(into, (own - 1) % size)])
                assert set(host(into)) == {members[own - 1]}
                async with group.coalescing():
                    group.allreduce(one := gpu.tensor(np.ones(2), rank))
                    group.broadcast(two := gpu.tensor(np.full(2, rank), rank), number % size)
                assert (host(one).tolist(), host(two).tolist()) == ([size] * 2, [members[number % size]] * 2)

        first = rank % 3
        await asyncio.gather(*(calls(group) for group in groups[first:] + groups[:first]))

    await run_with_gpus(4, body)


async def test_first_group_on_a_device_launches_calls_ahead_until_a_second_group_exists(limits: Limits) -> None:
    limits(device_slot_wait=60.0)

    async def body(pg: ProcessGroup, gpu: Gpus, calls: list[str]) -> None:
        rank = pg.rank()
        tensor = gpu.tensor(np.ones(3), rank)
        for _ in range(3):
            await pg.allreduce(tensor)
        calls.clear()
        await pg.barrier()
        await wait_for_idle_launcher(pg, gpu)
        work = pg.allreduce(tensor)
        assert "all_reduce" in calls
        await work
        other = await pg.split_group([[0, 1]], group_name="other")
        assert (other is None) == (rank == 2)
        if other is not None:
            await other.allreduce(gpu.tensor(np.ones(3), rank))
            assert uses_nccl(other)
        await wait_until(lambda: state_of(pg).slots.is_shared)
        assert host(tensor).tolist() == [3.0**4] * 3
        await pg.allreduce(tensor)
        assert host(tensor).tolist() == [3.0**5] * 3

    with gpus(3) as gpu, no_staging(gpu):
        await run_ranks(3, body, gpu, gpu.calls())


@pytest.mark.parametrize("forced", [False, True])
async def test_call_launched_ahead_delays_other_groups_only_briefly(forced: bool) -> None:
    """Let rank 0 launch a call of one group ahead, while rank 1 first calls the other group."""
    looked = asyncio.Event()

    async def body(pg: ProcessGroup, gpu: Gpus) -> None:
        rank = pg.rank()
        tensor = gpu.tensor(np.ones(3), rank)
        for _ in range(3):
            await pg.allreduce(tensor)
        other = await pg.split_group([[0, 1]], group_name="other")
        assert other is not None
        another = gpu.tensor(np.ones(3), rank)
        await pg.barrier()
        if rank == 0:
            work = pg.allreduce(tensor)
            await wait_until(lambda: nccl_end(pg).in_flight)
        if forced:
            set_nccl_only(other, True)
        waits = other.allreduce(another)
        if forced:
            if rank == 0:
                await asyncio.sleep(0.05)
                assert not waits.done()
                looked.set()
            await looked.wait()
            assert not waits.done()
        else:
            await waits
            assert gpu.cuda.calls["copy_to_host"]
        if rank == 1:
            work = pg.allreduce(tensor)
        await work
        await waits
        assert host(another).tolist() == [2.0] * 3
        assert host(tensor).tolist() == [2.0**4] * 3
        await wait_until(lambda: uses_nccl(other))
        with no_staging(gpu):
            await other.allreduce(another)
        assert host(another).tolist() == [4.0] * 3

    await run_with_gpus(2, body)


async def test_calls_without_an_agreed_launch_slot_are_staged_after_the_maximum_wait(limits: Limits) -> None:
    """Set the maximum wait to zero; make messages, ordered calls and keyed calls."""
    limits(device_slot_wait=0.0)

    async def body(pg: ProcessGroup, gpu: Gpus) -> None:
        rank = pg.rank()
        groups = [pg, await pg.split_group([[0, 1]], group_name="other")]
        for group in groups:
            assert group is not None
            await group.allreduce(gpu.tensor(np.ones(1), rank))
        for _ in range(ROUNDS):
            for group in groups:
                assert group is not None
                large = gpu.tensor(np.full(LARGE, rank), rank)
                tensors = [gpu.tensor(np.ones(2), rank) for _ in range(2)]
                await asyncio.gather(
                    (group.recv(large, 0) if rank else group.send(large, 1)).join(),
                    group.allreduce(tensors[0]).join(),
                    group.allreduce(tensors[1], key="key").join(),
                )
                assert set(host(large)) == {0}
                assert [host(each).tolist() for each in tensors] == [[2.0] * 2] * 2

    await run_with_gpus(2, body)


@pytest.mark.parametrize("failing", ["row", "column"])
async def test_failed_group_blocks_no_other_group_on_its_device(failing: str, limits: Limits) -> None:
    limits(device_slot_wait=60.0)

    async def body(pg: ProcessGroup, gpu: Gpus) -> None:
        rank = pg.rank()
        row, column = await mesh(pg, 2, 2)
        fails, goes_on = (row, column) if failing == "row" else (column, row)
        for group in (row, column):
            await group.allreduce(gpu.tensor(np.ones(3), rank))
        await pg.barrier()
        lost = [fails.allreduce(gpu.tensor(np.ones(3), rank)) for _ in range(5)] if rank else []
        works = [goes_on.allreduce(gpu.tensor(np.ones(3), rank)) for _ in range(5)]
        if rank == 0:
            fails.abort("enough")
        await asyncio.gather(*(work.join() for work in works))
        if 0 in fails.global_ranks:
            assert isinstance(await fails.wait_revoked(), GroupError)
        for work in lost:
            await asyncio.wait([work.get_future()])
            assert work.is_success() == (0 not in fails.global_ranks)
        await goes_on.allreduce(tensor := gpu.tensor(np.ones(3), rank))
        assert host(tensor).tolist() == [2.0] * 3

    await run_with_gpus(4, body)


@pytest.mark.parametrize("leaver", [0, 1, 2])
async def test_group_that_a_rank_has_left_blocks_no_other_group_on_its_device(leaver: int, limits: Limits) -> None:
    """Use a group that has launched calls ahead and, without the rank, cannot agree on launch slots any more."""
    limits(device_departure_timeout=0.02)

    async def body(pg: ProcessGroup, gpu: Gpus) -> None:
        rank = pg.rank()
        first = await pg.split_group([[0, 1, 2]], group_name="first")
        other = await pg.split_group([[0, 1, 2]], group_name="other")
        assert first is not None
        assert other is not None
        for _ in range(3):
            await first.allreduce(gpu.tensor(np.ones(3), rank))
        await pg.barrier()
        if rank == leaver:
            await first.shutdown()
        else:
            await wait_until(lambda: comm_of(first).left)
        await pg.barrier()
        for _ in range(3):
            await other.allreduce(tensor := gpu.tensor(np.ones(3), rank))
            assert host(tensor).tolist() == [3.0] * 3
        await wait_until(lambda: uses_nccl(other))
        if rank != leaver:
            ends = [each for each in range(3) if each != leaver]
            large = gpu.tensor(np.full(LARGE, rank), rank)
            await (first.send(large, ends[1]) if rank == ends[0] else first.recv(large, ends[0]))
            assert set(host(large)) == {ends[0]}

    await run_with_gpus(3, body)


async def test_messages_without_a_launch_time_are_staged_when_rank_0_leaves(limits: Limits) -> None:
    """Let rank 0 leave between its assignment of a launch slot and the time proposals of both ends."""
    limits(device_slot_wait=60.0, device_departure_timeout=0.02)

    async def body(pg: ProcessGroup, gpu: Gpus) -> None:
        rank = pg.rank()
        first = await pg.split_group([[0, 1, 2]], group_name="first")
        held = await pg.split_group([[0, 1, 2]], group_name="held")
        assert first is not None
        assert held is not None
        for group in (first, held):
            for _ in range(3):
                await group.allreduce(gpu.tensor(np.ones(1), rank))
        await wait_until(lambda: state_of(first).slots.is_shared)
        await pg.barrier()
        state_of(first).slots._lane.is_shared = rank == 0  # prevents proposals of a launch time
        await pg.barrier()
        large = gpu.tensor(np.full(LARGE, rank), rank)
        work = None if rank == 0 else held.send(large, 2) if rank == 1 else held.recv(large, 1)
        if rank == 0:
            await wait_until(lambda: state_of(held).slots._row)
            await held.shutdown()
        else:
            assert work is not None
            await work
            assert set(host(large)) == {1}
            state_of(first).slots._lane.share()

    await run_with_gpus(3, body)


@pytest.mark.parametrize("way", ["nccl", "staged"])
@pytest.mark.parametrize(
    ("sender", "note"),
    [
        (1, {"shared": 9}),
        (1, {"slot": 9}),
        (1, {"slot": 9, "at": 9}),
        (0, {"slot": 9, "at": 9}),
        (0, {"slot": 5, "at": 9}),
        (1, {"slot": 9, "clock": 9}),
        (1, {"slot": 5, "clock": 0}),
        (0, {"slot": 5, "clock": 9}),
        (0, {"slot": 5}),
        (0, {"crowded": True}),
    ],
    ids=str,
)
async def test_invalid_control_message_about_launch_slots_fails_the_group(
    sender: int, note: dict[str, Any], way: str
) -> None:
    """Send messages that do not fit launch slot 5: rank 0 has requested its time, and rank 1 knows its time."""

    async def body(pg: ProcessGroup, gpu: Gpus) -> None:
        rank, comm = pg.rank(), comm_of(pg)
        await pg.allreduce(gpu.tensor(np.ones(3), rank))
        if (slots := state_of(pg).slots) is not None:
            slots._times[5] = None if rank == 0 else 3
            slots._numbered[1] = 5
            slots._asked[1, 5] = slots_module._Slot({1: 5})
        await pg.barrier()
        if rank == sender:
            comm.channels[1 - rank].send_control({"t": "device", "g": comm.id, **note})
        assert isinstance(await pg.wait_revoked(), GroupError)

    with gpus(2, way) as gpu:
        await run_ranks(2, body, gpu)


async def test_launch_time_proposals_for_staged_calls_are_ignored(limits: Limits) -> None:
    """Let a launch time proposal arrive after its call was staged."""
    limits(device_slot_wait=60.0)

    async def body(pg: ProcessGroup, gpu: Gpus) -> None:
        rank = pg.rank()
        await pg.allreduce(gpu.tensor(np.ones(3), rank))
        slots = state_of(pg).slots
        if rank == 0:
            slots._numbered[1] = 100
            slots._on_proposal(1, 99, 7)
            slots._answer(99, 7)
        await pg.allreduce(gpu.tensor(np.ones(3), rank))

    await run_with_gpus(2, body)
