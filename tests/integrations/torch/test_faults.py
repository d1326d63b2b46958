"""Errors of torch programs, which name the fault on every rank within a second."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from .ranks import last_json, run_ranks

pytest.importorskip("torch", reason="needs torch")

pytestmark = [pytest.mark.torch, pytest.mark.slow]

SIZE = 2


def outcomes(case: str, folder: Path) -> list[dict[str, Any]]:
    """Run a case of `faults.py`; return the error that each rank prints, or {} for a killed rank."""
    return [last_json(printed) for printed in run_ranks("faults", case, SIZE, folder)]


def test_rank_killed_during_ddp_training_is_named_within_a_second(tmp_path: Path) -> None:
    left, killed = outcomes("killed", tmp_path)
    assert killed == {}
    # torch's C++ code forwards the text of the error, but not its class.
    assert left["error"] == "RuntimeError"
    assert "DistBackendError: [Rank 0] Connection closed by peer: all_reduce failed: rank 1 " in left["text"]
    assert left["seconds"] < 1.0


def test_error_for_different_tensor_shapes_names_both_shapes_on_both_ranks(tmp_path: Path) -> None:
    for rank, found in enumerate(outcomes("other_shapes", tmp_path)):
        assert found["error"] == "DistBackendError"
        assert found["cause"] == "CollectiveMismatchError"
        assert found["text"].startswith(f"[Rank {rank}] all_reduce failed")
        assert "rank 0 called ALLREDUCE(shape=[3]" in found["text"]
        assert "rank 1 called ALLREDUCE(shape=[4]" in found["text"]
        assert found["seconds"] < 1.0


@pytest.mark.parametrize("case", ["timeout_of_a_call", "timeout_that_is_set"])
def test_torch_operation_ends_at_the_timeout_of_its_group(case: str, tmp_path: Path) -> None:
    found, _ = outcomes(case, tmp_path)
    assert found["error"] == "DistBackendError"
    assert found["cause"] == "CollectiveTimeoutError"
    assert 0.3 <= found["seconds"] < 2.0


def test_torch_wait_ends_at_its_timeout_and_the_receive_continues(tmp_path: Path) -> None:
    found, _ = outcomes("timeout_of_a_wait", tmp_path)
    assert found["error"] == "DistBackendError"
    assert "Operation timed out!" in found["text"]


def test_error_names_the_unsupported_device_of_a_tensor(tmp_path: Path) -> None:
    for found in outcomes("other_device", tmp_path):
        assert found["error"] == "ValueError"
        assert "on meta" in found["text"]


def test_wait_of_a_torch_work_on_the_loop_thread_is_refused(tmp_path: Path) -> None:
    for found in outcomes("own_thread", tmp_path):
        assert found["error"] == "RuntimeError"
        assert "would block the event loop" in found["text"]


def test_keyboard_interrupt_ends_a_torch_receive_at_once(tmp_path: Path) -> None:
    interrupted, _ = outcomes("interrupted", tmp_path)
    assert interrupted["seconds"] < 0.1
