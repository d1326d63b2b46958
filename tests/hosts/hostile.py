"""Strangers on a host: connections of every kind that has no key, many at once, to all listeners of a job.

The argument says in JSON where to ("places": host, port and whether TLS is spoken there), how many connections of each
kind to each place ("each"), how many at once, and what others were heard saying ("recorded", in hex). In the end a line
of JSON tells of each kind how many there were, the longest that one of them was let be, in seconds since it was
connected, and the most bytes that one was sent. What no stranger may be told ends this program with an error.
"""

from __future__ import annotations

import asyncio
import errno
import json
import os
import resource
import socket
import ssl
import struct
import sys
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import cache
from typing import Any

from aiocoll.security.handshake import (
    CHALLENGE_SIZE,
    HELLO_SIZE,
    MAGIC,
    PROOF_SIZE,
    VERDICT_SIZE,
    WIRE_VERSION,
    ClientHandshake,
    ConnKind,
    Identity,
    job_id,
)
from aiocoll.security.tls import binding
from aiocoll.transport.frame import HEADER, FrameKind

HTTP = b"GET / HTTP/1.1\r\nHost: 10.77.0.1\r\n\r\n"
#: Of TLS: a record of 16 bits of length that begins a handshake, and a client's first words of 24 bits of length.
LONG_RECORD, LONG_HELLO = b"\x16\x03\x01\xff\xff", b"\x16\x03\x01\x40\x00\x01\xff\xff\xff\x03\x03"
#: Of a store and of a link.
LONG_FRAME = struct.pack("!I", 0xFFFFFFFF)
LONG_DATA = HEADER.pack(FrameKind.DATA, 0, 0, 0, 1, 0, 0, 0xFFFFFFFF, 0xFFFFFFFF)
#: Seconds between two bytes of who is slow, and after which a server that has not ended a connection never will.
SLOWLY, FOREVER = 1.0, 20.0
#: What a client without the key may be sent by a listener without TLS, and the most that one with TLS begins with.
CHALLENGE = MAGIC + WIRE_VERSION.to_bytes(4, "little")
MOST_OF_TLS = 2048

recorded: list[bytes] = []


class Visit:
    """One connection."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.heard = bytearray()

    async def say(self, data: bytes) -> None:
        """Send."""
        await asyncio.get_running_loop().sock_sendall(self.sock, data)

    async def hear(self, nbytes: int = 1 << 16) -> bytes:
        """Receive something, b"" at the end."""
        said = await asyncio.get_running_loop().sock_recv(self.sock, nbytes)
        self.heard += said
        return said

    async def message(self, nbytes: int) -> bytes:
        """Receive exactly so much."""
        while len(self.heard) < nbytes:
            if not await self.hear():
                raise ConnectionResetError
        message = bytes(self.heard[:nbytes])
        return message

    def check(self, encrypted: bool) -> None:
        """Find out whether the server has said more than it may."""
        if encrypted:
            assert len(self.heard) <= MOST_OF_TLS, bytes(self.heard)
            assert self.heard[:1] in (b"", b"\x15", b"\x16"), bytes(self.heard)
        else:
            nothing_told(bytes(self.heard))


def nothing_told(heard: bytes) -> None:
    """Only a nonce, and zeros."""
    assert CHALLENGE.startswith(heard[: len(CHALLENGE)]), heard
    assert bytes(VERDICT_SIZE).startswith(heard[CHALLENGE_SIZE:]), heard


class Secured(Visit):
    """One connection with TLS; `heard` is what was in it."""

    def __init__(self, sock: socket.socket) -> None:
        super().__init__(sock)
        self._come, self._go = ssl.MemoryBIO(), ssl.MemoryBIO()
        self.tls = context().wrap_bio(self._come, self._go)

    async def shake_hands(self) -> None:
        """Do the TLS handshake."""
        while True:
            try:
                self.tls.do_handshake()
                break
            except ssl.SSLWantReadError:
                await self._more()
            finally:
                await super().say(self._go.read())

    async def say(self, data: bytes) -> None:
        """Encrypt and send."""
        self.tls.write(data)
        await super().say(self._go.read())

    async def hear(self, nbytes: int = 1 << 16) -> bytes:
        """Receive and decrypt."""
        while True:
            try:
                said = self.tls.read(nbytes)
                self.heard += said
                return said
            except ssl.SSLWantReadError:
                if not await self._more():
                    return b""
            except ssl.SSLError:  # the server has said why it ends the connection
                return b""

    async def _more(self) -> bytes:
        await super().say(self._go.read())
        said = await asyncio.get_running_loop().sock_recv(self.sock, 1 << 16)
        self._come.write(said) if said else self._come.write_eof()
        return said

    def check(self, encrypted: bool) -> None:
        """Find out whether the server has said more than it may."""
        nothing_told(bytes(self.heard))


@cache
def context(version: ssl.TLSVersion = ssl.TLSVersion.TLSv1_3) -> ssl.SSLContext:
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    made.check_hostname = False
    made.verify_mode = ssl.CERT_NONE
    made.maximum_version = version
    return made


@cache
def client_hello(version: ssl.TLSVersion = ssl.TLSVersion.TLSv1_3) -> bytes:
    """Return the first message of a TLS client."""
    said = ssl.MemoryBIO()
    with suppress(ssl.SSLWantReadError):
        context(version).wrap_bio(ssl.MemoryBIO(), said).do_handshake()
    return said.read()


def liar(number: int, bound: bytes = b"") -> ClientHandshake:
    """Return the messages of a client with another key that claims a rank and a purpose."""
    kind = list(ConnKind)[number % len(ConnKind)]
    rank = -1 if kind is ConnKind.STORE else number // len(ConnKind) % 2
    return ClientHandshake(Identity(job_id(""), 0, rank, 2, kind), b"another key of this length", os.urandom, bound)


Conduct = Callable[[Any, int], Awaitable[None]]


def says(*words: bytes | Callable[[], bytes]) -> Conduct:
    """Say one of these, and wait."""

    async def conduct(visit: Visit, number: int) -> None:
        said = words[number % len(words)]
        await visit.say(said() if callable(said) else said)

    return conduct


async def silent(visit: Visit, number: int) -> None:
    """Say nothing."""


async def slow(visit: Visit, number: int) -> None:
    """Say what is expected, a byte at a time."""
    for byte in client_hello() if number % 2 else liar(number).hello():
        await visit.say(bytes([byte]))
        with suppress(TimeoutError):
            async with asyncio.timeout(SLOWLY):
                if not await visit.hear():
                    return


async def fragments(visit: Visit, number: int) -> None:
    """Begin TLS with a packet for every few bytes of a client's first words."""
    visit.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for begin in range(0, len(client_hello()), 40):
        await visit.say(client_hello()[begin : begin + 40])
        await asyncio.sleep(0)


async def half_closed(visit: Visit, number: int) -> None:
    """Say something, and that this is all."""
    await visit.say((b"", liar(number).hello(), client_hello())[number % 3])
    visit.sock.shutdown(socket.SHUT_WR)


async def reset(visit: Visit, number: int) -> None:
    """Be gone at once, with a reset."""
    visit.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    await visit.say((b"", b"a", client_hello())[number % 3])
    visit.sock.close()


async def wrong_key(visit: Visit, number: int) -> None:
    """Do all of a handshake, with another key."""
    client = liar(number, binding(visit.tls.getpeercert(binary_form=True)) if isinstance(visit, Secured) else b"")
    await visit.say(client.hello())
    await visit.say(client.prove(await visit.message(CHALLENGE_SIZE)))


async def reflected(visit: Visit, number: int) -> None:
    """Say what the server says."""
    await visit.say(liar(number).hello())
    await visit.say(((await visit.message(CHALLENGE_SIZE)) * 2)[:PROOF_SIZE])


async def replayed(visit: Visit, number: int) -> None:
    """Say what a rank has said."""
    await visit.say(recorded[number % len(recorded)])


async def replayed_in_step(visit: Visit, number: int) -> None:
    """Say what a rank has said, each message when it is due."""
    said = recorded[number % len(recorded)]
    await visit.say(said[:HELLO_SIZE])
    await visit.message(CHALLENGE_SIZE)
    await visit.say(said[HELLO_SIZE:])


ANYWHERE: dict[str, Conduct] = {
    "silent": silent,
    "slow": slow,
    "half closed": half_closed,
    "reset": reset,
    "garbage": says(lambda: os.urandom(100)),
    "garbage after a good beginning": says(lambda: liar(0).hello() + os.urandom(PROOF_SIZE), MAGIC + b"\xff" * 100),
    "HTTP": says(HTTP),
    "TLS": says(client_hello),
    "TLS 1.2": says(lambda: client_hello(ssl.TLSVersion.TLSv1_2)),
    "TLS that stalls": says(lambda: client_hello()[:100], lambda: client_hello()[:5]),
    "TLS in fragments": fragments,
    "no TLS": says(lambda: liar(0).hello()),
    "oversize": says(LONG_RECORD, LONG_HELLO, LONG_FRAME, LONG_DATA),
    "oversize after garbage": says(lambda: os.urandom(50) + LONG_FRAME, lambda: liar(0).hello() + LONG_DATA * 9),
    "replayed": replayed,
}
#: With what is expected below: TLS where that is spoken, and nothing elsewhere.
INSIDE: dict[str, Conduct] = {
    "silence inside": silent,
    "garbage inside": says(lambda: os.urandom(100)),
    "HTTP inside": says(HTTP),
    "oversize inside": says(LONG_FRAME, LONG_DATA * 3, lambda: liar(0).hello() + LONG_FRAME * 20),
    "wrong key": wrong_key,
    "reflected": reflected,
    "replayed inside": replayed_in_step,
}


class Strangers:
    """What was found out about each kind."""

    def __init__(self, at_once: int) -> None:
        self.found: dict[str, list[float]] = defaultdict(lambda: [0, 0.0, 0])
        self._places = asyncio.Semaphore(at_once)

    async def visit(self, place: tuple[str, int, bool], kind: str, number: int) -> None:
        """Be there until the server ends it."""
        host, port, encrypted = place
        async with self._places:
            with await connected(host, port) as sock:
                began = time.monotonic()
                visit = Secured(sock) if kind in INSIDE and encrypted else Visit(sock)
                try:
                    async with asyncio.timeout(FOREVER):
                        await behave(visit, INSIDE.get(kind) or ANYWHERE[kind], number)
                except TimeoutError:
                    raise AssertionError(f"{kind} at {place} is not ended") from None
                seconds = time.monotonic() - began
                visit.check(encrypted)
        found = self.found[kind]
        found[:] = found[0] + 1, max(found[1], seconds), max(found[2], len(visit.heard))


async def connected(host: str, port: int) -> socket.socket:
    """Connect, again and again: who listens may be about to."""
    while True:
        sock = socket.socket()
        sock.setblocking(False)
        try:
            await asyncio.get_running_loop().sock_connect(sock, (host, port))
            return sock
        except (ConnectionRefusedError, ConnectionResetError):
            sock.close()
            await asyncio.sleep(0.01)
        except BaseException:
            sock.close()
            raise


async def behave(visit: Visit, conduct: Conduct, number: int) -> None:
    try:
        if isinstance(visit, Secured):
            await visit.shake_hands()
        await conduct(visit, number)
        while await visit.hear():
            pass
    except (ConnectionError, ssl.SSLError):
        pass
    except OSError as error:
        if error.errno not in (errno.EBADF, errno.ENOTCONN):  # one end or the other is gone
            raise


async def main(places: list[tuple[str, int, bool]], each: int, at_once: int) -> None:
    print(json.dumps("ready"), flush=True)
    strangers = Strangers(at_once)
    async with asyncio.TaskGroup() as group:
        for number in range(each):
            for kind in (*ANYWHERE, *INSIDE):
                for place in places:
                    group.create_task(strangers.visit(place, kind, number))
    print(json.dumps(strangers.found), flush=True)


if __name__ == "__main__":
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    given = json.loads(sys.argv[1])
    recorded += map(bytes.fromhex, given["recorded"])
    asyncio.run(main(given["places"], given["each"], given["at_once"]))
