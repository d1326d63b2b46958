"""Allgather and gather without output arguments: they allocate arrays of the lengths that the ranks contribute."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aiocoll.completion import Completion
from aiocoll.elements.buffers import Buffer, view
from aiocoll.elements.dtypes import array_dtype
from aiocoll.engine.operations.base import Operation
from aiocoll.engine.operations.incremental import Steps
from aiocoll.engine.operations.object_exchange import ObjectExchange, Parcels
from aiocoll.engine.operations.signature import Signature
from aiocoll.engine.operations.stepped import StepGenerator, SteppedOperation, collective, exchange
from aiocoll.errors import ProtocolError
from aiocoll.group.dispatch.dispatcher import Dispatcher, Timeout
from aiocoll.group.prepared_call import FactoryCall
from aiocoll.transport.frame import SEGMENT
from aiocoll.work import Work

__all__ = ["allgather_unsized", "gather_unsized"]


def allgather_unsized(dispatcher: Dispatcher, source: Buffer, timeout: Timeout, key: str | None) -> Work[list[Any]]:
    """Start an allgather without output arguments. Its first step exchanges the lengths."""
    limit = dispatcher.limit(timeout)
    signature = Signature("ALLGATHER_ALLOCATED", source.dtype.name, (), None, None)
    dtype = array_dtype(source.dtype)
    plan = dispatcher.plans.counting_plan(signature)

    def make(identity: int, completion: Completion) -> Operation:
        return SteppedOperation(dispatcher.comm, identity, plan, _allgather(dispatcher, source, dtype), completion)

    nbytes = source.nbytes * (dispatcher.size - 1)
    call = FactoryCall(signature, make, limit, key, source.shape, nbytes=nbytes)
    call.arrays = [source.array]
    return dispatcher.start(call)


def gather_unsized(
    dispatcher: Dispatcher, source: Buffer, root: int, timeout: Timeout, key: str | None
) -> Work[list[Any] | None]:
    """Start a gather without output arguments at the root. The other ranks carry out an ordinary gather."""
    limit = dispatcher.limit(timeout)
    signature = Signature("GATHER", source.dtype.name, (), root, None)
    comm, dtype, own = dispatcher.comm, array_dtype(source.dtype), np.empty_like(source.array)
    parcels = Parcels(
        {},
        comm.others,
        lambda received: _gather(source, own, dtype, received),
        are_arrays=True,
        may_be_chunked=dispatcher.planner.can_relay_blocks(),
    )

    def make(identity: int, completion: Completion) -> Operation:
        return ObjectExchange(comm, identity, signature, parcels, completion)

    return dispatcher.start(FactoryCall(signature, make, limit, key, source.shape))


def _allgather(dispatcher: Dispatcher, source: Buffer, dtype: np.dtype[Any]) -> StepGenerator[list[Any]]:
    """Exchange the ranks' numbers of elements, then the elements; return one array per rank."""
    counts: list[int] = (yield from exchange(source.count)).tolist()
    outputs = [np.empty(_shape(source, count), dtype) for count in counts]
    plan = dispatcher.plans.plan("allgather", source.dtype, (tuple(counts),))
    yield from collective("gather", plan, [*(view(output).array for output in outputs), source.array])
    return outputs


def _gather(source: Buffer, own: NDArray[Any], dtype: np.dtype[Any], received: Mapping[int, memoryview]) -> Steps:
    """Copy the root's own block; return the blocks of all ranks as arrays."""
    array, step = source.array, max(SEGMENT // source.array.itemsize, 1)
    for start in range(0, array.size, step):
        own[start : start + step] = array[start : start + step]
        yield
    for rank, part in received.items():
        if part.nbytes % dtype.itemsize:
            raise ProtocolError(f"rank {rank} sent {part.nbytes} bytes, which is not a multiple of the size of {dtype}")
    parts = [np.frombuffer(received[rank], np.uint8) if rank in received else own for rank in range(len(received) + 1)]
    return [part.reshape(_shape(source, part.size)) for part in (part.view(dtype) for part in parts)]


def _shape(like: Buffer, count: int) -> Sequence[int]:
    """Return a shape for `count` elements: the shape of `like`, or any number of its rows, or one dimension."""
    if count == like.count:
        return like.shape
    row = prod(like.shape[1:])
    return (count // row, *like.shape[1:]) if row and not count % row else (count,)
