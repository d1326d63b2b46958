"""Element types of buffers and messages, and exact conversions between narrow floats and float32.

A `DType` names an element type on the wire and defines its storage: the dtype of the flat NumPy arrays that hold it.
NumPy has no bfloat16, float8 types, or integers of 4 and 2 bits. bfloat16 is stored as uint16, the others as uint8.
This module does not need `ml_dtypes`: it recognizes the arrays of that library by the name of their dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from importlib import import_module
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from aiocoll.elements.element_type import DType, Kind
from aiocoll.elements.records import LAYOUT, Record, record, record_by_code, record_by_name
from aiocoll.errors import BackendUnavailableError

__all__ = ["DType", "Kind", "array_dtype", "by_code", "by_name", "from_float32", "from_numpy", "to_float32"]

Convert = Callable[[npt.NDArray[Any], npt.NDArray[Any]], None]


class _Number(DType):
    """A numeric element type. It is predefined in every process, so pickles contain only its name."""

    __slots__ = ()

    def __reduce__(self) -> tuple[Callable[[str], DType], tuple[str]]:
        return by_name, (self.name,)


class _Float8(NamedTuple):
    """The bit layout of a float8 type: a sign bit, then exponent and mantissa.

    Attributes:
        mantissa: number of mantissa bits.
        bias: exponent bias.
        overflow: the code after the code of the largest finite value. It means infinity or NaN.
        nan: the code of NaN.
        unsigned_zero: there is no -0. Its code is the only NaN.
    """

    mantissa: int
    bias: int
    overflow: int
    nan: int
    unsigned_zero: bool

    def magnitudes(self) -> npt.NDArray[np.float64]:
        """Return the values of codes 0 to `overflow` in ascending order, as if code `overflow` were finite, too."""
        codes = np.arange(self.overflow + 1)
        exponent, mantissa = codes >> self.mantissa, codes & ((1 << self.mantissa) - 1)
        hidden = np.where(exponent > 0, 1 << self.mantissa, 0)
        scale = np.maximum(exponent, 1) - self.bias - self.mantissa
        values: npt.NDArray[np.float64] = np.ldexp((mantissa + hidden).astype(np.float64), scale)
        return values


_FLOAT8: Mapping[str, _Float8] = MappingProxyType(
    {
        "float8_e4m3fn": _Float8(mantissa=3, bias=7, overflow=0x7F, nan=0x7F, unsigned_zero=False),
        "float8_e5m2": _Float8(mantissa=2, bias=15, overflow=0x7C, nan=0x7E, unsigned_zero=False),
        "float8_e4m3fnuz": _Float8(mantissa=3, bias=8, overflow=0x80, nan=0x80, unsigned_zero=True),
        "float8_e5m2fnuz": _Float8(mantissa=2, bias=16, overflow=0x80, nan=0x80, unsigned_zero=True),
    }
)


#: Integer types with fewer than 8 bits, each element stored in one byte.
_NARROW = ("int4", "uint4", "int2", "uint2")


def _define() -> tuple[DType, ...]:
    carriers = {"bfloat16": "uint16"} | dict.fromkeys((*_FLOAT8, *_NARROW), "uint8")
    # The code of a type is its position in this list: append types, never insert one.
    kinds: tuple[tuple[Kind, str], ...] = (
        ("bool", "bool"),
        ("int", "int8 int16 int32 int64"),
        ("uint", "uint8 uint16 uint32 uint64"),
        ("float", "float32 float64"),
        ("complex", "complex64 complex128"),
        ("half", "float16 bfloat16 float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz"),
        ("int", "int4"),
        ("uint", "uint4"),
        ("int", "int2"),
        ("uint", "uint2"),
    )
    pairs = [(kind, name, np.dtype(carriers.get(name, name))) for kind, names in kinds for name in names.split()]
    return tuple(_Number(name, code, s.itemsize, s, kind) for code, (kind, name, s) in enumerate(pairs, start=1))


_ALL = _define()
_BY_NAME: Mapping[str, DType] = MappingProxyType({d.name: d for d in _ALL})
_NATIVE: Mapping[np.dtype[Any], DType] = MappingProxyType({d.storage: d for d in _ALL if d.name == d.storage.name})


def from_numpy(dtype: np.dtype[Any]) -> DType:
    """Return the element type for a dtype of NumPy or ml_dtypes.

    Raises:
        TypeError: arrays of this dtype cannot be exchanged.
    """
    found = _NATIVE.get(dtype)
    if found is not None:
        return found
    if dtype.type.__module__ == "ml_dtypes" and dtype.name in _BY_NAME:
        return _BY_NAME[dtype.name]
    if (made := record(dtype)) is not None:
        return made
    if not dtype.isnative and dtype.newbyteorder("=") in _NATIVE:
        hint = "convert it first: x.astype(x.dtype.newbyteorder('='))"
        raise TypeError(f"dtype {dtype.str!r} is {dtype.name} in foreign byte order; {hint}")
    raise TypeError(f"dtype {dtype} is not supported; use one of {', '.join(_BY_NAME)}")


def by_name(name: str) -> DType:
    """Return the element type with the name `name`: a numeric type, or a structured type that this process uses.

    Raises:
        TypeError: there is no such type.
    """
    found = _BY_NAME.get(name) or record_by_name(name)
    if found is None:
        raise TypeError(f"dtype {name!r} is not supported; use one of {', '.join(_BY_NAME)}")
    return found


def by_code(code: int) -> DType:
    """Return the element type with the code `code`: a numeric type, or a structured type that this process uses.

    Raises:
        ValueError: there is no such type.
    """
    if code & LAYOUT and (found := record_by_code(code)) is not None:
        return found
    if not 1 <= code <= len(_ALL):
        raise ValueError(f"dtype code {code} is unknown; codes go from 1 to {len(_ALL)}")
    return _ALL[code - 1]


def array_dtype(dtype: DType) -> np.dtype[Any]:
    """Return the NumPy dtype of a user's arrays of this element type, from ml_dtypes if NumPy has none.

    Raises:
        BackendUnavailableError: `dtype` needs ml_dtypes, which is not installed.
    """
    if isinstance(dtype, Record):
        return dtype.array
    if dtype in _NATIVE.values():
        return dtype.storage
    try:
        ml_dtypes = import_module("ml_dtypes")
    except ImportError as exc:
        raise BackendUnavailableError(f"arrays of {dtype.name} need ml_dtypes: pip install ml_dtypes") from exc
    extension: np.dtype[Any] = np.dtype(getattr(ml_dtypes, dtype.name))
    return extension


def to_float32(dtype: DType) -> Convert:
    """Return a function ``widen(src, out)`` that converts stored values of `dtype`, a narrow float, to float32.

    Both arrays are flat. The conversion is exact.
    """
    return _HALF[dtype.name][0]


def from_float32(dtype: DType) -> Convert:
    """Return a function ``narrow(src, out)`` that rounds float32 values to `dtype`, a float of at most 16 bits.

    Both arrays are flat. It rounds to nearest, ties to even, as IEEE 754 and ml_dtypes do. Values above the largest
    become infinity, or NaN in the float8 types without infinities; NumPy may warn. NaN stays NaN. `src` is not changed.
    """
    return _HALF[dtype.name][1]


# --- bfloat16: the upper half of a float32 ---


def _bfloat16_up(src: npt.NDArray[Any], out: npt.NDArray[Any]) -> None:
    bits = out.view(np.uint32)
    np.copyto(bits, src)
    np.left_shift(bits, 16, bits)


def _bfloat16_down(src: npt.NDArray[Any], out: npt.NDArray[Any]) -> None:
    bits = src.view(np.uint32)
    rounded = np.right_shift(bits, 16)
    np.bitwise_and(rounded, 1, rounded)
    np.add(rounded, bits, rounded)
    np.add(rounded, 0x7FFF, rounded)
    np.right_shift(rounded, 16, rounded)
    np.copyto(out, rounded, casting="unsafe")
    nan = np.isnan(src)
    if nan.any():
        # Rounding adds to the mantissa. In a NaN, this could carry into the sign bit and give zero, so write NaNs
        # separately.
        out[nan] = (bits[nan] >> 16) & 0x8000 | 0x7FC0


# --- float16: a table for conversion to float32, integer arithmetic for conversion from float32 ---


@cache
def _float16_table() -> npt.NDArray[np.float32]:
    return np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32)


# Minimum number of elements for the table. With fewer, NumPy's cast is faster than `take`.
_FLOAT16_TABLE_FROM = 1024


def _float16_up(src: npt.NDArray[Any], out: npt.NDArray[Any]) -> None:
    if len(src) < _FLOAT16_TABLE_FROM:
        np.copyto(out, src)
    else:
        # `take` is twice as fast as the cast. Mode "wrap" is the fastest, and changes nothing: every index is in range.
        _float16_table().take(src.view(np.uint16), out=out, mode="wrap")


# The smallest value that rounds to infinity, as the bits of a float32.
_FLOAT16_OVERFLOW = np.float32(65520).view(np.uint32)
# Minimum number of elements for the fifteen NumPy calls below. With fewer, NumPy's cast is faster.
_FLOAT16_PASSES_FROM = 12288


def _float16_down(src: npt.NDArray[Any], out: npt.NDArray[Any]) -> None:
    if len(src) < _FLOAT16_PASSES_FROM:
        np.copyto(out, src, casting="same_kind")
        return
    bits = src.view(np.uint32)
    size = np.bitwise_and(bits, 0x7FFFFFFF)
    if size.max() >= _FLOAT16_OVERFLOW:  # also for infinities and NaNs
        np.copyto(out, src, casting="same_kind")
        return
    # Let p be the greatest power of two up to |x|, at least 2**-14, below which float16 is subnormal. The sum |x| +
    # 2**13 * p keeps as many mantissa bits of x as float16 has, rounded by the processor. The low bits of the sum are
    # the mantissa.
    step = np.bitwise_and(size, 0x7F800000)
    np.maximum(step, np.full_like(step, (127 - 14) << 23), out=step)  # NumPy's loop is slow with a scalar operand
    np.add(step, 13 << 23, step)
    np.add(size.view(np.float32), step.view(np.float32), size.view(np.float32))
    np.subtract(size, step, size)
    np.right_shift(step, 13, step)
    np.add(size, step, size)  # exponent and mantissa; the exponent is too large by 126, subtracted below
    codes = out.view(np.uint16)
    np.copyto(codes, size, casting="unsafe")
    np.right_shift(bits, 16, step)
    sign = step.astype(np.uint16)
    np.bitwise_and(sign, 0x8000, sign)
    np.subtract(codes, (126 << 10) & 0xFFFF, codes)
    np.bitwise_or(codes, sign, codes)


# --- float8: tables for both directions ---


@cache
def _float8_up_table(name: str) -> npt.NDArray[np.float32]:
    layout = _FLOAT8[name]
    half = np.full(128, np.nan, dtype=np.float32)
    finite = layout.magnitudes()[: layout.overflow]
    half[: len(finite)] = finite
    if layout.overflow != layout.nan:
        half[layout.overflow] = np.inf
    table = np.concatenate([half, -half])
    if layout.unsigned_zero:
        table[0x80] = np.nan
    return table


@cache
def _float8_down_table(name: str) -> npt.NDArray[np.uint8]:
    """Return a table with the float8 codes of all float32 values whose lower 16 bits are zero."""
    layout = _FLOAT8[name]
    points = layout.magnitudes()
    values = (np.arange(1 << 16, dtype=np.uint32) << 16).view(np.float32)
    nan = np.isnan(values)
    size = np.where(nan, 0, np.abs(values)).astype(np.float64)
    above = np.clip(np.searchsorted(points, size), 1, layout.overflow)
    middle = (points[above - 1] + points[above]) / 2
    codes = above - ((size < middle) | ((size == middle) & (above % 2 == 1)))
    codes[nan] = layout.nan
    signed = (codes > 0) & (codes < 0x80) if layout.unsigned_zero else True
    table: npt.NDArray[np.uint8] = np.where(np.signbit(values) & signed, codes | 0x80, codes).astype(np.uint8)
    return table


def _float8_up(name: str) -> Convert:
    def widen(src: npt.NDArray[Any], out: npt.NDArray[Any]) -> None:
        _float8_up_table(name).take(src, out=out, mode="wrap")

    return widen


def _float8_down(name: str) -> Convert:
    def narrow(src: npt.NDArray[Any], out: npt.NDArray[Any]) -> None:
        # Truncate to the upper 16 bits. If any truncated bit was set, set the lowest of the upper 16 bits. Midpoints
        # between float8 values never use that bit, so the result rounds to the same float8 value.
        bits = src.view(np.uint32)
        lost = np.bitwise_and(bits, 0xFFFF)
        np.add(lost, 0xFFFF, lost)
        np.right_shift(lost, 16, lost)
        index = np.right_shift(bits, 16)
        np.bitwise_or(index, lost, index)
        _float8_down_table(name).take(index, out=out, mode="wrap")

    return narrow


_HALF: Mapping[str, tuple[Convert, Convert]] = MappingProxyType(
    {
        "float16": (_float16_up, _float16_down),
        "bfloat16": (_bfloat16_up, _bfloat16_down),
        **{name: (_float8_up(name), _float8_down(name)) for name in _FLOAT8},
    }
)
