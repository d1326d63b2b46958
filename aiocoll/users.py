"""Checks of users on this host: whether a file, or the peer of a unix socket, belongs to this user.

In a user namespace the kernel shows every user without a number there as the overflow user, 65534. A process may run as
one of these users itself. Equal numbers then prove nothing. When the kernel checks a permission, it compares the users
themselves. So in that case, the check uses a permission that only the owner has.
"""

from __future__ import annotations

import os
import signal
import socket
import struct
import sys
from contextlib import suppress

__all__ = ["owner_trouble", "peer_trouble", "peer_uid"]

_OVERFLOW_UID = "/proc/sys/kernel/overflowuid"
_UID_MAP = "/proc/self/uid_map"
#: The default overflow user id, for a system without /proc.
_NOBODY = 65534
#: Number of user ids in the initial user namespace.
_ALL = (1 << 32) - 1
#: Socket option SO_PEERPIDFD (Linux 6.5): a pidfd of the process that connected, or that listens.
_SO_PEERPIDFD = 77


def peer_uid(sock: socket.socket) -> int | None:
    """Return the user id of the peer of a unix socket; None if the system does not report it."""
    if not hasattr(socket, "SO_PEERCRED"):
        return None
    # struct ucred: pid, uid, gid
    return int(struct.unpack("iII", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[1])


def peer_trouble(sock: socket.socket) -> str | None:
    """Return why the peer of a unix socket may be another user's process; None if it belongs to this user.

    If the system does not report the peer, the permissions of the socket's directory have excluded other users.
    """
    uid, own = peer_uid(sock), os.geteuid()
    if uid is None:
        return None
    if uid != own:
        return f"belongs to user {uid}, not to this user ({own})"
    if _is_ambiguous(own) and not _may_signal_peer(sock):
        return f"{_ambiguity(uid)}, or use a job key"
    return None


def owner_trouble(fd: int) -> str | None:
    """Return why an open file may belong to another user; None if it belongs to this user."""
    uid, own = os.fstat(fd).st_uid, os.geteuid()
    if uid != own:
        return f"belongs to user {uid}, not to this user ({own})"
    if _is_ambiguous(own) and not _may_hide_access(fd):
        return _ambiguity(uid)
    return None


def _ambiguity(uid: int) -> str:
    return (
        f"belongs to user {uid}, which may be any user without a number in this user namespace: run as a user that "
        f"{_UID_MAP} lists"
    )


def _is_ambiguous(uid: int) -> bool:
    """Return whether several users may have the id `uid` in this user namespace."""
    if sys.platform != "linux":
        return False
    overflow = _NOBODY
    with suppress(OSError, ValueError), open(_OVERFLOW_UID) as file:
        overflow = int(file.read())
    if uid != overflow:
        return False
    try:
        with open(_UID_MAP) as file:
            return sum(int(line.split()[2]) for line in file) < _ALL
    except OSError:
        return True


def _may_signal_peer(sock: socket.socket) -> bool:
    """Return whether this process may signal the socket's peer, which without privileges must be its own user's."""
    try:
        pidfd = sock.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
    except OSError:  # raised by older kernels, or if the process has ended
        return False
    try:
        signal.pidfd_send_signal(pidfd, 0)
    except (AttributeError, OSError):  # Python may have been built with headers of an older kernel
        return False
    finally:
        os.close(pidfd)
    return True


def _may_hide_access(fd: int) -> bool:
    """Return whether this process may set O_NOATIME on a file, which only the file's owner may do."""
    import fcntl

    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_NOATIME)
    except OSError:
        return False
    fcntl.fcntl(fd, fcntl.F_SETFL, flags)
    return True
