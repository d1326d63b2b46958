"""Two ranks called what does not belong together: how all ranks come to hear the same of it.

A rank that sees a frame which does not fit sends its own description to the frame's sender. That one knows both sides
then, and tells the lowest rank, which revokes the group: several pairs may notice at the same time, and only one of
them is the cause. If that rank is silent, the one who knows revokes after a while by itself.
"""

from __future__ import annotations

from asyncio import TimerHandle
from collections.abc import Callable
from typing import Any, Protocol

from aiocoll.engine.failure.sender import Sender
from aiocoll.engine.operations.operation_log import Record

__all__ = ["Group", "MismatchReports"]

#: Seconds the lowest rank has to revoke a group of whose disagreement it was told: its loop may be blocked, and the
#: contract gives one second in all.
INSIST_AFTER = 0.5

Description = dict[str, Any]


class Group(Protocol):
    """A group of which two ranks may call what does not belong together.

    Attributes:
        rank: this one.
        ranks: all of them, numbered as in the job.
        left: those that have left.
    """

    rank: int
    ranks: tuple[int, ...]
    left: set[int]

    def record(self, op: int) -> Record | None:
        """Return what is remembered of a collective: of a part of one, the whole."""

    def disagreement(self, mine: dict[str, Any], theirs: dict[str, Any]) -> None:
        """Fail, since two ranks called operations that do not belong together."""

    def stands(self) -> bool:
        """Whether the group has neither failed nor been left."""

    def call_later(self, delay: float, callback: Callable[..., object], *args: Any) -> TimerHandle:
        """Call something that runs for the group in `delay` seconds."""


class MismatchReports:
    """The part of one group that finds out whose call is another one.

    Args:
        group: whose.
        sender: tells its other ranks.
    """

    def __init__(self, group: Group, sender: Sender) -> None:
        self._group = group
        self._sender = sender
        self._open: set[int] = set()

    def disagree(self, peer: int, op: int, mine: Description) -> None:
        """A frame of `peer` does not fit what this rank called: let the peer name both sides."""
        if op not in self._open:
            self._open.add(op)
            self._sender.say(peer, {"t": "disagree", "op": op, "theirs": mine})

    def differ(self, one: Description, two: Description) -> None:
        """Two calls do not belong together: let the lowest rank say so to all."""
        group = self._group
        judge = next(rank for rank in range(len(group.ranks)) if rank not in group.left)
        if group.rank == judge:
            group.disagreement(one, two)
        else:
            self._sender.say(judge, {"t": "differ", "one": one, "two": two})
            group.call_later(INSIST_AFTER, self._insist, one, two)

    def disagreed(self, peer: int, message: dict[str, Any]) -> None:
        """A frame of this rank did not fit what `peer` called."""
        group, op = self._group, message["op"]
        record = group.record(op)
        self.differ(_forgotten(group.rank, op) if record is None else record.describe(group.rank), message["theirs"])

    def differed(self, peer: int, message: dict[str, Any]) -> None:
        """Another rank knows of two calls that do not belong together."""
        self.settle(message["one"], message["two"])

    def settle(self, one: Description, two: Description) -> None:
        """Fail the group by name: two ranks called what does not belong together."""
        self._group.disagreement(one, two)

    def _insist(self, one: Description, two: Description) -> None:
        group = self._group
        if group.stands():
            group.disagreement(one, two)
            # Revocations may go through the one that is silent; these do not where there is a link.
            for rank in set(range(len(group.ranks))) - {group.rank}:
                self._sender.say(rank, {"t": "differ", "one": one, "two": two})


def _forgotten(rank: int, op: int) -> Description:
    """Stand in for what `rank` called so long ago that it has no record of it."""
    return {"rank": rank, "op": "AN OPERATION IT NO LONGER REMEMBERS", "seq": op, "key": None}
