"""Circulant-graph algorithms: as few steps as a tree and as few bytes as a ring, for any number of ranks.

Let R be the blocks in the order rank, rank+1, ... (mod p). The reduce-scatter halves the number of blocks in each
round. With s' wanted blocks and s = ceil(s'/2), send R[s:s'] to rank+s, which adds them to the first s'-s blocks of its
own R. Continue with s. After ceil(log2 p) rounds, this rank's block R[0] is complete. The same rounds in reverse, with
senders and receivers swapped, gather the results. R[s:s'] is at most two runs of the vector, so no packing is needed.

Partial results are combined in an order that is fixed, but is not rank order, so the op must be commutative. Each block
is reduced in one place, so all ranks get the same bits.

Cost in (steps, most bytes sent by one rank), n = bytes of the whole vector, L = ceil(log2 p):

    allreduce       "circulant"      (2L, 2n(p-1)/p)
    reduce_scatter  "circulant"      (L, n(p-1)/p)     scratch n
    allgather       "circulant"      (L, n(p-1)/p)     scratch n; Bruck's algorithm
    allreduce       "bruck"          (L, n(p-1))       scratch n*p; allgather, then all ranks fold in rank order
    barrier         "dissemination"  (L, 0)

Traeff, "Optimal, non-pipelined reduce-scatter and allreduce algorithms" (arXiv 2410.14234); Bruck et al., "Efficient
algorithms for all-to-all communications in multiport message-passing systems" (IEEE TPDS 1997); Hensgen, Finkel and
Manber, "Two algorithms for barrier synchronization" (IJPP 1988).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, chain
from typing import NamedTuple

from aiocoll.algorithms.builder import Builder, Deps, chunks, single_rank_reduction
from aiocoll.algorithms.program import Program, Region

__all__ = ["allgather", "allreduce", "barrier", "bruck", "reduce_scatter"]


class _Blocks(NamedTuple):
    """The blocks of one rank as a list R: R[i] is block (`first` + i) mod p of a buffer divided at `bounds`."""

    buffer: int
    bounds: Sequence[int]
    first: int = 0

    def runs(self, low: int, high: int) -> list[Region]:
        """Return the one or two regions of the buffer that hold the blocks `low` to `high` - 1 of this list."""
        size = len(self.bounds) - 1
        low, high = low + self.first, high + self.first
        if low < size < high:
            return [self._run(low, size), self._run(0, high - size)]
        if low >= size:
            low, high = low - size, high - size
        return [self._run(low, high)]

    def _run(self, low: int, high: int) -> Region:
        return Region(self.buffer, self.bounds[low], self.bounds[high])


def allreduce(rank: int, world_size: int, count: int) -> Program:
    """Return the program of a reduce-scatter and an allgather of the tensor (buffer 0), without scratch buffers."""
    if world_size == 1:
        return single_rank_reduction(Region(0, 0, count), Region(0, 0, count))
    build = Builder(1)
    parts = chunks(count, world_size)
    blocks = _Blocks(0, [part.start for part in parts] + [count], first=rank)
    reduced = _reduce_rounds(build, rank, blocks, [()] * world_size, parts[rank])
    _gather_rounds(build, rank, blocks, reduced)
    return build.program("circulant")


def reduce_scatter(rank: int, world_size: int, counts: Sequence[int]) -> Program:
    """Return the program that reduces inputs (buffers 0 to p-1) into the output (buffer p)."""
    output = Region(world_size, 0, counts[rank])
    if world_size == 1:
        return single_rank_reduction(output, Region(0, 0, counts[0]), buffers=2)
    build = Builder(world_size + 1)
    blocks = _rotated(build, rank, counts)
    copied = []
    for place in range(world_size):
        part = (rank + place) % world_size
        copied.append(build.copy(blocks.runs(place, place + 1)[0], Region(part, 0, counts[part])))
    _reduce_rounds(build, rank, blocks, copied, output)
    return build.program("circulant")


def allgather(rank: int, world_size: int, counts: Sequence[int]) -> Program:
    """Return the program that gathers inputs (buffer p) in a scratch buffer and copies them to outputs (0 to p-1)."""
    build = Builder(world_size + 1)
    mine = Region(world_size, 0, counts[rank])
    build.copy(Region(rank, 0, counts[rank]), mine)
    if world_size == 1:
        return build.program("local")
    blocks = _rotated(build, rank, counts)
    copied = build.copy(blocks.runs(0, 1)[0], mine)
    for low, high, arrived in _gather_rounds(build, rank, blocks, copied):
        for place in range(low, high):
            part = (rank + place) % world_size
            build.copy(Region(part, 0, counts[part]), blocks.runs(place, place + 1)[0], after=arrived)
    return build.program("circulant")


def bruck(rank: int, world_size: int, count: int) -> Program:
    """Return the program that gathers all tensors (buffer 0) in a scratch buffer and reduces them in rank order."""
    tensor = Region(0, 0, count)
    if world_size == 1:
        return single_rank_reduction(tensor, tensor)
    build = Builder(1)
    blocks = _rotated(build, rank, [count] * world_size)
    copied = build.copy(blocks.runs(0, 1)[0], tensor)
    rounds = _gather_rounds(build, rank, blocks, copied)
    arrived = tuple(chain.from_iterable(deps for _, _, deps in rounds))
    sources = [blocks.runs(place, place + 1)[0] for place in range(world_size)]
    in_rank_order = tuple(sources[(peer - rank) % world_size] for peer in range(world_size))
    build.fold(tensor, in_rank_order, after=copied + arrived)
    return build.program("bruck")


def barrier(rank: int, world_size: int) -> Program:
    """Return the program of a dissemination barrier: in round k, signal rank+2^k and wait for rank-2^k."""
    build = Builder(0)
    received: Deps = ()
    distance = 1
    while distance < world_size:
        build.signal((rank + distance) % world_size, after=received)
        received += build.await_signal((rank - distance) % world_size)
        distance *= 2
    return build.program("dissemination")


def _rotated(build: Builder, rank: int, counts: Sequence[int]) -> _Blocks:
    """Add a scratch buffer for the blocks of all ranks, in the order rank, rank+1, ... (mod p)."""
    bounds = list(accumulate([*counts[rank:], *counts[:rank]], initial=0))
    return _Blocks(build.scratch(bounds[-1]), bounds)


def _halvings(world_size: int) -> list[tuple[int, int]]:
    """Return, for each round of the reduction, the number of blocks after and before the round."""
    pairs = []
    while world_size > 1:
        half = (world_size + 1) // 2
        pairs.append((half, world_size))
        world_size = half
    return pairs


def _reduce_rounds(build: Builder, rank: int, blocks: _Blocks, loaded: Sequence[Deps], target: Region) -> Deps:
    """Add the rounds that reduce this rank's own block into `target`; return the actions of the last round.

    Actions `loaded[i]` must complete before R[i] is used.
    """
    world_size = len(loaded)
    combined: Deps = ()
    for half, whole in _halvings(world_size):
        ready = combined + tuple(chain.from_iterable(loaded[half:whole]))
        for run in blocks.runs(half, whole):
            build.send((rank + half) % world_size, run, after=ready)
        ready = combined + tuple(chain.from_iterable(loaded[: whole - half]))
        last = half == 1
        now: Deps = ()
        for run in blocks.runs(0, whole - half):
            place = target if last else run
            now += build.combine((rank - half) % world_size, place, run, final=last, after=ready)
        combined = now or combined
    return now


def _gather_rounds(build: Builder, rank: int, blocks: _Blocks, first: Deps) -> list[tuple[int, int, Deps]]:
    """Add the rounds that gather all blocks; return the range of blocks and the receiving actions of each round.

    The actions `first` write this rank's own block R[0].

    In an allreduce this overwrites partial results that the reduction has sent. That is safe: the complete results
    contain them and come from the rank that received them, so they arrive after the partial results were read.
    """
    world_size = len(blocks.bounds) - 1
    rounds = []
    ready: Deps = ()
    for half, whole in reversed(_halvings(world_size)):
        peer = (rank - half) % world_size
        if half == 1:
            build.send(peer, blocks.runs(0, 1)[0], follow=first)
        else:
            for run in blocks.runs(0, whole - half):
                build.send(peer, run, after=first + ready)
        arrived: Deps = ()
        for run in blocks.runs(half, whole):
            arrived += build.recv((rank + half) % world_size, run)
        rounds.append((half, whole, arrived))
        ready += arrived
    return rounds
