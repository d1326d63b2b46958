"""Addresses of a rank: host identity, listening sockets, and connecting to another rank's address."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import os
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from aiocoll.errors import RendezvousError
from aiocoll.log import RepeatLimiter, logger
from aiocoll.runtime import Runtime
from aiocoll.sockets import retry_soon, send_in_bursts
from aiocoll.transport.byte_stream import resolve

__all__ = [
    "ANY",
    "Listeners",
    "family_of",
    "host_identity",
    "is_missing",
    "is_outage",
    "is_transient",
    "is_wildcard",
    "open_tcp",
    "open_unix",
    "reach",
    "remove_unix",
    "unix_address",
]

ANY: dict[int, str] = {socket.AF_INET: "0.0.0.0", socket.AF_INET6: "::"}
#: Maximum number of connections that wait to be accepted, because all ranks of a large job may dial at once. The kernel
#: lowers this number to its own limit (net.core.somaxconn, 4096 since Linux 5.4).
_BACKLOG = 4096
#: Maximum number of connections accepted in one callback. Accepting 16 connections takes about 300 µs.
_ACCEPTS = 16
#: Seconds without accepting after the process has run out of descriptors. Meanwhile, it may close some.
_SHORTAGE_PAUSE = 0.1
#: Error numbers of a temporary shortage of descriptors or memory in this process or host.
_SHORTAGES = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
#: Error numbers of a temporary network outage: the peer's host did not answer, or a router reported an error.
_OUTAGES = frozenset({errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETDOWN, errno.EHOSTDOWN, errno.ETIMEDOUT})


def host_identity(override: str | None = None) -> str:
    """Return an identity of this host, equal in two processes if they can connect by an abstract unix socket.

    On Linux it depends on the kernel (its boot id) and the network namespace. Containers that share the network are one
    host; containers that do not are different hosts, even on one machine. On other systems it depends on the hardware
    address and the host name.

    Args:
        override: name of the host to report instead (for tests).
    """
    if override is not None:
        return f"named:{override}"
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot = file.read().strip()
        facts = f"{boot} {os.stat('/proc/self/ns/net').st_ino}"
    except OSError:
        import uuid

        facts = f"{uuid.getnode():x} {socket.gethostname()}"
    # 64 bits are enough to distinguish the hosts of a job. The hash hides the boot id and other facts from other hosts.
    return hashlib.sha256(facts.encode()).hexdigest()[:16]


def is_wildcard(host: str) -> bool:
    """Return whether `host` stands for all addresses of this host. Peers cannot connect to such an address."""
    return host in ANY.values()


def family_of(host: str) -> int:
    """Return the socket address family of a numeric `host`."""
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def open_tcp(host: str, ports: tuple[int, int] | None = None) -> socket.socket:
    """Return a socket listening on the numeric address `host`, on any free port or on the first free one in `ports`.

    Raises:
        RendezvousError: `host` is not an address of this host, or all ports in the range `ports` are in use.
    """
    first, last = ports or (0, 0)
    for port in range(first, last + 1):
        try:
            return _open_tcp(host, port)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                where = f"port {port} of {host}" if port else host
                raise RendezvousError(
                    f"cannot listen on {where}: {error.strerror}; check the options bind=, interface= and port_range="
                ) from error
    raise RendezvousError(
        f"cannot listen on {host}: no port of port_range=({first}, {last}) is free; set a wider port_range: each rank "
        "of a host uses one port, and a second one while its group grows"
    )


def _open_tcp(host: str, port: int) -> socket.socket:
    listener = socket.socket(family_of(host), socket.SOCK_STREAM)
    try:
        if listener.family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)  # so that "::" means IPv6 only
        if port:  # connections of an earlier job may still occupy a fixed port
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        return _listening(listener)
    except OSError:
        listener.close()
        raise


def open_unix(
    random_bytes: Callable[[int], bytes], *, abstract: bool = sys.platform.startswith("linux")
) -> tuple[socket.socket, str]:
    """Return a listening unix socket and its name: `"@..."` if abstract (Linux, without a file), otherwise a path.

    A path is in a new directory that only this user can access. `remove_unix` removes the socket and the directory.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if abstract:
            name = f"@aiocoll-{random_bytes(16).hex()}"
        else:
            import tempfile

            name = os.path.join(tempfile.mkdtemp(prefix="aiocoll-"), "s")
        listener.bind(unix_address(name))
        return _listening(listener), name
    except OSError:
        listener.close()
        raise


def _listening(listener: socket.socket) -> socket.socket:
    listener.setblocking(False)
    listener.listen(_BACKLOG)
    return listener


def unix_address(name: str) -> str:
    """Return the address to pass to `socket.connect` for the `name` from `open_unix`."""
    return f"\0{name[1:]}" if name.startswith("@") else name


def remove_unix(name: str) -> None:
    """Remove the socket file and the directory that `open_unix` has made; do nothing for an abstract socket."""
    if not name.startswith("@"):
        with suppress(OSError):
            os.unlink(name)
            os.rmdir(os.path.dirname(name))


def _find_connect_error(sock: socket.socket) -> int:
    """Return the errno that explains why a newly connected TCP socket has no peer; 0 if it has a peer."""
    try:
        # A socket that dials a free port of its own host may connect to itself.
        met_itself = sock.getsockname() == sock.getpeername()
    except OSError as error:
        if error.errno != errno.ENOTCONN:
            raise
        return errno.ECONNRESET
    return errno.ECONNREFUSED if met_itself else 0


async def reach(
    loop: asyncio.AbstractEventLoop,
    family: int,
    address: Any,
    *,
    in_bursts: bool = False,
    connecting: Callable[[int], object] | None = None,
) -> socket.socket:
    """Return a non-blocking socket connected to `address`.

    Args:
        loop: event loop of the caller.
        family: address family.
        address: address to connect to.
        in_bursts: whether to call `send_in_bursts` on a TCP socket.
        connecting: called with the descriptor of the socket before this function waits.

    Raises:
        OSError: the connection failed; BlockingIOError if the backlog of a unix listener is full.
    """
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        if family != getattr(socket, "AF_UNIX", None):
            retry_soon(sock)
            if in_bursts:
                send_in_bursts(sock)
        # Do not use `loop.sock_connect`: on EAGAIN (full backlog of a unix socket), it waits as if it were connecting.
        code = sock.connect_ex(address)
        if code == errno.EINPROGRESS:
            connected = loop.create_future()
            if connecting is not None:
                connecting(sock.fileno())
            loop.add_writer(sock, resolve, connected)
            try:
                await connected
            finally:
                loop.remove_writer(sock)
            code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if not code and family != getattr(socket, "AF_UNIX", None):
            code = _find_connect_error(sock)
        if code:
            raise OSError(code, os.strerror(code))
    except BaseException:
        sock.close()
        raise
    return sock


def is_transient(error: OSError) -> bool:
    """Return whether a failed connection attempt may succeed later, for instance when the peer listens."""
    passing = isinstance(error, ConnectionError | FileNotFoundError | BlockingIOError)
    return passing or error.errno in _SHORTAGES or is_outage(error)


def is_outage(error: OSError) -> bool:
    """Return whether a connection error means that the peer's host did not answer."""
    return error.errno in _OUTAGES


def is_missing(error: OSError) -> bool:
    """Return whether an error means that a unix socket is missing or inaccessible, so that a retry is useless."""
    return isinstance(error, ConnectionRefusedError | FileNotFoundError | PermissionError)


class Listeners:
    """The accept loop for listening sockets. It continues after failed connections and shortages of descriptors.

    Args:
        runtime: clock and timers.
        greet: called with each accepted socket, which is non-blocking.
    """

    def __init__(self, runtime: Runtime, greet: Callable[[socket.socket], None]) -> None:
        self._runtime = runtime
        self._greet = greet
        self._repeats = RepeatLimiter()
        # For each listening socket, the timer that ends its pause, or None.
        self._open: dict[socket.socket, asyncio.TimerHandle | None] = {}

    def add(self, listener: socket.socket) -> None:
        """Start to accept connections on another listening socket."""
        self._open[listener] = None
        self._runtime.loop.add_reader(listener, self._accept, listener)

    def close(self) -> None:
        """Close the listening sockets."""
        for listener, pause in self._open.items():
            if listener.fileno() >= 0:  # otherwise garbage collection has closed the socket before its owner
                self._runtime.loop.remove_reader(listener)
            listener.close()
            if pause is not None:
                pause.cancel()
        self._open.clear()

    def _accept(self, listener: socket.socket) -> None:
        for _ in range(_ACCEPTS):
            try:
                sock, _ = listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:  # EMFILE etc.: the listener stays readable, so pause to avoid a busy loop
                self._pause(listener, error)
                return
            sock.setblocking(False)
            if sock.family != getattr(socket, "AF_UNIX", None):
                retry_soon(sock)
            self._greet(sock)

    def _pause(self, listener: socket.socket, error: OSError) -> None:
        if (repeated := self._repeats.admit(error.errno, self._runtime.time())) is not None:
            logger.warning(
                "cannot accept connections (%s); trying again every %g s%s", error.strerror, _SHORTAGE_PAUSE, repeated
            )
        self._runtime.loop.remove_reader(listener)
        self._open[listener] = self._runtime.call_later(_SHORTAGE_PAUSE, self.add, listener)
