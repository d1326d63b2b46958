"""Mismatches over sockets and shared memory: all ranks report a mismatch within a second on an idle machine."""

from __future__ import annotations

import asyncio

import pytest

from ..engine.test_mismatch import DELAYS, P2P_TABLE, PLACES, TABLE, Case, check, counting, disagree, misfit
from ..ranks import LINKS, run_ranks

#: The number of cases that run at the same time.
CHUNK = 6


@pytest.mark.slow
@pytest.mark.parametrize("start", range(0, len(TABLE), CHUNK), ids=lambda start: TABLE[start].name)
async def test_mismatch_is_reported_over_sockets_and_shared_memory(start: int) -> None:
    """Run several groups concurrently, since mismatches that only stall reports reveal would otherwise take minutes."""
    transport = ("unix", "tcp", "shm")[start // CHUNK % 3]
    cases = TABLE[start : start + CHUNK]
    places = [PLACES[(start + index) % len(PLACES)] for index in range(len(cases))]
    runs = [
        run_ranks(world_size, disagree, case, odd, DELAYS["together"], transport=transport)
        for case, (world_size, odd) in zip(cases, places, strict=True)
    ]
    for case, (world_size, odd), reports in zip(cases, places, await asyncio.gather(*runs), strict=True):
        check(case, odd, world_size, reports)


@pytest.mark.parametrize("transport", LINKS)
@pytest.mark.parametrize("kind", ["allreduce", "broadcast"])
async def test_mismatch_of_8_bytes_against_64_mib_is_reported(kind: str, transport: str) -> None:
    word, giant = counting(kind, 1, "float32"), counting(kind, 16 * 1024 * 1024, "float32")
    for odd in (0, 1):
        case = Case(kind, "counts, shape", giant, word)
        check(case, odd, 2, await run_ranks(2, disagree, case, odd, DELAYS["together"], transport=transport))


@pytest.mark.parametrize("transport", LINKS[1:])
async def test_mismatched_message_is_reported_over_sockets(transport: str) -> None:
    runs = [run_ranks(3, misfit, *row, 0.0, transport=transport) for row in P2P_TABLE]
    assert all(len(set(texts)) == 1 for texts in await asyncio.gather(*runs))
