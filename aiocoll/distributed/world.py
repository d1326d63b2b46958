"""Default group: the group of the context, else of the event loop, else of the process."""

from __future__ import annotations

import asyncio
import os
import warnings
from datetime import timedelta
from typing import Any, Final
from weakref import WeakKeyDictionary, WeakSet

from aiocoll.group.current import CURRENT
from aiocoll.group.dispatch.dispatcher import Timeout
from aiocoll.group.parts import parts_of
from aiocoll.group.process_group import ProcessGroup
from aiocoll.numerals import to_int
from aiocoll.options import GroupOptions
from aiocoll.rendezvous.new_group import new_group as meet
from aiocoll.store import Store
from aiocoll.work import Work, finished_work

__all__ = [
    "Group",
    "GroupMember",
    "check_group",
    "default_group",
    "default_pg_timeout",
    "destroy_process_group",
    "device_name",
    "find_default_group",
    "finish_outside",
    "group",
    "init_process_group",
    "is_available",
    "is_initialized",
    "is_outside",
    "is_torchelastic_launched",
    "member_of",
    "replace_default_group",
    "require_member",
]

#: Type of `group` arguments: a group, None for the default one, or `GroupMember.NON_GROUP_MEMBER`.
Group = ProcessGroup | int | None

default_pg_timeout = timedelta(seconds=300)

_NON_GROUP_MEMBER: Final = -100
#: The first group that `init_process_group` has made on each event loop. Adding an entry removes the entries of closed
#: loops.
_first_groups: dict[asyncio.AbstractEventLoop, ProcessGroup] = {}
#: All groups that `init_process_group` has made, one per rank of this process.
_groups: WeakSet[ProcessGroup] = WeakSet()
#: For each group that `shrink_group` has closed: the group that replaces it.
_successors: WeakKeyDictionary[ProcessGroup, ProcessGroup] = WeakKeyDictionary()


class _World(type):
    @property
    def WORLD(cls) -> ProcessGroup | None:
        """The default group, or None; assigning a group makes it the default group of this context."""
        return find_default_group()

    @WORLD.setter
    def WORLD(cls, pg: ProcessGroup | None) -> None:
        CURRENT.set(pg)


class group(metaclass=_World):
    """The namespace of ``group.WORLD``, the default group, as in torch.distributed."""


class GroupMember(metaclass=_World):
    """The namespace of ``GroupMember.NON_GROUP_MEMBER``, as in torch.distributed.

    Attributes:
        NON_GROUP_MEMBER: returned instead of a group to ranks that are not in it.
    """

    NON_GROUP_MEMBER: Final = _NON_GROUP_MEMBER


def find_default_group() -> ProcessGroup | None:
    """Return the default group; None if there is no open default group.

    Raises:
        RuntimeError: this thread runs no event loop, and the process has several ranks.
    """
    pg = CURRENT.get()
    if pg is None:
        loop = asyncio._get_running_loop()
        pg = _find_in_process() if loop is None else _first_groups.get(loop)
    return _find_open_successor(pg)


def _find_in_process() -> ProcessGroup | None:
    """Return the default group of this process's only rank; None if this process has no rank."""
    ranks = {pg for made in list(_groups) if (pg := _find_open_successor(made)) is not None}
    if len(ranks) > 1:
        raise RuntimeError(
            f"{len(ranks)} ranks in this process have a default group, and this thread runs none of their event loops: "
            "pass group=, or use asyncio.to_thread, whose thread inherits the default group"
        )
    return next(iter(ranks), None)


def _find_open_successor(pg: ProcessGroup | None) -> ProcessGroup | None:
    """Return `pg` if it is open, else the open group that has replaced `pg`; None if all are closed."""
    while pg is not None and _is_closed(pg, otherwise=False):
        pg = _successors.get(pg)
    return pg


def _is_closed(pg: ProcessGroup | None, *, otherwise: bool) -> bool:
    """Return whether this rank has closed a group; return `otherwise` for a group of a third-party class."""
    return parts_of(pg).dispatcher.closed if isinstance(pg, ProcessGroup) else otherwise


def default_group() -> ProcessGroup:
    """Return the default group.

    Raises:
        ValueError: there is no default group.
    """
    pg = find_default_group()
    if pg is None:
        raise ValueError(
            "there is no open default group in this context; call `await init_process_group()` first, or use "
            "`with aiocoll.process_group(pg):`"
        )
    return pg


def is_outside(group: Group) -> bool:
    """Return whether `group` is `GroupMember.NON_GROUP_MEMBER`: this rank is not in the group."""
    return isinstance(group, int) and group == _NON_GROUP_MEMBER


def member_of(group: Group, op: str) -> ProcessGroup | None:
    """Return the group that the call `op` uses; warn and return None if this rank is not in the group."""
    if group is None:
        return default_group()
    if is_outside(group):
        pg = find_default_group()
        who = "this process" if pg is None else f"rank {pg.rank()}"
        warnings.warn(f"{op} was called by {who}, which is not in the given group: the call does nothing", stacklevel=3)
        return None
    return check_group(group)


def check_group(group: Any) -> ProcessGroup:
    """Return `group` if it is a process group; raise TypeError for a coroutine or any other object."""
    if not hasattr(group, "allreduce"):
        hint = "; await the call that makes the group" if hasattr(group, "__await__") else ""
        raise TypeError(f"group must be a ProcessGroup or None, not {type(group).__name__}{hint}")
    pg: ProcessGroup = group
    return pg


def require_member(group: Group) -> ProcessGroup:
    """Return the group that a call uses; raise if this rank is not in the group."""
    if is_outside(group):
        raise ValueError("group: this rank is not in the given group; only its members may make this call")
    return default_group() if group is None else check_group(group)


def finish_outside(op: str, result: Any = None) -> Work[Any]:
    """Return a finished work with `result`, for a call by a rank outside the group."""
    pg = default_group()
    parts = parts_of(pg)
    return finished_work(parts.comm.endpoint, op, parts.dispatcher, result)


def replace_default_group(old: ProcessGroup, new: ProcessGroup) -> None:
    """Make `new` the default group of every context and loop whose default group is the closed group `old`."""
    _successors[old] = new
    if old in _groups:
        _groups.add(new)


async def init_process_group(
    backend: str | None = None,
    init_method: str | None = None,
    timeout: Timeout = None,
    world_size: int = -1,
    rank: int = -1,
    store: Store | None = None,
    group_name: str = "",
    pg_options: GroupOptions | None = None,
    device_id: Any = None,
) -> None:
    """Meet the other ranks, and make the group of all ranks the default group.

    It becomes the default group of this context: of this task and of tasks that it starts. The first group made on an
    event loop is also the default of all other tasks of the loop. So two tasks may be two ranks. Threads without an
    event loop have the default group of the process's only rank; if it has several ranks, calls there raise
    `RuntimeError`.

    Args:
        backend: see `aiocoll.new_group`.
        init_method: ``env://`` (the default), ``tcp://host:port`` or ``file:///path``; not together with `store`.
        timeout: seconds for the ranks to meet, and the default seconds for an operation; None means 300.
        world_size: number of ranks; -1 takes it from the environment.
        rank: this rank; -1 takes it from the environment. Required with `store`.
        store: a store that all ranks share.
        group_name: the same on all ranks; "" is numbered in the order of the calls.
        pg_options: see `aiocoll.GroupOptions`.
        device_id: a name such as "cpu" or "cuda:0", the number of a CUDA device, or None.

    Raises:
        ValueError: this context has a default group already, or there is a `store` and no `rank`.
        Exception: see `aiocoll.new_group`.
    """
    present = CURRENT.get()
    if present is not None and find_default_group() is not None:
        raise ValueError(
            f"the default group {present.group_name!r} exists already; call destroy_process_group() before another "
            "init_process_group()"
        )
    if store is not None and init_method is None and rank == -1:
        raise ValueError("rank is missing; give rank= with store=, as torch.distributed requires it")
    pg = await meet(
        backend,
        init_method=init_method,
        store=store,
        rank=None if rank == -1 else rank,
        world_size=None if world_size == -1 else world_size,
        timeout=default_pg_timeout if timeout is None else timeout,
        device=device_name(device_id),
        name=group_name or None,
        options=pg_options,
    )
    CURRENT.set(pg)
    _groups.add(pg)
    for loop in [loop for loop in _first_groups if loop.is_closed()]:
        del _first_groups[loop]
    loop = asyncio.get_running_loop()
    if _is_closed(_first_groups.get(loop), otherwise=True):
        _first_groups[loop] = pg


async def destroy_process_group(group: Group = None) -> None:
    """Close a group, by default the default group, and all groups split off from it.

    Waits for started works, as `ProcessGroup.shutdown` does.

    Args:
        group: a group; None means the default group.
    """
    if is_outside(group):
        return
    pg = require_member(group)
    await pg.shutdown()
    for loop in [loop for loop, first in _first_groups.items() if first is pg]:
        del _first_groups[loop]


def device_name(device_id: Any) -> str | None:
    """Return the name of a device, such as "cuda:0"; None stands for no device."""
    if hasattr(device_id, "__index__"):
        return f"cuda:{to_int(device_id, 'device_id', 'a device, its number or None')}"
    return None if device_id is None else str(device_id)


def is_available() -> bool:
    """Return True: this package can always be used."""
    return True


def is_initialized() -> bool:
    """Return whether this context, loop or thread has a default group."""
    return find_default_group() is not None


def is_torchelastic_launched() -> bool:
    """Return whether torchrun has started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ
