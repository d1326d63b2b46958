"""Allreduce and reduce of sparse arrays: the result stores the union of all ranks' positions, with the sums there.

1. Each rank sorts its entries and adds up those at one position; then all ranks exchange their numbers of entries.
2. If there are few: an allgather of uneven sizes gives every rank all entries, and each adds them up in rank order.
   For a reduce, a gather gives them to the root.
3. If there are many, a dense array is cheaper: the entries are summed by a dense allreduce or reduce, and one bit per
   position, combined by OR over all ranks, tells which ones the result stores.

An average is the sum divided by the number of ranks; where a rank has no entry it has a zero.

All ranks choose the same of 2 and 3, from the counts. Each step is an operation of its own, with an id derived
from the call's. Arithmetic on more than some thousand numbers is done in a thread.

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
from aiocoll.elements.entries import Entries, gathered, merged, pack, scattered, unpack
from aiocoll.elements.ops import ReduceOp, kernel
from aiocoll.elements.sparse import SparseArray, sparse_array
from aiocoll.engine.operations.base import Operation
from aiocoll.engine.operations.signature import Signature
from aiocoll.engine.operations.stepped import StepGenerator, Stepped, collective, exchange, in_thread
from aiocoll.group.dispatch.dispatcher import Dispatcher, Timeout
from aiocoll.group.prepared_call import FactoryCall
from aiocoll.work import Work

__all__ = ["BYTES", "SparseInput", "calculate", "dense_pays", "gather_bytes", "reduce_sparse", "rooms"]

T = TypeVar("T")

#: Numbers processed on the loop: at 25 ns each, the slowest processing of them, about 200 µs. Waking a thread and
#: being woken by it takes about as long.
INLINE = 8192
#: Seconds per entry that merging takes more than writing it into a dense array and out again: a search among many, and
#: an addition where it was found (measured with a million entries: 40 ns against 12).
MERGE = 28e-9
#: Seconds per byte of a dense array and its marks that are made, and looked through again (measured: 0.9 ns for 5).
SWEEP = 0.2e-9

#: What packed entries are.
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
            f"op={op!r} is not defined on sparse arrays, only SUM and AVG are: places without an entry would take part "
            "as zeros; make the arrays dense"
        )
    limit = dispatcher.limit(timeout)
    given = SparseInput.of(dispatcher, array, root)
    dims = f"{op.name} over {array.sparse_dim} sparse and {len(array.shape) - array.sparse_dim} dense dimensions"
    kind = "ALLREDUCE_SPARSE" if root is None else "REDUCE_SPARSE"
    signature = Signature(kind, array.dtype.name, array.shape, root, dims)

    plan = dispatcher.plans.counting_plan(signature)

    def make(identity: int, completion: Completion) -> Operation:
        return Stepped(dispatcher.comm, identity, plan, _reduce(given, op, tensor), completion)

    # What all others are sent, if they are few: each entry with its place.
    nbytes = given.nbytes * (dispatcher.size - 1)
    return dispatcher.start(FactoryCall(signature, make, limit, key, array.shape, tensor, nbytes))


class SparseInput(NamedTuple):
    """The input of this rank.

    Attributes:
        dispatcher: of the group.
        array: the sparse array.
        root: of the call; None if all ranks get the result.
        entries: its entries, if it was decoded at the call because that is fast.
    """

    dispatcher: Dispatcher
    array: SparseArray
    root: int | None
    entries: Entries | None = None

    @classmethod
    def of(cls, dispatcher: Dispatcher, array: SparseArray, root: int | None) -> SparseInput:
        """Return the input of a rank that sends its entries; a small array is decoded, so that errors raise here."""
        return cls(dispatcher, array, root, array.read() if array.effort <= INLINE else None)

    @property
    def nbytes(self) -> int:
        """About how many bytes its entries take, each with its place."""
        array = self.array
        return array.effort * (array.dtype.itemsize + _INT64.itemsize // max(array.width, 1))

    @property
    def is_receiver(self) -> bool:
        """Whether this rank gets the result."""
        return self.root in (None, self.dispatcher.rank)

    def read(self) -> Entries:
        """Return its entries; may run in a thread."""
        return self.array.read() if self.entries is None else self.entries


def calculate(effort: int, task: Callable[[], T]) -> StepGenerator[T]:
    """Return the result of a calculation with `effort` numbers, here or in a thread."""
    return (yield from in_thread(task)) if effort > INLINE else task()


def gather_bytes(given: SparseInput, packed: NDArray[Any], sizes: list[int]) -> StepGenerator[list[NDArray[Any]]]:
    """Return the bytes of all ranks, of these sizes; nothing on a rank that does not receive."""
    dispatcher, root = given.dispatcher, given.root
    blocks: list[NDArray[Any]] = []
    if given.is_receiver:
        blocks = yield from calculate(sum(sizes) // 8, lambda: rooms(sizes))
        counts = tuple(sizes)
    else:
        counts = tuple(size if rank == dispatcher.rank else 0 for rank, size in enumerate(sizes))
    kind, agreed = ("allgather", None) if root is None else ("gather", ())
    # Hardly any two calls have the same counts: the plan is not worth keeping.
    plan = dispatcher.planner.compiled(kind, BYTES, (counts,), None, None, root, agreed)
    yield from collective("gather", plan, [*(blocks or (None for _ in sizes)), packed])
    return blocks


def rooms(sizes: Sequence[int]) -> list[NDArray[Any]]:
    """Return new memory in parts of so many bytes."""
    whole = np.empty(sum(sizes), np.uint8)
    # New memory is mapped page by page when it is written, up to a millisecond each: not on the loop.
    whole[:: mmap.PAGESIZE] = 0
    ends = accumulate(sizes)
    return [whole[end - size : end] for size, end in zip(sizes, ends, strict=True)]


def _reduce(given: SparseInput, op: ReduceOp, tensor: Any) -> StepGenerator[Any]:
    """Reduce, and return the caller's array or what replaces it."""
    array = given.array

    def read() -> tuple[Entries, NDArray[Any]]:
        entries = given.read()
        return entries, pack(entries)

    own, packed = yield from calculate(array.effort, read)
    counts = yield from exchange(len(own.places))
    row = array.width * array.dtype.itemsize
    entry = own.places.itemsize + row
    passes, machine = 2 if given.root is None else 1, given.dispatcher.comm.tuning.machine
    if dense_pays(int(counts.sum()), entry, array.size, row, len(counts), machine, passes):
        store = yield from _add_dense(given, own, op)
    else:
        blocks = yield from gather_bytes(given, packed, (counts * entry).tolist())
        store = yield from _merge(given, own, blocks, counts.tolist(), op)
    return tensor if store is None else store()


def _merge(
    given: SparseInput, own: Entries, blocks: list[NDArray[Any]], counts: list[int], op: ReduceOp
) -> StepGenerator[Callable[[], Any] | None]:
    """Merge the entries of all ranks, and return what stores the result; None on a rank that does not receive."""
    array = given.array
    if not given.is_receiver:
        return None

    def merge() -> Callable[[], Any]:
        parts = [unpack(block, count, own) for block, count in zip(blocks, counts, strict=True)]
        # Makes averages of sums.
        wide = by_name("float32") if array.dtype.kind == "half" else array.dtype
        divide = kernel(op, wide, len(counts)).finalize
        return array.build(merged(parts, array.dtype, divide))

    return (yield from calculate(sum(counts) * max(array.width, 1), merge))


def _add_dense(given: SparseInput, own: Entries, op: ReduceOp) -> StepGenerator[Callable[[], Any] | None]:
    """Add dense arrays, and return what stores the result; None on a rank that does not receive."""
    array, root, plans = given.array, given.root, given.dispatcher.plans
    effort = array.size * array.width
    dense, bits = yield from calculate(effort, lambda: scattered(own, array.size))
    kind = "allreduce" if root is None else "reduce"
    plan = plans.plan(kind, array.dtype, (len(dense),), op=op, root=root)
    yield from collective("add", plan, [dense])
    plan = plans.plan(kind, BYTES, (len(bits),), op=ReduceOp.BOR, root=root)
    yield from collective("mark", plan, [bits])
    if not given.is_receiver:
        return None
    return (yield from calculate(effort, lambda: array.build(gathered(dense, bits, array.size, own))))


def dense_pays(total: int, entry: int, size: int, row: int, world_size: int, machine: Machine, passes: int = 2) -> bool:
    """Whether a dense reduction takes less time than gathering the entries.

    A rank receives the entries of the others; or, once or twice, the dense array less its own part, and one bit per
    position. Entries are merged; a dense array is created and scanned. (In SparCML only bytes count.)

    Args:
        total: entries of all ranks.
        entry: bytes of one: place and values.
        size: places of the array.
        row: bytes of the values of one place.
        world_size: number of ranks.
        machine: of the medium.
        passes: how often a dense reduction moves its array: twice for an allreduce, once for a reduce.
    """
    share = (world_size - 1) / world_size
    sparse = total * (entry * share * machine.beta + MERGE)
    dense = size * (row + 1 / 8) * passes * share * machine.beta + size * (row + 1) * SWEEP
    return world_size > 1 and dense < sparse  # a rank alone has nothing to merge
