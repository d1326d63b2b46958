"""Dispatcher of a group: it finds a checked call's plan, takes a sequence number, and starts the operation."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any, Final

import numpy as np

from aiocoll.algorithms.spec import spec_of
from aiocoll.completion import Completion
from aiocoll.elements.buffers import Buffer, operand
from aiocoll.elements.ops import ReduceOp
from aiocoll.elements.pairs import pair_buffer
from aiocoll.engine.communicator import BARRED, DIVERTS, ENTERED, Communicator
from aiocoll.engine.group_spec import GroupSpec
from aiocoll.engine.native_calls import native_calls
from aiocoll.engine.operations.base import Operation
from aiocoll.engine.operations.composite import Make
from aiocoll.engine.operations.plan import Plan
from aiocoll.engine.operations.signature import P2P, Signature
from aiocoll.errors import GroupClosedError
from aiocoll.group.dispatch.call_cache import CallCache
from aiocoll.group.dispatch.devices import DeviceCalls, devices
from aiocoll.group.dispatch.interceptor import Interceptor, interceptor_in_scope, scope_here, scoped
from aiocoll.group.dispatch.planner import Planner
from aiocoll.group.prepared_call import FactoryCall, PlannedCall, PreparedCall
from aiocoll.numerals import to_int
from aiocoll.options import seconds
from aiocoll.unretrieved import UnretrievedFailures
from aiocoll.work import Work

__all__ = ["PROC_NULL", "Dispatcher", "Timeout"]

#: A rank number for "no rank". A message to or from `PROC_NULL` ends immediately and is not sent. The number is not -1,
#: which a program may compute by mistake, as ``rank - 1`` on rank 0.
PROC_NULL: Final = -2

Timeout = float | timedelta | None
#: A function that reports a wrong call to all ranks. Arguments: the error, the call's signature, the shape of its main
#: array, its timeout and key.
ReportWrongCall = Callable[[ValueError, Signature, tuple[int, ...], Timeout, str | None], Work[Any]]
_ndarray: Final = np.ndarray
_thread: Final = threading.get_ident


class Dispatcher:
    """The component of a group that starts all calls.

    An unchecked `root`, `rank` or `key` from the user is annotated `Any`.

    Args:
        group: the `ProcessGroup`; completions refer to it.
        comm: this rank's communicator of the group.
        spec: name and options of the group.
        dry: whether this is a dry run: the other ranks do not exist, and nothing is carried out.

    Attributes:
        comm, group, dry: as given.
        options: resolved options of the group.
        rank, size: this rank, and the number of ranks.
        planner: makes the plans of calls.
        plans: finds the plans of calls that equal earlier ones.
        interceptor: takes all calls outside of blocks; set by `intercept`.
        failures: failures of works whose outcome was never retrieved.
        closed: whether this rank has closed the group.
        stepped_calls: pending calls of several consecutive operations; the engine knows only the current operation.
        native: the calls that the accelerator carries out; None without the accelerator.
        device_calls: the group's calls on this rank's device; None before the first call on device arrays.
    """

    def __init__(self, group: Any, comm: Communicator, spec: GroupSpec, *, dry: bool) -> None:
        self.group = group
        self.comm = comm
        self.dry = dry
        self.options = spec.options
        self.rank = comm.rank
        self.size = len(comm.ranks)
        self.planner = Planner(comm, dry=dry)
        self.plans = CallCache(self.planner, comm.rank, len(comm.ranks))
        self.interceptor: Interceptor | None = None
        self._report_wrong_call: ReportWrongCall | None = None
        self.failures = UnretrievedFailures(comm.name, comm.rank)
        self.closed = False
        self.stepped_calls: dict[Completion, None] = {}
        self.device_calls: DeviceCalls | None = None
        self._backends = spec.devices
        # Cached: reaching these through `comm.endpoint` took ten attribute lookups per call.
        self.endpoint = comm.endpoint
        self.runtime = comm.endpoint.runtime
        self.loop = comm.endpoint.loop
        self._is_running = self.loop.is_running
        self._run_quietly = comm.endpoint.quiet.run
        self._enter = comm.enter
        self._pid = os.getpid()
        self._known = self.plans.known
        self.native = None if dry else native_calls(comm, self, Work, scope_here)
        self._scopes = 0

    # -- checks of the group

    def check(self) -> None:
        """Raise an error if the group cannot accept a call now. Called before the call gets a sequence number."""
        # `is_running` is enough in the loop's own thread. On Python 3.11, finding the running loop takes a system call.
        if _thread() != self.runtime.thread or not self._is_running() or self.closed or self.comm.gate[BARRED]:
            self.check_owner()
        if self.comm.cause is not None:
            self.comm.raise_if_revoked()

    def check_owner(self) -> None:
        """Raise an error if the caller is in the wrong process, thread or event loop, or if the group is closed."""
        self.check_caller()
        if self.closed:
            raise self.closed_error()

    def closed_error(self) -> GroupClosedError:
        """Return the error for a call on a group that this rank has closed."""
        return GroupClosedError(f"group {self.comm.name!r} was closed by this rank", group=self.comm.name)

    def check_caller(self) -> None:
        """Raise an error if the caller is in the wrong process, thread or event loop, or in a hook."""
        if self._pid != os.getpid():
            raise RuntimeError(
                f"group {self.comm.name!r} was made in process {self._pid}; a forked child cannot use it: "
                "make a new group in the child, or start it with the 'spawn' method"
            )
        if asyncio._get_running_loop() is not self.loop:
            raise RuntimeError(
                f"group {self.comm.name!r} belongs to another event loop (or no loop runs in this thread); from "
                "another thread, make the call in that loop: define `async def call(): return await pg.allreduce(x)` "
                "and run `asyncio.run_coroutine_threadsafe(call(), loop).result()`"
            )
        if method := self.comm.hooks.calling:
            raise RuntimeError(
                f"{method} called group {self.comm.name!r}, but hooks must not call their group; start a task that does"
            )
        self.runtime.thread = _thread()

    def set_timeout(self, timeout: Timeout) -> None:
        """Set the group's default timeout for later calls."""
        if timeout is None:
            raise TypeError("timeout must be seconds or a timedelta, not None; math.inf means no limit")
        self.comm.set_timeout(seconds(timeout, "timeout"))

    def limit(self, timeout: Timeout) -> float:
        """Return the timeout of a call in seconds. None stands for the group's default."""
        return self.comm.timeout if timeout is None else seconds(timeout, "timeout")

    # -- collectives on arrays

    def one(
        self,
        kind: str,
        tensor: Any,
        op: ReduceOp | None,
        root: Any,
        writable: bool,
        timeout: Timeout,
        key: Any,
    ) -> Work[Any]:
        """Start a collective on one array or number that has the same number of elements on all ranks."""
        # hot path: inlined from `CallCache.one`
        if type(tensor) is _ndarray and tensor.flags.carray:
            dtype, shape = tensor.dtype, tensor.shape
            plan = self._known.get((kind, dtype, id(op), root, shape)) or self.plans.one(kind, tensor, op, root)
            if plan is not None and plan.storage is dtype:
                flat = tensor if len(shape) == 1 else tensor.reshape(-1)
                limit = self.comm.timeout if timeout is None else seconds(timeout, "timeout")
                return self.start_plan(plan, [flat], shape, tensor, limit, key)
        buffer = operand(tensor, writable=writable)
        if op is not None and buffer.dtype.kind == "record":
            buffer = pair_buffer(buffer, op, writable=writable)
        plan = self.plans.find_for_buffer(kind, buffer, op, root)
        return self.start(self.make_call(plan, (buffer,), buffer, buffer.result, timeout, key))

    def make_call(
        self,
        plan: Plan,
        buffers: Sequence[Buffer | None],
        main: Buffer | None,
        result: Any,
        timeout: Timeout,
        key: Any,
        wholes: Sequence[Buffer] = (),
    ) -> PreparedCall:
        """Return a prepared call that carries out a plan on checked buffers.

        Args:
            plan: plan of the call.
            buffers: numbered as in the plan's program; None where this rank has no buffer.
            main: the buffer that error messages describe.
            result: result of the work.
            timeout: timeout of the call.
            key: key of the call.
            wholes: buffers that contain `buffers` as parts; if staged, they are copied back at the end.
        """
        arrays: list[Any] = []
        staged = [whole for whole in wholes if whole.writeback is not None] if wholes else []
        for buffer in buffers:
            arrays.append(None if buffer is None else buffer.array)
            if buffer is not None and buffer.writeback is not None:
                staged.append(buffer)
        unwrap = _unstage(staged, result) if staged else None
        shape = () if main is None else main.shape
        call = PlannedCall(plan, arrays, shape, result, self.limit(timeout), key, unwrap)
        # Test the last array, which is never None, to find out whether the arrays are on a device.
        return call if not arrays or type(arrays[-1]) is _ndarray else self._on_device(call)

    # -- any call

    def start(self, call: PreparedCall) -> Work[Any]:
        """Start a prepared call, or pass it to an interceptor."""
        if type(call) is PlannedCall:
            return self.start_plan(call.plan, call.arrays, call.shape, call.result, call.limit, call.key, call.unwrap)
        self.check()
        if (interceptor := self.interceptor_here()) is not None:
            return interceptor.take(call)
        # A message takes no sequence number, because its operation has its own id.
        identity, seq = (P2P, None) if call.signature is None else self.numbered(call.key)
        completion = Completion(self.endpoint, call.op, seq, call.key, self)
        call.expect(completion)
        work: Work[Any] = Work(completion)
        operation = call.operation(self.comm, identity, completion)
        if isinstance(call, PlannedCall):
            self._run_quietly(self._enter, operation)
        else:
            self._enter(operation)
        return work

    def start_plan(
        self,
        plan: Plan,
        arrays: list[Any],
        shape: tuple[int, ...],
        result: Any,
        limit: float,
        key: Any,
        unwrap: Callable[[], Any] | None = None,
    ) -> Work[Any]:
        """Start a call with a plan. Its `PlannedCall` is made only if an interceptor takes the call."""
        comm = self.comm
        # hot path: inlined from `check`, and from `interceptor_here` for the case that this group's block is innermost
        if _thread() != self.runtime.thread or not self._is_running() or self.closed or comm.gate[BARRED]:
            self.check()
        if comm.gate[DIVERTS]:
            scope = scope_here()
            interceptor = None if scope is None or scope.group is not self else scope.interceptor
            if interceptor is not None or (interceptor := self.interceptor_here()) is not None:
                return interceptor.take(PlannedCall(plan, arrays, shape, result, limit, key, unwrap))
        started: Any = None
        if (
            self.native is not None
            and unwrap is None
            and (limit == comm.default_timeout or limit >= self.endpoint.watch.least_timeout)
        ):
            started = self.native.start(plan, arrays, shape, result, limit, key)
            if type(started) is Work:
                return started
        identity, seq = self.numbered(key) if started is None else started
        completion = Completion(self.endpoint, plan.signature.op, seq, key, self)
        completion.shape, completion.timeout, completion.value = shape, limit, result
        if unwrap is not None:
            completion.unwrap = unwrap
        work: Work[Any] = Work(completion)
        self._run_quietly(self._enter, plan.executor(comm, identity, plan, arrays, completion))
        return work

    def enter(self, operation: Operation) -> None:
        """Register an operation as in flight, and start its sends and receives."""
        self._run_quietly(self._enter, operation)

    # -- interceptors

    def intercept(self, interceptor: Interceptor, report_wrong_call: ReportWrongCall | None = None) -> None:
        """Pass all calls of the group to `interceptor`, except calls inside a block.

        Args:
            interceptor: takes the calls.
            report_wrong_call: starts calls whose lists do not have exactly one entry per rank; None: they raise.
        """
        self.interceptor = interceptor
        self._report_wrong_call = report_wrong_call
        self.comm.gate[DIVERTS] = True

    def refuse(
        self, wrong: ValueError, signature: Signature, shape: tuple[int, ...], timeout: Timeout, key: Any
    ) -> Work[Any]:
        """Raise the error of a wrong call; with ``debug="detail"``, report the error to all ranks instead."""
        if self._report_wrong_call is None or self.block_here() is not None:
            raise wrong
        return self._report_wrong_call(wrong, signature, shape, timeout, key)

    @contextlib.contextmanager
    def scoped(self, interceptor: Interceptor) -> Iterator[None]:
        """Pass the calls made on this group in a ``with`` block to `interceptor`."""
        self._scopes += 1
        self.comm.gate[DIVERTS] = True
        try:
            with scoped(self, interceptor):
                yield
        finally:
            self._scopes -= 1
            self.comm.gate[DIVERTS] = self.closed or self._scopes > 0 or self.interceptor is not None

    def interceptor_here(self) -> Interceptor | None:
        """Return the interceptor for calls in the current context: the block's interceptor, or else the group's."""
        return self.block_here() or self.interceptor

    def block_here(self) -> Interceptor | None:
        """Return the interceptor of the block around the current code; None outside of blocks."""
        return interceptor_in_scope(self) if self._scopes else None

    def check_block(self, kind: str) -> None:
        """Raise an error if the current block records calls, but cannot record this kind of call."""
        block = self.block_here()
        if block is not None and block.records and not spec_of(kind).recordable:
            raise RuntimeError(f"a coalescing block cannot record {kind}(), which takes several steps; call it outside")

    def close(self) -> None:
        """Reject all later calls, because the group is closed."""
        self.closed = True
        self.comm.gate[DIVERTS] = True

    # -- numbers and keys

    def numbered(self, key: Any) -> tuple[int, int]:
        """Allocate a call's sequence number, or its count for `key`; return the operation id and this number."""
        comm = self.comm
        if key is None:
            identity = comm.gate[ENTERED] + 1
            comm.gate[ENTERED] = identity
            return identity, identity
        if not isinstance(key, str):
            self.check_key(key)
        try:
            return comm.keyed_id(key)
        except UnicodeEncodeError:
            self.check_key(key)
            raise

    def check_key(self, key: Any) -> None:
        """Raise an error if a call's key is invalid."""
        if not isinstance(key, str):
            raise TypeError(f"key must be a str or None, not {type(key).__name__}")
        try:
            key.encode()
        except UnicodeEncodeError:
            raise ValueError(
                f"key={key!r} is not valid text: it has a lone surrogate, which UTF-8 cannot encode"
            ) from None

    # -- ranks

    def check_rank(self, rank: Any, name: str, *, null: bool = False) -> int:
        """Return `rank` as an int; raise an error unless it is a rank of this group or, with `null`, `PROC_NULL`."""
        if type(rank) is not int:  # a plain int needs no conversion
            rank = to_int(rank, name, "a rank (int)")
        number: int = rank
        if not 0 <= number < self.size and not (null and number == PROC_NULL):
            what = f"{name}={number} is not a rank" if number != PROC_NULL else f"{name} is PROC_NULL, which is no rank"
            raise ValueError(f"{what} of group {self.comm.name!r}: ranks are 0 to {self.size - 1}")
        return number

    def count_error(self, values: Any, name: str, what: str) -> ValueError | None:
        """Return an error if `values` is not a sequence with one `what` per rank, otherwise None."""
        if not hasattr(values, "__len__") or not hasattr(values, "__getitem__") or isinstance(values, Mapping):
            given = "None" if values is None else type(values).__name__
        elif len(values) != self.size:
            given = str(len(values))
        else:
            return None
        return ValueError(f"{name} needs exactly one {what} per rank: {self.size}, not {given}")

    # -- arrays on devices

    def on_device(self, arrays: Sequence[Any]) -> DeviceCalls:
        """Check device arrays; return the group's `DeviceCalls` for their device."""
        self.check()
        if self.device_calls is None:
            return self._first_on_device(arrays)
        self._check_arrays(self.device_calls, arrays)
        return self.device_calls

    def _on_device(self, call: PlannedCall) -> PreparedCall:
        """Return the prepared call that carries out a planned call on device arrays."""
        if self.dry:
            plan, arrays = call.plan, call.arrays

            def make(identity: int, completion: Completion) -> Operation:
                return plan.executor(self.comm, identity, plan, arrays, completion)

            return FactoryCall(plan.signature, make, call.limit, call.key, call.shape, call.result)
        calls = self.device_calls
        is_current = False
        if calls is None:
            calls = self.on_device(call.arrays)
        else:  # the state of the group is checked when the call starts
            is_current = self._check_arrays(calls, call.arrays)
        return calls.call(call, is_current and not self.comm.gate[DIVERTS])

    def _first_on_device(self, arrays: Sequence[Any]) -> DeviceCalls:
        kind = arrays[-1].kind
        backend = devices.get(kind)
        forced = self._backends.get(kind) == backend.library
        self.device_calls = backend.calls(self.comm, arrays, forced=forced, ahead=self.options.verify == "behind")
        return self.device_calls

    def _check_arrays(self, calls: DeviceCalls, arrays: Sequence[Any]) -> bool:
        """Raise an error if the group cannot use these arrays; return whether they are on the current device."""
        last = arrays[-1]  # the last array is never None, and all arrays are on one kind of device
        if last.kind != calls.kind:
            raise ValueError(
                f"group {self.comm.name!r} works on {devices.get(calls.kind).label} devices, where its first device "
                f"arrays were, but the arrays of this call are on {last.label} devices: make a group for each kind "
                "of device"
            )
        return calls.check(arrays)

    def make_batch(self, calls: Sequence[PreparedCall], ordered: bool) -> Make:
        """Return a function that makes one operation of several collectives on checked device arrays.

        Args:
            calls: the collectives.
            ordered: whether the operation starts at its place in the program order.
        """
        assert self.device_calls is not None
        return self.device_calls.batched(calls, ordered)

    def batched(self, arrays: Iterable[Any]) -> contextlib.AbstractContextManager[None]:
        """Return a context that combines the messages of these device arrays into one library call."""
        return contextlib.nullcontext() if self.device_calls is None else self.device_calls.together(arrays)


def _unstage(staged: Sequence[Buffer], result: Any) -> Callable[[], Any]:
    """Return a function that copies staging buffers to the user's arrays, and returns `result` with these arrays."""

    def unwrap() -> Any:
        made: Mapping[int, Any] = {id(buffer.result): buffer.finish() for buffer in staged}
        if isinstance(result, list):
            return [made.get(id(each), each) for each in result]
        return made.get(id(result), result)

    return unwrap
