"""Fast conversion of bfloat16 and float16: each 32-bit word holds two values, separated by integer operations.

NumPy has fast loops for 32-bit integers and floats, but none for 16-bit floats. The words of an array are therefore
unpacked into a `Stack`: the float32 values of all low codes, then those of all high codes. After the computation they
are packed again. Byte order does not matter, because each code returns to its half of the word.

A bfloat16 is the upper half of a float32. A float16, shifted to the exponent and mantissa of a float32, is its value
times 2**-112; subnormal float16 become subnormal float32. Sums of these scaled values are rounded as the unscaled sums
would be: each is a multiple of 2**-136, and float32 reaches 2**-149. Infinity and NaN would look like numbers of at
least 2**-96, so arrays with them are not packed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

__all__ = ["BFLOAT16", "FLOAT16", "Codes", "Stack"]

Words = npt.NDArray[np.uint32]


class Stack:
    """The unpacked float32 values of `count` words: all values of low halves, then all values of high halves.

    Attributes:
        bits: all values, as unsigned integers.
        values: all values, as float32.
        low: the first half of `bits`.
        high: the second half of `bits`.
        low_signed: `low` as signed integers.
        high_signed: `high` as signed integers.
        low_codes: `low` as 16-bit integers, two per value.
    """

    __slots__ = ("bits", "high", "high_signed", "low", "low_codes", "low_signed", "values")

    def __init__(self, memory: Words, count: int) -> None:
        self.bits: Words = memory[: 2 * count]
        self.values: npt.NDArray[np.float32] = self.bits.view(np.float32)
        self.low: Words = self.bits[:count]
        self.high: Words = self.bits[count:]
        self.low_signed: npt.NDArray[np.int32] = self.low.view(np.int32)
        self.high_signed: npt.NDArray[np.int32] = self.high.view(np.int32)
        self.low_codes: npt.NDArray[np.uint16] = self.low.view(np.uint16)


class Codes(Protocol):
    """The interface of a 16-bit float type: unpack its values to float32, and pack float32 values."""

    def unpack(self, words: Words, into: Stack) -> int:
        """Convert the 16-bit values in `words` to float32 values in a stack.

        Returns:
            The code of the largest magnitude, or 0 if `fits` does not need it.
        """

    def pack(self, total: Stack, spare: Stack, target: Words, rounded: bool) -> None:
        """Round the values in `total` to nearest, ties to even, and write them to `target` as 16-bit values.

        This overwrites `total` and `spare`.

        Args:
            total: the values.
            spare: another stack of the same length.
            target: receives the codes.
            rounded: whether the values need no rounding.
        """

    def fits(self, total: Stack, spare: Stack, largest: int, terms: int) -> bool:
        """Return whether `total` is exact enough to be rounded by `pack`.

        Args:
            total: sums of unpacked values.
            spare: another stack, which is overwritten.
            largest: the largest code that `unpack` returned.
            terms: number of values that were added.
        """


def _word(value: int) -> npt.NDArray[np.uint32]:
    # NumPy is 2× faster with a 0-dimensional array as an operand than with a scalar.
    return np.array(value, np.uint32)


_ONE, _THREE, _THIRTEEN, _SIXTEEN = _word(1), _word(3), _word(13), _word(16)
_THREE_SIGNED = np.array(3, np.int32)
_SIGN, _SIZE, _HIGH = _word(0x80000000), _word(0x7FFFFFFF), _word(0xFFFF0000)
_BELOW_HALF_16, _BELOW_HALF_13 = _word(0x7FFF), _word(0xFFF)
# Mask for sign, exponent and mantissa of a float16 after an arithmetic shift by three.
_FLOAT16_BITS = _word(0x8FFFE000)
_FLOAT16_INFINITY = 0x7C00
_FLOAT16_LARGEST = 0x7BFF
# Bits of the smallest float32 sum that rounds to infinity in float16: 65520, scaled by 2**-112.
_FLOAT16_OVERFLOW = 0x0F7FF000

_shl, _shr, _and, _or, _add = np.left_shift, np.right_shift, np.bitwise_and, np.bitwise_or, np.add
_largest: Callable[..., Any] = np.maximum.reduce  # mypy finds no overload for one argument in the stubs of NumPy 2.5
# The product of these numbers is zero only if a library has set flush-to-zero in this thread. Then packing is inexact.
_TINY, _UNIT = 5e-324, 1.0


def _merge(total: Stack, target: Words) -> None:
    """Write the upper 16 bits of all float32 values to `target`, two values per word."""
    low, high = total.low, total.high
    _shr(low, _SIXTEEN, low)
    _and(high, _HIGH, high)
    _or(low, high, target)


class _Bfloat16:
    def unpack(self, words: Words, into: Stack) -> int:
        _shl(words, _SIXTEEN, into.low)
        _and(words, _HIGH, into.high)
        return 0

    def pack(self, total: Stack, spare: Stack, target: Words, rounded: bool) -> None:
        # Rounding cannot turn a NaN into zero: it carries into the sign bit only if one of the lower 16 bits is set.
        # These bits are zero in the operands, and so in every NaN that the processor propagates or generates.
        if not rounded:
            bits, last = total.bits, spare.bits
            _shr(bits, _SIXTEEN, last)
            _and(last, _ONE, last)
            _add(bits, last, bits)
            _add(bits, _BELOW_HALF_16, bits)
        _merge(total, target)

    def fits(self, total: Stack, spare: Stack, largest: int, terms: int) -> bool:
        return True


class _Float16:
    def unpack(self, words: Words, into: Stack) -> int:
        low, high = into.low_signed, into.high_signed
        # Doubling each code shifts its sign bit into the lowest bit of the next code. The shift below removes that bit.
        _add(words, words, into.low)
        largest = int(_largest(into.low_codes)) >> 1
        # An arithmetic shift copies the sign into the free bits. The mask below clears the copies.
        _shl(words, _SIXTEEN, into.low)
        _shr(low, _THREE_SIGNED, low)
        _shr(words.view(np.int32), _THREE_SIGNED, high)
        _and(into.bits, _FLOAT16_BITS, into.bits)
        return largest

    def pack(self, total: Stack, spare: Stack, target: Words, rounded: bool) -> None:
        bits, last = total.bits, spare.bits
        if not rounded:
            _shr(bits, _THIRTEEN, last)
            _and(last, _ONE, last)
            _add(bits, last, bits)
            _add(bits, _BELOW_HALF_13, bits)
        _and(bits, _SIGN, last)
        _shl(bits, _THREE, bits)
        _or(bits, last, bits)
        _merge(total, target)

    def fits(self, total: Stack, spare: Stack, largest: int, terms: int) -> bool:
        if largest >= _FLOAT16_INFINITY or not _TINY * _UNIT:
            return False
        # Each doubling of the number of terms increases the exponent of the sum by at most 1.
        if largest + ((terms - 1).bit_length() << 10) <= _FLOAT16_LARGEST:
            return True
        _and(total.bits, _SIZE, spare.bits)
        return int(_largest(spare.bits)) < _FLOAT16_OVERFLOW


BFLOAT16: Codes = _Bfloat16()
FLOAT16: Codes = _Float16()
