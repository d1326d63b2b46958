"""The test case classes under unittest: where each step runs, and the reported outcomes."""

from __future__ import annotations

import os
import subprocess
import sys
import unittest
from pathlib import Path

import pytest

from tests.testing import samples

from ..internals import Limits

pytestmark = pytest.mark.usefixtures("frames_of_users")

ROOT = Path(__file__).parents[2]


def run(*cases: unittest.TestCase) -> unittest.TestResult:
    """Run test cases in a unittest suite; return the result."""
    result = unittest.TestResult()
    unittest.TestSuite(cases).run(result)
    return result


def run_all(cls: type[unittest.TestCase]) -> unittest.TestResult:
    """Run all tests of a test case class; return the result."""
    return run(*unittest.defaultTestLoader.loadTestsFromTestCase(cls))


def words(outcomes: list[tuple[unittest.TestCase, str]]) -> dict[str, str]:
    return {case.id().rpartition(".")[2]: text for case, text in outcomes}


def test_rank_runs_all_setup_and_teardown_steps_of_a_test_case() -> None:
    samples.seen.clear()
    result = run_all(samples.Steps)
    assert (result.testsRun, result.wasSuccessful()) == (1, True)
    assert samples.seen == [
        "setUpClass",
        *("setUp", "asyncSetUp", "test", "asyncTearDown", "tearDown", "async cleanup", "cleanup"),
    ]


@pytest.mark.slow
@pytest.mark.parametrize("cls", [samples.InProcess, samples.MultiProcess])
def test_outcome_of_a_test_equals_the_outcome_of_its_ranks(cls: type[unittest.TestCase]) -> None:
    result = run_all(cls)
    # Python 3.12.1 does not count tests that a decorator skips; all other releases count them.
    assert result.testsRun == (8 if sys.version_info[:3] == (3, 12, 1) else 9)
    assert words(result.skipped) == {
        "test_skip_on_rank_1_skips_the_test": "not here",
        "test_world_below_4_ranks_skips_the_test": "needs at least 4 ranks, the world has 3",
        "test_skip_decorator_skips_the_test": "not today",
    }
    assert [case.id().rpartition(".")[2] for case, _ in result.expectedFailures] == ["test_failure_is_expected"]
    failures, errors = words(result.failures), words(result.errors)
    assert failures.keys() == {"test_unequal_values_on_rank_1_fail"}
    assert errors.keys() == {"test_key_error_on_rank_2_is_an_error", "test_returned_value_is_an_error"}
    assert 'self.assertEqual(1, 2, "unlucky")' in failures["test_unequal_values_on_rank_1_fail"]
    assert "AssertionError: 1 != 2 : unlucky" in failures["test_unequal_values_on_rank_1_fail"]
    assert failures["test_unequal_values_on_rank_1_fail"].endswith("rank 1 of 3 failed first\n")
    assert "in the part second, n=2" in errors["test_key_error_on_rank_2_is_an_error"]
    assert 'raise KeyError("lost")' in errors["test_key_error_on_rank_2_is_an_error"]
    assert "TypeError: a test must return None, not int" in errors["test_returned_value_is_an_error"]
    for text in (*failures.values(), *errors.values()):
        assert "aiocoll/testing/team.py" not in text
        assert "asyncio/runners.py" not in text


def test_each_test_starts_separate_processes() -> None:
    result = run_all(samples.OwnProcesses)
    assert (result.testsRun, len(result.errors)) == (2, 1)
    text = words(result.errors)["test_key_error_on_rank_1_is_an_error"]
    # The report must show no traceback except the traceback of the failed rank.
    assert text.count("Traceback") == 1
    assert text.index("KeyError: 'lost'\nits traceback on rank 1 of 2:\nTraceback") < text.index(
        "in test_key_error_on_rank_1_is_an_error"
    )


@pytest.mark.slow
def test_processes_of_continuous_ranks_are_reused_by_the_next_test(limits: Limits) -> None:
    limits(testing_release_timeout=0.5)
    result = run_all(samples.Continuous)
    assert result.testsRun == 7
    assert not result.failures
    errors = words(result.errors)
    assert errors.keys() == {"test_2_process_and_group_are_reused_until_rank_1_fails", "test_6_rank_2_is_killed"}
    assert "KeyError: 'lost'" in errors["test_2_process_and_group_are_reused_until_rank_1_fails"]
    assert (
        "ranks 0 and 2 of 3 continued, and had to be stopped"
        in errors["test_2_process_and_group_are_reused_until_rank_1_fails"]
    )
    assert "rank 2 of 3 was killed by SIGKILL" in errors["test_6_rank_2_is_killed"]


def test_exit_of_a_task_rank_passes_its_test_only_with_code_0() -> None:
    result = run_all(samples.PortedInProcess)
    assert result.testsRun == 3
    ((case, text),) = result.errors
    assert case.id().endswith("test_exit_with_code_86_is_an_error")
    assert "SystemExit: 86" in text
    assert "to skip it, call self.skipTest(reason)" in text


@pytest.mark.slow
def test_exit_of_a_process_rank_passes_its_test_only_with_code_0() -> None:
    result = run_all(samples.Ported)
    assert result.testsRun == 3
    ((case, text),) = result.errors
    assert case.id().endswith("test_exit_with_code_86_is_an_error")
    assert "rank 0 of 2 raised SystemExit: 86" in text
    assert "to skip it, call self.skipTest(reason)" in text


@pytest.mark.slow
def test_deaths_expected_by_a_test_class_are_not_failures() -> None:
    result = run_all(samples.Dying)
    assert result.testsRun == 3
    ((case, text),) = result.errors
    assert case.id().endswith("test_rank_1_lives_unexpectedly")
    assert "rank 1 of 2 returned" in text
    assert "rank 1 of 2 was expected to be killed by SIGKILL" in text


def test_expected_death_of_continuous_ranks_is_refused() -> None:
    ((_, text),) = run_all(samples.ContinuousDying).errors
    assert "ValueError: expect_death needs new processes for each test; set continuous = False" in text


def test_hanging_test_is_reported_and_ended() -> None:
    cases = [
        samples.Hanging(name)
        for name in ("test_0_barrier_completes", "test_1_rank_1_hangs", "test_2_barrier_completes_after_a_hang")
    ]
    cases[1].timeout = 0.5
    result = run(*cases)
    assert result.testsRun == 3
    assert not result.failures
    errors = words(result.errors)
    assert errors.keys() == {"test_1_rank_1_hangs"}
    first, second = errors["test_1_rank_1_hangs"].split("rank 1 (process ")
    assert "TimeoutError: ranks 0 and 1 of 2 did not end within 0.5 s\nrank 0 (process " in first
    assert "pending: <Work BARRIER" in first
    assert "await self.pg.barrier()" in first
    assert "await asyncio.Event().wait()" in second


def test_skipped_class_starts_no_ranks() -> None:
    result = run_all(samples.Odd)
    assert [text for _, text in result.skipped] == ["needs an even number of ranks, the world has 3"]


def test_error_names_a_test_class_whose_setup_starts_no_ranks() -> None:
    ((_, text),) = run_all(samples.Forgetful).errors
    assert "Forgetful.setUpClass must call super().setUpClass(), which starts the ranks" in text


def test_debug_method_of_a_test_case_raises_the_error_of_the_rank() -> None:
    with pytest.raises(KeyError, match="lost"):
        samples.InProcess("test_key_error_on_rank_2_is_an_error").debug()


def test_unittest_runs_a_script_of_test_cases(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "-W", "error", str(script)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stderr.startswith("FEs\n===="), done.stderr
    # The report of a failed rank contains the error of the rank only.
    error, failed = done.stderr.split("=" * 70)[1:]
    assert failed.count("  File ") == 1
    assert "assert await self.pg.allreduce(1) == 3" in failed
    assert error.count("  File ") == 1
    assert "it cannot be" in error


SCRIPT = """
import unittest
from aiocoll.testing import InProcessTestCase, MultiProcessTestCase, requires_module

class A(InProcessTestCase):
    world_size = 2
    async def test_sum(self):
        assert await self.pg.allreduce(1) == 3

class B(MultiProcessTestCase):
    @property
    def world_size(self):
        return 2
    continuous = True
    async def test_error(self):
        raise Odd("it cannot be")
    @requires_module("no_such_module")
    async def test_skip(self):
        pass

class Odd(Exception):
    pass

if __name__ == "__main__":
    unittest.main()
"""
