"""Interceptors, which may take calls before the engine does, and the blocks in which they do.

Most calls go straight from the group to the engine. An *interceptor* gets them first: that of a block around the call,
such as `ProcessGroup.coalescing`, or the group's own, such as that of ``debug="detail"``. It starts calls later, in
another way, or not at all, and returns the work.
"""

from __future__ import annotations

import contextlib
import contextvars
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, Protocol

from aiocoll.completion import Completion
from aiocoll.engine.operations.base import Operation
from aiocoll.engine.operations.composite import Make
from aiocoll.engine.operations.signature import Signature
from aiocoll.group.prepared_call import PreparedCall
from aiocoll.work import Work

__all__ = ["Interceptor", "Wrapper", "interceptor_in_scope", "scope_here", "scoped"]


class Interceptor(Protocol):
    """Takes calls in place of the engine.

    Attributes:
        moves_nothing: what it takes ends at once, without a look at the arrays.
        records: it keeps calls, to start them later.
        native: what records plain calls in C; None: nothing does.
    """

    moves_nothing: bool
    records: bool
    native: Any

    def take(self, call: PreparedCall) -> Work[Any]:
        """Return the work of `call`; called once all its arguments are checked."""


class Wrapper(ABC):
    """An interceptor that makes the operations of collectives children of its own."""

    moves_nothing = False
    records = False
    native = None

    @abstractmethod
    def take(self, call: PreparedCall) -> Work[Any]:
        """As in `Interceptor`."""

    @abstractmethod
    def wrap(self, identity: int, signature: Signature, make: Make, completion: Completion) -> Operation:
        """Return what is entered in place of the operation that `make` makes."""


class _Scope:
    """A block around calls; after its end, it does not take the calls of tasks that outlive it.

    Attributes:
        group: the group whose calls it takes.
        interceptor: takes them; None after the end of the block.
        outer: the block around this one.
    """

    __slots__ = ("group", "interceptor", "outer")

    def __init__(self, group: object, interceptor: Interceptor, outer: _Scope | None) -> None:
        self.group = group
        self.interceptor: Interceptor | None = interceptor
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
        scope.interceptor = None
        _scope.reset(token)


def interceptor_in_scope(group: object) -> Interceptor | None:
    """Return the interceptor of the calls on `group` here; None if no block has one."""
    scope = _scope.get()
    while scope is not None and (scope.group is not group or scope.interceptor is None):
        scope = scope.outer
    return None if scope is None else scope.interceptor
