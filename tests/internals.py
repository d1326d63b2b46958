"""Where tests reach into a group: the only file that knows the names of its private parts."""

from __future__ import annotations

from typing import Any

from aiocoll import ProcessGroup
from aiocoll.engine.communicator import Communicator
from aiocoll.group.dispatch.dispatcher import Dispatcher

__all__ = ["comm_of", "dispatcher_of"]


def comm_of(holder: Any) -> Communicator:
    """Return the communicator of a group, or of a part of one."""
    comm: Communicator = holder._comm
    return comm


def dispatcher_of(pg: ProcessGroup) -> Dispatcher:
    """Return what all calls of a group go through."""
    return pg._dispatcher
