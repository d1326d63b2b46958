"""A test process of one of two ranks on one device, which call NCCL without aiocoll.

``python -m tests.gpu.on_device.two raw HOW KIND FOLDER`` starts both ranks.
Other steps with two ranks run only after this step has passed.

cupy       by CuPy
library    by the functions of libnccl
fake       by the functions of the fake
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np

from aiocoll.gpu.ctypes_nccl import library

from ...fakes.arrays import FakeArray
from ...fakes.cuda import FakeCuda
from .base import record_figure
from .far_nccl import FarNccl
from .worlds import world

#: The element counts of the float32 arrays.
COUNTS = (1, 1000, 1 << 20)
ROUNDS = 20
FLOAT32, SUM = 7, 0


def exchange_id(rank: int, meeting: Path, unique_id: Callable[[], bytes]) -> bytes:
    """Return the communicator id, which rank 0 creates and sends through a pipe in the folder `meeting`."""
    pipe = meeting / "name"
    with suppress(FileExistsError):
        os.mkfifo(pipe)
    if rank:
        return pipe.read_bytes()
    name = unique_id()
    pipe.write_bytes(name)
    return name


def by_cupy(rank: int, meeting: Path) -> None:
    """Make allreduces through CuPy's NCCL functions."""
    import cupy
    from cupy.cuda import nccl

    print_line(rank, f"CuPy {cupy.__version__}, NCCL {nccl.get_version()}")
    name = exchange_id(rank, meeting, nccl.get_unique_id)
    cupy.cuda.Device(0).use()
    start = perf_counter()
    communicator = nccl.NcclCommunicator(2, name, rank)
    print_line(rank, f"the communicator was created in {perf_counter() - start:.1f} s")
    stream = cupy.cuda.Stream(non_blocking=True)

    def time_allreduce(count: int) -> Any:
        array = cupy.asarray(np.full(count, rank + 1, np.float32))
        cupy.cuda.runtime.deviceSynchronize()
        start = perf_counter()
        communicator.allReduce(array.data.ptr, array.data.ptr, count, FLOAT32, SUM, stream.ptr)
        stream.synchronize()
        return perf_counter() - start, cupy.asnumpy(array)

    check_sums(rank, "cupy", time_allreduce)
    communicator.destroy()
    print_line(rank, "the communicator was destroyed")


class UniqueId(ctypes.Structure):
    """A communicator id of NCCL, which C passes by value."""

    _fields_ = (("bytes", ctypes.c_char * 128),)


def by_library(rank: int, meeting: Path, kind: str) -> None:
    """Make allreduces through libnccl, on arrays of the given library."""
    with world(kind, processes=True) as made:
        nccl = library()
        address, number = ctypes.c_void_p, ctypes.c_int
        nccl.ncclCommInitRank.argtypes = (address, number, UniqueId, number)
        nccl.ncclAllReduce.argtypes = (address, address, ctypes.c_size_t, number, number, address, address)
        nccl.ncclCommDestroy.argtypes = (address,)

        def call(name: str, *args: Any) -> None:
            status = getattr(nccl, name)(*args)
            assert status == 0, f"{name}: NCCL returned status {status}"

        def new_id() -> bytes:
            identity = UniqueId()
            call("ncclGetUniqueId", ctypes.byref(identity))
            return bytes(memoryview(identity))

        version, end = ctypes.c_int(), ctypes.c_void_p()
        call("ncclGetVersion", ctypes.byref(version))
        print_line(rank, f"NCCL {version.value}")
        identity = UniqueId.from_buffer_copy(exchange_id(rank, meeting, new_id))
        made.direct.cuda.use(0)
        start = perf_counter()
        call("ncclCommInitRank", ctypes.byref(end), 2, identity, rank)
        print_line(rank, f"the communicator was created in {perf_counter() - start:.1f} s")
        made.stream(0)

        def time_allreduce(count: int) -> Any:
            array = made.tensor(np.full(count, rank + 1, np.float32))
            start = perf_counter()
            call("ncclAllReduce", *[made.address(array)] * 2, count, FLOAT32, SUM, end, made.current(0))
            made.finish(0)
            return perf_counter() - start, made.host(array)

        check_sums(rank, kind, time_allreduce)
        call("ncclCommDestroy", end)
        print_line(rank, "the communicator was destroyed")


def by_fake(rank: int, meeting: Path) -> None:
    """Make allreduces through the simulated NCCL."""
    with FakeCuda() as cuda:
        nccl = FarNccl(cuda)
        communicator = nccl.init(2, exchange_id(rank, meeting, nccl.unique_id), rank)
        stream = cuda.stream_create()

        def time_allreduce(count: int) -> Any:
            array = FakeArray(cuda, np.full(count, rank + 1, np.float32))
            start = perf_counter()
            communicator.all_reduce(array.ptr, array.ptr, count, FLOAT32, SUM, stream)
            cuda.stream_synchronize(stream)
            return perf_counter() - start, array.numpy()

        check_sums(rank, "fake", time_allreduce)
        communicator.destroy()


def check_sums(rank: int, kind: str, time_allreduce: Callable[[int], Any]) -> None:
    """Make allreduces of several array lengths, check the sums, and record the times."""
    for count in COUNTS:
        times = []
        for _ in range(ROUNDS):
            seconds, array = time_allreduce(count)
            assert (array == 3).all(), f"rank {rank}: {array} instead of 3"
            times.append(seconds)
        if rank == 0:
            record_figure(
                kind, f"raw allreduce of {4 * count} B, 2 ranks on 1 device: us p50", round(median(times) * 1e6, 1)
            )


def print_line(rank: int, what: str) -> None:
    print(f"rank {rank}: {what}", flush=True)


def main(how: str, kind: str, meeting: str, rank: str) -> None:
    ways = {"cupy": by_cupy, "library": partial(by_library, kind=kind), "fake": by_fake}
    assert how in ways
    ways[how](int(rank), Path(meeting))


if __name__ == "__main__":
    main(*sys.argv[1:])
