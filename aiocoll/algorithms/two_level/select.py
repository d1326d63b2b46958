"""Selection and cost of two-level algorithms, for groups with ranks on several hosts.

Inside a host, a message costs a few microseconds and memory bandwidth. Between hosts it costs a wake-up and a share of
the network. Two levels are used when a group has ranks on several hosts and more than one on any of them. Any split
works, 3+1 as well as 2+2, and rank numbers may alternate between hosts. Ops that need the inputs in rank order cannot
use two levels, since a team would be reduced before lower ranks of other teams.

Some collectives have no two-level form, because it would not reduce the traffic between hosts. In gather, scatter and
alltoall, every byte has one sender and one receiver; only the number of messages could shrink, for an additional copy.
In monitored_barrier, rank 0 must receive a report of every rank itself. Scans depend on the rank order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from math import inf
from types import MappingProxyType
from typing import NamedTuple

from aiocoll.algorithms.flat.tree import RADIX, children
from aiocoll.algorithms.load import Load, log2, seconds_of, streaming_seconds_of
from aiocoll.algorithms.machine import PIECE, Machine
from aiocoll.algorithms.program import Program
from aiocoll.algorithms.spec import spec_of
from aiocoll.algorithms.two_level import lanes, leaders, lines
from aiocoll.algorithms.two_level.hosts import Hosts

__all__ = [
    "ALGORITHMS",
    "RULES",
    "TwoLevelRule",
    "build",
    "bytes_between_hosts",
    "choose",
    "cost",
    "has_two_levels",
    "predict",
]


class TwoLevelRule(NamedTuple):
    """A rule for two-level algorithms: an algorithm, and the limits up to which it is used.

    Attributes:
        algorithm: name, which together with the kind is a key of `ALGORITHMS`; None for an algorithm without levels.
        max_hosts: number of hosts.
        max_nbytes: bytes of the whole vector, in n_half of the network.
        max_chunk: bytes of the vector divided by p, in n_half.
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
        """Return whether a call is within all limits of this rule."""
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
            # Two leaders exchange their tensors in one step, like the two ranks of "exchange".
            TwoLevelRule("leaders", max_hosts=2, max_nbytes=4),
            # Leaders gather and reduce all tensors, as in "bruck". Above `max_volume`, a leader needs more time to
            # send its bytes than to start a message.
            TwoLevelRule("leaders", max_volume=1),
            # "lanes" takes few steps. But one rank per host receives the pieces of its lane one after the other, and
            # waiting pieces are copied. Above the limit, "lines" is faster: it has more steps, but they overlap.
            TwoLevelRule("lanes", max_piece=8),
            TwoLevelRule("lines"),
        ),
        "reduce": (
            # "leaders" takes few steps, and only a few of them are between hosts.
            TwoLevelRule("leaders", max_nbytes=4),
            # "leaders" takes log2(p) sends of whole tensors, as in "binomial"; "lines" takes p-1 wake-ups.
            TwoLevelRule("leaders", max_chunk=0.25),
            TwoLevelRule("lines"),
        ),
        # None selects a flat algorithm. Below the limit, the number of steps matters more than the number of bytes.
        "reduce_scatter": (TwoLevelRule(None, max_chunk=1), TwoLevelRule("lines")),
        "broadcast": (
            # "leaders" sends along a tree, as in "knomial". Above the limit, the root's repeated sends take longer than
            # "lanes", which takes fewer steps than a chain.
            TwoLevelRule("leaders", max_nbytes=8),
            TwoLevelRule("lanes"),
        ),
        "allgather": (
            # "leaders" copies all data twice. Above the limit, the copies take longer than a wake-up.
            TwoLevelRule("leaders", max_nbytes=1),
            TwoLevelRule("lanes"),
        ),
        "barrier": (TwoLevelRule("leaders"),),
    }
)

_REPEATED = frozenset({("allreduce", "leaders")})
"""Algorithms in which several ranks carry out the same reduction.

Results are equal only if the kernel does not depend on an element's position.
"""

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
    """Return whether the ranks are on several hosts, and at least one host has several ranks."""
    return 1 < len(set(hosts)) < len(hosts)


def choose(
    kind: str, nbytes: int, hosts: Sequence[int], *, ordered: bool, portable: bool, machine: Machine
) -> str | None:
    """Return the name of the two-level algorithm for a collective; None if a flat algorithm is to be used.

    Args:
        kind: the collective.
        nbytes: bytes of the whole vector, as for `select.choose`.
        hosts: host number of each rank; () if unknown.
        ordered: True if the op must fold all inputs in rank order at one place.
        portable: True if the op gives the same bits on every rank.
        machine: the costs of the network between the hosts; the same on all ranks.
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
    raise AssertionError(f"no rule for {kind} applies; the last rule must have no limits")


def build(
    kind: str, algorithm: str, rank: int, hosts: Sequence[int], *sizes: int | Sequence[int], root: int = 0
) -> Program:
    """Return one rank's program of a two-level collective. The arguments are those of `select.build`."""
    generate = ALGORITHMS[kind, algorithm]
    if spec_of(kind).rooted:
        return generate(rank, Hosts(hosts), root, *sizes)
    return generate(rank, Hosts(hosts), *sizes)


def bytes_between_hosts(algorithm: str, kind: str, nbytes: int, hosts: Sequence[int]) -> int:
    """Return the number of bytes that all ranks together send to other hosts.

    They depend on the number of hosts only, not on the ranks per host.

    Args:
        algorithm: name of the algorithm.
        kind: the collective.
        nbytes: bytes of the whole vector, as for `choose`.
        hosts: host number of each rank.
    """
    number = len(set(hosts))
    if kind != "allreduce":
        return nbytes * (number - 1)
    return nbytes * (number - 1) * (number if algorithm == "leaders" else 2)


def cost(algorithm: str, kind: str, nbytes: int, hosts: Sequence[int]) -> tuple[int, int]:
    """Return the steps of a two-level collective, and the most bytes that any rank sends.

    Exact, except for rounding, if all hosts have equally many ranks. Otherwise, an upper bound: the cost for hosts that
    are all as large as the largest.

    Args:
        algorithm: name of the algorithm.
        kind: the collective.
        nbytes: bytes of the whole vector, as for `choose`.
        hosts: host number of each rank.

    Raises:
        KeyError: `kind` has no such algorithm.
    """
    teams = Counter(hosts)
    number, per_host = len(teams), max(teams.values())
    if nbytes == 0 and spec_of(kind).input is not None:
        return 0, 0
    return _FORMULAS[kind, algorithm](nbytes, number, per_host)


def predict(algorithm: str, kind: str, nbytes: int, hosts: Sequence[int], machine: Machine) -> float:
    """Return the approximate duration of a two-level collective in seconds, within a factor of two.

    The model treats all ranks as equally distant, with the costs of the network between hosts.

    Args:
        algorithm: name of the algorithm.
        kind: the collective.
        nbytes: bytes of the whole vector, as for `select.choose`.
        hosts: host number of each rank.
        machine: the costs of the network between the hosts.
    """
    steps, sent = cost(algorithm, kind, nbytes, hosts)
    load = Load(steps, 0, 0, sent, sent, nbytes if spec_of(kind).reduces else 0)
    if kind == "reduce":
        # Bytes that an inner rank receives before it forwards data: the whole tensor in "leaders", one piece in other
        # algorithms.
        passed = nbytes if algorithm == "leaders" else min(nbytes, PIECE)
        return seconds_of(load, machine) + max(steps - 1, 0) * passed * machine.beta
    return streaming_seconds_of(load, machine) if algorithm == "lines" else seconds_of(load, machine)


def _depth(ranks: int) -> int:
    """Return the number of levels below the root of a k-nomial tree."""
    levels, deepest = 0, 1
    while deepest < ranks:  # the first node of each level is 1, 11, 111, ... in base RADIX
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


#: Number of steps and bytes per rank, for n bytes, h hosts and k ranks per host: see the algorithms' module docstrings.
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
