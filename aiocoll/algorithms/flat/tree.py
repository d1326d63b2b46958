"""Tree algorithms: few steps for small messages, when one rank sends to all or receives from all.

Ranks are numbered from the root, v = (rank - root) mod p. The parent of v is v with its lowest digit other than zero
cleared, in base 2 for the reduction and base 4 for the broadcast.

Cost in (steps, most bytes sent by one rank), n = bytes of the tensor:

    reduce     "binomial"  (floor(log2 p), n)                 scratch n at inner nodes; the op must be commutative
    broadcast  "knomial"   (m, n * children of the root)      m: most digits other than zero of any v

Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH" (IJHPCA 2005).
"""

from __future__ import annotations

from collections.abc import Iterator

from aiocoll.algorithms.builder import Builder, Deps, single_rank_reduction
from aiocoll.algorithms.program import Program, Region

__all__ = ["RADIX", "broadcast", "children", "reduce"]

RADIX = 4
"""Base of the broadcast tree. A rank starts three sends in about the time of one wake-up, so 4 saves steps over 2."""


def children(node: int, world_size: int, radix: int) -> Iterator[int]:
    """Yield the children of `node` in the tree. Children with larger subtrees come first."""
    digits = 0
    while node % radix ** (digits + 1) == 0 and radix**digits < world_size:
        digits += 1
    for digit in reversed(range(digits)):
        for multiple in range(1, radix):
            child = node + multiple * radix**digit
            if child < world_size:
                yield child


def _parent(node: int, radix: int) -> int:
    weight = radix
    while node % weight == 0:
        weight *= radix
    return node - node % weight


def reduce(rank: int, world_size: int, root: int, count: int) -> Program:
    """Return the program that reduces the tensors (buffer 0) along a binomial tree, into the root's tensor."""
    tensor = Region(0, 0, count)
    if world_size == 1:
        return single_rank_reduction(tensor, tensor)
    build = Builder(1)
    node = (rank - root) % world_size
    branches = sorted(children(node, world_size, 2))
    partial = source = tensor
    if branches and node:
        partial = Region(build.scratch(count), 0, count)
    ready: Deps = ()
    for child in branches:
        peer = (child + root) % world_size
        last = node == 0 and child == branches[-1]
        ready = build.combine(peer, partial, source, incoming_first=False, final=last, after=ready)
        source = partial
    if node:
        build.send((_parent(node, 2) + root) % world_size, partial, follow=ready)
    return build.program("binomial")


def broadcast(rank: int, world_size: int, root: int, count: int) -> Program:
    """Return the program that sends the root's tensor (buffer 0) down a tree of ranks that forward it."""
    build = Builder(1)
    tensor = Region(0, 0, count)
    node = (rank - root) % world_size
    ready: Deps = ()
    if node:
        ready = build.recv((_parent(node, RADIX) + root) % world_size, tensor)
    for child in children(node, world_size, RADIX):
        build.send((child + root) % world_size, tensor, follow=ready)
    return build.program("knomial")
