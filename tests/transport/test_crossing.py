"""Simultaneous dials: two ranks that dial each other at once get the same single link, in every message order."""

from __future__ import annotations

import asyncio
import itertools
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from aiocoll.security.handshake import ConnKind, Status
from aiocoll.transport import byte_stream
from aiocoll.transport.byte_stream import ByteStream
from aiocoll.transport.stream import addresses as address
from aiocoll.transport.stream import dial, transport
from aiocoll.transport.stream.crossing import Crossing

from .test_stream import Rank, send_number, settle, started

#: The number of messages in a handshake, in both directions together.
MESSAGES = 5
#: The number of handshake messages after which the dialled rank has promised to use the link.
PROMISED = 3


class Links:
    """A stand-in for the table of links that `Crossing` queries."""

    def __init__(self) -> None:
        self.live = False

    def has(self, key: Any) -> bool:
        return self.live


@pytest.mark.parametrize(("rank", "peer"), [(0, 1), (1, 0), (6, 3)])
async def test_simultaneous_dials_are_decided_by_promises_and_confirmations(rank: int, peer: int) -> None:
    links = Links()
    crossing = Crossing(rank, 7, links)  # type: ignore[arg-type]
    key, other = (peer, ConnKind.DATA), (peer, ConnKind.CONTROL)
    assert crossing.decide(key) is Status.OK
    assert crossing.may_confirm(key)
    with crossing.promise(key):
        assert (crossing.decide(key), crossing.decide(other)) == (Status.CROSSED, Status.OK)
        assert crossing.may_confirm(key) is (rank < peer)
        promised = crossing.promised(key)
        assert promised is not None
        assert not promised.done()
    assert promised.done()
    assert crossing.promised(key) is None
    with crossing.confirm(key):
        assert (crossing.decide(key), crossing.decide(other)) == (Status.CROSSED, Status.OK)
    assert crossing.decide(key) is Status.OK
    links.live = True
    assert crossing.decide(key) is Status.DUPLICATE
    assert not crossing.may_confirm(key)
    for missing in (rank, -1, 7):
        assert crossing.decide((missing, ConnKind.DATA)) is Status.REFUSED


class Gate:
    """Gates for the handshake messages of two connections, one dialled by each rank.

    A connection is identified by the rank that dials it. Further connections of a rank are not held.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, ranks: list[Rank]) -> None:
        self.through = [0, 0]
        self.changed = asyncio.Event()
        self._of: dict[socket.socket, tuple[int, bool]] = {}
        self._free = [False, False]
        self._read: dict[socket.socket, int] = {}
        receive, reach = byte_stream.receive_message, address.reach
        self._receive = receive

        async def record_dialled(loop: Any, family: int, target: Any, **_: Any) -> socket.socket:
            sock = await reach(loop, family, target)
            task = asyncio.current_task()
            assert task is not None
            rank = int(task.get_name())
            if not self._free[rank]:
                self._free[rank] = True
                self._of[sock] = rank, True
            return sock

        for rank in ranks:
            greet = rank.transport._greet

            def record_accepted(sock: socket.socket, rank: Rank = rank, greet: Any = greet) -> None:
                dialled_by = 1 - rank.transport.rank
                if (dialled_by, False) not in self._of.values():
                    self._of[sock] = dialled_by, False
                greet(sock)

            monkeypatch.setattr(rank.transport._listeners, "_greet", record_accepted)
        monkeypatch.setattr(address, "reach", record_dialled)
        monkeypatch.setattr(dial, "receive_message", self.receive)
        monkeypatch.setattr(transport, "receive_message", self.receive)

    async def receive(self, stream: ByteStream, nbytes: int) -> bytes:
        sock = stream.sock
        data = await self._receive(stream, nbytes)
        if (of := self._of.get(sock)) is not None:
            dialled_by, dialler_side = of
            number = 2 * self._read.get(sock, 0) + dialler_side
            self._read[sock] = self._read.get(sock, 0) + 1
            while self.through[dialled_by] <= number:
                await self.changed.wait()
        return data

    async def let_through(self, dialled_by: int) -> None:
        """Release the next message on the connection of `dialled_by`, and run the loop until the message is handled."""
        self.through[dialled_by] += 1
        self.changed.set()
        self.changed = asyncio.Event()
        for _ in range(12):
            await asyncio.sleep(0)


def orders() -> Iterator[tuple[int, ...]]:
    """Yield every order in which the messages of the two connections can arrive, as numbers of the dialling rank."""
    for first in itertools.combinations(range(2 * MESSAGES), MESSAGES):
        yield tuple(0 if at in first else 1 for at in range(2 * MESSAGES))


@asynccontextmanager
async def gated_ranks(flavour: str) -> AsyncIterator[tuple[list[Rank], Gate]]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        async with started(2, flavour, handshake_timeout=3600.0) as ranks:
            yield ranks, Gate(monkeypatch, ranks)


async def start_both_dials(ranks: list[Rank]) -> list[asyncio.Task[Any]]:
    return [
        asyncio.get_running_loop().create_task(ranks[each].connect(ranks[1 - each]), name=str(each)) for each in (0, 1)
    ]


@pytest.mark.parametrize("flavour", ["unix", "tcp", "shm"])
async def test_simultaneous_dials_make_one_link_in_every_message_order(flavour: str) -> None:
    for order in orders():
        async with gated_ranks(flavour) as (ranks, gate):
            dials = await start_both_dials(ranks)
            for dialled_by in order:
                await gate.let_through(dialled_by)
            made = await asyncio.gather(*dials)
            await settle(*ranks)
            assert [link is None for link in made].count(True) == 1, order
            await exchange_messages(ranks)


@pytest.mark.parametrize("flavour", ["unix", "tcp", "shm"])
@pytest.mark.parametrize("held", [0, 1])
async def test_dial_succeeds_while_a_simultaneous_dial_of_the_peer_is_stuck(held: int, flavour: str) -> None:
    """Stop the peer's dial after any number of messages; its link is used only if the link has been promised."""
    for before in range(MESSAGES):
        async with gated_ranks(flavour) as (ranks, gate):
            dials = await start_both_dials(ranks)
            for _ in range(before):
                await gate.let_through(held)
            for _ in range(MESSAGES):
                await gate.let_through(1 - held)
            if before < PROMISED:
                await asyncio.gather(*dials)
            for _ in range(MESSAGES):  # release the dial that was stuck
                await gate.let_through(held)
            made = await asyncio.gather(*dials)
            await settle(*ranks)
            assert [link is None for link in made].count(True) == 1, before
            await exchange_messages(ranks)


async def exchange_messages(ranks: list[Rank]) -> None:
    a, b = ranks
    (left,), (right,) = a.links, b.links
    send_number(left, 5)
    send_number(right, 6)
    await b.until(lambda: b.received)
    await a.until(lambda: a.received)
    assert (a.received, b.received, a.lost_peers, b.lost_peers) == ([(1, 6)], [(0, 5)], [], [])
