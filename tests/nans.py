"""Input arrays with many kinds of NaNs, and the check of NaNs in reduced arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from aiocoll import ReduceOp

from .reductions import allowed, numpy_dtype

__all__ = ["COUNTS", "cases", "inputs", "is_right", "reduce_op"]

DTYPES = ("float32", "float64", "complex64", "complex128", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2",
          "float8_e4m3fnuz", "float8_e5m2fnuz")  # fmt: skip
OPS = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "PREMUL_SUM")
#: Array lengths: one element, less than one SIMD vector, more than one SIMD vector, and many SIMD vectors.
COUNTS = (1, 2, 3, 5, 16, 17, 33, 131, 1000)

#: For each dtype, bit patterns of NaNs with both signs and several payloads, and of numbers that can produce NaNs.
_BITS = {
    np.dtype("float32"): (0x7FC00000, 0xFFC00000, 0x7FC00001, 0xFFC12345, 0x7F800000, 0xFF800000, 0x3F800000, 0),
    np.dtype("float64"): (
        *(0x7FF8 << 48, 0xFFF8 << 48, (0x7FF8 << 48) + 1, (0xFFF8 << 48) + 0x12345),
        *(0x7FF0 << 48, 0xFFF0 << 48, 0x3FF0 << 48, 0),
    ),
}


def reduce_op(name: str) -> ReduceOp:
    return ReduceOp.PREMUL_SUM(2.0) if name == "PREMUL_SUM" else getattr(ReduceOp, name)


def _values(dtype: np.dtype[Any], rng: np.random.Generator, count: int) -> NDArray[Any]:
    if dtype.kind == "c":
        real = np.dtype(f"f{dtype.itemsize // 2}")
        return np.stack([_values(real, rng, count), _values(real, rng, count)], -1).reshape(-1).view(dtype)
    if dtype in _BITS:
        return rng.choice(np.array(_BITS[dtype], f"u{dtype.itemsize}"), count).view(dtype)
    bits = np.iinfo(f"u{dtype.itemsize}")
    return rng.integers(0, bits.max, count, f"u{dtype.itemsize}", endpoint=True).view(dtype)


def inputs(dtype: str, count: int, size: int, seed: int = 0) -> list[NDArray[Any]]:
    """Return one input array per rank; every process computes the same arrays."""
    rng = np.random.default_rng([seed, count, size, *dtype.encode()])
    return [_values(numpy_dtype(dtype), rng, count) for _ in range(size)]


def is_right(op: str, arrays: list[NDArray[Any]], result: NDArray[Any]) -> bool:
    """Return whether `result` has NaNs exactly where an input is NaN or opposite infinities are added.

    It checks only operations and dtypes that produce no other NaNs.
    """
    if op not in ("SUM", "AVG", "MIN", "MAX") or result.dtype not in _BITS:
        return True
    whole = np.stack(arrays)
    expected = np.isnan(whole).any(0)
    if op in ("SUM", "AVG"):
        expected |= np.isposinf(whole).any(0) & np.isneginf(whole).any(0)
    return bool((np.isnan(result) == expected).all())


def cases() -> list[tuple[str, str]]:
    return [(op, dtype) for op in OPS for dtype in DTYPES if allowed(op, dtype)]
