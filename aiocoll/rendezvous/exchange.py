"""What ranks tell each other through the store while they meet, and who has not told it yet."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine, Iterable, Mapping
from typing import Any

import msgpack

from aiocoll.errors import RendezvousError, StoreUnavailableError
from aiocoll.meeting.cards import ENDED, CardCache, raise_if_called_off
from aiocoll.runtime import Runtime
from aiocoll.store import Store
from aiocoll.store.base import settled
from aiocoll.store.deadline import last_request
from aiocoll.transport.base import Card

__all__ = ["Exchange", "await_end", "run_unless"]

#: Seconds in which news that arrived before the store was lost come through the layers of the store.
_LAST_NEWS = 0.3


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
            await self._publish("job", random_bytes(16).hex().encode())
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
            await self._publish(keys[self._rank], value)
        found = await self.store.multi_get([*keys.values()], timeout=self._timeout)
        return dict(zip(keys, found, strict=True))

    async def _publish(self, key: str, value: bytes) -> None:
        """Store a value unless the key says already that the ranks cannot meet, or meet elsewhere."""
        raise_if_called_off(await self.store.compare_set(key, b"", value))

    async def missing(self) -> list[int] | None:
        """Return the ranks that have not published what this one waits for; None if the store does not answer."""
        published = await last_request(self.store.list_keys())
        return None if published is None else [rank for rank, key in self._awaited.items() if key not in published]


async def await_end(store: Store) -> RendezvousError | None:
    """Wait until a rank publishes that the ranks cannot meet, or meet again; return the error to raise."""
    try:
        raise_if_called_off(await store.get(ENDED, timeout=math.inf))
    except RendezvousError as error:
        return error
    return None


async def run_unless(
    runtime: Runtime, doing: Coroutine[Any, Any, None], news: Coroutine[Any, Any, Exception | None], name: str
) -> None:
    """Run `doing` to its end; if `news` returns first, cancel it and raise the returned error.

    A rank that publishes news may close the store at once. News that arrived before the connection broke win.
    """
    task, other = runtime.create_task(doing, name), runtime.create_task(news, f"{name} news")
    try:
        await asyncio.wait([task, other], return_when=asyncio.FIRST_COMPLETED)
        lost = task.done() and not task.cancelled() and isinstance(task.exception(), StoreUnavailableError)
        if lost:
            await settled(other, _LAST_NEWS)
        if (lost or not task.done()) and other.done() and other.exception() is None and (error := other.result()):
            raise error
        await task
    finally:
        # Nothing awaits the end of `other`: a cancellation during that wait would lose the result of `task`.
        other.add_done_callback(lambda done: done.cancelled() or done.exception())
        other.cancel()
        if not task.done():
            task.cancel()
            await asyncio.wait([task])
            _ = task.cancelled() or task.exception()
