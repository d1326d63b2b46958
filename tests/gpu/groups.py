"""Helpers for tests of groups on fake devices: fake CUDA and NCCL, a torch lookalike, and calls with checks."""

from __future__ import annotations

import asyncio
import contextlib
import re
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
import pytest
from numpy.typing import NDArray

from aiocoll import GroupError, GroupRevokedError, ProcessGroup, ReduceOp
from aiocoll.elements.dtypes import by_name
from aiocoll.gpu.device import Device, close_devices
from aiocoll.gpu.events import Events
from aiocoll.gpu.provider import provide, runtime

from ..fake_libraries import Torch
from ..fakes.cuda import FakeCuda, Gate
from ..fakes.nccl import FakeNccl
from ..internals import dispatcher_of
from ..ranks import run_ranks, wait_until
from .fake_libraries import select_adapter

#: The two ways to reduce or transfer CUDA arrays: by NCCL, or staged through host memory.
WAYS = ("nccl", "staged")


class SupportsClear(Protocol):
    """A list, a counter or another collection with a `clear` method."""

    def clear(self) -> None: ...


class Gpus:
    """A set of fake devices in this process, one per rank.

    Attributes:
        cuda: the fake CUDA.
        nccl: the fake NCCL.
        torch: the torch lookalike.
    """

    def __init__(self, cuda: FakeCuda, library: Callable[[FakeCuda], Any]) -> None:
        self.cuda = cuda
        self.nccl = library(cuda)
        self.nccl.connects = True
        self.torch = Torch(lambda stream, device, work: cuda.kernel(stream, work, device))

    def tensor(self, values: Any, device: int, dtype: str | None = None, margin: int = 0) -> Any:
        """Return a device tensor, with `margin` additional elements of value 1 before and after it.

        Values of dtypes that NumPy lacks have the types of ml_dtypes.
        """
        array = np.asarray(values, dtype)
        around = self.cuda.allocate((array.size + 2 * margin) * array.itemsize, device).view(array.dtype)
        around[:] = 1
        inner = around[margin : margin + array.size].reshape(array.shape)
        inner[...] = array
        tensor = self.torch.Tensor(inner.view(by_name(array.dtype.name).storage), array.dtype.name, device)
        tensor.values, tensor.around = inner, around
        return tensor

    def stream(self, device: int) -> int:
        """Create a stream, make it current on a device, and return it."""
        stream = Events(self.cuda, device).on_device(self.cuda.stream_create)
        self.torch.streams[device] = stream
        return stream

    def gate(self, device: int) -> Gate:
        """Block later work on the current stream of a device until the returned gate is opened."""
        return self.cuda.gate(self.torch.streams.get(device, 0), device)

    def calls(self) -> list[str]:
        """Return a list that records the names of all later NCCL calls of all ranks."""
        names: list[str] = []
        self.nccl.hooks.append(names.append)
        return names

    def shared_device(self, device: int) -> Device:
        """Return the `Device` object that all groups on a device share."""
        return Device.of(runtime()[0], device)


@contextmanager
def gpus(devices: int, way: str = "nccl", library: Callable[[FakeCuda], Any] = FakeNccl) -> Iterator[Gpus]:
    """Yield fake devices, and make groups use them in the ``with`` block.

    Args:
        devices: the number of devices.
        way: "nccl", or "staged" for a machine without NCCL.
        library: class of the fake NCCL.
    """
    before = sys.modules.get("torch")
    cuda = FakeCuda(devices)
    made = Gpus(cuda, library)
    sys.modules["torch"] = made.torch  # type: ignore[assignment]
    try:
        used, nccl = select_adapter(cuda, made.nccl)
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


async def run_with_gpus(world_size: int, body: Callable[..., Awaitable[Any]], *args: Any, **options: Any) -> list[Any]:
    """Run `body(pg, gpu, *args)` on ranks with a fake device each; return the results in rank order."""
    with gpus(world_size) as gpu:
        return await run_ranks(world_size, body, gpu, *args, **options)


async def clear_counts(pg: ProcessGroup, counts: SupportsClear) -> None:
    """Clear call counts between two barriers, while no rank makes a call."""
    await pg.barrier()
    counts.clear()
    await pg.barrier()


def join_threads() -> None:
    """Wait for device threads that a test left stuck and that can end now."""
    for thread in threading.enumerate():
        if thread.name.startswith(("aiocoll-launch", "aiocoll-wait", "aiocoll-call")):
            thread.join(10.0)


def host(tensor: Any) -> NDArray[Any]:
    """Return a tensor's current values, without waiting for a stream."""
    values: NDArray[Any] = tensor.values
    return values


async def wait_for_idle_launcher(pg: ProcessGroup, gpu: Gpus) -> None:
    """Wait until the launcher thread is idle, so that the event loop itself launches the next call."""
    device = gpu.shared_device(pg.rank())
    await wait_until(lambda: not device.is_launching)


async def repeat_allreduce(pg: ProcessGroup, gpu: Gpus, passes: int = 2, count: int = 3) -> Any:
    """Repeat an allreduce until it is launched ahead of its comparison; return the tensor."""
    tensor = gpu.tensor(np.ones(count), pg.rank())
    for number in range(1, passes + 1):
        assert await pg.allreduce(tensor) is tensor
        assert host(tensor).tolist() == [float(pg.size() ** number)] * count
    tensor.values[:] = 1
    await wait_for_idle_launcher(pg, gpu)
    return tensor


def uses_nccl(pg: ProcessGroup) -> bool:
    """Return whether the group has an NCCL communicator."""
    return (
        dispatcher_of(pg).device_calls is not None
        and dispatcher_of(pg).device_calls.state.communicator is not None
        and dispatcher_of(pg).device_calls.state.communicator.is_begun
    )


async def check_allreduce(pg: ProcessGroup, gpu: Gpus, **more: Any) -> None:
    """Make an allreduce and check its result."""
    tensor = gpu.tensor(np.full(4, pg.rank() + 1.0), pg.rank())
    assert await pg.allreduce(tensor, **more) is tensor
    assert host(tensor).tolist() == [pg.size() * (pg.size() + 1) / 2] * 4


def ones(pg: ProcessGroup, gpu: Gpus) -> Any:
    return gpu.tensor(np.ones(3), pg.rank())


def start_allreduce(pg: ProcessGroup, gpu: Gpus, **more: Any) -> Any:
    return pg.allreduce(ones(pg, gpu), **more)


def start_list(pg: ProcessGroup, gpu: Gpus, **more: Any) -> Any:
    """Start a list call with four allreduces, one of which must be staged."""
    tensors = [gpu.tensor(np.ones(3, int), pg.rank()) for _ in range(3)]
    return pg.allreduce_coalesced([*tensors, gpu.tensor(np.ones(2, np.int16), pg.rank())], **more)


def start_unless_revoked(pg: ProcessGroup, gpu: Gpus, call: Any = start_allreduce, **more: Any) -> Any:
    """Start a call; return None if the group has already been revoked."""
    with contextlib.suppress(GroupRevokedError):
        return call(pg, gpu, **more)
    return None


async def check_failure(pg: ProcessGroup, work: Any, match: str, kind: type[GroupError] = GroupError) -> None:
    """Check that the group is revoked with the expected error.

    Args:
        pg: the group.
        work: a work that must fail for the same reason, unless it finished earlier; None for no work.
        match: pattern of the message.
        kind: class of the error.
    """
    cause = await pg.wait_revoked()
    assert isinstance(cause, kind)
    assert re.search(match, str(cause))
    if work is not None:
        await asyncio.wait([work.get_future()])
        assert work.exception() is None or str(work.exception()) == str(cause)
    with pytest.raises(GroupRevokedError, match=match):
        pg.barrier()


async def end_group(pg: ProcessGroup, works: list[Any], end: str, gate: Gate) -> None:
    """Abort the group or shut it down, and check that all works fail before the gate of the device opens."""
    pg.timeout = 0.01  # the time for which `shutdown` waits for the works
    if end == "abort":
        pg.abort("enough")
    ending = asyncio.ensure_future(pg.shutdown())
    await asyncio.wait([work.get_future() for work in works])
    gate.open()
    await ending
    for work in works:
        # During a shutdown, the peer's goodbye may arrive before this rank's timeout expires.
        with pytest.raises(GroupError, match="enough" if end == "abort" else "closed|has left"):
            await work


async def check_block_of_every_kind(pg: ProcessGroup, gpu: Gpus) -> None:
    """Make nearly every kind of call in one `coalescing` block, and check the results."""
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
