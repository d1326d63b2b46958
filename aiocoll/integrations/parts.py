"""Processes of an engine that stay in one group: what they do, and what their driver does, whatever the engine is."""

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

__all__ = ["Part", "Parts", "State", "all_right"]


class State(NamedTuple):
    """What a process says of its part in the group.

    Attributes:
        begun: it has been a rank.
        name: of its group; empty while there is none.
        size: of its group.
    """

    begun: bool
    name: str
    size: int


class Part:
    """An elastic program that only keeps its group, for other code of the process. Made in the loop of the group.

    Args:
        ticket: by which it joins.

    Attributes:
        group: None while there is none, or the ranks mend it.
    """

    def __init__(self, ticket: Ticket) -> None:
        self.group: ProcessGroup | None = None
        self._begun = False
        self._task = asyncio.create_task(self._keep(ticket), name="aiocoll part")

    async def _keep(self, ticket: Ticket) -> None:
        async with aclosing(elastic(init_method=ticket, wait=0.0, mend_timeout=inf)) as groups:
            async for group in groups:
                self.group, self._begun = group, True
                await group.wait_revoked()
                self.group = None

    def state(self) -> State | None:
        """Return what to say of it, from any thread; None if it is a rank no more.

        Raises:
            What ended it, if that was neither for the other ranks nor for the meeting.
        """
        if self._task.done():
            error = self._task.exception()
            if error is not None and not isinstance(error, (GroupError, RendezvousError, StoreError)):
                raise error
            return None
        group = self.group
        return State(self._begun, "", 0) if group is None else State(True, group.group_name, group.size())

    def abort(self, reason: str) -> None:
        """End what the ranks do in the group, which they mend then."""
        aborted, self.group = self.group, None
        if aborted is not None:
            aborted.abort(reason)

    async def leave(self) -> None:
        """Leave the group, or stop joining it."""
        self._task.cancel()
        await asyncio.wait([self._task])


class Parts:
    """The parts of several processes, as their driver sees them.

    Args:
        join: called with the number of a process and a ticket, has it begin a `Part` in place of the one that it has.
        abort: called with the number of a process and a reason, calls `Part.abort` there.
        given: arguments of `aiocoll.Meeting` besides the number of ranks.
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
    def meets(self) -> bool:
        """Whether there is a meeting."""
        return self._meeting is not None

    @property
    def joined(self) -> list[int]:
        """Numbers of the processes that have a ticket."""
        return list(self._tickets)

    async def are_whole(self, states: Mapping[int, State | None]) -> bool:
        """Return whether all processes are in one group; have those join that have no part.

        Args:
            states: of all processes, by their numbers. If none of them has been a rank, and one has no part, then all
                meet anew, in this order: the others would wait for it.
        """
        there = {number: state for number, state in states.items() if state is not None}
        absent = states.keys() - there.keys()
        begun = any(state.begun for state in there.values())
        # The ranks need not have noticed, if the process of one has ended without being killed.
        early = [number for number, state in there.items() if state.size > len(there)]
        await all_right(self._abort(number, "some of its ranks are no more") for number in early)
        if absent and not (begun and self._meeting is not None):
            await self.end()
            self._meeting = await Meeting(len(states), **self._given).__aenter__()
            await self._give({number: self._meeting.ticket(rank) for rank, number in enumerate(states)})
        elif absent and self._meeting is not None:
            await self._give({number: self._meeting.newcomer() for number in sorted(absent)})
        else:
            [*groups] = set(there.values())
            return len(groups) == 1 and groups[0].size == len(states)
        return False

    async def _give(self, tickets: Mapping[int, Ticket]) -> None:
        for number in tickets:
            self.report(number, "another one joins in its place")
        self._tickets.update(tickets)
        await all_right(self._join(number, ticket) for number, ticket in tickets.items())

    def report(self, number: int, reason: object) -> None:
        """Tell the ranks that a process is gone."""
        ticket = self._tickets.pop(number, None)
        if ticket is not None and self._meeting is not None:
            self._meeting.report_death(ticket, str(reason))

    async def end(self) -> None:
        """End the meeting; whoever waits there hears of it."""
        meeting, self._meeting, self._tickets = self._meeting, None, {}
        if meeting is not None:
            await meeting.__aexit__()


async def all_right(doing: Iterable[Awaitable[None]]) -> None:
    """Wait for all of it to end; raise the first error."""
    for result in await asyncio.gather(*doing, return_exceptions=True):
        if isinstance(result, BaseException):
            raise result
