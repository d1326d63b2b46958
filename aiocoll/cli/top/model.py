"""Content of `aiocoll top`: a verdict per group, the states of its ranks, and rates computed from two answers."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any, Final

from aiocoll.group.stats import OperationStats
from aiocoll.top.viewer import Process, State

__all__ = ["GroupView", "HostLoad", "KindView", "Model", "PendingView", "RankView"]

#: Seconds for which a group is still shown after its last rank has left.
KEPT: Final = 5.0
#: Maximum number of kinds of operations, and of pending operations, shown per group.
KINDS: Final = 6
PENDING: Final = 5
#: Number of request rounds in the rate history of a group.
HISTORY: Final = 60
#: A rank is late if others wait for it for at least this share of the time, and this many times longer than for any
#: other rank. In a healthy job with as many ranks as cores, shares of 46 % and 32 % on two ranks were measured.
LATE_SHARE: Final = 0.5
LATE_FACTOR: Final = 2.0
#: Minimum share of time in which a rank waits, for the verdict to blame a high load of the host.
WAIT_SHARE: Final = 0.2
#: Load average per core above which the host counts as overloaded.
OVERLOAD: Final = 1.5

_Kind = tuple[str, str | None, str]
_Histogram = dict[float, int]


@dataclass(frozen=True, slots=True)
class RankView:
    """A row about one rank of a group. Rates are None until the rank has answered twice.

    Attributes:
        rank: number of the rank in the group.
        process: process id; None if the rank is on another host.
        state: "ok"; "late": others wait for it in a collective; "blocked", "stopped", "silent": its process lives, but
            does not progress; "slow": other ranks report that it does not answer; "gone", "lost": its process is dead,
            or declared dead; "left", "closed": it has left the group; "revoked": the group has failed; "remote": on
            another host; "unknown": it has not answered yet.
        detail: more about the state, as text.
        ops: finished operations per second.
        nbytes: bytes of these, per second.
        p50: median of their times in seconds.
        p99: 99th percentile of their times in seconds.
        waited_for: share of the time in which others waited for it, averaged over the other ranks that count.
        waits: share of the time in which it waited for others.
        missing: number of pending collectives that others have entered and this rank has not.
        pending: number of operations in flight.
        oldest: age of the oldest of these in seconds.
    """

    rank: int
    process: int | None
    state: str
    detail: str
    ops: float | None
    nbytes: float | None
    p50: float | None
    p99: float | None
    waited_for: float | None
    waits: float | None
    missing: int
    pending: int
    oldest: float


@dataclass(frozen=True, slots=True)
class KindView:
    """A row about one kind of operation in a group: rates of the busiest rank, and percentiles of times."""

    op: str
    algorithm: str | None
    transport: str
    ops: float
    nbytes: float
    p50: float | None
    p99: float | None


@dataclass(frozen=True, slots=True)
class PendingView:
    """An operation in flight, as one or several ranks report it.

    Attributes:
        op: name of the operation.
        ranks: ranks that have entered it.
        seconds: age of the oldest of them.
        missing: ranks that are known not to have entered it.
        site: the line of the program that called one of them.
    """

    op: str
    ranks: tuple[int, ...]
    seconds: float
    missing: tuple[int, ...]
    site: str


@dataclass(frozen=True, slots=True)
class GroupView:
    """Everything that `aiocoll top` shows about a group.

    Attributes:
        name: name of the group.
        size: number of ranks.
        state: "open", "revoked" or "closed".
        cause: the cause if it was revoked, else None.
        counted: whether its ranks count their operations.
        ops: operations per second of the rank with most.
        nbytes: bytes per second of the rank with most.
        ranks: its ranks; first those that others wait for most.
        kinds: kinds of operations; first those that take most time.
        pending: the oldest pending operations.
        verdict: the state of the group in one sentence.
        culprits: the ranks that the verdict blames.
        history: operations per second in the last rounds, oldest first.
    """

    name: str
    size: int
    state: str
    cause: str | None
    counted: bool
    ops: float | None
    nbytes: float | None
    ranks: tuple[RankView, ...]
    kinds: tuple[KindView, ...]
    pending: tuple[PendingView, ...]
    verdict: str = ""
    culprits: tuple[int, ...] = ()
    history: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class HostLoad:
    """The CPU load of this host.

    Attributes:
        average: load average of the last minute: processes that run or wait for a core.
        cores: number of cores that this process may use.
    """

    average: float
    cores: int

    @property
    def is_high(self) -> bool:
        """Return whether ranks have to wait for cores."""
        return self.average > OVERLOAD * self.cores


@dataclass(slots=True)
class _Report:
    """The last two answers of a rank about one of its groups."""

    process: Process
    now: dict[str, Any]
    before: dict[str, Any] | None = None
    #: Share of the time between both answers in which the rank waited: for each rank, and for any. None if unknown.
    waited: dict[int, float] | None = None
    waits: float | None = None

    @property
    def seconds(self) -> float:
        """Return the seconds between the last two answers of the rank."""
        return 0.0 if self.before is None else self.now["time"] - self.before["time"]


@dataclass(slots=True)
class _Group:
    reports: dict[int, _Report] = field(default_factory=dict)
    #: Seconds of unfinished waits that are already counted, by waiting rank; see `_measure_waits`.
    ahead: dict[int, dict[int, float]] = field(default_factory=dict)
    seen: float = 0.0
    has_news: bool = False
    history: deque[float] = field(default_factory=lambda: deque(maxlen=HISTORY))


class Model:
    """A store of the last answers of all ranks, which computes the group views that `aiocoll top` shows."""

    def __init__(self) -> None:
        self._groups: dict[tuple[str, int], _Group] = {}
        self._answers: dict[int, float] = {}

    def look(self, processes: Iterable[Process], now: float, load: HostLoad | None = None) -> list[GroupView]:
        """Add the answers of a round of requests, and return the views of all groups.

        Args:
            processes: the processes that received a request.
            now: time on the clock of their answers.
            load: load of this host.
        """
        by_number = {process.number: process for process in processes}
        for process in by_number.values():
            if self._answers.get(process.number) != process.answered:
                self._answers[process.number] = process.answered
                for answer in process.groups:
                    if "error" not in answer:
                        self._take(process, answer)
        for key, group in list(self._groups.items()):
            if any(_is_shown(key, report) for report in group.reports.values()):
                group.seen = now
            elif now - group.seen > KEPT:
                del self._groups[key]
        return [_group_view(key, group, by_number, now, load) for key, group in sorted(self._groups.items())]

    def _take(self, process: Process, answer: dict[str, Any]) -> None:
        group = self._groups.setdefault((answer["name"], answer["id"]), _Group())
        group.has_news = True
        known = group.reports.get(answer["rank"])
        is_same = known is not None and known.process is process and known.now["time"] < answer["time"]
        report = _Report(process, answer, known.now if known is not None and is_same else None)
        _measure_waits(report, group.ahead.setdefault(answer["rank"], {}))
        group.reports[answer["rank"]] = report


def _is_shown(key: tuple[str, int], report: _Report) -> bool:
    """Return whether a rank is still shown: it is in the group, and its process lives."""
    process = report.process
    if process.state in (State.GONE, State.CLOSED):
        return False
    return any((answer.get("name"), answer.get("id")) == key for answer in process.groups)


def _group_view(
    key: tuple[str, int], group: _Group, processes: Mapping[int, Process], now: float, load: HostLoad | None
) -> GroupView:
    reports = group.reports
    any_answer = next(iter(reports.values())).now
    size = any_answer["size"]
    alive = [each for each in reports.values() if _is_shown(key, each)]
    waited_for, missing = _waiting_shares(alive)
    states = _States(key, reports, alive, any_answer["processes"], processes)
    ranks = [_rank_view(rank, reports.get(rank), states, now, waited_for, missing) for rank in range(size)]
    ranks.sort(
        key=lambda each: (
            -_state_priority(each),
            -each.missing,
            -(each.waited_for or 0.0),
            each.waits or 0.0,
            each.rank,
        )
    )
    cause = next((each.now["cause"] for each in reports.values() if each.now["cause"]), None)
    ops = max((each.ops for each in ranks if each.ops is not None), default=None)
    if ops is not None and group.has_news:
        group.history.append(ops)
    group.has_news = False
    pending = tuple(_pending(alive))
    verdict, culprits = _assess_group(ranks, pending, cause, bool(alive), load)
    return GroupView(
        name=key[0],
        size=size,
        state="closed" if not alive else "open" if cause is None else "revoked",
        cause=cause,
        counted=any(each.now["counted"] for each in reports.values()),
        ops=ops,
        nbytes=max((each.nbytes for each in ranks if each.nbytes is not None), default=None),
        ranks=tuple(ranks),
        kinds=tuple(_kinds(alive)),
        pending=pending,
        verdict=verdict,
        culprits=culprits,
        history=tuple(group.history),
    )


# -- the verdict


def _assess_group(
    ranks: Sequence[RankView],
    pending: Sequence[PendingView],
    cause: str | None,
    is_open: bool,
    load: HostLoad | None,
) -> tuple[str, tuple[int, ...]]:
    """Return the verdict on a group and the ranks that it blames; `ranks` begins with the worst."""
    worst = ranks[0]
    same = tuple(sorted(each.rank for each in ranks if each.state == worst.state))
    waited = next((each for each in pending if set(each.missing) & set(same)), None)
    waits = "" if waited is None else f"; {_waiters(waited)}"
    # Omit the callers of the line that blocks the loop: the notes below the table show them.
    detail = f": {worst.detail.partition(', called from')[0]}" if worst.detail and len(same) == 1 else ""
    if not is_open:
        if worst.state in ("stopped", "silent"):
            return f"{_name(same)} {worst.state}{detail}; the other ranks have closed the group", same
        return "all ranks have closed the group", ()
    if cause is not None:
        return f"the group has failed: {cause}", same if _state_priority(worst) else ()
    if _state_priority(worst):
        return f"{_name(same)} {worst.state}{detail}{waits}", same
    if worst.state == "late" and waited is not None:
        return f"{_name(same)} late{waits}", same
    counted = [each.waited_for for each in ranks if each.waited_for is not None]
    if all(each.ops is None for each in ranks) or not counted:
        return "measuring: rates follow with the next answers", ()
    others = sorted((each.waited_for or 0.0 for each in ranks if each is not worst), reverse=True)
    most, second = worst.waited_for or 0.0, others[0] if others else 0.0
    if most >= LATE_SHARE and most >= LATE_FACTOR * second and (worst.waits or 0.0) <= most / LATE_FACTOR:
        return f"{_name((worst.rank,))} slower than the others: they wait for it {most * 100:.0f} % of the time", (
            worst.rank,
        )
    if load is not None and load.is_high and any((each.waits or 0.0) >= WAIT_SHARE for each in ranks):
        return f"no rank is late; the ranks wait for a core (load {load.average:.1f} on {load.cores} cores)", ()
    return "healthy: no rank is late", ()


def _name(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]} is"
    return f"ranks {', '.join(map(str, ranks[:8]))}{', …' if len(ranks) > 8 else ''} are"


def _waiters(waited: PendingView) -> str:
    number = len(waited.ranks)
    return f"{number} rank{'s have' if number > 1 else ' has'} waited {waited.seconds:.1f} s in {waited.op}"


# -- waits


def _waiting_shares(reports: Sequence[_Report]) -> tuple[dict[int, float] | None, dict[int, int]]:
    """Return two maps by rank: the average share of time in which others waited for it, and its missed calls.

    The shares are None before there are two answers.
    """
    waited: dict[int, float] = {}
    missing: dict[int, int] = {}
    for report in reports:
        for rank, _, _, missing_in in report.now["peers"]:
            missing[rank] = max(missing.get(rank, 0), missing_in)
        for rank, share in (report.waited or {}).items():
            waited[rank] = waited.get(rank, 0.0) + share
    counting = [each.now["rank"] for each in reports if each.waited is not None]
    if not counting:
        return None, missing
    return {rank: share / max(1, sum(each != rank for each in counting)) for rank, share in waited.items()}, missing


def _measure_waits(report: _Report, ahead: dict[int, float]) -> None:
    """Compute the attributes `waited` and `waits` of a report: the rank's waits since its previous answer.

    The rank itself counts a wait only when the call ends. A wait of ten seconds would then appear as 1000 % in its last
    second. Instead it appears as 100 % in each of the ten seconds: waits in flight are counted in advance, and
    subtracted when the rank counts them.

    Args:
        report: the report of the rank.
        ahead: seconds counted in advance, by the rank that this rank waits for. This function updates them.
    """
    if report.before is None or not report.now["counted"]:
        return
    before = {rank: seconds for rank, _, seconds, _ in report.before["peers"]}
    waited: dict[int, float] = {}
    for rank, _, seconds, _ in report.now["peers"]:
        ended = max(0.0, seconds - before.get(rank, 0.0))
        known = min(ended, ahead.get(rank, 0.0))
        ahead[rank] = ahead.get(rank, 0.0) - known
        waited[rank] = ended - known
    oldest = next((each for each in report.now["in_flight"] if each["missing"]), None)
    lasting = 0.0 if oldest is None else min(oldest["seconds"], report.seconds)
    if oldest is None:
        ahead.clear()
    else:
        for rank in oldest["missing"]:
            waited[rank] = waited.get(rank, 0.0) + lasting
            ahead[rank] = ahead.get(rank, 0.0) + lasting
    report.waited = {rank: seconds / report.seconds for rank, seconds in waited.items()}
    several = 0.0 if oldest is None else (len(oldest["missing"]) - 1) * lasting
    report.waits = (sum(waited.values()) - several) / report.seconds


class _States:
    """The states of a group's ranks, derived from all reports and from the states of their processes."""

    def __init__(
        self,
        key: tuple[str, int],
        reports: dict[int, _Report],
        alive: Sequence[_Report],
        numbers: Sequence[int | None],
        processes: Mapping[int, Process],
    ) -> None:
        self._key = key
        #: Process id of each rank; None for a rank on another host.
        self._numbers = numbers
        self._processes = processes
        self._missing = {rank for each in alive for rank, _, _, missing in each.now["peers"] if missing}
        self._slow = {rank: (seconds, state) for each in alive for rank, seconds, state in each.now["slow"]}
        self._lost = {rank: (how, text) for each in reports.values() for rank, how, text in each.now["lost"]}
        self._left = {rank for each in reports.values() for rank in each.now["left"]}

    def process(self, rank: int, report: _Report | None) -> int | None:
        """Return the process id of a rank; None if it is on another host."""
        return self._numbers[rank] if report is None else report.process.number

    def of(self, rank: int, report: _Report | None, now: float) -> tuple[str, str]:
        """Return the state of a rank, and details about it as text."""
        number = self._numbers[rank]
        process = report.process if report is not None else None if number is None else self._processes.get(number)
        if process is not None:
            ever = process.answered > -inf
            silent = f"no answer for {max(0.0, now - process.answered):.0f} s" if ever else "no answer yet"
            if process.state == State.GONE and rank not in self._left:
                return "gone", f"process {process.number} is gone"
            if process.state == State.STOPPED:
                return "stopped", f"process {process.number} is stopped, {silent}"
            if process.state == State.SILENT:
                return "silent", f"process {process.number} lives and does not answer: {silent}"
        if report is not None:
            answer = report.now
            if not _is_shown(self._key, report):
                return "closed", "it has closed the group"
            if answer["blocked"] is not None:
                return (
                    "blocked",
                    f"its event loop has been blocked for {answer['blocked'][0]:.1f} s, at {answer['blocked'][1]}",
                )
        if rank in self._lost:
            how, text = self._lost[rank]
            return "lost", f"{how}: {text}"
        if rank in self._left:
            return "left", "it has left the group"
        if rank in self._slow:
            seconds, state = self._slow[rank]
            return "slow", f"it has not answered the others for {seconds:.1f} s{f', {state}' if state else ''}"
        if report is None:
            return ("remote", "on another host") if number is None else ("unknown", "it has not answered yet")
        if report.now["cause"] is not None:
            return "revoked", "the group has failed"
        return ("late", "") if rank in self._missing else ("ok", "")


def _state_priority(rank: RankView) -> int:
    return {"gone": 3, "lost": 3, "stopped": 2, "blocked": 2, "silent": 2, "slow": 2}.get(rank.state, 0)


def _rank_view(
    rank: int,
    report: _Report | None,
    states: _States,
    now: float,
    waited_for: dict[int, float] | None,
    missing: dict[int, int],
) -> RankView:
    state, detail = states.of(rank, report, now)
    running = report is not None and state in ("ok", "late", "blocked", "slow", "revoked")
    ops = nbytes = waits = p50 = p99 = None
    if report is not None and running and report.seconds > 0 and report.now["counted"]:
        counts = _operations_between_reports(report)
        calls = sum(sum(histogram.values()) for histogram, _ in counts.values())
        ops = calls / report.seconds
        nbytes = sum(each for _, each in counts.values()) / report.seconds
        p50, p99 = _quantiles(histogram for histogram, _ in counts.values())
        waits = report.waits
    return RankView(
        *(rank, states.process(rank, report), state, detail, ops, nbytes, p50, p99),
        waited_for=None if waited_for is None else waited_for.get(rank, 0.0),
        waits=waits,
        missing=missing.get(rank, 0),
        pending=0 if report is None or not running else report.now["pending"],
        oldest=0.0 if report is None or not running else report.now["oldest"],
    )


# -- operations


def _operations_between_reports(report: _Report) -> dict[_Kind, tuple[_Histogram, float]]:
    """Return for each kind the time histogram and the byte count of operations that ended between two answers."""
    found: dict[_Kind, tuple[_Histogram, float]] = {}
    assert report.before is not None
    before = {tuple(row[:3]): row for row in report.before["operations"]}
    for op, algorithm, transport, _, _, nbytes, _, histogram in report.now["operations"]:
        old = before.get((op, algorithm, transport))
        counts = dict(histogram)
        if old is not None:
            nbytes -= old[5]
            for bound, calls in old[7]:
                counts[bound] -= calls
        counts = {bound: calls for bound, calls in counts.items() if calls > 0}
        if counts:
            found[op, algorithm, transport] = counts, nbytes
    return found


def _quantiles(histograms: Iterable[_Histogram]) -> tuple[float | None, float | None]:
    merged: _Histogram = {}
    for histogram in histograms:
        for bound, calls in histogram.items():
            merged[bound] = merged.get(bound, 0) + calls
    stats = OperationStats("", None, "", sum(merged.values()), 0, 0, 0.0, tuple(sorted(merged.items())))
    return stats.p50, stats.p99


def _kinds(reports: Sequence[_Report]) -> list[KindView]:
    rates: dict[_Kind, tuple[float, float]] = {}
    histograms: dict[_Kind, list[_Histogram]] = {}
    for report in reports:
        if report.seconds <= 0:
            continue
        for kind, (histogram, nbytes) in _operations_between_reports(report).items():
            most = rates.get(kind, (0.0, 0.0))
            calls = sum(histogram.values())
            rates[kind] = max(most[0], calls / report.seconds), max(most[1], nbytes / report.seconds)
            histograms.setdefault(kind, []).append(histogram)
    views = [KindView(*kind, *rates[kind], *_quantiles(each)) for kind, each in histograms.items()]
    return sorted(views, key=lambda each: (-each.ops * (each.p50 or 0.0), each.op))[:KINDS]


def _pending(reports: Sequence[_Report]) -> list[PendingView]:
    """Return the oldest operations in flight that are at least a quarter of a second old."""
    found: dict[tuple[str, int | None], list[tuple[int, dict[str, Any]]]] = {}
    for report in reports:
        for each in report.now["in_flight"]:
            if each["seconds"] >= 0.25:
                found.setdefault((each["op"], each["peer"]), []).append((report.now["rank"], each))
    views = [
        PendingView(
            op,
            tuple(sorted(rank for rank, _ in entries)),
            max(each["seconds"] for _, each in entries),
            tuple(sorted({rank for _, each in entries for rank in each["missing"]})),
            entries[0][1]["site"],
        )
        for (op, _), entries in found.items()
    ]
    return sorted(views, key=lambda each: -each.seconds)[:PENDING]
