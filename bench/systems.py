"""Compared systems: aiocoll over each transport, and Gloo and two MPI libraries in each way of waiting."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from inflight import Case

from aiocoll.cli.workload import KINDS

#: Transports of aiocoll, in the order of the tables. `pure` is `auto` without the accelerator in C.
TRANSPORTS = ("auto", "pure", "shm", "unix", "tcp")
#: Transports that are measured by default. `shm` is omitted, because `auto` uses it on one host.
DEFAULT_TRANSPORTS = ("auto", "pure", "unix", "tcp")
#: Transports that are measured with all collectives; the others only with allreduce.
AT_ALL_COLLECTIVES = ("auto", "pure")

#: How a program waits for a call. Only "blocking" stops the event loop.
Mode = Literal["await", "future", "test", "spin", "thread", "blocking"]


@dataclass(frozen=True)
class System:
    """A compared system: a library, its transport, and the way in which a rank waits for a call.

    Attributes:
        name: the name in tables.
        library: the function of `libraries.py` that runs it.
        mode: the way in which a rank waits for a call.
        environment: the virtual environment of `environments.py`; None is the one of the benchmark.
        waits: `mode` in words.
        kinds: the collectives in addition to allreduce.
        mpiexec: the options of `mpiexec`; None starts the ranks directly.
        transport: the transport of aiocoll; None for a peer.
        variables: environment variables of its ranks.
    """

    name: str
    library: Literal["aiocoll", "gloo", "mpi"]
    mode: Mode
    environment: str | None
    waits: str
    kinds: frozenset[str] = frozenset()
    mpiexec: tuple[str, ...] | None = None
    transport: str | None = None
    variables: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_awaited(self) -> bool:
        """Return whether other tasks of the event loop can run during a call."""
        return self.mode != "blocking"

    def can_run(self, case: Case) -> bool:
        """Return whether `case` is measured with this system."""
        if case.inflight > 1:
            return self.is_awaited
        return case.kind == "allreduce" or case.kind in self.kinds


def make_aiocoll(transport: str) -> System:
    """Return the system of aiocoll over one of `TRANSPORTS`."""
    kinds: Collection[str] = KINDS if transport in AT_ALL_COLLECTIVES else ()
    return System(
        f"aiocoll {transport}",
        "aiocoll",
        "await",
        None,
        "`await` on uvloop polls for up to 50 µs per loop iteration, and yields the core between polls when there are "
        "more ranks than cores; then the rank sleeps in the loop until the kernel wakes it",
        frozenset(kinds),
        transport="auto" if transport == "pure" else transport,
        variables={"AIOCOLL_NATIVE": "0"} if transport == "pure" else {},
    )


_GLOO = {
    "future": "`async_op=True`; the future of the work wakes uvloop by `call_soon_threadsafe`",
    "thread": "`async_op=True`; a thread waits for the work, awaited on uvloop by `run_in_executor`",
    "blocking": "`dist.all_reduce(x)` blocks the thread on a condition variable, without spinning",
}
_MPI = {
    "test": "`Iallreduce`, then `request.Test()` once per iteration of uvloop, with `asyncio.sleep(0)` in between",
    "spin": "as *test*, but `Test()` is repeated for 50 µs before the first `asyncio.sleep(0)`",
    "thread": "a thread calls `Allreduce`, awaited on uvloop by `run_in_executor`",
    "blocking": "`Allreduce(MPI.IN_PLACE, x)` blocks the thread and spins, so that waiting takes a core",
}
#: Options of `mpiexec`. Waiting ranks of Open MPI yield the core only if oversubscription is allowed. No rank of any
#: system is bound to a core.
_MPIEXEC = {"mpich": (), "openmpi": ("--map-by", ":OVERSUBSCRIBE", "--bind-to", "none")}
_NAMES = {"gloo": "gloo", "mpich": "mpich", "openmpi": "open mpi"}


def _peers() -> dict[str, System]:
    """Return the systems of other libraries, by their names on the command line."""
    peers = {}
    for mode, waits in _GLOO.items():
        # Gloo has no scan, and its reduce_scatter returns a work without a future.
        kinds = frozenset(KINDS) - {"scan"} - ({"reduce_scatter"} if mode == "future" else set())
        peers[f"gloo-{mode}"] = System(f"gloo {mode}", "gloo", mode, "torch", waits, kinds)
    for library, options in _MPIEXEC.items():
        for mode, waits in _MPI.items():
            name = f"{_NAMES[library]} {mode}"
            peers[f"{library}-{mode}"] = System(name, "mpi", mode, library, waits, frozenset(KINDS), options)
    return peers


def choose_peers(names: Iterable[str]) -> list[str]:
    """Return the keys of `PEERS` that the command line selects with `names`, each once."""
    return [peer for peer in PEERS if any(name in (peer, peer.rpartition("-")[0]) for name in names)]


PEERS = _peers()
#: Names of peers on the command line. The name of a library stands for all its modes.
PEER_CHOICES = (*_NAMES, *PEERS)

#: Names of the peers in tables: those that are awaited, and those that block. Only the former suit an event loop.
AWAITED = tuple(system.name for system in PEERS.values() if system.is_awaited)
BLOCKING = tuple(system.name for system in PEERS.values() if not system.is_awaited)
MPI_BLOCKING = tuple(system.name for system in PEERS.values() if system.library == "mpi" and not system.is_awaited)
