"""Strided arrays whose elements share memory."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

__all__ = ["check_apart"]


def check_apart(strides: Sequence[int], shape: Sequence[int], itemsize: int, name: str, instead: str) -> None:
    """Refuse to write to an array whose elements share memory: expanded, or of windows that overlap.

    Args:
        strides: in the unit of `itemsize`.
        shape: of the array.
        itemsize: of an element.
        name: of the argument.
        instead: what to pass.

    Raises:
        ValueError: two elements share memory.
    """
    if 0 in shape:
        return
    extent, apart = itemsize, True
    for stride, length in sorted((abs(stride), length) for stride, length in zip(strides, shape, strict=True)):
        if length > 1:
            apart = apart and stride >= extent
            extent += (length - 1) * stride
    if not apart and not _lie_apart(strides, shape, itemsize):
        raise ValueError(f"{name} has elements that share memory, and the result is written to it; pass {instead}")


def _lie_apart(strides: Sequence[int], shape: Sequence[int], itemsize: int) -> bool:
    """Whether elements of axes that are interleaved have memory of their own; n log n, for the few such arrays."""
    offsets = np.zeros(1, np.int64)
    for stride, length in zip(strides, shape, strict=True):
        offsets = (offsets[:, None] + stride * np.arange(length)).reshape(-1)
    offsets.sort()
    return bool((np.diff(offsets) >= itemsize).all())
