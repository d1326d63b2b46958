"""Who has not entered, who called something else: the questions ranks ask each other about an operation that waits.

An operation pending for 250 ms is reported to the group's coordinator, its lowest rank. The coordinator compares the
reports, asks the ranks that sent none, and answers with the ranks that have not entered; a rank that was asked too
early reports as soon as it enters. A rank that sees a frame which does not fit sends its own description to the
frame's sender. That one knows both sides then, and tells the coordinator: it alone revokes, so that all ranks hear of
the same two.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from aiocoll.engine.disagreement import call, differences, forgotten
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

__all__ = ["Diagnosis", "Record", "cause_of", "error_from"]

#: Operations for which reports and answers are kept, the oldest ones first to go.
KEPT = 256
#: Seconds the coordinator has to revoke a group of whose disagreement it was told: its loop may be blocked, and the
#: contract gives one second in all.
INSIST_AFTER = 0.5

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
        self._disputed: set[int] = set()

    def find(self, op: int) -> Record | None:
        """Return the record of an operation, if it is remembered."""
        return next((Record._make(entry) for entry in reversed(self._group.history) if entry[0] == op), None)

    def disagree(self, peer: int, op: int, mine: Description) -> None:
        """A frame of `peer` does not fit what this rank called: let the peer name both sides."""
        if op in self._disputed:
            return
        self._disputed.add(op)
        note = {"t": "disagree", "op": op, "theirs": mine, "g": self._group.id}
        channel = self._group.channels[peer]
        if channel.link is not None:
            channel.say(note)
        else:
            self._tell(peer, note)

    def differ(self, one: Description, two: Description) -> None:
        """Two calls do not belong together: let the coordinator tell all ranks, or do it if the coordinator is slow."""
        if self._group.rank == self.coordinator:
            self._group.disagreement(one, two)
        else:
            self._tell(self.coordinator, {"t": "differ", "one": one, "two": two})
            self._group.endpoint.runtime.call_later(INSIST_AFTER, self._insist, one, two)

    @property
    def coordinator(self) -> int:
        """The lowest rank of the group that has not left it."""
        return next(rank for rank in range(len(self._group.ranks)) if rank not in self._group.left)

    def report(self, operation: Operation) -> None:
        """Tell the coordinator about an operation that has been pending for a while, or that it has asked about."""
        operation.reported = True
        if not operation.id & P2P:
            self._tell(self.coordinator, {"t": "report", "op": operation.id, "mine": operation.describe()})

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
            "disagree": self._disagreed,
            "differ": self._differed,
            "report": self._reported,
            "query": self._queried,
            "absent": self._absent,
            "status": self._status,
        }[message["t"]]
        handler(peer, message)

    def _disagreed(self, peer: int, message: dict[str, Any]) -> None:
        record = self.find(message["op"])
        rank = self._group.rank
        self.differ(
            forgotten(rank, message["op"]) if record is None else record.describe(rank),
            message["theirs"],
        )

    def _differed(self, peer: int, message: dict[str, Any]) -> None:
        self._group.disagreement(message["one"], message["two"])

    def _insist(self, one: Description, two: Description) -> None:
        """The coordinator is silent, and notes to others may go through it: use the links to those that have one."""
        group = self._group
        if group.cause is None and group.endpoint.groups.get(group.id) is group:
            group.disagreement(one, two)
            assert group.cause is not None
            for channel in group.channels:
                channel.say({"t": "revoke", "g": group.id, "cause": cause_of(group.cause)})

    def _reported(self, peer: int, message: dict[str, Any]) -> None:
        op, theirs = message["op"], message["mine"]
        reports = self._collect(op)
        reports[peer] = theirs
        for rank, known in reports.items():
            if isinstance(known, dict) and rank != peer and differences(known, theirs):
                self._group.disagreement(known, theirs)
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
        if not self._group.history:
            return "in no operation yet"
        record = Record._make(self._group.history[-1])
        age = self._group.endpoint.runtime.time() - record.entered
        return f"last in {call(record.describe(self._group.rank))}, {age:.1f} s ago"

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
