"""Roster of the job's other ranks: lost (with the evidence), reachable again, or ended."""

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

#: Seconds in which a rank declared dead may prove that it is alive. The documentation allows this time for detecting a
#: death. A message between running processes takes a small fraction of it.
DOUBT = 1.0


class Roster:
    """The states of the other ranks, as one endpoint knows them.

    Evidence of a death may be wrong: a program reports a living rank, or a detector reads garbage. Five rules keep two
    groups from continuing in that case, if messages between living ranks arrive within `DOUBT` seconds:

    1. A rank that declares a peer dead sends the peer a notice. On each link, this notice precedes everything sent
       later, and it is the first message on a new link.
    2. A rank accepts a notice of its own death from any sender and in any message. Such messages are notices, causes of
       revocations and goodbyes, and messages of the agreement on the next group.
    3. Such a rank is *out*: its groups fail, and it no longer votes. It sends no more notices of other deaths, and
       sends all ranks a notice of its own. From then on its death is true in the sense of the agreement: it can no
       longer take part.
    4. If two ranks declare each other dead, the rank that still has a majority of the job disregards the other rank's
       notice until it loses that majority. Two majorities share a rank, and that rank believes only one of the two.
    5. While a rank declared dead might still answer, its death is *doubted*: the agreement requires a majority that
       includes that rank in the count. The doubt ends when the rank is out, when its links break, or after `DOUBT`
       seconds. A process that has ended breaks its links, so recovery from a real death does not wait.

    Args:
        context: the endpoint's context.
        control: the control plane.
        groups: this rank's groups, which fail when one of their ranks is lost.

    Attributes:
        dead: how each lost rank was lost ("killed" if its death is proven), and the evidence. This rank itself is
            included if other ranks declared it dead.
        gone: ranks that have ended or are lost. A broken connection to one of them reveals nothing new.
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
        self.gone: set[int] = set()
        self._doubts: dict[int, asyncio.TimerHandle] = {}
        #: Notices of this rank's own death that were not accepted, by sender.
        self._disregarded: dict[int, str] = {}

    def connect(
        self,
        examine: Callable[[int], None],
        changed: Callable[[], None],
        data_links: Channels,
        is_majority: Callable[[Collection[int], Collection[int]], bool],
    ) -> None:
        """Set the parts of the endpoint that are made after the roster.

        Args:
            examine: callback for a lost rank, which checks whether its process is gone: that would prove its death.
            changed: callback for a rank that was lost, has ended, or is reachable again.
            data_links: the endpoint's data links.
            is_majority: returns whether some ranks are a majority of all; see `aiocoll.engine.consensus.quorum`.
        """
        self._examine, self.changed = examine, changed
        self._data_links, self._is_majority = data_links, is_majority

    @property
    def own_death(self) -> str | None:
        """Return the reason for which other ranks declared this rank dead; None if they did not."""
        return self.dead.get(self._context.rank, ("", None))[1]

    @property
    def suspected_ranks(self) -> set[int]:
        """Return the lost ranks that may still be alive."""
        return {rank for rank, (how, _) in self.dead.items() if how != "killed"}

    @property
    def doubted_ranks(self) -> set[int]:
        """Return the ranks declared dead that may still prove that they are alive."""
        return set(self._doubts)

    def is_ignored(self, rank: int) -> bool:
        """Return whether `rank` was declared dead. The messages of a rank declared dead are ignored."""
        return self.dead.get(rank, ("", ""))[0] == "killed"

    def notice(self, rank: int) -> ControlMessage | None:
        """Return the death notice for a rank declared dead; None for other ranks, or if this rank was declared dead."""
        if self.own_death is not None or not self.is_ignored(rank):
            return None
        return {"t": "died", "rank": rank, "detail": self.dead[rank][1], "how": "killed"}

    def record_loss(self, rank: int, detail: str, notify: bool = True, how: str = "killed") -> None:
        """Record a lost rank. The groups of the lost rank fail on this rank and, if `notify`, on all other ranks.

        Args:
            rank: the lost rank.
            detail: the evidence.
            notify: whether this rank is the first to know, and notifies the others.
            how: "killed" only if a witness has proven the death: then all messages of that rank are ignored. Otherwise
                the rank may come back ("unreachable", "stopped"), or other ranks may still receive from it
                ("protocol").
        """
        self._record(rank, detail, how, notify=notify, witnessed=notify)

    def report(self, rank: int, detail: str) -> None:
        """Record a death that the program or its launcher reported. A rank that is still alive receives a notice."""
        if rank == self._context.rank:
            self.on_own_death(detail, rank)
        elif self.own_death is None:
            self._record(rank, detail, "killed", notify=True, witnessed=False)

    def _record(self, rank: int, detail: str, how: str, notify: bool, witnessed: bool) -> None:
        context = self._context
        if context.closed or rank == context.rank:
            return
        context.transport.catch_up()
        known = rank in self.gone
        if known and (rank not in self.suspected_ranks or how != "killed"):
            if witnessed and how == "killed" and not self._is_linked(rank):
                self._end_doubt(rank)
            return
        if how == "killed" and self.own_death is None:
            note = {"t": "died", "rank": rank, "detail": detail, "how": how}
            self._control.send(rank, note)
            self._data_links.notify(rank, note)
            # Doubt the death if a link to the rank is still open, or if this rank has no evidence of its own.
            if self._is_linked(rank) or not (witnessed or known):
                self._doubts[rank] = context.runtime.call_later(DOUBT, self._end_doubt, rank)
        self._record_lost(rank, detail, how)
        if notify and self.own_death is None:
            message = {"t": "died", "rank": rank, "detail": detail, "how": how}
            self._control.send_to_others(message, range(context.world_size))
        if not known:
            for group in list(self._groups.values()):
                if rank in group.position:
                    group.lost(rank, detail, how)

    def _is_linked(self, rank: int) -> bool:
        return self._control.link(rank) is not None or self._data_links.is_linked(rank)

    def _end_doubt(self, rank: int) -> None:
        """Record that the death of `rank` is no longer doubted."""
        if (timer := self._doubts.pop(rank, None)) is not None:
            timer.cancel()
            self._disregarded.pop(rank, None)
            if not self._context.closed:
                self._context.transport.catch_up()
                self.changed()

    def on_link_closed(self, rank: int) -> None:
        """Handle a closed data or control link to `rank`."""
        if rank in self._doubts and not self._is_linked(rank):
            self._end_doubt(rank)

    def on_own_death(self, detail: str, sender: int) -> None:
        """Handle a notice in which `sender` declares this rank dead: all groups of this rank fail."""
        context = self._context
        if context.closed or self.own_death is not None:
            return
        if self.is_ignored(sender) and self._has_majority():
            if sender in self._doubts:
                self._disregarded[sender] = detail
            return
        self.dead[context.rank] = "killed", detail
        self._control.send_to_others(
            {"t": "died", "rank": context.rank, "detail": detail, "how": "killed"}, range(context.world_size)
        )
        for group in list(self._groups.values()):
            group.lost(context.rank, detail, "killed")
        self.changed()

    def _has_majority(self) -> bool:
        """Return whether the ranks that have neither ended nor been lost are a majority of the job."""
        job = range(self._context.world_size)
        return self._is_majority([rank for rank in job if rank not in self.gone], job)

    def _review_disregarded(self) -> None:
        """Accept disregarded notices of this rank's death if the remaining ranks are no majority of the job."""
        for sender, detail in list(self._disregarded.items()):
            self.on_own_death(detail, sender)

    def on_rank_out(self, rank: int, detail: str) -> None:
        """Handle the notice by which a rank confirms that it was declared dead and no longer takes part in the job."""
        self._record(rank, detail, "killed", notify=False, witnessed=False)
        self._end_doubt(rank)

    def on_connection_broken(self, rank: int) -> None:
        """Handle a broken connection to a living process: all groups that contain both ranks fail with one cause."""
        if self._context.closed or rank in self.gone:
            return
        self._context.transport.catch_up()
        self._record_lost(rank, "its connection broke, although its process is alive", "unreachable")
        for group in list(self._groups.values()):
            if rank in group.position:
                group.on_connection_broken(rank)

    def _record_lost(self, rank: int, detail: str, how: str) -> None:
        self.gone.add(rank)
        self.dead[rank] = how, detail
        self._control.remove_rank(rank)
        self._control.fail_join(rank, detail)
        self._review_disregarded()
        self.changed()
        self._examine(rank)

    def record_return(self, rank: int) -> None:
        """Record that a lost rank is reachable again and may join new groups, unless it was proven dead or rejected."""
        if self._context.closed or self.dead.get(rank, ("", ""))[0] not in ("unreachable", "stopped"):
            return
        del self.dead[rank]
        self.gone.discard(rank)
        self._data_links.renew(rank)
        self._control.restore_rank(rank)
        self.changed()

    def record_end(self, rank: int) -> None:
        """Record that `rank` has ended in order, without a failure."""
        self.gone.add(rank)
        if rank in self.suspected_ranks:
            del self.dead[rank]
        self._review_disregarded()
