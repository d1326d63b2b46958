"""Stall detection: messages that find the ranks which have not entered an operation, or have made another call.

An operation pending for 250 ms is reported to the group's coordinator, its lowest rank, and then once a second. The
coordinator compares the reports and queries the ranks that sent none. It answers with the ranks that have not entered,
and with those that do not answer because their loop is blocked or their process is stopped. If the coordinator itself
does not answer, the report goes to the next rank. A rank that is queried before it enters the operation reports when
it enters.
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING, Any, TypeVar

from aiocoll.engine.failure.failure_detector import FailureDetector
from aiocoll.engine.failure.failures import timed_out_error
from aiocoll.engine.failure.mismatch import MismatchReports
from aiocoll.engine.failure.sender import Sender
from aiocoll.engine.failure.stall_report import DETAILED, SLOW_AFTER, Finding, MissingRank, StallReport
from aiocoll.engine.operations.base import Operation
from aiocoll.engine.operations.differences import called, find_mismatch
from aiocoll.engine.operations.signature import P2P
from aiocoll.log import RepeatLimiter, logger
from aiocoll.runtime import Runtime

if TYPE_CHECKING:
    from aiocoll.engine.communicator import Communicator
    from aiocoll.engine.journal import Journal

__all__ = ["StallInspector"]

#: Maximum number of operations for which reports and answers are kept. The oldest are dropped first.
KEPT = 256
#: Seconds between two stall reports of the oldest pending operation. So the known state of other ranks is at most this
#: old.
REPORT_AGAIN = 1.0
#: Minimum seconds between two rounds of queries about an operation. A little less than `REPORT_AGAIN`, so that the next
#: report of the same rank starts a new round.
ROUND = 0.9 * REPORT_AGAIN
#: Maximum seconds to wait for a coordinator's answer before the next rank becomes coordinator. For short timeouts, a
#: quarter of the timeout.
MAX_WAIT = 0.25
#: Seconds to collect the replies of other ranks before the waiting ranks are notified. The replies of a round arrive
#: together.
GATHER = 0.01

Description = dict[str, Any]


class StallInspector:
    """The stall reports, queries and answers of one group on one rank.

    Args:
        group: the group.
        journal: the record of this rank's calls.
        mismatches: the mismatch reports of the group.
        sender: sends messages to the other ranks.
        runtime: the clock.
        failure_detector: describes the processes of silent ranks.
    """

    def __init__(
        self,
        group: Communicator,
        journal: Journal,
        mismatches: MismatchReports,
        sender: Sender,
        runtime: Runtime,
        failure_detector: FailureDetector,
    ) -> None:
        self._group = group
        self._journal = journal
        self._mismatches = mismatches
        self._sender = sender
        self._now = runtime.time
        self._state = failure_detector.state
        # State of this rank as a waiting rank. By operation: the coordinator's last answer (`_findings`), and the
        # coordinator that has not answered yet, with the time of the report (`_asked`). By rank: the slow ranks, the
        # slow ranks that were logged, and the time of the last answer to this rank or to a coordinator.
        self._findings: dict[int, Finding] = {}
        self._asked: dict[int, tuple[int, float]] = {}
        self._slow: set[int] = set()
        self._slow_logged: set[int] = set()
        self._repeats = RepeatLimiter()
        self._answered: dict[int, float] = {}
        # State of this rank as a coordinator: the stall report of each operation. The times in `_silent` serve a
        # waiting rank, too: for each rank, the time of the first unanswered request.
        self._reports: dict[int, StallReport] = {}
        self._silent: dict[int, float] = {}
        #: Ranks that queried an operation before this rank entered it, by operation.
        self.asked_early: dict[int, set[int]] = {}

    # -- as a waiting rank

    def report(self, operation: Operation) -> float:
        """Report a long-pending operation to the coordinator; return the time at which the next report is due."""
        if operation.id & P2P:
            return inf
        now = self._now()
        silent = self._asked.get(operation.id)
        finding = self._findings.get(operation.id)
        if silent is None and finding is not None and now < finding.received + ROUND:
            return finding.received + REPORT_AGAIN
        rank = self._coordinator(None if silent is None else silent[0])
        _bounded(self._asked)[operation.id] = rank, now
        if rank != self._group.rank:
            self._silent.setdefault(rank, now)
        self._send(rank, {"t": "report", "op": operation.id, "mine": operation.describe()})
        return now + (min(MAX_WAIT, operation.timeout / 4) if operation.id in self._asked else REPORT_AGAIN)

    def entered(self, operation: Operation) -> None:
        """Notify the ranks that queried `operation` before this rank had entered the operation."""
        for peer in self.asked_early.pop(operation.id, ()):
            self._send(peer, {"t": "report", "op": operation.id, "mine": operation.describe(), "asked": True})

    def is_unanswered(self, operation: Operation) -> bool:
        """Return whether the coordinator has not yet answered the report about an operation."""
        return operation.id in self._asked

    def finding(self, op: int) -> Finding | None:
        """Return the coordinator's last finding about an operation; None if there is none."""
        return self._findings.get(op)

    def missing(self, operation: Operation) -> tuple[list[int], str]:
        """Return the ranks that, as far as is known, have not entered an operation, and a text about these ranks."""
        finding = self._findings.get(operation.id)
        if finding is not None:
            return finding.ranks(self._now()), finding.describe(self._now())
        asked = self._asked.get(operation.id)
        text = operation.describe_wait() or "no rank has answered yet"
        if asked is not None:
            text = f"rank {asked[0]} has not answered the stall report of {self._now() - asked[1]:.2g} s ago"
        if awaited := operation.awaited_ranks():
            text += f"; data of rank(s) {', '.join(map(str, awaited[:DETAILED]))} has not arrived completely"
        return [], text

    def timed_out(self, operation: Operation) -> None:
        """Revoke the group on all ranks, because a collective has timed out. The error names the missing ranks."""
        missing, detail = self.missing(operation)
        self._group.revoke(timed_out_error(self._group.name, self._group.rank, operation, missing, detail))

    def warn(self, operation: Operation, age: float) -> None:
        """Log that an operation has been pending for `age` seconds."""
        _, detail = self.missing(operation)
        logger.warning(
            "group %r, rank %d: %s, called as %s, has been waiting for %.1f s: %s",
            self._group.name,
            self._group.rank,
            operation.title(),
            called(operation.describe()),
            age,
            detail,
            extra=self._group.log_extra,
        )

    def _coordinator(self, silent: int | None) -> int:
        """Return the coordinator: the lowest rank that may answer, above the rank `silent`, which did not answer."""
        group = self._group
        first = 0 if silent is None else silent + 1
        return next((rank for rank in range(first, group.rank) if rank not in group.left), group.rank)

    def _on_status(self, peer: int, message: dict[str, Any]) -> None:
        """Handle the coordinator's answer: the missing ranks and the silent ranks of an operation."""
        op, now = message["op"], self._now()
        self._asked.pop(op, None)
        known = tuple(MissingRank(*each) for each in message["known"])
        _bounded(self._findings)[op] = Finding(tuple(message["missing"]), known, now)
        silent = {each.rank: each for each in known if each.silent}
        for rank in self._slow - silent.keys():
            self._slow.remove(rank)
            self._answered[rank] = now
            if rank in self._slow_logged:
                self._slow_logged.remove(rank)
                logger.info(
                    "group %r, rank %d: rank %d answers again",
                    self._group.name,
                    self._group.rank,
                    rank,
                    extra=self._group.log_extra,
                )
        if (operation := self._group.in_flight.find(op)) is not None:
            # Use the shorter silence: a rank may have answered this rank, but not the coordinator yet.
            seconds = {rank: min(each.silent, now - self._answered.get(rank, -inf)) for rank, each in silent.items()}
            slow = [rank for rank in silent if seconds[rank] >= SLOW_AFTER and rank not in self._slow]
            self._slow.update(slow)
            self._warn_of_slow([(silent[rank], seconds[rank]) for rank in slow], operation)

    def _warn_of_slow(self, ranks: list[tuple[MissingRank, float]], operation: Operation) -> None:
        """Log slow ranks in one warning, since a large group may have many."""
        logged = []
        for each, seconds in ranks:
            if (repeated := self._repeats.admit(each.rank, self._now())) is not None:
                self._slow_logged.add(each.rank)
                state = f", {each.state}" if each.state else ""
                logged.append(f"rank {each.rank} is slow: it has not answered for {seconds:.1f} s{state}{repeated}")
        if logged:
            logger.warning(
                "group %r, rank %d: %s; %s waits for it",
                self._group.name,
                self._group.rank,
                "; ".join(logged),
                called(operation.describe()),
                extra=self._group.log_extra,
            )

    # -- receiving

    def handle(self, peer: int, message: dict[str, Any]) -> None:
        """Handle a message of `peer` (a rank of the group) about an operation."""
        if "asked" in message or message["t"] == "status":
            self._silent.pop(peer, None)
            self._answered[peer] = self._now()
        elif peer in self._silent:
            self._silent[peer] = self._now()
        handler = {
            "disagree": self._mismatches.on_disagree,
            "differ": self._mismatches.on_differ,
            "report": self._on_report,
            "query": self._on_query,
            "absent": self._on_absent,
            "status": self._on_status,
        }[message["t"]]
        handler(peer, message)

    def _on_query(self, peer: int, message: dict[str, Any]) -> None:
        record = self._group.record(message["op"])
        if record is not None:
            answer = {"t": "report", "op": record.op, "mine": record.describe(self._group.rank)}
        else:
            self._record_early_query(message["op"], peer)
            answer = {"t": "absent", "op": message["op"], **self._last_operation()}
        self._send(peer, {**answer, "asked": True})

    # -- coordinating

    def _on_report(self, peer: int, message: dict[str, Any]) -> None:
        op, theirs = message["op"], message["mine"]
        report = self._get_report(op)
        report.called[peer] = theirs
        report.absent.pop(peer, None)
        if "asked" in message:
            report.queried.discard(peer)
        other = find_mismatch(theirs, report.called.values())
        if other is not None:
            self._mismatches.revoke(other, theirs)
            return
        if "asked" in message:
            self._schedule_answer(op, report)
        else:
            self._query_ranks(op, report, peer)
            self._send_status(op, report, [peer])

    def _on_absent(self, peer: int, message: dict[str, Any]) -> None:
        report = self._get_report(message["op"])
        report.queried.discard(peer)
        if peer not in report.called:
            report.absent[peer] = message["last"], message["age"], self._now()
            self._schedule_answer(message["op"], report)

    def _get_report(self, op: int) -> StallReport:
        report = self._reports.get(op)
        if report is None:
            report = _bounded(self._reports)[op] = StallReport()
        rank = self._group.rank
        if rank not in report.called:
            if (record := self._group.record(op)) is not None:
                report.called[rank] = record.describe(rank)
            else:
                last = self._last_operation()
                self._record_early_query(op, rank)
                report.absent[rank] = last["last"], last["age"], self._now()
        return report

    def _record_early_query(self, op: int, peer: int) -> None:
        """Record that `peer` (perhaps this rank itself) must be notified when this rank enters the operation."""
        if op not in self.asked_early:
            _bounded(self.asked_early)[op] = set()
        self.asked_early[op].add(peer)

    def _query_ranks(self, op: int, report: StallReport, reporter: int) -> None:
        """Query all ranks about an operation except the reporter and ranks already queried; at most once per round."""
        group = self._group
        now = self._now()
        if now < report.again:
            return
        report.again = now + ROUND
        before = len(report.queried)
        for rank in range(len(group.ranks)):
            if rank in group.left:
                report.absent.setdefault(rank, ("which has left", None, now))
            elif rank not in (group.rank, reporter) and rank not in report.queried:
                report.queried.add(rank)
                self._silent.setdefault(rank, now)
                self._send(rank, {"t": "query", "op": op})
        if len(report.queried) > before:
            self._schedule_overdue(op)

    def _schedule_overdue(self, op: int) -> None:
        """Schedule a check at the time when the next rank counts as slow."""
        now = self._now()
        due = [since + SLOW_AFTER for since in self._silent.values() if since + SLOW_AFTER > now]
        if due:
            # Wait a little longer, because clock rounding may make the measured silence slightly too short.
            self._group.call_later(min(due) + GATHER - now, self._on_overdue, op)

    def _on_overdue(self, op: int) -> None:
        """Notify the waiting ranks that another rank is slow."""
        report = self._reports.get(op)
        if report is not None and self._silent and self._group.is_usable():
            self._send_status(op, report, list(report.called))
            self._schedule_overdue(op)

    def _schedule_answer(self, op: int, report: StallReport) -> None:
        """Schedule one answer to all waiting ranks, after a delay in which replies of more ranks may arrive."""
        if not report.due:
            report.due = True
            self._group.call_later(GATHER, self._answer_waiting, op, report)

    def _answer_waiting(self, op: int, report: StallReport) -> None:
        report.due = False
        if self._group.is_usable():
            self._send_status(op, report, list(report.called))

    def _send_status(self, op: int, report: StallReport, ranks: list[int]) -> None:
        """Send the list of missing ranks to `ranks`."""
        group = self._group
        missing = report.missing(len(group.ranks))
        known = report.absences(missing, self._silent, lambda rank: self._state(group.ranks[rank]), self._now())
        for rank in ranks:
            self._send(rank, {"t": "status", "op": op, "missing": missing, "known": known})

    def _last_operation(self) -> dict[str, Any]:
        record = self._journal.last()
        if record is None:
            return {"last": f"{self._describe_wait()}in no operation yet", "age": None}
        last = f"{self._describe_wait()}last in {called(record.describe(self._group.rank))}"
        return {"last": last, "age": self._now() - record.entered}

    def _describe_wait(self) -> str:
        """Describe the newest message that this rank waits for, as a possible reason why it has not made a call."""
        operation = next((each for each in reversed(self._group.in_flight.pending) if each.id & P2P == P2P), None)
        return "" if operation is None else f"waiting in {called(operation.describe())}; "

    def _send(self, rank: int, message: dict[str, Any]) -> None:
        if rank == self._group.rank:
            self.handle(rank, message)
        else:
            self._sender.send_direct(rank, message)


V = TypeVar("V")


def _bounded(table: dict[int, V]) -> dict[int, V]:
    while len(table) >= KEPT:
        table.pop(next(iter(table)))
    return table
