"""Subgroups in `aiocoll.distributed`, whose calls take roots and peers as global ranks."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import numpy as np
import pytest

import aiocoll
import aiocoll.distributed as dist
from aiocoll import GroupClosedError, HashStore, ProcessGroup

from ..ranks import LINKS, parametrize_transports, run_ranks

OUTSIDE = dist.GroupMember.NON_GROUP_MEMBER
WORLDS = (1, 2, 3, 4, 7)


@pytest.mark.ranks(*WORLDS)
async def test_group_made_by_new_group_supports_every_kind_of_call(pg: ProcessGroup) -> None:
    r, p = pg.rank(), pg.size()
    all_ranks = await dist.new_group()
    assert await dist.all_reduce(1, group=all_ranks) == p
    even = await dist.new_group(range(0, p, 2), timeout=timedelta(seconds=20), group_desc="even ranks")
    assert (even == OUTSIDE) is (r % 2 == 1)
    if r % 2 == 0:
        assert (even.timeout, even.group_desc) == (20.0, "even ranks")
        assert dist.get_process_group_ranks(even) == list(range(0, p, 2))
        assert await dist.all_reduce(r, group=even) == sum(range(0, p, 2))
    # The order of `ranks` does not change the rank order in the new group.
    backwards = await dist.new_group(list(range(p))[::-1])
    assert dist.get_rank(backwards) == r
    current, groups = await dist.new_subgroups_by_enumeration([[rank] for rank in range(p)])
    assert [group == OUTSIDE for group in groups] == [rank != r for rank in range(p)]
    assert await dist.all_reduce(r, group=current) == r
    half = await dist.split_group(backwards, [list(range((p + 1) // 2))])
    assert (half is None) is (r >= (p + 1) // 2)
    assert dist.get_pg_count() == 4 + (r % 2 == 0) + (half is not None)


@pytest.mark.ranks(4)
@parametrize_transports(*LINKS[1:])
async def test_subgroups_work_over_every_transport(pg: ProcessGroup) -> None:
    current, _ = await dist.new_subgroups(2, timeout=20)
    assert await dist.all_reduce(pg.rank(), group=current) == 1 + 4 * (pg.rank() // 2)
    await dist.broadcast(tensor := np.full(5, pg.rank()), src=pg.rank() // 2 * 2 + 1, group=current)
    np.testing.assert_array_equal(tensor, np.full(5, pg.rank() // 2 * 2 + 1))


@pytest.mark.ranks(5)
async def test_global_ranks_are_roots_and_peers_of_a_group(pg: ProcessGroup) -> None:
    """Use a group of global ranks 1, 2 and 4, so that global rank 4 is group rank 2."""
    r = pg.rank()
    group = await dist.new_group([1, 2, 4])
    if r in (0, 3):
        with pytest.warns(UserWarning, match="broadcast was called by rank"):
            assert await dist.broadcast(np.zeros(2), 4, group) is None
        return
    mine = dist.get_group_rank(group, r)
    for root in ({"src": 4}, {"group_src": 2}):
        await dist.broadcast(tensor := np.full(2, r), group=group, **root)
        np.testing.assert_array_equal(tensor, [4, 4])
        parts = [np.full(2, 10 + rank) for rank in range(3)] if r == 4 else None
        await dist.scatter(tensor, parts, group=group, **root)
        np.testing.assert_array_equal(tensor, np.full(2, 10 + mine))
        await dist.broadcast_object_list(objects := [r], group=group, **root)
        assert objects == [4]
        await dist.scatter_object_list(objects, [0, 1, 2] if r == 4 else None, group=group, **root)
        assert objects == [mine]
    for root in ({"dst": 4}, {"group_dst": 2}):
        await dist.reduce(tensor := np.full(2, r), group=group, **root)
        np.testing.assert_array_equal(tensor, [7, 7] if r == 4 else [r, r])
        gathered: Any = [np.zeros(2, np.int64) for _ in range(3)] if r == 4 else None
        await dist.gather(np.full(2, r), gathered, group=group, **root)
        assert gathered is None or [each[0] for each in gathered] == [1, 2, 4]
        await dist.gather_object(r, gathered := [None] * 3 if r == 4 else None, group=group, **root)
        assert gathered in (None, [1, 2, 4])
    # Global rank 1 sends to global rank 4. The peer is given as a global rank or, as `group_dst`, as a group rank.
    if r == 1:
        await dist.send(np.ones(1), 4, group)
        await dist.send_object_list(["a"], 4, group)
        await dist.send(np.ones(1), group_dst=2, group=group)
        await dist.batch_isend_irecv([dist.P2POp(dist.isend, np.ones(1), 4, group)])
    if r == 4:
        assert await dist.recv(np.zeros(1), group_src=0, group=group) == 1
        assert await dist.recv_object_list([None], group=group) == 1
        assert await dist.recv(np.zeros(1), group=group) == 1
        operation = dist.P2POp(dist.irecv, np.zeros(1), group_peer=0, group=group)
        assert (operation.peer, operation.group_peer) == (1, 0)
        await dist.batch_isend_irecv([operation])
    with pytest.raises(ValueError, match="src=3, a global rank, is not in group"):
        dist.broadcast(tensor, 3, group)
    # The default root is global rank 0, which is not in the group.
    with pytest.raises(ValueError, match="dst=0, a global rank, is not in group"):
        dist.gather(tensor, group=group)


@pytest.mark.ranks(4)
async def test_global_ranks_are_ranks_of_the_current_default_group(pg: ProcessGroup) -> None:
    upper = await dist.new_group([2, 3])
    if pg.rank() < 2:
        return
    assert dist.get_global_rank(upper, 0) == 2
    with aiocoll.process_group(upper):
        assert dist.get_rank() == pg.rank() - 2
        assert dist.get_global_rank(upper, 0) == 0
        assert dist.get_group_rank(pg, 0) == 2
        with pytest.raises(ValueError, match="has no global rank"):
            dist.get_global_rank(pg, 0)
        await dist.broadcast(tensor := np.full(2, pg.rank()), 1)
        np.testing.assert_array_equal(tensor, [3, 3])


@pytest.mark.ranks(3)
async def test_new_group_with_local_synchronization_needs_no_call_of_other_ranks(pg: ProcessGroup) -> None:
    r = pg.rank()
    for _ in range(2):
        if r > 0:
            group = await dist.new_group([2, 1], timeout=20, use_local_synchronization=True, group_desc="upper")
            assert (group.size(), group.timeout, group.group_desc) == (2, 20.0, "upper")
            assert await dist.all_reduce(r, group=group) == 3
    # Non-members can omit the call. If non-member rank 0 calls, it gets NON_GROUP_MEMBER and uses no sequence number.
    if r == 0:
        assert await dist.new_group([1, 2], use_local_synchronization=True) == OUTSIDE
    assert await dist.all_reduce(1, group=await dist.new_group()) == 3
    assert dist.get_pg_count() == (2 if r == 0 else 4)
    await dist.destroy_process_group()
    if r > 0:
        with pytest.raises(GroupClosedError):
            dist.barrier(group)


async def test_new_subgroups_use_the_launchers_local_world_size_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")

    async def body(pg: ProcessGroup) -> None:
        current, _ = await dist.new_subgroups()
        assert dist.get_process_group_ranks(current) == [pg.rank() // 2 * 2, pg.rank() // 2 * 2 + 1]

    await run_ranks(4, body)


@pytest.mark.ranks(5)
async def test_new_subgroups_can_divide_a_group_other_than_the_default_group(pg: ProcessGroup) -> None:
    upper = await dist.new_group([1, 2, 3, 4])
    if pg.rank() == 0:
        return
    current, groups = await dist.new_subgroups(2, group=upper)
    assert len(groups) == 2
    assert dist.get_process_group_ranks(current) == ([1, 2] if pg.rank() < 3 else [3, 4])
    assert await dist.all_reduce(pg.rank(), group=current) == (3 if pg.rank() < 3 else 7)


@pytest.mark.ranks(4)
async def test_shrink_of_a_subgroup_keeps_the_default_group(pg: ProcessGroup) -> None:
    group = await dist.new_group([0, 1, 2])
    if pg.rank() == 1:
        await group.wait_revoked()
    elif pg.rank() < 3:
        smaller = await dist.shrink_group([1], group)
        assert dist.group.WORLD is pg
        assert dist.get_process_group_ranks(smaller) == [0, 2]
        assert await dist.all_reduce(1, group=smaller) == 2
    assert await dist.all_reduce(1) == 4


@pytest.mark.ranks(4)
async def test_shrunk_default_group_replaces_the_default_group_of_earlier_tasks(pg: ProcessGroup) -> None:
    for excluded in (1, 2):
        world = dist.group.WORLD
        assert world is not None
        if dist.get_rank() == excluded:
            await world.wait_revoked()
            return
        await dist.shrink_group([excluded])
    with aiocoll.process_group(pg):  # tasks that were started earlier have such a context
        assert dist.get_world_size() == 2
        assert await dist.all_reduce(pg.rank()) == 0 + 2


async def test_two_default_groups_have_separate_subgroups() -> None:
    async def body(pg: ProcessGroup, stores: list[HashStore]) -> None:
        r = pg.rank()
        async with aiocoll.new_group(store=stores[0], rank=3 - r, world_size=4) as other:
            first = await dist.new_group([0, 1])
            with aiocoll.process_group(other):
                assert dist.get_rank() == 3 - r
                second = await dist.new_group([0, 1])
                assert (second == OUTSIDE) is (r < 2)
            assert (first == OUTSIDE) is (r > 1)
            mine = first if r < 2 else second
            assert await dist.all_reduce(r, group=mine) == (1 if r < 2 else 5)

    store = HashStore()
    await run_ranks(4, body, [store])
    await store.aclose()


async def test_new_group_refuses_backends_that_differ_from_those_of_the_default_group() -> None:
    async with HashStore() as store:
        await dist.init_process_group("cpu:aio,cuda:nccl", store=store, rank=0, world_size=1)
        config = dist.get_backend_config()
        for backend in ("aio", "AIO", "nccl", "cpu:aio", "CUDA:NCCL", "cuda:nccl,cpu:aio", config):
            group = await dist.new_group(backend=backend)
            assert dist.get_backend_config(group) == config
        for backend in ("cuda:aio", "cpu:nccl", "gloo", "fake"):
            with pytest.raises(
                ValueError, match=f"backend='{backend}' must be None or 'aio', because the parent group .* has {config}"
            ):
                await dist.new_group(backend=backend)
        for device in ("cpu", 0, "cuda:1"):
            assert dist.get_backend_config(await dist.new_group(device_id=device)) == config
        with pytest.raises(ValueError, match="device_id='xpu' must be None or a device of"):
            await dist.new_group(device_id="xpu")
        with pytest.raises(ValueError, match="device_id='cuda:-1': the index '-1' must be a number from 0"):
            await dist.new_group(device_id=-1)
        await dist.destroy_process_group()
