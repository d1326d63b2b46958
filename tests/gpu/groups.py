"""What tests of groups on fake devices share: CUDA, NCCL, a module that looks like torch, and tensors of it."""

from __future__ import annotations

import asyncio
import contextlib
import re
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from aiocoll import GroupError, GroupRevokedError, ProcessGroup, ReduceOp
from aiocoll.elements.dtypes import by_name
from aiocoll.gpu.device import Device, close_devices
from aiocoll.gpu.events import Events
from aiocoll.gpu.provider import provide, runtime

from ..fakes.cuda import FakeCuda, Gate
from ..fakes.nccl import FakeNccl
from ..internals import dispatcher_of
from ..lookalikes import Torch
from ..ranks import until
from .adapted import adapted

#: How CUDA arrays go: by NCCL, or through the host.
WAYS = ("nccl", "staged")


class Gpus:
    """One device for each rank, all in this process.

    Attributes:
        cuda: the fake runtime.
        nccl: the fake library.
        torch: what tensors are made of.
    """

    def __init__(self, cuda: FakeCuda, library: Callable[[FakeCuda], Any]) -> None:
        self.cuda = cuda
        self.nccl = library(cuda)
        self.nccl.connects = True
        self.torch = Torch(lambda stream, device, work: cuda.kernel(stream, work, device))

    def tensor(self, values: Any, device: int, dtype: str | None = None, margin: int = 0) -> Any:
        """Return a tensor on a device, with `margin` ones around it; of what NumPy lacks, `values` are ml_dtypes'."""
        array = np.asarray(values, dtype)
        around = self.cuda.allocate((array.size + 2 * margin) * array.itemsize, device).view(array.dtype)
        around[:] = 1
        inner = around[margin : margin + array.size].reshape(array.shape)
        inner[...] = array
        tensor = self.torch.Tensor(inner.view(by_name(array.dtype.name).storage), array.dtype.name, device)
        tensor.values, tensor.around = inner, around
        return tensor

    def stream(self, device: int) -> int:
        """Make a new stream current on a device, and return it."""
        stream = Events(self.cuda, device).on_device(self.cuda.stream_create)
        self.torch.streams[device] = stream
        return stream

    def gate(self, device: int) -> Gate:
        """Let nothing end that comes on the current stream of a device until the gate is opened."""
        return self.cuda.gate(self.torch.streams.get(device, 0), device)

    def calls(self) -> list[str]:
        """Return the names of all calls of NCCL from now on, on all ranks."""
        called: list[str] = []
        self.nccl.hooks.append(called.append)
        return called

    def engine(self, device: int) -> Device:
        """Return what the groups share."""
        return Device.of(runtime()[0], device)


@contextmanager
def gpus(devices: int, way: str = "nccl", library: Callable[[FakeCuda], Any] = FakeNccl) -> Iterator[Gpus]:
    """Provide so many devices, and NCCL, played by `library`, if that is the way."""
    before = sys.modules.get("torch")
    cuda = FakeCuda(devices)
    made = Gpus(cuda, library)
    sys.modules["torch"] = made.torch  # type: ignore[assignment]
    try:
        used, nccl = adapted(cuda, made.nccl)
        with cuda, provide(used, nccl if way == "nccl" else None):
            yield made
    finally:
        if before is None:
            del sys.modules["torch"]
        else:
            sys.modules["torch"] = before
        assert close_devices(10.0), "a thread of a device is stuck"
        join_threads()
    assert made.nccl.complaints == []
    assert made.nccl.crashes == []
    assert made.cuda.full == made.cuda.held_up == []


def join_threads() -> None:
    """Wait for threads of devices that a test has left stuck, and that have been let go."""
    for thread in threading.enumerate():
        if thread.name.startswith(("aiocoll-launch", "aiocoll-wait", "aiocoll-call")):
            thread.join(10.0)


def host(tensor: Any) -> NDArray[Any]:
    """Return what is in the tensor at this moment."""
    values: NDArray[Any] = tensor.values
    return values


async def launcher_rests(pg: ProcessGroup, gpu: Gpus) -> None:
    """Wait until the launcher is done with calls whose ends it has told: until then, calls go through its thread."""
    device = gpu.engine(pg.rank())
    await until(lambda: not device.is_launching)


async def looped(pg: ProcessGroup, gpu: Gpus, passes: int = 2, count: int = 3) -> Any:
    """Call the same a few times: from then on it goes ahead."""
    tensor = gpu.tensor(np.ones(count), pg.rank())
    for number in range(1, passes + 1):
        assert await pg.allreduce(tensor) is tensor
        assert host(tensor).tolist() == [float(pg.size() ** number)] * count
    tensor.values[:] = 1
    await launcher_rests(pg, gpu)
    return tensor


def is_native(pg: ProcessGroup) -> bool:
    """Whether the group has a communicator of NCCL."""
    return (
        dispatcher_of(pg).device_calls is not None
        and dispatcher_of(pg).device_calls.state.communicator is not None
        and dispatcher_of(pg).device_calls.state.communicator.is_begun
    )


async def allreduced(pg: ProcessGroup, gpu: Gpus, **more: Any) -> None:
    """Allreduce something, and find it right."""
    tensor = gpu.tensor(np.full(4, pg.rank() + 1.0), pg.rank())
    assert await pg.allreduce(tensor, **more) is tensor
    assert host(tensor).tolist() == [pg.size() * (pg.size() + 1) / 2] * 4


def ones(pg: ProcessGroup, gpu: Gpus) -> Any:
    return gpu.tensor(np.ones(3), pg.rank())


def one(pg: ProcessGroup, gpu: Gpus, **more: Any) -> Any:
    return pg.allreduce(ones(pg, gpu), **more)


def several(pg: ProcessGroup, gpu: Gpus, **more: Any) -> Any:
    """Call a list of which one is staged."""
    tensors = [gpu.tensor(np.ones(3, int), pg.rank()) for _ in range(3)]
    return pg.allreduce_coalesced([*tensors, gpu.tensor(np.ones(2, np.int16), pg.rank())], **more)


def called(pg: ProcessGroup, gpu: Gpus, call: Any = one, **more: Any) -> Any:
    """Call it, unless another rank has told before that the group has failed."""
    with contextlib.suppress(GroupRevokedError):
        return call(pg, gpu, **more)
    return None


async def fails(pg: ProcessGroup, work: Any, match: str, kind: type[GroupError] = GroupError) -> None:
    """Check that the group fails for this reason, and the work, too, unless it has ended before."""
    cause = await pg.wait_revoked()
    assert isinstance(cause, kind)
    assert re.search(match, str(cause))
    if work is not None:
        await asyncio.wait([work.get_future()])
        assert work.exception() is None or str(work.exception()) == str(cause)
    with pytest.raises(GroupRevokedError, match=match):
        pg.barrier()


async def ended(pg: ProcessGroup, works: list[Any], end: str, gate: Gate) -> None:
    """End the group; all works fail for that reason, though the gate is not opened before they have."""
    pg.timeout = 0.01  # for so long shutdown waits for them
    if end == "abort":
        pg.abort("enough")
    ending = asyncio.ensure_future(pg.shutdown())
    await asyncio.wait([work.get_future() for work in works])
    gate.open()
    await ending
    for work in works:
        # Of two ranks that shut down, one may hear that the other has left before its own time is up.
        with pytest.raises(GroupError, match="enough" if end == "abort" else "closed|has left"):
            await work


async def every_kind(pg: ProcessGroup, gpu: Gpus) -> None:
    """Call nearly everything in one block, and find it right."""
    rank, size = pg.rank(), pg.size()

    def full(count: int, value: float, dtype: str = "float32") -> Any:
        return gpu.tensor(np.full(count, value), rank, dtype)

    total = size * (size + 1) // 2
    summed, scaled, whole = full(5, rank + 1), full(3, 1), full(2, rank + 1, "int64")
    sent, reduced, gathered = full(4, rank), full(3, rank + 1, "float64"), full(2 * size, 0)
    parts, part = gpu.tensor(np.arange(2.0 * size) + rank, rank), gpu.tensor(np.zeros(2), rank)
    exchanged, outgoing = full(size, 0, "int32"), gpu.tensor(np.arange(size) + 10 * rank, rank, "int32")
    uneven = [full(peer, 0) for peer in range(size)]
    collected = [full(1, 0) for _ in range(size)] if rank == size - 1 else None
    empty, array = full(0, 0), np.full(3, rank + 1)
    async with pg.coalescing() as block:
        works = [
            pg.allreduce(summed),
            pg.allreduce(scaled, ReduceOp.PREMUL_SUM(rank + 1.0)),
            pg.allreduce(array),
            pg.allreduce(whole, ReduceOp.MAX),
            pg.broadcast(sent, size - 1),
            pg.reduce(reduced, 0),
            pg.allgather_into_tensor(gathered, full(2, rank + 1)),
            pg.reduce_scatter_tensor(part, parts),
            pg.alltoall_base(exchanged, outgoing),
            pg.allgather(uneven, full(rank, rank + 1)),
            pg.gather(collected, full(1, rank), size - 1),
            pg.allreduce(empty),
            pg.barrier(),
        ]
    assert block.seq is not None
    assert works[0].result() is summed
    assert works[2].result() is array
    assert host(summed).tolist() == [total] * 5
    assert host(scaled).tolist() == [total] * 3
    assert array.tolist() == [total] * 3
    assert host(whole).tolist() == [size] * 2
    assert host(sent).tolist() == [size - 1] * 4
    if rank == 0:
        assert host(reduced).tolist() == [total] * 3
    assert host(gathered).tolist() == [peer + 1 for peer in range(size) for _ in range(2)]
    assert host(part).tolist() == [size * (2 * rank + at) + size * (size - 1) / 2 for at in range(2)]
    assert host(exchanged).tolist() == [10 * peer + rank for peer in range(size)]
    assert [host(each).tolist() for each in uneven] == [[peer + 1] * peer for peer in range(size)]
    if collected is not None:
        assert [host(each).tolist() for each in collected] == [[peer] for peer in range(size)]
