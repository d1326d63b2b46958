"""Calls of the fake NCCL: their arguments, memory and computed results."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aiocoll.elements.dtypes import DType, by_name
from aiocoll.elements.ops import ReduceOp, kernel

from .memory import BadAddressError, FakeMemory

#: Dtypes by their type numbers in nccl.h.
DTYPES: Mapping[int, DType] = MappingProxyType(dict(enumerate(map(by_name, (
    "int8", "uint8", "int32", "uint32", "int64", "uint64", "float16", "float32", "float64", "bfloat16",
    "float8_e4m3fn", "float8_e5m2",
)))))  # fmt: skip
#: The first NCCL version with float8 dtypes.
FLOAT8_SINCE = 22400
#: The compute capability that float8 reductions need on every device of a communicator.
FLOAT8_CAPABILITY = (9, 0)
#: Reduction ops by their numbers in nccl.h.
OPS: Mapping[int, ReduceOp] = MappingProxyType(
    dict(enumerate((ReduceOp.SUM, ReduceOp.PRODUCT, ReduceOp.MAX, ReduceOp.MIN, ReduceOp.AVG)))
)
#: The byte that an aborted call writes to its whole output.
SPOILT = 0xA5


class FakeCall:
    """An NCCL call of one rank: its arguments, and its source and target memory."""

    def __init__(
        self,
        memory: FakeMemory,
        device: int,
        rank: int,
        name: str,
        source: int,
        read: int,
        target: int,
        written: int,
        dtype: DType,
        stream: int,
        op: int | None,
        root: int | None,
        peer: int | None,
    ) -> None:
        self.memory = memory
        self.device = device
        self.rank = rank
        self.name = name
        self.source = source
        self.target = target
        self.dtype = dtype
        self.stream = stream
        self.op = op
        self.root = root
        self.peer = peer
        self.read_bytes = read * dtype.itemsize
        self.written_bytes = written * dtype.itemsize
        self.ended = threading.Event()
        #: The arguments that must be equal on all ranks. The read and written counts may differ, but the larger one is
        #: equal.
        self.terms = (name, max(read, written), dtype.name, op, root)

    def overlaps(self) -> bool:
        """Return whether source and target overlap in a way that NCCL does not support as in place."""
        if not self.read_bytes or not self.written_bytes:
            return False
        place = self.source
        if self.name == "reduce_scatter":
            place += self.rank * self.written_bytes
        elif self.name == "all_gather":
            place -= self.rank * self.read_bytes
        disjoint = self.source + self.read_bytes <= self.target or self.target + self.written_bytes <= self.source
        return not disjoint and self.target != place

    def source_bytes(self) -> NDArray[Any]:
        """Return the source memory as a byte array."""
        return self._at(self.source, self.read_bytes)

    def target_bytes(self) -> NDArray[Any]:
        """Return the target memory as a byte array."""
        return self._at(self.target, self.written_bytes)

    def spoil(self) -> None:
        """Overwrite the output of an aborted call, because its contents are undefined."""
        try:
            self.target_bytes().fill(SPOILT)
        except BadAddressError:  # the target memory was freed, which real NCCL does not check either
            return

    def _at(self, address: int, nbytes: int) -> NDArray[Any]:
        return self.memory.at(address, nbytes, self.device)

    def __str__(self) -> str:
        return f"rank {self.rank} {self.terms}"


def compute(calls: list[FakeCall]) -> None:
    """Compute a collective; `calls` has the call of each rank, in rank order."""
    first = calls[0]
    inputs = [call.source_bytes().view(first.dtype.storage) for call in calls]
    outputs = [call.target_bytes().view(first.dtype.storage) for call in calls]
    if len(calls) == 1 and first.target == first.source:
        return  # a single rank in place: the result is already in the target, as in real NCCL
    if first.name == "broadcast":
        assert first.root is not None
        result = inputs[first.root].copy()
    elif first.name == "all_gather":
        result = np.concatenate(inputs)
    else:
        assert first.op is not None
        result = np.empty_like(inputs[0])
        with np.errstate(all="ignore"):
            kernel(OPS[first.op], first.dtype, len(calls)).fold(inputs, result)
    for rank, out in enumerate(outputs):
        if first.name == "reduce_scatter":
            out[:] = result[rank * len(out) : (rank + 1) * len(out)]
        elif len(out):
            out[:] = result
