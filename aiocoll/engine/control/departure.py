"""The orderly end of ranks: every other rank learns of it before a broken link could look like a loss.

A rank that ends tells the hub, which relays the message and answers. The hub itself waits until every other rank is
linked to it, and tells them all.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from aiocoll.engine.control.messages import ControlMessage
from aiocoll.engine.job.context import Context

if TYPE_CHECKING:
    from aiocoll.engine.control.star import ControlPlane
    from aiocoll.engine.receiver import Receiver

__all__ = ["Departure"]

#: Seconds for which the hub lets others end first: ranks that end together are spared a sequence of new hubs.
PATIENCE = 0.05
#: Seconds after which a rank ends even if not all others have learned of it.
PARTING = 1.0


class Departure:
    """The end of this rank, and as the hub the relay of the ends of others.

    Args:
        context: of the endpoint.
        control: the star of control links.
    """

    _receiver: Receiver

    def __init__(self, context: Context, control: ControlPlane) -> None:
        self._context = context
        self._control = control
        # As the hub: ranks that ended in this turn of the loop, the links of each, and the groups each continued
        # elsewhere.
        self._ended: list[tuple[int, list[int], list[int]]] = []
        self._finished: asyncio.Future[None] | None = None
        self._patient = True
        self._notified: int | None = None

    def connect(self, receiver: Receiver) -> None:
        """Set the part that knows the data links of this rank."""
        self._receiver = receiver

    async def run(self) -> None:
        """Tell all other ranks that this one ends, unless `goodbye` will tell them; give up after a while."""
        self._finished = self._context.loop.create_future()
        call_later = self._context.runtime.call_later
        timers = call_later(PATIENCE, self._stop_waiting), call_later(PARTING, self.finish)
        self.advance()
        try:
            await self._finished
        finally:
            for timer in timers:
                timer.cancel()

    def goodbye(self) -> None:
        """Tell every linked peer that this rank ends in order."""
        for link in self._control.links:
            if link.peer != self._notified:
                self._control.tell(link.peer, self._end())

    def advance(self) -> None:
        """Take the next step, if this rank is ending: a link was opened, or a rank has gone."""
        if self._finished is None or self._finished.done():
            return
        control, rank, hub = self._control, self._context.rank, self._control.hub
        if control.is_alone:
            self.finish()
        elif rank == hub:
            others = (each for each in range(self._context.world_size) if each != rank)
            if not self._patient and all(map(control.linked, others)):
                self.finish()
        elif control.link(hub) is not None and self._notified != hub:
            self._notified = hub
            control.tell(hub, self._end())

    def finish(self) -> None:
        """All ranks that must know that this one ends know it."""
        if self._finished is not None and not self._finished.done():
            self._finished.set_result(None)

    def ended(self, peer: int, linked: list[int], moved: list[int]) -> None:
        """A rank ends; a rank that is not the hub tells only the hub, which tells the others."""
        was_hub = peer == self._control.hub
        self._control.gone(peer)
        if not was_hub:
            if not self._ended:
                self._context.runtime.call_soon(self._relay)
            self._ended.append((peer, linked, moved))

    def _relay(self) -> None:
        """Tell the others which ranks have ended; when many end in one turn of the loop, most need not be told."""
        ended, self._ended = self._ended, []
        for rank in range(self._context.world_size):
            others = [each for each in ended if each[0] != rank]
            if others:
                self._control.flood({"t": "ended", "ranks": others}, [rank])
        for rank, _, _ in ended:
            if self._control.link(rank) is not None:
                self._control.tell(rank, {"t": "known"})

    def _end(self) -> ControlMessage:
        """Return the message that this rank ends, which lists its data links."""
        return {"t": "end", **self._receiver.parting()}

    def _stop_waiting(self) -> None:
        self._patient = False
        self.advance()
