"""Sub-groups that ranks have split off differently: how this is detected, and which ranks are told.

A split takes no message: every rank numbers its calls and stores its list. The id of a sub-group hashes the list, too,
so ranks with different lists cannot communicate. A message about a pending operation of a sub-group says how the group
was made; a rank that receives one and is not in that group compares it with its own calls.
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

__all__ = ["Split", "Splits", "stranger"]


class Split(NamedTuple):
    """One call of `split_group` or `split` on one rank.

    Attributes:
        parent: id of the group that was split.
        number: of the call, counted from 0.
        name: as given, or None.
        ranks: the list with this rank, as in the job, in the order of the new group; empty if there is none.
    """

    parent: int
    number: int
    name: str | None
    ranks: tuple[int, ...]

    def identity(self) -> int:
        """Return the id of the group that results."""
        return group_id(f"{self.parent}\0split\0{tuple(self)}")


class Splits:
    """This rank's calls that have split one group: their number, and the last `GROUPS` of them.

    Earlier ones are compared with nothing: a peer breaks the protocol if it is that many groups behind.
    """

    def __init__(self) -> None:
        self._kept: deque[Split | None] = deque(maxlen=GROUPS)
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def append(self, split: Split | None) -> None:
        """Count a call; None if it does not know its list yet."""
        self._kept.append(split)
        self._count += 1

    def is_kept(self, number: int) -> bool:
        """Return whether call `number` has been made, and is one of the last ones."""
        return self._count - len(self._kept) <= number < self._count

    def __getitem__(self, number: int) -> Split | None:
        return self._kept[number - self._count] if self.is_kept(number) else None

    def __setitem__(self, number: int, split: Split) -> None:
        if self.is_kept(number):
            self._kept[number - self._count] = split

    def known(self) -> int:
        """Return the number of calls that know their lists."""
        return self._count - self._kept.count(None)


def stranger(
    groups: Mapping[int, Communicator],
    early: UnmadeGroups,
    closed: ClosedGroups,
    control: ControlPlane,
    peer: int,
    message: dict[str, Any],
) -> str | None:
    """Handle a message of `peer` about a group that this rank is not in: explain why, or revoke the group.

    Args:
        groups: of this rank.
        early: the groups it has not made.
        closed: the groups it has left.
        control: tells the others.
        peer: who sent the message.
        message: what it says.

    Returns:
        A text for the peer about this rank, if that may still change; None otherwise.
    """
    history = [Split(parent, number, name, tuple(ranks)) for parent, number, name, ranks in message.get("split", ())]
    for level, theirs in enumerate(history):
        parent = groups.get(theirs.parent)
        if parent is None:
            if not closed.is_known(theirs.parent):
                break
            control.tell(peer, {"t": "bye", "g": message["g"], "cause": None, "linked": False})
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
            return f"which has split group {parent.name!r} {parent.splits.known()} times only"
        me = next(rank for rank, position in parent.position.items() if position == parent.rank)
        _refuse(early, control, peer, me, history[level:], error)
        return None
    return "which is not in the group now"


def _refuse(
    early: UnmadeGroups, control: ControlPlane, peer: int, me: int, history: Sequence[Split], error: GroupError
) -> None:
    """Revoke groups that this rank, `me`, will never be in."""
    for split in history:
        identity = split.identity()
        early.disown(identity, peer, None, split.ranks, me)
        control.flood({"t": "revoke", "g": identity, "cause": cause_of(error)}, split.ranks)


def _mismatch(parent: Communicator, peer: int, theirs: Split, mine: Split) -> CollectiveMismatchError:
    """Name both lists, that of the lower rank first: the text must not depend on which rank detects it."""
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
