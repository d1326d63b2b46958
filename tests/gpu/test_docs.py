"""The code examples of docs/cuda-tensors.md on a fake device."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest

from aiocoll import BackendUnavailableError, ProcessGroup
from aiocoll.store import HashStore

from ..pages import code, is_shown
from ..ranks import run_ranks
from .groups import WAYS, Gpus, gpus, host

PAGE = "docs/cuda-tensors.md"


@pytest.fixture
def examples() -> dict[str, Any]:
    """Return the example functions on the page by name; run each code block in a new namespace."""
    blocks = [
        code(PAGE, "CUDA tensors"),
        code(PAGE, "Streams: what comes before, and when the data may be used"),
        code(PAGE, "NCCL, or staged through the host"),
        code(PAGE, "NCCL, or staged through the host", 2),
        code(PAGE, "Failures and timeouts"),
    ]
    found: dict[str, Any] = {}
    for block in blocks:
        space: dict[str, Any] = {"__name__": PAGE}
        exec(compile(block, PAGE, "exec"), space)
        found |= {name: each for name, each in space.items() if getattr(each, "__module__", None) == PAGE}
    assert set(found) >= {"average", "scaled", "show_the_way", "insisting", "guarded"}
    return found


@pytest.mark.parametrize("way", WAYS)
async def test_examples_of_the_cuda_tensors_page_run(way: str, examples: dict[str, Any]) -> None:
    async def body(pg: ProcessGroup, gpu: Gpus) -> None:
        rank = pg.rank()
        tensor = gpu.tensor(np.full(4, rank), rank, "float32")
        assert host(await examples["average"](pg, tensor)).tolist() == [0.5] * 4

        def kernel(gradient: Any) -> None:
            values = gradient.values

            def work() -> None:
                values[...] *= 10

            gpu.cuda.kernel(0, work, rank)

        await examples["scaled"](pg, tensor, kernel)
        gpu.cuda.stream_synchronize(0, rank)
        assert host(tensor).tolist() == [10.0] * 4
        assert await examples["guarded"](pg, tensor) == "done"

    with gpus(2, way) as gpu:
        await run_ranks(2, body, gpu)


async def test_log_lines_of_the_page_show_whether_calls_use_nccl_or_staging(
    examples: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    logger = logging.getLogger("aiocoll")
    before = logger.level
    examples["show_the_way"]()

    async def body(pg: ProcessGroup, gpu: Gpus) -> None:
        await pg.allreduce(gpu.tensor(np.ones(2), pg.rank()))

    try:
        with gpus(2) as gpu:
            await run_ranks(2, body, gpu)
    finally:
        logger.setLevel(before)
    (nccl, _) = code(PAGE, "NCCL, or staged through the host", language="text").splitlines()
    assert is_shown(nccl, caplog.text)


@pytest.mark.parametrize("way", WAYS)
async def test_example_group_that_requires_nccl_works_or_raises_an_error(way: str, examples: dict[str, Any]) -> None:
    with gpus(1, way) as gpu:
        pg = await examples["insisting"](store=HashStore(), rank=0, world_size=1)
        tensor = gpu.tensor(np.ones(2), 0)
        if way == "nccl":
            await pg.allreduce(tensor)
        else:
            with pytest.raises(BackendUnavailableError, match="must use NCCL, but rank 0: NCCL was not provided"):
                await pg.allreduce(tensor)
        await pg.shutdown()
