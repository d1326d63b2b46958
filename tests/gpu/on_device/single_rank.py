"""A test process with one rank: ``python -m tests.gpu.on_device.single_rank KIND`` reduces CuPy or torch arrays."""

from __future__ import annotations

import asyncio
import sys

import numpy as np

from aiocoll import new_group
from aiocoll.store import HashStore

from ...internals import dispatcher_of
from ...reductions import numpy_dtype
from .worlds import World, world


async def body(made: World) -> None:
    async with new_group(store=HashStore(), rank=0, world_size=1, timeout=30.0) as pg:
        for dtype in sorted({"float32", "bfloat16"} & made.dtypes):
            tensor = made.tensor(np.arange(1000).astype(numpy_dtype(dtype)))
            assert await pg.allreduce(tensor) is tensor
            expected = np.arange(1000).astype(numpy_dtype(dtype))
            assert (made.host(tensor) == expected).all(), dtype
            await pg.allreduce(tensor).on_stream()
            print(f"{made.kind}, {dtype}: reduced", flush=True)
        assert dispatcher_of(pg).device_calls is not None
        assert dispatcher_of(pg).device_calls.state.decision is not None
        assert dispatcher_of(pg).device_calls.state.decision.native, dispatcher_of(pg).device_calls.state.decision.why


def main(kind: str) -> None:
    with world(kind) as made:
        asyncio.run(body(made))


if __name__ == "__main__":
    main(*sys.argv[1:])
