"""Groups of torch programs under both launchers: subgroups, options, timeouts."""

from __future__ import annotations

from typing import Any

import pytest

from .ranks import run_launched

pytest.importorskip("torch", reason="needs torch")

pytestmark = [pytest.mark.torch, pytest.mark.slow]

SIZE = 3
LAUNCHERS = {
    "torchrun": ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(SIZE)],
    "aiocoll run": ["-m", "aiocoll", "run", "-n", str(SIZE)],
}


@pytest.fixture(scope="module", params=sorted(LAUNCHERS))
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Run `groups.py` under a launcher, and return the results of each rank."""
    return run_launched(LAUNCHERS[request.param], "groups.py", SIZE, tmp_path_factory.mktemp("groups"))


def test_torch_subgroup_is_created_by_its_members_in_the_given_order(results: list[dict[str, Any]]) -> None:
    assert "broadcast" not in results[1]
    for rank, place in ((0, 1), (2, 0)):
        assert results[rank]["rank in pair"] == place
        assert results[rank]["broadcast"] == [2, 2]
        assert results[rank]["gathered"] == [2, 0]
        assert results[rank]["global ranks"] == [2, 0]


def test_options_of_a_torch_subgroup_take_effect(results: list[dict[str, Any]]) -> None:
    for found in results:
        assert found["cause"] == "CollectiveMismatchError"
        assert found["total after the mismatch"] == [3.0, 3.0, 3.0]


def test_pg_options_of_a_wrong_type_are_refused_by_new_group(results: list[dict[str, Any]]) -> None:
    for found in results:
        assert found["wrong options"] == "pg_options must be aiocoll.GroupOptions or None, not str"


def test_set_timeout_of_torch_changes_the_timeout_of_the_aiocoll_group(results: list[dict[str, Any]]) -> None:
    for found in results:
        assert found["timeouts"] == [7.0, 2.5]


def test_gather_single_collects_all_blocks_in_one_tensor_of_the_root(results: list[dict[str, Any]]) -> None:
    expected = [[], [0.0, 0.0, 1.0, 1.0, 2.0, 2.0], []]
    assert [found["gathered in one tensor"] for found in results] == expected
