"""Conversions between ranks of a group and global ranks, which are the ranks of the default group."""

from __future__ import annotations

import os
from typing import Any

from aiocoll.distributed.world import Group, check_group, find_default_group, is_outside, require_member
from aiocoll.group.process_group import ProcessGroup
from aiocoll.numerals import to_int
from aiocoll.rendezvous.launchers import local_numbers
from aiocoll.work import Work, completion_of

__all__ = [
    "get_global_rank",
    "get_group_rank",
    "get_node_local_rank",
    "get_process_group_ranks",
    "get_rank",
    "get_world_size",
    "global_rank_of",
    "rank_of",
    "sender_of",
]


def get_rank(group: Group = None) -> int:
    """Return the rank of this process in a group; -1 if it is not in the group.

    Args:
        group: a group; None means the default group.
    """
    if is_outside(group):
        return -1
    return require_member(group).rank()


def get_world_size(group: Group = None) -> int:
    """Return the number of ranks of a group; -1 if this rank is not in it.

    Args:
        group: a group; None means the default group.
    """
    if is_outside(group):
        return -1
    return require_member(group).size()


def get_group_rank(group: ProcessGroup, global_rank: int) -> int:
    """Convert a global rank to the rank in `group`.

    Args:
        group: a group.
        global_rank: the rank in the default group.

    Raises:
        ValueError: the rank is not in both groups.
    """
    pg, rank = check_group(group), _to_rank(global_rank, "global_rank")
    return _group_rank(pg, rank, "global_rank")


def get_global_rank(group: ProcessGroup, group_rank: int) -> int:
    """Convert a rank in `group` to a global rank, which is the rank in the default group.

    Args:
        group: a group.
        group_rank: the rank in `group`.

    Raises:
        ValueError: the rank is not in both groups.
    """
    pg = check_group(group)
    rank = _check_range(_to_rank(group_rank, "group_rank"), pg, "group_rank")
    return global_rank_of(pg, rank)


def get_process_group_ranks(group: ProcessGroup | None = None) -> list[int]:
    """Return the global ranks of all ranks of a group, in the order of the group.

    Args:
        group: a group; None means the default group.
    """
    pg = require_member(group)
    return [global_rank_of(pg, rank) for rank in range(pg.size())]


def get_node_local_rank(fallback_rank: int | None = None) -> int:
    """Return this process's rank on its host, from ``LOCAL_RANK`` or the launcher's own variable.

    Args:
        fallback_rank: returned if there is no such variable.

    Raises:
        RuntimeError: there is neither a variable nor `fallback_rank`.
    """
    rank, _ = local_numbers(os.environ)
    if rank is not None:
        return rank
    if fallback_rank is None:
        raise RuntimeError(
            "LOCAL_RANK is not in the environment; start the ranks with `aiocoll run`, or give fallback_rank="
        )
    return int(fallback_rank)


def rank_of(pg: ProcessGroup, name: str, given: int | None, group_given: int | None, default: int | None = None) -> int:
    """Return the rank in `pg` of a root or peer that the caller gives by global rank or by group rank.

    Args:
        pg: the group.
        name: "src" or "dst".
        given: its global rank, the caller's argument `name`.
        group_given: its rank in `pg`, the caller's argument ``group_<name>``.
        default: its global rank if neither is given.

    Raises:
        TypeError, ValueError: both are given, neither is, or the rank is not in the group.
    """
    if group_given is not None:
        if given is not None:
            raise ValueError(f"{name}={given!r} and group_{name}={group_given!r} exclude each other; give one of them")
        return _check_range(_to_rank(group_given, f"group_{name}"), pg, f"group_{name}")
    if given is None and default is None:
        raise ValueError(f"give {name}=, a global rank, or group_{name}=, a rank of the group")
    return _group_rank(pg, _to_rank(default if given is None else given, name), name)


def sender_of(pg: ProcessGroup, work: Work[Any]) -> int:
    """Return the global rank that sent the message received by `work`; -1 in a dry run."""
    source = completion_of(work).source
    return -1 if source is None else global_rank_of(pg, source)


def _group_rank(pg: ProcessGroup, rank: int, name: str) -> int:
    world = find_default_group()
    if world is None or world is pg:
        return _check_range(rank, pg, name)
    _check_range(rank, world, name)
    try:
        return pg.global_ranks.index(world.global_ranks[rank])
    except ValueError:
        raise ValueError(f"{name}={rank}, a global rank, is not in group {pg.group_name!r}") from None


def global_rank_of(pg: ProcessGroup, rank: int) -> int:
    """Return the global rank of a rank of `pg`."""
    world = find_default_group()
    if world is None or world is pg:
        return rank
    try:
        return world.global_ranks.index(pg.global_ranks[rank])
    except ValueError:
        raise ValueError(
            f"rank {rank} of group {pg.group_name!r} has no global rank, because it is not in the default group, "
            f"{world.group_name!r}"
        ) from None


def _to_rank(rank: Any, name: str) -> int:
    return to_int(rank, name, "a rank (int)")


def _check_range(rank: int, pg: ProcessGroup, name: str) -> int:
    if not 0 <= rank < pg.size():
        raise ValueError(f"{name}={rank} is not a rank of group {pg.group_name!r}: its ranks are 0 to {pg.size() - 1}")
    return rank
