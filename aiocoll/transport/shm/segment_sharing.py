"""What goes over a link's socket: descriptors of segments that the other end may map; see `registered_memory`.

    owner                                      reader
    offer of segment 7, [descriptor]  --->     maps it
                                      <---     mapped: from here on a chunk may be given by its place
    segment 7 has ended               --->     unmaps it

Nobody waits for an answer. A reader that cannot map a segment does not answer, and gets copies as of any other array.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
import struct
from collections import deque
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aiocoll.errors import ProtocolError
from aiocoll.transport.byte_stream import ByteStream
from aiocoll.transport.shared_memory import Segment
from aiocoll.transport.shm.descriptors import recv_fds
from aiocoll.transport.shm.region import open_region

__all__ = ["SegmentSharing"]

#: What, the segment's number, its bytes.
_MESSAGE = struct.Struct("<B3xIQ")
_OFFER, _TAKEN, _ENDED = range(1, 4)


class SegmentSharing:
    """One end.

    Args:
        stream: of the link, whose handshake is over: a unix socket.
        peer: rank of the other end.
    """

    __slots__ = ("_mapped", "_offered", "_peer", "_stream", "_taken", "_unsent")

    def __init__(self, stream: ByteStream, peer: int) -> None:
        self._stream = stream
        self._peer = peer
        self._offered: set[int] = set()
        self._taken: set[int] = set()
        self._mapped: dict[int, mmap.mmap] = {}
        self._unsent: deque[bytes] = deque()

    def can_map(self, segment: Segment) -> bool:
        """Whether the peer has mapped `segment`, which is offered to it if it has not been."""
        if segment.number in self._taken:
            return True
        if segment.number not in self._offered:
            self._offer(segment)
        return False

    def read(self, number: int, offset: int, dtype: np.dtype[Any], count: int) -> NDArray[Any] | None:
        """Return elements in a segment of the peer's; None if it is unknown, or they are not inside."""
        memory = self._mapped.get(number)
        if memory is None or offset + count * dtype.itemsize > len(memory):
            return None
        return np.frombuffer(memory, dtype, count, offset)

    def withdraw(self, number: int) -> None:
        """The segment has ended."""
        self._offered.discard(number)
        self._taken.discard(number)
        self._tell(_ENDED, number)

    def forget(self) -> None:
        """Unmap the segments of the peer, which is gone."""
        self._mapped.clear()

    def close(self) -> None:
        """Send nothing more; the stream is about to be closed."""
        self._unsent.clear()

    def receive(self) -> bool:
        """Receive the next message of the peer; False if it has ended its side.

        Raises:
            ProtocolError: it makes no sense.
            OSError: of the socket; `BlockingIOError` if there is nothing.
        """
        message, fds = recv_fds(self._stream.sock, _MESSAGE.size, 1)
        try:
            if message:
                self._handle(message, fds)
            return bool(message)
        finally:
            for fd in fds:
                os.close(fd)

    def _handle(self, message: bytes, fds: list[int]) -> None:
        what, number, nbytes = _MESSAGE.unpack(message) if len(message) == _MESSAGE.size else (0, 0, 0)
        if what == _OFFER and number not in self._mapped:
            if not fds:
                return  # too many open files: the kernel has left it out
            with contextlib.suppress(OSError):  # no memory for the mapping
                self._mapped[number] = open_region(fds.pop(), nbytes)
                self._tell(_TAKEN, number)
        elif what == _TAKEN:
            self._taken |= {number} & self._offered  # it may have ended meanwhile
        elif what == _ENDED:
            self._mapped.pop(number, None)
        else:
            raise ProtocolError(f"rank {self._peer} sent bytes where none belong")

    def _offer(self, segment: Segment) -> None:
        message = _MESSAGE.pack(_OFFER, segment.number, segment.nbytes)
        with contextlib.suppress(OSError):  # it will not be mapped, and copied as any other
            try:
                socket.send_fds(self._stream.sock, [message], [segment.fd])
            except BlockingIOError:
                return  # with the next chunk, then
        self._offered.add(segment.number)
        segment.readers.append(self.withdraw)

    def _tell(self, what: int, number: int) -> None:
        self._unsent.append(_MESSAGE.pack(what, number, 0))
        if len(self._unsent) == 1 and not self._send():
            self._stream.start_writing(self._send_rest)

    def _send_rest(self) -> None:
        if self._send():
            self._stream.stop_writing()

    def _send(self) -> bool:
        """Send what is unsent, a whole message at a time; False if the socket is full."""
        while self._unsent:
            try:
                self._stream.send(self._unsent[0])
            except BlockingIOError:
                return False
            except OSError:  # the link is at its end, of which it hears on its own
                self._unsent.clear()
                return True
            self._unsent.popleft()
        return True
