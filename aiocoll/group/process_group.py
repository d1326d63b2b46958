"""`ProcessGroup`: what a user holds. Here the calls are told; the modules beside this one carry them out."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from typing import Any, Self

from numpy.typing import DTypeLike, NDArray

from aiocoll.elements.ops import ReduceOp
from aiocoll.engine.communicator import Communicator
from aiocoll.errors import GroupError
from aiocoll.group.collectives import Collectives
from aiocoll.group.dispatch.dispatcher import Dispatcher, Timeout
from aiocoll.group.dispatch.origin import GroupSpec, Origin
from aiocoll.group.empty import empty
from aiocoll.group.flight_recorder import FlightRecorder
from aiocoll.group.interceptors.coalesce import Batch, Coalescer, check_list, pairs
from aiocoll.group.interceptors.dry_run import DryRun
from aiocoll.group.interceptors.estimate import Estimate, Estimator
from aiocoll.group.interceptors.verify import Verifier
from aiocoll.group.lifetime import Lifetime
from aiocoll.group.messages import Messages, Recv, Send
from aiocoll.group.objects import Objects
from aiocoll.group.reconfigurer import Reconfigurer
from aiocoll.hooks import Hook, HookHandle
from aiocoll.store import Store
from aiocoll.work import Work

__all__ = ["ProcessGroup", "current_process_group", "process_group"]

SUM = ReduceOp.SUM

_current: contextvars.ContextVar[ProcessGroup | None] = contextvars.ContextVar("aiocoll_group", default=None)


class ProcessGroup:
    """A group of ranks, seen by one of them; made by `aiocoll.new_group`.

    It belongs to the event loop that made it. A failed collective revokes it on all ranks: what is pending fails with
    the cause, and later calls raise `GroupRevokedError`.

    **Collectives.** Calls that all ranks of a group make in the same order (or with the same `key`).

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

    **Objects.** Called by all ranks in the same order (or with the same `key`); results are new objects.

    An object that cannot travel raises `SerializationError` at the call, which names its type and path. Sizes are
    capped at 16 MiB per object. Cost: one step; each object is sent straight to its receivers.

    **Messages.** Calls of a sender and a receiver. Messages of one sender with one tag are received in the order sent.

    A tag is a number from 0 to 2**30 - 1. Length and dtype of a message must be those of the receive. Arrays on a CUDA
    device go by NCCL if the group uses it and the message has more than 256 KiB, else through the host; the other end
    of a message may be an array of the host.

    Attributes:
        group_name: the same on all ranks.
        group_desc: for people.
        timeout: seconds an operation may take by default.
        global_ranks: rank in the job of each rank of the group.
        recorder: what this rank did last, see `FlightRecorder`.
        completed_everywhere: for a group made by `shrink`, what the old one had completed on all ranks of this one.
        completed_somewhere: what it had completed on one of them at least.
    """

    def __init__(self, comm: Communicator, spec: GroupSpec, origin: Origin) -> None:
        self.group_name = comm.name
        self.group_desc = f"{len(comm.ranks)} ranks"
        self.timeout = comm.timeout
        self.global_ranks = comm.ranks
        self.recorder = FlightRecorder(comm, spec.options.dump_dir)
        self.completed_everywhere, self.completed_somewhere = spec.completed
        self._comm = comm
        self._rank = comm.rank
        self._devices = spec.devices
        dispatcher = self._dispatcher = Dispatcher(self, comm, spec, dry=origin.dry)
        if origin.dry:
            dispatcher.intercept(DryRun(dispatcher))
        elif spec.options.debug == "detail" and len(comm.ranks) > 1:
            verifier = Verifier(dispatcher)
            dispatcher.intercept(verifier, verifier.tell_wrong)
        # Bound once: most calls are short.
        self._one = dispatcher.one
        self._check_rank = dispatcher.check_rank
        self._failures = dispatcher.failures
        self._collectives = Collectives(dispatcher)
        self._objects = Objects(dispatcher)
        self._messages = Messages(dispatcher, self._objects)
        self._coalescer = Coalescer(dispatcher)
        self._reconfigurer = Reconfigurer(dispatcher, self._objects, origin, spec)
        self._lifetime = Lifetime(dispatcher, self._coalescer, self._reconfigurer, self.recorder, origin)

    def __repr__(self) -> str:
        closed, revoked = self._dispatcher.closed, self._comm.cause is not None
        state = "closed" if closed else "revoked" if revoked else "open"
        return f"<ProcessGroup {self.group_name!r} rank {self._rank} of {len(self.global_ranks)}, {state}>"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if error is not None:
            for group in self._reconfigurer.open_groups():
                group.abort(f"{type(error).__name__}: {error}")
        await self.shutdown()

    def rank(self) -> int:
        """This rank's number in the group."""
        return self._rank

    def size(self) -> int:
        """Number of ranks."""
        return len(self.global_ranks)

    def backend_for(self, device: str) -> str:
        """Name what carries out collectives on arrays of `device`, a kind such as "cpu".

        Of CUDA arrays "aio" uses NCCL where all ranks can, "nccl" nothing else; see `aiocoll.backends`.
        """
        if device not in self._devices:
            served = ", ".join(map(repr, self._devices))
            raise ValueError(f"device={device!r} has no backend in group {self.group_name!r}; it has one for {served}")
        return self._devices[device]

    # -- collectives on arrays

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
            return self._one("allreduce", tensor, op, None, True, timeout, key)
        except TypeError as error:  # found out only here, where no other call pays for it
            return self._collectives.allreduce_sparse(error, tensor, op, timeout, key)

    def reduce(
        self, tensor: Any, root: int, op: ReduceOp = SUM, *, timeout: Timeout = None, key: str | None = None
    ) -> Work[Any]:
        """Reduce `tensor` over all ranks into `root`'s; the other ranks' tensors stay as they are.

        Cost: small: 1 step at the root or log2(p) steps; large: a pipelined chain, n bytes sent per rank.
        """
        root = self._check_rank(root, "root")
        return self._one("reduce", tensor, op, root, root == self._rank, timeout, key)

    def broadcast(self, tensor: Any, root: int, *, timeout: Timeout = None, key: str | None = None) -> Work[Any]:
        """Copy `root`'s tensor to all ranks.

        Cost: small: up to p-1 sends of the root, or a tree of log(p) levels; large: a pipelined chain, n per rank.
        """
        root = self._check_rank(root, "root")
        return self._one("broadcast", tensor, None, root, root != self._rank, timeout, key)

    def scan(self, tensor: Any, op: ReduceOp = SUM, *, timeout: Timeout = None, key: str | None = None) -> Work[Any]:
        """Reduce over ranks 0 to this one, in place (inclusive prefix)."""
        return self._collectives.scan("scan", tensor, op, timeout, key)

    def exscan(self, tensor: Any, op: ReduceOp = SUM, *, timeout: Timeout = None, key: str | None = None) -> Work[Any]:
        """Reduce over the ranks below this one, in place (exclusive prefix); rank 0's tensor stays as it is."""
        return self._collectives.scan("exscan", tensor, op, timeout, key)

    def barrier(self, *, timeout: Timeout = None, key: str | None = None) -> Work[None]:
        """Wait until all ranks have called it. Cost: ceil(log2 p) steps without data."""
        return self._collectives.barrier(timeout, key)

    def monitored_barrier(self, timeout: Timeout = None, wait_all_ranks: bool = False) -> Work[None]:
        """Wait until all ranks have called it; if some do not, rank 0 says which.

        Args:
            timeout: seconds; None is the group's.
            wait_all_ranks: of rank 0: name every rank that is missing, not only the first of them.

        Raises:
            CollectiveTimeoutError: on every rank, saying ``Ranks 1, 3 failed to pass monitoredBarrier in ... ms``.

        Cost: 2 steps without data, through rank 0: dearer than `barrier` with many ranks.
        """
        return self._collectives.monitored_barrier(timeout, wait_all_ranks)

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
        return self._collectives.allgather(outputs, tensor, timeout, key)

    def allgather_into_tensor(
        self, output: Any, tensor: Any, *, timeout: Timeout = None, key: str | None = None
    ) -> Work[Any]:
        """Gather every rank's tensor, all of the same count, into one array, in rank order."""
        return self._collectives.allgather_into_tensor(output, tensor, timeout, key)

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
        return self._collectives.gather(outputs, tensor, root, timeout, key)

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
        return self._collectives.scatter(output, inputs, root, timeout, key)

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
        return self._collectives.reduce_scatter(output, inputs, op, timeout, key)

    def reduce_scatter_tensor(
        self, output: Any, input: Any, op: ReduceOp = SUM, *, timeout: Timeout = None, key: str | None = None
    ) -> Work[Any]:
        """Reduce all ranks' `input` and leave the r-th of p equal parts in rank r's `output`."""
        return self._collectives.reduce_scatter_tensor(output, input, op, timeout, key)

    def alltoall(
        self, outputs: Sequence[Any], inputs: Sequence[Any], *, timeout: Timeout = None, key: str | None = None
    ) -> Work[list[Any]]:
        """Send `inputs[r]` to rank r and receive what rank r sends into `outputs[r]`; any counts."""
        return self._collectives.alltoall(outputs, inputs, timeout, key)

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
        return self._collectives.alltoall_base(output, input, output_split_sizes, input_split_sizes, timeout, key)

    # -- calls that travel together

    def coalescing(self) -> Batch:
        """Record the calls on this group made in the block, and in tasks started in it, and carry them out together.

            async with pg.coalescing():
                for gradient in gradients:
                    pg.allreduce(gradient)

        One operation does what was asked for with the same kind, dtype, op and root. All ranks record the same calls
        in the same order; they take one number together. Leaving the block sends them, and waits for all; awaiting one
        of them inside sends what is recorded at the end of this turn of the loop. The order in which the calls of a
        block are carried out is not defined: none may write where another one reads or writes. Calls on CUDA arrays are
        one group of NCCL calls; what NCCL cannot do is staged, each call by itself.

        If the block is left by an exception, nothing more is sent, and what was not raises from that exception.

        Raises:
            RuntimeError: the block is in another one of the same group.
            ValueError: (when it is sent) two calls share memory that one of them writes.
            CollectiveMismatchError: ranks have recorded different calls; it names some that differ.
        """
        return self._coalescer.block()

    def allreduce_coalesced(
        self, tensors: Sequence[Any], op: ReduceOp = SUM, *, timeout: Timeout = None, key: str | None = None
    ) -> Work[list[Any]]:
        """Reduce each of `tensors` over all ranks, in place, as one operation per dtype.

        Cost: that of one `allreduce` of all of them, and two copies of each that is small; large ones travel alone.
        """
        check_list(tensors, "tensors")
        return self._coalescer.as_one(
            "ALLREDUCE_COALESCED", lambda: [self.allreduce(each, op, timeout=timeout) for each in tensors], key
        )

    def allgather_into_tensor_coalesced(
        self, outputs: Sequence[Any], inputs: Sequence[Any], *, timeout: Timeout = None, key: str | None = None
    ) -> Work[list[Any]]:
        """Gather every rank's `inputs[i]` into `outputs[i]`, for all i, as one operation per dtype."""
        each = pairs(outputs, inputs)
        return self._coalescer.as_one(
            "ALLGATHER_INTO_TENSOR_COALESCED",
            lambda: [self.allgather_into_tensor(*pair, timeout=timeout) for pair in each],
            key,
        )

    def reduce_scatter_tensor_coalesced(
        self,
        outputs: Sequence[Any],
        inputs: Sequence[Any],
        op: ReduceOp = SUM,
        *,
        timeout: Timeout = None,
        key: str | None = None,
    ) -> Work[list[Any]]:
        """Reduce all ranks' `inputs[i]` and leave part r in rank r's `outputs[i]`, for all i."""
        each = pairs(outputs, inputs)
        return self._coalescer.as_one(
            "REDUCE_SCATTER_TENSOR_COALESCED",
            lambda: [self.reduce_scatter_tensor(*pair, op, timeout=timeout) for pair in each],
            key,
        )

    # -- messages between two ranks

    def send(self, tensor: Any, dst: int, tag: int = 0, *, timeout: Timeout = None) -> Work[Any]:
        """Send `tensor` to rank `dst`; done when the memory may be reused, not when it has been received."""
        return self._messages.send(tensor, dst, tag, timeout)

    def recv(self, tensor: Any, src: int, tag: int = 0, *, timeout: Timeout = None) -> Work[Any]:
        """Receive a message of rank `src` into `tensor`."""
        src = self._check_rank(src, "src", other=True)
        return self._messages.recv(tensor, src, tag, timeout)

    def recv_anysource(self, tensor: Any, tag: int = 0, *, timeout: Timeout = None) -> Work[Any]:
        """Receive the next message of any rank into `tensor`; `work.source_rank()` tells whose it was."""
        return self._messages.recv(tensor, None, tag, timeout)

    def batch(self, operations: Sequence[Send | Recv], *, timeout: Timeout = None) -> Work[list[Any]]:
        """Start several sends and receives together; the result is their tensors, in the order given.

        All arguments are checked before anything starts.
        """
        return self._messages.batch(operations, timeout)

    def send_object(self, obj: Any, dst: int, tag: int = 0, *, timeout: Timeout = None) -> Work[None]:
        """Send an object, by msgpack; see `aiocoll.codec` for what travels."""
        return self._messages.send_object(obj, dst, tag, timeout)

    def recv_object(self, src: int | None = None, tag: int = 0, *, timeout: Timeout = None) -> Work[Any]:
        """Receive an object of rank `src`, or of any rank."""
        return self._messages.recv_object(src, tag, timeout)

    def incoming(self, tag: int = 0) -> AsyncIterator[tuple[int, Any]]:
        """Yield `(source, message)` for every message with `tag` that no receive has asked for, in order of arrival.

        A message is a 1-D array, or the object that was sent. A message is taken only when it is yielded, so
        cancelling a step loses none, and the iterator can go on; several tasks may share it. It ends when the group is
        closed by this rank.
        """
        return self._messages.incoming(tag)

    # -- objects

    def broadcast_object(
        self, obj: Any = None, root: int = 0, *, timeout: Timeout = None, key: str | None = None
    ) -> Work[Any]:
        """Return `root`'s object on every rank; `obj` is ignored on the others."""
        return self._objects.broadcast(obj, root, timeout, key)

    def allgather_object(self, obj: Any, *, timeout: Timeout = None, key: str | None = None) -> Work[list[Any]]:
        """Return every rank's object, in rank order, on every rank."""
        return self._objects.allgather(obj, timeout, key)

    def gather_object(
        self, obj: Any, root: int = 0, *, timeout: Timeout = None, key: str | None = None
    ) -> Work[list[Any] | None]:
        """Return every rank's object, in rank order, at `root`; None elsewhere."""
        return self._objects.gather(obj, root, timeout, key)

    def scatter_object(
        self, objs: Sequence[Any] | None, root: int = 0, *, timeout: Timeout = None, key: str | None = None
    ) -> Work[Any]:
        """Return the r-th of `root`'s objects on rank r; `objs` is ignored on the others."""
        return self._objects.scatter(objs, root, timeout, key)

    def alltoall_object(
        self, objs: Sequence[Any], *, timeout: Timeout = None, key: str | None = None
    ) -> Work[list[Any]]:
        """Send the r-th object to rank r; return what every rank sent here, in rank order."""
        return self._objects.alltoall(objs, timeout, key)

    # -- arrays and estimates

    async def empty(self, shape: int | Sequence[int], dtype: DTypeLike) -> NDArray[Any]:
        """Return a new array, of any content, in memory that the other ranks of this host can read.

            ordinary array       rank 0 copies a piece into shared memory; rank 1 reduces it from there
            array of `empty`     rank 1 reduces it from where it lies

        An `allreduce` of more than 64 KiB then copies nothing that it does not have to, where all ranks of the group
        are on one host and share memory, and the op is applied in pieces (of float16 and narrower, sums are not). It
        gives the same bits as on other arrays, which other ranks may use. All other calls treat it as any other array.

        Any array inside it is as good: a slice or another shape of it, or a tensor that shares its memory. It belongs
        to this rank alone, is no call that others have to make too, and ends like any other array, with its last view.
        It also serves the groups that `shrink` and `new_group` make of the same ranks.

        Args:
            shape: a number of elements, or a tuple.
            dtype: one that can be exchanged, as NumPy takes it; bfloat16 and float8 are those of ml_dtypes.

        Returns:
            The array, C-contiguous. It lies in ordinary memory if it is small, if other memory would gain nothing, or
            (a warning says so once) if there is none.

        Raises:
            TypeError: `shape` or `dtype` is none, or such elements cannot be exchanged.
            ValueError: a negative number, or more bytes than there are addresses.
            MemoryError: there is no memory at all.
            GroupClosedError: this rank has closed the group.
            GroupRevokedError: the group has failed.

        Cost: 0.3 ms per MiB, in many turns of the loop; 1 file descriptor here, before Python 3.13 2 here and 1 at
        the right neighbour, so make few large arrays and slice them. The first call on each also passes it on.
        """
        return await empty(self._dispatcher, shape, dtype)

    @contextlib.contextmanager
    def time_estimator(self) -> Iterator[Estimate]:
        """Predict how long the calls in this block would take, in place of making them.

            with pg.time_estimator() as estimate:
                pg.allreduce(gradients)
                pg.barrier()
            print(estimate.seconds, estimate.calls)

        The calls check their arguments, send nothing, take no number and leave arrays as they are; their works have
        ended, and yield what they are given (objects: None). It is local: other ranks need not do the same. Tasks
        started in the block predict too; other groups, and other tasks, go on as always.

        What is predicted is a call that all ranks enter together, on a machine that does nothing else: the formulas of
        `aiocoll.algorithms.cost` with the numbers of the machine, which are defaults unless `aiocoll bench --tune` has
        measured them. Calls count one after the other, also where they would overlap. Of objects only the bytes that
        this rank sends are known; of gather and scatter, off the root, those of equal shares. Sparse arrays count as if
        all ranks' were of the same size and sent as they are. Of ranks on several hosts each is taken to be as far from
        any other as the hosts are. What ``debug="detail"`` adds is left out.

        Accuracy, as ``bench/estimate.py`` finds it: good for comparing calls, and for the order of magnitude of one.
        See the table in ``docs/estimates.md``.
        """
        self._dispatcher.check()
        estimate = Estimate()
        with self._dispatcher.scoped(Estimator(self._dispatcher, estimate)):
            yield estimate

    # -- other groups

    def split_group(
        self,
        ranks: Sequence[int] | Sequence[Sequence[int]],
        timeout: Timeout = None,
        group_name: str | None = None,
    ) -> Work[Self | None]:
        """Make a group of some of the ranks, or several that have no rank in common.

        Every rank of this group calls it, in the same order and with the same lists; it is local and sends nothing.
        Whatever order they are named in, the ranks of the new group are numbered as they follow each other in this
        one. It shares all connections with this group, can be split again, and is closed by itself or with this one.
        It fails on its own: a failure of this group, other than the death of a common rank, does not concern it.

        Ranks that have named different lists cannot talk to each other in the groups that come of it. The first
        collective there tells them so within half a second.

        Args:
            ranks: of this group; or a list of such lists.
            timeout: seconds an operation of the new group may take by default; this group's by default.
            group_name: of the new group, or of each of them, not that of another open one.

        Returns:
            A completed work. Its result is the group this rank is in, or None.

        Raises:
            TypeError, ValueError: the lists are empty, name a rank twice, or one that is none; or the name is taken.
        """
        return self._reconfigurer.split(ranks, timeout, group_name, self._lifetime.is_ending)

    async def shrink(self, exclude: Iterable[int] | None = None, *, assume_dead: Iterable[int] | None = None) -> Self:
        """Make a new group of the ranks that are alive and call this, numbered anew in the same order.

        On a failed group it keeps everybody who lives; on a healthy one, which it revokes, all but `exclude`: what is
        pending on this rank fails, so await it before. The new group works at once, and its `completed_everywhere` and
        `completed_somewhere` tell where to resume. The old one is of no more use: close it at any time.

        Lost ranks that are not proven dead are tried again first, for 2.5 s at most: a connection that was reset costs
        nobody the place. A death is proven by a process of the same host that sees it, or by who started the process.

        Once all living ranks have called it, it takes a few messages. Those that do not call it within 6 s are left
        out, if the others are enough to be sure that no other part of the group goes on: all ranks that are not proven
        dead have to answer, or more than half of all ranks of the group, or half of them with the lowest.

        Cancelling it does not take this rank's word back: it may be counted as a member. Call it again, then, or close
        the group.

        Args:
            exclude: ranks of this group to go on without; give the same on all ranks. Where they differ, a rank is
                out if any that takes part excludes it.
            assume_dead: ranks of this group that are dead by the word of the program, where nobody can prove it: their
                host has lost power, say. **If one of them lives and goes on as well, there are two groups**, each of
                which takes itself for the only one: whatever they write, they write twice.

        Raises:
            PeerLostError: too few ranks could be reached to be sure that the others do not go on by themselves; its
                message and `ranks` name the others.
            GroupError: this rank is out, since it was excluded, was taken for dead, or called too late.
        """
        group: Self = await self._reconfigurer.shrink(exclude, assume_dead)
        return group

    async def grow(self, n: int, timeout: Timeout = None) -> Self:
        """Make a new group of the ranks of this one, which keep their numbers, and `n` newcomers after them.

        All ranks call it; newcomers call ``new_group(join=True)`` with the same ``init_method`` or store, before or
        after. The new group is a world of its own, with its own connections: nothing of an older one is heard in it.
        This one stays as it is: close it when it is no longer needed. A process that takes the place of a lost one
        comes in like this, too: `shrink`, then `grow`.

        Args:
            n: number of newcomers.
            timeout: seconds to wait for them, and then for all to meet; the group's by default.

        Raises:
            RendezvousError: too few came, or not all could meet; this group is as before. Newcomers that came keep
                waiting.
            StoreUnavailableError: the store where the ranks met is gone, so nobody can be found there.
            GroupError: this group has failed, before or meanwhile, as all ranks hear at once: `shrink` it, and let what
                comes of it grow. Newcomers that have a seat by then raise `RendezvousError`, the others keep waiting.
        """
        group: Self = await self._reconfigurer.grow(n, timeout)
        return group

    async def merge_remote_group(
        self, store: Store, size: int, timeout: Timeout = None, group_name: str | None = None
    ) -> Self:
        """Make a group of all ranks of this one and of others that it has never met.

        All ranks of all these groups call it. The new group is a world of its own, with its own connections; the old
        ones stay as they are. Ranks are numbered group by group, and in a group in their order. Groups follow each
        other by their lowest rank in their job, then by their names, then as they have come.

        Groups with a job key need the same one.

        Args:
            store: that all these ranks share; it stays open.
            size: number of ranks of the new group.
            timeout: seconds the others have to come, and then all to meet; and that an operation of the new group may
                take by default. This group's by default.
            group_name: of the new group, the same on all ranks; several mergers at once in one store need different
                ones. "merged" by default.

        Raises:
            RendezvousError: too few ranks came, or too many, or they want different sizes, or could not meet; this
                group is as before.
            StoreUnavailableError: the store is gone.
            GroupError: this group has failed.
        """
        group: Self = await self._reconfigurer.merge(store, size, timeout, group_name)
        return group

    # -- life

    def add_hook(self, hook: Hook) -> HookHandle:
        """Call `hook` when operations of this group start and end; see `aiocoll.hooks`.

        Args:
            hook: an object with `on_start(info)`, `on_end(info)`, or both.

        Returns:
            What removes it again.

        Raises:
            TypeError: it has neither method.
        """
        return self._comm.hooks.add(hook)

    def pending(self) -> list[Work[Any]]:
        """The works that have not ended, oldest first."""
        return self._lifetime.pending()

    async def drain(self) -> None:
        """Wait until all works pending now have ended; raise the error of the first that failed."""
        await self._lifetime.drain()

    async def wait_revoked(self) -> GroupError:
        """Wait until the group is revoked; return the cause.

        Raises:
            GroupClosedError: this rank has closed the group, or does so before anybody revokes it.
        """
        return await self._lifetime.wait_revoked()

    def abort(self, reason: object = "aborted by the program") -> None:
        """Revoke the group at once, on all ranks: every pending work fails."""
        self._lifetime.abort(reason)

    async def shutdown(self) -> None:
        """Wait for started works (at most `timeout`), say goodbye, release everything. Idempotent.

        A peer whose operation needs this rank gets `PeerLostError` with ``how="left"``; nothing else is disturbed.
        Groups that were split off from this one and are open are closed first.
        """
        await self._lifetime.shutdown()

    aclose = shutdown


def current_process_group() -> ProcessGroup | None:
    """Return the group of this context (task), or None."""
    return _current.get()


@contextlib.contextmanager
def process_group(pg: ProcessGroup | None) -> Iterator[ProcessGroup | None]:
    """Make `pg` the current group inside the block, for this task and those it starts."""
    token = _current.set(pg)
    try:
        yield pg
    finally:
        _current.reset(token)
