"""Interceptors: objects that take calls instead of the engine, and the blocks in which they are active.

Most calls go directly from the group to the engine. A call with an *interceptor* goes to the interceptor instead. An
interceptor belongs to a block around the call, such as `ProcessGroup.coalescing`, or to the whole group, as with
``debug="detail"``. It returns the work, and starts the call later, in another way, or not at all.
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
    """An object that takes calls instead of the engine.

    Attributes:
        moves_nothing: whether calls end at once, without an access to the arrays.
        records: whether the interceptor keeps calls, to start them later.
        native: the recorder of plain calls in C, or None.
    """

    moves_nothing: bool
    records: bool
    native: Any

    def take(self, call: PreparedCall) -> Work[Any]:
        """Take `call`, whose arguments were checked, instead of the engine; return its work."""


class Wrapper(ABC):
    """An interceptor that wraps each collective: its own operation runs the collective as a child operation."""

    moves_nothing = False
    records = False
    native = None

    @abstractmethod
    def take(self, call: PreparedCall) -> Work[Any]:
        """Take `call`, whose arguments were checked, instead of the engine; return its work."""

    @abstractmethod
    def wrap(self, identity: int, signature: Signature, make: Make, completion: Completion) -> Operation:
        """Return an operation that does the interceptor's work, then starts the collective that `make` returns."""


class _Scope:
    """A block whose calls are intercepted. After its end, tasks started in it make calls as usual.

    Attributes:
        group: the group whose calls are intercepted.
        interceptor: takes the calls; None after the end of the block.
        outer: the enclosing block, or None.
    """

    __slots__ = ("group", "interceptor", "outer")

    def __init__(self, group: object, interceptor: Interceptor, outer: _Scope | None) -> None:
        self.group = group
        self.interceptor: Interceptor | None = interceptor
        self.outer = outer


_scope: contextvars.ContextVar[_Scope | None] = contextvars.ContextVar("aiocoll_scope", default=None)
#: Returns the innermost open block, of any group.
scope_here = _scope.get


@contextlib.contextmanager
def scoped(group: object, interceptor: Interceptor) -> Iterator[None]:
    """Pass the calls on `group` in this ``with`` block, and in tasks started there, to `interceptor`."""
    scope = _Scope(group, interceptor, _scope.get())
    token = _scope.set(scope)
    try:
        yield
    finally:
        scope.interceptor = None
        _scope.reset(token)


def interceptor_in_scope(group: object) -> Interceptor | None:
    """Return the interceptor of the innermost open block around a call on `group`; None if there is none."""
    scope = _scope.get()
    while scope is not None and (scope.group is not group or scope.interceptor is None):
        scope = scope.outer
    return None if scope is None else scope.interceptor
