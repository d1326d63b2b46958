"""The barrier in which every rank reports to rank 0, so that rank 0 can name those that have not."""

from __future__ import annotations

from aiocoll.engine.operations.base import Operation
from aiocoll.engine.operations.program_executor import ProgramExecutor
from aiocoll.errors import CollectiveTimeoutError

__all__ = ["MonitoredBarrier", "MonitoredBarrierOfAll"]


class MonitoredBarrier(ProgramExecutor):
    """One rank's part in a monitored barrier that names the first rank that is missing."""

    OP = "MONITORED_BARRIER"

    __slots__ = ()

    def expire(self) -> None:
        """The timeout has passed."""
        self.blame(self)

    def blame(self, operation: Operation) -> None:
        """Say who has not come to `operation`, this one or what goes before it: on rank 0 first-hand.

        Elsewhere it is known as far as rank 0 has told.
        """
        comm = self.comm
        missing = self._named(operation.awaited() if comm.rank == 0 else comm.stalls.missing(operation)[0])
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
                op=self.work.op,
                seq=self.work.seq,
                group=comm.name,
                ranks=missing or [0],
            )
        )

    def _named(self, missing: list[int]) -> list[int]:
        return missing[:1]


class MonitoredBarrierOfAll(MonitoredBarrier):
    """One that names all missing ranks."""

    __slots__ = ()

    def _named(self, missing: list[int]) -> list[int]:
        return missing
