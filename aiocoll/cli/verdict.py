"""Choice of the rank at fault, and the launcher's final messages about it."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import inf

from aiocoll.cli.rank import Exit, Report
from aiocoll.cli.top.formatting import rank_numbers

__all__ = [
    "RankOutcome",
    "final_lines",
    "find_culprit",
    "format_headline",
    "format_interruption",
    "replaced",
    "summarize_ends",
    "tracebacks",
]


@dataclass(slots=True)
class RankOutcome:
    """The way in which a rank ended.

    Attributes:
        report: the exception that its program did not catch, if any.
        exit: the end of its process, None while it runs.
    """

    rank: int
    report: Report | None = None
    exit: Exit | None = None

    @property
    def failed(self) -> bool:
        """Return whether the rank has failed: by an exception, an exit code, or a signal."""
        return self.report is not None or (self.exit is not None and self.exit.code != 0)

    @property
    def time(self) -> float:
        """Return the time of the rank's failure, or of its end; infinity while it runs."""
        known = self.report or self.exit
        return known.time if known is not None else inf

    @property
    def degree(self) -> int:
        """Return the degree of the rank's report (see `aiocoll.cli.start`); 0 for a rank without a report."""
        return 0 if self.report is None else self.report.degree

    @property
    def status(self) -> int:
        """Return the rank's exit status as a shell shows it: 128 plus n for signal n."""
        code = 0 if self.exit is None else self.exit.code
        if self.report is not None and code != -signal.SIGINT:
            # Use the reported code even if a signal ended the process: the signal may have come after the report.
            return 1 if self.report.code is None else self.report.code
        return 128 - code if code < 0 else code


def find_culprit(outcomes: Mapping[int, RankOutcome], stopped: float) -> RankOutcome | None:
    """Return the first rank that failed by itself, else the first rank that failed; None if no rank failed.

    Args:
        outcomes: of all ranks.
        stopped: time when the launcher ended the ranks. If a rank failed before, later failures do not count.
    """
    failed = [outcome for outcome in outcomes.values() if outcome.failed]
    failed = [outcome for outcome in failed if outcome.time <= stopped] or failed
    return min(failed, key=lambda outcome: (outcome.degree, outcome.time), default=None)


def final_lines(
    outcomes: Mapping[int, RankOutcome],
    to_blame: RankOutcome | None,
    stuck: Mapping[int, str],
    verbose: bool,
) -> Iterator[str]:
    """Yield the launcher's last lines, about ranks that failed in consequence, the rank at fault, and stuck ranks.

    Each error message appears once. Ranks with the same end share a line.

    Args:
        outcomes: of all ranks.
        to_blame: one of these, or None.
        stuck: the ranks that were stuck when others had failed because of another rank, each with the reason.
        verbose: whether every rank's traceback is shown.
    """
    others = {rank: each for rank, each in outcomes.items() if each is not to_blame and rank not in stuck}
    yield from _other_ends(others, to_blame)
    if verbose:
        yield from tracebacks(others)
    if to_blame is not None and to_blame.rank not in stuck:
        if to_blame.report is None or not to_blame.report.traceback:
            yield f"aiocoll run: rank {to_blame.rank} {_end(to_blame)}"
        else:
            yield f"aiocoll run: {_describe_culprit(to_blame, bool(stuck))}; exit code {to_blame.status}:"
            yield from tracebacks({to_blame.rank: to_blame})
    yield from (f"aiocoll run: {line}" for line in _stuck_ends(outcomes, stuck))


def summarize_ends(
    outcomes: Mapping[int, RankOutcome], to_blame: RankOutcome, stuck: Mapping[int, str]
) -> Iterator[str]:
    """Yield lines about how the ranks ended, the cause first, for viewers that show no tracebacks.

    Args:
        outcomes: of all ranks.
        to_blame: the rank at fault, one of these.
        stuck: the ranks that were stuck when others had failed because of another rank, each with the reason.
    """
    yield from _stuck_ends(outcomes, stuck)
    if to_blame.rank not in stuck:
        if to_blame.report is None or not to_blame.report.traceback:
            yield f"rank {to_blame.rank} {_end(to_blame)}"
        else:
            is_mismatch = to_blame.report.kind == "CollectiveMismatchError"
            cause = "ranks made different calls" if is_mismatch else _describe_culprit(to_blame, bool(stuck))
            yield f"{cause}: {to_blame.report.error_and_place}"
    others = {rank: each for rank, each in outcomes.items() if each is not to_blame and rank not in stuck}
    yield from (line.removeprefix("aiocoll run: ") for line in _other_ends(others, to_blame))


def format_headline(outcome: RankOutcome) -> str:
    """Return one line about how a rank failed."""
    report = outcome.report
    failed = f"failed: {report.error_and_place}" if report is not None and report.code is None else _end(outcome)
    return f"rank {outcome.rank} {failed}"


def replaced(outcome: RankOutcome, restart: str) -> Iterator[str]:
    """Yield the lines about a failed rank that a newcomer replaces: the failure, then its traceback."""
    yield f"aiocoll run: {format_headline(outcome)}; a newcomer is started in its place ({restart})"
    yield from tracebacks({outcome.rank: outcome})


def format_interruption(outcomes: Mapping[int, RankOutcome], began: float, verbose: bool) -> Iterator[str]:
    """Yield the final lines about the ranks of a job that a signal to the launcher has stopped.

    A rank that reported an exception has one line, shared with ranks that ended in the same way.

    Args:
        outcomes: of all ranks.
        began: time of the signal. The traceback of a failure before it is shown.
        verbose: whether every traceback is shown.
    """
    before = {rank: each for rank, each in outcomes.items() if each.report is not None and each.time < began}
    after = {rank: each for rank, each in outcomes.items() if each.report is not None and each.time >= began}
    yield from tracebacks(before)
    yield from _group_ends({rank: _describe_interruption(each) for rank, each in after.items()})
    if verbose:
        yield from tracebacks(after)


def tracebacks(outcomes: Mapping[int, RankOutcome]) -> Iterator[str]:
    """Yield the lines of each rank's traceback, prefixed with the rank; skip ranks without a traceback."""
    for rank, outcome in sorted(outcomes.items()):
        if outcome.report is not None:
            yield from (f"[{rank}] {line}" for line in outcome.report.traceback.splitlines())


def _describe_culprit(to_blame: RankOutcome, is_other_stuck: bool) -> str:
    """Return the words that introduce the traceback of the rank at fault."""
    rank, report = to_blame.rank, to_blame.report
    if to_blame.degree < 2:
        return f"rank {rank} failed first"
    if report is not None and report.kind == "CollectiveMismatchError":
        return f"ranks made different calls; rank {rank} was the first to report it"
    if report is not None and report.late:
        late = f"{'ranks' if len(report.late) > 1 else 'rank'} {rank_numbers(report.late)}"
        return f"rank {rank} was the first to report a timeout: it waited for {late} of group {report.group!r}"
    return f"rank {rank} was the first to report a failure" + (
        "" if is_other_stuck else ", and none here failed by itself"
    )


def _other_ends(outcomes: Mapping[int, RankOutcome], to_blame: RankOutcome | None) -> Iterator[str]:
    """Yield lines about how the other ranks ended, without repeating exception messages."""
    is_explained = to_blame is not None and to_blame.degree < 2
    shown = {to_blame.report.error} if to_blame is not None and to_blame.report is not None else set()
    first: dict[str, str] = {}
    lines = {}
    for rank, outcome in sorted(outcomes.items()):
        report = outcome.report
        brief = False
        if report is not None:
            place = first.setdefault(report.error, report.place)
            is_repeated = report.error in shown or report.place != place
            brief = is_repeated or (is_explained and outcome.degree == 2)
        lines[rank] = _end(outcome, brief)
    yield from _group_ends(lines)


def _group_ends(ends: Mapping[int, str]) -> Iterator[str]:
    """Yield one line for each group of ranks that ended in the same way."""
    ranks: dict[str, list[int]] = {}
    for rank, end in sorted(ends.items()):
        ranks.setdefault(end, []).append(rank)
    for end, found in ranks.items():
        if len(found) == 1:
            yield f"aiocoll run: rank {found[0]} {end}"
        else:
            yield f"aiocoll run: ranks {rank_numbers(found)} {f'were {end[4:]}' if end.startswith('was ') else end}"


def _stuck_ends(outcomes: Mapping[int, RankOutcome], stuck: Mapping[int, str]) -> Iterator[str]:
    """Yield a line about each stuck rank: the reason, and how it ended."""
    for rank, reason in sorted(stuck.items()):
        yield f"rank {rank} was stuck: {reason}; it {_end(outcomes[rank])}"


def _describe_interruption(outcome: RankOutcome) -> str:
    report = outcome.report
    assert report is not None
    if report.kind != "KeyboardInterrupt" or report.code is not None:
        return _end(outcome)
    return f"was interrupted at {report.place}" if report.place else "was interrupted"


def _signal_name(number: int) -> str:
    """Return the name of a signal, or its number: most real-time signals have no name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _end(outcome: RankOutcome, brief: bool = False) -> str:
    """Return a text about how a rank ended; if `brief`, without the message of its exception."""
    report, end = outcome.report, outcome.exit
    if report is not None:
        error = report.kind_and_place if brief else report.error_and_place
        if report.code is not None:
            return f"exited with code {report.code}" + (f", after {error}" if report.error else "")
        if report.kind == "CollectiveMismatchError":
            return f"failed: {error}"  # no rank fails in consequence of another one: their calls differ
        return f"failed{' too' if report.degree < 2 else ' in consequence'}: {error}"
    assert end is not None
    if end.code >= 0:
        return f"exited with code {end.code}" if end.code else "exited with code 0"
    if end.by_launcher:
        return f"was ended by the launcher ({_signal_name(-end.code)})"
    return f"was killed by {_signal_name(-end.code)}"
