"""Options of the stream transport."""

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
    """The options of a `StreamTransport`.

    Attributes:
        transport: `"tcp"`, `"unix"`, `"shm"` (one host; data through shared memory), or `"auto"`: `"shm"` between ranks
            of one host, TCP between hosts.
        single_copy: whether ranks of one host may read large arrays in each other's memory.
        host_id: name of the host to report instead of the real one (for tests).
        epoch: epoch of the job. Connections from ranks of another epoch are rejected.
        connect_timeout: seconds after which `connect` fails.
        handshake_timeout: seconds within which a peer must prove the job key.
        open_stream: makes the stream of a connected socket, before the handshake.
        carrier: makes data links in place of sockets and shared memory, if the ranks agree on it; see
            `StreamTransport.agree_on_carrier`.
        carries_all: the carrier makes all data links, not only those over TCP.
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
