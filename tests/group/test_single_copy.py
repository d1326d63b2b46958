"""Single copies of large arrays, which peers read in place: results, and safe reuse of the sender's memory."""

from __future__ import annotations

import asyncio
import json
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aiocoll import GroupError, GroupOptions, ProcessGroup
from aiocoll.engine.links.flow_control import LINK_WINDOW
from aiocoll.testing import run_processes, run_ranks
from aiocoll.transport.shm.process_memory import can_read
from aiocoll.transport.shm.references import ReferenceWriter

from ..internals import channels_of, observe_methods, plan_without_accelerator, ungranted_bytes
from ..pairwise import Case, cover
from ..reductions import DTYPES, OPS
from .test_collectives import MOVING, REDUCING, ROOTED, SIZES, check, label, valid

pytestmark = pytest.mark.skipif(
    can_read() is not None, reason=f"cannot read the memory of another process: {can_read()}"
)

#: An element count with which a message takes several frames at every world size.
LARGE = 500_000
SPACE = {"dtype": DTYPES, "count": ("1000000",), "root": range(max(SIZES)), "world_size": SIZES[1:]}


@pytest.fixture
def options(tmp_path: Path) -> GroupOptions:
    """Return group options with which peers read every large array in place."""
    return GroupOptions(transport="shm", tuning=tuning(tmp_path))


def tuning(folder: Path) -> str:
    path = folder / "tuning.json"
    sizes = {"moved": 0, "spread": 0, "reduced": 0}
    path.write_text(json.dumps({"format": "aiocoll tuning", "version": 1, "media": {}, "single_copy": sizes}))
    return str(path)


@pytest.fixture
def references(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Return a list that records the memory of each payload that is sent by reference."""
    seen: list[tuple[int, int]] = []

    def record_place(writer: ReferenceWriter, header: bytes, place: tuple[int, int], *_: Any) -> None:
        seen.append(place)

    observe_methods(monkeypatch, ReferenceWriter, write=record_place)
    return seen


def one_case_per_kind() -> list[Case]:
    cases = [*cover({"kind": REDUCING, "op": OPS, **SPACE}, valid), *cover({"kind": MOVING, **SPACE}, valid)]
    of_kind = {case["kind"]: case for case in cases}
    return list(of_kind.values())


@pytest.mark.parametrize(
    "case",
    [
        *one_case_per_kind(),
        *(
            pytest.param(case, marks=pytest.mark.matrix)
            for space in ({"kind": REDUCING, "op": OPS, **SPACE}, {"kind": MOVING, **SPACE})
            for case in cover(space, valid)
        ),
    ],
    ids=label,
)
async def test_single_copy_gives_the_closed_form_results(
    case: Case, options: GroupOptions, references: list[tuple[int, int]]
) -> None:
    async def rank(pg: ProcessGroup) -> list[bytes]:
        plan_without_accelerator(pg)
        return await check(pg, [case, case])

    first, *others = await run_ranks(case["world_size"], rank, options=options)
    assert case["kind"] in ROOTED or all(each == first for each in others), "ranks have results with different bits"


@pytest.mark.parametrize("kind", ["broadcast", "gather", "scatter", "allgather", "alltoall", "sendrecv"])
async def test_single_copy_makes_additional_copies_only_of_unexpected_data(
    kind: str, options: GroupOptions, references: list[tuple[int, int]]
) -> None:
    """Check the second call, before which all ranks have published their memory."""

    async def rank(pg: ProcessGroup) -> None:
        plan_without_accelerator(pg)
        mine = np.full(LARGE, pg.rank(), np.float64)
        outputs = [np.empty(LARGE) for _ in range(2)]
        for _ in range(2):
            await pg.barrier()
            if pg.rank() == 0:
                references.clear()
            await pg.barrier()
            await CALLS[kind](pg, mine, outputs)
        await pg.barrier()

    await run_ranks(2, rank, options=options)
    assert references
    assert {segment for segment, _ in references} == {0}


async def _sendrecv(pg: ProcessGroup, mine: Any, outputs: Any) -> None:
    sending = pg.send(mine, 1 - pg.rank())
    await pg.recv(outputs[0], 1 - pg.rank())
    await sending
    assert (outputs[0] == 1 - pg.rank()).all()


async def _broadcast(pg: ProcessGroup, mine: Any, outputs: Any) -> None:
    tensor = mine.copy()
    await pg.broadcast(tensor, 1)
    assert (tensor == 1).all()


async def _gather(pg: ProcessGroup, mine: Any, outputs: Any) -> None:
    await pg.gather(outputs if pg.rank() == 0 else None, mine, 0)
    assert pg.rank() or [set(each) for each in outputs] == [{0.0}, {1.0}]


async def _scatter(pg: ProcessGroup, mine: Any, outputs: Any) -> None:
    inputs = [mine + 2, mine + 3] if pg.rank() == 1 else None
    await pg.scatter(outputs[0], inputs, 1)
    assert (outputs[0] == 3 + pg.rank()).all()


async def _allgather(pg: ProcessGroup, mine: Any, outputs: Any) -> None:
    await pg.allgather(outputs, mine)
    assert [set(each) for each in outputs] == [{0.0}, {1.0}]


async def _alltoall(pg: ProcessGroup, mine: Any, outputs: Any) -> None:
    await pg.alltoall(outputs, [mine, mine + 10])
    assert [set(each) for each in outputs] == [{10.0 * pg.rank()}, {10.0 * pg.rank() + 1}]


CALLS = {
    "sendrecv": _sendrecv,
    "broadcast": _broadcast,
    "gather": _gather,
    "scatter": _scatter,
    "allgather": _allgather,
    "alltoall": _alltoall,
}


@pytest.mark.parametrize(
    ("kind", "keyed", "sub"), [*product(CALLS, [False], [False, True]), ("broadcast", True, False)]
)
async def test_registered_arrays_are_read_in_place_in_their_memory_segments(
    kind: str, keyed: bool, sub: bool, options: GroupOptions, references: list[tuple[int, int]]
) -> None:
    """Disable single copies of other memory; include keyed calls and subgroups."""

    async def rank(pg: ProcessGroup) -> None:
        plan_without_accelerator(pg)
        group = await pg.split_group([0, 1]) if sub else pg
        if keyed and kind == "broadcast":
            mine = await pg.empty(LARGE, np.float64)
            mine[:] = group.rank()
            for number in range(4):
                await group.barrier()
                await group.broadcast(mine, 0, key=f"a {number}")
            assert (mine == 0).all()
            return
        mine = await pg.empty(LARGE, np.float64)
        mine[:] = group.rank()
        for _ in range(4):
            await group.barrier()
            await CALLS[kind](group, mine, [np.empty(LARGE) for _ in range(2)])

    await run_ranks(2, rank, options=GroupOptions(transport="shm", single_copy=False))
    segments = {segment for segment, _ in references}
    assert 0 not in segments
    assert kind in ("broadcast", "scatter", "alltoall") or segments


async def test_large_send_does_not_complete_before_its_receive_has_started(options: GroupOptions) -> None:
    """Post the receive only after a later message has arrived."""

    async def rank(pg: ProcessGroup) -> None:
        for _ in range(3):
            if pg.rank() == 0:
                array = np.arange(LARGE)
                sending = pg.send(array, 1)
                await pg.send(np.zeros(1), 1, tag=1)
                assert not sending.is_completed()
                await sending
                array[:] = -1
            else:
                await pg.recv(np.zeros(1), 0, tag=1)
                found = np.empty(LARGE, np.int64)
                await pg.recv(found, 0)
                assert (found == np.arange(LARGE)).all()

    await run_ranks(2, rank, options=options)


async def test_large_message_is_read_in_place_as_one_frame(
    options: GroupOptions, references: list[tuple[int, int]]
) -> None:
    """Post the receive late: the receiver would have to copy all frames that arrive before its call."""
    messages = 3

    async def rank(pg: ProcessGroup) -> None:
        for _ in range(messages):
            if pg.rank() == 0:
                sending = pg.send(np.arange(LARGE), 1)
                await pg.send(np.zeros(1), 1, tag=1)
                await sending
            else:
                await pg.recv(np.zeros(1), 0, tag=1)
                await pg.recv(np.empty(LARGE, np.int64), 0)

    await run_ranks(2, rank, options=options)
    assert len(references) == messages


async def test_failed_call_never_delivers_data_written_after_the_failure(options: GroupOptions) -> None:
    """Overwrite the array once its send has failed; the receive must fail too, or already have the original data."""
    pattern = -7.0

    async def rank(pg: ProcessGroup, turns: int) -> None:
        await pg.barrier()
        found = np.zeros(LARGE)
        try:
            if pg.rank() == 0:
                array = np.ones(LARGE)
                sending = pg.send(array, 1)
                for _ in range(turns):
                    await asyncio.sleep(0)
                pg.abort("enough")
                try:
                    await sending
                finally:
                    array[:] = pattern
            else:
                await pg.recv(found, 0)
                assert (found == 1).all()
        except GroupError:
            pass

    for turns in range(8):
        await run_ranks(2, rank, turns, options=options)


async def test_withdrawn_eager_data_is_returned_to_the_eager_window(options: GroupOptions) -> None:
    """Fail many groups on one link: if each lost some bytes of the eager window, eager sends would stop."""
    nbytes = 200_000

    async def rank(pg: ProcessGroup) -> None:
        peer = 1 - pg.rank()
        for _ in range(3):  # repeat until the link is open and all its data is read
            await pg.allreduce(np.zeros(LARGE))
        for _ in range(2 * LINK_WINDOW // nbytes):
            group = await pg.split_group([0, 1])
            assert group is not None
            if pg.rank() == 0:
                sending = group.send(np.zeros(nbytes, np.uint8), 1)
                group.abort("enough")
                with pytest.raises(GroupError):
                    await sending
            await pg.barrier()
        await pg.send_object(b"", peer)
        await pg.recv_object(peer)
        assert ungranted_bytes(channels_of(pg)[peer]) < LINK_WINDOW // 2

    await run_ranks(2, rank, options=options)


async def wrong_receives(pg: ProcessGroup, rounds: int) -> int:
    """Overwrite each sent array once its work is done; return the number of receives with wrong data."""
    plan_without_accelerator(pg)
    seen, size, rank = 0, pg.size(), pg.rank()
    array, found = np.empty(LARGE), np.empty(LARGE)
    for step in range(rounds):
        array[:] = 1000 * step + rank
        sending = pg.send(array, (rank + 1) % size)
        receiving = pg.recv(found, (rank - 1) % size)
        await sending
        array.fill(-1)
        await receiving
        seen += int((found != 1000 * step + (rank - 1) % size).any())
        array[:] = step
        inputs = [array + peer for peer in range(size)]
        outputs = [np.empty(LARGE) for _ in range(size)]
        await pg.alltoall(outputs, inputs)
        for each in inputs:
            each.fill(-1)
        seen += int(any((each != step + rank).any() for each in outputs))
    return seen


@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.slow)])
async def test_sent_array_can_be_overwritten_as_soon_as_the_send_completes(world_size: int, tmp_path: Path) -> None:
    options = GroupOptions(transport="shm", tuning=tuning(tmp_path))
    assert await run_processes(world_size, wrong_receives, 5, options=options) == [0] * world_size


@pytest.mark.soak
@pytest.mark.parametrize("world_size", [2, 4])
async def test_sent_array_can_be_overwritten_as_soon_as_each_of_many_sends_completes(
    world_size: int, tmp_path: Path
) -> None:
    options = GroupOptions(transport="shm", tuning=tuning(tmp_path))
    assert await run_processes(world_size, wrong_receives, 500, options=options, timeout=600) == [0] * world_size


async def test_single_copy_can_be_disabled_by_one_rank(references: list[tuple[int, int]], tmp_path: Path) -> None:
    """Disable single copy on rank 1, which then reads no other rank's memory, and whose memory no other rank reads."""
    from aiocoll import new_group
    from aiocoll.store import HashStore

    store = HashStore()

    async def rank(number: int) -> None:
        given = GroupOptions(transport="shm", tuning=tuning(tmp_path), single_copy=number != 1)
        async with new_group(store=store, rank=number, world_size=3, options=given) as pg:
            for _ in range(3):
                array = np.full(LARGE, number)
                await pg.broadcast(array, 1)
                assert (array == 1).all()
                await pg.broadcast(array[:], 2)
                if number in (0, 2):
                    await (pg.send(array, 2) if number == 0 else pg.recv(array, 0))
                await pg.barrier()

    async with asyncio.TaskGroup() as ranks:
        for number in range(3):
            ranks.create_task(rank(number))
    assert references
