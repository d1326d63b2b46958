"""Merging of groups of different jobs, which meet through tickets in a store that all of them can reach.

The first rank of each group takes a ticket number and stores a card of the group under it. Each group reads the cards
in the order of the tickets until their ranks add up to the requested size. So all find the same groups and number them
in the same way. A later merge in the same store begins at the next card.
"""

from __future__ import annotations

import asyncio
from itertools import count
from typing import NamedTuple

import msgpack

from aiocoll.errors import RendezvousError, StoreTimeoutError
from aiocoll.meeting.growth import WITHDRAWN, Assignment
from aiocoll.runtime import Runtime
from aiocoll.store import PrefixStore, Store
from aiocoll.store.deadline import DeadlineStore, last_request

__all__ = ["Party", "find_assignment"]


class Party(NamedTuple):
    """A group to be merged with others. Sorted parties give the order of ranks in the new group.

    Attributes:
        lowest: its lowest rank in its job.
        name: its name.
        ticket: its ticket number.
        ranks: its number of ranks.
        size: requested number of ranks of the new group.
    """

    lowest: int
    name: str
    ticket: int
    ranks: int
    size: int


async def find_assignment(store: Store, party: Party, name: str, timeout: float) -> Assignment:
    """Wait until enough groups have arrived; return the assignment of this group's first rank in the merged group.

    Args:
        store: the store where the groups meet.
        party: this rank's group, its ticket not yet set.
        name: name of the new group; only groups that give the same name meet.
        timeout: seconds to wait.

    Raises:
        RendezvousError: too few ranks came in time, too many came, or the groups request different sizes.
        StoreTimeoutError: the store has stopped.
    """
    runtime = Runtime.of(asyncio.get_running_loop())
    deadline = runtime.time() + timeout
    scope = PrefixStore(f"aiocoll/merge/{name}", DeadlineStore(store, timeout))
    party = party._replace(ticket=await scope.add("tickets", 1))
    card = msgpack.packb(party)
    found: list[Party] = []
    try:
        await scope.set(str(party.ticket), card)
        for number in count(1):
            card_or_mark = await scope.get(str(number), timeout=max(0.0, deadline - runtime.time()))
            if card_or_mark == WITHDRAWN:
                continue
            found.append(Party(*msgpack.unpackb(card_or_mark)))
            if _is_complete(found):
                if party in found:
                    break
                found = []
    except BaseException as error:
        withdrawn = await last_request(scope.compare_set(str(party.ticket), card, WITHDRAWN))
        if isinstance(error, StoreTimeoutError) and withdrawn is not None:
            raise RendezvousError(
                f"{_count_ranks(found)} of {party.size} ranks came within {timeout:g} s, from "
                f"{_format_parties(found)}; call merge_remote_group() in all groups with the same store, size and "
                "group_name"
            ) from error
        raise
    first = min(each.ticket for each in found)
    before = [each for each in found if each < party]
    return Assignment(f"aiocoll/merge/{name}/{first}", _count_ranks(before), party.size, name)


def _is_complete(found: list[Party]) -> bool:
    """Return whether the groups together have the requested number of ranks; raise if they cannot be merged."""
    if len({each.size for each in found}) > 1:
        raise RendezvousError(
            f"the groups to be merged request different sizes, {', '.join(str(each.size) for each in found)} "
            f"({_format_parties(found)}); pass the same size in all groups"
        )
    size = found[0].size
    if _count_ranks(found) > size:
        raise RendezvousError(
            f"the groups to be merged have {_count_ranks(found)} ranks, not size={size}: {_format_parties(found)}; "
            "pass the total number of ranks of all groups as size, the same on every rank"
        )
    return _count_ranks(found) == size


def _count_ranks(parties: list[Party]) -> int:
    return sum(each.ranks for each in parties)


def _format_parties(parties: list[Party]) -> str:
    return ", ".join(f"{each.name!r} of {each.ranks}" for each in parties) or "no group"
