"""Construction of torch groups: the default group, whose ranks meet on torch's store, and subgroups."""

from __future__ import annotations

import os
from contextvars import ContextVar
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from aiocoll.group.process_group import ProcessGroup
from aiocoll.integrations.torch.aio_group import AioGroup
from aiocoll.integrations.torch.lifetime import Lifetime
from aiocoll.integrations.torch.process import process
from aiocoll.integrations.torch.store import TorchStore, host_of, is_loopback
from aiocoll.loops import LoopThread
from aiocoll.options import GroupOptions
from aiocoll.rendezvous.new_group import new_group
from aiocoll.runtime import random_bytes

__all__ = ["attached", "group", "make_group"]

#: The group that `attach` is wrapping in a torch group, with its event loop; None outside `attach`.
attached: ContextVar[tuple[ProcessGroup, LoopThread] | None] = ContextVar("attached", default=None)

#: Key in torch's store for the job key of rank 0. The value is empty if the ranks need no job key from rank 0.
_KEY = "aiocoll/key"
_KEY_BYTES = 32
#: Environment variables by which the user sets a job key.
_VARIABLES = {"AIOCOLL_JOB_KEY", "AIOCOLL_JOB_KEY_FILE"}


def make_group(options: Any, backend_options: Any) -> AioGroup:
    """Create a torch group with backend "aio"; torch calls this function on every member of the group.

    Args:
        options: torch's options: store, rank, size, timeout, global ranks.
        backend_options: the `pg_options` of the program: `GroupOptions` or None.

    Raises:
        TypeError: `pg_options` has another type.
        RendezvousError: the ranks do not meet.
    """
    if backend_options is not None and not isinstance(backend_options, GroupOptions):
        raise TypeError(f"pg_options must be aiocoll.GroupOptions or None, not {type(backend_options).__name__}")
    store = options.store
    if (given := attached.get()) is not None:
        return AioGroup(*given, store, is_owner=False)
    timeout, ranks = options.timeout.total_seconds(), list(options.global_ranks_in_group)
    parent = _parent(ranks) if backend_options is None else None
    if parent is None:
        thread = process.thread()
        return AioGroup(thread.run(_meet(options, timeout, backend_options)), thread, store)
    whole, thread = parent
    members = ranks or range(whole.size())
    pg = thread.start(lambda: whole.split_group(members, timeout, local=True, order="given")).result()
    assert pg is not None  # torch calls this on members only
    return AioGroup(pg, thread, store)


async def _meet(options: Any, timeout: float, given: GroupOptions | None) -> ProcessGroup:
    """Meet the other ranks on torch's store, and return the aiocoll group."""
    store = TorchStore(options.store, timeout)
    host, _ = host_of(options.store)
    key = None
    if given is None or given.job_key is None:
        if options.group_rank == 0:
            made = "" if not host or is_loopback(host) else random_bytes(_KEY_BYTES).hex()
            await store.set(_KEY, "" if _VARIABLES & os.environ.keys() else made)
        key = (await store.get(_KEY, timeout)).decode() or None
    chosen = GroupOptions.resolve(given, os.environ)
    if key is not None:
        chosen = replace(chosen, job_key=key)
    return await new_group(
        store=store, rank=options.group_rank, world_size=options.group_size, timeout=timeout, options=chosen
    )


def _parent(ranks: list[int]) -> tuple[ProcessGroup, LoopThread] | None:
    """Return the parent group from which a group of `ranks` is split off, and its loop; None without one.

    An empty list stands for all ranks.
    """
    if not ranks:
        return None if process.world is None else (process.world, process.thread())
    world = _carrier_of(dist.GroupMember.WORLD)
    return None if world is None else (world.pg, world.thread)


def group(pg: dist.ProcessGroup | None = None) -> ProcessGroup:
    """Return the aiocoll group that a torch group wraps, for awaiting calls next to torch's own calls.

    It belongs to the event loop of `loop_thread`, or to the loop of the program if `attach` made the torch group. Make
    its calls in coroutines on that loop.

    Args:
        pg: a torch group with backend "aio"; None for the default group.

    Raises:
        TypeError: `pg` has another backend.
    """
    found = dist.GroupMember.WORLD if pg is None else pg
    carrier = _carrier_of(found)
    if carrier is None:
        name = "no group: call init_process_group first" if found is None else f"{type(found).__name__}"
        raise TypeError(f"pg must be a torch group with backend 'aio', not {name}")
    return carrier.pg


def _carrier_of(group: Any) -> Lifetime | None:
    """Return aiocoll's object behind a torch group's CPU backend; None if the backend is not aiocoll's."""
    if isinstance(group, dist.ProcessGroup) and not isinstance(group, AioGroup):  # `shrink_group` may have made it
        try:
            group = group._get_backend(torch.device("cpu"))
        except RuntimeError:  # the group has no backend for the CPU
            return None
    return group if isinstance(group, Lifetime) else None
