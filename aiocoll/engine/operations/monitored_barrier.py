"""Monitored barrier: every rank reports to rank 0, which can name the ranks that are missing."""

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
    """The operation of one rank in a monitored barrier, which names the first missing rank."""

    OP = "MONITORED_BARRIER"

    __slots__ = ("_max_named",)

    def __init__(
        self, comm: Communicator, identity: int, plan: Plan, arrays: list[Any], completion: Completion
    ) -> None:
        super().__init__(comm, identity, plan, arrays, completion)
        self._max_named: int | None = 1

    @classmethod
    def naming_all_ranks(
        cls, comm: Communicator, identity: int, plan: Plan, arrays: list[Any], completion: Completion
    ) -> MonitoredBarrier:
        """Create a barrier whose error names all missing ranks."""
        barrier = cls(comm, identity, plan, arrays, completion)
        barrier._max_named = None
        return barrier

    def expire(self) -> None:
        """Handle the expired timeout: fail with an error that names missing ranks."""
        self.fail_with_missing_ranks(self)

    def fail_with_missing_ranks(self, operation: Operation) -> None:
        """Fail, and name the ranks that have not entered `operation`: this barrier, or an operation before it.

        Rank 0 has received the reports itself. Other ranks use the list that rank 0 has sent them.
        """
        comm = self.comm
        missing = operation.awaited_ranks() if comm.rank == 0 else comm.stalls.missing(operation)[0]
        missing = missing[: self._max_named]
        within = f"in {self.timeout * 1000:g} ms"
        if missing:
            text = f"Ranks {', '.join(map(str, missing))} failed to pass monitoredBarrier {within}"
            if comm.rank:
                text += "; check the log of rank 0, which receives the reports of all ranks"
        else:
            text = f"rank 0 did not answer monitoredBarrier {within}; check its log, which names the missing ranks"
        comm.revoke(
            CollectiveTimeoutError(
                f"[rank {comm.rank} of group {comm.name!r}] {text}",
                op=self.completion.op,
                seq=self.completion.seq,
                group=comm.name,
                ranks=missing or [0],
            )
        )
