"""Mismatched coalescing blocks: every rank reports the differing calls within a second, and no array changes."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from aiocoll import CollectiveMismatchError, ProcessGroup, ReduceOp
from aiocoll.engine.operations.differences import mismatch_error
from aiocoll.engine.operations.manifest import ROOM, Manifest
from aiocoll.engine.operations.signature import Signature, description

from ..internals import comm_of
from ..ranks import LINKS, parametrize_transports, run_ranks
from ..steady_loop import run_steadily

Record = Callable[[ProcessGroup], object]


def x(count: int = 4, dtype: str = "float64") -> Any:
    return np.full(count, 7, dtype)


def parts(*counts: int) -> list[Any]:
    return [x(count) for count in counts]


def many(pg: ProcessGroup, count: int = 5) -> None:
    for _ in range(count):
        pg.allreduce(x())


#: The calls of most ranks, the calls of one rank, and a pattern for the differing calls ("members") in the error text.
CASES: dict[str, tuple[Record, Record, str]] = {
    "op": (
        lambda pg: (many(pg), pg.allreduce(x())),
        lambda pg: (many(pg), pg.allreduce(x(), ReduceOp.MAX)),
        r"member 5 is ALLREDUCE\(dtype=float64, counts=\[4\], reduce op=\w+\) on rank",
    ),
    "kind": (
        lambda pg: (pg.allreduce(x()), pg.broadcast(x(), 0)),
        lambda pg: (pg.allreduce(x()), pg.reduce(x(), 0)),
        r"member 1 is (BROADCAST|REDUCE)\(dtype=float64, counts=\[4\], root=0",
    ),
    "order": (
        lambda pg: (pg.allreduce(x(3)), pg.allreduce(x(4))),
        lambda pg: (pg.allreduce(x(4)), pg.allreduce(x(3))),
        r"member 0 is .*counts=\[\d\].*; member 1 is .*counts=\[\d\]",
    ),
    "order with one op left over": (
        lambda pg: (pg.allreduce(x()), pg.barrier()),
        lambda pg: (pg.barrier(), pg.allreduce(x())),
        r"member 0 is .*; member 1 is",
    ),
    "one more": (lambda pg: many(pg, 5), lambda pg: many(pg, 6), r"member 5 is (missing|ALLREDUCE\()"),
    "one less": (lambda pg: many(pg, 2), lambda pg: many(pg, 1), r"member 1 is (missing|ALLREDUCE\()"),
    "objects": (
        lambda pg: (pg.allreduce(x()), pg.allgather_object(1)),
        lambda pg: (pg.allreduce(x()), pg.broadcast_object(1, 0)),
        r"member 1 is (ALLGATHER|BROADCAST)_OBJECT\(dtype=object",
    ),
    "large": (
        lambda pg: (pg.allreduce(x(100_000)), pg.allreduce(x(100_000))),
        lambda pg: (pg.allreduce(x(100_000)), pg.allreduce(x(100_001))),
        r"member 1 is ALLREDUCE\(dtype=float64, counts=\[10000\d\]",
    ),
    "alltoall, with totals that agree": (
        lambda pg: (pg.alltoall(parts(*[3] * pg.size()), parts(*[3] * pg.size())),
                    pg.alltoall(parts(*[5] * pg.size()), parts(*[5] * pg.size()))),
        lambda pg: (pg.alltoall(parts(*[5] * pg.size()), parts(*[5] * pg.size())),
                    pg.alltoall(parts(*[3] * pg.size()), parts(*[3] * pg.size()))),
        r"member 0 is ALLTOALL\(.*sends=\[\d, \d.*; member 1 is",
    ),
    "gather, with totals that agree": (
        lambda pg: [pg.gather(parts(*[n] * pg.size()) if pg.rank() == 0 else None, x(n), 0) for n in (2, 3)],
        lambda pg: [pg.gather(parts(*[n] * pg.size()) if pg.rank() == 0 else None, x(n), 0) for n in (3, 2)],
        r"member 0 is GATHER\(.*; member 1 is",
    ),
    "scatter, with totals that agree": (
        lambda pg: [pg.scatter(x(n), parts(*[n] * pg.size()) if pg.rank() == 0 else None, 0) for n in (2, 3)],
        lambda pg: [pg.scatter(x(n), parts(*[n] * pg.size()) if pg.rank() == 0 else None, 0) for n in (3, 2)],
        r"member 0 is SCATTER\(.*; member 1 is",
    ),
    "scatter, with other totals": (
        lambda pg: [pg.scatter(x(n), parts(*[n] * pg.size()) if pg.rank() == 0 else None, 0) for n in (2, 3)],
        lambda pg: [pg.scatter(x(n), parts(*[n] * pg.size()) if pg.rank() == 0 else None, 0) for n in (2, 4)],
        r"member 1 is SCATTER\(",
    ),
    "an empty list": (
        lambda pg: pg.allreduce_coalesced([]),
        lambda pg: pg.allreduce_coalesced([x()]),
        r"member 0 is (missing|ALLREDUCE\()",
    ),
}  # fmt: skip


async def block_mismatch(pg: ProcessGroup, most: Record, one: Record, odd: int, text: str) -> str:
    """Record calls in a block, with different calls on rank `odd`; return the text of the mismatch error."""
    loop = asyncio.get_running_loop()
    await pg.barrier()
    start = loop.time()
    with pytest.raises(CollectiveMismatchError) as caught:  # noqa: PT012
        async with pg.coalescing():
            (one if pg.rank() == odd else most)(pg)
        # The block may complete on this rank: only the receiver detects some mismatches, the sender does not.
        await pg.wait_revoked()
        raise comm_of(pg).cause  # type: ignore[misc]
    assert loop.time() - start < 1.0
    message = str(caught.value)
    assert "Collectives differ in the following: " in message
    assert re.search(text, message), message
    assert "SequenceNumber=2" in message
    assert pg.pending() == []
    return message


@pytest.mark.slow
@pytest.mark.parametrize("transport", LINKS)
@pytest.mark.parametrize("name", CASES)
def test_coalescing_blocks_with_different_calls_are_reported_as_a_mismatch(name: str, transport: str) -> None:
    most, one, text = CASES[name]
    for world_size, odd in ((2, 1), (3, 0)):
        run_steadily(run_ranks(world_size, block_mismatch, most, one, odd, text, transport=transport))


@pytest.mark.ranks(3)
@parametrize_transports(*LINKS)
@pytest.mark.parametrize("which", [0, 1])
async def test_coalescing_block_against_plain_calls_is_reported_as_a_mismatch(pg: ProcessGroup, which: int) -> None:
    tensors = [x() for _ in range(3)]
    with pytest.raises(CollectiveMismatchError) as caught:  # noqa: PT012
        if pg.rank() == which:
            async with pg.coalescing():
                for tensor in tensors:
                    pg.allreduce(tensor)
        else:
            for tensor in tensors:
                await pg.allreduce(tensor)
    message = str(caught.value)
    assert "Collectives differ in the following: op" in message
    members = r"COALESCED\(members=\[3 x ALLREDUCE\(dtype=float64, counts=\[4\], reduce op=SUM\)\], "
    assert re.search(rf"rank {which} called {members}", message), message
    if pg.rank() == which:
        assert all((tensor == 7).all() for tensor in tensors)


@pytest.mark.parametrize("transport", LINKS)
async def test_mismatched_coalescing_block_changes_no_array(transport: str) -> None:
    arrays: list[Any] = []

    async def rank(pg: ProcessGroup) -> None:
        tensors = [x(10 + number) for number in range(4)]
        outputs = [[x(5) for _ in range(pg.size())] for _ in range(2)]
        arrays.extend([*tensors, *outputs[0], *outputs[1]])
        with pytest.raises(CollectiveMismatchError):  # noqa: PT012
            async with pg.coalescing():
                for number, tensor in enumerate(tensors):
                    pg.allreduce(tensor, ReduceOp.MAX if (pg.rank(), number) == (1, 3) else ReduceOp.SUM)
                for each in outputs:
                    pg.allgather(each, np.full(5, 100.0 + pg.rank()))
                pg.broadcast(np.full(20_000, 1.0), 0)

    await run_ranks(2, rank, transport=transport)
    assert all((array == 7).all() for array in arrays)


@pytest.mark.ranks(2)
async def test_coalescing_blocks_flushed_after_different_calls_are_reported_as_a_mismatch(pg: ProcessGroup) -> None:
    with pytest.raises(CollectiveMismatchError, match="member 1 is"):  # noqa: PT012
        async with pg.coalescing():
            first = pg.allreduce(x())
            if pg.rank() == 0:
                await first
            await pg.allreduce(x())


def coalesced_call(rank: int, *members: Signature) -> dict[str, Any]:
    return description(rank, Signature("COALESCED", None, (), None, None, members=Manifest(members)), (), None, 3)


def member(count: int, op: str = "ALLREDUCE") -> Signature:
    return Signature(op, "float32", (count,), None, "SUM")


def test_mismatch_error_of_a_long_block_lists_a_limited_number_of_calls() -> None:
    """Check that a report beyond the limit states only that the calls of the blocks differ."""
    first = [member(number) for number in range(5000)]
    second = [*first[:-1], member(3)]
    one, two = coalesced_call(0, *first), coalesced_call(1, *second)
    assert len(repr(one)) < 2 * ROOM
    assert one["members"]["listed"] < 5000
    text = str(mismatch_error("g", one, two))
    assert re.search(r"member \d+ is ONE OF THE FOLLOWING\(\) on rank 0, ONE OF", text)
    assert "and 4997 more" in text
    assert "the messages they exchange" in str(mismatch_error("g", one, coalesced_call(1, *first)))


def test_mismatch_error_lists_equal_consecutive_calls_of_a_block_once() -> None:
    one, two = coalesced_call(0, *[member(1)] * 100_000), coalesced_call(1, *[member(1)] * 99_999, member(2))
    assert len(repr(one)) < 500
    text = str(mismatch_error("g", one, two))
    assert "member 99999 is ALLREDUCE(dtype=float32, counts=[1], reduce op=SUM) on rank 0, ALLREDUCE(" in text


def test_mismatch_error_names_at_most_three_calls_of_a_block() -> None:
    text = str(mismatch_error("g", coalesced_call(0, *[member(1)] * 9), coalesced_call(1, *[member(2)] * 9)))
    assert text.count("on rank 0, ") == 3
