"""The communication functions of `aiocoll.distributed`: results on small inputs, and refused arguments."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import aiocoll.distributed as dist
from aiocoll import GroupError, ProcessGroup, SerializationError, Work

from ..ranks import LINKS, parametrize_transports, run_ranks

WORLDS = (1, 2, 3, 4, 7)
OUTSIDE = dist.GroupMember.NON_GROUP_MEMBER

Case = Callable[[int, int], Awaitable[None]]
CASES: dict[str, Case] = {}


def case(fn: Case) -> Case:
    CASES[fn.__name__] = fn
    return fn


def filled(value: float, count: int = 3) -> np.ndarray:
    return np.full(count, value, np.float32)


def assert_equal_arrays(got: Any, expected: Any) -> None:
    np.testing.assert_array_equal(got, expected)


# -- collectives: each case is a function of its rank r and the world size p


@case
async def all_reduce(r: int, p: int) -> None:
    tensor = filled(r + 1)
    assert await dist.all_reduce(tensor) is tensor
    assert_equal_arrays(tensor, filled(p * (p + 1) / 2))
    await dist.all_reduce(tensor := filled(r), dist.ReduceOp.MAX)
    assert_equal_arrays(tensor, filled(p - 1))
    assert await dist.all_reduce(r, op=dist.ReduceOp.MIN) == 0
    await dist.all_reduce(tensor := np.full(2, r + 1j, np.complex64))
    assert_equal_arrays(tensor, np.full(2, p * (p - 1) / 2 + p * 1j, np.complex64))


@case
async def all_reduce_coalesced(r: int, p: int) -> None:
    tensors = [filled(r), np.full((2, 2), 2 * r, np.int64)]
    await dist.all_reduce_coalesced(tensors)
    assert_equal_arrays(tensors[0], filled(p * (p - 1) / 2))
    assert_equal_arrays(tensors[1], np.full((2, 2), p * (p - 1)))
    await dist.all_reduce_coalesced(tensor := filled(r), dist.ReduceOp.MAX)
    assert_equal_arrays(tensor, filled(p - 1))


@case
async def coalesced(r: int, p: int) -> None:
    """Call functions that convert their results, such as lists of objects, inside a coalescing block."""
    async with dist.coalescing_manager():
        works = [dist.all_reduce(r), dist.all_gather_object(objects := [None] * p, r)]
        assert await dist.broadcast_object_list(first := [r]) == [0]
        gathered = [[filled(-1)] for _ in range(p)]
        works += [dist.all_gather_coalesced(gathered, [filled(r)])]
        await asyncio.wait([works[-1].get_future()])
        assert_equal_arrays([each[0][0] for each in gathered], np.arange(p))
        if p > 1:
            requests = dist.batch_isend_irecv(
                [dist.P2POp(dist.isend, filled(r), (r + 1) % p), dist.P2POp(dist.irecv, filled(0), (r - 1) % p)]
            )
            assert_equal_arrays((await requests)[1], filled((r - 1) % p))
            await dist.send(filled(r), (r + 1) % p, tag=9)
            works.append(dist.recv(into := filled(-1), (r - 1) % p, tag=9))
    assert all(work.is_success() for work in works)
    assert (first, objects, works[0].result()) == ([0], list(range(p)), p * (p - 1) // 2)
    if p > 1:
        assert works[-1].result() == (r - 1) % p
        assert_equal_arrays(into, filled((r - 1) % p))


@case
async def reduce(r: int, p: int) -> None:
    root = p - 1
    await dist.reduce(tensor := filled(r), root)
    assert_equal_arrays(tensor, filled(p * (p - 1) / 2 if r == root else r))
    await dist.reduce(tensor := filled(2.0), op=dist.ReduceOp.PRODUCT, group_dst=0)
    assert_equal_arrays(tensor, filled(2.0**p if r == 0 else 2.0))


@case
async def broadcast(r: int, p: int) -> None:
    for src in range(p):
        await dist.broadcast(tensor := filled(r), src)
        assert_equal_arrays(tensor, filled(src))
    await dist.broadcast(tensor := filled(r), group_src=p - 1)
    assert_equal_arrays(tensor, filled(p - 1))


@case
async def barriers(r: int, p: int) -> None:
    assert await dist.barrier() is None
    assert await dist.barrier(device_ids=[0]) is None
    assert await dist.monitored_barrier() is None
    assert await dist.monitored_barrier(timeout=20.0, wait_all_ranks=True) is None


@case
async def all_gather(r: int, p: int) -> None:
    outputs = [np.zeros(rank, np.int64) for rank in range(p)]
    assert await dist.all_gather(outputs, np.full(r, r)) is outputs
    for rank, output in enumerate(outputs):
        assert_equal_arrays(output, np.full(rank, rank))
    await dist.all_gather_into_tensor(whole := np.zeros((p, 2)), np.full(2, r, np.float64))
    assert_equal_arrays(whole, np.repeat(np.arange(p), 2).reshape(p, 2))


@case
async def all_gather_coalesced(r: int, p: int) -> None:
    outputs = [[np.zeros(2), np.zeros(3, np.int32)] for _ in range(p)]
    assert await dist.all_gather_coalesced(outputs, [np.full(2, r / 2), np.full(3, r, np.int32)]) is outputs
    for rank, (first, second) in enumerate(outputs):
        assert_equal_arrays(first, np.full(2, rank / 2))
        assert_equal_arrays(second, np.full(3, rank))
    assert await dist.all_gather_coalesced([[] for _ in range(p)], []) == [[] for _ in range(p)]


@case
async def gather(r: int, p: int) -> None:
    root = p - 1
    outputs = [filled(0) for _ in range(p)] if r == root else None
    got = await dist.gather(filled(r), outputs, root)
    assert (got is None) is (outputs is None)
    if outputs is not None:
        for rank, output in enumerate(outputs):
            assert_equal_arrays(output, filled(rank))
    # The default root is rank 0. Other ranks may pass [] instead of None.
    await dist.gather(filled(r), outputs := [filled(0) for _ in range(p)] if r == 0 else [])
    for rank, output in enumerate(outputs):
        assert_equal_arrays(output, filled(rank))


@case
async def scatter(r: int, p: int) -> None:
    root = p - 1
    inputs = [filled(10 + rank) for rank in range(p)]
    tensor = filled(0)
    assert await dist.scatter(tensor, inputs if r == root else None, root) is tensor
    assert_equal_arrays(tensor, filled(10 + r))
    await dist.scatter(tensor := filled(0), inputs if r == 0 else [])
    assert_equal_arrays(tensor, filled(10 + r))
    await dist.scatter(tensor := filled(0), inputs if r == root else [], group_src=root)
    assert_equal_arrays(tensor, filled(10 + r))


@case
async def reduce_scatter(r: int, p: int) -> None:
    inputs = [np.full(rank + 1, r + rank, np.int64) for rank in range(p)]
    await dist.reduce_scatter(output := np.zeros(r + 1, np.int64), inputs)
    assert_equal_arrays(output, np.full(r + 1, p * (p - 1) // 2 + p * r))
    await dist.reduce_scatter(output := np.zeros(r + 1, np.int64), inputs, dist.ReduceOp.MAX)
    assert_equal_arrays(output, np.full(r + 1, p - 1 + r))
    await dist.reduce_scatter_tensor(output := filled(0, 2), np.arange(2 * p, dtype=np.float32))
    assert_equal_arrays(output, p * np.arange(2 * r, 2 * r + 2))


@case
async def all_to_all(r: int, p: int) -> None:
    inputs = [np.full(rank, r, np.int16) for rank in range(p)]
    outputs = [np.zeros(r, np.int16) for _ in range(p)]
    await dist.all_to_all(outputs, inputs)
    for rank, output in enumerate(outputs):
        assert_equal_arrays(output, np.full(r, rank))


@case
async def all_to_all_single(r: int, p: int) -> None:
    await dist.all_to_all_single(output := np.zeros(p), np.arange(p) + 100.0 * r)
    assert_equal_arrays(output, 100 * np.arange(p) + r)
    await dist.all_to_all_single(output := np.zeros(p), np.arange(p) + 100.0 * r, [], [])
    assert_equal_arrays(output, 100 * np.arange(p) + r)
    # Rank r sends k + 1 rows to rank k.
    source = np.repeat(np.arange(p), np.arange(1, p + 1))
    await dist.all_to_all_single(output := np.zeros((p * (r + 1), 2)), np.stack([source, source + 0.5], 1), [r + 1] * p,
                                 list(range(1, p + 1)))  # fmt: skip
    assert_equal_arrays(output, np.tile([r, r + 0.5], (p * (r + 1), 1)))


# -- objects


@case
async def object_lists(r: int, p: int) -> None:
    objects = ["foo", 12, {"1": [r]}] if r == p - 1 else [None] * 3
    assert await dist.broadcast_object_list(objects, p - 1) is objects
    assert objects == ["foo", 12, {"1": [p - 1]}]
    await dist.broadcast_object_list(objects := [r])
    assert objects == [0]
    assert await dist.all_gather_object(objects := [None] * p, {"rank": r}) is objects
    assert objects == [{"rank": rank} for rank in range(p)]
    objects = [None] * p if r == p - 1 else None
    await dist.gather_object(str(r), objects, group_dst=p - 1)
    assert objects == ([str(rank) for rank in range(p)] if r == p - 1 else None)
    objects = [None] * p if r == 0 else []
    await dist.gather_object(r, objects)
    assert objects == (list(range(p)) if r == 0 else [])
    await dist.scatter_object_list(out := [None, "stays"], list(range(10, 10 + p)) if r == p - 1 else None, p - 1)
    assert out == [10 + r, "stays"]
    await dist.scatter_object_list(out := [None], list(range(p)) if r == 0 else [None] * p)
    assert out == [r]


# -- messages


@case
async def send_and_recv(r: int, p: int) -> None:
    if p == 1:
        return
    following, before = (r + 1) % p, (r - 1) % p
    work = dist.isend(filled(r), following, tag=3)
    tensor = filled(-1)
    assert await dist.recv(tensor, before, tag=3) == before
    assert_equal_arrays(tensor, filled(before))
    await work
    work = dist.send(filled(r + 100), group_dst=following)
    assert await dist.irecv(tensor, group_src=before) is tensor
    assert_equal_arrays(tensor, filled(before + 100))
    await work
    if r == 0:
        sources = [await dist.recv(tensor) for _ in range(p - 1)]
        assert sorted(sources) == list(range(1, p))
    else:
        await dist.send(filled(r), 0)


@case
async def object_messages(r: int, p: int) -> None:
    if p == 1:
        return
    following, before = (r + 1) % p, (r - 1) % p
    await dist.send_object_list(["foo", r], following, device="cpu", use_batch=True)
    assert await dist.recv_object_list(objects := [None, None], before) == before
    assert objects == ["foo", before]
    await dist.send_object_list([r], group_dst=following)
    assert await dist.recv_object_list(objects := [None]) == before
    assert objects == [before]


@case
async def batches(r: int, p: int) -> None:
    if p == 1:
        return
    following, before = (r + 1) % p, (r - 1) % p

    def operations(into: np.ndarray) -> list[dist.P2POp]:
        return [
            dist.P2POp(dist.isend, filled(r), following),
            dist.P2POp(dist.irecv, into, before),
            dist.P2POp(dist.isend, filled(2 * r), group_peer=before, tag=1),
            dist.P2POp(dist.irecv, filled(0), group_peer=following, tag=1),
        ]

    for work in dist.batch_isend_irecv(operations(tensor := filled(-1))):
        assert isinstance(work, Work)
        await work
    assert_equal_arrays(tensor, filled(before))
    got = await dist.batch_isend_irecv(operations(tensor := filled(-1)))
    assert got[1] is tensor
    assert_equal_arrays(got[3], filled(2 * following))


@pytest.mark.slow
@pytest.mark.ranks(*WORLDS)
@pytest.mark.parametrize("name", CASES)
async def test_distributed_functions_return_the_expected_results(pg: ProcessGroup, name: str) -> None:
    await CASES[name](pg.rank(), pg.size())


@pytest.mark.ranks(3)
@parametrize_transports(*LINKS[1:])
async def test_distributed_functions_return_the_expected_results_over_every_transport(pg: ProcessGroup) -> None:
    for each in CASES.values():
        await each(pg.rank(), pg.size())
        await dist.barrier()  # keeps the messages of different cases separate


@pytest.mark.parametrize("name", ["ProcessGroupNCCL", "set_debug_level"])
def test_error_for_an_omitted_torch_name_refers_to_the_porting_page(name: str) -> None:
    page = "docs/porting.md"
    with pytest.raises(AttributeError, match=f"aiocoll.distributed has no '{name}': {page} lists the names"):
        getattr(dist, name)
    assert f"`{name}`" in (Path(__file__).parents[2] / page).read_text()
    assert not hasattr(dist, name)


def test_communication_functions_are_not_coroutine_functions() -> None:
    """Check that only the functions that create or end a default group are coroutine functions."""
    coroutines = {name for name in dist.__all__ if inspect.iscoroutinefunction(getattr(dist, name))}
    assert coroutines == {"init_process_group", "destroy_process_group", "shrink_group"}


@pytest.mark.ranks(2)
async def test_distributed_function_starts_its_operation_even_if_not_awaited(pg: ProcessGroup) -> None:
    works = [dist.all_reduce(filled(1)), dist.broadcast_object_list([pg.rank()], 1), dist.barrier()]
    assert all(isinstance(work, Work) for work in works)
    await pg.drain()
    assert all(work.is_success() for work in works)
    assert works[1].result() == [1]


# -- arguments that are refused before the operation starts


def refusals(pg: ProcessGroup) -> dict[str, tuple[type[Exception], str, Callable[[], object]]]:
    t, two = filled(0), [filled(0), filled(0)]
    other = 1 - pg.rank()
    return {
        "no root": (ValueError, "give src=", lambda: dist.broadcast(t)),
        "two roots": (ValueError, "exclude each other", lambda: dist.broadcast(t, 0, group_src=0)),
        "root out of range": (ValueError, "src=2 is not a rank", lambda: dist.broadcast(t, 2)),
        "group root out of range": (ValueError, "group_dst=-1 is not", lambda: dist.reduce(t, group_dst=-1)),
        "root is no rank": (TypeError, "src must be a rank", lambda: dist.broadcast(t, "0")),
        "root is a bool": (TypeError, "group_src must be a rank", lambda: dist.broadcast(t, None, None, True)),
        "async_op": (TypeError, "async_op", lambda: dist.all_reduce(t, async_op=True)),
        "group is none": (TypeError, "group must be", lambda: dist.all_reduce(t, group="world")),
        "no list": (TypeError, "tensor_list must be a list", lambda: dist.all_gather(filled(0, 6), t)),
        "short list": (ValueError, "tensor_list needs exactly one entry per rank", lambda: dist.all_gather([t], t)),
        "list of tuples": (TypeError, "input_list must be a list", lambda: dist.reduce_scatter(t, (t, t))),
        "no output list": (TypeError, "output_tensor_list must", lambda: dist.all_to_all(None, two)),
        "no gather_list": (ValueError, "gather_list is missing", lambda: dist.gather(t, None, pg.rank())),
        "gather_list": (ValueError, "gather_list must be None", lambda: dist.gather(t, two, other)),
        "no scatter_list": (ValueError, "scatter_list is missing", lambda: dist.scatter(t, None, pg.rank())),
        "scatter_list": (ValueError, "scatter_list must be None", lambda: dist.scatter(t, two, other)),
        "lists": (TypeError, "output_tensor_lists must", lambda: dist.all_gather_coalesced(None, [t])),
        "inputs": (TypeError, "input_tensor_list must", lambda: dist.all_gather_coalesced([[t], [t]], t)),
        "uneven lists": (ValueError, r"output_tensor_lists\[1\]", lambda: dist.all_gather_coalesced([[t], []], [t])),
        "complex maximum": ((TypeError, ValueError), "complex", lambda: dist.all_reduce(1j, dist.ReduceOp.MAX)),
        "no destination": (ValueError, "give dst=", lambda: dist.isend(t)),
        "tag": (ValueError, "tag=-1", lambda: dist.irecv(t, other, tag=-1)),
        "op of a batch": (ValueError, "op=", lambda: dist.P2POp(dist.all_reduce, t, other)),
        "peer of a batch": (ValueError, "peer=7", lambda: dist.P2POp(dist.isend, t, 7)),
        "peers of a batch": (ValueError, "exclude", lambda: dist.P2POp(dist.isend, t, other, group_peer=other)),
        "group of a batch": (ValueError, "not in the given group", lambda: dist.P2POp(dist.isend, t, 1, OUTSIDE)),
        "empty batch": (ValueError, "is empty", lambda: dist.batch_isend_irecv([])),
        "no batch": (ValueError, "list of P2POp", lambda: dist.batch_isend_irecv([dist.isend])),
        "objects": (TypeError, "object_list must be a list", lambda: dist.broadcast_object_list("foo", 0)),
        "object list": (ValueError, "object_list needs exactly one entry", lambda: dist.all_gather_object([None], 1)),
        "no object list": (TypeError, "object_gather_list must", lambda: dist.gather_object(1, None, pg.rank())),
        "gather list": (ValueError, "object_gather_list must", lambda: dist.gather_object(1, [0, 0], other)),
        "scatter out": (ValueError, "scatter_object_output_list is empty", lambda: dist.scatter_object_list([])),
        "scatter in": (TypeError, "input_list must be a list",
                       lambda: dist.scatter_object_list([None], None, pg.rank())),
        "strange object": (SerializationError, "object", lambda: dist.all_gather_object([0, 0], object())),
        "receive list": (TypeError, "object_list must be a list", lambda: dist.recv_object_list(None, other)),
    }  # fmt: skip


@pytest.mark.ranks(2)
async def test_distributed_functions_refuse_wrong_arguments(pg: ProcessGroup) -> None:
    for error, words, call in refusals(pg).values():
        with pytest.raises(error, match=words):
            call()
    # The refused calls sent nothing, and took no sequence number.
    assert await dist.all_reduce(1) == 2
    assert not pg.pending()


@pytest.mark.ranks(2)
async def test_batch_isend_irecv_checks_all_operations_before_it_starts_any(pg: ProcessGroup) -> None:
    peer = 1 - pg.rank()
    wrong = [dist.P2POp(dist.isend, filled(0), peer), dist.P2POp(dist.irecv, filled(0), peer, tag=-1)]
    with pytest.raises(ValueError, match="tag"):
        dist.batch_isend_irecv(wrong)
    assert not pg.pending()
    await dist.batch_isend_irecv([wrong[0], dist.P2POp(dist.irecv, tensor := filled(1), peer)])
    assert_equal_arrays(tensor, filled(0))


@pytest.mark.ranks(2)
async def test_all_gather_coalesced_checks_tensor_lists_before_it_starts(pg: ProcessGroup) -> None:
    outputs = [[filled(0), filled(0)] for _ in range(2)]
    with pytest.raises(ValueError, match=r"input_tensor_list\[1\]"):
        dist.all_gather_coalesced(outputs, [filled(1), filled(1, 4)])
    assert not pg.pending()
    assert await dist.all_reduce(1) == 2


async def dry_run(r: int, p: int) -> None:
    """Call functions in a dry run, and check that arrays and lists stay unchanged."""
    await dist.all_reduce(tensor := filled(r))
    assert_equal_arrays(tensor, filled(r))
    other = (r + 1) % p
    assert await dist.broadcast_object_list(objects := ["stays", r], other) is objects
    assert objects == ["stays", r]
    await dist.all_gather_object(objects := [None] * p, r)
    await dist.gather_object(r, [None] * p if r == 0 else None)
    await dist.scatter_object_list([None], list(range(p)))
    await dist.send_object_list([r], other)
    await dist.recv_object_list(objects := ["stays"], other)
    assert objects == ["stays"]
    await dist.recv_object_list(objects)
    await dist.recv(tensor, other)
    await dist.recv(tensor)
    await dist.batch_isend_irecv([dist.P2POp(dist.isend, tensor, other), dist.P2POp(dist.irecv, filled(0), other)])
    await dist.all_gather_coalesced([[filled(0)] for _ in range(p)], [tensor])
    await dist.monitored_barrier()


async def test_distributed_functions_work_in_dry_runs() -> None:
    await dist.init_process_group("fake", rank=3, world_size=8)
    await dry_run(3, 8)
    current, _ = await dist.new_subgroups(4)
    assert dist.get_process_group_ranks(current) == [0, 1, 2, 3]
    assert dist.get_backend() == "fake"
    await dist.destroy_process_group()

    async def body(pg: ProcessGroup) -> None:
        with dist.time_estimator() as estimate:
            await dry_run(pg.rank(), pg.size())
        assert estimate.seconds > 0
        assert await dist.all_reduce(1) == 2

    await run_ranks(2, body)


@pytest.mark.ranks(2)
async def test_object_lists_with_different_lengths_on_two_ranks_raise_an_error(pg: ProcessGroup) -> None:
    if pg.rank() == 0:
        await dist.broadcast_object_list([1, 2])
        await dist.send_object_list([1], 1)
    else:
        objects = [None]
        with pytest.raises(ValueError, match="rank 0 gave a list of 2"):
            await dist.broadcast_object_list(objects)
        with pytest.raises(ValueError, match="2 entries"):
            await dist.recv_object_list([None, None], 0)
        assert objects == [None]


@pytest.mark.ranks(2)
async def test_cancelled_await_of_a_receive_withdraws_the_receive(pg: ProcessGroup) -> None:
    if pg.rank() == 0:
        work = dist.recv(filled(0), 1)
        waiting = asyncio.ensure_future(work.join())
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert work.done()
        assert not pg.pending()
        await dist.barrier()
        tensor = filled(0)
        assert await dist.recv(tensor) == 1
        assert_equal_arrays(tensor, filled(7))
    else:
        await dist.barrier()
        await dist.send(filled(7), 0)


async def test_group_failure_fails_works_that_convert_their_result() -> None:
    started = asyncio.Event()

    async def body(pg: ProcessGroup) -> None:
        if pg.rank() == 0:
            await started.wait()
            pg.abort("enough")
            return
        works = [dist.recv(filled(0), 0), dist.all_gather_object([None, None], 1), dist.batch_isend_irecv(
            [dist.P2POp(dist.irecv, filled(0), 0), dist.P2POp(dist.isend, filled(0), 0)])]  # fmt: skip
        started.set()
        for work in works:
            with pytest.raises(GroupError, match="enough"):
                await work

    await run_ranks(2, body)


# -- a rank that is not in the group


@pytest.mark.ranks(2)
async def test_distributed_functions_do_nothing_on_a_rank_outside_the_group(pg: ProcessGroup) -> None:
    t = filled(0)
    calls: dict[str, Callable[[], Work[Any]]] = {
        "all_reduce": lambda: dist.all_reduce(t, group=OUTSIDE),
        "all_reduce_coalesced": lambda: dist.all_reduce_coalesced([t], group=OUTSIDE),
        "reduce": lambda: dist.reduce(t, 0, group=OUTSIDE),
        "broadcast": lambda: dist.broadcast(t, 0, OUTSIDE),
        "barrier": lambda: dist.barrier(OUTSIDE),
        "monitored_barrier": lambda: dist.monitored_barrier(OUTSIDE),
        "all_gather": lambda: dist.all_gather([], t, OUTSIDE),
        "all_gather_into_tensor": lambda: dist.all_gather_into_tensor(t, t, OUTSIDE),
        "all_gather_coalesced": lambda: dist.all_gather_coalesced([], [], OUTSIDE),
        "gather": lambda: dist.gather(t, group=OUTSIDE),
        "scatter": lambda: dist.scatter(t, group=OUTSIDE),
        "reduce_scatter": lambda: dist.reduce_scatter(t, [], group=OUTSIDE),
        "reduce_scatter_tensor": lambda: dist.reduce_scatter_tensor(t, t, group=OUTSIDE),
        "all_to_all": lambda: dist.all_to_all([], [], OUTSIDE),
        "all_to_all_single": lambda: dist.all_to_all_single(t, t, group=OUTSIDE),
        "broadcast_object_list": lambda: dist.broadcast_object_list([], 0, OUTSIDE),
        "all_gather_object": lambda: dist.all_gather_object([], 0, OUTSIDE),
        "gather_object": lambda: dist.gather_object(0, group=OUTSIDE),
        "scatter_object_list": lambda: dist.scatter_object_list([], group=OUTSIDE),
        "send_object_list": lambda: dist.send_object_list([], 0, OUTSIDE),
        "recv_object_list": lambda: dist.recv_object_list([], 0, OUTSIDE),
        "isend": lambda: dist.isend(t, 0, OUTSIDE),
        "irecv": lambda: dist.irecv(t, 0, OUTSIDE),
        "recv": lambda: dist.recv(t, 0, OUTSIDE),
    }
    for name, call in calls.items():
        with pytest.warns(UserWarning, match=f"{name} was called by rank {pg.rank()}, which is not") as caught:
            work = call()
        assert caught[0].filename == __file__
        assert work.done()
        assert await work == (-1 if name in ("recv", "recv_object_list") else None)
    assert dist.get_rank(OUTSIDE) == dist.get_world_size(OUTSIDE) == -1
    for query in (dist.get_backend, dist.get_backend_config):
        with pytest.raises(ValueError, match="not in the given group"):
            query(OUTSIDE)
    await dist.destroy_process_group(OUTSIDE)
    assert dist.is_initialized()
