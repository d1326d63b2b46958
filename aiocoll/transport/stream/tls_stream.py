"""A byte stream with TLS 1.3 on a socket, from its first byte to its last."""

from __future__ import annotations

import asyncio
import errno
import socket
import ssl
from collections.abc import Callable, Iterable, Iterator
from functools import partial

from aiocoll.credentials import tls_files
from aiocoll.security.names import check_names, names_in, rank_name
from aiocoll.security.tls import Tls, TlsOptions, binding
from aiocoll.security.tls_trouble import in_words
from aiocoll.security.user_ca import prepare
from aiocoll.transport.byte_stream import Bytes, ByteStream, resolve
from aiocoll.transport.stream.plain_stream import SocketStream, open_plain

__all__ = ["OpenEncrypted", "TlsStream", "open_tls"]

#: Bytes of the largest record. One that was made leaves before any other, so what is sent after a `BlockingIOError`
#: must begin with the same bytes, and as many of them in one piece.
_RECORD = 1 << 14
_WAIT = (ssl.SSLWantReadError, ssl.SSLWantWriteError)


class TlsStream(SocketStream):
    """See `aiocoll.transport.byte_stream.ByteStream`.

    Args:
        loop: whose readers and writers there will be.
        sock: after its handshake; closed by `close`.
        tls: what secures it.
        who: the other end, for messages.
        dialled: this end has opened the connection.
    """

    __slots__ = ("_held", "_readable", "_soon", "_ssl", "_tls", "_who", "bound")

    def __init__(
        self, loop: asyncio.AbstractEventLoop, sock: ssl.SSLSocket, tls: Tls, who: str, *, dialled: bool
    ) -> None:
        super().__init__(loop, sock)
        self.bound = binding(sock.getpeercert(binary_form=True) if dialled else tls.certificate)
        self._ssl = sock
        self._tls = tls
        self._who = who
        self._readable: Callable[[], object] | None = None
        self._soon = False
        # Bytes of the record that was made and is not taken yet.
        self._held = 0

    def check_rank(self, rank: int) -> None:
        """Compare the certificate that was shown with the rank at the other end, if it is one of the user's CA."""
        if self._tls.job is not None:
            shown = names_in(self._ssl.getpeercert() or {})
            check_names(shown, rank_name(self._tls.job, rank), f"the certificate of {self._who}")

    def send(self, data: Bytes) -> int:
        """Encrypt and send some bytes; return how many were taken."""
        rest = memoryview(data)
        sent, size = 0, len(rest)
        if size < self._held:
            raise BlockingIOError  # not what was offered before
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
                raise self._broken(error) from error
            self._held = 0
            sent += len(record)
        return sent

    def send_parts(self, parts: Iterable[Bytes]) -> int:
        """As `send`, for several buffers; small ones share a record."""
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
        """Receive and decrypt some bytes; return how many, 0 if the other end sends no more."""
        got = 0
        while got < len(space):
            try:
                more = self._ssl.recv_into(space[got:])
            except _WAIT:
                if got:
                    return got
                raise BlockingIOError from None
            except ssl.SSLError as error:
                raise self._broken(error) from error
            if not more:
                return got
            got += more
        self._look_again()
        return got

    def start_reading(self, readable: Callable[[], object]) -> None:
        """Have `readable` called while there is something to receive."""
        self._readable = readable
        super().start_reading(self._read)
        self._look_again()

    def stop_reading(self) -> None:
        """Call `readable` no more."""
        self._readable = None
        super().stop_reading()

    def shutdown(self) -> None:
        """Shut down the sending side of the socket: TLS of this Python cannot end one side and read the other."""
        socket.socket.shutdown(self._ssl, socket.SHUT_WR)

    def _read(self) -> None:
        if self._readable is not None:
            self._soon = True  # what is left is looked for once, when all was received that is to be
            try:
                self._readable()
            finally:
                self._soon = False
            self._look_again()

    def _broken(self, error: ssl.SSLError) -> ConnectionError:
        return _broken(error, self._tls, self._who)

    def _look_again(self) -> None:
        """Have what was decrypted and not received looked for: no poller tells of it."""
        if self._readable is not None and not self._soon and self._ssl.pending():
            self._soon = True
            self._loop.call_soon(self._again)

    def _again(self) -> None:
        self._soon = False
        self._read()


def _broken(error: ssl.SSLError, tls: Tls, who: str) -> ConnectionError:
    reset = ConnectionResetError(errno.ECONNRESET, f"TLS: {error.reason or error}")
    return in_words(error, tls, who) or reset


def _pieces(parts: Iterable[Bytes]) -> Iterator[Bytes]:
    """Yield the bytes of `parts` in pieces that fill whole records, but for the last."""
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
    """Opens the streams of a rank, see `aiocoll.transport.byte_stream.OpenStream`: plain ones, until TCP is encrypted.

    Args:
        options: of its group.
        rank: this rank.

    Attributes:
        tls: what encrypts connections over TCP; None: nothing.
    """

    def __init__(self, options: TlsOptions, rank: int) -> None:
        files = tls_files(options.tls_ca, options.tls_certificate, options.tls_key)
        job = options.job_id or ""
        self._prepare = partial(prepare, files, job, rank_name(job, rank))
        self.tls: Tls | None = None

    async def encrypt(self, encrypted: bool) -> None:
        """Encrypt connections over TCP from now on, or do not.

        Raises:
            ValueError: the files of the user's CA cannot be used.
            BackendUnavailableError: there are none, and no certificate can be made.
        """
        self.tls = await asyncio.to_thread(self._prepare) if encrypted else None

    async def renew(self) -> None:
        """Read the files again for connections to come, if they are encrypted."""
        if self.tls is not None:
            await self.encrypt(True)

    async def __call__(self, loop: asyncio.AbstractEventLoop, sock: socket.socket, *, dialled: bool) -> ByteStream:
        """Return a stream on a connected socket."""
        if self.tls is None or sock.family == getattr(socket, "AF_UNIX", None):
            return await open_plain(loop, sock, dialled=dialled)
        return await open_tls(self.tls, loop, sock, dialled=dialled)


async def open_tls(tls: Tls, loop: asyncio.AbstractEventLoop, sock: socket.socket, *, dialled: bool) -> TlsStream:
    """Return an encrypted stream; see `aiocoll.transport.byte_stream.OpenStream`.

    Raises:
        ConnectionResetError: the other end does not speak TLS 1.3, or ended the connection.
        WrongCertificateError: one end does not take the certificate of the other.
    """
    context = tls.client if dialled else tls.server
    secured = context.wrap_socket(sock, server_side=not dialled, do_handshake_on_connect=False)
    try:
        name = secured.getpeername()
        who = name[0] if isinstance(name, tuple) else "the other end"
        try:
            await _shake_hands(loop, secured)
        except ssl.SSLError as error:
            raise _broken(error, tls, who) from error
        return TlsStream(loop, secured, tls, who, dialled=dialled)
    except BaseException:
        secured.close()
        raise


async def _shake_hands(loop: asyncio.AbstractEventLoop, sock: ssl.SSLSocket) -> None:
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
