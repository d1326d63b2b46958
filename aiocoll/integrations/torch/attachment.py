"""`attach`: a temporary torch group that wraps a `ProcessGroup` of the program's own event loop."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import torch.distributed as dist

from aiocoll.engine.control.causes import failure_by
from aiocoll.group.parts import parts_of
from aiocoll.group.process_group import ProcessGroup
from aiocoll.integrations.torch.aio_group import AioGroup
from aiocoll.integrations.torch.arguments import to_timedelta
from aiocoll.integrations.torch.carriers import BACKEND
from aiocoll.integrations.torch.group_store import GroupStore
from aiocoll.integrations.torch.running_loop import RunningLoop
from aiocoll.integrations.torch.world import attached

__all__ = ["attach"]


@contextlib.asynccontextmanager
async def attach(pg: ProcessGroup) -> AsyncIterator[dist.ProcessGroup]:
    """Wrap `pg`, a group of the running event loop, in a torch group inside the ``async with`` block.

        async with aiocoll.new_group() as pg, aiocoll.torch.attach(pg):
            await asyncio.to_thread(train)  # calls torch.distributed

    Threads of the program use the torch group while the event loop carries out the calls. If torch has no default
    group, the torch group becomes it. Otherwise pass it as `group=`. The block destroys the torch group at its end, but
    leaves `pg` open. All ranks of `pg` enter the block.

    Args:
        pg: the group. If torch has a default group, its ranks and their order must be the same.

    Yields:
        The torch group.

    Raises:
        RuntimeError: `pg` belongs to another event loop. On the thread of the event loop, a call that waits raises it.
        ValueError: torch has a default group of another size, or one in which this process has another rank.
        GroupClosedError: `pg` was closed, or it has failed.
        GroupError: the block has raised a `RuntimeError`, such as torch's `DistBackendError`, and `pg` has failed.
    """
    parts = parts_of(pg)
    parts.dispatcher.check_owner()
    parts.comm.raise_if_revoked()
    _check_default_group(pg)
    thread = RunningLoop()
    store = GroupStore(pg.store, thread)  # keep a reference here, because C++ keeps none to the Python object
    group = await asyncio.to_thread(_make_torch_group, pg, thread, store)
    try:
        yield group
    except RuntimeError as error:
        if parts.comm.cause is None:
            raise
        raise failure_by(parts.comm.cause) from error
    finally:
        await asyncio.to_thread(_destroy, group)


def _check_default_group(pg: ProcessGroup) -> None:
    if not dist.is_initialized():
        return
    own, of_torch = (pg.rank(), pg.size()), (dist.get_rank(), dist.get_world_size())
    if own != of_torch:
        raise ValueError(
            f"group {pg.group_name!r} has rank {own[0]} of {own[1]} here, but torch's default group has rank "
            f"{of_torch[0]} of {of_torch[1]}: attach a group of the same ranks, or call destroy_process_group first"
        )


def _make_torch_group(pg: ProcessGroup, thread: RunningLoop, store: GroupStore) -> Any:
    timeout = to_timedelta(pg.timeout)
    token = attached.set((pg, thread))
    try:
        if dist.is_initialized():
            return dist.new_group(backend=BACKEND, timeout=timeout)
        dist.init_process_group(BACKEND, store=store, rank=pg.rank(), world_size=pg.size(), timeout=timeout)
        return dist.group.WORLD
    finally:
        attached.reset(token)


def _destroy(group: AioGroup) -> None:
    """Destroy a torch group, unless the program has destroyed it already."""
    if dist.distributed_c10d.GroupMember.WORLD is group:
        dist.destroy_process_group()
    else:
        with contextlib.suppress(ValueError):  # raised if the program has destroyed it
            dist.destroy_process_group(group)
