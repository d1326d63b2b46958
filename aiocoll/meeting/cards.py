"""Cards: the descriptions (host, addresses, process) that ranks publish in the store before any link is open."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

import msgpack

from aiocoll.errors import RendezvousError
from aiocoll.store import PrefixStore, Store
from aiocoll.transport.base import Card

__all__ = [
    "CALLED_OFF",
    "ENDED",
    "MOVED",
    "CardCache",
    "MeetingMovedError",
    "call_off",
    "cores",
    "meeting_store",
    "raise_if_called_off",
    "ranks_on_host",
]

#: Prefix of a store value that contains the reason why the ranks cannot meet. No job name (hexadecimal) and no card (a
#: msgpack map) begins with it.
CALLED_OFF = b"off:"
#: Store value that makes the ranks of a generation (one rendezvous attempt) meet again, under the keys of the next
#: generation.
MOVED = b"moved:"
#: Key under which the outcome of a failed rendezvous attempt is stored: the reason after `CALLED_OFF`, or `MOVED`. The
#: first stored value counts.
ENDED = "ended"

#: Types of the checked fields of a card: host, event loop, unix socket, store address, ticket holder, process
#: (namespace, pid, start), TCP host and port, chunk size in shared memory, whether the rank reads other ranks' memory,
#: fingerprint of its NaNs, requested carrier, offered carrier.
_CARD = [str, str, str, str, str, int, int, int, str, int, int, bool, int, str, str]


class MeetingMovedError(RendezvousError):
    """Raised when the ranks meet again, because a process was replaced before all ranks had published their cards."""


class CardCache:
    """A cache of one world's decoded cards, which all ranks of an event loop share."""

    def __init__(self) -> None:
        self._read: dict[tuple[bytes, ...], Mapping[int, Card]] = {}

    def read(self, found: Sequence[bytes]) -> Mapping[int, Card]:
        """Decode the cards in `found`, which are in rank order, and return them by rank.

        Raises:
            RendezvousError: a value is not a card, or is the reason why the ranks cannot meet.
        """
        data = tuple(found)
        cards = self._read.get(data)
        if cards is None:
            for each in data:
                raise_if_called_off(each)
            cards = self._read[data] = {rank: _decode(rank, each) for rank, each in enumerate(data)}
        return cards


def ranks_on_host(rank: int, cards: Mapping[int, Card]) -> int:
    """Return the number of ranks on the host of `rank`, including `rank`."""
    return sum(1 for card in cards.values() if card["host"] == cards[rank]["host"])


def _decode(rank: int, data: bytes) -> Card:
    """Decode and check the card of `rank`: any process with access to the store could have written it."""
    try:
        card = msgpack.unpackb(data)
        tcp = card["tcp"] or ("", 0)
        values = (
            card["host"],
            card.get("loop", ""),
            card["unix"] or "",
            card.get("store", ""),
            card.get("holder", ""),
            *card["process"],
            *tcp,
            card["piece"],
            card.get("reads", False),
            card.get("nans", 0),
            card.get("carrier", ""),
            card.get("offers", ""),
        )
        if list(map(type, values)) == _CARD:
            return dict(card)
    except (ValueError, TypeError, KeyError):
        pass
    raise RendezvousError(f"rank {rank} published an invalid card in the store: {data[:64]!r}")


async def call_off(store: Store, world_size: int, reason: str, generation: int = 1) -> None:
    """Publish why the ranks cannot meet in a rendezvous attempt, under every key for which a rank may wait.

    If the ranks are already meeting again, the reason is published in a later generation.
    """
    value = CALLED_OFF + reason.encode()
    while await meeting_store(store, generation).compare_set(ENDED, b"", value) == MOVED:
        generation += 1
    keys = ["job", ENDED, *(f"{what}/{rank}" for what in ("card", "tcp", "links") for rank in range(world_size))]
    await meeting_store(store, generation).multi_set(keys, [value] * len(keys))


def meeting_store(store: Store, generation: int) -> Store:
    """Return a view of `store` with only the keys of a generation (one attempt of the ranks to meet)."""
    return PrefixStore(f"aiocoll/{generation}", store)


def raise_if_called_off(data: bytes) -> None:
    """Raise an error if `data`, a value from the store, reports that the ranks cannot meet or must meet again."""
    if data == MOVED:
        raise MeetingMovedError("one of the ranks was replaced, so the ranks meet again")
    if data.startswith(CALLED_OFF):
        raise RendezvousError(data.removeprefix(CALLED_OFF).decode(errors="replace"))


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
