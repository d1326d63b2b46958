"""Splits of a group: records of this rank's calls, to detect ranks that split the group differently.

A split sends no message: every rank counts its calls and stores its list. The id of a sub-group is a hash that
includes the list, so ranks with different lists derive different ids and cannot exchange messages. A message about a
pending operation of a sub-group carries the calls that made the group. A rank that receives it and is not in that group
compares them with its own calls.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from aiocoll.engine.control.causes import cause_of
from aiocoll.engine.control.closed_groups import ClosedGroups
from aiocoll.engine.control.star import ControlPlane
from aiocoll.engine.control.unmade_groups import GROUPS, UnmadeGroups
from aiocoll.engine.job.ids import group_id
from aiocoll.errors import CollectiveMismatchError, GroupError

if TYPE_CHECKING:
    from aiocoll.engine.communicator import Communicator

__all__ = ["Split", "Splits", "handle_foreign_message"]


class Split(NamedTuple):
    """A call of `split_group` or `split` on one rank.

    Attributes:
        parent: id of the group that was split.
        number: number of the call, counted from 0.
        name: the group name as given, or None.
        ranks: the list that contains this rank, numbered as in the job, in the order of the new group; empty if none
        does.
    """

    parent: int
    number: int
    name: str | None
    ranks: tuple[int, ...]

    def identity(self) -> int:
        """Return the id of the group that the split made."""
        return group_id(f"{self.parent}\0split\0{tuple(self)}")


class Splits:
    """Record of this rank's calls that split one group: how many there were, and the last `GROUPS` of them.

    Earlier calls are not compared: a peer that is so many groups behind breaks the protocol.
    """

    def __init__(self) -> None:
        self._kept: deque[Split | None] = deque(maxlen=GROUPS)
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def append(self, split: Split | None) -> None:
        """Record a split call of this rank; None if the list of ranks is not known yet."""
        self._kept.append(split)
        self._count += 1

    def is_kept(self, number: int) -> bool:
        """Return whether split call `number` has been made and is still recorded."""
        return self._count - len(self._kept) <= number < self._count

    def __getitem__(self, number: int) -> Split | None:
        return self._kept[number - self._count] if self.is_kept(number) else None

    def __setitem__(self, number: int, split: Split) -> None:
        if self.is_kept(number):
            self._kept[number - self._count] = split

    def known(self) -> int:
        """Return the number of split calls whose lists of ranks are known."""
        return self._count - self._kept.count(None)


def handle_foreign_message(
    groups: Mapping[int, Communicator],
    early: UnmadeGroups,
    closed: ClosedGroups,
    control: ControlPlane,
    peer: int,
    message: dict[str, Any],
) -> str | None:
    """Handle a message of `peer` about a group that this rank is not in: return a text for `peer`, or revoke the group.

    Args:
        groups: this rank's groups, by id.
        early: the groups that this rank has not made.
        closed: the groups that this rank has left.
        control: sends messages to other ranks.
        peer: the sender of the message.
        message: the message.

    Returns:
        A text for the peer about this rank, if this rank may still make the group; None otherwise.
    """
    history = [Split(parent, number, name, tuple(ranks)) for parent, number, name, ranks in message.get("split", ())]
    for level, theirs in enumerate(history):
        parent = groups.get(theirs.parent)
        if parent is None:
            if not closed.is_known(theirs.parent):
                break
            control.send(peer, {"t": "bye", "g": message["g"], "cause": None, "linked": False})
            return None
        mine = parent.splits[theirs.number]
        if mine == theirs or (mine is None and theirs.number < len(parent.splits) - GROUPS):
            continue
        if mine is not None:
            error: GroupError = _mismatch(parent, peer, theirs, mine)
            if (own := groups.get(mine.identity())) is not None:
                own.revoke(error)
        elif parent.cause is not None:
            error = parent.cause
        else:
            return f"which has split group {parent.name!r} only {parent.splits.known()} times"
        me = next(rank for rank, position in parent.position.items() if position == parent.rank)
        _refuse(early, control, peer, me, history[level:], error)
        return None
    return "which is not in the group"


def _refuse(
    early: UnmadeGroups, control: ControlPlane, peer: int, me: int, history: Sequence[Split], error: GroupError
) -> None:
    """Revoke the groups that `peer` has split off, and to which this rank, `me`, will never belong."""
    for split in history:
        identity = split.identity()
        early.refuse_group(identity, peer, None, split.ranks, me)
        control.send_to_others({"t": "revoke", "g": identity, "cause": cause_of(error)}, split.ranks)


def _mismatch(parent: Communicator, peer: int, theirs: Split, mine: Split) -> CollectiveMismatchError:
    """Return an error with both split calls, the lower rank's first, so that all ranks raise the same text."""
    calls = sorted([(parent.position[peer], theirs), (parent.rank, mine)])
    fields = [
        field
        for field, differ in (("ranks", theirs.ranks != mine.ranks), ("group_name", theirs.name != mine.name))
        if differ
    ]
    words = [
        f"rank {rank} called SPLIT_GROUP(ranks={[parent.position[each] for each in split.ranks]}"
        f"{'' if split.name is None else f', group_name={split.name!r}'}, SequenceNumber={split.number + 1})"
        for rank, split in calls
    ]
    return CollectiveMismatchError(
        f"Collectives differ in the following: {', '.join(fields)}. Group {parent.name!r}: {'; '.join(words)}",
        op="SPLIT_GROUP",
        seq=mine.number + 1,
        group=parent.name,
        ranks=[rank for rank, _ in calls],
    )
