"""Algorithms of one step: each message goes directly from the rank with the data to the rank that needs it.

They have the least latency, and the most traffic through one link. They suit small messages, few ranks, and gather and
scatter, where no relay could reduce the root's traffic.

Cost in (steps, most bytes sent by one rank), n = bytes of the whole vector, p = ranks:

    allreduce  "oneround"  (1, n(p-1))      every rank receives all tensors and reduces them in rank order
    allreduce  "exchange"  (1, n)           the same for two ranks, reducing on arrival instead of from scratch
    reduce     "linear"    (1, n)           the root reduces in rank order
    broadcast  "linear"    (1, n(p-1))
    allgather  "direct"    (1, n(p-1)/p)
    gather     "linear"    (1, n/p)
    scatter    "linear"    (1, n(p-1)/p)
    allreduce  "central"   (2, n(p-1))      rank 0 reduces in rank order, and sends the result to all ranks
    barrier    "linear"    (2, 0)           every rank reports to rank 0, which then knows the missing ranks
    barrier    "oneround"  (1, 0)           every rank reports to every rank

Two ranks, oneround:

    rank 0:  send x0 -> ; x1 = incoming ; x0 = f(x0, x1)
    rank 1:  send x1 -> ; x0 = incoming ; x1 = f(x0, x1)
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from aiocoll.algorithms.builder import Builder
from aiocoll.algorithms.program import Program, Region

__all__ = [
    "allgather",
    "allreduce",
    "barrier",
    "barrier_oneround",
    "broadcast",
    "central",
    "exchange",
    "gather",
    "reduce",
    "scatter",
]


def allreduce(rank: int, world_size: int, count: int) -> Program:
    """Return the program that sends the tensor (buffer 0) to all ranks and reduces all tensors in rank order."""
    build = Builder(1)
    tensor = Region(0, 0, count)
    scratch = build.scratch((world_size - 1) * count) if world_size > 1 else 0
    sources = [tensor] * world_size
    sent: tuple[int, ...] = ()
    for distance in range(1, world_size):
        sent += build.send((rank + distance) % world_size, tensor)
    arrived: tuple[int, ...] = ()
    for distance in range(1, world_size):
        peer = (rank - distance) % world_size
        sources[peer] = Region(scratch, (distance - 1) * count, distance * count)
        arrived += build.recv(peer, sources[peer])
    build.fold(tensor, tuple(sources), after=sent, follow=arrived)
    return build.program("oneround")


def central(rank: int, world_size: int, count: int) -> Program:
    """Return the program in which rank 0 reduces all tensors (buffer 0) in rank order and sends back the result.

    Scratch at rank 0: p-1 tensors.
    """
    build = Builder(1)
    tensor = Region(0, 0, count)
    if rank:
        sent = build.send(0, tensor)
        build.recv(0, tensor, after=sent)
        return build.program("central")
    scratch = build.scratch((world_size - 1) * count) if world_size > 1 else 0
    sources = [tensor] * world_size
    arrived: tuple[int, ...] = ()
    for peer in range(1, world_size):
        sources[peer] = Region(scratch, (peer - 1) * count, peer * count)
        arrived += build.recv(peer, sources[peer])
    folded = build.fold(tensor, tuple(sources), follow=arrived)
    for peer in range(1, world_size):
        build.send(peer, tensor, follow=folded)
    return build.program("central")


def exchange(rank: int, world_size: int, count: int) -> Program:
    """Return the program in which two ranks exchange their tensors (buffer 0) and reduce both in rank order."""
    build = Builder(1)
    tensor = Region(0, 0, count)
    if world_size != 2:
        raise ValueError(f"world_size={world_size}: the algorithm 'exchange' needs two ranks")
    sent = build.send(1 - rank, tensor)
    build.combine(1 - rank, tensor, tensor, incoming_first=rank == 1, final=True, after=sent)
    return build.program("exchange")


def reduce(rank: int, world_size: int, root: int, count: int) -> Program:
    """Return the program that sends tensors (buffer 0) to the root, which reduces them in rank order."""
    build = Builder(1)
    tensor = Region(0, 0, count)
    if rank != root:
        build.send(root, tensor)
        return build.program("linear")
    scratch = build.scratch((world_size - 1) * count) if world_size > 1 else 0
    sources = [tensor] * world_size
    arrived: tuple[int, ...] = ()
    peers = (peer for peer in range(world_size) if peer != root)
    for place, peer in enumerate(peers):
        sources[peer] = Region(scratch, place * count, (place + 1) * count)
        arrived += build.recv(peer, sources[peer])
    build.fold(tensor, tuple(sources), follow=arrived)
    return build.program("linear")


def broadcast(rank: int, world_size: int, root: int, count: int) -> Program:
    """Return the program in which the root sends its tensor (buffer 0) to each rank."""
    build = Builder(1)
    tensor = Region(0, 0, count)
    if rank == root:
        for distance in range(1, world_size):
            build.send((root + distance) % world_size, tensor)
    else:
        build.recv(root, tensor)
    return build.program("linear")


def allgather(rank: int, world_size: int, counts: Sequence[int]) -> Program:
    """Return the program that sends the input (buffer p) to all ranks. Outputs are buffers 0 to p-1."""
    build = Builder(world_size + 1)
    mine = Region(world_size, 0, counts[rank])
    build.copy(Region(rank, 0, counts[rank]), mine)
    for distance in range(1, world_size):
        build.send((rank + distance) % world_size, mine)
    for distance in range(1, world_size):
        peer = (rank - distance) % world_size
        build.recv(peer, Region(peer, 0, counts[peer]))
    return build.program("direct")


def barrier(rank: int, world_size: int) -> Program:
    """Return the program of a barrier in which all ranks report to rank 0, and rank 0 replies after the last report."""
    build = Builder(0)
    if rank:
        build.signal(0)
        build.await_signal(0)
        return build.program("linear")
    arrived = tuple(chain.from_iterable(build.await_signal(peer) for peer in range(1, world_size)))
    for peer in range(1, world_size):
        build.signal(peer, after=arrived)
    return build.program("linear")


def barrier_oneround(rank: int, world_size: int) -> Program:
    """Return the program of a barrier that signals every rank and waits for a signal of every rank."""
    build = Builder(0)
    for distance in range(1, world_size):
        build.signal((rank + distance) % world_size)
    for distance in range(1, world_size):
        build.await_signal((rank - distance) % world_size)
    return build.program("oneround")


def gather(rank: int, world_size: int, root: int, counts: Sequence[int]) -> Program:
    """Return the program that sends the input (buffer p) to the root, whose outputs are buffers 0 to p-1."""
    build = Builder(world_size + 1)
    mine = Region(world_size, 0, counts[rank])
    if rank != root:
        # For an empty block, send a signal: the root may not know the block lengths, so it waits for a message from
        # every rank.
        if not build.send(root, mine):
            build.signal(root)
        return build.program("linear")
    build.copy(Region(root, 0, counts[root]), mine)
    for distance in range(1, world_size):
        peer = (root + distance) % world_size
        if not build.recv(peer, Region(peer, 0, counts[peer])):
            build.await_signal(peer)
    return build.program("linear")


def scatter(rank: int, world_size: int, root: int, counts: Sequence[int]) -> Program:
    """Return the program in which the root sends its inputs (buffers 0 to p-1). The output is buffer p."""
    build = Builder(world_size + 1)
    mine = Region(world_size, 0, counts[rank])
    if rank != root:
        build.recv(root, mine)
        return build.program("linear")
    for distance in range(1, world_size):
        peer = (root + distance) % world_size
        build.send(peer, Region(peer, 0, counts[peer]))
    build.copy(mine, Region(root, 0, counts[root]))
    return build.program("linear")
