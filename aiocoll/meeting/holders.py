"""Arrivals and deaths of a meeting's ticket holders, published in its store.

Ranks get new numbers when a group grows, so processes are identified by their tickets here.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Mapping

import msgpack

from aiocoll.errors import StoreError
from aiocoll.store import Store

__all__ = ["arrival", "death", "watch_deaths"]


def arrival(holder: str) -> str:
    """Return the store key that shows that a ticket holder has become a rank."""
    return f"aiocoll/arrivals/{holder}"


def death(number: int, holder: str, reason: str) -> tuple[str, bytes]:
    """Return the store key and value that report the `number`-th death of a ticket holder, with the evidence."""
    return _death_key(number), msgpack.packb([holder, reason])


def _death_key(number: int) -> str:
    return f"aiocoll/deaths/{number}"


async def watch_deaths(store: Store, holders: Mapping[str, int], report: Callable[[int, str], None]) -> None:
    """Call `report` with the rank and the evidence of each death that the `Meeting` publishes, until it ends.

    Args:
        store: the store of the meeting.
        holders: the rank of each ticket holder.
        report: callback for a dead rank and the evidence.
    """
    with contextlib.suppress(StoreError):
        for number in itertools.count():
            holder, reason = msgpack.unpackb(await store.get(_death_key(number), timeout=float("inf")))
            if holder in holders:
                report(holders[holder], reason)
