"""A simulated name server, which replaces the DNS lookups of the test process."""

from __future__ import annotations

import socket
from typing import Any

import pytest
import uvloop


class NameServer:
    """A name server that resolves every name to `addresses`, after some failed lookups.

    Args:
        addresses: IPv4 addresses.
        unknown: the number of lookups that fail first.
    """

    def __init__(self, *addresses: str, unknown: int = 0) -> None:
        self._addresses = addresses
        self._unknown = unknown

    def install(self, patch: pytest.MonkeyPatch) -> None:
        """Let this object answer all name lookups of this process, those of uvloop too."""

        async def look_up(*args: Any, **kwargs: Any) -> list[tuple[Any, ...]]:
            return self._getaddrinfo(*args, **kwargs)

        patch.setattr(socket, "getaddrinfo", self._getaddrinfo)
        patch.setattr(uvloop.Loop, "getaddrinfo", staticmethod(look_up))

    def _getaddrinfo(self, host: Any, port: Any, *_: Any, **__: Any) -> list[tuple[Any, ...]]:
        if self._unknown:
            self._unknown -= 1
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 0, "", (address, port)) for address in self._addresses]
