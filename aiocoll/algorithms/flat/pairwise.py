"""Pairwise algorithms: each rank receives one chunk directly from all ranks, and reduces it in rank order.

It has as little traffic as a ring, in two steps instead of 2(p-1). No other large-message algorithm reduces each
element in one place in rank order. That suits ops that are not commutative, and sums that must be rounded only once.
Its disadvantage is p-1 messages at once. The reduction streams: it follows the arrivals, and the sends of results
follow the reduction, element by element.

Cost in (steps, most bytes sent by one rank), n = bytes of the whole vector (alltoall: of one rank's inputs):

    allreduce       "pairwise"  (2, 2n(p-1)/p)    scratch n(p-1)/p
    reduce          "pairwise"  (2, n)            scratch n (root: n(p-1)/p)
    reduce_scatter  "pairwise"  (1, n(p-1)/p)     scratch n(p-1)/p
    alltoall        "pairwise"  (1, n(p-1)/p)

Each rank sends to rank+1, rank+2, ..., so that ranks start with different peers. Rabenseifner, "Optimization of
Collective Reduction Operations" (ICCS 2004), compares it with halving and ring.
"""

from __future__ import annotations

from collections.abc import Sequence

from aiocoll.algorithms.builder import Builder, Deps, chunks
from aiocoll.algorithms.program import Program, Region

__all__ = ["allreduce", "alltoall", "reduce", "reduce_scatter"]


def allreduce(rank: int, world_size: int, count: int) -> Program:
    """Return the program that reduces this rank's chunk of all tensors (buffer 0) and sends the result to all ranks."""
    build = Builder(1)
    parts = chunks(count, world_size)
    mine = parts[rank]
    folded = _fold_chunk(build, rank, parts, mine)
    for distance in range(1, world_size):
        build.send((rank + distance) % world_size, mine, follow=folded)
    for distance in range(1, world_size):
        # The result overwrites the chunk that was sent to the same peer above. This is safe: the peer sends the result
        # only after it has reduced that chunk.
        peer = (rank - distance) % world_size
        build.recv(peer, parts[peer])
    return build.program("pairwise")


def reduce(rank: int, world_size: int, root: int, count: int) -> Program:
    """Return the program that reduces this rank's chunk of all tensors (buffer 0) and sends the result to the root."""
    build = Builder(1)
    parts = chunks(count, world_size)
    if rank != root:
        size = parts[rank].count
        mine = Region(build.scratch(size), 0, size)
        folded = _fold_chunk(build, rank, parts, mine)
        build.send(root, mine, follow=folded)
        return build.program("pairwise")
    _fold_chunk(build, rank, parts, parts[root])
    for distance in range(1, world_size):
        # The result overwrites the chunk that was sent to the same peer. This is safe: the peer sends the result only
        # after it has reduced that chunk.
        peer = (root - distance) % world_size
        build.recv(peer, parts[peer])
    return build.program("pairwise")


def reduce_scatter(rank: int, world_size: int, counts: Sequence[int]) -> Program:
    """Return the program that reduces this rank's chunk of all inputs (buffers 0 to p-1) into buffer p."""
    build = Builder(world_size + 1)
    parts = [Region(part, 0, counts[part]) for part in range(world_size)]
    _fold_chunk(build, rank, parts, Region(world_size, 0, counts[rank]))
    return build.program("pairwise")


def alltoall(rank: int, world_size: int, in_counts: Sequence[int], out_counts: Sequence[int]) -> Program:
    """Return the program that sends input j (buffer j) to rank j and receives output j (buffer p+j) from it."""
    build = Builder(2 * world_size)
    for distance in range(1, world_size):
        peer = (rank + distance) % world_size
        build.send(peer, Region(peer, 0, in_counts[peer]))
    for distance in range(1, world_size):
        peer = (rank - distance) % world_size
        build.recv(peer, Region(world_size + peer, 0, out_counts[peer]))
    build.copy(Region(world_size + rank, 0, out_counts[rank]), Region(rank, 0, in_counts[rank]))
    return build.program("pairwise")


def _fold_chunk(build: Builder, rank: int, parts: Sequence[Region], target: Region) -> Deps:
    """Add actions that send each peer its chunk, and reduce this rank's chunk of all ranks in order into `target`."""
    world_size = len(parts)
    size = parts[rank].count
    scratch = build.scratch((world_size - 1) * size) if world_size > 1 else 0
    for distance in range(1, world_size):
        peer = (rank + distance) % world_size
        build.send(peer, parts[peer])
    sources = [parts[rank]] * world_size
    arrived: Deps = ()
    for distance in range(1, world_size):
        peer = (rank - distance) % world_size
        sources[peer] = Region(scratch, (distance - 1) * size, distance * size)
        arrived += build.recv(peer, sources[peer])
    return build.fold(target, tuple(sources), follow=arrived)
