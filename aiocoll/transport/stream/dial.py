"""One attempt to open a link, which may take many dials: how long it goes on, and why there is no link yet."""

from __future__ import annotations

import asyncio
import math
from functools import partial

from aiocoll.errors import PeerLostError
from aiocoll.runtime import Runtime
from aiocoll.sockets import UNREACHABLE_AFTER, is_ready
from aiocoll.transport.stream.dial_address import DialAddress
from aiocoll.transport.stream.patience import Patience

__all__ = ["SILENT", "Dial"]

SILENT = "it does not answer"


class Dial:
    """A `connect` in progress; bring `limit` forward to interrupt what it is doing.

    Args:
        runtime: clock and timers.
        peer: the rank that is dialled.
        target: where.

    Attributes:
        done: set when this is over.
        target: where it is dialled now.
        reason: why there is no link yet.
    """

    __slots__ = (
        "_arrived",
        "_began",
        "_blocked",
        "_patience",
        "_peer",
        "_runtime",
        "_silent_since",
        "done",
        "limit",
        "reason",
        "target",
    )

    def __init__(self, runtime: Runtime, peer: int, target: DialAddress) -> None:
        self._runtime = runtime
        self._peer = peer
        self._began = self._silent_since = runtime.time()
        self._blocked = 0.0
        self._patience: Patience | None = None
        self.done: asyncio.Future[None] = runtime.loop.create_future()
        self.target = target
        self.limit: asyncio.Timeout | None = None
        self.reason = SILENT
        self.watch(-1)

    def watch(self, fd: int, *, connecting: bool = False) -> None:
        """Set the socket of this attempt; -1 for none."""
        self._arrived = partial(is_ready, fd, to_write=connecting)

    def allow(self, seconds: float) -> None:
        """Interrupt what it is doing after so many seconds, unless `stop` comes before."""
        self._patience = Patience(
            self._runtime, seconds, lambda: self.interrupt(self._runtime.time()), lambda: self._arrived()
        )

    def stop(self) -> None:
        """Remove the limit of `allow`. The seconds for which the loop of this rank was blocked do not count."""
        if self._patience is not None:
            self._patience.cancel()
            self._blocked += self._patience.blocked
            self._silent_since += self._patience.blocked
            self._patience = None

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
        end = self._began + self._blocked + timeout
        return (min(end, self._silent_since + UNREACHABLE_AFTER) if impatient else end) - now

    def failure(self, now: float) -> PeerLostError:
        """Return what to raise if there is no more time."""
        return self.target.unreachable(self._peer, f"{self.reason} (tried for {now - self._began:.1f} s)")
