"""`StoreServer`: the server of TCP stores, with its own thread and event loop.

The separate thread keeps a busy event loop of a rank from delaying other ranks. The server accepts all connections at
once. A bounded table (`unproven`) holds connections that have not proven the key, for at most `HANDSHAKE_TIMEOUT`
seconds. Other connections do not depend on it, so clients without the key cannot keep a rank out.
"""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
import threading
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from functools import partial
from typing import Literal

from aiocoll.credentials import tls_files
from aiocoll.errors import AuthenticationError, StoreUnavailableError
from aiocoll.log import RepeatLimiter, logger
from aiocoll.runtime import Runtime
from aiocoll.security.handshake import HANDSHAKE_TIMEOUT, ConnKind, Identity, ServerHandshake, job_id
from aiocoll.security.loop_timeout import loop_timeout
from aiocoll.security.names import WrongCertificateError, store_name
from aiocoll.security.tls import binding, is_encrypted
from aiocoll.security.tls_trouble import explain_tls_error
from aiocoll.security.unproven_connections import UnprovenConnections
from aiocoll.security.user_ca import RenewedContexts, prepare
from aiocoll.sockets import is_ready
from aiocoll.store.address import check_peer, describe, is_unix, listen
from aiocoll.store.core import StoreCore
from aiocoll.store.session import Session

__all__ = ["StoreServer"]

#: Number of descriptors that an event loop opens: its selector, and a socket pair by which other threads wake it.
_LOOP_FDS = 3
#: Maximum connections to accept in one loop iteration, so that the kernel's queue stays short during other work.
_ACCEPTS = 16
#: The first byte that a TLS client sends.
_TLS = b"\x16"
#: Seconds to wait before the next accept when the process is out of file descriptors or memory.
_ACCEPT_PAUSE = 0.1


class StoreServer:
    """The server to which `TCPStore` clients connect. A launcher can also run it without a client.

    Args:
        host: address of this machine, or ``unix:PATH``, ``unix:@NAME``. Addresses that other machines can reach need a
            key.
        port: port to listen on; 0 means a free port.
        key: the job key; None is the null key, only for loopback and unix sockets.
        job: name of the job; clients of another job are refused.
        world_size: expected number of clients, for the size of the table of unproven connections; None if unknown.
        encryption: `"auto"` encrypts connections of other hosts, `"tls"` all connections except unix sockets, `"none"`
            none; the same for all clients.
        tls_ca: path of the certificates of a CA, with `tls_certificate` and `tls_key`: see `GroupOptions`. Changed
            files are read again.
        tls_certificate: path of the certificate of this process, which names `aiocoll://JOB/store`.
        tls_key: path of its private key.
    """

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        key: bytes | None = None,
        job: str = "",
        world_size: int | None = None,
        encryption: Literal["auto", "none", "tls"] = "auto",
        tls_ca: str | None = None,
        tls_certificate: str | None = None,
        tls_key: str | None = None,
    ) -> None:
        files = tls_files(tls_ca, tls_certificate, tls_key)
        self._tls = RenewedContexts(files, partial(prepare, files, job, store_name(job)))
        self._reads_files = files is not None
        self.host = host
        self.port = port
        self.core = StoreCore()
        self._key = key
        self._identity = Identity(job_id(job), 0, -1, 0, ConnKind.STORE)
        self._encryption = encryption
        self._unproven: UnprovenConnections[Session] = UnprovenConnections(world_size or 0, Session.abort)
        # Accepted connections that have no session yet, because their encryption has not started.
        self._unencrypted: UnprovenConnections[asyncio.Task[None]] = UnprovenConnections(
            world_size or 0, asyncio.Task.cancel
        )
        self._members = StoreCore()
        self._sessions: set[Session] = set()
        self._changed = asyncio.Event()
        self._stop = asyncio.Event()
        self._running: Future[None] = Future()
        self._finished: Future[None] = Future()
        # A cancelled aclose() must not cancel the future that close() waits for.
        self._finished.set_running_or_notify_cancel()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._closing = False
        self._repeats = RepeatLimiter()

    def start(self) -> tuple[str, int]:
        """Bind, listen and start serving. Call this once, from any thread.

        Returns:
            Host and actual port, to pass to `TCPStore`.

        Raises:
            AuthenticationError: other machines can reach the address, and there is no key.
            StoreUnavailableError: the address is not available.
            ValueError: the files of the user's CA cannot be used.
        """
        if self._thread is not None:
            raise RuntimeError("this StoreServer has already been started: make a new one")
        if self._reads_files and not is_unix(self.host) and is_encrypted(self._encryption, self.host):
            self._tls.get()
        sock = listen(self.host, self.port, self._key)
        if not is_unix(self.host):
            self.port = sock.getsockname()[1]
            if self._key is None:
                logger.warning(
                    "store on %s has no job key, so every user of this machine can use it; "
                    "use `aiocoll run`, job_key= or AIOCOLL_JOB_KEY to set one",
                    describe(self.host, self.port),
                )
        try:
            self._loop = _new_loop()
        except OSError as exc:
            sock.close()
            raise StoreUnavailableError(
                f"the store on {describe(self.host, self.port)} cannot start: {exc.strerror}; raise ulimit -n"
            ) from exc
        # A daemon thread, so that a program that does not close its store can exit.
        self._thread = threading.Thread(target=self._run, args=(sock,), name="aiocoll-store", daemon=True)
        self._thread.start()
        self._running.result()
        return self.host, self.port

    def put(self, key: str, value: bytes) -> None:
        """Set a key in the store; do nothing if the server is closed. Any thread may call this."""
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self.core.apply, "set", (key, value))

    def has(self, key: str) -> bool:
        """Return whether the store has a key. Any thread may call this."""
        found: bool = self.core.apply("check", ([key],))
        return found

    def close(self) -> None:
        """Stop the server and wait until its thread has ended. Idempotent. Any thread may call this."""
        if self._request_stop() and self._thread is not None:
            self._thread.join()

    async def aclose(self) -> None:
        """Stop the server as `close` does, without blocking the caller's event loop."""
        if self._request_stop() and self._thread is not None:
            await asyncio.wrap_future(self._finished)
            self._thread.join()

    def forget(self, kept: str | None = None) -> None:
        """Close all connections, and remove all keys and queues except those whose names begin with `kept`.

        Call this from another thread, while the server runs. Later requests of the ended connections are not received.
        """
        asyncio.run_coroutine_threadsafe(self._forget(kept), self._loop).result()

    def session_opened(self, session: Session) -> None:
        """Add a connection whose client has not proven the key yet."""
        self._unproven.admit(session)
        self._sessions.add(session)

    def session_proven(self, session: Session) -> None:
        """Remove a connection from the table of unproven connections."""
        self._unproven.release(session)

    def session_closed(self, session: Session, reason: Exception | None) -> None:
        """Remove a closed connection, and log the reason if its client had not proven the key."""
        if session in self._unproven:
            self._log_refusal(reason or "it sent nothing")
            self._unproven.release(session)
        self._sessions.discard(session)
        self._changed.set()

    def joined(self) -> StoreCore:
        """Count one more joined client; return a `StoreCore` with one key per client: "1", "2", ..."""
        self._members.apply("set", (str(self._members.apply("num_keys", ("",)) + 1), b""))
        return self._members

    def join_abandoned(self) -> None:
        """Reduce the count of joined clients by one, because a client has stopped waiting for the others."""
        self._members.apply("delete_key", (str(self._members.apply("num_keys", ("",))),))

    def _request_stop(self) -> bool:
        """Request the end of the server's thread; return whether there is a thread to wait for."""
        with self._lock:
            if self._thread is None:
                return False
            if not self._closing:
                self._closing = True
                with suppress(RuntimeError):  # the loop is closed
                    self._loop.call_soon_threadsafe(self._stop.set)
            return True

    def _run(self, sock: socket.socket) -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
                runner.run(self._serve(sock))
        except BaseException as exc:
            if self._running.done():
                raise
            self._running.set_exception(exc)
        finally:
            sock.close()
            self._finished.set_result(None)

    async def _forget(self, kept: str | None) -> None:
        for session in list(self._sessions):
            session.abort()
        self.core.forget(kept)
        self._members = StoreCore()

    async def _serve(self, sock: socket.socket) -> None:
        self.runtime = Runtime(self._loop)
        self._running.set_result(None)
        accepting = self.runtime.create_task(self._accept(sock), "aiocoll-store-accept")
        await self._stop.wait()
        accepting.cancel()
        await asyncio.wait([accepting])
        self._unlink()
        unencrypted = list(self._unencrypted)
        for task in unencrypted:
            task.cancel()
        if unencrypted:
            await asyncio.wait(unencrypted)
        for session in list(self._sessions):
            session.abort()
        while self._sessions:
            self._changed.clear()
            await self._changed.wait()
        # Each transport closes its socket in the same loop iteration, after connection_lost.
        await asyncio.sleep(0)

    async def _accept(self, sock: socket.socket) -> None:
        while True:
            await self._wait_readable(sock)
            try:
                for _ in range(_ACCEPTS):
                    self._accept_connection(sock.accept()[0])
            except (BlockingIOError, ConnectionAbortedError):
                continue
            except OSError as exc:
                self._warn("cannot accept connections", f"{exc.strerror}; retrying every {_ACCEPT_PAUSE:g} s")
                await self.runtime.sleep(_ACCEPT_PAUSE)

    def _refuse(self, connection: socket.socket, why: Exception | str) -> None:
        self._log_refusal(why)
        connection.close()

    def _log_refusal(self, why: Exception | str) -> None:
        if isinstance(why, WrongCertificateError):  # the client may be a rank of this job
            self._warn("refused a connection", str(why))
        else:
            logger.debug("store on %s refused a connection: %s", describe(self.host, self.port), why)

    def _warn(self, what: str, why: str) -> None:
        if (repeated := self._repeats.admit(what, self.runtime.time())) is not None:
            logger.warning("store on %s %s: %s%s", describe(self.host, self.port), what, why, repeated)

    async def _wait_readable(self, sock: socket.socket) -> None:
        """Wait until `sock` has a connection or data. Unlike with `sock_accept`, a cancellation loses no connection."""
        readable = asyncio.Event()
        self._loop.add_reader(sock, readable.set)
        try:
            await readable.wait()
        finally:
            self._loop.remove_reader(sock)

    def _accept_connection(self, connection: socket.socket) -> None:
        try:
            check_peer(connection)
            connection.setblocking(False)
            encrypted = False
            if connection.family != getattr(socket, "AF_UNIX", None):
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                encrypted = is_encrypted(self._encryption, connection.getpeername()[0])
        except (AuthenticationError, OSError) as exc:
            self._refuse(connection, exc)
            return
        task = self.runtime.create_task(self._start_session(connection, encrypted), "aiocoll-store-greet")
        self._unencrypted.admit(task)
        task.add_done_callback(partial(self._on_session_started, connection))

    def _on_session_started(self, connection: socket.socket, task: asyncio.Task[None]) -> None:
        self._unencrypted.release(task)
        error = None if task.cancelled() else task.exception()
        if isinstance(error, Exception) and not isinstance(error, OSError):
            self._warn("cannot accept connections", str(error))
        if task.cancelled():
            self._refuse(connection, "too many later connections have not proven the key either")
        elif isinstance(error, Exception):
            self._refuse(connection, error if str(error) else "it sent nothing")

    async def _start_session(self, connection: socket.socket, encrypted: bool) -> None:
        async with loop_timeout(self.runtime, HANDSHAKE_TIMEOUT, partial(is_ready, connection.fileno())):
            # Call `get` only once, because a second call may return renewed certificates.
            tls = self._tls.get() if encrypted else None
            bound = b"" if tls is None else binding(tls.certificate)
            handshake = ServerHandshake(self._identity, self._key, self.runtime.random_bytes, bound)
            session = Session(self, handshake, None if tls is None else tls.job)
            if tls is None:
                await self._loop.connect_accepted_socket(lambda: session, connection)
                return
            await self._wait_readable(connection)
            if connection.recv(1, socket.MSG_PEEK) != _TLS:  # check first: TLS takes memory and time
                raise ConnectionResetError("the client does not use TLS")
            address, *_ = connection.getpeername()
            try:
                await self._loop.connect_accepted_socket(lambda: session, connection, ssl=tls.server)
            except ssl.SSLError as error:
                if trouble := explain_tls_error(error, tls, address):
                    raise trouble from error
                raise

    def _unlink(self) -> None:
        name = self.host.removeprefix("unix:")
        if is_unix(self.host) and not name.startswith("@"):
            with suppress(FileNotFoundError):
                os.unlink(name)


def _new_loop() -> asyncio.AbstractEventLoop:
    """Return an event loop that can watch sockets on every platform.

    Raises:
        OSError: the process has too few free descriptors. A loop would print this error on stderr, so check first.
    """
    with ExitStack() as stack:
        for _ in range(_LOOP_FDS):
            stack.enter_context(socket.socket())
    return asyncio.SelectorEventLoop()
