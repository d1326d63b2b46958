"""The groups of one rank: those that it has made, and what has arrived for others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from aiocoll.engine import polling, split_history
from aiocoll.engine.consensus import parts
from aiocoll.engine.control.causes import error_from
from aiocoll.engine.control.device_inbox import DeviceInbox
from aiocoll.engine.control.messages import DEVICE, ControlMessage
from aiocoll.engine.control.star import ControlPlane
from aiocoll.engine.control.unmade_groups import Early
from aiocoll.engine.failure import deadlines, roster
from aiocoll.engine.job.context import Context
from aiocoll.engine.links import channel
from aiocoll.engine.links.channel import Channel
from aiocoll.errors import PeerLostError
from aiocoll.transport.frame import Header

__all__ = ["Group", "Groups"]


class Group(channel.Group, deadlines.Group, polling.Group, roster.Group, split_history.Group, parts.Group, Protocol):
    """A group, as the endpoint uses it: everything that its parts need, and more.

    Attributes:
        id: the group on the wire.
        channels: by rank.
        devices: handles messages about CUDA devices.
    """

    id: int
    channels: Sequence[Channel]
    devices: DeviceInbox

    def departed(self, rank: int) -> None:
        """A rank of the group (numbered as in the job) has left in order."""

    def linked(self) -> None:
        """A link of the endpoint has been opened."""

    def close(self) -> None:
        """Leave: nothing is received any more."""


class Groups:
    """The groups of one endpoint.

    Args:
        context: of the endpoint.
        control: tells ranks that a group does not exist here.

    Attributes:
        made: groups that this rank is in, by id.
        early: what has arrived for groups that this rank has not made.
    """

    def __init__(self, context: Context, control: ControlPlane) -> None:
        self._context = context
        self._control = control
        self.made: dict[int, Group] = {}
        self.early = Early()

    def ranks_of(self, identity: int) -> Sequence[int] | None:
        """Return the ranks of a group that this rank is in."""
        group = self.made.get(identity)
        return None if group is None else group.ranks

    def named(self, identity: int, peer: int) -> None:
        """A rank has named a group, which this rank may not have made."""
        if identity not in self.made and not self.early.is_over(identity):
            self.early.unmade(identity, peer)

    def keep_frame(self, source: Channel, header: Header, payload: memoryview | None) -> bool:
        """Buffer a frame of a group that this rank has not made; True if it is dropped instead."""
        return self._context.closed or self.early.keep_frame(source, header, payload)

    def departed(self, rank: int, identity: int) -> None:
        """A rank has left a group, and all its data has arrived."""
        if (group := self.made.get(identity)) is not None:
            group.departed(rank)
        else:
            self.early.keep_departure(identity, rank)

    def ended(self, rank: int, linked: Sequence[int] = ()) -> None:
        """A rank has ended, and so has left every group, unless it announces that behind its data."""
        if self._context.rank in linked:
            return
        for group in list(self.made.values()):
            peer = group.position.get(rank)
            if peer is not None and peer not in group.left:
                group.departed(rank)

    def own_death(self, cause: dict[str, Any] | None) -> str | None:
        """Return the text of a group's cause of failure if the cause is the death of this rank."""
        if cause is not None and cause["kind"] == PeerLostError.__name__ and cause["how"] == "killed":
            me = self._context.rank
            for group in self.made.values():
                if group.name == cause["group"] and group.position[me] in cause["ranks"]:
                    return str(cause["text"])
        return None

    def revoked(self, rank: int, identity: int, cause: dict[str, Any]) -> None:
        """Another rank has revoked a group."""
        self._context.transport.catch_up()
        if (group := self.made.get(identity)) is not None:
            group.revoke(error_from(cause), tell=False)
        else:
            self.early.keep_cause(identity, rank, cause)

    def handle(self, peer: int, message: ControlMessage) -> None:
        """Pass a message about a device or an operation to its group."""
        identity = message["g"]
        group = self.made.get(identity)
        if group is not None and message["t"] == DEVICE:
            group.devices.handle(peer, message)
        elif group is not None:
            group.stalls.handle(group.position[peer], message)
        elif message["t"] == DEVICE:
            self.early.keep_message(identity, peer, message)
        else:
            last = split_history.stranger(self.made, self.early, self._control, peer, message)
            if last is not None and message["t"] == "query":
                answer = {"t": "absent", "g": identity, "op": message["op"], "last": last, "age": None, "asked": True}
                self._control.tell(peer, answer)
