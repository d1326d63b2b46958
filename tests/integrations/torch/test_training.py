"""Training programs over aio and over Gloo, whose results must be equal, bit by bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from .ranks import run_ranks

torch = pytest.importorskip("torch", reason="needs torch")

pytestmark = [pytest.mark.torch, pytest.mark.slow]

SIZE = 2
#: The names of all programs in `training.py`.
NAMES = ("compiled", "ddp", "ddp_with_a_sampler_and_loader_workers", "ddp_with_buffers_and_unused_parameters",
         "ddp_without_synchronization_in_some_steps", "dtensor", "edges", "fp16_hook", "fsdp_with_a_checkpoint",
         "functional_collectives", "hybrid_sharding",
         "messages", "objects", "pipeline", "powersgd", "tensor_parallel", "zero")  # fmt: skip


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """Run `training.py` over each backend; return the results of each rank, by backend."""
    found = {}
    for backend in ("aio", "gloo"):
        folder: Path = tmp_path_factory.mktemp(backend)
        printed = run_ranks("training", backend, SIZE, folder, 300.0)
        assert all((folder / f"{rank}.pt").exists() for rank in range(SIZE)), "\n".join(printed)
        found[backend] = [torch.load(folder / f"{rank}.pt") for rank in range(SIZE)]
    return found


@pytest.mark.parametrize("name", NAMES)
def test_training_program_gives_bitwise_equal_results_over_aio_and_gloo(
    name: str, results: dict[str, list[dict[str, Any]]]
) -> None:
    assert results["aio"][0].keys() == set(NAMES)
    for aio, gloo in zip(results["aio"], results["gloo"], strict=True):
        assert not isinstance(gloo[name], str), gloo[name]
        assert not isinstance(aio[name], str), aio[name]
        assert aio[name]
        assert all(torch.equal(one, other) for one, other in zip(aio[name], gloo[name], strict=True))
