"""What the process that holds a meeting, and those that have its tickets, tell each other in its store.

Ranks are numbered anew when a group grows: here processes are named by the tickets that they have.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Mapping

import msgpack

from aiocoll.errors import StoreError
from aiocoll.store import Store

__all__ = ["arrival", "death", "heed_deaths"]


def arrival(holder: str) -> str:
    """Return the key that is set when a process has become a rank."""
    return f"aiocoll/arrivals/{holder}"


def death(number: int, holder: str, reason: str) -> tuple[str, bytes]:
    """Return key and value that tell of a death, the `number`-th one: whose, and how it is known."""
    return _death(number), msgpack.packb([holder, reason])


def _death(number: int) -> str:
    return f"aiocoll/deaths/{number}"


async def heed_deaths(store: Store, holders: Mapping[str, int], report: Callable[[int, str], None]) -> None:
    """Call `report` with each rank that is told to be dead, and why, until the meeting is over.

    Args:
        store: of the meeting.
        holders: the ranks of those that have tickets.
        report: called with each that is dead.
    """
    with contextlib.suppress(StoreError):
        for number in itertools.count():
            holder, reason = msgpack.unpackb(await store.get(_death(number), timeout=float("inf")))
            if holder in holders:
                report(holders[holder], reason)
