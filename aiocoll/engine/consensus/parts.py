"""The endpoint's roster, links and groups, as voters use them."""

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
    """The parts of an endpoint that voters use: its roster, its links and its groups.

    Attributes:
        context: the endpoint's context.
        ranks: the state of the other ranks.
        links: control links to other ranks.
        send_to_others: sends a message to several ranks, linked to this one or not.
        look: checks whether the process of a rank still exists.
        groups: the endpoint's groups, by id.
    """

    context: Context
    ranks: Roster
    links: PeerLinks
    send_to_others: Callable[[ControlMessage, Sequence[int]], None]
    look: Callable[[int], None]
    groups: Mapping[int, Communicator]
