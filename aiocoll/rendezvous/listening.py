"""TCP listener of a rank for ranks on other hosts: the address to bind, and the address to publish."""

from __future__ import annotations

from collections.abc import Mapping

from aiocoll.endpoints import parse_advertised
from aiocoll.options import GroupOptions
from aiocoll.transport.base import Card
from aiocoll.transport.stream.route import find_route
from aiocoll.transport.stream.transport import StreamTransport

__all__ = ["listen_between_hosts"]


async def listen_between_hosts(
    stream: StreamTransport, options: GroupOptions, stores: Mapping[int, str], *, together: bool
) -> Card:
    """Open a rank's TCP listener, and return the card fields that publish its address.

    Args:
        stream: the transport of the rank.
        options: resolved options. They determine both addresses; without them, the address of the store does.
        stores: the address at which each rank has found the store, "" if the store has no address.
        together: whether all ranks are on this host.

    Raises:
        AiocollError: an option names no address of this host, or the address for other hosts cannot be determined.
        ValueError: the same.
    """
    host, published = find_route(stream.rank, stores, options.interface, options.bind, together=together)
    port = None
    if options.advertise is not None and not together:
        published, port = parse_advertised(options.advertise)
    return await stream.listen_tcp(host, published, port, options.port_range)
