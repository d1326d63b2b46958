"""What TCP connections between hosts are told once, and what the kernel knows of the host at the other end."""

from __future__ import annotations

import socket
import struct
import sys
from contextlib import suppress

__all__ = ["UNREACHABLE_AFTER", "between_hosts", "keep_asking", "retry_soon", "silence"]

#: Seconds without any sign of a peer's host after which it is unreachable. It is asked every second, so the question of
#: the fifth is still waited for; what is left of the contract's 6 s is for noticing it and telling all ranks.
UNREACHABLE_AFTER = 5.2
#: Questions to the peer's host that must have stayed without answer by then: time alone can pass because this host was
#: paused, or because an old kernel asks the reader of a full connection ever more seldom.
UNANSWERED = 3

_LINUX = sys.platform.startswith("linux")
#: Linux 6.15, <linux/tcp.h>: the longest time between two attempts to send again, in milliseconds.
_TCP_RTO_MAX_MS = 44
#: The least that the kernel takes: without it a connection sleeps on for as long as an outage has lasted, or longer.
_RTO_MAX_MS = 1000
#: Seconds until an idle connection asks the other host for a sign, and then between two questions: the least there is.
_ASK_AFTER = _ASK_EVERY = 1
#: Questions after which the kernel gives up by itself: more than `UNREACHABLE_AFTER` takes.
_ASK_TIMES = 10
#: struct tcp_info: how often was sent again, questions without answer; milliseconds since data and since an
#: acknowledgement came.
_INFO = struct.Struct("=2xBB48xII")


def between_hosts(sock: socket.socket) -> bool:
    """Whether the other end of a connected socket may be on another host."""
    return sock.family != getattr(socket, "AF_UNIX", None) and sock.getpeername()[0] != sock.getsockname()[0]


def retry_soon(sock: socket.socket, give_up_after: float | None = None) -> None:
    """Send without delay, and after an outage within a second, where the kernel can (Linux 6.15); only for TCP.

    Args:
        sock: connected or not.
        give_up_after: seconds for which the kernel tries to send again; None is its own choice, some 15 s with short
            pauses between attempts.
    """
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if not _LINUX:
        return
    with suppress(OSError):  # an older kernel
        sock.setsockopt(socket.IPPROTO_TCP, _TCP_RTO_MAX_MS, _RTO_MAX_MS)
    if give_up_after is not None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(give_up_after * 1000))


def keep_asking(sock: socket.socket) -> None:
    """Let the kernel ask the other host for a sign while nothing is sent, so that `silence` can tell."""
    if _LINUX:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _ASK_AFTER)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _ASK_EVERY)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _ASK_TIMES)


def silence(sock: socket.socket) -> float:
    """Return for how many seconds the other host has left questions of this one without answer; 0 if it has not.

    It is the kernel there that answers: a process that is stopped, or reads nothing for as long as it likes, is not
    silent. That is why this is not `TCP_USER_TIMEOUT`, which also ends a connection whose reader takes nothing.
    """
    if not _LINUX:
        return 0.0
    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO.size)
    sent_again, asked, since_data, since_answer = _INFO.unpack(info)
    if max(sent_again, asked) < UNANSWERED:
        return 0.0
    return float(min(since_data, since_answer)) / 1000
