"""A process of clients without the job key ("strangers"). Argument: the behaviour of the clients.

Lines of standard input name listeners ("at FAMILY ADDRESS", with the address as a Python literal) and start or stop
the connections ("on", "off"). The process ends at the end of its input.

- hold: five silent connections at each listener, at different points of the handshake; reconnect when closed
- repeat: every 2 s, a proof without the key for each rank and each purpose
- flood: 200 connections per second to each listener
"""

from __future__ import annotations

import ast
import asyncio
import os
import socket
import sys
from collections import deque
from contextlib import ExitStack, suppress
from itertools import product
from typing import Any

from aiocoll.security.handshake import (
    CHALLENGE_SIZE,
    HELLO_SIZE,
    PROOF_SIZE,
    ClientHandshake,
    ConnKind,
    Identity,
    job_id,
)

RATE = 200
#: The number of listeners to which clients connect, in addition to the store. Older listeners belong to ended ranks.
NEWEST = 2
EVERY = 2.0
RANKS = 2


async def connected_socket(family: int, target: Any) -> socket.socket:
    sock = socket.socket(family)
    sock.setblocking(False)
    try:
        await asyncio.get_running_loop().sock_connect(sock, target)
    except BaseException:
        sock.close()
        raise
    return sock


def false_handshake(rank: int, kind: ConnKind) -> ClientHandshake:
    return ClientHandshake(Identity(job_id(""), 0, rank, RANKS, kind), b"another key of this length", os.urandom)


async def hold(family: int, target: Any) -> None:
    async def hold_one(nbytes: int) -> None:
        while True:
            with suppress(ConnectionResetError, BrokenPipeError), await connected_socket(family, target) as sock:
                sock.send((false_handshake(0, ConnKind.DATA).hello() + bytes(PROOF_SIZE))[:nbytes])
                while await asyncio.get_running_loop().sock_recv(sock, 1 << 16):
                    pass
            await asyncio.sleep(0.01)

    await asyncio.gather(*map(hold_one, (0, 3, HELLO_SIZE, HELLO_SIZE + 5, HELLO_SIZE + PROOF_SIZE - 1)))


async def repeat(family: int, target: Any) -> None:
    loop = asyncio.get_running_loop()
    while True:
        with ExitStack() as stack:
            for rank, kind in product(range(RANKS), ConnKind):
                with suppress(ConnectionResetError, BrokenPipeError):
                    client = false_handshake(rank, kind)
                    sock = stack.enter_context(await connected_socket(family, target))
                    sock.send(client.hello())
                    challenge = await loop.sock_recv(sock, CHALLENGE_SIZE)
                    if len(challenge) == CHALLENGE_SIZE and kind != ConnKind.DATA:  # clients for data links stay silent
                        sock.send(client.prove(challenge))
            await asyncio.sleep(EVERY)


async def flood(family: int, target: Any) -> None:
    loop = asyncio.get_running_loop()
    crowd: deque[socket.socket] = deque()
    begun, number = loop.time(), 0
    try:
        while True:
            with suppress(ConnectionResetError, BrokenPipeError):
                sock = await connected_socket(family, target)
                crowd.append(sock)
                sock.send((b"", b"GET / HTTP/1.1\r\n\r\n" * 10, false_handshake(0, ConnKind.DATA).hello())[number % 3])
            if len(crowd) > RATE:
                crowd.popleft().close()
            number += 1
            await asyncio.sleep(max(0.0, begun + number / RATE - loop.time()))
    finally:
        for sock in crowd:
            sock.close()


async def main(conduct: str) -> None:
    connect_strangers = {"hold": hold, "repeat": repeat, "flood": flood}[conduct]
    listeners: list[tuple[int, Any]] = []
    tasks: list[asyncio.Task[None]] = []
    active = False
    while line := await asyncio.to_thread(sys.stdin.readline):
        word, _, rest = line.strip().partition(" ")
        if word == "at":
            family, _, address = rest.partition(" ")
            listeners.append((int(family), ast.literal_eval(address)))
            if active:
                tasks.append(asyncio.create_task(connect_strangers(*listeners[-1])))
        elif word == "on":
            active = True
            tasks += [
                asyncio.create_task(connect_strangers(*listener))
                for listener in listeners[:1] + listeners[1:][-NEWEST:]
            ]
        else:
            active = False
            for task in tasks:
                task.cancel()
            for result in await asyncio.gather(*tasks, return_exceptions=True):
                # A client may end only because its listener is closed.
                if not isinstance(result, ConnectionRefusedError | asyncio.CancelledError):
                    raise RuntimeError(f"a stranger ended with {result!r}")
            tasks.clear()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
