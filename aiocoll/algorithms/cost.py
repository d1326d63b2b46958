"""What each algorithm costs: messages on the longest dependent path, and the most bytes that one rank sends.

The formulas are those in the heads of the modules; a test compares them with the programs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TypeAlias

from aiocoll.algorithms.tree import RADIX, children

__all__ = ["cost"]

_Formula: TypeAlias = Callable[[int, int], tuple[int, int]]


def cost(algorithm: str, kind: str, nbytes: int, world_size: int) -> tuple[int, int]:
    """Return (steps, most bytes sent by one rank) of a collective.

    Args:
        algorithm: its name.
        kind: the collective.
        nbytes: bytes of the whole vector, as for `choose`; a multiple of `world_size`, or the result is rounded.
        world_size: number of ranks.

    Raises:
        ValueError: if `kind` has no such algorithm.
    """
    formula = _FORMULAS.get((kind, algorithm))
    if formula is None:
        raise ValueError(f"algorithm={algorithm!r} is not known for kind={kind!r}; see aiocoll.algorithms.cost")
    if world_size == 1 or (nbytes == 0 and kind not in _EMPTY):
        return 0, 0
    return formula(nbytes, world_size)


def _log2(world_size: int) -> int:
    return (world_size - 1).bit_length()


def _shares(nbytes: int, world_size: int) -> int:
    return nbytes * (world_size - 1) // world_size


def _ring_allreduce(nbytes: int, world_size: int) -> tuple[int, int]:
    return 2 * (world_size - 1), 2 * _shares(nbytes, world_size)


def _circulant_allreduce(nbytes: int, world_size: int) -> tuple[int, int]:
    return 2 * _log2(world_size), 2 * _shares(nbytes, world_size)


def _shares_direct(nbytes: int, world_size: int) -> tuple[int, int]:
    return 1, _shares(nbytes, world_size)


def _shares_ring(nbytes: int, world_size: int) -> tuple[int, int]:
    return world_size - 1, _shares(nbytes, world_size)


def _shares_circulant(nbytes: int, world_size: int) -> tuple[int, int]:
    return _log2(world_size), _shares(nbytes, world_size)


def _everything_to_everybody(nbytes: int, world_size: int) -> tuple[int, int]:
    return 1, nbytes * (world_size - 1)


def _line(nbytes: int, world_size: int) -> tuple[int, int]:
    return world_size - 1, nbytes


def _knomial(nbytes: int, world_size: int) -> tuple[int, int]:
    steps, deepest = 0, 1
    while deepest < world_size:  # the first node of the next depth has one more digit 1: 1, 11, 111 in base RADIX
        steps += 1
        deepest = deepest * RADIX + 1
    return steps, nbytes * sum(1 for _ in children(0, world_size, RADIX))


_EMPTY = frozenset({"barrier", "monitored_barrier"})

_FORMULAS: Mapping[tuple[str, str], _Formula] = MappingProxyType(
    {
        ("allreduce", "exchange"): _everything_to_everybody,
        ("allreduce", "oneround"): _everything_to_everybody,
        ("allreduce", "bruck"): lambda nbytes, world_size: (_log2(world_size), nbytes * (world_size - 1)),
        ("allreduce", "circulant"): _circulant_allreduce,
        ("allreduce", "ring"): _ring_allreduce,
        ("allreduce", "pairwise"): lambda nbytes, world_size: (2, 2 * _shares(nbytes, world_size)),
        ("reduce", "linear"): lambda nbytes, world_size: (1, nbytes),
        ("reduce", "binomial"): lambda nbytes, world_size: (world_size.bit_length() - 1, nbytes),
        ("reduce", "chain"): _line,
        ("reduce", "pairwise"): lambda nbytes, world_size: (2, nbytes),
        ("reduce_scatter", "pairwise"): _shares_direct,
        ("reduce_scatter", "circulant"): _shares_circulant,
        ("reduce_scatter", "ring"): _shares_ring,
        ("allgather", "direct"): _shares_direct,
        ("allgather", "circulant"): _shares_circulant,
        ("allgather", "ring"): _shares_ring,
        ("broadcast", "linear"): _everything_to_everybody,
        ("broadcast", "knomial"): _knomial,
        ("broadcast", "chain"): _line,
        ("gather", "linear"): lambda nbytes, world_size: (1, nbytes // world_size),
        ("scatter", "linear"): _shares_direct,
        ("alltoall", "pairwise"): _shares_direct,
        ("barrier", "dissemination"): lambda nbytes, world_size: (_log2(world_size), 0),
        ("monitored_barrier", "linear"): lambda nbytes, world_size: (2, 0),
        ("scan", "fold"): _everything_to_everybody,
        ("scan", "chain"): _line,
        ("exscan", "fold"): _everything_to_everybody,
        ("exscan", "chain"): _line,
    }
)
