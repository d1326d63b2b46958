"""A byte stream that behaves like an encrypted stream (records, read-ahead, handshakes), without encryption."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable, Iterable
from typing import Any

__all__ = ["RecordStream", "open_records"]

_HEAD = struct.Struct("<BH")
_DATA, _TAKEN, _END = range(3)
#: Bytes of a record, maximum bytes of one receive, and number of records that may be sent before the peer confirms.
RECORD, SOME, AHEAD = 1000, 700, 3


class RecordStream:
    """A stream of records over a socket. The peer must use this class, too.

    - It reads ahead from the socket, so that a poller no longer reports the data, and returns them piece by piece.
    - After every `AHEAD` records the receiver must confirm before it returns more, and may have to wait to send that.
    - The sender waits for this confirmation before it sends more.
    """

    bound = b""

    def __init__(self, loop: asyncio.AbstractEventLoop, sock: socket.socket) -> None:
        self.sock = sock
        self.closed = False
        self._loop = loop
        self._encoded = bytearray()
        self._decoded = bytearray()
        self._leaving = bytearray()
        self._received = 0
        self._ahead = AHEAD
        self._owes = self._ended = self._soon = False
        self._error: OSError | None = None
        self._readable: Callable[[], object] | None = None
        self._writable: Callable[[], object] | None = None

    def check_rank(self, rank: int) -> None:
        pass

    def send(self, data: Any) -> int:
        self._move()
        if self._error is not None:
            raise self._error
        if self._leaving or not self._ahead:
            self._arm()
            raise BlockingIOError
        self._ahead -= 1
        part = bytes(memoryview(data)[:RECORD])
        self._put(_DATA, part)
        return len(part)

    def send_parts(self, parts: Iterable[Any]) -> int:
        sent = 0
        for part in parts:
            rest = memoryview(part)
            while rest:
                try:
                    taken = self.send(rest)
                except BlockingIOError:
                    if sent:
                        return sent
                    raise
                sent += taken
                rest = rest[taken:]
        return sent

    def receive_into(self, space: memoryview) -> int:
        self._move()
        if self._owes:
            self._owes = False
            self._put(_TAKEN)
            raise BlockingIOError
        if not self._decoded and self._error is not None:
            raise self._error
        if not self._decoded and not self._ended:
            self._arm()
            raise BlockingIOError
        given = self._decoded[: min(SOME, len(space))]
        del self._decoded[: len(given)]
        space[: len(given)] = given
        self._arm()
        return len(given)

    def start_reading(self, readable: Callable[[], object]) -> None:
        self._readable = readable
        self._arm()

    def stop_reading(self) -> None:
        self._readable = None
        self._arm()

    def start_writing(self, writable: Callable[[], object]) -> None:
        self._writable = writable
        self._arm()

    def stop_writing(self) -> None:
        self._writable = None
        self._arm()

    def shutdown(self) -> None:
        self._put(_END)

    def close(self) -> None:
        self._readable = self._writable = None
        self._arm()
        self.closed = True
        self.sock.close()

    def _put(self, kind: int, part: bytes = b"") -> None:
        self._leaving += _HEAD.pack(kind, len(part)) + part
        if kind != _TAKEN:
            self._move()
        self._arm()

    def _move(self) -> None:
        """Send and receive as much data as the socket allows without blocking."""
        try:
            while self._leaving:
                del self._leaving[: self.sock.send(self._leaving)]
        except BlockingIOError:
            pass
        except OSError as error:
            self._error = error
        try:
            while not self._ended and self._error is None:
                self._encoded += (came := self.sock.recv(1 << 16))
                self._ended = not came
        except BlockingIOError:
            pass
        except OSError as error:
            self._error = error
        while len(self._encoded) >= _HEAD.size:
            kind, nbytes = _HEAD.unpack_from(self._encoded)
            end = _HEAD.size + nbytes
            if len(self._encoded) < end:
                break
            self._decoded += self._encoded[_HEAD.size : end]
            del self._encoded[:end]
            self._decode(kind)

    def _decode(self, kind: int) -> None:
        if kind == _TAKEN:
            self._ahead += AHEAD
        elif kind == _END:
            self._ended = True
        else:
            self._received += 1
            self._owes = self._owes or not self._received % AHEAD

    # -- callbacks of the event loop, registered only while the owner reads or writes

    def _has_news(self) -> bool:
        return bool(self._decoded or self._owes or self._ended or self._error)

    def _arm(self) -> None:
        if self.closed:
            return
        fd = self.sock.fileno()
        called = self._readable is not None or self._writable is not None
        if called:
            self._loop.add_reader(fd, self._turn)
        else:
            self._loop.remove_reader(fd)
        if called and (self._leaving or (self._writable is not None and self._ahead)):
            self._loop.add_writer(fd, self._turn)
        else:
            self._loop.remove_writer(fd)
        if self._readable is not None and self._has_news() and not self._soon:
            self._soon = True
            self._loop.call_soon(self._again)

    def _again(self) -> None:
        self._soon = False
        self._turn()

    def _turn(self) -> None:
        if self.closed:
            return
        self._move()
        if self._readable is not None and self._has_news():
            self._readable()
        if self._writable is not None and self._ahead and not self._leaving:
            self._writable()
        self._arm()


async def open_records(loop: asyncio.AbstractEventLoop, sock: socket.socket, *, dialled: bool) -> RecordStream:
    return RecordStream(loop, sock)
