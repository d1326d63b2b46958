"""Call cache of one group: it finds a call's plan by kind, dtype, op, root and sizes.

Nearly every call equals an earlier one. If its arrays are plain, one check is left: written arrays must not share
memory with others. The lookup replaces `view`, splitting and planning, and takes a fraction of their time.

A *plain* array is an `ndarray` that is `carray`: contiguous, aligned and writeable. Its plan is found by its dtype.
Equal dtypes may be aliases that NumPy would convert, such as `long` and `longlong`. Therefore a cached plan is used
only if it has the identical dtype object.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from aiocoll.algorithms.spec import spec_of
from aiocoll.elements.buffers import Buffer, clash
from aiocoll.elements.dtypes import DType, from_numpy
from aiocoll.elements.ops import ReduceOp
from aiocoll.engine.operations.plan import Plan
from aiocoll.engine.operations.signature import Signature
from aiocoll.group.dispatch.planner import Planner

__all__ = ["PLANS", "CallCache", "Found"]

#: Maximum number of plans per group. A program makes few different calls, and a plan for many ranks has some hundred
#: actions.
PLANS = 256

#: Result of a lookup: the plan from the cache, and the call's flat arrays.
Found = tuple[Plan, list[Any]]
_ndarray: Final = np.ndarray
#: `may_share_memory` compares only the arrays' bounds, which is exact for contiguous arrays.
_share: Final = np.may_share_memory


class CallCache:
    """A cache of the plans for one group's calls. The planner makes plans that are missing.

    Args:
        planner: makes missing plans.
        rank: this rank.
        size: number of ranks.

    Attributes:
        known: plans by kind of call, dtype, op, root, and all shapes or sizes. The key has the op's id, since hashing
            the op costs more than the rest of the lookup; the plan keeps the op alive. The dtype is a NumPy dtype for
            plain arrays, and a `DType` for all others.
    """

    def __init__(self, planner: Planner, rank: int, size: int) -> None:
        self._planner = planner
        self._rank = rank
        self._size = size
        self.known: dict[tuple[Any, ...], Plan] = {}

    # -- calls on plain arrays

    def one(self, kind: str, tensor: Any, op: ReduceOp | None, root: Any) -> Plan | None:
        """Return the plan of a call on one array of equal size on all ranks; None if it is not a plain NumPy array."""
        if type(tensor) is not _ndarray or not tensor.flags.carray:
            return None
        dtype = tensor.dtype
        key = kind, dtype, id(op), root, tensor.shape
        plan = self.known.get(key)
        if plan is None:
            plan = self._new_plain(key, dtype, (tensor.size,), op, root)
        return plan if plan is not None and plan.storage is dtype else None

    def parts(self, kind: str, whole: Any, other: Any, op: ReduceOp | None) -> Found | None:
        """Return the plan and the flat arrays of a call on an array that consists of one equal part per rank.

        Args:
            kind: "allgather", "reduce_scatter", or "alltoall".
            whole: the array of all parts; for an alltoall, the input.
            other: an array of one part; for an alltoall, the output.
            op: op of a reduction; None otherwise.

        Returns:
            None if the arrays are not plain, or do not pass the checks.
        """
        plan = self.plan_of_parts(kind, whole, other, op)
        return None if plan is None else (plan, self.flatten(kind, whole, other))

    def plan_of_parts(self, kind: str, whole: Any, other: Any, op: ReduceOp | None) -> Plan | None:
        """Return the plan of a call on an array of equal parts, as `parts` does, but without the flat arrays."""
        if type(whole) is not _ndarray or type(other) is not _ndarray:
            return None
        dtype = whole.dtype
        if other.dtype is not dtype or not whole.flags.carray or not other.flags.carray or _share(whole, other):
            return None
        key = kind, dtype, id(op), None, whole.shape, other.shape
        plan = self.known.get(key)
        if plan is None:
            sizes = self._sizes_of_parts(kind, whole, other)
            plan = None if sizes is None else self._new_plain(key, dtype, sizes, op, None)
        return plan if plan is not None and plan.storage is dtype else None

    def flatten(self, kind: str, whole: Any, other: Any) -> list[Any]:
        """Return the flat arrays of a call on an array of equal parts, in the order that the call's plan expects."""
        arrays = self._split_parts(whole)
        if kind == "alltoall":
            arrays += self._split_parts(other)
        else:
            arrays.append(other if other.ndim == 1 else other.reshape(-1))
        return arrays

    def lists(
        self, kind: str, blocks: Any, other: Any, *, root: int | None = None, op: ReduceOp | None = None
    ) -> Found | None:
        """Return the plan and the flat arrays of a call on a list with one array per rank.

        Args:
            kind: "allgather", "gather", "scatter", "reduce_scatter", or "alltoall".
            blocks: one array per rank; for an alltoall, the inputs. None on a rank without a list.
            other: the single array of this rank; for an alltoall, the outputs.
            root: root of the call; None without one.
            op: op of a reduction; None otherwise.

        Returns:
            None if the arrays are not plain, or do not pass the checks.
        """
        if blocks is None:
            blocks = ()
        elif not self._is_list(blocks):
            return None
        if kind != "alltoall":
            others: Any = (other,)
        elif self._is_list(other):
            others = other
        else:
            return None
        first = others[0]
        if type(first) is not _ndarray:
            return None
        dtype = first.dtype
        shapes: list[Any] = []
        arrays: list[Any] = []
        for each in (*blocks, *others):
            if type(each) is not _ndarray or each.dtype is not dtype or not each.flags.carray:
                return None
            shape = each.shape
            shapes.append(shape)
            arrays.append(each if len(shape) == 1 else each.reshape(-1))
        count = len(blocks)
        if self._has_clash(arrays, count, kind):
            return None
        key = kind, dtype, id(op), root, *shapes
        plan = self.known.get(key)
        if plan is None:
            sizes = self._sizes_of_lists(kind, [each.size for each in arrays], count, root)
            plan = None if sizes is None else self._new_plain(key, dtype, sizes, op, root)
        if plan is None or plan.storage is not dtype:
            return None
        return plan, arrays if count else [*[None] * self._size, *arrays]

    def plan_of_lists(self, kind: str, blocks: Any, other: Any, op: ReduceOp | None, root: int | None) -> Plan | None:
        """Return the plan of a call on a list with one array per rank, as `lists` does, but without the flat arrays."""
        found = self.lists(kind, blocks, other, root=root, op=op)
        return None if found is None else found[0]

    # -- any other call

    def barrier(self) -> Plan:
        """Return the plan of a barrier."""
        return self.plan("barrier", None, ())

    def find_for_buffer(self, kind: str, buffer: Buffer, op: ReduceOp | None, root: Any) -> Plan:
        """Return the plan of a call on one buffer with equal counts on all ranks."""
        key = kind, buffer.dtype, id(op), root, buffer.shape
        found = self.known.get(key)
        return found or self._store_plan(key, self._planner.plan(kind, buffer.dtype, (buffer.count,), op=op, root=root))

    def plan(
        self,
        kind: str,
        dtype: DType | None,
        sizes: tuple[Any, ...],
        *,
        op: ReduceOp | None = None,
        root: int | None = None,
        agreed: tuple[int, ...] | None = None,
    ) -> Plan:
        """Return the plan of a call from the cache; make the plan if it is missing. See `Planner.plan`."""
        key = kind, dtype, id(op), root, sizes
        found = self.known.get(key)
        return found or self._store_plan(key, self._planner.plan(kind, dtype, sizes, op=op, root=root, agreed=agreed))

    def counting_plan(self, signature: Signature) -> Plan:
        """Return the plan with which a collective first gathers one integer from each rank."""
        key = (signature,)
        return self.known.get(key) or self._store_plan(key, self._planner.counting_plan(signature))

    # -- making plans

    def _new_plain(
        self, key: tuple[Any, ...], dtype: np.dtype[Any], sizes: tuple[Any, ...], op: ReduceOp | None, root: int | None
    ) -> Plan | None:
        """Make the plan of a call on NumPy arrays; return None if the arrays must be converted to another dtype."""
        try:
            element = from_numpy(dtype)
        except TypeError:
            return None
        if element.storage is not dtype:
            return None
        kind = key[0]
        agreed = () if spec_of(kind).private else None
        return self._store_plan(key, self._planner.plan(kind, element, sizes, op=op, root=root, agreed=agreed))

    def _store_plan(self, key: tuple[Any, ...], plan: Plan) -> Plan:
        """Store a call's plan in the cache. A full cache is emptied first."""
        if len(self.known) >= PLANS:
            self.known.clear()
        self.known[key] = plan
        return plan

    # -- sizes, in the form that `Planner.plan` expects

    def _sizes_of_parts(self, kind: str, whole: Any, other: Any) -> tuple[Any, ...] | None:
        size = self._size
        count = whole.size // size
        if not count or count * size != whole.size:
            return None
        counts = (count,) * size
        if kind != "alltoall":
            return (counts,) if other.size == count else None
        if other.size != whole.size or any(each.ndim and each.shape[0] % size for each in (whole, other)):
            return None  # each part must consist of whole rows
        return counts, counts

    def _sizes_of_lists(self, kind: str, sizes: list[int], count: int, root: int | None) -> tuple[Any, ...] | None:
        size, rank = self._size, self._rank
        blocks, others = tuple(sizes[:count]), tuple(sizes[count:])
        if kind == "alltoall":
            return (blocks, others) if count == size and blocks[rank] == others[rank] else None
        if root is not None and root != rank:
            if count:
                return None
            blocks = (0,) * rank + others + (0,) * (size - rank - 1)
        if len(blocks) != size or blocks[rank] != others[0]:
            return None
        return (blocks,)

    # -- lists and parts

    def _is_list(self, arrays: Any) -> bool:
        """Return whether `arrays` is a list or tuple with one array per rank."""
        return (type(arrays) is list or type(arrays) is tuple) and len(arrays) == self._size

    def _has_clash(self, arrays: list[Any], count: int, kind: str) -> bool:
        """Return whether an array that a call writes overlaps another. The first `count` arrays are one list."""
        blocks, others = arrays[:count], arrays[count:]
        written, read = (blocks, others) if kind in ("allgather", "gather") else (others, blocks)
        return clash(written, read) is not None

    def _split_parts(self, whole: Any) -> list[Any]:
        """Divide a flattened array into one equal part per rank."""
        flat = whole if whole.ndim == 1 else whole.reshape(-1)
        count = len(flat) // self._size
        return [flat[part * count : (part + 1) * count] for part in range(self._size)]
