"""What an agreement about a group needs of the endpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from aiocoll.engine.control.messages import ControlMessage
from aiocoll.engine.control.peer_links import PeerLinks
from aiocoll.engine.failure.roster import Roster
from aiocoll.engine.job.context import Context

if TYPE_CHECKING:
    from aiocoll.engine.communicator import Communicator

__all__ = ["Parts"]


class Parts(NamedTuple):
    """What the voters of an endpoint need of it.

    Attributes:
        context: of the endpoint.
        ranks: the others.
        links: carry the messages.
        flood: sends a message to ranks that may or may not be linked to this one.
        look: checks whether the process of a rank still exists.
        groups: of the endpoint.
    """

    context: Context
    ranks: Roster
    links: PeerLinks
    flood: Callable[[ControlMessage, Sequence[int]], None]
    look: Callable[[int], None]
    groups: Mapping[int, Communicator]
