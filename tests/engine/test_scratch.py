"""Scratch memory: its reuse by later operations, and its bounds."""

from __future__ import annotations

import numpy as np
import pytest

from aiocoll import ProcessGroup
from aiocoll.engine.operations.scratch import LARGE, MOST, Scratch

from ..internals import comm_of
from ..ranks import LINKS, run_ranks

BYTE, DOUBLE = np.dtype("uint8"), np.dtype("float64")


def test_returned_scratch_block_is_reused() -> None:
    scratch = Scratch()
    first = scratch.take(LARGE, BYTE)
    address = first.ctypes.data
    scratch.give(first)
    again = scratch.take(LARGE // 8, DOUBLE)
    assert again.ctypes.data == address
    assert (again.dtype, again.shape) == (DOUBLE, (LARGE // 8,))
    assert scratch.take(LARGE, BYTE).ctypes.data != address


@pytest.mark.parametrize(("given", "wanted", "same"), [(2, 1, True), (3, 1, False), (1, 2, False)])
def test_returned_scratch_block_is_reused_for_similar_sizes(given: int, wanted: int, same: bool) -> None:
    scratch = Scratch()
    block = scratch.take(given * LARGE, BYTE)
    scratch.give(block)
    assert (scratch.take(wanted * LARGE, BYTE).ctypes.data == block.ctypes.data) is same


def test_very_small_and_very_large_scratch_blocks_are_not_kept() -> None:
    scratch = Scratch()
    for nbytes in (0, 1, LARGE - 1, MOST + 1):
        scratch.give(scratch.take(nbytes, BYTE))
    assert scratch._kept == []


def test_oldest_scratch_block_is_dropped_beyond_the_limit() -> None:
    scratch = Scratch()
    blocks = [scratch.take(MOST // 2, BYTE) for _ in range(3)]
    for block in blocks:
        scratch.give(block)
    assert [kept.ctypes.data for kept in scratch._kept] == [block.ctypes.data for block in blocks[1:]]
    assert scratch._nbytes == MOST


@pytest.mark.parametrize("transport", LINKS)
async def test_second_reduction_reuses_the_scratch_of_the_first(transport: str) -> None:
    count = 1_000_000

    async def rank(pg: ProcessGroup) -> int:
        for _ in range(3):
            x = np.arange(count, dtype="float32") + pg.rank()
            await pg.reduce(x, 0)
            if pg.rank() == 0:
                assert (x == 3 * np.arange(count, dtype="float32") + 3).all()
        return len(comm_of(pg).endpoint.scratch._kept)

    assert sum(await run_ranks(3, rank, transport=transport)) == 1
