"""By which of its addresses the ranks on other hosts reach this one."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from contextlib import suppress

from aiocoll.errors import RendezvousError
from aiocoll.handshake import is_loopback
from aiocoll.transport.address import interface_address, is_wildcard, routable_address

__all__ = ["find_route", "is_own"]

#: Addresses for examples, which nobody has: the way to them is the way to everywhere. Nothing is sent.
_ELSEWHERE = ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1"))


def find_route(
    rank: int, stores: Mapping[int, str], interface: str | None, bind: str | None, *, together: bool
) -> tuple[str, str]:
    """Return the address to listen on, and the one that peers are told.

    Args:
        rank: this rank.
        stores: the address at which each rank has found the store, "" if it is at none.
        interface: name of a network interface of this host, or None.
        bind: an address of this host, "any", or None.
        together: all ranks are on this host.

    Raises:
        ValueError: `interface` or `bind` is none of this host.
        RendezvousError: nothing tells by which address others reach this host.
    """
    known = bool(interface) or bind not in (None, "any")
    master = stores[rank] or None if together or known else _way_out(rank, stores)
    host = routable_address(master, interface, bind)
    return host, routable_address(master, interface) if is_wildcard(host) else host


def is_own(host: str) -> bool:
    """Whether the numeric address `host` is one of this host."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_DGRAM, flags=socket.AI_NUMERICHOST)[
            0
        ]
        with socket.socket(family, kind) as probe:
            probe.bind(address)
    except OSError:
        return False
    return True


def _way_out(rank: int, stores: Mapping[int, str]) -> str:
    """Return an address the way to which begins where peers reach this host."""
    mine = stores[rank]
    if mine and not is_loopback(mine):
        return mine
    # The store is on this host, or it is a file. Ranks on other hosts know better where this host is.
    others = {store for store in stores.values() if store and not is_loopback(store)}
    if mine and not others:
        return mine  # all ranks share one loopback
    if mine:
        for store in sorted(others):
            if is_own(store):
                return store
    for family, far in _ELSEWHERE:
        with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((far, 9))
            return far
    return _only_address()


def _only_address() -> str:
    """Return the address of this host if it has one; not those of its loopback."""
    found = {}
    for name in sorted(name for _, name in socket.if_nameindex()):
        with suppress(ValueError):
            if not is_loopback(host := interface_address(name)):
                found[name] = host
    if len(found) == 1:
        return next(iter(found.values()))
    there = ", ".join(f"{name} ({host})" for name, host in found.items()) or "only the loopback"
    raise RendezvousError(
        "the ranks are on several hosts, and nothing tells by which address the others reach this one: name it with "
        f"the option interface= or bind= (AIOCOLL_INTERFACE, AIOCOLL_BIND); there is {there}"
    )
