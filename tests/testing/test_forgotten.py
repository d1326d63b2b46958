"""Failures of calls that a rank never retrieves, which fail its test."""

from __future__ import annotations

import inspect
import unittest
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from aiocoll import CollectiveMismatchError, HashStore, ProcessGroup, new_group
from aiocoll.testing import InProcessTestCase, run_processes, run_ranks, run_virtual, spawn_ranks
from tests.testing import jobs, samples

from ..ranks import wait_until
from .conftest import Project

pytest_plugins = ["pytester"]

ADVICE = "await these calls, or pass allow_unretrieved=True"


def line_of(function: Callable[..., Any], number: int) -> int:
    return inspect.getsourcelines(function)[1] + number


def check(error: BaseException, function: Callable[..., Any], line: int, size: int = 2) -> None:
    """Check that an error names all ranks, their call and its line."""
    *lines, advice = str(error).splitlines()
    place = f"{inspect.getfile(function)}:{line_of(function, line)}"
    assert len(lines) == size
    for rank, text in enumerate(lines):
        call = f"exception of ALLREDUCE (sequence 1) called at {place} was never retrieved: CollectiveMismatchError: "
        assert text.startswith(f"rank {rank} of {size}, group 'world:0': {call}")
    assert advice == ADVICE


async def forget_at_the_end(pg: ProcessGroup) -> None:
    pg.allreduce(np.ones(3 + pg.rank()))


async def forget_and_go_on(pg: ProcessGroup) -> str:
    pg.allreduce(np.ones(3 + pg.rank()))
    return str(await pg.wait_revoked())


@pytest.mark.parametrize("rank", [forget_at_the_end, forget_and_go_on])
async def test_unretrieved_failure_on_a_task_rank_fails_the_run(rank: Callable[..., Any]) -> None:
    with pytest.raises(AssertionError) as caught:
        await run_ranks(2, rank)
    check(caught.value, rank, 1)
    await run_ranks(2, rank, allow_unretrieved=True)


@pytest.mark.parametrize("latency", [None, (0.1, 1)])
def test_unretrieved_failure_on_a_virtual_clock_fails_the_run(latency: Any) -> None:
    with pytest.raises(AssertionError) as caught:
        run_virtual(2, forget_at_the_end, latency=latency)
    check(caught.value, forget_at_the_end, 1)
    run_virtual(2, forget_at_the_end, latency=latency, allow_unretrieved=True)


async def test_unretrieved_failure_on_a_process_rank_fails_the_run() -> None:
    with pytest.raises(AssertionError) as caught:
        await run_processes(2, jobs.forget)
    check(caught.value, jobs.forget, 2)
    assert await run_processes(2, jobs.forget, allow_unretrieved=True) == [0, 1]


async def test_unretrieved_failure_on_spawned_ranks_fails_the_test() -> None:
    with pytest.raises(AssertionError) as caught:
        await spawn_ranks(2)(forget_at_the_end)()
    check(caught.value, forget_at_the_end, 1)
    await spawn_ranks(2, allow_unretrieved=True)(forget_at_the_end)()


MARKED = """
import numpy as np
import pytest

@pytest.mark.ranks(2)
async def test_forgetting(pg):
    pg.allreduce(np.ones(3 + pg.rank()))

@pytest.mark.ranks(2, allow_unretrieved=True)
async def test_forgiving(pg):
    pg.allreduce(np.ones(3 + pg.rank()))

@pytest.mark.ranks(2, processes=True, allow_unretrieved=True)
async def test_forgiving_in_processes(pg):
    pg.allreduce(np.ones(3 + pg.rank()))
"""


def test_unretrieved_failure_fails_a_marked_test(project: Project) -> None:
    result = project.run(MARKED)
    result.assert_outcomes(passed=2, failed=1)
    result.stdout.fnmatch_lines(
        [
            "E*AssertionError: rank 0 of 2, group 'world:0': exception of ALLREDUCE (sequence 1) called at *test_it*",
            "E*rank 1 of 2, group 'world:0': exception of ALLREDUCE (sequence 1) called at *test_it.py:6 was never*",
            f"E*{ADVICE}",
        ]
    )
    result.stdout.no_fnmatch_line("*aiocoll*ranks.py:*")


async def test_failure_of_a_referenced_work_counts_as_unretrieved() -> None:
    kept = []

    async def rank(pg: ProcessGroup) -> None:
        kept.append(work := pg.recv(np.zeros(1), 1 - pg.rank(), timeout=0.01))
        await wait_until(lambda: work not in pg.pending())

    with pytest.raises(AssertionError, match="rank 1 of 2, group 'world:0': exception of RECV called at"):
        await run_ranks(2, rank)


async def test_failure_in_a_group_that_stays_open_counts_as_unretrieved() -> None:
    made: list[ProcessGroup] = []
    works = []

    async def rank(pg: ProcessGroup) -> None:
        group = await new_group(store=store, rank=0, world_size=1, name=f"of {pg.rank()}")
        made.append(group)
        works.append(group.recv(np.zeros(1), 0, timeout=0.01))
        await wait_until(lambda: not group.pending())

    async with HashStore() as store:
        with pytest.raises(AssertionError, match="rank 0 of 2, group 'of 0': exception of RECV called at"):
            await run_ranks(2, rank)
        for group in made:
            await group.shutdown()


async def test_retrieved_failures_do_not_fail_a_test() -> None:
    async def rank(pg: ProcessGroup) -> None:
        works = [pg.allreduce(np.ones(3 + pg.rank())) for _ in range(3)]
        with pytest.raises(CollectiveMismatchError):
            await works[1]

    await run_ranks(2, rank)


async def test_error_raised_by_a_peer_takes_precedence_over_unretrieved_failures() -> None:
    """Abort the group by an error; the resulting failures of other ranks must not be reported."""

    async def rank(pg: ProcessGroup) -> None:
        if pg.rank() == 1:
            await pg.recv_object(0)
            raise LookupError("lost")
        pg.allreduce(1)
        await pg.send_object("go", 1)
        await pg.wait_revoked()

    with pytest.raises(LookupError, match="lost") as caught:
        await run_ranks(2, rank)
    assert caught.value.__notes__ == ["rank 1 of 2 failed first"]


async def test_skip_raised_by_a_peer_takes_precedence_over_unretrieved_failures() -> None:
    async def rank(pg: ProcessGroup) -> None:
        if pg.rank() == 1:
            await pg.recv_object(0)
            raise unittest.SkipTest("not here")
        pg.allreduce(1)
        await pg.send_object("go", 1)
        await pg.wait_revoked()

    with pytest.raises(unittest.SkipTest, match="not here"):
        await run_ranks(2, rank)


async def test_error_of_a_peer_has_a_note_about_the_unretrieved_failure() -> None:
    async def rank(pg: ProcessGroup) -> None:
        work = pg.allreduce(np.ones(3 + pg.rank()))
        if pg.rank() == 1:
            await work

    with pytest.raises(CollectiveMismatchError) as caught:
        await run_ranks(2, rank)
    first, second = caught.value.__notes__
    assert first == "rank 1 of 2 failed first"
    assert second.startswith("rank 0 of 2, group 'world:0': exception of ALLREDUCE (sequence 1) called at ")


async def test_unretrieved_failures_of_groups_outside_of_the_run_are_ignored() -> None:
    """Leave a failure in a group that no rank of the run has created."""

    async def rank(pg: ProcessGroup) -> int:
        return pg.rank()

    async with HashStore() as store, new_group(store=store, rank=0, world_size=1) as group:
        group.recv(np.zeros(1), 0, timeout=0.01)
        await wait_until(lambda: not group.pending())
        assert await run_ranks(2, rank) == [0, 1]


class Forgetting(InProcessTestCase):
    world_size = 2

    async def test_failing_call_is_forgotten(self) -> None:
        await forget_at_the_end(self.pg)


class Forgiving(Forgetting):
    allow_unretrieved = True


del InProcessTestCase  # pytest must collect neither the base class nor these classes
Forgetting.__test__ = Forgiving.__test__ = False  # type: ignore[attr-defined]


def failures_of(cls: type[unittest.TestCase]) -> dict[str, str]:
    """Run the tests of a class; return the texts of failed tests."""
    result = unittest.TestResult()
    unittest.defaultTestLoader.loadTestsFromTestCase(cls).run(result)
    assert not result.errors
    return {case.id().rpartition(".")[2]: text for case, text in result.failures}


def test_unretrieved_failure_fails_a_test_of_a_test_case_class() -> None:
    failed = failures_of(Forgetting)
    assert failed.keys() == {"test_failing_call_is_forgotten"}
    assert (
        "rank 1 of 2, group 'world:0': exception of ALLREDUCE (sequence 1) called at"
        in failed["test_failing_call_is_forgotten"]
    )
    assert failures_of(Forgiving) == {}


def test_unretrieved_failure_fails_its_own_test_on_continuous_ranks() -> None:
    """Check that a failure of a pending call is not reported for the next test."""
    failed = failures_of(samples.ContinuousForgetting)
    assert failed.keys() == {
        "test_1_forgotten_mismatch_revokes_the_group",
        "test_2_forgotten_mismatch_is_pending_at_the_end",
    }
    for name, text in failed.items():
        assert text.count("exception of ALLREDUCE") == 2, name
        assert ADVICE in text
