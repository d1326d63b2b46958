"""Collectives whose ranks read large messages in place: fallbacks, failures and mismatches."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import numpy as np
import pytest

from aiocoll import (
    CollectiveMismatchError,
    CollectiveTimeoutError,
    GroupError,
    GroupOptions,
    GroupRevokedError,
    ProcessGroup,
    ReduceOp,
    new_group,
)
from aiocoll.algorithms.machine import SingleCopy
from aiocoll.engine.operations.program_executor import ProgramExecutor
from aiocoll.engine.operations.shm_ring import ShmRing
from aiocoll.store import HashStore
from aiocoll.testing import run_processes, run_ranks
from aiocoll.transport.frame import HEADER, SEGMENT
from aiocoll.transport.shm.process_memory import can_read
from aiocoll.transport.shm.references import ReferenceWriter

from ..internals import (
    comm_of,
    observe_methods,
    plan_without_accelerator,
    plans_of,
    wrap_methods,
)
from ..ranks import parametrize_transports

pytestmark = pytest.mark.skipif(can_read() is not None, reason=f"no process can be read here: {can_read()}")

SHM = GroupOptions(transport="shm")
#: Block lengths in float64 elements: the largest block that fits a slot, and a block of several segments.
FITS, LARGE = 8192, 5 * SEGMENT // 8 + 3
SIZES = [2, pytest.param(3, marks=pytest.mark.slow), 4, pytest.param(7, marks=pytest.mark.slow)]

Call = Callable[[ProcessGroup, int], Awaitable[None]]


async def allreduce(pg: ProcessGroup, count: int) -> None:
    tensor = np.arange(count, dtype=np.float64) + pg.rank()
    await pg.allreduce(tensor)
    p = pg.size()
    assert (tensor == p * np.arange(count) + p * (p - 1) / 2).all()


async def broadcast(pg: ProcessGroup, count: int) -> None:
    root = pg.size() - 1
    tensor = np.arange(count, dtype=np.float64) + pg.rank()
    await pg.broadcast(tensor, root)
    assert (tensor == np.arange(count) + root).all()


async def allgather(pg: ProcessGroup, count: int) -> None:
    outputs = [np.empty(count + rank) for rank in range(pg.size())]
    await pg.allgather(outputs, np.full(count + pg.rank(), pg.rank() + 0.5))
    assert all((each == rank + 0.5).all() for rank, each in enumerate(outputs))


async def reduce_scatter(pg: ProcessGroup, count: int) -> None:
    inputs = [np.full(count + block, pg.rank() + block, np.float64) for block in range(pg.size())]
    output = np.empty(count + pg.rank())
    await pg.reduce_scatter(output, inputs)
    p = pg.size()
    assert (output == p * (p - 1) / 2 + p * pg.rank()).all()


async def gather(pg: ProcessGroup, count: int) -> None:
    for outputs in ([np.empty(count + rank) for rank in range(pg.size())], None):
        found = await pg.gather(outputs if pg.rank() == 0 else None, np.full(count + pg.rank(), pg.rank() + 0.5), 0)
        assert found is None or [each.size for each in found] == [count + rank for rank in range(pg.size())]
        assert all((each == rank + 0.5).all() for rank, each in enumerate(found or ()))


async def scatter(pg: ProcessGroup, count: int) -> None:
    root = pg.size() - 1
    inputs = [np.full(count + rank, rank + 0.5) for rank in range(pg.size())] if pg.rank() == root else None
    output = np.empty(count + pg.rank())
    await pg.scatter(output, inputs, root)
    assert (output == pg.rank() + 0.5).all()


async def alltoall(pg: ProcessGroup, count: int) -> None:
    rank, p = pg.rank(), pg.size()
    outputs = [np.empty(count + peer) for peer in range(p)]
    await pg.alltoall(outputs, [np.full(count + rank, rank * p + peer, np.float64) for peer in range(p)])
    assert all((each == peer * p + rank).all() for peer, each in enumerate(outputs))


CALLS: dict[str, Call] = {
    call.__name__: call for call in (allreduce, broadcast, allgather, reduce_scatter, gather, scatter, alltoall)
}


def prefer_reading_in_place(pg: ProcessGroup, way: str = "in place") -> None:
    """Make this rank read large arrays in place, or with ``way="through queues"`` receive them through chunk queues."""
    comm = comm_of(pg)
    if way != "through queues":
        plan_without_accelerator(pg)
    comm.tuning = comm.tuning._replace(single_copy=SingleCopy(0, 0, 0))


def executors(pg: ProcessGroup) -> set[Any]:
    return {plan.executor for plan in plans_of(pg)}


@pytest.fixture
def references(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list to which the payload size of each frame by reference is appended, in bytes."""
    seen: list[int] = []

    def record_reference(writer: ReferenceWriter, header: bytes, *_: Any) -> None:
        seen.append(HEADER.unpack(header)[7])

    observe_methods(monkeypatch, ReferenceWriter, write=record_reference)
    return seen


@pytest.mark.parametrize("count", [7 * FITS, LARGE])
@pytest.mark.parametrize("world_size", SIZES)
@pytest.mark.parametrize("kind", CALLS)
async def test_reading_in_place_gives_the_closed_form_results(
    kind: str, world_size: int, count: int, references: list[int]
) -> None:
    """Make single calls, concurrent calls and calls of a subgroup."""

    async def rank(pg: ProcessGroup) -> None:
        prefer_reading_in_place(pg)
        for _ in range(2):
            await CALLS[kind](pg, count)
        assert ProgramExecutor in executors(pg)
        assert references
        await asyncio.gather(*(CALLS[kind](pg, count) for _ in range(3)))
        part = await pg.split_group([0, 1])
        if part is not None:
            prefer_reading_in_place(part)
            await CALLS[kind](part, count)
            assert ProgramExecutor in executors(part)

    await run_ranks(world_size, rank, options=SHM)


async def test_reading_in_place_gives_the_same_results_in_processes() -> None:
    assert await run_processes(3, _executors_in_a_process, options=SHM) == [{ProgramExecutor}] * 3


async def _executors_in_a_process(pg: ProcessGroup) -> set[Any]:
    prefer_reading_in_place(pg)
    for call in CALLS.values():
        for count in (7 * FITS, LARGE):
            await call(pg, count)
    return executors(pg)


@pytest.mark.parametrize("shift", range(3))
@pytest.mark.parametrize("world_size", SIZES)
async def test_alltoall_with_small_and_large_blocks_gives_the_closed_form_results(world_size: int, shift: int) -> None:
    sizes = [0, 1, FITS, FITS + 1, LARGE, FITS - 1, 3 * FITS][:world_size]
    counts = [*sizes[shift % world_size :], *sizes[: shift % world_size]]

    async def rank(pg: ProcessGroup) -> None:
        prefer_reading_in_place(pg)
        rank, root = pg.rank(), world_size - 1
        mine = np.full(counts[rank], rank + 0.5)
        for outputs in ([np.empty(count) for count in counts], None):
            found = await pg.gather(outputs if rank == root else None, mine, root)
            assert [each.size for each in found or ()] == (counts if rank == root else [])
            assert all((each == peer + 0.5).all() for peer, each in enumerate(found or ()))
        output = np.empty(counts[rank])
        await pg.scatter(output, [np.full(count, count / 2) for count in counts] if rank == root else None, root)
        assert (output == counts[rank] / 2).all()
        received = [np.empty(count) for count in counts]
        await pg.alltoall(received, [np.full(counts[rank], peer + 0.5) for peer in range(world_size)])
        assert all((each == rank + 0.5).all() for each in received)

    await run_ranks(world_size, rank, options=SHM)


@pytest.mark.parametrize("kept", ["always", "at times"])
@pytest.mark.parametrize("kind", CALLS)
async def test_payload_is_sent_in_frames_if_the_ring_has_no_space_for_a_reference(
    kind: str, kept: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = 0

    def write(original: Callable[..., bool], *args: Any) -> bool:
        nonlocal calls
        calls += 1
        return not (kept == "always" or calls % 3) and original(*args)

    async def rank(pg: ProcessGroup) -> None:
        prefer_reading_in_place(pg)
        for _ in range(3):
            await CALLS[kind](pg, LARGE)

    wrap_methods(monkeypatch, ReferenceWriter, write=write)
    await run_ranks(3, rank, options=SHM)
    assert calls


@pytest.mark.parametrize("kind", CALLS)
async def test_array_in_memory_that_peers_cannot_read_is_sent_in_frames(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def rank(pg: ProcessGroup) -> None:
        prefer_reading_in_place(pg)
        for _ in range(2):
            await CALLS[kind](pg, LARGE)

    monkeypatch.setattr(ReferenceWriter, "find", lambda *_, **__: None)
    await run_ranks(3, rank, options=SHM)


@pytest.mark.ranks(3)
@parametrize_transports("shm")
async def test_elements_that_do_not_divide_the_segment_size_are_not_split(pg: ProcessGroup) -> None:
    """Use elements of 24 and 12 bytes, which do not divide the segment size."""
    three = np.dtype([("a", "f8"), ("b", "f8"), ("c", "i8")])
    pair = np.dtype([("value", "f8"), ("index", "i4")])
    prefer_reading_in_place(pg)
    tensor = np.zeros(LARGE, three)
    tensor["c"] = np.arange(LARGE) + pg.rank()
    await pg.broadcast(tensor, 1)
    assert (tensor["c"] == np.arange(LARGE) + 1).all()
    pairs = np.zeros(LARGE, pair)
    pairs["value"], pairs["index"] = np.arange(LARGE) % 7 - pg.rank(), pg.rank()
    await pg.allreduce(pairs, ReduceOp.MINLOC)
    assert (pairs["value"] == np.arange(LARGE) % 7 - 2).all()
    assert (pairs["index"] == 2).all()
    assert {ProgramExecutor} <= executors(pg)


@pytest.mark.parametrize(
    "op", [ReduceOp.AVG, ReduceOp.PREMUL_SUM(0.5), ReduceOp.custom(lambda a, b, out: np.maximum(a, b, out=out))]
)
@pytest.mark.ranks(3)
@parametrize_transports("shm")
async def test_reading_in_place_supports_all_ops(pg: ProcessGroup, op: ReduceOp) -> None:
    prefer_reading_in_place(pg)
    tensor = np.full(LARGE, pg.rank() + 1.0)
    await pg.allreduce(tensor, op)
    assert (tensor == (2 if op == ReduceOp.AVG else 3)).all()


# -- conditions for reading in place


@pytest.mark.parametrize("forbidding", [None, 0, 1])
async def test_ranks_read_arrays_in_place_only_if_all_ranks_of_the_group_can(forbidding: int | None) -> None:
    """Check that all ranks use another executor if one rank forbids reading in place."""

    async def rank(number: int) -> None:
        given = GroupOptions(transport="shm", single_copy=number != forbidding)
        async with new_group(store=store, rank=number, world_size=2, options=given) as pg:
            prefer_reading_in_place(pg)
            await allreduce(pg, LARGE)
            assert executors(pg) == {ShmRing if forbidding is not None else ProgramExecutor}

    store = HashStore()
    async with asyncio.TaskGroup() as ranks:
        for number in range(2):
            ranks.create_task(rank(number))


@pytest.mark.parametrize(
    ("kind", "reduces", "size", "limit"),
    [
        ("broadcast", False, 2, 1),
        ("gather", False, 2, 1),
        ("broadcast", False, 3, 2),
        ("gather", False, 3, 2),
        ("scatter", False, 2, 2),
        ("allgather", False, 2, 2),
        ("alltoall", False, 4, 2),
        ("allreduce", True, 2, 3),
        ("reduce_scatter", True, 4, 3),
    ],
)
def test_arrays_at_or_above_the_size_limit_of_the_collective_are_read_in_place(
    kind: str, reduces: bool, size: int, limit: int
) -> None:
    assert SingleCopy(1, 2, 3).limit(kind, size, reduces=reduces) == limit


@pytest.mark.parametrize("kind", ["allreduce", "broadcast", "scatter", "alltoall"])
async def test_message_below_the_size_limit_is_not_read_in_place(kind: str, references: list[int]) -> None:
    async def rank(pg: ProcessGroup, limit: int) -> None:
        plan_without_accelerator(pg)
        comm = comm_of(pg)
        comm.tuning = comm.tuning._replace(single_copy=SingleCopy(math.inf, limit, limit))
        await CALLS[kind](pg, 9 * FITS)

    nbytes = 3 * FITS * 8 if kind == "allreduce" else 9 * FITS * 8
    await run_ranks(3, rank, nbytes + 17, options=SHM)
    assert not references
    await run_ranks(3, rank, nbytes, options=SHM)
    assert references


# -- aborted, late and mismatched calls

PATTERN = -7.0
#: Paths of large arrays: read in place by the receiver, or sent through chunk queues if all ranks have the accelerator.
WAYS = ("in place", "through queues")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", CALLS)
async def test_aborted_call_never_delivers_data_written_after_the_abort(kind: str, way: str) -> None:
    """Let rank 0 abort at various moments of a call, and then overwrite its array. Other groups must continue."""
    count = 64 * SEGMENT // 8
    outcomes = set()

    async def rank(pg: ProcessGroup, turns: int) -> None:
        prefer_reading_in_place(pg, way)
        other = await pg.split_group([0, 1])
        assert other is not None
        given = np.full(2 * count, pg.rank() + 1.0)
        taken = np.zeros(2 * count)
        await pg.barrier()
        halves, blocks = [given[:count], given[count:]], [taken[:count], taken[count:]]
        call = {
            "allreduce": lambda: pg.allreduce(given),
            "broadcast": lambda: pg.broadcast(given, 0),
            "allgather": lambda: pg.allgather(blocks, halves[0]),
            "reduce_scatter": lambda: pg.reduce_scatter_tensor(blocks[0], given),
            "gather": lambda: pg.gather(None, halves[0], 1),
            "scatter": lambda: pg.scatter(blocks[0], halves if pg.rank() == 0 else None, 0),
            "alltoall": lambda: pg.alltoall(blocks, halves),
        }[kind]
        try:
            work: Any = call()
            if pg.rank() == 0:
                for _ in range(turns):
                    await asyncio.sleep(0)
                pg.abort("enough")
            found = await work
            outcomes.add("done")
            if pg.rank() == 1:
                got = found if kind == "gather" else [given, taken]
                assert not any(PATTERN in each for each in got)
        except GroupError:
            outcomes.add("failed")
        finally:
            if pg.rank() == 0:
                given.fill(PATTERN)
        await allreduce(other, 1000)

    for turns in (0, 1, 2, 3, 5, 8, 13, 40):
        await run_ranks(2, rank, turns, options=SHM)
    assert "failed" in outcomes


@pytest.mark.ranks(2)
@parametrize_transports("shm")
async def test_timeout_error_names_the_rank_that_has_not_read_the_array(pg: ProcessGroup) -> None:
    prefer_reading_in_place(pg)
    await CALLS["allreduce"](pg, LARGE)
    if pg.rank() == 0:
        work = pg.scatter(np.empty(LARGE), [np.empty(LARGE)] * 2, 0, timeout=0.2)
        assert [each.awaited_ranks() for each in comm_of(pg).in_flight._operations.values()] == [[1]]
        with pytest.raises(CollectiveTimeoutError, match="it waits for rank 1"):
            await work
    else:
        await pg.wait_revoked()


MISMATCHES: dict[str, tuple[Callable[[ProcessGroup], Any], Callable[[ProcessGroup], Any]]] = {
    "longer": (
        lambda pg: pg.allreduce(np.zeros(LARGE)),
        lambda pg: pg.allreduce(np.zeros(LARGE + 1)),
    ),
    "small": (lambda pg: pg.allreduce(np.zeros(LARGE)), lambda pg: pg.allreduce(np.zeros(1))),
    "middle": (lambda pg: pg.allreduce(np.zeros(LARGE)), lambda pg: pg.allreduce(np.zeros(1000))),
    "dtype": (
        lambda pg: pg.allreduce(np.zeros(LARGE)),
        lambda pg: pg.allreduce(np.zeros(LARGE, np.int64)),
    ),
    "root": (lambda pg: pg.broadcast(np.zeros(LARGE), 0), lambda pg: pg.broadcast(np.zeros(LARGE), 1)),
    "small from the root": (lambda pg: pg.broadcast(np.zeros(LARGE), 0), lambda pg: pg.broadcast(np.zeros(1), 0)),
    "small to the root": (lambda pg: pg.reduce(np.zeros(1), 0), lambda pg: pg.reduce(np.zeros(LARGE), 0)),
    "small of both": (
        lambda pg: pg.reduce_scatter_tensor(np.zeros(LARGE), np.zeros(2 * LARGE)),
        lambda pg: pg.reduce_scatter_tensor(np.zeros(1), np.zeros(2)),
    ),
    "kind": (lambda pg: pg.broadcast(np.zeros(LARGE), 0), lambda pg: pg.allreduce(np.zeros(LARGE))),
    "barrier": (lambda pg: pg.broadcast(np.zeros(LARGE), 0), lambda pg: pg.barrier()),
    "block": (
        lambda pg: pg.scatter(np.zeros(LARGE), [np.zeros(LARGE)] * 2, 0),
        lambda pg: pg.scatter(np.zeros(LARGE - 1), None, 0),
    ),
    "small block": (
        lambda pg: pg.scatter(np.zeros(LARGE), [np.zeros(LARGE)] * 2, 0),
        lambda pg: pg.scatter(np.zeros(1), None, 0),
    ),
    "large block": (
        lambda pg: pg.scatter(np.zeros(1), [np.zeros(1)] * 2, 0),
        lambda pg: pg.scatter(np.zeros(LARGE), None, 0),
    ),
    "middle block": (
        lambda pg: pg.scatter(np.zeros(LARGE), [np.zeros(LARGE)] * 2, 0),
        lambda pg: pg.scatter(np.zeros(1000), None, 0),
    ),
    "objects": (lambda pg: pg.allgather_into_tensor(np.zeros(2 * LARGE), np.zeros(LARGE)),
                lambda pg: pg.allgather_object(None)),
}  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", MISMATCHES)
async def test_mismatched_calls_are_reported_within_a_second(name: str, way: str) -> None:
    """Check that the group is also revoked on a rank whose own call has already finished."""

    async def rank(pg: ProcessGroup, swapped: bool) -> None:
        prefer_reading_in_place(pg, way)
        await allreduce(pg, LARGE)
        with suppress(CollectiveMismatchError):
            async with asyncio.timeout(1):
                await MISMATCHES[name][pg.rank() ^ swapped](pg)
                await pg.wait_revoked()
        with pytest.raises(GroupRevokedError, match="Collectives differ"):
            await pg.barrier()

    for swapped in (False,) if "block" in name or "root" in name else (False, True):  # the roots differ
        await run_ranks(2, rank, swapped, options=SHM)


@pytest.mark.parametrize("given", ["longer", "an address"])
async def test_mismatched_message_is_not_read_in_place(given: str) -> None:
    """Check that a too long message is not written, and that the data of a small message is not read as an address."""

    async def rank(pg: ProcessGroup) -> None:
        prefer_reading_in_place(pg)
        await allreduce(pg, LARGE)
        output, other = np.full(LARGE, 7, np.uint64), np.zeros(LARGE, np.uint64)
        blocks = [np.zeros(LARGE + 1, np.uint64)] * 2
        if given == "an address":
            blocks = [np.array([0, other.__array_interface__["data"][0], other.nbytes, 0], np.uint64)] * 2
        with suppress(CollectiveMismatchError):
            async with asyncio.timeout(1):
                if pg.rank() == 0:
                    await pg.scatter(np.zeros(blocks[0].size, np.uint64), blocks, 0)
                else:
                    await pg.scatter(output, None, 0)
                await pg.wait_revoked()
        assert (output == 7).all()

    await run_ranks(2, rank, options=SHM)
