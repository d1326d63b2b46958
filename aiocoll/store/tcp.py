"""`TCPStore`: a store in a server process, which all ranks reach over TCP or a unix socket."""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from datetime import timedelta
from functools import partial
from typing import Any, Literal, Self

from aiocoll.credentials import tls_files
from aiocoll.endpoints import parse_endpoint
from aiocoll.errors import StoreUnavailableError
from aiocoll.runtime import Runtime, running_loop
from aiocoll.security.handshake import ConnKind, Identity, job_id
from aiocoll.security.names import part_name
from aiocoll.security.user_ca import prepare
from aiocoll.store.address import describe, is_unix
from aiocoll.store.base import Store, await_reply, check_world_size
from aiocoll.store.client import ClientLink, ClientSecurity, connect
from aiocoll.store.listening import find_address, local_address
from aiocoll.store.registry import StoreOptions, StoreRequest
from aiocoll.store.server import StoreServer

__all__ = ["TCP_OPENER", "TCPStore", "security_arguments", "tcp_url"]

_SCHEME = "tcp://"


class TCPStore(Store):
    """A client of a `StoreServer`. With `is_master` it also owns the server.

    The first call, `await store` or `async with store` opens it. The master then starts its server. Every client
    connects, with retries until `timeout`. With `wait_for_workers` it also waits for the other clients. Many tasks can
    send requests concurrently, and the server notifies waiting calls. When the server has ended, every call raises
    `StoreUnavailableError`.

    Args:
        host_name: the server's address; ``unix:PATH`` or ``unix:@NAME`` (Linux, no file) for a unix socket.
        port: the server's port; 0 lets the master choose a free port, which is `port` after opening.
        world_size: number of clients, including that of the master; None or -1 for any number.
        is_master: run the server, on a thread of its own; it ends with this store.
        timeout: seconds for opening, and the default timeout of calls.
        wait_for_workers: whether opening waits until `world_size` clients have opened.
        key: the job key, needed if other machines can reach the address.
        job: name of the job; a server of another job is refused.
        bind: the address on which the master listens if `host_name` does not belong to its machine, or resolves to its
            loopback; or "any".
        encryption: `"auto"` encrypts the connection if the server is on another host, `"tls"` always except over unix
            sockets, `"none"` never; the same for the server.
        tls_ca: path of the certificates of a CA, with `tls_certificate` and `tls_key`: see `GroupOptions`.
        tls_certificate: path of a certificate that names a part in the job `job`; for the master `aiocoll://JOB/store`.
        tls_key: path of its private key.
        runtime: clock and randomness to use; None is that of the running loop.
    """

    def __init__(
        self,
        host_name: str,
        port: int,
        world_size: int | None = None,
        is_master: bool = False,
        timeout: float | timedelta = 300.0,
        wait_for_workers: bool = True,
        *,
        key: bytes | None = None,
        job: str = "",
        bind: str | None = None,
        encryption: Literal["auto", "none", "tls"] = "auto",
        tls_ca: str | None = None,
        tls_certificate: str | None = None,
        tls_key: str | None = None,
        runtime: Runtime | None = None,
    ) -> None:
        super().__init__(timeout)
        if not 0 <= port <= 65535:
            raise ValueError(f"port must be between 0 and 65535, got {port}")
        if port == 0 and not is_master and not is_unix(host_name):
            raise ValueError("port=0 means a free port, which only the master can choose: pass its actual port")
        self.host = host_name
        self.port = port
        self._world_size = check_world_size(world_size)
        self._is_master = is_master
        self._wait_for_workers = wait_for_workers
        self._key = key
        self._identity = Identity(job_id(job), 0, -1, 0, ConnKind.STORE)
        self._job = job
        self._bind = bind
        self._encryption = encryption
        self._files = tls_files(tls_ca, tls_certificate, tls_key)
        self._runtime = runtime
        self._server: StoreServer | None = None
        self._link: ClientLink | None = None
        self._opening = asyncio.Lock()
        self._closed = False
        self._trouble: str | None = None
        self._local_only: str | None = None

    @property
    def trouble(self) -> str | None:
        """Reason why the last attempt to connect failed. Once connected: why other hosts may not reach the server."""
        return self._trouble if self._link is None else self._local_only

    @property
    def reached(self) -> str:
        """Numeric address of the server; "" before the connection and for a unix socket."""
        peer = None if self._link is None else self._link.transport.get_extra_info("peername")
        return peer[0] if isinstance(peer, tuple) else ""

    def __str__(self) -> str:
        return f"store {describe(self.host, self.port)}"

    @property
    def _sees_disconnects(self) -> bool:
        return True

    async def open(self) -> Self:
        """Connect now instead of at the first call; idempotent.

        Raises:
            StoreUnavailableError: no store was reached; the message has the reason and the duration of the attempts.
            AuthenticationError: one end refused the other, or a key is needed.
            ValueError: the files of the user's CA cannot be used.
            StoreTimeoutError: fewer than `world_size` clients connected in time.
        """
        return await await_reply(self._open_self(), self.timeout, self, "the connection")

    def __await__(self) -> Generator[Any, None, Self]:
        return self.open().__await__()

    async def __aenter__(self) -> Self:
        return await self.open()

    async def aclose(self) -> None:
        """Disconnect. The master also ends the server, for all clients."""
        self._closed = True
        try:
            if self._link is not None:
                await self._link.aclose()
        finally:
            if self._server is not None:
                await self._server.aclose()

    async def _call(self, command: str, arguments: tuple[Any, ...]) -> Any:
        link = await self._get_link(self.timeout)
        return await link.call(command, arguments, self.timeout)

    async def _wait(self, command: str, arguments: tuple[Any, ...], timeout: float) -> Any:
        link = await self._get_link(timeout)
        return await link.wait(command, arguments, timeout)

    async def _open_self(self) -> Self:
        await self._get_link(self.timeout)
        return self

    async def _get_link(self, timeout: float) -> ClientLink:
        self._check_open()
        if self._link is None:
            async with self._opening:
                self._check_open()
                if self._link is None:
                    self._link = await self._open(timeout)
        return self._link

    async def _open(self, timeout: float) -> ClientLink:
        runtime = self._runtime or Runtime(running_loop())
        deadline = runtime.time() + timeout
        link: ClientLink | None = None
        try:
            host = self.host
            if self._is_master:
                host = await self._serve(runtime, timeout)
            link = await connect(
                host,
                self.port,
                ClientSecurity(
                    self._key,
                    self._identity,
                    self._encryption,
                    partial(prepare, self._files, self._job, part_name(self._job)),
                ),
                runtime,
                max(0.0, deadline - runtime.time()),
                self._set_trouble,
            )
            if self._wait_for_workers and self._world_size is not None:
                await link.join(self._world_size, max(0.0, deadline - runtime.time()))
            self._check_open()
        except BaseException:
            if link is not None:
                await link.aclose()
            if self._server is not None:
                await self._server.aclose()
            raise
        return link

    def _set_trouble(self, trouble: str) -> None:
        self._trouble = trouble

    async def _serve(self, runtime: Runtime, timeout: float) -> str:
        """Start the server, and return the address at which this process reaches it."""
        host, self._local_only = await find_address(
            self.host,
            self._bind,
            key=self._key,
            runtime=runtime,
            timeout=timeout,
            trouble=self._set_trouble,
        )
        authority, certificate, key = self._files or (None, None, None)
        server = StoreServer(
            host,
            self.port,
            key=self._key,
            job=self._job,
            world_size=self._world_size,
            encryption=self._encryption,
            tls_ca=authority,
            tls_certificate=certificate,
            tls_key=key,
        )
        _, self.port = server.start()
        self._server = server
        return local_address(host)

    def _check_open(self) -> None:
        if self._closed:
            raise StoreUnavailableError(f"the TCPStore for {describe(self.host, self.port)} is closed: make a new one")


def security_arguments(options: StoreOptions) -> dict[str, Any]:
    """Return the arguments for encryption and certificates of `TCPStore` and `StoreServer`, from a group's options."""
    return {name: getattr(options, name) for name in ("encryption", "tls_ca", "tls_certificate", "tls_key")}


def tcp_url(host: str, port: int) -> str:
    """Return the URL of a store server. `host` may be the address of a unix socket."""
    return _SCHEME + describe(host, port)


class _TCPOpener:
    """The `aiocoll.store.registry.StoreOpener` of ``tcp://host:port`` URLs."""

    served_by_rank_0 = True
    has_secrets = False

    def check(self, url: str, world_size: int) -> None:
        """Check the host and the port of the URL."""
        _, port = parse_endpoint(_address(url))
        if port == 0 and world_size != 1:
            raise ValueError(
                "port 0 means a free port, which the other ranks cannot know: pass the port at which rank 0 serves "
                "the store"
            )

    def open(self, request: StoreRequest) -> Store:
        """Return a client, which starts the server at its first call if this rank serves the store."""
        unix = request.url.removeprefix(_SCHEME)
        host, port = (unix, 0) if is_unix(unix) else parse_endpoint(_address(request.url))
        return TCPStore(
            host,
            port,
            request.world_size,
            request.serves,
            request.timeout,
            wait_for_workers=False,
            key=request.key,
            job=request.job,
            bind=request.options.bind,
            **security_arguments(request.options),
        )


def _address(url: str) -> str:
    return url.removeprefix(_SCHEME).partition("/")[0]


#: The store opener of ``tcp://host:port`` URLs.
TCP_OPENER = _TCPOpener()
