"""Link probes: measured round-trip time and rate equal the simulated ones, and a closed connection is reported."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from aiocoll.testing.virtual import VirtualLoop
from aiocoll.transport.byte_stream import Bytes, ByteStream
from aiocoll.transport.stream.plain_stream import PlainStream
from aiocoll.transport.stream.probe import PACKET, TRAINS, LinkFigures, answer, measure


class Wire:
    """An end of a simulated connection with a data rate in bytes per second and a delay in seconds.

    Attributes:
        other: The other end.
        sent: The number of bytes sent so far.
    """

    bound = b""
    other: Wire

    def __init__(self, rate: float, delay: float, room: int, piece: int) -> None:
        self._loop = asyncio.get_running_loop()
        self._rate, self._delay, self._room, self._piece = rate, delay, room, piece
        self._idle = 0.0
        self._waiting = 0
        self._arrived = bytearray()
        self._readable: Callable[[], object] | None = None
        self._writable: Callable[[], object] | None = None
        self.sent = 0

    def send(self, data: Bytes) -> int:
        taken = min(len(data), self._room - self._waiting)
        if not taken:
            raise BlockingIOError
        for start in range(0, taken, self._piece):
            part = bytes(data[start : min(start + self._piece, taken)])
            self._idle = max(self._idle, self._loop.time()) + len(part) / self._rate
            self._waiting += len(part)
            self._loop.call_at(self._idle, self._leave, len(part))
            self._loop.call_at(self._idle + self._delay, self.other._arrive, part)
        self.sent += taken
        return taken

    def _leave(self, nbytes: int) -> None:
        self._waiting -= nbytes
        if self._writable is not None:
            self._writable()

    def _arrive(self, part: bytes) -> None:
        self._arrived += part
        if self._readable is not None:
            self._readable()

    def receive_into(self, space: memoryview) -> int:
        if not self._arrived:
            raise BlockingIOError
        taken = min(len(space), len(self._arrived))
        space[:taken] = self._arrived[:taken]
        del self._arrived[:taken]
        return taken

    def start_reading(self, readable: Callable[[], object]) -> None:
        self._readable = readable
        if self._arrived:
            self._loop.call_soon(lambda: self._arrived and self._readable and self._readable())

    def stop_reading(self) -> None:
        self._readable = None

    def start_writing(self, writable: Callable[[], object]) -> None:
        self._writable = writable

    def stop_writing(self) -> None:
        self._writable = None

    def send_parts(self, parts: Iterable[Bytes]) -> int:
        raise NotImplementedError

    sock: Any = None

    def shutdown(self) -> None:
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError


def measured_figures(
    rate: float, delay: float, *, room: int = 1 << 20, piece: int = PACKET, seconds: float = 1e9
) -> Any:
    """Return the round-trip time and the rate that a probe measures, and the number of bytes that the probe sends."""

    async def main() -> tuple[LinkFigures, int]:
        one, two = (Wire(rate, delay, room, piece) for _ in range(2))
        one.other, two.other = two, one
        loop = asyncio.get_running_loop()
        answering = asyncio.ensure_future(answer(two, loop.time))
        found = await measure(one, loop.time, seconds)
        answering.cancel()
        await asyncio.wait([answering])
        return found, one.sent

    with asyncio.Runner(loop_factory=lambda: VirtualLoop(0, None)) as runner:
        return runner.run(main())


@pytest.mark.parametrize("rate", [1e4, 1e6, 125e6, 1e9])
@pytest.mark.parametrize("delay", [0.0, 50e-6, 25e-3, 1.0])
@pytest.mark.parametrize("room", [1 << 20, 5000], ids=["", "full"])
def test_link_probe_measures_round_trip_time_and_rate(rate: float, delay: float, room: int) -> None:
    """Check the measurements; the round trip includes a request of 1 byte and a reply of 12 bytes."""
    found, sent = measured_figures(rate, delay, room=room)
    assert found.rtt == pytest.approx(2 * delay + 13 / rate)
    assert found.rate == pytest.approx(rate)
    assert sent == len(TRAINS) + sum(TRAINS) * PACKET


def test_link_probe_of_an_instant_link_returns_no_rate() -> None:
    assert measured_figures(float("inf"), 1e-3)[0] == LinkFigures(2e-3, 0.0)


def test_link_probe_of_a_distant_host_sends_one_request() -> None:
    found, sent = measured_figures(1e6, 2.0, seconds=1.0)
    assert found == LinkFigures(pytest.approx(4.0, rel=1e-4), 0.0)
    assert sent == 1


def test_link_probe_sends_no_more_data_than_its_time_limit_allows() -> None:
    found, sent = measured_figures(1e6, 0.2, seconds=1.0)
    assert found.rate == pytest.approx(1e6)
    assert sent == 3 + sum(TRAINS[:3]) * PACKET


@pytest.mark.parametrize("side", [measure, answer])
@pytest.mark.parametrize("sent", [b"", b"\x02", b"\x02" + bytes(PACKET)], ids=len)
async def test_link_probe_reports_a_closed_connection(side: Callable[..., Any], sent: bytes) -> None:
    near, far = socket.socketpair()
    near.setblocking(False)
    loop = asyncio.get_running_loop()
    stream: ByteStream = PlainStream(loop, near)
    arguments = (stream, loop.time) if side is answer else (stream, loop.time, 1.0)
    task = asyncio.ensure_future(side(*arguments))
    with far:
        far.sendall(sent)
    try:
        with pytest.raises(ConnectionError):
            await task
    finally:
        stream.close()
