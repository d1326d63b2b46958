"""Kernels: functions that reduce flat NumPy arrays element by element.

Floats of at most 16 bits are added up in float32 over all inputs and rounded once. Other types use a chain of NumPy
calls. NumPy warns of overflow and invalid operations as its error state demands. Callers that want no warnings run
kernels under ``np.errstate(all="ignore")``.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from aiocoll.elements.dtypes import DType, array_dtype
from aiocoll.elements.half_precision import Kind, half_fold, half_map
from aiocoll.errors import BackendUnavailableError
from aiocoll.user_code import contain

__all__ = ["Array", "Combine", "Fold", "Kernel", "builtin_kernel", "chain", "custom_kernel"]

Array = npt.NDArray[Any]
Combine = Callable[[Array, Array, Array], Any]
Fold = Callable[[Sequence[Array], Array], None]

# Number of bytes per piece of a fold: the accumulator and one input fit into the second-level cache (at least 1 MiB on
# servers). With smaller pieces, the call overhead exceeds the gain.
_PIECE_BYTES = 256 * 1024


class Kernel(NamedTuple):
    """The functions of one reduction op on one dtype.

    All arrays are 1-D, C-contiguous, of the dtype's storage, and equally long.

    Attributes:
        combine: ``combine(a, b, out)`` writes f(a, b) to `out`, without `finalize`. `a` comes from lower ranks than
            `b`. `out` may be exactly `a` or `b`.
        fold: ``fold(inputs, out)`` applies f over all inputs in order, then `finalize`. `out` may be exactly one of the
            inputs.
        finalize: the last step, in place (AVG divides), or None.
        prescale: ``prescale(src, out)``, which each rank applies to its own data first, or None.
        ordered: the reduction must be one `fold` over the inputs of all ranks, in rank order.
        portable: the bits of an element do not depend on its index in the arrays, so that several ranks may compute the
            same element.
        nan_varies: sign and payload of a NaN depend on the SIMD level, on the element's index and on the length of the
            arrays. This also holds for a `portable` kernel; see `aiocoll.elements.nan_fingerprint`.
        of_one: ``of_one(src, out)``, the reduction of one rank's data; None if that is the data itself. A rank may also
            apply it to its own data first.
        ufunc: the NumPy ufunc that alone is the reduction, over all inputs in order; None if there is none.
        is_builtin: the kernel calls no user function.
    """

    combine: Combine
    fold: Fold
    finalize: Callable[[Array], None] | None = None
    prescale: Callable[[Array, Array], None] | None = None
    ordered: bool = False
    portable: bool = True
    nan_varies: bool = False
    of_one: Callable[[Array, Array], None] | None = None
    ufunc: np.ufunc | None = None
    is_builtin: bool = True


def _minimum(a: Array, b: Array, out: Array) -> None:
    np.minimum(a, b, out=out)  # a keyword, because NumPy deprecates a positional `out` here


def _maximum(a: Array, b: Array, out: Array) -> None:
    np.maximum(a, b, out=out)


_NUMERIC: Mapping[str, Combine] = MappingProxyType(
    {
        "SUM": np.add,
        "AVG": np.add,
        "PREMUL_SUM": np.add,
        "PRODUCT": np.multiply,
        "MIN": _minimum,
        "MAX": _maximum,
        "BAND": np.bitwise_and,
        "BOR": np.bitwise_or,
        "BXOR": np.bitwise_xor,
    }
)
_BOOL: Mapping[str, Combine] = MappingProxyType(
    {
        "SUM": np.logical_or,
        "PRODUCT": np.logical_and,
        "MIN": np.logical_and,
        "MAX": np.logical_or,
        "BAND": np.logical_and,
        "BOR": np.logical_or,
        "BXOR": np.logical_xor,
    }
)


#: Maps each Python function above to the ufunc that it calls.
_UFUNCS: Mapping[Combine, Any] = MappingProxyType({_minimum: np.minimum, _maximum: np.maximum})
#: For each op, the operator that combines two elements of a float or complex dtype.
_ELEMENT_OPERATORS: Mapping[str, Callable[[Any, Any], Any]] = MappingProxyType(
    {"SUM": operator.add, "AVG": operator.add, "PREMUL_SUM": operator.add, "PRODUCT": operator.mul}
)


def builtin_kernel(name: str, dtype: DType, world_size: int, factor: float | complex | None) -> Kernel:
    """Return the kernel of the built-in op `name`. The caller has checked that the op is defined on `dtype`.

    Args:
        name: name of the op, such as ``"SUM"``.
        dtype: element type of the arrays.
        world_size: the divisor of AVG.
        factor: the factor of PREMUL_SUM; None for other ops.
    """
    if dtype.kind == "half":
        assert not isinstance(factor, complex)
        return _half_kernel(name, dtype, world_size, factor)
    combine = (_BOOL if dtype.kind == "bool" else _NUMERIC)[name]
    finalize = _divider(dtype, world_size) if name == "AVG" else None
    nan_varies = dtype.kind in ("float", "complex")
    return Kernel(
        combine=combine,
        fold=chain(combine, dtype.storage, finalize, _ELEMENT_OPERATORS.get(name) if nan_varies else None),
        finalize=finalize,
        prescale=None if factor is None else _scaler(dtype, factor),
        # NumPy uses fused multiply-add in complex products only at some positions, so equal inputs may give
        # different results.
        portable=not (dtype.kind == "complex" and name == "PRODUCT"),
        nan_varies=nan_varies,
        ufunc=None if finalize is not None or factor is not None else _UFUNCS.get(combine, combine),
    )


def chain(
    combine: Combine,
    storage: np.dtype[Any],
    finalize: Callable[[Array], None] | None,
    of_numbers: Callable[[Any, Any], Any] | None = None,
) -> Fold:
    """Return a fold that reduces all inputs in order, in pieces that fit into the cache, then calls `finalize`.

    `of_numbers` combines two elements, for arrays of one element. There NumPy uses a different code path if the output
    is one of the inputs, which may give a different NaN. `of_numbers` is also 3× faster.
    """

    def one(inputs: Sequence[Array], out: Array) -> None:
        assert of_numbers is not None
        found = inputs[0][0]
        for x in inputs[1:]:
            found = of_numbers(found, x[0])
        out[0] = found

    def piece(inputs: Sequence[Array], out: Array, scratch: Array) -> None:
        if of_numbers is not None and len(out) == 1:
            one(inputs, out)
        elif len(inputs) == 1:
            np.copyto(out, inputs[0])
        elif len(inputs) == 2:
            combine(inputs[0], inputs[1], out)
        else:
            combine(inputs[0], inputs[1], scratch)
            for x in inputs[2:-1]:
                combine(scratch, x, scratch)
            combine(scratch, inputs[-1], out)  # `out` is written last, so it may be one of the inputs
        if finalize is not None:
            finalize(out)  # finalize each piece while `out` is in the cache

    count = _PIECE_BYTES // storage.itemsize

    def pieces(inputs: Sequence[Array], out: Array) -> None:
        total = len(out)
        if total <= count:
            piece(inputs, out, out if len(inputs) < 3 else np.empty(total, storage))
            return
        scratch = np.empty(count, storage)
        for start in range(0, total, count):
            stop = min(start + count, total)
            piece([x[start:stop] for x in inputs], out[start:stop], scratch[: stop - start])

    def fold(inputs: Sequence[Array], out: Array) -> None:
        if len(inputs) == 2 and (of_numbers is None or len(out) != 1):
            combine(inputs[0], inputs[1], out)
        else:
            pieces(inputs, out)

    return fold if finalize is None else pieces


def _division(world_size: int) -> tuple[np.ufunc, float]:
    """Return a ufunc and its second operand, which divide floats by `world_size`.

    A division by a power of two becomes a multiplication, which gives the same bits and is faster.
    """
    return (np.divide, world_size) if world_size & (world_size - 1) else (np.multiply, 1 / world_size)


def _divider(dtype: DType, world_size: int) -> Callable[[Array], None]:
    if dtype.kind in ("int", "uint"):
        return _integer_divider(dtype, world_size)
    # To divide a complex number by a real one, divide both parts.
    real = np.dtype(f"float{dtype.itemsize * 4}") if dtype.kind == "complex" else dtype.storage
    ufunc, number = _division(world_size)
    operand = np.array(number, real)  # NumPy is 2× faster with a 0-dimensional array than with a scalar

    def divide(x: Array) -> None:
        parts = x.view(real) if x.dtype != real else x
        ufunc(parts, operand, parts)

    return divide


def _integer_divider(dtype: DType, world_size: int) -> Callable[[Array], None]:
    """Return a function that divides integers, rounding toward zero. NumPy's integer division rounds down."""
    info = np.iinfo(dtype.storage)
    if world_size > info.max:
        # All quotients round to 0. The only exception is -world_size, whose quotient is -1.
        return lambda x: np.copyto(x, np.where(x == -world_size, -1, 0), casting="unsafe")
    # If the divisor is a power of two, shift instead of dividing, which is 2× faster.
    shifts = world_size & (world_size - 1) == 0
    floor_divide = np.right_shift if shifts else np.floor_divide
    divisor = np.array(world_size.bit_length() - 1 if shifts else world_size, dtype.storage)
    if dtype.kind == "uint":
        return lambda x: floor_divide(x, divisor, x)
    places, raised = np.array(dtype.itemsize * 8 - 1, dtype.storage), np.array(world_size - 1, dtype.storage)

    def divide(x: Array) -> None:
        # Add divisor - 1 to negative numbers. Then rounding down gives the quotient rounded toward zero.
        by = np.right_shift(x, places)  # -1 for negative numbers, 0 for others
        np.bitwise_and(by, raised, by)
        np.add(x, by, x)
        floor_divide(x, divisor, x)

    return divide


def _scaler(dtype: DType, factor: float | complex) -> Callable[[Array, Array], None]:
    with np.errstate(over="ignore"):
        typed = np.array(dtype.storage.type(factor))

    def scale(src: Array, out: Array) -> None:
        np.multiply(src, typed, out)

    return scale


def _half_kernel(name: str, dtype: DType, world_size: int, factor: float | None) -> Kernel:
    selects = name in ("MIN", "MAX")
    kind: Kind = "select" if selects else "product" if name == "PRODUCT" else "sum"
    finalize = _division(world_size) if name == "AVG" else None
    pairwise = half_fold(_NUMERIC[name], dtype, kind)
    divide = None if finalize is None else half_map(dtype, finalize)
    return Kernel(
        combine=lambda a, b, out: pairwise((a, b), out),
        fold=pairwise if finalize is None else half_fold(_NUMERIC[name], dtype, kind, finalize),
        finalize=None if divide is None else lambda x: divide(x, x),
        prescale=None if factor is None else half_map(dtype, (np.multiply, factor)),
        ordered=not selects,
        nan_varies=True,
    )


def custom_kernel(function: Callable[[Any, Any, Any], object], name: str, commutative: bool, dtype: DType) -> Kernel:
    """Return the kernel of a user's reduction function ``f(a, b, out)``.

    Raises:
        TypeError: custom functions on `dtype` need ml_dtypes, which is not installed.
    """
    try:
        shown = array_dtype(dtype)
    except BackendUnavailableError as exc:
        raise TypeError(f"op {name!r}: a custom function on {dtype.name} needs ml_dtypes: {exc}") from exc

    def call(a: Array, b: Array, out: Array) -> None:
        view = out.view(shown)
        try:
            returned = function(a.view(shown), b.view(shown), view)
        except BaseException as error:
            if (contained := contain(error)) is error:
                raise
            raise contained from error
        if returned is not None and returned is not view:
            kind = type(returned).__name__
            raise TypeError(f"op {name!r}: f(a, b, out) must write its result to out and return None, not {kind}")

    def combine(a: Array, b: Array, out: Array) -> None:
        fold((a, b), out)

    def fold(inputs: Sequence[Array], out: Array) -> None:
        # Alternate between two scratch arrays for results, so that the user's function never gets an operand as `out`.
        result = inputs[0]
        scratch, spare = np.empty((2, len(out)), dtype=out.dtype)
        for x in inputs[1:]:
            call(result, x, scratch)
            result, scratch, spare = scratch, spare, scratch
        np.copyto(out, result)

    return Kernel(combine=combine, fold=fold, ordered=not commutative, portable=False, is_builtin=False)
