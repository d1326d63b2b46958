"""The ranks of a program on the workers of an engine: another worker takes the place of each that is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from aiocoll.errors import GroupError, GroupRevokedError
from aiocoll.log import logger
from aiocoll.rendezvous.tickets import Meeting, Ticket

__all__ = ["RankLostError", "Ranks"]

#: Seconds in which the other ranks fail if one has: the first that has may not be the one to blame.
LAST_WORDS = 1.0


class RankLostError(Exception):
    """The worker of a rank is gone, as its engine tells."""


class Ranks:
    """The ranks of one program, and what they have returned.

    Args:
        meeting: where they meet.
        run: called with the number of a rank and its ticket, runs the program on a worker, for which it waits if there
            is none, and returns the result. Raises `RankLostError` if the worker is lost; ends the program if it is
            cancelled.

    Attributes:
        losses: how many ranks were lost.
    """

    def __init__(self, meeting: Meeting, run: Callable[[int, Ticket], Awaitable[Any]]) -> None:
        self.losses = 0
        self._meeting = meeting
        self._run = run
        self._tickets: dict[int, Ticket] = {}
        self._results: dict[int, Any] = {}

    async def results(self) -> list[Any]:
        """Run them; return what they return, in their order, without those that were lost when others had ended.

        Raises:
            What the program raises on a rank: the first error that is not about another rank, if there is one, else
                what their group failed of.
        """
        numbers = range(self._meeting.world_size)
        ranks = {asyncio.create_task(self._fill(number), name=f"aiocoll rank {number}") for number in numbers}
        try:
            pending = ranks
            while pending:
                done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                if any(rank.exception() is not None for rank in done):
                    done, _ = await asyncio.wait(ranks, timeout=LAST_WORDS)
                    raise _to_blame([error for rank in done if (error := rank.exception()) is not None])
                if self._results and not any(map(self._takes_part, self._tickets.values())):
                    break  # those that are left are newcomers, and nobody takes them in any more
            return [result for _, result in sorted(self._results.items())]
        finally:
            for ticket in self._tickets.values():  # a call that blocks a thread cannot be cancelled
                self._meeting.report_death(ticket, "its program was told to end")
            for rank in ranks:
                rank.cancel()
            await asyncio.wait(ranks)

    async def _fill(self, number: int) -> None:
        """Have one rank run the program, and a newcomer after each loss, as long as all ranks run it."""
        ticket = self._meeting.ticket(number)
        while True:
            self._tickets[number] = ticket
            try:
                self._results[number] = await self._run(number, ticket)
                return
            except RankLostError as lost:
                self.losses += 1
                logger.warning("a rank is lost: %s", lost)
                self._meeting.report_death(ticket, str(lost))
            finally:
                del self._tickets[number]
            if self._results:
                return
            ticket = self._meeting.newcomer()

    def _takes_part(self, ticket: Ticket) -> bool:
        return ticket.world_size > 0 or self._meeting.has_arrived(ticket)


def _to_blame(errors: list[BaseException]) -> BaseException:
    first = next((error for error in errors if not isinstance(error, GroupError)), errors[0])
    # Whether a group fails during a call or before the next one is chance: its first failure is told in either case.
    return first.__cause__ if isinstance(first, GroupRevokedError) and first.__cause__ is not None else first
