"""Measurement of round-trip time and bandwidth between two hosts, with a few dozen packets.

    the end that measures                    the end that answers
      a byte, n; n packets at once   ------>
              <------   from the first packet to the last: bytes, and seconds

The packets are sent faster than the network carries them. The time between the first and the last is therefore the time
that the bytes take on the slowest part of the path. Source: Dovrolis, Ramanathan and Moore, "What do packet dispersion
techniques measure?", INFOCOM 2001. Each train of packets is as long as the TCP window at that time, so that it is sent
without a stop. The answer to a train without packets arrives after one round trip.

Cost: five round trips and 140 KB, on a separate connection.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from aiocoll.transport.byte_stream import ByteStream, receive_message, resolve, send_message

__all__ = ["LinkFigures", "answer", "measure"]

#: Payload bytes of a packet. With all headers and encryption, the packet fits into the usual MTU of 1500 bytes.
PACKET = 1280
#: Number of packets in each train. TCP starts with a window of ten packets, and doubles it with each answer.
TRAINS = (0, 10, 20, 40, 40)
#: Number of trains, counted from the last, that determine the bandwidth. Shorter trains may arrive too fast to be
#: measured.
COUNTED = 3
#: Number of packets per write: large enough for few system calls, small enough for several TLS records per train.
_AT_ONCE = 4
_ANSWER = struct.Struct("!Id")


class LinkFigures(NamedTuple):
    """The measured round-trip time and bandwidth of a network path.

    Attributes:
        rtt: round-trip time in seconds.
        rate: bytes per second; 0 if they arrived too fast to be measured.
    """

    rtt: float
    rate: float


async def measure(stream: ByteStream, clock: Callable[[], float], seconds: float) -> LinkFigures:
    """Measure the path to the other end, which must call `answer`. Start no more packet trains after `seconds`.

    Raises:
        OSError: the connection has ended.
    """
    end = clock() + seconds
    rtt = 0.0
    rates: list[float] = []
    for packets in TRAINS:
        sent = clock()
        if rtt and sent > end:
            break
        send_message(stream, bytes([packets]))
        for part in range(0, packets, _AT_ONCE):
            await _send(stream, bytes(min(_AT_ONCE, packets - part) * PACKET))
        nbytes, behind = _ANSWER.unpack(await receive_message(stream, _ANSWER.size))
        if packets:
            rates.append(nbytes / behind if behind > 0 else 0.0)
        else:
            rtt = clock() - sent
    counted = sorted(rates[-COUNTED:]) or [0.0]
    return LinkFigures(rtt, counted[len(counted) // 2])


async def answer(stream: ByteStream, clock: Callable[[], float]) -> None:
    """Receive the packet trains of `measure`, and send their sizes and durations back.

    Raises:
        OSError: the connection has ended.
    """
    for _ in TRAINS:
        (packets,) = await receive_message(stream, 1)
        nbytes, behind = await _train(stream, packets * PACKET, clock) if packets else (0, 0.0)
        send_message(stream, _ANSWER.pack(nbytes, behind))


async def _train(stream: ByteStream, nbytes: int, clock: Callable[[], float]) -> tuple[int, float]:
    """Receive `nbytes`; return the bytes after the first arrival, and the seconds from first to last arrival."""
    space = memoryview(bytearray(nbytes))
    arrivals: list[tuple[float, int]] = []
    done = asyncio.get_running_loop().create_future()

    def readable() -> None:
        nonlocal space
        try:
            received = stream.receive_into(space)
            if not received:
                raise ConnectionResetError("the peer closed the connection during the measurement")
        except BlockingIOError:
            return
        except OSError as error:
            stream.stop_reading()
            done.set_exception(error)
            return
        arrivals.append((clock(), received))
        space = space[received:]
        if not space:
            stream.stop_reading()
            done.set_result(None)

    stream.start_reading(readable)
    try:
        await done
    finally:
        stream.stop_reading()
    (first, at_first), (last, _) = arrivals[0], arrivals[-1]
    return nbytes - at_first, last - first


async def _send(stream: ByteStream, message: bytes) -> None:
    view = memoryview(message)
    while view:
        try:
            view = view[stream.send(view) :]
        except BlockingIOError:
            writable = asyncio.get_running_loop().create_future()
            stream.start_writing(partial(resolve, writable))
            try:
                await writable
            finally:
                stream.stop_writing()
