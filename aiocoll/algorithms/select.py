"""Algorithm selection: a table of rules, of which the first suitable one is used, and functions that build programs.

The rules use only values that are equal on all ranks: the collective, the bytes of the whole vector, the number of
ranks, properties of the reduce op, and the machine's numbers, which rank 0 has sent to all ranks. So all ranks choose
the same algorithm.

Limits are multiples of the bytes or messages that the machine handles in the time of one message
(`algorithms.machine`), so one table serves every machine and medium. A test compares it with the predictions of
`algorithms.cost`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import inf
from types import MappingProxyType
from typing import NamedTuple

from aiocoll.algorithms import load
from aiocoll.algorithms.flat import chain, circulant, pairwise, ring, scan, tree
from aiocoll.algorithms.flat import point_to_all as direct
from aiocoll.algorithms.load import Formula
from aiocoll.algorithms.machine import PIECE, Machine, Tuning
from aiocoll.algorithms.program import Program
from aiocoll.algorithms.spec import spec_of
from aiocoll.algorithms.two_level import select as two_level

__all__ = ["ALGORITHMS", "IN_SLOTS", "RULES", "Algorithm", "Lanes", "Rule", "build", "choose", "find", "lanes"]


class Rule(NamedTuple):
    """A rule of the selection table: an algorithm, and the limits up to which it is used.

    Attributes:
        algorithm: name, which together with the kind is a key of `ALGORITHMS`.
        min_world, max_world: number of ranks.
        max_nbytes: bytes of the whole vector, in n_half.
        max_chunk: bytes of the vector divided by p, in n_half.
        max_volume: bytes of the whole vector times (p-1), the amount sent by a rank that sends it to all ranks; in
            n_half.
        max_gaps: bytes of the whole vector, in units of the bytes that a link carries during the overhead of one
            message.
        max_stages: bytes of the vector divided by p, in units of the bytes that a link carries until a rank of a chain
            forwards a piece.
        max_fan: time for the p-2 messages of a rank after the first, in units of the time for all steps of a tree after
            the first.
    """

    algorithm: str
    min_world: int = 1
    max_world: float = inf
    max_nbytes: float = inf
    max_chunk: float = inf
    max_volume: float = inf
    max_gaps: float = inf
    max_stages: float = inf
    max_fan: float = inf

    def admits(self, nbytes: int, world_size: int, machine: Machine) -> bool:
        """Return whether a call is within all limits of this rule."""
        n_half = machine.n_half
        return (
            self.min_world <= world_size <= self.max_world
            and nbytes <= self.max_nbytes * n_half
            and nbytes <= self.max_chunk * n_half * world_size
            and nbytes * (world_size - 1) <= self.max_volume * n_half
            and nbytes * machine.fan <= self.max_gaps * n_half
            and nbytes <= self.max_stages * (n_half + PIECE) * world_size
            and world_size - 2 <= self.max_fan * machine.fan * max((world_size - 1).bit_length() - 1, 1)
        )


_SCANS = (
    # "fold" takes one step. Above the limit, sending p-1 tensors to the last rank takes longer than the p-1 wake-ups of
    # a chain.
    Rule("fold", max_volume=8),
    # A chain sends the fewest bytes, and all its steps overlap.
    Rule("chain"),
    # For ops that must reduce in rank order, because a chain would round the partial result at each rank.
    Rule("fold"),
)

RULES: Mapping[str, tuple[Rule, ...]] = MappingProxyType(
    {
        "allreduce": (
            # Two ranks exchange their tensors in one step. Above the limit, the reduction has to wait for the end of
            # the send.
            Rule("exchange", max_world=2, min_world=2, max_stages=0.42),
            Rule("oneround", max_world=2, max_nbytes=4),
            # With "ring", each of two ranks reduces one half of the tensor, while data flows in both directions.
            Rule("ring", max_world=2),
            # "oneround" takes one step. Above the limits, the messages or bytes of a rank take longer than the saved
            # steps.
            Rule("oneround", max_volume=4, max_fan=0.6),
            # "bruck" takes half the steps of "circulant". Above the limit, the bytes of its allgather take longer than
            # the saved steps.
            Rule("bruck", max_volume=4),
            # For ops whose result depends on an element's position in the array: "pairwise" reduces each chunk on one
            # rank only, in two steps.
            Rule("pairwise", max_volume=4, max_fan=0.25),
            # "circulant" sends the fewest bytes in few steps. Above the limit, a ring is faster: it has more steps, but
            # they overlap.
            Rule("circulant", max_chunk=15),
            Rule("ring"),
            # For ops that must reduce in rank order. Above the limit, "pairwise" is faster despite 4(p-2) more
            # messages.
            Rule("bruck", max_gaps=2),
            # For ops that must reduce in rank order, at any size: "pairwise" sends the fewest bytes.
            Rule("pairwise"),
        ),
        "reduce": (
            # "linear" sends all tensors to the root in one step. Above the limits, this takes longer than the steps of
            # a tree.
            Rule("linear", max_volume=2.5, max_fan=0.75),
            # "binomial" takes log2(p) sends of whole tensors. Above the limit, a chain takes less time until all its
            # ranks are busy.
            Rule("binomial", max_stages=0.3),
            # A chain sends the fewest bytes, and all its steps overlap.
            Rule("chain"),
            # For ops that must reduce in rank order. The root alone reduces small tensors ("linear"); all ranks reduce
            # larger ones ("pairwise").
            Rule("linear", max_gaps=3),
            Rule("pairwise"),
        ),
        "reduce_scatter": (
            # "pairwise" takes one step, with few messages per rank.
            Rule("pairwise", max_fan=0.5, max_nbytes=4),
            # "circulant" takes few steps. Above the limit, a ring is faster, because it needs no copy of the input.
            Rule("circulant", max_chunk=2),
            Rule("ring"),
            # For ops that must reduce in rank order, at any size.
            Rule("pairwise"),
        ),
        "allgather": (
            # "direct" takes one step, with few messages per rank. On every medium, it was the fastest for up to four
            # ranks.
            Rule("direct", max_world=4, max_stages=1),
            Rule("direct", max_fan=0.75, max_stages=1),
            # "circulant" takes few steps. Above the limit, "direct" is faster: its additional messages cost little
            # compared with the bytes, and it copies less.
            Rule("circulant", max_chunk=0.35),
            Rule("direct", max_stages=1),
            # A ring is as fast as "direct" for long vectors, and no link must carry the data of all other ranks at
            # once.
            Rule("ring"),
        ),
        "broadcast": (
            # With two ranks, the root has one receiver, so forwarding by other ranks cannot help.
            Rule("linear", max_world=2),
            # "linear" takes one step. Above the limits, the root's sends take longer than a second step.
            Rule("linear", max_fan=0.5, max_volume=4),
            # "knomial" needs two or three wake-ups, "chain" p-1. Above `max_stages`, the root's repeated sends take
            # longer than the saved wake-ups.
            Rule("knomial", max_stages=0.2),
            Rule("chain"),
        ),
        # "linear" is the only choice: forwarding by other ranks cannot reduce the bytes at the root.
        "gather": (Rule("linear"),),
        "scatter": (Rule("linear"),),
        # "pairwise" is the only choice: block lengths differ between ranks, so no limit can depend on them.
        "alltoall": (Rule("pairwise"),),
        "barrier": (Rule("dissemination"),),
        "monitored_barrier": (Rule("linear"),),
        "scan": _SCANS,
        "exscan": _SCANS,
    }
)

_IN_RANK_ORDER = frozenset({"oneround", "bruck", "pairwise", "linear", "fold"})
"""Algorithms in which one rank reduces all inputs of an element, in rank order."""
_ON_EVERY_RANK = frozenset({"exchange", "oneround", "bruck"})
"""Algorithms that reduce on every rank: results are equal only if kernels ignore the position of an element."""


class Algorithm(NamedTuple):
    """An algorithm for one kind of collective: the function that creates its programs, and the formula of its load.

    Attributes:
        schedule: creates the program of one rank.
        load: formula of its load.
    """

    schedule: Callable[..., Program]
    load: Formula


class Lanes(NamedTuple):
    """The shared-memory lanes to which a program posts: the common lane, read by several ranks, or one lane per reader.

    Attributes:
        first: True if posts at the start use the common lane.
        last: True if posts of the result use the common lane.
    """

    first: bool
    last: bool


ALGORITHMS: Mapping[tuple[str, str], Algorithm] = MappingProxyType(
    {
        ("allreduce", "exchange"): Algorithm(direct.exchange, load.all_to_all_fold),
        ("allreduce", "oneround"): Algorithm(direct.allreduce, load.all_to_all_fold),
        ("allreduce", "bruck"): Algorithm(circulant.bruck, load.bruck),
        ("allreduce", "circulant"): Algorithm(circulant.allreduce, load.circulant_allreduce),
        ("allreduce", "ring"): Algorithm(ring.allreduce, load.ring_allreduce),
        ("allreduce", "pairwise"): Algorithm(pairwise.allreduce, load.pairwise_allreduce),
        ("reduce", "linear"): Algorithm(direct.reduce, load.fan_in),
        ("reduce", "binomial"): Algorithm(tree.reduce, load.binomial),
        ("reduce", "chain"): Algorithm(chain.reduce, load.chain(lambda _: 1)),
        ("reduce", "pairwise"): Algorithm(pairwise.reduce, load.pairwise_reduce),
        ("reduce_scatter", "pairwise"): Algorithm(pairwise.reduce_scatter, load.shares(load.one_step, reduced=True)),
        ("reduce_scatter", "circulant"): Algorithm(
            circulant.reduce_scatter, load.shares(load.log2, reduced=True, all_copied=True)
        ),
        ("reduce_scatter", "ring"): Algorithm(ring.reduce_scatter, load.shares(load.ring_steps, reduced=True)),
        ("allgather", "direct"): Algorithm(direct.allgather, load.shares(load.one_step, own_copied=True)),
        ("allgather", "circulant"): Algorithm(
            circulant.allgather, load.shares(load.log2, all_copied=True, own_copied=True)
        ),
        ("allgather", "ring"): Algorithm(ring.allgather, load.shares(load.ring_steps, own_copied=True)),
        ("broadcast", "linear"): Algorithm(direct.broadcast, load.linear_broadcast),
        ("broadcast", "knomial"): Algorithm(tree.broadcast, load.knomial),
        ("broadcast", "chain"): Algorithm(chain.broadcast, load.chain(lambda _: 0)),
        ("gather", "linear"): Algorithm(direct.gather, load.gather),
        ("scatter", "linear"): Algorithm(direct.scatter, load.scatter),
        ("alltoall", "pairwise"): Algorithm(pairwise.alltoall, load.shares(load.one_step, own_copied=True)),
        ("barrier", "dissemination"): Algorithm(circulant.barrier, load.dissemination),
        ("monitored_barrier", "linear"): Algorithm(direct.barrier, load.report),
        ("scan", "fold"): Algorithm(scan.scan_fold, load.scan_fold),
        ("scan", "chain"): Algorithm(scan.scan_chain, load.chain(lambda _: 1)),
        ("exscan", "fold"): Algorithm(scan.exscan_fold, load.exscan_fold),
        ("exscan", "chain"): Algorithm(scan.exscan_chain, load.chain(lambda world_size: 2 if world_size > 2 else 0)),
    }
)

#: Algorithms for small messages in shared-memory slots, which ranks read in place. `choose` never returns these
#: algorithms.
IN_SLOTS: Mapping[tuple[str, str], Algorithm] = MappingProxyType(
    {
        ("allreduce", "oneshot"): Algorithm(direct.allreduce, load.oneshot),
        ("allreduce", "central"): Algorithm(direct.central, load.central),
        ("barrier", "oneshot"): Algorithm(direct.barrier_oneround, load.oneshot),
        ("barrier", "central"): Algorithm(direct.barrier, load.central),
        ("allgather", "oneshot"): Algorithm(direct.allgather, load.shares(load.one_step, own_copied=True)),
        ("reduce_scatter", "oneshot"): Algorithm(pairwise.reduce_scatter, load.shares(load.one_step, reduced=True)),
        ("broadcast", "oneshot"): Algorithm(direct.broadcast, load.linear_broadcast),
        ("reduce", "oneshot"): Algorithm(direct.reduce, load.fan_in),
        ("scan", "oneshot"): Algorithm(scan.scan_fold, load.scan_fold),
        ("exscan", "oneshot"): Algorithm(scan.exscan_fold, load.exscan_fold),
    }
)

_POSTED_TO_ALL = frozenset({"allreduce", "barrier", "allgather", "broadcast", "scan", "exscan"})
"""Kinds whose contributions several ranks read, unless one rank reads all of them first (`central`)."""


def lanes(kind: str, algorithm: str, world_size: int) -> Lanes:
    """Return the shared-memory lanes to which an algorithm posts; the same on all ranks."""
    if world_size == 2 or kind not in _POSTED_TO_ALL:
        return Lanes(first=False, last=False)
    return Lanes(first=algorithm != "central", last=True)


_DEFAULT = Tuning()


def choose(
    kind: str,
    nbytes: int,
    world_size: int,
    *,
    ordered: bool = False,
    portable: bool = True,
    tuning: Tuning = _DEFAULT,
    hosts: Sequence[int] = (),
) -> str:
    """Return the name of the fastest algorithm for a collective, according to the rules.

    Args:
        kind: the collective, a key of `RULES`.
        nbytes: bytes of the whole vector: the tensor; all outputs together (allgather, gather); all inputs of one rank
            together (reduce_scatter, scatter, alltoall); 0 for a barrier.
        world_size: number of ranks.
        ordered: True if the op must fold all inputs in rank order at one place. Only for kinds that reduce.
        portable: True if the op gives the same bits on every rank. If not, each element is reduced on one rank only.
        tuning: the numbers of the machine and the group's medium; the same on all ranks.
        hosts: host number of each rank (see `aiocoll.algorithms.two_level.hosts`). By default all ranks share one host.

    Raises:
        ValueError: `kind` is unknown, or no program carries it out.
    """
    ordered = spec_of(kind).reduces and ordered
    if kind not in RULES:
        raise ValueError(f"kind={kind!r} has no algorithms; use one of {', '.join(RULES)}")
    machine = tuning.machine
    # Use the costs of TCP: a network connects the hosts, even if the ranks of each host use another medium.
    if name := two_level.choose(kind, nbytes, hosts, ordered=ordered, portable=portable, machine=tuning.tcp):
        return name
    for rule in RULES[kind]:
        if ordered and rule.algorithm not in _IN_RANK_ORDER:
            continue
        if not portable and rule.algorithm in _ON_EVERY_RANK:
            continue
        if rule.admits(nbytes, world_size, machine):
            return rule.algorithm
    raise AssertionError(f"no rule for {kind} applies; the last rule must have no limits")


def build(
    kind: str,
    algorithm: str,
    rank: int,
    world_size: int,
    *sizes: int | Sequence[int],
    root: int = 0,
    hosts: Sequence[int] = (),
) -> Program:
    """Return one rank's program of a collective.

    Args:
        kind: the collective.
        algorithm: its name, as returned by `choose`, or one of `IN_SLOTS`.
        rank: the rank.
        world_size: number of ranks.
        *sizes: elements: a count (allreduce, reduce, broadcast, scan, exscan), one count per rank (allgather, gather,
            scatter, reduce_scatter), counts per input and per output (alltoall), or nothing (the barriers).
        root: the root of reduce, broadcast, gather and scatter; otherwise ignored.
        hosts: host number of each rank, used by two-level algorithms only.

    Raises:
        ValueError: `kind` is unknown or has no such algorithm.
    """
    spec = spec_of(kind)
    if (kind, algorithm) in two_level.ALGORITHMS:
        return two_level.build(kind, algorithm, rank, hosts, *sizes, root=root)
    schedule = find(kind, algorithm).schedule
    program = schedule(rank, world_size, root, *sizes) if spec.rooted else schedule(rank, world_size, *sizes)
    return program._replace(algorithm=algorithm)


def find(kind: str, algorithm: str) -> Algorithm:
    """Return the functions of a flat algorithm (one that ignores hosts).

    Raises:
        ValueError: `kind` is unknown or has no such algorithm.
    """
    found = ALGORITHMS.get((kind, algorithm)) or IN_SLOTS.get((kind, algorithm))
    if found is None:
        known = ", ".join(name for of_kind, name in ALGORITHMS if of_kind == spec_of(kind).kind)
        raise ValueError(f"algorithm={algorithm!r} is not known for kind={kind!r}; use one of {known}")
    return found
