"""Membership of an execution engine's processes in one group, which is repaired when a process dies."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import aclosing
from math import inf
from typing import Any, NamedTuple

from aiocoll.elastic_groups import elastic
from aiocoll.errors import GroupError, RendezvousError, StoreError
from aiocoll.group.process_group import ProcessGroup
from aiocoll.rendezvous.tickets import Meeting, Ticket

__all__ = ["Membership", "Memberships", "State", "wait_for_all"]


class State(NamedTuple):
    """The report of a process to the driver about its group membership.

    Attributes:
        begun: whether it has been a rank.
        name: name of its group; empty while it has no group.
        size: number of ranks in its group; 0 while it has no group.
    """

    begun: bool
    name: str
    size: int


class Membership:
    """The membership of this process in a group: a task that joins the group, and a new group after failures.

    It must be created on the group's event loop.

    Args:
        ticket: the ticket by which the process joins.

    Attributes:
        group: the group; None before the first one, and while the ranks agree on a new one.
    """

    def __init__(self, ticket: Ticket) -> None:
        self.group: ProcessGroup | None = None
        self._begun = False
        self._task = asyncio.create_task(self._stay_in_group(ticket), name="aiocoll membership")

    async def _stay_in_group(self, ticket: Ticket) -> None:
        async with aclosing(elastic(init_method=ticket, wait=0.0, mend_timeout=inf)) as groups:
            async for group in groups:
                self.group, self._begun = group, True
                await group.wait_revoked()
                self.group = None

    def state(self) -> State | None:
        """Return this process's report for the driver; None if the process is no longer a rank; thread-safe.

        Raises:
            BaseException: the error that ended it, unless it is an error of the group, the rendezvous or the store.
        """
        if self._task.done():
            error = self._task.exception()
            if error is not None and not isinstance(error, (GroupError, RendezvousError, StoreError)):
                raise error
            return None
        group = self.group
        return State(self._begun, "", 0) if group is None else State(True, group.group_name, group.size())

    def abort(self, reason: str) -> None:
        """Abort the group, so that its ranks agree on a new group."""
        aborted, self.group = self.group, None
        if aborted is not None:
            aborted.abort(reason)

    async def leave(self) -> None:
        """Leave the group; if this process is still joining, stop joining."""
        self._task.cancel()
        await asyncio.wait([self._task])


class Memberships:
    """The memberships of all processes, as the driver manages them.

    Args:
        join: called with the number of a process and a ticket; creates a new `Membership` in that process.
        abort: called with the number of a process and a reason; calls `Membership.abort` in that process.
        given: arguments of `aiocoll.Meeting`, except the number of ranks.
    """

    def __init__(
        self,
        join: Callable[[int, Ticket], Awaitable[None]],
        abort: Callable[[int, str], Awaitable[None]],
        given: Mapping[str, Any],
    ) -> None:
        self._join = join
        self._abort = abort
        self._given = given
        self._meeting: Meeting | None = None
        self._tickets: dict[int, Ticket] = {}

    @property
    def has_meeting(self) -> bool:
        """Return whether the driver runs a `Meeting`, on which the processes form a group."""
        return self._meeting is not None

    @property
    def joined(self) -> list[int]:
        """Numbers of the processes that have a ticket."""
        return list(self._tickets)

    async def ensure_one_group(self, states: Mapping[int, State | None]) -> bool:
        """Return whether all processes are in one group; if not, make the missing processes join.

        Args:
            states: the states of all processes, by their numbers. If no process has been a rank, but one has no
                membership, all processes meet again, in this order. Otherwise they would wait for that process.
        """
        present = {number: state for number, state in states.items() if state is not None}
        absent = states.keys() - present.keys()
        begun = any(state.begun for state in present.values())
        # Abort groups that have more ranks than there are processes: after the orderly end of a process, the other
        # ranks may not have noticed it.
        outdated = [number for number, state in present.items() if state.size > len(present)]
        await wait_for_all(self._abort(number, "some of its ranks have ended") for number in outdated)
        if absent and not (begun and self._meeting is not None):
            await self.end()
            self._meeting = await Meeting(len(states), **self._given).__aenter__()
            await self._assign_tickets({number: self._meeting.ticket(rank) for rank, number in enumerate(states)})
        elif absent and self._meeting is not None:
            await self._assign_tickets({number: self._meeting.newcomer() for number in sorted(absent)})
        else:
            [*groups] = set(present.values())
            return len(groups) == 1 and groups[0].size == len(states)
        return False

    async def _assign_tickets(self, tickets: Mapping[int, Ticket]) -> None:
        for number in tickets:
            self.report(number, "a new rank replaces it")
        self._tickets.update(tickets)
        await wait_for_all(self._join(number, ticket) for number, ticket in tickets.items())

    def report(self, number: int, reason: object) -> None:
        """Report the death of the process `number` to the ranks of the group."""
        ticket = self._tickets.pop(number, None)
        if ticket is not None and self._meeting is not None:
            self._meeting.report_death(ticket, str(reason))

    async def end(self) -> None:
        """End the `Meeting`; processes that are waiting to join fail with an error."""
        meeting, self._meeting, self._tickets = self._meeting, None, {}
        if meeting is not None:
            await meeting.__aexit__()


async def wait_for_all(doing: Iterable[Awaitable[None]]) -> None:
    """Wait until all awaitables are done, then raise the first error."""
    for result in await asyncio.gather(*doing, return_exceptions=True):
        if isinstance(result, BaseException):
            raise result
