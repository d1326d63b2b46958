"""Pairs of ranks in which only one rank can connect to the other, as behind a one-way firewall."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgpack
import numpy as np
import pytest

from aiocoll import GroupOptions, ProcessGroup, new_group
from aiocoll.store import HashStore, Store

KEY = b"k" * 32


@contextmanager
def unanswering_address() -> Iterator[tuple[str, int]]:
    """Yield an address of this host that answers no SYN, because its listener's backlog is full."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        address = listener.getsockname()
        waiting = [socket.socket() for _ in range(3)]
        for sock in waiting:
            sock.setblocking(False)
            sock.connect_ex(address)
        try:
            yield address
        finally:
            for sock in waiting:
                sock.close()


class DisguisingStore(Store):
    """A store view of one rank, in which the cards of the `hidden` ranks contain an address that does not answer."""

    def __init__(self, store: Store, where: tuple[str, int], hidden: list[int]) -> None:
        super().__init__(store.timeout)
        self._store = store
        self._shown_at = where
        self._hidden = hidden

    async def aclose(self) -> None:
        pass

    async def _call(self, command: str, arguments: tuple[Any, ...]) -> Any:
        return await self._store._call(command, arguments)

    async def _wait(self, command: str, arguments: tuple[Any, ...], timeout: float) -> Any:
        found = await self._store._wait(command, arguments, timeout)
        if command != "multi_get" or any(key.rpartition("/")[0].endswith("claim") for key in arguments[0]):
            return found
        return [self._shown(rank, data) for rank, data in enumerate(found)]

    def _shown(self, rank: int, data: bytes) -> bytes:
        card = msgpack.unpackb(data)
        if rank in self._hidden and card["tcp"]:
            card["tcp"] = list(self._shown_at)
        return msgpack.packb(card)


async def run(world_size: int, barred: set[tuple[int, int]], work: Callable[[ProcessGroup], Awaitable[None]]) -> None:
    """Run `work` on all ranks. In each pair in `barred`, the first rank cannot connect to the second rank."""
    store = HashStore()

    async def rank(number: int) -> None:
        view = DisguisingStore(store, address, [to for one, to in barred if one == number])
        options = GroupOptions(transport="tcp", job_key=KEY)
        async with new_group(store=view, rank=number, world_size=world_size, timeout=60, options=options) as pg:
            await work(pg)

    with unanswering_address() as address:
        async with asyncio.TaskGroup() as ranks:
            for number in range(world_size):
                ranks.create_task(rank(number))
    await store.aclose()


#: World sizes, with the pairs of ranks in which the first rank cannot connect to the second rank.
BARRED = [(2, {(0, 1)}), (3, {(0, 1)}), (3, {(1, 2)}), (3, {(2, 1)}), (4, {(0, 1), (0, 2), (0, 3), (1, 2), (3, 2)})]


@pytest.mark.parametrize(("world_size", "barred"), BARRED)
async def test_both_ranks_can_send_if_only_one_rank_can_connect(world_size: int, barred: set[tuple[int, int]]) -> None:
    async def work(pg: ProcessGroup) -> None:
        for count in (1, 100_000):
            got = await pg.allreduce(np.full(count, 1.0 + pg.rank()))
            np.testing.assert_array_equal(got, np.full(count, world_size * (world_size + 1) / 2))
        inputs = [np.full(3, 10 * pg.rank() + to) for to in range(world_size)]
        outputs = await pg.alltoall([np.zeros(3, int) for _ in inputs], inputs)
        for source, got in enumerate(outputs):
            np.testing.assert_array_equal(got, np.full(3, 10 * source + pg.rank()))

    await run(world_size, barred, work)


@pytest.mark.slow
@pytest.mark.parametrize(("world_size", "barred"), BARRED)
async def test_rank_that_cannot_connect_can_send_over_a_link_opened_by_its_peer(
    world_size: int, barred: set[tuple[int, int]]
) -> None:
    """Check that a waiting rank opens a link to its peer, since the peer may be unable to open one."""

    async def broadcasts(pg: ProcessGroup) -> None:
        for root in range(world_size):
            np.testing.assert_array_equal(await pg.broadcast(np.full(3, float(pg.rank())), root), np.full(3, root))

    async def messages(pg: ProcessGroup) -> None:
        for one, to in sorted(barred):
            if pg.rank() == one:
                await pg.send(np.full(3, float(one)), to)
            elif pg.rank() == to:
                np.testing.assert_array_equal(await pg.recv(np.zeros(3), one), np.full(3, one))

    await run(world_size, barred, broadcasts)
    await run(world_size, barred, messages)
