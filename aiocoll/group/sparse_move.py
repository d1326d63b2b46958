"""Broadcast, allgather and gather of sparse arrays: only their entries travel, each with its place.

All ranks first exchange how much that is, 8 bytes each. Large arrays are read and made in a thread.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aiocoll.elements.entries import pack
from aiocoll.elements.sparse import SparseArray, entries_of, fresh_like, sparse_array
from aiocoll.engine.communicator import Communicator
from aiocoll.engine.operations.base import Operation
from aiocoll.engine.operations.plan import Plan
from aiocoll.engine.operations.signature import Signature
from aiocoll.group import sparse_reduce
from aiocoll.group.dispatch.call import Call
from aiocoll.group.dispatch.dispatcher import Dispatcher, Timeout
from aiocoll.group.sparse_reduce import SparseInput, SparseSteps
from aiocoll.work import Work

__all__ = ["broadcast_sparse", "gather_sparse"]

Make = Callable[[Communicator, int, Plan, SparseInput, Work[Any]], Operation]


def broadcast_sparse(dispatcher: Dispatcher, tensor: Any, root: int, timeout: Timeout, key: str | None) -> Work[Any]:
    """Start a broadcast of a sparse array; see `ProcessGroup.broadcast`."""
    array = sparse_array(tensor)
    signature = Signature("BROADCAST_SPARSE", array.dtype.name, array.shape, root, _dimensions(array))
    here = dispatcher.rank == root
    return _start(dispatcher, signature, _given(dispatcher, array, here), tensor, _Broadcast, timeout, key)


def gather_sparse(
    dispatcher: Dispatcher, tensor: Any, root: int | None, timeout: Timeout, key: str | None
) -> Work[Any]:
    """Start an allgather of sparse arrays, or a gather to `root`; see `ProcessGroup.allgather`."""
    array = sparse_array(tensor)
    kind = "ALLGATHER_SPARSE" if root is None else "GATHER_SPARSE"
    signature = Signature(kind, array.dtype.name, (), root, _dimensions(array))

    given = _given(dispatcher, array, True)._replace(more=tensor)
    return _start(dispatcher, signature, given, None, _Gather, timeout, key)


def _given(dispatcher: Dispatcher, array: SparseArray, is_read: bool) -> SparseInput:
    short = is_read and array.effort <= sparse_reduce.INLINE
    return SparseInput(array, array.read() if short else None, dispatcher.planner)


def _start(
    dispatcher: Dispatcher,
    signature: Signature,
    given: SparseInput,
    result: Any,
    make: Make,
    timeout: Timeout,
    key: str | None,
) -> Work[Any]:
    limit, plan = dispatcher.limit(timeout), dispatcher.planner.counting_plan(signature)

    def operation(identity: int, work: Work[Any]) -> Operation:
        return make(dispatcher.comm, identity, plan, given, work)

    nbytes = given.nbytes * (dispatcher.size - 1)
    return dispatcher.begin(
        Call(signature.op, operation, limit, signature, key, given.array.shape, result, None, nbytes)
    )


def _dimensions(array: SparseArray) -> str:
    return f"none over {array.sparse_dim} sparse and {len(array.shape) - array.sparse_dim} dense dimensions"


class _Broadcast(SparseSteps):
    """One broadcast."""

    __slots__ = ("_block", "_finish", "_packed")

    def _is_long(self) -> bool:
        return self._is_root() and self._given is None

    def _is_root(self) -> bool:
        return self.comm.rank == self._root

    def _count(self) -> int:
        if not self._is_root():
            return 0
        entries = self._array.read() if self._given is None else self._given
        self._packed = pack(entries)
        return len(self._packed)

    def _go_on(self) -> None:
        nbytes = int(self.counts[self._root or 0])
        if self._is_root():
            self._block = self._packed
            self._send(nbytes)
        else:
            self._work_on("room", nbytes // 8, self._make_room, lambda: self._send(nbytes))

    def _make_room(self) -> None:
        (self._block,) = sparse_reduce.rooms([int(self.counts[self._root or 0])])

    def _send(self, nbytes: int) -> None:
        plan = self._planner.compiled("broadcast", sparse_reduce.BYTES, (nbytes,), None, None, self._root)
        self._carry_out("spread", plan, [self._block], self._take)

    def _take(self) -> None:
        if self._is_root():
            self.succeed(self.work._value)
        else:
            self._work_on("build", len(self._block) // 8, self._build, lambda: self.succeed(self._finish()))

    def _build(self) -> None:
        self._finish = self._array.build(entries_of(self._array, self._block))


class _Gather(SparseSteps):
    """One allgather or gather; what is sent begins with the shape, which may differ from rank to rank."""

    __slots__ = ("_blocks", "_packed", "_results", "_tensor")

    def __init__(self, comm: Communicator, identity: int, plan: Plan, given: SparseInput, work: Work[Any]) -> None:
        super().__init__(comm, identity, plan, given, work)
        self._tensor = given.more

    def _count(self) -> int:
        entries = self._array.read() if self._given is None else self._given
        head = np.array(self._array.shape, np.int64).view(np.uint8)
        self._packed = np.concatenate([head, pack(entries)])
        return len(self._packed)

    def _go_on(self) -> None:
        self._gather_bytes(self._packed, self.counts.tolist(), self._root, self._take)

    def _take(self, blocks: list[NDArray[Any]]) -> None:
        if not blocks:
            self.succeed(None)
            return
        self._blocks = blocks
        self._work_on("build", sum(map(len, blocks)) // 8, self._build, lambda: self.succeed(self._results))

    def _build(self) -> None:
        self._results = [self._made(block) for block in self._blocks]

    def _made(self, block: NDArray[Any]) -> Any:
        head = 8 * len(self._array.shape)
        shape = tuple(block[:head].copy().view(np.int64).tolist())
        array = sparse_array(fresh_like(self._tensor, self._array.sparse_dim, shape))
        return array.build(entries_of(array, block[head:]))()
