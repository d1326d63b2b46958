"""Functions of the program's that are called when operations start and end: for counters, traces and the like.

    class Slow:
        def on_end(self, info):
            if info.seconds > 1:
                print(f"{info.op} of {info.group} took {info.seconds:.1f} s")

    handle = aiocoll.hooks.add_hook(Slow())  # for all groups; pg.add_hook(Slow()) for one
    handle.remove()

A hook has a method `on_start(info)`, `on_end(info)`, or both; they are plain functions, called on the event loop of the
group, one at a time, so they should be short. Every start is followed by exactly one end, whatever becomes of the
operation; who is added later hears of neither. A hook that raises is removed, and the log says so once. A hook cannot
call the group whose operation it is told of.

Cost: nothing is made where there is no hook; two attribute look-ups per operation.
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
    """One operation: what one call has started on this rank.

    Attributes:
        group: name of the group.
        rank: this rank, in the group.
        op: name of the operation in capitals.
        kind: "collective", or "message" between two ranks.
        key: of a keyed collective.
        seq: its number, or the count of its key; None of a message.
        nbytes: of the caller's main array; None where only the other end knows.
        dtype: of the elements; None where there are none.
        seconds: from the start to the end; None at the start.
        algorithm: what carries it out; None where there is only one way, or that is not known yet.
        transport: what carries the bytes: "memory", "unix", "tcp", "shm", or several with "+" between; "" where there
            is no link yet.
        error: what it failed with; None of one that has not, and at the start.
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
    """What removes a hook.

    Args:
        remove: removes it.
    """

    def __init__(self, remove: Callable[[], None]) -> None:
        self._remove = remove

    def remove(self) -> None:
        """Call the hook no more, not even for the end of what has started. Idempotent."""
        self._remove()


class Hooks:
    """The hooks of one group: its own, and those of all groups.

    Args:
        group: its name.
        rank: this rank.
        on_change: called when there are other hooks.

    Attributes:
        active: all of them; one list, of which native code reads the length.
        started: of the operations in flight, the hooks that were told of their start.
        calling: the method of a hook that is being called.
    """

    def __init__(self, group: str, rank: int, on_change: Callable[[], None]) -> None:
        self.active = list(_everywhere.values())
        self.started: dict[Any, tuple[Hook, ...]] = {}
        self.calling = ""
        self._group = group
        self._rank = rank
        self._on_change = on_change
        self._own: dict[int, Hook] = {}
        _groups.add(self)

    def add(self, hook: Hook) -> HookHandle:
        """Call `hook` for the operations of this group."""
        _check(hook)
        self._own[id(hook)] = hook
        self.refresh()

        def remove() -> None:
            self._own.pop(id(hook), None)
            self.refresh()

        return HookHandle(remove)

    def refresh(self) -> None:
        """Take note that hooks were added or removed."""
        self.active[:] = {**_everywhere, **self._own}.values()
        self._on_change()

    def start(self, operation: Any, info: Callable[[], OperationInfo]) -> None:
        """Tell all hooks that an operation starts; `info` makes what they are told."""
        self.started[operation] = self._call("on_start", tuple(self.active), info)

    def end(self, operation: Any, info: Callable[[], OperationInfo]) -> None:
        """Tell those that know of its start that an operation has ended."""
        active = set(map(id, self.active))
        hooks = tuple(hook for hook in self.started.pop(operation, ()) if id(hook) in active)
        self._call("on_end", hooks, info)

    def _call(self, name: str, hooks: tuple[Hook, ...], make: Callable[[], OperationInfo]) -> tuple[Hook, ...]:
        """Call a method of the hooks that have it; return the hooks that have not raised."""
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
        _everywhere.pop(id(hook), None)
        _refresh_all()


#: Hooks of all groups, by identity.
_everywhere: dict[int, Hook] = {}
_groups: weakref.WeakSet[Hooks] = weakref.WeakSet()


def add_hook(hook: Hook) -> HookHandle:
    """Call `hook` for the operations of all groups of this process, those that are made later too.

    Args:
        hook: an object with `on_start(info)`, `on_end(info)`, or both; see `OperationInfo`.

    Returns:
        What removes it again.

    Raises:
        TypeError: it has neither method.
    """
    _check(hook)
    _everywhere[id(hook)] = hook
    _refresh_all()

    def remove() -> None:
        _everywhere.pop(id(hook), None)
        _refresh_all()

    return HookHandle(remove)


def _refresh_all() -> None:
    for hooks in list(_groups):
        hooks.refresh()


def _check(hook: Hook) -> None:
    if not callable(getattr(hook, "on_start", None)) and not callable(getattr(hook, "on_end", None)):
        raise TypeError(f"hook must have on_start(info) or on_end(info), not {type(hook).__name__}")
