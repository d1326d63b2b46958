"""`Session`: the server's side of one store connection."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from aiocoll.errors import ProtocolError, StoreError
from aiocoll.handshake import CONFIRM_SIZE, HANDSHAKE_TIMEOUT, HELLO_SIZE, PROOF_SIZE, ServerHandshake, Status
from aiocoll.runtime import Runtime
from aiocoll.store.commands import COMMANDS, MAX_ENTRIES, WAITS, check_arguments
from aiocoll.store.core import StoreCore, Waiter
from aiocoll.store.frames import MAX_FRAME, FrameProtocol, Outcome, pack

__all__ = ["Session", "SessionOwner"]

#: Waits of one connection at a time.
_MAX_WAITS = 1024
#: Bytes of answers kept for a client that does not read them; beyond, it is cut off. It stops being read long before.
_MAX_UNSENT = 4 * MAX_FRAME


class SessionOwner(Protocol):
    """What a session needs from its server."""

    core: StoreCore
    runtime: Runtime

    def session_opened(self, session: Session) -> None:
        """Count a connection that has yet to prove itself."""

    def session_proven(self, session: Session) -> None:
        """Learn that it has."""

    def session_closed(self, session: Session, reason: Exception | None) -> None:
        """Forget it."""

    def joined(self) -> StoreCore:
        """Count a client that opens its store; return the keys "1", "2", ... of those that have."""


class Session(FrameProtocol):
    """Handshake, then requests. Any misbehaviour ends this connection and touches nothing else."""

    def __init__(self, owner: SessionOwner, handshake: ServerHandshake) -> None:
        super().__init__()
        self._owner = owner
        self._handshake = handshake
        self._waits: dict[int, tuple[StoreCore, Waiter, tuple[Any, ...]]] = {}
        self._reason: Exception | None = None
        self._deadline = owner.runtime.call_later(HANDSHAKE_TIMEOUT, self.abort)

    def abort(self) -> None:
        """Close at once."""
        self.transport.abort()

    def connection_made(self, transport: Any) -> None:
        """Wait for the client's first message."""
        super().connection_made(transport)
        self._expect(HELLO_SIZE, self._hello_received)
        self._owner.session_opened(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """Drop everything the client waited for."""
        self._deadline.cancel()
        for core, waiter, _ in self._waits.values():
            core.drop(waiter)
        self._waits.clear()
        self._owner.session_closed(self, self._reason or exc)

    def pause_writing(self) -> None:
        """Read no more requests from a client that does not read its answers."""
        self.transport.pause_reading()

    def resume_writing(self) -> None:
        """Go on reading."""
        self.transport.resume_reading()

    def broken(self, exc: Exception) -> None:
        """Keep the reason for the log."""
        self._reason = exc

    def message_received(self, number: int, word: Any, payload: Any) -> None:
        """Carry out one request."""
        if not isinstance(word, str) or not isinstance(payload, list):
            raise ProtocolError("a store request without a command or arguments")
        arguments = tuple(payload)
        try:
            if word == "cancel":
                self._cancel(number)
            elif word == "join":
                self._join(number, arguments)
            elif word in WAITS:
                check_arguments(word, arguments)
                self._start_wait(self._owner.core, number, word, arguments)
            elif word in COMMANDS:
                check_arguments(word, arguments)
                self._reply(number, Outcome.RESULT, self._owner.core.apply(word, arguments))
            else:
                raise ProtocolError(f"unknown store command {word[:40]!r}")
        except (StoreError, TypeError, ValueError) as exc:
            self._reply(number, Outcome.ERROR, str(exc))

    def _hello_received(self, block: bytearray) -> None:
        self._answer(self._handshake.challenge(bytes(block)))
        self._expect(PROOF_SIZE, self._proof_received)

    def _proof_received(self, block: bytearray) -> None:
        self._answer(self._handshake.verdict(bytes(block), lambda peer: Status.OK))
        if self._handshake.refusal is None:
            self._owner.session_proven(self)
        self._expect(CONFIRM_SIZE, self._confirm_received)

    def _confirm_received(self, block: bytearray) -> None:
        self._handshake.accept(bytes(block))
        self._deadline.cancel()
        self._expect_frame()

    def _answer(self, message: bytes) -> None:
        self.transport.write(message)
        if self._handshake.refusal is not None:
            self._reason = self._handshake.refusal
            self.transport.close()

    def _join(self, number: int, arguments: tuple[Any, ...]) -> None:
        if len(arguments) != 1 or not isinstance(arguments[0], int) or not 0 < arguments[0] <= MAX_ENTRIES:
            raise ProtocolError("join without a world size")
        everybody = [str(i) for i in range(1, arguments[0] + 1)]
        self._start_wait(self._owner.joined(), number, "wait", (everybody,))

    def _start_wait(self, core: StoreCore, number: int, command: str, arguments: tuple[Any, ...]) -> None:
        if number in self._waits or len(self._waits) >= _MAX_WAITS:
            raise StoreError(f"{_MAX_WAITS} waits in one client: await some of them first")
        waiter = core.start(command, arguments, self._deliverer(core, number, command, arguments[0]))
        if waiter is not None:
            self._waits[number] = (core, waiter, arguments)

    def _deliverer(self, core: StoreCore, number: int, command: str, key: Any) -> Callable[[Any], None]:
        def deliver(result: Any) -> None:
            self._waits.pop(number, None)
            if command == "queue_pop" and self.transport.is_closing():
                core.apply("queue_return", (key, result))
            self._reply(number, Outcome.RESULT, result)

        return deliver

    def _cancel(self, number: int) -> None:
        """Drop a wait and answer it; when it has ended already, its answer is on the way."""
        wait = self._waits.pop(number, None)
        if wait is not None:
            core, waiter, wanted = wait
            core.drop(waiter)
            self._reply(number, Outcome.MISSING, core.missing(waiter.command, wanted))

    def _reply(self, number: int, outcome: Outcome, payload: Any) -> None:
        if self.transport.is_closing():
            return
        try:
            frame = pack([number, outcome, payload])
        except StoreError as exc:
            frame = pack([number, Outcome.ERROR, str(exc)])
        self.transport.write(frame)
        if self.transport.get_write_buffer_size() > _MAX_UNSENT:
            self._reason = ProtocolError("the client does not read its answers")
            self.transport.abort()
