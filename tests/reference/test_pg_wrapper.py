"""Torch's tests of `ProcessGroupWrapper`: mismatched ops and shapes, with and without debugging, and hangs.

Without ``debug="detail"`` the first mismatch revokes the group, so each mismatch has its own group here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from aiocoll import (
    CollectiveMismatchError,
    CollectiveTimeoutError,
    GroupOptions,
    GroupRevokedError,
    ProcessGroup,
    Work,
    testing,
)

from ..ranks import LINKS, options

COVERS = {
    "AbstractProcessGroupWrapperTest._test_collective_hang": "test_collective_hang",
    "AbstractProcessGroupWrapperTest._test_collectives_op_mismatch": "test_collectives_op_mismatch_debug_mode",
    "AbstractProcessGroupWrapperTest._test_collective_shape_mismatch": "test_collective_shape_mismatch_debug_mode",
    "ProcessGroupGlooWrapperTest.test_collective_hang": "test_collective_hang",
    "ProcessGroupGlooWrapperTest.test_collectives_op_mismatch_debug_mode": "test_collectives_op_mismatch_debug_mode",
    "ProcessGroupGlooWrapperTest.test_collectives_op_mismatch": "test_collectives_op_mismatch",
    "ProcessGroupGlooWrapperTest.test_collective_shape_mismatch_debug_mode": (
        "test_collective_shape_mismatch_debug_mode"
    ),
    "ProcessGroupGlooWrapperTest.test_collective_shape_mismatch_debug_mode_off": (
        "test_collective_shape_mismatch_debug_mode_off"
    ),
}

_GPUS = "the same test on tensors of four GPUs; the comparison does not depend on the kind of memory"
_NCCL = "needs NCCL and two GPUs; on arrays of the host it is "
LEFT_OUT = {
    "ProcessGroupNCCLWrapperTest.test_collective_hang": f"{_NCCL}`test_collective_hang`",
    "ProcessGroupNCCLWrapperTest.test_collectives_op_mismatch_debug_mode": f"{_NCCL}`test_nccl_only_op_mismatch`",
    "ProcessGroupNCCLWrapperTest.test_collectives_op_mismatch": f"{_NCCL}`test_collectives_op_mismatch`",
    "ProcessGroupNCCLWrapperTest.test_collective_shape_mismatch_debug_mode_detail": (
        f"{_NCCL}`test_nccl_only_shape_mismatch`"
    ),
    "ProcessGroupNCCLWrapperTest.test_collective_shape_mismatch_debug_mode_off": (
        f"{_NCCL}`test_collective_shape_mismatch_debug_mode_off`"
    ),
    "ProcessGroupNCCLWrapperTest.test_coalescing_manager_debug_mode_detail": (
        f"{_NCCL}`test_coalescing_manager_debug_mode_detail`"
    ),
    "ProcessGroupNCCLWrapperTest._test_nccl_only_op_mismatch": f"{_NCCL}`test_nccl_only_op_mismatch`",
    "ProcessGroupNCCLWrapperTest._test_nccl_only_shape_mismatch": f"{_NCCL}`test_nccl_only_shape_mismatch`",
    "ProcessGroupGlooWrapperTest.test_collectives_op_mismatch_cuda_debug_mode": _GPUS,
    "ProcessGroupGlooWrapperTest.test_collectives_op_mismatch_cuda": _GPUS,
    "ProcessGroupGlooWrapperTest.test_collective_shape_mismatch_cuda_debug_mode": _GPUS,
    "ProcessGroupGlooWrapperTest.test_collective_shape_mismatch_cuda": _GPUS,
    "ProcessGroupNCCLWrapperTest.test_debug_level_detail_no_gloo": "a build of torch without Gloo",
    "ProcessGroupNCCLWrapperTest.test_new_group_no_gloo": "a build of torch without Gloo",
}

PLACES = [(2, "memory"), (4, "unix"), (2, "tcp"), (4, "shm")]
#: Pairs of an index in the list of mismatches and a transport. Each pair is tested on a separate group.
NUMBERS = [(0, "memory"), (1, "unix"), (2, "tcp"), (0, "shm"), (1, "tcp"), (2, "shm")]
SHAPE = (20, 10)

Call = Callable[[ProcessGroup], Work[Any]]


async def run_wrapped(world_size: int, fn: Callable[..., Any], transport: str, debug: Any = "detail") -> None:
    given = GroupOptions(transport=options(transport).transport, debug=debug)
    await testing.run_ranks(world_size, fn, options=given, timeout=60)


def check_mismatch_text(error: BaseException, op: str, tensor: np.ndarray | None) -> None:
    """Check that the error names this rank's op, shape, dtype and device, a sequence number, and the mismatch."""
    text = str(error)
    assert f"called {op}(" in text
    assert "SequenceNumber=" in text
    assert "Collectives differ in the following: " in text
    if tensor is not None:
        assert f"{op}(shape={list(tensor.shape)}, dtype={tensor.dtype.name}, device=cpu" in text


async def assert_mismatch(work: Work[Any], tensor: np.ndarray | None) -> None:
    before = None if tensor is None else tensor.copy()
    with pytest.raises(CollectiveMismatchError) as caught:
        await work
    check_mismatch_text(caught.value, work.op, tensor)
    assert tensor is None or np.array_equal(tensor, before)  # type: ignore[arg-type]


def op_mismatches(pg: ProcessGroup, tensor: np.ndarray) -> list[tuple[Call, np.ndarray | None]]:
    """Return this rank's calls, whose ops differ from the calls of other ranks, each with its tensor."""
    if pg.rank() == 0:
        return [
            (lambda pg: pg.allreduce(tensor), tensor),
            (lambda pg: pg.reduce(tensor, 0), tensor),
            (lambda pg: pg.broadcast(tensor, 0), tensor),
        ]
    return [
        (lambda pg: pg.reduce(tensor, 0), tensor),
        (lambda pg: pg.barrier(), None),
        (lambda pg: pg.allgather([np.zeros_like(tensor) for _ in range(pg.size())], tensor), tensor),
    ]


def shape_mismatches(pg: ProcessGroup) -> list[tuple[Call, np.ndarray]]:
    """Return this rank's calls, whose shapes differ from the calls of other ranks, each with its tensor."""
    rank = pg.rank()
    rows = np.ones((20, 2) if rank == 0 else (20, 10))
    dimensions = np.ones((20, 10, 2) if rank == 0 else (20, 10))
    blocks = [np.full(1, rank) for _ in range(pg.size())]
    output = np.full(1 if rank == 0 else 2, -1)
    return [
        (lambda pg: pg.allreduce(rows), rows),
        (lambda pg: pg.allreduce(dimensions), dimensions),
        (lambda pg: pg.scatter(output, blocks if rank == 0 else None, 0), output),
    ]


@pytest.mark.slow
@pytest.mark.parametrize("transport", LINKS)
@pytest.mark.parametrize("debug", ["off", "detail"])
async def test_collective_hang(debug: str, transport: str) -> None:
    """Check that the timeout error on each waiting rank names rank 1, which does not make the call."""

    async def rank(pg: ProcessGroup) -> None:
        await pg.barrier()
        if pg.rank() == 1:
            await pg.wait_revoked()
            return
        with pytest.raises(CollectiveTimeoutError, match=r"waits for rank 1 \(last in BARRIER") as caught:
            await pg.allreduce(np.ones(SHAPE), timeout=0.3)
        assert caught.value.ranks == (1,)

    await run_wrapped(4, rank, transport, debug)


@pytest.mark.parametrize("transport", LINKS)
@pytest.mark.parametrize("wait_all_ranks", [False, True])
async def test_monitored_barrier_hang(wait_all_ranks: bool, transport: str) -> None:
    """Check that the error on each waiting rank contains rank 0's report of the missing ranks."""

    async def rank(pg: ProcessGroup) -> None:
        await pg.barrier()
        if pg.rank() in (1, 3):
            await pg.wait_revoked()
            return
        ranks = "1, 3" if wait_all_ranks else "1"
        with pytest.raises(CollectiveTimeoutError, match=rf"rank 0 .*Ranks {ranks} failed to pass monitoredBarrier in"):
            await pg.monitored_barrier(0.2 if pg.rank() == 0 else 20.0, wait_all_ranks=wait_all_ranks)

    await run_wrapped(4, rank, transport, "detail" if wait_all_ranks else "off")


@pytest.mark.parametrize(("world_size", "transport"), PLACES)
async def test_collectives_op_mismatch_debug_mode(world_size: int, transport: str) -> None:
    """Check that a group with `debug="detail"` reports mismatched ops on every rank, and stays usable."""

    async def rank(pg: ProcessGroup) -> None:
        tensor = np.ones(SHAPE)
        for work in [pg.allreduce(tensor) for _ in range(500)]:
            await work
            assert work.is_success()
        for call, named_tensor in op_mismatches(pg, tensor):
            await assert_mismatch(call(pg), named_tensor)
        assert await pg.allreduce(1) == world_size

    await run_wrapped(world_size, rank, transport)


@pytest.mark.parametrize(("number", "transport"), NUMBERS)
async def test_collectives_op_mismatch(number: int, transport: str) -> None:
    """Check that mismatched ops revoke a group without debugging, with an error that describes the call."""

    async def rank(pg: ProcessGroup) -> None:
        await pg.allreduce(np.ones(SHAPE))
        call, named_tensor = op_mismatches(pg, np.ones(SHAPE))[number]
        await assert_mismatch_without_debug(pg, call, named_tensor)

    await run_wrapped(2, rank, transport, "off")


@pytest.mark.parametrize(("world_size", "transport"), PLACES)
async def test_collective_shape_mismatch_debug_mode(world_size: int, transport: str) -> None:
    """Check that a group with `debug="detail"` reports mismatched shapes on every rank, and stays usable."""

    async def rank(pg: ProcessGroup) -> None:
        await pg.barrier()
        for call, named_tensor in shape_mismatches(pg):
            await assert_mismatch(call(pg), named_tensor)
        assert await pg.allreduce(1) == world_size

    await run_wrapped(world_size, rank, transport)


@pytest.mark.parametrize(("number", "transport"), NUMBERS)
async def test_collective_shape_mismatch_debug_mode_off(number: int, transport: str) -> None:
    """Check that mismatched shapes revoke a group without debugging, with an error that describes the call."""

    async def rank(pg: ProcessGroup) -> None:
        await pg.barrier()
        call, named_tensor = shape_mismatches(pg)[number]
        await assert_mismatch_without_debug(pg, call, named_tensor)

    await run_wrapped(2, rank, transport, "off")


async def assert_mismatch_without_debug(pg: ProcessGroup, call: Call, tensor: np.ndarray | None) -> None:
    """Check a mismatch without debugging, where the root may complete its call and fail only at its next call."""
    work = call(pg)
    cause = await pg.wait_revoked()
    check_mismatch_text(cause, work.op, tensor)
    assert work.done()
    if work.is_success():
        with pytest.raises(GroupRevokedError) as caught:
            pg.barrier()
        assert caught.value.__cause__ is cause
    else:
        assert str(work.exception()) == str(cause)


@pytest.mark.parametrize("transport", LINKS)
async def test_group_continues_after_mismatches_of_op_shape_and_list_length(transport: str) -> None:
    """Make 500 allreduces and then several mismatches on one group, which stays usable."""

    async def rank(pg: ProcessGroup) -> None:
        tensor = np.zeros(SHAPE)
        for _ in range(500):
            await pg.allreduce(tensor)
        await assert_mismatch(pg.allreduce(tensor) if pg.rank() == 0 else pg.reduce(tensor, 0), tensor)
        other = np.zeros((20, 2 + pg.rank()))
        await assert_mismatch(pg.allreduce(other), other)
        for number in (pg.size() - 1, pg.size() + 1):
            blocks = [np.ones(SHAPE) for _ in range(number)]
            work = pg.scatter(tensor, blocks if pg.rank() == 0 else None, 0)
            await assert_mismatch(work, tensor)
            assert f"one array per rank: 3, not {number}" in str(work.exception())
        assert pg.pending() == []
        await pg.barrier()

    await run_wrapped(3, rank, transport)


@pytest.mark.parametrize("transport", LINKS)
async def test_nccl_only_op_mismatch(transport: str) -> None:
    """Check that an allgather on one rank and a reduce-scatter on the other are a mismatch."""

    async def rank(pg: ProcessGroup) -> None:
        part, whole = np.zeros(4), np.ones(4 * pg.size())
        work = pg.allgather_into_tensor(whole, part) if pg.rank() == 0 else pg.reduce_scatter_tensor(part, whole)
        await assert_mismatch(work, part)

    await run_wrapped(2, rank, transport)


async def test_nccl_only_shape_mismatch() -> None:
    """Check that a wrong input size raises `ValueError` at the call, while different sizes per rank are a mismatch."""

    async def rank(pg: ProcessGroup) -> None:
        with pytest.raises(ValueError, match=r"input has 12 elements, expected \d+, \d+ times those of output"):
            pg.reduce_scatter_tensor(np.zeros(4 + pg.rank()), np.ones(4 * (pg.size() + 1)))
        with pytest.raises(ValueError, match="input has 9 elements, expected 8"):
            pg.reduce_scatter_tensor(np.zeros(4), np.ones(9))
        # Each call is valid by itself, but the calls of the ranks differ.
        part = np.zeros(4 + pg.rank())
        await assert_mismatch(pg.reduce_scatter_tensor(part, np.ones(part.size * pg.size())), part)

    await run_wrapped(2, rank, "memory")


@pytest.mark.parametrize("transport", LINKS)
async def test_coalescing_manager_debug_mode_detail(transport: str) -> None:
    """Check that `coalescing()` works in a group with `debug="detail"`."""

    async def rank(pg: ProcessGroup) -> None:
        tensor = np.ones(1)
        async with pg.coalescing():
            pg.allreduce(tensor)
        assert tensor[0] == 2

    await run_wrapped(2, rank, transport)
