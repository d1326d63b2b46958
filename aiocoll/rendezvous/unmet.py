"""Error and warning texts about ranks that have not met in time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from aiocoll.engine.endpoint import Endpoint
from aiocoll.store import Store
from aiocoll.transport.base import Card
from aiocoll.transport.stream.transport import StreamTransport

__all__ = ["describe_missing_links", "describe_missing_ranks", "describe_silent_store"]


def describe_missing_ranks(missing: Sequence[int], world_size: int, drawback: str | None, before: int) -> str:
    """Return a text about the ranks that have published nothing in the store.

    Args:
        missing: these ranks.
        world_size: the expected number of ranks.
        drawback: the reason why some ranks may not reach the store, or None.
        before: the number of earlier rendezvous on this store.
    """
    names = ", ".join(map(str, missing))
    because = f" ({drawback})" if drawback else ""
    hint = "check that they run and use the same master address"
    if before:
        hint = "ranks have already met on this store; to replace a lost rank, pass join=True"
    return f"rank(s) {names} of {world_size}: {hint}{because}"


def describe_silent_store(store: Store) -> str:
    """Return a text about a store that does not answer."""
    return f"{store} does not answer; check that the process that serves it runs and is not stopped"


def describe_missing_links(endpoint: Endpoint | None, transport: StreamTransport | None) -> str:
    """Return a text about the connections that are missing after all ranks have published their cards.

    The text names the ranks and addresses, and the reason if it is known.
    """
    if transport is not None and (trouble := transport.trouble):
        return trouble
    if endpoint is None:
        return "all ranks have arrived, but some have not published their addresses"
    hub, rank = endpoint.control.hub, endpoint.rank
    if rank != hub:
        return f"rank {hub} is not connected to all other ranks; see the error message of rank {hub}"
    absent = ", ".join(f"{each} (at {_format_address(endpoint.cards, each)})" for each in endpoint.control.absent())
    return (
        f"rank(s) {absent} have not connected to rank {rank} at {_format_address(endpoint.cards, rank)}; check that "
        "they run and that firewalls permit the connection"
    )


def _format_address(cards: Mapping[int, Card], rank: int) -> str:
    card = cards[rank]
    return f"{card['tcp'][0]} port {card['tcp'][1]}" if card["tcp"] else f"unix socket {card['unix']}"
