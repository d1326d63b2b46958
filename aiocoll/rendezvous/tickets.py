"""`Meeting` and `Ticket`: a process that is not a rank serves the store, and gives tickets to future ranks."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, Self

from aiocoll.engine.control.shapes import fit_text
from aiocoll.meeting.holders import arrival, death
from aiocoll.numerals import to_int
from aiocoll.rendezvous.new_group import new_group
from aiocoll.rendezvous.parameters import DEFAULT, RendezvousParameters
from aiocoll.runtime import random_bytes, running_loop
from aiocoll.security.keys import KEY_SIZE
from aiocoll.store import StoreServer
from aiocoll.store.tcp import tcp_url

__all__ = ["Meeting", "Ticket"]


@dataclass(frozen=True, slots=True)
class Ticket:
    """A permit that lets one process become a rank. It is small and can be pickled.

    A ticket contains the job key, so any process that has it can join the job. Send it only over private connections.

    Attributes:
        host: address of the meeting.
        port: port of the meeting.
        job: name of the job.
        key: the job key.
        world_size: number of ranks; 0 for a newcomer to a group that grows.
        rank: the rank that its holder becomes; None for a free rank.
        holder: the meeting's name for the process that has the ticket.
    """

    host: str
    port: int
    job: str
    key: bytes = field(repr=False)
    world_size: int
    rank: int | None
    holder: str = ""

    def where(self) -> RendezvousParameters:
        """Return the rendezvous parameters for `new_group`: store address, job key, rank and world size."""
        return RendezvousParameters(
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
        """Make this ticket the default init method of `new_group` and `elastic`, in a ``with`` block.

        A program that otherwise finds its job in the environment runs unchanged. The default holds for this task and
        the tasks that it starts. Arguments such as `init_method`, `store` and `rank` take precedence.
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
            An object to await or to enter with ``async with``; it yields the `ProcessGroup`.

        Raises:
            StoreUnavailableError: the process that holds the meeting has ended or cannot be reached from here.
            RendezvousError: the other ranks did not arrive, or no group grew to include this newcomer.
        """
        return new_group(init_method=self, **given)


class Meeting:
    """A store and a job key for the rendezvous of a job, held by a process that starts the ranks but is not a rank.

        with aiocoll.Meeting(4) as meeting:
            for rank in range(4):
                start(work, meeting.ticket(rank))  # in any process pool; the worker calls: pg = await ticket.join()

    A thread serves the store. Enter the meeting with ``with`` or ``async with``. After the block, ranks can no longer
    meet or grow, but existing groups continue.

    Args:
        world_size: number of ranks.
        host: address of this machine at which the ranks reach it; the default reaches only ranks of this machine.
        port: port of the store; 0 means a free port.
        encryption: see `GroupOptions`; the same on all ranks.

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
            rank: the rank that the process becomes. None assigns a free rank when it joins; then use None for all
                tickets.

        Raises:
            ValueError: `rank` is out of range, or the meeting has not been entered.
        """
        rank = None if rank is None else to_int(rank, "rank", "an int or None")
        if rank is not None and not 0 <= rank < self.world_size:
            raise ValueError(f"rank={rank}: must be from 0 to {self.world_size - 1} (world_size - 1)")
        return self._ticket(self.world_size, rank)

    def newcomer(self) -> Ticket:
        """Return a ticket for a process that joins when the ranks call `ProcessGroup.grow`.

        Raises:
            ValueError: the meeting has not been entered.
        """
        return self._ticket(0, None)

    def has_arrived(self, ticket: Ticket) -> bool:
        """Return whether the holder of a ticket has become a rank.

        Args:
            ticket: a ticket of this meeting.
        """
        return self._server.has(arrival(ticket.holder))

    def report_death(self, ticket: Ticket, reason: str) -> None:
        """Report to the ranks that the holder of a ticket has ended, for instance when the process pool detects it.

        The effect on each rank is that of `ProcessGroup.report_death` called by another rank. `report_death` also
        describes the case of a process that still runs.

        Args:
            ticket: a ticket of this meeting, given to that process only.
            reason: the explanation in the errors of the ranks.

        Raises:
            ValueError: the ticket belongs to another meeting.
        """
        if ticket.job != self._job:
            raise ValueError("ticket belongs to another meeting; pass one that this meeting made")
        self._server.put(*death(next(self._deaths), ticket.holder, fit_text(reason)))

    def _ticket(self, world_size: int, rank: int | None) -> Ticket:
        if not self._started:
            raise ValueError("the meeting has not been entered: use `with aiocoll.Meeting(...) as meeting:`")
        return Ticket(
            self._server.host, self._server.port, self._job, self._key, world_size, rank, random_bytes(8).hex()
        )
