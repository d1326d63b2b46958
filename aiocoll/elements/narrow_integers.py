"""Kernels of integers with 4 or 2 bits, from ml_dtypes and JAX.

Each integer is in the low bits of a byte. Arithmetic wraps at its width.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import numpy as np

from aiocoll.elements.dtypes import DType
from aiocoll.elements.kernels import Array, Combine, Kernel, chain

__all__ = ["narrow_kernel"]

_BITS: Mapping[str, np.ufunc] = MappingProxyType({"BAND": np.bitwise_and, "BOR": np.bitwise_or, "BXOR": np.bitwise_xor})


def narrow_kernel(name: str, dtype: DType, world_size: int) -> Kernel:
    """Return the kernel of a built-in op on a narrow integer type. The caller has checked that the type has the op."""
    bits = int(dtype.name[-1])
    mask = np.array((1 << bits) - 1, np.uint8)
    # Flipping the sign bit makes the unsigned order of the codes equal to the order of the signed numbers.
    sign = np.array(1 << bits - 1 if dtype.kind == "int" else 0, np.uint8)
    combine: Combine
    if name in _BITS:
        combine = _BITS[name]
    elif name in ("MIN", "MAX"):
        combine = _selecting(np.minimum if name == "MIN" else np.maximum, sign)
    else:
        combine = _wrapping(np.multiply if name == "PRODUCT" else np.add, mask)
    if name != "AVG":
        return Kernel(combine, chain(combine, dtype.storage, None))
    quotients = np.array([_quotient(code, int(sign), world_size) & int(mask) for code in range(1 << bits)], np.uint8)

    def divide(x: Array) -> None:
        quotients.take(x, out=x, mode="wrap")

    return Kernel(combine, chain(combine, dtype.storage, divide), divide)


def _wrapping(ufunc: np.ufunc, mask: Array) -> Combine:
    def combine(a: Array, b: Array, out: Array) -> None:
        ufunc(a, b, out)
        np.bitwise_and(out, mask, out)

    return combine


def _selecting(ufunc: np.ufunc, sign: Array) -> Combine:
    def combine(a: Array, b: Array, out: Array) -> None:
        ufunc(np.bitwise_xor(a, sign), np.bitwise_xor(b, sign), out=out)
        np.bitwise_xor(out, sign, out)

    return combine


def _quotient(code: int, sign: int, divisor: int) -> int:
    """Decode `code` as a number; return this number divided by `divisor` and rounded toward zero."""
    value = code - 2 * (code & sign)
    return abs(value) // divisor * (-1 if value < 0 else 1)
