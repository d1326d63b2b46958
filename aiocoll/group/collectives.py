"""The collectives on arrays: each call checks its arguments, says what it is, and starts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from aiocoll.elements.allocate import empty_like, same_place, spare
from aiocoll.elements.buffers import Buffer, clash, overlaps, view
from aiocoll.elements.device import DeviceArray
from aiocoll.elements.ops import ReduceOp
from aiocoll.engine.operations.monitored_barrier import MonitoredBarrier, MonitoredBarrierOfAll
from aiocoll.group.arguments import Arguments, slices
from aiocoll.group.calls import Recorder, interceptor_in_scope
from aiocoll.group.launch import Timeout
from aiocoll.group.unsized import allgather_unsized, gather_unsized
from aiocoll.loading import loading
from aiocoll.work import Work

__all__ = ["Collectives"]

SUM = ReduceOp.SUM


class Collectives(Arguments):
    """Calls that all ranks of a group make in the same order (or with the same `key`).

    Common to all: the call starts at once and returns a `Work`; awaiting it gives the result. `timeout` is in seconds
    for the whole collective (None: the group's). Arrays are anything `aiocoll.elements.buffers.view` takes; their
    dtype must be the same on every rank. A wrong argument raises `TypeError` or `ValueError` at the call, and nothing
    is sent; the await raises `CollectiveMismatchError`, `CollectiveTimeoutError` or `PeerLostError`, and the group is
    revoked.

    Arrays on a CUDA device go by NCCL if all ranks have the same version of it and a device each. If not, they are
    staged: copied to the host, where the collective is carried out, and back. So is what NCCL lacks: scans, bit and
    custom ops, reductions of 16-bit integers, AVG of integers and float8, PRODUCT of complex, and PREMUL_SUM but of
    `allreduce`; and all reductions of float8, unless NCCL is 2.24 or later and all devices have compute capability 9.0.
    What NCCL reduces, it rounds in its own way: floats of 16 bits and less at each step; and of a NaN, MIN and MAX may
    lose sight. All ranks agree on each call before it begins, in two steps over the host: where they differ,
    `CollectiveMismatchError` leaves arrays and group as they are. A group is of one device; ranks that share several
    groups call them in the same order, as NCCL asks of communicators.

    Below, p is the world size and n the bytes of one rank's tensor.
    """

    def allreduce(
        self, tensor: Any, op: ReduceOp = SUM, *, timeout: Timeout = None, key: str | None = None
    ) -> Work[Any]:
        """Reduce `tensor` over all ranks, in place; every rank gets the same bits.

            rank 0  [a0 a1]         [a0+b0 a1+b1]
            rank 1  [b0 b1]   ->    [a0+b0 a1+b1]

        Args:
            tensor: an array of the same count on every rank, or a number, whose reduction is the result then.
            op: how to reduce.
            timeout: seconds; None is the group's.
            key: match by this key instead of by order.

        Sparse arrays, for SUM only: scipy.sparse COO, CSR and CSC, and torch COO, in place, with or without dense
        dimensions; of torch CSR a new tensor is the result. Every rank gets the union of all ranks' entries, sorted,
        one per place: a sum that is zero stays stored. Entries of one place in one array are added up first. A large
        array is read by a thread: what is wrong with its indices is then the work's error, on all ranks.

        Cost: small: 1 step, n (p-1) bytes sent per rank; large: 2 (p-1) steps, 2 n (p-1)/p bytes. Sparse: an allgather
        of the counts, then one of all entries (4 or 8 bytes each, and the value), or a dense allreduce if that is
        cheaper; see `aiocoll.group.sparse_reduce`.
        Source: Patarasuk and Yuan 2009, doi:10.1016/j.jpdc.2008.09.002; Traff, arXiv 2410.14234.
        """
        try:
            return self._on_one("allreduce", tensor, op, None, True, timeout, key)
        except TypeError:  # found out only here, where no other call pays for it
            with loading("sparse arrays"):
                from aiocoll.elements.sparse import is_sparse  # which few programs need

            if not is_sparse(tensor):
                raise
        with loading("sparse arrays"):
            from aiocoll.group.sparse_reduce import allreduce_sparse

        return allreduce_sparse(self, tensor, op, timeout, key)

    def reduce(
        self, tensor: Any, root: int, op: ReduceOp = SUM, *, timeout: Timeout = None, key: str | None = None
    ) -> Work[Any]:
        """Reduce `tensor` over all ranks into `root`'s; the other ranks' tensors stay as they are.

        Cost: small: 1 step at the root or log2(p) steps; large: a pipelined chain, n bytes sent per rank.
        """
        root = self._check_rank(root, "root")
        return self._on_one("reduce", tensor, op, root, root == self._rank, timeout, key)

    def broadcast(self, tensor: Any, root: int, *, timeout: Timeout = None, key: str | None = None) -> Work[Any]:
        """Copy `root`'s tensor to all ranks.

        Cost: small: up to p-1 sends of the root, or a tree of log(p) levels; large: a pipelined chain, n per rank.
        """
        root = self._check_rank(root, "root")
        return self._on_one("broadcast", tensor, None, root, root != self._rank, timeout, key)

    def scan(self, tensor: Any, op: ReduceOp = SUM, *, timeout: Timeout = None, key: str | None = None) -> Work[Any]:
        """Reduce over ranks 0 to this one, in place (inclusive prefix)."""
        return self._scan("scan", tensor, op, timeout, key)

    def exscan(self, tensor: Any, op: ReduceOp = SUM, *, timeout: Timeout = None, key: str | None = None) -> Work[Any]:
        """Reduce over the ranks below this one, in place (exclusive prefix); rank 0's tensor stays as it is."""
        return self._scan("exscan", tensor, op, timeout, key)

    def barrier(self, *, timeout: Timeout = None, key: str | None = None) -> Work[None]:
        """Wait until all ranks have called it. Cost: ceil(log2 p) steps without data."""
        return self._start(self._plan("barrier", None, ()), (), None, None, timeout, key)

    def monitored_barrier(self, timeout: Timeout = None, wait_all_ranks: bool = False) -> Work[None]:
        """Wait until all ranks have called it; if some do not, rank 0 says which.

        Args:
            timeout: seconds; None is the group's.
            wait_all_ranks: of rank 0: name every rank that is missing, not only the first of them.

        Raises:
            CollectiveTimeoutError: on every rank, saying ``Ranks 1, 3 failed to pass monitoredBarrier in ... ms``.

        Cost: 2 steps without data, through rank 0: dearer than `barrier` with many ranks.
        """
        plan = self._plan("monitored_barrier", None, ())
        executor = MonitoredBarrierOfAll if wait_all_ranks else MonitoredBarrier
        return self._start(plan, (), None, None, timeout, None, executor=executor)

    def allgather(
        self, outputs: Sequence[Any] | None, tensor: Any, *, timeout: Timeout = None, key: str | None = None
    ) -> Work[list[Any]]:
        """Gather every rank's tensor on every rank.

        Args:
            outputs: one array per rank, as long as that rank's tensor. None, then on all ranks, makes them, with rows
                like those of `tensor`; on a CUDA device as long as `tensor`.
            tensor: this rank's array; counts may differ from rank to rank.
            timeout: seconds; None is the group's.
            key: match by this key instead of by order.

        Cost: n (p-1) bytes sent per rank; 1 step, log2(p) steps or p-1 pipelined steps, by size. Without outputs, one
        small step before.
        """
        source = view(tensor, name="tensor", writable=False)
        if outputs is None and self._may_differ(source):
            return allgather_unsized(self, source, timeout, key)
        if outputs is None:
            outputs = [empty_like(source) for _ in range(self._size)]
        buffers = self._blocks(outputs, "outputs", source, "tensor")
        self._same_count(buffers[self._rank], source, f"outputs[{self._rank}]", "tensor")
        return self._gathering(outputs if isinstance(outputs, list) else list(outputs), buffers, source, timeout, key)

    def allgather_into_tensor(
        self, output: Any, tensor: Any, *, timeout: Timeout = None, key: str | None = None
    ) -> Work[Any]:
        """Gather every rank's tensor, all of the same count, into one array, in rank order."""
        source = view(tensor, name="tensor", writable=False)
        target = self._whole(output, "output", source, "tensor", source.count * self._size)
        blocks = slices(target, [source.count] * self._size)
        return self._gathering(target.result, blocks, source, timeout, key, target)

    def gather(
        self,
        outputs: Sequence[Any] | None,
        tensor: Any,
        root: int,
        *,
        timeout: Timeout = None,
        key: str | None = None,
    ) -> Work[list[Any] | None]:
        """Gather every rank's tensor at `root`.

        Args:
            outputs: at the root one array per rank, or None, which makes them, of at most 4 GiB each, with rows like
                those of `tensor`; on a CUDA device, or in a block, as long as `tensor`. Elsewhere None or [].
            tensor: this rank's array; counts may differ from rank to rank.
            root: who gets them; elsewhere the result is None.
            timeout: seconds; None is the group's.
            key: match by this key instead of by order.
        """
        root = self._check_rank(root, "root")
        source = view(tensor, name="tensor", writable=False)
        blocks: list[Buffer | None] = [None] * self._size
        counts = [0] * self._size
        counts[self._rank] = source.count
        result = None
        if root == self._rank:
            if outputs is None and self._may_differ(source) and interceptor_in_scope(self) is None:
                return gather_unsized(self, source, root, timeout, key)
            if outputs is None:
                outputs = [empty_like(source) for _ in range(self._size)]
            blocks = self._blocks(outputs, "outputs", source, "tensor")
            self._same_count(blocks[root], source, f"outputs[{root}]", "tensor")
            self._check_spared(blocks, source)
            counts = [block.count for block in blocks if block is not None]
            result = list(outputs)
        else:
            self._check_none(outputs, "outputs", root)
        plan = self._plan("gather", source.dtype, (tuple(counts),), root=root, agreed=())
        return self._start(plan, (*blocks, source), source, result, timeout, key)

    def scatter(
        self,
        output: Any,
        inputs: Sequence[Any] | None,
        root: int,
        *,
        timeout: Timeout = None,
        key: str | None = None,
    ) -> Work[Any]:
        """Send block r of `root`'s `inputs` to rank r's `output`; elsewhere `inputs` is None or []."""
        root = self._check_rank(root, "root")
        target = view(output, name="output")
        blocks: list[Buffer | None] = [None] * self._size
        counts = [0] * self._size
        counts[self._rank] = target.count
        if root == self._rank:
            blocks = self._blocks(inputs, "inputs", target, "output", writable=False)
            self._same_count(blocks[root], target, f"inputs[{root}]", "output")
            for rank, block in enumerate(blocks):
                if rank != root and block is not None and overlaps(block.array, target.array):
                    raise ValueError(f"output shares memory with inputs[{rank}]: it would be overwritten")
            counts = [block.count for block in blocks if block is not None]
        else:
            self._check_none(inputs, "inputs", root)
        plan = self._plan("scatter", target.dtype, (tuple(counts),), root=root, agreed=())
        return self._start(plan, (*blocks, target), target, target.result, timeout, key)

    def reduce_scatter(
        self,
        output: Any,
        inputs: Sequence[Any],
        op: ReduceOp = SUM,
        *,
        timeout: Timeout = None,
        key: str | None = None,
    ) -> Work[Any]:
        """Reduce block r of all ranks' `inputs` into rank r's `output`; counts may differ from block to block.

        Cost: n (p-1)/p bytes sent per rank, where n are the bytes of all blocks: half of an allreduce.
        """
        target = view(output, name="output")
        blocks = self._blocks(inputs, "inputs", target, "output", writable=False)
        self._same_count(blocks[self._rank], target, f"inputs[{self._rank}]", "output")
        return self._reducing(target, blocks, op, timeout, key)

    def reduce_scatter_tensor(
        self, output: Any, input: Any, op: ReduceOp = SUM, *, timeout: Timeout = None, key: str | None = None
    ) -> Work[Any]:
        """Reduce all ranks' `input` and leave the r-th of p equal parts in rank r's `output`."""
        target = view(output, name="output")
        source = self._whole(input, "input", target, "output", target.count * self._size, writable=False)
        return self._reducing(target, slices(source, [target.count] * self._size), op, timeout, key)

    def alltoall(
        self, outputs: Sequence[Any], inputs: Sequence[Any], *, timeout: Timeout = None, key: str | None = None
    ) -> Work[list[Any]]:
        """Send `inputs[r]` to rank r and receive what rank r sends into `outputs[r]`; any counts."""
        sources = self._blocks(inputs, "inputs", None, "inputs[0]", writable=False)
        targets = self._blocks(outputs, "outputs", sources[0], "inputs[0]")
        found = clash([each.array for each in targets], [each.array for each in sources])
        if found is not None:
            first, second = found[0], found[1] - self._size
            raise ValueError(f"outputs[{first}] shares memory with inputs[{second}]: alltoall needs separate arrays")
        return self._exchanging(list(outputs), targets, sources, (), timeout, key)

    def alltoall_base(
        self,
        output: Any,
        input: Any,
        output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None,
        *,
        timeout: Timeout = None,
        key: str | None = None,
    ) -> Work[Any]:
        """Cut `input` along its first dimension, send part r to rank r, and lay what comes out in `output`.

        Args:
            output: receives part by part, in rank order.
            input: is sent part by part; must not share memory with `output`.
            output_split_sizes: rows from each rank; None for equal parts.
            input_split_sizes: rows to each rank; None for equal parts.
            timeout: seconds; None is the group's.
            key: match by this key instead of by order.
        """
        source = view(input, name="input", writable=False)
        target = view(output, name="output")
        if target.dtype is not source.dtype:
            raise TypeError(f"output has dtype {target.dtype.name}, input has {source.dtype.name}; they must be equal")
        same_place(target, "output", source, "input")
        if overlaps(target.array, source.array):
            raise ValueError("output shares memory with input: alltoall_base needs separate arrays")
        into = slices(target, self._splits(target, output_split_sizes, "output"))
        out_of = slices(source, self._splits(source, input_split_sizes, "input"))
        return self._exchanging(target.result, into, out_of, (target,), timeout, key)

    # -- what several calls have in common

    def _may_differ(self, source: Buffer) -> bool:
        """Whether outputs are made as long as what the others give, not as what this rank gives."""
        if self._size == 1 or isinstance(source.array, DeviceArray):
            return False
        interceptor = interceptor_in_scope(self)
        return interceptor is None or isinstance(
            interceptor, Recorder
        )  # any other one only predicts what calls would take

    def _scan(self, kind: str, tensor: Any, op: ReduceOp, timeout: Timeout, key: str | None) -> Work[Any]:
        if op == ReduceOp.AVG:
            raise ValueError(f"op=ReduceOp.AVG is not defined for {kind}: use SUM and divide by the number of ranks")
        return self._on_one(kind, tensor, op, None, True, timeout, key)

    def _gathering(
        self,
        result: Any,
        blocks: Sequence[Buffer],
        source: Buffer,
        timeout: Timeout,
        key: str | None,
        whole: Buffer | None = None,
    ) -> Work[Any]:
        self._check_spared(blocks, source)
        plan = self._plan("allgather", source.dtype, (tuple(block.count for block in blocks),))
        return self._start(plan, (*blocks, source), source, result, timeout, key, () if whole is None else (whole,))

    def _reducing(
        self, target: Buffer, blocks: Sequence[Buffer], op: ReduceOp, timeout: Timeout, key: str | None
    ) -> Work[Any]:
        if any(overlaps(block.array, target.array) for block in blocks):
            target = spare(target)
        plan = self._plan("reduce_scatter", target.dtype, (tuple(block.count for block in blocks),), op=op)
        return self._start(plan, (*blocks, target), blocks[self._rank], target.result, timeout, key)

    def _exchanging(
        self,
        result: Any,
        targets: Sequence[Buffer],
        sources: Sequence[Buffer],
        wholes: Sequence[Buffer],
        timeout: Timeout,
        key: str | None,
    ) -> Work[Any]:
        rank = self._rank
        self._same_count(targets[rank], sources[rank], f"the output part of rank {rank}", "the input part")
        counts = tuple(each.count for each in sources), tuple(each.count for each in targets)
        plan = self._plan("alltoall", sources[0].dtype, counts, agreed=())
        return self._start(plan, (*sources, *targets), sources[0], result, timeout, key, wholes)
