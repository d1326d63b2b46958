"""Measurement of latency and bandwidth between hosts during the rendezvous.

All ranks use the same figures, so that they choose the same algorithms. The lowest rank of each host measures the links
to the lowest ranks of some other hosts and publishes the figures. With few hosts every pair is measured. With many
hosts the pairs that algorithms use are measured: those at distances 1, 2, 4, ... in the list of hosts. A link that
cannot be measured is left out, for instance if a firewall permits connections in the other direction only.
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

#: Bytes that the kernel keeps in flight on one connection by default (net.ipv4.tcp_wmem, tcp_rmem).
WINDOW = 3 << 20
#: Bytes that a sender may send at once without loss on any link. Longer bursts collide with other senders' traffic.
BURST = 1 << 20
#: The rate in bytes per second assumed for a link that is too fast to measure.
FAST = 1e9
#: Maximum number of hosts for which the link of every pair is measured.
FEW = 8
#: Time limits in seconds. A measurement sends no further packet train after ENOUGH, and is given up after LIMIT: about
#: twelve round trips around the world.
ENOUGH, LIMIT = 1.0, 2.5


class MeasuredLinks:
    """The measured round-trip times and rates of links between hosts.

    Args:
        figures: round-trip times and rates, by the names of both hosts.
    """

    def __init__(self, figures: Mapping[frozenset[str], LinkFigures]) -> None:
        self._figures = figures

    def tune(self, tuning: Tuning, hosts: set[str]) -> Tuning:
        """Adapt the tuning of a group to the slowest link between its hosts."""
        figures = [each for pair, each in self._figures.items() if pair <= hosts] or [*self._figures.values()]
        tcp = tuning.tcp
        latency = max((each.rtt for each in figures), default=0.0) / 2
        beta = max((1 / each.rate for each in figures if each.rate), default=0.0)
        beta = max(tcp.beta, beta, latency / BURST)
        tcp = tcp._replace(alpha=tcp.alpha + latency, beta=beta)
        return tuning._replace(tcp=tcp).over("tcp")

    def connections(self, one: str, most: int | None, other: str) -> int:
        """Return the number of TCP connections, at most `most`, that fill the link between two hosts."""
        figures = self._figures.get(frozenset((one, other)))
        if figures is None or not sys.platform.startswith("linux"):
            return 1
        window = figures.rtt * (figures.rate or FAST)
        return min(max(round(window / WINDOW), 1), MOST_CONNECTIONS, most or MOST_CONNECTIONS)


async def agree_on_links(
    exchange: Exchange, stream: StreamTransport, cards: Mapping[int, Card], connections: int | None
) -> MeasuredLinks:
    """Measure the links between hosts, and return the measurements that all hosts have published.

    The result is the same on every rank.

    Args:
        exchange: the exchange in which the figures are published.
        stream: the transport of this rank.
        cards: the cards of all ranks.
        connections: the highest number of connections of a link; None means no limit.
    """
    ranks = leaders(cards)
    if len(ranks) == 1:
        return MeasuredLinks({})
    found = await measure_links(stream, cards) if stream.rank in ranks else None
    links = read_links(await exchange.exchange_values("links", found, ranks), cards)
    stream.connections = partial(links.connections, cards[stream.rank]["host"], connections)
    return links


def leaders(cards: Mapping[int, Card]) -> list[int]:
    """Return the lowest rank of each host."""
    found: dict[str, int] = {}
    for rank in sorted(cards):
        found.setdefault(cards[rank]["host"], rank)
    return [*found.values()]


async def measure_links(stream: StreamTransport, cards: Mapping[int, Card]) -> bytes:
    """Measure the links from this host to other hosts, and encode the measurements for the store.

    Only the lowest rank of a host calls this.
    """
    ranks = leaders(cards)
    place = ranks.index(stream.rank)
    others = [ranks[(place + distance) % len(ranks)] for distance in _distances(len(ranks))]
    turn = asyncio.Lock()
    found = await asyncio.gather(*(_measure_link(stream, peer, cards[peer], turn) for peer in others))
    published = [[peer, *figures] for peer, figures in zip(others, found, strict=True) if figures is not None]
    return bytes(msgpack.packb(published))


def read_links(published: Mapping[int, bytes], cards: Mapping[int, Card]) -> MeasuredLinks:
    """Decode the measurements that the lowest ranks of the hosts have published.

    Raises:
        RendezvousError: a value is not valid. Any process with access to the store could have written it.
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
            raise RendezvousError(f"rank {rank} published invalid link figures in the store: {data[:64]!r}") from None
    return MeasuredLinks(found)


def _distances(hosts: int) -> Iterator[int]:
    """Yield the distances, in the ring of all hosts, from a host to the hosts to which it measures links.

    Only one host of a pair measures it.
    """
    distance = 1
    while distance <= hosts // 2:
        yield distance
        distance += 1 if hosts <= FEW else distance


async def _measure_link(stream: StreamTransport, peer: int, card: Card, turn: asyncio.Lock) -> LinkFigures | None:
    """Measure the link to a peer. The lock `turn` admits one measurement at a time, so that results are exact."""
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
        return None  # not measured; if the peer is unreachable, joining raises the error


def _seconds(number: Any) -> float:
    if type(number) is not float or not isfinite(number) or number < 0:
        raise ValueError(number)
    return number
