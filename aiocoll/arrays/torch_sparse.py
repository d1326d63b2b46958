"""Conversion of sparse torch tensors to entries (indices and values) and back."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aiocoll.elements.buffers import view
from aiocoll.elements.entries import Entries, coalesce_entries
from aiocoll.elements.sparse import (
    SparseArray,
    coordinates_of,
    describe_sparse,
    expand_pointers,
    flat_places,
    row_pointers,
)

__all__ = ["describe", "fresh_like"]

Array = NDArray[Any]


def describe(torch: Any, tensor: Any, name: str) -> SparseArray:
    """Return a `SparseArray` that describes a sparse tensor, in constant time.

    Raises:
        TypeError: its layout or dtype is not supported.
    """
    describe_layout = _describe_csr if tensor.layout is torch.sparse_csr else _describe_coo
    return describe_layout(torch, tensor, name)


def fresh_like(torch: Any, tensor: Any, sparse_dim: int, shape: tuple[int, ...]) -> Any:
    """Return a sparse tensor without entries, with the layout and dtype of `tensor`."""
    if tensor.layout is torch.sparse_csr:
        pointers = torch.zeros(shape[0] + 1, dtype=torch.int64)
        return torch.sparse_csr_tensor(
            pointers, pointers[:0], torch.empty(0, dtype=tensor.dtype), shape, check_invariants=False
        )
    indices = torch.empty((sparse_dim, 0), dtype=torch.int64)
    values = torch.empty((0, *shape[sparse_dim:]), dtype=tensor.dtype)
    return torch.sparse_coo_tensor(indices, values, shape, check_invariants=False)


def _describe_coo(torch: Any, tensor: Any, name: str) -> SparseArray:
    if tensor.layout is not torch.sparse_coo:
        raise TypeError(f"{name} is a torch tensor of layout {tensor.layout}; pass {name}.to_sparse()")
    shape, sparse_dim = tuple(tensor.shape), tensor.sparse_dim()
    # Use torch's private accessors, because `indices()` and `values()` raise for a tensor that is not coalesced.
    indices, values = tensor._indices(), tensor._values()
    flat = view(values, name=name, writable=False)
    grid, dense = shape[:sparse_dim], shape[sparse_dim:]
    width = math.prod(dense)

    def read() -> Entries:
        places = flat_places(list(indices.numpy()), grid, name, count=len(values))
        return coalesce_entries(
            places, flat.array if width == 1 else flat.array.reshape(len(values), width), flat.dtype
        )

    def build(entries: Entries) -> Callable[[], Any]:
        coords = np.empty((sparse_dim, len(entries.places)), np.int64)
        for axis, each in enumerate(coordinates_of(entries.places, grid)):
            coords[axis] = each
        made = torch.sparse_coo_tensor(
            torch.from_numpy(coords),
            _to_tensor(torch, entries.values, tensor.dtype).reshape(len(entries.places), *dense),
            shape,
            is_coalesced=True,
            check_invariants=False,
        )

        def put() -> Any:
            tensor.data = made  # autograd still sees the same tensor
            return tensor

        return put

    return describe_sparse(shape, sparse_dim, flat.dtype, len(values), 0, read, build)


def _describe_csr(torch: Any, tensor: Any, name: str) -> SparseArray:
    if tensor.ndim != 2:
        raise TypeError(f"{name} is a torch CSR tensor of {tensor.ndim} dimensions; only 2 are supported")
    shape = tuple(tensor.shape)
    pointers, columns, values = tensor.crow_indices(), tensor.col_indices(), tensor.values()
    flat = view(values, name=name, writable=False)

    def read() -> Entries:
        places = flat_places(expand_pointers(pointers.numpy(), columns.numpy(), name), shape, name)
        return coalesce_entries(places, flat.array, flat.dtype)

    def build(entries: Entries) -> Callable[[], Any]:
        rows, found = coordinates_of(entries.places, shape)
        made = torch.sparse_csr_tensor(
            torch.from_numpy(row_pointers(rows, shape[0])),
            torch.from_numpy(found.astype(np.int64)),
            _to_tensor(torch, entries.values, tensor.dtype),
            shape,
            check_invariants=False,
        )
        return lambda: made

    return describe_sparse(shape, 2, flat.dtype, len(values), shape[0], read, build)


def _to_tensor(torch: Any, values: Array, dtype: Any) -> Any:
    # NumPy has no bfloat16 or float8, so such values arrive as integers and need a view as the torch dtype.
    if dtype.is_floating_point and values.dtype.kind == "u":
        return torch.from_numpy(values.view(np.int16) if values.itemsize == 2 else values).view(dtype)
    return torch.from_numpy(values)
