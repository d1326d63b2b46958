"""Allocation of arrays that peers can read in place, for `ProcessGroup.empty`."""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from aiocoll.elements.dtypes import from_numpy
from aiocoll.group.dispatch.dispatcher import Dispatcher
from aiocoll.log import logger

__all__ = ["empty"]


async def empty(dispatcher: Dispatcher, shape: int | Sequence[int], dtype: DTypeLike) -> NDArray[Any]:
    """Allocate an array; see `aiocoll.group.process_group.ProcessGroup.empty`."""
    comm = dispatcher.comm
    dispatcher.check()
    sizes = _sizes(shape)
    try:
        kind = np.dtype(dtype)
    except TypeError as error:
        raise TypeError(f"dtype={dtype!r} is not a NumPy dtype: {error}") from None
    from_numpy(kind)
    nbytes = math.prod(sizes) * kind.itemsize
    if nbytes > sys.maxsize:
        raise ValueError(f"shape={shape!r} of {kind} is {nbytes} bytes, which exceeds the address space")
    registered_memory = comm.endpoint.registered_memory
    # Use ordinary memory for arrays that fit into a slot, because these are copied anyway.
    if registered_memory is None or not comm.chunk_nbytes or dispatcher.size == 1 or nbytes <= comm.slots.largest:
        return np.empty(sizes, kind)
    try:
        memory = await registered_memory.make(nbytes)
    except OSError as error:
        if not registered_memory.troubled:
            registered_memory.troubled = True
            logger.warning(
                "empty() on rank %d of group %r returns ordinary memory, which peers cannot read in place: %s",
                comm.rank,
                comm.name,
                str(error),  # only the text: a handler that keeps the record must not keep the traceback
                extra=comm.log_extra,
            )
        return np.empty(sizes, kind)
    return memory.view(kind).reshape(sizes)


def _sizes(shape: int | Sequence[int]) -> tuple[int, ...]:
    try:
        sizes = tuple(map(operator.index, shape if isinstance(shape, tuple | list) else (shape,)))
    except TypeError:
        raise TypeError(f"shape must be an int or a tuple of ints, not {shape!r}") from None
    if any(size < 0 for size in sizes):
        raise ValueError(f"shape={shape!r} has a negative number")
    return sizes
