"""Allreduce of sparse arrays: the result stores the union of all ranks' positions, with the sums of the values there.

1. Each rank sorts its entries and adds up those at one position; then all ranks exchange their numbers of entries.
2. If there are few: an allgather of uneven sizes gives every rank all entries, and each adds them up in rank order.
3. If there are many, a dense array is cheaper: the entries are summed by a dense allreduce, and one bit per position,
   combined by OR over all ranks, tells which ones the result stores.

All ranks choose the same of 2 and 3, from the counts. Each step is an operation of its own, with an id derived
from the call's. Arithmetic on more than some thousand numbers is done in a thread.

Renggli, Ashkboos, Aghagolzadeh, Alistarh and Hoefler, "SparCML: high-performance sparse communication for machine
learning" (SC 2019), arXiv:1802.08021: sparse allgather, and when to switch to dense vectors.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from aiocoll.algorithms.machine import Machine
from aiocoll.elements.dtypes import by_name
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

__all__ = ["allreduce_sparse", "dense_pays"]

#: Numbers processed on the loop: at 25 ns each, the slowest processing of them, about 200 µs. Waking a thread and
#: being woken by it takes about as long.
INLINE = 8192
#: Seconds per entry that merging takes more than writing it into a dense array and out again: a search among many, and
#: an addition where it was found (measured with a million entries: 40 ns against 12).
MERGE = 28e-9
#: Seconds per byte of a dense array and its marks that are made, and looked through again (measured: 0.9 ns for 5).
SWEEP = 0.2e-9

_UINT8, _INT64 = by_name("uint8"), by_name("int64")


def allreduce_sparse(dispatcher: Dispatcher, tensor: Any, op: ReduceOp, timeout: Timeout, key: str | None) -> Work[Any]:
    """Start the sum of a sparse array; for the arguments, see `ProcessGroup.allreduce`."""
    array = sparse_array(tensor)
    kernel(op, array.dtype, dispatcher.size)
    if op != ReduceOp.SUM:
        remedy = "divide the sum by the number of ranks" if op == ReduceOp.AVG else "make the arrays dense"
        raise ValueError(f"op={op!r} of sparse arrays is not carried out, only SUM is: {remedy}")
    limit = dispatcher.limit(timeout)
    entries = array.read() if array.effort <= INLINE else None
    dims = f"SUM over {array.sparse_dim} sparse and {len(array.shape) - array.sparse_dim} dense dimensions"
    signature = Signature("ALLREDUCE_SPARSE", array.dtype.name, array.shape, None, dims)

    plan = dispatcher.planner.counting_plan(signature)

    def make(identity: int, work: Work[Any]) -> Operation:
        return _Sum(dispatcher.comm, identity, plan, _SparseInput(array, entries, dispatcher.planner), work)

    # What all others are sent, if they are few: each entry with its place.
    nbytes = array.effort * (array.dtype.itemsize + _INT64.itemsize // max(array.width, 1)) * (dispatcher.size - 1)
    return dispatcher.begin(Call(signature.op, make, limit, signature, key, array.shape, tensor, None, nbytes))


class _SparseInput(NamedTuple):
    """The input of this rank, decoded already if that is fast."""

    array: SparseArray
    entries: Entries | None
    planner: Planner


class _Sum(Stepped):
    """One call on one rank."""

    __slots__ = (
        "_array",
        "_bits",
        "_blocks",
        "_dense",
        "_finish",
        "_given",
        "_machine",
        "_packed",
        "_planner",
        "_read",
        "_sizes",
    )

    def __init__(self, comm: Communicator, identity: int, plan: Plan, given: _SparseInput, work: Work[Any]) -> None:
        super().__init__(comm, identity, plan, work)
        self._array, self._given, self._planner = given
        self._machine = comm.tuning.machine

    def _is_long(self) -> bool:
        return self._given is None

    def _count(self) -> int:
        self._read = self._array.read() if self._given is None else self._given
        self._packed = pack(self._read)
        return len(self._read.places)

    def _go_on(self) -> None:
        array, total = self._array, int(self.counts.sum())
        entry = self._read.places.itemsize + array.width * array.dtype.itemsize
        row = array.width * array.dtype.itemsize
        if dense_pays(total, entry, array.size, row, len(self.counts), self._machine):
            self._work_on("scatter", array.size * array.width, self._scatter, self._add_dense)
            return
        self._sizes = (self.counts * entry).tolist()
        self._work_on("room", total * entry // 8, self._make_room, self._gather)

    # -- few entries

    def _make_room(self) -> None:
        whole = np.empty(sum(self._sizes), np.uint8)
        # New memory is mapped page by page when it is written, up to a millisecond each: not on the loop.
        whole[:: mmap.PAGESIZE] = 0
        ends = accumulate(self._sizes)
        self._blocks = [whole[end - size : end] for size, end in zip(self._sizes, ends, strict=True)]

    def _gather(self) -> None:
        # Hardly any two calls have the same counts: the plan is not worth keeping.
        plan = self._planner.compiled("allgather", _UINT8, (tuple(self._sizes),), None, None, None)
        self._carry_out("gather", plan, [*self._blocks, self._packed], self._merge_all)

    def _merge_all(self) -> None:
        effort = int(self.counts.sum()) * max(self._array.width, 1)
        self._work_on("merge", effort, self._merge, self._store)

    def _merge(self) -> None:
        counts = zip(self._blocks, self.counts.tolist(), strict=True)
        parts = [unpack(block, count, self._read) for block, count in counts]
        self._finish = self._array.build(merged(parts, self._array.dtype))

    # -- many entries

    def _scatter(self) -> None:
        self._dense, self._bits = scattered(self._read, self._array.size)

    def _add_dense(self) -> None:
        plan = self._planner.plan("allreduce", self._array.dtype, (len(self._dense),), op=ReduceOp.SUM)
        self._carry_out("add", plan, [self._dense], self._mark_dense)

    def _mark_dense(self) -> None:
        plan = self._planner.plan("allreduce", _UINT8, (len(self._bits),), op=ReduceOp.BOR)
        self._carry_out("mark", plan, [self._bits], self._take_dense)

    def _take_dense(self) -> None:
        self._work_on("take", self._array.size * self._array.width, self._collect, self._store)

    def _collect(self) -> None:
        self._finish = self._array.build(gathered(self._dense, self._bits, self._array.size, self._read))

    # -- from step to step

    def _store(self) -> None:
        self.succeed(self._finish())

    def _work_on(self, step: str, effort: int, task: Callable[[], None], then: Callable[[], None]) -> None:
        """Continue with arithmetic, here or in a thread."""
        if effort > INLINE:
            self._calculate(step, task, then)
        else:
            task()
            then()


def dense_pays(total: int, entry: int, size: int, row: int, world_size: int, machine: Machine) -> bool:
    """Whether a dense allreduce takes less time than gathering the entries.

    A rank receives the entries of the others, or twice the dense array less its own part, and one bit per position.
    Entries are merged; a dense array is created and scanned. (In SparCML only bytes count.)

    Args:
        total: entries of all ranks.
        entry: bytes of one: place and values.
        size: places of the array.
        row: bytes of the values of one place.
        world_size: number of ranks.
        machine: of the medium.
    """
    share = (world_size - 1) / world_size
    sparse = total * (entry * share * machine.beta + MERGE)
    dense = size * (row + 1 / 8) * 2 * share * machine.beta + size * (row + 1) * SWEEP
    return world_size > 1 and dense < sparse  # a rank alone has nothing to merge
