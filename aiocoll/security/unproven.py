"""Places for the connections that have not proven the job key, at a rank or a store.

Who has no key can take a place, and nothing else: when all are taken, the oldest connection is turned away for the
newest. An honest one needs its place for one round trip, and dials again should it be turned away. No address has a
limit of its own: all ranks of a host, or behind one router, come from the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

__all__ = ["MIN_PLACES", "Unproven"]

#: Places however small the world is: under 200 connections a second each is kept for over half a second, several round
#: trips between continents; and they are few beside the 1024 files that a process may usually have open.
MIN_PLACES = 128

T = TypeVar("T")


class Unproven(Generic[T]):
    """The connections of one listener that have yet to prove themselves.

    Args:
        world_size: ranks that may come at the same time; 0 if that is not known.
        turn_away: told of a connection that has lost its place.
    """

    def __init__(self, world_size: int, turn_away: Callable[[T], object]) -> None:
        self._most = max(MIN_PLACES, 2 * world_size)
        self._turn_away = turn_away
        self._oldest_first: dict[T, None] = {}

    def __len__(self) -> int:
        return len(self._oldest_first)

    def __contains__(self, connection: T) -> bool:
        return connection in self._oldest_first

    def admit(self, connection: T) -> None:
        """Give a new connection a place."""
        if len(self._oldest_first) >= self._most:
            oldest = next(iter(self._oldest_first))
            del self._oldest_first[oldest]
            self._turn_away(oldest)
        self._oldest_first[connection] = None

    def release(self, connection: T) -> None:
        """The connection has proven itself, or has ended, if it still had its place."""
        self._oldest_first.pop(connection, None)
