"""Functions that make both ends of a link in this process, for every kind of link."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from aiocoll.runtime import Runtime
from aiocoll.security.handshake import ConnKind
from aiocoll.security.tls import make_own_contexts
from aiocoll.testing.contracts import Recorder as Recorder
from aiocoll.testing.contracts import frame as frame
from aiocoll.transport.buffer_pool import BufferPool
from aiocoll.transport.byte_stream import ByteStream, OpenStream
from aiocoll.transport.memory import Hub, MemoryTransport
from aiocoll.transport.shm.link import ShmLink
from aiocoll.transport.shm.transport import Sharing
from aiocoll.transport.stream.link import StreamLink
from aiocoll.transport.stream.plain_stream import PlainStream, open_plain
from aiocoll.transport.stream.striped_stream import StripedStream
from aiocoll.transport.stream.tls_stream import open_tls

from .record_stream import open_records

#: The kinds of links. "records" uses `RecordStream`, which behaves like an encrypted stream.
KINDS = ("memory", "unix", "tcp", "shm", "records", "tls", "striped")


def sockets(kind: str) -> tuple[socket.socket, socket.socket]:
    """Return two connected, non-blocking sockets: unix sockets or TCP sockets."""
    if kind == "unix":
        pair = socket.socketpair()
    else:
        with socket.create_server(("127.0.0.1", 0)) as server:
            near = socket.create_connection(server.getsockname())
            far, _ = server.accept()
        pair = near, far
    for each in pair:
        each.setblocking(False)
    return pair


class Idle:
    """Polling hooks for an event loop on which no operation waits."""

    def look(self) -> bool:
        return False

    def keep_polling(self, moved: bool) -> bool:
        return False


async def shm_ends(runtime: Runtime, single_copy: Sequence[bool] = (True, True)) -> list[ShmLink]:
    """Return both ends of a shared-memory link, which belong to two ranks with these `single_copy` options."""
    near, far = sockets("unix")
    ranks = [Sharing(runtime, rank, 2, Idle(), wanted=True, single_copy=single_copy[rank]) for rank in range(2)]
    pairs = await asyncio.gather(ranks[0].propose(near, 1), ranks[1].accept(far, 0))
    ends = []
    for rank, (sock, pair) in enumerate(zip((near, far), pairs, strict=True)):
        assert pair is not None
        ends.append(
            ShmLink(runtime, PlainStream(runtime.loop, sock), pair, ranks[rank].in_place, 1 - rank, ConnKind.DATA)
        )
    return ends


async def striped(loop: asyncio.AbstractEventLoop, first: Sequence[ByteStream]) -> list[StripedStream]:
    """Return both ends of a striped stream over three connections; `first` has both ends of the first connection."""
    ends = [StripedStream(loop, end) for end in first]
    for _ in range(2):
        for end, sock in zip(ends, sockets("unix"), strict=True):
            end.add(PlainStream(loop, sock))
    return ends


async def make_ends(kind: str, runtime: Runtime) -> list[Any]:
    """Return both ends of a link of kind `kind`, which are not started yet."""
    if kind == "memory":
        hub = Hub(runtime)
        transports = [MemoryTransport(hub, rank) for rank in range(2)]
        accepted: list[Any] = []
        transports[1].accepted = accepted.append
        for transport in transports:
            await transport.listen()
        near: Any = await transports[0].connect(1, {}, ConnKind.DATA)
        return [near, accepted[0]]
    if kind == "shm":
        return list(await shm_ends(runtime))
    opening: OpenStream = {"records": open_records, "tls": partial(open_tls, make_own_contexts())}.get(kind, open_plain)
    pair = enumerate(sockets(kind if kind == "tcp" else "unix"))
    streams = await asyncio.gather(*(opening(runtime.loop, sock, dialled=not rank) for rank, sock in pair))
    if kind == "striped":
        streams = await striped(runtime.loop, streams)
    return [StreamLink(runtime, stream, 1 - rank, ConnKind.DATA, BufferPool()) for rank, stream in enumerate(streams)]


@asynccontextmanager
async def linked(kind: str, runtime: Runtime | None = None) -> AsyncIterator[tuple[Any, Any]]:
    """Yield both ends of a link, which are not started yet; a `Recorder` receives the frames of each end."""
    ends = await make_ends(kind, runtime or Runtime.of(asyncio.get_running_loop()))
    for end in ends:
        end.sink = Recorder()
    try:
        yield ends[0], ends[1]
    finally:
        for end in ends:
            end.close()
        for _ in range(3):
            await asyncio.sleep(0)
