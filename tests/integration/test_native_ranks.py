"""Jobs in which only some processes use the accelerator in C: the results equal the results of pure Python jobs."""

from __future__ import annotations

import asyncio
import signal
import time
import zlib
from typing import Any

import numpy as np
import pytest

from aiocoll import CollectiveMismatchError, GroupError, GroupOptions, PeerLostError, ProcessGroup
from aiocoll.native import core, describe_implementation
from aiocoll.testing import run_processes

from ..internals import is_native, native_calls_of, wrap_parts
from ..native.cases import DTYPES, cases, counts

#: Jobs, one letter per rank: N if the rank uses the accelerator (native), P for pure Python.
JOBS = ("NP", "PN", "NN", "NPN", "PNNP")


def jobs(fast: int) -> list[Any]:
    """Return test parameters for all jobs, with a slow mark on all except the first `fast` jobs."""
    return [pytest.param(job, marks=[pytest.mark.slow] * (place >= fast)) for place, job in enumerate(JOBS)]


SHM = GroupOptions(transport="shm")


@pytest.fixture(autouse=True)
def _accelerator() -> None:
    """Skip a test where the accelerator is not available."""
    if core is None:
        pytest.skip(f"the accelerator in C does not run: {describe_implementation()}")


@pytest.fixture
def set_job(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that makes each process of a job use the implementation that its letter names."""

    def choose(job: str) -> None:
        def environment(original: Any, rank: int, *args: Any) -> dict[str, str]:
            return {**original(rank, *args), "AIOCOLL_NATIVE": "1" if job[rank] == "N" else "0"}

        wrap_parts(monkeypatch, rank_environment=environment)

    return choose


async def result_digests(pg: ProcessGroup, places: list[int]) -> tuple[bool, int, int, int]:
    """Call all small collectives; return whether the rank is native, a digest of the results, and two call counts."""
    digest = native = number = 0
    await pg.allgather(None, np.zeros(1))
    with np.errstate(all="ignore"):
        for place in places:
            dtype = DTYPES[place % len(DTYPES)]
            sizes = counts(pg.size(), dtype)
            for case in cases(pg.size(), dtype, sizes[place % len(sizes)]):
                work, arrays = case.call(pg)
                await work
                native, number = native + is_native(work), number + case.plain
                for array in arrays:
                    digest = zlib.crc32(array.tobytes(), digest)
    return native_calls_of(pg) is not None, digest, native, number


@pytest.mark.parametrize("job", jobs(2))
async def test_native_and_pure_python_processes_together_give_the_results_of_pure_python_jobs(
    job: str, set_job: Any
) -> None:
    size, start = len(job), JOBS.index(job)
    places = list(range(start, len(DTYPES), len(JOBS)))
    set_job(job)
    mixed = await run_processes(size, result_digests, places, options=SHM)
    set_job("P" * size)
    pure = await run_processes(size, result_digests, places, options=SHM)
    assert [each[0] for each in mixed] == [letter == "N" for letter in job]
    assert [each[1] for each in mixed] == [each[1] for each in pure]
    for (runs_natively, _, native, number), letter in zip(mixed, job, strict=True):
        assert runs_natively is (letter == "N")
        # Python carries out some calls of a native rank, since this rank or a peer has no free slot.
        assert native > number / 2 if runs_natively else native == 0


async def complete_calls_in_flight(pg: ProcessGroup) -> int:
    """Await many calls in random order, some of them with keys; return the number of native calls.

    The number depends on timing: frames of a pure rank without a free slot may arrive first.
    """
    rng = np.random.default_rng(pg.rank())
    keys = [f"key {number}" for number in rng.permutation(100)]
    native = 0
    for turn in range(5):
        await pg.barrier()
        # Count a call without other calls in flight: such a call is native whatever the other ranks do.
        alone = pg.allreduce(np.ones(3))
        await alone
        native += is_native(alone)
        calls = [
            (pg.allreduce(array := np.full(7, float(number + turn))), array, number + turn) for number in range(200)
        ]
        calls += [(pg.allreduce(array := np.full(3, float(key[4:])), key=key), array, int(key[4:])) for key in keys]
        for place in rng.permutation(len(calls)):
            work, array, value = calls[place]
            assert await work is array
            assert (array == value * pg.size()).all()
        native += sum(is_native(work) for work, _, _ in calls)
    return native


@pytest.mark.parametrize("job", jobs(1))
async def test_native_and_pure_python_processes_together_support_many_concurrent_calls(job: str, set_job: Any) -> None:
    set_job(job)
    native = await run_processes(len(job), complete_calls_in_flight, options=SHM)
    assert [each > 0 for each in native] == [letter == "N" for letter in job]


async def disagree(pg: ProcessGroup) -> str:
    await pg.allreduce(np.ones(3))
    await pg.barrier()
    loop = asyncio.get_running_loop()
    start = loop.time()
    work = pg.allreduce(np.ones(3)) if pg.rank() != 1 else pg.broadcast(np.ones(3), 0)
    with pytest.raises(CollectiveMismatchError) as raised:
        await work
    assert loop.time() - start < 1.5  # the contract is 1 s on an idle machine
    return str(raised.value)


@pytest.mark.parametrize("job", jobs(1))
async def test_native_and_pure_python_processes_together_report_mismatches(job: str, set_job: Any) -> None:
    set_job(job)
    for text in await run_processes(2, disagree, options=SHM, allow_unretrieved=True):
        assert "ALLREDUCE" in text
        assert "BROADCAST" in text


async def lose_rank(pg: ProcessGroup) -> str:
    await pg.allreduce(np.ones(3))
    await pg.barrier()
    if pg.rank() == 1:
        signal.raise_signal(signal.SIGKILL)
    work = pg.allreduce(np.ones(3))
    with pytest.raises(GroupError) as raised:
        await work
    assert isinstance(raised.value, PeerLostError)
    return str(raised.value)


@pytest.mark.parametrize("job", jobs(2))
async def test_native_and_pure_python_processes_together_report_a_killed_rank(job: str, set_job: Any) -> None:
    set_job(job)
    results = await run_processes(
        len(job), lose_rank, options=SHM, expect_death={1: signal.SIGKILL}, allow_unretrieved=True
    )
    for rank, text in enumerate(results):
        if rank != 1:
            assert "rank 1" in text


async def count_turns_of_other_task(pg: ProcessGroup) -> tuple[int, float, int]:
    """Make calls whose awaits poll on rank 0, since rank 1 is late; return how often another task ran."""
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    await pg.allgather(None, np.zeros(1))
    await pg.barrier()
    task, start, native = asyncio.ensure_future(count()), time.perf_counter(), 0
    for _ in range(3000):
        late = time.perf_counter() + 10e-6
        while pg.rank() == 1 and time.perf_counter() < late:
            pass
        work = pg.allreduce(np.ones(1))
        await work
        native += is_native(work)
    took = time.perf_counter() - start
    task.cancel()
    return turns, took, native


async def test_other_tasks_run_between_calls_that_end_during_polling_awaits() -> None:
    """Check that a loop that is never idle completes an iteration at least every 500 µs."""
    for turns, took, native in await run_processes(2, count_turns_of_other_task, options=SHM):
        assert native > 2000
        assert turns > took / 500e-6 / 4, took
