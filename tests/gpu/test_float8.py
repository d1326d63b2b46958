"""Reductions of float8 arrays: by NCCL if its version and all devices support float8, otherwise staged."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from aiocoll import ProcessGroup, ReduceOp
from aiocoll.gpu.api import DeviceError

from ..fakes.arrays import FakeArray
from ..fakes.cuda import FakeCuda
from ..fakes.nccl import FakeNccl
from ..ranks import run_ranks
from .groups import Gpus, gpus, host

CAPABLE = [(9, 0), (10, 3)]


@pytest.mark.parametrize(
    ("version", "capabilities", "native"),
    [
        (22809, CAPABLE, True),
        (22400, CAPABLE, True),
        (22304, CAPABLE, False),
        (22809, [(8, 9), (9, 0)], False),
        (22809, [(9, 0), (8, 9)], False),
    ],
)
@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
async def test_float8_is_reduced_by_nccl_if_all_devices_support_float8(
    dtype: str, version: int, capabilities: list[tuple[int, int]], native: bool
) -> None:
    kind = np.dtype(getattr(ml_dtypes, dtype))

    async def body(pg: ProcessGroup, gpu: Gpus) -> None:
        rank = pg.rank()

        def tensor(*values: float) -> object:
            return gpu.tensor(np.array(values, kind), rank)

        for op, expected in ((ReduceOp.SUM, 3), (ReduceOp.PRODUCT, 2), (ReduceOp.MIN, 1), (ReduceOp.MAX, 2)):
            assert host(await pg.allreduce(tensor(1 + rank, 2 - rank), op)).tolist() == [expected] * 2
        if rank == 0:
            assert host(await pg.reduce(tensor(1), 0)).tolist() == [2]
        else:
            await pg.reduce(tensor(1), 0)
        part = tensor(0, 0)
        await pg.reduce_scatter_tensor(part, tensor(1, 2, 3, 4))
        assert host(part).tolist() == [[2, 4], [6, 8]][rank]
        async with pg.coalescing():
            first, second = pg.allreduce(tensor(1)), pg.allreduce(tensor(2 + rank), ReduceOp.MAX)
        assert [host(await each).tolist() for each in (first, second)] == [[2], [3]]
        uneven = tensor(*[0.0] * (1 + rank))
        await pg.reduce_scatter(uneven, [tensor(1), tensor(2, 3)])
        assert host(uneven).tolist() == [[2], [4, 6]][rank]

    with gpus(2) as gpu:
        gpu.nccl._version = version
        gpu.cuda.capabilities = capabilities
        await run_ranks(2, body, gpu)
        assert (gpu.cuda.calls["copy_to_host"] == 0) is native


@pytest.mark.parametrize("capability", [(8, 0), (9, 0)])
async def test_float8_transfers_use_nccl_and_float8_averages_are_staged(capability: tuple[int, int]) -> None:
    async def body(pg: ProcessGroup, gpu: Gpus) -> None:
        def tensor(*values: float) -> object:
            return gpu.tensor(np.array(values, ml_dtypes.float8_e5m2), pg.rank())

        assert host(await pg.broadcast(tensor(3 + pg.rank()), 1)).tolist() == [4]
        await pg.barrier()
        assert gpu.cuda.calls["copy_to_host"] == 0
        await pg.barrier()
        assert host(await pg.allreduce(tensor(3), ReduceOp.AVG)).tolist() == [3]
        await pg.barrier()
        assert gpu.cuda.calls["copy_to_host"] == 3

    with gpus(3) as gpu:
        gpu.cuda.capabilities[1] = capability
        await run_ranks(3, body, gpu)


def test_fake_nccl_refuses_float8_reductions_on_old_devices() -> None:
    with FakeCuda(1) as cuda:
        nccl = FakeNccl(cuda)
        cuda.capabilities[0] = (8, 9)
        made = nccl.init(1, nccl.unique_id(), 0)
        array = FakeArray(cuda, np.zeros(1, np.uint8))
        with pytest.raises(DeviceError, match="rank 0 cannot reduce float8") as error:
            made.all_reduce(array.ptr, array.ptr, 1, 10, 0, 0)
        assert not error.value.fatal
        made.broadcast(array.ptr, array.ptr, 1, 10, 0, 0)
        cuda.capabilities[0] = (9, 0)
        made.all_reduce(array.ptr, array.ptr, 1, 10, 0, 0)
        cuda.stream_synchronize(0)
        made.destroy()
