"""A rank keeps no more of what comes early than its windows allow, whoever sends; who keeps to them never notices."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

import msgpack
import numpy as np
import pytest

from aiocoll import ProcessGroup
from aiocoll.engine import channel, early, windows
from aiocoll.engine.windows import ASK_WINDOW, EARLY_GRANTS, LEAST, LINK_WINDOW
from aiocoll.errors import PeerProtocolError
from aiocoll.transport.base import Link
from aiocoll.transport.frame import EAGER, HEADER, SEGMENT, FrameKind

from ..ranks import TRANSPORTS, run_ranks, until
from .jobs import resident

MIB = 1 << 20
UNMADE = 77
DATA, READY, GRANT, CONTROL = FrameKind.DATA, FrameKind.READY, FrameKind.GRANT, FrameKind.CONTROL

#: Sends so many things, the first being number 0.
Flood = Callable[[Link, ProcessGroup, int], None]


def frame(link: Link, *header: int, payload: bytes = b"") -> None:
    link.write(HEADER.pack(*header, len(payload), len(payload)), memoryview(payload) if payload else None)


def note(link: Link, **what: Any) -> None:
    frame(link, CONTROL, 0, 0, 0, 0, 0, 0, payload=msgpack.packb(what))


def device(link: Link, group: int) -> None:
    note(link, t="device", g=group, card={"nccl": 0, "why": "", "bus": "", "unfinished": False})


SEGMENT_OF_ONES = bytes([1]) * SEGMENT

#: What is sent too much of, how many of it an honest peer may send, and what the refusal says.
FLOODS: dict[str, tuple[Flood, int, str]] = {
    "bytes for a group that there is not": (
        lambda link, pg, number: frame(link, DATA, EAGER, 0, UNMADE, number, 0, 0, payload=SEGMENT_OF_ONES),
        LINK_WINDOW // SEGMENT,
        "4194304 bytes that may wait",
    ),
    "bytes for many groups that there are not": (
        lambda link, pg, number: frame(link, DATA, EAGER, 0, number, 1, 0, 0, payload=SEGMENT_OF_ONES),
        LINK_WINDOW // SEGMENT,
        "4194304 bytes that may wait",
    ),
    "bytes for operations not entered": (
        lambda link, pg, number: frame(link, DATA, EAGER, 0, pg._member.id, 9 + number, 0, 0, payload=SEGMENT_OF_ONES),
        LINK_WINDOW // SEGMENT,
        "4194304 bytes that may wait",
    ),
    "messages that nobody receives": (
        lambda link, pg, number: frame(
            link, DATA, EAGER, 0, pg._member.id, 2 << 62 | 9 << 32 | number, 255, 0, payload=SEGMENT_OF_ONES
        ),
        LINK_WINDOW // SEGMENT,
        "4194304 bytes that may wait",
    ),
    "frames without bytes": (
        lambda link, pg, number: frame(link, DATA, EAGER, 0, UNMADE, number, 0, 0),
        LINK_WINDOW // LEAST,
        "4194304 bytes that may wait",
    ),
    "messages without bytes": (
        lambda link, pg, number: frame(link, DATA, EAGER, 0, pg._member.id, 2 << 62 | 9 << 32 | number, 255, 0),
        LINK_WINDOW // LEAST,
        "4194304 bytes that may wait",
    ),
    "news of messages that wait": (
        lambda link, pg, number: frame(link, READY, EAGER, 0, pg._member.id, 9 + number, 0, 0),
        (LINK_WINDOW + ASK_WINDOW) // LEAST,
        "8388608 bytes that may wait",
    ),
    "grants of operations not entered": (
        lambda link, pg, number: frame(link, GRANT, 0, 0, pg._member.id, 9 + number, 0, 0),
        EARLY_GRANTS,
        "granted more than 65536 operations",
    ),
    "a message beyond its window": (
        lambda link, pg, number: frame(link, DATA, EAGER, 0, UNMADE, 1, 0, number, payload=SEGMENT_OF_ONES),
        1,
        "more of operation 0x1 than it was asked for",
    ),
    "goodbyes to groups that there are not": (
        lambda link, pg, number: note(link, t="bye", g=number, cause=None),
        early.GROUPS,
        "spoken of more than 4096 groups",
    ),
    "notes about devices of a group that there is not": (
        lambda link, pg, number: device(link, UNMADE),
        early.DEVICE_NOTES,
        "more than 16 control messages about devices",
    ),
    "notes about devices that are not in use": (
        lambda link, pg, number: device(link, pg._member.id),
        early.DEVICE_NOTES,
        "more than 16 control messages about devices",
    ),
}


@pytest.mark.parametrize("what", FLOODS)
@pytest.mark.parametrize("transport", ["memory", "unix", "shm"])
async def test_a_flood_is_refused_where_no_honest_peer_comes(transport: str, what: str) -> None:
    flood, allowed, words = FLOODS[what]

    async def rank(pg: ProcessGroup) -> None:
        await pg.barrier()
        work = pg.recv(np.zeros(1), 1 - pg.rank(), tag=1)
        await pg.send_object("ready", 1 - pg.rank())
        await pg.recv_object(1 - pg.rank())
        if pg.rank() == 0:
            link = pg._member.channels[1].link
            assert link is not None
            for number in range(allowed):
                flood(link, pg, number)
                if number % 100 == 0:
                    await until(lambda: link.writable)
            note(link, t="disagree", g=UNMADE, op=1, theirs={"rank": 0, "op": "X", "seq": 1, "key": None})
            await until(lambda: link.writable)
            assert not work.done()
            flood(link, pg, allowed)
        with pytest.raises(PeerProtocolError, match=words) as refusal:
            await work
        assert "rank 0" in str(refusal.value)

    await run_ranks(2, rank, transport=transport)


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_400_mib_for_a_group_that_there_is_not_take_4(transport: str) -> None:
    async def rank(pg: ProcessGroup) -> None:
        await pg.barrier()
        work = pg.recv(np.zeros(1), 1 - pg.rank(), tag=1)
        before = resident()
        if pg.rank() == 0:
            link = pg._member.channels[1].link
            assert link is not None
            for number in range(400 * MIB // SEGMENT):
                frame(link, DATA, EAGER, 0, UNMADE, number, 0, 0, payload=SEGMENT_OF_ONES)
                await until(lambda: link.writable)
                if work.done():
                    break
        with pytest.raises(PeerProtocolError):
            await work
        assert resident() - before < 8 * LINK_WINDOW

    await run_ranks(2, rank, transport=transport)


@pytest.fixture
def _narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows of some tens of frames, so that everything that they do happens often."""
    for module in (channel, windows):
        monkeypatch.setattr(module, "LINK_WINDOW", 40 * LEAST)
        monkeypatch.setattr(module, "ASK_WINDOW", 60 * LEAST)
    monkeypatch.setattr(channel, "WINDOW_LOT", 10 * LEAST)


@pytest.mark.usefixtures("_narrow")
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_honest_ranks_never_meet_the_bounds(transport: str, seed: int) -> None:
    """Many more calls ahead than the windows hold, of messages with and without bytes, in any order of two tags."""
    chance = random.Random(seed)
    sizes = [chance.choice([0, 0, 1, 100, 1000, 9000]) for _ in range(300)]
    tags = [chance.randrange(2) for _ in sizes]

    async def rank(pg: ProcessGroup) -> None:
        peer = 1 - pg.rank()
        works = [
            pg.send(np.full(size, number % 251, "uint8"), peer, tag=tags[number]) for number, size in enumerate(sizes)
        ]
        works += [pg.allreduce(np.full(size, 1.0), key=str(number)) for number, size in enumerate(sizes[:40])]
        await pg.send_object("all are called", peer, tag=9)
        await pg.recv_object(peer, tag=9)
        for tag in (1, 0):
            for number, size in enumerate(sizes):
                if tags[number] == tag:
                    got = await pg.recv(np.zeros(size, "uint8"), peer, tag=tag)
                    assert (got == number % 251).all()
        for work in works:
            await work
        one = pg._member.channels[peer]
        await until(lambda: one._waiting._nbytes == 0 and one._unasked < 20 * LEAST)

    async with asyncio.timeout(30):
        await run_ranks(2, rank, transport=transport)


async def test_ten_thousand_messages_without_bytes_wait() -> None:
    async def rank(pg: ProcessGroup) -> None:
        count = 10_000
        if pg.rank() == 0:
            for work in [pg.send(np.zeros(0), 1) for _ in range(count)]:
                await work
            await pg.send_object("behind them", 1, tag=1)
        else:
            assert await pg.recv_object(0, tag=1) == "behind them"
            assert pg._member.channels[0]._waiting._nbytes == count * LEAST
            for _ in range(count):
                await pg.recv(np.zeros(0), 0)
            assert pg._member.channels[0]._waiting._nbytes == 0

    await run_ranks(2, rank)
