"""Two ranks called operations that do not match: how all ranks come to raise the same error.

A rank that receives a frame that does not fit sends its own description to the frame's sender. The sender knows both
descriptions then, and tells the lowest rank, which revokes the group: several pairs may notice at the same time, and
only one pair is reported. If the lowest rank is silent, the sender itself revokes after a while.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from aiocoll.engine.failure.sender import Sender
from aiocoll.engine.operations.differences import mismatch

if TYPE_CHECKING:
    from aiocoll.engine.communicator import Communicator

__all__ = ["MismatchReports"]

#: Seconds the lowest rank has to revoke a group after it was told of a mismatch: its loop may be blocked, and the
#: contract gives one second in all.
INSIST_AFTER = 0.5

Description = dict[str, Any]


class MismatchReports:
    """Finds out for one group which ranks' calls do not match.

    Args:
        group: the group.
        sender: sends to its other ranks.
    """

    def __init__(self, group: Communicator, sender: Sender) -> None:
        self._group = group
        self._sender = sender
        self._open: set[int] = set()

    def disagree(self, peer: int, op: int, mine: Description) -> None:
        """A frame of `peer` does not match this rank's call: tell the peer, which then knows both calls."""
        if op not in self._open:
            self._open.add(op)
            self._sender.say(peer, {"t": "disagree", "op": op, "theirs": mine})

    def differ(self, one: Description, two: Description) -> None:
        """Two calls do not match: let the lowest rank tell all."""
        group = self._group
        judge = next(rank for rank in range(len(group.ranks)) if rank not in group.left)
        if group.rank == judge:
            self.settle(one, two)
        else:
            self._sender.say(judge, {"t": "differ", "one": one, "two": two})
            group.call_later(INSIST_AFTER, self._insist, one, two)

    def disagreed(self, peer: int, message: dict[str, Any]) -> None:
        """A frame of this rank did not match what `peer` called."""
        group, op = self._group, message["op"]
        record = group.record(op)
        self.differ(_forgotten(group.rank, op) if record is None else record.describe(group.rank), message["theirs"])

    def differed(self, peer: int, message: dict[str, Any]) -> None:
        """Another rank reports two calls that do not match."""
        self.settle(message["one"], message["two"])

    def settle(self, one: Description, two: Description) -> None:
        """Revoke the group, naming the two calls."""
        self._group.revoke(mismatch(self._group.name, one, two))

    def _insist(self, one: Description, two: Description) -> None:
        group = self._group
        if group.stands():
            self.settle(one, two)
            # Revocations may be routed through the silent rank; these messages go direct where there is a link.
            for rank in set(range(len(group.ranks))) - {group.rank}:
                self._sender.say(rank, {"t": "differ", "one": one, "two": two})


def _forgotten(rank: int, op: int) -> Description:
    """Stand in for a call of `rank` that is too old to have a record."""
    return {"rank": rank, "op": "AN OPERATION IT NO LONGER REMEMBERS", "seq": op, "key": None}
