"""Why ranks have not met, in words for errors and warnings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from aiocoll.engine.endpoint import Endpoint
from aiocoll.store import Store
from aiocoll.transport.base import Card
from aiocoll.transport.stream.transport import StreamTransport

__all__ = ["not_come", "not_connected", "silent"]


def not_come(missing: Sequence[int], world_size: int, drawback: str | None, before: int) -> str:
    """Name the ranks that have published nothing in the store.

    Args:
        missing: the ranks.
        world_size: how many there should be.
        drawback: why some may not reach the store.
        before: how often ranks have met on it.
    """
    who = ", ".join(map(str, missing))
    because = f" ({drawback})" if drawback else ""
    hint = "are they running with the same master address?"
    if before:
        hint = "ranks have met on this store before: to come in the place of a lost one, pass join=True"
    return f"rank(s) {who} of {world_size}: {hint}{because}"


def silent(store: Store) -> str:
    """Return the text for a store that does not answer."""
    return f"{store} does not answer; is the process that serves it stopped?"


def not_connected(endpoint: Endpoint | None, transport: StreamTransport | None) -> str:
    """Return which connection is missing when all ranks have published their cards: between whom, where, and why."""
    if transport is not None and (trouble := transport.trouble):
        return trouble
    if endpoint is None:
        return "all ranks have come, but not all have published their addresses"
    hub, rank = endpoint.control.hub, endpoint.rank
    if rank != hub:
        return f"rank {hub} has not connected to all others: see its message"
    absent = ", ".join(f"{each} (at {_address(endpoint.cards, each)})" for each in endpoint.control.absent())
    return (
        f"rank(s) {absent} have not connected to rank {rank} at {_address(endpoint.cards, rank)}: do they run, and do "
        "firewalls let them?"
    )


def _address(cards: Mapping[int, Card], rank: int) -> str:
    card = cards[rank]
    return f"{card['tcp'][0]} port {card['tcp'][1]}" if card["tcp"] else f"unix socket {card['unix']}"
