"""Ranks on the workers of a Dask cluster: processes that are killed, retired, and started again by their nannies."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

from .engines import Driver

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("distributed") is None, reason="Dask (distributed) is not installed"),
]


@pytest.fixture(scope="module")
def driver() -> Iterator[Driver]:
    driver = Driver("tests.integrations.dask_driver")
    yield driver
    driver.close()


def test_readme_program_runs_unchanged_on_dask_workers(driver: Driver) -> None:
    assert driver.call("say_hello") == ["[3. 3. 3.] ['rank 0', 'rank 1']\n"] * 2


@pytest.mark.parametrize("blocking", [False, True], ids=["coroutine", "function"])
@pytest.mark.parametrize("n", [1, 3])
def test_each_rank_runs_on_a_separate_dask_worker(driver: Driver, n: int, blocking: bool) -> None:
    assert driver.call("sums", n=n, blocking=blocking) == [1.5 * n] * n


def test_synchronous_dask_client_can_run_ranks(driver: Driver) -> None:
    assert driver.call("from_another_client") == [4.0, 4.0]


def test_dask_workers_can_be_threads_of_one_process(driver: Driver) -> None:
    assert driver.call("in_one_process") == [4.0, 4.0]


@pytest.mark.parametrize("victim", [0, 2])
def test_killed_dask_worker_is_replaced(driver: Driver, victim: int, tmp_path: Path) -> None:
    """Check that the group is complete within 10 s after Dask's nanny has restarted the killed worker."""
    results, seconds, restarts = driver.call("lose", folder=str(tmp_path), n=3, victim=victim, alone=False)
    assert results == [[2, 3, [7.0]]] * 3
    assert restarts == 1
    assert seconds < 10


def test_spare_dask_worker_replaces_a_lost_worker(driver: Driver, tmp_path: Path) -> None:
    results, _, _ = driver.call("lose", folder=str(tmp_path), n=2, victim=1, alone=False)
    assert results == [[2, 2, [3.0]]] * 2


def test_death_reported_by_dask_lets_a_rank_on_another_host_continue(driver: Driver, tmp_path: Path) -> None:
    """Give each rank a separate host id, so that rank 1 cannot confirm the death of rank 0 by itself."""
    results, _, _ = driver.call("lose", folder=str(tmp_path), n=2, victim=0, alone=True)
    assert results == [[2, 2, [3.0]]] * 2


def test_program_without_recovery_fails_after_the_loss_of_a_dask_worker(driver: Driver, tmp_path: Path) -> None:
    message, leftovers = driver.call("lose_a_rank_of_a_plain_program", folder=str(tmp_path))
    assert "rank 1 of group 'world:0' is gone" in message
    assert leftovers == [[]] * 3


@pytest.mark.parametrize("how", ["waits", "sleeps"])
def test_exception_on_one_rank_ends_the_dask_run(driver: Driver, how: str) -> None:
    message, left, leftovers = driver.call("fail", how=how)
    assert message == "rank 1 does not like it"
    assert (left, leftovers) == ([], [[]] * 3)


@pytest.mark.parametrize("blocking", [False, True], ids=["coroutine", "function"])
def test_cancelled_dask_run_leaves_no_resources(driver: Driver, blocking: bool, tmp_path: Path) -> None:
    seconds, left, leftovers = driver.call("cancel", folder=str(tmp_path), blocking=blocking)
    assert seconds < 4  # a run that waited for a timeout would take longer
    assert (left, leftovers) == ([], [[]] * 3)


def test_dask_run_cancelled_before_its_start_leaves_no_resources(driver: Driver) -> None:
    assert driver.call("cancel_early") == []


def test_dask_run_waits_until_the_cluster_has_enough_workers(driver: Driver) -> None:
    assert driver.call("grow_until_there_are_enough") == [4.0] * 4


def test_scale_down_of_a_dask_cluster_ends_ranks_and_the_other_ranks_continue(driver: Driver, tmp_path: Path) -> None:
    assert driver.call("scale_down", folder=str(tmp_path)) == [[2, 2], 1]


def test_dask_run_refuses_wrong_arguments(driver: Driver) -> None:
    assert driver.call("argument_errors") == [
        "program must be a function, not int",
        "n=0: must be positive",
        "n must be an int, not bool",
        "n must be an int, not str",
    ]


def test_examples_of_the_dask_page_work(driver: Driver) -> None:
    assert driver.call("page") == [[4.5] * 3, [300.0] * 3]
