"""Choice of the address at which ranks on other hosts reach this rank."""

from __future__ import annotations

import socket
import struct
import sys
from collections.abc import Mapping
from contextlib import suppress

from aiocoll.errors import RendezvousError
from aiocoll.security.keys import is_loopback
from aiocoll.transport.stream.addresses import ANY, is_wildcard

__all__ = ["find_route", "interface_address", "is_own", "routable_address"]

#: The ioctl that returns an interface's IPv4 address (SIOCGIFADDR in Linux' <linux/sockios.h>).
_SIOCGIFADDR = 0x8915
#: The port of the "discard" service, used only to look up a route. No packet is sent to it.
_DISCARD_PORT = 9
#: Number of fields in a line of /proc/net/if_inet6: address, index, prefix length, scope, flags, name.
_IF_INET6_FIELDS = 6
_GLOBAL_SCOPE = "00"
_LINK_SCOPE = "20"

#: Addresses reserved for documentation. The route to them is the default route. No packet is sent to them.
_ELSEWHERE = ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1"))


def find_route(
    rank: int, stores: Mapping[int, str], interface: str | None, bind: str | None, *, together: bool
) -> tuple[str, str]:
    """Return the address on which this rank listens, and the address that it advertises to peers.

    Args:
        rank: this rank.
        stores: the address at which each rank reaches the store, "" if the store has no address.
        interface: name of a network interface of this host, or None.
        bind: an address of this host, "any", or None.
        together: whether all ranks are on this host.

    Raises:
        ValueError: `interface` or `bind` does not exist on this host.
        RendezvousError: the address by which others reach this host cannot be determined.
    """
    known = bool(interface) or bind not in (None, "any")
    master = stores[rank] or None if together or known else _route_target(rank, stores)
    host = routable_address(master, interface, bind)
    return host, routable_address(master, interface) if is_wildcard(host) else host


def is_own(host: str) -> bool:
    """Return whether the numeric address `host` belongs to this host."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_DGRAM, flags=socket.AI_NUMERICHOST)[
            0
        ]
        with socket.socket(family, kind) as probe:
            probe.bind(address)
    except OSError:
        return False
    return True


def _route_target(rank: int, stores: Mapping[int, str]) -> str:
    """Return a remote address. Peers reach this host at the local address of the route to that remote address."""
    mine = stores[rank]
    if mine and not is_loopback(mine):
        return mine
    # The store is on this host (`mine` is a loopback address), or it is a file (`mine` is empty). `others` holds the
    # addresses at which other hosts reach a store on this host.
    others = {store for store in stores.values() if store and not is_loopback(store)}
    if mine and not others:
        return mine  # all ranks use the loopback interface of one host
    if mine:
        for store in sorted(others):
            if is_own(store):
                return store
    for family, far in _ELSEWHERE:
        with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((far, _DISCARD_PORT))
            return far
    return _only_address()


def _only_address() -> str:
    """Return this host's only address; raise an error if it has several, not counting the loopback."""
    found = {}
    for name in sorted(name for _, name in socket.if_nameindex()):
        with suppress(ValueError):
            if not is_loopback(host := interface_address(name)):
                found[name] = host
    if len(found) == 1:
        return next(iter(found.values()))
    there = ", ".join(f"{name} ({host})" for name, host in found.items()) or "only the loopback"
    raise RendezvousError(
        "the ranks are on several hosts, but the address by which others reach this host is not known; set the option "
        f"interface= or bind= (AIOCOLL_INTERFACE, AIOCOLL_BIND); available: {there}"
    )


def routable_address(master_host: str | None, interface: str | None = None, bind: str | None = None) -> str:
    """Return the local address at which peers should connect to this rank.

    It is `bind`, else the address of `interface`, else the local address on the route to the master. That is the
    loopback if the master is on the loopback or None. No packet is sent, but names are resolved: call this from a
    thread if that may take long.

    Args:
        master_host: name or address of the master. It also determines whether IPv4 or IPv6 is used.
        interface: name of a network interface of this host.
        bind: an address of this host, or `"any"` for all of them (returns `"0.0.0.0"` or `"::"`).

    Raises:
        ValueError: `bind` is not an address of this host, or there is no such `interface`.
        RendezvousError: the master's name does not resolve, or there is no route to it.
    """
    if bind is not None and bind != "any":
        return _check_bind(bind)
    if master_host is None:
        if bind:
            return ANY[socket.AF_INET]
        return interface_address(interface, socket.AF_INET) if interface else "127.0.0.1"
    family, local = _route(master_host, lookup_only=bool(bind or interface))
    if bind:
        return ANY[family]
    return interface_address(interface, family) if interface else local


def _check_bind(bind: str) -> str:
    if is_wildcard(bind):
        raise ValueError(f"bind={bind!r}: must be an address of this host; to listen on all addresses, set bind='any'")
    try:
        family, _, _, _, address = socket.getaddrinfo(bind, 0, type=socket.SOCK_DGRAM, flags=socket.AI_NUMERICHOST)[0]
    except OSError:
        raise ValueError(f"bind={bind!r}: must be an IPv4 or IPv6 address of this host, or 'any'") from None
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind(address)
        except OSError as error:
            raise ValueError(f"bind={bind!r}: is not an address of this host ({error.strerror})") from None
    return bind


def _route(master_host: str, *, lookup_only: bool) -> tuple[int, str]:
    """Return the address family and the local address of the first working route to the master."""
    try:
        found = socket.getaddrinfo(master_host, _DISCARD_PORT, type=socket.SOCK_DGRAM)
    except OSError as error:
        raise RendezvousError(f"master address {master_host!r} does not resolve: {error.strerror}") from error
    if lookup_only:
        return found[0][0], ""
    reason: str | None = None
    for family, kind, _, _, address in found:
        with socket.socket(family, kind) as probe:
            try:
                probe.connect(address)
                return family, str(probe.getsockname()[0])
            except OSError as error:
                reason = error.strerror
    raise RendezvousError(
        f"no route from this host to the master at {master_host!r} ({reason}); check MASTER_ADDR, or set the option "
        "interface= or bind="
    )


def interface_address(name: str, family: int = socket.AF_INET) -> str:
    """Return an address of the network interface `name`, of the address `family` if possible.

    Raises:
        ValueError: there is no such interface, or it has no address. The message lists those that exist.
    """
    if not sys.platform.startswith("linux"):
        raise ValueError(f"interface={name!r}: only supported on Linux; set an address with bind=")
    known = [known for _, known in socket.if_nameindex()]
    if name not in known:
        raise ValueError(f"interface={name!r} not found; available: {', '.join(known)}")
    by_family = (_ipv4_of, _ipv6_of) if family == socket.AF_INET else (_ipv6_of, _ipv4_of)
    for address_of in by_family:
        if address := address_of(name):
            return address
    raise ValueError(f"interface={name!r} has no address; available: {', '.join(known)}")


def _ipv4_of(name: str) -> str | None:
    import fcntl  # does not exist on Windows

    # struct ifreq has 40 bytes: a name of 16 bytes, then a sockaddr_in, whose address starts at its fifth byte.
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("40s", name.encode()))
        except OSError:
            return None
    return socket.inet_ntop(socket.AF_INET, answer[20:24])


def _ipv6_of(name: str) -> str | None:
    try:
        with open("/proc/net/if_inet6") as file:
            lines = file.read().splitlines()
    except OSError:  # the kernel has no IPv6
        return None
    found: dict[str, str] = {}
    for fields in map(str.split, lines):
        if len(fields) == _IF_INET6_FIELDS and fields[5] == name:
            found.setdefault(fields[3], socket.inet_ntop(socket.AF_INET6, bytes.fromhex(fields[0])))
    # Prefer any other address to a link-local one, which is valid only together with its interface.
    link = found.pop(_LINK_SCOPE, None)
    if found:
        return found.get(_GLOBAL_SCOPE) or next(iter(found.values()))
    return f"{link}%{name}" if link else None
