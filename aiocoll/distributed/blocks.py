"""Blocks that fuse the calls in them, or predict their time."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager, AbstractContextManager

from aiocoll.distributed.world import inside
from aiocoll.group.interceptors.coalesce import Batch
from aiocoll.group.interceptors.estimate import Estimate
from aiocoll.group.process_group import ProcessGroup

__all__ = ["coalescing_manager", "time_estimator"]


def coalescing_manager(group: ProcessGroup | None = None, device: object = None) -> AbstractAsyncContextManager[Batch]:
    """Run the calls of an ``async with`` block on a group fused: `ProcessGroup.coalescing`.

    Args:
        group: None is the default group.
        device: not used.
    """
    return inside(group).coalescing()


def time_estimator(group: ProcessGroup | None = None, device: object = None) -> AbstractContextManager[Estimate]:
    """Predict how long the calls of a ``with`` block on a group would take, and send nothing.

    See `ProcessGroup.time_estimator`: the object of the block has the seconds at the end.

    Args:
        group: None is the default group.
        device: not used.
    """
    return inside(group).time_estimator()
