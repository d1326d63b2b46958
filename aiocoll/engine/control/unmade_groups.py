"""Buffers of frames and messages that arrive for groups which this rank has not made yet.

Ranks make groups without waiting for each other, so a rank may be behind. The buffered frames and messages are
delivered when the group is made. Their number is limited per peer, however many groups the peer names. The window of
the peer's link limits frames (`aiocoll.engine.links.channel`). Other limits are far above the needs of a correct peer.
A peer that exceeds a limit breaks the protocol.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from typing import TYPE_CHECKING, Any, TypeVar

from aiocoll.engine.control.closed_groups import ClosedGroups, Goodbyes
from aiocoll.engine.control.messages import ControlMessage
from aiocoll.errors import ProtocolError
from aiocoll.transport.frame import Header

if TYPE_CHECKING:
    from aiocoll.engine.links.channel import Channel

__all__ = ["BufferedFrame", "UnmadeGroup", "UnmadeGroups", "keep_message"]

#: Maximum number of groups that one peer may name before this rank has made them. To exceed the limit, a peer must be
#: thousands of `split_group` calls ahead, and must have used, left or revoked each of the new groups.
GROUPS = 4096
#: Maximum number of messages about CUDA devices from one peer for one group. A correct peer sends only one before all
#: ranks have described their devices.
DEVICE_MESSAGES = 16


T = TypeVar("T")

#: Key of the buffers: the sender of a message, and the group name in the message.
Key = tuple[int, str | None]


#: A buffered frame: its channel, header and payload.
BufferedFrame = tuple["Channel", Header, bytes]


class UnmadeGroup:
    """The buffered frames and messages for one group id that this rank has not used yet.

    Attributes:
        frames: the frames, in order of arrival.
        messages: the messages about CUDA devices, with their senders.
        causes: the first cause of revocation, by sender and group name.
        goodbyes: the goodbyes of ranks that have left the group, by sender and group name.
        peers: the peers that have named the group, with the names: several only if ids collide.
    """

    def __init__(self) -> None:
        self.frames: list[BufferedFrame] = []
        self.messages: list[tuple[int, ControlMessage]] = []
        self.causes: dict[Key, dict[str, Any]] = {}
        self.goodbyes: dict[Key, Goodbyes] = {}
        self.peers: dict[int, set[str]] = {}

    def split(self, name: str | None, ranks: Collection[int]) -> UnmadeGroup:
        """Remove and return the entries of the group with this name and these ranks, among all groups with this id."""
        found, members = UnmadeGroup(), self.peers.keys() & set(ranks)
        found.frames = [kept for kept in self.frames if kept[0].peer in members]
        found.messages = [(peer, message) for peer, message in self.messages if peer in members]
        self.frames = [kept for kept in self.frames if kept[0].peer not in members]
        self.messages = [(peer, message) for peer, message in self.messages if peer not in members]
        found.causes = _pop_matching(self.causes, name, members)
        found.goodbyes = _pop_matching(self.goodbyes, name, members)
        for peer in members:
            others = {other for other in self.peers.pop(peer) if not _may_match(name, other)}
            if others:
                self.peers[peer] = others
        return found


def _pop_matching(kept: dict[Key, T], name: str | None, members: Collection[int]) -> dict[Key, T]:
    """Remove and return the entries that the ranks `members` have sent about the group called `name`."""
    return {key: kept.pop(key) for key in list(kept) if key[0] in members and _may_match(name, key[1])}


def _may_match(name: str | None, other: str | None) -> bool:
    """Return whether two names may belong to the same group. None stands for an unknown name."""
    return name == other or None in (name, other)


class UnmadeGroups:
    """The buffers of one endpoint for all groups that it has not made yet, or will never make.

    Args:
        closed: the groups that this rank has left.
    """

    def __init__(self, closed: ClosedGroups) -> None:
        self._closed = closed
        self._unmade: dict[int, UnmadeGroup] = {}
        self._named: Counter[int] = Counter()
        self._refused: Counter[int] = Counter()

    def buffer_of(self, identity: int, peer: int, name: str | None = None) -> UnmadeGroup:
        """Return the buffer for a group that a message of `peer` has named.

        Raises:
            ProtocolError: `peer` has named too many groups.
        """
        found = self._unmade.get(identity)
        names = None if found is None else found.peers.get(peer)
        if names is None or (names and name is not None and name not in names):
            if self._named[peer] >= GROUPS:
                raise ProtocolError(f"rank {peer} has named more than {GROUPS} groups that are not made yet")
            self._named[peer] += 1
        found = found or self._unmade.setdefault(identity, UnmadeGroup())
        names = found.peers.setdefault(peer, set())
        if name is not None:
            names.add(name)
        return found

    def keep_frame(self, channel: Channel, header: Header, payload: memoryview | None) -> bool:
        """Buffer a frame; return True if the frame is dropped instead, because its group is closed."""
        identity = header[3]
        if self._closed.sends_frames(identity, channel.peer):
            return True
        channel.hold(header)
        self.buffer_of(identity, channel.peer).frames.append(
            (channel, header, b"" if payload is None else bytes(payload))
        )
        return False

    def keep_message(self, identity: int, peer: int, message: ControlMessage, direct: bool) -> None:
        """Buffer a message about CUDA devices.

        `direct` is True if the message arrived on the data link.
        """
        if not self._closed.sends_notes(identity, peer, direct):
            keep_message(self.buffer_of(identity, peer).messages, peer, message)

    def keep_cause(self, identity: int, peer: int, name: str | None, cause: dict[str, Any], direct: bool) -> None:
        """Store why a group was revoked, unless a cause is stored already.

        `direct` is True if the message arrived on the data link.
        """
        if not self._closed.sends_notes(identity, peer, direct, name):
            self.buffer_of(identity, peer, name).causes.setdefault((peer, name), cause)

    def store_goodbye(self, identity: int, peer: int, name: str | None, frames: bool, notes: bool) -> None:
        """Store the goodbye of a rank that has left a group; see `ClosedGroups`."""
        unmade = self.buffer_of(identity, peer, name)
        unmade.goodbyes.setdefault((peer, name), Goodbyes(name, (peer,))).mark(peer, frames, notes)

    def take(self, identity: int, name: str | None, ranks: Collection[int]) -> UnmadeGroup:
        """Remove and return the buffer of a group that this rank is making now."""
        unmade = self._unmade.get(identity)
        if unmade is None:
            return UnmadeGroup()
        before = {peer: max(1, len(names)) for peer, names in unmade.peers.items()}
        found = unmade.split(name, ranks)
        self._named.subtract({peer: count - len(unmade.peers.get(peer, ())) for peer, count in before.items()})
        if not unmade.peers:
            del self._unmade[identity]
        return found

    def drop(self, identity: int, name: str | None, ranks: Collection[int]) -> Goodbyes:
        """Drop the buffer of a group that this rank will never make; return the goodbyes from the buffer."""
        found, goodbyes = self.take(identity, name, ranks), Goodbyes(name, ranks)
        for channel, header, _ in found.frames:
            channel.release(header)
        for (peer, _), each in found.goodbyes.items():
            goodbyes.mark(peer, bool(each.frames), bool(each.notes))
        return goodbyes

    def refuse_group(self, identity: int, peer: int, name: str | None, ranks: Collection[int], me: int) -> None:
        """Drop all messages, also later ones, about a group of `peer` to which this rank, `me`, will never belong."""
        if self._closed.is_known(identity):
            return
        self._refused[peer] += 1
        if self._refused[peer] > GROUPS:
            raise ProtocolError(f"rank {peer} has split off more than {GROUPS} groups that this rank is not in")
        self._closed.close(identity, self.drop(identity, name, ranks), (rank for rank in ranks if rank != me))


def keep_message(messages: list[tuple[int, ControlMessage]], peer: int, message: ControlMessage) -> None:
    """Append a message about CUDA devices to the messages that wait until a handler exists.

    Raises:
        ProtocolError: `peer` has sent too many.
    """
    if sum(each == peer for each, _ in messages) >= DEVICE_MESSAGES:
        raise ProtocolError(
            f"rank {peer} sent more than {DEVICE_MESSAGES} control messages about devices that are not in use yet"
        )
    messages.append((peer, message))
