"""Conversion of torch's arguments: reduction ops, timeouts, tensor lists, outputs that share memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from aiocoll.elements.ops import ReduceOp

__all__ = [
    "Copies",
    "check_device",
    "check_devices",
    "flat_tensors",
    "reduce_op",
    "seconds",
    "sole_tensor",
    "to_timedelta",
]

#: The longest timeout that torch accepts, in seconds.
_LONGEST = 1e8
_NAMES = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")
_OPS: dict[Any, ReduceOp] = {getattr(dist.ReduceOp.RedOpType, name): getattr(ReduceOp, name) for name in _NAMES}


def reduce_op(op: Any) -> ReduceOp:
    """Convert torch's reduction op to aiocoll's `ReduceOp`; None stands for SUM."""
    if op is None:
        return ReduceOp.SUM
    kind = getattr(op, "op", op)
    if kind in _OPS:
        return _OPS[kind]
    if kind == dist.ReduceOp.RedOpType.PREMUL_SUM:
        return ReduceOp.PREMUL_SUM(float(op.factor))
    raise ValueError(f"backend 'aio' does not support the reduction {op}; use one of {', '.join(_NAMES)}")


def seconds(timeout: Any) -> float | None:
    """Return the seconds of a timedelta, or of the timeout in torch's options; None for the group's default."""
    timeout = getattr(timeout, "timeout", timeout)
    if timeout is None:
        return None
    found: float = timeout.total_seconds()
    return found if found >= 0 else None


def to_timedelta(timeout: float) -> timedelta:
    """Convert a timeout in seconds to a timedelta for torch; inf becomes the longest one that torch accepts."""
    return timedelta(seconds=min(timeout, _LONGEST))


def sole_tensor(tensors: Any) -> torch.Tensor:
    """Return the tensor of an argument that is a tensor or a list with one tensor."""
    if isinstance(tensors, torch.Tensor):
        return tensors
    if len(tensors) != 1:
        raise ValueError(f"got {len(tensors)} tensors: backend 'aio' takes one tensor per rank")
    found: torch.Tensor = tensors[0]
    return found


def flat_tensors(lists: Any) -> list[torch.Tensor]:
    """Return the tensors of an argument that is a list of tensors, or a list that contains only this list."""
    return list(lists[0]) if lists and isinstance(lists[0], (list, tuple)) else list(lists)


class Copies:
    """Temporary output tensors of an operation, which replace output tensors whose elements share memory.

    An operation writes each element of its outputs once. But an expanded tensor has several elements at one address.
    Also, a program may pass one tensor twice. Gloo accepts both. The operation writes to copies of such tensors, and
    `write_back` copies the results to the tensors.
    """

    def __init__(self) -> None:
        self._pairs: list[tuple[torch.Tensor, torch.Tensor]] = []

    def __bool__(self) -> bool:
        """Return whether there are copies to write back."""
        return bool(self._pairs)

    def writable(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return `tensor`, or a temporary copy if several of its elements share memory."""
        check_device(tensor)
        if tensor.layout != torch.strided or not _is_expanded(tensor):
            return tensor
        copy = tensor.contiguous()
        self._pairs.append((tensor, copy))
        return copy

    def outputs(self, tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Return the output tensors, with temporary copies in place of tensors that share memory."""
        seen: set[tuple[int, int]] = set()
        found = []
        for tensor in tensors:
            place = tensor.data_ptr(), tensor.numel()
            if place in seen and tensor.numel():
                check_device(tensor)
                copy = torch.empty_like(tensor, memory_format=torch.contiguous_format)
                self._pairs.append((tensor, copy))
                found.append(copy)
            else:
                found.append(self.writable(tensor))
            seen.add(place)
        return found

    def write_back(self) -> None:
        """Copy the results to the caller's tensors; where tensors share memory, the last result remains."""
        for tensor, copy in self._pairs:
            for dimension, stride in enumerate(tensor.stride()):
                if stride == 0 and tensor.shape[dimension] > 1:
                    tensor = tensor.narrow(dimension, 0, 1)
                    copy = copy.narrow(dimension, 0, 1)
            tensor.detach().copy_(copy)


def check_device(tensor: torch.Tensor) -> None:
    """Raise `ValueError` if a tensor is not on the CPU."""
    if tensor.device.type != "cpu":
        raise ValueError(
            f"a tensor is on {tensor.device}, but backend 'aio' carries CPU tensors: pass tensors of one device to a "
            f"call, and make the group with another backend for that device, such as 'cpu:aio,cuda:nccl'"
        )


def check_devices(tensors: Sequence[torch.Tensor]) -> None:
    """Raise `ValueError` if one of the tensors is not on the CPU."""
    for tensor in tensors:
        check_device(tensor)


def _is_expanded(tensor: torch.Tensor) -> bool:
    return any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
