"""How a checked call becomes an operation in flight: find its plan, number it, make its completion."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from aiocoll.completion import Completion
from aiocoll.elements.buffers import Buffer, is_scalar, scalar, view
from aiocoll.elements.ops import ReduceOp
from aiocoll.elements.pairs import paired
from aiocoll.engine.communicator import Communicator
from aiocoll.engine.group_spec import GroupSpec
from aiocoll.engine.operations.base import Operation
from aiocoll.engine.operations.composite import Make
from aiocoll.engine.operations.plan import Executor, Plan
from aiocoll.engine.operations.signature import P2P, Signature
from aiocoll.errors import GroupClosedError
from aiocoll.group.dispatch.call import (
    Call,
    Interceptor,
    Recorder,
    Unchecked,
    interceptor_in_scope,
    scope_here,
    scoped,
)
from aiocoll.group.dispatch.planner import Known, Planner, keep
from aiocoll.loading import loading
from aiocoll.numerals import to_int
from aiocoll.options import seconds
from aiocoll.unretrieved import UnretrievedFailures
from aiocoll.work import Work

if TYPE_CHECKING:
    from aiocoll.group.cuda.device_state import DeviceState
    from aiocoll.group.cuda.on_device import DeviceCalls

__all__ = ["PROC_NULL", "Dispatcher", "Timeout"]

#: In place of the other rank of a message: there is none, and the message ends at once. No rank has this number, and
#: what a program may compute by mistake, such as ``rank - 1`` on rank 0, is another one.
PROC_NULL: Final = -2

Timeout = float | timedelta | None
#: Takes the error in a call, the call's signature, the shape of its main array, its timeout and key.
TellWrong = Callable[[ValueError, Signature, tuple[int, ...], Timeout, str | None], Work[Any]]
_ndarray: Final = np.ndarray
_thread: Final = threading.get_ident


class Dispatcher:
    """Starts all calls of a group.

    Args:
        group: the `ProcessGroup`, to which completions refer.
        comm: this rank's part in the group.
        spec: what the group was made with.
        dry: the other ranks do not exist, and nothing is carried out.

    Attributes:
        comm, group, dry: as given.
        options: the group's, resolved.
        rank, size: of the group.
        planner: makes the plans of calls.
        interceptor: takes all calls outside of blocks; set by `intercept`.
        failures: of works whose outcome nobody has retrieved.
        closed: this rank has closed the group.
        in_steps: calls that have not ended, and start one operation after the other, of which the engine knows one.
        device_state: the group's state on a CUDA device, from the first call on arrays there.
    """

    def __init__(self, group: Any, comm: Communicator, spec: GroupSpec, *, dry: bool) -> None:
        self.group = group
        self.comm = comm
        self.dry = dry
        self.options = spec.options
        self.rank = comm.rank
        self.size = len(comm.ranks)
        self.planner = Planner(comm, dry=dry)
        self.interceptor: Interceptor | None = None
        self._tell_wrong: TellWrong | None = None
        self.failures = UnretrievedFailures(comm.name, comm.rank)
        self.closed = False
        self.in_steps: dict[Completion, None] = {}
        self.device_state: DeviceState | None = None
        self._device_calls: DeviceCalls | None = None
        self._nccl_only = spec.devices.get("cuda") == "nccl"
        # Direct references: what a call needs of the engine took ten look-ups.
        self.endpoint = comm.endpoint
        self.runtime = comm.endpoint.runtime
        self.loop = comm.endpoint.loop
        self._is_running = self.loop.is_running
        self._run_quietly = comm.endpoint.quiet.run
        self._enter = comm.enter
        self._pid = os.getpid()
        self._scopes = 0
        # Calls take the slow path: the group is closed, or there are interceptors.
        self._diverts = False
        # Plans by the kind of call and the dtype and shape of a plain array.
        self._plans_by_array: dict[tuple[Any, ...], Known] = {}

    # -- checks of the group

    def check(self) -> None:
        """Refuse a call that this group cannot accept, before it is numbered."""
        # A loop that runs, in this thread, is the running one: which that is takes Python 3.11 a system call.
        if _thread() != self.runtime.thread or not self._is_running() or self.closed or self.comm.barred:
            self.check_owner()
        if self.comm.cause is not None:
            self.comm.raise_if_revoked()

    def check_owner(self) -> None:
        """Refuse a call from a wrong process, thread or loop, or after the group was closed."""
        self.check_place()
        if self.closed:
            raise self.closed_error()

    def closed_error(self) -> GroupClosedError:
        """Return the error of a call after this rank has closed the group."""
        return GroupClosedError(f"group {self.comm.name!r} was closed by this rank", group=self.comm.name)

    def check_place(self) -> None:
        """Refuse a call from another process, thread or event loop."""
        if self._pid != os.getpid():
            raise RuntimeError(
                f"group {self.comm.name!r} was made in process {self._pid}; a forked child cannot use it: "
                "make a new group in the child, or start it with the 'spawn' method"
            )
        if asyncio._get_running_loop() is not self.loop:
            raise RuntimeError(
                f"group {self.comm.name!r} belongs to another event loop (or there is none running here): from "
                "another thread let that loop make the call, `async def call(): return await pg.allreduce(x)`, by "
                "`asyncio.run_coroutine_threadsafe(call(), loop).result()`"
            )
        if method := self.comm.hooks.calling:
            raise RuntimeError(
                f"{method} called group {self.comm.name!r}, which has called this hook: let a task of its own do that"
            )
        self.runtime.thread = _thread()

    def set_timeout(self, timeout: Timeout) -> None:
        """Set the group's default timeout for later calls."""
        if timeout is None:
            raise TypeError("timeout must be seconds or a timedelta, not None; math.inf means no limit")
        self.comm.set_timeout(seconds(timeout, "timeout"))

    def limit(self, timeout: Timeout) -> float:
        """Return how many seconds a call may take."""
        return self.comm.timeout if timeout is None else seconds(timeout, "timeout")

    # -- collectives on arrays

    def one(
        self,
        kind: str,
        tensor: Any,
        op: ReduceOp | None,
        root: Unchecked,
        writable: bool,
        timeout: Timeout,
        key: Unchecked,
    ) -> Work[Any]:
        """Start a collective on one tensor or number, of the same count on all ranks.

        Nearly every call is on a plain array like that of an earlier one: then the plan stored for such arrays replaces
        the work of `view`, the planner and `start`, in a quarter of their time.
        """
        # carray: contiguous, aligned and writeable.
        if type(tensor) is _ndarray and tensor.flags.carray:
            dtype, shape = tensor.dtype, tensor.shape
            call = kind, dtype, shape, id(op), root
            found = self._plans_by_array.get(call)
            # Of dtypes that are equal, one may be an alias that NumPy would convert.
            if found is not None and found[0].storage is dtype:
                flat = tensor if len(shape) == 1 else tensor.reshape(-1)
                return self.launch(found[0], [flat], shape, tensor, timeout, key)
        else:
            call = None
        buffer = (
            view(tensor, writable=writable) if type(tensor) is _ndarray or not is_scalar(tensor) else scalar(tensor)
        )
        if op is not None and buffer.dtype.kind == "record":
            buffer = paired(buffer, op, writable=writable)
        plan = self.planner.plan(kind, buffer.dtype, (buffer.count,), op=op, root=root)
        if call is not None:
            keep(self._plans_by_array, call, (plan, op))
        # As in `start`, without the call.
        arrays: list[Any] = [buffer.array]
        executor = None if type(arrays[0]) is _ndarray else self._on_device(plan, arrays)
        unwrap = None if buffer.writeback is None else _unstage((buffer,), buffer.result)
        return self.launch(plan, arrays, buffer.shape, buffer.result, timeout, key, unwrap, executor)

    def start(
        self,
        plan: Plan,
        buffers: Sequence[Buffer | None],
        main: Buffer | None,
        result: Any,
        timeout: Timeout,
        key: Unchecked,
        wholes: Sequence[Buffer] = (),
        executor: Executor | None = None,
    ) -> Work[Any]:
        """Start `plan`.

        Args:
            plan: what to do.
            buffers: numbered as the program's; None where this rank has none.
            main: the buffer that error messages describe.
            result: result of the work.
            timeout: the call's.
            key: the call's.
            wholes: buffers of which `buffers` are parts; if staged, they are copied back at the end.
            executor: carries it out in place of the plan's executor.
        """
        arrays: list[Any] = []
        staged = [whole for whole in wholes if whole.writeback is not None] if wholes else []
        for buffer in buffers:
            arrays.append(None if buffer is None else buffer.array)
            if buffer is not None and buffer.writeback is not None:
                staged.append(buffer)
        if arrays and type(arrays[-1]) is not _ndarray:  # of none of them the last one is missing
            executor = self._on_device(plan, arrays)
        shape = () if main is None else main.shape
        unwrap = _unstage(staged, result) if staged else None
        return self.launch(plan, arrays, shape, result, timeout, key, unwrap, executor)

    def launch(
        self,
        plan: Plan,
        arrays: list[Any],
        shape: tuple[int, ...],
        result: Any,
        timeout: Timeout,
        key: Unchecked,
        unwrap: Callable[[], Any] | None = None,
        executor: Executor | None = None,
    ) -> Work[Any]:
        """Start `plan` on flat arrays that were checked; then `unwrap` makes the result."""
        comm = self.comm
        limit = comm.timeout if timeout is None else seconds(timeout, "timeout")
        # As in `check`, without the call.
        if _thread() != self.runtime.thread or not self._is_running() or self.closed or comm.barred:
            self.check()
        if self._diverts:
            scope = scope_here()
            # As below, in a third of the time, where no other block is inside that of this group.
            if scope is not None and scope.group is self and scope.record is not None:
                return scope.record(plan, arrays, shape, result, limit, key, unwrap, executor)
            if (interceptor := self.interceptor_here()) is not None:
                if isinstance(interceptor, Recorder):
                    return interceptor.record(plan, arrays, shape, result, limit, key, unwrap, executor)
                return interceptor.take(self.call(plan, arrays, shape, result, limit, key, unwrap, executor))
        if key is None:
            identity = seq = comm.entered = comm.entered + 1
        else:
            identity, seq = self.keyed_id(key)
        completion = Completion(self.endpoint, plan.signature.op, seq, key, self)
        completion.shape, completion.timeout, completion.value = shape, limit, result
        if unwrap is not None:
            completion.unwrap = unwrap
        work: Work[Any] = Work(completion)
        make = plan.executor if executor is None else executor
        self._run_quietly(self._enter, make(comm, identity, plan, arrays, completion))
        return work

    def again(
        self, plan: Plan, arrays: list[Any], shape: tuple[int, ...], result: Any, timeout: float, key: Unchecked
    ) -> Work[Any]:
        """Start `plan` as before, of a call that has been checked."""
        return self.launch(plan, [*arrays], shape, result, timeout, key)

    def call(
        self,
        plan: Plan,
        arrays: list[Any],
        shape: tuple[int, ...],
        result: Any,
        limit: float,
        key: Unchecked,
        unwrap: Callable[[], Any] | None,
        executor: Executor | None,
    ) -> Call:
        """Return the `Call` that an interceptor gets for a call on arrays."""
        make = plan.executor if executor is None else executor

        def operation(identity: int, completion: Completion) -> Operation:
            return make(self.comm, identity, plan, arrays, completion)

        known = plan if executor is None else None
        signature = plan.signature if isinstance(executor, type) else getattr(executor, "signature", plan.signature)
        on_device = None if signature.device == "cpu" else plan
        return Call(
            plan.signature.op, operation, limit, signature, key, shape, result, unwrap, 0, known, arrays, on_device
        )

    # -- any other call

    def begin(self, call: Call) -> Work[Any]:
        """Start a call, or pass it to an interceptor."""
        self.check()
        if self._diverts and (interceptor := self.interceptor_here()) is not None:
            return interceptor.take(call)
        # Not for a message: its operation has its own id.
        identity, seq = (P2P, None) if call.signature is None else self.numbered(call.key)
        completion = Completion(self.endpoint, call.op, seq, call.key, self)
        call.expect(completion)
        work: Work[Any] = Work(completion)
        self._enter(call.make(identity, completion))
        return work

    def begin_again(self, call: Call) -> Work[Any]:
        """Start a message as before."""
        return self.begin(call)

    def enter(self, operation: Operation) -> None:
        """Put an operation in flight."""
        self._run_quietly(self._enter, operation)

    # -- interceptors

    def intercept(self, interceptor: Interceptor, tell_wrong: TellWrong | None = None) -> None:
        """Let `interceptor` take all calls of the group that no block takes.

        Args:
            interceptor: who.
            tell_wrong: gets calls whose lists do not have exactly one entry per rank; by default, these raise here.
        """
        self.interceptor = interceptor
        self._tell_wrong = tell_wrong
        self._diverts = True

    def refuse(
        self, wrong: ValueError, signature: Signature, shape: tuple[int, ...], timeout: Timeout, key: Unchecked
    ) -> Work[Any]:
        """Raise the error of a call, or report it to all ranks."""
        if self._tell_wrong is None or self.block_here() is not None:
            raise wrong
        return self._tell_wrong(wrong, signature, shape, timeout, key)

    @contextlib.contextmanager
    def scoped(self, interceptor: Interceptor) -> Iterator[None]:
        """Let `interceptor` take the calls on this group made in this block."""
        self._scopes += 1
        self._diverts = True
        try:
            with scoped(self, interceptor):
                yield
        finally:
            self._scopes -= 1
            self._diverts = self.closed or self._scopes > 0 or self.interceptor is not None

    def interceptor_here(self) -> Interceptor | None:
        """Return the interceptor of calls here: that of a block, or the group's own."""
        return self.block_here() or self.interceptor

    def block_here(self) -> Interceptor | None:
        """Return the interceptor of calls here, if it is that of a block."""
        return interceptor_in_scope(self) if self._scopes else None

    def close(self) -> None:
        """Accept no more calls."""
        self.closed = self._diverts = True

    # -- numbers and keys

    def numbered(self, key: Unchecked) -> tuple[int, int]:
        """Take the next number, or the next count of `key`; return the operation id and the number."""
        if key is None:
            identity = self.comm.entered = self.comm.entered + 1
            return identity, identity
        return self.keyed_id(key)

    def keyed_id(self, key: Unchecked) -> tuple[int, int]:
        """Take the next count of `key`; return the operation id and the count."""
        if not isinstance(key, str):
            self.check_key(key)
        try:
            return self.comm.keyed_id(key)
        except UnicodeEncodeError:
            self.check_key(key)
            raise

    def check_key(self, key: Unchecked) -> None:
        """Refuse an invalid key."""
        if not isinstance(key, str):
            raise TypeError(f"key must be a str or None, not {type(key).__name__}")
        try:
            key.encode()
        except UnicodeEncodeError:
            raise ValueError(f"key={key!r} is no text: it has a lone surrogate, which UTF-8 cannot hold") from None

    # -- ranks

    def check_rank(self, rank: Unchecked, name: str, *, null: bool = False) -> int:
        """Return `rank` if it is one of this group's, or, with `null`, `PROC_NULL`."""
        if type(rank) is not int:  # in a plain number there is nothing to find out
            rank = to_int(rank, name, "a rank (int)")
        number: int = rank
        if not 0 <= number < self.size and not (null and number == PROC_NULL):
            what = f"{name}={number} is not a rank" if number != PROC_NULL else f"{name} is PROC_NULL, which is no rank"
            raise ValueError(f"{what} of group {self.comm.name!r}: ranks are 0 to {self.size - 1}")
        return number

    def miscounted(self, values: Any, name: str, what: str) -> ValueError | None:
        """Return the error of `values` unless it is a sequence of one `what` per rank."""
        if not hasattr(values, "__len__") or not hasattr(values, "__getitem__") or isinstance(values, Mapping):
            given = "None" if values is None else type(values).__name__
        elif len(values) != self.size:
            given = str(len(values))
        else:
            return None
        return ValueError(f"{name} needs exactly one {what} per rank: {self.size}, not {given}")

    # -- CUDA arrays

    def on_device(self, arrays: Sequence[Any]) -> DeviceCalls:
        """Return what makes the operations of calls on these arrays."""
        self.check()
        calls = self._device_calls
        if calls is not None:
            calls.check(arrays)
            return calls
        with loading("CUDA arrays"):
            from aiocoll.group.cuda.on_device import DeviceCalls  # with all that a GPU needs

        calls = DeviceCalls.first(self.comm, arrays, forced=self._nccl_only, ahead=self.options.verify == "behind")
        self._device_calls, self.device_state = calls, calls.state
        return calls

    def _on_device(self, plan: Plan, arrays: list[Any]) -> Executor:
        """Return what carries out `plan` on CUDA arrays."""
        if self.dry:
            return plan.executor
        calls = self._device_calls
        is_current = False
        if calls is None:
            calls = self.on_device(arrays)
        else:  # the group is checked as the call is launched
            is_current = calls.check(arrays)
        return calls.executor(plan, arrays, is_current and not self._diverts)

    def as_one(self, calls: Sequence[Call], ordered: bool) -> Make:
        """Return what makes one operation of several collectives on CUDA arrays, which have been checked.

        Args:
            calls: the collectives.
            ordered: it starts at its place in the order of the program.
        """
        from aiocoll.group.cuda.batched import Member

        made = self._device_calls
        assert made is not None
        members = [
            Member(call.op, call.shape, call.result, made.executor(call.on_device, call.arrays or (), False))
            for call in calls
            if call.on_device is not None
        ]
        return made.batched(members, ordered)

    def batched(self, arrays: Iterable[Any]) -> contextlib.AbstractContextManager[None]:
        """Let messages of these CUDA arrays, which start in the block, be one group of NCCL calls."""
        return contextlib.nullcontext() if self.device_state is None else self.device_state.messages.together(arrays)


def _unstage(staged: Sequence[Buffer], result: Any) -> Callable[[], Any]:
    """Copy staging buffers back; replace what they stand for in the result."""

    def unwrap() -> Any:
        made: Mapping[int, Any] = {id(buffer.result): buffer.finish() for buffer in staged}
        if isinstance(result, list):
            return [made.get(id(each), each) for each in result]
        return made.get(id(result), result)

    return unwrap
