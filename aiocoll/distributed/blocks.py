"""Context managers that fuse the group calls in a block, or predict how long they take."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager, AbstractContextManager

from aiocoll.distributed.world import require_member
from aiocoll.group.interceptors.coalesce import Batch
from aiocoll.group.interceptors.estimate import Estimate
from aiocoll.group.process_group import ProcessGroup

__all__ = ["coalescing_manager", "time_estimator"]


def coalescing_manager(group: ProcessGroup | None = None, device: object = None) -> AbstractAsyncContextManager[Batch]:
    """Fuse the calls on a group in an ``async with`` block; see `ProcessGroup.coalescing`.

    Args:
        group: a group; None means the default group.
        device: not used.
    """
    return require_member(group).coalescing()


def time_estimator(group: ProcessGroup | None = None, device: object = None) -> AbstractContextManager[Estimate]:
    """Predict the time of a group's calls in a ``with`` block, and send nothing; see `ProcessGroup.time_estimator`.

    The object of the block has the predicted seconds after the block.

    Args:
        group: a group; None means the default group.
        device: not used.
    """
    return require_member(group).time_estimator()
