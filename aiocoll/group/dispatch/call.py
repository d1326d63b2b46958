"""A checked call that has not started, and the interceptors that may take it before the engine does.

Most calls go straight from the group to the engine. An *interceptor* gets them first: that of a block around the call,
such as `ProcessGroup.coalescing`, or the group's own, such as that of ``debug="detail"``. It starts calls later, in
another way, or not at all, and returns the work.
"""

from __future__ import annotations

import contextlib
import contextvars
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

from aiocoll.completion import Completion
from aiocoll.engine.operations.base import Operation
from aiocoll.engine.operations.composite import Make
from aiocoll.engine.operations.plan import Executor, Plan
from aiocoll.engine.operations.signature import Signature
from aiocoll.work import Work

__all__ = ["Call", "Interceptor", "Recorder", "Unchecked", "Wrapper", "interceptor_in_scope", "scope_here", "scoped"]

#: An argument of the user's that may be anything: what is compiled would refuse another type before it is looked at.
Unchecked = Any


class Call(NamedTuple):
    """A call on a group.

    Attributes:
        op: name of the work.
        make: makes the operation from its id and the completion.
        timeout: seconds the operation may take.
        signature: what the ranks must agree on; None for a message between two ranks, which is not numbered either.
        key: of a keyed collective.
        shape: of the caller's main array.
        result: result of the work.
        unwrap: makes the result at the end, if it is not `result`.
        nbytes: size of a message between two ranks, or of all objects that this rank sends.
        plan: of a collective on host arrays that its plan's executor carries out.
        arrays: flat, numbered as the plan's buffers; None where this rank has none. Of a message, its CUDA array.
        on_device: the plan of a collective on CUDA arrays, in place of `plan`.
        ends: for a message: "src" or "dst", the other rank (None: any), and the tag.
    """

    op: str
    make: Make
    timeout: float
    signature: Signature | None = None
    key: Unchecked = None
    shape: tuple[int, ...] = ()
    result: Any = None
    unwrap: Callable[[], Any] | None = None
    nbytes: int = 0
    plan: Plan | None = None
    arrays: list[Any] | None = None
    on_device: Plan | None = None
    ends: tuple[str, int | None, int] | None = None

    def expect(self, completion: Completion) -> None:
        """Give `completion` the result and timeout of the call."""
        completion.expect(self.shape, self.timeout, self.result)
        completion.unwrap, completion.ends = self.unwrap, self.ends


class Interceptor(Protocol):
    """Takes calls in place of the engine.

    Attributes:
        moves_nothing: what it takes ends at once, without a look at the arrays.
    """

    moves_nothing: bool

    def take(self, call: Call) -> Work[Any]:
        """Return the work of `call`; called once all its arguments are checked."""


class Recorder(ABC):
    """An interceptor that also takes planned calls directly, without the cost of a `Call`."""

    moves_nothing = False

    @abstractmethod
    def take(self, call: Call) -> Work[Any]:
        """As in `Interceptor`."""

    @abstractmethod
    def record(
        self,
        plan: Plan,
        arrays: list[Any],
        shape: tuple[int, ...],
        result: Any,
        timeout: float,
        key: Unchecked,
        unwrap: Callable[[], Any] | None,
        executor: Executor | None,
    ) -> Work[Any]:
        """Return the work of a call on arrays; the arguments are the fields of its `Call`, and what it runs with."""


class Wrapper(ABC):
    """An interceptor that makes the operations of collectives children of its own."""

    moves_nothing = False

    @abstractmethod
    def take(self, call: Call) -> Work[Any]:
        """As in `Interceptor`."""

    @abstractmethod
    def wrap(self, identity: int, signature: Signature, make: Make, completion: Completion) -> Operation:
        """Return what is entered in place of the operation that `make` makes."""


class _Scope:
    """A block around calls; after its end, it does not take the calls of tasks that outlive it.

    Attributes:
        group: the group whose calls it takes.
        interceptor: takes them; None after the end of the block.
        record: that of the interceptor, if it is a `Recorder`.
        outer: the block around this one.
    """

    __slots__ = ("group", "interceptor", "outer", "record")

    def __init__(self, group: object, interceptor: Interceptor, outer: _Scope | None) -> None:
        self.group = group
        self.interceptor: Interceptor | None = interceptor
        self.record = interceptor.record if isinstance(interceptor, Recorder) else None
        self.outer = outer


_scope: contextvars.ContextVar[_Scope | None] = contextvars.ContextVar("aiocoll_scope", default=None)
#: Returns the innermost block of any group.
scope_here = _scope.get


@contextlib.contextmanager
def scoped(group: object, interceptor: Interceptor) -> Iterator[None]:
    """Let `interceptor` take the calls on `group` in this block, and in tasks started in it, until the block ends."""
    scope = _Scope(group, interceptor, _scope.get())
    token = _scope.set(scope)
    try:
        yield
    finally:
        scope.interceptor = scope.record = None
        _scope.reset(token)


def interceptor_in_scope(group: object) -> Interceptor | None:
    """Return the interceptor of the calls on `group` here; None if no block has one."""
    scope = _scope.get()
    while scope is not None and (scope.group is not group or scope.interceptor is None):
        scope = scope.outer
    return None if scope is None else scope.interceptor
