"""The expected results of all collectives, computed by NumPy from the data of all ranks."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from aiocoll import ReduceOp

Array = NDArray[Any]

HALVES = ("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz")
NARROW = ("int4", "uint4", "int2", "uint2")
DTYPES = (
    "bool",
    *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)),
    "float32",
    "float64",
    "complex64",
    "complex128",
    *HALVES,
    *NARROW,
)
#: All dtypes except integers of fewer than 8 bits, which torch arrays cannot hold.
WIDE = tuple(name for name in DTYPES if name not in NARROW)
LOGICAL = ("LAND", "LOR", "LXOR")
OPS = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", *LOGICAL, "PREMUL_SUM", "larger", "affine")


def allowed(op: str, dtype: str) -> bool:
    """Return whether reductions with `op` must support arrays of `dtype`."""
    if op == "affine":
        return dtype in ("uint16", "int32", "int64", "uint32", "uint64")  # packed values need 16 unsigned bits
    if dtype == "bool":
        return op not in ("AVG", "PREMUL_SUM")
    if "int" in dtype:
        return op != "PREMUL_SUM"
    if dtype.startswith("complex"):
        return op in ("SUM", "AVG", "PRODUCT", "PREMUL_SUM")
    return not op.startswith("B")


def numpy_dtype(name: str) -> np.dtype[Any]:
    """Return the NumPy or ml_dtypes dtype with the given name."""
    return np.dtype(getattr(ml_dtypes, name)) if hasattr(ml_dtypes, name) else np.dtype(name)


def larger(a: Array, b: Array, out: Array) -> None:
    """Write the element-wise maximum to `out`: a commutative custom op."""
    np.maximum(a, b, out=out)


def affine(a: Array, b: Array, out: Array) -> None:
    """Compose functions x -> m x + c modulo 251, packed as m * 256 + c: an associative, non-commutative custom op."""
    m1, c1, m2, c2 = a // 256, a % 256, b // 256, b % 256
    out[:] = m1 * m2 % 251 * 256 + (c1 * m2 + c2) % 251


_CUSTOM = {
    "larger": ReduceOp.custom(larger),
    "affine": ReduceOp.custom(affine, commutative=False),
}


def reduce_op(name: str, rank: int) -> ReduceOp:
    """Return the op with the given name; the factor of PREMUL_SUM depends on `rank`."""
    if name == "PREMUL_SUM":
        return ReduceOp.PREMUL_SUM(factor(rank))
    return _CUSTOM[name] if name in _CUSTOM else getattr(ReduceOp, name)


def factor(rank: int) -> float:
    """Return the PREMUL_SUM factor of a rank: a power of two, so that products are exact."""
    return 0.5 if rank % 2 else 2.0


def data(dtype: str, op: str, rank: int, start: int, count: int) -> Array:
    """Return elements `start` to `start + count` of a rank's test data.

    Results are exact in any order of reduction. On the narrow floats they are rounded, but still unique.
    """
    i = np.arange(start, start + count)
    mixed = (i * 7 + i // 5 + rank * 3) % 11
    if op == "affine":
        return ((mixed + 1) * 256 + (i + rank) % 251).astype(dtype)
    if dtype == "bool":
        return mixed * (rank + 1) % 3 == 0
    if "int" in dtype:
        values = mixed - (0 if dtype.startswith("u") else 5)
        if dtype in NARROW:
            return (values * 3 + rank).astype(np.int8).astype(numpy_dtype(dtype))  # overflow wraps around
        return values.astype(dtype) if op == "AVG" else (values * 37 + rank * 11).astype(dtype)  # overflow wraps around
    if dtype.startswith("complex"):
        if op == "PRODUCT":
            return np.array([1, 1j, -2, -1j], dtype)[mixed % 4]
        return (mixed - 5 + 1j * (i % 7 - rank)).astype(dtype)
    if op == "PRODUCT":
        scale = 1 + mixed / 16 if dtype in HALVES else 2.0 ** (mixed % 3 - 1)
        return (np.where(mixed % 2, -scale, scale)).astype(numpy_dtype(dtype))
    return ((mixed - 5) * (0.3 if dtype in HALVES else 1.0)).astype(numpy_dtype(dtype))


def reduced(op: str, dtype: str, inputs: list[Array], world_size: int, first_rank: int = 0) -> Array:
    """Return the expected reduction of the arrays of several ranks, in rank order."""
    if op == "PREMUL_SUM":
        inputs = [x * x.dtype.type(factor(first_rank + rank)) for rank, x in enumerate(inputs)]
    if op == "affine":
        total = inputs[0].copy()
        for x in inputs[1:]:
            affine(total.copy(), x, total)
        return total
    if dtype == "bool":
        functions = {"SUM": "logical_or", "MAX": "logical_or", "BOR": "logical_or", "larger": "logical_or"}
        functions |= {"PRODUCT": "logical_and", "MIN": "logical_and", "BAND": "logical_and", "BXOR": "logical_xor"}
        functions |= {"LAND": "logical_and", "LOR": "logical_or", "LXOR": "logical_xor"}
        return getattr(np, functions[op]).reduce(inputs, axis=0)
    if op in LOGICAL:
        function = {"LAND": np.logical_and, "LOR": np.logical_or, "LXOR": np.logical_xor}[op]
        return function.reduce([x.astype(bool) for x in inputs], axis=0).astype(inputs[0].dtype)
    functions = {"PRODUCT": "multiply", "MIN": "minimum", "MAX": "maximum", "larger": "maximum"}
    functions |= {"BAND": "bitwise_and", "BOR": "bitwise_or", "BXOR": "bitwise_xor"}
    function = getattr(np, functions.get(op, "add"))
    wide = np.dtype(np.float32) if dtype in HALVES else np.dtype(np.int64) if dtype in NARROW else inputs[0].dtype
    total = inputs[0].astype(wide)
    for x in inputs[1:]:
        total = function(total, x.astype(wide), dtype=wide)
    if dtype in NARROW:
        total = total.astype(np.int8).astype(numpy_dtype(dtype)).astype(np.int64)  # overflow wraps around
        return (np.trunc(total / world_size) if op == "AVG" else total).astype(np.int8).astype(numpy_dtype(dtype))
    if op == "AVG":
        # Divide real and imaginary parts: NumPy's rounding of a complex division depends on the element's position.
        parts = total.view(total.real.dtype)
        divided = parts / (world_size if "int" in dtype else parts.dtype.type(world_size))
        total = np.trunc(divided) if "int" in dtype else divided.view(wide)
    return total.astype(numpy_dtype(dtype))


def equal(a: Array, b: Array) -> bool:
    """Return whether two arrays have equal dtype, length and values; 0.0 and -0.0 count as equal."""
    if a.dtype != b.dtype:
        return False
    narrow = a.dtype.name in HALVES + NARROW
    return np.array_equal(a.astype(np.float32), b.astype(np.float32)) if narrow else np.array_equal(a, b)
