"""What a connection between two hosts can do, measured with a few dozen packets.

    who measures                             who answers
      a byte, n; n packets at once   ------>
              <------   how far the last was behind the first: bytes, and seconds

The packets leave faster than any link that matters carries them, so what lies between the first and the last is the
time of the bytes on the slowest part of the way, as Dovrolis, Ramanathan and Moore measure it ("What do packet
dispersion techniques measure?", INFOCOM 2001). Each train of packets is as long as the window that TCP has opened by
then, so that it does not stop in between. The answer to a train without packets comes after one round trip.

Cost: five round trips and 140 KB, on a connection that exists for this alone.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from aiocoll.transport.byte_stream import ByteStream, receive_message, resolve, send_message

__all__ = ["LinkFigures", "answer", "measure"]

#: Bytes of a packet, less than any network takes with its headers and those of encryption.
PACKET = 1280
#: Packets of the trains: TCP begins with ten, and doubles them with each answer.
TRAINS = (0, 10, 20, 40, 40)
#: Of these, the last that count for the rate: shorter ones may come faster than a receiver can tell.
COUNTED = 3
#: Packets written at a time: as many bytes as make few system calls, and several records where there is encryption.
_AT_ONCE = 4
_ANSWER = struct.Struct("!Id")


class LinkFigures(NamedTuple):
    """What a link does.

    Attributes:
        rtt: seconds of a round trip.
        rate: bytes per second; 0 if they came too fast to tell.
    """

    rtt: float
    rate: float


async def measure(stream: ByteStream, clock: Callable[[], float], seconds: float) -> LinkFigures:
    """Measure the way to the other end, which is to `answer`; what has not been tried after so many seconds is not.

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
    """Receive trains of packets, and tell the other end how they came.

    Raises:
        OSError: the connection has ended.
    """
    for _ in TRAINS:
        (packets,) = await receive_message(stream, 1)
        nbytes, behind = await _train(stream, packets * PACKET, clock) if packets else (0, 0.0)
        send_message(stream, _ANSWER.pack(nbytes, behind))


async def _train(stream: ByteStream, nbytes: int, clock: Callable[[], float]) -> tuple[int, float]:
    """Receive so many bytes; return how many came after the first, and how many seconds after them the last."""
    space = memoryview(bytearray(nbytes))
    arrivals: list[tuple[float, int]] = []
    done = asyncio.get_running_loop().create_future()

    def readable() -> None:
        nonlocal space
        try:
            received = stream.receive_into(space)
            if not received:
                raise ConnectionResetError("it closed the connection while it was measured")
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
