"""Two ranks called what does not belong together: how all ranks come to hear the same of it.

A rank that sees a frame which does not fit sends its own description to the frame's sender. That one knows both sides
then, and tells the lowest rank, which revokes the group: several pairs may notice at the same time, and only one of
them is the cause. If that rank is silent, the one who knows revokes after a while by itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from aiocoll.engine.communicator import Communicator

__all__ = ["MismatchReports"]

#: Seconds the lowest rank has to revoke a group of whose disagreement it was told: its loop may be blocked, and the
#: contract gives one second in all.
INSIST_AFTER = 0.5

Description = dict[str, Any]


class MismatchReports:
    """The part of one membership that finds out whose call is another one."""

    def __init__(self, group: Communicator) -> None:
        self._group = group
        self._open: set[int] = set()

    def disagree(self, peer: int, op: int, mine: Description) -> None:
        """A frame of `peer` does not fit what this rank called: let the peer name both sides."""
        if op not in self._open:
            self._open.add(op)
            self._tell(peer, {"t": "disagree", "op": op, "theirs": mine})

    def differ(self, one: Description, two: Description) -> None:
        """Two calls do not belong together: let the lowest rank say so to all."""
        group = self._group
        judge = next(rank for rank in range(len(group.ranks)) if rank not in group.left)
        if group.rank == judge:
            group.disagreement(one, two)
        else:
            self._tell(judge, {"t": "differ", "one": one, "two": two})
            group.call_later(INSIST_AFTER, self._insist, one, two)

    def disagreed(self, peer: int, note: dict[str, Any]) -> None:
        """A frame of this rank did not fit what `peer` called."""
        group, op = self._group, note["op"]
        record = group.record(op)
        self.differ(_forgotten(group.rank, op) if record is None else record.describe(group.rank), note["theirs"])

    def differed(self, peer: int, note: dict[str, Any]) -> None:
        """Another rank knows of two calls that do not belong together."""
        self._group.disagreement(note["one"], note["two"])

    def _insist(self, one: Description, two: Description) -> None:
        group = self._group
        if group.cause is None and group.endpoint.groups.get(group.id) is group:
            group.disagreement(one, two)
            # Revocations may go through the one that is silent; these do not where there is a link.
            for rank in set(range(len(group.ranks))) - {group.rank}:
                self._tell(rank, {"t": "differ", "one": one, "two": two})

    def _tell(self, rank: int, note: dict[str, Any]) -> None:
        """Send a note on the link to `rank`, if there is one: it depends on nobody else."""
        group = self._group
        note = {**note, "g": group.id}
        if group.channels[rank].link is not None:
            group.channels[rank].say(note)
        else:
            group.endpoint.control.tell(group.ranks[rank], note)


def _forgotten(rank: int, op: int) -> Description:
    """Stand in for what `rank` called so long ago that it has no record of it."""
    return {"rank": rank, "op": "AN OPERATION IT NO LONGER REMEMBERS", "seq": op, "key": None}
