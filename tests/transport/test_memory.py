"""The network in memory: latency, cuts, and the arena."""

from __future__ import annotations

import asyncio

import pytest

from aiocoll.handshake import ConnKind
from aiocoll.runtime import Runtime
from aiocoll.transport.memory import SLOT_NBYTES, SLOTS, Hub, MemoryArena, MemoryLink, MemoryTransport

from .links import Recorder, frame


async def network(world_size: int, latency: list[float] | None = None) -> tuple[Hub, dict[tuple[int, int], MemoryLink]]:
    """Link every rank to every other; `latency` is used up frame by frame."""
    hub = Hub(Runtime.of(asyncio.get_running_loop()), None if latency is None else lambda a, b: latency.pop(0))
    links: dict[tuple[int, int], MemoryLink] = {}

    def attach(rank: int, link: MemoryLink) -> None:
        links[rank, link.peer] = link
        link.sink = Recorder()
        link.start()

    transports = [MemoryTransport(hub, rank) for rank in range(world_size)]
    for rank, transport in enumerate(transports):
        transport.accepted = lambda link, rank=rank: attach(rank, link)  # type: ignore[misc]
        await transport.listen()
    for rank, transport in enumerate(transports):
        for peer in range(rank):
            link = await transport.connect(peer, {}, ConnKind.DATA)
            assert isinstance(link, MemoryLink)
            attach(rank, link)
    return hub, links


async def test_frames_keep_their_order_whatever_their_latency() -> None:
    _, links = await network(2, [0.02, 0.0, 0.01])
    for op in range(3):
        links[0, 1].write(*frame(op))
    await links[1, 0].sink.frames_are(3)  # type: ignore[attr-defined]
    assert [op for op, _ in links[1, 0].sink.frames] == [0, 1, 2]  # type: ignore[attr-defined]


async def test_a_cut_breaks_one_link_on_both_sides() -> None:
    hub, links = await network(3)
    hub.cut(2, 0)
    await asyncio.sleep(0)
    for end in ((0, 2), (2, 0)):
        (loss,) = links[end].sink.losses  # type: ignore[attr-defined]
        assert str(loss) == "the link between rank 2 and rank 0 was cut"
    links[0, 1].write(*frame(1))
    await links[1, 0].sink.frames_are(1)  # type: ignore[attr-defined]
    assert [link.sink.losses for end, link in links.items() if set(end) != {0, 2}] == [[]] * 4  # type: ignore[attr-defined]


async def test_two_ranks_have_one_link_of_a_kind() -> None:
    hub, _ = await network(2)
    for rank in range(2):
        assert await hub.ranks[rank].connect(1 - rank, {}, ConnKind.DATA) is None


async def test_a_peer_that_has_not_come_is_waited_for() -> None:
    hub = Hub(Runtime.of(asyncio.get_running_loop()))
    early, late = (MemoryTransport(hub, rank) for rank in range(2))
    accepted: list[object] = []
    late.accepted = accepted.append
    await early.listen()
    connecting = asyncio.ensure_future(early.connect(1, {}, ConnKind.CONTROL))
    await asyncio.sleep(0)
    assert not connecting.done()
    await late.listen()
    assert await connecting is not None
    assert len(accepted) == 1


# -- the arena


def view(data: bytes | bytearray) -> memoryview:
    return memoryview(data)


@pytest.fixture
async def arena() -> MemoryArena:
    return MemoryArena(Runtime.of(asyncio.get_running_loop()), 3)


async def test_what_one_rank_publishes_all_others_see(arena: MemoryArena) -> None:
    data = bytearray(b"block")
    assert arena.look(0, 7, 0) is None
    assert arena.publish(0, 7, 0, 99, view(data))
    data[:] = b"later"
    for _ in range(2):
        shown = arena.look(0, 7, 0)
        assert shown is not None
        assert (shown[0], bytes(shown[1])) == (99, b"block")
    for rank, op, stage in ((1, 7, 0), (0, 8, 0), (0, 7, 1)):
        assert arena.look(rank, op, stage) is None


async def test_a_slot_is_free_after_its_last_reader(arena: MemoryArena) -> None:
    for stage in range(SLOTS):
        assert arena.publish(0, 7, stage, 0, view(b"x"))
    assert not arena.publish(0, 7, SLOTS, 0, view(b"x"))
    assert arena.publish(1, 7, 0, 0, view(b"x")), "slots are each rank's own"
    arena.release(0, 1, 7, 3)
    assert arena.look(0, 7, 3) is not None
    assert not arena.publish(0, 7, SLOTS, 0, view(b"x"))
    arena.release(0, 2, 7, 3)
    assert arena.look(0, 7, 3) is None
    assert arena.publish(0, 7, SLOTS, 0, view(b"x"))


async def test_no_operation_waits_for_the_slots_of_another(arena: MemoryArena) -> None:
    for stage in range(SLOTS):
        arena.publish(0, 7, stage, 0, view(b"x"))
    assert arena.publish(0, 8, 0, 0, view(b"y"))
    assert not arena.publish(0, 8, 1, 0, view(b"y"))
    for reader in (1, 2):
        arena.release(0, reader, 8, 0)
    assert arena.publish(0, 8, 1, 0, view(b"y"))


async def test_a_block_fills_a_slot(arena: MemoryArena) -> None:
    assert arena.slot_nbytes == SLOT_NBYTES
    assert arena.publish(0, 7, 0, 0, view(bytes(SLOT_NBYTES)))


async def test_watchers_wake_after_changes_in_a_turn_of_their_own(arena: MemoryArena) -> None:
    woken: list[int] = []
    for rank in range(3):
        arena.watch(rank, lambda rank=rank: woken.append(rank))  # type: ignore[misc]
    arena.publish(0, 7, 0, 0, view(b"x"))
    arena.publish(0, 7, 1, 0, view(b"x"))
    assert woken == []
    await asyncio.sleep(0)
    assert sorted(woken) == [0, 1, 2]
    arena.release(0, 1, 7, 0)
    await asyncio.sleep(0)
    assert len(woken) == 3, "nothing has become possible"
    arena.release(0, 2, 7, 0)
    await asyncio.sleep(0)
    assert sorted(woken[3:]) == [0, 1, 2]


async def test_alone_there_is_nobody_to_read() -> None:
    arena = MemoryArena(Runtime.of(asyncio.get_running_loop()), 1)
    for stage in range(3 * SLOTS):
        assert arena.publish(0, 7, stage, 0, view(b"x"))
