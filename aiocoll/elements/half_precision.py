"""Reductions of narrow floats (at most 16 bits), computed in float32 and rounded once.

Arrays are processed in pieces whose float32 values fit into the second-level cache. `aiocoll.elements.packed` computes
long pieces of bfloat16, and long pieces of float16 without infinity and NaN. The conversions of
`aiocoll.elements.dtypes` compute all other pieces. Both give the same bits, except the payload of a NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import Context
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from aiocoll.elements.dtypes import DType, from_float32, to_float32
from aiocoll.elements.packed import BFLOAT16, FLOAT16, Codes, Stack

__all__ = ["Kind", "half_fold", "half_map"]

Array = npt.NDArray[Any]
Combine = Callable[[Array, Array, Array], Any]
Fold = Callable[[Sequence[Array], Array], None]
Kind = Literal["sum", "product", "select"]
# The last step of a reduction: a ufunc and its second operand.
Finalize = tuple[np.ufunc, float]

# Number of elements per piece that is converted to float32 and back. A piece takes two float32 arrays of 128 KiB, and
# the scratch arrays of the conversions.
_PIECE = 32 * 1024
# Number of 32-bit words per packed piece. A piece takes two stacks of 256 KiB. Smaller pieces would save memory, but
# NumPy's call overhead is already a quarter of the time.
_WORDS = 32 * 1024
# Number of 32-bit words per cache line.
_LINE = 16
# Minimum number of float16 elements for packing. With fewer, the conversions are faster, since packing needs many
# NumPy calls.
_FLOAT16_FROM = 4096
# Largest divisor p for which quotients of packed float16 are rounded correctly. Packing divides the scaled values. An
# exact quotient either is a rounding boundary, or is at least 1 / 2p of float16's smallest step away from every
# boundary. The computed quotient is off by at most 2**-14 of a step, so it rounds to the same value.
_FLOAT16_DIVISORS = 4096
# The factors 1, 1/2, ..., 1/4096. Multiplying by such a factor gives the same result as dividing by its inverse.
_FLOAT16_FACTORS = frozenset(2.0**-k for k in range(13))


def half_fold(combine: Combine, dtype: DType, kind: Kind, finalize: Finalize | None = None) -> Fold:
    """Return a function ``fold(inputs, out)`` that reduces all inputs in order, applies `finalize`, and rounds.

    Args:
        combine: a function of float32 arrays.
        dtype: element type of the arrays, of kind ``"half"``.
        kind: ``"sum"``, ``"product"``, or ``"select"`` if each result is one of the inputs.
        finalize: applied to the float32 result before it is rounded, or None.
    """
    convert = _converting(combine, dtype, finalize)
    if dtype.name == "bfloat16":
        return _in_pieces(_packing(combine, BFLOAT16, kind, finalize, convert), 2 * _WORDS)
    plain = _in_pieces(convert, _PIECE)
    if dtype.name != "float16":
        return plain
    packs = kind != "product" and (finalize is None or _divides(finalize))
    large = _in_pieces(_packing(combine, FLOAT16, kind, finalize, convert), 2 * _WORDS) if packs else plain
    native = kind != "select" and finalize is None

    def fold(inputs: Sequence[Array], out: Array) -> None:
        if len(out) >= _FLOAT16_FROM:
            large(inputs, out)
        elif native and len(inputs) == 2:
            # One call of NumPy's float16 loop gives the same result.
            _silently(combine, inputs[0], inputs[1], out)
        else:
            plain(inputs, out)

    return fold


def half_map(dtype: DType, finalize: Finalize) -> Callable[[Array, Array], None]:
    """Return a function ``f(src, out)`` that computes ``finalize(src)`` in float32 and writes the rounded result."""
    fold = half_fold(np.add, dtype, "sum", finalize)
    return lambda src, out: fold((src,), out)


def _divides(finalize: Finalize) -> bool:
    """Return whether `finalize` divides by a number that packed float16 supports, possibly by a multiplication."""
    ufunc, operand = finalize
    return operand <= _FLOAT16_DIVISORS if ufunc is np.divide else operand in _FLOAT16_FACTORS


# Unused contexts in which NumPy's warnings are off. A call takes one from the list and returns it, so nested calls
# never share a context.
_SILENT: list[Context] = []


def _silently(function: Callable[..., Any], *args: Any) -> None:
    """Call a function with NumPy's warnings turned off, 7× faster than with `np.errstate`."""
    try:
        context = _SILENT.pop()
    except IndexError:
        context = Context()
        context.run(np.seterr, all="ignore")
    try:
        context.run(function, *args)
    finally:
        _SILENT.append(context)


def _in_pieces(piece: Fold, count: int) -> Fold:
    def fold(inputs: Sequence[Array], out: Array) -> None:
        if len(out) <= count:
            _silently(piece, inputs, out)
            return
        for start in range(0, len(out), count):
            part = slice(start, start + count)
            _silently(piece, [x[part] for x in inputs], out[part])

    return fold


def _single(number: float) -> npt.NDArray[np.float32]:
    # Use the canonical NaN, because packed values support no other NaN.
    with np.errstate(over="ignore"):
        return np.array(np.float32(np.nan if np.isnan(number) else number))


def _converting(combine: Combine, dtype: DType, finalize: Finalize | None) -> Fold:
    """Return a fold for one piece that converts to float32 and back, which works for every type and value."""
    up, down = to_float32(dtype), from_float32(dtype)
    ufunc, operand = (None, None) if finalize is None else (finalize[0], _single(finalize[1]))

    def piece(inputs: Sequence[Array], out: Array) -> None:
        total, term = np.empty(len(out), np.float32), np.empty(len(out), np.float32)
        up(inputs[0], total)
        for x in inputs[1:]:
            up(x, term)
            combine(total, term, total)
        if ufunc is not None:
            ufunc(total, operand, total)
        down(total, out)

    return piece


class _Scratch:
    """Scratch memory, used by one fold at a time."""

    def __init__(self) -> None:
        memory = np.empty(5 * _WORDS + _LINE, np.uint32)
        # Align the memory to cache lines: additions are then 1.3× faster.
        memory = memory[-memory.__array_interface__["data"][0] // 4 % _LINE :]
        self._total, self._term = memory[: 2 * _WORDS], memory[2 * _WORDS : 4 * _WORDS]
        self._staged = memory[4 * _WORDS :]
        self._stacks: dict[int, tuple[Stack, Stack]] = {}

    def stacks(self, count: int) -> tuple[Stack, Stack]:
        """Return two stacks with room for `count` words."""
        found = self._stacks.get(count)
        if found is None:
            if len(self._stacks) == _LENGTHS:
                self._stacks.clear()
            found = self._stacks[count] = Stack(self._total, count), Stack(self._term, count)
        return found

    def view_words(self, x: Array) -> npt.NDArray[np.uint32]:
        """Return `x` as 32-bit words: as a view, or as a padded copy if its length is odd or it is unaligned."""
        if not len(x) % 2:
            words = x.view(np.uint32)
            if words.flags.aligned:
                return words
        staged = self._staged[: (len(x) + 1) // 2]
        staged[-1] = 0
        staged.view(x.dtype)[: len(x)] = x
        return staged


# Maximum number of lengths with cached stacks. The pieces of one operation have few different lengths.
_LENGTHS = 16
# Unused scratch memory. A fold takes an item from this list and returns it. `pop` and `append` are atomic, so threads
# and nested calls never share an item.
_FREE: list[_Scratch] = []


def _packing(combine: Combine, codes: Codes, kind: Kind, finalize: Finalize | None, convert: Fold) -> Fold:
    """Return a fold for one piece that uses packed values, or calls `convert` where packing is inexact."""
    select = kind == "select"
    ufunc, operand = (None, None) if finalize is None else (finalize[0], _single(finalize[1]))

    def compute(inputs: Sequence[Array], out: Array, scratch: _Scratch) -> bool:
        total, term = scratch.stacks((len(out) + 1) // 2)
        largest = codes.unpack(scratch.view_words(inputs[0]), total)
        values, more = total.values, term.values
        for x in inputs[1:]:
            largest = max(largest, codes.unpack(scratch.view_words(x), term))
            combine(values, more, values)
        if ufunc is not None:
            ufunc(values, operand, values)
        if not codes.fits(total, term, largest, 1 if select else len(inputs)):
            return False
        if not len(out) % 2 and (words := out.view(np.uint32)).flags.aligned:
            codes.pack(total, term, words, select)
        else:
            codes.pack(total, term, total.low, select)
            out[:] = total.low_codes.view(out.dtype)[: len(out)]
        return True

    def piece(inputs: Sequence[Array], out: Array) -> None:
        if not len(out):
            return
        try:
            scratch = _FREE.pop()
        except IndexError:
            scratch = _Scratch()
        try:
            done = compute(inputs, out, scratch)
        finally:
            _FREE.append(scratch)
        if not done:
            convert(inputs, out)

    return piece
