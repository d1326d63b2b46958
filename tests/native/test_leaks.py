"""Memory and references after a million native calls."""

from __future__ import annotations

import gc
import sys

import numpy as np
import pytest

from aiocoll.native import core

from ..engine.jobs import resident
from ..engine.test_slot_program import jobs
from ..internals import native_calls_of

pytestmark = [pytest.mark.skipif(core is None, reason="needs the accelerator in C"), pytest.mark.soak]

#: The number of calls per rank between two measurements, and the number of calls before the first measurement.
CALLS, WARM = 500_000, 20_000


@pytest.mark.parametrize("dtype", ["f8", "f2"])
async def test_million_native_calls_leave_no_memory_and_no_references(dtype: str) -> None:
    async with jobs(2) as [pgs]:
        arrays = [np.zeros(4, dtype) for _ in pgs]
        whole, parts = [np.zeros(8, dtype) for _ in pgs], [np.zeros(4, dtype) for _ in pgs]

        async def call(times: int) -> tuple[int, int, int, list[int]]:
            for number in range(times // 3):
                for pg, array in zip(pgs, arrays, strict=True):
                    kept = pg.allreduce(array)
                first = [pg.allgather_into_tensor(*each) for pg, *each in zip(pgs, whole, parts, strict=True)]
                last = [pg.allreduce(array, key="k") for pg, array in zip(pgs, arrays, strict=True)]
                assert kept.done()
                for work in (*first, *last):
                    await work
                if not number % 64:
                    native_calls_of(pgs[0]).hand_over()
            del kept, first, last, work
            gc.collect()
            steady = [
                sys.getrefcount(each)
                for each in (*arrays, *whole, *parts, None, arrays[0].dtype, native_calls_of(pgs[0]))
            ]
            return resident(), len(gc.get_objects()), sys.getallocatedblocks(), steady

        await call(WARM)
        memory, objects, blocks, references = await call(WARM)
        memory_after, objects_after, blocks_after, references_after = await call(CALLS)
        assert memory_after - memory < 2**20
        assert objects_after - objects < 2000
        assert blocks_after - blocks < 5000
        differences = [after - before for before, after in zip(references, references_after, strict=True)]
        assert max(map(abs, differences)) < 1000, differences
