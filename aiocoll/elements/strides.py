"""The check that no two elements of a strided array share memory."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

__all__ = ["check_disjoint"]


def check_disjoint(strides: Sequence[int], shape: Sequence[int], itemsize: int, name: str, instead: str) -> None:
    """Check that no two elements of an array share memory; those of expanded arrays and overlapping windows do.

    Args:
        strides: strides of the array, in the unit of `itemsize`.
        shape: shape of the array.
        itemsize: size of an element.
        name: name of the argument in the error message.
        instead: the remedy in the error message: an expression to pass instead.

    Raises:
        ValueError: two elements share memory.
    """
    if 0 in shape:
        return
    extent, disjoint = itemsize, True
    for stride, length in sorted((abs(stride), length) for stride, length in zip(strides, shape, strict=True)):
        if length > 1:
            disjoint = disjoint and stride >= extent
            extent += (length - 1) * stride
    if not disjoint and not _are_disjoint(strides, shape, itemsize):
        raise ValueError(f"{name} has elements that share memory, and the result is written to it; pass {instead}")


def _are_disjoint(strides: Sequence[int], shape: Sequence[int], itemsize: int) -> bool:
    """Return whether no two elements of an array with interleaved axes share memory, in n log n time."""
    offsets = np.zeros(1, np.int64)
    for stride, length in zip(strides, shape, strict=True):
        offsets = (offsets[:, None] + stride * np.arange(length)).reshape(-1)
    offsets.sort()
    return bool((np.diff(offsets) >= itemsize).all())
