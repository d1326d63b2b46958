"""`ProcessGroup`, the public API of a group. Its methods document and delegate; neighbouring modules implement them."""

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
#: Type of the argument and result of a reduction: an array or a number.
N = TypeVar("N", bound=Array | Number)
#: The same type for calls that also accept sparse arrays.
S = TypeVar("S", bound=Array | Number | Sparse)
#: Type of a message's payload.
M = TypeVar("M", bound=Array | Sparse)
P = ParamSpec("P")
T = TypeVar("T")
D = TypeVar("D", bound=np.generic)


class ProcessGroup:
    """A group of ranks, made by `aiocoll.new_group`. Each rank has its own object.

    A group belongs to the event loop that made it. ``async with`` closes it at the end of the block. If the block ends
    with an exception, the group is revoked on all ranks with that exception as the cause.

    Collectives on arrays:

    - `allreduce`: reduce the tensors of all ranks; every rank gets the result
    - `reduce`: reduce the tensors of all ranks; the root gets the result
    - `broadcast`: copy the root's tensor to all ranks
    - `allgather`, `allgather_into_tensor`: gather every rank's tensor on every rank, as a list or as one array
    - `gather`: gather every rank's tensor at the root
    - `scatter`: send each rank its own array of the root's list
    - `reduce_scatter`, `reduce_scatter_tensor`: reduce the inputs of all ranks; each rank gets one part of the result
    - `alltoall`, `alltoall_base`: send a separate part to each rank
    - `scan`, `exscan`: reduce over the ranks up to this one, with or without it
    - `barrier`, `monitored_barrier`: wait until all ranks have made the call

    Several calls as one operation:

    - `coalescing`: fuse the calls of an ``async with`` block
    - `allreduce_coalesced`: reduce a list of tensors
    - `allgather_into_tensor_coalesced`: gather each tensor of a list into one array
    - `reduce_scatter_tensor_coalesced`: reduce and scatter each tensor of a list

    Messages between two ranks:

    - `send`, `recv`: send or receive an array
    - `recv_anysource`: receive an array from any rank
    - `batch`: start several sends and receives together
    - `send_object`, `recv_object`: send or receive an object
    - `incoming`: iterate over the messages that match no posted receive
    - `probe`, `iprobe`: describe the next message without receiving it

    Collectives on objects:

    - `broadcast_object`: send the root's object to all ranks
    - `allgather_object`: gather every rank's object on every rank
    - `gather_object`: gather every rank's object at the root
    - `scatter_object`: send each rank its own object of the root's list
    - `alltoall_object`: send a separate object to each rank

    Plans, memory and estimates:

    - `plan`: check a call once, to start it many times
    - `empty`: allocate an array that the other ranks of this host can read in place
    - `time_estimator`: predict the duration of calls without making them

    Other groups:

    - `split_group`: make groups of listed ranks
    - `split`: make a group of the ranks that pass the same color
    - `cart`: make a group whose ranks form a grid
    - `shrink`: make a group of the ranks that are alive
    - `grow`: make a group of these ranks and newcomers
    - `merge_remote_group`: make a group of these ranks and the ranks of other groups

    State and lifetime:

    - `rank`, `size`, `backend_for`: return this rank's number, the number of ranks, the backend of a device
    - `pending`, `stats`: list the pending works, return the counters
    - `add_hook`: call a hook when operations start and end
    - `drain`: wait until all pending works have ended
    - `wait_revoked`: wait until the group is revoked
    - `abort`: revoke the group on all ranks
    - `report_death`: report to all ranks that the process of a rank has died
    - `shutdown`, `aclose`: close the group

    **Calls.** A call checks its arguments, starts its operation and returns a `Work`. Awaiting the work gives the
    result. A wrong argument raises `TypeError` or `ValueError` at the call, and nothing is sent. Calls also raise
    `GroupClosedError` once this rank has closed the group, and `GroupRevokedError` once the group has failed.

    **Failures.** When an operation fails, awaiting its work raises a `GroupError`: `CollectiveMismatchError` if the
    ranks made different calls, `CollectiveTimeoutError` if the timeout expired, `PeerLostError` if a rank is lost. The
    first failure revokes the group on all ranks: all pending works fail with the same cause. `shrink` makes a new group
    of the ranks that are alive.

    **Collectives.** All ranks of the group make the same collective calls in the same order, or with the same `key`.
    `timeout` is in seconds and bounds the whole operation, not only the caller's wait. Arrays are of any kind that
    `aiocoll.typing.Array` names; their dtype is the same on every rank. In the *Cost* of a call, p is the number of
    ranks, and n the number of bytes of one rank's tensor unless the call defines it.

    **Objects.** Object collectives accept the types that `aiocoll.codec` can encode, and yield new objects. Each object
    is sent directly to its receivers, in one step. An encoded object has at most 16 MiB.

    **Messages.** A message is a send on one rank and a receive on another rank or on the same one. Messages from one
    sender with one tag are received in the order sent. A tag is a number from 0 to 2**30 - 1. A receive has the length
    and dtype of its message. A message to or from `PROC_NULL` ends at once: nothing is sent, and the tensor of a
    receive stays unchanged.

    **CUDA arrays.** NCCL carries out collectives on CUDA arrays if all ranks have the same NCCL version and a device
    each. Otherwise they are staged: copied to the host, carried out there, and copied back. Calls that NCCL lacks are
    staged, too: scans, bit, logical and custom ops, reductions of 16-bit integers, AVG of integers and float8, PRODUCT
    of complex numbers, and PREMUL_SUM except in `allreduce`. Reductions of float8 are staged unless NCCL is 2.24 or
    later and all devices have compute capability 9.0. NCCL rounds floats of 16 bits and less at each step, and its MIN
    and MAX may lose a NaN. All ranks compare each call before it starts, in two steps over the host. If the calls
    differ, `CollectiveMismatchError` leaves arrays and group unchanged. A group uses one device. Ranks that share
    several groups call them in the same order, as NCCL requires. NCCL carries messages of more than 256 KiB if the
    group uses it; the host carries all others. The other end of a message may be a host array.

    Attributes:
        group_name: name of the group, the same on all ranks.
        group_desc: a description for people.
        timeout: default number of seconds that an operation may take. Setting it applies to later calls on this rank.
        global_ranks: rank in the job of each rank of the group.
        recorder: the last operations of this rank, see `FlightRecorder`.
        store: the keys of this group in the store where its ranks met, for small values that the ranks share.
        completed_everywhere: for a group made by `shrink`, the calls that the old group had completed on all ranks of
            this one.
        completed_somewhere: the calls that the old group had completed on at least one rank of this one.
    """

    def __init__(self, comm: Communicator, spec: GroupSpec, origin: Origin) -> None:
        self.group_name = comm.name
        self.group_desc = f"{len(comm.ranks)} ranks"
        self.global_ranks, self.store = comm.ranks, origin.store(comm.id)
        self.recorder = FlightRecorder(comm, spec.options.dump_dir)
        self.completed_everywhere, self.completed_somewhere = spec.completed
        dispatcher = Dispatcher(self, comm, spec, dry=origin.dry)
        if origin.dry:
            from aiocoll.group.interceptors.dry_run import DryRun  # few groups are dry runs

            dispatcher.intercept(DryRun(dispatcher))
        elif spec.options.debug == "detail" and len(comm.ranks) > 1:
            from aiocoll.group.interceptors.verify import Verifier  # few groups compare all calls

            verifier = Verifier(dispatcher)
            dispatcher.intercept(verifier, verifier.report_wrong_call)
        # Cached, because an attribute lookup is a noticeable part of a short call.
        self._one = dispatcher.one
        if dispatcher.native is not None:
            self._one = dispatcher.native.one  # type: ignore[assignment]  # takes positional arguments only
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
        """The default timeout of operations in seconds; `math.inf` means no limit."""
        return self._parts.comm.timeout

    @timeout.setter
    def timeout(self, timeout: Timeout) -> None:
        self._parts.dispatcher.set_timeout(timeout)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        await self._parts.lifetime.leave(error)

    def rank(self) -> int:
        """Return the number of this rank in the group.

        Returns:
            A number from 0 to `size` - 1.
        """
        return self._rank

    def size(self) -> int:
        """Return the number of ranks in the group.

        Returns:
            At least 1; it never changes.
        """
        return len(self.global_ranks)

    def backend_for(self, device: str) -> str:
        """Return the name of the backend that carries out collectives on a device's arrays.

        Args:
            device: a kind of device, such as "cpu".

        Returns:
            Name of the backend. For CUDA arrays, "aio" uses NCCL if all ranks can, and "nccl" uses only NCCL; see
            `aiocoll.backends`.

        Raises:
            ValueError: the group has no backend for that device.
        """
        if device not in self._parts.devices:
            available = f"group {self.group_name!r}; available: {', '.join(map(repr, self._parts.devices))}"
            raise ValueError(f"device={device!r} has no backend in {available}")
        return self._parts.devices[device]

    # -- collectives on arrays

    def allreduce(self, tensor: S, op: ReduceOp = SUM, *, timeout: Timeout = None, key: str | None = None) -> Work[S]:
        """Reduce `tensor` over all ranks, in place. Every rank gets bitwise the same result.

            rank 0  [a0 a1]         [a0+b0 a1+b1]
            rank 1  [b0 b1]   ->    [a0+b0 a1+b1]

        Sparse arrays are accepted for SUM and AVG. Scipy.sparse COO, CSR and CSC, and torch COO with or without dense
        dimensions are reduced in place; torch CSR yields a new tensor. Every rank gets the union of all ranks' entries,
        sorted, one per position. A sum of zero stays stored. Entries of one array at the same position are added up
        first. A thread reads a large array; an error in its indices then fails the work on all ranks.

        Args:
            tensor: an array of any shape, of the same number of elements on every rank; or a number.
            op: how to reduce.
            timeout: seconds; None is the group's.
            key: match by this key instead of by order.

        Returns:
            Work that yields `tensor`; for a number, the reduced number of the same type.

        Raises:
            TypeError: `tensor` is not an array or number, or `op` is not defined on its dtype.
            ValueError: `tensor` is read-only; or it is sparse, and `op` is neither SUM nor AVG.
            GroupError: the operation fails, see `ProcessGroup`.

        Cost: small tensors take 1 step, n (p-1) bytes sent per rank. With more than four ranks that share memory they
            take 2 steps, n bytes, and n (p-1) from rank 0. Large tensors take 2 (p-1) steps, 2 n (p-1)/p bytes. Sparse
            arrays take an allgather of the counts, then an allgather of all entries, or a dense allreduce if that is
            cheaper. An entry has 4 or 8 bytes and its value; see `aiocoll.group.sparse_reduce`.
        Source: Patarasuk and Yuan 2009, doi:10.1016/j.jpdc.2008.09.002 (ring); Traeff, arXiv 2410.14234 (circulant);
            Bruck et al. 1997 (bruck); Rabenseifner 2004 (pairwise); Traeff and Hunold 2020 and Bayatpour et al. 2017
            (between hosts); Renggli et al. 2019, arXiv 1802.08021 (sparse).
        """
        try:
            return self._one("allreduce", tensor, op, None, True, timeout, key)
        except TypeError as error:  # checked only after a failure, because an earlier check would slow down every call
            return self._parts.collectives.reduce_sparse(error, tensor, op, None, timeout, key)

    def reduce(
        self, tensor: S, root: int, op: ReduceOp = SUM, *, timeout: Timeout = None, key: str | None = None
    ) -> Work[S]:
        """Reduce `tensor` over all ranks into the root's tensor. The other ranks' tensors stay unchanged.

        Sparse arrays are accepted as in `allreduce`.

        Args:
            tensor: an array of any shape, of the same number of elements on every rank; or a number.
            root: rank that gets the result.
            op: how to reduce.
            timeout: seconds; None is the group's.
            key: match by this key instead of by order.

        Returns:
            Work that yields `tensor`, which at the root holds the result; for a number, the reduced number at the root.

        Raises:
            TypeError: `tensor` is not an array or number, or `op` is not defined on its dtype.
            ValueError: `root` is not a rank of the group, or its tensor is read-only; or the tensor is sparse, and `op`
                is neither SUM nor AVG.
            GroupError: the operation fails, see `ProcessGroup`.

        Cost: small tensors take 1 step at the root or log2(p) steps; large ones a pipelined chain, n bytes sent per
            rank. Sparse arrays take an allgather of the counts, then a gather of all entries, or a dense reduce if that
            is cheaper.
        Source: Thakur, Rabenseifner and Gropp 2005 (binomial tree); Rabenseifner 2004 (pairwise); Karonis et al. 2000
            (between hosts).
        """
        root = self._check_rank(root, "root")
        try:
            return self._one("reduce", tensor, op, root, root == self._rank, timeout, key)
        except TypeError as error:
            return self._parts.collectives.reduce_sparse(error, tensor, op, root, timeout, key)

    def broadcast(self, tensor: S, root: int, *, timeout: Timeout = None, key: str | None = None) -> Work[S]:
        """Copy the root's tensor to all ranks.

        Sparse arrays need the same shape and dtype on all ranks, but not the same entries. The root's entries replace
        the entries of the other ranks, in place as in `allreduce`.

        Args:
            tensor: an array of any shape, of the same number of elements on every rank; or a number. It is read at the
                root and written elsewhere.
            root: rank whose tensor is copied.
            timeout: seconds; None is the group's.
            key: match by this key instead of by order.

        Returns:
            Work that yields `tensor`; for a number, the root's number.

        Raises:
            TypeError: `tensor` is not an array or number.
            ValueError: `root` is not a rank of the group, or another rank's tensor is read-only.
            GroupError: the operation fails, see `ProcessGroup`.

        Cost: small tensors take up to p-1 sends of the root, or a tree of log(p) levels; large ones a pipelined chain,
            n bytes sent per rank. Sparse arrays take an allgather of the counts, then a broadcast of the entries (4 or
            8 bytes each, and the value).
        Source: Thakur, Rabenseifner and Gropp 2005 (tree); Karonis et al. 2000, Traeff and Hunold 2020 (between hosts).
        """
        root = self._check_rank(root, "root")
        try:
            return self._one("broadcast", tensor, None, root, root != self._rank, timeout, key)
        except TypeError as error:
            return self._parts.collectives.broadcast_sparse(error, tensor, root, timeout, key)

    def scan(self, tensor: N, op: ReduceOp = SUM, *, timeout: Timeout = None, key: str | None = None) -> Work[N]:
        """Reduce `tensor` over all ranks up to and including this rank, in place (inclusive prefix).

        Args:
            tensor: an array of any shape, of the same number of elements on every rank; or a number.
            op: how to reduce, in rank order; not AVG.
            timeout: seconds; None is the group's.
            key: match by this key instead of by order.

        Returns:
            Work that yields `tensor`; for a number, the reduced number.

        Raises:
            TypeError: `tensor` is not an array or number, or `op` is not defined on its dtype.
            ValueError: `op` is AVG, or `tensor` is read-only.
            GroupError: the operation fails, see `ProcessGroup`.

        Cost: small tensors take 1 step, up to n (p-1) bytes sent per rank; large ones a pipelined chain, n bytes.
        """
        return self._parts.collectives.scan("scan", tensor, op, timeout, key)

    def exscan(self, tensor: N, op: ReduceOp = SUM, *, timeout: Timeout = None, key: str | None = None) -> Work[N]:
        """Reduce `tensor` over all lower ranks, in place (exclusive prefix). Rank 0's tensor stays unchanged.

        Args:
            tensor: an array of any shape, of the same number of elements on every rank; or a number.
            op: how to reduce, in rank order; not AVG.
            timeout: seconds; None is the group's.
            key: match by this key instead of by order.

        Returns:
            Work that yields `tensor`; for a number, the reduced number.

        Raises:
            TypeError: `tensor` is not an array or number, or `op` is not defined on its dtype.
            ValueError: `op` is AVG, or `tensor` is read-only.
            GroupError: the operation fails, see `ProcessGroup`.

        Cost: small tensors take 1 step, up to n (p-1) bytes sent per rank; large ones a pipelined chain, n bytes.
        """
        return self._parts.collectives.scan("exscan", tensor, op, timeout, key)

    def barrier(self, *, timeout: Timeout = None, key: str | None = None) -> Work[None]:
        """Wait until all ranks have entered the barrier.

        Args:
            timeout: seconds; None is the group's.
            key: match by this key instead of by order.

        Returns:
            Work that is done once all ranks have entered.

        Raises:
            GroupError: the operation fails, see `ProcessGroup`.

        Cost: ceil(log2 p) steps without data. Ranks that share memory take 1 step if they are at most four, and 2 steps
            if they are at most 64.
        Source: Hensgen, Finkel and Manber 1988 (dissemination); Karonis et al. 2000 (between hosts); Mellor-Crummey
            and Scott 1991 (in shared memory).
        """
        return self._parts.collectives.barrier(timeout, key)

    def monitored_barrier(self, timeout: Timeout = None, wait_all_ranks: bool = False) -> Work[None]:
        """Wait until all ranks have entered the barrier. If the timeout expires, report the missing ranks.

        Args:
            timeout: seconds; None is the group's.
            wait_all_ranks: on rank 0: report every missing rank, not only the first one.

        Returns:
            Work that is done once all ranks have entered.

        Raises:
            CollectiveTimeoutError: on every rank, with ``Ranks 1, 3 failed to pass monitoredBarrier in ... ms``.
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

        Sparse arrays may have different shapes on different ranks. They yield new arrays in the format of `tensor`;
        `outputs` is None.

        Args:
            outputs: one array per rank, with as many elements as that rank's tensor. None, on all ranks, allocates
                NumPy arrays with rows like those of `tensor`; on a CUDA device, arrays like `tensor`.
            tensor: this rank's array; the number of elements may differ from rank to rank.
            timeout: seconds; None is the group's.
            key: match by this key instead of by order.

        Returns:
            Work that yields the list of outputs, in rank order.

        Raises:
            TypeError: an argument is not an array, or dtypes differ.
            ValueError: `outputs` does not have one array per rank, or one is read-only or shares memory with another.
            GroupError: the operation fails, see `ProcessGroup`.

        Cost: n (p-1) bytes sent per rank; 1 step, log2(p) steps or p-1 pipelined steps, depending on the size. Without
            outputs, one small step precedes. For sparse arrays, n is the number of bytes of the entries: 4 or 8 each,
            and the value.
        Source: Bruck et al. 1997 (circulant); Patarasuk and Yuan 2009 (ring); Karonis et al. 2000, Traeff and Hunold
            2020 (between hosts).
        """
        return self._parts.collectives.allgather(outputs, tensor, timeout, key)

    def allgather_into_tensor(
        self, output: A, tensor: Array, *, timeout: Timeout = None, key: str | None = None
    ) -> Work[A]:
        """Gather the tensors of all ranks, which have equal lengths, into one array in rank order.

        Args:
            output: an array of p times the elements of `tensor`.
            tensor: this rank's array, of the same number of elements on every rank.
            timeout: seconds; None is the group's.
            key: match by this key instead of by order.

        Returns:
            Work that yields `output`.

        Raises:
            TypeError: an argument is not an array, or dtypes differ.
            ValueError: `output` has a wrong number of elements, or is read-only.
            GroupError: the operation fails, see `ProcessGroup`.

        Cost: as for `allgather`.
        Source: as for `allgather`.
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
        """Gather every rank's tensor at the root.

        Sparse arrays are accepted as in `allgather`.

        Args:
            outputs: at the root one array per rank, or None. None allocates NumPy arrays of at most 4 GiB each, with
                rows like those of `tensor`; on a CUDA device, or in a block, arrays like `tensor`. Elsewhere None or
                [].
            tensor: this rank's array; the number of elements may differ from rank to rank.
            root: rank that gets the tensors.
            timeout: seconds; None is the group's.
            key: match by this key instead of by order.

        Returns:
            Work that yields the list of outputs at the root, None elsewhere.

        Raises:
            TypeError: an argument is not an array, or dtypes differ.
            ValueError: `root` is not a rank of the group, or `outputs` is not as described.
            GroupError: the operation fails, see `ProcessGroup`.

        Cost: 1 step; n bytes sent per rank; the root receives the tensors of all ranks. For sparse arrays, an allgather
            of the counts precedes.
        """
        return self._parts.collectives.gather(outputs, tensor, root, timeout, key)

    def scatter(
        self, output: A, inputs: Sequence[Array] | None, root: int, *, timeout: Timeout = None, key: str | None = None
    ) -> Work[A]:
        """Send the root's array `inputs[r]` to rank r, which receives it in `output`.

        Args:
            output: array that receives this rank's input; the number of elements may differ from rank to rank.
            inputs: at the root one array per rank; elsewhere None or [].
            root: rank that sends its arrays.
            timeout: seconds; None is the group's.
            key: match by this key instead of by order.

        Returns:
            Work that yields `output`.

        Raises:
            TypeError: an argument is not an array, or dtypes differ.
            ValueError: `root` is not a rank of the group, `inputs` is not as described, or `output` is read-only or
                shares memory with another rank's input.
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
        """Reduce `inputs[r]` over all ranks into the array `output` of rank r.

        Args:
            output: on rank r, an array of as many elements as `inputs[r]`.
            inputs: one array per rank. `inputs[r]` has the same number of elements on every rank; different arrays may
                have different numbers of elements.
            op: how to reduce.
            timeout: seconds; None is the group's.
            key: match by this key instead of by order.

        Returns:
            Work that yields `output`.

        Raises:
            TypeError: an argument is not an array, dtypes differ, or `op` is not defined on them.
            ValueError: `inputs` does not have one array per rank, or `output` has a wrong number of elements or is
                read-only.
            GroupError: the operation fails, see `ProcessGroup`.

        Cost: n (p-1)/p bytes sent per rank, half as many as for an allreduce; n is the number of bytes of all inputs of
            a rank. 1 step, log2(p) steps or p-1 pipelined steps, depending on the size.
        Source: Rabenseifner 2004 (pairwise); Traeff, arXiv 2410.14234 (circulant); Patarasuk and Yuan 2009 (ring).
        """
        return self._parts.collectives.reduce_scatter(output, inputs, op, timeout, key)

    def reduce_scatter_tensor(
        self, output: A, input: Array, op: ReduceOp = SUM, *, timeout: Timeout = None, key: str | None = None
    ) -> Work[A]:
        """Reduce `input` over all ranks, and divide the result into equal parts; rank r gets part r in `output`.

        Args:
            output: an array of 1/p of the elements of `input`.
            input: an array of the same number of elements on every rank.
            op: how to reduce.
            timeout: seconds; None is the group's.
            key: match by this key instead of by order.

        Returns:
            Work that yields `output`.

        Raises:
            TypeError: an argument is not an array, dtypes differ, or `op` is not defined on them.
            ValueError: `input` does not have p times the elements of `output`, or `output` is read-only.
            GroupError: the operation fails, see `ProcessGroup`.

        Cost: as for `reduce_scatter`.
        Source: as for `reduce_scatter`.
        """
        return self._parts.collectives.reduce_scatter_tensor(output, input, op, timeout, key)

    def alltoall(
        self, outputs: Sequence[A], inputs: Sequence[Array], *, timeout: Timeout = None, key: str | None = None
    ) -> Work[list[A]]:
        """Send `inputs[r]` to rank r, and receive the array from rank r in `outputs[r]`.

        Args:
            outputs: one array per rank, with as many elements as that rank sends to this one.
            inputs: one array per rank, of any number of elements.
            timeout: seconds; None is the group's.
            key: match by this key instead of by order.

        Returns:
            Work that yields the list of outputs.

        Raises:
            TypeError: an argument is not an array, or dtypes differ.
            ValueError: a list does not have one array per rank, or an output is read-only or shares memory with an
                input or another output.
            GroupError: the operation fails, see `ProcessGroup`.

        Cost: 1 step; n (p-1)/p bytes sent per rank, where n is the number of bytes of all its inputs.
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
        """Split `input` along its first dimension, send part r to rank r, and receive parts into `output`.

        Args:
            output: an array of as many elements as all received parts together; it holds them in rank order.
            input: an array of any shape, which is split along its first dimension; must not share memory with `output`.
            output_split_sizes: rows from each rank; None for equal parts.
            input_split_sizes: rows to each rank; None for equal parts.
            timeout: seconds; None is the group's.
            key: match by this key instead of by order.

        Returns:
            Work that yields `output`.

        Raises:
            TypeError: an argument is not an array, or dtypes differ.
            ValueError: the sizes do not add up to the rows of their array, `output` is read-only, or `input` and
                `output` share memory.
            GroupError: the operation fails, see `ProcessGroup`.

        Cost: as for `alltoall`.
        """
        return self._parts.collectives.alltoall_base(output, input, output_split_sizes, input_split_sizes, timeout, key)

    # -- several calls as one operation

    def coalescing(self) -> Batch:
        """Record the calls made on this group in the block, and in tasks started there, and run them together.

            async with pg.coalescing():
                for gradient in gradients:
                    pg.allreduce(gradient)

        Calls of the same kind, dtype, op and root become one operation. If all ranks share memory and run the
        accelerator, each small call remains a separate operation, which takes about 2 µs. All ranks record the same
        calls in the same order; together the calls take one sequence number.

        Leaving the block starts the recorded calls and waits for all of them. Awaiting a work inside the block starts
        them at the end of the current loop iteration. The calls of a block are carried out in any order, so no call may
        write memory that another one reads or writes. Calls on CUDA arrays become one group of NCCL calls; calls that
        NCCL cannot carry out are staged one by one.

        If an exception leaves the block, nothing more is sent. The works that were not sent raise an error with that
        exception as its cause.

        Returns:
            An async context manager, which ``async with`` binds to its target.

        Raises:
            RuntimeError: on entering: the block is inside another block of the same group.
            ValueError: on sending: two calls share memory that one of them writes.
            CollectiveMismatchError: on sending: the ranks have recorded different calls; it names some of them.

        Cost: as for one call on all arrays of a kind, and two copies of each small array; large ones are not fused.
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
        """Reduce each of `tensors` over all ranks, in place, with one operation per dtype.

        Args:
            tensors: a list of dense arrays of any shapes; each has the same number of elements on every rank.
            op: how to reduce.
            timeout: seconds; None is the group's.
            key: match by this key instead of by order.

        Returns:
            Work that yields the list of tensors.

        Raises:
            TypeError: `tensors` is not a list of arrays, or `op` is not defined on their dtype.
            ValueError: a tensor is read-only, or two tensors share memory.
            GroupError: the operation fails, see `ProcessGroup`.

        Cost: as for one `allreduce` of all tensors, and two copies of each small tensor; large ones are not fused.
        """
        check_list(tensors, "tensors")
        return self._parts.coalescer.start_list(
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
        """Gather every rank's `inputs[i]` into `outputs[i]`, for each i, with one operation per dtype.

        Args:
            outputs: a list of arrays, each of p times the elements of its input.
            inputs: a list of as many arrays; each has the same number of elements on every rank.
            timeout: seconds; None is the group's.
            key: match by this key instead of by order.

        Returns:
            Work that yields the list of outputs.

        Raises:
            TypeError: an argument is not a list of arrays, or the dtypes of a pair differ.
            ValueError: the lists differ in length, or an output has a wrong number of elements or is read-only.
            GroupError: the operation fails, see `ProcessGroup`.

        Cost: as for one `allgather_into_tensor` of all inputs, and two copies of each small array; large ones are not
            fused.
        """
        each = pairs(outputs, inputs)
        call = partial(self.allgather_into_tensor, timeout=timeout)
        return self._parts.coalescer.start_list(
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
        """Reduce each `inputs[i]` over all ranks; rank r gets part r of the result in `outputs[i]`.

        Args:
            outputs: a list of arrays, each of 1/p of the elements of its input.
            inputs: a list of as many arrays; each has the same number of elements on every rank.
            op: how to reduce.
            timeout: seconds; None is the group's.
            key: match by this key instead of by order.

        Returns:
            Work that yields the list of outputs.

        Raises:
            TypeError: an argument is not a list of arrays, the dtypes of a pair differ, or `op` is not defined on them.
            ValueError: the lists differ in length, or an output has a wrong number of elements or is read-only.
            GroupError: the operation fails, see `ProcessGroup`.

        Cost: as for one `reduce_scatter_tensor` of all inputs, and two copies of each small array; large ones are not
            fused.
        """
        each = pairs(outputs, inputs)
        call = partial(self.reduce_scatter_tensor, op=op, timeout=timeout)
        return self._parts.coalescer.start_list(
            "REDUCE_SCATTER_TENSOR_COALESCED", lambda: [call(*pair) for pair in each], key
        )

    # -- messages between two ranks

    def send(self, tensor: M, dst: int, tag: int = 0, *, timeout: Timeout = None) -> Work[M]:
        """Send `tensor` to rank `dst`. The work ends when `tensor` may be reused, possibly before it is received.

        Only the entries of a sparse array (as in `allreduce`) are sent. The receive passes a sparse array of the same
        shape and dtype.

        Args:
            tensor: an array of any shape, of less than 4 GiB.
            dst: a rank of the group, which may be this one; or `PROC_NULL`, to send nothing.
            tag: a number from 0 to 2**30 - 1; the receive passes the same tag.
            timeout: seconds; None is the group's.

        Returns:
            Work that yields `tensor`.

        Raises:
            TypeError: `tensor` is not an array, or `dst` or `tag` is not a number.
            ValueError: `dst` is not a rank of the group, `tag` is out of range, or `tensor` is too long.
            GroupError: the operation fails, see `ProcessGroup`.

        Cost: one message of n bytes. A sparse array takes 4 or 8 bytes per entry, and its value.
        """
        return self._parts.messages.send(tensor, dst, tag, timeout)

    def recv(self, tensor: M, src: int, tag: int = 0, *, timeout: Timeout = None) -> Work[M]:
        """Receive a message from rank `src` into `tensor`.

        Args:
            tensor: an array with the number of elements and the dtype of the message. For a sparse message, a sparse
                array of the same shape and dtype, whose entries are replaced as in `broadcast`.
            src: a rank of the group, which may be this one; or `PROC_NULL`, to receive nothing.
            tag: tag of the send.
            timeout: seconds; None is the group's.

        Returns:
            Work that yields `tensor`.

        Raises:
            TypeError: `tensor` is not an array, or `src` or `tag` is not a number.
            ValueError: `src` is not a rank of the group, `tag` is out of range, or `tensor` is read-only.
            GroupError: the operation fails, see `ProcessGroup`.

        Cost: one message of n bytes.
        """
        return self._parts.messages.recv(tensor, self._check_rank(src, "src", null=True), tag, timeout)

    def recv_anysource(self, tensor: M, tag: int = 0, *, timeout: Timeout = None) -> Work[M]:
        """Receive the next message from any rank into `tensor`; `work.source_rank()` returns the sender.

        Args:
            tensor: an array with the number of elements and the dtype of the message; or a sparse array, as for `recv`.
            tag: tag of the send.
            timeout: seconds; None is the group's.

        Returns:
            Work that yields `tensor`.

        Raises:
            TypeError: `tensor` is not an array, or `tag` is not a number.
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

        Cost: one message per operation.
        """
        return self._parts.messages.batch(operations, timeout)

    def send_object(self, obj: object, dst: int, tag: int = 0, *, timeout: Timeout = None) -> Work[None]:
        """Send an object to rank `dst`.

        Args:
            obj: an object that `aiocoll.codec` can encode, of at most 16 MiB.
            dst: a rank of the group, which may be this one; or `PROC_NULL`, to send nothing.
            tag: a number from 0 to 2**30 - 1; the receive passes the same tag.
            timeout: seconds; None is the group's.

        Returns:
            Work that yields None.

        Raises:
            SerializationError: `obj` cannot be encoded; the message names the type and the path.
            TypeError, ValueError: `dst` or `tag` is wrong.
            GroupError: the operation fails, see `ProcessGroup`.

        Cost: one message.
        """
        return self._parts.messages.send_object(obj, dst, tag, timeout)

    def recv_object(self, src: int | None = None, tag: int = 0, *, timeout: Timeout = None) -> Work[Any]:
        """Receive an object from rank `src`, or from any rank.

        Args:
            src: a rank of the group, or `PROC_NULL`, which yields None; None receives the next object from any rank.
            tag: tag of the send.
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
        """Iterate over messages with `tag` that no posted receive matches, in order of arrival.

        A message is removed from the queue only when it is yielded. So cancelling a step loses no message, and the
        iterator remains usable. Several tasks may share the iterator. It ends when this rank closes the group.

        Args:
            tag: tag of the sends.

        Returns:
            An iterator over pairs ``(source, message)``: a rank, and the object or array that was sent. Arrays are 1-D.
            A message of a structured dtype, of dates or of texts is an array of its bytes.

        Raises:
            TypeError, ValueError: `tag` is wrong; or the next message is a sparse array, which remains for `recv`.
            GroupError: the group is closed or fails, see `ProcessGroup`.

        Cost: one message per step.
        """
        return self._parts.messages.incoming(tag)

    def probe(self, source: int | None = None, tag: int = 0, *, timeout: Timeout = None) -> Work[Envelope]:
        """Wait for a message that could be received, and describe it without receiving it.

            envelope = await pg.probe(tag=3)
            x = np.empty(envelope.count, envelope.dtype)
            await pg.recv(x, envelope.source, tag=3)

        The next receive from that source with that tag gets the message. A message that matches a receive posted
        earlier is not visible to probes. Several probes see the same message until a receive or `incoming` takes it.
        Tasks that compete for the messages of one tag use `incoming`. Cancelling a probe loses no message.

        Args:
            source: a rank of the group, or `PROC_NULL`; None is any rank.
            tag: tag of the send.
            timeout: seconds; None is the group's.

        Returns:
            Work that yields the `Envelope`: source, tag, length and dtype of the oldest such message.

        Raises:
            TypeError, ValueError: `source` or `tag` is wrong.
            GroupError: no such message arrives in time, or the group fails, see `ProcessGroup`.

        Cost: none; the message is sent anyway.
        """
        return self._parts.messages.probe(source, tag, timeout)

    def iprobe(self, source: int | None = None, tag: int = 0) -> Envelope | None:
        """Describe the next message if one has arrived, without waiting for it or receiving it; see `probe`.

        It checks for messages that have arrived. Connections are opened, and long computations continue, only while the
        program awaits something. So a program that calls `iprobe` repeatedly without an await may never get a message.

        Args:
            source: a rank of the group, or `PROC_NULL`; None is any rank.
            tag: tag of the send.

        Returns:
            The `Envelope`; None if there is no such message.

        Raises:
            TypeError, ValueError: `source` or `tag` is wrong.
            GroupError: the group is closed or has failed.

        Cost: none; the message is sent anyway.
        """
        return self._parts.messages.iprobe(source, tag)

    # -- collectives on objects

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
        """Send the root's object to all ranks.

        Args:
            obj: at the root an object that `aiocoll.codec` can encode, of at most 16 MiB; ignored elsewhere.
            root: rank whose object is sent.
            timeout: seconds; None is the group's.
            key: match by this key instead of by order.

        Returns:
            Work that yields the root's object: `obj` itself there, a new one elsewhere.

        Raises:
            SerializationError: `obj` cannot be encoded; the message names the type and the path.
            TypeError, ValueError: `root` is not a rank of the group.
            GroupError: the operation fails, see `ProcessGroup`.

        Cost: 1 step: p-1 messages from the root.
        """
        return self._parts.objects.broadcast(obj, root, timeout, key)

    def allgather_object(self, obj: T, *, timeout: Timeout = None, key: str | None = None) -> Work[list[T]]:
        """Gather every rank's object on every rank.

        Args:
            obj: an object that `aiocoll.codec` can encode, of at most 16 MiB.
            timeout: seconds; None is the group's.
            key: match by this key instead of by order.

        Returns:
            Work that yields the list of objects, in rank order.

        Raises:
            SerializationError: `obj` cannot be encoded; the message names the type and the path.
            GroupError: the operation fails, see `ProcessGroup`.

        Cost: 1 step: p-1 messages from every rank.
        """
        return self._parts.objects.allgather(obj, timeout, key)

    def gather_object(
        self, obj: T, root: int = 0, *, timeout: Timeout = None, key: str | None = None
    ) -> Work[list[T] | None]:
        """Gather every rank's object at the root.

        Args:
            obj: an object that `aiocoll.codec` can encode, of at most 16 MiB.
            root: rank that gets the objects.
            timeout: seconds; None is the group's.
            key: match by this key instead of by order.

        Returns:
            Work that yields the list of objects in rank order at the root, None elsewhere.

        Raises:
            SerializationError: `obj` cannot be encoded; the message names the type and the path.
            TypeError, ValueError: `root` is not a rank of the group.
            GroupError: the operation fails, see `ProcessGroup`.

        Cost: 1 step: one message from every other rank.
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
        """Send the root's object `objs[r]` to rank r.

        Args:
            objs: at the root one object per rank, each of at most 16 MiB; ignored elsewhere.
            root: rank whose objects are sent.
            timeout: seconds; None is the group's.
            key: match by this key instead of by order.

        Returns:
            Work that yields this rank's object.

        Raises:
            SerializationError: an object cannot be encoded; the message names the type and the path.
            TypeError, ValueError: `root` is not a rank of the group, or `objs` does not have one object per rank.
            GroupError: the operation fails, see `ProcessGroup`.

        Cost: 1 step: p-1 messages from the root.
        """
        return self._parts.objects.scatter(objs, root, timeout, key)

    def alltoall_object(self, objs: Sequence[T], *, timeout: Timeout = None, key: str | None = None) -> Work[list[T]]:
        """Send `objs[r]` to rank r, and receive an object from every rank.

        Args:
            objs: one object per rank, each of at most 16 MiB.
            timeout: seconds; None is the group's.
            key: match by this key instead of by order.

        Returns:
            Work that yields the list of the objects received from every rank, in rank order.

        Raises:
            SerializationError: an object cannot be encoded; the message names the type and the path.
            ValueError: `objs` does not have one object per rank.
            GroupError: the operation fails, see `ProcessGroup`.

        Cost: 1 step: p-1 messages from every rank.
        """
        return self._parts.objects.alltoall(objs, timeout, key)

    # -- plans

    def plan(self, call: Callable[P, Work[T]], /, *args: P.args, **kwargs: P.kwargs) -> CallPlan[T]:
        """Check a call once, so that it can be started many times without checks.

            plan = pg.plan(pg.allreduce, gradients, ReduceOp.AVG)
            for batch in batches:
                gradients[:] = ...
                await plan.start()

        The arguments are checked here, and nothing starts. The plan holds the arrays: each start reads their current
        contents, and writes its result there. A start takes its place in the order of the group's calls as the call
        itself would. Starting a plan is cheaper than the call if its arrays are contiguous host arrays; otherwise each
        start repeats the whole call.

        Args:
            call: a method of this group: any collective, send or receive, of arrays or objects, or `batch`.
            args: positional arguments of the call.
            kwargs: keyword arguments of the call.

        Returns:
            A plan; its `start` returns the work of the call.

        Raises:
            TypeError: `call` is not such a method of this group; or the call raises it.
            ValueError: the call raises it.
            GroupError: the group is closed or has failed.

        Cost: as for the call, at each start.
        """
        return make_plan(self._parts.dispatcher, call, args, kwargs)

    # -- arrays and estimates

    @overload
    async def empty(self, shape: int | Sequence[int], dtype: type[D] | np.dtype[D]) -> NDArray[D]: ...
    @overload
    async def empty(self, shape: int | Sequence[int], dtype: DTypeLike) -> NDArray[Any]: ...
    async def empty(self, shape: int | Sequence[int], dtype: DTypeLike) -> NDArray[Any]:
        """Allocate an uninitialized array in memory that other ranks of this host can read in place.

            ordinary array       rank 0 copies a piece into shared memory; rank 1 reduces that copy
            array of `empty`     rank 1 reduces rank 0's memory in place

        An `allreduce` of more than 64 KiB on such arrays avoids that copy, if all ranks of the group are on one host
        and share memory. The op must be applicable in pieces; sums of float16 and narrower dtypes are not. The result
        has the same bits as with ordinary arrays, and other ranks may pass ordinary arrays. Slices, reshaped views and
        tensors that share the memory work as well. All other calls treat the array as any other array.

        The call is local: other ranks need not make it. The memory is released with the last view of the array. The
        array also works in the groups that `shrink` and `new_group` make of the same ranks.

        Args:
            shape: a number of elements, or a tuple.
            dtype: a NumPy dtype of elements that can be exchanged; ml_dtypes has bfloat16 and float8.

        Returns:
            A C-contiguous array. It is in ordinary memory if it is small, if shared memory would save nothing, or if
            shared memory is not available; in the last case a warning is logged once.

        Raises:
            TypeError: `shape` or `dtype` is invalid, or such elements cannot be exchanged.
            ValueError: `shape` has a negative number, or the array exceeds the address space.
            MemoryError: not even ordinary memory is available.
            GroupClosedError: this rank has closed the group.
            GroupRevokedError: the group has failed.

        Cost: 0.3 ms per MiB, spread over many loop iterations, and 1 file descriptor on this rank. Before Python 3.13
            it is 2 on this rank and 1 at the right neighbour. So make few large arrays and slice them. The first call
            on each array also passes its descriptor to that neighbour.
        """
        return await empty(self._parts.dispatcher, shape, dtype)

    @contextlib.contextmanager
    def time_estimator(self) -> Iterator[Estimate]:
        """Estimate the duration of the calls in this block instead of carrying them out.

            with pg.time_estimator() as estimate:
                pg.allreduce(gradients)
                pg.barrier()
            print(estimate.seconds, estimate.calls)

        The calls check their arguments, send nothing, take no sequence number and leave arrays unchanged. Their works
        have ended, and yield the caller's arrays (object calls yield None). The block is local: other ranks need not
        enter one. Tasks started in the block predict, too. Other groups and other tasks are not affected.

        The prediction assumes that all ranks make the calls together, on an otherwise idle machine. It applies the
        formulas of `aiocoll.algorithms.cost` to the parameters of the machine. These are defaults unless
        ``aiocoll bench --tune`` has measured them. The times of all calls are added up, even where calls would overlap.

        The prediction is less exact for some calls. For objects only the bytes that this rank sends are known. For
        gather and scatter, ranks other than the root assume equal shares. Sparse arrays are assumed to have the same
        size on all ranks and to be sent as they are. All hosts are assumed to be equally distant from each other. The
        additional steps of ``debug="detail"`` are left out.

        It is accurate enough to compare calls, and to know the order of magnitude of one; see the table in
        ``docs/metrics.md``, which ``bench/estimate.py`` measures.

        Returns:
            A context manager, which ``with`` binds to the `Estimate`. The estimate is complete at the end of the block.

        Raises:
            TypeError: from a call in the block on CUDA arrays, for which there are no measurements.
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
        """Make a group of some of the ranks, or several groups that have no rank in common.

        Every rank of this group calls it, in the same order and with the same lists. It is local and sends nothing. The
        new group shares all connections with this group, can be split again, and is closed separately or with this
        group. It also fails separately: a failure of this group does not affect it, except the death of a common rank.

        Ranks that passed different lists cannot exchange messages in the resulting groups. The first collective there
        reports the mismatch within half a second.

        Args:
            ranks: a list of ranks of this group; or a list of such lists.
            timeout: default number of seconds that an operation of the new group may take; None is this group's.
            group_name: name of the new group, or of each of them; different from the names of open groups.
            local: only the ranks in a list call it, each of them equally often with that list. Different lists are then
                not reported: a collective fails at its timeout.
            order: numbering of the ranks in the new group: as in this group ("group"), or as in the list ("given").

        Returns:
            Work that is done, and yields the group this rank is in, or None.

        Raises:
            TypeError, ValueError: the lists are empty, or name a rank twice or a rank that does not exist; or the name
                is already in use.
            GroupError: the group is closed or revoked.

        Cost: nothing is sent.
        """
        ending = self._parts.lifetime.is_ending
        return self._parts.reconfigurer.split(ranks, timeout, group_name, ending, local, order)

    async def shrink(self, exclude: Iterable[int] | None = None, *, assume_dead: Iterable[int] | None = None) -> Self:
        """Make a new group of the ranks that are alive and call `shrink`, numbered from 0 in the same order.

        On a failed group, the new group has all ranks that are alive. On a healthy group, it has all ranks but
        `exclude`, and the old group is revoked: pending works on this rank fail, so await them before. The new group is
        usable at once. Its `completed_everywhere` and `completed_somewhere` show where to resume. The old group is no
        longer usable: close it at any time.

        First, `shrink` reconnects to lost ranks that are not proven dead, for at most 2.5 s. So a reset connection does
        not exclude a rank. A process on the same host, or the process that started the rank, can prove its death.

        Ranks that do not call `shrink` within 6 s are left out. The others continue only if no second part of the group
        can do so, too. So one of these must take part: all ranks not proven dead; more than half of all ranks; or half
        of all ranks, including the lowest one.

        Cancelling it does not withdraw this rank's vote: the rank may be counted as a member. Then call `shrink` again,
        or close the group.

        Args:
            exclude: ranks of this group to leave out; pass the same on all ranks. If the ranks differ, a rank is left
                out if any participant excludes it.
            assume_dead: ranks of this group that the program knows to be dead although no process can prove it, for
                example because their host has lost power. **If one of them is alive and continues, there are two
                groups.** Each considers itself the only one, so their external effects happen twice.

        Returns:
            The new group.

        Raises:
            ValueError: an argument names this rank, or a rank that does not exist.
            PeerLostError: too few ranks could be reached, so the other ranks might continue as a separate group;
                the message and `ranks` name the other ranks.
            GroupError: this rank is left out: it was excluded, was assumed dead, or called too late. Or the group was
                already shrunk, or is closed.

        Cost: a few small messages once all ranks that are alive have made the call.
        """
        group: Self = await self._parts.reconfigurer.shrink(exclude, assume_dead)
        return group

    async def grow(self, n: int, timeout: Timeout = None, *, at_least: int | None = None) -> Self:
        """Make a new group of this group's ranks, which keep their numbers, and `n` newcomers.

        All ranks call it. Newcomers call ``new_group(join=True)`` with the same ``init_method`` or store, before or
        after. The new group has its own connections, so it receives no messages of older groups. This group stays
        unchanged: close it when it is no longer needed. To replace a lost process, call `shrink`, then `grow`.

        Args:
            n: number of newcomers, the same on all ranks.
            timeout: seconds to wait for the newcomers, and then for all ranks to meet; None is the group's.
            at_least: at the timeout, continue if at least this many newcomers have arrived; None requires `n`.

        Returns:
            The new group.

        Raises:
            TypeError, ValueError: `n` or `at_least` is not a positive number, or differs between ranks.
            RendezvousError: too few newcomers arrived, or not all ranks could meet. This group is unchanged, and
                newcomers that have arrived keep waiting.
            StoreUnavailableError: the store where the ranks met is gone, so newcomers cannot be found there.
            GroupError: this group has failed, before or during the call; all ranks raise it at once. Call `shrink`,
                then `grow` on the new group. Newcomers with an assignment raise `RendezvousError`; others keep waiting.

        Cost: as for `new_group`, after an `allgather_object`.
        """
        group: Self = await self._parts.reconfigurer.grow(n, timeout, at_least)
        return group

    async def merge_remote_group(
        self, store: Store, size: int, timeout: Timeout = None, group_name: str | None = None
    ) -> Self:
        """Make a new group of all ranks of this group and of groups of other jobs.

        All ranks of all these groups call it. The new group has its own connections; the old groups stay unchanged.
        Ranks are numbered group by group, and inside a group in their order. Groups are sorted by their lowest rank in
        their job, then by name, then by arrival. Groups with a job key need the same key.

        Args:
            store: a store that all these ranks share; it stays open.
            size: number of ranks of the new group.
            timeout: seconds to wait for the other groups, and then for all ranks to meet. Also the default timeout of
                operations of the new group. None is this group's.
            group_name: name of the new group, the same on all ranks. Merges at the same time in one store need
                different names. None is "merged".

        Returns:
            The new group.

        Raises:
            RendezvousError: too few or too many ranks arrived, they passed different sizes, or they could not meet;
                this group is unchanged.
            StoreUnavailableError: the store is gone.
            GroupError: this group has failed.

        Cost: as for `new_group`.
        """
        group: Self = await self._parts.reconfigurer.merge(store, size, timeout, group_name)
        return group

    async def split(self, color: int | str | None, key: int = 0) -> Self | None:
        """Make one new group for each color, of the ranks that pass this color.

        All ranks of this group call it, in the same order as other calls. Unlike with `split_group`, a rank need not
        know the arguments of the other ranks. The new group shares all connections with this group, as with
        `split_group`.

        Args:
            color: an int or str that selects the group of this rank; None: no group.
            key: an int; ranks of the new group are sorted by their keys, then by their numbers in this group.

        Returns:
            The group this rank is in; None if `color` is None.

        Raises:
            TypeError: `color` or `key` is of another type.
            GroupError: the operation fails, see `ProcessGroup`.

        Cost: as for `allgather_object`.
        """
        group: Self | None = await self._parts.reconfigurer.split_by_color(
            color, key, lambda: self._parts.lifetime.is_ending
        )
        return group

    def cart(self, dims: Sequence[int], periods: bool | Sequence[bool] | None = None) -> CartesianGroup[Self] | None:
        """Make a new group of the first ranks of this group, arranged as a grid.

            cart = pg.cart([0, 0], periods=[True, False])  # a cylinder
            below, above = cart.shift(axis=0)
            await cart.halo(u)

        All ranks of this group call it, in the same order as other calls that make groups, and with the same arguments.
        It is local and sends nothing. Ranks keep their order, and the last coordinate changes fastest.

        Args:
            dims: number of ranks along each axis. Zeros are replaced so that all ranks are in the grid, by lengths as
                equal as possible, the largest first.
            periods: whether each axis is periodic: its last rank is a neighbour of its first. None: no axis is.

        Returns:
            The `CartesianGroup`; None on ranks beyond the grid.

        Raises:
            TypeError, ValueError: `dims` needs more ranks than the group has, or does not divide their number; or an
                argument is not a list of ints or bools.
            GroupError: the group is closed or has failed.

        Cost: nothing is sent.
        """
        made: CartesianGroup[Self] | None = make_cartesian(self, self._parts.dispatcher.size, dims, periods)
        return made

    # -- state and lifetime

    def add_hook(self, hook: Hook) -> HookHandle:
        """Call `hook` whenever an operation of this group starts or ends; see `aiocoll.hooks`.

        Args:
            hook: an object with `on_start(info)`, `on_end(info)`, or both.

        Returns:
            A handle whose `remove` method removes the hook.

        Raises:
            TypeError: `hook` has neither method.
        """
        return self._parts.comm.hooks.add(hook)

    def stats(self) -> GroupStats:
        """Return this rank's counters in the group: calls, bytes, times, and waits for other ranks.

        Counters start when the group is made. They include collectives, messages, objects and blocks, also on CUDA
        arrays. Any thread may call it, at any time, also after the group was closed or revoked.

        Returns:
            An immutable snapshot; `str()` formats it as a table.

        Raises:
            RuntimeError: the group was made with ``GroupOptions(stats=False)``.
        """
        return self._parts.lifetime.stats()

    def pending(self) -> list[Work[Any]]:
        """Return the works of this group that have not ended.

        Returns:
            The works, oldest first; works recorded by a block come last.
        """
        return self._parts.lifetime.pending()

    async def drain(self) -> None:
        """Wait until all works that are pending now have ended.

        Raises:
            GroupError: a work failed. The error of the first failed work is raised, whatever its type.
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
        """Revoke the group immediately, on all ranks, so that every pending work fails.

        Args:
            reason: text for the error on all ranks.

        Raises:
            RuntimeError: called in another process, thread or event loop than the group's.
        """
        self._parts.lifetime.abort(reason)

    def report_death(self, rank: int, reason: str) -> None:
        """Report to all ranks that the process of `rank` has died, as the program or its launcher has noticed.

        All groups with that rank fail, on all ranks, with ``PeerLostError(how="killed")``. `shrink` treats the rank as
        proven dead: it does not reconnect to it, wait for it or count it. The report may be made after the group has
        failed, and while `shrink` waits. Reports about ranks that have ended, or are known to be dead, have no effect.

        **If the rank is alive**, it is excluded as soon as it receives the report: its groups fail, its `shrink` raises
        `GroupError`, and its messages are ignored. If two ranks report each other, at most one of them continues.
        Without a majority of the job, `shrink` waits up to a second for a reported rank whose connection is still open.
        So there are two groups only if the report is wrong and cannot reach the rank within that second.

        Args:
            rank: rank of this group.
            reason: text for the errors.

        Raises:
            TypeError, ValueError: `rank` is not another rank of this group, or `reason` is not a str.
            RuntimeError: called in another process, thread or event loop than the group's.

        Cost: a small message to every rank.
        """
        self._parts.lifetime.report_death(rank, reason)

    async def shutdown(self) -> None:
        """Close the group: wait at most `timeout` for started works, send goodbyes, release all resources.

        Idempotent. A peer whose operation needs this rank gets `PeerLostError` with ``how="left"``; other operations
        are not affected. Open groups that were split off from this group are closed first.

        Raises:
            RuntimeError: called in another process, thread or event loop than the group's.
        """
        await self._parts.lifetime.shutdown()

    aclose = shutdown
