"""Cards: what each rank publishes about itself in the store, before any link is open."""

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

#: Prefix of a value in the store that says why the ranks cannot meet. No job name (hexadecimal) and no card (a msgpack
#: map) begins like that.
CALLED_OFF = b"off:"
#: Such a value, too: the ranks meet again under the keys of the next generation.
MOVED = b"moved:"
#: Key of the reason why the ranks of a generation do not meet, or that they meet again: whichever is stored first.
ENDED = "ended"

#: Types of the fields of a card: host, event loop, unix socket, address of the store, whose ticket it has, process
#: (namespace, pid, start), host and port of TCP, bytes of a piece in shared memory, whether it reads others' memory,
#: the fingerprint of its NaNs, the carriers that it asks for and that it offers.
_CARD = [str, str, str, str, str, int, int, int, str, int, int, bool, int, str, str]


class MeetingMovedError(RendezvousError):
    """The ranks meet again, since one was replaced before all had published their cards."""


class CardCache:
    """The cards of one world, decoded once for all ranks that share a loop."""

    def __init__(self) -> None:
        self._read: dict[tuple[bytes, ...], Mapping[int, Card]] = {}

    def read(self, found: Sequence[bytes]) -> Mapping[int, Card]:
        """Return the cards in `found`, in rank order.

        Raises:
            RendezvousError: one is not a card, or says why the ranks cannot meet.
        """
        data = tuple(found)
        cards = self._read.get(data)
        if cards is None:
            for each in data:
                raise_if_called_off(each)
            cards = self._read[data] = {rank: _decoded(rank, each) for rank, each in enumerate(data)}
        return cards


def ranks_on_host(rank: int, cards: Mapping[int, Card]) -> int:
    """Return how many ranks are on the host of `rank`, itself included."""
    return sum(1 for card in cards.values() if card["host"] == cards[rank]["host"])


def _decoded(rank: int, data: bytes) -> Card:
    """Return the card of `rank`, checked: whoever can write to the store could have written anything."""
    try:
        card = msgpack.unpackb(data)
        tcp = card["tcp"] or ("", 0)
        told = (
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
        if list(map(type, told)) == _CARD:
            return dict(card)
    except (ValueError, TypeError, KeyError):
        pass
    raise RendezvousError(f"rank {rank} published an invalid card in the store: {data[:64]!r}")


async def call_off(store: Store, world_size: int, reason: str, generation: int = 1) -> None:
    """Publish why the ranks of this generation cannot meet, under every key for which a rank may be waiting.

    If they are meeting again, they find it in a later generation.
    """
    value = CALLED_OFF + reason.encode()
    while await meeting_store(store, generation).compare_set(ENDED, b"", value) == MOVED:
        generation += 1
    keys = ["job", ENDED, *(f"{what}/{rank}" for what in ("card", "tcp", "links") for rank in range(world_size))]
    await meeting_store(store, generation).multi_set(keys, [value] * len(keys))


def meeting_store(store: Store, generation: int) -> Store:
    """Return the part of `store` where the ranks of a generation meet."""
    return PrefixStore(f"aiocoll/{generation}", store)


def raise_if_called_off(data: bytes) -> None:
    """Raise if a rank has published there why the ranks cannot meet, or that they meet elsewhere."""
    if data == MOVED:
        raise MeetingMovedError("the ranks meet again: one of them was replaced")
    if data.startswith(CALLED_OFF):
        raise RendezvousError(data.removeprefix(CALLED_OFF).decode(errors="replace"))


def cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
