"""The monitored barrier: every rank reports to rank 0, which can name the ranks that have not."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from aiocoll.completion import Completion
from aiocoll.engine.operations.base import Operation
from aiocoll.engine.operations.plan import Plan
from aiocoll.engine.operations.program_executor import ProgramExecutor
from aiocoll.errors import CollectiveTimeoutError

if TYPE_CHECKING:
    from aiocoll.engine.communicator import Communicator

__all__ = ["MonitoredBarrier"]


class MonitoredBarrier(ProgramExecutor):
    """One rank's part in a monitored barrier that names the first missing rank."""

    OP = "MONITORED_BARRIER"

    __slots__ = ("_named",)

    def __init__(
        self, comm: Communicator, identity: int, plan: Plan, arrays: list[Any], completion: Completion
    ) -> None:
        super().__init__(comm, identity, plan, arrays, completion)
        self._named: int | None = 1

    @classmethod
    def of_all(
        cls, comm: Communicator, identity: int, plan: Plan, arrays: list[Any], completion: Completion
    ) -> MonitoredBarrier:
        """Make one that names all ranks that are missing."""
        barrier = cls(comm, identity, plan, arrays, completion)
        barrier._named = None
        return barrier

    def expire(self) -> None:
        """The timeout has passed."""
        self.blame(self)

    def blame(self, operation: Operation) -> None:
        """Fail with the ranks that have not entered `operation`, this one or a step before it.

        Rank 0 knows them first-hand; other ranks know what rank 0 has reported.
        """
        comm = self.comm
        missing = operation.awaited() if comm.rank == 0 else comm.stalls.missing(operation)[0]
        missing = missing[: self._named]
        within = f"in {self.timeout * 1000:g} ms"
        if missing:
            text = f"Ranks {', '.join(map(str, missing))} failed to pass monitoredBarrier {within}"
            if comm.rank:
                text += "; look at rank 0, which hears of every rank first"
        else:
            text = f"rank 0 did not answer monitoredBarrier {within}: look at rank 0, which knows the missing ranks"
        comm.revoke(
            CollectiveTimeoutError(
                f"[rank {comm.rank} of group {comm.name!r}] {text}",
                op=self.completion.op,
                seq=self.completion.seq,
                group=comm.name,
                ranks=missing or [0],
            )
        )
