"""`Overlap`: averages gradients over the ranks while `backward` runs, for torch programs with asyncio."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from aiocoll.elements.ops import ReduceOp
from aiocoll.group.process_group import ProcessGroup
from aiocoll.work import Work

__all__ = ["Overlap"]


class Overlap:
    """A gradient averager that reduces full buckets of gradients while `backward` computes the others.

        overlap = Overlap(pg, model)
        ...
        await overlap.backward(loss)  # in place of loss.backward()
        optimizer.step()

    Create it on the event loop of the group. The model has the same parameters on every rank, in the same order.

    Args:
        pg: the group.
        model: a torch module on the CPU.
        bucket_bytes: number of bytes of gradients that one operation averages; 0 for one operation per parameter.
        compress: dtype in which gradients are sent, such as `torch.bfloat16`; None for their own dtype.
        find_unused: count missing gradients as zero, at the cost of one small operation per step. Otherwise a missing
            gradient raises `RuntimeError`.
        name: prefix of the keys of the operations. Each `Overlap` of a group needs another name.
    """

    def __init__(
        self,
        pg: ProcessGroup,
        model: torch.nn.Module,
        bucket_bytes: int = 4 << 20,
        *,
        compress: torch.dtype | None = None,
        find_unused: bool = False,
        name: str = "overlap",
    ) -> None:
        self._pg, self._model, self._name = pg, model, name
        self._loop = asyncio.get_running_loop()
        self._compress, self._find_unused = compress, find_unused
        self._synchronizes = True
        self._works: list[tuple[int, Work[Any], list[Any]]] = []
        self._buckets = _buckets(model, bucket_bytes)
        self._missing = [len(bucket) for bucket in self._buckets]
        for number, bucket in enumerate(self._buckets):
            for parameter in bucket:
                parameter.register_post_accumulate_grad_hook(lambda _, number=number: self._on_gradient(number))

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Only accumulate gradients locally inside the block; the next `backward` after it averages the sums.

        Yields:
            None.
        """
        self._synchronizes = False
        try:
            yield
        finally:
            self._synchronizes = True

    async def backward(self, loss: torch.Tensor) -> None:
        """Compute the gradients and average them over all ranks.

        Args:
            loss: a scalar tensor. Its `backward` runs in a thread.

        Raises:
            RuntimeError: a parameter has no gradient, and `find_unused` is False.
            GroupError: an operation fails.
        """
        self._works, self._missing = [], [len(bucket) for bucket in self._buckets]
        # When this await returns, all gradient hooks have run, and so has `_start_average` for each full bucket.
        await asyncio.to_thread(loss.backward)
        if not self._synchronizes:
            return
        unused: list[torch.nn.Parameter] = []
        if self._find_unused:
            unused = await self._average_incomplete()
        elif any(self._missing):
            raise RuntimeError("some parameters have no gradient; pass find_unused=True to average zeros for them")
        for number, work, sent in self._works:
            await work
            if self._compress is not None:
                for parameter, average in zip(self._buckets[number], sent, strict=True):
                    assert parameter.grad is not None
                    parameter.grad.copy_(average)
        for parameter in unused:
            parameter.grad = None

    async def broadcast_buffers(self) -> None:
        """Copy the model's buffers, such as batch normalization statistics, from rank 0 to all ranks.

        Raises:
            GroupError: an operation fails.
        """
        for index, buffer in enumerate(self._model.buffers()):
            await self._pg.broadcast(buffer, 0, key=f"{self._name} buffer {index}")

    def _on_gradient(self, number: int) -> None:
        """Record that `backward` has computed a gradient of bucket `number`; runs in the thread of `backward`."""
        self._missing[number] -= 1
        if self._missing[number] == 0 and self._synchronizes:
            self._loop.call_soon_threadsafe(self._start_average, number)

    def _start_average(self, number: int) -> None:
        """Start the average of a bucket; runs on the event loop."""
        gradients: list[Any] = [parameter.grad for parameter in self._buckets[number]]
        if self._compress is not None:
            gradients = [gradient.to(self._compress) for gradient in gradients]
        work = self._pg.allreduce_coalesced(gradients, ReduceOp.AVG, key=f"{self._name} bucket {number}")
        self._works.append((number, work, gradients))

    async def _average_incomplete(self) -> list[torch.nn.Parameter]:
        """Average incomplete buckets with zeros for missing gradients; return the parameters no rank has used."""
        parameters = [parameter for bucket in self._buckets for parameter in bucket]
        used = torch.tensor([parameter.grad is not None for parameter in parameters], dtype=torch.uint8)
        await self._pg.allreduce(used, ReduceOp.MAX, key=f"{self._name} used")
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        for number, missing in enumerate(self._missing):
            if missing:
                self._start_average(number)
        return [parameter for parameter, is_used in zip(parameters, used.tolist(), strict=True) if not is_used]


def _buckets(model: torch.nn.Module, nbytes: int) -> list[list[torch.nn.Parameter]]:
    """Divide the parameters into buckets, last layer first; all ranks get the same buckets."""
    buckets: list[list[torch.nn.Parameter]] = [[]]
    for parameter in reversed([each for each in model.parameters() if each.requires_grad]):
        if sum(each.nbytes for each in buckets[-1]) >= nbytes and buckets[-1]:
            buckets.append([])
        buckets[-1].append(parameter)
    return buckets
