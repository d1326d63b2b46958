"""Growth of a group: the tickets of newcomers, and their assigned ranks, in the store.

A newcomer takes the next ticket number and waits for the assignment of that number. Rank 0 of the group counts the
tickets without an assignment until there are enough. It then calls their holders, since one may have died while it
waited. For each holder that answers, it stores an assignment: a rank in a new world, where all ranks, old and new,
meet. A ticket is withdrawn by a mark in place of its assignment if its holder gives up or does not answer. Marks and
assignments are stored by `compare_set`, so exactly one of the two succeeds. A living holder takes another ticket.

No process waits for a dead one. Tickets stay valid until they are assigned. If rank 0 is lost, the next rank 0 calls
off the world that the lost rank had made.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from typing import NamedTuple

import msgpack

from aiocoll.errors import RendezvousError, StoreTimeoutError
from aiocoll.meeting.cards import call_off
from aiocoll.runtime import Runtime
from aiocoll.store import PrefixStore, Store
from aiocoll.store.deadline import DeadlineStore, last_request

__all__ = ["Assignment", "Invitation", "await_assignment", "await_newcomer", "invite"]

#: Store keys of counters for newcomers. Keys of generations differ, because they have a number after "aiocoll/". All
#: tickets up to the number in `DONE` are assigned or withdrawn.
TICKETS = "aiocoll/grow/tickets"
DONE = "aiocoll/grow/done"
CALLS = "aiocoll/grow/calls"
EPOCHS = "aiocoll/grow/epochs"
#: Seconds within which newcomers must answer a roll call. At the group's deadline, only `LATE_ANSWER` seconds are left.
ANSWER = 2.0
LATE_ANSWER = 0.25
#: Maximum seconds between two searches for waiting newcomers.
LOOK = 5.0
#: Value stored in place of an assignment when a ticket is withdrawn.
WITHDRAWN = b"withdrawn"


class Assignment(NamedTuple):
    """The rank that a process gets in a grown or merged group, assigned before its ranks meet.

    Attributes:
        prefix: prefix of that world's keys in the store; "" for the first world of the store.
        rank: the assigned rank.
        world_size: number of ranks, old and new.
        name: name of the group; "" if it is numbered.
    """

    prefix: str
    rank: int
    world_size: int
    name: str


class Invitation(NamedTuple):
    """A growing group's request for newcomers.

    Attributes:
        most: maximum number of newcomers.
        least: minimum number of newcomers. With fewer newcomers, the group does not grow.
        size: current number of ranks.
        name: name of the group with the newcomers.
    """

    most: int
    least: int
    size: int
    name: str


async def await_assignment(store: Store, timeout: float) -> Assignment:
    """Take a ticket as a newcomer, and wait until a growing group assigns this process a rank.

    Raises:
        RendezvousError: no group has grown within `timeout` seconds.
        StoreTimeoutError: the store has stopped.
    """
    runtime = Runtime.of(asyncio.get_running_loop())
    deadline = runtime.time() + timeout
    store = DeadlineStore(store, timeout)
    while True:
        ticket = await store.add(TICKETS, 1)
        key = _assignment_key(ticket)
        answering = runtime.create_task(_answer_calls(store, ticket), f"aiocoll newcomer {ticket}")
        answering.add_done_callback(lambda done: done.cancelled() or done.exception())
        try:
            await store.set(_arrival_key(ticket), b"")
            answer = await store.get(key, timeout=max(0.0, deadline - runtime.time()))
        except StoreTimeoutError:
            answer = await store.compare_set(key, b"", WITHDRAWN)
            if answer == WITHDRAWN:
                raise RendezvousError(
                    f"no group has grown within {timeout:g} s; while newcomers wait with join=True, call grow(n) on "
                    "all ranks of a group that met at the same address"
                ) from None
        except asyncio.CancelledError:
            await last_request(store.compare_set(key, b"", WITHDRAWN))
            raise
        finally:
            answering.cancel()
        if answer != WITHDRAWN:
            return Assignment(*msgpack.unpackb(answer))


async def _answer_calls(store: Store, ticket: int) -> None:
    while True:
        call = int(await store.queue_pop(_call_queue(ticket), timeout=float("inf")))
        await store.queue_push(_answer_queue(call), str(ticket).encode())


async def await_newcomer(store: Store) -> None:
    """Return when a live newcomer is waiting for a group. If the store does not answer, try again later."""
    runtime = Runtime.of(asyncio.get_running_loop())
    while True:
        try:
            tickets, last = await _list_waiting(store)
            if await _call_holders(store, tickets, ANSWER):
                return
            await _await_ticket(store, last + 1, LOOK)
        except StoreTimeoutError:
            await runtime.sleep(LOOK)


async def invite(store: Store, invitation: Invitation, timeout: float) -> Assignment:
    """Wait for newcomers and assign them ranks after the existing ranks; return the assignment of rank 0.

    Raises:
        RendezvousError: too few newcomers came within `timeout` seconds; they keep waiting for a later call.
        StoreTimeoutError: the store has stopped.
    """
    runtime = Runtime.of(asyncio.get_running_loop())
    deadline = runtime.time() + timeout
    # The last roll call starts at the deadline, so its answers arrive up to `LATE_ANSWER` seconds later.
    store = DeadlineStore(store, timeout + LATE_ANSWER)
    open_world = f"aiocoll/grow/open/{invitation.name.rpartition('~')[0]}"
    await _cancel_open_world(store, open_world)
    while True:
        tickets = await _find_newcomers(store, invitation, deadline, runtime)
        if len(tickets) < invitation.least:
            raise RendezvousError(
                f"{len(tickets)} of {invitation.least} newcomers came within {timeout:g} s: start the others with "
                "new_group(join=True) at the same address, and call grow() again"
            )
        epoch = await store.add(EPOCHS, 1)
        head = Assignment(f"aiocoll/grown/{epoch}", 0, invitation.size + len(tickets), invitation.name)
        await store.set(open_world, msgpack.packb(head))
        try:
            for number, ticket in enumerate(tickets):
                packed = msgpack.packb(head._replace(rank=invitation.size + number))
                if await store.compare_set(_assignment_key(ticket), b"", packed) != packed:
                    break
            else:
                return head
        except BaseException:
            await last_request(_cancel_open_world(store, open_world))
            raise
        await _cancel_open_world(store, open_world)


async def _find_newcomers(store: Store, invitation: Invitation, deadline: float, runtime: Runtime) -> list[int]:
    """Wait until enough newcomers have answered a roll call, or until the deadline; return their tickets."""
    late = False
    while True:
        waiting, last = await _list_waiting(store)
        if len(waiting) >= invitation.most or late:
            left = deadline - runtime.time()
            # At the deadline, include all newcomers in the last roll call, since live ones may replace dead ones.
            tickets = waiting if left <= 0 else waiting[: invitation.most]
            present = await _call_holders(store, tickets, min(ANSWER, max(left, LATE_ANSWER)))
            if len(present) == len(tickets) or left <= 0:
                return present[: invitation.most]
            continue
        await _await_ticket(store, last + 1, min(max(0.0, deadline - runtime.time()), LOOK))
        late = runtime.time() >= deadline


async def _await_ticket(store: Store, ticket: int, timeout: float) -> None:
    """Wait at most `timeout` seconds for the newcomer with `ticket`: it may have died after it took the ticket."""
    with contextlib.suppress(StoreTimeoutError):
        await store.get(_arrival_key(ticket), timeout=timeout)


async def _list_waiting(store: Store) -> tuple[list[int], int]:
    """Return the tickets of newcomers that wait for an assignment, and the number of the last ticket."""
    done, last = await store.add(DONE, 0), await store.add(TICKETS, 0)
    waiting = [ticket for ticket in range(done + 1, last + 1) if not await store.check([_assignment_key(ticket)])]
    await store.set(DONE, str(min(waiting, default=last + 1) - 1).encode())
    return waiting, last


async def _call_holders(store: Store, tickets: Sequence[int], timeout: float) -> list[int]:
    """Send a roll call to the holders of `tickets`; return the answered tickets, and withdraw the others."""
    if not tickets:
        return []
    runtime = Runtime.of(asyncio.get_running_loop())
    deadline = runtime.time() + timeout
    call = await store.add(CALLS, 1)
    for ticket in tickets:
        await store.queue_push(_call_queue(ticket), str(call).encode())
    present: set[int] = set()
    with contextlib.suppress(StoreTimeoutError):
        while len(present) < len(tickets):
            left = max(0.0, deadline - runtime.time())
            present.add(int(await store.queue_pop(_answer_queue(call), timeout=left)))
    for ticket in set(tickets) - present:
        await store.compare_set(_assignment_key(ticket), b"", WITHDRAWN)
    return [ticket for ticket in tickets if ticket in present]


async def _cancel_open_world(store: Store, open_world: str) -> None:
    """Notify newcomers with an assignment that their grown group may never meet. A group that has met ignores this."""
    if await store.check([open_world]):
        world = Assignment(*msgpack.unpackb(await store.get(open_world)))
        reason = "the group that the newcomers joined does not grow: its rank 0 was lost or cancelled"
        await call_off(PrefixStore(world.prefix, store), world.world_size, reason)


def _assignment_key(ticket: int) -> str:
    return f"aiocoll/grow/assignment/{ticket}"


def _arrival_key(ticket: int) -> str:
    return f"aiocoll/grow/came/{ticket}"


def _call_queue(ticket: int) -> str:
    return f"aiocoll/grow/calls/{ticket}"


def _answer_queue(call: int) -> str:
    return f"aiocoll/grow/answers/{call}"
