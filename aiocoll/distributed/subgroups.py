"""Functions that make subgroups: groups of some ranks of another group."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import Any

from aiocoll.backends import BackendConfig, kind_of
from aiocoll.distributed.introspection import get_backend, get_backend_config
from aiocoll.distributed.map_result import map_result
from aiocoll.distributed.world import (
    Group,
    GroupMember,
    default_group,
    device_name,
    find_default_group,
    replace_default_group,
    require_member,
)
from aiocoll.group.dispatch.dispatcher import Timeout
from aiocoll.group.parts import parts_of
from aiocoll.group.process_group import ProcessGroup
from aiocoll.numerals import to_int
from aiocoll.rendezvous.launchers import local_numbers
from aiocoll.work import Work, finished_work

__all__ = [
    "SHRINK_ABORT",
    "SHRINK_DEFAULT",
    "new_group",
    "new_subgroups",
    "new_subgroups_by_enumeration",
    "shrink_group",
    "split_group",
]

#: Values of the argument `shrink_flags` of `shrink_group`: wait for pending calls in the group, or let them fail.
SHRINK_DEFAULT = 0
SHRINK_ABORT = 1


def new_group(
    ranks: Sequence[int] | None = None,
    timeout: Timeout = None,
    backend: str | None = None,
    pg_options: Any = None,
    use_local_synchronization: bool = False,
    group_desc: str | None = None,
    device_id: object = None,
) -> Work[ProcessGroup | int]:
    """Make a group of some ranks of the default group, without communication; see `ProcessGroup.split_group`.

    All ranks of the default group call it, in the same order.

    Args:
        ranks: global ranks; None means all of them. The new group numbers them in ascending order.
        timeout: default seconds for an operation of the new group; None means those of the default group.
        backend: None, or the backend of the default group.
        pg_options: must be None: a group has the options of the group that it is split off from.
        use_local_synchronization: only the ranks in `ranks` call it.
        group_desc: a description for people.
        device_id: None, or the device of the default group.

    Returns:
        A finished work. Its result is the group, or `GroupMember.NON_GROUP_MEMBER` on other ranks.

    Raises:
        ValueError: `ranks` is empty, names a rank twice or a rank that does not exist, or an argument differs from that
            of the default group.
    """
    world = default_group()
    _check_same_options(world, backend, pg_options, device_id)
    chosen = list(range(world.size())) if ranks is None else _check_ranks(ranks, "ranks", world)
    if use_local_synchronization:
        if world.rank() not in chosen:
            return _make_finished(world, GroupMember.NON_GROUP_MEMBER)
        split = world.split_group(chosen, timeout, local=True)
    else:
        split = world.split_group(chosen, timeout)
    return map_result(split, lambda pg: _set_description(pg, group_desc, GroupMember.NON_GROUP_MEMBER))


def split_group(
    parent_pg: ProcessGroup | None = None,
    split_ranks: Sequence[Sequence[int]] | None = None,
    timeout: Timeout = None,
    pg_options: Any = None,
    group_desc: str | None = None,
) -> Work[ProcessGroup | None]:
    """Split a group into one group per list in `split_ranks`; see `ProcessGroup.split_group`.

    Args:
        parent_pg: a group; None means the default group.
        split_ranks: lists of ranks of `parent_pg`, the same on all of its ranks, without common ranks.
        timeout: default seconds for an operation of the new group; None means those of `parent_pg`.
        pg_options: must be None: a group has the options of the group that it is split off from.
        group_desc: a description for people.

    Returns:
        A finished work. Its result is the new group of this rank, or None if the rank is in no list.
    """
    parent = require_member(parent_pg)
    _check_same_options(parent, None, pg_options, None)
    if not split_ranks:
        raise ValueError("split_ranks is empty; give at least one list of ranks")
    lists = [_check_ranks(each, f"split_ranks[{index}]", parent) for index, each in enumerate(split_ranks)]
    return map_result(parent.split_group(lists, timeout), lambda pg: _set_description(pg, group_desc, None))


def new_subgroups(
    group_size: int | None = None,
    group: ProcessGroup | None = None,
    timeout: Timeout = None,
    backend: str | None = None,
    pg_options: Any = None,
    group_desc: str | None = None,
) -> Work[tuple[Group, list[Group]]]:
    """Split a group into groups of consecutive ranks, by `new_group`. All ranks of the group call this.

    Args:
        group_size: ranks per group; None means the number of ranks that the launcher has started on this host
            (``LOCAL_WORLD_SIZE``).
        group: the group to divide; None means the default group.
        timeout: seconds; see `new_group`.
        backend: see `new_group`.
        pg_options: see `new_group`.
        group_desc: see `new_group`.

    Returns:
        See `new_subgroups_by_enumeration`.

    Raises:
        ValueError: the ranks cannot be divided into groups of that size.
    """
    parent = require_member(group)
    size = parent.size()
    if group_size is None:
        _, group_size = local_numbers(os.environ)
        if group_size is None:
            raise ValueError("group_size is missing, and LOCAL_WORLD_SIZE is not in the environment; give group_size=")
    group_size = to_int(group_size, "group_size")
    if group_size <= 0:
        raise ValueError(f"group_size={group_size} must be positive")
    if group_size > size:
        raise ValueError(f"group_size={group_size} must not exceed the world size, {size}")
    if size % group_size:
        raise ValueError(f"the world size, {size}, must be divisible by group_size={group_size}")
    lists = [list(range(start, start + group_size)) for start in range(0, size, group_size)]
    return _split_into(parent, lists, timeout, backend, pg_options, group_desc)


def new_subgroups_by_enumeration(
    ranks_per_subgroup_list: Sequence[Sequence[int]],
    timeout: Timeout = None,
    backend: str | None = None,
    pg_options: Any = None,
    group_desc: str | None = None,
) -> Work[tuple[Group, list[Group]]]:
    """Make one group per list of global ranks, by `new_group`. All ranks of the default group call this.

    Args:
        ranks_per_subgroup_list: lists of global ranks, without common ranks.
        timeout: seconds; see `new_group`.
        backend: see `new_group`.
        pg_options: see `new_group`.
        group_desc: see `new_group`.

    Returns:
        A finished work. Its result is the group of this rank, or None, and the list of all groups, with
        `GroupMember.NON_GROUP_MEMBER` for those that this rank is not in.

    Raises:
        ValueError: a list or all of them are empty, or a rank is in two lists, twice in one, or not in the group.
    """
    world = default_group()
    if not ranks_per_subgroup_list:
        raise ValueError("ranks_per_subgroup_list is empty; give at least one list of ranks")
    lists = [
        _check_ranks(each, f"ranks_per_subgroup_list[{n}]", world) for n, each in enumerate(ranks_per_subgroup_list)
    ]
    owner: dict[int, int] = {}
    for index, each in enumerate(lists):
        for rank in each:
            if rank in owner:
                raise ValueError(
                    f"rank {rank} has appeared in both subgroup {lists[owner[rank]]} and {each}; subgroups must not "
                    "share a rank"
                )
            owner[rank] = index
    return _split_into(world, lists, timeout, backend, pg_options, group_desc)


async def shrink_group(
    ranks_to_exclude: list[int],
    group: ProcessGroup | None = None,
    shrink_flags: int = SHRINK_DEFAULT,
    pg_options: Any = None,
) -> ProcessGroup:
    """Make a group without `ranks_to_exclude`; only the remaining ranks call this. See `ProcessGroup.shrink`.

    The old group is closed, with all groups split off from it. If it was the default group, the new one replaces it.

    Args:
        ranks_to_exclude: ranks of the group, at least one; lost ranks are excluded, too.
        group: a group; None means the default group.
        shrink_flags: `SHRINK_DEFAULT` waits for pending calls in the group; `SHRINK_ABORT` lets them fail.
        pg_options: must be None: the new group has the options of the old one.

    Raises:
        TypeError, ValueError: `ranks_to_exclude` is empty, names a rank twice, a rank that does not exist, or all
            ranks; or the group has only one rank.
        RuntimeError: `ranks_to_exclude` names this rank.
        Exception: see `ProcessGroup.shrink`.
    """
    if not isinstance(ranks_to_exclude, list):
        raise TypeError(f"ranks_to_exclude must be a list, not {type(ranks_to_exclude).__name__}")
    if not ranks_to_exclude:
        raise ValueError("ranks_to_exclude is empty; give at least one rank")
    if isinstance(shrink_flags, bool) or shrink_flags not in (SHRINK_DEFAULT, SHRINK_ABORT):
        raise ValueError(f"shrink_flags={shrink_flags!r} must be SHRINK_DEFAULT or SHRINK_ABORT")
    old = require_member(group)
    _check_same_options(old, None, pg_options, None)
    if old.size() < 2:
        raise ValueError(f"group {old.group_name!r} has only one rank, which cannot be excluded")
    excluded = _check_ranks(ranks_to_exclude, "ranks_to_exclude", old)
    if len(excluded) == old.size():
        raise ValueError(f"ranks_to_exclude names all {old.size()} ranks of the group; at least one must remain")
    if old.rank() in excluded:
        raise RuntimeError(
            f"ranks_to_exclude names rank {old.rank()}, which is this rank; only the remaining ranks may make this call"
        )
    if shrink_flags == SHRINK_DEFAULT:
        await parts_of(old).lifetime.settle()
    new = await old.shrink(excluded)
    was_default = find_default_group() is old
    await old.shutdown()
    if was_default:
        replace_default_group(old, new)
    return new


def _split_into(
    parent: ProcessGroup, lists: list[list[int]], timeout: Timeout, backend: str | None, options: Any, desc: str | None
) -> Work[tuple[Group, list[Group]]]:
    """Make one group per list of ranks; return this rank's group, and a group or marker for each list.

    The marker stands for a group that this rank is not in.
    """
    _check_same_options(parent, backend, options, None)

    def all_parts(pg: ProcessGroup | None) -> tuple[Group, list[Group]]:
        mine = _set_description(pg, desc, None)
        return mine, [mine if parent.rank() in each else GroupMember.NON_GROUP_MEMBER for each in lists]

    return map_result(parent.split_group(lists, timeout), all_parts)


def _check_ranks(ranks: Any, name: str, pg: ProcessGroup) -> list[int]:
    """Check that `ranks` are ranks of `pg`, and return them in ascending order."""
    if isinstance(ranks, str | bytes) or not isinstance(ranks, Iterable):
        raise TypeError(f"{name} must be a list of ranks, not {type(ranks).__name__}")
    numbers = []
    for index, rank in enumerate(ranks):
        number = to_int(rank, f"{name}[{index}]", "a rank (int)")
        if not 0 <= number < pg.size():
            raise ValueError(
                f"{name}[{index}]={number} is not a rank of group {pg.group_name!r}: ranks are 0 to {pg.size() - 1}"
            )
        if number in numbers:
            raise ValueError(f"{name} names rank {number} twice")
        numbers.append(number)
    if not numbers:
        raise ValueError(f"{name} is empty; give at least one rank")
    return sorted(numbers)


def _check_same_options(pg: ProcessGroup, backend: str | None, options: Any, device: Any) -> None:
    """Raise if a backend, device or option differs from that of the parent group `pg`, which subgroups inherit."""
    if options is not None:
        raise ValueError("pg_options must be None; a group has the options of the group that it is split off from")
    if backend is not None and not _has_backend(pg, backend):
        own, served = get_backend(pg), get_backend_config(pg)
        raise ValueError(
            f"backend={backend!r} must be None or {own!r}, because the parent group {pg.group_name!r} has {served}"
        )
    if device is not None and kind_of(device_name(device) or "", "device_id") not in parts_of(pg).devices:
        served = ", ".join(map(repr, parts_of(pg).devices))
        raise ValueError(
            f"device_id={device!r} must be None or a device of the parent group {pg.group_name!r}, which has {served}"
        )


def _has_backend(pg: ProcessGroup, backend: str) -> bool:
    """Return whether group `pg` has `backend`: a backend name, or pairs such as "cpu:aio,cuda:nccl"."""
    try:
        wanted = BackendConfig(backend).device_backend_map
    except ValueError:  # not a known backend, so no group has it
        return False
    if ":" in backend:
        return wanted.items() <= parts_of(pg).devices.items()
    return set(wanted.values()) <= set(parts_of(pg).devices.values())


def _set_description(pg: Any, desc: str | None, outside: Any) -> Any:
    """Set the description of the new group `pg`, and return `pg`; return `outside` if `pg` is None."""
    if pg is None:
        return outside
    if desc is not None:
        pg.group_desc = desc
    return pg


def _make_finished(pg: ProcessGroup, result: Any) -> Work[Any]:
    parts = parts_of(pg)
    return finished_work(parts.comm.endpoint, "SPLIT_GROUP", parts.dispatcher, result)
