"""Prefix-reduction algorithms: rank r gets f(x0, ..., xr), or f(x0, ..., xr-1) in the exclusive form.

All algorithms keep the rank order. An op that finalizes its result (AVG) has no meaning here, and the caller rejects
it. In the exclusive form rank 0's tensor stays unchanged, and rank 1 gets rank 0's tensor.

Cost in (steps, most bytes sent by one rank), n = bytes of the tensor:

    scan, exscan  "fold"   (1, n(p-1))    scratch n*rank; each rank sends to all higher ranks, which fold
    scan          "chain"  (p-1, n)       each rank adds its own tensor and forwards the sum, while data arrives
    exscan        "chain"  (p-1, n)       scratch 2n at inner ranks

Hillis and Steele's logarithmic prefix ("Data parallel algorithms", CACM 1986) lies between the two in steps and in
bytes. It pays off only for many ranks and middle sizes.
"""

from __future__ import annotations

from aiocoll.algorithms.builder import Builder, Deps, single_rank_reduction
from aiocoll.algorithms.program import Program, Region

__all__ = ["exscan_chain", "exscan_fold", "scan_chain", "scan_fold"]


def scan_fold(rank: int, world_size: int, count: int) -> Program:
    """Return the program that reduces the tensors (buffer 0) of ranks 0 to `rank` in place."""
    return _fold(rank, world_size, count, inclusive=True)


def exscan_fold(rank: int, world_size: int, count: int) -> Program:
    """Return the program that reduces the tensors (buffer 0) of ranks 0 to `rank` - 1. Rank 0 keeps its tensor."""
    return _fold(rank, world_size, count, inclusive=False)


def _fold(rank: int, world_size: int, count: int, *, inclusive: bool) -> Program:
    build = Builder(1)
    tensor = Region(0, 0, count)
    sent: Deps = ()
    for peer in range(rank + 1, world_size):
        sent += build.send(peer, tensor)
    scratch = build.scratch(rank * count) if rank else 0
    lower = [Region(scratch, peer * count, (peer + 1) * count) for peer in range(rank)]
    arrived: Deps = ()
    for peer in range(rank):
        arrived += build.recv(peer, lower[peer])
    sources = (*lower, tensor) if inclusive else tuple(lower)
    if sources:
        build.fold(tensor, sources, after=sent, follow=arrived)
    return build.program("fold")


def scan_chain(rank: int, world_size: int, count: int) -> Program:
    """Return the program that reduces data from rank-1 with the tensor (buffer 0) and sends the result to rank+1."""
    tensor = Region(0, 0, count)
    if world_size == 1:
        return single_rank_reduction(tensor, tensor)
    build = Builder(1)
    ready = build.combine(rank - 1, tensor, tensor, final=True) if rank else build.fold(tensor, (tensor,))
    if rank < world_size - 1:
        build.send(rank + 1, tensor, follow=ready)
    return build.program("chain")


def exscan_chain(rank: int, world_size: int, count: int) -> Program:
    """Return the program that stores data from rank-1 and sends it, reduced with the tensor (buffer 0), to rank+1."""
    build = Builder(1)
    tensor = Region(0, 0, count)
    last = world_size - 1
    if rank == 0 and last:
        build.send(1, tensor)
    elif rank == last and last:
        build.recv(rank - 1, tensor)
    elif last:
        lower = Region(build.scratch(count), 0, count)
        upto = Region(build.scratch(count), 0, count)
        arrived = build.recv(rank - 1, lower)
        folded = build.fold(upto, (lower, tensor), follow=arrived)
        build.send(rank + 1, upto, follow=folded)
        build.copy(tensor, lower, follow=folded)
    return build.program("chain")
