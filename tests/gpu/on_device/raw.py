"""One of two ranks that call NCCL with nothing in between but CuPy: whether that works decides what else can.

``python -m tests.gpu.on_device.two raw sum KIND FOLDER`` starts both.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np

from ...fakes.arrays import FakeArray
from ...fakes.cuda import FakeCuda
from .far_nccl import FarNccl
from .worlds import figure

#: Elements, of float32.
COUNTS = (1, 1000, 1 << 20)
ROUNDS = 20
FLOAT32, SUM = 7, 0


def name_of(rank: int, meeting: Path, unique_id: Callable[[], bytes]) -> bytes:
    """Return what rank 0 calls the communicator, by a pipe in the folder where both meet."""
    pipe = meeting / "name"
    with suppress(FileExistsError):
        os.mkfifo(pipe)
    if rank:
        return pipe.read_bytes()
    name = unique_id()
    pipe.write_bytes(name)
    return name


def by_cupy(rank: int, meeting: Path) -> None:
    """Reduce by CuPy's NCCL."""
    import cupy
    from cupy.cuda import nccl

    say(rank, f"CuPy {cupy.__version__}, NCCL {nccl.get_version()}")
    name = name_of(rank, meeting, nccl.get_unique_id)
    cupy.cuda.Device(0).use()
    start = perf_counter()
    communicator = nccl.NcclCommunicator(2, name, rank)
    say(rank, f"the communicator is made, in {perf_counter() - start:.1f} s")
    stream = cupy.cuda.Stream(non_blocking=True)

    def reduced(count: int) -> Any:
        array = cupy.asarray(np.full(count, rank + 1, np.float32))
        cupy.cuda.runtime.deviceSynchronize()
        start = perf_counter()
        communicator.allReduce(array.data.ptr, array.data.ptr, count, FLOAT32, SUM, stream.ptr)
        stream.synchronize()
        return perf_counter() - start, cupy.asnumpy(array)

    compare(rank, "cupy", reduced)
    communicator.destroy()
    say(rank, "the communicator is destroyed")


def by_fake(rank: int, meeting: Path) -> None:
    """Reduce by the fake."""
    with FakeCuda() as cuda:
        nccl = FarNccl(cuda)
        communicator = nccl.init(2, name_of(rank, meeting, nccl.unique_id), rank)
        stream = cuda.stream_create()

        def reduced(count: int) -> Any:
            array = FakeArray(cuda, np.full(count, rank + 1, np.float32))
            start = perf_counter()
            communicator.all_reduce(array.ptr, array.ptr, count, FLOAT32, SUM, stream)
            cuda.stream_synchronize(stream)
            return perf_counter() - start, array.numpy()

        compare(rank, "fake", reduced)
        communicator.destroy()


def compare(rank: int, kind: str, reduced: Callable[[int], Any]) -> None:
    """Reduce arrays of several lengths, and look at the sums."""
    for count in COUNTS:
        times = []
        for _ in range(ROUNDS):
            seconds, array = reduced(count)
            assert (array == 3).all(), f"rank {rank}: {array} instead of 3"
            times.append(seconds)
        if rank == 0:
            figure(kind, f"raw allreduce of {4 * count} B, 2 ranks on 1 device: us p50", round(median(times) * 1e6, 1))


def say(rank: int, what: str) -> None:
    print(f"rank {rank}: {what}", flush=True)


def main(how: str, kind: str, meeting: str, rank: str) -> None:
    assert how == "sum"
    (by_fake if kind == "fake" else by_cupy)(int(rank), Path(meeting))


if __name__ == "__main__":
    main(*sys.argv[1:])
