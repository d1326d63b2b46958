"""Two-level algorithm "leaders": one rank of each host exchanges small messages with other hosts.

Inside a host, data goes up to the leader, and results come down from it, along the trees of `tree`. The leaders run the
algorithm with the fewest steps among themselves. There are as many steps as without levels, but few between hosts
(ceil(log2 h) for h hosts). The number of messages between hosts does not grow with the ranks per host.

Cost, h hosts of k ranks, n = bytes of the whole vector, L = ceil(log2 h), U = floor(log2 k), D and c the depth of a
k-nomial tree of k ranks and the children of its root:

                 steps        most bytes sent by one rank    messages, bytes between hosts   scratch
    allreduce    U + L + D    n(h-1 + c)                     hL, nh(h-1)                     n at inner nodes, nh
    reduce       U + U' *     n                              h-1, n(h-1)                     2n at inner nodes
    broadcast    D' + D *     n(c' + c)                      h-1, n(h-1)
    allgather    1 + B + D    n((h-1)/h + c)                 h(h-1) or hL, n(h-1)            n (above 4 hosts 2n)
    barrier      2 + L        0                              hL, 0

    * U', D' and c': the same for h hosts.   B is 1 up to 4 hosts, L above.

Every leader repeats the reduction among the leaders, as every rank does in "bruck", so the op must be portable. It must
also be commutative, since teams are reduced before hosts. Karonis et al., "Exploiting hierarchy in parallel computer
networks to optimize collective operation performance" (IPDPS 2000).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from aiocoll.algorithms.builder import Builder, Deps
from aiocoll.algorithms.flat import circulant, tree
from aiocoll.algorithms.flat import point_to_all as direct
from aiocoll.algorithms.program import Program, Region
from aiocoll.algorithms.two_level.hosts import Hosts, embed

__all__ = ["DIRECT_HOSTS", "allgather", "allreduce", "barrier", "broadcast", "reduce"]

DIRECT_HOSTS = 4
"""Number of hosts up to which leaders exchange data in one step. Three sends take about the time of one wake-up."""


def allreduce(rank: int, hosts: Hosts, count: int) -> Program:
    """Return the program that reduces tensors (buffer 0) at leaders, then between leaders, and spreads the result."""
    build = Builder(1)
    tensor = Region(0, 0, count)
    host, place = hosts.host[rank], hosts.place[rank]
    team, number = hosts.teams[host], len(hosts.teams)
    done: Deps = ()
    if len(team) > 1:
        done = embed(build, tree.reduce(place, len(team), 0, count), team, [tensor], final=False)
    if place == 0:
        among = direct.exchange if number == 2 else circulant.bruck
        done = embed(build, among(host, number, count), hosts.leaders, [tensor], after=done)
    embed(build, tree.broadcast(place, len(team), 0, count), team, [tensor], after=done)
    return build.program("leaders")


def reduce(rank: int, hosts: Hosts, root: int, count: int) -> Program:
    """Return the program that reduces tensors (buffer 0) at each host's head (root or leader), then at the root."""
    build = Builder(1)
    tensor = Region(0, 0, count)
    host, heads = hosts.host[rank], _heads(hosts, root)
    team, head = hosts.teams[host], heads[host]
    held = tensor
    done: Deps = ()
    if rank == head != root and len(team) > 1:
        held = Region(build.scratch(count), 0, count)
        done = build.copy(held, tensor)
    if len(team) > 1:
        program = tree.reduce(hosts.place[rank], len(team), hosts.place[head], count)
        done = embed(build, program, team, [held], after=done, final=False)
    if rank == head:
        embed(build, tree.reduce(host, len(heads), hosts.host[root], count), heads, [held], after=done)
    return build.program("leaders")


def broadcast(rank: int, hosts: Hosts, root: int, count: int) -> Program:
    """Return the program that sends the root's tensor (buffer 0) to one rank per host, which forwards it."""
    build = Builder(1)
    tensor = Region(0, 0, count)
    host, heads = hosts.host[rank], _heads(hosts, root)
    team, head = hosts.teams[host], heads[host]
    arrived: Deps = ()
    if rank == head:
        done = embed(build, tree.broadcast(host, len(heads), hosts.host[root], count), heads, [tensor])
        arrived = () if rank == root else done[:1]
    program = tree.broadcast(hosts.place[rank], len(team), hosts.place[head], count)
    embed(build, program, team, [tensor], follow=arrived)
    return build.program("leaders")


def allgather(rank: int, hosts: Hosts, counts: Sequence[int]) -> Program:
    """Return the program that gathers each host's inputs (buffer p) in a scratch buffer and sends them to all ranks."""
    world_size, number = len(counts), len(hosts.teams)
    build = Builder(world_size + 1)
    mine = Region(world_size, 0, counts[rank])
    host, team = hosts.host[rank], hosts.teams[hosts.host[rank]]
    whole = Region(build.scratch(sum(counts)), 0, sum(counts))
    sizes = [sum(counts[peer] for peer in team) for team in hosts.teams]
    bundles = [Region(whole.buffer, stop - size, stop) for size, stop in zip(sizes, accumulate(sizes), strict=True)]
    blocks = _blocks(hosts, bundles, counts)
    done: Deps = ()
    if rank == team[0]:
        done = build.copy(blocks[rank], mine)
        for peer in team[1:]:
            done += build.recv(peer, blocks[peer])
        among = direct.allgather if number <= DIRECT_HOSTS else circulant.allgather
        done += embed(build, among(host, number, sizes), hosts.leaders, [*bundles, bundles[host]], after=done)
    else:
        build.send(team[0], mine)
    handed = embed(build, tree.broadcast(hosts.place[rank], len(team), 0, whole.count), team, [whole], after=done)
    here = done if rank == team[0] else handed[:1]
    for peer in range(world_size):
        own = peer == rank
        build.copy(Region(peer, 0, counts[peer]), mine if own else blocks[peer], after=() if own else here)
    return build.program("leaders")


def barrier(rank: int, hosts: Hosts) -> Program:
    """Return the program of a barrier: ranks report to their leaders, which synchronise and then reply."""
    build = Builder(0)
    host = hosts.host[rank]
    first, *others = hosts.teams[host]
    if rank != first:
        build.signal(first)
        build.await_signal(first)
        return build.program("leaders")
    received: Deps = ()
    for peer in others:
        received += build.await_signal(peer)
    received += embed(build, circulant.barrier(host, len(hosts.teams)), hosts.leaders, [], after=received)
    for peer in others:
        build.signal(peer, after=received)
    return build.program("leaders")


def _heads(hosts: Hosts, root: int) -> list[int]:
    """Return the head of each host: the root on its own host, the leader on any other host."""
    return [root if root in team else team[0] for team in hosts.teams]


def _blocks(hosts: Hosts, bundles: Sequence[Region], counts: Sequence[int]) -> dict[int, Region]:
    """Return the region of each rank's block in the scratch buffer of its host."""
    blocks = {}
    for team, bundle in zip(hosts.teams, bundles, strict=True):
        start = bundle.start
        for peer in team:
            blocks[peer] = Region(bundle.buffer, start, start + counts[peer])
            start += counts[peer]
    return blocks
