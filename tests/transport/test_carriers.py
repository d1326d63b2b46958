"""Carriers, with which plugins make data links: their selection, their use, and links without a carrier."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from aiocoll import GroupOptions, ProcessGroup, new_group
from aiocoll.errors import BackendUnavailableError, RendezvousError
from aiocoll.plugins import TRANSPORT_VERSION, CarrierRequest, TransportProvider, transports
from aiocoll.rendezvous.transport_choice import TransportChoice
from aiocoll.runtime import Runtime
from aiocoll.store import HashStore
from aiocoll.testing import run_ranks
from aiocoll.transport.stream.link_table import CarrierUse


class DecliningCarrier:
    """A carrier that opens no data links, so that frames use the authenticated connection."""

    def __init__(self, request: CarrierRequest) -> None:
        self.request = request
        self.closed = False

    async def open(self, stream: object, peer: int, *, dialled: bool) -> None:
        return None

    def catch_up(self) -> None:
        pass

    def close(self) -> None:
        self.closed = True


def make_unavailable_carrier(request: CarrierRequest) -> Any:
    raise BackendUnavailableError("there is no such device")


@pytest.fixture
def register() -> Iterator[Any]:
    """Yield a function that registers a transport by name until the end of the test."""
    names = []

    def register(name: str, make: Any = DecliningCarrier, **how: Any) -> None:
        names.append(name)
        transports.register(name, TransportProvider(medium="tcp", make_carrier=make, **how), version=TRANSPORT_VERSION)

    yield register
    for name in names:
        transports.unregister(name)


def request() -> CarrierRequest:
    return CarrierRequest(Runtime.of(asyncio.get_running_loop()), 0, 2)


@pytest.mark.parametrize("used", [True, False])
async def test_data_link_waits_until_the_ranks_have_agreed_on_a_carrier(used: bool) -> None:
    carrier = DecliningCarrier(request())
    use = CarrierUse(carrier, carries_all=True)
    with socket.socket(socket.AF_UNIX) as sock:
        found = asyncio.create_task(use.carrier(sock))
        for _ in range(5):
            await asyncio.sleep(0)
        assert not found.done()
        use.agree(used)
        assert await found is (carrier if used else None)


async def test_carrier_for_links_between_hosts_does_not_replace_unix_sockets() -> None:
    use = CarrierUse(DecliningCarrier(request()), carries_all=False)
    with socket.socket(socket.AF_UNIX) as sock:
        assert await use.carrier(sock) is None


async def test_link_that_a_carrier_declines_uses_its_connection(register: Any) -> None:
    register("declining")

    async def main(pg: ProcessGroup) -> set[str]:
        found: set[str] = set()

        class Hook:
            def on_end(self, info: Any) -> None:
                found.add(info.transport)

        pg.add_hook(Hook())
        assert (await pg.allreduce(np.ones(100_000)) == 2).all()
        return found

    assert await run_ranks(2, main, options=GroupOptions(transport="declining")) == [{"unix"}] * 2


async def test_transport_on_unix_sockets_refuses_ranks_of_several_hosts(register: Any) -> None:
    register("local", sockets="unix")
    store = HashStore()

    async def meet(rank: int) -> None:
        options = GroupOptions(transport="local", host_id=f"host {rank}")
        async with new_group(store=store, rank=rank, world_size=2, timeout=20, options=options):
            pass

    for error in await asyncio.gather(meet(0), meet(1), return_exceptions=True):
        assert isinstance(error, RendezvousError)
        assert "transport='local', but the ranks are on 2 hosts; use 'auto' or 'tcp'" in str(error)


def cards(*fields: dict[str, str]) -> dict[int, dict[str, str]]:
    return {rank: {"host": str(rank), **each} for rank, each in enumerate(fields)}


async def test_ranks_select_a_transport_that_all_ranks_offer(register: Any) -> None:
    register("slow", auto_rank=1)
    register("fast", auto_rank=2)
    register("manual")
    choice = TransportChoice("auto")
    assert choice.make_carrier(request()) is not None
    assert (choice.card, choice.carries_all) == ({"offers": "fast"}, False)
    assert choice.agree(cards({"offers": "fast"}, {"offers": "fast"}))
    assert not choice.agree(cards({"offers": "fast"}, {"offers": "slow"}))
    assert not choice.agree(cards({"offers": "fast"}, {}))
    assert not choice.agree({rank: {"host": "one", "offers": "fast"} for rank in range(2)})
    named = TransportChoice("manual")
    assert (named.card, named.carries_all) == ({"carrier": "manual"}, True)
    assert named.agree(cards({"carrier": "manual"}, {"carrier": "manual"}))
    with pytest.raises(RendezvousError, match="transport='manual' on some ranks, but not on ranks 1, 2: set the same"):
        named.agree(cards({"carrier": "manual"}, {}, {"offers": "fast"}))


async def test_auto_transport_skips_an_unavailable_carrier(register: Any, caplog: pytest.LogCaptureFixture) -> None:
    register("broken", make_unavailable_carrier, auto_rank=1)
    choice = TransportChoice("auto")
    assert choice.make_carrier(request()) is None
    assert choice.card == {}
    assert not choice.agree(cards({}, {}))
    assert "rank 0 does not use transport 'broken': there is no such device" in caplog.text
    with pytest.raises(BackendUnavailableError, match="there is no such device"):
        TransportChoice("broken").make_carrier(request())


async def test_cards_of_a_group_without_a_carrier_name_no_carrier() -> None:
    for name in ("auto", "tcp", "unix", "shm"):
        choice = TransportChoice(name)
        assert choice.make_carrier(request()) is None
        assert (choice.card, choice.carries_all) == ({}, False)
        assert not choice.agree(cards({}, {}))
