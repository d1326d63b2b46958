"""How a checked call becomes an operation in flight: plan, number, start."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import numpy as np

from aiocoll.algorithms.scale import scaled
from aiocoll.algorithms.schedule import Program
from aiocoll.algorithms.select import build, choose
from aiocoll.buffers import Buffer, is_scalar, scalar, view
from aiocoll.dtypes import DType
from aiocoll.engine.exchange import Exchange
from aiocoll.engine.membership import Membership
from aiocoll.engine.oneshot import OneShot
from aiocoll.engine.operation import Terms
from aiocoll.engine.plan import Executor, Plan
from aiocoll.engine.relay import MOST_PIECES, Relay
from aiocoll.errors import GroupClosedError
from aiocoll.ops import Kernel, ReduceOp, kernel
from aiocoll.options import GroupOptions, seconds
from aiocoll.unseen import Failures
from aiocoll.work import Work

__all__ = ["Launcher", "Timeout"]

Timeout = float | timedelta | None
#: A plan, and the op of its call, which has to live as long as its identity names the plan.
Known = tuple[Plan, ReduceOp | None]

#: Ranks up to which the lanes' steps, two per rank, are worth it for what is just too large for one step.
CIRCLE = 4
#: Ranks up to which each tells all others that it has come to a barrier; telling one takes half a microsecond.
FLAT = 16
#: Plans kept per group: a program has few call sites, and a plan of many ranks has some hundred actions.
PLANS = 256

_REDUCING = frozenset({"allreduce", "reduce", "reduce_scatter", "scan", "exscan"})

_ndarray = np.ndarray
_thread = threading.get_ident


class Launcher:
    """The part of a group that starts operations; the base of everything that offers calls.

    Args:
        member: this rank's membership.
        options: the group's options, resolved.
    """

    def __init__(self, member: Membership, options: GroupOptions) -> None:
        self._member = member
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
        self._rank = member.rank
        self._size = len(member.ranks)
        self._failures = Failures(member.name, member.rank)
        self._plans: dict[tuple[Any, ...], Known] = {}
        #: The same plans by the kind of call and what a plain array is: dtype and shape.
        self._alike: dict[tuple[Any, ...], Known] = {}

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
            raise GroupClosedError(f"group {self._member.name!r} was closed by this rank", group=self._member.name)

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
                "another thread use asyncio.run_coroutine_threadsafe(coroutine, loop_of_the_group)"
            )
        self._runtime.thread = _thread()

    def _plan(
        self,
        kind: str,
        dtype: DType | None,
        sizes: tuple[Any, ...],
        *,
        op: ReduceOp | None = None,
        root: int | None = None,
        agreed: tuple[int, ...] | None = None,
    ) -> Plan:
        """Return the plan of a call, made once for calls alike.

        Args:
            kind: the collective, as `algorithms.select` calls it.
            dtype: of the elements; None for a barrier.
            sizes: counts in elements, as `algorithms.select.build` takes them.
            op: how it reduces.
            root: its root.
            agreed: the counts all ranks know alike; by default all of `sizes`.
        """
        # By identity: hashing an op costs more than the rest of the look-up, and the entry keeps the op alive.
        call = (kind, dtype, sizes, id(op), root)
        found = self._plans.get(call)
        if found is None:
            found = _keep(self._plans, call, (self._make_plan(kind, dtype, sizes, op, root, agreed), op))
        return found[0]

    def _make_plan(
        self,
        kind: str,
        dtype: DType | None,
        sizes: tuple[Any, ...],
        op: ReduceOp | None,
        root: int | None,
        agreed: tuple[int, ...] | None,
    ) -> Plan:
        # First of all, since it checks the op.
        made = kernel(op, dtype, self._size) if kind in _REDUCING and dtype is not None else None  # type: ignore[arg-type]
        counts = _flat(sizes)
        terms = Terms(
            kind.upper(),
            None if dtype is None else dtype.name,
            counts if agreed is None else agreed,
            root,
            None if op is None else op.wire_name,
            *self._ends(kind, sizes, root),
        )
        nbytes = (sum(sizes[0]) if sizes and isinstance(sizes[0], tuple) else sum(sizes)) * (
            0 if dtype is None else dtype.itemsize
        )
        if kind == "allreduce" and self._size == 1 and made is not None and made.prescale is None:
            # What a rank alone gives is what it gets; folding it into itself took as long as the rest of the call.
            return Plan(terms, Program((), (), "alone"), dtype, made, Exchange)
        algorithm = choose(
            kind,
            nbytes,
            self._size,
            ordered=made is not None and made.ordered,
            portable=made is None or made.portable,
            tuning=self._member.tuning,
            hosts=self._member.hosts,
        )
        if kind == "barrier" and 1 < self._size <= FLAT and self._member.piece_nbytes:
            return Plan(terms, Program((), (), "oneshot"), dtype, made, OneShot)
        if kind == "allreduce" and made is not None and nbytes and made.prescale is None:
            executor = self._shares(algorithm, nbytes, made)
            if executor is not None:
                return Plan(terms, Program((), (), executor.__name__.lower()), dtype, made, executor)
        program = build(kind, algorithm, self._rank, self._size, *sizes, root=root or 0, hosts=self._member.hosts)
        if made is not None and made.prescale is not None:
            program = self._scaled(program, kind, sizes, root)
        return Plan(terms, program, dtype, made, Exchange)

    def _shares(self, algorithm: str, nbytes: int, made: Kernel) -> type[OneShot] | type[Relay] | None:
        """Return the executor through shared memory that suits an allreduce, if there is one."""
        piece = self._member.piece_nbytes
        if not piece or self._size == 1:
            return None
        if made.portable and nbytes * (self._size - 1) <= piece and nbytes <= piece // 4:
            return OneShot
        few = self._size <= CIRCLE or algorithm == "ring"
        pieces = 2 * (self._size - 1) * (nbytes // (self._size * piece) + 2)
        return Relay if few and not made.ordered and pieces < MOST_PIECES else None

    def _ends(self, kind: str, sizes: tuple[Any, ...], root: int | None) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return how many elements go to each rank and come from each, where only the ends of a message know."""
        if kind == "alltoall":
            return tuple(sizes[0]), tuple(sizes[1])
        if kind not in ("gather", "scatter"):
            return (), ()
        counts: tuple[int, ...] = sizes[0]
        if self._rank == root:
            return ((), counts) if kind == "gather" else (counts, ())
        own = tuple(counts[self._rank] if rank == root else 0 for rank in range(self._size))
        return (own, ()) if kind == "gather" else ((), own)

    def _scaled(self, program: Program, kind: str, sizes: tuple[Any, ...], root: int | None) -> Program:
        if kind == "reduce_scatter":
            return scaled(program, dict(enumerate(sizes[0])), self._size + 1, in_place=False)
        if kind == "exscan":
            # The tensor of rank 0 is not an output.
            return scaled(program, {0: sizes[0]}, 1, in_place=self._rank > 0) if self._size > 1 else program
        return scaled(program, {0: sizes[0]}, 1, in_place=root is None or root == self._rank)

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
            found = self._alike.get(call)
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
            _keep(self._alike, call, (plan, op))
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
        # The user's call is four frames away: the call of the group and what it goes through.
        if key is None:
            identity = seq = member.entered = member.entered + 1
        else:
            identity, seq = self._keyed_id(key)
        work: Work[Any] = Work(self._endpoint, plan.terms.op, seq, key, self, 4)
        if unwrap is not None:
            work._unwrap = unwrap
        make = plan.executor if executor is None else executor
        operation = make(member, identity, plan, arrays, shape, result, work, limit)
        self._run_quietly(self._enter, operation)
        return work

    def _work(self, op: str, key: str | None) -> tuple[Work[Any], int]:
        """Take a number, or a count of `key`; return the work and its operation id."""
        if key is None:
            identity = seq = self._member.entered = self._member.entered + 1
        else:
            identity, seq = self._keyed_id(key)
        return Work(self._member.endpoint, op, seq, key, self, 4), identity

    def _keyed_id(self, key: Any) -> tuple[int, int]:
        """Take a count of `key`; return the operation id and the count."""
        if not isinstance(key, str):
            raise TypeError(f"key must be a str or None, not {type(key).__name__}")
        try:
            return self._member.keyed_id(key)
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


def _keep(plans: dict[tuple[Any, ...], Known], call: tuple[Any, ...], found: Known) -> Known:
    if len(plans) >= PLANS:
        plans.clear()
    plans[call] = found
    return found


def _flat(sizes: tuple[Any, ...]) -> tuple[int, ...]:
    flat: list[int] = []
    for size in sizes:
        flat.extend(size if isinstance(size, tuple) else (size,))
    return tuple(flat)


def _unstage(staged: Sequence[Buffer], result: Any) -> Callable[[], Any]:
    """Copy staging buffers back; replace what they stand for in the result."""

    def unwrap() -> Any:
        made: Mapping[int, Any] = {id(buffer.result): buffer.finish() for buffer in staged}
        if isinstance(result, list):
            return [made.get(id(each), each) for each in result]
        return made.get(id(result), result)

    return unwrap
