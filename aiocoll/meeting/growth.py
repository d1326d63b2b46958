"""How newcomers find a group that grows: tickets and assignments in the store.

A newcomer takes a ticket number, puts it into the queue, and waits for the assignment of that number. Rank 0 of the
group takes tickets from the queue until it has enough, then stores an assignment for each: a rank in a new world, in
which all ranks, old and new, meet. A newcomer that gives up stores a mark instead of its assignment; both use
`compare_set`, so exactly one of the two succeeds.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import NamedTuple

import msgpack

from aiocoll.errors import RendezvousError, StoreError, StoreTimeoutError
from aiocoll.meeting.cards import call_off
from aiocoll.runtime import Runtime
from aiocoll.store import PrefixStore, Store

__all__ = ["Assignment", "await_assignment", "invite", "meeting_store"]

#: Keys and queues of newcomers that wait; the keys of a world begin with a number, so none of them is one of these.
WAITING = "aiocoll/grow/waiting"
TICKETS = "aiocoll/grow/tickets"
EPOCHS = "aiocoll/grow/epochs"
#: Seconds to put tickets back into the queue: `grow` that fails shall raise soon, even if the store is gone.
GIVE_BACK = 1.0
#: Stored instead of the assignment of a newcomer that has given up.
WITHDRAWN = b"withdrawn"


class Assignment(NamedTuple):
    """A rank in a world that is about to meet.

    Attributes:
        prefix: prefix of that world's keys in the store.
        rank: the assigned rank.
        world_size: number of ranks, old and new.
        name: name of the group.
    """

    prefix: str
    rank: int
    world_size: int
    name: str


async def await_assignment(store: Store, timeout: float) -> Assignment:
    """Wait until a group that grows assigns this process a rank.

    Raises:
        RendezvousError: no group has grown within `timeout` seconds.
    """
    ticket = await store.add(TICKETS, 1)
    key = _key(ticket)
    try:
        await store.queue_push(WAITING, str(ticket).encode())
        answer = await store.get(key, timeout=timeout)
    except StoreTimeoutError:
        answer = await store.compare_set(key, b"", WITHDRAWN)
        if answer == WITHDRAWN:
            raise RendezvousError(
                f"no group has grown within {timeout:g} s: join=True waits until all ranks of a group call grow(n), "
                "at the same address"
            ) from None
    except asyncio.CancelledError:
        with contextlib.suppress(StoreError):
            await store.compare_set(key, b"", WITHDRAWN)
        raise
    return Assignment(*msgpack.unpackb(answer))


async def invite(store: Store, n: int, size: int, name: str, timeout: float) -> Assignment:
    """Wait for `n` newcomers and assign them the ranks from `size` on; return the assignment of rank 0.

    Raises:
        RendezvousError: fewer came within `timeout` seconds; these keep waiting for a later call.
    """
    runtime = Runtime.of(asyncio.get_running_loop())
    deadline = runtime.time() + timeout
    tickets: list[int] = []
    head: Assignment | None = None
    try:
        while len(tickets) < n:
            ticket = int(await store.queue_pop(WAITING, timeout=max(0.0, deadline - runtime.time())))
            if not await store.check([_key(ticket)]):
                tickets.append(ticket)
        epoch = await store.add(EPOCHS, 1)
        head = Assignment(f"aiocoll/grown/{epoch}", 0, size + n, name)
        while tickets:
            packed = msgpack.packb(head._replace(rank=size + n - len(tickets)))
            if await store.compare_set(_key(tickets[0]), b"", packed) == WITHDRAWN:
                tickets[0] = int(await store.queue_pop(WAITING, timeout=max(0.0, deadline - runtime.time())))
            else:
                tickets.pop(0)
    except BaseException as error:
        with contextlib.suppress(StoreError, TimeoutError):
            async with asyncio.timeout(GIVE_BACK):
                for ticket in tickets:
                    await store.queue_push(WAITING, str(ticket).encode())
                if head is not None:
                    why = f"the group that was to meet them does not grow: {str(error) or 'its rank 0 was cancelled'}"
                    await call_off(meeting_store(head, store), head.world_size, why)
        if isinstance(error, StoreTimeoutError):
            raise RendezvousError(
                f"{len(tickets)} of {n} newcomers came within {timeout:g} s: start the others with "
                "new_group(join=True) at the same address, and call grow() again"
            ) from error
        raise
    return head


def meeting_store(assignment: Assignment, store: Store) -> Store:
    """Return the part of `store` where the ranks of an assignment meet, for the first time and only once."""
    return PrefixStore(f"{assignment.prefix}/aiocoll/1", store)


def _key(ticket: int) -> str:
    return f"aiocoll/grow/seat/{ticket}"
