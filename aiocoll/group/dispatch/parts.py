"""Collectives on a plain array of as many equal parts as there are ranks: found by their arrays, cut without a check.

Nearly every such call is on arrays like those of an earlier one. Of these nothing is left to check but that both do not
share memory, and the rest takes a fraction of the time that checking, cutting, and finding the plan take otherwise.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from aiocoll.elements.buffers import view
from aiocoll.elements.ops import ReduceOp
from aiocoll.engine.operations.plan import Plan
from aiocoll.group.dispatch.planner import Known, Planner, keep

__all__ = ["Parts"]

_ndarray: Final = np.ndarray
#: Compares bounds, which is exact for contiguous arrays.
_share: Final = np.may_share_memory


class Parts:
    """Finds the plans of one group for such calls.

    Args:
        planner: makes them.
        size: number of ranks.
    """

    def __init__(self, planner: Planner, size: int) -> None:
        self._planner = planner
        self._size = size
        # By the kind of call, the dtype, the shapes of both arrays, and the op; without a plan, where there is none.
        self._plans: dict[tuple[Any, ...], Known | None] = {}

    def find(self, kind: str, whole: Any, other: Any, op: ReduceOp | None) -> tuple[Plan, list[Any]] | None:
        """Return the plan of a call and its flat arrays; None if its arrays are not plain, or not right.

        Args:
            kind: "allgather", "reduce_scatter", or "alltoall".
            whole: the array of all parts; of an alltoall, the input.
            other: an array of one part; of an alltoall, the output.
            op: how it reduces, if it does.
        """
        if type(whole) is not _ndarray or type(other) is not _ndarray:
            return None
        dtype = whole.dtype
        # carray: contiguous, aligned and writeable.
        if other.dtype is not dtype or not whole.flags.carray or not other.flags.carray or _share(whole, other):
            return None
        call = kind, dtype, whole.shape, other.shape, id(op)
        try:
            found = self._plans[call]
        except KeyError:
            plan = self._plan(kind, whole, other, op)
            found = keep(self._plans, call, None if plan is None else (plan, op))
        # Of dtypes that are equal, one may be an alias that NumPy would convert.
        if found is None or found[0].storage is not dtype:
            return None
        arrays = self._cut(whole)
        if kind == "alltoall":
            arrays += self._cut(other)
        else:
            arrays.append(other if other.ndim == 1 else other.reshape(-1))
        return found[0], arrays

    def _plan(self, kind: str, whole: Any, other: Any, op: ReduceOp | None) -> Plan | None:
        try:
            dtype = view(other).dtype
        except TypeError:
            return None
        size = self._size
        count = whole.size // size
        if not count or count * size != whole.size or dtype.storage is not whole.dtype:
            return None
        counts = (count,) * size
        if kind != "alltoall":
            return self._planner.plan(kind, dtype, (counts,), op=op) if other.size == count else None
        if other.size != whole.size or any(each.ndim and each.shape[0] % size for each in (whole, other)):
            return None  # parts are rows
        return self._planner.plan(kind, dtype, (counts, counts), agreed=())

    def _cut(self, whole: Any) -> list[Any]:
        """Return the flat parts of an array, by rank."""
        flat = whole if whole.ndim == 1 else whole.reshape(-1)
        count = len(flat) // self._size
        return [flat[start : start + count] for start in range(0, len(flat), count)]
