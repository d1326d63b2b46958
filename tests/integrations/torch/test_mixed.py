"""Torch groups with several backends: each backend carries the tensors of its device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from .ranks import last_json, run_ranks

pytest.importorskip("torch", reason="needs torch")

pytestmark = [pytest.mark.torch, pytest.mark.slow]

SIZE = 2
CALLS = ["allreduce", "reduce", "broadcast", "allgather", "_allgather_base", "gather", "scatter", "reduce_scatter",
         "_reduce_scatter_base", "alltoall", "alltoall_base"]  # fmt: skip
#: The names of backend calls before torch 2.14, by their new names.
NEW_NAMES = {"all_gather_single": "_allgather_base", "reduce_scatter_single": "_reduce_scatter_base",
             "all_to_all_single": "alltoall_base"}  # fmt: skip


def outcomes(backends: str, folder: Path) -> list[dict[str, Any]]:
    """Run `mixed.py` with these torch backends, and return the results of each rank."""
    printed = run_ranks("mixed", backends, SIZE, folder)
    found = [last_json(each) for each in printed]
    assert all(found), "\n".join(printed)
    return found


def test_each_torch_backend_handles_the_tensors_of_its_device(tmp_path: Path) -> None:
    for rank, found in enumerate(outcomes("cpu:aio,meta:recorder", tmp_path)):
        assert found["devices"] == ["cpu", "meta"]
        assert (found["cpu"], found["total"]) == ("none", [3.0, 3.0])
        assert (found["objects"], found["gathered"]) == ("none", [0, 1])
        assert found["meta"] == "none"
        calls = [NEW_NAMES.get(call, call) for call in found["calls"]]
        assert calls == [*CALLS, "recv" if rank else "send", "shutdown"]


def test_gloo_backend_for_cuda_tensors_is_created_next_to_aio(tmp_path: Path) -> None:
    for found in outcomes("cpu:aio,cuda:gloo", tmp_path):
        assert found["backend of CUDA tensors"] == "ProcessGroupGloo"
        assert found["total"] == [3.0, 3.0]
        assert found["meta"].startswith("ValueError: a tensor is on meta, and the backends of this group are")


@pytest.mark.parametrize("backends", ["cuda:aio", "cpu:gloo,cuda:aio"])
def test_aio_backend_for_cuda_tensors_is_refused_with_a_remedy(backends: str, tmp_path: Path) -> None:
    for found in outcomes(backends, tmp_path):
        assert found["cpu"] == (
            f"ValueError: the backends of this group are '{backends}', and 'aio' carries CPU tensors only: choose "
            "'cpu:aio' and another backend for other devices, such as 'cpu:aio,cuda:nccl'"
        )
