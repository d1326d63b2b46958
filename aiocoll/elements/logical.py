"""Kernels of the logical ops LAND, LOR and LXOR.

A number is true if it is not zero. NaN is true, as in C and NumPy. Results are 0 or 1 in the dtype of the arrays. Types
that NumPy lacks, such as bfloat16, are compared with zero by their codes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import numpy as np

from aiocoll.elements.dtypes import DType, from_float32
from aiocoll.elements.kernels import Array, Combine, Kernel, chain

__all__ = ["LOGICAL", "logical_kernel"]

LOGICAL: Mapping[str, np.ufunc] = MappingProxyType(
    {"LAND": np.logical_and, "LOR": np.logical_or, "LXOR": np.logical_xor}
)


def logical_kernel(name: str, dtype: DType) -> Kernel:
    """Return the kernel of a logical op. The caller has checked that the op is defined on `dtype`."""
    ufunc = LOGICAL[name]
    if dtype.kind == "half" and dtype.storage.kind == "u":
        return _make_code_kernel(ufunc, dtype)

    def combine(a: Array, b: Array, out: Array) -> None:
        ufunc(a, b, out)

    def to_bool(src: Array, out: Array) -> None:
        np.not_equal(src, 0, out)

    return _kernel(dtype, combine, to_bool)


def _make_code_kernel(ufunc: np.ufunc, dtype: DType) -> Kernel:
    one = np.empty(1, dtype.storage)
    from_float32(dtype)(np.ones(1, np.float32), one)
    # In the fnuz types, the code of a negative zero means NaN, which counts as true. Do not mask the sign bit of these
    # types.
    has_sign = not dtype.name.endswith("fnuz")
    size = np.array(np.iinfo(dtype.storage).max >> has_sign, dtype.storage)

    def combine(a: Array, b: Array, out: Array) -> None:
        np.multiply(ufunc(np.bitwise_and(a, size), np.bitwise_and(b, size)), one, out)

    def to_bool(src: Array, out: Array) -> None:
        np.multiply(np.not_equal(np.bitwise_and(src, size), 0), one, out)

    return _kernel(dtype, combine, to_bool)


def _kernel(dtype: DType, combine: Combine, to_bool: Callable[[Array, Array], None]) -> Kernel:
    several = chain(combine, dtype.storage, None)

    def fold(inputs: Sequence[Array], out: Array) -> None:
        if len(inputs) == 1:
            to_bool(inputs[0], out)
        else:
            several(inputs, out)

    return Kernel(combine, fold, of_one=to_bool)
