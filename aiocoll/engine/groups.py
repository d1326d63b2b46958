"""The groups that one rank has made, and buffers for groups that only other ranks have made."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from aiocoll.engine.control.causes import cause_of, error_from
from aiocoll.engine.control.closed_groups import ClosedGroups, Goodbyes
from aiocoll.engine.control.messages import DEVICE, ControlMessage
from aiocoll.engine.control.shapes import fit_text
from aiocoll.engine.control.star import ControlPlane
from aiocoll.engine.control.unmade_groups import UnmadeGroup, UnmadeGroups
from aiocoll.engine.job.context import Context
from aiocoll.engine.links.channel import Channel
from aiocoll.engine.split_history import handle_foreign_message
from aiocoll.errors import GroupError, PeerLostError
from aiocoll.transport.frame import Header

if TYPE_CHECKING:
    from aiocoll.engine.communicator import Communicator

__all__ = ["Groups"]


class Groups:
    """The groups of one endpoint: open groups, closed groups, and groups that this rank has not made yet.

    Args:
        context: the endpoint's context.
        control: sends messages to other ranks, such as the end of a group.

    Attributes:
        made: the groups that this rank is in, by id.
        closed: the groups that this rank has left.
        early: the groups that this rank has not made, with their frames and messages.
        finished: ranks that have ended, and whose frames have all arrived.
    """

    _forget: Callable[[int, Collection[int]], None]
    _release: Callable[[int, int], None]

    def __init__(self, context: Context, control: ControlPlane) -> None:
        self._context = context
        self._control = control
        self.made: dict[int, Communicator] = {}
        self._goodbyes: dict[int, Goodbyes] = {}
        self.closed = ClosedGroups(lambda identity, ranks: self._forget(identity, ranks))
        self.early = UnmadeGroups(self.closed)
        self.finished: set[int] = set()

    def connect(self, forget: Callable[[int, Collection[int]], None], release: Callable[[int, int], None]) -> None:
        """Set the callbacks for closed groups.

        Args:
            forget: callback for a closed group about which nothing arrives any more, with its id and ranks.
            release: callback for a rank that has left a closed group, with the rank and the group's id: the rank posts
                nothing more.
        """
        self._forget, self._release = forget, release

    def add(self, group: Communicator) -> UnmadeGroup:
        """Add a group; return the frames and messages that its other ranks have already sent.

        Raises:
            GroupError: another group has the same id. All ranks of the group raise this error.
        """
        identity = group.id
        other = self.made.get(identity)
        name = self.closed.name(identity) if other is None else other.name
        if name is not None:
            raise self._refuse(group, other, name)
        self.made[identity] = group
        self.closed.reuse(identity)
        goodbyes = self._goodbyes[identity] = Goodbyes(fit_text(group.name), group.position)
        early = self.early.take(identity, goodbyes.name, group.position)
        for (rank, _), each in early.goodbyes.items():
            goodbyes.mark(rank, bool(each.frames), bool(each.notes))
        return early

    def remove(self, group: Communicator, members: Iterable[int]) -> None:
        """Remove a group that this rank leaves; `members` may still send frames or messages about it."""
        del self.made[group.id]
        self.closed.close(group.id, self._goodbyes.pop(group.id), members)

    def _refuse(self, group: Communicator, other: Communicator | None, name: str) -> GroupError:
        """Revoke a group on all its ranks, because its id equals that of a closed group or of the group `other`."""
        error = GroupError(
            f"group {group.name!r} cannot be made: its id {group.id:#x} is that of group {name!r}, which is open, or "
            "which only some of its ranks have closed; make another group, which gets a different id",
            group=group.name,
        )
        me, wire_name = self._context.rank, fit_text(group.name)
        message = {"t": "bye", "g": group.id, "name": wire_name, "cause": cause_of(error), "linked": False}
        self._control.send_to_others(message, group.ranks)
        for each in group.channels:
            if other is None or each.peer not in other.position:
                each.purge(group.id, has_left=False)
        goodbyes = self.early.drop(group.id, wire_name, group.position)
        self.closed.close(group.id, goodbyes, (rank for rank in group.ranks if rank != me))
        return error

    def _find_group(self, identity: int, peer: int, name: str | None = None) -> Communicator | None:
        """Return the group to which a message of `peer` belongs; None if this rank has not made the group."""
        goodbyes = self._goodbyes.get(identity)
        return self.made[identity] if goodbyes is not None and goodbyes.matches(peer, name) else None

    def ranks_of(self, identity: int, peer: int) -> Sequence[int] | None:
        """Return the ranks of a group with this id that contains this rank and `peer`; None if there is none."""
        group = self._find_group(identity, peer)
        return None if group is None else group.ranks

    def record_name(self, identity: int, peer: int) -> bool:
        """Record a group id that `peer` has sent; return False if all ranks of that group have left."""
        if self._find_group(identity, peer) is not None or self.closed.name(identity) is not None:
            return True
        if self.closed.sends_notes(identity, peer, direct=False):
            return False
        self.early.buffer_of(identity, peer)
        return True

    def keep_frame(self, source: Channel, header: Header, payload: memoryview | None) -> bool:
        """Buffer a frame of a group that this rank has not made; return True if the frame is dropped instead."""
        return self._context.closed or self.early.keep_frame(source, header, payload)

    def on_goodbye(self, rank: int, message: ControlMessage, direct: bool) -> None:
        """Handle the goodbye of a rank that has left a group.

        `direct` is True if the message arrived on the data link.
        """
        identity, name = message["g"], message.get("name")
        if message["cause"] is not None:
            self.on_revocation(rank, message, direct)
        frames, notes = direct or not message["linked"], not direct
        if (group := self._find_group(identity, rank, name)) is not None:
            self._goodbyes[identity].mark(rank, frames, notes)
            if frames:
                group.on_departure(rank)
        elif self.closed.mark(identity, rank, name, frames, notes):
            if frames:
                self._release(rank, identity)
        else:
            self.early.store_goodbye(identity, rank, name, frames, notes)

    def on_rank_end(self, rank: int, linked: Sequence[int] = (), direct: bool = False) -> None:
        """Record that a rank has ended and left all groups, unless another notice follows on its data link."""
        frames = self._context.rank not in linked
        if frames:
            self.finished.add(rank)
        self.closed.end([rank], frames, notes=not direct)
        for identity, group in list(self.made.items()):
            peer = group.position.get(rank)
            if peer is not None:
                self._goodbyes[identity].mark(rank, frames, not direct)
                if frames and peer not in group.left:
                    group.on_departure(rank)

    def own_death(self, cause: dict[str, Any] | None) -> str | None:
        """Return the text of a group's failure if its cause is the death of this rank; None otherwise."""
        if cause is not None and cause["kind"] == PeerLostError.__name__ and cause["how"] == "killed":
            me = self._context.rank
            for group in self.made.values():
                if group.name == cause["group"] and group.position[me] in cause["ranks"]:
                    return str(cause["text"])
        return None

    def on_revocation(self, rank: int, message: ControlMessage, direct: bool = False) -> None:
        """Handle the revocation of a group by another rank.

        `direct` is True if the message arrived on the data link.
        """
        self._context.transport.catch_up()
        identity, name = message["g"], message.get("name")
        if (group := self._find_group(identity, rank, name)) is not None:
            group.revoke(error_from(message["cause"]), notify=False)
        else:
            self.early.keep_cause(identity, rank, name, message["cause"], direct)

    def handle(self, peer: int, message: ControlMessage, direct: bool) -> None:
        """Pass a control message about a device or an operation to its group.

        `direct` is True if the message arrived on the data link.
        """
        identity = message["g"]
        group = self._find_group(identity, peer)
        if group is not None and message["t"] == DEVICE:
            group.devices.handle(peer, message)
        elif group is not None:
            group.stalls.handle(group.position[peer], message)
        elif message["t"] == DEVICE:
            self.early.keep_message(identity, peer, message, direct)
        else:
            last = handle_foreign_message(self.made, self.early, self.closed, self._control, peer, message)
            if last is not None and message["t"] == "query":
                answer = {"t": "absent", "g": identity, "op": message["op"], "last": last, "age": None, "asked": True}
                self._control.send(peer, answer)
