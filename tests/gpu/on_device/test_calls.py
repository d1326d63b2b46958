"""Every collective, op and dtype on a device, by NCCL and staged; results are compared with NumPy."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import numpy as np
import pytest

from aiocoll import ProcessGroup

from ...group.test_collectives import MARGIN, MOVING, REDUCING, Call, label, valid
from ...internals import dispatcher_of
from ...pairwise import Case, cover
from ...ranks import run_ranks
from ...reductions import OPS, WIDE, equal, numpy_dtype
from ..groups import WAYS
from .worlds import SIMULATED, World, possible_ranks, world

COUNTS = ("0", "1", "1000")


class Around:
    """A device tensor with margins, whose slices are host copies."""

    def __init__(self, made: World, tensor: Any, count: int) -> None:
        self._world, self._tensor, self._count = made, tensor, count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, part: slice) -> Any:
        return self._world.host(self._tensor)[part]


class DeviceCall(Call):
    """A collective call of one rank in a test case, with arrays on the rank's device."""

    def __init__(self, case: Case, rank: int, made: World) -> None:
        super().__init__(case, rank)
        self.world = made

    def mine(self, values: Any) -> Any:
        count = len(values) + 2 * MARGIN
        around = np.ones(count, numpy_dtype(self.dtype))
        around[MARGIN : count - MARGIN] = values
        tensor = self.world.tensor(around, self.rank % self.world.devices)
        self.margins.append(Around(self.world, tensor, count))
        return self.world.part(tensor, MARGIN, count - MARGIN)


async def check(pg: ProcessGroup, cases: list[Case], made: World) -> None:
    for case in cases:
        call = DeviceCall(case, pg.rank(), made)
        arrays, expected = await call.run(pg), call.expected()
        for array, right in zip(arrays, expected, strict=True):
            found = made.host(array)
            assert equal(found, right), f"{label(case)} on rank {pg.rank()}: {found} instead of {right}"


def pairs() -> Iterator[Case]:
    """Yield a pairwise cover of arguments for simulated devices; `test_groups_cover` tests all combinations."""
    yield from cover({"kind": REDUCING, "op": OPS, "dtype": WIDE, "count": COUNTS}, valid)
    yield from cover({"kind": MOVING, "dtype": WIDE, "count": COUNTS}, valid)


def everything() -> Iterator[Case]:
    for kind, op, dtype, count in product(REDUCING, OPS, WIDE, COUNTS):
        if valid({"kind": kind, "op": op, "dtype": dtype}):
            yield {"kind": kind, "op": op, "dtype": dtype, "count": count}
    for kind, dtype, count in product(MOVING, WIDE, COUNTS):
        yield {"kind": kind, "dtype": dtype, "count": count}


@pytest.mark.parametrize("way", WAYS)
async def test_every_op_and_dtype_gives_correct_results_on_the_device(kind: str, way: str) -> None:
    with world(kind, way, 2) as made:
        size = possible_ranks(made, way, 2)
        found = pairs() if kind in SIMULATED else everything()
        cases = [
            case | {"root": number % size if case["kind"] in ("broadcast", "reduce") else 0, "world_size": size}
            for number, case in enumerate(found)
            if case["dtype"] in made.dtypes
        ]
        await run_ranks(size, check, cases, made, timeout=100.0)
        made.figure(f"cases of calls, {way}, {size} ranks", len(cases))


@pytest.mark.parametrize("way", WAYS)
async def test_tensors_that_require_gradients_are_written_in_place(kind: str, way: str) -> None:
    """Check that results are written in place, without a record in autograd."""
    if kind == "cupy":
        pytest.skip("arrays of CuPy have no gradients")

    async def body(pg: ProcessGroup, made: World) -> None:
        rank, size, device = pg.rank(), pg.size(), pg.rank() % made.devices
        tensors = [made.tensor(np.full(4, rank + 1.0), device) for _ in range(3 + size)]
        for each in tensors:
            each.requires_grad = True
        x, sent, part, *parts = tensors
        assert await pg.allreduce(x) is x
        assert await pg.broadcast(sent, 0) is sent
        assert await pg.reduce_scatter(part, parts) is part
        assert await pg.allgather(parts, sent) == parts
        total = size * (size + 1) / 2
        for each, value in zip(tensors, [total, 1, total, *[1] * size], strict=True):
            assert each.requires_grad
            assert getattr(each, "grad_fn", None) is None
            assert made.host(each).tolist() == [value] * 4

    with world(kind, way, 2) as made:
        await run_ranks(possible_ranks(made, way, 2), body, made)


async def test_group_uses_nccl_if_nccl_is_available(kind: str) -> None:
    async def body(pg: ProcessGroup, made: World) -> str:
        await pg.allreduce(made.tensor(np.ones(3), pg.rank() % made.devices))
        assert dispatcher_of(pg).device_calls is not None
        assert dispatcher_of(pg).device_calls.state.decision is not None
        assert dispatcher_of(pg).device_calls.state.decision.native, dispatcher_of(pg).device_calls.state.decision.why
        return dispatcher_of(pg).device_calls.state.decision.why

    with world(kind, "nccl", 2) as made:
        found = await run_ranks(possible_ranks(made, "nccl", 2), body, made)
        assert "a device each" in found[0]
        made.figure("the way, and why", found[0])
