"""Two-level algorithm "lanes": every rank carries a share of the data between hosts, so all ranks send at once.

A vector is cut into one piece per lane. In an allreduce, the ranks of a host first reduce each piece at the gate of its
lane. Then the gates of a lane reduce over the hosts, and each gate sends the result to its team. A block to be spread
travels along the gates of its lane from host to host. In each host, it travels from the gate around the team. Each rank
forwards it while it arrives.

Cost, h hosts of k ranks, p = hk, n = bytes of the whole vector, L = ceil(log2 h):

                 steps            most bytes sent by one rank   bytes between hosts
    allreduce    2 + 2L           2n(p-1)/p                     2n(h-1)
    broadcast    h + k - 1        n(1 + 1/k)                    n(h-1)
    allgather    h + k - 2        n(p-1)/p                      n(h-1)

Between hosts that is the minimum, and each rank carries 1/k of it, without scratch. Partial results are combined in an
order that is fixed, but is not rank order, so the op must be commutative. Each element is reduced along one path, so
all ranks get the same bits.

Two hosts of two ranks (0 1 | 2 3), the first lane of an allreduce:

    rank 1 -> 0 ; rank 3 -> 2     reduced on arrival: each host's sum
    rank 0 -> 2 ; rank 2 -> 0     one half each, reduced on arrival: complete
    rank 0 -> 2 ; rank 2 -> 0     the complete halves
    rank 0 -> 1 ; rank 2 -> 3

Traeff and Hunold, "Decomposing MPI collectives for exploiting multi-lane communication" (CLUSTER 2020); Bayatpour et
al., "Scalable reduction collectives with data partitioning-based multi-leader design" (SC 2017).
"""

from __future__ import annotations

from collections.abc import Sequence

from aiocoll.algorithms.builder import Builder, Deps, chunks
from aiocoll.algorithms.flat import circulant
from aiocoll.algorithms.program import Program, Region
from aiocoll.algorithms.two_level.hosts import Hosts, embed

__all__ = ["allgather", "allreduce", "broadcast", "spread"]


def allreduce(rank: int, hosts: Hosts, count: int) -> Program:
    """Return the program that reduces each piece of the tensor (buffer 0) at one rank per host, then between hosts."""
    build = Builder(1)
    host = hosts.host[rank]
    others = [peer for peer in hosts.teams[host] if peer != rank]
    pieces = [(piece, hosts.gates(lane)) for lane, piece in enumerate(chunks(count, hosts.lanes))]
    reduced: list[Deps] = []
    for piece, gates in pieces:
        ready: Deps = ()
        if gates[host] == rank:
            for peer in others:
                ready = build.combine(peer, piece, piece, incoming_first=peer < rank, after=ready)
        else:
            build.send(gates[host], piece)
        reduced.append(ready)
    for (piece, gates), ready in zip(pieces, reduced, strict=True):
        if gates[host] != rank:
            build.recv(gates[host], piece)
            continue
        between = circulant.allreduce(host, len(gates), piece.count)
        done = embed(build, between, gates, [piece], after=ready)
        for peer in others:
            build.send(peer, piece, after=done)
    return build.program("lanes")


def broadcast(rank: int, hosts: Hosts, root: int, count: int) -> Program:
    """Return the program that sends each piece of the root's tensor (buffer 0) along its own lane of ranks."""
    build = Builder(1)
    for lane, piece in enumerate(chunks(count, hosts.lanes)):
        spread(build, hosts, rank, root, hosts.gates(lane), piece)
    return build.program("lanes")


def allgather(rank: int, hosts: Hosts, counts: Sequence[int]) -> Program:
    """Return the program that sends the input (buffer p) of each rank along its own lane to all outputs (0 to p-1)."""
    world_size = len(counts)
    build = Builder(world_size + 1)
    mine = Region(world_size, 0, counts[rank])
    build.copy(Region(rank, 0, counts[rank]), mine)
    for origin in range(world_size):
        block = mine if origin == rank else Region(origin, 0, counts[origin])
        spread(build, hosts, rank, origin, hosts.counterparts(origin), block)
    return build.program("lanes")


def spread(
    build: Builder, hosts: Hosts, rank: int, root: int, gates: Sequence[int], region: Region, ready: Deps = ()
) -> None:
    """Add actions that send `region` from `root` to one rank per host (`gates`), and on to all ranks of the host.

    Args:
        build: builder of the program of `rank`.
        hosts: the teams.
        rank: the rank of the program.
        root: the rank that has the data. It need not be a gate.
        gates: the gate on each host.
        region: location of the data at `rank`.
        ready: actions that write the data at the root.
    """
    host, first = hosts.host[rank], hosts.host[root]
    circle = hosts.rotated_hosts(first)
    place = circle.index(host)
    line = hosts.rotated_team(gates[host])
    if place == 0:
        line = [root, *(peer for peer in line if peer != root)]
    at = line.index(rank)
    if at:
        ready = build.recv(line[at - 1], region)
    elif place:
        ready = build.recv(gates[circle[place - 1]], region)
    if rank == gates[host] and place < len(circle) - 1:
        build.send(gates[circle[place + 1]], region, follow=ready)
    if at < len(line) - 1:
        build.send(line[at + 1], region, follow=ready)
