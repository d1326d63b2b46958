"""Proxies in front of a rank or a store that cut, stall or garble a connection.

A proxy changes connections of one kind only. The wire does not show the kind before the proof, so a proxy learns from
this process which HELLO belongs to which kind. A stalled connection carries nothing more in either direction, not even
its end, like a network that has disappeared.
"""

from __future__ import annotations

import asyncio
import os
import socket
from dataclasses import dataclass
from typing import Any, Literal, Self

import msgpack
import pytest

from aiocoll.security.handshake import HELLO_SIZE, ClientHandshake, ConnKind
from aiocoll.store import Store
from aiocoll.transport.stream import addresses as address

from ..internals import wrap_methods

CHUNK = 1 << 16
#: The kind of each connection that this process has dialled, by its HELLO message.
kinds: dict[bytes, ConnKind] = {}


@pytest.fixture
def recorded_connection_kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Record the kind of each connection that this process dials, so that proxies can apply faults by kind."""

    def record_kind(hello: Any, handshake: ClientHandshake) -> bytes:
        said: bytes = hello(handshake)
        kinds[said] = handshake._identity.kind
        return said

    wrap_methods(monkeypatch, ClientHandshake, hello=record_kind)
    monkeypatch.setattr("tests.chaos.proxy.kinds", {})


@dataclass(frozen=True)
class Fault:
    """A fault to inject into a connection: kind, offset and direction.

    Attributes:
        what: what happens to the byte at `offset` of the data from one end. "kill" cuts every connection of the proxy,
            which stops listening.
        kind: the kind of connection.
        upstream: whether the dialling end sends the byte.
        offset: the number of bytes before it.
        again: whether the fault happens to every connection of this kind, not only to the first.
        flip: the bits of the garbled byte that are wrong.
    """

    what: Literal["cut", "stall", "garble", "kill"]
    kind: ConnKind
    upstream: bool
    offset: int
    again: bool = False
    flip: int = 0xFF


class Proxy:
    """A proxy that listens on `family` and forwards to `target`; an async context manager.

    Attributes:
        name: the address of a proxy on a unix socket.
        hits: how often the fault has happened.
        said: the forwarded bytes, by kind and by whether the dialling end sent them.
    """

    def __init__(self, family: int, target: Any, fault: Fault | None) -> None:
        self.hits = 0
        self.said: dict[tuple[ConnKind, bool], bytearray] = {}
        self._family = family
        self._target = target
        self._fault = fault
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        if family == socket.AF_UNIX:
            self._listener, self.name = address.open_unix(os.urandom)
        else:
            self._listener = address.open_tcp("127.0.0.1")
        self._spawn(self._accept())

    @classmethod
    def tcp(cls, target: tuple[str, int], fault: Fault | None) -> Self:
        """Return a proxy for a listener on IPv4."""
        return cls(socket.AF_INET, target, fault)

    @property
    def endpoint(self) -> tuple[str, int]:
        """The host and port of a proxy on TCP."""
        host, port = self._listener.getsockname()
        return host, port

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._listener.close()

    def _spawn(self, coro: Any) -> asyncio.Task[None]:
        task = self._loop.create_task(coro)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _accept(self) -> None:
        while True:
            sock, _ = await self._loop.sock_accept(self._listener)
            self._spawn(self._relay(sock))

    async def _relay(self, client: socket.socket) -> None:
        with client:
            client.setblocking(False)
            hello = b""
            while len(hello) < HELLO_SIZE:
                part = await self._loop.sock_recv(client, HELLO_SIZE - len(hello))
                if not part:
                    return
                hello += part
            try:
                server = await address.reach(self._loop, self._family, self._target)
            except OSError:
                return
            with server:
                await self._forward(client, server, kinds[hello], hello)

    async def _forward(self, client: socket.socket, server: socket.socket, kind: ConnKind, hello: bytes) -> None:
        pipe = _Pipe(self, kind)
        up = self._spawn(pipe.pump(client, server, True, hello))
        down = self._spawn(pipe.pump(server, client, False, b""))
        try:
            await asyncio.gather(up, down)
        except _CutError:
            pass
        finally:
            up.cancel()
            down.cancel()
            await asyncio.gather(up, down, return_exceptions=True)

    def fault_of(self, kind: ConnKind, upstream: bool) -> Fault | None:
        """Return the fault if it applies to this kind of connection."""
        fault = self._fault
        if fault is None or (fault.kind, fault.upstream) != (kind, upstream) or (self.hits and not fault.again):
            return None
        return fault

    def record(self, kind: ConnKind, upstream: bool, data: bytes) -> None:
        """Record the data that a proxy forwards."""
        self.said.setdefault((kind, upstream), bytearray()).extend(data)

    def kill(self) -> None:
        """Behave like a killed process: break every connection, and stop listening."""
        self._listener.close()
        for task in self._tasks - {asyncio.current_task()}:
            task.cancel()


class _CutError(Exception):
    """Raised to break a connection."""


class _Pipe:
    """A connection through a proxy."""

    def __init__(self, proxy: Proxy, kind: ConnKind) -> None:
        self._proxy = proxy
        self._kind = kind
        self._stalled = False

    async def pump(self, source: socket.socket, sink: socket.socket, upstream: bool, data: bytes) -> None:
        """Forward `data` and then all data from `source` until its end."""
        loop, proxy = asyncio.get_running_loop(), self._proxy
        position = 0
        try:
            while True:
                data = data or await loop.sock_recv(source, CHUNK)
                if self._stalled:
                    await loop.create_future()
                if not data:
                    sink.shutdown(socket.SHUT_WR)
                    return
                fault = proxy.fault_of(self._kind, upstream)
                if fault is not None and position <= fault.offset < position + len(data):
                    data = await self._apply(fault, sink, data, fault.offset - position)
                await loop.sock_sendall(sink, data)
                proxy.record(self._kind, upstream, data)
                position += len(data)
                data = b""
        except OSError as error:
            raise _CutError from error

    async def _apply(self, fault: Fault, sink: socket.socket, data: bytes, at: int) -> bytes:
        """Apply the fault, if due, to `data` that starts at byte `at`; return the data to forward."""
        self._proxy.hits += 1
        if fault.what == "garble":
            return data[:at] + bytes([data[at] ^ fault.flip]) + data[at + 1 :]
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(sink, data[:at])
        if fault.what == "stall":
            self._stalled = True
            await loop.create_future()
        if fault.what == "kill":
            self._proxy.kill()
        raise _CutError


class Detour(Store):
    """A store that replaces the addresses on cards by the addresses of proxies; use it for one group.

    Args:
        store: the real store.
        fault: the fault of each proxy.
    """

    def __init__(self, store: Store, fault: Fault | None) -> None:
        super().__init__(store.timeout)
        self.proxies: dict[Any, Proxy] = {}
        self._store = store
        self._fault = fault

    @property
    def hits(self) -> int:
        return sum(proxy.hits for proxy in self.proxies.values())

    async def aclose(self) -> None:
        for proxy in self.proxies.values():
            await proxy.__aexit__()

    async def _call(self, command: str, arguments: tuple[Any, ...]) -> Any:
        return await self._store._call(command, arguments)

    async def _wait(self, command: str, arguments: tuple[Any, ...], timeout: float) -> Any:
        found = await self._store._wait(command, arguments, timeout)
        if command != "multi_get" or "/claim/" in arguments[0][0]:
            return found
        return [self._card(data) for data in found]

    def _card(self, data: bytes) -> bytes:
        card = msgpack.unpackb(data)
        if card.get("unix"):
            card["unix"] = self._proxy(socket.AF_UNIX, address.unix_address(card["unix"])).name
        if card.get("tcp"):
            card["tcp"] = list(self._proxy(socket.AF_INET, tuple(card["tcp"])).endpoint)
        return msgpack.packb(card)

    def _proxy(self, family: int, target: Any) -> Proxy:
        if target not in self.proxies:
            self.proxies[target] = Proxy(family, target, self._fault)
        return self.proxies[target]
