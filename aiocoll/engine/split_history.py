"""Sub-groups that the ranks have split off in different ways: how this is found out, and who hears of it.

A split takes no message: every rank numbers its calls and remembers its list. The id of a sub-group hashes the list
too, so ranks with different lists cannot talk to each other. A message about an operation that waits in a sub-group
says how the group came to be; who gets one and is not in that group compares it with what it did itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from aiocoll.engine.control.causes import cause_of
from aiocoll.engine.control.star import ControlPlane
from aiocoll.engine.control.unmade_groups import Early
from aiocoll.engine.job.ids import hash62
from aiocoll.errors import CollectiveMismatchError, GroupError

__all__ = ["Group", "Split", "stranger"]


class Split(NamedTuple):
    """One call of `split_group` on one rank.

    Attributes:
        parent: id of the group that was split.
        number: of the call, from 0.
        name: as given, or None.
        ranks: of the list this rank is in, as in the job, ascending; empty if it is in none.
    """

    parent: int
    number: int
    name: str | None
    ranks: tuple[int, ...]

    def identity(self) -> int:
        """Return the id of the group that comes of it."""
        return hash62(f"{self.parent}\0split\0{tuple(self)}") & 0xFFFFFFFF


class Group(Protocol):
    """A group that this rank has split, or made by that.

    Attributes:
        name: of the group.
        rank: this one.
        splits: this rank's calls that have split it.
        cause: why it has failed, if it has.
    """

    name: str
    rank: int
    splits: list[Split]
    cause: GroupError | None

    @property
    def position(self) -> Mapping[int, int]:
        """The number in the group by rank in the job."""

    def revoke(self, cause: GroupError, tell: bool = True) -> None:
        """Fail with `cause`."""


def stranger(
    groups: Mapping[int, Group], early: Early, control: ControlPlane, peer: int, message: dict[str, Any]
) -> str | None:
    """A message of `peer` is about a group that this rank is not in: say why it is not, or tell all why it will not be.

    Args:
        groups: of this rank.
        early: the groups it has not made.
        control: tells the others.
        peer: who sent the message.
        message: what it says.

    Returns:
        What the peer shall be told of this rank, if that can still change.
    """
    history = [Split(parent, number, name, tuple(ranks)) for parent, number, name, ranks in message.get("split", ())]
    for level, theirs in enumerate(history):
        parent = groups.get(theirs.parent)
        if parent is None:
            if not early.is_over(theirs.parent):
                break
            control.tell(peer, {"t": "bye", "g": message["g"], "cause": None, "linked": False})
            return None
        if theirs.number < len(parent.splits):
            mine = parent.splits[theirs.number]
            if mine == theirs:
                continue
            error: GroupError = _mismatch(parent, peer, theirs, mine)
            if (own := groups.get(mine.identity())) is not None:
                own.revoke(error)
        elif parent.cause is not None:
            error = parent.cause
        else:
            return f"which has split group {parent.name!r} {len(parent.splits)} times only"
        _refuse(early, control, peer, history[level:], error)
        return None
    return "which is not in the group now"


def _refuse(early: Early, control: ControlPlane, peer: int, history: Sequence[Split], error: GroupError) -> None:
    """Revoke groups that this rank will never be in."""
    for split in history:
        identity = split.identity()
        early.disown(identity, peer)
        control.flood({"t": "revoke", "g": identity, "cause": cause_of(error)}, split.ranks)


def _mismatch(parent: Group, peer: int, theirs: Split, mine: Split) -> CollectiveMismatchError:
    """Name both lists, that of the lower rank first: who finds out must not matter."""
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
