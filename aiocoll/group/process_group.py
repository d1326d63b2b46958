"""`ProcessGroup`, the public API of a group: its methods document and delegate; neighbouring modules implement them."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, Self, TypeVar, overload

import numpy as np
from numpy.typing import DTypeLike, NDArray

from aiocoll.elements.ops import ReduceOp
from aiocoll.engine.communicator import Communicator
from aiocoll.engine.group_spec import GroupSpec
from aiocoll.engine.matching.probe import Envelope
from aiocoll.errors import GroupError
from aiocoll.group import open_groups
from aiocoll.group.cartesian import CartesianGroup, make_cartesian
from aiocoll.group.collectives import Collectives
from aiocoll.group.dispatch.dispatcher import Dispatcher, Timeout
from aiocoll.group.dispatch.origin import Origin
from aiocoll.group.empty import empty
from aiocoll.group.flight_recorder import FlightRecorder
from aiocoll.group.interceptors.coalesce import Batch, Coalescer, check_list, pairs
from aiocoll.group.lifetime import Lifetime
from aiocoll.group.messages import Message, Messages
from aiocoll.group.objects import Objects
from aiocoll.group.parts import GroupParts
from aiocoll.group.plans import CallPlan, make_plan
from aiocoll.group.reconfigurer import Reconfigurer
from aiocoll.hooks import Hook, HookHandle
from aiocoll.loading import loading
from aiocoll.store import Store
from aiocoll.typing import Array, Number, Sparse
from aiocoll.work import Work

if TYPE_CHECKING:
    from aiocoll.group.interceptors.estimate import Estimate
    from aiocoll.group.stats import GroupStats

__all__ = ["ProcessGroup"]

SUM = ReduceOp.SUM

A = TypeVar("A", bound=Array)
#: What a reduction of one thing takes and gives back.
N = TypeVar("N", bound=Array | Number)
#: The same of calls that take sparse arrays, too.
S = TypeVar("S", bound=Array | Number | Sparse)
#: What a message carries.
M = TypeVar("M", bound=Array | Sparse)
P = ParamSpec("P")
T = TypeVar("T")
D = TypeVar("D", bound=np.generic)


class ProcessGroup:
    """A group of ranks, seen by one of them; `aiocoll.new_group` makes it.

    A group belongs to the event loop that made it. ``async with`` closes it at the end of the block; if the block ends
    with an exception, the group is revoked on all ranks with that exception as the cause.

    **Calls.** A call checks its arguments, starts its operation and returns a `Work`, whose await gives the result. A
    wrong argument raises `TypeError` or `ValueError` at the call, and nothing is sent. Calls also raise
    `GroupClosedError` once this rank has closed the group, and `GroupRevokedError` once the group has failed.

    **Failures.** Where an operation fails, awaiting its work raises a `GroupError`: `CollectiveMismatchError` if the
    ranks called different things, `CollectiveTimeoutError` if time is up, `PeerLostError` if a rank is gone. The first
    failure revokes the group on all ranks: what is pending there fails with the same cause. `shrink` makes a group of
    the ranks that live.

    **Collectives.** All ranks of the group make the same collective calls in the same order, or with the same `key`.
    `timeout` is in seconds and bounds the whole operation, not only the caller's wait. Arrays are of any kind that
    `aiocoll.typing.Array` names; their dtype is the same on every rank. In what calls cost, p is the number of ranks
    and n the bytes of one rank's tensor, or what the call says.

    **Objects.** Object collectives take what `aiocoll.codec` can write, and give new objects. Each object is sent
    straight to its receivers, in one step, and has at most 16 MiB when it is written.

    **Messages.** A send on one rank and a receive on another, or on the same. Messages of one sender with one tag are
    received in the order sent. A tag is a number from 0 to 2**30 - 1. A receive has the length and dtype of its
    message. A message to or from `PROC_NULL` ends at once: nothing is sent, and the tensor of a receive stays as it is.

    **CUDA arrays.** NCCL carries out collectives on CUDA arrays if all ranks have the same version of it and a device
    each. If not, they are staged: copied to the host, where the collective is carried out, and back. Staged is also
    what NCCL lacks: scans, bit, logical and custom ops, reductions of 16-bit integers, AVG of integers and float8,
    PRODUCT of complex, and PREMUL_SUM except in `allreduce`; and all reductions of float8, unless NCCL is 2.24 or later
    and all devices have compute capability 9.0. NCCL rounds floats of 16 bits and less at each step, and its MIN and
    MAX may lose a NaN. All ranks agree on each call before it begins, in two steps over the host: where they differ,
    `CollectiveMismatchError` leaves arrays and group as they are. A group uses one device; ranks that share several
    groups call them in the same order, as NCCL demands of communicators. Messages of more than 256 KiB go by NCCL if
    the group uses it, others through the host; the other end of a message may be an array of the host.

    Attributes:
        group_name: the same on all ranks.
        group_desc: a description for people.
        timeout: seconds an operation may take by default. Setting it applies to later calls, on this rank.
        global_ranks: rank in the job of each rank of the group.
        recorder: what this rank did last, see `FlightRecorder`.
        store: keys of this group in the store where its ranks met, for any small values that they share.
        completed_everywhere: for a group made by `shrink`, what the old one had completed on all ranks of this one.
        completed_somewhere: what it had completed on one of them at least.
    """

    def __init__(self, comm: Communicator, spec: GroupSpec, origin: Origin) -> None:
        self.group_name = comm.name
        self.group_desc = f"{len(comm.ranks)} ranks"
        self.global_ranks, self.store = comm.ranks, origin.store(comm.id)
        self.recorder = FlightRecorder(comm, spec.options.dump_dir)
        self.completed_everywhere, self.completed_somewhere = spec.completed
        dispatcher = Dispatcher(self, comm, spec, dry=origin.dry)
        if origin.dry:
            from aiocoll.group.interceptors.dry_run import DryRun  # few groups are

            dispatcher.intercept(DryRun(dispatcher))
        elif spec.options.debug == "detail" and len(comm.ranks) > 1:
            from aiocoll.group.interceptors.verify import Verifier  # few groups compare all calls

            verifier = Verifier(dispatcher)
            dispatcher.intercept(verifier, verifier.tell_wrong)
        # Bound once: most calls are short.
        self._one = dispatcher.one
        if dispatcher.native is not None:
            self._one = dispatcher.native.one  # type: ignore[assignment]  # which takes no argument by its name
        self._check_rank, self._rank = dispatcher.check_rank, comm.rank
        objects, coalescer = Objects(dispatcher), Coalescer(dispatcher)
        reconfigurer = Reconfigurer(dispatcher, objects, origin, spec)
        self._parts = GroupParts(
            comm=comm,
            dispatcher=dispatcher,
            collectives=Collectives(dispatcher),
            messages=Messages(dispatcher, objects),
            objects=objects,
            coalescer=coalescer,
            reconfigurer=reconfigurer,
            lifetime=Lifetime(dispatcher, coalescer, reconfigurer, self.recorder, origin, spec.options),
            devices=spec.devices,
        )
        open_groups.add(self)

    def __repr__(self) -> str:
        state = "closed" if self._parts.dispatcher.closed else "open" if self._parts.comm.cause is None else "revoked"
        return f"<ProcessGroup {self.group_name!r} rank {self._rank} of {len(self.global_ranks)}, {state}>"

    @property
    def timeout(self) -> float:
        """Seconds an operation may take by default; `math.inf` is no limit."""
        return self._parts.comm.timeout

    @timeout.setter
    def timeout(self, timeout: Timeout) -> None:
        self._parts.dispatcher.set_timeout(timeout)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        await self._parts.lifetime.leave(error)

    def rank(self) -> int:
        """Return this rank's number in the group.

        Returns:
            A number from 0 to `size` - 1.
        """
        return self._rank

    def size(self) -> int:
        """Return the number of ranks.

        Returns:
            At least 1; it never changes.
        """
        return len(self.global_ranks)

    def backend_for(self, device: str) -> str:
        """Name what carries out collectives on arrays of a device.

        Args:
            device: a kind of device, such as "cpu".

        Returns:
            Name of the backend. For CUDA arrays "aio" uses NCCL where all ranks can, "nccl" nothing else; see
            `aiocoll.backends`.

        Raises:
            ValueError: the group has no backend for that device.
        """
        if device not in self._parts.devices:
            has = f"group {self.group_name!r}; it has one for {', '.join(map(repr, self._parts.devices))}"
            raise ValueError(f"device={device!r} has no backend in {has}")
        return self._parts.devices[device]

    # -- collectives on arrays

    def allreduce(self, tensor: S, op: ReduceOp = SUM, *, timeout: Timeout = None, key: str | None = None) -> Work[S]:
        """Reduce `tensor` over all ranks, in place; every rank gets the same bits.

            rank 0  [a0 a1]         [a0+b0 a1+b1]
            rank 1  [b0 b1]   ->    [a0+b0 a1+b1]

        Sparse arrays, for SUM and AVG only: scipy.sparse COO, CSR and CSC, and torch COO, in place, with or without
        dense dimensions; of torch CSR a new tensor is the result. Every rank gets the union of all ranks' entries,
        sorted, one per place: a sum that is zero stays stored. Entries of one place in one array are added up first. A
        thread reads a large array; what is wrong with its indices is then the work's error, on all ranks.

        Args:
            tensor: an array of any shape, of the same number of elements on every rank; or a number.
            op: how to reduce.
            timeout: seconds; None is the group's.
            key: match by this key instead of by order.

        Returns:
            Work that yields `tensor`; for a number, the reduced number of the same type.

        Raises:
            TypeError: `tensor` is no array or number, or `op` is not defined on its dtype.
            ValueError: `tensor` is read-only; or it is sparse, and `op` is neither SUM nor AVG.
            GroupError: the operation fails, see `ProcessGroup`.

        Cost: small: 1 step, n (p-1) bytes sent per rank, or of more than four ranks that share memory 2 steps, n bytes,
            and n (p-1) from rank 0; large: 2 (p-1) steps, 2 n (p-1)/p bytes. Sparse: an allgather of the counts, then
            one of all entries (4 or 8 bytes each, and the value), or a dense allreduce if that is cheaper; see
            `aiocoll.group.sparse_reduce`.
        Source: Patarasuk and Yuan 2009, doi:10.1016/j.jpdc.2008.09.002 (ring); Traeff, arXiv 2410.14234 (circulant);
            Bruck et al. 1997 (bruck); Rabenseifner 2004 (pairwise); Traeff and Hunold 2020 and Bayatpour et al. 2017
            (between hosts); Renggli et al. 2019, arXiv 1802.08021 (sparse).
        """
        try:
            return self._one("allreduce", tensor, op, None, True, timeout, key)
        except TypeError as error:  # found out only here, where no other call pays for it
            return self._parts.collectives.reduce_sparse(error, tensor, op, None, timeout, key)

    def reduce(
        self, tensor: S, root: int, op: ReduceOp = SUM, *, timeout: Timeout = None, key: str | None = None
    ) -> Work[S]:
        """Reduce `tensor` over all ranks into `root`'s; the other ranks' tensors stay as they are.

        Of sparse arrays as in `allreduce`.

        Args:
            tensor: an array of any shape, of the same number of elements on every rank; or a number.
            root: rank that gets the result.
            op: how to reduce.
            timeout: seconds; None is the group's.
            key: match by this key instead of by order.

        Returns:
            Work that yields `tensor`, which at the root holds the result; for a number, the reduced number at the root.

        Raises:
            TypeError: `tensor` is no array or number, or `op` is not defined on its dtype.
            ValueError: `root` is no rank of the group, or its tensor is read-only; or it is sparse, and `op` is neither
                SUM nor AVG.
            GroupError: the operation fails, see `ProcessGroup`.

        Cost: small: 1 step at the root or log2(p) steps; large: a pipelined chain, n bytes sent per rank. Sparse: an
            allgather of the counts, then a gather of all entries, or a dense reduce if that is cheaper.
        Source: Thakur, Rabenseifner and Gropp 2005 (binomial tree); Rabenseifner 2004 (pairwise); Karonis et al. 2000
            (between hosts).
        """
        root = self._check_rank(root, "root")
        try:
            return self._one("reduce", tensor, op, root, root == self._rank, timeout, key)
        except TypeError as error:
            return self._parts.collectives.reduce_sparse(error, tensor, op, root, timeout, key)

    def broadcast(self, tensor: S, root: int, *, timeout: Timeout = None, key: str | None = None) -> Work[S]:
        """Copy `root`'s tensor to all ranks.

        Sparse arrays need the same shape and dtype on all ranks, not the same entries: those of the root replace
        theirs, in place as in `allreduce`.

        Args:
            tensor: an array of any shape, of the same number of elements on every rank; or a number. It is read at the
                root and written elsewhere.
            root: rank whose tensor it is.
            timeout: seconds; None is the group's.
            key: match by this key instead of by order.

        Returns:
            Work that yields `tensor`; for a number, that of the root.

        Raises:
            TypeError: `tensor` is no array or number.
            ValueError: `root` is no rank of the group, or another rank's tensor is read-only.
            GroupError: the operation fails, see `ProcessGroup`.

        Cost: small: up to p-1 sends of the root, or a tree of log(p) levels; large: a pipelined chain, n bytes sent per
            rank. Sparse: an allgather of the counts, then a broadcast of the entries (4 or 8 bytes each, and the
            value).
        Source: Thakur, Rabenseifner and Gropp 2005 (tree); Karonis et al. 2000, Traeff and Hunold 2020 (between hosts).
        """
        root = self._check_rank(root, "root")
        try:
            return self._one("broadcast", tensor, None, root, root != self._rank, timeout, key)
        except TypeError as error:
            return self._parts.collectives.broadcast_sparse(error, tensor, root, timeout, key)

    def scan(self, tensor: N, op: ReduceOp = SUM, *, timeout: Timeout = None, key: str | None = None) -> Work[N]:
        """Reduce over ranks 0 to this one, in place (inclusive prefix).

        Args:
            tensor: an array of any shape, of the same number of elements on every rank; or a number.
            op: how to reduce, in rank order; not AVG.
            timeout: seconds; None is the group's.
            key: match by this key instead of by order.

        Returns:
            Work that yields `tensor`; for a number, the reduced number.

        Raises:
            TypeError: `tensor` is no array or number, or `op` is not defined on its dtype.
            ValueError: `op` is AVG, or `tensor` is read-only.
            GroupError: the operation fails, see `ProcessGroup`.

        Cost: small: 1 step, up to n (p-1) bytes sent per rank; large: a pipelined chain, n bytes.
        """
        return self._parts.collectives.scan("scan", tensor, op, timeout, key)

    def exscan(self, tensor: N, op: ReduceOp = SUM, *, timeout: Timeout = None, key: str | None = None) -> Work[N]:
        """Reduce over the ranks below this one, in place (exclusive prefix); rank 0's tensor stays as it is.

        Args:
            tensor: an array of any shape, of the same number of elements on every rank; or a number.
            op: how to reduce, in rank order; not AVG.
            timeout: seconds; None is the group's.
            key: match by this key instead of by order.

        Returns:
            Work that yields `tensor`; for a number, the reduced number.

        Raises:
            TypeError: `tensor` is no array or number, or `op` is not defined on its dtype.
            ValueError: `op` is AVG, or `tensor` is read-only.
            GroupError: the operation fails, see `ProcessGroup`.

        Cost: small: 1 step, up to n (p-1) bytes sent per rank; large: a pipelined chain, n bytes.
        """
        return self._parts.collectives.scan("exscan", tensor, op, timeout, key)

    def barrier(self, *, timeout: Timeout = None, key: str | None = None) -> Work[None]:
        """Wait until all ranks have called it.

        Args:
            timeout: seconds; None is the group's.
            key: match by this key instead of by order.

        Returns:
            Work that is done once all ranks have called it.

        Raises:
            GroupError: the operation fails, see `ProcessGroup`.

        Cost: ceil(log2 p) steps without data; of ranks that share memory 1 step up to four, 2 steps up to 64 of them.
        Source: Hensgen, Finkel and Manber 1988 (dissemination); Karonis et al. 2000 (between hosts); Mellor-Crummey
            and Scott 1991 (in shared memory).
        """
        return self._parts.collectives.barrier(timeout, key)

    def monitored_barrier(self, timeout: Timeout = None, wait_all_ranks: bool = False) -> Work[None]:
        """Wait until all ranks have called it; if some do not, rank 0 says which.

        Args:
            timeout: seconds; None is the group's.
            wait_all_ranks: on rank 0: name every rank that is missing, not only the first of them.

        Returns:
            Work that is done once all ranks have called it.

        Raises:
            CollectiveTimeoutError: on every rank, saying ``Ranks 1, 3 failed to pass monitoredBarrier in ... ms``.
            GroupError: the operation fails, see `ProcessGroup`.

        Cost: 2 steps without data, through rank 0: slower than `barrier` with many ranks.
        """
        return self._parts.collectives.monitored_barrier(timeout, wait_all_ranks)

    @overload
    def allgather(
        self, outputs: None, tensor: NDArray[D], *, timeout: Timeout = None, key: str | None = None
    ) -> Work[list[NDArray[D]]]: ...
    @overload
    def allgather(
        self, outputs: None, tensor: Array | Sparse, *, timeout: Timeout = None, key: str | None = None
    ) -> Work[list[Any]]: ...
    @overload
    def allgather(
        self, outputs: Sequence[A], tensor: Array, *, timeout: Timeout = None, key: str | None = None
    ) -> Work[list[A]]: ...
    def allgather(
        self, outputs: Sequence[Any] | None, tensor: Any, *, timeout: Timeout = None, key: str | None = None
    ) -> Work[list[Any]]:
        """Gather every rank's tensor on every rank.

        Of sparse arrays, whose shapes may differ from rank to rank, the results are new arrays in the format of
        `tensor`; `outputs` is None.

        Args:
            outputs: one array per rank, with as many elements as that rank's tensor. None, then on all ranks, makes
                NumPy arrays with rows like those of `tensor`; on a CUDA device, arrays like `tensor`.
            tensor: this rank's array; the number of elements may differ from rank to rank.
            timeout: seconds; None is the group's.
            key: match by this key instead of by order.

        Returns:
            Work that yields the list of outputs, in rank order.

        Raises:
            TypeError: an argument is no array, or dtypes differ.
            ValueError: `outputs` has not one array per rank, or one is read-only or shares memory with another.
            GroupError: the operation fails, see `ProcessGroup`.

        Cost: n (p-1) bytes sent per rank; 1 step, log2(p) steps or p-1 pipelined steps, by size. Without outputs, one
            small step before. Sparse: n are the bytes of the entries, 4 or 8 each, and the value.
        Source: Bruck et al. 1997 (circulant); Patarasuk and Yuan 2009 (ring); Karonis et al. 2000, Traeff and Hunold
            2020 (between hosts).
        """
        return self._parts.collectives.allgather(outputs, tensor, timeout, key)

    def allgather_into_tensor(
        self, output: A, tensor: Array, *, timeout: Timeout = None, key: str | None = None
    ) -> Work[A]:
        """Gather every rank's tensor, all of the same count, into one array, in rank order.

        Args:
            output: an array of p times the elements of `tensor`.
            tensor: this rank's array, of the same number of elements on every rank.
            timeout: seconds; None is the group's.
            key: match by this key instead of by order.

        Returns:
            Work that yields `output`.

        Raises:
            TypeError: an argument is no array, or dtypes differ.
            ValueError: `output` has another number of elements, or is read-only.
            GroupError: the operation fails, see `ProcessGroup`.

        Cost: that of `allgather`.
        Source: that of `allgather`.
        """
        return self._parts.collectives.allgather_into_tensor(output, tensor, timeout, key)

    @overload
    def gather(
        self, outputs: None, tensor: NDArray[D], root: int, *, timeout: Timeout = None, key: str | None = None
    ) -> Work[list[NDArray[D]] | None]: ...
    @overload
    def gather(
        self, outputs: None, tensor: Array | Sparse, root: int, *, timeout: Timeout = None, key: str | None = None
    ) -> Work[list[Any] | None]: ...
    @overload
    def gather(
        self, outputs: Sequence[A] | None, tensor: Array, root: int, *, timeout: Timeout = None, key: str | None = None
    ) -> Work[list[A] | None]: ...
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

        Of sparse arrays as in `allgather`.

        Args:
            outputs: at the root one array per rank, or None, which makes NumPy arrays, of at most 4 GiB each, with
                rows like those of `tensor`; on a CUDA device, or in a block, arrays like `tensor`. Elsewhere None or
                [].
            tensor: this rank's array; the number of elements may differ from rank to rank.
            root: rank that gets them.
            timeout: seconds; None is the group's.
            key: match by this key instead of by order.

        Returns:
            Work that yields the list of outputs at the root, None elsewhere.

        Raises:
            TypeError: an argument is no array, or dtypes differ.
            ValueError: `root` is no rank of the group, or `outputs` is not as described.
            GroupError: the operation fails, see `ProcessGroup`.

        Cost: 1 step; n bytes sent per rank, of all ranks received at the root. Sparse: an allgather of the counts
            before.
        """
        return self._parts.collectives.gather(outputs, tensor, root, timeout, key)

    def scatter(
        self, output: A, inputs: Sequence[Array] | None, root: int, *, timeout: Timeout = None, key: str | None = None
    ) -> Work[A]:
        """Send array r of `root`'s `inputs` to rank r's `output`.

        Args:
            output: receives this rank's array; the number of elements may differ from rank to rank.
            inputs: at the root one array per rank; elsewhere None or [].
            root: rank whose arrays they are.
            timeout: seconds; None is the group's.
            key: match by this key instead of by order.

        Returns:
            Work that yields `output`.

        Raises:
            TypeError: an argument is no array, or dtypes differ.
            ValueError: `root` is no rank of the group, `inputs` is not as described, or `output` is read-only or shares
                memory with another rank's input.
            GroupError: the operation fails, see `ProcessGroup`.

        Cost: 1 step; the root sends the arrays of the other ranks.
        """
        return self._parts.collectives.scatter(output, inputs, root, timeout, key)

    def reduce_scatter(
        self,
        output: A,
        inputs: Sequence[Array],
        op: ReduceOp = SUM,
        *,
        timeout: Timeout = None,
        key: str | None = None,
    ) -> Work[A]:
        """Reduce array r of all ranks' `inputs` into rank r's `output`.

        Args:
            output: as many elements as input r has, on rank r.
            inputs: one array per rank; array r has the same number of elements on every rank, and different arrays may
                have different numbers.
            op: how to reduce.
            timeout: seconds; None is the group's.
            key: match by this key instead of by order.

        Returns:
            Work that yields `output`.

        Raises:
            TypeError: an argument is no array, dtypes differ, or `op` is not defined on them.
            ValueError: `inputs` has not one array per rank, or `output` has another number of elements or is read-only.
            GroupError: the operation fails, see `ProcessGroup`.

        Cost: n (p-1)/p bytes sent per rank, where n are the bytes of all inputs of a rank: half of an allreduce; 1
            step, log2(p) steps or p-1 pipelined steps, by size.
        Source: Rabenseifner 2004 (pairwise); Traeff, arXiv 2410.14234 (circulant); Patarasuk and Yuan 2009 (ring).
        """
        return self._parts.collectives.reduce_scatter(output, inputs, op, timeout, key)

    def reduce_scatter_tensor(
        self, output: A, input: Array, op: ReduceOp = SUM, *, timeout: Timeout = None, key: str | None = None
    ) -> Work[A]:
        """Reduce all ranks' `input` and leave the r-th of p equal parts in rank r's `output`.

        Args:
            output: a p-th of the elements of `input`.
            input: an array of the same number of elements on every rank.
            op: how to reduce.
            timeout: seconds; None is the group's.
            key: match by this key instead of by order.

        Returns:
            Work that yields `output`.

        Raises:
            TypeError: an argument is no array, dtypes differ, or `op` is not defined on them.
            ValueError: `input` has not p times the elements of `output`, or `output` is read-only.
            GroupError: the operation fails, see `ProcessGroup`.

        Cost: that of `reduce_scatter`.
        Source: that of `reduce_scatter`.
        """
        return self._parts.collectives.reduce_scatter_tensor(output, input, op, timeout, key)

    def alltoall(
        self, outputs: Sequence[A], inputs: Sequence[Array], *, timeout: Timeout = None, key: str | None = None
    ) -> Work[list[A]]:
        """Send `inputs[r]` to rank r, and receive what rank r sends in `outputs[r]`.

        Args:
            outputs: one array per rank, with as many elements as that rank sends here.
            inputs: one array per rank, of any number of elements.
            timeout: seconds; None is the group's.
            key: match by this key instead of by order.

        Returns:
            Work that yields the list of outputs.

        Raises:
            TypeError: an argument is no array, or dtypes differ.
            ValueError: a list has not one array per rank, or an output is read-only or shares memory with an input or
                another output.
            GroupError: the operation fails, see `ProcessGroup`.

        Cost: 1 step; n (p-1)/p bytes sent per rank, where n are the bytes of all its inputs.
        """
        return self._parts.collectives.alltoall(outputs, inputs, timeout, key)

    def alltoall_base(
        self,
        output: A,
        input: Array,
        output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None,
        *,
        timeout: Timeout = None,
        key: str | None = None,
    ) -> Work[A]:
        """Cut `input` along its first dimension, send part r to rank r, and put what arrives into `output`.

        Args:
            output: an array of as many elements as all that it receives, part by part in rank order.
            input: an array of any shape, sent part by part along its first dimension; must not share memory with
                `output`.
            output_split_sizes: rows from each rank; None for equal parts.
            input_split_sizes: rows to each rank; None for equal parts.
            timeout: seconds; None is the group's.
            key: match by this key instead of by order.

        Returns:
            Work that yields `output`.

        Raises:
            TypeError: an argument is no array, or dtypes differ.
            ValueError: the sizes do not add up to the rows of their array, `output` is read-only, or both share memory.
            GroupError: the operation fails, see `ProcessGroup`.

        Cost: that of `alltoall`.
        """
        return self._parts.collectives.alltoall_base(output, input, output_split_sizes, input_split_sizes, timeout, key)

    # -- calls that travel together

    def coalescing(self) -> Batch:
        """Record the calls on this group made in the block, and in tasks started in it, and carry them out together.

            async with pg.coalescing():
                for gradient in gradients:
                    pg.allreduce(gradient)

        Calls of the same kind, dtype, op and root become one operation; where all ranks share memory and run the
        accelerator, small ones are carried out each by itself, in about 2 µs. All ranks record the same calls in the
        same order; together they take one number. Leaving the block sends them and waits for all; awaiting one of them
        inside sends what is recorded at the end of this turn of the loop. The order in which the calls of a block are
        carried out is not defined: none may write where another one reads or writes. Calls on CUDA arrays are one group
        of NCCL calls; those that NCCL cannot carry out are staged one by one.

        If an exception leaves the block, nothing more is sent, and the works that were not sent raise an error with
        that exception as its cause.

        Returns:
            What ``async with`` enters, and gives.

        Raises:
            RuntimeError: on entering: the block is inside another one of the same group.
            ValueError: on sending: two calls share memory that one of them writes.
            CollectiveMismatchError: on sending: the ranks have recorded different calls; it names some that differ.

        Cost: that of one call on all arrays of a kind, and two copies of each that is small; large ones travel alone.
        """
        return self._parts.coalescer.block()

    @overload
    def allreduce_coalesced(
        self, tensors: Sequence[A], op: ReduceOp = SUM, *, timeout: Timeout = None, key: str | None = None
    ) -> Work[list[A]]: ...
    @overload
    def allreduce_coalesced(
        self, tensors: Collection[Array], op: ReduceOp = SUM, *, timeout: Timeout = None, key: str | None = None
    ) -> Work[list[Any]]: ...
    def allreduce_coalesced(
        self, tensors: Any, op: ReduceOp = SUM, *, timeout: Timeout = None, key: str | None = None
    ) -> Work[list[Any]]:
        """Reduce each of `tensors` over all ranks, in place, as one operation per dtype.

        Args:
            tensors: a list of dense arrays of any shapes; each has the same number of elements on every rank.
            op: how to reduce.
            timeout: seconds; None is the group's.
            key: match by this key instead of by order.

        Returns:
            Work that yields the list of tensors.

        Raises:
            TypeError: `tensors` is no list of arrays, or `op` is not defined on their dtype.
            ValueError: a tensor is read-only, or two of them share memory.
            GroupError: the operation fails, see `ProcessGroup`.

        Cost: that of one `allreduce` of all of them, and two copies of each that is small; large ones travel alone.
        """
        check_list(tensors, "tensors")
        return self._parts.coalescer.as_one(
            "ALLREDUCE_COALESCED", lambda: [self.allreduce(each, op, timeout=timeout) for each in tensors], key
        )

    @overload
    def allgather_into_tensor_coalesced(
        self, outputs: Sequence[A], inputs: Sequence[Array], *, timeout: Timeout = None, key: str | None = None
    ) -> Work[list[A]]: ...
    @overload
    def allgather_into_tensor_coalesced(
        self, outputs: Collection[Array], inputs: Sequence[Array], *, timeout: Timeout = None, key: str | None = None
    ) -> Work[list[Any]]: ...
    def allgather_into_tensor_coalesced(
        self, outputs: Any, inputs: Any, *, timeout: Timeout = None, key: str | None = None
    ) -> Work[list[Any]]:
        """Gather every rank's `inputs[i]` into `outputs[i]`, for all i, as one operation per dtype.

        Args:
            outputs: a list of arrays, each of p times the elements of its input.
            inputs: a list of as many arrays; each has the same number of elements on every rank.
            timeout: seconds; None is the group's.
            key: match by this key instead of by order.

        Returns:
            Work that yields the list of outputs.

        Raises:
            TypeError: an argument is no list of arrays, or the dtypes of a pair differ.
            ValueError: the lists differ in length, or an output has a wrong number of elements or is read-only.
            GroupError: the operation fails, see `ProcessGroup`.

        Cost: that of one `allgather_into_tensor` of all of them, and two copies of each that is small; large ones
            travel alone.
        """
        each = pairs(outputs, inputs)
        call = partial(self.allgather_into_tensor, timeout=timeout)
        return self._parts.coalescer.as_one(
            "ALLGATHER_INTO_TENSOR_COALESCED", lambda: [call(*pair) for pair in each], key
        )

    @overload
    def reduce_scatter_tensor_coalesced(
        self,
        outputs: Sequence[A],
        inputs: Sequence[Array],
        op: ReduceOp = SUM,
        *,
        timeout: Timeout = None,
        key: str | None = None,
    ) -> Work[list[A]]: ...
    @overload
    def reduce_scatter_tensor_coalesced(
        self,
        outputs: Collection[Array],
        inputs: Sequence[Array],
        op: ReduceOp = SUM,
        *,
        timeout: Timeout = None,
        key: str | None = None,
    ) -> Work[list[Any]]: ...
    def reduce_scatter_tensor_coalesced(
        self, outputs: Any, inputs: Any, op: ReduceOp = SUM, *, timeout: Timeout = None, key: str | None = None
    ) -> Work[list[Any]]:
        """Reduce all ranks' `inputs[i]` and leave part r in rank r's `outputs[i]`, for all i, as one call.

        Args:
            outputs: a list of arrays, each of a p-th of the elements of its input.
            inputs: a list of as many arrays; each has the same number of elements on every rank.
            op: how to reduce.
            timeout: seconds; None is the group's.
            key: match by this key instead of by order.

        Returns:
            Work that yields the list of outputs.

        Raises:
            TypeError: an argument is no list of arrays, the dtypes of a pair differ, or `op` is not defined on them.
            ValueError: the lists differ in length, or an output has a wrong number of elements or is read-only.
            GroupError: the operation fails, see `ProcessGroup`.

        Cost: that of one `reduce_scatter_tensor` of all of them, and two copies of each that is small; large ones
            travel alone.
        """
        each = pairs(outputs, inputs)
        call = partial(self.reduce_scatter_tensor, op=op, timeout=timeout)
        return self._parts.coalescer.as_one(
            "REDUCE_SCATTER_TENSOR_COALESCED", lambda: [call(*pair) for pair in each], key
        )

    # -- messages between two ranks

    def send(self, tensor: M, dst: int, tag: int = 0, *, timeout: Timeout = None) -> Work[M]:
        """Send `tensor` to rank `dst`; done when the memory may be reused, not when it has been received.

        Of a sparse array (as in `allreduce`) only the entries travel, and are received in one of its shape and dtype.

        Args:
            tensor: an array of any shape, of less than 4 GiB.
            dst: a rank of the group, which may be this one; or `PROC_NULL`, to send nothing.
            tag: a number from 0 to 2**30 - 1, which the receive gives, too.
            timeout: seconds; None is the group's.

        Returns:
            Work that yields `tensor`.

        Raises:
            TypeError: `tensor` is no array, or `dst` or `tag` no number.
            ValueError: `dst` is no rank of the group, `tag` is out of range, or `tensor` is too long.
            GroupError: the operation fails, see `ProcessGroup`.

        Cost: one message of n bytes. Sparse: 4 or 8 bytes per entry, and its value.
        """
        return self._parts.messages.send(tensor, dst, tag, timeout)

    def recv(self, tensor: M, src: int, tag: int = 0, *, timeout: Timeout = None) -> Work[M]:
        """Receive a message of rank `src` in `tensor`.

        Args:
            tensor: an array of the number of elements and the dtype of the message; or a sparse one of its shape and
                dtype, whose entries are replaced, as in `broadcast`.
            src: a rank of the group, which may be this one; or `PROC_NULL`, to receive nothing.
            tag: that of the send.
            timeout: seconds; None is the group's.

        Returns:
            Work that yields `tensor`.

        Raises:
            TypeError: `tensor` is no array, or `src` or `tag` no number.
            ValueError: `src` is no rank of the group, `tag` is out of range, or `tensor` is read-only.
            GroupError: the operation fails, see `ProcessGroup`.

        Cost: one message of n bytes.
        """
        return self._parts.messages.recv(tensor, self._check_rank(src, "src", null=True), tag, timeout)

    def recv_anysource(self, tensor: M, tag: int = 0, *, timeout: Timeout = None) -> Work[M]:
        """Receive the next message of any rank in `tensor`; `work.source_rank()` tells whose it was.

        Args:
            tensor: an array of the number of elements and the dtype of the message; or a sparse one, as for `recv`.
            tag: that of the send.
            timeout: seconds; None is the group's.

        Returns:
            Work that yields `tensor`.

        Raises:
            TypeError: `tensor` is no array, or `tag` no number.
            ValueError: `tag` is out of range, or `tensor` is read-only.
            GroupError: the operation fails, see `ProcessGroup`.

        Cost: one message of n bytes.
        """
        return self._parts.messages.recv(tensor, None, tag, timeout)

    @overload
    def batch(self, operations: Sequence[Message[A]], *, timeout: Timeout = None) -> Work[list[A]]: ...
    @overload
    def batch(self, operations: Collection[Message[Array]], *, timeout: Timeout = None) -> Work[list[Any]]: ...
    def batch(self, operations: Any, *, timeout: Timeout = None) -> Work[list[Any]]:
        """Start several sends and receives together.

        All arguments are checked before anything starts.

        Args:
            operations: a list of `Send` and `Recv`.
            timeout: seconds for each; None is the group's.

        Returns:
            Work that yields the list of their tensors, in the order given.

        Raises:
            TypeError, ValueError: an operation is wrong, as for `send` and `recv`; or the array of a receive shares
                memory with that of another operation.
            GroupError: an operation fails, see `ProcessGroup`.

        Cost: a message each.
        """
        return self._parts.messages.batch(operations, timeout)

    def send_object(self, obj: object, dst: int, tag: int = 0, *, timeout: Timeout = None) -> Work[None]:
        """Send an object to rank `dst`.

        Args:
            obj: what `aiocoll.codec` can write, of 16 MiB at most.
            dst: a rank of the group, which may be this one; or `PROC_NULL`, to send nothing.
            tag: a number from 0 to 2**30 - 1, which the receive gives, too.
            timeout: seconds; None is the group's.

        Returns:
            Work that yields None.

        Raises:
            SerializationError: `obj` cannot travel; names its type and its path.
            TypeError, ValueError: `dst` or `tag` is wrong.
            GroupError: the operation fails, see `ProcessGroup`.

        Cost: one message.
        """
        return self._parts.messages.send_object(obj, dst, tag, timeout)

    def recv_object(self, src: int | None = None, tag: int = 0, *, timeout: Timeout = None) -> Work[Any]:
        """Receive an object of rank `src`, or of any rank.

        Args:
            src: a rank of the group, or `PROC_NULL`, which yields None; None takes the next object of any rank.
            tag: that of the send.
            timeout: seconds; None is the group's.

        Returns:
            Work that yields the object.

        Raises:
            TypeError, ValueError: `src` or `tag` is wrong.
            GroupError: the operation fails, see `ProcessGroup`.

        Cost: one message.
        """
        return self._parts.messages.recv_object(src, tag, timeout)

    def incoming(self, tag: int = 0) -> AsyncIterator[tuple[int, Any]]:
        """Iterate over the messages with `tag` that no receive has asked for, in order of arrival.

        A message is taken only when it is yielded, so cancelling a step loses none, and the iterator can go on; several
        tasks may share it. It ends when this rank closes the group.

        Args:
            tag: that of the sends.

        Returns:
            An iterator over pairs ``(source, message)``: a rank, and a 1-D array or the object that was sent. A
            message of a structured dtype, of dates or of texts is an array of its bytes.

        Raises:
            TypeError, ValueError: `tag` is wrong; or the next message is a sparse array, which stays for `recv`.
            GroupError: the group is closed or fails, see `ProcessGroup`.

        Cost: one message each.
        """
        return self._parts.messages.incoming(tag)

    def probe(self, source: int | None = None, tag: int = 0, *, timeout: Timeout = None) -> Work[Envelope]:
        """Wait for a message that could be received, and tell what it is, without receiving it.

            envelope = await pg.probe(tag=3)
            x = np.empty(envelope.count, envelope.dtype)
            await pg.recv(x, envelope.source, tag=3)

        The next receive from that source with that tag gets the message. A receive that was posted earlier, and fits,
        takes it first: a probe does not see it. Several probes see the same message, until a receive or `incoming`
        takes it; tasks that take messages of one tag from each other use `incoming`. Cancelling a probe loses nothing.

        Args:
            source: a rank of the group, or `PROC_NULL`; None is any rank.
            tag: that of the send.
            timeout: seconds; None is the group's.

        Returns:
            Work that yields the `Envelope`: source, tag, length and dtype of the oldest such message.

        Raises:
            TypeError, ValueError: `source` or `tag` is wrong.
            GroupError: no such message comes in time, or the group fails, see `ProcessGroup`.

        Cost: none of its own.
        """
        return self._parts.messages.probe(source, tag, timeout)

    def iprobe(self, source: int | None = None, tag: int = 0) -> Envelope | None:
        """Tell what the next message is, if there is one now; otherwise as `probe`.

        It looks at what has come meanwhile, but connections are opened, and long computations of the loop go on, only
        while the program awaits something: a loop that only calls this, without an await, may wait for ever.

        Args:
            source: a rank of the group, or `PROC_NULL`; None is any rank.
            tag: that of the send.

        Returns:
            The `Envelope`; None if there is no such message.

        Raises:
            TypeError, ValueError: `source` or `tag` is wrong.
            GroupError: the group is closed or has failed.

        Cost: none of its own.
        """
        return self._parts.messages.iprobe(source, tag)

    # -- objects

    @overload
    def broadcast_object(
        self, obj: None = None, root: int = 0, *, timeout: Timeout = None, key: str | None = None
    ) -> Work[Any]: ...
    @overload
    def broadcast_object(
        self, obj: T, root: int = 0, *, timeout: Timeout = None, key: str | None = None
    ) -> Work[T]: ...
    def broadcast_object(
        self, obj: object = None, root: int = 0, *, timeout: Timeout = None, key: str | None = None
    ) -> Work[Any]:
        """Send `root`'s object to all ranks.

        Args:
            obj: at the root what `aiocoll.codec` can write, of 16 MiB at most; ignored elsewhere.
            root: rank whose object it is.
            timeout: seconds; None is the group's.
            key: match by this key instead of by order.

        Returns:
            Work that yields the root's object: `obj` itself there, a new one elsewhere.

        Raises:
            SerializationError: `obj` cannot travel; names its type and its path.
            TypeError, ValueError: `root` is no rank of the group.
            GroupError: the operation fails, see `ProcessGroup`.

        Cost: 1 step: p-1 messages of the root.
        """
        return self._parts.objects.broadcast(obj, root, timeout, key)

    def allgather_object(self, obj: T, *, timeout: Timeout = None, key: str | None = None) -> Work[list[T]]:
        """Gather every rank's object on every rank.

        Args:
            obj: what `aiocoll.codec` can write, of 16 MiB at most.
            timeout: seconds; None is the group's.
            key: match by this key instead of by order.

        Returns:
            Work that yields the list of objects, in rank order.

        Raises:
            SerializationError: `obj` cannot travel; names its type and its path.
            GroupError: the operation fails, see `ProcessGroup`.

        Cost: 1 step: p-1 messages of every rank.
        """
        return self._parts.objects.allgather(obj, timeout, key)

    def gather_object(
        self, obj: T, root: int = 0, *, timeout: Timeout = None, key: str | None = None
    ) -> Work[list[T] | None]:
        """Gather every rank's object at `root`.

        Args:
            obj: what `aiocoll.codec` can write, of 16 MiB at most.
            root: rank that gets them.
            timeout: seconds; None is the group's.
            key: match by this key instead of by order.

        Returns:
            Work that yields the list of objects, in rank order, at the root, None elsewhere.

        Raises:
            SerializationError: `obj` cannot travel; names its type and its path.
            TypeError, ValueError: `root` is no rank of the group.
            GroupError: the operation fails, see `ProcessGroup`.

        Cost: 1 step: a message of every other rank.
        """
        return self._parts.objects.gather(obj, root, timeout, key)

    @overload
    def scatter_object(
        self, objs: None, root: int = 0, *, timeout: Timeout = None, key: str | None = None
    ) -> Work[Any]: ...
    @overload
    def scatter_object(
        self, objs: Sequence[T] | None, root: int = 0, *, timeout: Timeout = None, key: str | None = None
    ) -> Work[T]: ...
    def scatter_object(
        self, objs: Sequence[Any] | None, root: int = 0, *, timeout: Timeout = None, key: str | None = None
    ) -> Work[Any]:
        """Send the r-th of `root`'s objects to rank r.

        Args:
            objs: at the root one object per rank, each of 16 MiB at most; ignored elsewhere.
            root: rank whose objects they are.
            timeout: seconds; None is the group's.
            key: match by this key instead of by order.

        Returns:
            Work that yields this rank's object.

        Raises:
            SerializationError: an object cannot travel; names its type and its path.
            TypeError, ValueError: `root` is no rank of the group, or `objs` has not one object per rank.
            GroupError: the operation fails, see `ProcessGroup`.

        Cost: 1 step: p-1 messages of the root.
        """
        return self._parts.objects.scatter(objs, root, timeout, key)

    def alltoall_object(self, objs: Sequence[T], *, timeout: Timeout = None, key: str | None = None) -> Work[list[T]]:
        """Send the r-th object to rank r.

        Args:
            objs: one object per rank, each of 16 MiB at most.
            timeout: seconds; None is the group's.
            key: match by this key instead of by order.

        Returns:
            Work that yields the list of what every rank has sent here, in rank order.

        Raises:
            SerializationError: an object cannot travel; names its type and its path.
            ValueError: `objs` has not one object per rank.
            GroupError: the operation fails, see `ProcessGroup`.

        Cost: 1 step: p-1 messages of every rank.
        """
        return self._parts.objects.alltoall(objs, timeout, key)

    # -- calls that are made again and again

    def plan(self, call: Callable[P, Work[T]], /, *args: P.args, **kwargs: P.kwargs) -> CallPlan[T]:
        """Check a call once, to start it many times.

            plan = pg.plan(pg.allreduce, gradients, ReduceOp.AVG)
            for batch in batches:
                gradients[:] = ...
                await plan.start()

        The arguments are checked here, and nothing starts. The plan holds the arrays: each start takes what is in them
        then, and leaves its result there. A start takes its place among the calls of the group as the call itself
        would. Calls on contiguous arrays of the host are cheaper to start than to make; any other call is made anew.

        Args:
            call: a method of this group: any collective, send or receive, of arrays or objects, or `batch`.
            args: its arguments.
            kwargs: likewise.

        Returns:
            A plan; its `start` returns what the call returns.

        Raises:
            TypeError: `call` is no such method of this group; or what the call raises.
            ValueError: what the call raises.
            GroupError: the group is closed or has failed.

        Cost: that of the call, at each start.
        """
        return make_plan(self._parts.dispatcher, call, args, kwargs)

    # -- arrays and estimates

    @overload
    async def empty(self, shape: int | Sequence[int], dtype: type[D] | np.dtype[D]) -> NDArray[D]: ...
    @overload
    async def empty(self, shape: int | Sequence[int], dtype: DTypeLike) -> NDArray[Any]: ...
    async def empty(self, shape: int | Sequence[int], dtype: DTypeLike) -> NDArray[Any]:
        """Make an array, of any content, in memory that the other ranks of this host can read.

            ordinary array       rank 0 copies a piece into shared memory; rank 1 reduces it from there
            array of `empty`     rank 1 reduces it from where it lies

        An `allreduce` of more than 64 KiB on such arrays copies nothing that it does not have to, where all ranks of
        the group are on one host and share memory, and the op is applied in pieces (of float16 and narrower, sums are
        not). It gives the same bits as on other arrays, which other ranks may use. A slice of it, another shape of it
        or a tensor that shares its memory is as good. All other calls treat it as any other array.

        The call is local: other ranks need not make it. The memory is released with the last view of the array. It also
        serves the groups that `shrink` and `new_group` make of the same ranks.

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
        return await empty(self._parts.dispatcher, shape, dtype)

    @contextlib.contextmanager
    def time_estimator(self) -> Iterator[Estimate]:
        """Predict how long the calls in this block would take, in place of making them.

            with pg.time_estimator() as estimate:
                pg.allreduce(gradients)
                pg.barrier()
            print(estimate.seconds, estimate.calls)

        The calls check their arguments, send nothing, take no number and leave arrays as they are; their works have
        ended, and yield what they are given (objects: None). The block is local: other ranks need not enter one. Tasks
        started in the block predict, too; other groups, and other tasks, go on as always.

        The prediction is for calls that all ranks make together, on a machine that does nothing else: the formulas of
        `aiocoll.algorithms.cost` with the numbers of the machine, which are defaults unless `aiocoll bench --tune` has
        measured them. Calls count one after the other, also where they would overlap. Of objects only the bytes that
        this rank sends are known; of gather and scatter, off the root, those of equal shares. Sparse arrays count as if
        all ranks' had the same size and were sent as they are. All hosts count as equally far from each other. What
        ``debug="detail"`` adds is left out.

        It is accurate enough to compare calls, and to know the order of magnitude of one; see the table in
        ``docs/metrics.md``, which ``bench/estimate.py`` measures.

        Returns:
            What ``with`` enters; it gives the `Estimate`, which is complete at the end of the block.

        Raises:
            TypeError: from a call in the block on CUDA arrays, of which nothing has been measured.
            GroupError: the group is closed or revoked.
        """
        self._parts.dispatcher.check()
        with loading("estimates"):
            from aiocoll.group.interceptors.estimate import Estimate, Estimator  # few programs need them

        with self._parts.dispatcher.scoped(Estimator(self._parts.dispatcher, estimate := Estimate())):
            yield estimate

    # -- other groups

    def split_group(
        self,
        ranks: Sequence[int] | Sequence[Sequence[int]],
        timeout: Timeout = None,
        group_name: str | None = None,
        *,
        local: bool = False,
        order: Literal["group", "given"] = "group",
    ) -> Work[Self | None]:
        """Make a group of some of the ranks, or several that have no rank in common.

        Every rank of this group calls it, in the same order and with the same lists; it is local and sends nothing.
        The new group shares all connections with this group, can be split again, and is closed by itself or with this
        one. It fails on its own: a failure of this group, other than the death of a common rank, does not concern it.

        Ranks that have named different lists cannot talk to each other in the groups that come of it. The first
        collective there tells them so within half a second.

        Args:
            ranks: of this group; or a list of such lists.
            timeout: seconds an operation of the new group may take by default; None is this group's.
            group_name: of the new group, or of each of them, not that of another open one.
            local: only the ranks in a list call it, as often as each other with that list. Ranks that name different
                lists are then not told: a collective ends at its timeout.
            order: how the new group numbers its ranks: as this one does ("group"), or as the list does ("given").

        Returns:
            Work that is done, and yields the group this rank is in, or None.

        Raises:
            TypeError, ValueError: the lists are empty, name a rank twice, or one that is none; or the name is taken.
            GroupError: the group is closed or revoked.

        Cost: nothing is sent.
        """
        ending = self._parts.lifetime.is_ending
        return self._parts.reconfigurer.split(ranks, timeout, group_name, ending, local, order)

    async def shrink(self, exclude: Iterable[int] | None = None, *, assume_dead: Iterable[int] | None = None) -> Self:
        """Make a new group of the ranks that are alive and call this, numbered anew in the same order.

        On a failed group it keeps all ranks that live. On a healthy one it keeps all but `exclude`, and revokes the old
        group: what is pending on this rank fails, so await it before. The new group works at once, and its
        `completed_everywhere` and `completed_somewhere` tell where to resume. The old one is of no more use: close it
        at any time.

        Lost ranks that are not proven dead are tried again first, for 2.5 s at most: a reset connection does not cost a
        rank its place. A death is proven by a process of the same host that sees it, or by the process that started the
        rank.

        Ranks that do not call it within 6 s are left out, if the others are enough to be sure that no other part of the
        group goes on: all ranks that are not proven dead have to answer, or more than half of all ranks of the group,
        or half of them with the lowest.

        Cancelling it does not take this rank's vote back: it may be counted as a member. Call it again then, or close
        the group.

        Args:
            exclude: ranks of this group to go on without; give the same on all ranks. Where they differ, a rank is
                out if any that takes part excludes it.
            assume_dead: ranks of this group that the program knows to be dead where nobody can prove it: their host has
                lost power, say. **If one of them lives and goes on as well, there are two groups**, each of which takes
                itself for the only one: whatever they write, they write twice.

        Returns:
            The new group.

        Raises:
            ValueError: an argument names this rank, or one that is none.
            PeerLostError: too few ranks could be reached to be sure that the others do not go on by themselves; its
                message and `ranks` name the others.
            GroupError: this rank is out: it was excluded, was taken for dead, or called too late. Or the group was
                shrunk before, or is closed.

        Cost: a few small messages once all living ranks have called it.
        """
        group: Self = await self._parts.reconfigurer.shrink(exclude, assume_dead)
        return group

    async def grow(self, n: int, timeout: Timeout = None, *, at_least: int | None = None) -> Self:
        """Make a new group of the ranks of this one, which keep their numbers, and `n` newcomers after them.

        All ranks call it; newcomers call ``new_group(join=True)`` with the same ``init_method`` or store, before or
        after. The new group has connections of its own: nothing of an older one is heard in it. This one stays as it
        is: close it when it is no longer needed. A process that takes the place of a lost one comes in like this, too:
        `shrink`, then `grow`.

        Args:
            n: number of newcomers, the same on all ranks.
            timeout: seconds to wait for them, and then for all to meet; None is the group's.
            at_least: when the time is over, go on with those that have come if there are so many; None: only with `n`.

        Returns:
            The new group.

        Raises:
            TypeError, ValueError: `n` or `at_least` is no positive number, or differs between ranks.
            RendezvousError: too few came, or not all could meet; this group is as before. Newcomers that came keep
                waiting.
            StoreUnavailableError: the store where the ranks met is gone, so nobody can be found there.
            GroupError: this group has failed, before or meanwhile, as all ranks hear at once: `shrink` it, and let what
                comes of it grow. Newcomers assigned by then raise `RendezvousError`, the others keep waiting.

        Cost: that of `new_group`, after an `allgather_object`.
        """
        group: Self = await self._parts.reconfigurer.grow(n, timeout, at_least)
        return group

    async def merge_remote_group(
        self, store: Store, size: int, timeout: Timeout = None, group_name: str | None = None
    ) -> Self:
        """Make a group of all ranks of this one and of others that it has never met.

        All ranks of all these groups call it. The new group has connections of its own; the old ones stay as they are.
        Ranks are numbered group by group, and in a group in their order. Groups follow each other by their lowest rank
        in their job, then by their names, then in the order of their coming. Groups with a job key need the same one.

        Args:
            store: that all these ranks share; it stays open.
            size: number of ranks of the new group.
            timeout: seconds the others have to come, and then all to meet; and that an operation of the new group may
                take by default. None is this group's.
            group_name: of the new group, the same on all ranks; several mergers at once in one store need different
                ones. None is "merged".

        Returns:
            The new group.

        Raises:
            RendezvousError: too few ranks came, or too many, or they want different sizes, or could not meet; this
                group is as before.
            StoreUnavailableError: the store is gone.
            GroupError: this group has failed.

        Cost: that of `new_group`.
        """
        group: Self = await self._parts.reconfigurer.merge(store, size, timeout, group_name)
        return group

    async def split(self, color: int | str | None, key: int = 0) -> Self | None:
        """Make a group of the ranks that give the same colour, for each colour.

        All ranks of this group call it, in the same order as other calls; unlike for `split_group`, a rank need not
        know what the others give. The new group shares all connections with this one, as one that `split_group` makes.

        Args:
            color: of the group that this rank is to be in: any number or text. None: of none.
            key: ranks of the new group are numbered by their keys, and ranks with the same key as in this group.

        Returns:
            The group this rank is in; None if it has given no colour.

        Raises:
            TypeError: `color` or `key` is of another type.
            GroupError: the operation fails, see `ProcessGroup`.

        Cost: that of `allgather_object`.
        """
        group: Self | None = await self._parts.reconfigurer.split_by_color(
            color, key, lambda: self._parts.lifetime.is_ending
        )
        return group

    def cart(self, dims: Sequence[int], periods: bool | Sequence[bool] | None = None) -> CartesianGroup[Self] | None:
        """Make a group of the first ranks whose ranks form a grid.

            cart = pg.cart([0, 0], periods=[True, False])  # a cylinder
            below, above = cart.shift(axis=0)
            await cart.halo(u)

        All ranks of this group call it, in the same order as other calls that make groups, and with the same
        arguments; it is local and sends nothing. Ranks are numbered along the last axis first, and keep their order.

        Args:
            dims: number of ranks along each axis. Those that are 0 are chosen so that all ranks are in the grid, as
                equal as possible, the largest first.
            periods: whether each axis goes round, its last rank next to its first; None: none does.

        Returns:
            The `CartesianGroup`; None on ranks beyond the grid.

        Raises:
            TypeError, ValueError: `dims` are more ranks than there are, no multiple of the ranks can have the lengths
                that are given, or an argument is no list of ints or bools.
            GroupError: the group is closed or has failed.

        Cost: nothing is sent.
        """
        made: CartesianGroup[Self] | None = make_cartesian(self, self._parts.dispatcher.size, dims, periods)
        return made

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
        return self._parts.comm.hooks.add(hook)

    def stats(self) -> GroupStats:
        """Return what this rank has done in the group so far: counts, bytes, times, and whom it has waited for.

        All operations are counted from the start of the group: collectives, messages, objects and blocks, on CUDA
        arrays, too. Any thread may ask, at any time, also after the group was closed or revoked.

        Returns:
            Numbers that do not change any more; `str()` of them is a table.

        Raises:
            RuntimeError: the group was made with ``GroupOptions(stats=False)``.
        """
        return self._parts.lifetime.stats()

    def pending(self) -> list[Work[Any]]:
        """List the works that have not ended.

        Returns:
            The works, oldest first; those that a block has recorded come last.
        """
        return self._parts.lifetime.pending()

    async def drain(self) -> None:
        """Wait until all works pending now have ended.

        Raises:
            GroupError: a work failed; it is the error of the first that did, of whatever type.
        """
        await self._parts.lifetime.drain()

    async def wait_revoked(self) -> GroupError:
        """Wait until the group is revoked.

        Returns:
            The cause.

        Raises:
            GroupClosedError: this rank has closed the group, or does so before any rank revokes it.
        """
        return await self._parts.lifetime.wait_revoked()

    def abort(self, reason: object = "aborted by the program") -> None:
        """Revoke the group at once, on all ranks: every pending work fails.

        Args:
            reason: what the error says on all ranks.

        Raises:
            RuntimeError: called in another process, thread or event loop than the group's.
        """
        self._parts.lifetime.abort(reason)

    def report_death(self, rank: int, reason: str) -> None:
        """Tell all ranks that the process of a rank is gone, where the program, or what runs it, knows that it is.

        All groups with that rank fail, on all ranks, with ``PeerLostError(how="killed")``. To `shrink` the rank is
        proven dead: it is not tried again, not waited for and not counted. The report may come when the group has
        failed already, and while `shrink` waits. Reports of ranks that have ended, or are known to be dead, do nothing.

        **If the rank lives after all**, it is out as soon as it receives the report: its groups fail, its `shrink`
        raises `GroupError`, and what it sends is ignored. If two ranks report each other, at most one of them
        continues. Without a majority of the job, `shrink` waits up to a second for a reported rank whose connection is
        still open. So there are two groups only if the report is wrong and cannot reach the rank within that second.

        Args:
            rank: rank of this group.
            reason: what the errors say about it.

        Raises:
            TypeError, ValueError: `rank` is no other rank of this group, or `reason` no text.
            RuntimeError: called in another process, thread or event loop than the group's.

        Cost: a small message to every rank.
        """
        self._parts.lifetime.report_death(rank, reason)

    async def shutdown(self) -> None:
        """Close the group: wait for works that have started (at most `timeout`), say goodbye, release everything.

        Idempotent. A peer whose operation needs this rank gets `PeerLostError` with ``how="left"``; no other operation
        is disturbed. Groups that were split off from this one and are open are closed first.

        Raises:
            RuntimeError: called in another process, thread or event loop than the group's.
        """
        await self._parts.lifetime.shutdown()

    aclose = shutdown
