"""`Ranks`: runs a program as ranks on the workers of an execution engine, and replaces lost ranks."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from aiocoll.errors import GroupError, GroupRevokedError
from aiocoll.log import logger
from aiocoll.rendezvous.tickets import Meeting, Ticket

__all__ = ["RankLostError", "Ranks"]

#: Seconds to wait for errors of other ranks after the first error, because it may only be a consequence of another one.
ERROR_WAIT = 1.0


class RankLostError(Exception):
    """Raised when the execution engine reports the loss of the worker that runs a rank."""


class Ranks:
    """The ranks of one program: starts them, replaces lost ranks, and collects the results.

    Args:
        meeting: the meeting of the ranks.
        run: called with the number of a rank and its ticket. It waits for a free worker, runs the program there, and
            returns the result. It raises `RankLostError` if the worker is lost, and ends the program if it is
            cancelled.

    Attributes:
        losses: number of lost ranks.
    """

    def __init__(self, meeting: Meeting, run: Callable[[int, Ticket], Awaitable[Any]]) -> None:
        self.losses = 0
        self._meeting = meeting
        self._run = run
        self._tickets: dict[int, Ticket] = {}
        self._results: dict[int, Any] = {}

    async def results(self) -> list[Any]:
        """Run the program on all ranks; return the results in rank order.

        A rank that is lost after another rank has returned has no result.

        Raises:
            BaseException: the exception of the program on a rank: the first one that is not a `GroupError`, if any;
                otherwise the cause of the group's failure.
        """
        numbers = range(self._meeting.world_size)
        ranks = {asyncio.create_task(self._run_rank(number), name=f"aiocoll rank {number}") for number in numbers}
        try:
            pending = ranks
            while pending:
                done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                if any(rank.exception() is not None for rank in done):
                    done, _ = await asyncio.wait(ranks, timeout=ERROR_WAIT)
                    raise _find_cause([error for rank in done if (error := rank.exception()) is not None])
                if self._results and not any(map(self._is_member, self._tickets.values())):
                    break  # only newcomers are left, and no group accepts them any more
            return [result for _, result in sorted(self._results.items())]
        finally:
            for ticket in self._tickets.values():  # a reported death ends calls that block a thread; cancelling cannot
                self._meeting.report_death(ticket, "its program was cancelled")
            for rank in ranks:
                rank.cancel()
            await asyncio.wait(ranks)

    async def _run_rank(self, number: int) -> None:
        """Run the program as one rank; after a loss of the rank, run it again as a newcomer in its place.

        It is not run again after the program has returned on another rank.
        """
        ticket = self._meeting.ticket(number)
        while True:
            self._tickets[number] = ticket
            try:
                self._results[number] = await self._run(number, ticket)
                return
            except RankLostError as lost:
                self.losses += 1
                logger.warning("rank %d of the program was lost: %s", number, lost)
                self._meeting.report_death(ticket, str(lost))
            finally:
                del self._tickets[number]
            if self._results:
                return
            ticket = self._meeting.newcomer()

    def _is_member(self, ticket: Ticket) -> bool:
        return ticket.world_size > 0 or self._meeting.has_arrived(ticket)


def _find_cause(errors: list[BaseException]) -> BaseException:
    first = next((error for error in errors if not isinstance(error, GroupError)), errors[0])
    # A rank gets the first failure of its group directly during a call, but as the cause of a `GroupRevokedError`
    # between calls. Return this first failure in both cases.
    return first.__cause__ if isinstance(first, GroupRevokedError) and first.__cause__ is not None else first
