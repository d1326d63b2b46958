"""Exchange of values between ranks through the store, during a rendezvous."""

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
from aiocoll.store.base import wait_until_done
from aiocoll.store.deadline import last_request
from aiocoll.transport.base import Card

__all__ = ["Exchange", "await_end", "run_until_notice"]

#: Seconds to wait for a notice after the store was lost: one may have arrived that is not processed yet.
_NOTICE_GRACE = 0.3


class Exchange:
    """A rank's part in the exchange of values through the store, in one rendezvous.

    Args:
        store: the store, or the part of it, that has only these keys.
        rank: this rank.
        world_size: number of ranks.
        timeout: seconds to wait for each key.
    """

    def __init__(self, store: Store, rank: int, world_size: int, timeout: float) -> None:
        self.store = store
        self._rank = rank
        self._world_size = world_size
        self._timeout = timeout
        self._awaited = {0: "job"}

    async def exchange_job_name(self, random_bytes: Callable[[int], bytes]) -> str:
        """Generate and publish the job name on rank 0; return it on all ranks.

        The name is unique, so that ranks of an older job cannot connect.
        """
        if self._rank == 0:
            await self._publish("job", random_bytes(16).hex().encode())
        job = await self.store.get("job", timeout=self._timeout)
        raise_if_called_off(job)
        return job.decode(errors="replace")

    async def exchange_cards(self, topic: str, card: Card, cache: CardCache) -> Mapping[int, Card]:
        """Publish this rank's `card` (its addresses and capabilities), and return the cards of all ranks."""
        found = await self.exchange_values(topic, msgpack.packb(card), range(self._world_size))
        return cache.read([*found.values()])

    async def exchange_values(self, topic: str, value: bytes | None, ranks: Iterable[int]) -> dict[int, bytes]:
        """Publish `value` unless it is None, and return the values published by `ranks`."""
        keys = self._awaited = {rank: f"{topic}/{rank}" for rank in ranks}
        if value is not None:
            await self._publish(keys[self._rank], value)
        found = await self.store.multi_get([*keys.values()], timeout=self._timeout)
        return dict(zip(keys, found, strict=True))

    async def _publish(self, key: str, value: bytes) -> None:
        """Store `value` under `key`; raise if `key` holds a notice that the rendezvous failed or starts again."""
        raise_if_called_off(await self.store.compare_set(key, b"", value))

    async def list_missing_ranks(self) -> list[int] | None:
        """Return the ranks whose values are missing in the current exchange; None if the store does not answer."""
        published = await last_request(self.store.list_keys())
        return None if published is None else [rank for rank, key in self._awaited.items() if key not in published]


async def await_end(store: Store) -> RendezvousError | None:
    """Wait until a rank publishes a notice that the rendezvous failed or starts again; return the error to raise."""
    try:
        raise_if_called_off(await store.get(ENDED, timeout=math.inf))
    except RendezvousError as error:
        return error
    return None


async def run_until_notice(
    runtime: Runtime, work: Coroutine[Any, Any, None], notice: Coroutine[Any, Any, Exception | None], name: str
) -> None:
    """Run `work` to its end; if `notice` returns an error first, cancel `work` and raise that error.

    A rank may publish a notice and close the store at once. So a notice that arrived before the connection broke takes
    precedence over the error of the broken connection.
    """
    task, watcher = runtime.create_task(work, name), runtime.create_task(notice, f"{name} notice")
    try:
        await asyncio.wait([task, watcher], return_when=asyncio.FIRST_COMPLETED)
        lost = task.done() and not task.cancelled() and isinstance(task.exception(), StoreUnavailableError)
        if lost:
            await wait_until_done(watcher, _NOTICE_GRACE)
        if (lost or not task.done()) and watcher.done() and watcher.exception() is None and (error := watcher.result()):
            raise error
        await task
    finally:
        # Do not await the end of `watcher`, because a cancellation during that wait would lose the result of `task`.
        watcher.add_done_callback(lambda done: done.cancelled() or done.exception())
        watcher.cancel()
        if not task.done():
            task.cancel()
            await asyncio.wait([task])
            _ = task.cancelled() or task.exception()
