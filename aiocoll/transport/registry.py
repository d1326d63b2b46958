"""Registry of transports, which connect the ranks of a group and carry their data.

Every group has sockets: peers are found, authenticated and monitored on them. A transport determines the kind of
sockets, and may bring a carrier, which takes over the data links between ranks once a connection is authenticated.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple, Protocol

from aiocoll.registry import Registry
from aiocoll.runtime import Runtime
from aiocoll.transport.base import Link
from aiocoll.transport.byte_stream import ByteStream

__all__ = [
    "AUTO",
    "SHM",
    "TCP",
    "TRANSPORT_VERSION",
    "UNIX",
    "CarrierRequest",
    "DataCarrier",
    "DataLink",
    "TransportProvider",
    "find_transport",
    "transports",
]

#: Version number of the interfaces `TransportProvider` and `DataCarrier`.
TRANSPORT_VERSION: Final = 1
#: The value of the option `transport` that selects the fastest transport available.
AUTO: Final = "auto"


class DataLink(Link, Protocol):
    """A data link made by a plugin's carrier."""

    @property
    def closed(self) -> bool:
        """Return whether the link is closed."""

    def fail(self, error: Exception) -> None:
        """Close the link and report `error` to the sink, like a failed read."""


class CarrierRequest(NamedTuple):
    """The description of the rank for which a carrier is made.

    Attributes:
        runtime: clock, timers and randomness of its event loop.
        rank: its number in the job.
        world_size: number of ranks of the job.
    """

    runtime: Runtime
    rank: int
    world_size: int


class DataCarrier(Protocol):
    """A plugin's carrier: it makes the data links of one rank."""

    async def open(self, stream: ByteStream, peer: int, *, dialled: bool) -> DataLink | None:
        """Make a link to a peer on an authenticated connection. The peer's carrier does the same at its end.

        The two send each other addresses and keys over `stream`. The link owns `stream` afterwards: it closes it at its
        end, and the peer has gone once `stream` ends.

        Args:
            stream: an authenticated connection to the peer, encrypted where the group encrypts; no bytes of it are
                left unread or unsent when this returns.
            peer: the rank at the other end.
            dialled: whether this end has opened the connection.

        Returns:
            The link, or None at both ends if it must stay on `stream`.

        Raises:
            OSError: the connection broke, or the two cannot be connected; the caller closes `stream`, and retries.
        """

    def catch_up(self) -> None:
        """Deliver the data that peers wrote to their links before a notice, when the notice took another path."""

    def close(self) -> None:
        """Make no more links. Open links stay open. Idempotent."""


@dataclass(frozen=True, kw_only=True)
class TransportProvider:
    """A transport, as registered under its name.

    Attributes:
        medium: whose measured costs choose the algorithms: those of the shipped transport that is most similar.
        sockets: "tcp"; "unix" (one host only); "shm" (the same, and data through shared memory); or "auto": as "shm"
            between ranks of one host, TCP between hosts.
        make_carrier: makes the carrier of a rank; it carries all data links of a group whose option `transport` is the
            name of this transport. None: data goes over the sockets, or shared memory.
        auto_rank: if positive, the carrier also serves groups with ``transport="auto"``: if it is registered on every
            rank, it carries the data links between hosts. The highest number wins.
    """

    medium: Literal["tcp", "unix", "shm"]
    sockets: Literal["auto", "tcp", "unix", "shm"] = "auto"
    make_carrier: Callable[[CarrierRequest], DataCarrier] | None = None
    auto_rank: int = 0

    @property
    def crosses_hosts(self) -> bool:
        """Return whether the transport connects ranks on different hosts."""
        return self.sockets in ("auto", "tcp")

    @property
    def always_tcp(self) -> bool:
        """Return whether the transport uses TCP even between ranks of one host."""
        return self.sockets == "tcp"

    @property
    def shares_memory(self) -> bool:
        """Return whether the transport sends data between ranks of one host through shared memory."""
        return self.sockets in ("auto", "shm") and self.make_carrier is None


TCP: Final = TransportProvider(medium="tcp", sockets="tcp")
UNIX: Final = TransportProvider(medium="unix", sockets="unix")
SHM: Final = TransportProvider(medium="shm", sockets="shm")
_AUTO: Final = TransportProvider(medium="shm", sockets="auto")

#: The registered transports by name.
transports: Final = Registry[TransportProvider]("transport", TRANSPORT_VERSION)


def find_transport(name: str) -> TransportProvider:
    """Return the transport registered as `name`, the value of the option `transport`.

    Raises:
        ValueError: no transport has this name.
        BackendUnavailableError: it cannot be loaded.
    """
    return _AUTO if name == AUTO else transports.get(name)
