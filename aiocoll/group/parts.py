"""The parts of a `ProcessGroup`, for the package's own modules."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from aiocoll.engine.communicator import Communicator
from aiocoll.group.collectives import Collectives
from aiocoll.group.dispatch.dispatcher import Dispatcher
from aiocoll.group.lifetime import Lifetime
from aiocoll.group.messages import Messages
from aiocoll.group.reconfigurer import Reconfigurer

__all__ = ["GroupParts", "parts_of"]


class GroupParts(NamedTuple):
    """The objects to which a group delegates.

    Attributes:
        comm: this rank's part in the group.
        dispatcher: starts all calls.
        collectives: the collectives on arrays.
        messages: the messages between two ranks.
        reconfigurer: makes further groups.
        lifetime: closes the group.
        devices: the backend of each kind of device.
    """

    comm: Communicator
    dispatcher: Dispatcher
    collectives: Collectives
    messages: Messages
    reconfigurer: Reconfigurer
    lifetime: Lifetime
    devices: Mapping[str, str]


def parts_of(group: Any) -> GroupParts:
    """Return the parts of a `ProcessGroup`."""
    parts: GroupParts = group._parts
    return parts
