"""Clients without the job key: many concurrent connections with every misbehaviour to all listeners of a job.

The argument is JSON. It has the "places" (host, port and whether TLS is used there), the number of connections of each
kind to "each" place, the number of them "at_once", and bytes "recorded" from ranks, in hex.

At the end, a line of JSON has for each kind the number of connections, the longest lifetime of one in seconds, and the
most bytes that a server sent on one. The program ends with an error if a server reveals anything.
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
#: For TLS: the start of a maximum-length handshake record, and of a maximum-length client hello.
LONG_RECORD, LONG_HELLO = b"\x16\x03\x01\xff\xff", b"\x16\x03\x01\x40\x00\x01\xff\xff\xff\x03\x03"
#: Headers that announce the largest possible frame: of a store connection, and of a link.
LONG_FRAME = struct.pack("!I", 0xFFFFFFFF)
LONG_DATA = HEADER.pack(FrameKind.DATA, 0, 0, 0, 1, 0, 0, 0xFFFFFFFF, 0xFFFFFFFF)
#: Seconds between two bytes of a slow client, and maximum seconds until the server must close a connection.
PAUSE, LONGEST = 1.0, 20.0
#: The first bytes that a listener without TLS may send, and the maximum number of bytes that a TLS listener may send.
CHALLENGE = MAGIC + WIRE_VERSION.to_bytes(4, "little")
MOST_OF_TLS = 2048

recorded: list[bytes] = []


class Visit:
    """A connection of a client without the job key."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.received = bytearray()

    async def send(self, data: bytes) -> None:
        """Send `data` without encryption."""
        await asyncio.get_running_loop().sock_sendall(self.sock, data)

    async def receive(self, nbytes: int = 1 << 16) -> bytes:
        """Receive and return some bytes, or b"" at the end of the connection."""
        data = await asyncio.get_running_loop().sock_recv(self.sock, nbytes)
        self.received += data
        return data

    async def receive_exactly(self, nbytes: int) -> bytes:
        """Return the first `nbytes` bytes of the connection; receive more bytes if necessary."""
        while len(self.received) < nbytes:
            if not await self.receive():
                raise ConnectionResetError
        message = bytes(self.received[:nbytes])
        return message

    def check(self, encrypted: bool) -> None:
        """Check that the server has sent at most a challenge without a proof, or the first messages of TLS."""
        if encrypted:
            assert len(self.received) <= MOST_OF_TLS, bytes(self.received)
            assert self.received[:1] in (b"", b"\x15", b"\x16"), bytes(self.received)
        else:
            check_challenge_only(bytes(self.received))


def check_challenge_only(received: bytes) -> None:
    """Check that the received bytes are only a challenge, followed by a handshake verdict of zeros."""
    assert CHALLENGE.startswith(received[: len(CHALLENGE)]), received
    assert bytes(VERDICT_SIZE).startswith(received[CHALLENGE_SIZE:]), received


class Secured(Visit):
    """A TLS connection of a client without the job key. The attribute `received` has the decrypted bytes."""

    def __init__(self, sock: socket.socket) -> None:
        super().__init__(sock)
        self._come, self._go = ssl.MemoryBIO(), ssl.MemoryBIO()
        self.tls = context().wrap_bio(self._come, self._go)

    async def shake_hands(self) -> None:
        """Carry out the TLS handshake."""
        while True:
            try:
                self.tls.do_handshake()
                break
            except ssl.SSLWantReadError:
                await self._more()
            finally:
                await super().send(self._go.read())

    async def send(self, data: bytes) -> None:
        """Encrypt and send `data`."""
        self.tls.write(data)
        await super().send(self._go.read())

    async def receive(self, nbytes: int = 1 << 16) -> bytes:
        """Receive, decrypt and return some bytes."""
        while True:
            try:
                data = self.tls.read(nbytes)
                self.received += data
                return data
            except ssl.SSLWantReadError:
                if not await self._more():
                    return b""
            except ssl.SSLError:  # the server sent an alert before it closed the connection
                return b""

    async def _more(self) -> bytes:
        await super().send(self._go.read())
        data = await asyncio.get_running_loop().sock_recv(self.sock, 1 << 16)
        self._come.write(data) if data else self._come.write_eof()
        return data

    def check(self, encrypted: bool) -> None:
        """Check that the server has sent at most a challenge without a proof."""
        check_challenge_only(bytes(self.received))


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
    data = ssl.MemoryBIO()
    with suppress(ssl.SSLWantReadError):
        context(version).wrap_bio(ssl.MemoryBIO(), data).do_handshake()
    return data.read()


def false_handshake(number: int, bound: bytes = b"") -> ClientHandshake:
    """Return a client handshake with a wrong key that claims a rank and a purpose, both chosen by `number`."""
    kind = list(ConnKind)[number % len(ConnKind)]
    rank = -1 if kind is ConnKind.STORE else number // len(ConnKind) % 2
    return ClientHandshake(Identity(job_id(""), 0, rank, 2, kind), b"another key of this length", os.urandom, bound)


Conduct = Callable[[Any, int], Awaitable[None]]


def sender_of(*words: bytes | Callable[[], bytes]) -> Conduct:
    """Return a client behaviour: the client sends one of the given messages, and then waits."""

    async def conduct(visit: Visit, number: int) -> None:
        data = words[number % len(words)]
        await visit.send(data() if callable(data) else data)

    return conduct


async def stay_silent(visit: Visit, number: int) -> None:
    """Send nothing."""


async def send_slowly(visit: Visit, number: int) -> None:
    """Send the expected messages, one byte at a time."""
    for byte in client_hello() if number % 2 else false_handshake(number).hello():
        await visit.send(bytes([byte]))
        with suppress(TimeoutError):
            async with asyncio.timeout(PAUSE):
                if not await visit.receive():
                    return


async def send_fragments(visit: Visit, number: int) -> None:
    """Send a client hello in packets of 40 bytes."""
    visit.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for begin in range(0, len(client_hello()), 40):
        await visit.send(client_hello()[begin : begin + 40])
        await asyncio.sleep(0)


async def half_close(visit: Visit, number: int) -> None:
    """Send a message, and close the sending direction."""
    await visit.send((b"", false_handshake(number).hello(), client_hello())[number % 3])
    visit.sock.shutdown(socket.SHUT_WR)


async def reset_connection(visit: Visit, number: int) -> None:
    """Disconnect at once, with a reset."""
    visit.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    await visit.send((b"", b"a", client_hello())[number % 3])
    visit.sock.close()


async def prove_wrong_key(visit: Visit, number: int) -> None:
    """Carry out the whole handshake with a wrong key."""
    client = false_handshake(
        number, binding(visit.tls.getpeercert(binary_form=True)) if isinstance(visit, Secured) else b""
    )
    await visit.send(client.hello())
    await visit.send(client.prove(await visit.receive_exactly(CHALLENGE_SIZE)))


async def reflect(visit: Visit, number: int) -> None:
    """Send the server's own challenge back as the proof."""
    await visit.send(false_handshake(number).hello())
    await visit.send(((await visit.receive_exactly(CHALLENGE_SIZE)) * 2)[:PROOF_SIZE])


async def replay(visit: Visit, number: int) -> None:
    """Send the recorded bytes of a rank without waiting for the server's challenge."""
    await visit.send(recorded[number % len(recorded)])


async def replay_in_step(visit: Visit, number: int) -> None:
    """Send the recorded bytes of a rank, and wait for the server's challenge after the first message."""
    data = recorded[number % len(recorded)]
    await visit.send(data[:HELLO_SIZE])
    await visit.receive_exactly(CHALLENGE_SIZE)
    await visit.send(data[HELLO_SIZE:])


ANYWHERE: dict[str, Conduct] = {
    "silent": stay_silent,
    "slow": send_slowly,
    "half closed": half_close,
    "reset": reset_connection,
    "garbage": sender_of(lambda: os.urandom(100)),
    "garbage after a good beginning": sender_of(
        lambda: false_handshake(0).hello() + os.urandom(PROOF_SIZE), MAGIC + b"\xff" * 100
    ),
    "HTTP": sender_of(HTTP),
    "TLS": sender_of(client_hello),
    "TLS 1.2": sender_of(lambda: client_hello(ssl.TLSVersion.TLSv1_2)),
    "TLS that stalls": sender_of(lambda: client_hello()[:100], lambda: client_hello()[:5]),
    "TLS in fragments": send_fragments,
    "no TLS": sender_of(lambda: false_handshake(0).hello()),
    "oversize": sender_of(LONG_RECORD, LONG_HELLO, LONG_FRAME, LONG_DATA),
    "oversize after garbage": sender_of(
        lambda: os.urandom(50) + LONG_FRAME, lambda: false_handshake(0).hello() + LONG_DATA * 9
    ),
    "replayed": replay,
}
#: Client behaviours after the TLS handshake if the listener uses TLS, otherwise from the first byte on.
INSIDE: dict[str, Conduct] = {
    "silence inside": stay_silent,
    "garbage inside": sender_of(lambda: os.urandom(100)),
    "HTTP inside": sender_of(HTTP),
    "oversize inside": sender_of(LONG_FRAME, LONG_DATA * 3, lambda: false_handshake(0).hello() + LONG_FRAME * 20),
    "wrong key": prove_wrong_key,
    "reflected": reflect,
    "replayed inside": replay_in_step,
}


class Strangers:
    """Clients without the job key; counts their connections per kind of misbehaviour."""

    def __init__(self, at_once: int) -> None:
        self.found: dict[str, list[float]] = defaultdict(lambda: [0, 0.0, 0])
        self._places = asyncio.Semaphore(at_once)

    async def visit(self, place: tuple[str, int, bool], kind: str, number: int) -> None:
        """Keep a connection open until the server closes it."""
        host, port, encrypted = place
        async with self._places:
            with await connected(host, port) as sock:
                began = time.monotonic()
                visit = Secured(sock) if kind in INSIDE and encrypted else Visit(sock)
                try:
                    async with asyncio.timeout(LONGEST):
                        await behave(visit, INSIDE.get(kind) or ANYWHERE[kind], number)
                except TimeoutError:
                    raise AssertionError(f"the server at {place} did not end a connection of kind {kind!r}") from None
                seconds = time.monotonic() - began
                visit.check(encrypted)
        found = self.found[kind]
        found[:] = found[0] + 1, max(found[1], seconds), max(found[2], len(visit.received))


async def connected(host: str, port: int) -> socket.socket:
    """Connect to a listener, and retry while the listener refuses or resets the connection."""
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
        while await visit.receive():
            pass
    except (ConnectionError, ssl.SSLError):
        pass
    except OSError as error:
        if error.errno not in (errno.EBADF, errno.ENOTCONN):  # the connection is closed already
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
