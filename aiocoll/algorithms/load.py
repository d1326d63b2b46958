"""The load of algorithms as formulas of bytes and ranks, and the time it takes on a machine.

`algorithms.select` names the formula of each schedule; a test compares their counts with the programs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

from aiocoll.algorithms.flat.tree import RADIX, children
from aiocoll.algorithms.machine import PIECE, Machine

__all__ = [
    "Formula",
    "Load",
    "around",
    "binomial",
    "bruck",
    "central",
    "circulant_allreduce",
    "dissemination",
    "everybody_folds",
    "exscan_fold",
    "fan_in",
    "gather",
    "in_a_row",
    "knomial",
    "line",
    "linear_broadcast",
    "log2",
    "once",
    "oneshot",
    "pairwise_allreduce",
    "pairwise_reduce",
    "report",
    "ring_allreduce",
    "scan_fold",
    "scatter",
    "seconds_of",
    "shares",
]


class Load(NamedTuple):
    """The load of a collective.

    Attributes:
        steps: messages on the longest path of messages that depend on each other.
        sends, receives: messages of the rank that has most of both together.
        sent, received: most bytes that one rank sends, and receives.
        worked: most bytes that one rank reduces into something, or copies.
    """

    steps: int
    sends: int
    receives: int
    sent: int
    received: int
    worked: int


Formula: TypeAlias = Callable[[int, int], Load]


def seconds_of(load: Load, machine: Machine) -> float:
    """Return about how many seconds `load` takes, if no step begins before the one it depends on has ended."""
    alpha, overhead, beta, gamma = machine
    crowd = max(load.sends - load.steps, 0) + max(load.receives - load.steps, 0)
    return load.worked * gamma + load.steps * alpha + max(crowd * overhead, max(load.sent, load.received) * beta)


def in_a_row(load: Load, machine: Machine) -> float:
    """Return about how many seconds `load` takes, if each step passes on what the one before brings."""
    alpha, _, beta, gamma = machine
    # A step ends when its chunk is through; the next begins with its first piece.
    chunk = max(load.sent, load.received) / load.steps if load.steps else 0.0
    return load.worked * gamma + load.steps * max(alpha + min(chunk, PIECE) * beta, chunk * beta)


def once(world_size: int) -> int:
    """Return the steps of a one-step algorithm."""
    return 1


def around(world_size: int) -> int:
    """Return the steps of one round of a ring."""
    return world_size - 1


def log2(world_size: int) -> int:
    """Return the steps of doubling, rounded up."""
    return (world_size - 1).bit_length()


def _share(nbytes: int, world_size: int) -> int:
    return nbytes * (world_size - 1) // world_size


def everybody_folds(nbytes: int, world_size: int) -> Load:
    """Every rank sends everything to every rank."""
    others = world_size - 1
    return Load(1, others, others, nbytes * others, nbytes * others, nbytes * others)


def scan_fold(nbytes: int, world_size: int) -> Load:
    """Rank r receives r tensors and sends p-1-r: the last one folds all."""
    return everybody_folds(nbytes, world_size)._replace(sends=0)


def exscan_fold(nbytes: int, world_size: int) -> Load:
    """As `scan_fold`; rank 1 only copies."""
    return scan_fold(nbytes, world_size)._replace(worked=nbytes * max(world_size - 2, 1))


def bruck(nbytes: int, world_size: int) -> Load:
    """In rounds, twice as many tensors in each; then all ranks fold them."""
    steps, moved = log2(world_size), nbytes * (world_size - 1)
    return Load(steps, steps, steps, moved, moved, moved + nbytes)


def circulant_allreduce(nbytes: int, world_size: int) -> Load:
    """A reduce-scatter and an allgather, in the minimal number of steps."""
    share, steps = _share(nbytes, world_size), 2 * log2(world_size)
    messages = steps + world_size.bit_length() - 2  # runs of blocks that wrap around the end are two messages
    return Load(steps, messages, messages, 2 * share, 2 * share, share)


def ring_allreduce(nbytes: int, world_size: int) -> Load:
    """Each p-th goes around twice: reduced, then copied."""
    share, steps = _share(nbytes, world_size), 2 * (world_size - 1)
    return Load(steps, steps, steps, 2 * share, 2 * share, share)


def pairwise_allreduce(nbytes: int, world_size: int) -> Load:
    """The same bytes as in a ring, straight to their receivers."""
    return ring_allreduce(nbytes, world_size)._replace(steps=2)


def oneshot(nbytes: int, world_size: int) -> Load:
    """Each rank copies its tensor to all ranks, and reduces all there are."""
    others = world_size - 1
    return Load(1, others, others, 0, 0, nbytes * (2 * others + 1))


def central(nbytes: int, world_size: int) -> Load:
    """One rank reads the tensors of all others, and copies the result to each."""
    others = world_size - 1
    return Load(2, others, others, 0, 0, nbytes * (2 * others + 1))


def fan_in(nbytes: int, world_size: int) -> Load:
    """All tensors go to the root."""
    others = world_size - 1
    return Load(1, 0, others, nbytes, nbytes * others, nbytes * others)


def binomial(nbytes: int, world_size: int) -> Load:
    """Up a tree; the root has the most branches."""
    branches = log2(world_size)
    return Load(world_size.bit_length() - 1, 0, branches, nbytes, nbytes * branches, nbytes * branches)


def pairwise_reduce(nbytes: int, world_size: int) -> Load:
    """Every rank reduces a p-th, and the root gets them."""
    share = _share(nbytes, world_size)
    return Load(2, world_size - 1, 2 * (world_size - 1), nbytes, 2 * share, share)


def shares(
    steps: Callable[[int], int], *, reduced: bool = False, all_copied: bool = False, own_copied: bool = False
) -> Formula:
    """Everybody sends and receives p-1 p-ths of the vector, in so many steps; at least one message each."""

    def formula(nbytes: int, world_size: int) -> Load:
        share, taken = _share(nbytes, world_size), steps(world_size)
        messages = world_size - 1 if taken == 1 else taken
        copied = all_copied * nbytes + own_copied * (nbytes // world_size)
        return Load(taken, messages, messages, share, share, reduced * share + copied)

    return formula


def line(worked: Callable[[int], int]) -> Formula:
    """The tensor passes p-2 ranks on its way."""

    def formula(nbytes: int, world_size: int) -> Load:
        return Load(world_size - 1, 1, min(world_size - 2, 1), nbytes, nbytes, nbytes * worked(world_size))

    return formula


def knomial(nbytes: int, world_size: int) -> Load:
    """Down a tree of `RADIX`."""
    steps, deepest = 0, 1
    while deepest < world_size:  # the first node of the next depth has one more digit 1: 1, 11, 111 in base RADIX
        steps += 1
        deepest = deepest * RADIX + 1
    branches = sum(1 for _ in children(0, world_size, RADIX))
    return Load(steps, branches, 0, nbytes * branches, nbytes, 0)


def linear_broadcast(nbytes: int, world_size: int) -> Load:
    """The root sends its tensor to all ranks."""
    return Load(1, world_size - 1, 0, nbytes * (world_size - 1), nbytes, 0)


def gather(nbytes: int, world_size: int) -> Load:
    """Blocks go to the root, which copies its own."""
    return Load(1, 0, world_size - 1, nbytes // world_size, _share(nbytes, world_size), nbytes // world_size)


def scatter(nbytes: int, world_size: int) -> Load:
    """Blocks come from the root, which copies its own."""
    return Load(1, world_size - 1, 0, _share(nbytes, world_size), nbytes // world_size, nbytes // world_size)


def dissemination(nbytes: int, world_size: int) -> Load:
    """Messages without data, twice as far in each step."""
    steps = log2(world_size)
    return Load(steps, steps, steps, 0, 0, 0)


def report(nbytes: int, world_size: int) -> Load:
    """Messages without data to rank 0, and back."""
    return Load(2, world_size - 1, world_size - 1, 0, 0, 0)
