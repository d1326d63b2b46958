"""Limits on early messages: a flood is refused, and peers that obey the windows never reach the limits."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

import msgpack
import numpy as np
import pytest

from aiocoll import ProcessGroup
from aiocoll.engine.control import unmade_groups as early
from aiocoll.engine.control.closed_groups import ClosedGroups
from aiocoll.engine.links.flow_control import LEAST, LINK_WINDOW
from aiocoll.engine.operations.plan import EAGER_WINDOW
from aiocoll.errors import PeerProtocolError, ProtocolError
from aiocoll.transport.base import Link
from aiocoll.transport.frame import EAGER, HEADER, SEGMENT, FrameKind

from ..internals import Limits, comm_of, ungranted_bytes, waiting_bytes
from ..ranks import LINKS, parametrize_transports, run_ranks, wait_until
from .jobs import resident

MIB = 1 << 20
UNMADE = 77
DATA, READY, GRANT, CONTROL = FrameKind.DATA, FrameKind.READY, FrameKind.GRANT, FrameKind.CONTROL

#: A function (link, group, number) that sends one item of a flood.
Flood = Callable[[Link, ProcessGroup, int], None]


def send_frame(link: Link, *header: int, payload: bytes = b"") -> None:
    link.write(HEADER.pack(*header, len(payload), len(payload)), memoryview(payload) if payload else None)


def send_control_message(link: Link, **what: Any) -> None:
    send_frame(link, CONTROL, 0, 0, 0, 0, 0, 0, payload=msgpack.packb(what))


def send_device_message(link: Link, group: int) -> None:
    card = {"library": 0, "why": "", "bus": "", "unfinished": False, "float8": False, "ahead": True}
    send_control_message(link, t="device", g=group, card=card)


#: A small window and a payload size in bytes, and a low limit for the number of items. Only a few payloads fit.
NARROW, SOME, FEW = LINK_WINDOW // 10, bytes(10_000), 300
SEGMENT_OF_ONES = bytes([1]) * SEGMENT

#: For each flood: a function that sends one item, the limit, and words of the error. The limit is a number of items, or
#: a window in bytes with the bytes that each item uses. Windows have 10 % of the usual size.
FLOODS: dict[str, tuple[Flood, int | tuple[int, int], str]] = {
    "bytes for an unknown group": (
        lambda link, pg, number: send_frame(link, DATA, EAGER, 0, UNMADE, number, 0, 0, payload=SOME),
        (NARROW, len(SOME)),
        f"{NARROW} bytes that may wait",
    ),
    "bytes for many unknown groups": (
        lambda link, pg, number: send_frame(link, DATA, EAGER, 0, number, 1, 0, 0, payload=SOME),
        (NARROW, len(SOME)),
        f"{NARROW} bytes that may wait",
    ),
    "bytes for operations not called": (
        lambda link, pg, number: send_frame(link, DATA, EAGER, 0, comm_of(pg).id, 9 + number, 0, 0, payload=SOME),
        (NARROW, len(SOME)),
        f"{NARROW} bytes that may wait",
    ),
    "messages without a receive": (
        lambda link, pg, number: send_frame(
            link, DATA, EAGER, 0, comm_of(pg).id, 2 << 62 | 9 << 32 | number, 255, 0, payload=SOME
        ),
        (NARROW, len(SOME)),
        f"{NARROW} bytes that may wait",
    ),
    "frames without bytes": (
        lambda link, pg, number: send_frame(link, DATA, EAGER, 0, UNMADE, number, 0, 0),
        (NARROW, LEAST),
        f"{NARROW} bytes that may wait",
    ),
    "messages without bytes": (
        lambda link, pg, number: send_frame(link, DATA, EAGER, 0, comm_of(pg).id, 2 << 62 | 9 << 32 | number, 255, 0),
        (NARROW, LEAST),
        f"{NARROW} bytes that may wait",
    ),
    "announcements of messages": (
        lambda link, pg, number: send_frame(link, READY, EAGER, 0, comm_of(pg).id, 9 + number, 0, 0),
        (2 * NARROW, LEAST),
        f"{2 * NARROW} bytes that may wait",
    ),
    "grants for operations not called": (
        lambda link, pg, number: send_frame(link, GRANT, 0, 0, comm_of(pg).id, 9 + number, 0, 0),
        FEW,
        f"sent more than {FEW} grants for operations that are not entered yet",
    ),
    "a message beyond its window": (
        lambda link, pg, number: send_frame(link, DATA, EAGER, 0, UNMADE, 1, 0, number, payload=bytes(SEGMENT)),
        1,
        "more bytes of operation 0x1 than this rank had granted",
    ),
    "goodbyes to unknown groups": (
        lambda link, pg, number: send_control_message(link, t="bye", g=number, cause=None),
        FEW,
        f"named more than {FEW} groups",
    ),
    "device messages for an unknown group": (
        lambda link, pg, number: send_device_message(link, UNMADE),
        early.DEVICE_MESSAGES,
        "more than 16 control messages about devices",
    ),
    "device messages without a device in use": (
        lambda link, pg, number: send_device_message(link, comm_of(pg).id),
        early.DEVICE_MESSAGES,
        "more than 16 control messages about devices",
    ),
}


@pytest.mark.parametrize("what", FLOODS)
@pytest.mark.parametrize("transport", LINKS)
async def test_flood_of_early_messages_is_refused_at_the_limits(transport: str, what: str, limits: Limits) -> None:
    flood, most, words = FLOODS[what]
    limits(link_window=NARROW, ready_window=NARROW, early_grants=FEW, unmade_groups=FEW)

    async def rank(pg: ProcessGroup) -> None:
        await pg.barrier()
        work = pg.recv(np.zeros(1), 1 - pg.rank(), tag=1)
        await pg.send_object("ready", 1 - pg.rank())
        await pg.recv_object(1 - pg.rank())
        if pg.rank() == 0:
            channel = comm_of(pg).channels[1]
            link = channel.link
            assert link is not None
            allowed = most if isinstance(most, int) else (most[0] - ungranted_bytes(channel)) // most[1]
            for number in range(allowed):
                flood(link, pg, number)
                await wait_until(lambda: link.writable)
            for _ in range(20):
                await asyncio.sleep(0)
            assert not work.done()
            for number in range(allowed, allowed + 3):
                flood(link, pg, number)
        with pytest.raises(PeerProtocolError, match=words) as refusal:
            async with asyncio.timeout(10):
                await work
        assert "rank 0" in str(refusal.value)

    await run_ranks(2, rank, transport=transport)


@pytest.mark.ranks(2)
@parametrize_transports(*LINKS[1:])
async def test_flood_of_messages_for_an_unknown_group_takes_little_memory(pg: ProcessGroup) -> None:
    await pg.barrier()
    work = pg.recv(np.zeros(1), 1 - pg.rank(), tag=1)
    before = resident()
    if pg.rank() == 0:
        link = comm_of(pg).channels[1].link
        assert link is not None
        for number in range(400 * MIB // SEGMENT):
            send_frame(link, DATA, EAGER, 0, UNMADE, number, 0, 0, payload=SEGMENT_OF_ONES)
            await wait_until(lambda: link.writable)
            if work.done():
                break
    with pytest.raises(PeerProtocolError):
        await work
    assert resident() - before < 8 * LINK_WINDOW


@pytest.fixture
def _narrow(limits: Limits) -> None:
    """Reduce the windows to a few dozen frames, so that the windows often fill and reopen."""
    limits(link_window=40 * LEAST, ready_window=60 * LEAST, window_batch=10 * LEAST)


@pytest.mark.slow
@pytest.mark.usefixtures("_narrow")
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("transport", LINKS)
async def test_ranks_that_obey_the_windows_never_reach_the_limits_of_early_messages(transport: str, seed: int) -> None:
    """Receive 300 messages in the order of the sends, and then 50 messages in another order."""
    chance = random.Random(seed)
    sizes = [chance.choice([0, 0, 1, 100, 1000, 9000]) for _ in range(300)]
    others = list(range(50))
    chance.shuffle(others)

    async def rank(pg: ProcessGroup) -> None:
        peer = 1 - pg.rank()
        one = comm_of(pg).channels[peer]

        def call(number: int) -> Any:
            return pg.send(np.full(sizes[number], number % 251, "uint8"), peer, tag=number)

        async def receive(number: int) -> None:
            got = await pg.recv(np.zeros(sizes[number], "uint8"), peer, tag=number)
            assert (got == number % 251).all()

        works = [call(number) for number in range(len(sizes))]
        works += [pg.allreduce(np.full(size, 1.0), key=str(number)) for number, size in enumerate(sizes[:40])]
        for number in range(len(sizes)):
            await receive(number)
        for work in works:
            await work
        works = [call(number) for number in sorted(others)]
        for number in others:
            await receive(number)
        for work in works:
            await work
        await wait_until(lambda: waiting_bytes(one) == 0 and ungranted_bytes(one) < 20 * LEAST)

    async with asyncio.timeout(30):
        await run_ranks(2, rank, transport=transport)


@pytest.mark.ranks(2)
async def test_ten_thousand_empty_messages_are_kept_until_they_are_received(pg: ProcessGroup) -> None:
    count = 10_000
    if pg.rank() == 0:
        for work in [pg.send(np.zeros(0), 1) for _ in range(count)]:
            await work
        await pg.send_object("behind them", 1, tag=1)
    else:
        assert await pg.recv_object(0, tag=1) == "behind them"
        assert waiting_bytes(comm_of(pg).channels[0]) == count * LEAST
        for _ in range(count):
            await pg.recv(np.zeros(0), 0)
        assert waiting_bytes(comm_of(pg).channels[0]) == 0


@pytest.mark.parametrize("room", [LEAST - 1, LEAST])
@pytest.mark.parametrize("transport", LINKS)
async def test_small_message_is_sent_eagerly_if_its_size_fits_the_window(transport: str, room: int) -> None:
    sent = asyncio.Event()

    async def rank(pg: ProcessGroup) -> None:
        await pg.barrier()
        channel = comm_of(pg).channels[1 - pg.rank()]
        fill = LINK_WINDOW - room - ungranted_bytes(channel)
        sizes = [*(fill // EAGER_WINDOW * [EAGER_WINDOW]), fill % EAGER_WINDOW]
        if pg.rank() == 1:
            await sent.wait()
            for size in sizes:
                await pg.recv(np.zeros(size, "uint8"), 0)
            assert ((await pg.recv(np.zeros(8), 0)) == 1).all()
            return
        works = [pg.send(np.zeros(size, "uint8"), 1) for size in sizes]
        await wait_until(lambda: ungranted_bytes(channel) == LINK_WINDOW - room)
        last = pg.send(np.ones(8), 1)
        for _ in range(20):
            await asyncio.sleep(0)
        assert last.done() is (room == LEAST)
        sent.set()
        for work in (*works, last):
            await work

    await run_ranks(2, rank, transport=transport)


async def test_number_of_agreement_messages_for_unknown_groups_is_limited_per_peer(
    limits: Limits,
) -> None:
    """Check that a message about the agreement of a group counts like a message about the group."""
    limits(unmade_groups=FEW)

    def accept_message(identity: int) -> dict[str, Any]:
        about = {"t": "shrink", "g": identity, "n": 0, "ranks": [0, 1, 2], "dead": [], "assumed": []}
        return {**about, "what": "accept", "ballot": 0}

    async def rank(pg: ProcessGroup) -> None:
        endpoint = comm_of(pg).endpoint
        for peer in (1, 2):
            for number in range(FEW):
                endpoint.agreements.handle(peer, accept_message(peer * UNMADE * FEW + number))
            with pytest.raises(ProtocolError, match=f"rank {peer} has named more than {FEW} groups"):
                endpoint.agreements.handle(peer, accept_message(UNMADE))

    await run_ranks(3, rank)


def test_number_of_unknown_split_groups_is_limited_per_peer(limits: Limits) -> None:
    limits(unmade_groups=FEW)
    closed = ClosedGroups(lambda identity, ranks: None)
    kept = early.UnmadeGroups(closed)
    for peer in (1, 2):
        for number in range(FEW):
            identity = peer * UNMADE * FEW + number
            kept.refuse_group(identity, peer, None, (0, peer), 0)
            kept.refuse_group(identity, peer, None, (0, peer), 0)  # a group that is known already is not counted again
            assert closed.sends_frames(identity, peer)
            assert not closed.sends_frames(identity, 0)
        with pytest.raises(ProtocolError, match=f"rank {peer} has split off more than {FEW} groups"):
            kept.refuse_group(UNMADE, peer, None, (0, peer), 0)
