"""Who has not entered, who called something else: the questions ranks ask each other about an operation that waits.

An operation pending for 250 ms is reported to the group's coordinator, its lowest rank. The coordinator compares the
reports, asks the ranks that sent none, and answers with the ranks that have not entered. A rank that was asked about
an operation before it enters reports as soon as it does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from aiocoll.engine.disagreement import called, mismatch, opposed
from aiocoll.engine.operation import P2P, Operation, Terms, description
from aiocoll.errors import (
    CollectiveMismatchError,
    CollectiveTimeoutError,
    GroupError,
    GroupRevokedError,
    PeerLostError,
)

if TYPE_CHECKING:
    from aiocoll.engine.membership import Membership

__all__ = ["Diagnosis", "Record", "called", "cause_of", "error_from", "mismatch"]

#: Operations for which reports and answers are kept, the oldest ones first to go.
KEPT = 256

Description = dict[str, Any]


class Record(NamedTuple):
    """An operation this rank entered, kept for questions after its end."""

    op: int
    entered: float
    terms: Terms
    shape: tuple[int, ...]
    key: str | None
    seq: int | None

    def describe(self, rank: int) -> Description:
        """Say what `rank`, this one, called."""
        return description(rank, self.terms, self.shape, self.key, self.seq)


class Diagnosis:
    """The part of one membership that asks and answers."""

    def __init__(self, group: Membership) -> None:
        self._group = group
        # For each operation: what every rank called, or in words what it was last seen in.
        self._reports: dict[int, dict[int, Description | str]] = {}
        self._answers: dict[int, dict[int, str]] = {}
        #: Operations somebody asked about before this rank has entered them.
        self.asked: dict[int, None] = {}

    def find(self, op: int) -> Record | None:
        """Return the record of an operation, if it is remembered."""
        return next((Record._make(entry) for entry in reversed(self._group.history) if entry[0] == op), None)

    def report(self, operation: Operation) -> None:
        """Tell the coordinator about an operation that has been pending for a while, or that it has asked about."""
        operation.reported = True
        if not operation.id & P2P:
            coordinator = next(rank for rank in range(len(self._group.ranks)) if rank not in self._group.left)
            self._tell(coordinator, {"t": "report", "op": operation.id, "mine": operation.describe()})

    def missing(self, operation: Operation) -> tuple[list[int], str]:
        """Say which ranks have not entered, as far as this rank has learnt."""
        last = self._answers.get(operation.id)
        if last is None:
            return [], "the other ranks have not been asked yet, or rank 0, which collects the answers, is silent"
        if not last:
            return [], "every rank has entered it, but it is not complete"
        seen = ", ".join(f"rank {rank} ({words})" for rank, words in sorted(last.items()))
        return sorted(last), f"it waits for {seen}"

    # -- hearing

    def heard(self, peer: int, message: dict[str, Any]) -> None:
        """Take a message of `peer` (a rank of the group) about an operation."""
        handler = {
            "disagree": self._group.disputes.disagreed,
            "differ": self._group.disputes.differed,
            "report": self._reported,
            "query": self._queried,
            "absent": self._absent,
            "status": self._status,
        }[message["t"]]
        handler(peer, message)

    def _reported(self, peer: int, message: dict[str, Any]) -> None:
        op, theirs = message["op"], message["mine"]
        reports = self._collect(op)
        reports[peer] = theirs
        other = opposed(theirs, (known for known in reports.values() if isinstance(known, dict)))
        if other is not None:
            self._group.disagreement(other, theirs)
            return
        self._answer(op, reports)

    def _queried(self, peer: int, message: dict[str, Any]) -> None:
        record = self.find(message["op"])
        if record is not None:
            self._tell(peer, {"t": "report", "op": record.op, "mine": record.describe(self._group.rank)})
        else:
            _bounded(self.asked)[message["op"]] = None
            self._tell(peer, {"t": "absent", "op": message["op"], "last": self._last()})

    def _absent(self, peer: int, message: dict[str, Any]) -> None:
        reports = self._collect(message["op"])
        if not isinstance(reports.get(peer), dict):
            reports[peer] = message["last"]
            self._answer(message["op"], reports)

    def _status(self, peer: int, message: dict[str, Any]) -> None:
        _bounded(self._answers)[message["op"]] = dict(message["missing"])

    # -- coordinating

    def _collect(self, op: int) -> dict[int, Description | str]:
        reports = self._reports.get(op)
        if reports is None:
            reports = _bounded(self._reports)[op] = {}
            if (record := self.find(op)) is not None:
                reports[self._group.rank] = record.describe(self._group.rank)
        return reports

    def _answer(self, op: int, reports: dict[int, Description | str]) -> None:
        """Ask the ranks nothing is known of; tell those that wait who is missing."""
        for rank in range(len(self._group.ranks)):
            if rank not in reports:
                reports[rank] = "which has not answered"
                self._tell(rank, {"t": "query", "op": op})
        missing = [(rank, words) for rank, words in reports.items() if isinstance(words, str)]
        for rank, known in list(reports.items()):
            if isinstance(known, dict):
                self._tell(rank, {"t": "status", "op": op, "missing": missing})

    def _last(self) -> str:
        waiting = self._waiting()
        if not self._group.history:
            return f"in no operation yet{waiting}"
        record = Record._make(self._group.history[-1])
        age = self._group.endpoint.runtime.time() - record.entered
        return f"last in {called(record.describe(self._group.rank))}, {age:.1f} s ago{waiting}"

    def _waiting(self) -> str:
        """Name the newest message this rank waits for: it may be what keeps it from entering."""
        operation = next((each for each in reversed(self._group.pending) if each.id & P2P == P2P), None)
        return "" if operation is None else f"; waiting in {called(operation.describe())}"

    def _tell(self, rank: int, message: dict[str, Any]) -> None:
        if rank == self._group.rank:
            self.heard(rank, message)
        else:
            self._group.endpoint.control.tell(self._group.ranks[rank], {**message, "g": self._group.id})


V = TypeVar("V")


def _bounded(table: dict[int, V]) -> dict[int, V]:
    while len(table) >= KEPT:
        table.pop(next(iter(table)))
    return table


_CLASSES: dict[str, type[GroupError]] = {
    each.__name__: each
    for each in (CollectiveMismatchError, CollectiveTimeoutError, PeerLostError, GroupRevokedError, GroupError)
}


def cause_of(error: GroupError) -> dict[str, Any]:
    """Turn an error into plain data that travels."""
    return {
        "kind": type(error).__name__,
        "text": str(error),
        "op": error.op,
        "seq": error.seq,
        "group": error.group,
        "ranks": list(error.ranks),
        "how": getattr(error, "how", None),
    }


def error_from(cause: dict[str, Any], origin: BaseException | None = None) -> GroupError:
    """Turn plain data back into an error of the same class; `origin` becomes its cause."""
    kind = _CLASSES.get(cause["kind"], GroupError)
    fields = {"op": cause["op"], "seq": cause["seq"], "group": cause["group"], "ranks": cause["ranks"]}
    if kind is PeerLostError:
        fields["how"] = cause["how"]
    error = kind(cause["text"], **fields)
    error.__cause__ = origin
    return error
