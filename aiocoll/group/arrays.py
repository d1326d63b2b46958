"""`empty`: arrays that peers can read where they lie."""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from aiocoll.elements.dtypes import of_numpy
from aiocoll.group.launch import Launcher
from aiocoll.log import logger

__all__ = ["Arrays"]

#: A rank contributes this part of a lane's block, or less, by showing it all: there is nothing to be saved.
_SMALL_PART = 4


class Arrays(Launcher):
    """The part of a group that makes arrays."""

    async def empty(self, shape: int | Sequence[int], dtype: DTypeLike) -> NDArray[Any]:
        """Return a new array, of any content, in memory that the other ranks of this host can read.

            ordinary array       rank 0 copies a piece into shared memory; rank 1 reduces it from there
            array of `empty`     rank 1 reduces it from where it lies

        An `allreduce` of more than 64 KiB then copies nothing that it does not have to, where all ranks of the group
        are on one host and share memory, and the op is applied in pieces (of float16 and narrower, sums are not). It
        gives the same bits as on other arrays, which other ranks may use. All other calls treat it as any other array.

        Any array inside it is as good: a slice or another shape of it, or a tensor that shares its memory. It belongs
        to this rank alone, is no call that others have to make too, and ends like any other array, with its last view.
        It also serves the groups that `shrink` and `new_group` make of the same ranks.

        Args:
            shape: a number of elements, or a tuple.
            dtype: one that can be exchanged, as NumPy takes it; bfloat16 and float8 are those of ml_dtypes.

        Returns:
            The array, C-contiguous. It lies in ordinary memory if it is small, if other memory would gain nothing, or
            (a warning says so once) if there is none.

        Raises:
            TypeError: `shape` or `dtype` is none, or such elements cannot be exchanged.
            ValueError: a negative number, or more bytes than there are addresses.
            MemoryError: there is no memory at all.
            GroupClosedError: this rank has closed the group.
            GroupRevokedError: the group has failed.

        Cost: 0.3 ms per MiB, in many turns of the loop; 1 file descriptor here, before Python 3.13 2 here and 1 at
        the right neighbour, so make few large arrays and slice them. The first call on each also passes it on.
        """
        self._check()
        sizes = _sizes(shape)
        try:
            kind = np.dtype(dtype)
        except TypeError as error:
            raise TypeError(f"dtype={dtype!r} is no dtype: {error}") from None
        of_numpy(kind)
        nbytes = math.prod(sizes) * kind.itemsize
        if nbytes > sys.maxsize:
            raise ValueError(f"shape={shape!r} of {kind} is {nbytes} bytes: there are not so many addresses")
        registered_memory, piece_nbytes = self._endpoint.registered_memory, self._member.piece_nbytes
        if registered_memory is None or not piece_nbytes or self._size == 1 or nbytes <= piece_nbytes // _SMALL_PART:
            return np.empty(sizes, kind)
        try:
            memory = await registered_memory.make(nbytes)
        except OSError as error:
            if not registered_memory.troubled:
                registered_memory.troubled = True
                logger.warning(
                    "empty() on rank %d of group %r gives ordinary memory, whose pieces are copied: %s",
                    self._rank,
                    self._member.name,
                    str(error),  # not what it comes from: a handler may keep the record
                    extra=self._member.log_extra,
                )
            return np.empty(sizes, kind)
        return memory.view(kind).reshape(sizes)


def _sizes(shape: int | Sequence[int]) -> tuple[int, ...]:
    try:
        sizes = tuple(map(operator.index, shape if isinstance(shape, tuple | list) else (shape,)))
    except TypeError:
        raise TypeError(f"shape must be an int or a tuple of ints, not {shape!r}") from None
    if any(size < 0 for size in sizes):
        raise ValueError(f"shape={shape!r} has a negative number")
    return sizes
