"""The options of links over sockets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from aiocoll.security.handshake import HANDSHAKE_TIMEOUT
from aiocoll.transport.byte_stream import OpenStream
from aiocoll.transport.registry import DataCarrier
from aiocoll.transport.stream.plain_stream import open_plain

__all__ = ["StreamOptions"]


@dataclass(frozen=True, slots=True)
class StreamOptions:
    """What the ranks of a `StreamTransport` may choose.

    Attributes:
        transport: `"tcp"`, `"unix"`, `"shm"` (one host; data through shared memory), or `"auto"`: as `"shm"` between
            ranks of one host, TCP between hosts.
        single_copy: whether ranks of one host may read large arrays in each other's memory.
        host_id: pretend to be on another host (for tests).
        epoch: of the job; ranks of another epoch are refused.
        connect_timeout: seconds after which `connect` gives up.
        handshake_timeout: seconds a peer has to prove the job key.
        open_stream: makes of each connected socket the stream that carries all that follows.
        carrier: the medium of data links in place of the sockets, if the ranks agree on it; see
            `StreamTransport.agree_on_carrier`.
        carries_all: the carrier has all data links, and not only those over TCP.
    """

    transport: Literal["auto", "tcp", "unix", "shm"] = "auto"
    single_copy: bool = True
    host_id: str | None = None
    epoch: int = 0
    connect_timeout: float = 300.0
    handshake_timeout: float = HANDSHAKE_TIMEOUT
    open_stream: OpenStream = open_plain
    carrier: DataCarrier | None = None
    carries_all: bool = False
