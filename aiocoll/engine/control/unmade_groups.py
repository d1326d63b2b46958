"""What peers have said of groups that this rank has not made yet; it is heard when the group is made.

Ranks make groups without waiting for each other, so a rank may be behind. How much is kept is bounded for each peer,
whatever groups it names: frames by the windows of its link (`aiocoll.engine.links.channel`), the rest by numbers that
no honest rank comes near. A peer that goes beyond breaks the protocol.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, Protocol

from aiocoll.engine.control.messages import ControlMessage
from aiocoll.errors import ProtocolError
from aiocoll.transport.frame import Header

__all__ = ["Early", "Kept", "Source", "Unmade", "keep_message"]

#: Groups that one peer may speak of before this rank has made them: it would have to be thousands of calls of
#: `split_group` ahead, each of which made a group that it has used, left or revoked by now.
GROUPS = 4096
#: Messages about CUDA devices of one peer for one group: before all have said what they have, each says that once.
DEVICE_MESSAGES = 16


class Source(Protocol):
    """What a frame that waits has come on.

    Attributes:
        peer: who has sent it.
    """

    peer: int

    def hold(self, header: Header) -> None:
        """Count a frame that has to wait."""

    def release(self, header: Header) -> None:
        """A frame that has waited does so no more."""

    def redeliver(self, deliver: Callable[..., bool], header: Header, payload: bytes) -> None:
        """Hand on a frame that has waited."""


#: A frame that waits, and what it has come on.
Kept = tuple[Source, Header, bytes]


class Unmade:
    """One group.

    Attributes:
        frames: for it, in the order in which they have come.
        messages: about CUDA devices, and whose they are.
        cause: why it was revoked, if it was.
        departed: ranks that have left it.
        peers: that have spoken of it.
    """

    def __init__(self) -> None:
        self.frames: list[Kept] = []
        self.messages: list[tuple[int, ControlMessage]] = []
        self.cause: dict[str, Any] | None = None
        self.departed: set[int] = set()
        self.peers: set[int] = set()


class Early:
    """All groups of one endpoint that are not made, or never will be."""

    def __init__(self) -> None:
        self._unmade: dict[int, Unmade] = {}
        self._named: Counter[int] = Counter()
        self._over: set[int] = set()
        self._disowned: Counter[int] = Counter()

    def is_over(self, identity: int) -> bool:
        """Whether this rank has left the group, or will never be in it."""
        return identity in self._over

    def unmade(self, identity: int, peer: int) -> Unmade:
        """Return what is kept for a group of which `peer` has spoken.

        Raises:
            ProtocolError: it has spoken of too many.
        """
        found = self._unmade.get(identity)
        if found is None or peer not in found.peers:
            if self._named[peer] >= GROUPS:
                raise ProtocolError(f"rank {peer} has spoken of more than {GROUPS} groups that are not made yet")
            self._named[peer] += 1
            found = found or self._unmade.setdefault(identity, Unmade())
            found.peers.add(peer)
        return found

    def keep_frame(self, channel: Source, header: Header, payload: memoryview | None) -> bool:
        """Keep a frame; True if its group is over instead."""
        identity = header[3]
        if identity in self._over:
            return True
        channel.hold(header)
        self.unmade(identity, channel.peer).frames.append((channel, header, b"" if payload is None else bytes(payload)))
        return False

    def keep_message(self, identity: int, peer: int, message: ControlMessage) -> None:
        """Keep a message about CUDA devices."""
        if identity not in self._over:
            keep_message(self.unmade(identity, peer).messages, peer, message)

    def keep_cause(self, identity: int, peer: int, cause: dict[str, Any]) -> None:
        """Keep why a group was revoked; the first cause stays."""
        if identity not in self._over:
            unmade = self.unmade(identity, peer)
            unmade.cause = unmade.cause or cause

    def keep_departure(self, identity: int, peer: int) -> None:
        """Keep that a rank has left a group."""
        if identity not in self._over:
            self.unmade(identity, peer).departed.add(peer)

    def take(self, identity: int) -> Unmade:
        """Return what was kept for a group, which is made now."""
        found = self._unmade.pop(identity, None) or Unmade()
        self._named.subtract(found.peers)
        return found

    def end(self, identity: int) -> None:
        """Keep nothing more for a group: this rank has left it."""
        self._over.add(identity)

    def disown(self, identity: int, peer: int) -> None:
        """Keep nothing for a group of which `peer` has spoken: this rank will never be in it."""
        if identity in self._over:
            return
        self._disowned[peer] += 1
        if self._disowned[peer] > GROUPS:
            raise ProtocolError(f"rank {peer} has split off more than {GROUPS} groups that this rank is not in")
        self._over.add(identity)
        for channel, header, _ in self.take(identity).frames:
            channel.release(header)


def keep_message(messages: list[tuple[int, ControlMessage]], peer: int, message: ControlMessage) -> None:
    """Keep a message about CUDA devices among others, until something hears them.

    Raises:
        ProtocolError: there are too many of that rank.
    """
    if sum(each == peer for each, _ in messages) >= DEVICE_MESSAGES:
        raise ProtocolError(
            f"rank {peer} sent more than {DEVICE_MESSAGES} control messages about devices not in use yet"
        )
    messages.append((peer, message))
