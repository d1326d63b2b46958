"""The state of all other ranks of the job: which are lost and how, which are reachable again, which have ended."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING

from aiocoll.engine.control.messages import ControlMessage
from aiocoll.engine.control.star import ControlPlane
from aiocoll.engine.job.context import Context

if TYPE_CHECKING:
    from aiocoll.engine.channels import Channels
    from aiocoll.engine.communicator import Communicator

__all__ = ["DOUBT", "Roster"]

#: Seconds in which a rank that is taken for dead may show that it lives: many times what a message takes between
#: processes that run, and as long as a death may stay undetected (contract).
DOUBT = 1.0


class Roster:
    """The state of the other ranks of one endpoint.

    Evidence of a death may be wrong: a program reports a rank that lives, or a detector reads garbage. Five rules keep
    two groups from continuing then, as long as messages between living ranks arrive within `DOUBT` seconds:

    1. A rank that takes a peer for dead sends the peer a note that says so. On each link, this note precedes
       everything sent afterwards, and it is the first message on a new link.
    2. A rank processes a notice of its own death from any sender, in any message: a note, the cause of a revocation or
       of a goodbye, the agreement on the next group.
    3. Such a rank is *out*: its groups fail, it votes no more, sends no more notes of other deaths, and sends all ranks
       a note of its own. From then on its death is true in the sense of the agreement: it can no longer take part.
    4. Of two ranks that take each other for dead, the one that has a majority of the job left disregards the other's
       notice, until it loses that majority. Majorities share a rank, and this rank believes only one of the two.
    5. While a rank that is taken for dead might still answer, its death is *doubted*: the agreement requires a majority
       that counts it. The doubt ends when that rank is out, when its links break, or after `DOUBT` seconds. A process
       that has ended breaks its links, so recovery from a real death does not wait.

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
    _data_links: Channels
    _is_majority: Callable[[Collection[int], Collection[int]], bool]

    def __init__(self, context: Context, control: ControlPlane, groups: Mapping[int, Communicator]) -> None:
        self._context = context
        self._control = control
        self._groups = groups
        self.dead: dict[int, tuple[str, str]] = {}
        self.over: set[int] = set()
        self._doubts: dict[int, asyncio.TimerHandle] = {}
        #: Notices of this rank's own death that it disregards, by sender.
        self._disregarded: dict[int, str] = {}

    def connect(
        self,
        examine: Callable[[int], None],
        changed: Callable[[], None],
        data_links: Channels,
        is_majority: Callable[[Collection[int], Collection[int]], bool],
    ) -> None:
        """Set the parts that are made later.

        Args:
            examine: called with a rank that is lost: its process may be gone, which would prove its death.
            changed: called when a rank was lost, has ended, or is reachable again.
            data_links: of the endpoint.
            is_majority: return whether some ranks are a majority of all; see `aiocoll.engine.consensus.quorum`.
        """
        self._examine, self.changed = examine, changed
        self._data_links, self._is_majority = data_links, is_majority

    @property
    def out(self) -> str | None:
        """Why other ranks take this one for dead; None: they do not."""
        return self.dead.get(self._context.rank, ("", None))[1]

    @property
    def suspected(self) -> set[int]:
        """Lost ranks that may still be alive."""
        return {rank for rank, (how, _) in self.dead.items() if how != "killed"}

    @property
    def doubted(self) -> set[int]:
        """Ranks taken for dead that may still show that they live."""
        return set(self._doubts)

    def is_ignored(self, rank: int) -> bool:
        """Return whether `rank` is taken for dead."""
        return self.dead.get(rank, ("", ""))[0] == "killed"

    def note(self, rank: int) -> ControlMessage | None:
        """Return the note to a rank that is taken for dead; None for other ranks, and if this rank is out itself."""
        if self.out is not None or not self.is_ignored(rank):
            return None
        return {"t": "died", "rank": rank, "detail": self.dead[rank][1], "how": "killed"}

    def died(self, rank: int, detail: str, tell: bool = True, how: str = "killed") -> None:
        """A rank is lost: all its groups fail here and, if this rank is the first to know, on all other ranks.

        Args:
            rank: the lost rank.
            detail: the evidence.
            tell: this rank is the first to know.
            how: "killed" only if a witness has proven it: all messages of that rank are ignored. Otherwise the rank may
                come back ("unreachable", "stopped"), or other ranks may still hear from it ("protocol").
        """
        self._record(rank, detail, how, tell=tell, witnessed=tell)

    def report(self, rank: int, detail: str) -> None:
        """The program, or what runs it, knows that the process of `rank` is gone. If it lives, it gets a note."""
        if rank == self._context.rank:
            self.disowned(detail, rank)
        elif self.out is None:
            self._record(rank, detail, "killed", tell=True, witnessed=False)

    def _record(self, rank: int, detail: str, how: str, tell: bool, witnessed: bool) -> None:
        context = self._context
        if context.closed or rank == context.rank:
            return
        context.transport.catch_up()
        known = rank in self.over
        if known and (rank not in self.suspected or how != "killed"):
            if witnessed and how == "killed" and not self._is_linked(rank):
                self._settle(rank)
            return
        if how == "killed" and self.out is None:
            note = {"t": "died", "rank": rank, "detail": detail, "how": how}
            self._control.tell(rank, note)
            self._data_links.notify(rank, note)
            # No link shows the end of a process to which there was none; this rank has not seen the end itself either.
            if self._is_linked(rank) or not (witnessed or known):
                self._doubts[rank] = context.runtime.call_later(DOUBT, self._settle, rank)
        self._lose(rank, detail, how)
        if tell and self.out is None:
            message = {"t": "died", "rank": rank, "detail": detail, "how": how}
            self._control.flood(message, range(context.world_size))
        if not known:
            for group in list(self._groups.values()):
                if rank in group.position:
                    group.lost(rank, detail, how)

    def _is_linked(self, rank: int) -> bool:
        return self._control.link(rank) is not None or self._data_links.is_linked(rank)

    def _settle(self, rank: int) -> None:
        """The death of a rank is doubted no longer."""
        if (timer := self._doubts.pop(rank, None)) is not None:
            timer.cancel()
            self._disregarded.pop(rank, None)
            if not self._context.closed:
                self._context.transport.catch_up()
                self.changed()

    def unlinked(self, rank: int) -> None:
        """A link to a rank has ended."""
        if rank in self._doubts and not self._is_linked(rank):
            self._settle(rank)

    def disowned(self, detail: str, sender: int) -> None:
        """`sender` takes this rank for dead, and ignores it: all groups of this rank fail."""
        context = self._context
        if context.closed or self.out is not None:
            return
        if self.is_ignored(sender) and self._prevails():
            if sender in self._doubts:
                self._disregarded[sender] = detail
            return
        self.dead[context.rank] = "killed", detail
        self._control.flood(
            {"t": "died", "rank": context.rank, "detail": detail, "how": "killed"}, range(context.world_size)
        )
        for group in list(self._groups.values()):
            group.lost(context.rank, detail, "killed")
        self.changed()

    def _prevails(self) -> bool:
        """Return whether the ranks that are left are a majority of the job."""
        job = range(self._context.world_size)
        return self._is_majority([rank for rank in job if rank not in self.over], job)

    def _reconsider(self) -> None:
        """Be out after all if the majority that spoke against it is lost."""
        for sender, detail in list(self._disregarded.items()):
            self.disowned(detail, sender)

    def gave_up(self, rank: int, detail: str) -> None:
        """A rank has learned that others take it for dead: it takes part in nothing more."""
        self._record(rank, detail, "killed", tell=False, witnessed=False)
        self._settle(rank)

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
        self._control.remove_rank(rank)
        self._control.fail_join(rank, detail)
        self._reconsider()
        self.changed()
        self._examine(rank)

    def restored(self, rank: int) -> None:
        """A lost rank, neither proven dead nor refused, is reachable again: it can be in new groups."""
        if self._context.closed or self.dead.get(rank, ("", ""))[0] not in ("unreachable", "stopped"):
            return
        del self.dead[rank]
        self.over.discard(rank)
        self._data_links.renew(rank)
        self._control.restore_rank(rank)
        self.changed()

    def finished(self, rank: int) -> None:
        """A rank has ended in order."""
        self.over.add(rank)
        if rank in self.suspected:
            del self.dead[rank]
        self._reconsider()
