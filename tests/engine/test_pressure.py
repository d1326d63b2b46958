"""Many calls in flight, large messages in any order, and slow receivers: all calls complete within the windows."""

from __future__ import annotations

import asyncio
import random
import sys

import numpy as np
import pytest

from aiocoll import HashStore, ProcessGroup, ReduceOp, new_group
from aiocoll.engine.journal import HISTORY
from aiocoll.engine.links.flow_control import LINK_WINDOW
from aiocoll.engine.operations.plan import EAGER_WINDOW
from aiocoll.testing import run_processes

from ..internals import comm_of, ungranted_bytes
from ..ranks import LINKS, options, parametrize_transports, run_in_two_groups, run_ranks, wait_until
from . import jobs

MIB = 1024 * 1024
linux_only = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc/self/statm")


async def fill_the_window(pg: ProcessGroup) -> None:
    """Send eager messages with tag 9 from rank 0 to rank 1, which does not receive, until the window is full."""
    if pg.rank() == 0:
        for _ in range(LINK_WINDOW // EAGER_WINDOW):
            pg.send(np.zeros(EAGER_WINDOW, "uint8"), 1, tag=9)
        await wait_until(lambda: ungranted_bytes(comm_of(pg).channels[1]) == LINK_WINDOW)


@pytest.mark.parametrize("nbytes", [1, EAGER_WINDOW, EAGER_WINDOW + 1, 3_000_000])
@pytest.mark.ranks(2, timeout=5)
@parametrize_transports(*LINKS)
async def test_message_that_exceeds_a_full_window_is_announced(pg: ProcessGroup, nbytes: int) -> None:
    """Check that a receive gets its own message: unannounced, it would hang or get a later message of the same tag."""
    await fill_the_window(pg)
    if pg.rank() == 0:
        work = pg.send(np.full(nbytes, 1, "uint8"), 1)
        pg.send_object("behind it", 1)
        await work
    else:
        assert (await pg.recv(np.zeros(nbytes, "uint8"), 0) == 1).all()
        assert await pg.recv_object(0) == "behind it"
        for _ in range(LINK_WINDOW // EAGER_WINDOW):
            await pg.recv(np.ones(EAGER_WINDOW, "uint8"), 0, tag=9)


@pytest.mark.ranks(2, timeout=5)
@parametrize_transports(*LINKS)
async def test_object_that_exceeds_a_full_window_is_announced(pg: ProcessGroup) -> None:
    await fill_the_window(pg)
    got = await pg.broadcast_object(bytes(EAGER_WINDOW + 1) if pg.rank() == 0 else None, 0)
    assert len(got) == EAGER_WINDOW + 1
    for _ in range(LINK_WINDOW // EAGER_WINDOW if pg.rank() else 0):
        await pg.recv(np.ones(EAGER_WINDOW, "uint8"), 0, tag=9)


async def exchange(pg: ProcessGroup, nbytes: int, keys: str, tasks: bool) -> None:
    """Reduce one large array per key, in the order of `keys`, in one task or with one task per array."""
    arrays = {key: np.full(nbytes // 4, pg.rank() + 1, "float32") for key in keys}
    if tasks:
        async with asyncio.TaskGroup() as group:
            for key, array in arrays.items():
                group.create_task(pg.allreduce(array, ReduceOp.PREMUL_SUM(2), key=key).join())
    else:
        for work in [pg.allreduce(array, ReduceOp.PREMUL_SUM(2), key=key) for key, array in arrays.items()]:
            await work
    assert all((array == 6).all() for array in arrays.values())


@pytest.mark.slow
@pytest.mark.parametrize("tasks", [False, True], ids=["calls", "tasks"])
@pytest.mark.parametrize("transport", LINKS)
async def test_large_messages_in_opposite_orders_do_not_block_other_calls(transport: str, tasks: bool) -> None:
    """Let ranks make large calls in two groups in different orders; small calls must not wait for large messages."""

    async def body(one: ProcessGroup, two: ProcessGroup) -> None:
        rank = one.rank()
        mine, room = np.full(64 * MIB, rank, "uint8"), np.full(64 * MIB, 9, "uint8")
        sending = two.send(mine, 1 - rank)
        giants = [(one, 64 * MIB, "ab"), (two, 8 * MIB, "cd")]
        if rank:
            giants = [(two, 8 * MIB, "dc"), (one, 64 * MIB, "ba")]
        running = [asyncio.create_task(exchange(*giant, tasks)) for giant in giants]
        for number in range(50):
            assert await one.allreduce(number) == 2 * number
        # Post the receive last: the message waits for the receive, and no other call waits for the message.
        await two.recv(room, 1 - rank)
        await sending
        await asyncio.gather(*running)
        assert (room == 1 - rank).all()

    await run_in_two_groups(body, transport)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("transport", "keyed"),
    [
        pytest.param("memory", False, id="memory-ordered"),
        pytest.param("memory", True, id="memory-keyed"),
        pytest.param("unix", False, id="unix-ordered", marks=pytest.mark.matrix),
        pytest.param("unix", True, id="unix-keyed"),
        pytest.param("shm", False, id="shm-ordered", marks=pytest.mark.matrix),
        pytest.param("shm", True, id="shm-keyed"),
    ],
)
async def test_ten_thousand_concurrent_collectives_complete(transport: str, keyed: bool) -> None:
    count = 10_000

    async def rank(pg: ProcessGroup) -> None:
        async def reduce_number(number: int) -> None:
            result = await pg.allreduce(np.full(4, number), key=f"key {number}" if keyed else None)
            assert result.tolist() == [2 * number] * 4

        order = list(range(count))
        if keyed:
            random.Random(pg.rank()).shuffle(order)
        async with asyncio.TaskGroup() as tasks:
            for number in order:
                tasks.create_task(reduce_number(number))
        assert pg.pending() == []
        assert jobs.unclaimed_bytes(pg) == 0

    await run_ranks(2, rank, transport=transport)


@pytest.mark.parametrize("transport", LINKS)
async def test_data_for_groups_that_do_not_exist_yet_counts_toward_the_window(transport: str) -> None:
    store = HashStore()
    group_options = options(transport)
    count, nbytes = 100, 100_000

    async def rank(rank: int) -> None:
        async with new_group(store=store, rank=rank, world_size=2, options=group_options) as one:
            works = []
            if rank == 0:
                two = await new_group(store=store, rank=0, world_size=2, options=group_options)
                for number in range(count):
                    data = np.full(nbytes, number, "uint8")
                    works += [two.broadcast(data, 0), two.send(data, 1), one.send(data, 1, 5)]
            await one.barrier()
            if rank == 1:
                await wait_until(lambda: jobs.unclaimed_bytes(one) > LINK_WINDOW - 2 * nbytes)
                assert jobs.unclaimed_bytes(one) <= LINK_WINDOW
                two = await new_group(store=store, rank=1, world_size=2, options=group_options)
                for number in range(count):
                    for work in (
                        two.broadcast(np.zeros(nbytes, "uint8"), 0),
                        two.recv(np.zeros(nbytes, "uint8"), 0),
                        one.recv(np.zeros(nbytes, "uint8"), 0, 5),
                    ):
                        assert (await work == number).all()
                assert jobs.unclaimed_bytes(one) == jobs.unclaimed_bytes(two) == 0
            for work in works:
                await work
            await two.shutdown()

    await asyncio.gather(rank(0), rank(1))
    await store.aclose()


@pytest.mark.slow
@linux_only
@pytest.mark.parametrize("seconds", [4, pytest.param(60, marks=pytest.mark.soak)])
async def test_fast_sender_buffers_no_more_than_the_windows_at_a_slow_receiver(seconds: float) -> None:
    fast, slow = await run_processes(2, jobs.flood, seconds)
    assert LINK_WINDOW / 2 < slow.early <= LINK_WINDOW
    assert fast.early <= LINK_WINDOW
    # The limit covers waiting bytes, the copy of these bytes during delivery, and memory that the allocator keeps.
    assert max(fast.resident, slow.resident) <= 4 * LINK_WINDOW
    assert slow.received > 8 * LINK_WINDOW, "rank 1 received too little to show that the window is reused"


@pytest.mark.slow
@linux_only
@pytest.mark.parametrize(("count", "warm"), [(25_000, 5_000), pytest.param(1_000_000, 10_000, marks=pytest.mark.soak)])
async def test_memory_use_does_not_grow_over_many_operations(count: int, warm: int) -> None:
    for blocks, nbytes in await run_processes(2, jobs.operate_long, count, warm, timeout=1200):
        # Python caches integers up to 256 only, so each record of an operation may hold one more object: its number.
        # Beyond that, the bound reveals a leak of one object in a hundred operations.
        assert blocks < HISTORY + count / 100
        assert nbytes < 4 * MIB


@pytest.mark.ranks(2)
async def test_used_key_takes_only_the_memory_of_its_name_and_a_counter(pg: ProcessGroup) -> None:
    """Check that a used key leaves only a call counter, which is needed while other ranks may still use the key."""
    count = 2000
    names = [f"step {number}" for number in range(count)]
    for name in names:
        await pg.barrier(key=name)
    assert len(comm_of(pg)._counts) == count
    assert sys.getsizeof(comm_of(pg)._counts) < 100 * count
    assert all(comm_of(pg)._counts[name] == 1 for name in names)
    assert not comm_of(pg).in_flight._operations
    assert not comm_of(pg).early
