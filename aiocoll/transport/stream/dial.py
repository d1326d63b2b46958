"""One attempt to open a link, which may take many dials: how long it goes on, and why there is no link yet."""

from __future__ import annotations

import asyncio
import math

from aiocoll.errors import PeerLostError
from aiocoll.sockets import UNREACHABLE_AFTER
from aiocoll.transport.stream.dial_address import DialAddress

__all__ = ["SILENT", "Dial"]

SILENT = "it does not answer"


class Dial:
    """A `connect` in progress; bring `limit` forward to interrupt what it is doing.

    Args:
        peer: the rank that is dialled.
        target: where.
        done: set when this is over.
        now: when it begins.

    Attributes:
        target: where it is dialled now.
        reason: why there is no link yet.
    """

    __slots__ = ("_began", "_peer", "_silent_since", "done", "limit", "reason", "target")

    def __init__(self, peer: int, target: DialAddress, done: asyncio.Future[None], now: float) -> None:
        self._peer = peer
        self._began = self._silent_since = now
        self.done = done
        self.target = target
        self.limit: asyncio.Timeout | None = None
        self.reason = SILENT

    def interrupt(self, now: float) -> None:
        """End what it is doing, so that it looks at once for what has changed."""
        if self.limit is not None and not self.limit.expired():
            self.limit.reschedule(now)

    def begins(self, now: float) -> None:
        """A connection is attempted."""
        self._silent_since = min(self._silent_since, now)

    def answered(self) -> None:
        """The peer's host has answered, be it with a refusal."""
        self._silent_since = math.inf

    def left(self, now: float, timeout: float, *, impatient: bool) -> float:
        """Return for how many seconds more to dial, `timeout` in all; fewer if silence of a host is to end it."""
        end = self._began + timeout
        return (min(end, self._silent_since + UNREACHABLE_AFTER) if impatient else end) - now

    def failure(self, now: float) -> PeerLostError:
        """Return what to raise if there is no more time."""
        return self.target.unreachable(self._peer, f"{self.reason} (tried for {now - self._began:.1f} s)")
