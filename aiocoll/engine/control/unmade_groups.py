"""Frames and messages for groups that this rank has not made yet; they are delivered when the group is made.

Ranks make groups without waiting for each other, so a rank may be behind. What is buffered is bounded for each peer,
whatever groups it names: frames by the window of its link (`aiocoll.engine.links.channel`), everything else by limits
far above what a correct peer needs. A peer that exceeds a limit breaks the protocol.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, Protocol

from aiocoll.engine.control.messages import ControlMessage
from aiocoll.errors import ProtocolError
from aiocoll.transport.frame import Header

__all__ = ["Early", "Kept", "Source", "Unmade", "keep_message"]

#: Groups that one peer may name before this rank has made them: the peer would have to be thousands of calls of
#: `split_group` ahead, each for a group that it has used, left or revoked by now.
GROUPS = 4096
#: Messages about CUDA devices of one peer for one group: before all ranks have described theirs, each sends one.
DEVICE_MESSAGES = 16


class Source(Protocol):
    """The channel on which a waiting frame arrived.

    Attributes:
        peer: the sender.
    """

    peer: int

    def hold(self, header: Header) -> None:
        """Count a frame that has to wait."""

    def release(self, header: Header) -> None:
        """Stop counting a frame that has waited."""

    def redeliver(self, deliver: Callable[..., bool], header: Header, payload: bytes) -> None:
        """Deliver a frame that has waited."""


#: A waiting frame: its channel, header and payload.
Kept = tuple[Source, Header, bytes]


class Unmade:
    """What has arrived for one group that is not made yet.

    Attributes:
        frames: in order of arrival.
        messages: about CUDA devices, with their senders.
        cause: why it was revoked, if it was.
        departed: ranks that have left it.
        peers: that have named it.
    """

    def __init__(self) -> None:
        self.frames: list[Kept] = []
        self.messages: list[tuple[int, ControlMessage]] = []
        self.cause: dict[str, Any] | None = None
        self.departed: set[int] = set()
        self.peers: set[int] = set()


class Early:
    """All groups of one endpoint that are not made yet, have been left, or will never be made."""

    def __init__(self) -> None:
        self._unmade: dict[int, Unmade] = {}
        self._named: Counter[int] = Counter()
        self._over: set[int] = set()
        self._disowned: Counter[int] = Counter()

    def is_over(self, identity: int) -> bool:
        """Whether this rank has left the group, or will never be in it."""
        return identity in self._over

    def unmade(self, identity: int, peer: int) -> Unmade:
        """Return the buffer of a group that `peer` has named.

        Raises:
            ProtocolError: it has named too many.
        """
        found = self._unmade.get(identity)
        if found is None or peer not in found.peers:
            if self._named[peer] >= GROUPS:
                raise ProtocolError(f"rank {peer} has named more than {GROUPS} groups that are not made yet")
            self._named[peer] += 1
            found = found or self._unmade.setdefault(identity, Unmade())
            found.peers.add(peer)
        return found

    def keep_frame(self, channel: Source, header: Header, payload: memoryview | None) -> bool:
        """Buffer a frame; True if its group is over, and the frame is dropped instead."""
        identity = header[3]
        if identity in self._over:
            return True
        channel.hold(header)
        self.unmade(identity, channel.peer).frames.append((channel, header, b"" if payload is None else bytes(payload)))
        return False

    def keep_message(self, identity: int, peer: int, message: ControlMessage) -> None:
        """Buffer a message about CUDA devices."""
        if identity not in self._over:
            keep_message(self.unmade(identity, peer).messages, peer, message)

    def keep_cause(self, identity: int, peer: int, cause: dict[str, Any]) -> None:
        """Store why a group was revoked; the first cause stays."""
        if identity not in self._over:
            unmade = self.unmade(identity, peer)
            unmade.cause = unmade.cause or cause

    def keep_departure(self, identity: int, peer: int) -> None:
        """Store that a rank has left a group."""
        if identity not in self._over:
            self.unmade(identity, peer).departed.add(peer)

    def take(self, identity: int) -> Unmade:
        """Return and remove what is buffered for a group that is made now."""
        found = self._unmade.pop(identity, None) or Unmade()
        self._named.subtract(found.peers)
        return found

    def end(self, identity: int) -> None:
        """Buffer nothing more for a group: this rank has left it."""
        self._over.add(identity)

    def disown(self, identity: int, peer: int) -> None:
        """Buffer nothing for a group that `peer` has named: this rank will never be in it."""
        if identity in self._over:
            return
        self._disowned[peer] += 1
        if self._disowned[peer] > GROUPS:
            raise ProtocolError(f"rank {peer} has split off more than {GROUPS} groups that this rank is not in")
        self._over.add(identity)
        for channel, header, _ in self.take(identity).frames:
            channel.release(header)


def keep_message(messages: list[tuple[int, ControlMessage]], peer: int, message: ControlMessage) -> None:
    """Append a message about CUDA devices to those that wait for a handler.

    Raises:
        ProtocolError: that rank has sent too many.
    """
    if sum(each == peer for each, _ in messages) >= DEVICE_MESSAGES:
        raise ProtocolError(
            f"rank {peer} sent more than {DEVICE_MESSAGES} control messages about devices not in use yet"
        )
    messages.append((peer, message))
