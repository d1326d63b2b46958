"""Chain algorithms: each rank receives from the previous rank, and forwards data to the next rank while it arrives.

Each rank receives and sends the tensor once, which is the minimum. All links work at the same time, and a filled chain
is as fast as one link, so it suits large tensors. (A reduce-scatter with a gather to the root would move twice the
bytes.)

Cost in (steps, most bytes sent by one rank), n = bytes of the tensor:

    broadcast  "chain"  (p-1, n)
    reduce     "chain"  (p-1, n)    scratch n at inner ranks; the op must be commutative

Ranks are numbered from the root, v = (rank - root) mod p. A broadcast runs up the chain, a reduction down to v = 0.
"""

from __future__ import annotations

from aiocoll.algorithms.builder import Builder, Deps, single_rank_reduction
from aiocoll.algorithms.program import Program, Region

__all__ = ["broadcast", "reduce"]


def broadcast(rank: int, world_size: int, root: int, count: int) -> Program:
    """Return the program that forwards the root's tensor (buffer 0) from rank to rank along the chain."""
    build = Builder(1)
    tensor = Region(0, 0, count)
    node = (rank - root) % world_size
    ready: Deps = ()
    if node:
        ready = build.recv((rank - 1) % world_size, tensor)
    if node < world_size - 1:
        build.send((rank + 1) % world_size, tensor, follow=ready)
    return build.program("chain")


def reduce(rank: int, world_size: int, root: int, count: int) -> Program:
    """Return the program that reduces the tensors (buffer 0) along the chain. Only the root's tensor is overwritten."""
    tensor = Region(0, 0, count)
    if world_size == 1:
        return single_rank_reduction(tensor, tensor)
    build = Builder(1)
    node = (rank - root) % world_size
    last = node == world_size - 1
    partial = tensor if last or node == 0 else Region(build.scratch(count), 0, count)
    ready: Deps = ()
    if not last:
        ready = build.combine((rank + 1) % world_size, partial, tensor, incoming_first=False, final=node == 0)
    if node:
        build.send((rank - 1) % world_size, partial, follow=ready)
    return build.program("chain")
