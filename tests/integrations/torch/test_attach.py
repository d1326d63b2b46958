"""Tests of `aiocoll.torch.attach`, which makes torch groups for threads from an aiocoll group."""

from __future__ import annotations

from typing import Any

import pytest

from .ranks import run_launched

pytest.importorskip("torch", reason="needs torch")

pytestmark = [pytest.mark.torch, pytest.mark.slow]

SIZE = 2


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Run `attached.py` on two ranks, and return the results of each rank."""
    launcher = ["-m", "aiocoll", "run", "-n", str(SIZE)]
    return run_launched(launcher, "attached.py", SIZE, tmp_path_factory.mktemp("attached"))


def test_ddp_trains_in_a_thread_while_the_loop_makes_calls(results: list[dict[str, Any]]) -> None:
    for rank, found in enumerate(results):
        assert found["gradient"] == [[1.5, 1.5]]  # the average of the inputs 1 and 2
        assert found["names"] == ["rank 0", "rank 1"]
        assert found["same group"]
        assert found["value"] == f"value {1 - rank}"
        assert found["sum over itself"] == 1.0


def test_second_attached_torch_group_carries_calls(results: list[dict[str, Any]]) -> None:
    assert [found["total of a second group"] for found in results] == [3.0, 3.0]


def test_end_of_the_attach_block_destroys_only_the_torch_group(results: list[dict[str, Any]]) -> None:
    for found in results:
        assert found["initialized after the block"] is False
        assert found["total after the block"] == 3.0


def test_torch_wait_on_the_event_loop_thread_is_refused(results: list[dict[str, Any]]) -> None:
    for found in results:
        assert found["on the loop"].startswith(
            "RuntimeError: this wait would block the event loop that completes the call"
        )


def test_attach_refuses_a_group_whose_size_differs_from_torchs_default_group(results: list[dict[str, Any]]) -> None:
    for rank, found in enumerate(results):
        assert found["other size"].startswith("ValueError: group 'world:0/")
        assert f"has rank 0 of 1 here, but torch's default group has rank {rank} of 2" in found["other size"]


def test_attach_refuses_closed_and_failed_groups(results: list[dict[str, Any]]) -> None:
    for rank, found in enumerate(results):
        assert found["closed"] == "GroupClosedError: group 'world:0' was closed by this rank"
        assert found["failed"].startswith(f"GroupRevokedError: group 'world:0' on rank {rank} was revoked")


def test_attach_block_raises_the_group_failure_instead_of_the_torch_error(results: list[dict[str, Any]]) -> None:
    for found in results:
        assert found["mismatch"].startswith("CollectiveMismatchError: Collectives differ")
        assert found["in the block"] == "RuntimeError: of the program"
