"""What ranks tell each other through the store while they meet, and who has not told it yet."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import msgpack

from aiocoll.meeting.cards import CardCache, raise_if_called_off
from aiocoll.store import Store
from aiocoll.store.deadline import last_request
from aiocoll.transport.base import Card

__all__ = ["Exchange"]


class Exchange:
    """The keys of one meeting.

    Args:
        store: where they are; nothing else is there.
        rank: this rank.
        world_size: number of ranks.
        timeout: seconds to wait for each.
    """

    def __init__(self, store: Store, rank: int, world_size: int, timeout: float) -> None:
        self.store = store
        self._rank = rank
        self._world_size = world_size
        self._timeout = timeout
        self._awaited = {0: "job"}

    async def job(self, random_bytes: Callable[[int], bytes]) -> str:
        """Return the name that rank 0 gives the job: no other job has it, so no rank of an older one can connect."""
        if self._rank == 0:
            await self.store.set("job", random_bytes(16).hex().encode())
        job = await self.store.get("job", timeout=self._timeout)
        raise_if_called_off(job)
        return job.decode(errors="replace")

    async def cards(self, what: str, card: Card, cache: CardCache) -> Mapping[int, Card]:
        """Publish `card`; return the cards of all ranks."""
        found = await self.values(what, msgpack.packb(card), range(self._world_size))
        return cache.read([*found.values()])

    async def values(self, what: str, value: bytes | None, ranks: Iterable[int]) -> dict[int, bytes]:
        """Publish `value`, if there is one; return what each of `ranks` has published."""
        keys = self._awaited = {rank: f"{what}/{rank}" for rank in ranks}
        if value is not None:
            await self.store.set(keys[self._rank], value)
        found = await self.store.multi_get([*keys.values()], timeout=self._timeout)
        return dict(zip(keys, found, strict=True))

    async def missing(self) -> list[int] | None:
        """Return the ranks that have not published what this one waits for; None if the store does not answer."""
        published = await last_request(self.store.list_keys())
        return None if published is None else [rank for rank, key in self._awaited.items() if key not in published]
