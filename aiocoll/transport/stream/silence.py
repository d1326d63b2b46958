"""Links to hosts that have fallen silent: they are closed with a network error.

Twice a second the kernel is asked, which knows more than any timer of a process: hosts answer each other even while the
processes on them are blocked or stopped. This also detects that two ranks are disconnected from each other while
the ranks that monitor both of them can reach both.
"""

from __future__ import annotations

import errno
import socket

from aiocoll.runtime import Runtime
from aiocoll.sockets import UNREACHABLE_AFTER, keep_asking, silence
from aiocoll.transport.registry import DataLink

__all__ = ["Silence"]

#: Seconds between two looks. One takes 2 microseconds per link.
ROUND = 0.5


class Silence:
    """Watches the links of one rank to other hosts.

    Args:
        runtime: clock and timers.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._watched: dict[socket.socket, DataLink] = {}

    def watch(self, link: DataLink, sock: socket.socket) -> None:
        """Watch one of the connections of a link until that is closed."""
        keep_asking(sock)
        if not self._watched:
            self._runtime.call_later(ROUND, self._look)
        self._watched[sock] = link

    def _look(self) -> None:
        for sock, link in list(self._watched.items()):
            if link.closed:
                del self._watched[sock]
            elif (seconds := silence(sock)) >= UNREACHABLE_AFTER:
                link.fail(OSError(errno.ETIMEDOUT, f"nothing has come from its host for {seconds:.1f} s"))
        if self._watched:
            self._runtime.call_later(ROUND, self._look)
