"""The examples and errors in torch's documentation of the functional API, ported to `await`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import aiocoll
import aiocoll.distributed as dist
from aiocoll import CollectiveTimeoutError, HashStore, ProcessGroup, ReduceOp

from ..ranks import run_ranks

COVERS = {
    "init_process_group, twice": "test_second_init_process_group_is_refused",
    "init_process_group, store and init_method": "test_init_process_group_refuses_store_with_init_method",
    "destroy_process_group, one and all": "test_destroy_process_group_closes_one_group_or_all_groups",
    "get_rank, outside": "test_get_rank_returns_minus_one_outside_of_the_group",
    "get_group_rank, errors": "test_get_group_rank_refuses_ranks_outside_of_the_group",
    "get_node_local_rank, errors": "test_get_node_local_rank_refuses_a_missing_variable_without_a_fallback",
    "all_reduce, example": "test_all_reduce_example_gives_the_documented_result",
    "all_reduce, complex maximum": "test_all_reduce_refuses_the_maximum_of_complex_numbers",
    "all_gather, example": "test_all_gather_example_gives_the_documented_result",
    "all_gather_into_tensor, example": "test_all_gather_into_tensor_example_gives_the_documented_result",
    "all_gather_coalesced, example": "test_all_gather_coalesced_example_gives_the_documented_result",
    "all_gather_object, example": "test_all_gather_object_example_gives_the_documented_result",
    "gather, example": "test_gather_example_gives_the_documented_result",
    "gather, errors": "test_gather_refuses_wrong_arguments",
    "gather_object, example": "test_gather_object_example_gives_the_documented_result",
    "scatter, example": "test_scatter_example_gives_the_documented_result",
    "scatter, errors": "test_scatter_refuses_wrong_arguments",
    "scatter_object_list, example": "test_scatter_object_list_example_gives_the_documented_result",
    "broadcast_object_list, example": "test_broadcast_object_list_example_gives_the_documented_result",
    "send_object_list, example": "test_send_object_list_example_gives_the_documented_result",
    "reduce_scatter_tensor, example": "test_reduce_scatter_tensor_example_gives_the_documented_result",
    "all_to_all_single, example": "test_all_to_all_single_example_gives_the_documented_result",
    "all_to_all_single, uneven example": "test_all_to_all_single_uneven_example_gives_the_documented_result",
    "all_to_all, example": "test_all_to_all_example_gives_the_documented_result",
    "all_to_all, uneven example": "test_all_to_all_uneven_example_gives_the_documented_result",
    "batch_isend_irecv, example": "test_batch_isend_irecv_example_gives_the_documented_result",
    "batch_isend_irecv, errors": "test_batch_isend_irecv_refuses_wrong_arguments",
    "monitored_barrier, example": "test_monitored_barrier_names_the_missing_rank",
    "_coalescing_manager, example": "test_coalescing_manager_example_gives_the_documented_result",
    "_time_estimator, example": "test_time_estimator_estimates_calls_without_making_them",
    "new_group, errors": "test_new_group_refuses_wrong_arguments",
    "new_subgroups, example": "test_new_subgroups_example_gives_the_documented_result",
    "new_subgroups, errors": "test_new_subgroups_refuses_wrong_arguments",
    "new_subgroups_by_enumeration, example": "test_new_subgroups_by_enumeration_example_gives_the_documented_result",
    "new_subgroups_by_enumeration, errors": "test_new_subgroups_by_enumeration_refuses_wrong_arguments",
    "split_group, errors": "test_split_group_refuses_wrong_arguments",
    "shrink_group, errors": "test_shrink_group_refuses_wrong_arguments",
    "shrink_group, default group": "test_shrink_group_replaces_the_default_group",
    "Backend, names": "test_backend_name_is_converted_to_lower_case",
    "BackendConfig, errors": "test_backend_config_refuses_invalid_backends",
}
LEFT_OUT: dict[str, str] = {}

OUTSIDE = dist.GroupMember.NON_GROUP_MEMBER
OBJECTS: list[Any] = ["foo", 12, {1: 2}]
DTYPES = pytest.mark.parametrize("unit", [np.int64(1), np.complex64(1 + 1j)])
#: The numbers of each message in the all-to-all examples with uneven sizes: UNEVEN[sender][receiver].
UNEVEN = [
    [[0, 1], [2, 3], [4], [5]],
    [[10, 11, 12], [13, 14], [15, 16], [17, 18]],
    [[20, 21], [22], [23], [24]],
    [[30, 31], [32, 33], [34, 35], [36]],
]


def assert_equal_arrays(got: Any, expected: Any) -> None:
    np.testing.assert_array_equal(got, expected)


async def test_second_init_process_group_is_refused() -> None:
    store = HashStore()
    await dist.init_process_group(store=store, rank=0, world_size=1)
    with pytest.raises(ValueError, match="already"):
        await dist.init_process_group(store=store, rank=0, world_size=1)
    await dist.destroy_process_group()
    await store.aclose()


async def test_init_process_group_refuses_store_with_init_method() -> None:
    with pytest.raises(ValueError, match="init_method and store exclude each other"):
        await dist.init_process_group(init_method="env://", store=HashStore(), rank=0, world_size=1)
    for numbers in ({"rank": 0}, {"world_size": 1}):
        with pytest.raises(ValueError, match="is missing"):
            await dist.init_process_group(store=HashStore(), **numbers)


@pytest.mark.ranks(2)
async def test_destroy_process_group_closes_one_group_or_all_groups(pg: ProcessGroup) -> None:
    one, two = await dist.new_group([0, 1]), await dist.new_group([0])
    assert dist.get_pg_count() == 3 - pg.rank()
    await dist.destroy_process_group(one)
    with pytest.raises(aiocoll.GroupClosedError):
        dist.barrier(one)
    await dist.destroy_process_group(two)
    assert dist.get_pg_count() == 1
    other = await dist.new_group()
    await dist.destroy_process_group()
    with pytest.raises(aiocoll.GroupClosedError):
        dist.barrier(other)
    assert not dist.is_initialized()
    assert dist.get_pg_count() == 0


@pytest.mark.ranks(3)
async def test_get_rank_returns_minus_one_outside_of_the_group(pg: ProcessGroup) -> None:
    group = await dist.new_group([1, 2])
    inside = pg.rank() > 0
    assert (group == OUTSIDE) is not inside
    assert dist.get_rank(group) == (pg.rank() - 1 if inside else -1)
    assert dist.get_world_size(group) == (2 if inside else -1)


@pytest.mark.ranks(3)
async def test_get_group_rank_refuses_ranks_outside_of_the_group(pg: ProcessGroup) -> None:
    group = await dist.new_group([2, 1])
    if pg.rank() == 0:
        return
    assert [dist.get_group_rank(group, rank) for rank in (1, 2)] == [0, 1]
    assert [dist.get_global_rank(group, rank) for rank in (0, 1)] == [1, 2]
    assert dist.get_process_group_ranks(group) == [1, 2]
    with pytest.raises(ValueError, match="global_rank=0, a global rank, is not in group"):
        dist.get_group_rank(group, 0)
    with pytest.raises(ValueError, match="group_rank=2 is not a rank of group"):
        dist.get_global_rank(group, 2)


def test_get_node_local_rank_refuses_a_missing_variable_without_a_fallback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    with pytest.raises(RuntimeError, match="LOCAL_RANK is not in the environment"):
        dist.get_node_local_rank()
    assert dist.get_node_local_rank(fallback_rank=2) == 2


@pytest.mark.ranks(2)
@DTYPES
async def test_all_reduce_example_gives_the_documented_result(pg: ProcessGroup, unit: np.generic) -> None:
    tensor = (np.arange(2) + 1 + 2 * pg.rank()) * unit
    await dist.all_reduce(tensor, op=ReduceOp.SUM)
    assert_equal_arrays(tensor, [4 * unit, 6 * unit])


@pytest.mark.ranks(2)
async def test_all_reduce_refuses_the_maximum_of_complex_numbers(pg: ProcessGroup) -> None:
    for op in (ReduceOp.MAX, ReduceOp.MIN, ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR):
        assert not dist.supports_complex(op)
        with pytest.raises((TypeError, ValueError), match="complex"):
            dist.all_reduce(np.ones(2, np.complex64), op)


@pytest.mark.ranks(2)
@DTYPES
async def test_all_gather_example_gives_the_documented_result(pg: ProcessGroup, unit: np.generic) -> None:
    given = (np.arange(2) + 1 + 2 * pg.rank()) * unit
    await dist.all_gather(tensors := [np.zeros_like(given) for _ in range(2)], given)
    assert_equal_arrays(tensors, [[1 * unit, 2 * unit], [3 * unit, 4 * unit]])


@pytest.mark.ranks(2)
async def test_all_gather_into_tensor_example_gives_the_documented_result(pg: ProcessGroup) -> None:
    tensor_in = np.arange(2) + 1 + 2 * pg.rank()
    await dist.all_gather_into_tensor(concatenated := np.zeros(4, np.int64), tensor_in)
    assert_equal_arrays(concatenated, [1, 2, 3, 4])
    await dist.all_gather_into_tensor(stacked := np.zeros((2, 2), np.int64), tensor_in)
    assert_equal_arrays(stacked, [[1, 2], [3, 4]])


@pytest.mark.ranks(2)
async def test_all_gather_coalesced_example_gives_the_documented_result(pg: ProcessGroup) -> None:
    given = [[[[1, 1], [1, 1]], [2], [3, 3]], [[[3, 3], [3, 3]], [5], [1, 1]]]
    outputs = [[np.full_like(np.array(each), -1) for each in tensors] for tensors in given]
    await dist.all_gather_coalesced(outputs, [np.array(each) for each in given[pg.rank()]])
    assert [[each.tolist() for each in tensors] for tensors in outputs] == given


@pytest.mark.ranks(3)
async def test_all_gather_object_example_gives_the_documented_result(pg: ProcessGroup) -> None:
    output = [None for _ in OBJECTS]
    await dist.all_gather_object(output, OBJECTS[dist.get_rank()])
    assert output == OBJECTS


@pytest.mark.ranks(2)
async def test_gather_example_gives_the_documented_result(pg: ProcessGroup) -> None:
    gather_list = [np.zeros(2) for _ in range(2)] if dist.get_rank() == 0 else None
    await dist.gather(np.ones(2) + dist.get_rank(), gather_list, dst=0)
    if gather_list is not None:
        assert_equal_arrays(gather_list, [[1, 1], [2, 2]])


@pytest.mark.ranks(2)
async def test_gather_refuses_wrong_arguments(pg: ProcessGroup) -> None:
    own_rank, peer = pg.rank(), 1 - pg.rank()
    with pytest.raises(ValueError, match="gather_list is missing"):
        dist.gather(np.ones(2), None, dst=own_rank)
    with pytest.raises(ValueError, match="gather_list must be None"):
        dist.gather(np.ones(2), [np.ones(2)] * 2, dst=peer)
    with pytest.raises(TypeError, match="float32"):
        dist.gather(np.ones(2), [np.ones(2, np.float32) for _ in range(2)], dst=own_rank)


@pytest.mark.ranks(3)
async def test_gather_object_example_gives_the_documented_result(pg: ProcessGroup) -> None:
    output = [None for _ in OBJECTS]
    await dist.gather_object(OBJECTS[dist.get_rank()], output if dist.get_rank() == 0 else None, dst=0)
    assert output == (OBJECTS if dist.get_rank() == 0 else [None] * 3)


@pytest.mark.ranks(2)
async def test_scatter_example_gives_the_documented_result(pg: ProcessGroup) -> None:
    scatter_list = [np.ones(2), np.ones(2) * 5] if dist.get_rank() == 0 else None
    await dist.scatter(output := np.zeros(2), scatter_list, src=0)
    assert_equal_arrays(output, [1, 1] if dist.get_rank() == 0 else [5, 5])


@pytest.mark.ranks(2)
async def test_scatter_refuses_wrong_arguments(pg: ProcessGroup) -> None:
    own_rank, peer = pg.rank(), 1 - pg.rank()
    with pytest.raises(ValueError, match="scatter_list is missing"):
        dist.scatter(np.ones(2), None, src=own_rank)
    with pytest.raises(ValueError, match="scatter_list must be None"):
        dist.scatter(np.ones(2), [np.ones(2)] * 2, src=peer)


@pytest.mark.ranks(3)
async def test_scatter_object_list_example_gives_the_documented_result(pg: ProcessGroup) -> None:
    output = [None]
    await dist.scatter_object_list(output, OBJECTS if dist.get_rank() == 0 else [None] * 3, src=0)
    assert output == [OBJECTS[pg.rank()]]


@pytest.mark.ranks(3)
async def test_broadcast_object_list_example_gives_the_documented_result(pg: ProcessGroup) -> None:
    objects = list(OBJECTS) if dist.get_rank() == 0 else [None] * 3
    await dist.broadcast_object_list(objects, src=0, device="cpu")
    assert objects == OBJECTS


@pytest.mark.ranks(2)
async def test_send_object_list_example_gives_the_documented_result(pg: ProcessGroup) -> None:
    if dist.get_rank() == 0:
        await dist.send_object_list(OBJECTS, dst=1, device="cpu")
    else:
        objects = [None, None, None]
        assert await dist.recv_object_list(objects, src=0, device="cpu") == 0
        assert objects == OBJECTS


@pytest.mark.ranks(2)
async def test_reduce_scatter_tensor_example_gives_the_documented_result(pg: ProcessGroup) -> None:
    for tensor_in in (np.arange(4), np.arange(4).reshape(2, 2)):
        await dist.reduce_scatter_tensor(out := np.zeros(2, np.int64), tensor_in)
        assert_equal_arrays(out, [0, 2] if pg.rank() == 0 else [4, 6])


@pytest.mark.ranks(4)
@DTYPES
async def test_all_to_all_single_example_gives_the_documented_result(pg: ProcessGroup, unit: np.generic) -> None:
    given = (np.arange(4) + 4 * pg.rank()) * unit
    await dist.all_to_all_single(output := np.empty_like(given), given)
    assert_equal_arrays(output, (4 * np.arange(4) + pg.rank()) * unit)


@pytest.mark.ranks(4)
async def test_all_to_all_single_uneven_example_gives_the_documented_result(pg: ProcessGroup) -> None:
    rank = pg.rank()
    expected = [number for parts in UNEVEN for number in parts[rank]]
    output = np.empty(len(expected), np.int64)
    into, out_of = [len(parts[rank]) for parts in UNEVEN], [len(part) for part in UNEVEN[rank]]
    await dist.all_to_all_single(output, np.concatenate(UNEVEN[rank]), into, out_of)
    assert_equal_arrays(output, expected)


@pytest.mark.ranks(4)
@DTYPES
async def test_all_to_all_example_gives_the_documented_result(pg: ProcessGroup, unit: np.generic) -> None:
    given = list(((np.arange(4) + 4 * pg.rank()) * unit).reshape(4, 1))
    await dist.all_to_all(output := [np.empty_like(each) for each in given], given)
    assert_equal_arrays(np.concatenate(output), (4 * np.arange(4) + pg.rank()) * unit)


@pytest.mark.ranks(4)
async def test_all_to_all_uneven_example_gives_the_documented_result(pg: ProcessGroup) -> None:
    expected = [parts[pg.rank()] for parts in UNEVEN]
    output = [np.zeros(len(each), np.int64) for each in expected]
    await dist.all_to_all(output, [np.array(part) for part in UNEVEN[pg.rank()]])
    assert [each.tolist() for each in output] == expected


@pytest.mark.ranks(2)
async def test_batch_isend_irecv_example_gives_the_documented_result(pg: ProcessGroup) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    tensor = np.empty(2, np.float32)
    operations = [
        dist.P2POp(dist.isend, np.arange(2, dtype=np.float32) + 2 * rank, (rank + 1) % world_size),
        dist.P2POp(dist.irecv, tensor, (rank - 1 + world_size) % world_size),
    ]
    for request in dist.batch_isend_irecv(operations):
        await request
    assert_equal_arrays(tensor, [2, 3] if rank == 0 else [0, 1])
    name, peer = pg.group_name, 1 - rank
    assert repr(operations[0]) == f"P2POp(isend pg={name}, group_src={rank}, group_dst={peer}, (2,), float32)"
    assert repr(operations[1]) == f"P2POp(irecv pg={name}, group_src={peer}, group_dst={rank}, (2,), float32)"


@pytest.mark.ranks(2)
async def test_batch_isend_irecv_refuses_wrong_arguments(pg: ProcessGroup) -> None:
    tensor, peer = np.ones(2), 1 - pg.rank()
    with pytest.raises(ValueError, match=r"isend or irecv"):
        dist.P2POp(dist.broadcast, tensor, peer)
    with pytest.raises(ValueError, match="list of P2POp"):
        dist.batch_isend_irecv([tensor])
    both = await dist.new_group()
    operations = [dist.P2POp(dist.isend, tensor, peer), dist.P2POp(dist.isend, tensor, peer, both)]
    with pytest.raises(ValueError, match="belong to the same group"):
        dist.batch_isend_irecv(operations)
    assert not pg.pending()


@pytest.mark.ranks(3)
async def test_monitored_barrier_names_the_missing_rank(pg: ProcessGroup) -> None:
    """Check that the other ranks name rank 1, which does not call the barrier."""
    if dist.get_rank() != 1:
        with pytest.raises(CollectiveTimeoutError, match=r"1 failed to pass monitoredBarrier in 500 ms"):
            await dist.monitored_barrier(timeout=0.5, wait_all_ranks=True)
    else:
        await pg.wait_revoked()


@pytest.mark.ranks(2)
async def test_coalescing_manager_example_gives_the_documented_result(pg: ProcessGroup) -> None:
    tensors = [np.full(3, float(pg.rank() + index)) for index in range(5)]
    async with dist.coalescing_manager():
        works = [dist.all_reduce(tensor) for tensor in tensors]
    assert all(work.is_success() for work in works)
    assert_equal_arrays(tensors, [[1.0 + 2 * index] * 3 for index in range(5)])


@pytest.mark.ranks(2)
async def test_time_estimator_estimates_calls_without_making_them(pg: ProcessGroup) -> None:
    tensor = np.ones(1000)
    with dist.time_estimator() as estimate:
        for _ in range(3):
            await dist.all_reduce(tensor)
    assert estimate.seconds > 0
    assert_equal_arrays(tensor, np.ones(1000))


@pytest.mark.ranks(2)
async def test_new_group_refuses_wrong_arguments(pg: ProcessGroup) -> None:
    calls: list[tuple[type[Exception], str, dict[str, Any]]] = [
        (ValueError, r"ranks\[2\]=2 is not a rank", {"ranks": [0, 1, 2]}),
        (ValueError, r"ranks\[0\]=-1 is not a rank", {"ranks": [-1]}),
        (ValueError, "ranks names rank 0 twice", {"ranks": [0, 0]}),
        (ValueError, "ranks is empty", {"ranks": []}),
        (TypeError, "ranks must be a list", {"ranks": 1}),
        (TypeError, r"ranks\[0\] must be a rank", {"ranks": ["0"]}),
        (ValueError, "backend='gloo' must be None or 'aio'", {"backend": "gloo"}),
        (ValueError, "pg_options must be None", {"pg_options": aiocoll.GroupOptions()}),
        (ValueError, "device_id='tpu:0'", {"device_id": "tpu:0"}),
        (TypeError, "timeout", {"timeout": "soon"}),
    ]
    for error, words, arguments in calls:
        with pytest.raises(error, match=words):
            dist.new_group(**arguments)
    assert dist.get_pg_count() == 1


@pytest.mark.ranks(4)
async def test_new_subgroups_example_gives_the_documented_result(pg: ProcessGroup) -> None:
    current, subgroups = await dist.new_subgroups(group_size=2)
    mine = pg.rank() // 2
    assert subgroups == [current if index == mine else OUTSIDE for index in range(2)]
    assert await dist.all_reduce(pg.rank(), group=current) == 1 + 4 * mine
    for subgroup in subgroups:
        await dist.destroy_process_group(subgroup)
    assert dist.get_pg_count() == 1


async def test_new_subgroups_refuses_wrong_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    calls: list[tuple[type[Exception], str, Any]] = [
        (ValueError, "group_size is missing", None),
        (ValueError, "group_size=0 must be positive", 0),
        (ValueError, "group_size=-1 must be positive", -1),
        (ValueError, "group_size=5 must not exceed the world size, 4", 5),
        (ValueError, "the world size, 4, must be divisible by group_size=3", 3),
        (TypeError, "group_size must be an int", 2.0),
    ]

    async def body(pg: ProcessGroup) -> None:
        for error, words, size in calls:
            with pytest.raises(error, match=words):
                dist.new_subgroups(size)

    await run_ranks(4, body)


@pytest.mark.ranks(4)
async def test_new_subgroups_by_enumeration_example_gives_the_documented_result(pg: ProcessGroup) -> None:
    current, subgroups = await dist.new_subgroups_by_enumeration([[0, 2], [1, 3]])
    assert len(subgroups) == 2
    assert await dist.all_reduce(pg.rank(), group=current) == (2 if pg.rank() % 2 == 0 else 4)


@pytest.mark.ranks(4)
async def test_new_subgroups_by_enumeration_refuses_wrong_arguments(pg: ProcessGroup) -> None:
    calls: list[tuple[str, Any]] = [
        ("ranks_per_subgroup_list is empty", []),
        ("ranks_per_subgroup_list is empty", None),
        (r"rank 1 has appeared in both subgroup \[0, 1\] and \[1, 2\]", [[0, 1], [1, 2]]),
        (r"ranks_per_subgroup_list\[1\]\[0\]=4 is not a rank", [[0], [4]]),
        (r"ranks_per_subgroup_list\[1\] is empty", [[0], []]),
    ]
    for words, lists in calls:
        with pytest.raises(ValueError, match=words):
            dist.new_subgroups_by_enumeration(lists)
    assert dist.get_pg_count() == 1


@pytest.mark.ranks(2)
async def test_split_group_refuses_wrong_arguments(pg: ProcessGroup) -> None:
    calls: list[tuple[str, Any]] = [
        ("split_ranks is empty", None),
        ("split_ranks is empty", []),
        (r"split_ranks\[0\] is empty", [[]]),
        (r"split_ranks\[0\] names rank 1 twice", [[1, 1]]),
        (r"split_ranks\[0\]\[2\]=2 is not a rank", [[0, 1, 2]]),
        ("rank 1", [[0, 1], [1]]),
    ]
    for words, lists in calls:
        with pytest.raises(ValueError, match=words):
            dist.split_group(split_ranks=lists)
    alone = await dist.split_group(pg, [[1]], timeout=7.0, group_desc="alone")
    assert (alone is None) is (pg.rank() == 0)
    if alone is not None:
        assert (alone.timeout, alone.group_desc, alone.size()) == (7.0, "alone", 1)


@pytest.mark.ranks(3)
async def test_shrink_group_refuses_wrong_arguments(pg: ProcessGroup) -> None:
    calls: list[tuple[type[Exception], str, dict[str, Any]]] = [
        (TypeError, "ranks_to_exclude must be a list", {"ranks_to_exclude": (1,)}),
        (ValueError, "ranks_to_exclude is empty", {"ranks_to_exclude": []}),
        (TypeError, r"ranks_to_exclude\[0\] must be a rank", {"ranks_to_exclude": ["1"]}),
        (ValueError, r"ranks_to_exclude\[0\]=3 is not a rank", {"ranks_to_exclude": [3]}),
        (ValueError, "names rank 2 twice", {"ranks_to_exclude": [2, 2]}),
        (ValueError, "names all 3 ranks", {"ranks_to_exclude": [0, 1, 2]}),
        (ValueError, "shrink_flags=2", {"ranks_to_exclude": [2], "shrink_flags": 2}),
        (ValueError, "pg_options", {"ranks_to_exclude": [2], "pg_options": {}}),
    ]
    for error, words, arguments in calls:
        with pytest.raises(error, match=words):
            await dist.shrink_group(**arguments)
    with pytest.raises(RuntimeError, match="this rank; only the remaining ranks may make"):
        await dist.shrink_group([pg.rank()])
    alone = await dist.new_group([0])
    if pg.rank() == 0:
        with pytest.raises(ValueError, match="only one rank, which cannot be excluded"):
            await dist.shrink_group([0], group=alone)
    assert await dist.all_reduce(1) == 3


@pytest.mark.ranks(3)
@pytest.mark.parametrize("flags", [dist.SHRINK_DEFAULT, dist.SHRINK_ABORT])
async def test_shrink_group_replaces_the_default_group(pg: ProcessGroup, flags: int) -> None:
    part = await dist.new_group([0, 2])
    if pg.rank() == 1:
        await pg.wait_revoked()
        return
    assert await dist.all_reduce(1, group=part) == 2
    smaller = await dist.shrink_group([1], shrink_flags=flags)
    assert dist.group.WORLD is smaller
    assert (dist.get_rank(), dist.get_world_size()) == (pg.rank() // 2, 2)
    assert await dist.all_reduce(dist.get_rank() + 1) == 3
    # The shrink has also closed the groups that were made from the old default group.
    with pytest.raises(aiocoll.GroupClosedError):
        dist.barrier(part)
    await dist.destroy_process_group()
    assert not dist.is_initialized()


def test_backend_name_is_converted_to_lower_case() -> None:
    assert dist.Backend("AIO") == dist.Backend.AIO == "aio"
    with pytest.raises(TypeError, match="must be a str"):
        dist.Backend(3)  # type: ignore[arg-type]


def test_backend_config_refuses_invalid_backends() -> None:
    config = dist.BackendConfig(dist.Backend("aio"))
    assert repr(config) == "cpu:aio,cuda:aio"
    assert config.get_device_backend_map() == {"cpu": "aio", "cuda": "aio"}
    wrong: list[Callable[[], object]] = [
        lambda: dist.BackendConfig("cpu:aio,cpu:aio"),
        lambda: dist.BackendConfig("cpu:aio:more"),
        lambda: dist.BackendConfig("cpu:"),
    ]
    for call in wrong:
        with pytest.raises(ValueError, match="backend="):
            call()
