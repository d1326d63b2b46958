"""A proxy in front of a rank or a store that does one thing wrong: it cuts, stalls or garbles a connection.

It touches connections of one kind. On the wire no kind is told before the proof, so a proxy overhears which HELLO this
process says for what. A stalled connection carries nothing any more in either direction, not even its end: a network
that has gone away.
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

from ..internals import wrapped

CHUNK = 1 << 16
#: What each HELLO of this process was for.
kinds: dict[bytes, ConnKind] = {}


@pytest.fixture
def overheard(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tell proxies the kind of each connection that this process dials."""

    def overhear(hello: Any, handshake: ClientHandshake) -> bytes:
        said: bytes = hello(handshake)
        kinds[said] = handshake._identity.kind
        return said

    wrapped(monkeypatch, client_hello=overhear)
    monkeypatch.setattr("tests.chaos.proxy.kinds", {})


@dataclass(frozen=True)
class Fault:
    """What goes wrong.

    Attributes:
        what: happens to the byte at `offset` of what one end says; "kill" is a cut of every connection of the proxy,
            which listens no more.
        kind: of the connection.
        upstream: whether the end that dials says it.
        offset: bytes before it.
        again: it happens to every connection of that kind, not to the first only.
        flip: bits that a garbled byte has wrong.
    """

    what: Literal["cut", "stall", "garble", "kill"]
    kind: ConnKind
    upstream: bool
    offset: int
    again: bool = False
    flip: int = 0xFF


class Proxy:
    """Listens where its `family` says and passes on to `target`; an async context manager.

    Attributes:
        name: where a proxy on a unix socket listens.
        hits: how often the fault has happened.
        said: by kind and by whether the end that dials said it.
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
        """Return a proxy of a listener on IPv4."""
        return cls(socket.AF_INET, target, fault)

    @property
    def endpoint(self) -> tuple[str, int]:
        """Host and port of a proxy on TCP."""
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
                await self._pass(client, server, kinds[hello], hello)

    async def _pass(self, client: socket.socket, server: socket.socket, kind: ConnKind, hello: bytes) -> None:
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

    def strikes(self, kind: ConnKind, upstream: bool) -> Fault | None:
        """Return the fault if it may happen to such a connection."""
        fault = self._fault
        if fault is None or (fault.kind, fault.upstream) != (kind, upstream) or (self.hits and not fault.again):
            return None
        return fault

    def note(self, kind: ConnKind, upstream: bool, data: bytes) -> None:
        """Remember what was said."""
        self.said.setdefault((kind, upstream), bytearray()).extend(data)

    def kill(self) -> None:
        """End like a process: every connection breaks, and nobody listens."""
        self._listener.close()
        for task in self._tasks - {asyncio.current_task()}:
            task.cancel()


class _CutError(Exception):
    """The connection is to break."""


class _Pipe:
    """One connection through a proxy."""

    def __init__(self, proxy: Proxy, kind: ConnKind) -> None:
        self._proxy = proxy
        self._kind = kind
        self._stalled = False

    async def pump(self, source: socket.socket, sink: socket.socket, upstream: bool, data: bytes) -> None:
        """Pass on what `source` says, `data` first, until it has ended."""
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
                fault = proxy.strikes(self._kind, upstream)
                if fault is not None and position <= fault.offset < position + len(data):
                    data = await self._strike(fault, sink, data, fault.offset - position)
                await loop.sock_sendall(sink, data)
                proxy.note(self._kind, upstream, data)
                position += len(data)
                data = b""
        except OSError as error:
            raise _CutError from error

    async def _strike(self, fault: Fault, sink: socket.socket, data: bytes, at: int) -> bytes:
        """Let the fault happen to byte `at` of `data`; return what is passed on, if anything is."""
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
    """A store whose ranks, when they look each other up, find proxies; use it for one group.

    Args:
        store: the real one.
        fault: what each of the proxies does wrong.
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
