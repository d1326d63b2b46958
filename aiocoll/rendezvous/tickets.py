"""`Meeting`: a process that is no rank lets others become ranks, with tickets in place of addresses, ports and keys."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, Self

from aiocoll.engine.control.shapes import fitting
from aiocoll.meeting.holders import arrival, death
from aiocoll.numerals import to_int
from aiocoll.rendezvous.new_group import new_group
from aiocoll.rendezvous.where import DEFAULT, Where
from aiocoll.runtime import random_bytes, running_loop
from aiocoll.security.keys import KEY_SIZE
from aiocoll.store import StoreServer
from aiocoll.store.tcp import tcp_url

__all__ = ["Meeting", "Ticket"]


@dataclass(frozen=True, slots=True)
class Ticket:
    """What a process needs to become a rank. Small, and can be pickled.

    Whoever has it can join the job, for it has the job key: send it only where nobody else reads it.

    Attributes:
        host: where the meeting is.
        port: where the meeting is.
        job: name of the job.
        key: the job key.
        world_size: number of ranks; 0 for a newcomer to a group that grows.
        rank: which one its holder becomes; None: one that is free.
        holder: how the meeting calls the process that has it.
    """

    host: str
    port: int
    job: str
    key: bytes = field(repr=False)
    world_size: int
    rank: int | None
    holder: str = ""

    def where(self) -> Where:
        """Return where the ranks meet, for `new_group`."""
        return Where(
            (self.host, self.port, self.job),
            self.rank,
            self.world_size,
            url=tcp_url(self.host, self.port),
            job=self.job,
            key=self.key,
            holder=self.holder,
        )

    @contextlib.contextmanager
    def as_default(self) -> Iterator[None]:
        """Have `new_group` and `elastic` without arguments join by this ticket, in a ``with`` block.

        So a program runs unchanged that finds its job in the environment otherwise. It holds for this task and those
        that it starts; arguments that say where to meet go before.
        """
        token = DEFAULT.set(self)
        try:
            yield
        finally:
            DEFAULT.reset(token)

    def join(self, **given: Any) -> new_group:
        """Become a rank; the same as ``new_group(init_method=ticket)``.

        Args:
            **given: other arguments of `new_group`: `name`, `timeout`, `options`, ...

        Returns:
            What is awaited or entered, and gives the `ProcessGroup`.

        Raises:
            StoreUnavailableError: the process that holds the meeting is gone, or cannot be reached from here.
            RendezvousError: the other ranks did not come; a newcomer: no group has grown.
        """
        return new_group(init_method=self, **given)


class Meeting:
    """Where the ranks of a job meet: a store and a job key, held by a process that starts them but is none of them.

        with aiocoll.Meeting(4) as meeting:
            for rank in range(4):
                start(work, meeting.ticket(rank))  # on any pool of processes; there: pg = await ticket.join()

    The store is served from a thread of its own. Enter it with ``with`` or ``async with``; at the end of the block the
    ranks can no longer meet or grow, but groups that there are go on.

    Args:
        world_size: number of ranks.
        host: address of this machine at which the ranks reach it; with the default, those of this machine do.
        port: 0 means a free one.
        encryption: see `GroupOptions`, the same for all ranks.

    Attributes:
        world_size: number of ranks.
    """

    def __init__(
        self,
        world_size: int,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        encryption: Literal["auto", "none", "tls"] = "auto",
    ) -> None:
        world_size = to_int(world_size, "world_size")
        if world_size < 1:
            raise ValueError(f"world_size={world_size}: must be positive")
        self.world_size = world_size
        self._job = random_bytes(8).hex()
        self._key = random_bytes(KEY_SIZE)
        self._server = StoreServer(
            host, port, key=self._key, job=self._job, world_size=world_size, encryption=encryption
        )
        self._started = False
        self._deaths = itertools.count()

    def __enter__(self) -> Self:
        self._server.start()
        self._started = True
        return self

    def __exit__(self, *exc: object) -> None:
        self._server.close()

    async def __aenter__(self) -> Self:
        running_loop()
        return self.__enter__()

    async def __aexit__(self, *exc: object) -> None:
        await self._server.aclose()

    def ticket(self, rank: int | None = None) -> Ticket:
        """Return a ticket for one process.

        Args:
            rank: which rank it becomes; None: one that is free when it joins, and then for all tickets.

        Raises:
            ValueError: there is no such rank, or the meeting has not begun.
        """
        rank = None if rank is None else to_int(rank, "rank", "an int or None")
        if rank is not None and not 0 <= rank < self.world_size:
            raise ValueError(f"rank={rank}: must be from 0 to {self.world_size - 1}, one less than world_size")
        return self._ticket(self.world_size, rank)

    def newcomer(self) -> Ticket:
        """Return a ticket for a process that takes part when the ranks call `ProcessGroup.grow`.

        Raises:
            ValueError: the meeting has not begun.
        """
        return self._ticket(0, None)

    def has_arrived(self, ticket: Ticket) -> bool:
        """Return whether the process that has a ticket of this meeting has become a rank.

        Args:
            ticket: of this meeting.
        """
        return self._server.has(arrival(ticket.holder))

    def report_death(self, ticket: Ticket, reason: str) -> None:
        """Tell the ranks that the process which had a ticket is gone, where what runs it knows that.

        To each of them it is as if another one called `ProcessGroup.report_death`: see there also for what becomes of a
        process that lives after all.

        Args:
            ticket: of this meeting, given to that process only.
            reason: what the errors say about it.

        Raises:
            ValueError: the ticket is of another meeting.
        """
        if ticket.job != self._job:
            raise ValueError("ticket is not one of this meeting")
        self._server.put(*death(next(self._deaths), ticket.holder, fitting(reason)))

    def _ticket(self, world_size: int, rank: int | None) -> Ticket:
        if not self._started:
            raise ValueError("the meeting has not begun: enter it, `with aiocoll.Meeting(...) as meeting:`")
        return Ticket(
            self._server.host, self._server.port, self._job, self._key, world_size, rank, random_bytes(8).hex()
        )
