"""Stray posts: data in shared memory that no operation reads, because the calls of two ranks do not match.

A frame is compared with this rank's own call on arrival. But only an operation that expects a post reads a slot. A rank
that has made a different call does not read it, and the rank that posted may have finished. So `AFTER` seconds after a
post, unread slots and the next chunk of each chunk queue are compared with this rank's calls, as frames are.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from aiocoll.runtime import Runtime
from aiocoll.transport.base import SharedMemoryLink
from aiocoll.transport.shared_memory import PeerOutbox

if TYPE_CHECKING:
    from aiocoll.engine.communicator import Communicator

__all__ = ["StrayPosts"]

#: Seconds until unread posts are compared with this rank's calls. A mismatch must be found within a second. Reading all
#: slots of a peer takes about 5 µs, which is negligible at this interval.
AFTER = 0.1


class StrayPosts:
    """The search for unread posts in the outboxes of one endpoint's peers.

    Args:
        runtime: clock and timers.
        groups: the endpoint's groups, by id.

    Attributes:
        outboxes: the peers' outboxes, with their ranks in the job.
        links: the links to peers with chunk queues, with their ranks in the job.
    """

    def __init__(self, runtime: Runtime, groups: Mapping[int, Communicator]) -> None:
        self.outboxes: tuple[tuple[int, PeerOutbox], ...] = ()
        self.links: tuple[tuple[int, SharedMemoryLink], ...] = ()
        # For each peer, the number of its next unread chunk at the last check.
        self._heads: dict[int, int] = {}
        self._runtime = runtime
        self._groups = groups
        self._waiting = False

    def watch(self) -> None:
        """Schedule a check for unread posts, because a peer has posted data."""
        if not self._waiting:
            self._waiting = True
            self._runtime.call_later(AFTER, self._look)

    def _look(self) -> None:
        self._waiting = False
        unread = [(rank, post) for rank, outbox in self.outboxes for post in outbox.unread()]
        heads = {rank: head for rank, link in self.links if (head := link.chunks.head()) is not None}
        for rank, (number, chunk) in heads.items():
            if self._heads.get(rank) == number:  # it was unread at the last check, too
                unread.append((rank, chunk))
        self._heads = {rank: number for rank, (number, _) in heads.items()}
        for rank, (op, identity, fingerprint) in unread:
            if (group := self._groups.get(identity)) is not None and rank in group.position:
                try:
                    _compare(group, rank, op, fingerprint)
                except Exception as error:
                    group.revoke_after_crash(error)
        if unread or heads:  # check again later: this rank may still make the matching calls
            self.watch()


def _compare(group: Communicator, rank: int, op: int, fingerprint: int) -> None:
    """Report a rank's post if it does not match this rank's call for the same operation."""
    operation = group.in_flight.find(op)
    if operation is None:
        # An operation ends only when it has read all its posts. A further post means that the peer has made a different
        # call.
        record = group.record(op)
        mine = None if record is None else record.describe(group.rank)
    else:
        mine = None if operation.fingerprint == fingerprint else operation.describe()
    if mine is not None:
        group.mismatches.disagree(group.position[rank], op, mine)
