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
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from aiocoll.algorithms.machine import Machine
from aiocoll.elements.dtypes import DType, by_name
from aiocoll.elements.entries import Entries, gathered, merged, pack, scattered, unpack
from aiocoll.elements.ops import ReduceOp, kernel
from aiocoll.elements.sparse import SparseArray, sparse_array
from aiocoll.engine.communicator import Communicator
from aiocoll.engine.operations.base import Operation
from aiocoll.engine.operations.plan import Plan
from aiocoll.engine.operations.signature import Signature
from aiocoll.engine.operations.stepped import Stepped
from aiocoll.group.dispatch.call import Call
from aiocoll.group.dispatch.dispatcher import Dispatcher, Timeout
from aiocoll.group.dispatch.planner import Planner
from aiocoll.work import Work

__all__ = ["BYTES", "SparseInput", "SparseSteps", "dense_pays", "reduce_sparse", "rooms"]

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
    here = SparseInput(array, array.read() if array.effort <= INLINE else None, dispatcher.planner, op)
    dims = f"{op.name} over {array.sparse_dim} sparse and {len(array.shape) - array.sparse_dim} dense dimensions"
    kind = "ALLREDUCE_SPARSE" if root is None else "REDUCE_SPARSE"
    signature = Signature(kind, array.dtype.name, array.shape, root, dims)

    plan = dispatcher.planner.counting_plan(signature)

    def make(identity: int, work: Work[Any]) -> Operation:
        return _Sum(dispatcher.comm, identity, plan, here, work)

    # What all others are sent, if they are few: each entry with its place.
    nbytes = here.nbytes * (dispatcher.size - 1)
    return dispatcher.begin(Call(signature.op, make, limit, signature, key, array.shape, tensor, None, nbytes))


class SparseInput(NamedTuple):
    """The input of this rank, decoded already if that is fast; and what else the call needs: an op, or the tensor."""

    array: SparseArray
    entries: Entries | None
    planner: Planner
    more: Any = None

    @property
    def nbytes(self) -> int:
        """About how many bytes its entries take, each with its place."""
        array = self.array
        return array.effort * (array.dtype.itemsize + _INT64.itemsize // max(array.width, 1))


class SparseSteps(Stepped):
    """A call on a sparse array, on one rank."""

    __slots__ = ("_array", "_given", "_planner", "_root")

    def __init__(self, comm: Communicator, identity: int, plan: Plan, given: SparseInput, work: Work[Any]) -> None:
        super().__init__(comm, identity, plan, work)
        self._array, self._given, self._planner, _ = given
        self._root = plan.signature.root  # in a block, the signature of the operation becomes that of the block

    def _is_long(self) -> bool:
        return self._given is None

    def _work_on(self, step: str, effort: int, task: Callable[[], None], then: Callable[[], None]) -> None:
        """Continue with arithmetic, here or in a thread."""
        if effort > INLINE:
            self._calculate(step, task, then)
        else:
            task()
            then()

    def _gather_bytes(
        self, packed: NDArray[Any], sizes: list[int], root: int | None, then: Callable[[list[NDArray[Any]]], None]
    ) -> None:
        """Continue with the bytes of all ranks, which `sizes` tells; at the root only, if there is one."""
        rank = self.comm.rank
        if root not in (None, rank):
            mine = [size if each == rank else 0 for each, size in enumerate(sizes)]
            plan = self._planner.compiled("gather", BYTES, (tuple(mine),), None, None, root, ())
            self._carry_out("gather", plan, [*(None for _ in sizes), packed], lambda: then([]))
            return
        blocks: list[NDArray[Any]] = []

        def make_room() -> None:
            blocks.extend(rooms(sizes))

        def gather() -> None:
            # Hardly any two calls have the same counts: the plan is not worth keeping.
            agreed = None if root is None else ()
            kind = "allgather" if root is None else "gather"
            plan = self._planner.compiled(kind, BYTES, (tuple(sizes),), None, None, root, agreed)
            self._carry_out("gather", plan, [*blocks, packed], lambda: then(blocks))

        self._work_on("room", sum(sizes) // 8, make_room, gather)


def rooms(sizes: Sequence[int]) -> list[NDArray[Any]]:
    """Return new memory in parts of so many bytes."""
    whole = np.empty(sum(sizes), np.uint8)
    # New memory is mapped page by page when it is written, up to a millisecond each: not on the loop.
    whole[:: mmap.PAGESIZE] = 0
    ends = accumulate(sizes)
    return [whole[end - size : end] for size, end in zip(sizes, ends, strict=True)]


class _Sum(SparseSteps):
    """One reduction."""

    __slots__ = ("_bits", "_blocks", "_dense", "_finish", "_machine", "_op", "_packed", "_read")

    def __init__(self, comm: Communicator, identity: int, plan: Plan, given: SparseInput, work: Work[Any]) -> None:
        super().__init__(comm, identity, plan, given, work)
        self._machine = comm.tuning.machine
        self._op: ReduceOp = given.more

    def _count(self) -> int:
        self._read = self._array.read() if self._given is None else self._given
        self._packed = pack(self._read)
        return len(self._read.places)

    def _go_on(self) -> None:
        array, total = self._array, int(self.counts.sum())
        entry = self._read.places.itemsize + array.width * array.dtype.itemsize
        row = array.width * array.dtype.itemsize
        if dense_pays(
            total, entry, array.size, row, len(self.counts), self._machine, 1 if self._root is not None else 2
        ):
            self._work_on("scatter", array.size * array.width, self._scatter, self._add_dense)
        else:
            self._gather_bytes(self._packed, (self.counts * entry).tolist(), self._root, self._merge_all)

    # -- few entries

    def _merge_all(self, blocks: list[NDArray[Any]]) -> None:
        if not self._is_receiver():
            self.succeed(self.work._value)
            return
        self._blocks = blocks
        self._work_on("merge", int(self.counts.sum()) * max(self._array.width, 1), self._merge, self._store)

    def _merge(self) -> None:
        counts = zip(self._blocks, self.counts.tolist(), strict=True)
        parts = [unpack(block, count, self._read) for block, count in counts]
        self._finish = self._array.build(merged(parts, self._array.dtype, self._divide()))

    def _divide(self) -> Callable[[NDArray[Any]], None] | None:
        """Return what makes averages of sums."""
        dtype = self._array.dtype
        wide = by_name("float32") if dtype.kind == "half" else dtype
        return kernel(self._op, wide, len(self.counts)).finalize

    # -- many entries

    def _scatter(self) -> None:
        self._dense, self._bits = scattered(self._read, self._array.size)

    def _add_dense(self) -> None:
        plan = self._plan_of(self._array.dtype, len(self._dense), self._op)
        self._carry_out("add", plan, [self._dense], self._mark_dense)

    def _mark_dense(self) -> None:
        plan = self._plan_of(BYTES, len(self._bits), ReduceOp.BOR)
        self._carry_out("mark", plan, [self._bits], self._take_dense)

    def _plan_of(self, dtype: DType, count: int, op: ReduceOp) -> Plan:
        kind = "allreduce" if self._root is None else "reduce"
        return self._planner.plan(kind, dtype, (count,), op=op, root=self._root)

    def _take_dense(self) -> None:
        if not self._is_receiver():
            self.succeed(self.work._value)
            return
        self._work_on("take", self._array.size * self._array.width, self._collect, self._store)

    def _collect(self) -> None:
        self._finish = self._array.build(gathered(self._dense, self._bits, self._array.size, self._read))

    # -- from step to step

    def _store(self) -> None:
        self.succeed(self._finish())

    def _is_receiver(self) -> bool:
        """Whether this rank gets the result."""
        return self._root in (None, self.comm.rank)


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
