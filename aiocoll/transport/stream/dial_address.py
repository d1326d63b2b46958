"""Where to dial a rank: what its card offers, as far as this rank may use it."""

from __future__ import annotations

import socket
from typing import Any, NamedTuple

from aiocoll.errors import PeerLostError, RendezvousError
from aiocoll.log import logger
from aiocoll.security import keys
from aiocoll.transport.base import Card
from aiocoll.transport.stream import addresses as address

__all__ = ["DialAddress", "DialAddresses"]

_HAS_UNIX = hasattr(socket, "AF_UNIX")  # not on Windows


class DialAddress(NamedTuple):
    """Where to dial, and how.

    Attributes:
        family, address: of the socket.
        label: what to call it in messages.
        instead: where to dial if that leads nowhere.
        striped: the link will have further connections.
    """

    family: int
    address: Any
    label: str
    instead: DialAddress | None = None
    striped: bool = False

    def unreachable(self, peer: int, reason: str) -> PeerLostError:
        """Return the error that rank `peer` could not be reached here."""
        text = f"rank {peer} cannot be reached at {self.label}: {reason}"
        return PeerLostError(text, how="unreachable", ranks=[peer])


class DialAddresses:
    """Where one rank may dial.

    Args:
        rank: this rank.
        host: identity of its host.
        key: the job key, if there is one.
        transport: as for `aiocoll.transport.stream.transport.StreamTransport`.
    """

    def __init__(self, rank: int, host: str, key: bytes | None, transport: str) -> None:
        self.host = host
        #: Why ranks whose cards name the same host are not reached by unix sockets; None where they are.
        self.apart: str | None = None
        self.may_use_unix = transport != "tcp" and _HAS_UNIX
        self._rank = rank
        self._key = key
        self._transport = transport
        self._warned_keyless = False

    def find(self, peer: int, card: Card) -> DialAddress:
        """Return where to dial rank `peer`, whose card this is.

        Raises:
            AuthenticationError: other machines can reach that address, and there is no job key.
            RendezvousError: no transport that is allowed leads there.
        """
        if card["host"] == self.host and self.may_use_unix and card["unix"]:
            name = card["unix"]
            # A unix socket between ranks of one host is quicker than TCP, and may still lead nowhere: the peer may run
            # as another user, or on a copy of this virtual machine. Only the key tells who is at the end of the other.
            instead = self._tcp(card) if self._transport == "auto" and card["tcp"] and self._key else None
            return DialAddress(socket.AF_UNIX, address.unix_address(name), f"unix socket {name}", instead)
        if self._transport in ("unix", "shm"):
            where = "another host" if card["host"] != self.host else "this host, but has no unix socket"
            raise RendezvousError(
                f"transport={self._transport!r} on rank {self._rank}, but rank {peer} is on {where}; use 'auto'"
            )
        if not card["tcp"]:
            raise RendezvousError(f"rank {peer} listens on no address that rank {self._rank} could use: {card}")
        return self._tcp(card)

    def _tcp(self, card: Card) -> DialAddress:
        host, port = card["tcp"]
        self.check_key(host)
        hint = ", which other hosts cannot reach" if card["host"] != self.host and keys.is_loopback(host) else ""
        return DialAddress(address.family_of(host), (host, port), f"{host} port {port}{hint}")

    def check_key(self, host: str) -> None:
        """Refuse to use TCP on `host` without a job key, or warn once where that is a smaller risk."""
        keys.require_key(host, self._key)
        if self._key is None and not self._warned_keyless:
            self._warned_keyless = True
            risk = "every user of this host could join; start the job with `aiocoll run`, or pass job_key="
            rank = self._rank
            logger.warning("rank %d uses TCP on %s without a job key: %s", rank, host, risk, extra={"rank": rank})
