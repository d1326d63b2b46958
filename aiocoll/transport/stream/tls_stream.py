"""Byte stream on a socket that TLS 1.3 encrypts from the first byte."""

from __future__ import annotations

import asyncio
import errno
import socket
import ssl
from collections.abc import Callable, Iterable, Iterator
from functools import partial

from aiocoll.credentials import tls_files
from aiocoll.security.names import certificate_names, check_names, rank_name
from aiocoll.security.tls import Tls, TlsOptions, binding
from aiocoll.security.tls_trouble import explain_tls_error
from aiocoll.security.user_ca import prepare
from aiocoll.transport.byte_stream import Bytes, ByteStream, resolve
from aiocoll.transport.stream.plain_stream import SocketStream, open_plain

__all__ = ["OpenEncrypted", "TlsStream", "open_tls"]

#: Maximum number of bytes in a TLS record. OpenSSL keeps an encrypted record until the socket accepts it. So after a
#: `BlockingIOError`, the next call must pass at least the same bytes again.
_RECORD = 1 << 14
_WAIT = (ssl.SSLWantReadError, ssl.SSLWantWriteError)


class TlsStream(SocketStream):
    """A byte stream encrypted by TLS; see `aiocoll.transport.byte_stream.ByteStream`.

    Args:
        loop: the event loop that watches the socket.
        sock: the socket after the TLS handshake; `close` closes it.
        tls: the TLS contexts and certificates of this rank.
        address: the address of the other end, for messages.
        dialled: whether this end has opened the connection.
    """

    __slots__ = ("_address", "_held", "_is_scheduled", "_readable", "_ssl", "_tls", "bound")

    def __init__(
        self, loop: asyncio.AbstractEventLoop, sock: ssl.SSLSocket, tls: Tls, address: str, *, dialled: bool
    ) -> None:
        super().__init__(loop, sock)
        self.bound = binding(sock.getpeercert(binary_form=True) if dialled else tls.certificate)
        self._ssl = sock
        self._tls = tls
        self._address = address
        self._readable: Callable[[], object] | None = None
        self._is_scheduled = False
        # Number of plain bytes in the encrypted record that the socket has not accepted yet.
        self._held = 0

    def check_rank(self, rank: int) -> None:
        """If the user's own CA issues certificates, check that the other end's certificate names `rank`."""
        if self._tls.job is not None:
            shown = certificate_names(self._ssl.getpeercert() or {})
            check_names(shown, rank_name(self._tls.job, rank), f"the certificate of {self._address}")

    def send(self, data: Bytes) -> int:
        """Encrypt and send some bytes; return the number of bytes that were accepted."""
        rest = memoryview(data)
        sent, size = 0, len(rest)
        if size < self._held:
            raise BlockingIOError  # the caller passes fewer bytes than in the previous call
        while sent < size:
            record = rest[sent : sent + _RECORD]
            try:
                self._ssl.send(record)
            except _WAIT:
                self._held = len(record)
                if sent:
                    return sent
                raise BlockingIOError from None
            except ssl.SSLError as error:
                raise self._connection_error(error) from error
            self._held = 0
            sent += len(record)
        return sent

    def send_parts(self, parts: Iterable[Bytes]) -> int:
        """Encrypt and send some bytes of several buffers, as `send` does. Small buffers share a TLS record."""
        sent = 0
        for piece in _pieces(parts):
            try:
                taken = self.send(piece)
            except BlockingIOError:
                if sent:
                    return sent
                raise
            sent += taken
            if taken < len(piece):
                return sent
        return sent

    def receive_into(self, space: memoryview) -> int:
        """Receive and decrypt some bytes; return how many, or 0 if the other end has ended its sending side."""
        got = 0
        while got < len(space):
            try:
                more = self._ssl.recv_into(space[got:])
            except _WAIT:
                if got:
                    return got
                raise BlockingIOError from None
            except ssl.SSLError as error:
                raise self._connection_error(error) from error
            if not more:
                return got
            got += more
        self._schedule_read()
        return got

    def start_reading(self, readable: Callable[[], object]) -> None:
        """Call `readable` whenever there is data to receive."""
        self._readable = readable
        super().start_reading(self._read)
        self._schedule_read()

    def stop_reading(self) -> None:
        """Stop calling `readable`."""
        self._readable = None
        super().stop_reading()

    def shutdown(self) -> None:
        """Shut down the socket's sending side, because Python's TLS cannot end only one direction."""
        socket.socket.shutdown(self._ssl, socket.SHUT_WR)

    def _read(self) -> None:
        if self._readable is not None:
            self._is_scheduled = True  # `_readable` receives data first, then the check for remaining bytes runs once
            try:
                self._readable()
            finally:
                self._is_scheduled = False
            self._schedule_read()

    def _connection_error(self, error: ssl.SSLError) -> ConnectionError:
        return _connection_error(error, self._tls, self._address)

    def _schedule_read(self) -> None:
        """Schedule another read if decrypted bytes are left, which the event loop's selector cannot report."""
        if self._readable is not None and not self._is_scheduled and self._ssl.pending():
            self._is_scheduled = True
            self._loop.call_soon(self._read_again)

    def _read_again(self) -> None:
        self._is_scheduled = False
        self._read()


def _connection_error(error: ssl.SSLError, tls: Tls, address: str) -> ConnectionError:
    reset = ConnectionResetError(errno.ECONNRESET, f"TLS: {error.reason or error}")
    return explain_tls_error(error, tls, address) or reset


def _pieces(parts: Iterable[Bytes]) -> Iterator[Bytes]:
    """Yield the bytes of `parts` in pieces that fill whole TLS records, except the last piece."""
    joined = bytearray()
    for part in parts:
        rest = memoryview(part)
        if joined or len(rest) < _RECORD:
            head = rest[: _RECORD - len(joined)]
            joined += head
            if len(joined) < _RECORD:
                continue
            yield joined
            joined = bytearray()
            rest = rest[len(head) :]
        if whole := len(rest) - len(rest) % _RECORD:
            yield rest[:whole]
        joined += rest[whole:]
    if joined:
        yield joined


class OpenEncrypted:
    """A function that opens byte streams: without encryption until `encrypt` is called. See `OpenStream`.

    Args:
        options: TLS options of the group.
        rank: this rank.

    Attributes:
        tls: the TLS contexts for TCP connections; None if they are not encrypted.
    """

    def __init__(self, options: TlsOptions, rank: int) -> None:
        files = tls_files(options.tls_ca, options.tls_certificate, options.tls_key)
        job = options.job_id or ""
        self._prepare = partial(prepare, files, job, rank_name(job, rank))
        self.tls: Tls | None = None

    async def encrypt(self, encrypted: bool) -> None:
        """Set whether TCP connections opened from now on are encrypted.

        Raises:
            ValueError: the certificate files of the user cannot be used.
            BackendUnavailableError: there are no such files, and no certificate can be made.
        """
        self.tls = await asyncio.to_thread(self._prepare) if encrypted else None

    async def renew(self) -> None:
        """If connections are encrypted, read the certificate files again for later connections."""
        if self.tls is not None:
            await self.encrypt(True)

    async def __call__(self, loop: asyncio.AbstractEventLoop, sock: socket.socket, *, dialled: bool) -> ByteStream:
        """Return a byte stream on a connected socket."""
        if self.tls is None or sock.family == getattr(socket, "AF_UNIX", None):
            return await open_plain(loop, sock, dialled=dialled)
        return await open_tls(self.tls, loop, sock, dialled=dialled)


async def open_tls(tls: Tls, loop: asyncio.AbstractEventLoop, sock: socket.socket, *, dialled: bool) -> TlsStream:
    """Return a byte stream encrypted by TLS; see `aiocoll.transport.byte_stream.OpenStream`.

    Raises:
        ConnectionResetError: the other end does not speak TLS 1.3, or ended the connection.
        WrongCertificateError: one end rejects the certificate of the other.
    """
    context = tls.client if dialled else tls.server
    secured = context.wrap_socket(sock, server_side=not dialled, do_handshake_on_connect=False)
    try:
        name = secured.getpeername()
        address = name[0] if isinstance(name, tuple) else "the other end"
        try:
            await _do_handshake(loop, secured)
        except ssl.SSLError as error:
            raise _connection_error(error, tls, address) from error
        return TlsStream(loop, secured, tls, address, dialled=dialled)
    except BaseException:
        secured.close()
        raise


async def _do_handshake(loop: asyncio.AbstractEventLoop, sock: ssl.SSLSocket) -> None:
    while True:
        ready = loop.create_future()
        try:
            sock.do_handshake()
            return
        except ssl.SSLWantReadError:
            watch, forget = loop.add_reader, loop.remove_reader
        except ssl.SSLWantWriteError:
            watch, forget = loop.add_writer, loop.remove_writer
        watch(sock.fileno(), resolve, ready)
        try:
            await ready
        finally:
            forget(sock.fileno())
