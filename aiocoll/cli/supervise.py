"""Supervision of the ranks: signal forwarding, the end of all ranks after a failure, restarts, and the final report.

One queue receives the events of all threads: the threads that wait for ranks, other hosts and signals. The main
thread handles them. There is no event loop, because a terminal that blocks output must not block Ctrl-C. In some
asyncio releases, `Process.wait` also waits for the output of grandchildren.
"""

from __future__ import annotations

import queue
import signal
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing
from functools import partial
from math import inf
from operator import itemgetter
from typing import NamedTuple

from aiocoll.cli.program import Program, RankStart
from aiocoll.cli.rank import DRAIN, ElasticReport, Exit, RankProcess, Report
from aiocoll.cli.restarts import HostState, News, Notice, OtherHosts, Phase, RestartGrant, Restarts, Verdict
from aiocoll.cli.shutdown import KILL_AFTER, Shutdown
from aiocoll.cli.signals import signals_to
from aiocoll.cli.sink import Sink, limit_waits, on_loss
from aiocoll.cli.stuck import find_stuck
from aiocoll.cli.terminal import write_stderr
from aiocoll.cli.top.jobs import JobOutcome
from aiocoll.cli.verdict import (
    RankOutcome,
    final_lines,
    find_culprit,
    format_headline,
    format_interruption,
    replaced,
    summarize_ends,
    tracebacks,
)

__all__ = ["GRACE", "RELEASE", "supervise"]

#: Seconds that ranks have to end by themselves after a rank has failed. Most of them receive the cause and report an
#: error. The rank at fault may be the last to report, because it first leaves its groups.
RELEASE = 1.0
#: Seconds from SIGTERM to SIGKILL. The documentation promises that a failure ends all ranks within 5 s.
GRACE = 3.0
#: Seconds from the loss of a rank to the start of its replacement, in which further ranks may be lost. If all ranks are
#: lost, they restart together, which counts as one restart.
SETTLE = 0.3
#: Seconds after SIGTERM for which the launcher waits for a blocked reader of its output. Then it drops the output.
STUCK = 1.0


_Event = Report | ElasticReport | Exit | News | signal.Signals
_Events = queue.SimpleQueue[_Event]


class _Outcome(NamedTuple):
    """The outcome of an attempt: the exit code, the final messages, the verdict, and lines with the cause first."""

    code: int
    lines: list[str]
    verdict: Verdict
    summary: tuple[str, ...] = ()


def supervise(program: Program, restarts: Restarts, kill_after: float = KILL_AFTER, *, verbose: bool = False) -> int:
    """Run the ranks of this host, restart them when `restarts` decides so, and wait until all have ended.

    Args:
        program: the program of the ranks.
        restarts: decides when the ranks start, for the first time and again.
        kill_after: seconds from a signal that ends the job until the ranks that still run are killed.
        verbose: whether the tracebacks of all ranks are shown.

    Returns:
        0 if every rank ended with 0, else the exit code of the rank at fault, or 128 + n for signal n. If the reader of
        the output has gone, the code is 128 + SIGPIPE.
    """
    events = _Events()
    readers_gone: list[Sink] = []

    def lost(sink: Sink) -> None:
        if sink.has_no_reader:
            readers_gone.append(sink)
            events.put(signal.SIGPIPE)
        else:
            write_stderr([f"aiocoll run: {sink.trouble}: further output is lost, and the job goes on"])

    on_loss(lost)
    with signals_to(partial(_signal, events, set())), closing(restarts):
        restarts.begin(events.put)
        ending = _await_start(events)
        while (number := ending.verdict.restarts) is not None:
            ending = _Attempt(program, number, restarts, events, Shutdown(kill_after), verbose).run()
            write_stderr(ending.lines)
    if not ending.lines and ending.verdict.why:
        write_stderr([f"aiocoll run: {ending.verdict.why}"])
    if program.record_end is not None:
        program.record_end(JobOutcome(ending.code, ending.summary or tuple(filter(None, [ending.verdict.why]))))
    if readers_gone and ending.code == 0:  # the last output of the ranks found no reader
        return 128 + signal.SIGPIPE
    return ending.code


def _messages(lines: Iterable[str]) -> tuple[str, ...]:
    """Return the messages among the launcher's lines, without tracebacks."""
    return tuple(line.removeprefix("aiocoll run: ") for line in lines if line.startswith("aiocoll run: "))


def _await_start(events: _Events) -> _Outcome:
    while True:
        event = events.get()
        if isinstance(event, Notice):
            write_stderr([f"aiocoll run: {event.text}"])
        if isinstance(event, Verdict):
            return _Outcome(1, [], event)
        if isinstance(event, signal.Signals) and event != signal.SIGUSR2:
            return _Outcome(128 + event, [], Verdict(None, f"stopped by {event.name}"))


def _signal(events: _Events, before: set[signal.Signals], number: signal.Signals) -> None:
    """Put a signal into the event queue. Runs in a second thread, because a write may block the main thread."""
    if number in (signal.SIGTERM, signal.SIGHUP) or (number == signal.SIGINT and number in before):
        limit_waits(STUCK)
    before.add(number)
    events.put(number)


class _Attempt:
    """A single run of all ranks of this host, from their start to the end of the last rank."""

    def __init__(
        self,
        program: Program,
        number: int,
        restarts: Restarts,
        events: _Events,
        shutdown: Shutdown,
        verbose: bool,
    ) -> None:
        self._program = program
        self._number = number
        self._restarts = restarts
        self._events = events
        self._processes: list[RankProcess] = []
        self._running: dict[int, RankProcess] = {}
        self._outcomes = {rank: RankOutcome(rank) for rank in program.ranks}
        #: Deadlines of the next step and of the last step in ending all ranks. `_stopped`: the time of SIGTERM.
        self._deadline = self._end = inf
        self._stopped = inf
        #: Ranks that were stuck at the time of SIGTERM, each with the reason.
        self._stuck: Mapping[int, str] = {}
        self._shutdown = shutdown
        self._verbose = verbose
        #: Whether a failure ends the job: on this host, or on another host. `_verdict`: the decision about a restart.
        self._failing = self._failing_elsewhere = False
        self._verdict: Verdict | None = None
        # State of an elastic job, one attribute each: whether the job is elastic, living members of its group, lost
        # ranks, time to request restarts for lost ranks, ranks with a requested restart, dismissed replacements, and
        # time to dismiss replacements that have no group to join.
        self._elastic = False
        self._members: set[int] = set()
        self._lost: set[int] = set()
        self._replacement = inf
        self._asked: set[int] = set()
        self._dismissed: set[int] = set()
        self._dismissal = inf
        self._elsewhere: Mapping[int, HostState] = {}
        self._reported_state: HostState | None = None

    def run(self) -> _Outcome:
        """Start all ranks, wait for their end, and return the outcome."""
        try:
            for rank in self._program.ranks:
                self._start(RankStart(rank, self._number, joins=False))
            while self._running or (not self._is_signalled and (self._ranks_to_replace() or self._verdict is None)):
                self._report_state()
                self._handle_next()
        finally:
            for process in self._processes:
                process.kill()
            self._shutdown.close()
            deadline = time.monotonic() + DRAIN
            for process in self._processes:
                process.drain(deadline)
        ending = self._make_outcome()
        if ending.verdict.restarts is not None:
            for process in self._processes:
                process.kill_children()
        return ending

    def _start(self, start: RankStart) -> None:
        process = self._program.start(start, self._events.put)
        self._processes.append(process)
        self._running[start.rank] = process

    def _handle_next(self) -> None:
        """Wait for the next event or deadline, and handle it."""
        steps: list[tuple[float, Callable[[], None]]] = [
            (self._replacement, self._request_restarts),
            (self._dismissal, self._dismiss_remaining_ranks),
            (self._deadline, self._on_deadline),
            (self._end, self._on_deadline),
            (self._shutdown.report_at, self._report_running),
            (self._shutdown.kill_at, self._kill_running),
        ]
        due, step = min(steps, key=itemgetter(0))
        try:
            event = self._events.get(timeout=None if due == inf else max(0.0, due - time.monotonic()))
        except queue.Empty:
            step()
            return
        if isinstance(event, signal.Signals):
            self._on_signal(event)
        elif isinstance(event, Report | Exit):
            self._on_rank_event(event)
        elif isinstance(event, ElasticReport):
            self._elastic = True
            self._members.add(event.rank)
        elif isinstance(event, RestartGrant):
            self._replace(event)
        elif isinstance(event, Notice):
            write_stderr([f"aiocoll run: {event.text}"])
        elif isinstance(event, OtherHosts):
            self._elsewhere = {host: state for host, state in event.states.items() if state.restarts == self._number}
            if any(state.phase in (Phase.FAILS, Phase.FAILED) for state in self._elsewhere.values()):
                self._on_failure_elsewhere()
        else:
            self._verdict = event
            self._on_failure_elsewhere()
        self._look_for_members()

    def _report_state(self) -> None:
        why = ""
        if self._shutdown.signal is not None:
            phase, why = Phase.QUITS, f"was stopped by {self._shutdown.signal.name}"
        elif self._running or self._ranks_to_replace():
            phase = Phase.FAILS if self._failing else Phase.RUNS
        else:
            to_blame = self._find_culprit()
            phase = Phase.ENDED if to_blame is None else Phase.FAILED
            if to_blame is not None and to_blame.degree < 2 and to_blame.time <= self._stopped:
                why = format_headline(to_blame)
        well = any(outcome.exit is not None and not outcome.failed for outcome in self._outcomes.values())
        state = HostState(self._number, phase, self._elastic, len(self._members), well, why)
        if state != self._reported_state:
            self._reported_state = state
            self._restarts.report(state)

    def _find_culprit(self) -> RankOutcome | None:
        outcomes = {rank: outcome for rank, outcome in self._outcomes.items() if rank not in self._dismissed}
        return find_culprit(outcomes, self._stopped)

    def _make_outcome(self) -> _Outcome:
        to_blame, verdict, number = self._find_culprit(), self._verdict or Verdict(None), self._shutdown.signal
        summary: Iterable[str] = ()
        if to_blame is None:
            code, lines = int(bool(verdict.why)), []
        elif number is not None:
            stopped = f"stopped by {number.name}"
            lines = list(format_interruption(self._outcomes, self._shutdown.began, self._verbose))
            summary = (stopped, *_messages(lines))
            return _Outcome(128 + number, [*lines, f"aiocoll run: {stopped}"], Verdict(None), summary)
        else:
            elsewhere = self._failing_elsewhere and to_blame.time > self._stopped
            code = 1 if elsewhere else to_blame.status or 1
            lines = list(final_lines(self._outcomes, None if elsewhere else to_blame, self._stuck, self._verbose))
            summary = _messages(lines) if elsewhere else summarize_ends(self._outcomes, to_blame, self._stuck)
        summary = (*filter(None, [verdict.why]), *summary)
        if verdict.restarts is not None:
            why = f"{verdict.why}; " if verdict.why else ""
            restart = f"restart {verdict.restarts} of {self._restarts.allowed}"
            lines.append(f"aiocoll run: {why}all ranks are started again ({restart})")
        elif verdict.why:
            lines.append(f"aiocoll run: {verdict.why}")
        return _Outcome(code, lines, verdict, summary)

    # -- failures

    def _on_rank_event(self, event: Report | Exit) -> None:
        outcome = self._outcomes[event.rank]
        if isinstance(event, Exit):
            outcome.exit = event
            process = self._running.pop(event.rank)
            self._members.discard(event.rank)
            if outcome.failed and self._restarts.allowed:
                process.kill_children()  # the replacement needs the ports and devices of these children
        else:
            outcome.report = event
        if not outcome.failed:
            return
        if self._may_replace(event.rank):
            if isinstance(event, Exit):
                self._lost.add(event.rank)
                self._replacement = min(self._replacement, time.monotonic() + SETTLE)
            return
        if isinstance(event, Exit) and not self._is_signalled:
            self._end = min(self._end, time.monotonic() + RELEASE + GRACE)
        self._fail()

    def _fail(self) -> None:
        """End all ranks after the failure of a rank."""
        self._cancel_replacements()
        if not self._is_signalled and self._stopped == inf:  # otherwise all ranks are ending already
            self._failing = True
            self._deadline = min(self._deadline, time.monotonic() + RELEASE)

    def _on_failure_elsewhere(self) -> None:
        if self._running and not self._failing_elsewhere and not self._is_signalled:
            self._end = min(self._end, time.monotonic() + RELEASE + GRACE)
            if self._stopped == inf:
                self._deadline = min(self._deadline, time.monotonic() + RELEASE)
        self._failing_elsewhere = True
        self._cancel_replacements()

    def _on_deadline(self) -> None:
        if time.monotonic() >= self._end:
            self._deadline = self._end = inf
            self._kill(self._running)
        elif self._stopped == inf:
            self._stop()
        else:
            self._deadline = inf
            self._kill(self._ranks_without_report())
            # The programs of these ranks have failed, but their exit may take long, so show the tracebacks now.
            late = {rank: self._outcomes[rank] for rank in self._running.keys() - self._ranks_without_report()}
            if late:
                ranks = ", ".join(map(str, sorted(late)))
                write_stderr([f"aiocoll run: failed, but still running: rank {ranks}", *tracebacks(late)])

    def _stop(self) -> None:
        """Send SIGTERM to all ranks, except to ranks that have reported an exception, because these end anyway."""
        if all(outcome.degree == 2 for outcome in self._outcomes.values() if outcome.failed):
            self._stuck = self._make_stuck_finder(self._ranks_without_report())()
        self._stopped = time.monotonic()
        self._deadline = self._stopped + GRACE
        for rank in self._ranks_without_report():
            self._running[rank].send(signal.SIGTERM)

    def _make_stuck_finder(self, ranks: Iterable[int]) -> Callable[[], Mapping[int, str]]:
        """Return a function that finds the stuck ranks among `ranks`; any thread may call it."""
        return partial(find_stuck, {rank: self._running[rank].pid for rank in ranks}, self._program.top_dir)

    def _ranks_without_report(self) -> set[int]:
        return {rank for rank in self._running if self._outcomes[rank].report is None}

    # -- elastic groups

    def _may_replace(self, rank: int) -> bool:
        """Return whether the job continues, and a replacement of `rank` would find a group to join."""
        going_on = self._restarts.allowed and not self._is_ending()
        return bool(going_on) and self._is_elastic() and self._has_members(but=rank)

    def _is_ending(self) -> bool:
        return self._is_signalled or self._failing_elsewhere or min(self._stopped, self._deadline) != inf

    def _is_elastic(self) -> bool:
        return self._elastic or any(state.elastic for state in self._elsewhere.values())

    def _has_members(self, but: int = -1) -> bool:
        """Return whether the group has a living member other than `but`. A host without a report counts as a member."""
        members = {rank for rank in self._members - {but} if not self._outcomes[rank].failed}
        return bool(members) or any(
            state.members or (self._elastic and not state.elastic and not state.over)
            for state in self._elsewhere.values()
        )

    def _ranks_to_replace(self) -> set[int]:
        return self._lost | self._asked

    def _cancel_replacements(self) -> None:
        self._lost.clear()
        self._asked.clear()
        self._replacement = inf

    def _request_restarts(self) -> None:
        self._replacement = inf
        lost, self._lost = self._lost, set()
        self._asked |= lost
        for rank in lost:
            self._restarts.take(rank)

    def _replace(self, granted: RestartGrant) -> None:
        rank, number = granted
        if rank not in self._asked or self._is_signalled:
            return
        self._asked.discard(rank)
        if not number:
            self._end = min(self._end, time.monotonic() + RELEASE + GRACE)
            self._fail()
            return
        write_stderr(replaced(self._outcomes[rank], f"restart {number} of {self._restarts.allowed}"))
        self._outcomes[rank] = RankOutcome(rank)
        self._start(RankStart(rank, number, joins=True))

    def _look_for_members(self) -> None:
        """If no group member is left, schedule the end of all replacements; a later report of a member cancels it."""
        if self._is_ending() or not self._running or not self._is_elastic() or self._has_members():
            self._dismissal = inf
        elif self._dismissal == inf:
            self._dismissal = time.monotonic() + RELEASE

    def _dismiss_remaining_ranks(self) -> None:
        self._dismissal = inf
        ended = [*self._elsewhere.values(), *([self._reported_state] if self._reported_state is not None else [])]
        if not any(state.well for state in ended):
            self._fail()  # all members were lost at once
            return
        ranks = ", ".join(map(str, sorted(self._running)))
        write_stderr(
            [f"aiocoll run: stopped rank {ranks}: the other ranks have ended, so it cannot join them any more"]
        )
        self._dismissed |= self._running.keys()
        self._end = time.monotonic() + RELEASE + GRACE
        self._stop()

    # -- signals

    def _on_signal(self, number: signal.Signals) -> None:
        if number == signal.SIGUSR2:
            self._request_dumps()
        elif number == signal.SIGPIPE:
            # The output has no reader any more, as in `aiocoll run ... | head`: end the job, as SIGPIPE ends programs.
            self._shutdown.leave(number, GRACE)
            self._send(signal.SIGTERM)
        elif self._shutdown.take(number):
            self._send(number)
        else:
            self._kill_running(number)

    @property
    def _is_signalled(self) -> bool:
        return self._shutdown.signal is not None

    def _report_running(self) -> None:
        self._shutdown.report(self._running, self._make_stuck_finder(self._running))

    def _kill_running(self, again: signal.Signals | None = None) -> None:
        """Kill the ranks that still run, because of the time limit or because the signal `again` was repeated."""
        self._kill(self._running)
        self._shutdown.killed(self._running, again)

    def _request_dumps(self) -> None:
        """Send SIGUSR2 to the ranks, to request dumps, except to ranks that the signal would end."""
        for rank, process in sorted(self._running.items()):
            asked = (
                "dump requested"
                if process.send_signal(signal.SIGUSR2)
                else "no dump requested: it has no handler for SIGUSR2"
            )
            write_stderr([f"aiocoll run: rank {rank}, process {process.pid}: {asked}"])
        for rank in sorted(self._outcomes.keys() - self._running.keys()):
            write_stderr([f"aiocoll run: rank {rank}: its process has ended"])

    def _send(self, number: signal.Signals) -> None:
        for process in self._running.values():
            process.send(number)

    def _kill(self, ranks: Iterable[int]) -> None:
        for rank in ranks:
            self._running[rank].kill()
