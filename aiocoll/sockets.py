"""Socket options of TCP connections between hosts, and the kernel's statistics of these connections."""

from __future__ import annotations

import select
import socket
import struct
import sys
from contextlib import suppress
from math import inf

__all__ = [
    "UNREACHABLE_AFTER",
    "enable_keepalive",
    "is_between_hosts",
    "is_ready",
    "retry_soon",
    "round_trip",
    "send_evenly",
    "send_in_bursts",
    "silence",
    "window",
]

#: Seconds without an answer of a peer's host after which it counts as unreachable. The kernel sends a probe every
#: second, so the fifth probe can still be answered. The rest of the 6 s in the contract is for detection and for
#: notifying all ranks.
UNREACHABLE_AFTER = 5.2
#: Minimum number of unanswered probes until the host counts as unreachable. Time alone is not enough: this host may
#: have been paused, or an old kernel may probe the reader of a full connection at growing intervals.
UNANSWERED = 3

_LINUX = sys.platform.startswith("linux")
#: Socket option in <linux/tcp.h> (Linux 6.15): the longest time between two retransmissions, in milliseconds.
_TCP_RTO_MAX_MS = 44
#: Value of TCP_RTO_MAX_MS: the smallest that the kernel accepts. Without a limit, a connection stays idle after an
#: outage for as long as the outage lasted.
_RTO_MAX_MS = 1000
#: Seconds until an idle connection sends a keepalive probe, and between two probes: the kernel's minimum.
_ASK_AFTER = _ASK_EVERY = 1
#: Number of unanswered probes after which the kernel ends the connection: more than it sends in `UNREACHABLE_AFTER`.
_ASK_TIMES = 10
#: Socket option in <asm-generic/socket.h>: maximum bytes per second. The kernel paces every socket with such a limit.
_SO_MAX_PACING_RATE = 47
#: A pacing rate above the rate of any network, but not the number for "no limit". Kernels before 4.20 read only the
#: lower 32 bits, which also differ from the number for "no limit".
_ANY_RATE = struct.pack("=Q", (1 << 48) - 2)
#: struct tcp_info: retransmissions, unanswered probes; milliseconds since the last data and the last acknowledgement.
_INFO = struct.Struct("=2xBB48xII")
#: struct tcp_info: bytes per packet, and number of packets that may be in flight.
_WINDOW = struct.Struct("=16xI60xI")
#: struct tcp_info: the shortest round trip in microseconds. Kernels before 4.6 do not report it.
_ROUND_TRIP = struct.Struct("=148xI")


def is_between_hosts(sock: socket.socket) -> bool:
    """Return whether the peer of a connected socket may be on another host."""
    return sock.family != getattr(socket, "AF_UNIX", None) and sock.getpeername()[0] != sock.getsockname()[0]


def is_ready(fd: int, *, to_write: bool = False) -> bool:
    """Return, without waiting, whether a socket has data or was closed; with `to_write`, whether it has connected.

    Args:
        fd: its descriptor. A negative one is never ready.
        to_write: True for a socket that is connecting.
    """
    if fd < 0:
        return False
    if hasattr(select, "poll"):
        poll = select.poll()
        poll.register(fd, select.POLLOUT if to_write else select.POLLIN)
        return bool(poll.poll(0))
    read, write, failed = select.select([fd], [fd] if to_write else [], [fd], 0)  # Windows has no poll()
    return bool(write or failed if to_write else read or failed)


def retry_soon(sock: socket.socket, give_up_after: float | None = None) -> None:
    """Set TCP_NODELAY, and limit the retransmission interval to one second (Linux 6.15), on a TCP socket.

    With the limit, a connection resumes within a second after an outage.

    Args:
        sock: a socket, connected or not.
        give_up_after: seconds for which the kernel retransmits; None for the kernel's default, some 15 s with short
            pauses between attempts.
    """
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if not _LINUX:
        return
    with suppress(OSError):  # older kernels lack this option
        sock.setsockopt(socket.IPPROTO_TCP, _TCP_RTO_MAX_MS, _RTO_MAX_MS)
    if give_up_after is not None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(give_up_after * 1000))


def send_in_bursts(sock: socket.socket) -> None:
    """Turn off packet pacing, which BBR uses, so that the kernel sends the whole window at once.

    Call before connecting.
    """
    if _LINUX:
        with suppress(OSError):  # some kernels lack this algorithm
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")


def send_evenly(sock: socket.socket) -> None:
    """Turn on packet pacing, so that a full window sent after a pause does not overflow a queue on the path."""
    if _LINUX:
        sock.setsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, _ANY_RATE)


def enable_keepalive(sock: socket.socket) -> None:
    """Enable TCP keepalive probes on an idle connection; `silence` requires them."""
    if _LINUX:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _ASK_AFTER)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _ASK_EVERY)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _ASK_TIMES)


def silence(sock: socket.socket) -> float:
    """Return the seconds since the other host stopped answering keepalive probes; 0 if it answers.

    The kernel of the other host answers, so a process that is stopped, or does not read, is not silent. For that
    reason, `TCP_USER_TIMEOUT` is not used: it also ends a connection whose reader does not read.
    """
    if not _LINUX:
        return 0.0
    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO.size)
    sent_again, asked, since_data, since_answer = _INFO.unpack(info)
    if max(sent_again, asked) < UNANSWERED:
        return 0.0
    return float(min(since_data, since_answer)) / 1000


def round_trip(sock: socket.socket) -> float:
    """Return the shortest round trip of a TCP connection so far in seconds; inf if the kernel does not report it.

    The kernels measure it without any process, so it does not depend on the load of the hosts.
    """
    if not _LINUX:
        return inf
    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _ROUND_TRIP.size)
    if len(info) < _ROUND_TRIP.size:
        return inf
    (microseconds,) = _ROUND_TRIP.unpack(info)
    return float(microseconds) / 1e6 or inf


def window(sock: socket.socket) -> int:
    """Return the TCP window: the bytes that may be in flight now; 0 if the kernel does not report it."""
    if not _LINUX or sock.family == socket.AF_UNIX:
        return 0
    nbytes, packets = _WINDOW.unpack(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _WINDOW.size))
    # The send buffer keeps data until it is acknowledged, and its limit also counts overhead.
    return min(int(nbytes * packets), sock.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) * 3 // 4)
