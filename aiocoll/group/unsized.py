"""Allgather and gather without outputs: the result is new arrays, as long as what each rank gives."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from aiocoll.elements.buffers import Buffer, view
from aiocoll.elements.dtypes import array_dtype
from aiocoll.engine.communicator import Communicator
from aiocoll.engine.operations.base import Operation
from aiocoll.engine.operations.plan import Plan
from aiocoll.engine.operations.signature import Signature
from aiocoll.engine.operations.stepped import Stepped
from aiocoll.engine.operations.unsized_gather import Gathered, Given
from aiocoll.group.dispatch.call import Call
from aiocoll.group.dispatch.dispatcher import Dispatcher, Timeout
from aiocoll.group.dispatch.planner import Planner
from aiocoll.work import Work

__all__ = ["allgather_unsized", "gather_unsized"]


def allgather_unsized(dispatcher: Dispatcher, source: Buffer, timeout: Timeout, key: str | None) -> Work[list[Any]]:
    """Start an allgather without outputs: first all ranks exchange the lengths."""
    limit = dispatcher.limit(timeout)
    signature = Signature("ALLGATHER_ALLOCATED", source.dtype.name, (), None, None)
    dtype = array_dtype(source.dtype)
    plan = dispatcher.planner.counting_plan(signature)

    def make(identity: int, work: Work[Any]) -> Operation:
        return _Allgather(dispatcher.comm, identity, plan, _AllgatherInput(source, dtype, dispatcher.planner), work)

    nbytes = source.nbytes * (dispatcher.size - 1)
    return dispatcher.begin(
        Call(signature.op, make, limit, signature, key, source.shape, nbytes=nbytes, arrays=[source.array])
    )


def gather_unsized(
    dispatcher: Dispatcher, source: Buffer, root: int, timeout: Timeout, key: str | None
) -> Work[list[Any] | None]:
    """Start the root's part of a gather without outputs; the other ranks take part as usual."""
    limit = dispatcher.limit(timeout)
    signature = Signature("GATHER", source.dtype.name, (), root, None)
    dtype = array_dtype(source.dtype)

    def pack(parts: list[NDArray[Any]]) -> list[Any]:
        return [part.reshape(_shape(source, part.size)) for part in (part.view(dtype) for part in parts)]

    def make(identity: int, work: Work[Any]) -> Operation:
        return Gathered(dispatcher.comm, identity, signature, Given(source.array, pack), work)

    return dispatcher.begin(Call(signature.op, make, limit, signature, key, source.shape))


class _AllgatherInput(NamedTuple):
    source: Buffer
    dtype: np.dtype[Any]
    planner: Planner


class _Allgather(Stepped):
    """One rank's part, in which all ranks first exchange their numbers of elements."""

    __slots__ = ("_given", "_outputs")

    def __init__(self, comm: Communicator, identity: int, plan: Plan, given: _AllgatherInput, work: Work[Any]) -> None:
        super().__init__(comm, identity, plan, work)
        self._given = given
        self._outputs: list[Any]

    def _count(self) -> int:
        return self._given.source.count

    def _go_on(self) -> None:
        source, dtype, planner = self._given
        counts = self.counts.tolist()
        self._outputs = [np.empty(_shape(source, count), dtype) for count in counts]
        arrays = [view(output).array for output in self._outputs]
        plan = planner.plan("allgather", source.dtype, (tuple(counts),))
        self._carry_out("gather", plan, [*arrays, source.array], lambda: self.succeed(self._outputs))


def _shape(like: Buffer, count: int) -> Sequence[int]:
    """Return the shape of an array of `count` elements: that of `like`, or as many rows of it; otherwise flat."""
    if count == like.count:
        return like.shape
    row = prod(like.shape[1:])
    return (count // row, *like.shape[1:]) if row and not count % row else (count,)
