"""Groups of many ranks in one process: collectives, links, control messages and memory."""

from __future__ import annotations

import resource
from typing import Any

import numpy as np
import pytest

from aiocoll import ProcessGroup, Recv, ReduceOp, Send
from aiocoll.engine.channels import FEW

from ..internals import channels_of, comm_of, observe_calls
from ..ranks import hub_of, run_ranks

MANY = 64


async def check_arrays(pg: ProcessGroup) -> None:
    """Make every collective on arrays once."""
    rank, size = pg.rank(), pg.size()
    total = size * (size - 1) / 2
    own, numbers = np.full(2, float(rank)), np.arange(size, dtype=float)
    assert (await pg.allreduce(own.copy()) == total).all()
    assert await pg.allreduce(rank, ReduceOp.MAX) == size - 1
    assert (await pg.broadcast(own.copy(), 3) == 3).all()
    if rank == 5:
        assert (await pg.reduce(own.copy(), 5) == total).all()
    else:
        await pg.reduce(own.copy(), 5)
    assert [each[0] for each in await pg.allgather(None, own)] == list(range(size))
    assert (await pg.allgather_into_tensor(np.empty(size), own[:1]) == numbers).all()
    gathered = await pg.gather(None, own, 1)
    assert rank != 1 or [each[0] for each in gathered] == list(range(size))
    parts = [np.full(2, float(peer)) for peer in range(size)]
    assert (await pg.scatter(np.empty(2), parts if rank == 2 else None, 2) == rank).all()
    assert (await pg.reduce_scatter(np.empty(2), parts) == rank * size).all()
    assert (await pg.reduce_scatter_tensor(np.empty(1), numbers) == rank * size).all()
    received = await pg.alltoall([np.empty(2) for _ in range(size)], [each + rank for each in parts])
    assert [each[0] for each in received] == [rank + peer for peer in range(size)]
    assert (await pg.alltoall_base(np.empty(size), numbers + rank) == numbers + rank).all()
    assert (await pg.scan(own.copy()) == rank * (rank + 1) / 2).all()
    if rank:
        assert (await pg.exscan(own.copy()) == rank * (rank - 1) / 2).all()
    else:
        await pg.exscan(own.copy())
    await pg.barrier()
    await pg.monitored_barrier()


async def check_objects(pg: ProcessGroup) -> None:
    """Make every collective on objects once, and exchange messages with both neighbouring ranks."""
    rank, size = pg.rank(), pg.size()
    right, left = (rank + 1) % size, (rank - 1) % size
    assert await pg.broadcast_object({"from": rank}, 7) == {"from": 7}
    assert await pg.allgather_object(rank) == list(range(size))
    gathered = await pg.gather_object(rank, 4)
    assert rank != 4 or gathered == list(range(size))
    assert await pg.scatter_object(list(range(size)) if rank == 6 else None, 6) == rank
    assert await pg.alltoall_object([rank - peer for peer in range(size)]) == [peer - rank for peer in range(size)]
    sent = pg.send_object("to the right", right)
    assert await pg.recv_object(left) == "to the right"
    await sent
    x = np.empty(1)
    await pg.batch([Send(np.full(1, float(rank)), right), Recv(x, left)])
    assert x[0] == left


@pytest.mark.slow
@pytest.mark.ranks(MANY)
async def test_group_with_many_ranks_makes_every_collective(pg: ProcessGroup) -> None:
    await check_arrays(pg)
    await check_objects(pg)
    part: Any = await pg.split_group([range(MANY // 2), range(MANY // 2, MANY)])
    assert await part.allreduce(1) == MANY // 2


@pytest.mark.slow
@pytest.mark.ranks(FEW + 1)
async def test_large_group_opens_links_on_first_use(pg: ProcessGroup) -> None:
    size = pg.size()
    await pg.barrier()
    channels = comm_of(pg).channels
    # A barrier uses log2(p) links for sends, and as many for receives.
    assert list(channels) == [channels_of(pg)[peer] for peer in sorted(channels_of(pg))]
    assert 0 < sum(channel.link is not None for channel in channels) <= 2 * size.bit_length()
    assert len(channels) == size
    peer = (pg.rank() + size // 2) % size
    assert channels[peer] is channels[peer] is comm_of(pg).endpoint.channels.to(peer)
    await check_objects(pg)


async def test_shutdown_of_many_ranks_takes_few_control_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    sent_notes: list[str] = []

    async def rank(pg: ProcessGroup) -> None:
        await pg.barrier()
        if pg.rank() == 0:
            observe_calls(monkeypatch, send_control_message=lambda _, note: sent_notes.append(note["t"]))
        await pg.barrier()

    await run_ranks(32, rank)
    assert set(sent_notes) <= {"end", "ended", "known", "status"}  # status: of a rank that a busy machine delays
    # Each rank notifies the hub when it leaves. The hub replies, and reports several ranks in one message.
    assert len(sent_notes) < 32 * 8


@pytest.mark.soak
async def test_group_with_a_thousand_ranks_makes_a_collective() -> None:
    size = 1024

    async def rank(pg: ProcessGroup) -> None:
        assert (await pg.allreduce(np.full(4, float(pg.rank()))) == size * (size - 1) / 2).all()
        await pg.barrier()
        # No rank may have links to all others. All ranks share one list of cards in this process.
        assert len(hub_of(pg).links) < size * 64
        assert comm_of(pg).endpoint.cards is first.setdefault("cards", comm_of(pg).endpoint.cards)

    first: dict[str, Any] = {}
    await run_ranks(size, rank, timeout=300)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 2 << 20  # `ru_maxrss` is in KiB
