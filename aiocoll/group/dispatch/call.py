"""A checked call that has not started, and who may take it before the engine does.

Most calls go straight from the group to the engine. An *interceptor* gets them first: a block around them, such as
`ProcessGroup.coalescing`, or the group's own, such as that of ``debug="detail"``. It starts them later, in another way,
or not at all, and returns the work.
"""

from __future__ import annotations

import contextlib
import contextvars
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

from aiocoll.engine.operations.base import Operation
from aiocoll.engine.operations.composite import Make
from aiocoll.engine.operations.plan import Executor, Plan
from aiocoll.engine.operations.signature import Signature
from aiocoll.work import Work

__all__ = ["Call", "Interceptor", "Recorder", "Wrapper", "interceptor_in_scope", "scope_here", "scoped"]


class Call(NamedTuple):
    """What a group was asked to do.

    Attributes:
        op: what the work is called.
        make: makes the operation, given its id and the work.
        timeout: seconds the operation may take.
        signature: what the ranks must agree on; None of a message between two ranks, which takes no number either.
        key: of a keyed collective.
        shape: of the caller's main array.
        result: what the work yields.
        unwrap: makes the result in the end, if it is not `result`.
        nbytes: of a message between two ranks, or all that this rank sends of objects.
        plan: of a collective on arrays that its plan's executor carries out.
        arrays: flat, numbered as the plan's buffers; None where this rank has none. Of a message, its CUDA array.
        on_device: the plan of a collective on CUDA arrays, in place of `plan`.
        ends: of a message: "src" or "dst", the other rank (None: any), and the tag.
    """

    op: str
    make: Make
    timeout: float
    signature: Signature | None = None
    key: str | None = None
    shape: tuple[int, ...] = ()
    result: Any = None
    unwrap: Callable[[], Any] | None = None
    nbytes: int = 0
    plan: Plan | None = None
    arrays: list[Any] | None = None
    on_device: Plan | None = None
    ends: tuple[str, int | None, int] | None = None

    def expect(self, work: Work[Any]) -> None:
        """Let `work` end as the call does."""
        work._expect(self.shape, self.timeout, self.result)
        work._unwrap = self.unwrap
        if self.ends is not None:
            work._name_ends(self.ends)


class Interceptor(Protocol):
    """Takes calls in place of the engine."""

    def take(self, call: Call) -> Work[Any]:
        """Return the work of `call`; called once all its arguments are checked."""


class Recorder(ABC):
    """An interceptor that also takes planned calls as they are, without the time that making a `Call` takes."""

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
        key: str | None,
        unwrap: Callable[[], Any] | None,
        executor: Executor | None,
    ) -> Work[Any]:
        """Return the work of a call on arrays; the arguments are the fields of its `Call`, and what it runs with."""


class Wrapper(ABC):
    """An interceptor that lets the operations of collectives be children of others."""

    @abstractmethod
    def take(self, call: Call) -> Work[Any]:
        """As in `Interceptor`."""

    @abstractmethod
    def wrap(self, identity: int, signature: Signature, make: Make, work: Work[Any]) -> Operation:
        """Return what is entered in place of the operation that `make` makes."""


class _Scope:
    """A block around calls; once it is over, it takes none of tasks that outlive it.

    Attributes:
        group: on which group.
        taker: who takes them; None once it is over.
        record: the taker's, if it is a `Recorder`.
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
    """Let `taker` take the calls on `group` made in this block, and in tasks started in it, as long as it lasts."""
    scope = _Scope(group, interceptor, _scope.get())
    token = _scope.set(scope)
    try:
        yield
    finally:
        scope.interceptor = scope.record = None
        _scope.reset(token)


def interceptor_in_scope(group: object) -> Interceptor | None:
    """Return who takes calls on `group` here; None if no block does."""
    scope = _scope.get()
    while scope is not None and (scope.group is not group or scope.interceptor is None):
        scope = scope.outer
    return None if scope is None else scope.interceptor
