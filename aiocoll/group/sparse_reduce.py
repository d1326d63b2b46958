"""Allreduce and reduce of sparse arrays: the result has the union of all ranks' entries, added up.

1. Each rank sorts its entries, and adds up entries at the same position. Then all ranks exchange their numbers of
   entries.
2. If there are few entries, an allgather of uneven sizes gives every rank all entries, and each rank adds them up in
   rank order. For a reduce, a gather gives the entries to the root.
3. If there are many entries, a dense array is cheaper. A dense allreduce or reduce adds up the entries. One bit per
   position, combined by OR over all ranks, marks the positions that the result stores.

An average is the sum divided by the number of ranks; a missing entry counts as zero.

From the counts, all ranks choose the same of steps 2 and 3. Each step is a separate operation, with an id derived from
the call's id. A thread does arithmetic on more than a few thousand numbers.

Renggli, Ashkboos, Aghagolzadeh, Alistarh and Hoefler, "SparCML: high-performance sparse communication for machine
learning" (SC 2019), arXiv:1802.08021: sparse allgather, and when to switch to dense vectors.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from aiocoll.algorithms.machine import Machine
from aiocoll.completion import Completion
from aiocoll.elements.dtypes import by_name
from aiocoll.elements.entries import Entries, gather_entries, merge_entries, pack, scatter_entries, unpack
from aiocoll.elements.ops import ReduceOp, kernel
from aiocoll.elements.sparse import SparseArray, sparse_array
from aiocoll.engine.operations.base import Operation
from aiocoll.engine.operations.signature import Signature
from aiocoll.engine.operations.stepped import StepGenerator, SteppedOperation, calculate_in_thread, collective, exchange
from aiocoll.group.dispatch.dispatcher import Dispatcher, Timeout
from aiocoll.group.prepared_call import FactoryCall
from aiocoll.work import Work

__all__ = ["BYTES", "SparseInput", "allocate_blocks", "calculate", "gather_bytes", "is_dense_faster", "reduce_sparse"]

T = TypeVar("T")

#: Maximum number of array values processed in the event loop. At 25 ns per value, the slowest case, they take about
#: 200 µs. Passing the work to a thread and back takes as long.
INLINE = 8192
#: Seconds per entry by which merging sorted entries is slower than writing them into a dense array and reading them
#: back (measured with a million entries: 40 ns against 12 ns). Merging searches a sorted list for each entry.
MERGE = 28e-9
#: Seconds per byte to create a dense array with its bitmap, and to scan it (measured: 0.9 ns for 5 bytes).
SWEEP = 0.2e-9

#: The dtype of packed entries.
BYTES = by_name("uint8")
_INT64 = by_name("int64")


def reduce_sparse(
    dispatcher: Dispatcher, tensor: Any, op: ReduceOp, root: int | None, timeout: Timeout, key: str | None
) -> Work[Any]:
    """Start an allreduce of a sparse array, or a reduce to `root`; see `ProcessGroup.allreduce`."""
    array = sparse_array(tensor)
    kernel(op, array.dtype, dispatcher.size)
    if op not in (ReduceOp.SUM, ReduceOp.AVG):
        raise ValueError(
            f"op={op!r} is not defined on sparse arrays, since positions without an entry would count as zeros: use "
            "SUM or AVG, or make the arrays dense"
        )
    limit = dispatcher.limit(timeout)
    given = SparseInput.of(dispatcher, array, root)
    dims = f"{op.name} over {array.sparse_dim} sparse and {len(array.shape) - array.sparse_dim} dense dimensions"
    kind = "ALLREDUCE_SPARSE" if root is None else "REDUCE_SPARSE"
    signature = Signature(kind, array.dtype.name, array.shape, root, dims)

    plan = dispatcher.plans.counting_plan(signature)

    def make(identity: int, completion: Completion) -> Operation:
        return SteppedOperation(dispatcher.comm, identity, plan, _reduce(given, op, tensor), completion)

    # Bytes that this rank sends to all other ranks if the arrays have few entries: each entry with its index.
    nbytes = given.nbytes * (dispatcher.size - 1)
    return dispatcher.start(FactoryCall(signature, make, limit, key, array.shape, tensor, nbytes))


class SparseInput(NamedTuple):
    """The sparse array that this rank contributes to a call.

    Attributes:
        dispatcher: dispatcher of the group.
        array: the sparse array.
        root: root of the call; None if all ranks get the result.
        entries: entries of a small array, which is read at the call; None for a large one.
    """

    dispatcher: Dispatcher
    array: SparseArray
    root: int | None
    entries: Entries | None = None

    @classmethod
    def of(cls, dispatcher: Dispatcher, array: SparseArray, root: int | None) -> SparseInput:
        """Return the input of a rank that sends entries. Read a small array now, so that the call raises its errors."""
        return cls(dispatcher, array, root, array.read() if array.effort <= INLINE else None)

    @property
    def nbytes(self) -> int:
        """The approximate number of bytes of the entries, with indices and values."""
        array = self.array
        return array.effort * (array.dtype.itemsize + _INT64.itemsize // max(array.width, 1))

    @property
    def is_receiver(self) -> bool:
        """Return whether this rank gets the result of the call."""
        return self.root in (None, self.dispatcher.rank)

    def read(self) -> Entries:
        """Return the entries of the array. A thread may run this method."""
        return self.array.read() if self.entries is None else self.entries


def calculate(effort: int, task: Callable[[], T]) -> StepGenerator[T]:
    """Run `task`, which processes `effort` numbers, and return its result. A long task runs in a thread."""
    return (yield from calculate_in_thread(task)) if effort > INLINE else task()


def gather_bytes(given: SparseInput, packed: NDArray[Any], sizes: list[int]) -> StepGenerator[list[NDArray[Any]]]:
    """Gather one block of bytes per rank; return an empty list on ranks that receive no blocks."""
    dispatcher, root = given.dispatcher, given.root
    blocks: list[NDArray[Any]] = []
    if given.is_receiver:
        blocks = yield from calculate(sum(sizes) // 8, lambda: allocate_blocks(sizes))
        counts = tuple(sizes)
    else:
        counts = tuple(size if rank == dispatcher.rank else 0 for rank, size in enumerate(sizes))
    kind, agreed = ("allgather", None) if root is None else ("gather", ())
    # Do not cache the plan, because the next call is unlikely to have the same counts.
    plan = dispatcher.planner.build_plan(kind, BYTES, (counts,), None, None, root, agreed)
    yield from collective("gather", plan, [*(blocks or (None for _ in sizes)), packed])
    return blocks


def allocate_blocks(sizes: Sequence[int]) -> list[NDArray[Any]]:
    """Allocate blocks of `sizes` bytes, with all memory pages mapped."""
    whole = np.empty(sum(sizes), np.uint8)
    # Write to each page now: mapping pages later, one by one, could block the event loop for a millisecond.
    whole[:: mmap.PAGESIZE] = 0
    ends = accumulate(sizes)
    return [whole[end - size : end] for size, end in zip(sizes, ends, strict=True)]


def _reduce(given: SparseInput, op: ReduceOp, tensor: Any) -> StepGenerator[Any]:
    """Reduce a sparse array; return the caller's array with the result, or a new array."""
    array = given.array

    def read() -> tuple[Entries, NDArray[Any]]:
        entries = given.read()
        return entries, pack(entries)

    own, packed = yield from calculate(array.effort, read)
    counts = yield from exchange(len(own.places))
    row = array.width * array.dtype.itemsize
    entry = own.places.itemsize + row
    passes, machine = 2 if given.root is None else 1, given.dispatcher.comm.tuning.machine
    if is_dense_faster(int(counts.sum()), entry, array.size, row, len(counts), machine, passes):
        store = yield from _add_dense(given, own, op)
    else:
        blocks = yield from gather_bytes(given, packed, (counts * entry).tolist())
        store = yield from _merge(given, own, blocks, counts.tolist(), op)
    return tensor if store is None else store()


def _merge(
    given: SparseInput, own: Entries, blocks: list[NDArray[Any]], counts: list[int], op: ReduceOp
) -> StepGenerator[Callable[[], Any] | None]:
    """Add up the entries of all ranks; return a function that stores the result, or None on a rank without result."""
    array = given.array
    if not given.is_receiver:
        return None

    def merge() -> Callable[[], Any]:
        parts = [unpack(block, count, own) for block, count in zip(blocks, counts, strict=True)]
        # For AVG, `divide` converts the sums to averages.
        wide = by_name("float32") if array.dtype.kind == "half" else array.dtype
        divide = kernel(op, wide, len(counts)).finalize
        return array.build(merge_entries(parts, array.dtype, divide))

    return (yield from calculate(sum(counts) * max(array.width, 1), merge))


def _add_dense(given: SparseInput, own: Entries, op: ReduceOp) -> StepGenerator[Callable[[], Any] | None]:
    """Reduce as dense arrays; return a function that stores the result, or None on a rank without result."""
    array, root, plans = given.array, given.root, given.dispatcher.plans
    effort = array.size * array.width
    dense, bits = yield from calculate(effort, lambda: scatter_entries(own, array.size))
    kind = "allreduce" if root is None else "reduce"
    plan = plans.plan(kind, array.dtype, (len(dense),), op=op, root=root)
    yield from collective("add", plan, [dense])
    plan = plans.plan(kind, BYTES, (len(bits),), op=ReduceOp.BOR, root=root)
    yield from collective("mark", plan, [bits])
    if not given.is_receiver:
        return None
    return (yield from calculate(effort, lambda: array.build(gather_entries(dense, bits, array.size, own))))


def is_dense_faster(
    total: int, entry: int, size: int, row: int, world_size: int, machine: Machine, passes: int = 2
) -> bool:
    """Return whether reducing dense arrays takes less time than gathering and adding up the entries.

    With sparse arrays, a rank receives and merges the entries of the other ranks. With dense arrays, it receives, once
    or twice, the array without its own part and one bit per position, and it creates and scans the array. The model of
    SparCML counts only bytes.

    Args:
        total: number of entries of all ranks.
        entry: bytes of one entry: position and values.
        size: number of positions in the array.
        row: bytes of the values at one position.
        world_size: number of ranks.
        machine: parameters of the machine.
        passes: number of times that a dense reduction moves its array: 2 for an allreduce, 1 for a reduce.
    """
    share = (world_size - 1) / world_size
    sparse = total * (entry * share * machine.beta + MERGE)
    dense = size * (row + 1 / 8) * passes * share * machine.beta + size * (row + 1) * SWEEP
    return world_size > 1 and dense < sparse  # with a single rank, there is nothing to merge
