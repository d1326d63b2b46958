"""Socket options of TCP connections between hosts, and what the kernel knows of the host at the other end."""

from __future__ import annotations

import select
import socket
import struct
import sys
from contextlib import suppress
from math import inf

__all__ = [
    "UNREACHABLE_AFTER",
    "between_hosts",
    "is_ready",
    "keep_asking",
    "retry_soon",
    "round_trip",
    "send_evenly",
    "send_in_bursts",
    "silence",
    "window",
]

#: Seconds without an answer of a peer's host after which it is unreachable. The kernel sends a probe every second, so
#: the fifth probe still gets its time; the rest of the contract's 6 s is for noticing it and telling all ranks.
UNREACHABLE_AFTER = 5.2
#: Probes to the peer's host that must have stayed unanswered by then: time alone can pass because this host was
#: paused, or because an old kernel probes the reader of a full connection at growing intervals.
UNANSWERED = 3

_LINUX = sys.platform.startswith("linux")
#: Linux 6.15, <linux/tcp.h>: the longest time between two retransmissions, in milliseconds.
_TCP_RTO_MAX_MS = 44
#: The least that the kernel accepts: without it a connection stays idle after an outage for as long as that lasted.
_RTO_MAX_MS = 1000
#: Seconds until an idle connection sends a keepalive probe, and then between two probes: the least the kernel accepts.
_ASK_AFTER = _ASK_EVERY = 1
#: Probes after which the kernel gives up by itself: more than fit into `UNREACHABLE_AFTER`.
_ASK_TIMES = 10
#: <asm-generic/socket.h>: the most bytes per second that may leave. The kernel paces whatever has such a limit.
_SO_MAX_PACING_RATE = 47
#: More than any network carries. Not the number that stands for no limit; nor are its lower 32 bits, which are all that
#: kernels before 4.20 look at.
_ANY_RATE = struct.pack("=Q", (1 << 48) - 2)
#: struct tcp_info: retransmissions, unanswered probes; milliseconds since data and since an acknowledgement came.
_INFO = struct.Struct("=2xBB48xII")
#: struct tcp_info: bytes of a packet, and how many may be under way.
_WINDOW = struct.Struct("=16xI60xI")
#: struct tcp_info: the shortest round trip in microseconds, of which a kernel before 4.6 says nothing.
_ROUND_TRIP = struct.Struct("=148xI")


def between_hosts(sock: socket.socket) -> bool:
    """Whether the other end of a connected socket may be on another host."""
    return sock.family != getattr(socket, "AF_UNIX", None) and sock.getpeername()[0] != sock.getsockname()[0]


def is_ready(fd: int, *, to_write: bool = False) -> bool:
    """Return whether a socket has bytes to read, or has ended; with `to_write`, whether it is connected. Never waits.

    Args:
        fd: its descriptor; a negative one is never ready.
        to_write: for a socket that is connecting.
    """
    if fd < 0:
        return False
    if hasattr(select, "poll"):
        poll = select.poll()
        poll.register(fd, select.POLLOUT if to_write else select.POLLIN)
        return bool(poll.poll(0))
    read, write, failed = select.select([fd], [fd] if to_write else [], [fd], 0)  # Windows
    return bool(write or failed if to_write else read or failed)


def retry_soon(sock: socket.socket, give_up_after: float | None = None) -> None:
    """Send without delay, and resume within a second after an outage where the kernel can (Linux 6.15); TCP only.

    Args:
        sock: connected or not.
        give_up_after: seconds for which the kernel retransmits; None is its own choice, some 15 s with short pauses
            between attempts.
    """
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if not _LINUX:
        return
    with suppress(OSError):  # an older kernel
        sock.setsockopt(socket.IPPROTO_TCP, _TCP_RTO_MAX_MS, _RTO_MAX_MS)
    if give_up_after is not None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(give_up_after * 1000))


def send_in_bursts(sock: socket.socket) -> None:
    """Send what the window allows at once, not spread over the round trip as BBR does; before `sock` is connected."""
    if _LINUX:
        with suppress(OSError):  # a kernel that was built without it
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")


def send_evenly(sock: socket.socket) -> None:
    """Spread what the window allows over the round trip, so that no queue on the way is overrun after a pause."""
    if _LINUX:
        sock.setsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, _ANY_RATE)


def keep_asking(sock: socket.socket) -> None:
    """Let the kernel send keepalive probes to the other host while the connection is idle, as `silence` needs."""
    if _LINUX:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _ASK_AFTER)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _ASK_EVERY)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _ASK_TIMES)


def silence(sock: socket.socket) -> float:
    """Return for how many seconds the other host has answered no probe; 0 if it has.

    The kernel of the other host answers, so a process that is stopped, or does not read, is not silent. That is why
    this is not `TCP_USER_TIMEOUT`, which also ends a connection whose reader does not read.
    """
    if not _LINUX:
        return 0.0
    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO.size)
    sent_again, asked, since_data, since_answer = _INFO.unpack(info)
    if max(sent_again, asked) < UNANSWERED:
        return 0.0
    return float(min(since_data, since_answer)) / 1000


def round_trip(sock: socket.socket) -> float:
    """Return the seconds of the shortest round trip on a TCP connection so far; inf if the kernel cannot tell.

    No process takes part in it, so it is the network's, however busy both hosts are.
    """
    if not _LINUX:
        return inf
    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _ROUND_TRIP.size)
    if len(info) < _ROUND_TRIP.size:
        return inf
    (microseconds,) = _ROUND_TRIP.unpack(info)
    return float(microseconds) / 1e6 or inf


def window(sock: socket.socket) -> int:
    """Return how many bytes the kernel lets be under way on a connection now; 0 if it cannot tell."""
    if not _LINUX or sock.family == socket.AF_UNIX:
        return 0
    nbytes, packets = _WINDOW.unpack(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _WINDOW.size))
    # It keeps them until they are acknowledged, and counts more than the bytes.
    return min(int(nbytes * packets), sock.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) * 3 // 4)
