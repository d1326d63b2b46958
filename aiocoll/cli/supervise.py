"""Watch the ranks: forward signals, stop all when one fails, and say how it ended.

One queue gets everything that happens, from the threads that wait for the ranks and from signal handlers; the main
thread takes it from there. (Threads rather than an event loop: a terminal that blocks our output must not block
Ctrl-C, and `Process.wait` of some asyncio releases waits for the output of grandchildren.)
"""

from __future__ import annotations

import queue
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import inf
from typing import NamedTuple

from aiocoll.cli.rank import Output, RankProcess

__all__ = ["DRAIN", "GRACE", "supervise"]

#: Seconds from asking a rank to end (SIGTERM) to ending it (SIGKILL): users are promised that a failure stops all
#: ranks within 5.
GRACE = 4.0
#: Seconds that the output of a rank which has ended may take to arrive; only a process it left behind takes longer.
DRAIN = 1.0


class _Exit(NamedTuple):
    rank: int
    code: int


_Event = _Exit | signal.Signals
_Events = queue.SimpleQueue[_Event]


def supervise(command: Sequence[str], environments: Mapping[int, Mapping[str, str]], key: bytes) -> int:
    """Run `command` once for each rank and wait for the end of all.

    Args:
        command: what follows the name of the Python interpreter.
        environments: the environment of each rank.
        key: what each rank finds in its pipe.

    Returns:
        0 when every rank ended with 0, else the code of the first that did not, or 128 + n for signal n.
    """
    events = _Events()
    output = Output(on_closed=lambda: events.put(signal.SIGPIPE))
    ranks: dict[int, RankProcess] = {}
    with _signals_to(events):
        try:
            for rank, environment in environments.items():
                ranks[rank] = RankProcess(rank, command, environment, key, output)
                threading.Thread(target=_wait, args=(ranks[rank], events), name=f"rank-{rank}", daemon=True).start()
            code, verdict = _Supervisor(ranks, events).run()
        finally:
            for process in ranks.values():
                process.kill()
            deadline = time.monotonic() + DRAIN
            for process in ranks.values():
                process.drain(deadline)
    if verdict:
        print(f"aiocoll run: {verdict}", file=sys.stderr, flush=True)
    return code


def _wait(process: RankProcess, events: _Events) -> None:
    events.put(_Exit(process.rank, process.wait()))


@contextmanager
def _signals_to(events: _Events) -> Iterator[None]:
    """Queue the signals that end programs; one that is ignored (as nohup asks for) stays ignored."""
    before = {
        number: signal.getsignal(number)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
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
    """What has happened so far, and when patience ends."""

    def __init__(self, ranks: Mapping[int, RankProcess], events: _Events) -> None:
        self._running = dict(ranks)
        self._events = events
        self._deadline = inf
        self._failure: _Exit | None = None
        self._signal: signal.Signals | None = None

    def run(self) -> tuple[int, str]:
        """Return the exit code, and what to tell the user ("" when all went well)."""
        while self._running:
            try:
                timeout = None if self._deadline == inf else max(0.0, self._deadline - time.monotonic())
                event = self._events.get(timeout=timeout)
            except queue.Empty:
                self._kill()
                continue
            if isinstance(event, _Exit):
                self._ended(event)
            else:
                self._signalled(event)
        if self._failure is None:
            return 0, ""
        if self._signal is not None:
            return 128 + self._signal, f"stopped by {self._signal.name}"
        rank, code = self._failure
        if code < 0:
            return 128 - code, f"rank {rank} was killed by {_signal_name(-code)}"
        return code, f"rank {rank} exited with code {code}"

    def _ended(self, exit_: _Exit) -> None:
        del self._running[exit_.rank]
        if exit_.code == 0 or self._failure is not None:
            return
        self._failure = exit_
        self._deadline = time.monotonic() + GRACE
        if self._signal is None:  # else they have theirs, and are on their way out
            self._send(signal.SIGTERM)

    def _signalled(self, number: signal.Signals) -> None:
        if number == signal.SIGPIPE:
            # Nobody reads our output any more, as in `aiocoll run ... | head`: end as programs do then.
            self._signal = self._signal or number
            self._deadline = min(self._deadline, time.monotonic() + GRACE)
            self._send(signal.SIGTERM)
        elif number == signal.SIGINT and self._signal == signal.SIGINT:
            self._kill()
        else:
            self._signal = self._signal or number
            self._send(number)

    def _send(self, number: signal.Signals) -> None:
        for process in self._running.values():
            process.send(number)

    def _kill(self) -> None:
        self._deadline = inf
        for process in self._running.values():
            process.kill()


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # most real-time signals have none
        return f"signal {number}"
