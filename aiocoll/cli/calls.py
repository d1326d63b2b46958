"""Calls of aiocoll for benchmark workloads: one function call per kind of collective."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from aiocoll.cli.measure import Combine
from aiocoll.cli.workload import Workload
from aiocoll.elements.ops import ReduceOp
from aiocoll.group.process_group import ProcessGroup
from aiocoll.work import Work

__all__ = ["call_of", "combine_of"]


def call_of(pg: ProcessGroup, load: Workload) -> Callable[[], Work[Any]]:
    """Return a function that starts the collective of a workload on its arrays."""
    op = getattr(ReduceOp, load.case.op.upper())
    # The kind of collective determines which of the three arrays exist. The others are None.
    arrays: tuple[Any, Any, Any] = load.inplace, load.inputs, load.outputs
    x, source, target = arrays
    match load.case.kind:
        case "gather":
            targets = None if target is None or source is None else list(target.reshape(-1, source.size))
            return lambda: pg.gather(targets, source, 0)
        case "scatter":
            sources = None if source is None or target is None else list(source.reshape(-1, target.size))
            return lambda: pg.scatter(target, sources, 0)
    calls: dict[str, Callable[[], Work[Any]]] = {
        "allreduce": lambda: pg.allreduce(x, op),
        "broadcast": lambda: pg.broadcast(x, 0),
        "reduce": lambda: pg.reduce(x, 0, op),
        "scan": lambda: pg.scan(x, op),
        "barrier": lambda: pg.barrier(),
        "allgather": lambda: pg.allgather_into_tensor(target, source),
        "reduce_scatter": lambda: pg.reduce_scatter_tensor(target, source, op),
        "alltoall": lambda: pg.alltoall_base(target, source),
    }
    return calls[load.case.kind]


def combine_of(pg: ProcessGroup) -> Combine:
    """Return a function that reduces measured values over the ranks of `pg`, in place."""

    async def combine(values: npt.NDArray[np.float64], how: Literal["sum", "max"]) -> None:
        await pg.allreduce(values, ReduceOp.SUM if how == "sum" else ReduceOp.MAX)

    return combine
