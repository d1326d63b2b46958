"""What is compared: this library over each transport, and the peers; how each is run and how it waits."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

from inflight import Case

from aiocoll.cli.workload import KINDS

#: Of aiocoll, in the order of the tables.
TRANSPORTS = ("auto", "shm", "unix", "tcp")
#: What is asked for by default: `shm` is what `auto` takes on one host.
DEFAULT_TRANSPORTS = ("auto", "unix", "tcp")


@dataclass(frozen=True)
class System:
    """One column of the comparison.

    Attributes:
        name: in tables.
        library: which part of `libraries.py` runs it.
        environment: the virtual environment of `environments.py` that has it; None is the one of the benchmark.
        waits: what a rank does while it waits for another.
        kinds: the collectives it is measured at besides allreduce.
        inflight: whether it can have many calls in flight.
        mpiexec: options of `mpiexec`; None starts the ranks directly.
    """

    name: str
    library: Literal["aiocoll", "gloo", "gloo awaited", "mpi"]
    environment: str | None
    waits: str
    kinds: frozenset[str] = frozenset()
    inflight: bool = False
    mpiexec: tuple[str, ...] | None = None

    def takes(self, case: Case) -> bool:
        if case.inflight > 1:
            return self.inflight
        return case.kind == "allreduce" or case.kind in self.kinds


def ours(transport: str, kinds: Collection[str] = ()) -> System:
    return System(
        f"aiocoll {transport}",
        "aiocoll",
        None,
        "`await` on uvloop: polls for up to 50 µs per turn of the loop, giving the core away between polls when there "
        "are more ranks than cores; then sleeps in the loop until the kernel wakes it",
        frozenset(kinds),
        inflight=True,
    )


PEERS = {
    "gloo": System(
        "gloo",
        "gloo",
        "torch",
        "`dist.all_reduce(x)` blocks the thread on a condition variable, without spinning; two worker threads and one "
        "of epoll do the work",
        frozenset(KINDS) - {"scan"},
    ),
    "gloo-awaited": System(
        "gloo awaited",
        "gloo awaited",
        "torch",
        "as asyncio programs use it, on uvloop: `async_op=True`, whose future wakes the loop by `call_soon_threadsafe`",
        inflight=True,
    ),
    "mpich": System(
        "mpich",
        "mpi",
        "mpich",
        "mpi4py's `Allreduce(MPI.IN_PLACE, x)` blocks and spins, so that waiting costs a core; its loop yields the "
        "core now and then",
        frozenset(KINDS),
        mpiexec=(),
    ),
    "openmpi": System(
        "open mpi",
        "mpi",
        "openmpi",
        "mpi4py's `Allreduce(MPI.IN_PLACE, x)` blocks and spins, so that waiting costs a core; yields it when there "
        "are more ranks than cores (it is told that there may be); ranks are not bound to cores, like all others here",
        frozenset(KINDS),
        mpiexec=("--map-by", ":OVERSUBSCRIBE", "--bind-to", "none"),
    ),
}
