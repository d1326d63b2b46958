"""Tests of link measurements: the measured pairs of hosts, the tuning of groups, and invalid measurements."""

from __future__ import annotations

import asyncio
import sys
from itertools import combinations
from pathlib import Path
from typing import Any

import msgpack
import pytest

from aiocoll import GroupOptions, RendezvousError, new_group
from aiocoll.algorithms.machine import Machine, Tuning
from aiocoll.rendezvous import measured_links
from aiocoll.rendezvous.measured_links import BURST, WINDOW, MeasuredLinks, leaders, measure_links, read_links
from aiocoll.transport.base import Card
from aiocoll.transport.stream.link_table import MOST_CONNECTIONS
from aiocoll.transport.stream.probe import LinkFigures

from ..internals import comm_of

SLOW, FAST = LinkFigures(50e-3, 1e6), LinkFigures(1e-6, 1e12)
LINKS = MeasuredLinks({frozenset("ab"): SLOW, frozenset("ac"): FAST, frozenset("bc"): LinkFigures(10e-3, 0.0)})
TUNING = Tuning(tcp=Machine(1e-4, 2e-5, 1e-9, 3e-10), medium="shm")


def cards(hosts: str) -> dict[int, Card]:
    return {rank: {"host": host} for rank, host in enumerate(hosts)}


class Recorder:
    """A transport that records and refuses each request for a link probe."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.requested_peers: list[int] = []

    async def connect_probe(self, peer: int, card: Card) -> Any:
        self.requested_peers.append(peer)
        raise RendezvousError("no way")


@pytest.mark.parametrize(
    ("hosts", "latency", "beta"),
    [("abc", 25e-3, 1e-6), ("ab", 25e-3, 1e-6), ("bc", 5e-3, 5e-3 / BURST), ("ac", 5e-7, 1e-9), ("ad", 25e-3, 1e-6)],
)
def test_tuning_uses_the_slowest_link_between_the_hosts(hosts: str, latency: float, beta: float) -> None:
    """Check that latencies add up, that loopback is the fastest link, and that unmeasured links count as slowest."""
    assert LINKS.tune(TUNING, set(hosts)) == TUNING._replace(
        tcp=Machine(1e-4 + latency, 2e-5, beta, 3e-10), medium="tcp"
    )


def test_tuning_does_not_change_without_link_measurements() -> None:
    assert MeasuredLinks({}).tune(TUNING, {"a", "b"}) == TUNING.over("tcp")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="links have one connection on other systems")
@pytest.mark.parametrize(("windows", "count"), [(0.1, 1), (1.4, 1), (1.6, 2), (3.4, 3), (90, MOST_CONNECTIONS)])
def test_number_of_connections_per_link_follows_from_the_send_window(windows: float, count: int) -> None:
    links = MeasuredLinks({frozenset("ab"): LinkFigures(20e-3, windows * WINDOW / 20e-3)})
    assert links.connections("a", None, "b") == links.connections("b", None, "a") == count
    assert links.connections("a", 2, "b") == min(count, 2)
    assert links.connections("a", 1, "b") == 1
    assert links.connections("a", 100, "b") == count
    assert links.connections("a", None, "c") == 1, "an unmeasured link must have one connection"


def test_link_too_fast_to_measure_uses_the_assumed_rate() -> None:
    links = MeasuredLinks({frozenset("ab"): LinkFigures(1e-3, 0.0), frozenset("ac"): LinkFigures(1.0, 0.0)})
    assert links.connections("a", None, "b") == 1
    assert links.connections("a", None, "c") == (MOST_CONNECTIONS if sys.platform.startswith("linux") else 1)


def test_lowest_ranks_of_the_hosts_measure_the_links() -> None:
    assert leaders(cards("abacbd")) == [0, 1, 3, 5]


@pytest.mark.parametrize("size", range(2, 9))
async def test_all_pairs_of_few_hosts_are_measured(size: int) -> None:
    pairs = await measured_pairs(size)
    assert {frozenset(pair) for pair in pairs} == {frozenset(pair) for pair in combinations(range(size), 2)}
    assert len(pairs) <= size * (size // 2)


@pytest.mark.parametrize("size", [9, 16, 100, 1000])
async def test_pairs_at_doubling_distances_of_many_hosts_are_measured(size: int) -> None:
    expected = {
        (rank, (rank + 2**power) % size) for rank in range(size) for power in range(10) if 2**power <= size // 2
    }
    assert set(await measured_pairs(size)) == expected


async def measured_pairs(size: int) -> list[tuple[int, int]]:
    all_cards = {rank: {"host": str(rank)} for rank in range(size)}
    found = []
    for rank in range(size):
        transport: Any = Recorder(rank)
        assert msgpack.unpackb(await measure_links(transport, all_cards)) == []
        found += [(rank, peer) for peer in transport.requested_peers]
    return found


def test_published_link_measurements_are_decoded() -> None:
    published = {0: msgpack.packb([[2, *SLOW]]), 2: msgpack.packb([])}
    assert read_links(published, cards("aabb")).tune(TUNING, {"a", "b"}).tcp.alpha == TUNING.tcp.alpha + 25e-3


@pytest.mark.parametrize(
    "value",
    [b"", b"\xc1", *map(msgpack.packb, (7, [7], [[1, 1.0]], [[9, 1.0, 1.0]], [[1, "x", 1.0]], [[1, -1.0, 1.0]]))]
    + [msgpack.packb([[1, float(bad), 1.0]]) for bad in ("nan", "inf")],
)
def test_invalid_link_measurements_are_refused(value: bytes) -> None:
    with pytest.raises(RendezvousError, match="rank 0 published invalid link figures in the store"):
        read_links({0: value, 1: msgpack.packb([])}, cards("ab"))


async def machine_figures(hosts: str, path: Path) -> list[dict[str, Machine]]:
    """Return the tuning of each rank for the whole group and for the group of its host; run each rank in a thread."""

    async def rank(number: int) -> dict[str, Machine]:
        how = GroupOptions(host_id=hosts[number], job_key=b"k" * 32, bind="127.0.0.1")
        place = {"init_method": f"file://{path}/store", "rank": number, "world_size": len(hosts)}
        async with new_group(**place, timeout=30, options=how) as pg:
            here = [other for other, host in enumerate(hosts) if host == hosts[number]]
            inner = await pg.split_group(here)
            found = {"world": comm_of(pg).tuning.machine, "host": comm_of(inner).tuning.machine}
            await pg.barrier()
            return found

    def in_thread(number: int) -> dict[str, Machine]:
        return asyncio.run(rank(number))

    return await asyncio.gather(*(asyncio.to_thread(in_thread, number) for number in range(len(hosts))))


async def test_all_ranks_use_the_same_link_measurements(tmp_path: Path) -> None:
    found = await machine_figures("aab", tmp_path)
    assert len({each["world"] for each in found}) == 1
    assert found[0]["world"].alpha > Tuning().tcp.alpha


async def test_group_on_one_host_ignores_measurements_of_links_between_hosts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def measured_figures(*_: Any) -> LinkFigures:
        return SLOW

    monkeypatch.setattr(measured_links, "_measure_link", measured_figures)
    for each in await machine_figures("aab", tmp_path):
        assert each["world"].alpha == Tuning().tcp.alpha + 25e-3
        assert each["host"].alpha == Tuning(medium="shm").machine.alpha


@pytest.mark.parametrize(("most", "count"), [(None, MOST_CONNECTIONS), (1, 1)])
async def test_connections_option_limits_the_connections_of_a_link(
    most: int | None, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def measured_figures(*_: Any) -> LinkFigures:
        return LinkFigures(1.0, 1e12)

    monkeypatch.setattr(measured_links, "_measure_link", measured_figures)

    async def rank(number: int) -> int:
        how = GroupOptions(host_id=str(number), job_key=b"k" * 32, bind="127.0.0.1", connections=most)
        place = {"init_method": f"file://{tmp_path}/store", "rank": number, "world_size": 2}
        async with new_group(**place, timeout=30, options=how) as pg:
            await pg.barrier()
            endpoint = comm_of(pg).endpoint
            return int(endpoint.context.transport.connections(endpoint.cards[1 - number]["host"]))  # type: ignore[attr-defined]

    def in_thread(number: int) -> int:
        return asyncio.run(rank(number))

    expected = count if sys.platform.startswith("linux") else 1
    assert await asyncio.gather(*(asyncio.to_thread(in_thread, number) for number in range(2))) == [expected] * 2


@pytest.mark.parametrize("error", [RendezvousError("no way"), ConnectionResetError(), TimeoutError()])
async def test_unmeasurable_link_does_not_prevent_the_rendezvous(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*_: Any) -> None:
        raise error

    monkeypatch.setattr(measured_links, "measure", fail)
    for each in await machine_figures("ab", tmp_path):
        assert each["world"] == Tuning().tcp
