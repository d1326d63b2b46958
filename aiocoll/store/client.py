"""`ClientLink`: the connection of a `TCPStore` to its server, which `connect` makes."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from typing import Any, NamedTuple

from aiocoll.errors import AuthenticationError, StoreError, StoreTimeoutError, StoreUnavailableError
from aiocoll.runtime import Runtime
from aiocoll.security.handshake import (
    CHALLENGE_SIZE,
    HANDSHAKE_TIMEOUT,
    VERDICT_SIZE,
    ClientHandshake,
    Identity,
    may_be_handshake,
)
from aiocoll.security.keys import is_loopback
from aiocoll.security.loop_timeout import loop_timeout
from aiocoll.security.names import WrongCertificateError, certificate_names, check_names, store_name
from aiocoll.security.tls import Tls, binding, is_encrypted
from aiocoll.security.tls_trouble import explain_silent_close, explain_tls_error
from aiocoll.sockets import is_ready
from aiocoll.store.address import StoreEndpoint, check_peer, describe, is_loopback_name, is_unix, literal, resolve
from aiocoll.store.base import timeout_error, wait_until_done
from aiocoll.store.frames import FrameProtocol, pack
from aiocoll.store.replies import ReplyStatus, check_reply

__all__ = ["ClientLink", "ClientSecurity", "StoreAuthenticationError", "connect"]

#: Seconds between attempts to connect. Ranks start at about the same time, so the first retries follow quickly.
_FIRST_RETRY = 0.005
_LAST_RETRY = 0.25
#: Seconds to wait until the server confirms a cancelled wait. Only an overloaded server needs that long.
_CANCEL_TIMEOUT = 0.5
#: Seconds to send the remaining bytes while the link closes.
_CLOSE_TIMEOUT = 0.25


class StoreAuthenticationError(StoreUnavailableError, AuthenticationError):
    """Raised when a store cannot be used, because its client or its server does not accept the other end."""


class _Request(NamedTuple):
    """A request in flight. A lost connection cancels `answer`, because an exception might never be retrieved."""

    command: str
    arguments: tuple[Any, ...]
    answer: asyncio.Future[tuple[ReplyStatus, Any]]


class ClientLink(FrameProtocol):
    """The client's end of a store connection, which sends concurrent requests and matches replies to them.

    Attributes:
        ready: a future that is done at the end of the handshake, with its error or None.
        connected: whether the connection was made, including its encryption.
        tls: the certificates and contexts of an encrypted connection, or None.
    """

    def __init__(self, handshake: ClientHandshake, where: str, tls: Tls | None = None) -> None:
        super().__init__()
        self.connected = False
        self.tls = tls
        loop = asyncio.get_running_loop()
        self.ready: asyncio.Future[Exception | None] = loop.create_future()
        self._handshake = handshake
        self._challenged = False
        self._where = where
        self._closed: asyncio.Future[None] = loop.create_future()
        self._requests: dict[int, _Request] = {}
        self._count = 0
        self._failure = (
            f"store {where} closed the connection: its process (rank 0, the launcher, or the owner of the meeting) "
            "has ended"
        )

    async def call(self, command: str, arguments: tuple[Any, ...], timeout: float) -> Any:
        """Carry out a command that returns at once; fail if the server sends no reply within `timeout` seconds."""
        number, future = self._send(command, arguments)
        try:
            if not await wait_until_done(future, timeout):
                raise StoreTimeoutError(f"store {self._where} did not answer {command} within {timeout:g} s")
        finally:
            self._requests.pop(number, None)
        _, result = self._unwrap_reply(future)
        return result

    async def wait(self, command: str, arguments: tuple[Any, ...], timeout: float) -> Any:
        """Carry out a command that waits for keys. A timeout or a cancellation ends the wait at the server."""
        outcome, payload = await self._wait(command, arguments, timeout)
        if outcome is ReplyStatus.MISSING:
            raise timeout_error(f"store {self._where}", command, payload, timeout)
        return payload

    async def join(self, world_size: int, timeout: float) -> None:
        """Wait until `world_size` clients have joined, including this one."""
        outcome, payload = await self._wait("join", (world_size,), timeout)
        if outcome is ReplyStatus.MISSING:
            raise StoreTimeoutError(
                f"{world_size - len(payload)} of {world_size} clients connected to store {self._where} "
                f"within {timeout:g} s: start the other ranks, or correct world_size"
            )

    async def aclose(self) -> None:
        """Close the connection; requests in flight raise `StoreUnavailableError`."""
        self._failure = f"the TCPStore for {self._where} is closed: make a new one"
        self.transport.close()
        if not await wait_until_done(self._closed, _CLOSE_TIMEOUT):
            self.transport.abort()
            await wait_until_done(self._closed, _CLOSE_TIMEOUT)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Start the handshake, after a check that the server's certificate names a store."""
        super().connection_made(transport)
        self.connected = True
        if secured := transport.get_extra_info("ssl_object"):
            self._handshake.bound = binding(secured.getpeercert(binary_form=True))
            try:
                self._check_names(certificate_names(secured.getpeercert()))
            except WrongCertificateError as error:
                self.record_failure(error)
                self.transport.abort()
                return
        self._expect(CHALLENGE_SIZE, self._challenge_received)
        self.transport.write(self._handshake.hello())

    def connection_lost(self, exc: Exception | None) -> None:
        """Handle a lost connection: fail the handshake and all pending requests."""
        if not self.ready.done():
            causes = "it is not an aiocoll store, or a store that is closing"
            if self.tls is not None:
                causes += f", or {explain_silent_close(self.tls)}"
            reset = ConnectionResetError(f"something listens there but closes the connection: {causes}")
            self.ready.set_result(self.certificate_trouble(exc) or self.foreign_answer() or reset)
        for request in self._requests.values():
            request.answer.cancel()
        self._requests.clear()
        self._closed.set_result(None)

    def record_failure(self, exc: Exception) -> None:
        """Record why the connection fails, for the errors of the pending requests."""
        self._failure = f"store {self._where}: {exc}"
        if not self.ready.done():
            self.ready.set_result(exc)

    def foreign_answer(self) -> AuthenticationError | None:
        """Return an error if the other end has sent data that is not a store handshake; otherwise None."""
        received = self.received_so_far()
        if self._challenged or may_be_handshake(received):
            return None
        return AuthenticationError(f"it is not an aiocoll store: it sent {received[:32]!r}")

    def message_received(self, number: int, word: Any, payload: Any) -> None:
        """Complete the request to which a reply belongs; ignore the reply to an abandoned request."""
        request = self._requests.get(number)
        if request is not None:
            answer = check_reply(request.command, request.arguments, word, payload)
            del self._requests[number]
            if not request.answer.done():
                request.answer.set_result(answer)

    def _check_names(self, names: tuple[str, ...]) -> None:
        if self.tls is not None and self.tls.job is not None:
            check_names(names, store_name(self.tls.job), "the certificate of the server")

    def certificate_trouble(self, exc: BaseException | None) -> WrongCertificateError | None:
        """Return an error that explains the rejected certificate, if `exc` reports one; otherwise None."""
        return (
            explain_tls_error(exc, self.tls, "the server")
            if isinstance(exc, ssl.SSLError) and self.tls is not None
            else None
        )

    def _challenge_received(self, block: bytearray) -> None:
        self._challenged = True
        self.transport.write(self._handshake.prove(bytes(block)))
        self._expect(VERDICT_SIZE, self._verdict_received)

    def _verdict_received(self, block: bytearray) -> None:
        self.transport.write(self._handshake.confirm(bytes(block)))
        self._expect_frame()
        if not self.ready.done():
            self.ready.set_result(None)

    async def _wait(self, command: str, arguments: tuple[Any, ...], timeout: float) -> tuple[ReplyStatus, Any]:
        number, future = self._send(command, arguments)
        try:
            if not await wait_until_done(future, timeout):
                self._cancel(number)
                await wait_until_done(future, _CANCEL_TIMEOUT)
        except asyncio.CancelledError:
            if not future.done():
                self._cancel(number)
            if command == "queue_pop":
                # Put a popped item back into the queue. It may arrive later, in spite of the cancellation.
                future.add_done_callback(lambda popped: self._return_item(number, arguments[0], popped))
            raise
        if not future.done():
            wanted = arguments[0] if isinstance(arguments[0], list) else list(map(str, arguments))
            raise timeout_error(f"store {self._where}, which does not answer,", command, wanted, timeout)
        self._requests.pop(number, None)
        return self._unwrap_reply(future)

    def _send(self, command: str, arguments: tuple[Any, ...]) -> tuple[int, asyncio.Future[tuple[ReplyStatus, Any]]]:
        if self.transport.is_closing():
            raise StoreUnavailableError(self._failure)
        self._count += 1
        self.transport.write(pack([self._count, command, arguments]))
        future = self._closed.get_loop().create_future()
        self._requests[self._count] = _Request(command, arguments, future)
        return self._count, future

    def _cancel(self, number: int) -> None:
        if not self.transport.is_closing():
            self.transport.write(pack([number, "cancel", []]))

    def _return_item(self, number: int, key: str, popped: asyncio.Future[tuple[ReplyStatus, Any]]) -> None:
        self._requests.pop(number, None)
        if not popped.cancelled() and popped.result()[0] is ReplyStatus.RESULT and not self.transport.is_closing():
            self._count += 1
            self.transport.write(pack([self._count, "queue_return", [key, popped.result()[1]]]))

    def _unwrap_reply(self, future: asyncio.Future[tuple[ReplyStatus, Any]]) -> tuple[ReplyStatus, Any]:
        if future.cancelled():
            raise StoreUnavailableError(self._failure)
        outcome, payload = future.result()
        if outcome is ReplyStatus.ERROR:
            raise StoreError(str(payload))
        return outcome, payload


class ClientSecurity(NamedTuple):
    """The settings for authentication and encryption of a store client.

    Attributes:
        key: the job key; None if no key is needed.
        identity: the identity of this client.
        encryption: the argument `encryption` of `TCPStore`.
        secure: makes the certificates. It is called in a thread, if the connection will be encrypted.
    """

    key: bytes | None
    identity: Identity
    encryption: str
    secure: Callable[[], Tls]


async def connect(
    host: str, port: int, security: ClientSecurity, runtime: Runtime, timeout: float, trouble: Callable[[str], None]
) -> ClientLink:
    """Connect to a store and authenticate; until `timeout`, retry while the server may still be starting.

    The reason of each failed attempt is passed to `trouble` at once, since this call may be cancelled before it raises.

    Raises:
        ValueError: `security.secure` raised it, or another error of the certificates.
        StoreUnavailableError: no store was reached; the message names address, reason and duration of the attempts.
        StoreAuthenticationError: one end refused the other, or the other end is not a store.
    """
    key, identity, encryption, secure = security
    where = describe(host, port)
    began = runtime.time()
    pause = _FIRST_RETRY
    tls: Tls | None = None
    trouble(f"no store at {where}: {_explain(TimeoutError())}")
    while True:
        try:
            for endpoint in await _resolve(host, port):
                endpoint.require_key(key)
                endpoint = endpoint.reachable()
                remaining = began + timeout - runtime.time()
                secured = not is_unix(host) and is_encrypted(encryption, endpoint.sockaddr[0])
                if secured and tls is None:
                    tls = await asyncio.to_thread(secure)
                link = ClientLink(ClientHandshake(identity, key, runtime.random_bytes), where, tls if secured else None)
                try:
                    return await _attempt(link, endpoint, runtime, min(HANDSHAKE_TIMEOUT, max(remaining, _LAST_RETRY)))
                except AuthenticationError:
                    raise
                except OSError as exc:
                    reason = _explain(exc) + _explain_loopback(host, endpoint)
                    if encryption != "auto" and isinstance(exc, ConnectionResetError | ssl.SSLError):
                        reason += f"; check that the server also uses encryption={encryption!r} (AIOCOLL_ENCRYPTION)"
        except AuthenticationError as exc:
            raise StoreAuthenticationError(f"cannot use the store at {where}: {exc}") from exc
        except _UnresolvedError as exc:
            reason = str(exc)
        elapsed = runtime.time() - began
        trouble(f"no store at {where}: {reason}")
        if elapsed >= timeout:
            raise StoreUnavailableError(f"no store at {where}: {reason} (tried for {elapsed:.1f} s)")
        await runtime.sleep(min(pause, timeout - elapsed))
        pause = min(2 * pause, _LAST_RETRY)


class _UnresolvedError(Exception):
    """Raised when a host name cannot be resolved. A later lookup may succeed."""


async def _resolve(host: str, port: int) -> list[StoreEndpoint]:
    try:
        return await resolve(host, port)
    except (OSError, UnicodeError) as exc:
        why = getattr(exc, "strerror", None) or exc
        raise _UnresolvedError(f"the host name {host!r} cannot be resolved ({why})") from exc


async def _attempt(link: ClientLink, endpoint: StoreEndpoint, runtime: Runtime, timeout: float) -> ClientLink:
    """Connect `link` to an endpoint, and complete its handshake.

    Raises:
        OSError, AuthenticationError: the connection or the handshake failed.
    """
    loop = asyncio.get_running_loop()
    sock = endpoint.socket()
    transport: asyncio.BaseTransport | None = None
    connecting = True

    def has_arrived() -> bool:
        """Return whether a connection, data or a result has arrived that this coroutine has not handled yet."""
        is_read = link.ready.done() or (link.connected and transport is None)
        return is_read or is_ready(sock.fileno(), to_write=connecting)

    try:
        async with loop_timeout(runtime, timeout, has_arrived):
            await loop.sock_connect(sock, endpoint.sockaddr)
            connecting = False
            check_peer(sock)
            if isinstance(endpoint.sockaddr, str):
                transport, _ = await loop.create_unix_connection(lambda: link, sock=sock)
            elif link.tls is not None:
                context = link.tls.client
                transport, _ = await loop.create_connection(lambda: link, sock=sock, ssl=context, server_hostname="")
            else:
                transport, _ = await loop.create_connection(lambda: link, sock=sock)
            failure = await link.ready
        if failure is not None:
            raise failure
    except BaseException as exc:
        if transport is None:
            if link.connected:  # `create_connection` was cancelled just when it had connected
                link.transport.abort()
            else:
                sock.close()
            if trouble := link.certificate_trouble(exc):
                raise trouble from exc
            raise
        link.transport.abort()
        if isinstance(exc, TimeoutError):
            silent = TimeoutError("something listens there but does not answer: not an aiocoll store, or a stopped one")
            raise link.foreign_answer() or silent from None
        raise
    return link


def _explain_loopback(host: str, endpoint: StoreEndpoint) -> str:
    """Return a hint for errors if a host name unexpectedly resolves to the loopback; else ""."""
    if literal(host, 0) is not None or is_loopback_name(host) or not is_loopback(endpoint.sockaddr[0]):
        return ""
    return f"; {host!r} resolves to {endpoint.sockaddr[0]} here, this machine itself (see /etc/hosts)"


def _explain(exc: OSError) -> str:
    if isinstance(exc, ConnectionRefusedError | FileNotFoundError):
        return "nothing listens there (connection refused); check that rank 0 or the launcher runs at this address"
    if isinstance(exc, ssl.SSLError):
        return f"the program that listens there does not use TLS as expected ({exc.reason or exc})"
    if isinstance(exc, TimeoutError):
        return str(exc) or "no answer to the connection attempt; check the address and the firewall"
    return exc.strerror or str(exc)
