"""Reports of mismatched calls, which make all ranks raise the same error.

A rank that receives a frame with the wrong fingerprint sends the description of its own call to the frame's sender. The
sender then knows both descriptions and reports them to the lowest rank, which revokes the group. Several pairs of ranks
may notice a mismatch at the same time, but only one pair is reported. If the lowest rank is silent, the sender itself
revokes the group after `INSIST_AFTER` seconds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from aiocoll.engine.failure.sender import Sender
from aiocoll.engine.operations.differences import mismatch_error

if TYPE_CHECKING:
    from aiocoll.engine.communicator import Communicator

__all__ = ["MismatchReports"]

#: Seconds that the lowest rank has to revoke a group after a mismatch report. Afterwards, the reporting rank revokes
#: the group itself: the lowest rank's loop may be blocked, and the documentation allows one second in total.
INSIST_AFTER = 0.5

Description = dict[str, Any]


class MismatchReports:
    """The mismatch reports of one group on one rank.

    Args:
        group: the group.
        sender: sends messages to the group's other ranks.
    """

    def __init__(self, group: Communicator, sender: Sender) -> None:
        self._group = group
        self._sender = sender
        self._open: set[int] = set()

    def disagree(self, peer: int, op: int, mine: Description) -> None:
        """Send this rank's call to `peer`, whose frame does not match the call. The peer then knows both calls."""
        if op not in self._open:
            self._open.add(op)
            self._sender.send(peer, {"t": "disagree", "op": op, "theirs": mine})

    def differ(self, one: Description, two: Description) -> None:
        """Send two mismatched calls to the lowest rank, which revokes the group."""
        group = self._group
        judge = next(rank for rank in range(len(group.ranks)) if rank not in group.left)
        if group.rank == judge:
            self.revoke(one, two)
        else:
            self._sender.send(judge, {"t": "differ", "one": one, "two": two})
            group.call_later(INSIST_AFTER, self._revoke_here, one, two)

    def on_disagree(self, peer: int, message: dict[str, Any]) -> None:
        """Handle a peer's report that a frame of this rank did not match the peer's call."""
        group, op = self._group, message["op"]
        record = group.record(op)
        self.differ(_placeholder(group.rank, op) if record is None else record.describe(group.rank), message["theirs"])

    def on_differ(self, peer: int, message: dict[str, Any]) -> None:
        """Handle a message with two mismatched calls: revoke the group."""
        self.revoke(message["one"], message["two"])

    def revoke(self, one: Description, two: Description) -> None:
        """Revoke the group with an error that names both calls."""
        self._group.revoke(mismatch_error(self._group.name, one, two))

    def _revoke_here(self, one: Description, two: Description) -> None:
        group = self._group
        if group.is_usable():
            self.revoke(one, two)
            # The silent lowest rank may be the hub, so send these messages on direct links where possible.
            for rank in set(range(len(group.ranks))) - {group.rank}:
                self._sender.send(rank, {"t": "differ", "one": one, "two": two})


def _placeholder(rank: int, op: int) -> Description:
    """Return a placeholder for a call of `rank` that is too old to be recorded any more."""
    return {"rank": rank, "op": "AN OPERATION NO LONGER RECORDED", "seq": op, "key": None}
