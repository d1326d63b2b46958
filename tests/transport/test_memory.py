"""The in-process network between ranks of one process: latency, cut links, and late ranks."""

from __future__ import annotations

import asyncio

from aiocoll.runtime import Runtime
from aiocoll.security.handshake import ConnKind
from aiocoll.transport.memory import Hub, MemoryLink, MemoryTransport

from .links import Recorder, frame


async def network(world_size: int, latency: list[float] | None = None) -> tuple[Hub, dict[tuple[int, int], MemoryLink]]:
    """Link every rank to every other rank; the latency of each frame is the next entry of `latency`."""
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


async def test_frames_keep_their_order_for_any_latency() -> None:
    _, links = await network(2, [0.02, 0.0, 0.01])
    for op in range(3):
        links[0, 1].write(*frame(op))
    await links[1, 0].sink.frames_are(3)  # type: ignore[attr-defined]
    assert [op for op, _ in links[1, 0].sink.frames] == [0, 1, 2]  # type: ignore[attr-defined]


async def test_simulated_cut_breaks_one_link_on_both_sides() -> None:
    hub, links = await network(3)
    hub.cut(2, 0)
    await asyncio.sleep(0)
    for end in ((0, 2), (2, 0)):
        (loss,) = links[end].sink.losses  # type: ignore[attr-defined]
        assert str(loss) == "the link between rank 2 and rank 0 was cut"
    links[0, 1].write(*frame(1))
    await links[1, 0].sink.frames_are(1)  # type: ignore[attr-defined]
    assert [link.sink.losses for end, link in links.items() if set(end) != {0, 2}] == [[]] * 4  # type: ignore[attr-defined]


async def test_two_ranks_have_one_in_process_link_per_kind() -> None:
    hub, _ = await network(2)
    for rank in range(2):
        assert await hub.ranks[rank].connect(1 - rank, {}, ConnKind.DATA) is None


async def test_in_process_connect_waits_for_a_missing_peer() -> None:
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
