"""The orderly end of ranks: all other ranks are notified before a closed link could look like a loss.

A rank that ends notifies the hub. The hub relays the notice to the other ranks and replies. When the hub itself ends,
it waits until every other rank is linked to it, and notifies all of them.
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

#: Seconds that an ending hub waits for other ranks to end before it. When all ranks end together, this avoids new hubs.
MAX_WAIT = 0.05
#: Seconds after which a rank ends even if it could not notify all ranks.
PARTING = 1.0


class Departure:
    """The orderly end of this rank. On the hub, this class also relays the notices of other ranks that end.

    Args:
        context: the endpoint's context.
        control: the star of control links.
    """

    _receiver: Receiver

    def __init__(self, context: Context, control: ControlPlane) -> None:
        self._context = context
        self._control = control
        # On the hub: each rank that ended in this iteration of the loop, the ranks with data links to it, and its
        # groups that have a successor.
        self._ended: list[tuple[int, list[int], list[int]]] = []
        self._finished: asyncio.Future[None] | None = None
        self._patient = True
        self._notified: int | None = None

    def connect(self, receiver: Receiver) -> None:
        """Set the receiver of control messages, which also lists the data links of this rank."""
        self._receiver = receiver

    async def run(self) -> None:
        """Notify the other ranks that this rank ends, within `PARTING` seconds; see `send_goodbyes`."""
        self._finished = self._context.loop.create_future()
        call_later = self._context.runtime.call_later
        timers = call_later(MAX_WAIT, self._stop_waiting), call_later(PARTING, self.finish)
        self.advance()
        try:
            await self._finished
        finally:
            for timer in timers:
                timer.cancel()

    def send_goodbyes(self) -> None:
        """Send the notice of this rank's end to every linked peer that has not received the notice yet."""
        for link in self._control.links:
            if link.peer != self._notified:
                self._control.send(link.peer, self._make_end_message())

    def advance(self) -> None:
        """Continue this rank's end after a link was opened or a rank has gone: send the notice, or finish."""
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
            control.send(hub, self._make_end_message())

    def finish(self) -> None:
        """Let `run` return: every rank that needs the notice has received it, or the time is up."""
        if self._finished is not None and not self._finished.done():
            self._finished.set_result(None)

    def on_end(self, peer: int, linked: list[int], moved: list[int]) -> None:
        """Handle the notice that `peer` has ended. On the hub, schedule a relay of the notice to the other ranks."""
        was_hub = peer == self._control.hub
        self._control.remove_rank(peer)
        if not was_hub:
            if not self._ended:
                self._context.runtime.call_soon(self._relay)
            self._ended.append((peer, linked, moved))

    def _relay(self) -> None:
        """Notify each remaining rank of all ended ranks, in one message per remaining rank."""
        ended, self._ended = self._ended, []
        for rank in range(self._context.world_size):
            others = [each for each in ended if each[0] != rank]
            if others:
                self._control.send_to_others({"t": "ended", "ranks": others}, [rank])
        for rank, _, _ in ended:
            if self._control.link(rank) is not None:
                self._control.send(rank, {"t": "known"})

    def _make_end_message(self) -> ControlMessage:
        """Return the notice of this rank's end, which lists its data links."""
        return {"t": "end", **self._receiver.make_end_fields()}

    def _stop_waiting(self) -> None:
        self._patient = False
        self.advance()
