"""Which rank is to blame, and the launcher's final messages."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import inf

from aiocoll.cli.rank import Exit, Report

__all__ = ["RankOutcome", "culprit", "headline", "replaced", "tracebacks", "words"]


@dataclass(slots=True)
class RankOutcome:
    """The outcome of one rank.

    Attributes:
        report: of the exception that its program did not catch, if any.
        exit: its end, if it has come.
    """

    rank: int
    report: Report | None = None
    exit: Exit | None = None

    @property
    def failed(self) -> bool:
        """Whether it has not ended well."""
        return self.report is not None or (self.exit is not None and self.exit.code != 0)

    @property
    def time(self) -> float:
        """When it failed."""
        known = self.report or self.exit
        return known.time if known is not None else inf

    @property
    def degree(self) -> int:
        """The degree of its report (see `aiocoll.cli.start`); a rank without one has failed by itself."""
        return 0 if self.report is None else self.report.degree

    @property
    def status(self) -> int:
        """The exit status that it stands for: a shell's."""
        code = 0 if self.exit is None else self.exit.code
        if self.report is not None and code != -signal.SIGINT:
            # On its way out it may have been ended by others.
            return 1 if self.report.code is None else self.report.code
        return 128 - code if code < 0 else code


def culprit(outcomes: Mapping[int, RankOutcome], stopped: float) -> RankOutcome | None:
    """Return the rank that failed first by itself, else the first of all; None if none did.

    Args:
        outcomes: of all ranks.
        stopped: when the ranks were told to end: what came later came of that, if anything came before.
    """
    failed = [outcome for outcome in outcomes.values() if outcome.failed]
    failed = [outcome for outcome in failed if outcome.time <= stopped] or failed
    return min(failed, key=lambda outcome: (outcome.degree, outcome.time), default=None)


def words(outcomes: Mapping[int, RankOutcome], to_blame: RankOutcome | None, stuck: Mapping[int, str]) -> Iterator[str]:
    """Yield a line for each rank, then that to blame if it is here, with its traceback; ranks that were stuck last.

    Args:
        outcomes: of all ranks.
        to_blame: one of these, or None.
        stuck: the ranks that were stuck when others had failed because of another rank, each with the reason.
    """
    for rank, outcome in sorted(outcomes.items()):
        if outcome is not to_blame and rank not in stuck:
            yield f"aiocoll run: rank {rank} {_end(outcome)}"
    if to_blame is not None and to_blame.rank not in stuck:
        if to_blame.report is None or not to_blame.report.traceback:
            yield f"aiocoll run: rank {to_blame.rank} {_end(to_blame)}"
        else:
            reported = "was the first to report a failure"
            reported += "" if stuck else ", and none here failed by itself"
            first = "failed first" if to_blame.degree < 2 else reported
            yield f"aiocoll run: rank {to_blame.rank} {first}; exit code {to_blame.status}:"
            yield from tracebacks({to_blame.rank: to_blame})
    for rank, reason in sorted(stuck.items()):
        yield f"aiocoll run: rank {rank} was stuck: {reason}; it {_end(outcomes[rank])}"


def headline(outcome: RankOutcome) -> str:
    """Return how a rank failed, in one line."""
    report = outcome.report
    failed = f"failed: {report.error}" if report is not None and report.code is None else _end(outcome)
    return f"rank {outcome.rank} {failed}"


def replaced(outcome: RankOutcome, restart: str) -> Iterator[str]:
    """Yield how a rank failed in whose place a newcomer is started, its traceback last."""
    yield f"aiocoll run: {headline(outcome)}; a newcomer is started in its place ({restart})"
    yield from tracebacks({outcome.rank: outcome})


def tracebacks(outcomes: Mapping[int, RankOutcome]) -> Iterator[str]:
    """Yield the traceback of each rank that has one."""
    for rank, outcome in sorted(outcomes.items()):
        if outcome.report is not None:
            yield from (f"[{rank}] {line}" for line in outcome.report.traceback.splitlines())


def _signal_name(number: int) -> str:
    """Return what people call a signal."""
    try:
        return signal.Signals(number).name
    except ValueError:  # most real-time signals have none
        return f"signal {number}"


def _end(outcome: RankOutcome) -> str:
    report, end = outcome.report, outcome.exit
    if report is not None and report.code is not None:
        return f"exited with code {report.code}" + (f", after {report.error}" if report.error else "")
    if report is not None:
        return f"failed{' too' if report.degree < 2 else ' in consequence'}: {report.error}"
    assert end is not None
    if end.code >= 0:
        return f"exited with code {end.code}" if end.code else "ended well"
    if end.by_launcher:
        return f"was ended by the launcher ({_signal_name(-end.code)})"
    return f"was killed by {_signal_name(-end.code)}"
