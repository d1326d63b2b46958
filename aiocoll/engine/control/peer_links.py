"""Control links between two ranks other than the hub, for use when the hub does not answer.

They also reach a lost rank again: a new link, or an answer on an existing link, shows that the rank is alive.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from aiocoll.engine.control.messages import ControlMessage
from aiocoll.engine.control.sending import send_message
from aiocoll.engine.control.star import ControlPlane
from aiocoll.engine.job.context import Context
from aiocoll.errors import AiocollError
from aiocoll.log import logger
from aiocoll.security.handshake import ConnKind
from aiocoll.transport.base import Link

if TYPE_CHECKING:
    from aiocoll.engine.failure.roster import Roster

__all__ = ["PeerLinks"]

#: Seconds for which a lost rank is tried again. Afterwards, messages that wait for this rank are dropped; their senders
#: repeat them.
REACH = 2.0


class PeerLinks:
    """The opener of control links between two ranks other than the hub, on demand. The control plane owns the links.

    Args:
        context: the endpoint's context.
        control: the star.
        ranks: the state of the other ranks.
        missed: callback for a rank that could not be reached.
    """

    def __init__(self, context: Context, control: ControlPlane, ranks: Roster, missed: Callable[[int], None]) -> None:
        self._context = context
        self._control = control
        self._ranks = ranks
        self._missed = missed
        self._held: dict[int, list[ControlMessage]] = {}
        self._dialling: set[int] = set()

    def send(self, rank: int, message: ControlMessage) -> None:
        """Send `message` to `rank` on a link of the control plane, or on a direct link if it has none."""
        context, control = self._context, self._control
        if context.closed or control.hub in (rank, context.rank) or control.linked(rank):
            control.send(rank, message)
            return
        self.send_direct(rank, message)

    def send_direct(self, rank: int, message: ControlMessage) -> None:
        """Send `message` to `rank` on a direct link, even if this rank or `rank` is the hub, or if `rank` is lost."""
        link = self._control.link(rank)
        if link is not None:
            send_message(link, message)
        elif not self._context.closed:
            self._held.setdefault(rank, []).append(message)
            self._connect(rank)

    def probe(self, rank: int) -> None:
        """Try to reach a lost rank again by opening a link to it."""
        self.send_direct(rank, {"t": "probe"})

    def _connect(self, rank: int) -> None:
        if rank not in self._dialling and not self._control.dials(rank):
            self._dialling.add(rank)
            self._context.spawn(self._dial(rank), "aiocoll control")

    def dials(self, rank: int) -> bool:
        """Return whether a link to `rank` is being opened."""
        return rank in self._dialling

    def on_link_open(self, link: Link) -> None:
        """Handle a control link that either end has opened: send the messages that wait for the link."""
        for message in self._held.pop(link.peer, ()):
            send_message(link, message)

    async def _dial(self, rank: int) -> None:
        context = self._context
        lost = rank in self._ranks.gone
        try:
            async with asyncio.timeout(REACH if lost else None):
                link = await context.connect(rank, ConnKind.CONTROL)
        except (OSError, AiocollError, TimeoutError) as error:
            link = None
            self._held.pop(rank, None)
            self._missed(rank)
            logger.debug("rank %d did not reach rank %d: %s", context.rank, rank, error, extra={"rank": context.rank})
        finally:
            self._dialling.discard(rank)
        if link is not None:
            self._control.attach(link)
        elif rank == self._control.hub:
            self._control.connect_to_hub()  # `rank` has become the hub meanwhile
