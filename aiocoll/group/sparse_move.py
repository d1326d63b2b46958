"""Broadcast, allgather and gather of sparse arrays, which transfer only entries: indices and values.

First all ranks exchange the sizes, in 8 bytes each. A thread reads and builds large arrays.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aiocoll.completion import Completion
from aiocoll.elements.entries import pack
from aiocoll.elements.sparse import SparseArray, entries_of, fresh_like, sparse_array
from aiocoll.engine.operations.base import Operation
from aiocoll.engine.operations.signature import Signature
from aiocoll.engine.operations.stepped import StepGenerator, SteppedOperation, collective, exchange
from aiocoll.group.dispatch.dispatcher import Dispatcher, Timeout
from aiocoll.group.prepared_call import FactoryCall
from aiocoll.group.sparse_reduce import BYTES, SparseInput, allocate_blocks, calculate, gather_bytes
from aiocoll.work import Work

__all__ = ["broadcast_sparse", "gather_sparse"]


def broadcast_sparse(dispatcher: Dispatcher, tensor: Any, root: int, timeout: Timeout, key: str | None) -> Work[Any]:
    """Start a broadcast of a sparse array; see `ProcessGroup.broadcast`."""
    array = sparse_array(tensor)
    signature = Signature("BROADCAST_SPARSE", array.dtype.name, array.shape, root, _dimensions(array))
    is_root = dispatcher.rank == root
    given = SparseInput.of(dispatcher, array, root) if is_root else SparseInput(dispatcher, array, root)
    steps = _send if is_root else _receive
    return _start(given, signature, tensor, lambda: steps(given, tensor), timeout, key)


def gather_sparse(
    dispatcher: Dispatcher, tensor: Any, root: int | None, timeout: Timeout, key: str | None
) -> Work[Any]:
    """Start an allgather of sparse arrays, or a gather to `root`; see `ProcessGroup.allgather`."""
    array = sparse_array(tensor)
    kind = "ALLGATHER_SPARSE" if root is None else "GATHER_SPARSE"
    signature = Signature(kind, array.dtype.name, (), root, _dimensions(array))
    given = SparseInput.of(dispatcher, array, root)
    return _start(given, signature, None, lambda: _gather(given, tensor), timeout, key)


def _start(
    given: SparseInput,
    signature: Signature,
    result: Any,
    steps: Callable[[], StepGenerator[Any]],
    timeout: Timeout,
    key: str | None,
) -> Work[Any]:
    dispatcher, shape = given.dispatcher, given.array.shape
    limit, plan = dispatcher.limit(timeout), dispatcher.plans.counting_plan(signature)

    def make(identity: int, completion: Completion) -> Operation:
        return SteppedOperation(dispatcher.comm, identity, plan, steps(), completion)

    nbytes = given.nbytes * (dispatcher.size - 1)
    return dispatcher.start(FactoryCall(signature, make, limit, key, shape, result, nbytes))


def _dimensions(array: SparseArray) -> str:
    return f"none over {array.sparse_dim} sparse and {len(array.shape) - array.sparse_dim} dense dimensions"


def _send(given: SparseInput, tensor: Any) -> StepGenerator[Any]:
    """Broadcast the root's entries to the other ranks. The root runs this function."""
    block = yield from calculate(given.array.effort, lambda: pack(given.read()))
    yield from exchange(len(block))
    yield from _spread(given, block)
    return tensor


def _receive(given: SparseInput, tensor: Any) -> StepGenerator[Any]:
    """Receive the root's entries; return the caller's array with them, or a new array."""
    array = given.array
    nbytes = int((yield from exchange(0)).sum())
    (block,) = yield from calculate(nbytes // 8, lambda: allocate_blocks([nbytes]))
    yield from _spread(given, block)
    store = yield from calculate(nbytes // 8, lambda: array.build(entries_of(array, block)))
    return store()


def _spread(given: SparseInput, block: NDArray[Any]) -> StepGenerator[None]:
    plan = given.dispatcher.planner.build_plan("broadcast", BYTES, (len(block),), None, None, given.root)
    yield from collective("spread", plan, [block])


def _gather(given: SparseInput, tensor: Any) -> StepGenerator[list[Any] | None]:
    """Gather a block of every rank: the array's shape, which may differ between ranks, and its entries."""
    array = given.array
    head = np.array(array.shape, np.int64).view(np.uint8)

    def make(block: NDArray[Any]) -> Any:
        shape = tuple(block[: len(head)].copy().view(np.int64).tolist())
        made = sparse_array(fresh_like(tensor, array.sparse_dim, shape))
        return made.build(entries_of(made, block[len(head) :]))()

    packed = yield from calculate(array.effort, lambda: np.concatenate([head, pack(given.read())]))
    sizes = (yield from exchange(len(packed))).tolist()
    blocks = yield from gather_bytes(given, packed, sizes)
    if not given.is_receiver:
        return None
    return (yield from calculate(sum(sizes) // 8, lambda: [make(block) for block in blocks]))
