"""The state of all other ranks of the job: which are lost and how, which are reachable again, which have ended."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from aiocoll.engine.control.star import ControlPlane
from aiocoll.engine.job.context import Context

__all__ = ["Group", "Roster"]


class Group(Protocol):
    """What the roster needs of a group; ranks are numbered as in the job."""

    @property
    def position(self) -> Mapping[int, int]:
        """Rank in the group by rank in the job."""

    def lost(self, rank: int, detail: str, how: str) -> None:
        """A rank is lost."""

    def torn(self, rank: int) -> None:
        """The connection to a rank broke, though both processes live."""


class Roster:
    """The state of the other ranks of one endpoint.

    Args:
        context: of the endpoint.
        control: tells the others.
        groups: of this rank; they fail when one of their ranks is lost.

    Attributes:
        dead: how each lost rank was lost, and the evidence for it: proven dead ("killed"), or not. This rank itself is
            among them if others take it for dead.
        over: ranks that have ended or are lost: a connection that breaks to one of them is no news.
        changed: see `connect`.
    """

    _examine: Callable[[int], None]
    changed: Callable[[], None]
    _renew: Callable[[int], None]

    def __init__(self, context: Context, control: ControlPlane, groups: Mapping[int, Group]) -> None:
        self._context = context
        self._control = control
        self._groups = groups
        self.dead: dict[int, tuple[str, str]] = {}
        self.over: set[int] = set()

    def connect(
        self, examine: Callable[[int], None], changed: Callable[[], None], renew: Callable[[int], None]
    ) -> None:
        """Set the callbacks.

        Args:
            examine: called with a rank that is lost: its process may be gone, which would prove its death.
            changed: called when a rank was lost, has ended, or is reachable again.
            renew: called with a rank that is reachable again.
        """
        self._examine, self.changed, self._renew = examine, changed, renew

    @property
    def out(self) -> str | None:
        """Why other ranks take this one for dead; None: they do not."""
        return self.dead.get(self._context.rank, ("", None))[1]

    @property
    def suspected(self) -> set[int]:
        """Lost ranks that may still be alive."""
        return {rank for rank, (how, _) in self.dead.items() if how != "killed"}

    def died(self, rank: int, detail: str, tell: bool = True, how: str = "killed") -> None:
        """A rank is lost: all its groups fail here and, if this rank is the first to know, on all other ranks.

        Args:
            rank: the lost rank.
            detail: the evidence.
            tell: this rank is the first to know.
            how: "killed" only if a witness has proven it: all messages of that rank are ignored. Otherwise the rank may
                come back ("unreachable", "stopped"), or other ranks may still hear from it ("protocol").
        """
        context = self._context
        if context.closed or rank == context.rank:
            return
        context.transport.catch_up()
        known = rank in self.over
        if known and (rank not in self.suspected or how != "killed"):
            return
        self._lose(rank, detail, how)
        if tell and self.out is None:
            message = {"t": "died", "rank": rank, "detail": detail, "how": how}
            self._control.flood(message, range(context.world_size))
        if not known:
            for group in list(self._groups.values()):
                if rank in group.position:
                    group.lost(rank, detail, how)

    def report(self, rank: int, detail: str) -> None:
        """The program, or what runs it, knows that the process of `rank` is gone. If it lives, it hears of it."""
        if rank == self._context.rank:
            self.disowned(detail)
        elif not self._context.closed and self.out is None and (rank not in self.over or rank in self.suspected):
            self._control.tell(rank, {"t": "died", "rank": rank, "detail": detail, "how": "killed"})
            self.died(rank, detail)

    def disowned(self, detail: str) -> None:
        """Other ranks take this one for dead, and ignore it: all its groups fail."""
        context = self._context
        if context.closed or self.out is not None:
            return
        self.dead[context.rank] = "killed", detail
        for group in list(self._groups.values()):
            group.lost(context.rank, detail, "killed")
        self.changed()

    def cut_off(self, rank: int) -> None:
        """The connection to a rank broke although its process lives: groups with both fail, for the same reason."""
        if self._context.closed or rank in self.over:
            return
        self._context.transport.catch_up()
        self._lose(rank, "its connection broke, though its process lives", "unreachable")
        for group in list(self._groups.values()):
            if rank in group.position:
                group.torn(rank)

    def _lose(self, rank: int, detail: str, how: str) -> None:
        self.over.add(rank)
        self.dead[rank] = how, detail
        self._control.gone(rank)
        self._control.miss(rank, detail)
        self.changed()
        self._examine(rank)

    def restored(self, rank: int) -> None:
        """A lost rank, neither proven dead nor refused, is reachable again: it can be in new groups."""
        if self._context.closed or self.dead.get(rank, ("", ""))[0] not in ("unreachable", "stopped"):
            return
        del self.dead[rank]
        self.over.discard(rank)
        self._renew(rank)
        self._control.back(rank)
        self.changed()

    def finished(self, rank: int) -> None:
        """A rank has ended in order."""
        self.over.add(rank)
        if rank in self.suspected:
            del self.dead[rank]
