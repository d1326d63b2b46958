"""Collectives and messages of a torch group, carried out by aiocoll's `ProcessGroup`.

C++ finds the methods of `Calls` by name. Some names differ between torch 2.13 and 2.14: `alias` defines the older ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from aiocoll.errors import CollectiveTimeoutError
from aiocoll.group.process_group import ProcessGroup
from aiocoll.integrations.torch.arguments import (
    Copies,
    check_device,
    check_devices,
    flat_tensors,
    reduce_op,
    seconds,
    sole_tensor,
)
from aiocoll.integrations.torch.carriers import Carriers, alias, routed
from aiocoll.integrations.torch.work import TorchWork
from aiocoll.loops import LoopThread
from aiocoll.work import Work

__all__ = ["Calls"]


class Calls:
    """A mixin with the collective and message methods of a torch group.

    Attributes:
        pg: the group of aiocoll.
        thread: the thread whose event loop carries out the calls.
        count: number of calls so far.
        carriers: the backends for the tensors of each kind of device.
    """

    def setup_calls(self, pg: ProcessGroup, thread: LoopThread, backend: str) -> None:
        """Initialize this mixin; a separate method, because torch's classes do not call `super().__init__`."""
        self.pg = pg
        self.thread = thread
        self.count = 0
        self.carriers = Carriers()
        self._rank = pg.rank()
        self._prefix = f"{backend}:"
        # Works of the calls in the current coalescing block; None outside a block.
        self._block: list[TorchWork] | None = None
        # References that keep works in flight alive, because torch's C++ code holds no reference to the Python objects.
        self._pending_works: set[TorchWork] = set()

    # -- reductions

    @routed
    def allreduce(self, tensors: Any, opts: Any = None, timeout: timedelta | None = None) -> TorchWork:
        """Reduce tensors over all ranks in place."""
        if isinstance(tensors, torch.Tensor):
            tensors = [tensors]
        if len(tensors) > 1:
            return self.allreduce_coalesced(tensors, opts)
        op, limit = _reduction(opts, timeout)
        copies = Copies()
        (tensor,) = [copies.writable(each) for each in tensors]
        return self._call("all_reduce", lambda: self.pg.allreduce(tensor, op, timeout=limit), tensors, copies=copies)

    @routed
    def allreduce_coalesced(self, tensors: list[torch.Tensor], opts: Any = None) -> TorchWork:
        """Reduce several tensors over all ranks in place."""
        op, limit = _reduction(opts, None)
        copies = Copies()
        inner = [copies.writable(each) for each in tensors]
        if any(tensor.is_sparse for tensor in tensors):

            def call() -> Any:
                return _all([self.pg.allreduce(each, op, timeout=limit) for each in inner])

        else:

            def call() -> Any:
                return self.pg.allreduce_coalesced(inner, op, timeout=limit)

        return self._call("all_reduce", call, tensors, copies=copies)

    @routed
    def reduce(self, tensors: Any, opts: Any = None, op: Any = None, timeout: timedelta | None = None) -> TorchWork:
        """Reduce a tensor to one rank, in place."""
        tensor = sole_tensor(tensors)
        root, limit = _rooted(opts, timeout)
        chosen = reduce_op(op if isinstance(opts, int) else opts.reduceOp)
        copies = Copies()
        inner = copies.writable(tensor)
        return self._call("reduce", lambda: self.pg.reduce(inner, root, chosen, timeout=limit), [tensor], copies=copies)

    @routed
    def reduce_scatter(self, output_tensors: Any, input_tensors: Any, opts: Any = None) -> TorchWork:
        """Reduce the r-th tensors in the lists of all ranks into the output of rank r."""
        output, inputs = sole_tensor(output_tensors), flat_tensors(input_tensors)
        op, limit = _reduction(opts, None)
        copies = Copies()
        inner = copies.writable(output)
        check_devices(inputs)
        call: Callable[[], Any] = lambda: self.pg.reduce_scatter(inner, inputs, op, timeout=limit)  # noqa: E731
        return self._call("reduce_scatter", call, [output], inputs, copies)

    @routed
    def reduce_scatter_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        opts: Any = None,
        timeout: timedelta | None = None,
    ) -> TorchWork:
        """Reduce a tensor over all ranks, and store the r-th block of the result in the output of rank r."""
        op, limit = _reduction(opts, timeout)
        check_devices([output, input])
        call: Callable[[], Any] = lambda: self.pg.reduce_scatter_tensor(output, input, op, timeout=limit)  # noqa: E731
        return self._call("_reduce_scatter_base", call, [output], [input])

    _reduce_scatter_base = alias(reduce_scatter_single, "_reduce_scatter_base")

    @routed
    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> TorchWork:
        """Reduce several tensors over all ranks, and store the r-th block of each result on rank r."""
        op, limit = _reduction(opts, None)
        check_devices([*outputs, *inputs])

        def call() -> Any:
            return self.pg.reduce_scatter_tensor_coalesced(outputs, inputs, op, timeout=limit)

        return self._call("reduce_scatter", call, outputs, inputs)

    reduce_scatter_tensor_coalesced = alias(reduce_scatter_single_coalesced, "reduce_scatter_tensor_coalesced")

    # -- moving data

    @routed
    def broadcast(self, tensors: Any, opts: Any = None, timeout: timedelta | None = None) -> TorchWork:
        """Send the tensor of one rank to all ranks."""
        tensor = sole_tensor(tensors)
        root, limit = _rooted(opts, timeout)
        copies = Copies()
        inner = copies.writable(tensor)
        return self._call("broadcast", lambda: self.pg.broadcast(inner, root, timeout=limit), [tensor], copies=copies)

    @routed
    def allgather(
        self, output_tensors: Any, input_tensors: Any, opts: Any = None, timeout: timedelta | None = None
    ) -> TorchWork:
        """Gather the tensors of all ranks into a list on every rank."""
        outputs, tensor, limit = flat_tensors(output_tensors), sole_tensor(input_tensors), seconds(timeout or opts)
        copies = Copies()
        inner = copies.outputs(outputs)
        check_device(tensor)
        call: Callable[[], Any] = lambda: self.pg.allgather(inner, tensor, timeout=limit)  # noqa: E731
        return self._call("all_gather", call, outputs, [tensor], copies)

    @routed
    def allgather_coalesced(self, output_lists: Any, input_list: list[torch.Tensor], opts: Any = None) -> TorchWork:
        """Gather several tensors of each rank on every rank; each sending rank has its own list of outputs."""
        copies, limit = Copies(), seconds(opts)
        outputs = [tensor for each in output_lists for tensor in each]
        check_devices(input_list)
        of_tensors = [copies.outputs(each) for each in zip(*output_lists, strict=True)]

        def call() -> Any:
            pairs = zip(of_tensors, input_list, strict=True)
            return _all([self.pg.allgather(inner, tensor, timeout=limit) for inner, tensor in pairs])

        return self._call("all_gather", call, outputs, input_list, copies)

    @routed
    def all_gather_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        opts: Any = None,
        timeout: timedelta | None = None,
    ) -> TorchWork:
        """Gather the tensors of all ranks into one tensor on every rank."""
        limit = seconds(timeout or opts)
        check_devices([output, input])
        call: Callable[[], Any] = lambda: self.pg.allgather_into_tensor(output, input, timeout=limit)  # noqa: E731
        return self._call("_all_gather_base", call, [output], [input])

    _allgather_base = alias(all_gather_single, "_allgather_base")

    @routed
    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> TorchWork:
        """Gather several tensors of each rank on every rank, with one output tensor per input tensor."""
        limit = seconds(opts)
        check_devices([*outputs, *inputs])
        call: Callable[[], Any] = lambda: self.pg.allgather_into_tensor_coalesced(  # noqa: E731
            outputs, inputs, timeout=limit
        )
        return self._call("all_gather", call, outputs, inputs)

    allgather_into_tensor_coalesced = alias(all_gather_single_coalesced, "allgather_into_tensor_coalesced")

    @routed
    def gather(
        self, output_tensors: Any, input_tensors: Any, opts: Any = None, timeout: timedelta | None = None
    ) -> TorchWork:
        """Gather the tensors of all ranks into a list on the root."""
        (root, limit), tensor = _rooted(opts, timeout), sole_tensor(input_tensors)
        outputs = flat_tensors(output_tensors) if self._rank == root else []
        copies = Copies()
        inner = copies.outputs(outputs) if self._rank == root else None
        check_device(tensor)
        call: Callable[[], Any] = lambda: self.pg.gather(inner, tensor, root, timeout=limit)  # noqa: E731
        return self._call("gather", call, outputs, [tensor], copies)

    @routed
    def gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> TorchWork:
        """Gather the tensors of all ranks into one tensor on the root."""
        parts = []
        if self._rank == opts.rootRank:
            parts = list(output.view(self.pg.size(), *input.shape).unbind())
        return self.gather([parts], [input], opts)

    @routed
    def scatter(
        self, output_tensors: Any, input_tensors: Any, opts: Any = None, timeout: timedelta | None = None
    ) -> TorchWork:
        """Send the r-th tensor in the root's list to rank r."""
        (root, limit), output = _rooted(opts, timeout), sole_tensor(output_tensors)
        inputs = flat_tensors(input_tensors) if self._rank == root else None
        copies = Copies()
        inner = copies.writable(output)
        check_devices(inputs or [])
        call: Callable[[], Any] = lambda: self.pg.scatter(inner, inputs, root, timeout=limit)  # noqa: E731
        return self._call("scatter", call, [output], copies=copies)

    @routed
    def alltoall(self, output_tensors: Any, input_tensors: Any, opts: Any = None) -> TorchWork:
        """Send the r-th input tensor to rank r, and receive from rank r into the r-th output tensor."""
        copies, limit = Copies(), seconds(opts)
        outputs = copies.outputs(output_tensors)
        check_devices(input_tensors)
        call: Callable[[], Any] = lambda: self.pg.alltoall(outputs, input_tensors, timeout=limit)  # noqa: E731
        return self._call("all_to_all", call, output_tensors, input_tensors, copies)

    @routed
    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: Sequence[int],
        input_split_sizes: Sequence[int],
        opts: Any = None,
        timeout: timedelta | None = None,
    ) -> TorchWork:
        """Send the r-th block of the input tensor to rank r, and receive a block from each rank."""
        limit = seconds(timeout or opts)
        check_devices([output, input])
        sizes = list(output_split_sizes) or None, list(input_split_sizes) or None
        call: Callable[[], Any] = lambda: self.pg.alltoall_base(output, input, *sizes, timeout=limit)  # noqa: E731
        return self._call("all_to_all", call, [output], [input])

    alltoall_base = alias(all_to_all_single, "alltoall_base")

    # -- messages

    @routed
    def send(self, tensors: Any, dst: int, tag: int = 0) -> TorchWork:
        """Send a tensor to one rank."""
        tensor = sole_tensor(tensors)
        check_device(tensor)
        return self._call("send", lambda: self.pg.send(tensor, dst, tag), [tensor])

    @routed
    def recv(self, tensors: Any, src: int, tag: int = 0) -> TorchWork:
        """Receive a tensor from one rank."""
        return self._receive("recv", lambda tensor: self.pg.recv(tensor, src, tag), tensors)

    @routed
    def recv_anysource(self, tensors: Any, tag: int = 0) -> TorchWork:
        """Receive a tensor from any rank."""
        return self._receive("recvAnySource", lambda tensor: self.pg.recv_anysource(tensor, tag), tensors)

    def _receive(self, name: str, call: Callable[[torch.Tensor], Any], tensors: Any) -> TorchWork:
        copies = Copies()
        tensor = copies.writable(sole_tensor(tensors))
        return self._call(name, lambda: call(tensor), [sole_tensor(tensors)], copies=copies)

    # -- barriers

    def barrier(self, opts: Any = None, timeout: timedelta | None = None) -> TorchWork:
        """Wait until all ranks have called the barrier."""
        limit = seconds(timeout or opts)
        return self._call("barrier", lambda: self.pg.barrier(timeout=limit), [])

    def monitored_barrier(self, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        """Wait until all ranks have called the barrier; on timeout, rank 0's error names the missing ranks."""
        limit = seconds(timeout)
        work = self._call("monitored_barrier", lambda: self.pg.monitored_barrier(limit, wait_all_ranks), [])
        try:
            work.wait()
        except dist.DistBackendError as error:
            cause = error.__cause__
            if not isinstance(cause, CollectiveTimeoutError):
                raise
            shown = self.pg.timeout if limit is None else limit
            raise dist.DistBackendError(_barrier_error_text(self._rank, cause, shown, wait_all_ranks)) from cause

    # -- blocks of tensors

    @routed
    def start_coalescing(self, device: Any = None) -> None:
        """Begin a coalescing block; its calls start at once, and `end_coalescing` returns one work for all."""
        self._block = []

    _start_coalescing = alias(start_coalescing, "_start_coalescing")

    @routed
    def end_coalescing(self, device: Any = None) -> TorchWork:
        """End the coalescing block; return a work for all of its calls."""
        block, self._block = self._block or [], None

        def call() -> Any:
            return _all_ended(block)

        return self._call("coalesced", call, [])

    _end_coalescing = alias(end_coalescing, "_end_coalescing")

    # -- starting a call

    def _call(
        self,
        name: str,
        call: Callable[[], Any],
        outputs: Sequence[torch.Tensor],
        profiled: Sequence[torch.Tensor] | None = None,
        copies: Copies | None = None,
    ) -> TorchWork:
        event = None
        if torch.autograd._profiler_enabled():
            shown = outputs if profiled is None else profiled
            event = torch.autograd._record_function_with_args_enter(self._prefix + name, *shown)
        if copies:
            call = _written_back(call, copies)
        self.count += 1
        work = TorchWork(self.thread, self._rank, name, outputs, call, event)
        if self._block is not None:
            self._block.append(work)
        self._pending_works.add(work)
        work.add_done_callback(lambda _: self._pending_works.discard(work))
        return work


def _reduction(opts: Any, timeout: timedelta | None) -> tuple[Any, float | None]:
    """Return the reduction op and the timeout in seconds from torch's options, or from a plain reduction op."""
    if opts is None or not hasattr(opts, "reduceOp"):
        return reduce_op(opts), seconds(timeout)
    return reduce_op(opts.reduceOp), seconds(opts)


def _rooted(opts: Any, timeout: timedelta | None) -> tuple[int, float | None]:
    """Return the root rank and the timeout in seconds from torch's options, or from a plain root rank."""
    return (opts, seconds(timeout)) if isinstance(opts, int) else (opts.rootRank, seconds(opts))


def _written_back(call: Callable[[], Any], copies: Copies) -> Callable[[], Any]:
    def begin() -> Any:
        made = call()

        async def finish() -> None:
            await made
            copies.write_back()

        return finish()

    return begin


async def _all(works: list[Work[Any]]) -> None:
    """Wait until all works have ended, then raise the first error."""
    errors = []
    for work in works:
        try:
            await work
        except Exception as error:
            errors.append(error)
    if errors:
        raise errors[0]


async def _all_ended(works: list[TorchWork]) -> None:
    """Wait until all works of a coalescing block have ended, then raise the first error."""
    for work in works:
        if not work.is_completed():
            await work.started.ended()
    for work in works:
        if (error := work.started.exception()) is not None:
            raise error


def _barrier_error_text(rank: int, cause: CollectiveTimeoutError, limit: float, wait_all_ranks: bool) -> str:
    """Return the error message, worded as in torch, for a `monitored_barrier` that some ranks did not reach."""
    if rank:
        return (
            f"[Rank {rank}] Rank {rank} successfully reached monitoredBarrier, but received errors while waiting for "
            f"send/recv from rank 0. Please check rank 0 logs for faulty rank. {cause}"
        )
    if limit == 0:
        return f"[Rank 0] Rank 0 timed out in monitoredBarrier after 0 ms. {cause}"
    ranks = list(cause.ranks) if wait_all_ranks else list(cause.ranks)[:1]
    names = f"Rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
    return f"[Rank 0] {names} failed to pass monitoredBarrier in {1000 * limit:.0f} ms. {cause}"
