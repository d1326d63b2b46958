"""Messages that the ranks of one group send each other about its operations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from aiocoll.engine.control.messages import ControlMessage
from aiocoll.engine.control.peer_links import PeerLinks
from aiocoll.engine.control.star import ControlPlane
from aiocoll.engine.links.channel import Channel

__all__ = ["Sender"]


class Sender:
    """The sender of messages about the operations of one group.

    Args:
        identity: the group's id.
        ranks: the group's ranks, numbered as in the job.
        channels: the channels to these ranks.
        control: the control plane, which reaches all these ranks.
        links: direct control links between this rank and each of these ranks.
    """

    def __init__(
        self,
        identity: int,
        ranks: Sequence[int],
        channels: Sequence[Channel],
        control: ControlPlane,
        links: PeerLinks,
    ) -> None:
        self._group = identity
        self._ranks = ranks
        self._channels = channels
        self._control = control
        self._links = links
        self._lineage: tuple[Any, ...] = ()

    def split_off(self, parent: Sender, split: Any) -> None:
        """Add this group's origin to all later messages: its parent group, and the call that split it off."""
        self._lineage = (*parent._lineage, split)

    def send_direct(self, rank: int, message: ControlMessage) -> None:
        """Send a message to `rank` on a control link, even if there is a data link."""
        if self._lineage:
            message = {**message, "split": self._lineage}
        self._links.send(self._ranks[rank], {**message, "g": self._group})

    def send(self, rank: int, message: ControlMessage) -> None:
        """Send a message to `rank` on its data link, or on the control plane if there is no data link.

        The control plane may need another rank as a relay.
        """
        message = {**message, "g": self._group}
        if self._channels[rank].link is not None:
            self._channels[rank].send_after_data(message)
        else:
            self._control.send(self._ranks[rank], message)
