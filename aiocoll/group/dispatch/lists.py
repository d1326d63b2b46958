"""Collectives on a list of an array per rank, all of them plain: found by their arrays, like those on equal parts.

As of `aiocoll.group.dispatch.parts`, nothing is left to check of arrays like those of an earlier call but that what is
written shares no memory with anything else.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from aiocoll.elements.buffers import clash, view
from aiocoll.elements.ops import ReduceOp
from aiocoll.engine.operations.plan import Plan
from aiocoll.group.dispatch.planner import Known, Planner, keep

__all__ = ["Lists"]

_ndarray: Final = np.ndarray


class Lists:
    """Finds the plans of one group for such calls.

    Args:
        planner: makes them.
        rank: this one.
        size: number of ranks.
    """

    def __init__(self, planner: Planner, rank: int, size: int) -> None:
        self._planner = planner
        self._rank = rank
        self._size = size
        # By the kind of call, the dtype, the root, the op, and all shapes; without a plan, where there is none.
        self._plans: dict[tuple[Any, ...], Known | None] = {}

    def find(
        self, kind: str, blocks: Any, other: Any, *, root: int | None = None, op: ReduceOp | None = None
    ) -> tuple[Plan, list[Any]] | None:
        """Return the plan of a call and its flat arrays; None if its arrays are not plain, or not right.

        Args:
            kind: "allgather", "gather", "scatter", "reduce_scatter", or "alltoall".
            blocks: an array per rank; of an alltoall, the inputs. None on a rank that has none.
            other: the array of this rank alone; of an alltoall, the outputs.
            root: the root, if there is one.
            op: how it reduces, if it does.
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
            # carray: contiguous, aligned and writeable.
            if type(each) is not _ndarray or each.dtype is not dtype or not each.flags.carray:
                return None
            shape = each.shape
            shapes.append(shape)
            arrays.append(each if len(shape) == 1 else each.reshape(-1))
        count = len(blocks)
        if self._clash(arrays, count, kind):
            return None
        call = kind, dtype, root, id(op), count, *shapes
        try:
            found = self._plans[call]
        except KeyError:
            plan = self._plan(kind, first, [each.size for each in arrays], count, root, op)
            found = keep(self._plans, call, None if plan is None else (plan, op))
        # Of dtypes that are equal, one may be an alias that NumPy would convert.
        if found is None or found[0].storage is not dtype:
            return None
        return found[0], arrays if count else [*[None] * self._size, *arrays]

    def _is_list(self, arrays: Any) -> bool:
        """Whether it is a plain list of one array per rank."""
        return (type(arrays) is list or type(arrays) is tuple) and len(arrays) == self._size

    def _clash(self, arrays: list[Any], count: int, kind: str) -> bool:
        """Whether any array that is written shares memory with another one; the first `count` are the blocks."""
        blocks, others = arrays[:count], arrays[count:]
        written, read = (blocks, others) if kind in ("allgather", "gather") else (others, blocks)
        return clash(written, read) is not None

    def _plan(
        self, kind: str, like: Any, sizes: list[int], count: int, root: int | None, op: ReduceOp | None
    ) -> Plan | None:
        try:
            dtype = view(like).dtype
        except TypeError:
            return None
        if dtype.storage is not like.dtype:
            return None
        size, rank = self._size, self._rank
        blocks, others = tuple(sizes[:count]), tuple(sizes[count:])
        if kind == "alltoall":
            right = count == size and blocks[rank] == others[rank]
            return self._planner.plan(kind, dtype, (blocks, others), agreed=()) if right else None
        if root is not None and root != rank:
            if count:
                return None
            blocks = (0,) * rank + others + (0,) * (size - rank - 1)
        if len(blocks) != size or blocks[rank] != others[0]:
            return None
        return self._planner.plan(kind, dtype, (blocks,), op=op, root=root, agreed=None if root is None else ())
