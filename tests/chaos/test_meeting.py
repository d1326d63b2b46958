"""Ranks and store hosts that die before, during and after the rendezvous."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from aiocoll import AiocollError, GroupOptions, RendezvousError, StoreUnavailableError, new_group
from aiocoll.security.handshake import CONFIRM_SIZE, HELLO_SIZE, PROOF_SIZE, ConnKind
from aiocoll.store import HashStore, Store, StoreServer, TCPStore
from tests.chaos.proxy import Detour, Fault, Proxy, recorded_connection_kinds  # noqa: F401

pytestmark = pytest.mark.usefixtures("recorded_connection_kinds")

KEY = b"k" * 32
OPTIONS = GroupOptions(transport="unix", job_key=KEY)
#: Seconds after which ranks give up a rendezvous that cannot succeed.
SHORT = 0.5


async def meet(store: Store, rank: int, world_size: int, timeout: float) -> str:
    group = new_group(store=store, rank=rank, world_size=world_size, timeout=timeout, options=OPTIONS)
    async with group as pg:
        assert await pg.allreduce(1) == world_size
    return "right"


async def test_rank_lost_during_the_rendezvous_delays_no_other_rank() -> None:
    """Lose rank 1 while rank 2 has no link yet; rank 0 must not wait until its timeout of 300 s."""
    store = HashStore()
    plain = Detour(store, None)
    stalled = Detour(store, Fault("stall", ConnKind.CONTROL, True, 0, again=True))
    ranks = [asyncio.create_task(meet(each, rank, 3, 300.0)) for rank, each in enumerate((store, plain, stalled))]
    sent = HELLO_SIZE + PROOF_SIZE + CONFIRM_SIZE
    while not any(len(p.said.get((ConnKind.CONTROL, True), b"")) == sent for p in plain.proxies.values()):  # noqa: ASYNC110
        await asyncio.sleep(0)
    ranks[1].cancel()
    with pytest.raises(RendezvousError, match="rank 1 was lost before all ranks had met: its control connection broke"):
        await ranks[0]
    ranks[2].cancel()
    await asyncio.wait(ranks)
    await plain.aclose()
    await stalled.aclose()


async def test_missing_store_host_is_reported_with_address_and_time(port: int) -> None:
    """Check that a rank reports the address of the store, and for how many seconds the rank tried to connect."""
    group = new_group(init_method=f"tcp://127.0.0.1:{port}", rank=1, world_size=2, timeout=SHORT, options=OPTIONS)
    where = rf"no store at 127\.0\.0\.1:{port}: nothing listens there"
    with pytest.raises(RendezvousError, match=rf"did not meet the others within 0\.5 s: {where}"):
        await group


async def results_until_death(offset: int, upstream: bool) -> tuple[list[Any], Proxy]:
    """Let three ranks meet at a store whose host dies after `offset` bytes on the connection of a rank."""
    server = StoreServer(key=KEY)
    async with Proxy.tcp(server.start(), Fault("kill", ConnKind.STORE, upstream, offset)) as proxy:
        stores = [TCPStore(*proxy.endpoint, timeout=SHORT, key=KEY) for _ in range(3)]
        try:
            async with asyncio.timeout(20):
                ranks = (meet(store, rank, 3, SHORT) for rank, store in enumerate(stores))
                return await asyncio.gather(*ranks, return_exceptions=True), proxy
        finally:
            for store in stores:
                await store.aclose()
            await server.aclose()


async def check_deaths(step: int) -> None:
    _, proxy = await results_until_death(1 << 30, True)
    for upstream in (True, False):
        sent = len(proxy.said[ConnKind.STORE, upstream]) // 3
        for results, _ in await asyncio.gather(*(results_until_death(at, upstream) for at in range(0, sent, step))):
            # The last message of a rank to the store reports its arrival. A rank that has all cards needs no store any
            # more.
            assert all(result == "right" or isinstance(result, AiocollError) for result in results), results
            assert "right" not in results or upstream or results == ["right"] * 3, results


async def test_store_host_that_dies_during_the_rendezvous_is_reported() -> None:
    await check_deaths(97)


@pytest.mark.soak
async def test_store_host_that_dies_at_any_byte_of_a_connection_is_reported() -> None:
    await check_deaths(2)


async def test_group_works_after_the_death_of_its_store_host() -> None:
    server = StoreServer(key=KEY)
    where = server.start()
    stores = [TCPStore(*where, timeout=5, key=KEY) for _ in range(3)]
    met = asyncio.Barrier(3)

    async def rank(number: int, store: TCPStore) -> None:
        async with new_group(store=store, rank=number, world_size=3, options=OPTIONS) as pg:
            await met.wait()
            await server.aclose()
            for count in (1, 100_000):
                got = await pg.allreduce(np.full(count, number))
                np.testing.assert_array_equal(got, np.full(count, 3))
            # A second group of the same ranks needs no store.
            async with new_group(store=store, rank=number, world_size=3, options=OPTIONS) as second:
                assert await second.allreduce(1) == 3
            with pytest.raises(StoreUnavailableError, match=rf"store 127\.0\.0\.1:{where[1]} closed the connection"):
                await store.set("k", b"v")

    await asyncio.gather(*map(rank, range(3), stores))
    for store in stores:
        await store.aclose()
