"""Rejection of a rank that has sent an unacceptable message.

The rank receives the reason, its links are closed, and everything else it sends is ignored. Its groups fail on all
ranks with an error that names it. A rank is rejected if it broke the protocol, or if handling its message raised an
exception here: in both cases the missing data is unknown.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeGuard

from aiocoll.engine.control.messages import PROTOCOL
from aiocoll.engine.control.sending import send_message
from aiocoll.engine.control.shapes import fit_text
from aiocoll.engine.control.star import ControlPlane
from aiocoll.engine.failure.roster import Roster
from aiocoll.engine.job.context import Context
from aiocoll.errors import ProtocolError
from aiocoll.transport.base import Link
from aiocoll.transport.frame import Header

__all__ = ["LINGER", "DiscardingSink", "Refusals", "is_data_error"]

#: Seconds for which a link to a rejected peer stays open, to send queued data and to let the peer close its end.
LINGER = 1.0


class Refusals:
    """The links of one endpoint that are closing because this rank has rejected their peers.

    Args:
        context: the endpoint's context.
        control: the control plane.
        roster: the record of lost ranks.
        cut: stops the use of the data links to a rank and returns them.
        ended: callback for a rank that had ended before it was rejected.
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
        """Reject `peer` and close its links, and also `link`, which the endpoint has already dropped."""
        text = str(error)
        if not isinstance(error, ProtocolError):
            text = f"rank {self._context.rank} could not handle a message of rank {peer}: {error!r}"
        detail = fit_text(text)
        links = [*([] if link is None else [link]), *self._control.detach(peer), *self._cut(peer)]
        if peer in self._roster.gone and peer not in self._roster.dead:
            self._ended(peer)
        else:
            self._roster.record_loss(peer, detail, how=PROTOCOL)
        self._control.remove_rank(peer)
        for each in links:
            send_message(each, {"t": "died", "rank": peer, "detail": detail, "how": PROTOCOL})
            each.sink = DiscardingSink(self._lost)
            self._links[each] = self._context.runtime.call_later(LINGER, self._close, each)
            each.finish()

    def attempt(self, peer: int, take: Callable[..., Any], *args: Any) -> Any:
        """Call `take` with a buffered message of `peer`. If `take` raises an exception, reject the peer."""
        try:
            return take(*args)
        except Exception as error:
            self.refuse(peer, error)

    def close(self) -> None:
        """Close the links of all rejected peers now."""
        for link in list(self._links):
            self._close(link)

    def _close(self, link: Link) -> None:
        self._lost(link, None)
        link.close()

    def _lost(self, link: Link, error: Exception | None) -> None:
        timer = self._links.pop(link, None)
        if timer is not None:
            timer.cancel()


class DiscardingSink:
    """A handler for the frames of a link that is closing. It discards all frames."""

    def __init__(self, lost: Callable[[Link, Exception | None], None]) -> None:
        self.lost = lost

    def route(self, link: Link, header: Header) -> memoryview | None:
        """Return None, so that the link drops the payload."""
        return None

    def deliver(self, link: Link, header: Header, payload: memoryview | None) -> None:
        """Drop a frame that has arrived."""

    def withdrawn(self, link: Link, header: Header) -> None:
        """Do nothing for a withdrawn frame, because all frames are dropped."""

    def drained(self, link: Link) -> None:
        """Do nothing, because no code waits until the link can accept more frames."""


def is_data_error(error: Exception | None) -> TypeGuard[Exception]:
    """Return whether a link ended because of the peer's data, or because handling the data raised an exception."""
    return error is not None and not isinstance(error, OSError)
