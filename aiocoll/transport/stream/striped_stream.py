"""Byte stream over several connections, for networks that one connection cannot fill.

TCP sends one window per round trip, and kernel buffers limit the window. Several connections have several windows.

The bytes are sent in blocks, each over one connection. The first connection whose window has room for the block is
used, so that a small amount of data keeps one window open. If none has room, the connection with the fewest bytes in
flight is used. A block starts with a header:

    offset  size  (big endian)
         0     8  number of the block
         8     4  number of its bytes, 1 to `BLOCK`

The receiver delivers the blocks in order. It keeps up to `AHEAD` bytes of later blocks from other connections, so that
these connections continue to receive. The rest waits in the kernel.
"""

from __future__ import annotations

import asyncio
import fcntl
import socket
import struct
import termios
from collections.abc import Callable, Iterable, Sequence
from math import inf

from aiocoll.errors import ProtocolError
from aiocoll.sockets import window
from aiocoll.transport.byte_stream import Bytes, ByteStream

__all__ = ["BLOCK", "StripedStream"]

#: Maximum number of bytes in a block: large enough that the header costs little, and small enough that all connections
#: of a link carry a part of each segment.
BLOCK = 64 * 1024
#: Maximum number of bytes kept from blocks that arrive early: as many as a fast, distant link delivers while it
#: recovers from a packet loss.
AHEAD = 8 << 20
_HEAD = struct.Struct("!QI")
_QUEUED = struct.Struct("=i")
_INCOMPLETE = "the connection ended in the middle of a block"


class _Stripe:
    """A single connection of the stream, and the block that arrives on it.

    Attributes:
        stream: the connection.
        head: the received part of a header.
        block: number of the block; None before its header has arrived.
        left: number of bytes of the block that have not been received.
        ahead: received bytes of the block, if earlier blocks are still missing.
        ended: the connection delivers no more data.
        watched: whether the event loop calls `_readable` when data arrives.
    """

    __slots__ = ("ahead", "block", "ended", "head", "left", "stream", "watched")

    def __init__(self, stream: ByteStream) -> None:
        self.stream = stream
        self.head = b""
        self.block: int | None = None
        self.left = 0
        self.ahead = bytearray()
        self.ended = self.watched = False

    def queued(self) -> int:
        """Return the number of bytes that were sent on this connection but are not acknowledged."""
        (nbytes,) = _QUEUED.unpack(fcntl.ioctl(self.stream.sock, termios.TIOCOUTQ, bytes(_QUEUED.size)))
        return int(nbytes)

    def find_block(self) -> None:
        """Receive the header of the next block, if it has arrived."""
        space = memoryview(bytearray(_HEAD.size - len(self.head)))
        try:
            got = self.stream.receive_into(space)
        except BlockingIOError:
            return
        self.ended = not got
        self.head += space[:got]
        if self.ended and self.head:
            raise ConnectionResetError(_INCOMPLETE)
        if len(self.head) == _HEAD.size:
            self.block, self.left = _HEAD.unpack(self.head)
            self.head = b""
            if not 1 <= self.left <= BLOCK:
                raise ProtocolError(f"received a block of {self.left} bytes; the allowed range is 1 to {BLOCK}")

    def receive_into(self, space: memoryview) -> int:
        """Receive some bytes of the current block; return how many.

        Raises:
            BlockingIOError: no bytes have arrived.
            OSError: the connection has ended.
        """
        got = self.stream.receive_into(space[: self.left])
        if not got:
            raise ConnectionResetError(_INCOMPLETE)
        self.left -= got
        return got


class StripedStream:
    """A byte stream over several connections; see `aiocoll.transport.byte_stream.ByteStream`.

    The other end must also be a `StripedStream`.

    Args:
        loop: event loop of the connections.
        first: the first connection.
    """

    __slots__ = (
        "_ahead",
        "_current",
        "_delivered",
        "_error",
        "_expected",
        "_head",
        "_is_scheduled",
        "_kept",
        "_left",
        "_loop",
        "_next",
        "_readable",
        "_stripes",
        "_writable",
        "bound",
        "check_rank",
        "sock",
    )

    def __init__(self, loop: asyncio.AbstractEventLoop, first: ByteStream) -> None:
        self.sock: socket.socket = first.sock
        self.bound = first.bound
        self.check_rank = first.check_rank
        self._stripes = [_Stripe(first)]
        self._loop = loop
        self._readable: Callable[[], object] | None = None
        self._writable: Callable[[], object] | None = None
        self._is_scheduled = False
        self._error: OSError | None = None
        # The block that is being sent: its connection, the unsent part of its header, and the number of its unsent
        # bytes. `_next` is the number of the block after it.
        self._current = self._stripes[0]
        self._head = memoryview(b"")
        self._left = 0
        self._next = 0
        # Number of the block to deliver next, number of its delivered bytes, and complete later blocks by number.
        self._expected = 0
        self._delivered = 0
        self._kept: dict[int, bytearray] = {}
        # Number of received bytes of later blocks, complete or incomplete.
        self._ahead = 0

    @property
    def connections(self) -> int:
        """The number of connections of this stream."""
        return len(self._stripes)

    def add(self, stream: ByteStream) -> None:
        """Add a connection. The other end must add it, too, before either end closes it."""
        self._stripes.append(_Stripe(stream))
        self._watch()

    def send(self, data: Bytes) -> int:
        """Send some bytes; return the number of bytes that were accepted."""
        return self.send_parts((data,))

    def send_parts(self, parts: Iterable[Bytes]) -> int:
        """Send some bytes of several buffers in order, as `send` does for one buffer."""
        views = [memoryview(part) for part in parts]
        size, taken = sum(map(len, views)), 0
        while taken < size:
            if not self._left:
                self._begin(size - taken)
            wanted = min(self._left, size - taken)
            head = len(self._head)
            try:
                sent = self._current.stream.send_parts([self._head, *_slice_views(views, taken, taken + wanted)])
            except BlockingIOError:
                break
            self._head = self._head[sent:]
            sent = max(0, sent - head)
            self._left -= sent
            taken += sent
            if sent < wanted:
                break
        if size and not taken:
            raise BlockingIOError
        return taken

    def receive_into(self, space: memoryview) -> int:
        """Receive some bytes; return how many, or 0 if the other end has ended its sending side."""
        got = 0
        try:
            while got < len(space) and (more := self._deliver(space[got:])):
                got += more
            for stripe in self._stripes:
                self._store_early(stripe)
        except OSError as error:
            self._error = self._error or error
        self._watch()
        if got:
            return got
        if self._error is not None:
            raise self._error
        if self._kept or self._find(self._expected) is not None or not all(each.ended for each in self._stripes):
            raise BlockingIOError
        return 0

    def start_reading(self, readable: Callable[[], object]) -> None:
        """Call `readable` whenever there is data to receive."""
        self._readable = readable
        for stripe in self._stripes:
            stripe.watched = False
        self._watch()

    def stop_reading(self) -> None:
        """Stop calling `readable`."""
        self._readable = None
        self._watch()

    def start_writing(self, writable: Callable[[], object]) -> None:
        """Call `writable` whenever the stream accepts data."""
        self._writable = writable
        self._current.stream.start_writing(writable)

    def stop_writing(self) -> None:
        """Stop calling `writable`."""
        self._writable = None
        self._current.stream.stop_writing()

    def shutdown(self) -> None:
        """Shut down the sending side of all connections."""
        for stripe in self._stripes:
            stripe.stream.shutdown()

    def close(self) -> None:
        """Close all connections."""
        self._readable = self._writable = None
        for stripe in self._stripes:
            stripe.stream.close()

    def _begin(self, nbytes: int) -> None:
        """Start a block for the next `nbytes` to send, or for the maximum block size if that is less."""
        self._left = min(nbytes, BLOCK)
        before = self._current
        self._current = before if len(self._stripes) == 1 else self._choose(self._left)
        if self._writable is not None and self._current is not before:
            before.stream.stop_writing()
            self._current.stream.start_writing(self._writable)
        self._head = memoryview(_HEAD.pack(self._next, self._left))
        self._next += 1

    def _choose(self, nbytes: int) -> _Stripe:
        """Return the connection on which to send the next block of `nbytes`."""
        fewest = inf
        for stripe in self._stripes:
            queued = stripe.queued()
            if queued + nbytes <= window(stripe.stream.sock):
                return stripe
            if queued < fewest:
                fewest, found = queued, stripe
        return found

    def _find(self, block: int) -> _Stripe | None:
        """Return the connection on which block `block` arrives; None if the block's header has not arrived yet."""
        return next((stripe for stripe in self._stripes if stripe.block == block), None)

    def _receive_header(self, stripe: _Stripe) -> None:
        """Receive a block header. Raise a connection error only when all other data has been delivered."""
        try:
            stripe.find_block()
        except OSError as error:
            stripe.ended = True
            self._error = self._error or error
        if stripe.block is not None and (stripe.block < self._expected or stripe.block in self._kept):
            raise ProtocolError(f"received block {stripe.block} twice")

    def _deliver(self, space: memoryview) -> int:
        """Copy some bytes of the next block to the caller's buffer; return how many."""
        kept, stripe = self._kept.get(self._expected), None
        if kept is None:
            for each in self._stripes:
                if each.block is None and not each.ended and self._find(self._expected) is None:
                    self._receive_header(each)
            stripe = self._find(self._expected)
            if stripe is None:
                return 0
            kept = stripe.ahead
        if self._delivered < len(kept):
            part = memoryview(kept)[self._delivered : self._delivered + len(space)]
            space[: len(part)] = part
            self._delivered += len(part)
            self._ahead -= len(part)
            got = len(part)
        else:
            assert stripe is not None
            try:
                got = stripe.receive_into(space)
            except BlockingIOError:
                return 0
        if self._delivered == len(kept) and (stripe is None or not stripe.left):
            self._kept.pop(self._expected, None)
            self._expected += 1
            self._delivered = 0
            if stripe is not None:
                stripe.block, stripe.ahead = None, bytearray()
        return got

    def _store_early(self, stripe: _Stripe) -> None:
        """Receive blocks that arrive early on a connection, and keep them until earlier blocks are delivered."""
        while self._ahead < AHEAD and not stripe.ended:
            if stripe.block is None:
                self._receive_header(stripe)
            if stripe.block in (None, self._expected):
                return
            space = memoryview(bytearray(stripe.left))
            try:
                got = stripe.receive_into(space)
            except BlockingIOError:
                return
            stripe.ahead += space[:got]
            self._ahead += got
            if not stripe.left:
                assert stripe.block is not None
                self._kept[stripe.block] = stripe.ahead
                stripe.block, stripe.ahead = None, bytearray()

    def _watch(self) -> None:
        """Watch the connections whose data can be received now. Stop watching the others."""
        open_stripes = [stripe for stripe in self._stripes if not stripe.ended]
        full = self._ahead >= AHEAD
        due = [each for each in open_stripes or self._stripes[:1] if not full or each.block in (None, self._expected)]
        for stripe in self._stripes:
            if self._readable is not None and stripe in due:
                if not stripe.watched:
                    stripe.watched = True
                    stripe.stream.start_reading(self._readable)
            elif stripe.watched:
                stripe.watched = False
                stripe.stream.stop_reading()
        if self._readable is not None and not self._is_scheduled and self._has_buffered():
            self._is_scheduled = True
            self._loop.call_soon(self._read_again)

    def _has_buffered(self) -> bool:
        """Return whether received bytes wait in memory, which the event loop's selector cannot report."""
        stripe = self._find(self._expected)
        return self._expected in self._kept or (stripe is not None and self._delivered < len(stripe.ahead))

    def _read_again(self) -> None:
        self._is_scheduled = False
        if self._readable is not None:
            self._readable()
            self._watch()


def _slice_views(views: Sequence[memoryview], start: int, end: int) -> list[memoryview]:
    """Return views of the bytes from `start` to `end` in the concatenation of `views`."""
    found = []
    for view in views:
        if start < len(view) and end > 0:
            found.append(view[max(start, 0) : end])
        start -= len(view)
        end -= len(view)
    return found
