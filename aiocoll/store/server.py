"""`StoreServer`: serves one `StoreCore` to TCP stores, from its own thread and event loop.

It has its own thread so that a rank whose loop is busy does not delay the others. It accepts all connections at once;
those that have not proven the key are in a bounded table (`unproven`) for at most `HANDSHAKE_TIMEOUT` seconds, and
nothing else depends on them, so clients without the key cannot keep a rank out.
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
from aiocoll.log import Repeats, logger
from aiocoll.runtime import Runtime
from aiocoll.security.handshake import HANDSHAKE_TIMEOUT, ConnKind, Identity, ServerHandshake, job_id
from aiocoll.security.names import WrongCertificateError, store_name
from aiocoll.security.patience import patient_timeout
from aiocoll.security.tls import binding, is_encrypted
from aiocoll.security.tls_trouble import in_words
from aiocoll.security.unproven import Unproven
from aiocoll.security.user_ca import Renewed, prepare
from aiocoll.sockets import is_ready
from aiocoll.store.address import check_peer, describe, is_unix, listen
from aiocoll.store.core import StoreCore
from aiocoll.store.session import Session

__all__ = ["StoreServer"]

#: Descriptors of an event loop: the selector's, and a pair of sockets by which other threads wake it.
_LOOP_FDS = 3
#: Connections accepted in one turn of the loop, so that few wait in the kernel's queue while others are answered.
_ACCEPTS = 16
#: The first byte of whoever speaks TLS.
_TLS = b"\x16"
#: Seconds before accepting again when the process is out of file descriptors or memory.
_ACCEPT_PAUSE = 0.1


class StoreServer:
    """The server of `TCPStore`, usable on its own by a launcher.

    Args:
        host: address of this machine, or ``unix:PATH``, ``unix:@NAME``. One that other machines can reach needs a key.
        port: 0 means a free one.
        key: the job key; None is the null key, for loopback and unix sockets only.
        job: name of the job; clients of another job are refused.
        world_size: expected number of clients, to size the handshake queue; None if not known.
        encryption: `"auto"` encrypts connections of other hosts, `"tls"` all but those of unix sockets, `"none"` none;
            the same for all clients.
        tls_ca: path of the certificates of a CA, with `tls_certificate` and `tls_key`: see `GroupOptions`. They are
            read again when they change.
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
        self._tls = Renewed(files, partial(prepare, files, job, store_name(job)))
        self._reads_files = files is not None
        self.host = host
        self.port = port
        self.core = StoreCore()
        self._key = key
        self._identity = Identity(job_id(job), 0, -1, 0, ConnKind.STORE)
        self._encryption = encryption
        self._unproven: Unproven[Session] = Unproven(world_size or 0, Session.abort)
        # Those that have no session yet, since they are not even encrypted.
        self._greeting: Unproven[asyncio.Task[None]] = Unproven(world_size or 0, asyncio.Task.cancel)
        self._members = StoreCore()
        self._sessions: set[Session] = set()
        self._changed = asyncio.Event()
        self._stop = asyncio.Event()
        self._running: Future[None] = Future()
        self._finished: Future[None] = Future()
        # A cancelled aclose() must not cancel what close() waits for.
        self._finished.set_running_or_notify_cancel()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._closing = False
        self._repeats = Repeats()

    def start(self) -> tuple[str, int]:
        """Bind, listen and start serving; may be called once, from any thread.

        Returns:
            Host and port to give to `TCPStore`; the port is the real one.

        Raises:
            AuthenticationError: other machines can reach the address and there is no key.
            StoreUnavailableError: the address is not available.
            ValueError: the files of the user's CA cannot be used.
        """
        if self._thread is not None:
            raise RuntimeError("this StoreServer was started before: make a new one")
        if self._reads_files and not is_unix(self.host) and is_encrypted(self._encryption, self.host):
            self._tls.get()
        sock = listen(self.host, self.port, self._key)
        if not is_unix(self.host):
            self.port = sock.getsockname()[1]
            if self._key is None:
                logger.warning(
                    "store on %s has no job key: every user of this machine can reach it; "
                    "`aiocoll run`, job_key= or AIOCOLL_JOB_KEY give it one",
                    describe(self.host, self.port),
                )
        try:
            self._loop = _new_loop()
        except OSError as exc:
            sock.close()
            raise StoreUnavailableError(
                f"the store on {describe(self.host, self.port)} cannot start: {exc.strerror}; raise ulimit -n"
            ) from exc
        # A daemon, so that a program that forgets to close its store can still exit.
        self._thread = threading.Thread(target=self._run, args=(sock,), name="aiocoll-store", daemon=True)
        self._thread.start()
        self._running.result()
        return self.host, self.port

    def put(self, key: str, value: bytes) -> None:
        """Set a key in the store, from any thread; nothing once this is closed."""
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self.core.apply, "set", (key, value))

    def has(self, key: str) -> bool:
        """Return whether there is a key in the store, from any thread."""
        found: bool = self.core.apply("check", ([key],))
        return found

    def close(self) -> None:
        """Stop serving and wait until the thread is gone; idempotent, from any thread."""
        if self._request_stop() and self._thread is not None:
            self._thread.join()

    async def aclose(self) -> None:
        """Do what `close` does without blocking the loop."""
        if self._request_stop() and self._thread is not None:
            await asyncio.wrap_future(self._finished)
            self._thread.join()

    def forget(self, kept: str | None = None) -> None:
        """Begin anew: end all connections, remove all keys and queues, but those whose names begin with `kept`.

        From any other thread, while it serves. Nothing that the clients of before have sent arrives later.
        """
        asyncio.run_coroutine_threadsafe(self._forget(kept), self._loop).result()

    def session_opened(self, session: Session) -> None:
        """Add a connection that has not proven the key yet."""
        self._unproven.admit(session)
        self._sessions.add(session)

    def session_proven(self, session: Session) -> None:
        """Remove a connection from the unproven ones."""
        self._unproven.release(session)

    def session_closed(self, session: Session, reason: Exception | None) -> None:
        """Remove a connection that has ended."""
        if session in self._unproven:
            self._log_refusal(reason or "it sent nothing")
            self._unproven.release(session)
        self._sessions.discard(session)
        self._changed.set()

    def joined(self) -> StoreCore:
        """Count a client that opens its store; return the keys "1", "2", ... of those that have."""
        self._members.apply("set", (str(self._members.apply("num_keys", ("",)) + 1), b""))
        return self._members

    def join_abandoned(self) -> None:
        """Uncount a client that gave up before enough had come."""
        self._members.apply("delete_key", (str(self._members.apply("num_keys", ("",))),))

    def _request_stop(self) -> bool:
        """Return whether there is a thread to wait for."""
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
        greeting = list(self._greeting)
        for task in greeting:
            task.cancel()
        if greeting:
            await asyncio.wait(greeting)
        for session in list(self._sessions):
            session.abort()
        while self._sessions:
            self._changed.clear()
            await self._changed.wait()
        # After connection_lost each transport closes its socket in the same iteration of the loop.
        await asyncio.sleep(0)

    async def _accept(self, sock: socket.socket) -> None:
        while True:
            await self._readable(sock)
            try:
                for _ in range(_ACCEPTS):
                    self._greet(sock.accept()[0])
            except (BlockingIOError, ConnectionAbortedError):
                continue
            except OSError as exc:
                self._warn("cannot accept connections", f"{exc.strerror}; trying again every {_ACCEPT_PAUSE:g} s")
                await self.runtime.sleep(_ACCEPT_PAUSE)

    def _refused(self, connection: socket.socket, why: Exception | str) -> None:
        self._log_refusal(why)
        connection.close()

    def _log_refusal(self, why: Exception | str) -> None:
        if isinstance(why, WrongCertificateError):  # it may be a rank that waits in vain
            self._warn("refused a connection", str(why))
        else:
            logger.debug("store on %s refused a connection: %s", describe(self.host, self.port), why)

    def _warn(self, what: str, why: str) -> None:
        if (repeated := self._repeats.admit(what, self.runtime.time())) is not None:
            logger.warning("store on %s %s: %s%s", describe(self.host, self.port), what, why, repeated)

    async def _readable(self, sock: socket.socket) -> None:
        """Wait for a connection or a byte; unlike in `sock_accept`, none is lost when this is cancelled."""
        readable = asyncio.Event()
        self._loop.add_reader(sock, readable.set)
        try:
            await readable.wait()
        finally:
            self._loop.remove_reader(sock)

    def _greet(self, connection: socket.socket) -> None:
        try:
            check_peer(connection)
            connection.setblocking(False)
            encrypted = False
            if connection.family != getattr(socket, "AF_UNIX", None):
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                encrypted = is_encrypted(self._encryption, connection.getpeername()[0])
        except (AuthenticationError, OSError) as exc:
            self._refused(connection, exc)
            return
        task = self.runtime.create_task(self._start_session(connection, encrypted), "aiocoll-store-greet")
        self._greeting.admit(task)
        task.add_done_callback(partial(self._greeted, connection))

    def _greeted(self, connection: socket.socket, task: asyncio.Task[None]) -> None:
        self._greeting.release(task)
        error = None if task.cancelled() else task.exception()
        if isinstance(error, Exception) and not isinstance(error, OSError):
            self._warn("cannot accept connections", str(error))
        if task.cancelled():
            self._refused(connection, "others came after it")
        elif isinstance(error, Exception):
            self._refused(connection, error if str(error) else "it was silent")

    async def _start_session(self, connection: socket.socket, encrypted: bool) -> None:
        async with patient_timeout(self.runtime, HANDSHAKE_TIMEOUT, partial(is_ready, connection.fileno())):
            tls = self._tls.get() if encrypted else None  # once: threads that make one at the same time get several
            bound = b"" if tls is None else binding(tls.certificate)
            handshake = ServerHandshake(self._identity, self._key, self.runtime.random_bytes, bound)
            session = Session(self, handshake, None if tls is None else tls.job)
            if tls is None:
                await self._loop.connect_accepted_socket(lambda: session, connection)
                return
            await self._readable(connection)
            if connection.recv(1, socket.MSG_PEEK) != _TLS:  # TLS takes memory and time
                raise ConnectionResetError("it does not speak TLS")
            who, *_ = connection.getpeername()
            try:
                await self._loop.connect_accepted_socket(lambda: session, connection, ssl=tls.server)
            except ssl.SSLError as error:
                if trouble := in_words(error, tls, who):
                    raise trouble from error
                raise

    def _unlink(self) -> None:
        name = self.host.removeprefix("unix:")
        if is_unix(self.host) and not name.startswith("@"):
            with suppress(FileNotFoundError):
                os.unlink(name)


def _new_loop() -> asyncio.AbstractEventLoop:
    """Return a loop that can watch sockets, on Windows too, whatever the program's own loop is.

    Raises:
        OSError: there are too few descriptors; a loop that fails by itself would complain on stderr.
    """
    with ExitStack() as stack:
        for _ in range(_LOOP_FDS):
            stack.enter_context(socket.socket())
    return asyncio.SelectorEventLoop()
