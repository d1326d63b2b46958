"""Which algorithm a collective runs: one table, read from the top, and the functions behind the names.

The table asks only for what all ranks know alike: the collective, the bytes of the whole vector, the number of ranks
and what the reduce op needs. So all ranks choose the same.

The limits follow from n_half, the bytes that take as long to send as one message takes to get started: about 64 KiB
where a wake-up costs 25 to 50 microseconds and a link carries 1 to 3 GB/s. Twenty times more than under MPI, hence
limits ten to thirty times those in its literature.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from types import MappingProxyType

from aiocoll.algorithms import chain, circulant, direct, pairwise, ring, scan, tree
from aiocoll.algorithms.schedule import Program

__all__ = ["ALGORITHMS", "RULES", "Rule", "build", "choose"]

_KIB = 1024
_MIB = 1024 * _KIB


@dataclass(frozen=True, slots=True)
class Rule:
    """One line of the table: `algorithm` is used as long as none of the limits (all inclusive) is exceeded.

    Attributes:
        algorithm: name, a key of `ALGORITHMS` together with the kind.
        min_world, max_world: number of ranks.
        max_nbytes: bytes of the whole vector.
        max_chunk: bytes of a p-th of the vector.
        max_volume: bytes of the whole vector times (p-1), as sent by a rank that sends all of it to everybody.
    """

    algorithm: str
    min_world: int = 1
    max_world: float = inf
    max_nbytes: float = inf
    max_chunk: float = inf
    max_volume: float = inf

    def admits(self, nbytes: int, world_size: int) -> bool:
        """Whether no limit is exceeded."""
        return (
            self.min_world <= world_size <= self.max_world
            and nbytes <= self.max_nbytes
            and nbytes <= self.max_chunk * world_size
            and nbytes * (world_size - 1) <= self.max_volume
        )


_SCANS = (
    # One step as long as the first rank's p-1 messages take less than the p-1 wake-ups of a line.
    Rule("fold", max_volume=256 * _KIB),
    # The least traffic, streaming.
    Rule("chain"),
    # Ordered ops: a line would round at each rank.
    Rule("fold"),
)

RULES: Mapping[str, tuple[Rule, ...]] = MappingProxyType(
    {
        "allreduce": (
            # Two ranks exchange: halving the bytes at the price of a second step pays above 4 n_half.
            Rule("exchange", max_world=2, min_world=2, max_nbytes=256 * _KIB),
            Rule("oneround", max_world=2, max_nbytes=256 * _KIB),
            # Each rank reduces one half, streaming in both directions.
            Rule("ring", max_world=2),
            # One step instead of four for twice the bytes, and at most three messages per rank.
            Rule("oneround", max_world=4, max_nbytes=32 * _KIB),
            # Half the steps of circulant, until the bytes of the gathering reach n_half.
            Rule("bruck", max_volume=64 * _KIB),
            # Least bytes in few steps; above, the ring's extra steps are hidden by streaming.
            Rule("circulant", max_chunk=1 * _MIB - 1),
            Rule("ring"),
            # Ordered ops of any size: least bytes, every chunk folded in one place.
            Rule("pairwise"),
        ),
        "reduce": (
            # Up to three tensors arrive at the root in the time of one wake-up.
            Rule("linear", max_world=4, max_nbytes=64 * _KIB),
            # log2(p) whole tensors against p-1 wake-ups: even at about p/4 n_half.
            Rule("binomial", max_chunk=16 * _KIB),
            # The least traffic, streaming.
            Rule("chain"),
            # Ordered ops: the root folds alone while everything fits in its links' buffers, all ranks fold above.
            Rule("linear", max_nbytes=64 * _KIB),
            Rule("pairwise"),
        ),
        "reduce_scatter": (
            # One step, and at most three messages per rank.
            Rule("pairwise", max_world=4, max_nbytes=256 * _KIB),
            # Few steps; it copies its input once, which streaming saves above.
            Rule("circulant", max_chunk=512 * _KIB),
            Rule("ring"),
            # Ordered ops of any size.
            Rule("pairwise"),
        ),
        "allgather": (
            # One step, and at most three messages per rank.
            Rule("direct", max_world=4, max_nbytes=256 * _KIB),
            # Few steps; it copies its output once, which streaming saves above.
            Rule("circulant", max_chunk=128 * _KIB),
            Rule("ring"),
        ),
        "broadcast": (
            # Nothing to relay.
            Rule("linear", max_world=2),
            # Seven sends from the root take less than two wake-ups.
            Rule("linear", max_world=8, max_nbytes=256 * _KIB),
            # Two or three levels instead of p-1 wake-ups, until the root's repeated bytes cost more.
            Rule("knomial", max_nbytes=1 * _MIB),
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

_REDUCING = frozenset({"allreduce", "reduce", "reduce_scatter", "scan", "exscan"})
_IN_RANK_ORDER = frozenset({"oneround", "bruck", "pairwise", "linear", "fold"})
"""Reductions that fold all inputs of an element in rank order at one place."""
_ON_EVERY_RANK = frozenset({"exchange", "oneround", "bruck"})
"""Reductions that every rank repeats: the same bits only if the kernel gives them wherever an element lies."""

ALGORITHMS: Mapping[tuple[str, str], Callable[..., Program]] = MappingProxyType(
    {
        ("allreduce", "exchange"): direct.exchange,
        ("allreduce", "oneround"): direct.allreduce,
        ("allreduce", "bruck"): circulant.bruck,
        ("allreduce", "circulant"): circulant.allreduce,
        ("allreduce", "ring"): ring.allreduce,
        ("allreduce", "pairwise"): pairwise.allreduce,
        ("reduce", "linear"): direct.reduce,
        ("reduce", "binomial"): tree.reduce,
        ("reduce", "chain"): chain.reduce,
        ("reduce", "pairwise"): pairwise.reduce,
        ("reduce_scatter", "pairwise"): pairwise.reduce_scatter,
        ("reduce_scatter", "circulant"): circulant.reduce_scatter,
        ("reduce_scatter", "ring"): ring.reduce_scatter,
        ("allgather", "direct"): direct.allgather,
        ("allgather", "circulant"): circulant.allgather,
        ("allgather", "ring"): ring.allgather,
        ("broadcast", "linear"): direct.broadcast,
        ("broadcast", "knomial"): tree.broadcast,
        ("broadcast", "chain"): chain.broadcast,
        ("gather", "linear"): direct.gather,
        ("scatter", "linear"): direct.scatter,
        ("alltoall", "pairwise"): pairwise.alltoall,
        ("barrier", "dissemination"): circulant.barrier,
        ("monitored_barrier", "linear"): direct.barrier,
        ("scan", "fold"): scan.scan_fold,
        ("scan", "chain"): scan.scan_chain,
        ("exscan", "fold"): scan.exscan_fold,
        ("exscan", "chain"): scan.exscan_chain,
    }
)

_ROOTED = frozenset({"reduce", "broadcast", "gather", "scatter"})


def choose(kind: str, nbytes: int, world_size: int, *, ordered: bool = False, portable: bool = True) -> str:
    """Return the name of the algorithm for a collective.

    Args:
        kind: the collective, a key of `RULES`.
        nbytes: bytes of the whole vector: the tensor; all outputs together (allgather, gather); all inputs of one
            rank together (reduce_scatter, scatter, alltoall); 0 for a barrier.
        world_size: number of ranks.
        ordered: the op must fold all inputs in rank order at one place. Only for kinds that reduce.
        portable: the op gives the same bits on every rank; if not, each element is reduced on one rank only.

    Raises:
        ValueError: if `kind` is unknown.
    """
    rules = _rules(kind)
    ordered = ordered and kind in _REDUCING
    for rule in rules:
        if ordered and rule.algorithm not in _IN_RANK_ORDER:
            continue
        if not portable and rule.algorithm in _ON_EVERY_RANK:
            continue
        if rule.admits(nbytes, world_size):
            return rule.algorithm
    raise AssertionError(f"the rules for {kind} have no last resort")


def build(kind: str, algorithm: str, rank: int, world_size: int, *sizes: int | Sequence[int], root: int = 0) -> Program:
    """Return the program of one rank.

    Args:
        kind: the collective.
        algorithm: its name, as returned by `choose`.
        rank: whose program.
        world_size: number of ranks.
        *sizes: elements: a count (allreduce, reduce, broadcast, scan, exscan), one count per rank (allgather, gather,
            scatter, reduce_scatter), counts per input and per output (alltoall), or nothing (the barriers).
        root: the root of reduce, broadcast, gather and scatter; otherwise ignored.

    Raises:
        ValueError: if `kind` is unknown or has no such algorithm.
    """
    generate = ALGORITHMS.get((kind, algorithm))
    if generate is None:
        _rules(kind)
        known = ", ".join(name for of_kind, name in ALGORITHMS if of_kind == kind)
        raise ValueError(f"algorithm={algorithm!r} is not known for kind={kind!r}; use one of {known}")
    if kind in _ROOTED:
        return generate(rank, world_size, root, *sizes)
    return generate(rank, world_size, *sizes)


def _rules(kind: str) -> tuple[Rule, ...]:
    rules = RULES.get(kind)
    if rules is None:
        raise ValueError(f"kind={kind!r} is not a collective; use one of {', '.join(RULES)}")
    return rules
