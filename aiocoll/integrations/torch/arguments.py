"""Arguments of torch's calls: reductions, timeouts, and tensors that an operation cannot take as they are."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from aiocoll.elements.ops import ReduceOp

__all__ = ["Copies", "check_device", "check_devices", "flat", "only", "reduce_op", "seconds"]

_NAMES = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")
_OPS: dict[Any, ReduceOp] = {getattr(dist.ReduceOp.RedOpType, name): getattr(ReduceOp, name) for name in _NAMES}


def reduce_op(op: Any) -> ReduceOp:
    """Return the reduction of aiocoll for one of torch; None is SUM."""
    if op is None:
        return ReduceOp.SUM
    kind = getattr(op, "op", op)
    if kind in _OPS:
        return _OPS[kind]
    if kind == dist.ReduceOp.RedOpType.PREMUL_SUM:
        return ReduceOp.PREMUL_SUM(float(op.factor))
    raise ValueError(f"{op} is not a reduction of backend aio: use one of {', '.join(_NAMES)}")


def seconds(timeout: Any) -> float | None:
    """Return the seconds of a timeout, or of options that have one; None is the group's."""
    timeout = getattr(timeout, "timeout", timeout)
    if timeout is None:
        return None
    found: float = timeout.total_seconds()
    return found if found >= 0 else None


def only(tensors: Any) -> torch.Tensor:
    """Return the tensor of a call that takes one per rank."""
    if isinstance(tensors, torch.Tensor):
        return tensors
    if len(tensors) != 1:
        raise ValueError(f"backend aio takes one tensor per rank, not {len(tensors)}")
    found: torch.Tensor = tensors[0]
    return found


def flat(lists: Any) -> list[torch.Tensor]:
    """Return the tensors of a call that takes one list of them per rank."""
    return list(lists[0]) if lists and isinstance(lists[0], (list, tuple)) else list(lists)


class Copies:
    """Tensors for an operation, and the copies that stand for those that it cannot write to.

    An operation writes each element of its outputs once. An expanded tensor has several elements at one address, and a
    program may give one tensor twice. Gloo takes both: a copy stands for each, and is written back at the end.
    """

    def __init__(self) -> None:
        self._pairs: list[tuple[torch.Tensor, torch.Tensor]] = []

    def __bool__(self) -> bool:
        """Return whether there is anything to write back."""
        return bool(self._pairs)

    def writable(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor, or a copy of it if several of its elements have one address."""
        check_device(tensor)
        if tensor.layout != torch.strided or not _is_expanded(tensor):
            return tensor
        copy = tensor.contiguous()
        self._pairs.append((tensor, copy))
        return copy

    def outputs(self, tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Return tensors to write to, of which no two are the same memory."""
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
        """Write the results to the tensors of the caller, the last one of those with the same memory last."""
        for tensor, copy in self._pairs:
            for dimension, stride in enumerate(tensor.stride()):
                if stride == 0 and tensor.shape[dimension] > 1:
                    tensor = tensor.narrow(dimension, 0, 1)
                    copy = copy.narrow(dimension, 0, 1)
            tensor.detach().copy_(copy)


def check_device(tensor: torch.Tensor) -> None:
    """Refuse a tensor that backend aio does not carry."""
    if tensor.device.type != "cpu":
        raise ValueError(
            f"a tensor is on {tensor.device}, and backend 'aio' carries CPU tensors: make a group with another backend "
            f"for them, new_group(backend=...), or use the group that aiocoll.torch.group(pg) returns"
        )


def check_devices(tensors: Sequence[torch.Tensor]) -> None:
    """Refuse tensors that backend aio does not carry."""
    for tensor in tensors:
        check_device(tensor)


def _is_expanded(tensor: torch.Tensor) -> bool:
    return any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
