"""Conversion of torch tensors inside sent objects: plain tensors on the CPU, in C order."""

from __future__ import annotations

import sys
from math import prod
from typing import Any

import numpy as np

from aiocoll.codec.records import RefusedError
from aiocoll.errors import SerializationError

__all__ = ["content", "pack", "unpack"]

#: Maximum number of dimensions of a received tensor, as in torch itself.
_MAX_NDIM = 64
_NAMES = frozenset(
    {"bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32",
     "float64", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "complex64", "complex128"}
)  # fmt: skip


def pack(torch: Any, tensor: Any) -> tuple[str, list[int], int]:
    """Return the dtype, shape and number of bytes of a tensor to send inside an object.

    Raises:
        RefusedError: the receiver would get a different tensor.
    """
    kind, dtype = type(tensor), str(tensor.dtype).removeprefix("torch.")
    if kind is not torch.Tensor:
        raise RefusedError(f"{kind.__module__}.{kind.__qualname__} would arrive as a torch.Tensor: send x.detach()")
    if not tensor.is_cpu or tensor.layout is not torch.strided or dtype not in _NAMES:
        raise RefusedError(
            f"a torch tensor of {dtype}, {tensor.layout} on {tensor.device}: send a dense tensor on the CPU"
        )
    return dtype, list(tensor.shape), tensor.numel() * tensor.element_size()


def content(torch: Any, tensor: Any) -> memoryview:
    """Return the bytes of a tensor, in C order."""
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    array: np.ndarray[Any, Any] = plain.view(torch.uint8).numpy()
    return array.data


def unpack(torch: Any, dtype: str, shape: list[Any], data: bytes) -> Any:
    """Return a new tensor with a received dtype, shape and content.

    `torch` is None if the program has not imported torch.

    Raises:
        SerializationError: the arguments do not describe a tensor, or `torch` is None.
    """
    if torch is None:
        raise SerializationError("received an object that contains a torch tensor; import torch before receiving it")
    if dtype not in _NAMES or (kind := getattr(torch, dtype, None)) is None:
        raise SerializationError(f"received a torch tensor with the unknown dtype {dtype!r:.60}")
    good = len(shape) <= _MAX_NDIM and all(type(n) is int and 0 <= n <= sys.maxsize for n in shape)
    if not good or prod(shape) * kind.itemsize != len(data):
        raise SerializationError(f"a tensor of shape {shape!r:.80} and dtype {dtype} does not have {len(data)} bytes")
    if not data:
        return torch.empty(shape, dtype=kind)
    return torch.frombuffer(bytearray(data), dtype=kind).reshape(shape)
