"""The barrier in which every rank reports to rank 0, so that rank 0 can name those that have not."""

from __future__ import annotations

from typing import Any

from aiocoll.engine.operations.base import Operation
from aiocoll.engine.operations.program_executor import ProgramExecutor
from aiocoll.errors import CollectiveTimeoutError

__all__ = ["Monitored"]


class Monitored(ProgramExecutor):
    """One rank's part in a monitored barrier.

    Args:
        wait_all_ranks: name all missing ranks, not only the first.
    """

    __slots__ = ("_wait_all_ranks",)

    OP = "MONITORED_BARRIER"

    def __init__(self, *args: Any, wait_all_ranks: bool) -> None:
        super().__init__(*args)
        self._wait_all_ranks = wait_all_ranks

    def expire(self) -> None:
        """The timeout has passed."""
        self.blame(self)

    def blame(self, operation: Operation) -> None:
        """Say who has not come to `operation`, this one or what goes before it: on rank 0 first-hand.

        Elsewhere it is known as far as rank 0 has told.
        """
        group = self.group
        missing = operation.awaited() if group.rank == 0 else group.stalls.missing(operation)[0]
        if not self._wait_all_ranks:
            missing = missing[:1]
        within = f"in {self.timeout * 1000:g} ms"
        if missing:
            text = f"Ranks {', '.join(map(str, missing))} failed to pass monitoredBarrier {within}"
            if group.rank:
                text += "; look at rank 0, which hears of every rank first"
        else:
            text = f"rank 0 did not answer monitoredBarrier {within}: look at rank 0, which knows the missing ranks"
        group.revoke(
            CollectiveTimeoutError(
                f"[rank {group.rank} of group {group.name!r}] {text}",
                op=self.work.op,
                seq=self.work.seq,
                group=group.name,
                ranks=missing or [0],
            )
        )
