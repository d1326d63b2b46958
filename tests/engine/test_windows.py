"""Windows of eager data, per message and per link: a waiting message blocks no other message."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from typing import Any

import numpy as np
import pytest

from aiocoll import CollectiveMismatchError, ProcessGroup, ReduceOp, Work
from aiocoll.engine.links.channel import WINDOW_LOT, Channel
from aiocoll.engine.links.flow_control import LINK_WINDOW
from aiocoll.engine.operations.plan import EAGER_WINDOW
from aiocoll.testing.virtual import run_virtual
from aiocoll.transport.frame import EAGER, FrameKind, Header
from aiocoll.transport.shm.process_memory import can_read

from ..internals import comm_of, early_bytes, observe_methods, plan_without_accelerator, ungranted_bytes
from ..ranks import LINKS, parametrize_transports, run_in_two_groups, run_ranks

MIB = 1024 * 1024


class FrameRecorder:
    """A record of every frame that any rank receives."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.frames: list[tuple[int, Header]] = []
        observe_methods(monkeypatch, Channel, deliver=self._tapped)

    def _tapped(self, channel: Channel, _: Any, header: Header, __: memoryview | None) -> None:
        self.frames.append((channel.peer, header))

    def count(self, kind: FrameKind, sender: int) -> int:
        return sum(peer == sender and header[0] == kind for peer, header in self.frames)

    def eager(self, sender: int) -> Counter[int]:
        """Return the number of bytes that `sender` has sent eagerly for each operation."""
        sums: Counter[int] = Counter()
        for peer, header in self.frames:
            if peer == sender and header[0] == FrameKind.DATA and header[1] & EAGER:
                sums[header[4]] += header[7]
        return sums


@pytest.fixture
def tap(monkeypatch: pytest.MonkeyPatch) -> FrameRecorder:
    return FrameRecorder(monkeypatch)


def waiting_early_bytes(pg: ProcessGroup) -> int:
    """Return the number of received bytes that belong to calls which this rank has not made yet."""
    return early_bytes(pg)


async def settle(pg: ProcessGroup) -> None:
    """Wait until all sent frames have arrived, by a round trip: frames of one link keep their order."""
    peer = 1 - pg.rank()
    if pg.rank():
        await pg.send(np.zeros(1), peer, tag=99)
        await pg.recv(np.zeros(1), peer, tag=99)
    else:
        await pg.recv(np.zeros(1), peer, tag=99)
        await pg.send(np.zeros(1), peer, tag=99)


@pytest.mark.parametrize("transport", LINKS)
async def test_unexpected_large_message_fills_one_window_and_blocks_no_other_message(
    transport: str, tap: FrameRecorder
) -> None:
    # A message that is read in place is only announced, since the receiver would have to copy eager data.
    is_announced = transport == "shm" and can_read() is None
    window = 0 if is_announced else EAGER_WINDOW

    async def rank(pg: ProcessGroup) -> None:
        plan_without_accelerator(pg)
        giant = np.full(64 * MIB, pg.rank(), "uint8")
        if pg.rank() == 0:
            work = pg.broadcast(giant, 0, key="giant")
        for number in range(20):
            tensor = np.full(1000, number)
            assert (await pg.allgather(None, tensor))[1 - pg.rank()].tolist() == tensor.tolist()
        await settle(pg)
        if pg.rank() == 1:
            assert waiting_early_bytes(pg) == window
            work = pg.broadcast(giant, 0, key="giant")
        await work
        assert not giant.any()

    await run_ranks(2, rank, transport=transport)
    assert tap.count(FrameKind.GRANT, sender=1) == 1
    assert tap.count(FrameKind.READY, sender=0) == is_announced
    assert is_announced or max(tap.eager(sender=0).values()) == window


@pytest.mark.slow
@pytest.mark.ranks(2)
@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.PREMUL_SUM(2)], ids=["arena-or-links", "links"])
@parametrize_transports(*LINKS)
async def test_large_messages_in_opposite_orders_complete(pg: ProcessGroup, op: ReduceOp) -> None:
    tensors = {key: np.full(64 * MIB // 4, 1 + pg.rank(), "float32") for key in ("a", "b")}
    works = [pg.allreduce(tensors[key], op, key=key) for key in ("ab" if pg.rank() else "ba")]
    for work in works:
        await work
    expected = 3 * (op.factor or 1)
    assert all((tensor == expected).all() for tensor in tensors.values())


@pytest.mark.slow
@pytest.mark.parametrize("transport", LINKS)
async def test_ten_thousand_early_operations_stay_within_the_window(transport: str, tap: FrameRecorder) -> None:
    """Start ten thousand operations, which together exceed the window about three times."""
    count, nbytes = 10_000, 1200

    async def rank(pg: ProcessGroup) -> None:
        if pg.rank() == 0:
            works = [pg.broadcast(np.full(nbytes, number % 251, "uint8"), 0) for number in range(count)]
            await settle(pg)
            assert not works[-1].done()
        else:
            await settle(pg)
            assert LINK_WINDOW - nbytes <= waiting_early_bytes(pg) <= LINK_WINDOW
            works = [pg.broadcast(np.zeros(nbytes, "uint8"), 0) for _ in range(count)]
        for number, work in enumerate(works):
            assert ((await work) == number % 251).all()
        assert waiting_early_bytes(pg) == 0

    await run_ranks(2, rank, transport=transport, timeout=60)
    assert tap.count(FrameKind.READY, sender=0) > 0
    assert tap.count(FrameKind.GRANT, sender=1) == tap.count(FrameKind.READY, sender=0)
    assert tap.count(FrameKind.WINDOW, sender=1) > 0


async def test_frames_of_several_messages_are_interleaved(tap: FrameRecorder) -> None:
    async def rank(pg: ProcessGroup) -> None:
        tensors = [np.full(4 * MIB, pg.rank(), "uint8") for _ in range(3)]
        for work in [pg.broadcast(tensor, 0) for tensor in tensors]:
            await work
        assert not any(tensor.any() for tensor in tensors)

    await run_ranks(2, rank, transport="unix")
    order = [header[4] for peer, header in tap.frames if peer == 0 and header[0] == FrameKind.DATA and header[7]]
    last = {op: max(place for place, each in enumerate(order) if each == op) for op in set(order)}
    assert len(last) == 3
    # Without interleaving, the first message would have ended before the last one began.
    assert min(last.values()) > order.index(3)


@pytest.mark.parametrize("transport", LINKS)
async def test_failed_group_returns_its_eager_bytes_to_the_window(transport: str) -> None:
    """Fail a group that has filled most of the window of a shared link; the other group must get the window back."""

    async def body(one: ProcessGroup, two: ProcessGroup) -> None:
        rank = one.rank()
        if rank == 0:
            for _ in range(30):
                one.broadcast(np.zeros(LINK_WINDOW // 32, "uint8"), 0)
        await settle(two)
        if rank == 1:
            assert waiting_early_bytes(one) > LINK_WINDOW // 2
            one.abort()
        await one.wait_revoked()
        await settle(two)
        if rank == 0:
            assert ungranted_bytes(comm_of(two).channels[1]) < LINK_WINDOW // 2
        assert waiting_early_bytes(one) == 0

    await run_in_two_groups(body, transport)


async def check_window(pg: ProcessGroup) -> None:
    """Check that rank 0 can use the whole window to rank 1, except one incomplete batch of returned bytes."""
    nbytes = LINK_WINDOW // 16
    works = []

    def fill() -> None:
        works.extend(pg.broadcast(np.zeros(nbytes, "uint8"), 0) for _ in range(20))

    await settle(pg)
    if pg.rank() == 0:
        fill()
    await settle(pg)
    if pg.rank() == 1:
        assert waiting_early_bytes(pg) > LINK_WINDOW - WINDOW_LOT - nbytes
        fill()
    for work in works:
        await work


@pytest.mark.ranks(2)
@parametrize_transports(*LINKS)
async def test_all_consumed_bytes_are_returned_to_the_window(pg: ProcessGroup) -> None:
    """Send five times the bytes of the window, in messages that do not divide a batch of returned bytes."""
    plan_without_accelerator(pg)  # the accelerator sends no frames
    nbytes = 200_003
    for number in range(5 * LINK_WINDOW // nbytes):
        await pg.broadcast(np.zeros(nbytes, "uint8"), 0)
        if number % 8 == 0:
            await settle(pg)
    await check_window(pg)


@pytest.mark.slow
@pytest.mark.ranks(2)
@parametrize_transports("memory", "unix")
@pytest.mark.parametrize("fate", ["received", "aborted", "never made"])
@pytest.mark.parametrize("sort", ["collectives", "messages"])
async def test_data_that_precedes_its_group_is_returned_to_the_window(pg: ProcessGroup, sort: str, fate: str) -> None:
    """Let rank 0 twice send 75 % of the window for a group that rank 1 makes later or never."""
    count, nbytes = 12, LINK_WINDOW // 16

    def call(group: ProcessGroup) -> Work[Any]:
        tensor = np.zeros(nbytes, "uint8")
        if sort == "collectives":
            return group.broadcast(tensor, 0)
        return group.send(tensor, 1) if group.rank() == 0 else group.recv(tensor, 0)

    for number in range(2):
        if pg.rank() == 1:
            await settle(pg)  # wait until rank 0's data for the group has arrived
        ranks = [1] if pg.rank() and fate == "never made" else [0, 1]
        part = await pg.split_group(ranks, group_name=f"part{number}")
        assert part is not None
        works = [call(part) for _ in range(count)] if pg.rank() == 0 or fate == "received" else []
        if pg.rank() == 0:
            if fate == "aborted":
                part.abort("a test")
            await settle(pg)
        if fate == "received":
            for work in works:
                await work
        elif fate == "never made" and pg.rank() == 0:
            with pytest.raises(CollectiveMismatchError):
                await part.barrier()
        elif fate == "aborted":
            await part.wait_revoked()
        await settle(pg)
        await part.shutdown()
    await check_window(pg)


def test_data_for_a_closed_group_is_returned_to_the_window() -> None:
    """Let rank 1 leave the group while rank 0, which has not been notified yet, still sends frames."""

    async def rank(pg: ProcessGroup) -> None:
        for number in range(3):
            await settle(pg)
            part = await pg.split_group([0, 1], group_name=f"part{number}")
            assert part is not None
            if pg.rank() == 0:
                await asyncio.gather(*(part.broadcast(np.zeros(LINK_WINDOW // 16, "uint8"), 0) for _ in range(12)))
            await part.shutdown()
            await settle(pg)
        await check_window(pg)

    run_virtual(2, rank, latency=(0.01, 0.02))


@pytest.mark.slow
@pytest.mark.ranks(3)
@parametrize_transports(*LINKS)
@pytest.mark.parametrize("seed", range(3))
async def test_keyed_calls_complete_in_any_order(pg: ProcessGroup, seed: int) -> None:
    sizes = [0, 1, 1000, 100_000, 3_000_000]
    calls = [
        (f"{kind}{number}", kind, size) for kind in ("sum", "links", "gather") for number, size in enumerate(sizes)
    ]
    random.Random(seed * 100 + pg.rank()).shuffle(calls)
    works = []
    for key, kind, size in calls:
        tensor = np.full(size, pg.rank() + 1.0, "float32")
        if kind == "gather":
            works.append((pg.allgather(None, tensor, key=key), kind))
        else:
            op = ReduceOp.SUM if kind == "sum" else ReduceOp.custom(np.add)
            works.append((pg.allreduce(tensor, op, key=key), kind))
    for work, kind in reversed(works):
        result = await work
        if kind == "gather":
            assert all((each == rank + 1).all() for rank, each in enumerate(result))
        else:
            assert (result == 6).all()
