"""Tests of misbehaving clients without the job key ("strangers") at every listener while ranks meet and work."""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from itertools import count
from typing import Any

import numpy as np
import pytest

from aiocoll import GroupOptions, ProcessGroup, new_group
from aiocoll.security.handshake import (
    CHALLENGE_SIZE,
    HELLO_SIZE,
    PROOF_SIZE,
    VERDICT_SIZE,
    ClientHandshake,
    ConnKind,
    Identity,
    job_id,
)
from aiocoll.store import StoreServer, TCPStore
from aiocoll.transport.stream import addresses as address

KEY = b"k" * 32
#: Total number of connections of `flood` to a listener, and number of connections open at a time. Both exceed the limit
#: for clients without a proven key.
FLOOD, OPEN = 400, 150
#: Numbers of handshake bytes after which a client stops sending.
HANDSHAKE_BYTES = (0, 3, HELLO_SIZE, HELLO_SIZE + 5, HELLO_SIZE + PROOF_SIZE - 1)

Conduct = Callable[[int, Any], Awaitable[None]]


async def connected_socket(family: int, target: Any) -> socket.socket:
    """Connect to a listener, and retry while its accept queue is full; raise an error if the listener is closed."""
    while True:
        try:
            return await address.reach(asyncio.get_running_loop(), family, target)
        except BlockingIOError:
            await asyncio.sleep(0)


def false_handshake(number: int) -> ClientHandshake:
    """Return a client handshake with a wrong key that claims a rank and a purpose, both chosen by `number`."""
    kind = list(ConnKind)[number % len(ConnKind)]
    rank = -1 if kind is ConnKind.STORE else number // len(ConnKind) % 4
    return ClientHandshake(Identity(job_id(""), 0, rank, 3, kind), b"another key of this length", os.urandom)


async def received_bytes(sock: socket.socket, nbytes: int) -> bytes:
    """Return `nbytes` received bytes, or fewer if the peer closes or resets the connection."""
    data = b""
    while len(data) < nbytes:
        try:
            part = await asyncio.get_running_loop().sock_recv(sock, nbytes - len(data))
        except ConnectionResetError:
            break
        if not part:
            break
        data += part
    return data


async def hold(family: int, target: Any) -> None:
    """Keep connections open after a part of a handshake; reconnect when the listener closes a connection."""

    async def hold_one(nbytes: int) -> None:
        while True:
            with await connected_socket(family, target) as sock:
                sock.send((false_handshake(1).hello() + bytes(PROOF_SIZE))[:nbytes])
                await received_bytes(sock, CHALLENGE_SIZE + 1)

    await asyncio.gather(*map(hold_one, HANDSHAKE_BYTES))


async def repeat(family: int, target: Any) -> None:
    """Claim each rank and purpose repeatedly with a wrong key; the listener must reply only with a nonce and zeros."""
    for number in count():
        with await connected_socket(family, target) as sock:
            client = false_handshake(number)
            try:
                sock.send(client.hello())
                challenge = await received_bytes(sock, CHALLENGE_SIZE)
                if len(challenge) == CHALLENGE_SIZE:
                    sock.send(client.prove(challenge))
            except (BrokenPipeError, ConnectionResetError):
                continue  # the listener dropped this client for another one
            reply = await received_bytes(sock, VERDICT_SIZE + 1)
            assert reply in (b"", bytes(VERDICT_SIZE))


async def flood(family: int, target: Any) -> None:
    """Open more connections than a listener accepts without a proven key; send garbage on half of them."""
    with ExitStack() as stack:
        crowd: deque[socket.socket] = deque()
        stack.callback(lambda: [sock.close() for sock in crowd])
        for number in range(FLOOD):
            crowd.append(await connected_socket(family, target))
            if number % 2:
                crowd[-1].send(
                    (b"GET / HTTP/1.1\r\n\r\n" * 10, os.urandom(HELLO_SIZE), false_handshake(number).hello())[
                        number % 3
                    ]
                )
            if len(crowd) > OPEN:
                crowd.popleft().close()


async def half_open(family: int, target: Any) -> None:
    """Leave replies unread, and reset connections at various points of the handshake."""
    with ExitStack() as stack:
        for number in count():
            sock = await connected_socket(family, target)
            try:
                with suppress(BrokenPipeError, ConnectionResetError):
                    nbytes = HANDSHAKE_BYTES[number % len(HANDSHAKE_BYTES)] + 32 * (number % 3)
                    sock.send((false_handshake(1).hello() + bytes(PROOF_SIZE + 32))[:nbytes])
                    await asyncio.sleep(0)
            finally:
                if number < OPEN and number % 4 == 0:
                    stack.enter_context(sock)
                else:
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    sock.close()


class Strangers:
    """The clients without the job key of one test, one client for each listener."""

    def __init__(self, conduct: Conduct) -> None:
        self._conduct = conduct
        self._tasks: list[asyncio.Task[None]] = []

    def visit(self, family: int, target: Any) -> None:
        self._tasks.append(asyncio.get_running_loop().create_task(self._stay(family, target)))

    async def _stay(self, family: int, target: Any) -> None:
        # Ignore the errors that a client gets if the listener drops it for another client, or is closed.
        with suppress(BrokenPipeError, ConnectionRefusedError, ConnectionResetError, FileNotFoundError):
            await self._conduct(family, target)

    async def leave(self) -> int:
        """End all clients, and raise their errors; return the number of listeners that had a client."""
        for task in self._tasks:
            task.cancel()
        for result in await asyncio.gather(*self._tasks, return_exceptions=True):
            if isinstance(result, Exception):
                raise result
        return len(self._tasks)


@contextmanager
def strangers_at_every_listener(conduct: Conduct) -> Iterator[Strangers]:
    strangers = Strangers(conduct)
    add = address.Listeners.add

    def add_and_visit(self: address.Listeners, listener: socket.socket) -> None:
        add(self, listener)
        strangers.visit(listener.family, listener.getsockname())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(address.Listeners, "add", add_and_visit)
        yield strangers


async def work(pg: ProcessGroup) -> None:
    size, rank = pg.size(), pg.rank()
    for length in (1, 1000, 100_000):
        got = await pg.allreduce(np.full(length, rank + 1.0))
        np.testing.assert_array_equal(got, np.full(length, size * (size + 1) / 2))
    for root in range(size):
        assert (await pg.broadcast(np.full(3, rank), root) == root).all()
    if size > 1:
        ahead, behind = (rank + 1) % size, (rank - 1) % size
        sent = pg.send(np.full(5, rank), ahead)
        assert (await pg.recv(np.zeros(5, int), behind) == behind).all()
        await sent
    assert await pg.alltoall_object([rank] * size) == list(range(size))


async def run_job(endpoint: tuple[str, int], transport: str, world_size: int) -> None:
    """Run a job whose ranks twice meet and work, while clients without the job key connect."""

    async def rank(number: int) -> None:
        host_id = f"host {number}" if transport == "hosts" else None
        options = GroupOptions(transport="tcp" if host_id else transport, job_key=KEY, host_id=host_id)
        async with TCPStore(*endpoint, key=KEY) as store:
            for _ in range(2):
                async with new_group(store=store, rank=number, world_size=world_size, options=options) as pg:
                    for _ in range(3):
                        await work(pg)

    async with asyncio.TaskGroup() as ranks:
        for number in range(world_size):
            ranks.create_task(rank(number))


@pytest.mark.slow
@pytest.mark.parametrize(("transport", "world_size"), [("unix", 3), ("tcp", 2), ("tcp", 4), ("shm", 2), ("hosts", 3)])
@pytest.mark.parametrize("conduct", [hold, repeat, flood, half_open])
async def test_unauthenticated_clients_at_every_listener_do_not_disturb_a_job(
    conduct: Conduct, transport: str, world_size: int
) -> None:
    """Connect to all listeners of ranks and stores, over unix sockets and TCP. With "hosts", ranks have heartbeats."""
    unix = transport in ("unix", "shm")
    server = StoreServer(f"unix:@aiocoll-test-{os.urandom(8).hex()}" if unix else "127.0.0.1", key=KEY)
    endpoint = server.start()
    with strangers_at_every_listener(conduct) as strangers:
        if unix:
            strangers.visit(socket.AF_UNIX, address.unix_address(server.host.removeprefix("unix:")))
        else:
            strangers.visit(socket.AF_INET, endpoint)
        try:
            await run_job(endpoint, transport, world_size)
        finally:
            found = await strangers.leave()
            await server.aclose()
        assert found == 1 + 2 * world_size, "not every listener had a stranger"
