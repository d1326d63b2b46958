"""Ring algorithms: chunks travel from rank to rank and are reduced on the way, while all ranks send and receive.

Chunk c starts at rank c+1, is reduced at each rank it passes and is complete at rank c. In an allreduce it then travels
around the ring once more. A rank forwards a chunk while it arrives (`follow`), so segments stream and every link is
busy in both directions. This is the fastest algorithm for large vectors, and the slowest for small ones. Partial sums
start at a different rank for each chunk, so the op must be commutative. Each chunk is reduced along one path only, so
all ranks get the same bits.

Cost in (steps, most bytes sent by one rank), n = bytes of the whole vector:

    allreduce       "ring"  (2(p-1), 2n(p-1)/p)
    reduce_scatter  "ring"  (p-1, n(p-1)/p)      scratch: two chunks, used in turn
    allgather       "ring"  (p-1, n(p-1)/p)

Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations" (JPDC 2009). Two ranks:

    rank 0:  send half 1 -> ; half 0 += incoming ; send half 0 -> ; half 1 = incoming
    rank 1:  send half 0 -> ; half 1 += incoming ; send half 1 -> ; half 0 = incoming
"""

from __future__ import annotations

from collections.abc import Sequence

from aiocoll.algorithms.builder import Builder, Deps, chunks, single_rank_reduction
from aiocoll.algorithms.program import Program, Region

__all__ = ["allgather", "allreduce", "reduce_scatter"]


def allreduce(rank: int, world_size: int, count: int) -> Program:
    """Return the program of a reduce-scatter and an allgather of the tensor (buffer 0), without scratch buffers."""
    if world_size == 1:
        return single_rank_reduction(Region(0, 0, count), Region(0, 0, count))
    build = Builder(1)
    parts = chunks(count, world_size)
    right, left = (rank + 1) % world_size, (rank - 1) % world_size
    ready: Deps = ()
    for hop in range(1, world_size):
        build.send(right, parts[(rank - hop) % world_size], follow=ready)
        part = parts[(rank - hop - 1) % world_size]
        ready = build.combine(left, part, part, final=hop == world_size - 1)
    for hop in range(world_size - 1):
        build.send(right, parts[(rank - hop) % world_size], follow=ready)
        # The received chunk overwrites a partial result that this rank sent above. This is safe: the complete result
        # contains the partial result, so it arrives after the partial result was read.
        ready = build.recv(left, parts[(rank - hop - 1) % world_size])
    return build.program("ring")


def reduce_scatter(rank: int, world_size: int, counts: Sequence[int]) -> Program:
    """Return the program that reduces inputs (buffers 0 to p-1) into the output (buffer p)."""
    output = Region(world_size, 0, counts[rank])
    if world_size == 1:
        return single_rank_reduction(output, Region(0, 0, counts[0]), buffers=2)
    build = Builder(world_size + 1)
    relays = [build.scratch(max(counts)) for _ in range(min(2, world_size - 2))]
    readers: dict[int, Deps] = {}  # the last message sent from each buffer
    right, left = (rank + 1) % world_size, (rank - 1) % world_size
    partial = Region(left, 0, counts[left])
    ready: Deps = ()
    for hop in range(1, world_size):
        sent = build.send(right, partial, follow=ready)
        readers[partial.buffer] = sent or readers.get(partial.buffer, ())
        part = (rank - hop - 1) % world_size
        last = hop == world_size - 1
        partial = output if last else Region(relays[hop % len(relays)], 0, counts[part])
        free = readers.get(partial.buffer, ())
        ready = build.combine(left, partial, Region(part, 0, counts[part]), final=last, after=free)
    return build.program("ring")


def allgather(rank: int, world_size: int, counts: Sequence[int]) -> Program:
    """Return the program that forwards inputs (buffer p) around the ring into all outputs (buffers 0 to p-1)."""
    build = Builder(world_size + 1)
    right, left = (rank + 1) % world_size, (rank - 1) % world_size
    block = Region(world_size, 0, counts[rank])
    build.copy(Region(rank, 0, counts[rank]), block)
    ready: Deps = ()
    for hop in range(1, world_size):
        build.send(right, block, follow=ready)
        part = (rank - hop) % world_size
        block = Region(part, 0, counts[part])
        ready = build.recv(left, block)
    return build.program("ring")
