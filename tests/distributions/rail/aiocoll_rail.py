"""A transport plugin with its own medium for data, here a socket: ``GroupOptions(transport="rail")``.

It is set up like a transport over RDMA. The ends exchange an address and a secret over the authenticated connection,
then connect their medium. They keep the connection to detect the end of the peer.
"""

from __future__ import annotations

import asyncio
import hmac
import socket
import struct
from collections import deque

from aiocoll.plugins import (
    HEADER,
    TRANSPORT_VERSION,
    ByteStream,
    CarrierRequest,
    ConnKind,
    Header,
    Registry,
    Sink,
    TransportProvider,
    receive_message,
    send_message,
)

#: The offer that the dialling end sends: its port, and a secret that the other end must present there.
_OFFER = struct.Struct("!H16s")
#: The number of received bytes after which a callback returns to the event loop.
_TURN = 1 << 18
#: The payload length in the header that ends one direction of a link. No frame has this length.
_NO_LENGTH = (1 << 32) - 1
_LAST = HEADER.pack(0, 0, 0, 0, 0, 0, 0, _NO_LENGTH, 0)


class RailLink:
    """An end of a data link over the plugin's socket; see `aiocoll.plugins.Link`."""

    sink: Sink
    shared = None
    carrier = "rail"
    kind = ConnKind.DATA

    def __init__(self, stream: ByteStream, rail: socket.socket, peer: int) -> None:
        self.peer = peer
        self.closed = False
        self._loop = asyncio.get_running_loop()
        self._stream = stream
        self._rail = rail
        self._waiting: deque[memoryview] = deque()
        self._ending = self._peer_has_ended = False
        self._refusing = False
        self._started = False
        # The receive state: the header of the current payload, the memory that is filled, and the filled bytes.
        self._header: Header | None = None
        self._target = memoryview(bytearray(HEADER.size))
        self._placed = False
        self._filled = 0

    @property
    def writable(self) -> bool:
        return not self._waiting

    def peer_process(self) -> None:
        return None

    def start(self) -> None:
        self._started = True
        self._loop.add_reader(self._rail, self.poll)
        self._stream.start_reading(self._stream_ended)

    def write(self, header: bytes, payload: memoryview | None = None) -> bool:
        if self.closed or self._ending:
            return True
        idle = not self._waiting
        self._waiting += [memoryview(part) for part in (header, payload) if part is not None]
        return self._send() if idle else False

    def poll(self) -> bool:
        taken = 0
        while self._started and not self.closed and taken < _TURN:
            try:
                received = self._rail.recv_into(self._target[self._filled :])
            except BlockingIOError:
                break
            except OSError as error:
                self._lose(error)
                return True
            if not received:
                self._lose(ConnectionResetError(f"rank {self.peer} closed the rail"))
                return True
            taken += received
            self._filled += received
            if self._filled == len(self._target):
                self._complete()
        return taken > 0

    def divert(self) -> None:
        """Receive the rest of the payload into memory of this link."""
        if self._placed:
            self._target = memoryview(bytearray(len(self._target)))

    def finish(self) -> None:
        if not self.closed and not self._ending:
            self.write(_LAST)
            self._ending = True

    def fail(self, error: Exception) -> None:
        if not self.closed:
            self._lose(error)

    def close(self) -> None:
        if self.closed:
            return
        self.closed = True
        self._waiting.clear()
        if not self._loop.is_closed():
            self._loop.remove_reader(self._rail)
            self._loop.remove_writer(self._rail)
        self._rail.close()
        self._stream.close()

    def _send(self) -> bool:
        try:
            while self._waiting:
                part = self._waiting[0]
                sent = self._rail.send(part)
                if sent < len(part):
                    self._waiting[0] = part[sent:]
                else:
                    self._waiting.popleft()
        except BlockingIOError:
            self._loop.add_writer(self._rail, self._resume)
        except OSError:
            self._waiting.clear()  # the next read raises the connection's error
        return not self._waiting

    def _resume(self) -> None:
        if self._send():
            self._loop.remove_writer(self._rail)
            self.sink.drained(self)
            self._end_both()

    def _complete(self) -> None:
        """Handle a header or payload after its last byte has arrived."""
        try:
            if self._header is None:
                header = HEADER.unpack(self._target)
                if header[7] == _NO_LENGTH:
                    self._peer_has_ended = True
                    self.finish()
                    self._end_both()
                elif header[7]:
                    self._place(header)
                else:
                    self._deliver(header, memoryview(b""))
            else:
                self._deliver(self._header, None if self._placed else self._target)
        except Exception as error:
            self._refusing = True
            self.sink.lost(self, error)

    def _place(self, header: Header) -> None:
        place = None if self._refusing else self.sink.route(self, header)
        self._placed = place is not None
        self._expect(header, memoryview(bytearray(header[7])) if place is None else place)

    def _deliver(self, header: Header, payload: memoryview | None) -> None:
        self._expect(None, memoryview(bytearray(HEADER.size)))
        if not self._refusing:
            self.sink.deliver(self, header, payload)

    def _expect(self, header: Header | None, target: memoryview) -> None:
        self._header, self._target, self._filled = header, target.cast("B"), 0

    def _end_both(self) -> None:
        """Close the link if the peer has finished and all queued data has been sent."""
        if self._peer_has_ended and not self._waiting:
            self._lose(None)

    def _stream_ended(self) -> None:
        """Handle the end of `_stream`: receive the remaining data from the socket, then report the lost link."""
        self._stream.stop_reading()
        while self.poll():
            pass
        if not self.closed:
            self._lose(ConnectionResetError(f"rank {self.peer} closed the connection"))

    def _lose(self, error: Exception | None) -> None:
        if self.closed:
            return
        self.close()
        if not self._refusing:
            self.sink.lost(self, error)


class RailCarrier:
    """The carrier that makes data links over sockets; see `aiocoll.plugins.DataCarrier`."""

    def __init__(self, request: CarrierRequest) -> None:
        self._runtime = request.runtime
        self._links: list[RailLink] = []

    async def open(self, stream: ByteStream, peer: int, *, dialled: bool) -> RailLink | None:
        rail = await (self._offer(stream) if dialled else self._take(stream))
        link = RailLink(stream, rail, peer)
        self._links = [each for each in self._links if not each.closed]
        self._links.append(link)
        return link

    def catch_up(self) -> None:
        for link in self._links:
            while not link.closed and link.poll():
                pass

    def close(self) -> None:
        self._links.clear()

    async def _offer(self, stream: ByteStream) -> socket.socket:
        loop, secret = asyncio.get_running_loop(), self._runtime.random_bytes(16)
        with socket.create_server(("127.0.0.1", 0)) as server:
            server.setblocking(False)
            send_message(stream, _OFFER.pack(server.getsockname()[1], secret))
            while True:
                rail, _ = await loop.sock_accept(server)
                rail.setblocking(False)
                if hmac.compare_digest(await loop.sock_recv(rail, 16), secret):
                    return rail
                rail.close()  # the connection comes from another process of this host

    async def _take(self, stream: ByteStream) -> socket.socket:
        loop = asyncio.get_running_loop()
        port, secret = _OFFER.unpack(await receive_message(stream, _OFFER.size))
        rail = socket.socket()
        rail.setblocking(False)
        try:
            await loop.sock_connect(rail, ("127.0.0.1", port))
            await loop.sock_sendall(rail, secret)
        except BaseException:
            rail.close()
            raise
        return rail


def register(transports: Registry[TransportProvider]) -> None:
    provider = TransportProvider(medium="tcp", make_carrier=RailCarrier, auto_rank=10)
    transports.register("rail", provider, version=TRANSPORT_VERSION)
