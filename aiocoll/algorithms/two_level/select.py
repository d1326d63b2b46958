"""Two levels: which collectives go over hosts first and ranks second, by which algorithm, and at what cost.

Inside a host a message costs a few microseconds and memory bandwidth; between hosts it costs a wake-up on the network
and a share of it. Two levels are used when a group has ranks on several hosts and more than one on any of them; any
split will do, 3+1 as well as 2+2, and rank numbers may alternate between the hosts. Not with ops that must see the
inputs in rank order: teams would be reduced before others' lower ranks.

Not built, since it would save nothing between hosts: gather, scatter and alltoall (every byte has one sender and one
receiver; only messages could be fewer, at the price of another copy), monitored_barrier (rank 0 must hear from every
rank itself) and the scans (their order is the ranks').
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from math import inf
from types import MappingProxyType
from typing import NamedTuple

from aiocoll.algorithms.flat.tree import RADIX, children
from aiocoll.algorithms.load import Load, in_a_row, log2, seconds_of
from aiocoll.algorithms.machine import PIECE, Machine
from aiocoll.algorithms.program import Program
from aiocoll.algorithms.spec import spec_of
from aiocoll.algorithms.two_level import lanes, leaders, lines
from aiocoll.algorithms.two_level.hosts import Hosts

__all__ = ["ALGORITHMS", "RULES", "TwoLevelRule", "between", "build", "choose", "cost", "has_two_levels", "predict"]


class TwoLevelRule(NamedTuple):
    """One line of the table: `algorithm` is used as long as none of the limits (all inclusive) is exceeded.

    Attributes:
        algorithm: name, a key of `ALGORITHMS` together with the kind; None for the one without levels.
        max_hosts: number of hosts.
        max_nbytes: bytes of the whole vector, in n_half of the network.
        max_chunk: bytes of a p-th of the vector, in n_half.
        max_piece: bytes of one lane's piece of the vector, in n_half.
        max_volume: bytes of the whole vector times (h-1), for h hosts, in n_half.
    """

    algorithm: str | None
    max_hosts: float = inf
    max_nbytes: float = inf
    max_chunk: float = inf
    max_piece: float = inf
    max_volume: float = inf

    def admits(self, nbytes: int, world_size: int, hosts: int, lanes: int, n_half: float) -> bool:
        """Whether no limit is exceeded."""
        return (
            hosts <= self.max_hosts
            and nbytes <= self.max_nbytes * n_half
            and nbytes <= self.max_chunk * n_half * world_size
            and nbytes <= self.max_piece * n_half * lanes
            and nbytes * (hosts - 1) <= self.max_volume * n_half
        )


RULES: Mapping[str, tuple[TwoLevelRule, ...]] = MappingProxyType(
    {
        "allreduce": (
            # Two leaders exchange: as "exchange" of two ranks.
            TwoLevelRule("leaders", max_hosts=2, max_nbytes=4),
            # As "bruck": until the bytes that a leader sends take as long as a message takes to get started.
            TwoLevelRule("leaders", max_volume=1),
            # Few steps; but a gate takes its team's pieces one after the other, and what waits is copied. Above, the
            # lines' extra steps are hidden by streaming.
            TwoLevelRule("lanes", max_piece=8),
            TwoLevelRule("lines"),
        ),
        "reduce": (
            # Few steps, few of them between hosts.
            TwoLevelRule("leaders", max_nbytes=4),
            # log2(p) whole tensors against p-1 wake-ups, as "binomial".
            TwoLevelRule("leaders", max_chunk=0.25),
            TwoLevelRule("lines"),
        ),
        # Below, the steps count, not the bytes.
        "reduce_scatter": (TwoLevelRule(None, max_chunk=1), TwoLevelRule("lines")),
        "broadcast": (
            # As "knomial", until the root's repeated bytes cost more; the lanes take fewer steps than a chain.
            TwoLevelRule("leaders", max_nbytes=8),
            TwoLevelRule("lanes"),
        ),
        "allgather": (
            # It copies everything twice, which costs as much as a wake-up above.
            TwoLevelRule("leaders", max_nbytes=1),
            TwoLevelRule("lanes"),
        ),
        "barrier": (TwoLevelRule("leaders"),),
    }
)

_REPEATED = frozenset({("allreduce", "leaders")})
"""Reductions that several ranks repeat: the same bits only if the kernel gives them wherever an element lies."""

ALGORITHMS: Mapping[tuple[str, str], Callable[..., Program]] = MappingProxyType(
    {
        ("allreduce", "leaders"): leaders.allreduce,
        ("allreduce", "lanes"): lanes.allreduce,
        ("allreduce", "lines"): lines.allreduce,
        ("reduce", "leaders"): leaders.reduce,
        ("reduce", "lines"): lines.reduce,
        ("reduce_scatter", "lines"): lines.reduce_scatter,
        ("broadcast", "leaders"): leaders.broadcast,
        ("broadcast", "lanes"): lanes.broadcast,
        ("allgather", "leaders"): leaders.allgather,
        ("allgather", "lanes"): lanes.allgather,
        ("barrier", "leaders"): leaders.barrier,
    }
)


def has_two_levels(hosts: Sequence[int]) -> bool:
    """Whether these ranks are on several hosts, and more than one of them on any."""
    return 1 < len(set(hosts)) < len(hosts)


def choose(
    kind: str, nbytes: int, hosts: Sequence[int], *, ordered: bool, portable: bool, machine: Machine
) -> str | None:
    """Return the name of the two-level algorithm for a collective; None to do it without levels.

    Args:
        kind: the collective.
        nbytes: bytes of the whole vector, as for `select.choose`.
        hosts: host number of each rank; () if that is not known.
        ordered: the op must fold all inputs in rank order at one place.
        portable: the op gives the same bits on every rank.
        machine: what the network between the hosts can do; the same on all ranks.
    """
    rules = RULES.get(kind)
    if rules is None or ordered or not has_two_levels(hosts):
        return None
    teams = Counter(hosts)
    number, per_host = len(teams), max(teams.values())
    for rule in rules:
        if not portable and (kind, rule.algorithm) in _REPEATED:
            continue
        if rule.admits(nbytes, len(hosts), number, per_host, machine.n_half):
            return rule.algorithm
    raise AssertionError(f"the rules for {kind} have no last resort")


def build(
    kind: str, algorithm: str, rank: int, hosts: Sequence[int], *sizes: int | Sequence[int], root: int = 0
) -> Program:
    """Return the program of one rank; arguments as for `select.build`, with the host number of each rank."""
    generate = ALGORITHMS[kind, algorithm]
    if spec_of(kind).rooted:
        return generate(rank, Hosts(hosts), root, *sizes)
    return generate(rank, Hosts(hosts), *sizes)


def between(algorithm: str, kind: str, nbytes: int, hosts: Sequence[int]) -> int:
    """Return the bytes that all ranks together send to other hosts.

    They depend on the number of hosts alone, however many ranks each of them has.

    Args:
        algorithm: its name.
        kind: the collective.
        nbytes: bytes of the whole vector, as for `choose`.
        hosts: host number of each rank.
    """
    number = len(set(hosts))
    if kind != "allreduce":
        return nbytes * (number - 1)
    return nbytes * (number - 1) * (number if algorithm == "leaders" else 2)


def cost(algorithm: str, kind: str, nbytes: int, hosts: Sequence[int]) -> tuple[int, int]:
    """Return (steps, most bytes sent by one rank) of a two-level collective.

    Exact, but for rounding, where all hosts have as many ranks; else for hosts as large as the largest, which is more.

    Args:
        algorithm: its name.
        kind: the collective.
        nbytes: bytes of the whole vector, as for `choose`.
        hosts: host number of each rank.

    Raises:
        KeyError: if `kind` has no such algorithm.
    """
    teams = Counter(hosts)
    number, per_host = len(teams), max(teams.values())
    if nbytes == 0 and spec_of(kind).input is not None:
        return 0, 0
    return _FORMULAS[kind, algorithm](nbytes, number, per_host)


def predict(algorithm: str, kind: str, nbytes: int, hosts: Sequence[int], machine: Machine) -> float:
    """Return about how many seconds a two-level collective takes: half of that or twice as much for some splits.

    All ranks are taken to be as far from each other as the hosts are.

    Args:
        algorithm: its name.
        kind: the collective.
        nbytes: bytes of the whole vector, as for `select.choose`.
        hosts: host number of each rank.
        machine: what the network between the hosts can do.
    """
    steps, sent = cost(algorithm, kind, nbytes, hosts)
    load = Load(steps, 0, 0, sent, sent, nbytes if spec_of(kind).reduces else 0)
    if kind == "reduce":
        # What a rank sends is little compared to what it receives, in whole tensors or piece by piece.
        passed = nbytes if algorithm == "leaders" else min(nbytes, PIECE)
        return seconds_of(load, machine) + max(steps - 1, 0) * passed * machine.beta
    return in_a_row(load, machine) if algorithm == "lines" else seconds_of(load, machine)


def _depth(ranks: int) -> int:
    """Levels below the root of a k-nomial tree."""
    levels, deepest = 0, 1
    while deepest < ranks:  # as in `cost`: the first node of the next level has one more digit 1 in base RADIX
        levels += 1
        deepest = deepest * RADIX + 1
    return levels


def _children(ranks: int) -> int:
    return sum(1 for _ in children(0, ranks, RADIX))


def _allgather_leaders(n: int, h: int, k: int) -> tuple[int, int]:
    steps = 1 if h <= leaders.DIRECT_HOSTS else log2(h)
    return (k > 1) + steps + _depth(k), n * (h - 1) // h + n * _children(k)


def _allreduce_bytes(n: int, h: int, k: int) -> int:
    return 2 * n * (h * k - 1) // (h * k)


#: Of bytes n, hosts h and ranks per host k, as in the heads of the modules.
_FORMULAS: Mapping[tuple[str, str], Callable[[int, int, int], tuple[int, int]]] = MappingProxyType(
    {
        ("allreduce", "leaders"): lambda n, h, k: (
            k.bit_length() - 1 + log2(h) + _depth(k),
            n * (h - 1 + _children(k)),
        ),
        ("allreduce", "lanes"): lambda n, h, k: (2 * log2(h) + 2 * (k > 1), _allreduce_bytes(n, h, k)),
        ("allreduce", "lines"): lambda n, h, k: (h * k + h + k - 3, _allreduce_bytes(n, h, k)),
        ("reduce", "leaders"): lambda n, h, k: (k.bit_length() + h.bit_length() - 2, n),
        ("reduce", "lines"): lambda n, h, k: (h * k - 1, n),
        ("reduce_scatter", "lines"): lambda n, h, k: (h * k - 1, n * (h * k - 1) // (h * k)),
        ("broadcast", "leaders"): lambda n, h, k: (_depth(h) + _depth(k), n * (_children(h) + _children(k))),
        ("broadcast", "lanes"): lambda n, h, k: (h + k - 1, n + n // k),
        ("allgather", "leaders"): _allgather_leaders,
        ("allgather", "lanes"): lambda n, h, k: (h + k - 2, n * (h * k - 1) // (h * k)),
        ("barrier", "leaders"): lambda n, h, k: (2 * (k > 1) + log2(h), 0),
    }
)
