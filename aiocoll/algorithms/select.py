"""Which algorithm a collective runs: one table, read from the top, and the functions behind the names.

The table asks only for what all ranks know alike: the collective, the bytes of the whole vector, the number of ranks,
what the reduce op needs, and the numbers of the machine that rank 0 has told all ranks. So all ranks choose the same.

The limits are multiples of what the machine does in the time of a message (`algorithms.machine`), so one table is for
every machine and medium; a test holds it against the predictions of `algorithms.cost`.
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
    """One line of the table: `algorithm` is used as long as none of the limits (all inclusive) is exceeded.

    Attributes:
        algorithm: name, a key of `ALGORITHMS` together with the kind.
        min_world, max_world: number of ranks.
        max_nbytes: bytes of the whole vector, in n_half.
        max_chunk: bytes of a p-th of the vector, in n_half.
        max_volume: bytes of the whole vector times (p-1), sent by a rank that sends all of it to all ranks; in n_half.
        max_gaps: bytes of the whole vector, in what a link carries during the overhead of one message.
        max_stages: bytes of a p-th of the vector, in what a link carries until a rank of a line passes on a piece.
        max_fan: time for the p-2 messages of a rank besides the first, in that of the steps that a tree has besides
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
        """Whether no limit is exceeded."""
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
    # One step, until the p-1 tensors that the last rank gets take longer than the p-1 wake-ups of a line.
    Rule("fold", max_volume=8),
    # The least traffic, streaming.
    Rule("chain"),
    # Ordered ops: a line would round at each rank.
    Rule("fold"),
)

RULES: Mapping[str, tuple[Rule, ...]] = MappingProxyType(
    {
        "allreduce": (
            # Two ranks exchange, until what they reduce has to wait for what they send.
            Rule("exchange", max_world=2, min_world=2, max_stages=0.42),
            Rule("oneround", max_world=2, max_nbytes=4),
            # Each rank reduces one half, streaming in both directions.
            Rule("ring", max_world=2),
            # One step, until the messages of a rank take longer than the steps saved, or their bytes.
            Rule("oneround", max_volume=4, max_fan=0.6),
            # Half the steps of circulant, until the bytes of the gathering weigh more.
            Rule("bruck", max_volume=4),
            # Ops whose bits depend on the place: every chunk folded on one rank, in two steps.
            Rule("pairwise", max_volume=4, max_fan=0.25),
            # Least bytes in few steps; above, the ring's extra steps are hidden by streaming.
            Rule("circulant", max_chunk=15),
            Rule("ring"),
            # Ordered ops: that every chunk is folded in one place takes 4(p-2) messages more.
            Rule("bruck", max_gaps=2),
            # The least bytes.
            Rule("pairwise"),
        ),
        "reduce": (
            # All tensors at the root in one step, while they take no longer than the steps of a tree.
            Rule("linear", max_volume=2.5, max_fan=0.75),
            # log2(p) whole tensors, until a line that carries one is filled in the same time.
            Rule("binomial", max_stages=0.3),
            # The least traffic, streaming.
            Rule("chain"),
            # Ordered ops: the root folds alone while that is little, all ranks fold above.
            Rule("linear", max_gaps=3),
            Rule("pairwise"),
        ),
        "reduce_scatter": (
            # One step, and few messages per rank.
            Rule("pairwise", max_fan=0.5, max_nbytes=4),
            # Few steps; it copies its input once, which streaming saves above.
            Rule("circulant", max_chunk=2),
            Rule("ring"),
            # Ordered ops of any size.
            Rule("pairwise"),
        ),
        "allgather": (
            # One step, and few messages per rank; for up to four ranks measured to be the fastest on every medium.
            Rule("direct", max_world=4, max_stages=1),
            Rule("direct", max_fan=0.75, max_stages=1),
            # Few steps; above, the bytes take longer than the messages of all others, and it copies its output.
            Rule("circulant", max_chunk=0.35),
            Rule("direct", max_stages=1),
            # As fast, and no link has to carry what all others send at once.
            Rule("ring"),
        ),
        "broadcast": (
            # Nothing to relay.
            Rule("linear", max_world=2),
            # One step, while the sends of the root take less than a second one.
            Rule("linear", max_fan=0.5, max_volume=4),
            # Two or three levels instead of p-1 wake-ups, until the root's repeated bytes cost more than a line's.
            Rule("knomial", max_stages=0.2),
            Rule("chain"),
        ),
        # A relay cannot save the root anything.
        "gather": (Rule("linear"),),
        "scatter": (Rule("linear"),),
        # Lengths differ from rank to rank, so no rule could ask for them.
        "alltoall": (Rule("pairwise"),),
        "barrier": (Rule("dissemination"),),
        "monitored_barrier": (Rule("linear"),),
        "scan": _SCANS,
        "exscan": _SCANS,
    }
)

_IN_RANK_ORDER = frozenset({"oneround", "bruck", "pairwise", "linear", "fold"})
"""Reductions that fold all inputs of an element in rank order at one place."""
_ON_EVERY_RANK = frozenset({"exchange", "oneround", "bruck"})
"""Reductions that every rank repeats: the same bits only if the kernel gives them wherever an element lies."""


class Algorithm(NamedTuple):
    """What there is to know of an algorithm for one kind.

    Attributes:
        schedule: writes the program of one rank.
        load: what it asks of a machine.
    """

    schedule: Callable[..., Program]
    load: Formula


class Lanes(NamedTuple):
    """Whether the posts of a program for slots go through the common lane, which several ranks may read.

    Attributes:
        first: those that wait for nothing.
        last: those of the result.
    """

    first: bool
    last: bool


ALGORITHMS: Mapping[tuple[str, str], Algorithm] = MappingProxyType(
    {
        ("allreduce", "exchange"): Algorithm(direct.exchange, load.everybody_folds),
        ("allreduce", "oneround"): Algorithm(direct.allreduce, load.everybody_folds),
        ("allreduce", "bruck"): Algorithm(circulant.bruck, load.bruck),
        ("allreduce", "circulant"): Algorithm(circulant.allreduce, load.circulant_allreduce),
        ("allreduce", "ring"): Algorithm(ring.allreduce, load.ring_allreduce),
        ("allreduce", "pairwise"): Algorithm(pairwise.allreduce, load.pairwise_allreduce),
        ("reduce", "linear"): Algorithm(direct.reduce, load.fan_in),
        ("reduce", "binomial"): Algorithm(tree.reduce, load.binomial),
        ("reduce", "chain"): Algorithm(chain.reduce, load.line(lambda _: 1)),
        ("reduce", "pairwise"): Algorithm(pairwise.reduce, load.pairwise_reduce),
        ("reduce_scatter", "pairwise"): Algorithm(pairwise.reduce_scatter, load.shares(load.once, reduced=True)),
        ("reduce_scatter", "circulant"): Algorithm(
            circulant.reduce_scatter, load.shares(load.log2, reduced=True, all_copied=True)
        ),
        ("reduce_scatter", "ring"): Algorithm(ring.reduce_scatter, load.shares(load.around, reduced=True)),
        ("allgather", "direct"): Algorithm(direct.allgather, load.shares(load.once, own_copied=True)),
        ("allgather", "circulant"): Algorithm(
            circulant.allgather, load.shares(load.log2, all_copied=True, own_copied=True)
        ),
        ("allgather", "ring"): Algorithm(ring.allgather, load.shares(load.around, own_copied=True)),
        ("broadcast", "linear"): Algorithm(direct.broadcast, load.linear_broadcast),
        ("broadcast", "knomial"): Algorithm(tree.broadcast, load.knomial),
        ("broadcast", "chain"): Algorithm(chain.broadcast, load.line(lambda _: 0)),
        ("gather", "linear"): Algorithm(direct.gather, load.gather),
        ("scatter", "linear"): Algorithm(direct.scatter, load.scatter),
        ("alltoall", "pairwise"): Algorithm(pairwise.alltoall, load.shares(load.once, own_copied=True)),
        ("barrier", "dissemination"): Algorithm(circulant.barrier, load.dissemination),
        ("monitored_barrier", "linear"): Algorithm(direct.barrier, load.report),
        ("scan", "fold"): Algorithm(scan.scan_fold, load.scan_fold),
        ("scan", "chain"): Algorithm(scan.scan_chain, load.line(lambda _: 1)),
        ("exscan", "fold"): Algorithm(scan.exscan_fold, load.exscan_fold),
        ("exscan", "chain"): Algorithm(scan.exscan_chain, load.line(lambda world_size: 2 if world_size > 2 else 0)),
    }
)

#: Algorithms of one round for slots of shared memory, from which ranks read in place; `choose` names none of them.
IN_SLOTS: Mapping[tuple[str, str], Algorithm] = MappingProxyType(
    {
        ("allreduce", "oneshot"): Algorithm(direct.allreduce, load.oneshot),
        ("allreduce", "central"): Algorithm(direct.central, load.central),
        ("barrier", "oneshot"): Algorithm(direct.barrier_oneround, load.oneshot),
        ("barrier", "central"): Algorithm(direct.barrier, load.central),
        ("allgather", "oneshot"): Algorithm(direct.allgather, load.shares(load.once, own_copied=True)),
        ("reduce_scatter", "oneshot"): Algorithm(pairwise.reduce_scatter, load.shares(load.once, reduced=True)),
        ("broadcast", "oneshot"): Algorithm(direct.broadcast, load.linear_broadcast),
        ("reduce", "oneshot"): Algorithm(direct.reduce, load.fan_in),
        ("scan", "oneshot"): Algorithm(scan.scan_fold, load.scan_fold),
        ("exscan", "oneshot"): Algorithm(scan.exscan_fold, load.exscan_fold),
    }
)

_POSTED_TO_ALL = frozenset({"allreduce", "barrier", "allgather", "broadcast", "scan", "exscan"})
"""Kinds whose contributions several ranks read, unless one rank reads all of them first (`central`)."""


def lanes(kind: str, algorithm: str, world_size: int) -> Lanes:
    """Return which posts of an algorithm several ranks may read, the same on all ranks; others have one reader each."""
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
    """Return the name of the algorithm for a collective.

    Args:
        kind: the collective, a key of `RULES`.
        nbytes: bytes of the whole vector: the tensor; all outputs together (allgather, gather); all inputs of one
            rank together (reduce_scatter, scatter, alltoall); 0 for a barrier.
        world_size: number of ranks.
        ordered: the op must fold all inputs in rank order at one place. Only for kinds that reduce.
        portable: the op gives the same bits on every rank; if not, each element is reduced on one rank only.
        tuning: what the machine and the group's medium can do; the same on all ranks.
        hosts: host number of each rank (see `aiocoll.algorithms.two_level.hosts`); by default all are on one.

    Raises:
        ValueError: if `kind` is unknown, or no program carries it out.
    """
    ordered = spec_of(kind).reduces and ordered
    if kind not in RULES:
        raise ValueError(f"kind={kind!r} has no algorithms; use one of {', '.join(RULES)}")
    machine = tuning.machine
    # What there is between hosts is a network, whatever the hosts have inside.
    if name := two_level.choose(kind, nbytes, hosts, ordered=ordered, portable=portable, machine=tuning.tcp):
        return name
    for rule in RULES[kind]:
        if ordered and rule.algorithm not in _IN_RANK_ORDER:
            continue
        if not portable and rule.algorithm in _ON_EVERY_RANK:
            continue
        if rule.admits(nbytes, world_size, machine):
            return rule.algorithm
    raise AssertionError(f"the rules for {kind} have no last resort")


def build(
    kind: str,
    algorithm: str,
    rank: int,
    world_size: int,
    *sizes: int | Sequence[int],
    root: int = 0,
    hosts: Sequence[int] = (),
) -> Program:
    """Return the program of one rank.

    Args:
        kind: the collective.
        algorithm: its name, as returned by `choose`, or one of `IN_SLOTS`.
        rank: whose program.
        world_size: number of ranks.
        *sizes: elements: a count (allreduce, reduce, broadcast, scan, exscan), one count per rank (allgather, gather,
            scatter, reduce_scatter), counts per input and per output (alltoall), or nothing (the barriers).
        root: the root of reduce, broadcast, gather and scatter; otherwise ignored.
        hosts: host number of each rank; only two-level algorithms ask.

    Raises:
        ValueError: if `kind` is unknown or has no such algorithm.
    """
    spec = spec_of(kind)
    if (kind, algorithm) in two_level.ALGORITHMS:
        return two_level.build(kind, algorithm, rank, hosts, *sizes, root=root)
    schedule = find(kind, algorithm).schedule
    program = schedule(rank, world_size, root, *sizes) if spec.rooted else schedule(rank, world_size, *sizes)
    return program._replace(algorithm=algorithm)


def find(kind: str, algorithm: str) -> Algorithm:
    """Return what there is to know of an algorithm without levels.

    Raises:
        ValueError: if `kind` is unknown or has no such algorithm.
    """
    found = ALGORITHMS.get((kind, algorithm)) or IN_SLOTS.get((kind, algorithm))
    if found is None:
        known = ", ".join(name for of_kind, name in ALGORITHMS if of_kind == spec_of(kind).kind)
        raise ValueError(f"algorithm={algorithm!r} is not known for kind={kind!r}; use one of {known}")
    return found
