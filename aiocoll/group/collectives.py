"""Collectives on arrays: methods that check the arguments and start the call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from aiocoll.completion import Completion
from aiocoll.elements.allocate import empty_like, same_place, spare
from aiocoll.elements.buffers import Buffer, clash, overlaps, view
from aiocoll.elements.device import DeviceArray
from aiocoll.elements.ops import ReduceOp
from aiocoll.elements.pairs import pair_buffer
from aiocoll.engine.operations.monitored_barrier import MonitoredBarrier
from aiocoll.engine.operations.signature import Signature
from aiocoll.group.dispatch.arguments import Arguments, slices
from aiocoll.group.dispatch.call_cache import Found
from aiocoll.group.dispatch.dispatcher import Dispatcher, Timeout
from aiocoll.group.prepared_call import FactoryCall
from aiocoll.group.unsized import allgather_unsized, gather_unsized
from aiocoll.loading import loading
from aiocoll.work import Work

__all__ = ["Collectives", "check_sparse"]


def check_sparse(error: TypeError, tensor: Any) -> None:
    """Raise `error`, the result of a failed dense-array check, unless `tensor` is a sparse array."""
    with loading("sparse arrays"):
        from aiocoll.elements.sparse import is_sparse  # imported here, because few programs need it

    if not is_sparse(tensor):
        raise error


class Collectives:
    """The array collectives of one group. `ProcessGroup` documents the calls and their arguments.

    Args:
        dispatcher: dispatcher of the group.
    """

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher
        self._rank = dispatcher.rank
        self._size = dispatcher.size
        self._arguments = Arguments(dispatcher.rank, dispatcher.size)
        self._plans = dispatcher.plans
        self._one = dispatcher.one
        if dispatcher.native is not None:
            self._one = dispatcher.native.one  # type: ignore[assignment]  # takes positional arguments only

    def reduce_sparse(
        self, error: TypeError, tensor: Any, op: ReduceOp, root: int | None, timeout: Timeout, key: str | None
    ) -> Work[Any]:
        """Start an allreduce or a reduce of a sparse array; raise `error` if `tensor` is not a sparse array."""
        check_sparse(error, tensor)
        with loading("sparse arrays"):
            from aiocoll.group.sparse_reduce import reduce_sparse

        return reduce_sparse(self._dispatcher, tensor, op, root, timeout, key)

    def broadcast_sparse(
        self, error: TypeError, tensor: Any, root: int, timeout: Timeout, key: str | None
    ) -> Work[Any]:
        """Start a broadcast of a sparse array; raise `error` if `tensor` is not a sparse array."""
        check_sparse(error, tensor)
        with loading("sparse arrays"):
            from aiocoll.group.sparse_move import broadcast_sparse

        return broadcast_sparse(self._dispatcher, tensor, root, timeout, key)

    def gather_sparse(
        self, error: TypeError, outputs: Any, tensor: Any, root: int | None, timeout: Timeout, key: str | None
    ) -> Work[Any]:
        """Start an allgather, or a gather to `root`, of sparse arrays; raise `error` if `tensor` is not sparse."""
        check_sparse(error, tensor)
        if outputs is not None:
            raise TypeError("outputs must be None for sparse arrays: the results are new arrays")
        with loading("sparse arrays"):
            from aiocoll.group.sparse_move import gather_sparse

        return gather_sparse(self._dispatcher, tensor, root, timeout, key)

    def scan(self, kind: str, tensor: Any, op: ReduceOp, timeout: Timeout, key: str | None) -> Work[Any]:
        """Start a scan or an exscan."""
        if op == ReduceOp.AVG:
            raise ValueError(f"op=ReduceOp.AVG is not defined for {kind}: use SUM and divide by the number of ranks")
        return self._one(kind, tensor, op, None, True, timeout, key)

    def barrier(self, timeout: Timeout, key: str | None) -> Work[None]:
        """Start a barrier."""
        d = self._dispatcher
        work = None if d.native is None else d.native.barrier(timeout, key)
        if work is not None:
            return work
        return d.start_plan(self._plans.barrier(), [], (), None, d.limit(timeout), key)

    def monitored_barrier(self, timeout: Timeout, wait_all_ranks: bool) -> Work[None]:
        """Start a monitored barrier."""
        d = self._dispatcher
        executor = MonitoredBarrier.naming_all_ranks if wait_all_ranks else MonitoredBarrier
        plan = self._plans.plan("monitored_barrier", None, ())

        def make(identity: int, completion: Completion) -> MonitoredBarrier:
            return executor(d.comm, identity, plan, [], completion)

        return d.start(FactoryCall(plan.signature, make, d.limit(timeout)))

    def allgather(
        self, outputs: Sequence[Any] | None, tensor: Any, timeout: Timeout, key: str | None
    ) -> Work[list[Any]]:
        """Start an allgather into one array per rank."""
        given = outputs is not None
        if given and (work := self._start_lists("allgather", outputs, tensor, None, None, timeout, key)) is not None:
            return work
        try:
            source = view(tensor, name="tensor", writable=False)
        except TypeError as error:
            return self.gather_sparse(error, outputs, tensor, None, timeout, key)
        if outputs is None:
            if self._may_differ(source):
                return allgather_unsized(self._dispatcher, source, timeout, key)
            outputs = [empty_like(source) for _ in range(self._size)]
        elif (wrong := self._dispatcher.count_error(outputs, "outputs", "array")) is not None:
            return self._report_wrong(wrong, "allgather", source, timeout, key)
        buffers = self._arguments.blocks(outputs, "outputs", source, "tensor")
        self._arguments.same_count(buffers[self._rank], source, f"outputs[{self._rank}]", "tensor")
        return self._start_allgather(
            outputs if isinstance(outputs, list) else list(outputs), buffers, source, timeout, key
        )

    def allgather_all(self, outputs: Sequence[list[Any]], tensors: Sequence[Any], name: str) -> list[Work[Any]]:
        """Check all `tensors`, then start one allgather per tensor. Error messages call the list `name`."""
        ready = []
        for index, (each, tensor) in enumerate(zip(outputs, tensors, strict=True)):
            own = f"{name}[{index}]"
            source = view(tensor, name=own, writable=False)
            blocks = self._arguments.blocks(each, "outputs", source, own)
            self._arguments.same_count(blocks[self._rank], source, f"outputs[{self._rank}]", own)
            self._arguments.check_outputs_separate(blocks, source)
            ready.append((each, blocks, source))
        return [self._start_allgather(*each, None, None) for each in ready]

    def allgather_into_tensor(self, output: Any, tensor: Any, timeout: Timeout, key: str | None) -> Work[Any]:
        """Start an allgather into one array."""
        if (work := self._start_parts("allgather", output, tensor, None, timeout, key)) is not None:
            return work
        source = view(tensor, name="tensor", writable=False)
        target = self._arguments.require_buffer(output, "output", source, "tensor", source.count * self._size)
        blocks = slices(target, [source.count] * self._size)
        return self._start_allgather(target.result, blocks, source, timeout, key, target)

    def gather(
        self, outputs: Sequence[Any] | None, tensor: Any, root: int, timeout: Timeout, key: str | None
    ) -> Work[list[Any] | None]:
        """Start a gather."""
        d = self._dispatcher
        root = d.check_rank(root, "root")
        if (work := self._start_lists("gather", outputs, tensor, None, root, timeout, key)) is not None:
            return work
        try:
            source = view(tensor, name="tensor", writable=False)
        except TypeError as error:
            return self.gather_sparse(error, outputs, tensor, root, timeout, key)
        blocks: list[Buffer | None] = [None] * self._size
        counts = [0] * self._size
        counts[self._rank] = source.count
        result = None
        if root == self._rank:
            if outputs is None:
                if self._may_differ(source) and d.block_here() is None:
                    return gather_unsized(d, source, root, timeout, key)
                outputs = [empty_like(source) for _ in range(self._size)]
            elif (wrong := d.count_error(outputs, "outputs", "array")) is not None:
                return self._report_wrong(wrong, "gather", source, timeout, key, root)
            blocks = self._arguments.blocks(outputs, "outputs", source, "tensor")
            self._arguments.same_count(blocks[root], source, f"outputs[{root}]", "tensor")
            self._arguments.check_outputs_separate(blocks, source)
            counts = [block.count for block in blocks if block is not None]
            result = list(outputs)
        else:
            self._arguments.check_none(outputs, "outputs", root)
        plan = self._plans.plan("gather", source.dtype, (tuple(counts),), root=root, agreed=())
        return d.start(d.make_call(plan, (*blocks, source), source, result, timeout, key))

    def scatter(
        self, output: Any, inputs: Sequence[Any] | None, root: int, timeout: Timeout, key: str | None
    ) -> Work[Any]:
        """Start a scatter."""
        d = self._dispatcher
        root = d.check_rank(root, "root")
        if (work := self._start_lists("scatter", inputs, output, None, root, timeout, key)) is not None:
            return work
        target = view(output, name="output")
        blocks: list[Buffer | None] = [None] * self._size
        counts = [0] * self._size
        counts[self._rank] = target.count
        if root == self._rank:
            if (wrong := d.count_error(inputs, "inputs", "array")) is not None:
                return self._report_wrong(wrong, "scatter", target, timeout, key, root)
            blocks = self._arguments.blocks(inputs, "inputs", target, "output", writable=False)
            self._arguments.same_count(blocks[root], target, f"inputs[{root}]", "output")
            for rank, block in enumerate(blocks):
                if rank != root and block is not None and overlaps(block.array, target.array):
                    raise ValueError(f"output shares memory with inputs[{rank}]: it would be overwritten")
            counts = [block.count for block in blocks if block is not None]
        else:
            self._arguments.check_none(inputs, "inputs", root)
        plan = self._plans.plan("scatter", target.dtype, (tuple(counts),), root=root, agreed=())
        return d.start(d.make_call(plan, (*blocks, target), target, target.result, timeout, key))

    def reduce_scatter(
        self, output: Any, inputs: Sequence[Any], op: ReduceOp, timeout: Timeout, key: str | None
    ) -> Work[Any]:
        """Start a reduce_scatter of one array per rank."""
        if (work := self._start_lists("reduce_scatter", inputs, output, op, None, timeout, key)) is not None:
            return work
        target = view(output, name="output")
        if (wrong := self._dispatcher.count_error(inputs, "inputs", "array")) is not None:
            return self._report_wrong(wrong, "reduce_scatter", target, timeout, key, op=op)
        blocks = self._arguments.blocks(inputs, "inputs", target, "output", writable=False)
        self._arguments.same_count(blocks[self._rank], target, f"inputs[{self._rank}]", "output")
        return self._start_reduce_scatter(target, blocks, op, timeout, key)

    def reduce_scatter_tensor(
        self, output: Any, input: Any, op: ReduceOp, timeout: Timeout, key: str | None
    ) -> Work[Any]:
        """Start a reduce_scatter of one array."""
        if (work := self._start_parts("reduce_scatter", input, output, op, timeout, key)) is not None:
            return work
        target = view(output, name="output")
        count = target.count * self._size
        source = self._arguments.require_buffer(input, "input", target, "output", count, writable=False)
        return self._start_reduce_scatter(target, slices(source, [target.count] * self._size), op, timeout, key)

    def alltoall(
        self, outputs: Sequence[Any], inputs: Sequence[Any], timeout: Timeout, key: str | None
    ) -> Work[list[Any]]:
        """Start an alltoall with one array to and from each rank."""
        if (work := self._start_lists("alltoall", inputs, outputs, None, None, timeout, key)) is not None:
            return work
        for values, name in ((inputs, "inputs"), (outputs, "outputs")):
            if (wrong := self._dispatcher.count_error(values, name, "array")) is not None:
                return self._report_wrong(wrong, "alltoall", None, timeout, key)
        sources = self._arguments.blocks(inputs, "inputs", None, "inputs[0]", writable=False)
        targets = self._arguments.blocks(outputs, "outputs", sources[0], "inputs[0]")
        shared = clash([each.array for each in targets], [each.array for each in sources])
        if shared is not None:
            first, second = shared[0], shared[1] - self._size
            raise ValueError(f"outputs[{first}] shares memory with inputs[{second}]: alltoall needs separate arrays")
        return self._start_alltoall(list(outputs), targets, sources, (), timeout, key)

    def alltoall_base(
        self,
        output: Any,
        input: Any,
        output_split_sizes: Sequence[int] | None,
        input_split_sizes: Sequence[int] | None,
        timeout: Timeout,
        key: str | None,
    ) -> Work[Any]:
        """Start an alltoall from one input array to one output array."""
        is_even = output_split_sizes is input_split_sizes is None
        if is_even and (work := self._start_parts("alltoall", input, output, None, timeout, key)) is not None:
            return work
        source = view(input, name="input", writable=False)
        target = view(output, name="output")
        if target.dtype is not source.dtype:
            raise TypeError(f"output has dtype {target.dtype.name}, input has {source.dtype.name}; they must be equal")
        same_place(target, "output", source, "input")
        if overlaps(target.array, source.array):
            raise ValueError("output shares memory with input: alltoall_base needs separate arrays")
        into = slices(target, self._arguments.splits(target, output_split_sizes, "output"))
        out_of = slices(source, self._arguments.splits(source, input_split_sizes, "input"))
        return self._start_alltoall(target.result, into, out_of, (target,), timeout, key)

    # -- helpers that several collectives use

    def _start(self, found: Found, shape: tuple[int, ...], result: Any, timeout: Timeout, key: str | None) -> Work[Any]:
        """Start a call on NumPy arrays, with the plan and the flat arrays that the call cache has returned."""
        d = self._dispatcher
        return d.start_plan(*found, shape, result, d.limit(timeout), key)

    def _start_parts(
        self, kind: str, whole: Any, other: Any, op: ReduceOp | None, timeout: Timeout, key: str | None
    ) -> Work[Any] | None:
        """Start a call on an array of equal parts, one per rank; return None if the call cache rejects the arrays."""
        if type(whole) is not np.ndarray or type(other) is not np.ndarray:
            return None
        native = self._dispatcher.native
        if native is not None:
            work = native.parts(kind, whole, other, op, timeout, key)
            if work is not None:
                return work
        if (found := self._plans.parts(kind, whole, other, op)) is None:
            return None
        if kind == "allgather":
            return self._start(found, other.shape, whole, timeout, key)
        return self._start(found, (whole.size // self._size,), other, timeout, key)

    def _start_lists(
        self,
        kind: str,
        blocks: Any,
        other: Any,
        op: ReduceOp | None,
        root: int | None,
        timeout: Timeout,
        key: str | None,
    ) -> Work[Any] | None:
        """Start a call on a list with one array per rank; return None if the call cache rejects the arrays."""
        native = self._dispatcher.native
        if native is not None:
            work = native.lists(kind, blocks, other, op, root, timeout, key)
            if work is not None:
                return work
        if (found := self._plans.lists(kind, blocks, other, root=root, op=op)) is None:
            return None
        match kind:
            case "alltoall":
                return self._start(found, blocks[0].shape, list(other), timeout, key)
            case "reduce_scatter":
                return self._start(found, blocks[self._rank].shape, other, timeout, key)
            case "scatter":
                return self._start(found, other.shape, other, timeout, key)
        same = kind == "allgather" and isinstance(blocks, list)
        result = blocks if same or blocks is None else list(blocks)
        return self._start(found, other.shape, result, timeout, key)

    def _may_differ(self, source: Buffer) -> bool:
        """Return whether allocated outputs may differ in length, so that the ranks must exchange lengths first."""
        if self._size == 1 or self._dispatcher.dry or isinstance(source.array, DeviceArray):
            return False
        block = self._dispatcher.block_here()
        # A block that does not record calls only estimates their durations, and exchanges no lengths.
        return block is None or block.records

    def _report_wrong(
        self,
        wrong: ValueError,
        kind: str,
        main: Buffer | None,
        timeout: Timeout,
        key: str | None,
        root: int | None = None,
        op: ReduceOp | None = None,
    ) -> Work[Any]:
        """Raise an error about a list argument; with ``debug="detail"``, report the error to all ranks instead."""
        signature = Signature(
            kind.upper(),
            None if main is None else main.dtype.name,
            (),
            root,
            None if op is None else op.wire_name,
            device=main.array.kind if main is not None and isinstance(main.array, DeviceArray) else "cpu",
        )
        return self._dispatcher.refuse(wrong, signature, () if main is None else main.shape, timeout, key)

    def _start_allgather(
        self,
        result: Any,
        blocks: Sequence[Buffer],
        source: Buffer,
        timeout: Timeout,
        key: str | None,
        whole: Buffer | None = None,
    ) -> Work[Any]:
        d = self._dispatcher
        self._arguments.check_outputs_separate(blocks, source)
        plan = self._plans.plan("allgather", source.dtype, (tuple(block.count for block in blocks),))
        wholes = () if whole is None else (whole,)
        return d.start(d.make_call(plan, (*blocks, source), source, result, timeout, key, wholes))

    def _start_reduce_scatter(
        self, target: Buffer, blocks: Sequence[Buffer], op: ReduceOp, timeout: Timeout, key: str | None
    ) -> Work[Any]:
        d = self._dispatcher
        if target.dtype.kind == "record":
            target = pair_buffer(target, op, writable=True)
            blocks = [pair_buffer(block, op, writable=False) for block in blocks]
        if any(overlaps(block.array, target.array) for block in blocks):
            target = spare(target)
        plan = self._plans.plan("reduce_scatter", target.dtype, (tuple(block.count for block in blocks),), op=op)
        return d.start(d.make_call(plan, (*blocks, target), blocks[self._rank], target.result, timeout, key))

    def _start_alltoall(
        self,
        result: Any,
        targets: Sequence[Buffer],
        sources: Sequence[Buffer],
        wholes: Sequence[Buffer],
        timeout: Timeout,
        key: str | None,
    ) -> Work[Any]:
        d, rank = self._dispatcher, self._rank
        self._arguments.same_count(targets[rank], sources[rank], f"the output part of rank {rank}", "the input part")
        counts = tuple(each.count for each in sources), tuple(each.count for each in targets)
        plan = self._plans.plan("alltoall", sources[0].dtype, counts, agreed=())
        return d.start(d.make_call(plan, (*sources, *targets), sources[0], result, timeout, key, wholes))
