"""What happens to a rank that has sent something unacceptable: it is told why, and everything else it sends is ignored.

Its links are closed and its groups fail on all ranks with an error that names it, whether it broke the protocol or an
exception was raised here while its message was handled: in both cases nobody knows what is missing from then on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeGuard

from aiocoll.engine.control.messages import PROTOCOL
from aiocoll.engine.control.sending import send_message
from aiocoll.engine.control.shapes import fitting
from aiocoll.engine.control.star import ControlPlane
from aiocoll.engine.failure.roster import Roster
from aiocoll.engine.job.context import Context
from aiocoll.errors import ProtocolError
from aiocoll.transport.base import Link
from aiocoll.transport.frame import Header

__all__ = ["LINGER", "Ignored", "Refusals", "cannot_be_taken"]

#: Seconds for which a link stays open to send what is queued, and for the peer to end its side too.
LINGER = 1.0


class Refusals:
    """The links of one endpoint that are being closed after a refusal.

    Args:
        context: of the endpoint.
        control: its control links.
        roster: is told which rank is refused.
        cut: stops the use of the data links to a rank and returns them.
        ended: called with a rank that had ended before it was refused.
    """

    def __init__(
        self,
        context: Context,
        control: ControlPlane,
        roster: Roster,
        cut: Callable[[int], list[Link]],
        ended: Callable[[int], None],
    ) -> None:
        self._context = context
        self._control = control
        self._roster = roster
        self._cut = cut
        self._ended = ended
        self._links: dict[Link, asyncio.TimerHandle] = {}

    def refuse(self, peer: int, error: Exception, link: Link | None = None) -> None:
        """End all contact with `peer`; `link` is one of its links that the endpoint has forgotten already."""
        words = str(error)
        if not isinstance(error, ProtocolError):
            words = f"rank {self._context.rank} could not take what rank {peer} sent: {error!r}"
        detail = fitting(words)
        links = [*([] if link is None else [link]), *self._control.detach(peer), *self._cut(peer)]
        if peer in self._roster.over and peer not in self._roster.dead:
            self._ended(peer)
        else:
            self._roster.died(peer, detail, how=PROTOCOL)
        self._control.remove_rank(peer)
        for each in links:
            send_message(each, {"t": "died", "rank": peer, "detail": detail, "how": PROTOCOL})
            each.sink = Ignored(self._lost)
            self._links[each] = self._context.runtime.call_later(LINGER, self._close, each)
            each.finish()

    def attempt(self, peer: int, take: Callable[..., Any], *args: Any) -> Any:
        """Call `take` with something of `peer` that has waited here; an exception ends the peer's links, too."""
        try:
            return take(*args)
        except Exception as error:
            self.refuse(peer, error)

    def close(self) -> None:
        """Close all links now."""
        for link in list(self._links):
            self._close(link)

    def _close(self, link: Link) -> None:
        self._lost(link, None)
        link.close()

    def _lost(self, link: Link, error: Exception | None) -> None:
        timer = self._links.pop(link, None)
        if timer is not None:
            timer.cancel()


class Ignored:
    """The sink of a link that is being closed: ignores what arrives."""

    def __init__(self, lost: Callable[[Link, Exception | None], None]) -> None:
        self.lost = lost

    def route(self, link: Link, header: Header) -> memoryview | None:
        """Give no memory: the payload is dropped."""
        return None

    def deliver(self, link: Link, header: Header, payload: memoryview | None) -> None:
        """Drop a frame."""

    def withdrawn(self, link: Link, header: Header) -> None:
        """Nothing to do: it is dropped anyway."""

    def drained(self, link: Link) -> None:
        """Nothing to do: nothing waits for it."""


def cannot_be_taken(error: Exception | None) -> TypeGuard[Exception]:
    """Whether a link ended because of what the peer sent, or because handling it raised an exception here."""
    return error is not None and not isinstance(error, OSError)
