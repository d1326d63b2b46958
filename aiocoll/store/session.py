"""`Session`: the server's end of one store connection."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol

from aiocoll.errors import ProtocolError, StoreError
from aiocoll.runtime import Runtime
from aiocoll.security.handshake import (
    CONFIRM_SIZE,
    HANDSHAKE_TIMEOUT,
    HELLO_SIZE,
    PROOF_SIZE,
    Peer,
    ServerHandshake,
    Status,
)
from aiocoll.security.loop_timeout import LoopTimeout
from aiocoll.security.names import WrongCertificateError, certificate_names, check_names, part_name
from aiocoll.sockets import is_ready
from aiocoll.store.commands import COMMANDS, LEFT, LEFT_SUFFIX, SERVER_COMMANDS, WAITS, check_request
from aiocoll.store.core import PendingWait, StoreCore
from aiocoll.store.frames import MAX_FRAME, FrameProtocol, pack
from aiocoll.store.replies import ReplyStatus

__all__ = ["Session", "SessionOwner"]

#: Maximum number of concurrent waits of one connection.
_MAX_WAITS = 1024
#: Bytes of unread replies after which a client is disconnected. The server stops reading its requests much earlier.
_MAX_UNSENT = 4 * MAX_FRAME


class SessionOwner(Protocol):
    """The methods of a server that its sessions call."""

    core: StoreCore
    runtime: Runtime

    def session_opened(self, session: Session) -> None:
        """Add a connection whose client has not proven the key yet."""

    def session_proven(self, session: Session) -> None:
        """Remove a connection from the table of unproven connections."""

    def session_closed(self, session: Session, reason: Exception | None) -> None:
        """Remove a closed connection; `reason` is its error or None."""

    def joined(self) -> StoreCore:
        """Count one more joined client; return a `StoreCore` with one key per client: "1", "2", ..."""

    def join_abandoned(self) -> None:
        """Reduce the count of joined clients by one, because a client has stopped waiting. It may join again."""


class Session(FrameProtocol):
    """A server connection that authenticates its client and carries out requests. Protocol errors end it."""

    def __init__(self, owner: SessionOwner, handshake: ServerHandshake, job: str | None = None) -> None:
        super().__init__()
        # The job id that client certificates must name; None if certificates are not checked.
        self._job = job
        self._owner = owner
        self._handshake = handshake
        self._waits: dict[int, tuple[StoreCore, PendingWait, tuple[Any, ...]]] = {}
        self._joined = False
        self._held: dict[str, bytes] = {}
        self._reason: Exception | None = None
        # This deadline also covers the TLS handshake. The session can close the connection only after that handshake.
        self._end_of_handshake = owner.runtime.time() + HANDSHAKE_TIMEOUT
        # The deadline for proving the key. Later requests of the client have no deadline.
        self._deadline: LoopTimeout | None = None

    def abort(self) -> None:
        """Close the connection at once."""
        self.transport.abort()

    def connection_made(self, transport: Any) -> None:
        """Handle a new connection: wait for the client's first message."""
        super().connection_made(transport)
        runtime = self._owner.runtime
        left = max(0.0, self._end_of_handshake - runtime.time())
        self._deadline = LoopTimeout(runtime, left, self.abort, self._has_arrived)
        self._expect(HELLO_SIZE, self._hello_received)
        self._owner.session_opened(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """Handle a lost connection: drop the client's waits, and set the keys that the client held to `LEFT`."""
        if self._deadline is not None:
            self._deadline.cancel()
        for core, waiter, _ in self._waits.values():
            self._drop(core, waiter)
        self._waits.clear()
        for key, value in self._held.items():
            with suppress(StoreError):  # the store is full
                if self._owner.core.apply("compare_set", (key, value, LEFT)) == LEFT:
                    self._owner.core.apply("set", (key + LEFT_SUFFIX, b""))
        self._owner.session_closed(self, self._reason or exc)

    def pause_writing(self) -> None:
        """Stop reading the requests of a client that does not read its replies."""
        self.transport.pause_reading()

    def resume_writing(self) -> None:
        """Resume reading requests."""
        self.transport.resume_reading()

    def record_failure(self, exc: Exception) -> None:
        """Record why the connection fails, for the log."""
        self._reason = exc

    def message_received(self, number: int, word: Any, payload: Any) -> None:
        """Check a request, and carry it out."""
        if not isinstance(word, str) or not isinstance(payload, list):
            raise ProtocolError("received a store request without a command or arguments")
        arguments = tuple(payload)
        if word not in COMMANDS and word not in WAITS and word not in SERVER_COMMANDS:
            raise ProtocolError(f"unknown store command {word[:40]!r}")
        try:
            check_request(word, arguments)
        except (StoreError, TypeError, ValueError) as exc:
            if word in SERVER_COMMANDS:
                raise ProtocolError(f"store command {word!r}: {exc}") from exc
            self._reply(number, ReplyStatus.ERROR, str(exc))
            return
        try:
            self._carry_out(number, word, arguments)
        except StoreError as exc:
            self._reply(number, ReplyStatus.ERROR, str(exc))

    def _carry_out(self, number: int, word: str, arguments: tuple[Any, ...]) -> None:
        """Carry out a request whose arguments have been checked, and send the reply."""
        if word == "cancel":
            self._cancel(number)
        elif word == "join":
            self._join(number, arguments[0])
        elif word == "hold":
            self._reply(number, ReplyStatus.RESULT, self._hold(*arguments))
        elif word in WAITS:
            self._start_wait(self._owner.core, number, word, arguments)
        else:
            self._reply(number, ReplyStatus.RESULT, self._owner.core.apply(word, arguments))

    def _has_arrived(self) -> bool:
        """Return whether the client has sent data that the session has not read yet."""
        return is_ready(self.transport.get_extra_info("socket").fileno())

    def _hello_received(self, block: bytearray) -> None:
        self._answer(self._handshake.challenge(bytes(block)))
        self._expect(PROOF_SIZE, self._proof_received)

    def _proof_received(self, block: bytearray) -> None:
        self._answer(self._handshake.verdict(bytes(block), self._decide))
        if self._handshake.refusal is None:
            assert self._deadline is not None
            self._deadline.cancel()
            self._owner.session_proven(self)
        self._expect(CONFIRM_SIZE, self._confirm_received)

    def _decide(self, peer: Peer) -> Status:
        if self._job is not None:
            address, *_ = self.transport.get_extra_info("peername")
            names = certificate_names(self.transport.get_extra_info("ssl_object").getpeercert())
            try:
                check_names(names, part_name(self._job), f"the certificate of {address}")
            except WrongCertificateError as error:
                self._reason = error
                return Status.WRONG_CERTIFICATE
        return Status.OK

    def _confirm_received(self, block: bytearray) -> None:
        self._handshake.accept(bytes(block))
        self._expect_frame()

    def _answer(self, message: bytes) -> None:
        self.transport.write(message)
        if self._handshake.refusal is not None:
            self._reason = self._reason or self._handshake.refusal
            self.transport.close()

    def _hold(self, key: str, expected: bytes, desired: bytes) -> bytes:
        value: bytes = self._owner.core.apply("hold", (key, expected, desired))
        if value == desired:
            self._held[key] = desired
        return value

    def _join(self, number: int, world_size: int) -> None:
        if self._joined:
            raise ProtocolError("the client sent join twice")
        self._joined = True
        clients = [str(i) for i in range(1, world_size + 1)]
        self._start_wait(self._owner.joined(), number, "wait", (clients,))

    def _start_wait(self, core: StoreCore, number: int, command: str, arguments: tuple[Any, ...]) -> None:
        if number in self._waits or len(self._waits) >= _MAX_WAITS:
            raise StoreError(f"one client has {_MAX_WAITS} waits in progress: await some of them first")
        waiter = core.start(command, arguments, self._make_deliverer(core, number, command, arguments[0]))
        if waiter is not None:
            self._waits[number] = (core, waiter, arguments)

    def _make_deliverer(self, core: StoreCore, number: int, command: str, key: Any) -> Callable[[Any], None]:
        def deliver(result: Any) -> None:
            self._waits.pop(number, None)
            if command == "queue_pop" and self.transport.is_closing():
                core.apply("queue_return", (key, result))
            try:
                self._reply(number, ReplyStatus.RESULT, result)
            except Exception as exc:  # catch it: the command that ended the wait, of another client, must not fail
                self.record_failure(exc)
                self.abort()

        return deliver

    def _cancel(self, number: int) -> None:
        """Cancel a wait and reply with its missing keys. If the wait has ended, do nothing: its reply was sent."""
        wait = self._waits.pop(number, None)
        if wait is not None:
            core, waiter, wanted = wait
            self._reply(number, ReplyStatus.MISSING, core.missing(waiter.command, wanted))
            self._drop(core, waiter)

    def _drop(self, core: StoreCore, waiter: PendingWait) -> None:
        core.drop(waiter)
        if core is not self._owner.core:
            self._owner.join_abandoned()

    def _reply(self, number: int, outcome: ReplyStatus, payload: Any) -> None:
        if self.transport.is_closing():
            return
        try:
            frame = pack([number, outcome, payload])
        except StoreError as exc:
            frame = pack([number, ReplyStatus.ERROR, str(exc)])
        self.transport.write(frame)
        if self.transport.get_write_buffer_size() > _MAX_UNSENT:
            self._reason = ProtocolError("the client does not read its replies")
            self.transport.abort()
