"""Access to the internal objects of a `ProcessGroup`, for other modules of the package."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from aiocoll.engine.communicator import Communicator
    from aiocoll.group.collectives import Collectives
    from aiocoll.group.dispatch.dispatcher import Dispatcher
    from aiocoll.group.interceptors.coalesce import Coalescer
    from aiocoll.group.lifetime import Lifetime
    from aiocoll.group.messages import Messages
    from aiocoll.group.objects import Objects
    from aiocoll.group.reconfigurer import Reconfigurer

__all__ = ["GroupParts", "parts_of"]


@dataclass(frozen=True, slots=True)
class GroupParts:
    """The internal objects to which a `ProcessGroup` delegates.

    Attributes:
        comm: this rank's communicator of the group.
        dispatcher: starts all calls.
        collectives: the collectives on arrays.
        messages: the messages between two ranks.
        objects: the collectives on objects.
        coalescer: the blocks of fused calls.
        reconfigurer: makes further groups.
        lifetime: pending works, revocation, closing.
        devices: name of the backend by kind of device.
    """

    comm: Communicator
    dispatcher: Dispatcher
    collectives: Collectives
    messages: Messages
    objects: Objects
    coalescer: Coalescer
    reconfigurer: Reconfigurer
    lifetime: Lifetime
    devices: Mapping[str, str]


def parts_of(group: Any) -> GroupParts:
    """Return the internal objects of a `ProcessGroup`."""
    parts: GroupParts = group._parts
    return parts
