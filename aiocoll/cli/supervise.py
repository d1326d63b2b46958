"""Supervise the ranks: forward signals, stop all when one fails, and report which rank failed first.

One queue gets all events, from the threads that listen to the ranks and from signal handlers; the main thread handles
them. (Threads rather than an event loop: a terminal that blocks our output must not block Ctrl-C, and `Process.wait` of
some asyncio releases waits for the output of grandchildren.)
"""

from __future__ import annotations

import queue
import signal
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import inf

from aiocoll.cli.output import Output
from aiocoll.cli.rank import Exit, RankProcess, Report
from aiocoll.cli.verdict import RankOutcome, culprit, tracebacks, words

__all__ = ["DRAIN", "GRACE", "RELEASE", "supervise"]

#: Seconds that ranks get to end by themselves when one has failed. Most are told and report their own error; and the
#: rank to blame may be the last to report, after it has left its groups.
RELEASE = 1.0
#: Seconds from asking a rank to end (SIGTERM) to ending it (SIGKILL): users are promised that a failure stops all
#: ranks within 5.
GRACE = 3.0
#: Seconds for the rest of the output of an ended rank; only a process that it left behind takes longer.
DRAIN = 1.0


_Event = Report | Exit | signal.Signals
_Events = queue.SimpleQueue[_Event]


def supervise(command: Sequence[str], environments: Mapping[int, Mapping[str, str]], key: bytes) -> int:
    """Run `command` once for each rank and wait for the end of all.

    Args:
        command: what follows the name of the Python interpreter.
        environments: the environment of each rank.
        key: the content of each rank's pipe.

    Returns:
        0 when every rank ended with 0, else the code of the rank to blame, or 128 + n for signal n.
    """
    events = _Events()
    output = Output(on_closed=lambda: events.put(signal.SIGPIPE))
    ranks: dict[int, RankProcess] = {}
    with _signals_to(events):
        try:
            for rank, environment in environments.items():
                ranks[rank] = RankProcess(rank, command, environment, key, output, events.put)
            code, last_words = _Supervisor(ranks, events, output).run()
        finally:
            for process in ranks.values():
                process.kill()
            deadline = time.monotonic() + DRAIN
            for process in ranks.values():
                process.drain(deadline)
    _say(output, last_words)
    return code


def _say(output: Output, lines: Iterable[str]) -> None:
    output.write(sys.stderr, "".join(f"{line}\n" for line in lines).encode(errors="replace"))


@contextmanager
def _signals_to(events: _Events) -> Iterator[None]:
    """Queue the signals that end programs, and SIGUSR2; one that is ignored (as nohup asks for) stays ignored."""
    before = {
        number: signal.getsignal(number)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR2)
        if signal.getsignal(number) is not signal.SIG_IGN
    }
    for number in before:
        signal.signal(number, lambda received, frame: events.put(signal.Signals(received)))
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _Supervisor:
    """The state of the ranks, and the deadlines for ending them."""

    def __init__(self, ranks: Mapping[int, RankProcess], events: _Events, output: Output) -> None:
        self._running = dict(ranks)
        self._events = events
        self._output = output
        self._outcomes = {rank: RankOutcome(rank) for rank in ranks}
        #: When the next step towards the end of all is due, when the last one is, and when all were told to end.
        self._deadline = self._end = inf
        self._stopped = inf
        self._signal: signal.Signals | None = None

    def run(self) -> tuple[int, list[str]]:
        """Return the exit code, and what to tell the user (nothing when all went well)."""
        while self._running:
            try:
                due = min(self._deadline, self._end)
                event = self._events.get(timeout=None if due == inf else max(0.0, due - time.monotonic()))
            except queue.Empty:
                self._out_of_patience()
                continue
            if isinstance(event, signal.Signals):
                self._signalled(event)
            else:
                self._heard(event)
        to_blame = culprit(self._outcomes, self._stopped)
        if to_blame is None:
            return 0, []
        if self._signal is not None:
            return 128 + self._signal, [*tracebacks(self._outcomes), f"aiocoll run: stopped by {self._signal.name}"]
        return to_blame.status or 1, list(words(self._outcomes, to_blame, self._stopped))

    def _heard(self, event: Report | Exit) -> None:
        outcome = self._outcomes[event.rank]
        if isinstance(event, Exit):
            outcome.exit = event
            del self._running[event.rank]
        else:
            outcome.report = event
        if not outcome.failed:
            return
        if isinstance(event, Exit):
            self._end = min(self._end, time.monotonic() + RELEASE + GRACE)
        if self._signal is not None or self._stopped != inf:
            return  # all have been told to end
        self._deadline = min(self._deadline, time.monotonic() + RELEASE)

    def _out_of_patience(self) -> None:
        if self._signal is not None or time.monotonic() >= self._end:
            self._deadline = self._end = inf
            self._kill(self._running)
        elif self._stopped == inf:
            self._stop()
        else:
            self._deadline = inf
            self._kill(self._unreported())
            # Their programs have failed, and their exit may take long: show the reason now.
            late = {rank: self._outcomes[rank] for rank in self._running.keys() - self._unreported()}
            if late:
                ranks = ", ".join(map(str, sorted(late)))
                _say(self._output, [f"aiocoll run: failed, but not at an end yet: rank {ranks}", *tracebacks(late)])

    def _stop(self) -> None:
        """Tell all ranks to end that are not ending already."""
        self._stopped = time.monotonic()
        self._deadline = self._stopped + GRACE
        for rank in self._unreported():
            self._running[rank].send(signal.SIGTERM)

    def _unreported(self) -> set[int]:
        return {rank for rank in self._running if self._outcomes[rank].report is None}

    def _signalled(self, number: signal.Signals) -> None:
        if number == signal.SIGUSR2:
            self._ask_all()
        elif number == signal.SIGPIPE:
            # The reader of our output is gone, as in `aiocoll run ... | head`: end as programs do then.
            self._signal = self._signal or number
            self._deadline = min(self._deadline, time.monotonic() + GRACE)
            self._send(signal.SIGTERM)
        elif number == signal.SIGINT and self._signal == signal.SIGINT:
            self._kill(self._running)
        else:
            self._signal = self._signal or number
            self._send(number)

    def _ask_all(self) -> None:
        """Request dumps from the ranks; a process that the signal would end does not get it."""
        for rank, process in sorted(self._running.items()):
            asked = "asked for a dump" if process.ask(signal.SIGUSR2) else "has no handler for SIGUSR2 now, not asked"
            _say(self._output, [f"aiocoll run: rank {rank}, process {process.pid}: {asked}"])
        for rank in sorted(self._outcomes.keys() - self._running.keys()):
            _say(self._output, [f"aiocoll run: rank {rank}: its process has ended"])

    def _send(self, number: signal.Signals) -> None:
        for process in self._running.values():
            process.send(number)

    def _kill(self, ranks: Iterable[int]) -> None:
        for rank in ranks:
            self._running[rank].kill()
