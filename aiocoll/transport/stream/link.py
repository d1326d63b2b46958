"""A link over a byte stream, TCP or unix: raw non-blocking calls, one permanent reader, no task per message.

Small frames are read many at a time into a buffer of the link and handed out from there. Of a large frame only the
header goes through the buffer: its payload is received straight into the place the engine names, or, when it is to be
reduced, into the buffer, to be reduced from there while it is in the cache.

Small frames are also sent many at a time. The first one leaves at once; those that follow closely are gathered, and
leave together when the batch is full, when something else is sent behind them, when an await polls or ends, or with the
turn of the loop, whichever comes first.
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
from aiocoll.sockets import between_hosts
from aiocoll.transport.base import Sink
from aiocoll.transport.buffer_pool import BufferPool
from aiocoll.transport.byte_stream import Bytes, ByteStream
from aiocoll.transport.frame import HEADER, HEADER_SIZE, SEGMENT, FrameKind, Header

__all__ = ["LOOPBACK_BUFFER", "UNIX_BUFFER", "StreamLink"]

#: How much is read at once where small frames are expected; copying this much costs 3 microseconds.
LOOKAHEAD = 64 * 1024
#: From this payload on it matters where the bytes go: after one that was received into its place only a header is read
#: ahead, after one that was handed out from the buffer just as much again.
BULK = 16 * 1024
#: Up to this payload, copying it behind its header is cheaper than `sendmsg` with two buffers.
JOIN = 16 * 1024
#: Up to this payload, copying a frame into a batch is cheaper than a system call of its own.
GATHER = 8 * 1024
#: Bytes of a batch that is full: what a receiver reads at once.
BATCH = LOOKAHEAD
#: Seconds after the last one from which a frame is the first again, though nobody has polled: many times what a program
#: takes from one call to the next, and less than it would notice.
CLOSELY = 100e-6
#: Buffers per `sendmsg`; far below every system's IOV_MAX (1024).
IOVECS = 64
#: Bytes the kernel may hold in each direction on one host: some segments, so that sender and receiver overlap without
#: a wake-up per segment, and not so many that the bytes leave the cache before they are read. Measured from 128 KiB to
#: 4 MiB: TCP counts its own overhead, and acknowledges, so it needs more. Between hosts the kernel tunes by itself.
UNIX_BUFFER = 2 * SEGMENT
LOOPBACK_BUFFER = 8 * SEGMENT
_KINDS = frozenset(FrameKind)
_NO_BUFFER = memoryview(b"")


class StreamLink:
    """Frames on one connected, authenticated byte stream; see `aiocoll.transport.base.Link`. Owns the stream."""

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
        # One of the pool while the link reads, and until the next time if a part of a frame is left in it.
        self._buffer = _NO_BUFFER
        self._start = 0
        self._end = 0
        self._ahead = LOOKAHEAD
        # The frame whose payload is incomplete; `_target` is None while it gathers in the buffer.
        self._header: Header | None = None
        self._target: memoryview | None = None
        self._filled = 0
        # Frames that were written, and leave together; none while `_out` holds what the kernel has not taken.
        self._batch = bytearray()
        # Whether the next frame is the first since a poll, and when the last one left.
        self._first = True
        self._last = 0.0
        self._out: deque[memoryview] = deque()
        self._ending = False
        self._closed = False
        # What has come could not be taken: the rest is read and dropped.
        self._refusing = False
        # Complete frames may be left in the buffer.
        self._unparsed = False
        _size_buffers(stream.sock)

    @property
    def carrier(self) -> str:
        """What carries the bytes."""
        return "unix" if self._stream.sock.family == socket.AF_UNIX else "tcp"

    @property
    def writable(self) -> bool:
        """Whether nothing waits to be handed over."""
        return not self._out

    @property
    def closed(self) -> bool:
        """Whether the link is closed."""
        return self._closed

    def peer_process(self) -> PidFd | None:
        """Return the process at the other end of a unix socket."""
        return peer_process(self._stream.sock)

    def start(self) -> None:
        """Begin to read."""
        self._stream.start_reading(self.poll)

    def write(self, header: bytes, payload: memoryview | None = None) -> bool:
        """Send one frame; True if the kernel took all of it, or a batch did."""
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
            return True  # the reader meets the same end, after everything the peer managed to say
        self._last = self._runtime.ticks()
        return sent == len(frame) or self._put_back(sent, frame)

    def poll(self) -> bool:
        """Send and receive what can move now, for at most `BUDGET` seconds."""
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
            # Both ends close at once when neither reads any more: a reset then is as good as an end.
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
        """Receive the rest of the arriving payload into memory that nobody reads."""
        if self._target is not None:
            # Not one of the pool: other links read into those meanwhile.
            self._target = memoryview(bytearray(self._target.nbytes))

    def finish(self) -> None:
        """Send what is queued, then shut down the sending side."""
        self._send_batch()
        self._ending = True
        if not self._out:
            self._shutdown()

    def close(self) -> None:
        """Close the stream."""
        if self._closed:
            return
        self._send_batch()  # its frames were said to be handed over
        self._closed = True
        self._out.clear()
        self._target = None
        self._stream.close()

    def fail(self, error: Exception) -> None:
        """Close the link and tell the sink why, as if reading had failed."""
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
            return True  # as above
        return sent == sum(map(len, parts)) or self._put_back(sent, *parts)

    def _put_back(self, sent: int, *parts: Bytes) -> Literal[False]:
        """Keep what the kernel has not taken of `parts` until it does."""
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
        """Read and drop until the peer ends its side: closing at once would lose what was sent to it."""
        if not self._stream.receive_into(self._buffer):
            self.close()
        return True

    def _place(self) -> memoryview:
        """Return where the next bytes go, of the size that is wanted."""
        if self._target is not None:
            return self._target[self._filled :]
        if self._header is not None:
            # The payload gathers at the front of the buffer; the header of the next frame may be read behind it.
            return self._buffer[self._end : 2 * HEADER_SIZE + self._header[7]]
        return self._buffer[self._end : self._ahead]

    def _placed(self) -> None:
        header = self._header
        assert header is not None
        self._header = self._target = None
        self.sink.deliver(self, header, None)

    def _parse(self, deadline: float) -> None:
        """Hand out the frames in the buffer; leave an incomplete one, or what there is no time for, at its front."""
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
                raise ProtocolError(f"rank {self.peer} sent a frame of kind {header[0]} and length {length}")
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
                # No poller tells of bytes that have been read.
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
            out.clear()  # the reader meets the same end
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
    """Size the buffers of a connection inside a host."""
    if sock.family == socket.AF_UNIX:
        nbytes = UNIX_BUFFER
    elif between_hosts(sock):
        return
    else:
        nbytes = LOOPBACK_BUFFER
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, nbytes)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, nbytes)
