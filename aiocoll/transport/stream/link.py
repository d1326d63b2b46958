"""Link over a byte stream (TCP or unix socket): non-blocking calls, one permanent reader, no task per message.

Many small frames are read at once into a buffer of the link and delivered from there. A large frame is received in two
parts. Its header goes through the buffer. Its payload is received directly into memory that the engine provides. A
payload that will be reduced is received into the buffer, and reduced there while it is in the cache.

Small frames are also sent in batches. The first frame is sent at once. Frames that follow soon are collected in a
batch. The batch is sent when it is full, when a large frame follows, when an await polls or ends, or at the end of the
loop iteration, whichever comes first.
"""

from __future__ import annotations

import errno
import socket
from collections import deque
from itertools import islice
from typing import Literal

from aiocoll.errors import ProtocolError
from aiocoll.process import PidFd, peer_process
from aiocoll.runtime import BUDGET, Runtime
from aiocoll.security.handshake import ConnKind
from aiocoll.sockets import is_between_hosts
from aiocoll.transport.base import Sink
from aiocoll.transport.buffer_pool import BufferPool
from aiocoll.transport.byte_stream import Bytes, ByteStream
from aiocoll.transport.frame import HEADER, HEADER_SIZE, SEGMENT, FrameKind, Header

__all__ = ["LOOPBACK_BUFFER", "UNIX_BUFFER", "StreamLink"]

#: Number of bytes to read at once when small frames are expected. Copying 64 KiB takes 3 µs.
LOOKAHEAD = 64 * 1024
#: Minimum size of a large payload. After a large payload that was received into the operation's memory, only a header
#: is read ahead. After one that was delivered from the buffer, as many bytes are read ahead again.
BULK = 16 * 1024
#: Largest payload for which appending it to its header is faster than `sendmsg` with two buffers.
JOIN = 16 * 1024
#: Largest payload for which copying the frame into a batch is faster than a system call per frame.
GATHER = 8 * 1024
#: Size of a full batch in bytes: the number of bytes that the receiver reads at once.
BATCH = LOOKAHEAD
#: If the last frame was sent longer ago than this many seconds, the next frame is sent at once instead of batched. The
#: time is far longer than the time between two calls of a program, and too short to be noticed.
CLOSELY = 100e-6
#: Maximum number of buffers per `sendmsg`, far below every system's IOV_MAX (1024).
IOVECS = 64
#: Socket buffer sizes in each direction on one host. They hold a few segments, so that sender and receiver overlap
#: without a wake-up per segment. More segments would leave the cache before they are read. Sizes from 128 KiB to 4 MiB
#: were measured. TCP needs more, because its buffers also hold overhead and unacknowledged bytes. Between hosts, the
#: kernel chooses the sizes.
UNIX_BUFFER = 2 * SEGMENT
LOOPBACK_BUFFER = 8 * SEGMENT
_KINDS = frozenset(FrameKind)
_NO_BUFFER = memoryview(b"")


class StreamLink:
    """A link over an authenticated byte stream, which it owns; see `aiocoll.transport.base.Link`."""

    __slots__ = (
        "_ahead",
        "_batch",
        "_buffer",
        "_closed",
        "_end",
        "_ending",
        "_filled",
        "_first",
        "_header",
        "_last",
        "_out",
        "_pool",
        "_refusing",
        "_runtime",
        "_start",
        "_stream",
        "_target",
        "_unparsed",
        "kind",
        "peer",
        "sink",
    )

    sink: Sink
    shared = None

    def __init__(self, runtime: Runtime, stream: ByteStream, peer: int, kind: ConnKind, pool: BufferPool) -> None:
        self.peer = peer
        self.kind = kind
        self._runtime = runtime
        self._stream = stream
        self._pool = pool
        # The link holds a buffer of the pool while it reads, and longer if a part of a frame remains in the buffer.
        self._buffer = _NO_BUFFER
        self._start = 0
        self._end = 0
        self._ahead = LOOKAHEAD
        # The frame whose payload is incomplete. `_target` is None while the payload is received into the buffer.
        self._header: Header | None = None
        self._target: memoryview | None = None
        self._filled = 0
        # Frames to send together. The batch is empty while `_out` holds bytes that the kernel has not accepted.
        self._batch = bytearray()
        # Whether no frame was sent since the last poll, and the time at which the last frame was sent.
        self._first = True
        self._last = 0.0
        self._out: deque[memoryview] = deque()
        self._ending = False
        self._closed = False
        # Set after invalid data was received. From then on, received data is discarded.
        self._refusing = False
        # Whether the buffer may still hold complete frames.
        self._unparsed = False
        _size_buffers(stream.sock)

    @property
    def carrier(self) -> str:
        """The medium of the link: "unix" or "tcp"."""
        return "unix" if self._stream.sock.family == socket.AF_UNIX else "tcp"

    @property
    def writable(self) -> bool:
        """Return whether the send queue is empty."""
        return not self._out

    @property
    def closed(self) -> bool:
        """Return whether the link is closed."""
        return self._closed

    def peer_process(self) -> PidFd | None:
        """Return a handle of the process at the other end of a unix socket."""
        return peer_process(self._stream.sock)

    def start(self) -> None:
        """Start to read."""
        self._stream.start_reading(self.poll)

    def write(self, header: bytes, payload: memoryview | None = None) -> bool:
        """Send a frame; return whether the kernel or a batch has accepted all of it. Otherwise the rest is queued."""
        if self._closed or self._ending:
            return True
        if self._out:
            self._out.append(memoryview(header))
            if payload is not None:
                self._out.append(payload)
            return False
        if self._first:
            self._first = False
        elif payload is None or payload.nbytes <= GATHER:
            if self._batch or self._runtime.ticks() - self._last < CLOSELY:
                self._gather(header, payload)
                return True
        elif self._batch:
            batch, self._batch = self._batch, bytearray()
            return self._send(batch, header, payload)
        if payload is not None and payload.nbytes > JOIN:
            return self._send(header, payload)
        frame = header if payload is None else header + payload
        try:
            sent = self._stream.send(frame)
        except (BlockingIOError, InterruptedError):
            sent = 0
        except OSError:
            return True  # ignore it: the reader gets the same error, after all data that the peer sent before
        self._last = self._runtime.ticks()
        return sent == len(frame) or self._put_back(sent, frame)

    def poll(self) -> bool:
        """Send and receive without waiting, for at most `BUDGET` seconds; return whether any data moved."""
        if self._closed:
            return False
        if self._batch:
            self._send_batch()
        self._first = True
        moved = self._flush() if self._out else False
        if not self._end:
            self._buffer = self._pool.take()
        try:
            return (self._drop() if self._refusing else self._receive()) or moved
        except (BlockingIOError, InterruptedError):
            return moved
        except OSError as error:
            # If both ends stop reading and close at once, the kernel may report a reset. That is an orderly end.
            orderly = self._ending and error.errno in (errno.ECONNRESET, errno.EPIPE)
            self._lost(None if orderly else error)
            return True
        except Exception as error:
            self._refusing, self._unparsed, self._end = True, False, 0
            self._header = self._target = None
            self.sink.lost(self, error)
            return True
        finally:
            if self._closed or not self._end:
                self._pool.give(self._buffer)
                self._buffer = _NO_BUFFER

    def divert(self) -> None:
        """Receive the rest of the arriving payload into memory whose content is ignored."""
        if self._target is not None:
            # Allocate new memory, because other links may use the pool's buffers meanwhile.
            self._target = memoryview(bytearray(self._target.nbytes))

    def finish(self) -> None:
        """Send the queued frames, then shut down the sending side of the stream."""
        self._send_batch()
        self._ending = True
        if not self._out:
            self._shutdown()

    def close(self) -> None:
        """Close the link and its byte stream."""
        if self._closed:
            return
        self._send_batch()  # `write` has reported the frames of the batch as sent
        self._closed = True
        self._out.clear()
        self._target = None
        self._stream.close()

    def fail(self, error: Exception) -> None:
        """Close the link and report `error` to the sink, like a failed read."""
        self._lost(error)

    def _gather(self, header: bytes, payload: memoryview | None) -> None:
        batch = self._batch
        if not batch:
            self._runtime.before_turn_ends(self._send_batch)
        batch += header
        if payload is not None:
            batch += payload
        if len(batch) >= BATCH:
            self._send_batch()

    def _send_batch(self) -> None:
        if batch := self._batch:
            self._batch = bytearray()
            self._send(batch)
            self._last = self._runtime.ticks()

    def _send(self, *parts: Bytes) -> bool:
        try:
            sent = self._stream.send_parts(parts)
        except (BlockingIOError, InterruptedError):
            sent = 0
        except OSError:
            return True  # ignore it: the reader gets the same error
        return sent == sum(map(len, parts)) or self._put_back(sent, *parts)

    def _put_back(self, sent: int, *parts: Bytes) -> Literal[False]:
        """Queue the bytes of `parts` that the kernel has not accepted: all bytes after the first `sent` bytes."""
        for part in parts:
            if sent < len(part):
                self._out.append(memoryview(part)[sent:])
            sent = max(0, sent - len(part))
        self._stream.start_writing(self._flush)
        return False

    def _receive(self) -> bool:
        ticks = self._runtime.ticks
        deadline = ticks() + BUDGET
        if self._unparsed:
            self._parse(deadline)
        receive_into = self._stream.receive_into
        while not self._unparsed and not self._closed:
            place = self._place()
            wanted = len(place)
            got = receive_into(place)
            if not got:
                self._lost(None)
                return True
            if self._target is not None:
                self._filled += got
                if got == wanted:
                    self._placed()
            else:
                self._end += got
                self._parse(deadline)
            if got < wanted or ticks() > deadline:
                break
        return True

    def _drop(self) -> bool:
        """Discard received data until the peer ends its sending side. An earlier close would lose data sent to it."""
        if not self._stream.receive_into(self._buffer):
            self.close()
        return True

    def _place(self) -> memoryview:
        """Return the memory into which the next bytes are read."""
        if self._target is not None:
            return self._target[self._filled :]
        if self._header is not None:
            # The payload starts at the front of the buffer, and the header of the next frame may follow.
            return self._buffer[self._end : 2 * HEADER_SIZE + self._header[7]]
        return self._buffer[self._end : self._ahead]

    def _placed(self) -> None:
        header = self._header
        assert header is not None
        self._header = self._target = None
        self.sink.deliver(self, header, None)

    def _parse(self, deadline: float) -> None:
        """Deliver all complete frames in the receive buffer.

        Move an incomplete frame to the front, or all remaining frames if the time is used up.
        """
        buffer, position, end = self._buffer, 0, self._end
        self._unparsed = False
        if self._header is not None and end < HEADER_SIZE + self._header[7]:
            return
        self._header = None
        unpack, deliver, ticks = HEADER.unpack_from, self.sink.deliver, self._runtime.ticks
        while end - position >= HEADER_SIZE:
            header: Header = unpack(buffer, position)
            length = header[7]
            if length > SEGMENT or header[0] not in _KINDS:
                raise ProtocolError(
                    f"rank {self.peer} sent an invalid frame of kind {header[0]} and length {length}; "
                    f"at most {SEGMENT} bytes are allowed"
                )
            body = position + HEADER_SIZE
            if body + length > end:
                self._await_payload(header, position)
                return
            self._ahead = HEADER_SIZE + length if length >= BULK else LOOKAHEAD
            deliver(self, header, buffer[body : body + length])
            if self._closed:
                return
            position = body + length
            if end - position >= HEADER_SIZE and ticks() > deadline:
                # Schedule a poll: the event loop's selector does not report bytes that are already in the buffer.
                self._unparsed = True
                self._runtime.call_soon(self.poll)
                break
        self._keep(position)

    def _await_payload(self, header: Header, position: int) -> None:
        self._header = header
        target = self.sink.route(self, header)
        if target is None:
            self._keep(position)
            return
        self._ahead = HEADER_SIZE if header[7] >= BULK else LOOKAHEAD
        here = self._end - position - HEADER_SIZE
        target[:here] = self._buffer[position + HEADER_SIZE : self._end]
        self._target = target
        self._filled = here
        self._end = 0

    def _keep(self, position: int) -> None:
        rest = self._end - position
        if position and rest:
            self._buffer[:rest] = bytes(self._buffer[position : self._end])
        self._end = rest

    def _flush(self) -> bool:
        out = self._out
        try:
            while out:
                sent = self._stream.send_parts(list(islice(out, IOVECS)))
                while sent:
                    first = out[0]
                    if sent < first.nbytes:
                        out[0] = first[sent:]
                        return True
                    sent -= first.nbytes
                    out.popleft()
        except (BlockingIOError, InterruptedError):
            return False
        except OSError:
            out.clear()  # ignore it: the reader gets the same error
        self._stream.stop_writing()
        self.sink.drained(self)
        if self._ending and not self._closed and not out:
            self._shutdown()
        return True

    def _shutdown(self) -> None:
        try:
            self._stream.shutdown()
        except OSError as error:
            self._runtime.call_soon(self._lost, None if self._ending else error)

    def _lost(self, error: Exception | None) -> None:
        if not self._closed:
            self.close()
            if not self._refusing:
                self.sink.lost(self, error)


def _size_buffers(sock: socket.socket) -> None:
    """Set the socket buffer sizes of a connection within a host."""
    if sock.family == socket.AF_UNIX:
        nbytes = UNIX_BUFFER
    elif is_between_hosts(sock):
        return
    else:
        nbytes = LOOPBACK_BUFFER
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, nbytes)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, nbytes)
