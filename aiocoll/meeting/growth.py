"""How newcomers find a group that grows: tickets and assignments in the store.

A newcomer takes the next ticket number and waits for the assignment of that number. Rank 0 of the group looks for
tickets without an assignment until there are enough, calls their holders, since one may have died while it waited, then
stores an assignment for each that has answered: a rank in a new world, in which all ranks, old and new, meet. A ticket
is withdrawn by a mark in place of its assignment, if its holder gives up or does not answer; marks and assignments are
stored by `compare_set`, so exactly one of the two succeeds. A holder that lives takes another ticket.

Whoever dies, nobody waits for it: tickets stay where they are until they are assigned, and a world that a lost rank 0
had made is called off by the next one.
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

#: Keys of newcomers that wait; the keys of a world begin with a number, so none of them is one of these. All tickets up
#: to `DONE` are assigned.
TICKETS = "aiocoll/grow/tickets"
DONE = "aiocoll/grow/done"
CALLS = "aiocoll/grow/calls"
EPOCHS = "aiocoll/grow/epochs"
#: Seconds in which a newcomer answers a call, and those after the deadline for newcomers.
ANSWER = 2.0
LATE_ANSWER = 0.25
#: Seconds after which whoever waits for tickets looks for them again.
LOOK = 5.0
#: Stored instead of the assignment of a ticket that is not valid any more.
WITHDRAWN = b"withdrawn"


class Assignment(NamedTuple):
    """A rank in a world that is about to meet.

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
    """What a group that grows asks for.

    Attributes:
        most: newcomers that it wants.
        least: newcomers without which it does not grow.
        size: ranks that it has.
        name: name of the group with the newcomers.
    """

    most: int
    least: int
    size: int
    name: str


async def await_assignment(store: Store, timeout: float) -> Assignment:
    """Wait until a group that grows assigns this process a rank.

    Raises:
        RendezvousError: no group has grown within `timeout` seconds.
        StoreTimeoutError: the store has stopped.
    """
    runtime = Runtime.of(asyncio.get_running_loop())
    deadline = runtime.time() + timeout
    store = DeadlineStore(store, timeout)
    while True:
        ticket = await store.add(TICKETS, 1)
        key = _assignment(ticket)
        answering = runtime.create_task(_answer_calls(store, ticket), f"aiocoll newcomer {ticket}")
        answering.add_done_callback(lambda done: done.cancelled() or done.exception())
        try:
            await store.set(_came(ticket), b"")
            answer = await store.get(key, timeout=max(0.0, deadline - runtime.time()))
        except StoreTimeoutError:
            answer = await store.compare_set(key, b"", WITHDRAWN)
            if answer == WITHDRAWN:
                raise RendezvousError(
                    f"no group has grown within {timeout:g} s: join=True waits until all ranks of a group call "
                    "grow(n), at the same address"
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
        call = int(await store.queue_pop(_calls(ticket), timeout=float("inf")))
        await store.queue_push(_answers(call), str(ticket).encode())


async def await_newcomer(store: Store) -> None:
    """Wait until there is a newcomer, also while the store has stopped for some time."""
    runtime = Runtime.of(asyncio.get_running_loop())
    while True:
        try:
            tickets, last = await _waiting(store)
            if await _present(store, tickets, ANSWER):
                return
            await _await_ticket(store, last + 1, LOOK)
        except StoreTimeoutError:
            await runtime.sleep(LOOK)


async def invite(store: Store, invitation: Invitation, timeout: float) -> Assignment:
    """Wait for newcomers and assign them the ranks after those that there are; return the assignment of rank 0.

    Raises:
        RendezvousError: too few came within `timeout` seconds; these keep waiting for a later call.
        StoreTimeoutError: the store has stopped.
    """
    runtime = Runtime.of(asyncio.get_running_loop())
    deadline = runtime.time() + timeout
    # The last call for newcomers comes at the deadline, and must be answered.
    store = DeadlineStore(store, timeout + LATE_ANSWER)
    open_world = f"aiocoll/grow/open/{invitation.name.rpartition('~')[0]}"
    await _call_off_open(store, open_world)
    while True:
        tickets = await _find(store, invitation, deadline, runtime)
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
                if await store.compare_set(_assignment(ticket), b"", packed) != packed:
                    break
            else:
                return head
        except BaseException:
            await last_request(_call_off_open(store, open_world))
            raise
        await _call_off_open(store, open_world)


async def _find(store: Store, invitation: Invitation, deadline: float, runtime: Runtime) -> list[int]:
    """Return the tickets of the newcomers that take part."""
    late = False
    while True:
        waiting, last = await _waiting(store)
        if len(waiting) >= invitation.most or late:
            left = deadline - runtime.time()
            # There is time for one call only: call those, too, that may take the place of a dead one.
            tickets = waiting if left <= 0 else waiting[: invitation.most]
            present = await _present(store, tickets, min(ANSWER, max(left, LATE_ANSWER)))
            if len(present) == len(tickets) or left <= 0:
                return present[: invitation.most]
            continue
        await _await_ticket(store, last + 1, min(max(0.0, deadline - runtime.time()), LOOK))
        late = runtime.time() >= deadline


async def _await_ticket(store: Store, ticket: int, timeout: float) -> None:
    """Wait until somebody has taken a ticket, but not for ever: it may have died right after that."""
    with contextlib.suppress(StoreTimeoutError):
        await store.get(_came(ticket), timeout=timeout)


async def _waiting(store: Store) -> tuple[list[int], int]:
    """Return the tickets without an assignment, and the last one."""
    done, last = await store.add(DONE, 0), await store.add(TICKETS, 0)
    waiting = [ticket for ticket in range(done + 1, last + 1) if not await store.check([_assignment(ticket)])]
    await store.set(DONE, str(min(waiting, default=last + 1) - 1).encode())
    return waiting, last


async def _present(store: Store, tickets: Sequence[int], timeout: float) -> list[int]:
    """Call the holders of tickets; return the tickets of those that answer, and withdraw the others."""
    runtime = Runtime.of(asyncio.get_running_loop())
    deadline = runtime.time() + timeout
    call = await store.add(CALLS, 1)
    for ticket in tickets:
        await store.queue_push(_calls(ticket), str(call).encode())
    present: set[int] = set()
    with contextlib.suppress(StoreTimeoutError):
        while len(present) < len(tickets):
            left = max(0.0, deadline - runtime.time())
            present.add(int(await store.queue_pop(_answers(call), timeout=left)))
    for ticket in set(tickets) - present:
        await store.compare_set(_assignment(ticket), b"", WITHDRAWN)
    return [ticket for ticket in tickets if ticket in present]


async def _call_off_open(store: Store, open_world: str) -> None:
    """Tell the newcomers of the last world that it may never meet; it matters to none if it has met."""
    if await store.check([open_world]):
        world = Assignment(*msgpack.unpackb(await store.get(open_world)))
        reason = "the group that was to meet them does not grow: its rank 0 was lost or cancelled"
        await call_off(PrefixStore(world.prefix, store), world.world_size, reason)


def _assignment(ticket: int) -> str:
    return f"aiocoll/grow/assignment/{ticket}"


def _came(ticket: int) -> str:
    return f"aiocoll/grow/came/{ticket}"


def _calls(ticket: int) -> str:
    return f"aiocoll/grow/calls/{ticket}"


def _answers(call: int) -> str:
    return f"aiocoll/grow/answers/{call}"
