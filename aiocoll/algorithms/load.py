"""Load formulas of the algorithms: steps, messages and bytes per rank; and the duration of a load on a machine.

`algorithms.select` names the formula of each schedule. A test compares the formulas with the programs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

from aiocoll.algorithms.flat.tree import RADIX, children
from aiocoll.algorithms.machine import PIECE, Machine

__all__ = [
    "Formula",
    "Load",
    "all_to_all_fold",
    "binomial",
    "bruck",
    "central",
    "chain",
    "circulant_allreduce",
    "dissemination",
    "exscan_fold",
    "fan_in",
    "gather",
    "knomial",
    "linear_broadcast",
    "log2",
    "one_step",
    "oneshot",
    "pairwise_allreduce",
    "pairwise_reduce",
    "report",
    "ring_allreduce",
    "ring_steps",
    "scan_fold",
    "scatter",
    "seconds_of",
    "shares",
    "streaming_seconds_of",
]


class Load(NamedTuple):
    """The load of the busiest rank in a collective.

    Attributes:
        steps: messages on the longest path of messages that depend on each other.
        sends, receives: messages of the rank with the largest sum of both.
        sent, received: most bytes that one rank sends, and receives.
        worked: most bytes that one rank reduces or copies.
    """

    steps: int
    sends: int
    receives: int
    sent: int
    received: int
    worked: int


Formula: TypeAlias = Callable[[int, int], Load]


def seconds_of(load: Load, machine: Machine) -> float:
    """Return the approximate duration of `load` in seconds, if each step starts when the previous step has ended."""
    alpha, overhead, beta, gamma = machine
    crowd = max(load.sends - load.steps, 0) + max(load.receives - load.steps, 0)
    return load.worked * gamma + load.steps * alpha + max(crowd * overhead, max(load.sent, load.received) * beta)


def streaming_seconds_of(load: Load, machine: Machine) -> float:
    """Return the approximate duration of `load` in seconds, if ranks forward data while it arrives."""
    alpha, _, beta, gamma = machine
    # A step ends when its chunk has been forwarded. The next step begins with the first piece of that chunk.
    chunk = max(load.sent, load.received) / load.steps if load.steps else 0.0
    return load.worked * gamma + load.steps * max(alpha + min(chunk, PIECE) * beta, chunk * beta)


def one_step(world_size: int) -> int:
    """Return 1: in a one-step algorithm, no message depends on another message."""
    return 1


def ring_steps(world_size: int) -> int:
    """Return the number of steps in which data travels once around a ring."""
    return world_size - 1


def log2(world_size: int) -> int:
    """Return log2 of `world_size`, rounded up: the number of steps if the distance to the peer doubles in each step."""
    return (world_size - 1).bit_length()


def _share(nbytes: int, world_size: int) -> int:
    return nbytes * (world_size - 1) // world_size


def all_to_all_fold(nbytes: int, world_size: int) -> Load:
    """Return the load of the algorithm "oneround": each rank sends its tensor to all ranks and reduces all tensors."""
    others = world_size - 1
    return Load(1, others, others, nbytes * others, nbytes * others, nbytes * others)


def scan_fold(nbytes: int, world_size: int) -> Load:
    """Return the load of the scan algorithm "fold": rank r receives r tensors and sends its tensor to p-1-r ranks.

    The last rank folds all tensors.
    """
    return all_to_all_fold(nbytes, world_size)._replace(sends=0)


def exscan_fold(nbytes: int, world_size: int) -> Load:
    """Return the load of the exscan algorithm "fold": the same as for scan, but no rank reduces its own tensor."""
    return scan_fold(nbytes, world_size)._replace(worked=nbytes * max(world_size - 2, 1))


def bruck(nbytes: int, world_size: int) -> Load:
    """Return the load of the algorithm "bruck": rounds send 1, 2, 4, ... tensors; then each rank reduces all."""
    steps, moved = log2(world_size), nbytes * (world_size - 1)
    return Load(steps, steps, steps, moved, moved, moved + nbytes)


def circulant_allreduce(nbytes: int, world_size: int) -> Load:
    """Return the load of the algorithm "circulant": a reduce-scatter and an allgather in the fewest possible steps."""
    share, steps = _share(nbytes, world_size), 2 * log2(world_size)
    messages = steps + world_size.bit_length() - 2  # a run of blocks that wraps around the end takes two messages
    return Load(steps, messages, messages, 2 * share, 2 * share, share)


def ring_allreduce(nbytes: int, world_size: int) -> Load:
    """Return the load of the algorithm "ring": each chunk circulates twice: to be reduced, then to be copied."""
    share, steps = _share(nbytes, world_size), 2 * (world_size - 1)
    return Load(steps, steps, steps, 2 * share, 2 * share, share)


def pairwise_allreduce(nbytes: int, world_size: int) -> Load:
    """Return the load of the algorithm "pairwise": as many bytes as in a ring, but sent directly to their receivers."""
    return ring_allreduce(nbytes, world_size)._replace(steps=2)


def oneshot(nbytes: int, world_size: int) -> Load:
    """Return the load of the algorithm "oneshot": each rank copies its tensor for all ranks and reduces all."""
    others = world_size - 1
    return Load(1, others, others, 0, 0, nbytes * (2 * others + 1))


def central(nbytes: int, world_size: int) -> Load:
    """Return the load of the algorithm "central": rank 0 reads all tensors, and copies the result to each rank."""
    others = world_size - 1
    return Load(2, others, others, 0, 0, nbytes * (2 * others + 1))


def fan_in(nbytes: int, world_size: int) -> Load:
    """Return the load of the reduce algorithm "linear": all ranks send their tensors to the root."""
    others = world_size - 1
    return Load(1, 0, others, nbytes, nbytes * others, nbytes * others)


def binomial(nbytes: int, world_size: int) -> Load:
    """Return the load of a reduction along a binomial tree, in which the root receives the most messages."""
    branches = log2(world_size)
    return Load(world_size.bit_length() - 1, 0, branches, nbytes, nbytes * branches, nbytes * branches)


def pairwise_reduce(nbytes: int, world_size: int) -> Load:
    """Return the load of the reduce algorithm "pairwise": each rank reduces one chunk and sends it to the root."""
    share = _share(nbytes, world_size)
    return Load(2, world_size - 1, 2 * (world_size - 1), nbytes, 2 * share, share)


def shares(
    steps: Callable[[int], int], *, reduced: bool = False, all_copied: bool = False, own_copied: bool = False
) -> Formula:
    """Return a load formula: each rank sends and receives p-1 of p parts of the vector, in `steps` steps.

    A rank sends at least one message in each step.
    """

    def formula(nbytes: int, world_size: int) -> Load:
        share, taken = _share(nbytes, world_size), steps(world_size)
        messages = world_size - 1 if taken == 1 else taken
        copied = all_copied * nbytes + own_copied * (nbytes // world_size)
        return Load(taken, messages, messages, share, share, reduced * share + copied)

    return formula


def chain(worked: Callable[[int], int]) -> Formula:
    """Return the load formula of a chain in which p-2 inner ranks receive and forward the tensor."""

    def formula(nbytes: int, world_size: int) -> Load:
        return Load(world_size - 1, 1, min(world_size - 2, 1), nbytes, nbytes, nbytes * worked(world_size))

    return formula


def knomial(nbytes: int, world_size: int) -> Load:
    """Return the load of a broadcast tree in which each rank forwards to `RADIX` - 1 ranks per level."""
    steps, deepest = 0, 1
    while deepest < world_size:  # the first node of each level is 1, 11, 111, ... in base RADIX
        steps += 1
        deepest = deepest * RADIX + 1
    branches = sum(1 for _ in children(0, world_size, RADIX))
    return Load(steps, branches, 0, nbytes * branches, nbytes, 0)


def linear_broadcast(nbytes: int, world_size: int) -> Load:
    """Return the load of the broadcast algorithm "linear": the root sends its tensor to all ranks."""
    return Load(1, world_size - 1, 0, nbytes * (world_size - 1), nbytes, 0)


def gather(nbytes: int, world_size: int) -> Load:
    """Return the load of a gather: all blocks go to the root, which copies its own block."""
    return Load(1, 0, world_size - 1, nbytes // world_size, _share(nbytes, world_size), nbytes // world_size)


def scatter(nbytes: int, world_size: int) -> Load:
    """Return the load of a scatter: all blocks come from the root, which copies its own block."""
    return Load(1, world_size - 1, 0, _share(nbytes, world_size), nbytes // world_size, nbytes // world_size)


def dissemination(nbytes: int, world_size: int) -> Load:
    """Return the load of the barrier algorithm "dissemination": the distance to the peer doubles in each step."""
    steps = log2(world_size)
    return Load(steps, steps, steps, 0, 0, 0)


def report(nbytes: int, world_size: int) -> Load:
    """Return the load of the barrier algorithm "linear": each rank reports to rank 0, which replies."""
    return Load(2, world_size - 1, world_size - 1, 0, 0, 0)
