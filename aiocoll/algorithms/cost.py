"""What each algorithm costs: what the busiest rank does, and how long that takes on a given machine.

The counts are those in the heads of the modules, and a test compares them with the programs; `predict` puts a time on
them. A prediction is for choosing between algorithms: it knows nothing of what else the machine does, nor that ranks
share cores.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple, TypeAlias

from aiocoll.algorithms.flat.tree import RADIX, children
from aiocoll.algorithms.machine import PIECE, Machine
from aiocoll.algorithms.spec import spec_of

__all__ = ["Load", "cost", "in_a_row", "predict", "seconds_of"]


class Load(NamedTuple):
    """What a collective asks for.

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


_Formula: TypeAlias = Callable[[int, int], Load]


def cost(algorithm: str, kind: str, nbytes: int, world_size: int) -> Load:
    """Return what a collective asks for.

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
    if world_size == 1 or (nbytes == 0 and spec_of(kind).input is not None):
        return Load(0, 0, 0, 0, 0, 0)
    return formula(nbytes, world_size)


def predict(algorithm: str, kind: str, nbytes: int, world_size: int, machine: Machine) -> float:
    """Return about how many seconds a collective takes.

    A step costs alpha, a byte in the busier direction of the busiest link beta (Hockney); or the messages that a rank
    has besides, all under way at the same time, an overhead each, if that takes longer than the bytes (LogGP); what is
    reduced or copied gamma per byte.

    Args:
        algorithm: its name.
        kind: the collective.
        nbytes: bytes of the whole vector, as for `choose`.
        world_size: number of ranks.
        machine: of the medium.

    Raises:
        ValueError: if `kind` has no such algorithm.
    """
    load = cost(algorithm, kind, nbytes, world_size)
    if algorithm in ("ring", "relay"):
        return in_a_row(load, machine)
    _, _, beta, gamma = machine
    seconds = seconds_of(load, machine)
    if algorithm == "exchange":
        # Reducing overwrites what is sent, so it waits for that, but for what has arrived unasked.
        seconds += max(nbytes - PIECE, 0) * beta
    if algorithm == "chain":
        # Each inner rank hands on the first piece before the last one sees it; from then on all work at once.
        piece, inner = min(nbytes, PIECE), max(load.steps - 1, 0)
        seconds += inner * piece * (beta + (gamma if load.worked else 0.0))
    return seconds


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


def _log2(world_size: int) -> int:
    return (world_size - 1).bit_length()


def _share(nbytes: int, world_size: int) -> int:
    return nbytes * (world_size - 1) // world_size


def _everybody_folds(nbytes: int, world_size: int) -> Load:
    """Everything goes to everybody."""
    others = world_size - 1
    return Load(1, others, others, nbytes * others, nbytes * others, nbytes * others)


def _scan_fold(nbytes: int, world_size: int) -> Load:
    """What a rank does not send it receives: the last one folds everything."""
    return _everybody_folds(nbytes, world_size)._replace(sends=0)


def _exscan_fold(nbytes: int, world_size: int) -> Load:
    return _scan_fold(nbytes, world_size)._replace(worked=nbytes * max(world_size - 2, 1))


def _bruck(nbytes: int, world_size: int) -> Load:
    steps, moved = _log2(world_size), nbytes * (world_size - 1)
    return Load(steps, steps, steps, moved, moved, moved + nbytes)


def _circulant_allreduce(nbytes: int, world_size: int) -> Load:
    share, steps = _share(nbytes, world_size), 2 * _log2(world_size)
    messages = steps + world_size.bit_length() - 2  # runs of blocks that wrap around the end are two messages
    return Load(steps, messages, messages, 2 * share, 2 * share, share)


def _ring_allreduce(nbytes: int, world_size: int) -> Load:
    share, steps = _share(nbytes, world_size), 2 * (world_size - 1)
    return Load(steps, steps, steps, 2 * share, 2 * share, share)


def _pairwise_allreduce(nbytes: int, world_size: int) -> Load:
    return _ring_allreduce(nbytes, world_size)._replace(steps=2)


def _oneshot(nbytes: int, world_size: int) -> Load:
    """Each rank copies its tensor to everybody, and reduces all there are."""
    others = world_size - 1
    return Load(1, others, others, 0, 0, nbytes * (2 * others + 1))


def _fan_in(nbytes: int, world_size: int) -> Load:
    others = world_size - 1
    return Load(1, 0, others, nbytes, nbytes * others, nbytes * others)


def _binomial(nbytes: int, world_size: int) -> Load:
    branches = _log2(world_size)
    return Load(world_size.bit_length() - 1, 0, branches, nbytes, nbytes * branches, nbytes * branches)


def _pairwise_reduce(nbytes: int, world_size: int) -> Load:
    share = _share(nbytes, world_size)
    return Load(2, world_size - 1, 2 * (world_size - 1), nbytes, 2 * share, share)


def _shares(steps: Callable[[int], int], reduced: bool, copied: Callable[[int, int], int]) -> _Formula:
    """Everybody sends and receives p-1 p-ths of the vector, in so many steps; at least one message each."""

    def formula(nbytes: int, world_size: int) -> Load:
        share, taken = _share(nbytes, world_size), steps(world_size)
        messages = world_size - 1 if taken == 1 else taken
        return Load(taken, messages, messages, share, share, reduced * share + copied(nbytes, world_size))

    return formula


def _line(worked: Callable[[int], int]) -> _Formula:
    """The tensor passes p-2 ranks on its way."""

    def formula(nbytes: int, world_size: int) -> Load:
        return Load(world_size - 1, 1, min(world_size - 2, 1), nbytes, nbytes, nbytes * worked(world_size))

    return formula


def _knomial(nbytes: int, world_size: int) -> Load:
    steps, deepest = 0, 1
    while deepest < world_size:  # the first node of the next depth has one more digit 1: 1, 11, 111 in base RADIX
        steps += 1
        deepest = deepest * RADIX + 1
    branches = sum(1 for _ in children(0, world_size, RADIX))
    return Load(steps, branches, 0, nbytes * branches, nbytes, 0)


def _linear_broadcast(nbytes: int, world_size: int) -> Load:
    return Load(1, world_size - 1, 0, nbytes * (world_size - 1), nbytes, 0)


def _gather(nbytes: int, world_size: int) -> Load:
    return Load(1, 0, world_size - 1, nbytes // world_size, _share(nbytes, world_size), nbytes // world_size)


def _scatter(nbytes: int, world_size: int) -> Load:
    return Load(1, world_size - 1, 0, _share(nbytes, world_size), nbytes // world_size, nbytes // world_size)


def _dissemination(nbytes: int, world_size: int) -> Load:
    steps = _log2(world_size)
    return Load(steps, steps, steps, 0, 0, 0)


def _report(nbytes: int, world_size: int) -> Load:
    return Load(2, world_size - 1, world_size - 1, 0, 0, 0)


def _once(world_size: int) -> int:
    return 1


def _round(world_size: int) -> int:
    return world_size - 1


def _nothing(nbytes: int, world_size: int) -> int:
    return 0


def _own(nbytes: int, world_size: int) -> int:
    return nbytes // world_size


def _all(nbytes: int, world_size: int) -> int:
    return nbytes


def _all_and_own(nbytes: int, world_size: int) -> int:
    return nbytes + nbytes // world_size


_FORMULAS: Mapping[tuple[str, str], _Formula] = MappingProxyType(
    {
        ("allreduce", "exchange"): _everybody_folds,
        ("allreduce", "oneround"): _everybody_folds,
        ("allreduce", "bruck"): _bruck,
        ("allreduce", "circulant"): _circulant_allreduce,
        ("allreduce", "ring"): _ring_allreduce,
        ("allreduce", "pairwise"): _pairwise_allreduce,
        # Not of programs, but of executors: through memory that all ranks share.
        ("allreduce", "oneshot"): _oneshot,
        ("allreduce", "relay"): _ring_allreduce,
        ("barrier", "oneshot"): _oneshot,
        ("reduce", "linear"): _fan_in,
        ("reduce", "binomial"): _binomial,
        ("reduce", "chain"): _line(lambda _: 1),
        ("reduce", "pairwise"): _pairwise_reduce,
        ("reduce_scatter", "pairwise"): _shares(_once, True, _nothing),
        ("reduce_scatter", "circulant"): _shares(_log2, True, _all),
        ("reduce_scatter", "ring"): _shares(_round, True, _nothing),
        ("allgather", "direct"): _shares(_once, False, _own),
        ("allgather", "circulant"): _shares(_log2, False, _all_and_own),
        ("allgather", "ring"): _shares(_round, False, _own),
        ("broadcast", "linear"): _linear_broadcast,
        ("broadcast", "knomial"): _knomial,
        ("broadcast", "chain"): _line(lambda _: 0),
        ("gather", "linear"): _gather,
        ("scatter", "linear"): _scatter,
        ("alltoall", "pairwise"): _shares(_once, False, _own),
        ("barrier", "dissemination"): _dissemination,
        ("monitored_barrier", "linear"): _report,
        ("scan", "fold"): _scan_fold,
        ("scan", "chain"): _line(lambda _: 1),
        ("exscan", "fold"): _exscan_fold,
        ("exscan", "chain"): _line(lambda world_size: 2 if world_size > 2 else 0),
    }
)
