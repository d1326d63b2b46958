"""What one rank knows of the others of its job: who is lost, and how, who is back, and who has ended in order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from aiocoll.engine.endpoint import Endpoint

__all__ = ["Roster"]


class Roster:
    """The other ranks of one endpoint.

    Attributes:
        dead: how each lost rank was lost, and what tells so: proven dead ("killed"), or not.
        over: ranks that have ended or are lost: that a connection to one of them breaks tells nothing new.
    """

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self.dead: dict[int, tuple[str, str]] = {}
        self.over: set[int] = set()

    @property
    def suspected(self) -> set[int]:
        """The lost ranks that may still live."""
        return {rank for rank, (how, _) in self.dead.items() if how != "killed"}

    def died(self, rank: int, detail: str, tell: bool = True, how: str = "killed") -> None:
        """A rank is lost: every group it belongs to fails, here and, if we are first to know, everywhere.

        Args:
            rank: which one.
            detail: what tells so.
            tell: this rank is the first to know.
            how: "killed" only if a witness has proven it: nothing of that rank is heard any more. Others keep their
                say: "unreachable" and "stopped" ranks may come back, and of "protocol" ones another rank may hear.
        """
        endpoint = self._endpoint
        if endpoint.closed or rank == endpoint.rank:
            return
        endpoint.transport.catch_up()
        known = rank in self.over
        if known and (rank not in self.suspected or how != "killed"):
            return
        self._lose(rank, detail, how)
        if tell:
            note = {"t": "died", "rank": rank, "detail": detail, "how": how}
            endpoint.control.flood(note, range(endpoint.world_size))
        if not known:
            for group in list(endpoint.groups.values()):
                if rank in group.position:
                    group.lost(rank, detail, how)

    def cut_off(self, rank: int) -> None:
        """The connection to a rank broke although its process lives: what both need fails, for the same reason."""
        endpoint = self._endpoint
        if endpoint.closed or rank in self.over:
            return
        endpoint.transport.catch_up()
        self._lose(rank, "its connection broke, though its process lives", "unreachable")
        for group in list(endpoint.groups.values()):
            if rank in group.position:
                group.torn(rank)

    def _lose(self, rank: int, detail: str, how: str) -> None:
        endpoint = self._endpoint
        self.over.add(rank)
        self.dead[rank] = how, detail
        endpoint.control.gone(rank)
        endpoint.control.miss(rank, detail)
        endpoint.thinned()
        endpoint.failure_detector.examine(rank)

    def restored(self, rank: int) -> None:
        """A rank that was lost, and neither proven dead nor refused, is heard again: it can be in new groups."""
        endpoint = self._endpoint
        if endpoint.closed or self.dead.get(rank, ("", ""))[0] not in ("unreachable", "stopped"):
            return
        del self.dead[rank]
        self.over.discard(rank)
        endpoint.renew(rank)
        endpoint.control.back(rank)
        endpoint.thinned()

    def finished(self, rank: int, moved: Sequence[int]) -> None:
        """A rank has ended in order; it went on elsewhere from the groups `moved`."""
        endpoint = self._endpoint
        self.over.add(rank)
        if rank in self.suspected:
            del self.dead[rank]
        for identity in moved:
            if (group := endpoint.groups.get(identity)) is not None:
                endpoint.agreement(identity, group.growths, group.ranks).moved.add(rank)
