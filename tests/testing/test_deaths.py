"""Ranks that are expected to die, by `expect_death`."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

import pytest

import aiocoll
from aiocoll import ProcessGroup
from aiocoll.testing import run_processes, spawn_ranks

from ..internals import Limits
from .conftest import Project

pytest_plugins = ["pytester"]

KILLED = {2: signal.SIGKILL}


async def survive(pg: ProcessGroup, how: str, dying: int = 2) -> Any:
    """Let one rank die; the other ranks continue without it."""
    if pg.rank() == dying:
        match how:
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "exit":
                os._exit(7)
            case "exit well":
                os._exit(0)
            case "sys.exit":
                sys.exit(7)
            case "raise":
                raise LookupError("not dead")
            case "return":
                return "alive"
    try:
        await pg.barrier()
    except aiocoll.GroupError:
        if how == "sys.exit":
            return how
        async with await pg.shrink() as survivors:
            return await survivors.allreduce(pg.rank())
    return "no rank died"


@pytest.mark.parametrize(
    ("how", "death"),
    [
        ("kill", signal.SIGKILL),
        pytest.param("exit", 7, marks=pytest.mark.slow),
        pytest.param("exit well", 0, marks=pytest.mark.slow),
    ],
)
async def test_expected_death_is_returned_as_the_result_of_its_rank(how: str, death: Any) -> None:
    results = await run_processes(3, survive, how, expect_death={2: death})
    assert results == [1, 1, death]
    assert type(results[2]) is type(death)


@pytest.mark.slow
async def test_sys_exit_counts_as_a_death_with_its_exit_code() -> None:
    assert await run_processes(2, survive, "sys.exit", 1, expect_death={1: 7}) == ["sys.exit", 7]


@pytest.mark.slow
async def test_all_ranks_can_be_expected_to_die() -> None:
    assert await run_processes(1, survive, "kill", 0, expect_death={0: signal.SIGKILL}) == [signal.SIGKILL]


@pytest.mark.parametrize(
    ("how", "error", "text"),
    [
        ("return", ChildProcessError, "rank 2 of 3 returned"),
        pytest.param("exit", ChildProcessError, "rank 2 of 3 exited with code 7", marks=pytest.mark.slow),
        pytest.param("exit well", ChildProcessError, "rank 2 of 3 exited with code 0 before", marks=pytest.mark.slow),
        pytest.param("raise", LookupError, "not dead", marks=pytest.mark.slow),
    ],
)
async def test_unexpected_end_of_a_rank_fails_with_an_error_that_names_the_expected_end(
    how: str, error: type[Exception], text: str, limits: Limits
) -> None:
    with pytest.raises(error, match=text) as caught:
        await run_processes(3, survive, how, expect_death=KILLED)
    *_, expected, first = [note for note in caught.value.__notes__ if "continued" not in note]
    assert expected == "rank 2 of 3 was expected to be killed by SIGKILL"
    assert first == "rank 2 of 3 failed first"


@pytest.mark.slow
async def test_death_by_a_signal_differs_from_an_exit_code_with_the_signal_number() -> None:
    with pytest.raises(ChildProcessError, match=r"rank 1 of 2 was killed by SIGKILL") as caught:
        await run_processes(2, survive, "kill", 1, expect_death={1: 9})
    assert "rank 1 of 2 was expected to exit with code 9" in caught.value.__notes__


async def fail_on_rank_0(pg: ProcessGroup) -> None:
    if pg.rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    raise LookupError("a survivor")


@pytest.mark.slow
async def test_failure_of_a_rank_without_an_expected_death_fails_the_run() -> None:
    with pytest.raises(LookupError, match="a survivor") as caught:
        await run_processes(2, fail_on_rank_0, expect_death={1: signal.SIGKILL})
    assert "rank 0 of 2 failed first" in caught.value.__notes__


@pytest.mark.parametrize(
    ("deaths", "error", "message"),
    [
        ([2], TypeError, r"expect_death must be like \{2: signal.SIGKILL\}, not list"),
        ({3: signal.SIGKILL}, ValueError, "3 is not one of 3 ranks, 0 to 2"),
        ({-1: signal.SIGKILL}, ValueError, "-1 is not one of 3 ranks"),
        ({2: "SIGKILL"}, TypeError, "give a signal, like signal.SIGKILL, or an exit code, for rank 2"),
        ({2: True}, TypeError, "give a signal"),
        ({2: -9}, ValueError, "-9 is not an exit code; give a signal as signal.SIGKILL"),
        ({2: 256}, ValueError, "256 is not an exit code"),
    ],
)
async def test_impossible_expected_death_is_refused(deaths: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        await run_processes(3, survive, "kill", expect_death=deaths)


def test_expected_death_of_a_task_rank_is_refused() -> None:
    with pytest.raises(ValueError, match="expect_death: ranks that are tasks cannot die; add processes=True"):
        spawn_ranks(3, expect_death=KILLED)


MARKED = """
import os, signal
import pytest
import aiocoll
from aiocoll.testing import spawn_ranks

async def die(pg, rank):
    if pg.rank() == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(aiocoll.GroupError):
        await pg.barrier()

@pytest.mark.ranks(2, processes=True, expect_death={1: signal.SIGKILL})
@pytest.mark.parametrize("dies", [True, False])
async def test_survivor(pg, dies):
    if dies:
        await die(pg, 1)

@pytest.mark.asyncio
@spawn_ranks(2, processes=True, expect_death={0: signal.SIGKILL})
async def test_spawned(pg):
    await die(pg, 0)
"""

WRONG = """
import signal
import pytest
from hypothesis import given, strategies as st
"""
WRONG_MARKS = {
    "2, expect_death={1: signal.SIGKILL})": "expect_death needs processes=True; no other rank can die",
    "2, 3, processes=True, expect_death={2: signal.SIGKILL})": "2 is not one of 2 ranks, 0 to 1",
    "2, processes=True, expect_death={1: 7})\n@given(x=st.none())": "expect_death is not for @given",
}


@pytest.mark.slow
def test_pytest_mark_can_expect_deaths_of_ranks(project: Project) -> None:
    result = project.run(MARKED)
    result.assert_outcomes(passed=2, failed=1)
    result.stdout.fnmatch_lines(
        [
            "*test_survivor*False*",
            "E*ChildProcessError: rank 1 of 2 returned",
            "E*rank 1 of 2 was expected to be killed by SIGKILL",
            "E*rank 1 of 2 failed first",
        ]
    )
    result.stdout.no_fnmatch_line("*aiocoll/testing*")


@pytest.mark.slow
def test_error_says_why_the_expected_death_of_a_pytest_mark_is_impossible(
    project: Project, pytester: pytest.Pytester
) -> None:
    for number, mark in enumerate(WRONG_MARKS):
        given = ", x" if "given" in mark else ""
        test = f"@pytest.mark.ranks({mark}\nasync def test_it(pg{given}): pass\n"
        pytester.makepyfile(**{f"test_wrong_{number}": WRONG + test})
    result = project.run("")
    result.assert_outcomes(errors=len(WRONG_MARKS))
    for message in WRONG_MARKS.values():
        assert message in result.stdout.str()
