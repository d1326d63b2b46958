"""Connection to a Redis server: address, TLS and error texts, none of which contains a password."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, Final
from urllib.parse import unquote, urlsplit

from aiocoll.credentials import read_private
from aiocoll.errors import BackendUnavailableError, StoreError
from aiocoll.numerals import parse_int
from aiocoll.store.address import describe
from aiocoll.store.client import StoreAuthenticationError

__all__ = ["MAX_WAIT", "RedisAddress", "RedisConnection", "pauses"]

#: Timeout in seconds of a connection attempt and of a reply: enough to transfer 8 MiB at 5 Mbit/s.
MAX_WAIT: Final = 15.0
#: Shortest and longest pause in seconds between two attempts to connect. The pause doubles each time.
_FIRST_RETRY: Final = 0.005
_LAST_RETRY: Final = 0.25
#: Seconds that `aclose` waits for a running attempt to connect.
_CLOSE_TIMEOUT: Final = 1.0
#: The default port of Redis servers.
_PORT: Final = 6379


class RedisAddress:
    """The address of a Redis database: ``redis://[[user]:password@]host[:port][/db]``, or ``rediss://`` for TLS.

    Args:
        url: the address.
        tls_ca: path of the CA certificates that verify the server; None uses those of the system.
        tls_certificate: path of the certificate to present to the server, or None.
        tls_key: path of its private key.

    Raises:
        BackendUnavailableError: the package `redis` is not installed.
        ValueError, TypeError: `url` has an invalid form, or a file cannot be used. The message omits the password.
    """

    def __init__(self, url: str, tls_ca: str | None, tls_certificate: str | None, tls_key: str | None) -> None:
        self._redis, self._exceptions = _import_redis()
        encrypted, self._arguments = _parse(url)
        where = describe(self._arguments["host"], self._arguments["port"])
        self._text = f"redis{'s' * encrypted}://{where}/{self._arguments['db']}"
        self._context: ssl.SSLContext | None = None
        if encrypted:
            self._context = _context(tls_ca, tls_certificate, tls_key)
        elif (tls_ca, tls_certificate, tls_key) != (None, None, None):
            raise ValueError("tls_ca, tls_certificate and tls_key need a url that begins with rediss://")

    def __str__(self) -> str:
        return self._text

    def connection(self) -> Any:
        """Return a new, unconnected `redis.asyncio.Connection` without timeouts, which the caller has to set."""
        # Use version 2 of the Redis protocol, which every server and proxy supports.
        arguments = {**self._arguments, "protocol": 2, "socket_timeout": None}
        if self._context is None:
            return self._redis.Connection(**arguments)
        connection = self._redis.SSLConnection(**arguments)
        # Replace the TLS context of the package `redis`, which would also trust the system's CAs.
        connection.ssl_context.context = self._context
        return connection

    def refusal(self, error: Exception) -> StoreError | None:
        """Return the exception to raise in place of `error`; None if a retry may succeed."""
        exceptions = self._exceptions
        if isinstance(error, exceptions.NoPermissionError):
            return StoreAuthenticationError(
                f"{self} denies a permission that the store needs ({error}): the user in the url needs the keys and "
                "the channels aiocoll:*, and the commands that the documentation of RedisStore lists"
            )
        if isinstance(error, exceptions.AuthenticationError | exceptions.AuthenticationWrongNumberOfArgsError):
            return StoreAuthenticationError(f"{self} refused user or password: {error}; correct them in the url")
        for cause in _causes(error):
            if isinstance(cause, ssl.SSLCertVerificationError):
                return StoreAuthenticationError(
                    f"the certificate of {self} was refused ({cause.verify_message}): pass the certificates of its CA "
                    "as tls_ca=, and use a host in the url that the certificate names"
                )
        if isinstance(error, exceptions.ResponseError):
            return StoreError(f"{self} could not carry out a request: {error}")
        return None

    def explain(self, error: Exception) -> str:
        """Return an error text that explains why the server was not reached."""
        for cause in _causes(error):
            if isinstance(cause, ConnectionRefusedError):
                return "nothing listens there (connection refused); check that the server runs and the url is correct"
            alert = isinstance(cause, ssl.SSLError) and "ALERT" in (cause.reason or "")
            if alert or (self._context is not None and isinstance(cause, ConnectionResetError)):
                return (
                    "the server closed the connection; if it requires certificates, pass tls_certificate= and tls_key= "
                    "of a CA that it trusts"
                )
            if isinstance(cause, ssl.SSLError):
                return f"the program that listens there does not use TLS as expected ({cause.reason or cause})"
            if isinstance(cause, OSError) and cause.strerror:
                return cause.strerror
        if isinstance(error, TimeoutError):
            return "no answer; check the url, and that the firewall permits the port"
        return str(error) or type(error).__name__


class RedisConnection:
    """A connection to a Redis server. The caller closes it with `hang_up` after each error.

    Methods raise the exceptions of the package `redis`, or `OSError`.

    Args:
        address: the address of the server.
    """

    def __init__(self, address: RedisAddress) -> None:
        self._connection = address.connection()
        self._connecting: asyncio.Future[None] | None = None
        self._transport: Any = None

    @property
    def connected(self) -> bool:
        """Return whether the connection is open."""
        return bool(self._connection.is_connected)

    @property
    def reached(self) -> str:
        """Numeric address of the server; valid after `open`."""
        return str(self._transport.get_extra_info("peername")[0])

    async def open(self) -> None:
        """Connect, and log in."""
        self._connecting = connecting = asyncio.ensure_future(self._connection.connect())
        # Retrieve the exception here, because a cancelled caller never does.
        connecting.add_done_callback(lambda done: done.cancelled() or done.exception())
        try:
            await asyncio.wait([connecting])
        finally:
            connecting.cancel()
        connecting.result()
        self._transport = self._connection._writer.transport  # the package has no public attribute for it

    async def send(self, *words: str | bytes | int) -> None:
        """Send a Redis command."""
        await self._connection.send_command(*words)

    async def receive(self) -> Any:
        """Return the next reply or published message."""
        return await self._connection.read_response()

    async def hang_up(self) -> None:
        """Close the connection at once, in any state."""
        if self._transport is not None:
            self._transport.abort()  # an orderly TLS shutdown would wait for the server
        with suppress(Exception):
            await self._connection.disconnect(nowait=True)

    async def aclose(self, user: asyncio.Task[None] | None) -> None:
        """Close the connection permanently, and cancel the task `user` that uses it.

        Wait first for an attempt to connect: if asyncio's TLS connect is cancelled at the moment of the connection, the
        socket stays open without an owner.
        """
        if self._connecting is not None:
            await asyncio.wait([self._connecting], timeout=_CLOSE_TIMEOUT)
        if user is not None:
            user.cancel()
            await asyncio.wait([user])
        await self.hang_up()


def pauses() -> Iterator[float]:
    """Yield the pauses in seconds between attempts to reach a server. They double, up to a limit."""
    pause = _FIRST_RETRY
    while True:
        yield pause
        pause = min(2 * pause, _LAST_RETRY)


def _import_redis() -> tuple[Any, Any]:
    try:
        import redis.asyncio
        import redis.exceptions
    except ImportError as error:
        raise BackendUnavailableError("RedisStore needs the package redis: pip install aiocoll[redis]") from error
    return redis.asyncio, redis.exceptions


def _parse(url: str) -> tuple[bool, dict[str, Any]]:
    """Return whether a URL requests TLS, and the arguments for `redis.asyncio.Connection`."""
    if not isinstance(url, str):
        raise TypeError(f"url must be str, got {type(url).__name__}")
    form = "redis://[[user]:password@]host[:port][/db], or rediss:// for TLS"
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
        database = parse_int(parts.path.removeprefix("/") or "0")
    except ValueError:
        raise ValueError(f"url must be {form}: the host, the port or the database number is invalid") from None
    if parts.scheme not in ("redis", "rediss") or not host or parts.query or parts.fragment or database < 0:
        raise ValueError(f"url must be {form}; write characters like / and @ in a password as %2F and %40")
    return parts.scheme == "rediss", {
        "host": host,
        "port": _PORT if port is None else port,
        "db": database,
        "username": unquote(parts.username) if parts.username else None,
        "password": unquote(parts.password) if parts.password else None,
    }


def _context(ca: str | None, certificate: str | None, key: str | None) -> ssl.SSLContext:
    if (certificate is None) != (key is None):
        raise ValueError("tls_certificate and tls_key belong together: pass both, or none")
    try:
        context = ssl.create_default_context(cafile=ca)
    except OSError as error:
        raise ValueError(f"tls_ca={ca!r}: cannot be used ({error.strerror or error})") from None
    if certificate is not None and key is not None:
        read_private(key, "tls_key", 0)
        try:
            context.load_cert_chain(certificate, key, password="")
        except OSError as error:
            raise ValueError(
                f"tls_certificate={certificate!r}, tls_key={key!r}: cannot be used ({error.strerror or error})"
            ) from None
    return context


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yield `error`, then the exceptions that caused it."""
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__ or cause.__context__
