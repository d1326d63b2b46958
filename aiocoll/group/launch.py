"""How a checked call becomes an operation in flight: number, start."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import numpy as np

from aiocoll.elements.buffers import Buffer, is_scalar, scalar, view
from aiocoll.elements.ops import ReduceOp
from aiocoll.engine.communicator import Communicator
from aiocoll.engine.operations.base import P2P, Operation, Signature
from aiocoll.engine.operations.plan import Executor, Plan
from aiocoll.errors import GroupClosedError
from aiocoll.group.calls import Call, Interceptor, Recorder, interceptor_in_scope, scope_here, scoped
from aiocoll.group.planning import Known, Planner, keep
from aiocoll.loading import loading
from aiocoll.options import GroupOptions, seconds
from aiocoll.unretrieved import UnretrievedFailures
from aiocoll.work import Work

if TYPE_CHECKING:
    from aiocoll.group.cuda.device_state import DeviceState

__all__ = ["Launcher", "Timeout"]

Timeout = float | timedelta | None
_ndarray = np.ndarray
_thread = threading.get_ident


class Launcher(Planner):
    """The part of a group that starts operations; the base of everything that offers calls.

    Args:
        member: this rank's membership.
        options: the group's options, resolved.

    Attributes:
        _devices: backend by device.
    """

    _devices: Mapping[str, str]

    def __init__(self, member: Communicator, options: GroupOptions) -> None:
        super().__init__(member)
        self._options = options
        # Kept at hand: what a call needs of the engine took ten look-ups.
        self._endpoint = member.endpoint
        self._runtime = member.endpoint.runtime
        self._loop = member.endpoint.loop
        self._is_running = self._loop.is_running
        self._run_quietly = member.endpoint.quiet.run
        self._enter = member.enter
        self._pid = os.getpid()
        self._closed = False
        #: Who takes all calls of the group that no block takes.
        self._interceptor: Interceptor | None = None
        self._scopes = 0
        #: Calls do not go straight to the engine: the group is closed, or there are takers.
        self._diverts = False
        self._failures = UnretrievedFailures(member.name, member.rank)
        #: What the group has on a CUDA device, from the first call on arrays there.
        self._device_state: DeviceState | None = None
        #: Plans by the kind of call and what a plain array is: dtype and shape.
        self._plans_by_array: dict[tuple[Any, ...], Known] = {}

    def _check(self) -> None:
        """Refuse a call that this group cannot take, before it takes a number."""
        # A loop that runs, in this thread, is the running one: which that is takes Python 3.11 a system call.
        if _thread() != self._runtime.thread or not self._is_running() or self._closed:
            self._check_owner()
        if self._member.cause is not None:
            self._member.raise_if_revoked()

    def _check_owner(self) -> None:
        """Refuse a call from where the group does not belong, or after it was closed."""
        self._check_place()
        if self._closed:
            raise self._closed_error()

    def _closed_error(self) -> GroupClosedError:
        return GroupClosedError(f"group {self._member.name!r} was closed by this rank", group=self._member.name)

    def _check_place(self) -> None:
        """Refuse a call from another process, thread or event loop: nothing of the group is made for that."""
        if self._pid != os.getpid():
            raise RuntimeError(
                f"group {self._member.name!r} was made in process {self._pid}; a forked child cannot use it: "
                "make a new group in the child, or start it with the 'spawn' method"
            )
        if asyncio._get_running_loop() is not self._loop:
            raise RuntimeError(
                f"group {self._member.name!r} belongs to another event loop (or there is none running here): from "
                "another thread let that loop make the call, `async def call(): return await pg.allreduce(x)`, by "
                "`asyncio.run_coroutine_threadsafe(call(), loop).result()`"
            )
        self._runtime.thread = _thread()

    def _on_one(
        self,
        kind: str,
        tensor: Any,
        op: ReduceOp | None,
        root: int | None,
        writable: bool,
        timeout: Timeout,
        key: str | None,
    ) -> Work[Any]:
        """Start a collective on one tensor or number, of the same count on all ranks.

        Nearly every call is on a plain array like one before it: then its plan, found by what the array is, stands for
        all that `view`, `_plan` and `_start` would find out again, in a quarter of their time.
        """
        # carray: contiguous, aligned and writeable.
        if type(tensor) is _ndarray and tensor.flags.carray:
            dtype, shape = tensor.dtype, tensor.shape
            call = kind, dtype, shape, id(op), root
            found = self._plans_by_array.get(call)
            # Of dtypes that are equal, one may be an alias that NumPy would convert.
            if found is not None and found[0].storage is dtype:
                flat = tensor if len(shape) == 1 else tensor.reshape(-1)
                return self._launch(found[0], [flat], shape, tensor, timeout, key)
        else:
            call = None
        buffer = (
            view(tensor, writable=writable) if type(tensor) is _ndarray or not is_scalar(tensor) else scalar(tensor)
        )
        plan = self._plan(kind, buffer.dtype, (buffer.count,), op=op, root=root)
        if call is not None:
            keep(self._plans_by_array, call, (plan, op))
        return self._start(plan, (buffer,), buffer, buffer.result, timeout, key)

    def _start(
        self,
        plan: Plan,
        buffers: Sequence[Buffer | None],
        main: Buffer | None,
        result: Any,
        timeout: Timeout,
        key: str | None,
        wholes: Sequence[Buffer] = (),
        executor: Executor | None = None,
    ) -> Work[Any]:
        """Start `plan`.

        Args:
            plan: what to do.
            buffers: numbered as the program's; None where this rank has none.
            main: the buffer that error messages describe.
            result: what the work yields.
            timeout: the call's.
            key: the call's.
            wholes: buffers of which `buffers` are parts; if staged, they are copied back in the end.
            executor: what carries it out, if not the plan's.
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
        return self._launch(plan, arrays, shape, result, timeout, key, unwrap, executor)

    def _launch(
        self,
        plan: Plan,
        arrays: list[Any],
        shape: tuple[int, ...],
        result: Any,
        timeout: Timeout,
        key: str | None,
        unwrap: Callable[[], Any] | None = None,
        executor: Executor | None = None,
    ) -> Work[Any]:
        """Start `plan` on flat arrays; `unwrap` makes the result then."""
        member = self._member
        limit = member.timeout if timeout is None else seconds(timeout, "timeout")
        # As in `_check`, without the call.
        if _thread() != self._runtime.thread or not self._is_running() or self._closed or member.cause is not None:
            self._check()
        if self._diverts:
            scope = scope_here()
            # As below, in a third of the time, where no other block is inside that of this group.
            if scope is not None and scope.group is self and scope.record is not None:
                return scope.record(plan, arrays, shape, result, limit, key, unwrap, executor)
            if (interceptor := self._interceptor_here()) is not None:
                if isinstance(interceptor, Recorder):
                    return interceptor.record(plan, arrays, shape, result, limit, key, unwrap, executor)
                return interceptor.take(self._call(plan, arrays, shape, result, limit, key, unwrap, executor))
        # The user's call is four frames away: the call of the group and what it goes through.
        if key is None:
            identity = seq = member.entered = member.entered + 1
        else:
            identity, seq = self._keyed_id(key)
        work: Work[Any] = Work(self._endpoint, plan.terms.op, seq, key, self, 4)
        work._shape, work._timeout, work._value = shape, limit, result
        if unwrap is not None:
            work._unwrap = unwrap
        make = plan.executor if executor is None else executor
        self._run_quietly(self._enter, make(member, identity, plan, arrays, work))
        return work

    def _on_device(self, plan: Plan, arrays: list[Any]) -> Executor:
        """Return what carries out `plan` on CUDA arrays."""
        self._check()
        with loading("CUDA arrays"):
            from aiocoll.group.cuda.on_device import on_device  # with all that a GPU needs

        return on_device(self, plan, arrays)

    # -- takers

    def _call(
        self,
        plan: Plan,
        arrays: list[Any],
        shape: tuple[int, ...],
        result: Any,
        limit: float,
        key: str | None,
        unwrap: Callable[[], Any] | None,
        executor: Executor | None,
    ) -> Call:
        """Return what a taker gets of a call on arrays."""
        make = plan.executor if executor is None else executor

        def operation(identity: int, work: Work[Any]) -> Operation:
            return make(self._member, identity, plan, arrays, work)

        known = plan if executor is None else None
        terms = plan.terms if isinstance(executor, type) else getattr(executor, "terms", plan.terms)
        on_device = None if terms.device == "cpu" else plan
        return Call(plan.terms.op, operation, limit, terms, key, shape, result, unwrap, 0, known, arrays, on_device)

    @contextlib.contextmanager
    def _scoped(self, interceptor: Interceptor) -> Iterator[None]:
        """Let `taker` take the calls on this group made in this block."""
        self._scopes += 1
        self._diverts = True
        try:
            with scoped(self, interceptor):
                yield
        finally:
            self._scopes -= 1
            self._diverts = self._closed or self._scopes > 0 or self._interceptor is not None

    def _interceptor_here(self) -> Interceptor | None:
        return (interceptor_in_scope(self) if self._scopes else None) or self._interceptor

    def _begin(
        self,
        op: str,
        make: Callable[[int, Work[Any]], Operation],
        limit: float,
        terms: Signature | None = None,
        key: str | None = None,
        shape: tuple[int, ...] = (),
        result: Any = None,
        unwrap: Callable[[], Any] | None = None,
        nbytes: int = 0,
        arrays: list[Any] | None = None,
    ) -> Work[Any]:
        """Start a call, or leave it to who takes it here; for the arguments, see `aiocoll.group.calls.Call`."""
        self._check()
        if self._diverts and (interceptor := self._interceptor_here()) is not None:
            return interceptor.take(Call(op, make, limit, terms, key, shape, result, unwrap, nbytes, None, arrays))
        # Of a message: its operation has an id of its own.
        identity, seq = (P2P, None) if terms is None else self._numbered(key)
        # The user's call is four frames away: the call of the group and what it goes through.
        work: Work[Any] = Work(self._endpoint, op, seq, key, self, 4)
        work._shape, work._timeout, work._value = shape, limit, result
        if unwrap is not None:
            work._unwrap = unwrap
        self._enter(make(identity, work))
        return work

    def _batched(self, arrays: Iterable[Any]) -> contextlib.AbstractContextManager[None]:
        """Let messages of these CUDA arrays, which start in the block, be one group of NCCL calls."""
        return contextlib.nullcontext() if self._device_state is None else self._device_state.messages.together(arrays)

    def _numbered(self, key: str | None) -> tuple[int, int]:
        """Take a number, or a count of `key`; return the operation id and that."""
        if key is None:
            identity = self._member.entered = self._member.entered + 1
            return identity, identity
        return self._keyed_id(key)

    def _keyed_id(self, key: Any) -> tuple[int, int]:
        """Take a count of `key`; return the operation id and the count."""
        if not isinstance(key, str):
            self._check_key(key)
        try:
            return self._member.keyed_id(key)
        except UnicodeEncodeError:
            self._check_key(key)
            raise

    def _check_key(self, key: Any) -> None:
        """Refuse what cannot be a key."""
        if not isinstance(key, str):
            raise TypeError(f"key must be a str or None, not {type(key).__name__}")
        try:
            key.encode()
        except UnicodeEncodeError:
            raise ValueError(f"key={key!r} is no text: it has a lone surrogate, which UTF-8 cannot hold") from None

    def _check_rank(self, rank: Any, name: str, *, other: bool = False) -> int:
        """Return `rank` if it is one of this group's (and, with `other`, not this one)."""
        number: int = rank
        if type(rank) is not int:  # in a plain number there is nothing to find out
            if isinstance(rank, bool) or not hasattr(rank, "__index__"):
                raise TypeError(f"{name} must be a rank (int), not {type(rank).__name__}")
            number = int(rank.__index__())
        if not 0 <= number < self._size:
            raise ValueError(
                f"{name}={number} is not a rank of group {self._member.name!r}: ranks are 0 to {self._size - 1}"
            )
        if other and number == self._rank:
            raise ValueError(f"{name}={number} is this rank itself; a rank does not send to itself")
        return number

    def _check_one_per_rank(self, values: Any, name: str, what: str) -> None:
        """Refuse `values` unless it is a sequence of one `what` per rank."""
        if not hasattr(values, "__len__") or not hasattr(values, "__getitem__") or isinstance(values, Mapping):
            given = "None" if values is None else type(values).__name__
        elif len(values) != self._size:
            given = str(len(values))
        else:
            return
        raise ValueError(f"{name} must hold one {what} per rank, {self._size} in all, not {given}")


def _unstage(staged: Sequence[Buffer], result: Any) -> Callable[[], Any]:
    """Copy staging buffers back; replace what they stand for in the result."""

    def unwrap() -> Any:
        made: Mapping[int, Any] = {id(buffer.result): buffer.finish() for buffer in staged}
        if isinstance(result, list):
            return [made.get(id(each), each) for each in result]
        return made.get(id(result), result)

    return unwrap
