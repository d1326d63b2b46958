"""How newcomers find a group that grows: tickets and seats in the store.

A newcomer takes a ticket, queues with it, and waits for the seat of that number. Rank 0 of the group takes tickets from
the queue until it has enough, then hands out the seats: where all ranks, old and new, meet as a world of their own. A
newcomer that gives up takes its own seat away, so exactly one of the two has it.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import NamedTuple

import msgpack

from aiocoll.errors import RendezvousError, StoreError, StoreTimeoutError
from aiocoll.runtime import Runtime
from aiocoll.store import Store

__all__ = ["Assignment", "invite", "take_seat"]

#: Keys and queues of those who wait to be taken in; none belongs to a world, whose keys begin with a number.
WAITING = "aiocoll/grow/waiting"
TICKETS = "aiocoll/grow/tickets"
EPOCHS = "aiocoll/grow/epochs"
#: Seconds for the tickets to get back into the queue: who grows in vain hears so at once, also if the store is gone.
GIVE_BACK = 1.0
#: What stands in the seat of a newcomer that has given up.
WITHDRAWN = b"withdrawn"


class Assignment(NamedTuple):
    """A rank in a world that is about to meet.

    Attributes:
        prefix: of that world's keys in the store.
        rank: its own.
        world_size: number of ranks, old and new.
        name: of the group.
    """

    prefix: str
    rank: int
    world_size: int
    name: str


async def take_seat(store: Store, timeout: float) -> Assignment:
    """Wait to be taken in by a group that grows.

    Raises:
        RendezvousError: no group has grown within `timeout` seconds.
    """
    ticket = await store.add(TICKETS, 1)
    seat = _seat(ticket)
    try:
        await store.queue_push(WAITING, str(ticket).encode())
        told = await store.get(seat, timeout=timeout)
    except StoreTimeoutError:
        told = await store.compare_set(seat, b"", WITHDRAWN)
        if told == WITHDRAWN:
            raise RendezvousError(
                f"no group has taken this process in within {timeout:g} s: join=True waits for all ranks of a group "
                "to call grow(n), at the same address"
            ) from None
    except asyncio.CancelledError:
        with contextlib.suppress(StoreError):
            await store.compare_set(seat, b"", WITHDRAWN)
        raise
    return Assignment(*msgpack.unpackb(told))


async def invite(store: Store, n: int, size: int, name: str, timeout: float) -> Assignment:
    """Wait for `n` newcomers and give them the ranks from `size` on; return the seat of rank 0.

    Raises:
        RendezvousError: fewer came within `timeout` seconds; those keep waiting for a later call.
    """
    runtime = Runtime.of(asyncio.get_running_loop())
    deadline = runtime.time() + timeout
    tickets: list[int] = []
    try:
        while len(tickets) < n:
            ticket = int(await store.queue_pop(WAITING, timeout=max(0.0, deadline - runtime.time())))
            if not await store.check([_seat(ticket)]):
                tickets.append(ticket)
        epoch = await store.add(EPOCHS, 1)
        head = Assignment(f"aiocoll/grown/{epoch}", 0, size + n, name)
        while tickets:
            seat = msgpack.packb(head._replace(rank=size + n - len(tickets)))
            if await store.compare_set(_seat(tickets[0]), b"", seat) == WITHDRAWN:
                tickets[0] = int(await store.queue_pop(WAITING, timeout=max(0.0, deadline - runtime.time())))
            else:
                tickets.pop(0)
    except BaseException as error:
        with contextlib.suppress(StoreError, TimeoutError):
            async with asyncio.timeout(GIVE_BACK):
                for ticket in tickets:
                    await store.queue_push(WAITING, str(ticket).encode())
        if isinstance(error, StoreTimeoutError):
            raise RendezvousError(
                f"{len(tickets)} of {n} newcomers came within {timeout:g} s: start the others with "
                "new_group(join=True) at the same address, and call grow() again"
            ) from error
        raise
    return head


def _seat(ticket: int) -> str:
    return f"aiocoll/grow/seat/{ticket}"
