"""The cost of each algorithm: the load of the busiest rank, and its time on a given machine.

The counts are those in the heads of the modules. A prediction is for choosing between algorithms: it ignores other load
on the machine, and that ranks share cores.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from aiocoll.algorithms.load import Load, in_a_row, seconds_of
from aiocoll.algorithms.machine import PIECE, Machine
from aiocoll.algorithms.select import find
from aiocoll.algorithms.spec import spec_of

__all__ = ["cost", "predict"]

#: Of "relay", the ring of chunk queues: the program that sends the same messages, by kind.
_RELAYED: Mapping[str, str] = MappingProxyType(
    {
        "allreduce": "ring",
        "allgather": "ring",
        "reduce_scatter": "ring",
        "broadcast": "chain",
        "reduce": "chain",
        "scan": "chain",
        "exscan": "chain",
        "gather": "linear",
        "scatter": "linear",
        "alltoall": "pairwise",
    }
)


def cost(algorithm: str, kind: str, nbytes: int, world_size: int) -> Load:
    """Return the load of a collective.

    Args:
        algorithm: its name.
        kind: the collective.
        nbytes: bytes of the whole vector, as for `choose`; a multiple of `world_size`, or the result is rounded.
        world_size: number of ranks.

    Raises:
        ValueError: if `kind` is unknown or has no such algorithm.
    """
    formula = find(kind, _program(kind, algorithm)).load
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
    algorithm = _program(kind, algorithm)
    load = cost(algorithm, kind, nbytes, world_size)
    if algorithm == "ring":
        return in_a_row(load, machine)
    _, _, beta, gamma = machine
    seconds = seconds_of(load, machine)
    if algorithm == "exchange":
        # Reducing overwrites the data that is being sent, so it waits for that, except for data sent eagerly.
        seconds += max(nbytes - PIECE, 0) * beta
    if algorithm == "chain":
        # Each inner rank forwards the first piece before the last rank receives it; from then on all work at once.
        piece, inner = min(nbytes, PIECE), max(load.steps - 1, 0)
        seconds += inner * piece * (beta + (gamma if load.worked else 0.0))
    return seconds


def _program(kind: str, algorithm: str) -> str:
    return _RELAYED.get(kind, algorithm) if algorithm == "relay" else algorithm
