"""`Shutdown`, the end of a job after a signal: ranks receive the signal, and SIGKILL after a time limit."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from math import inf

from aiocoll.cli.terminal import write_stderr
from aiocoll.cli.top.formatting import name_ranks

__all__ = ["KILL_AFTER", "Shutdown"]

#: Default of --kill-after: seconds from the first signal to SIGKILL.
KILL_AFTER = 30.0
#: Seconds from the first signal to the report of ranks that still run. Each further interval is ten times longer.
REPORT_AFTER = 1.0
#: Seconds for which the launcher waits for the thread that writes a report, after all ranks have ended.
_JOIN_TIMEOUT = 1.0


class Shutdown:
    """The state of a shutdown: the received signals, and the times of the next report and of SIGKILL.

    Args:
        kill_after: seconds from the first signal until the ranks that still run are killed.

    Attributes:
        signal: the first signal, or None.
        kill_at: time at which the ranks that still run are killed.
        report_at: time at which they are named.
        began: time of the first signal.
    """

    def __init__(self, kill_after: float) -> None:
        self.signal: signal.Signals | None = None
        self.kill_at = self.report_at = inf
        self._kill_after = kill_after
        self.began = 0.0
        self._passed_on: set[signal.Signals] = set()
        self._interval = REPORT_AFTER
        self._reporter: threading.Thread | None = None

    def take(self, number: signal.Signals) -> bool:
        """Record a signal; return whether to forward it. A repeated signal requests SIGKILL instead."""
        if number in self._passed_on:
            return False
        self._passed_on.add(number)
        if self.signal is None:
            self._begin(number, self._kill_after)
            self.report_at = self.began + self._interval
        return True

    def leave(self, number: signal.Signals, limit: float) -> None:
        """End the job within `limit` seconds and without a report, because the output has no reader any more."""
        if self.signal is None:
            self._begin(number, limit)
        self.kill_at = min(self.kill_at, time.monotonic() + limit)

    def report(self, running: Collection[int], find_stuck: Callable[[], Mapping[int, str]]) -> None:
        """Print which ranks still run, which are stuck, and how to end them at once.

        Another thread writes the report: a terminal that blocks output must not delay SIGKILL.

        Args:
            running: the ranks; may change meanwhile.
            find_stuck: returns the stuck ranks, each with the reason.
        """
        self._interval *= 10
        self.report_at = time.monotonic() + self._interval
        if self._reporter is None or not self._reporter.is_alive():
            self._reporter = threading.Thread(target=self._write, args=(running, find_stuck), daemon=True)
            self._reporter.start()

    def killed(self, ranks: Iterable[int], again: signal.Signals | None = None) -> None:
        """Print that ranks were killed, because of the time limit or because the signal `again` was repeated."""
        self.kill_at = self.report_at = inf
        assert self.signal is not None
        waited = f"{time.monotonic() - self.began:.0f} s after {self.signal.name}"
        why = f"after a second {again.name}" if again else waited
        write_stderr([f"aiocoll run: sent SIGKILL to {name_ranks(list(ranks))}, {why}"])

    def close(self) -> None:
        """Wait for a limited time until the report in progress is written."""
        if self._reporter is not None:
            self._reporter.join(_JOIN_TIMEOUT)

    def _begin(self, number: signal.Signals, limit: float) -> None:
        self.signal = number
        self.began = time.monotonic()
        self.kill_at = self.began + limit

    def _write(self, running: Collection[int], find_stuck: Callable[[], Mapping[int, str]]) -> None:
        assert self.signal is not None
        stuck = find_stuck()
        ranks = list(running)
        if not ranks or self.kill_at == inf:
            return  # the ranks have ended meanwhile, or were killed
        left = max(0.0, self.kill_at - time.monotonic())
        again = "Ctrl-C" if self.signal == signal.SIGINT else self.signal.name
        write_stderr(
            [
                f"aiocoll run: waiting for {name_ranks(ranks)} to end after {self.signal.name}; SIGKILL follows in "
                f"{left:.0f} s, or at once after a second {again}",
                *(f"aiocoll run: rank {rank} is stuck: {stuck[rank]}" for rank in ranks if rank in stuck),
            ]
        )
