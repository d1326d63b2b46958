"""Collectives of every kind, op and dtype on CUDA arrays, by NCCL and staged; `make matrix` runs all combinations."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import numpy as np
import pytest

from aiocoll import ProcessGroup

from ..group.test_collectives import MARGIN, MOVING, REDUCING, Call, everything, label, valid
from ..internals import observe_calls
from ..pairwise import Case, cover
from ..ranks import run_ranks
from ..reductions import OPS, WIDE, equal, numpy_dtype
from .groups import WAYS, Gpus, gpus, run_with_gpus

SIZES = (1, 2, 3, 4, 7)
COUNTS = ("0", "1", "p-1", "p+1", "1000")
SPACE = {"dtype": WIDE, "count": COUNTS, "root": range(max(SIZES)), "world_size": SIZES}


class DeviceCall(Call):
    """A collective call of one rank in a test case, with arrays on the rank's device."""

    def __init__(self, case: Case, rank: int, gpu: Gpus) -> None:
        super().__init__(case, rank)
        self.gpu = gpu
        self.tensors: list[Any] = []

    def mine(self, values: Any) -> Any:
        tensor = self.gpu.tensor(values, self.rank, self.dtype if self.dtype not in NARROW else None, MARGIN)
        self.margins.append(tensor.around)
        return tensor

    def room(self, count: int) -> Any:
        return self.mine(np.zeros(count, numpy_dtype(self.dtype)))


NARROW = tuple(name for name in WIDE if not hasattr(np, name) and name != "bool")


def pairs() -> Iterator[Case]:
    yield from cover({"kind": REDUCING, "op": OPS, **SPACE}, valid)
    yield from cover({"kind": MOVING, **SPACE}, valid)


async def check(pg: ProcessGroup, cases: list[Case], gpu: Gpus) -> list[bytes]:
    """Run cases and check their results; return the result bytes of allreduce cases."""
    seen = []
    for case in cases:
        call = DeviceCall(case, pg.rank(), gpu)
        arrays, expected = await call.run(pg), call.expected()
        for array, right in zip(arrays, expected, strict=True):
            assert equal(array.values, right), f"{label(case)} on rank {pg.rank()}: {array.values} instead of {right}"
        if case["kind"] == "allreduce":
            seen.append(arrays[0].values.tobytes())
    return seen


async def check_cases(world_size: int, way: str, cases: list[Case]) -> None:
    with gpus(world_size, way) as gpu:
        first, *others = await run_ranks(world_size, check, cases, gpu, timeout=120.0)
    assert all(each == first for each in others), "the ranks have different bits"


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("world_size", SIZES)
async def test_pairwise_cover_of_device_calls_gives_correct_results(world_size: int, way: str) -> None:
    await check_cases(world_size, way, [case for case in pairs() if case["world_size"] == world_size])


def is_native(kind: str, op: str, dtype: str) -> bool:
    """Return whether NCCL supports a reduction."""
    if kind in ("scan", "exscan") or dtype.endswith(("int16", "fnuz")):
        return False
    if op == "PREMUL_SUM" and kind != "allreduce":
        return False
    if dtype == "bool":
        return op not in ("BXOR", "LXOR", "larger")
    if "int" in dtype or "float8" in dtype:
        return op in ("SUM", "PRODUCT", "MIN", "MAX")
    if dtype.startswith("complex"):
        return op in ("SUM", "AVG", "PREMUL_SUM")
    return op in ("SUM", "PRODUCT", "MIN", "MAX", "AVG", "PREMUL_SUM")


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 3])
async def test_only_reductions_that_nccl_does_not_support_are_staged(
    world_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check every kind, op and dtype in one group."""
    staged = [0] * world_size

    def count_staged(operation: Any) -> None:
        staged[operation.comm.rank] += 1

    async def body(pg: ProcessGroup, gpu: Gpus) -> None:
        for kind, op, dtype in product(REDUCING, OPS, WIDE):
            case: Case = {"kind": kind, "op": op, "dtype": dtype, "count": "p+1", "root": 0, "world_size": world_size}
            if valid(case):
                before = staged[pg.rank()]
                await check(pg, [case], gpu)
                assert staged[pg.rank()] - before == (not is_native(kind, op, dtype)), label(case)

    observe_calls(monkeypatch, stage_inputs=count_staged)
    await run_with_gpus(world_size, body)


@pytest.mark.matrix
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("world_size", SIZES)
@pytest.mark.parametrize("dtype", WIDE)
async def test_all_combinations_of_device_calls_give_correct_results(dtype: str, world_size: int, way: str) -> None:
    await check_cases(world_size, way, [case for case in everything(dtype, world_size) if case["count"] in COUNTS])
