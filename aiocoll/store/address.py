"""Addresses of TCP stores: host and port, or ``unix:NAME`` (``unix:@NAME``: Linux abstract socket, no file)."""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import os
import socket
import stat
from typing import Any, NamedTuple

from aiocoll.errors import AuthenticationError, StoreUnavailableError
from aiocoll.security.keys import require_key
from aiocoll.sockets import retry_soon
from aiocoll.users import peer_trouble

__all__ = ["StoreEndpoint", "check_peer", "describe", "is_loopback_name", "is_unix", "listen", "literal", "resolve"]

_UNIX = "unix:"
#: Length of the kernel's queue of new connections, enough for all ranks of a large job at once. The kernel lowers this
#: length to its own limit (net.core.somaxconn, 4096 since Linux 5.4).
_BACKLOG = 4096
#: Seconds of a network outage after which the kernel closes a connection. The value is as high as Linux's defaults,
#: because each request has its own timeout.
_MAX_OUTAGE = 900.0


class StoreEndpoint(NamedTuple):
    """A resolved address, with its socket family, to which a socket can bind or connect."""

    family: int
    sockaddr: Any

    def require_key(self, key: bytes | None) -> None:
        """Raise `AuthenticationError` if `key` is None, but other machines can reach this endpoint."""
        require_key("localhost" if isinstance(self.sockaddr, str) else self.sockaddr[0], key)

    def reachable(self) -> StoreEndpoint:
        """Return the endpoint at which clients on this machine connect: the loopback in place of a wildcard address."""
        if isinstance(self.sockaddr, str):
            return self
        host, port = self.sockaddr[:2]
        address = ipaddress.ip_address(host.partition("%")[0])
        mapped = getattr(address, "ipv4_mapped", None)
        if not (mapped or address).is_unspecified:
            return self
        # Use IPv4: a server on the IPv6 wildcard also accepts IPv4, and some hosts have no IPv6 loopback.
        return StoreEndpoint(socket.AF_INET, ("127.0.0.1", port))

    def socket(self) -> socket.socket:
        """Return a new non-blocking socket of this endpoint's family."""
        sock = socket.socket(self.family, socket.SOCK_STREAM)
        sock.setblocking(False)
        if not isinstance(self.sockaddr, str):
            retry_soon(sock, _MAX_OUTAGE)
        return sock


def is_unix(host: str) -> bool:
    """Return whether `host` is the address of a unix socket, such as ``unix:PATH``."""
    return host.startswith(_UNIX)


def describe(host: str, port: int) -> str:
    """Return an address as error messages show it."""
    if is_unix(host):
        return host
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


async def resolve(host: str, port: int) -> list[StoreEndpoint]:
    """Return the endpoints of `host`. Only host names need a lookup, which runs in a thread.

    Raises:
        OSError: `host` cannot be resolved.
    """
    known = literal(host, port)
    if known is not None:
        return [known]
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [StoreEndpoint(family, sockaddr) for family, _, _, _, sockaddr in found]


def listen(host: str, port: int, key: bytes | None) -> socket.socket:
    """Return a socket that listens on `host`, an address of this machine; `port` 0 means a free port.

    Raises:
        AuthenticationError: other machines can reach the address, and `key` is None.
        StoreUnavailableError: the address is not available.
    """
    where = describe(host, port)
    try:
        endpoint = literal(host, port) or _resolve_first(host, port)
        endpoint.require_key(key)
        sock = endpoint.socket()
        try:
            _bind(sock, endpoint)
            sock.listen(_BACKLOG)
        except BaseException:
            sock.close()
            raise
    except AuthenticationError:
        raise
    except OSError as exc:
        hint = {
            errno.EADDRINUSE: "another program uses it, choose another port or 0",
            errno.EADDRNOTAVAIL: "it is not an address of this machine",
            errno.EMFILE: "raise ulimit -n",
        }.get(exc.errno or 0, "pass an address of this machine")
        raise StoreUnavailableError(f"the store cannot listen on {where}: {exc.strerror or exc}; {hint}") from exc
    return sock


def check_peer(sock: socket.socket) -> None:
    """Check the user of a unix socket's peer; raise `AuthenticationError` if it may be another user's process."""
    if sock.family == socket.AF_UNIX and (reason := peer_trouble(sock)) is not None:
        raise AuthenticationError(f"the process at the other end of the unix socket {reason}")


def literal(host: str, port: int) -> StoreEndpoint | None:
    """Return the endpoint of a numeric address or a unix socket; None for a host name."""
    if is_unix(host):
        name = host.removeprefix(_UNIX)
        return StoreEndpoint(socket.AF_UNIX, "\0" + name[1:] if name.startswith("@") else name)
    try:
        version = ipaddress.ip_address(host).version
    except ValueError:
        return None
    if version == 4:
        return StoreEndpoint(socket.AF_INET, (host, port))
    if "%" in host:
        # Resolve the name of the IPv6 scope, such as eth0, to a number. This needs no name server.
        return _resolve_first(host, port)
    return StoreEndpoint(socket.AF_INET6, (host, port, 0, 0))


def is_loopback_name(name: str) -> bool:
    """Return whether a host name means the loopback on every machine, as "localhost" does."""
    return name.split(".")[0].lower() in ("localhost", "ip6-localhost", "ip6-loopback", "localhost4", "localhost6")


def _resolve_first(host: str, port: int) -> StoreEndpoint:
    family, _, _, _, sockaddr = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    return StoreEndpoint(family, sockaddr)


def _bind(sock: socket.socket, endpoint: StoreEndpoint) -> None:
    path = endpoint.sockaddr
    if not isinstance(path, str):
        if os.name == "posix":
            # Let a restarted job bind at once, although connections of the old job are in TIME_WAIT.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if path[0] == "::":
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)  # include IPv4, whatever the system default
        sock.bind(path)
    elif path.startswith("\0"):
        sock.bind(path)
    else:
        _remove_stale(path)
        # Linux creates the socket file with this mode, so other users can never connect.
        os.fchmod(sock.fileno(), 0o600)
        sock.bind(path)
        os.chmod(path, 0o600)


def _remove_stale(path: str) -> None:
    """Remove a socket file whose server has died; keep the socket of a running server, and any other file."""
    try:
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            return
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.setblocking(False)
            probe.connect(path)
    except ConnectionRefusedError:
        os.unlink(path)
    except (FileNotFoundError, BlockingIOError):
        return
