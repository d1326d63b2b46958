"""Jobs with native and pure ranks: their results have the same bits as the results of pure jobs."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from aiocoll import ProcessGroup
from aiocoll.transport.shared_memory import SMALL_SLOTS

from .. import nans
from ..internals import Limits, disable_accelerator, is_native, native_calls_of, use_same_slots
from .cases import DTYPES, Case, bits, cases, counts
from .groups import group_of_ranks, open_links, pending_in_python

#: Jobs, one letter per rank: N if the accelerator carries out the rank's calls (native), P for pure Python.
JOBS = ("NN", "NP", "PN", "NPN", "PNN", "NPNP", "PPNN", "NNPNPNN")


@pytest.fixture(autouse=True)
def _no_age_checks(limits: Limits) -> None:
    """Turn off the handover of slow calls to Python, since any call may be slow on a loaded machine."""
    limits(report_after=1000.0, report_strays_after=1000.0)


def native_ranks(job: str) -> list[bool]:
    return [letter == "N" for letter in job]


async def results_of(pgs: Sequence[ProcessGroup], case: Case, first: int) -> tuple[list[Any], list[bool]]:
    """Make a call on all ranks, first on rank `first`; return each rank's result bytes, and whether it was native."""
    started = {rank: case.call(pgs[rank]) for rank in [*range(first, len(pgs)), *range(first)]}
    for work, _ in started.values():
        await work
    ranks = range(len(pgs))
    return [[array.tobytes() for array in started[rank][1]] for rank in ranks], [
        is_native(started[rank][0]) for rank in ranks
    ]


def chosen_count(number: int, size: int, dtype: str) -> int:
    found = counts(size, dtype)
    return found[number % len(found)]


async def compare_with_pure_job(job: str, chosen: Sequence[tuple[str, int]]) -> None:
    """Check that `job` and a pure Python job give equal results for all calls with the chosen dtypes and counts."""
    size, native, turns = len(job), native_ranks(job), itertools.cycle(range(len(job)))
    async with group_of_ranks(native) as pgs, group_of_ranks([False] * size, "pure") as pure:
        for dtype, count in chosen:
            for case in cases(size, dtype, count):
                first = next(turns)
                found, were_native = await results_of(pgs, case, first)
                expected, _ = await results_of(pure, case, first)
                where = f"{case.name} of {count} {dtype}, rank {first} first"
                assert found == expected, where
                if case.plain:
                    assert were_native == native, where
                else:
                    assert not any(
                        is_native_rank and not may for is_native_rank, may in zip(were_native, native, strict=True)
                    ), where
            assert [pending_in_python(pg) for pg in pgs] == [0] * size


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("job", JOBS)
async def test_job_of_native_and_pure_ranks_gives_the_same_bits_as_a_pure_job(job: str) -> None:
    """Check one element count per dtype; each job checks other counts."""
    size, start = len(job), JOBS.index(job)
    chosen = [(dtype, chosen_count(start + place, size, dtype)) for place, dtype in enumerate(DTYPES)]
    await compare_with_pure_job(job, chosen[start % 2 :: 2] if size > 2 else chosen)


@pytest.mark.matrix
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("job", JOBS)
async def test_job_of_native_and_pure_ranks_gives_the_same_bits_as_a_pure_job_for_each_count(
    job: str, dtype: str
) -> None:
    await compare_with_pure_job(job, [(dtype, count) for count in counts(len(job), dtype)])


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("count", [1, 2, 17])
async def test_nan_bits_are_equal_on_all_ranks(count: int) -> None:
    """Check several element counts, since NumPy computes different NaN bits for short and for long arrays."""
    async with group_of_ranks([True, False, True]) as pgs:
        for (op, dtype), seed in itertools.product(nans.cases(), range(25)):
            arrays = [array.copy() for array in nans.inputs(dtype, count, 3, seed)]
            works = [pg.allreduce(array, nans.reduce_op(op)) for pg, array in zip(pgs, arrays, strict=True)]
            for work in works:
                await work
            assert len({array.tobytes() for array in arrays}) == 1, (op, dtype, seed)


@pytest.mark.parametrize("job", ["NN", "NP", "PN", "NPN"])
@pytest.mark.parametrize("count", [1, 512, 2048])
async def test_many_concurrent_native_calls_use_slots_or_frames(job: str, count: int) -> None:
    async with group_of_ranks(native_ranks(job)) as pgs:
        size, number = len(pgs), 3 * SMALL_SLOTS
        calls = [[np.full(count, 2.0**rank + call) for call in range(number)] for rank in range(size)]
        works = []
        for pg, arrays in zip(pgs, calls, strict=True):
            works += [pg.allreduce(array) for array in arrays]
            if native_calls_of(pg) is not None and pg.rank() < size - 1:
                assert native_calls_of(pg).count == number
                assert native_calls_of(pg).waiting >= number - SMALL_SLOTS
        async with asyncio.timeout(20):
            for work in works:
                await work
        for arrays in calls:
            for call, array in enumerate(arrays):
                assert (array == 2.0**size - 1 + size * call).all()


@pytest.mark.parametrize("job", ["NN", "NP", "PNN"])
async def test_keyed_calls_of_native_and_pure_ranks_match_in_any_order(job: str) -> None:
    async with group_of_ranks(native_ranks(job)) as pgs:
        works, keys = [], [f"layer {number}" for number in range(20)]
        for pg in pgs:
            order = keys[pg.rank() :] + keys[: pg.rank()]
            for key in order + order[::-1]:
                array = np.full(3, float(keys.index(key)))
                works.append((pg.allreduce(array, key=key), array, key))
            if native_calls_of(pg) is not None and pg.rank() == 0:
                assert native_calls_of(pg).count > 0
        for work, array, key in works:
            async with asyncio.timeout(20):
                await work
            assert work.key == key
            assert (array == len(pgs) * keys.index(key)).all()
        # Use a key again, and make one more call without a key, whose sequence number must still match.
        again = [pg.allreduce(np.ones(1), key=keys[0]) for pg in pgs]
        await asyncio.gather(*again)
        assert {work.seq for work in again} == {3}
        assert len({pg.barrier().seq for pg in pgs}) == 1
        await asyncio.gather(*(pg.drain() for pg in pgs))


@pytest.mark.parametrize("job", ["NNNN", "NPNP", "PNPN", "NPPN"])
async def test_overlapping_groups_with_native_ranks_share_links(job: str) -> None:
    """Let each rank call its groups in another order, with calls that compete for the same slots."""
    async with group_of_ranks(native_ranks(job)) as pgs:
        whole = list(pgs)
        low = await asyncio.gather(*(pg.split(0 if pg.rank() < 3 else None) for pg in pgs))
        high = await asyncio.gather(*(pg.split(0 if pg.rank() > 0 else None) for pg in pgs))
        groups = [whole, low, high]
        for group in (low, high):
            for pg, is_native_rank in zip(group, native_ranks(job), strict=True):
                if pg is not None and not is_native_rank:
                    disable_accelerator(pg)
        for pg in (pg for group in groups for pg in group if pg is not None):
            use_same_slots(pg)
        works = []
        for rank in range(4):
            for turn in range(30):
                for group in groups[(rank + turn) % 3 :] + groups[: (rank + turn) % 3]:
                    if (pg := group[rank]) is not None:
                        array = np.full(5, 2.0 ** pg.rank() + turn)
                        works.append((pg.allreduce(array), array, 2.0 ** pg.size() - 1 + pg.size() * turn))
        async with asyncio.timeout(20):
            for work, array, expected in works:
                await work
                assert (array == expected).all()
        taken = sum(is_native(work) for work, _, _ in works)
        assert 0 < taken <= len(works)
        await asyncio.gather(*(pg.shutdown() for group in (low, high) for pg in group if pg is not None))


@pytest.mark.parametrize("job", ["NN", "NP", "PN"])
async def test_native_rank_that_runs_ahead_overwrites_no_unread_slot(job: str) -> None:
    """Let the root make more broadcasts than there are slots while the other rank receives them slowly."""
    async with group_of_ranks(native_ranks(job)) as (zero, one):
        sent = [bits("uint8", count, call) for call, count in enumerate([1, 32, 33, 4096, 4097] * 40)]
        got = [np.zeros_like(array) for array in sent]

        async def root() -> None:
            for array in sent:
                await zero.broadcast(array, 0)

        async def reader() -> None:
            for array in got:
                await one.broadcast(array, 0)
                await asyncio.sleep(0)

        async with asyncio.timeout(20):
            await asyncio.gather(root(), reader())
        for expected, received in zip(sent, got, strict=True):
            assert expected.tobytes() == received.tobytes()


@pytest.mark.parametrize("job", ["NN", "NP", "PN"])
async def test_native_calls_before_links_exist_use_frames(job: str) -> None:
    async with group_of_ranks(native_ranks(job), linked=False) as pgs:
        works = [pg.allreduce(np.full(3, 2.0 ** pg.rank())) for pg in pgs for _ in range(5)]
        assert not any(map(is_native, works))
        async with asyncio.timeout(20):
            for work in works:
                assert (await work == 3).all()
        await open_links(pgs)
        later = [pg.allreduce(np.full(3, 2.0 ** pg.rank())) for pg in pgs]
        await asyncio.gather(*later)
        assert [is_native(work) for work in later] == native_ranks(job)
