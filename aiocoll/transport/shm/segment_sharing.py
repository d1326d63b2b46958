"""Exchange of segment descriptors over a link's socket, so that the other end can map them; see `registered_memory`.

    owner                                      reader
    offer of segment 7, [descriptor]  --->     maps it
                                      <---     mapped: from now on chunks may refer to it
    segment 7 has ended               --->     unmaps it

The owner does not wait for an answer. A reader that cannot map a segment does not answer, and receives copies, as from
any other array.
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

#: A message: its kind, a segment number, and a size in bytes.
_MESSAGE = struct.Struct("<B3xIQ")
_OFFER, _TAKEN, _ENDED = range(1, 4)


class SegmentSharing:
    """An end of the exchange of segment descriptors on a link.

    Args:
        stream: the link's stream after the handshake: a unix socket.
        peer: rank at the other end.
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
        """Return whether the peer has mapped `segment`. Send the peer the segment's descriptor on the first call."""
        if segment.number in self._taken:
            return True
        if segment.number not in self._offered:
            self._offer(segment)
        return False

    def read(self, number: int, offset: int, dtype: np.dtype[Any], count: int) -> NDArray[Any] | None:
        """Return elements in one of the peer's segments; None if the segment is unknown or does not contain them."""
        memory = self._mapped.get(number)
        if memory is None or offset + count * dtype.itemsize > len(memory):
            return None
        return np.frombuffer(memory, dtype, count, offset)

    def withdraw(self, number: int) -> None:
        """Notify the peer that it must unmap a segment."""
        self._offered.discard(number)
        self._taken.discard(number)
        self._queue_message(_ENDED, number)

    def forget(self) -> None:
        """Unmap the peer's segments, because the link is closed."""
        self._mapped.clear()

    def close(self) -> None:
        """Stop sending, because the link's socket is about to be closed."""
        self._unsent.clear()

    def receive(self) -> bool:
        """Receive the peer's next message; return False if the peer has ended its sending side.

        Raises:
            ProtocolError: the message is invalid.
            OSError: the socket has failed; `BlockingIOError` if there is no message.
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
        kind, number, nbytes = _MESSAGE.unpack(message) if len(message) == _MESSAGE.size else (0, 0, 0)
        if kind == _OFFER and number not in self._mapped:
            if not fds:
                return  # the kernel has dropped the descriptor, because this process has too many open files
            with contextlib.suppress(OSError):  # ignore a lack of memory for the mapping
                self._mapped[number] = open_region(fds.pop(), nbytes)
                self._queue_message(_TAKEN, number)
        elif kind == _TAKEN:
            self._taken |= {number} & self._offered  # unless the segment has ended meanwhile
        elif kind == _ENDED:
            self._mapped.pop(number, None)
        else:
            raise ProtocolError(f"rank {self._peer} sent an invalid message about segments")

    def _offer(self, segment: Segment) -> None:
        message = _MESSAGE.pack(_OFFER, segment.number, segment.nbytes)
        with contextlib.suppress(OSError):  # if that fails, the peer does not map the segment, and receives copies
            try:
                socket.send_fds(self._stream.sock, [message], [segment.fd])
            except BlockingIOError:
                return  # the segment will be offered again for the next chunk
        self._offered.add(segment.number)
        segment.readers.append(self.withdraw)

    def _queue_message(self, kind: int, number: int) -> None:
        self._unsent.append(_MESSAGE.pack(kind, number, 0))
        if len(self._unsent) == 1 and not self._send():
            self._stream.start_writing(self._send_rest)

    def _send_rest(self) -> None:
        if self._send():
            self._stream.stop_writing()

    def _send(self) -> bool:
        """Send the queued messages, each in one piece; return False if the socket's buffer is full."""
        while self._unsent:
            try:
                self._stream.send(self._unsent[0])
            except BlockingIOError:
                return False
            except OSError:  # the link has ended, and its reader will notice
                self._unsent.clear()
                return True
            self._unsent.popleft()
        return True
