"""Where a rank listens for ranks of other hosts, and which address it tells them: by the options, or by the store."""

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
    """Open the TCP listener of a rank; return the card that tells others where it is.

    Args:
        stream: of the rank.
        options: resolved.
        stores: the address at which each rank has found the store, "" if it is at none.
        together: all ranks are on this host.

    Raises:
        AiocollError: an option names nothing of this host, or nothing tells by which address others reach it.
        ValueError: the same.
    """
    host, told = find_route(stream.rank, stores, options.interface, options.bind, together=together)
    port = None
    if options.advertise is not None and not together:
        told, port = parse_advertised(options.advertise)
    return await stream.listen_tcp(host, told, port, options.port_range)
