"""What the links between hosts do, measured while the ranks meet, so that all of them choose the same algorithms.

The lowest rank of each host measures the way to those of some other hosts, and publishes what it found; all ranks read
that. With few hosts every pair is measured, with many the pairs that algorithms use: those that are 1, 2, 4, ... apart.
A way that cannot be measured, because a firewall lets only the other side dial, for instance, is left out.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator, Mapping
from functools import partial
from math import isfinite
from typing import Any

import msgpack

from aiocoll.algorithms.machine import Tuning
from aiocoll.errors import AiocollError, RendezvousError
from aiocoll.meeting.cards import raise_if_called_off
from aiocoll.rendezvous.exchange import Exchange
from aiocoll.sockets import round_trip
from aiocoll.transport.base import Card
from aiocoll.transport.stream.link_table import MOST_CONNECTIONS
from aiocoll.transport.stream.probe import LinkFigures, measure
from aiocoll.transport.stream.transport import StreamTransport

__all__ = ["MeasuredLinks", "agree_on_links", "leaders", "measure_links", "read_links"]

#: Bytes under way that the kernel allows one connection, unless it is told to allow more (net.ipv4.tcp_wmem, tcp_rmem).
WINDOW = 3 << 20
#: Bytes that a link takes at once, however fast it is: more is lost where it meets what others send.
BURST = 1 << 20
#: Bytes per second of a link on which they come too fast to tell.
FAST = 1e9
#: Hosts up to which every pair is measured.
FEW = 8
#: Seconds after which no other train of packets is asked for, and those after which nothing is waited for: some twelve
#: round trips around the world.
ENOUGH, LIMIT = 1.0, 2.5


class MeasuredLinks:
    """The figures of links between hosts.

    Args:
        figures: by the names of both hosts.
    """

    def __init__(self, figures: Mapping[frozenset[str], LinkFigures]) -> None:
        self._figures = figures

    def tune(self, tuning: Tuning, hosts: set[str]) -> Tuning:
        """Return the tuning of a group with ranks on these hosts: what the slowest link between them does."""
        figures = [each for pair, each in self._figures.items() if pair <= hosts] or [*self._figures.values()]
        tcp = tuning.tcp
        there = max((each.rtt for each in figures), default=0.0) / 2
        beta = max((1 / each.rate for each in figures if each.rate), default=0.0)
        beta = max(tcp.beta, beta, there / BURST)
        tcp = tcp._replace(alpha=tcp.alpha + there, beta=beta)
        return tuning._replace(tcp=tcp).over("tcp")

    def connections(self, one: str, most: int | None, other: str) -> int:
        """Return how many connections a link between two hosts is to have, `most` if that is fewer."""
        figures = self._figures.get(frozenset((one, other)))
        if figures is None or not sys.platform.startswith("linux"):
            return 1
        window = figures.rtt * (figures.rate or FAST)
        return min(max(round(window / WINDOW), 1), MOST_CONNECTIONS, most or MOST_CONNECTIONS)


async def agree_on_links(
    exchange: Exchange, stream: StreamTransport, cards: Mapping[int, Card], connections: int | None
) -> MeasuredLinks:
    """Measure the links between hosts; return those that all ranks have published, the same on every rank.

    Args:
        exchange: where they are published.
        stream: the transport of this rank.
        cards: of all ranks.
        connections: most connections of a link; None: no limit.
    """
    ranks = leaders(cards)
    if len(ranks) == 1:
        return MeasuredLinks({})
    found = await measure_links(stream, cards) if stream.rank in ranks else None
    links = read_links(await exchange.values("links", found, ranks), cards)
    stream.connections = partial(links.connections, cards[stream.rank]["host"], connections)
    return links


def leaders(cards: Mapping[int, Card]) -> list[int]:
    """Return the lowest rank of each host."""
    found: dict[str, int] = {}
    for rank in sorted(cards):
        found.setdefault(cards[rank]["host"], rank)
    return [*found.values()]


async def measure_links(stream: StreamTransport, cards: Mapping[int, Card]) -> bytes:
    """Return what the leader of a host is to publish about the links to other hosts."""
    ranks = leaders(cards)
    place = ranks.index(stream.rank)
    others = [ranks[(place + distance) % len(ranks)] for distance in _distances(len(ranks))]
    turn = asyncio.Lock()
    found = await asyncio.gather(*(_measured(stream, peer, cards[peer], turn) for peer in others))
    told = [[peer, *figures] for peer, figures in zip(others, found, strict=True) if figures is not None]
    return bytes(msgpack.packb(told))


def read_links(published: Mapping[int, bytes], cards: Mapping[int, Card]) -> MeasuredLinks:
    """Return what the leaders have published.

    Raises:
        RendezvousError: that is something else; whoever can write to the store could have written anything.
    """
    found = {}
    for rank, data in published.items():
        raise_if_called_off(data)
        try:
            for peer, rtt, rate in msgpack.unpackb(data):
                found[frozenset((cards[rank]["host"], cards[peer]["host"]))] = LinkFigures(
                    _seconds(rtt), _seconds(rate)
                )
        except (ValueError, TypeError, KeyError):
            raise RendezvousError(f"rank {rank} published invalid links in the store: {data[:64]!r}") from None
    return MeasuredLinks(found)


def _distances(hosts: int) -> Iterator[int]:
    """Yield how far the hosts are whose links one of them measures: each pair is measured by one of its hosts."""
    distance = 1
    while distance <= hosts // 2:
        yield distance
        distance += 1 if hosts <= FEW else distance


async def _measured(stream: StreamTransport, peer: int, card: Card, turn: asyncio.Lock) -> LinkFigures | None:
    """Measure one link; in turns, so that the packets for one do not wait for those of another."""
    try:
        async with asyncio.timeout(LIMIT):
            probe = await stream.connect_probe(peer, card)
            try:
                async with turn:
                    rtt, rate = await measure(probe, asyncio.get_running_loop().time, ENOUGH)
                return LinkFigures(min(rtt, round_trip(probe.sock)), rate)
            finally:
                probe.close()
    except (AiocollError, OSError, TimeoutError):
        return None  # if the ranks do not meet, that says why


def _seconds(number: Any) -> float:
    if type(number) is not float or not isfinite(number) or number < 0:
        raise ValueError(number)
    return number
