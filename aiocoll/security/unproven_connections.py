"""Table of the connections that have not proven the job key, of limited size, for one listener.

A client without the key can occupy an entry of the table, and has no other effect. When the table is full, a new
connection replaces the oldest one, which is closed. An honest client needs its entry for one round trip, and dials
again if its connection was closed. There is no limit per address, since all ranks of a host, or behind one router,
share an address.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

__all__ = ["MIN_PLACES", "UnprovenConnections"]

#: Minimum capacity of the table, small compared to the usual limit of 1024 open files. At 200 new connections per
#: second, a connection stays in the table for more than half a second: several round trips between continents.
MIN_PLACES = 128

T = TypeVar("T")


class UnprovenConnections(Generic[T]):
    """The connections of one listener that have not proven the job key yet.

    Args:
        world_size: number of ranks that may connect at the same time; 0 if unknown.
        turn_away: callback for a connection that was removed in favour of a newer one.
    """

    def __init__(self, world_size: int, turn_away: Callable[[T], object]) -> None:
        self._most = max(MIN_PLACES, 2 * world_size)
        self._turn_away = turn_away
        self._oldest_first: dict[T, None] = {}

    def __len__(self) -> int:
        return len(self._oldest_first)

    def __iter__(self) -> Iterator[T]:
        return iter(self._oldest_first)

    def __contains__(self, connection: T) -> bool:
        return connection in self._oldest_first

    def admit(self, connection: T) -> None:
        """Add a new connection. If the table is full, remove and close the oldest connection."""
        if len(self._oldest_first) >= self._most:
            oldest = next(iter(self._oldest_first))
            del self._oldest_first[oldest]
            self._turn_away(oldest)
        self._oldest_first[connection] = None

    def release(self, connection: T) -> None:
        """Remove a connection that has proven the key or ended, if it is still in the table."""
        self._oldest_first.pop(connection, None)
