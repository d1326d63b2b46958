"""Ranks that are Ray actors: processes that are killed and started again."""

from __future__ import annotations

import importlib.util
import secrets
from collections.abc import Iterator

import pytest

from .engines import Driver

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed"),
]

KINDS = pytest.mark.parametrize("kind", ["async", "blocking"])


@pytest.fixture(scope="module")
def driver() -> Iterator[Driver]:
    """Yield a driver with Ray on 127.0.0.1, without usage reports and without a token file in the home directory.

    Ray's workers have a low priority by default, with which they would hardly run while other tests do.
    """
    driver = Driver(
        "tests.integrations.ray_driver",
        RAY_USAGE_STATS_ENABLED="0",
        RAY_worker_niceness="0",
        RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER="0",
        RAY_AUTH_TOKEN=secrets.token_hex(16),
    )
    yield driver
    driver.close()


def expected_sums(n: int, value: float, steps: int) -> list[list[float]]:
    return [[value * n * (n + 1) / 2, n, steps]] * n


@KINDS
def test_readme_program_runs_unchanged_on_ray_actors(driver: Driver, kind: str) -> None:
    assert driver.call("say_hello", kind=kind) == ["[3. 3. 3.] ['rank 0', 'rank 1']\n"] * 2


@KINDS
@pytest.mark.parametrize("n", [1, 3])
def test_ray_actors_become_ranks_of_one_group(driver: Driver, kind: str, n: int) -> None:
    assert driver.call("sums", kind=kind, n=n) == [expected_sums(n, 1.0, 1), expected_sums(n, 2.0, 2)]


@pytest.mark.parametrize(
    ("kind", "n", "victim", "again"),
    [("async", 3, 0, True), ("async", 3, 2, False), ("blocking", 3, 1, True), ("blocking", 2, 0, False)],
)
def test_ray_actor_killed_during_allreduces_is_replaced(
    driver: Driver, kind: str, n: int, victim: int, again: bool
) -> None:
    """Check that the group is complete and sums correctly within 10 s after the restart of the killed actor."""
    first, second, third, seconds, replaced_numbers = driver.call("lose", kind=kind, n=n, victim=victim, again=again)
    assert first == expected_sums(n, 1.0, 1)
    assert [each[:2] for each in second] == [each[:2] for each in expected_sums(n, 1.0, 2)]
    assert [each[:2] for each in third] == [each[:2] for each in expected_sums(n, 2.0, 3)]
    assert len({steps for *_, steps in third}) == 1, "the newcomer has another state"
    assert replaced_numbers == ([] if again else [victim])
    assert seconds < 10


def test_death_reported_by_ray_lets_a_rank_on_another_host_continue(driver: Driver) -> None:
    """Give each rank a separate host id, so that rank 1 cannot confirm the death of rank 0 by itself."""
    first, _, third, _, _ = driver.call("lose", kind="alone", n=2, victim=0, again=True)
    assert first == expected_sums(2, 1.0, 1)
    assert third == expected_sums(2, 2.0, 3)


@KINDS
def test_elastic_program_continues_with_a_restarted_ray_actor(driver: Driver, kind: str) -> None:
    results, sums = driver.call("lose_in_program", kind=kind)
    assert results == [[6.0, 3, 2]] * 3
    assert [each[:2] for each in sums] == [[6.0, 3]] * 3


@KINDS
def test_several_ray_actors_lost_between_calls_are_replaced(driver: Driver, kind: str) -> None:
    assert driver.call("lose_between_calls", kind=kind) == expected_sums(3, 1.0, 2)


def test_group_is_complete_again_after_ray_has_restarted_all_actors(driver: Driver) -> None:
    assert driver.call("lose_all") == expected_sums(2, 1.0, 1)


def test_group_continues_without_a_lost_ray_actor_that_is_not_replaced(driver: Driver) -> None:
    assert driver.call("lose_for_good") == [expected_sums(2, 1.0, 2), 2]


def test_group_with_a_dead_ray_actor_is_refused(driver: Driver) -> None:
    assert "actor 1 has died and has no replacement" in driver.call("group_with_a_dead_actor")


@KINDS
def test_exception_of_a_ray_actor_is_raised_and_the_group_continues(driver: Driver, kind: str) -> None:
    assert driver.call("fail", kind=kind) == ["rank 1 does not like it", expected_sums(3, 1.0, 1)]


@KINDS
def test_closed_group_of_ray_actors_leaves_no_resources(driver: Driver, kind: str) -> None:
    before, within, after, left, message = driver.call("close", kind=kind)
    assert before == after == [[], []]
    assert within == [True, True]
    assert left == []
    assert message == "the group of actors was closed"


@KINDS
def test_cancelled_call_on_ray_actors_ends_and_the_group_continues(driver: Driver, kind: str) -> None:
    again, seconds, left, after = driver.call("cancel", kind=kind)
    assert again == expected_sums(2, 1.0, 1)
    assert seconds < 4
    assert (left, after) == ([], [[], []])


@KINDS
def test_group_of_ray_actors_cancelled_during_its_creation_leaves_no_resources(driver: Driver, kind: str) -> None:
    assert driver.call("cancel_early", kind=kind) == [[], [[], []]]


def test_group_of_ray_actors_refuses_wrong_arguments(driver: Driver) -> None:
    ending = "must be the handle of an actor whose class derives from Member or BlockingMember"
    assert driver.call("argument_errors") == [
        "actors is empty; pass at least one actor",
        f"actors[0] {ending}",
        f"actors[0] {ending}",
    ]


@pytest.mark.parametrize(("torch", "declared"), [(False, False), (True, True)], ids=["numpy-init", "torch-create"])
def test_ray_util_collective_backend_works(driver: Driver, torch: bool, declared: bool) -> None:
    if torch and importlib.util.find_spec("torch") is None:
        pytest.skip("torch is not installed")
    found, leftovers = driver.call("backend", torch=torch, declared=declared)
    reduced = [[6.0, 6.0], [6.0, 8.0], [1.0, 2.0], [3.0, 2.0]]
    for rank, results in enumerate(found):
        received = [[7.0]] if rank == 1 else []
        mine = [6.0] if rank == 1 else []
        assert results == [*reduced, mine, [2.0], [[1.0], [2.0], [3.0]], [3.0 * rank], *received]
    assert leftovers == [[]] * 3


def test_examples_of_the_ray_page_work(driver: Driver) -> None:
    totals, found = driver.call("page")
    assert totals == [4.5] * 3
    assert found == [[4.0] * 2, [1] * 2, [2.0] * 2, [3.0] * 2, [[2.0] * 2] * 2]
