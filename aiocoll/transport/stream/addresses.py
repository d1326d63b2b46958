"""Where a rank can be reached: which host it is on, and the sockets there."""

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
from aiocoll.log import Repeats, logger
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
    "is_wildcard",
    "may_pass",
    "open_tcp",
    "open_unix",
    "reach",
    "remove_unix",
    "unix_address",
]

ANY: dict[int, str] = {socket.AF_INET: "0.0.0.0", socket.AF_INET6: "::"}
#: Connections the kernel completes before we accept them: all ranks of a large job may dial at once. The kernel lowers
#: it to its own limit (net.core.somaxconn, 4096 since Linux 5.4).
_BACKLOG = 4096
#: Connections accepted in one callback; 16 of them take about 300 microseconds.
_ACCEPTS = 16
#: Seconds to leave a listener alone after the process ran out of descriptors: others may be closed meanwhile.
_SHORTAGE_PAUSE = 0.1
#: What a process or its host may lack for a while: descriptors, memory.
_SHORTAGES = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
#: Errors of an outage of the network, which may end: the peer's host has not answered, or a router has for it.
_OUTAGES = frozenset({errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETDOWN, errno.EHOSTDOWN, errno.ETIMEDOUT})


def host_identity(override: str | None = None) -> str:
    """Return a name that processes share exactly if they can meet at one abstract unix address.

    On Linux that is a kernel (its boot id) and a network namespace in it: containers that share the network are one
    host, others are not, even on one machine. Elsewhere it is the hardware address and the host name.

    Args:
        override: pretend to be on the host of that name (for tests).
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
    # 64 bits keep any two hosts of one job apart, and the hash keeps the facts to this host.
    return hashlib.sha256(facts.encode()).hexdigest()[:16]


def is_wildcard(host: str) -> bool:
    """Whether `host` means all addresses of this host, which is nothing that peers could be told."""
    return host in ANY.values()


def family_of(host: str) -> int:
    """Return the address family of a numeric `host`."""
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def open_tcp(host: str, ports: tuple[int, int] | None = None) -> socket.socket:
    """Return a socket that listens on the numeric address `host`, on a free port, the first free one of `ports`.

    Raises:
        RendezvousError: it is no address of this host, or all ports from the first of `ports` to the last are in use.
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
        f"cannot listen on {host}: no port of port_range=({first}, {last}) is free; each rank of a host takes one, and "
        "another one while its group grows"
    )


def _open_tcp(host: str, port: int) -> socket.socket:
    listener = socket.socket(family_of(host), socket.SOCK_STREAM)
    try:
        if listener.family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)  # "::" is to mean the same everywhere
        if port:  # connections of a job that has ended may still use it
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        return _listening(listener)
    except OSError:
        listener.close()
        raise


def open_unix(
    random_bytes: Callable[[int], bytes], *, abstract: bool = sys.platform.startswith("linux")
) -> tuple[socket.socket, str]:
    """Return a listening unix socket and its name: `"@..."` for an abstract one (Linux, nothing on disk), else a path.

    A path lies in a new directory that only this user may enter; `remove_unix` removes both.
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
    """Return what `socket.connect` takes for a `name` of `open_unix`."""
    return f"\0{name[1:]}" if name.startswith("@") else name


def remove_unix(name: str) -> None:
    """Remove what `open_unix` left on disk."""
    if not name.startswith("@"):
        with suppress(OSError):
            os.unlink(name)
            os.rmdir(os.path.dirname(name))


def _lack_of_a_peer(sock: socket.socket) -> int:
    """Return why a TCP socket that has just connected has no peer, as an errno; 0 if it has one."""
    try:
        met_itself = sock.getsockname() == sock.getpeername()  # as dialling a free port of this host can
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
        loop: of the caller.
        family: of the address.
        address: where to connect.
        in_bursts: whether TCP is told to `send_in_bursts`.
        connecting: called with the descriptor of the socket before this waits.

    Raises:
        OSError: of the class of its errno; BlockingIOError if the backlog of a unix listener is full.
    """
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        if family != getattr(socket, "AF_UNIX", None):
            retry_soon(sock)
            if in_bursts:
                send_in_bursts(sock)
        # Not `loop.sock_connect`: it takes EAGAIN, a full backlog of a unix socket, for a connection being made.
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
            code = _lack_of_a_peer(sock)
        if code:
            raise OSError(code, os.strerror(code))
    except BaseException:
        sock.close()
        raise
    return sock


def may_pass(error: OSError) -> bool:
    """Whether to dial again: the peer may not listen yet, the network or this process lacks something just now."""
    passing = isinstance(error, ConnectionError | FileNotFoundError | BlockingIOError)
    return passing or error.errno in _SHORTAGES or is_outage(error)


def is_outage(error: OSError) -> bool:
    """Whether the peer's host has not answered."""
    return error.errno in _OUTAGES


def is_missing(error: OSError) -> bool:
    """Whether a unix socket is not there, or not for us, however often it is tried."""
    return isinstance(error, ConnectionRefusedError | FileNotFoundError | PermissionError)


class Listeners:
    """The accept loop of some listening sockets: it survives whatever connects, and a lack of descriptors.

    Args:
        runtime: clock and timers.
        greet: takes each accepted socket, non-blocking.
    """

    def __init__(self, runtime: Runtime, greet: Callable[[socket.socket], None]) -> None:
        self._runtime = runtime
        self._greet = greet
        self._repeats = Repeats()
        # Each with the timer that ends its pause, if it has one.
        self._open: dict[socket.socket, asyncio.TimerHandle | None] = {}

    def add(self, listener: socket.socket) -> None:
        """Accept from `listener`, too."""
        self._open[listener] = None
        self._runtime.loop.add_reader(listener, self._accept, listener)

    def close(self) -> None:
        """Close the listeners."""
        for listener, pause in self._open.items():
            if listener.fileno() >= 0:  # else garbage collection has finalized the socket before its owner
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
            except OSError as error:  # EMFILE and its kin: the listener stays readable, so pause for a moment
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
