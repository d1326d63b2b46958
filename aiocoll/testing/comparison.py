"""Comparison of arrays of any library, and of nested containers of them, for assertions in test cases."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["find_difference", "has_arrays"]


def find_difference(
    first: Any, second: Any, *, rtol: float = 0.0, atol: float = 0.0, exact_dtype: bool = True, where: str = ""
) -> str | None:
    """Describe the first difference between two values; return None if they are equal. NaN equals NaN.

    Args:
        first: a value: an array of a kind in `aiocoll.typing.Array`, a list, tuple or dict of values, or any other
            object.
        second: a value, as `first`. A list of numbers equals an array of them.
        rtol: tolerance relative to `second`, for arrays of numbers.
        atol: absolute tolerance.
        exact_dtype: whether arrays of different dtypes differ.
        where: path of the values in the compared containers, such as ``"[0]['weight']"``.
    """
    if _is_array(first) or _is_array(second):
        return _between_arrays(first, second, rtol, atol, exact_dtype, where)
    options: Any = {"rtol": rtol, "atol": atol, "exact_dtype": exact_dtype}
    if isinstance(first, Mapping) and isinstance(second, Mapping):
        if first.keys() != second.keys():
            return f"keys{_at(where)} differ: {list(first)} and {list(second)}"
        pairs = [(f"{where}[{key!r}]", first[key], second[key]) for key in first]
    elif isinstance(first, (list, tuple)) and isinstance(second, (list, tuple)):
        if len(first) != len(second):
            return f"lengths{_at(where)} differ: {len(first)} and {len(second)}"
        pairs = [(f"{where}[{index}]", *pair) for index, pair in enumerate(zip(first, second, strict=True))]
    else:
        return None if first == second else f"values{_at(where)} differ: {first!r} and {second!r}"
    found = (find_difference(*pair, **options, where=path) for path, *pair in pairs)
    return next((difference for difference in found if difference is not None), None)


def has_arrays(value: Any) -> bool:
    """Return whether a value is an array of any library, or a container with such an array."""
    if isinstance(value, Mapping):
        return any(map(has_arrays, value.values()))
    if isinstance(value, (list, tuple)):
        return any(map(has_arrays, value))
    return _is_array(value)


def _is_array(value: Any) -> bool:
    return hasattr(value, "shape") and hasattr(value, "dtype") and not isinstance(value, np.generic)


def _between_arrays(first: Any, second: Any, rtol: float, atol: float, exact_dtype: bool, where: str) -> str | None:
    try:
        (a, kind), (b, other) = _on_host(first), _on_host(second)
    except (TypeError, ValueError) as error:
        return f"values{_at(where)} differ in kind: {type(first).__name__} and {type(second).__name__} ({error})"
    if a.shape != b.shape:
        return f"shapes{_at(where)} differ: {a.shape} and {b.shape}"
    if exact_dtype and _is_array(first) and _is_array(second) and kind != other:
        return f"dtypes{_at(where)} differ: {kind} and {other}"
    equal = (a == b) | ((a != a) & (b != b))
    if rtol or atol:
        equal |= np.isclose(a, b, rtol=rtol, atol=atol)
    if np.all(equal):
        return None
    wrong = np.flatnonzero(~np.atleast_1d(equal).reshape(-1))
    index = np.unravel_index(int(wrong[0]), a.shape) if a.shape else ()
    place = f" at {tuple(map(int, index))}" if a.shape else ""
    return f"{wrong.size} of {a.size} elements{_at(where)} differ, first{place}: {a[index]} and {b[index]}"


def _on_host(value: Any) -> tuple[npt.NDArray[Any], str]:
    """Copy an array to the host as an ndarray; return it, and the name of its original dtype."""
    if hasattr(value, "detach") and hasattr(value, "cpu"):  # a torch tensor
        tensor = value.detach().cpu()
        tensor = tensor.to_dense() if "sparse" in str(tensor.layout) else tensor.resolve_conj().resolve_neg()
        # Convert to float64, which represents all values of the float types that NumPy lacks.
        return (tensor.double() if tensor.is_floating_point() else tensor).numpy(), str(tensor.dtype)
    if hasattr(value, "__cuda_array_interface__") and hasattr(value, "get"):  # a CuPy array
        value = value.get()
    if hasattr(value, "toarray"):  # a sparse array of SciPy
        value = value.toarray()
    array = np.asarray(value)
    if array.dtype == object:
        raise TypeError("the array has elements that are not numbers")
    return array, str(array.dtype)


def _at(where: str) -> str:
    return f" at {where}" if where else ""
