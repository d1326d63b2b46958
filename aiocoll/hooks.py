"""Hooks: user callbacks at the start and end of operations, such as counters or traces.

    class Slow:
        def on_end(self, info):
            if info.seconds > 1:
                print(f"{info.op} of {info.group} took {info.seconds:.1f} s")

    handle = aiocoll.hooks.add_hook(Slow())  # for all groups; pg.add_hook(Slow()) for one
    handle.remove()

A hook has a method `on_start(info)`, `on_end(info)`, or both. They are plain functions, called on the event loop of the
group, one at a time, so they should be short. Every start is followed by exactly one end, whatever the outcome of the
operation. A hook that is added in between receives neither. A hook that raises is removed, with one log record. A hook
cannot call the group whose operation is being reported.

Cost: without hooks, two attribute lookups per operation and no allocation.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

from aiocoll.log import logger
from aiocoll.user_code import contain

__all__ = ["Hook", "HookHandle", "Hooks", "OperationInfo", "add_hook"]

#: An object with `on_start(info)`, `on_end(info)`, or both.
Hook = Any


class OperationInfo(NamedTuple):
    """The description of an operation on this rank that hooks receive.

    Attributes:
        group: name of the group.
        rank: this rank, in the group.
        op: name of the operation in capitals.
        kind: "collective", or "message" for an operation between two ranks.
        key: the key of a keyed collective; None without one.
        seq: its sequence number, or the count of its key; None for a message.
        nbytes: size of the caller's main array in bytes; None where only the other end knows it.
        dtype: name of the dtype; None for operations without elements.
        seconds: duration in seconds; None at the start.
        algorithm: name of the algorithm; None if there is only one, or if it is not known yet.
        transport: transport of the data: "memory", "unix", "tcp", "shm", or several joined by "+". "" if no link was
            opened.
        error: the error of a failed operation; None at the start and after success.
    """

    group: str
    rank: int
    op: str
    kind: str
    key: str | None
    seq: int | None
    nbytes: int | None
    dtype: str | None
    seconds: float | None
    algorithm: str | None
    transport: str
    error: BaseException | None


class HookHandle:
    """A handle that removes a hook.

    Args:
        remove: function that removes the hook.
    """

    def __init__(self, remove: Callable[[], None]) -> None:
        self._remove = remove

    def remove(self) -> None:
        """Remove the hook; it is not called any more, even at the end of operations in flight. Idempotent."""
        self._remove()


class Hooks:
    """The hooks that one group calls: the hooks added to it, and the hooks added for all groups.

    Args:
        group: name of the group.
        rank: this rank.
        on_change: called after hooks were added or removed.

    Attributes:
        active: all hooks of the group. Native code reads the length of this list object.
        started: by operation in flight, the hooks that received its start.
        calling: name of the hook method that is being called; "" outside of calls.
    """

    def __init__(self, group: str, rank: int, on_change: Callable[[], None]) -> None:
        self.active = list(_global_hooks.values())
        self.started: dict[Any, tuple[Hook, ...]] = {}
        self.calling = ""
        self._group = group
        self._rank = rank
        self._on_change = on_change
        self._own: dict[int, Hook] = {}
        _groups.add(self)

    def add(self, hook: Hook) -> HookHandle:
        """Add a hook for the operations of this group."""
        _check(hook)
        self._own[id(hook)] = hook
        self.refresh()

        def remove() -> None:
            self._own.pop(id(hook), None)
            self.refresh()

        return HookHandle(remove)

    def refresh(self) -> None:
        """Update the list of hooks to call, after hooks were added or removed."""
        self.active[:] = {**_global_hooks, **self._own}.values()
        self._on_change()

    def start(self, operation: Any, info: Callable[[], OperationInfo]) -> None:
        """Call `on_start(info())` of all hooks."""
        self.started[operation] = self._call("on_start", tuple(self.active), info)

    def end(self, operation: Any, info: Callable[[], OperationInfo]) -> None:
        """Call `on_end(info())` of the hooks that received the start of this operation."""
        active = set(map(id, self.active))
        hooks = tuple(hook for hook in self.started.pop(operation, ()) if id(hook) in active)
        self._call("on_end", hooks, info)

    def _call(self, name: str, hooks: tuple[Hook, ...], make: Callable[[], OperationInfo]) -> tuple[Hook, ...]:
        """Call the method `name` of all hooks that have it; return the hooks that did not raise."""
        info = None
        kept = []
        for hook in hooks:
            self.calling = f"{type(hook).__name__}.{name}"
            try:
                function = getattr(hook, name, None)
                if function is not None:
                    info = make() if info is None else info
                    function(info)
            except BaseException as error:
                self._drop(hook, self.calling)
                contain(error)
                continue
            finally:
                self.calling = ""
            kept.append(hook)
        return tuple(kept)

    def _drop(self, hook: Hook, method: str) -> None:
        logger.exception(
            "group %r, rank %d: %s raised; the hook is removed",
            self._group,
            self._rank,
            method,
            extra={"group": self._group, "rank": self._rank},
        )
        self._own.pop(id(hook), None)
        _global_hooks.pop(id(hook), None)
        _refresh_all()


#: Hooks for all groups, by the hook's `id()`.
_global_hooks: dict[int, Hook] = {}
_groups: weakref.WeakSet[Hooks] = weakref.WeakSet()


def add_hook(hook: Hook) -> HookHandle:
    """Add a hook for the operations of all groups of this process, including groups made later.

    Args:
        hook: an object with `on_start(info)`, `on_end(info)`, or both; see `OperationInfo`.

    Returns:
        A handle that removes the hook.

    Raises:
        TypeError: the object has neither method.
    """
    _check(hook)
    _global_hooks[id(hook)] = hook
    _refresh_all()

    def remove() -> None:
        _global_hooks.pop(id(hook), None)
        _refresh_all()

    return HookHandle(remove)


def _refresh_all() -> None:
    for hooks in list(_groups):
        hooks.refresh()


def _check(hook: Hook) -> None:
    if not callable(getattr(hook, "on_start", None)) and not callable(getattr(hook, "on_end", None)):
        raise TypeError(f"hook must have on_start(info) or on_end(info), not {type(hook).__name__}")
