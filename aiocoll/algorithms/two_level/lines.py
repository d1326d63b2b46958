"""Two-level algorithm "lines" for large reductions: each part is reduced along a chain of all ranks, host after host.

Each rank reduces arriving data with its own, and forwards the result while data arrives, as in "chain" and "ring", so
all steps stream. But a line enters and leaves each host only once, each line through other ranks of the host. So no
more bytes than needed cross between hosts, and all ranks of a host share this traffic. In an allreduce, a part of n/p
bytes travels along each rank's line, and the complete part is spread as in `lanes`. Between hosts, this is a ring.

Cost, p ranks on h hosts, k on each, n = bytes of the whole vector:

                     steps             most bytes sent by one rank   bytes between hosts   scratch
    allreduce        p + h + k - 3     2n(p-1)/p                     2n(h-1)
    reduce           p - 1             n                             n(h-1)                n
    reduce_scatter   p - 1             n(p-1)/p                      n(h-1)                n(p-2)/p

A ring over all ranks moves 2n(p-1)/p over each boundary between hosts, all of it from one rank. If rank numbers
alternate between hosts, it moves k times as much. (Reducing in each host first would take fewer steps. But data from
another host would have to wait for that, and waiting data is copied instead of streamed.)

Partial results are combined in an order that is fixed, but is not rank order, so the op must be commutative. Each
element is reduced along one path, so all ranks get the same bits. The sources are those of `lanes`.
"""

from __future__ import annotations

from collections.abc import Sequence

from aiocoll.algorithms.builder import Builder, Deps, chunks
from aiocoll.algorithms.program import Program, Region
from aiocoll.algorithms.two_level.hosts import Hosts
from aiocoll.algorithms.two_level.lanes import spread

__all__ = ["allreduce", "reduce", "reduce_scatter"]


def allreduce(rank: int, hosts: Hosts, count: int) -> Program:
    """Return the program that reduces part j of the tensor (buffer 0) along a line to rank j and spreads the result."""
    build = Builder(1)
    parts = list(enumerate(chunks(count, len(hosts.host))))
    done: list[Deps] = []
    for target, part in parts:
        done.append(_reduce(build, _line(hosts, target, hosts.counterparts(target)), rank, part, part))
    for target, part in parts:
        # The complete result overwrites a partial result that this rank sent above. That is safe: the complete result
        # contains the partial result, so it arrives after the partial result was read.
        ready = done[target] if rank == target else ()
        spread(build, hosts, rank, target, hosts.counterparts(target), part, ready)
    return build.program("lines")


def reduce(rank: int, hosts: Hosts, root: int, count: int) -> Program:
    """Return the program that reduces each piece of the tensors (buffer 0) along its own line of ranks to the root."""
    build = Builder(1)
    scratch = 0 if rank == root else build.scratch(count)
    for lane, piece in enumerate(chunks(count, hosts.lanes)):
        partial = Region(scratch, piece.start, piece.stop)
        _reduce(build, _line(hosts, root, hosts.gates(lane)), rank, partial, piece)
    return build.program("lines")


def reduce_scatter(rank: int, hosts: Hosts, counts: Sequence[int]) -> Program:
    """Return the program that reduces input j of all ranks (buffer j) along a line of ranks that ends at rank j."""
    world_size = len(counts)
    build = Builder(world_size + 1)
    for target, count in enumerate(counts):
        line = _line(hosts, target, hosts.counterparts(target))
        partial = Region(world_size, 0, count)
        if rank not in (line[0], target):
            partial = Region(build.scratch(count), 0, count)
        _reduce(build, line, rank, partial, Region(target, 0, count))
    return build.program("lines")


def _line(hosts: Hosts, target: int, gates: Sequence[int]) -> list[int]:
    """Return all ranks in the order of a line: host after host, and on each host the gate first.

    The team of `target` is last, with `target` at its end.
    """
    first, *others = hosts.rotated_hosts(hosts.host[target])
    line = [rank for host in others for rank in hosts.rotated_team(gates[host])]
    return [*line, *(rank for rank in hosts.rotated_team(gates[first]) if rank != target), target]


def _reduce(build: Builder, line: Sequence[int], rank: int, partial: Region, own: Region) -> Deps:
    """Add actions that reduce data from the previous rank of `line` with `own`, and send the result to the next rank.

    Return the reducing action; () on the first rank of the line.
    """
    place, last = line.index(rank), line[-1] == rank
    ready: Deps = ()
    if place == 0:
        partial = own
    else:
        ready = build.combine(line[place - 1], partial, own, final=last)
    if not last:
        build.send(line[place + 1], partial, follow=ready)
    return ready
