"""Overlap check: the calls of a coalescing block run in no fixed order, so none may write memory that another uses."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aiocoll.engine.fusion.deferred_completion import DeferredCompletion
from aiocoll.engine.fusion.layout import Layout

__all__ = ["Span", "check_no_overlap", "check_spans"]

#: The memory of one array: start address, end address, index of the call that uses it, and whether that call writes it.
Span = tuple[int, int, int, bool]


def check_no_overlap(layout: Layout, members: Sequence[DeferredCompletion]) -> None:
    """Raise an error if two calls of a coalescing block share memory that at least one of them writes.

    Raises:
        ValueError: two members share memory. The text names both.

    Time: linear if each array owns its memory. If some arrays are views of others, n log n and ten times as long.
    """
    if not _own_their_memory(layout, members):
        check_spans(_spans(layout, members), members)


def check_spans(spans: Iterable[Span], members: Sequence[DeferredCompletion]) -> None:
    """Raise an error if two calls share memory that one of them writes, given the memory spans of their arrays.

    Time: n log n.
    """
    reading, writing = _FarthestEnds(), _FarthestEnds()
    for start, end, member, writes in sorted(spans):
        other = writing.find_overlap(start, member)
        if other is None and writes:
            other = reading.find_overlap(start, member)
        if other is not None:
            first, second = sorted((member, other))
            raise ValueError(
                f"members {first} ({members[first].op}) and {second} ({members[second].op}) of a coalescing block "
                "share memory, and at least one of them writes to it: await the first call before making the second"
            )
        (writing if writes else reading).add(end, member)


class _FarthestEnds:
    """The farthest end address of all memory spans so far, and the farthest end address in any other call."""

    def __init__(self) -> None:
        self._end, self._member = 0, -1
        self._other_end, self._other = 0, -1

    def add(self, end: int, member: int) -> None:
        if member == self._member:
            self._end = max(self._end, end)
        elif end > self._end:
            self._other_end, self._other = self._end, self._member
            self._end, self._member = end, member
        elif end > self._other_end:
            self._other_end, self._other = end, member

    def find_overlap(self, start: int, member: int) -> int | None:
        """Return a member other than `member` with a memory span that ends after `start`; None if there is none."""
        if self._member != member:
            return self._member if self._end > start else None
        return self._other if self._other_end > start else None


def _arrays(layout: Layout, members: Sequence[DeferredCompletion]) -> Iterator[tuple[int, NDArray[Any], bool]]:
    for bucket in layout.buckets:
        if bucket.plan is None:
            for position in bucket.members:
                for array in _arrays_read_by(members[position]):
                    yield position, array, False
            continue
        for position in bucket.members:
            for buffer, array in enumerate(members[position].arrays):
                if array is not None:
                    yield position, array, buffer in bucket.writes


def _arrays_read_by(member: DeferredCompletion) -> Sequence[NDArray[Any]]:
    """Return the host arrays that a recorded call without a plan reads."""
    call = member.call
    return () if call.is_on_device or call.arrays is None else call.arrays


def _spans(layout: Layout, members: Sequence[DeferredCompletion]) -> Iterator[Span]:
    for position, array, writes in _arrays(layout, members):
        if array.nbytes:
            start = array.__array_interface__["data"][0]
            yield start, start + array.nbytes, position, writes


def _own_their_memory(layout: Layout, members: Sequence[DeferredCompletion]) -> bool:
    """Return whether the arrays of different calls are parts of different allocations, so that none overlap."""
    ndarray = np.ndarray
    seen: set[int] = set()
    for bucket in layout.buckets:
        if bucket.plan is None:
            if any(map(_arrays_read_by, map(members.__getitem__, bucket.members))):
                return False  # for so few calls, the fast path does not pay off
            continue
        arrays = [members[position].arrays for position in bucket.members]
        if len(arrays[0]) == 1:
            # Fast path for the most common case: each call has one array, which owns its memory or is a view of an
            # array that does.
            owners = [array if (base := array.base) is None else base for (array,) in arrays]
            if set(map(type, owners)) != {ndarray}:
                return False
            mine = set(map(id, owners))
            if len(mine) < len(owners) or not seen.isdisjoint(mine):
                return False
            seen |= mine
            continue
        for each in arrays:
            owners = [array if array.base is None else array.base for array in each if array is not None]
            mine = set(map(id, owners))
            if any(type(owner) is not ndarray for owner in owners) or not seen.isdisjoint(mine):
                return False
            seen |= mine
    return True
