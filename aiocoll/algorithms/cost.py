"""Costs of algorithms: the load of the busiest rank, and the predicted time on a given machine.

The counts equal those in the module docstrings of the schedules. Predictions serve to choose between algorithms. They
ignore other load on the machine, and cores shared by several ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from aiocoll.algorithms.load import Load, seconds_of, streaming_seconds_of
from aiocoll.algorithms.machine import PIECE, Machine
from aiocoll.algorithms.select import find
from aiocoll.algorithms.spec import spec_of

__all__ = ["cost", "predict"]

#: For each kind of collective, the algorithm that sends the same messages as the algorithm "relay".
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
    """Return the load of a collective on its busiest rank: messages, steps and bytes.

    Args:
        algorithm: name of the algorithm.
        kind: name of the collective.
        nbytes: bytes of the whole vector, as for `choose`. If it is not a multiple of `world_size`, the result is
            rounded.
        world_size: number of ranks.

    Raises:
        ValueError: `kind` is unknown or has no such algorithm.
    """
    formula = find(kind, _program(kind, algorithm)).load
    if world_size == 1 or (nbytes == 0 and spec_of(kind).input is not None):
        return Load(0, 0, 0, 0, 0, 0)
    return formula(nbytes, world_size)


def predict(algorithm: str, kind: str, nbytes: int, world_size: int, machine: Machine) -> float:
    """Return the approximate duration of a collective in seconds.

    A step costs alpha, and each byte that is reduced or copied costs gamma. A byte in the busier direction of the
    busiest link costs beta (Hockney). If a rank has more messages than steps, these are in flight at the same time.
    Each of them costs an overhead, if the overheads take longer than the bytes (LogGP).

    Args:
        algorithm: name of the algorithm.
        kind: name of the collective.
        nbytes: bytes of the whole vector, as for `choose`.
        world_size: number of ranks.
        machine: the costs of the medium.

    Raises:
        ValueError: `kind` has no such algorithm.
    """
    algorithm = _program(kind, algorithm)
    load = cost(algorithm, kind, nbytes, world_size)
    if algorithm == "ring":
        return streaming_seconds_of(load, machine)
    _, _, beta, gamma = machine
    seconds = seconds_of(load, machine)
    if algorithm == "exchange":
        # The reduction overwrites the tensor being sent, so it waits for the end of the send. The first `PIECE` bytes
        # cost no wait, because they are sent eagerly.
        seconds += max(nbytes - PIECE, 0) * beta
    if algorithm == "chain":
        # The first piece passes all inner ranks, one after the other, before the last rank receives it. From then on,
        # all ranks work in parallel.
        piece, inner = min(nbytes, PIECE), max(load.steps - 1, 0)
        seconds += inner * piece * (beta + (gamma if load.worked else 0.0))
    return seconds


def _program(kind: str, algorithm: str) -> str:
    return _RELAYED.get(kind, algorithm) if algorithm == "relay" else algorithm
