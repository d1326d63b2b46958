"""Stall report: the state of one stalled operation at its coordinator, and the finding sent to the waiting ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

__all__ = ["DETAILED", "SLOW_AFTER", "Finding", "MissingRank", "StallReport"]

#: Maximum number of ranks that a finding describes in detail: enough for a human reader, and little to send to a
#: thousand ranks.
DETAILED = 16
#: Seconds without an answer after which a rank is reported as slow. A responsive loop answers within a millisecond.
SLOW_AFTER = 1.0
#: Seconds in which an answer may still be on its way: many times the round trip between hosts.
DOUBT = 0.025

Description = dict[str, Any]


class MissingRank(NamedTuple):
    """The state of one rank that other ranks may wait for. Durations end at the arrival of the finding.

    Attributes:
        rank: the rank in the group.
        entered: whether it has entered the operation.
        last: description of its last known operation; None if it has not answered.
        age: seconds since it entered that operation; None without an operation.
        silent: seconds since the first unanswered request to it; 0 if it has answered all requests.
        state: state of its process, as far as it is visible.
    """

    rank: int
    entered: bool
    last: str | None
    age: float | None
    silent: float
    state: str

    def describe(self, since: float) -> str:
        """Describe the state of this rank in a text, `since` seconds after the arrival of the finding."""
        known = self.last
        if known is not None and self.age is not None:
            known += f", {self.age + since:.1f} s ago"
        silence = f"which has not answered for {self.silent + since:.2f} s" if self.silent else None
        if silence is not None and self.state:
            silence += f", {self.state}"
        text = "; ".join(filter(None, (known, silence)))
        return f"rank {self.rank} ({text})" if text else f"rank {self.rank}"


class Finding(NamedTuple):
    """A coordinator's answer: all ranks that have not entered an operation, and details of missing and silent ranks."""

    missing: tuple[int, ...]
    known: tuple[MissingRank, ...]
    received: float

    def ranks(self, now: float) -> list[int]:
        """Return the ranks that cause the stall: those that have not entered, or, if all have, the silent ones."""
        doubtful = {each.rank for each in self.known if each.last is None and each.silent + now - self.received < DOUBT}
        return [rank for rank in self.missing if rank not in doubtful] or [
            each.rank for each in self.known if each.entered
        ]

    def describe(self, now: float) -> str:
        """Describe in a text the ranks that the operation waits for."""
        since = now - self.received
        absent = [each.describe(since) for each in self.known if not each.entered]
        silent = [each.describe(since) for each in self.known if each.entered]
        if not self.missing:
            text = "every rank has entered it, but it is not complete"
        else:
            text = f"it waits for {', '.join(absent)}"
            if len(self.missing) > len(absent):
                text += f" and {len(self.missing) - len(absent)} more"
        return f"{text}; it may also wait for {', '.join(silent)}" if silent else text


class StallReport:
    """The state of one stalled operation, as its coordinator knows it.

    Attributes:
        called: the call of each rank that has entered.
        absent: for each rank that has not entered: its last known operation, the age of that, and the time of its
            answer.
        queried: ranks that have not answered a request about the operation.
        again: the time from which requests may be repeated.
        due: whether an answer to the waiting ranks is scheduled.
    """

    __slots__ = ("absent", "again", "called", "due", "queried")

    def __init__(self) -> None:
        self.again = 0.0
        self.queried: set[int] = set()
        self.called: dict[int, Description] = {}
        self.absent: dict[int, tuple[str, float | None, float]] = {}
        self.due = False

    def missing(self, world_size: int) -> list[int]:
        """Return the ranks that, as far as the coordinator knows, have not entered."""
        return [rank for rank in range(world_size) if rank not in self.called]

    def absences(
        self, missing: Sequence[int], silent: Mapping[int, float], state: Callable[[int], str], now: float
    ) -> list[MissingRank]:
        """Describe the missing ranks, and the ranks that have entered but are silent; at most `DETAILED` of each.

        Args:
            missing: ranks that have not entered.
            silent: for each silent rank, the time of the first unanswered request.
            state: describes the process of a rank; called for ranks that have been silent for long.
            now: the time.
        """
        slow = [rank for rank in silent if rank in self.called and now - silent[rank] >= SLOW_AFTER]
        found = []
        for rank in (*missing[:DETAILED], *sorted(slow)[:DETAILED]):
            last, age, answered = self.absent.get(rank, (None, None, now))
            quiet = now - silent[rank] if rank in silent else 0.0
            text = state(rank) if quiet >= SLOW_AFTER else ""
            found.append(
                MissingRank(rank, rank in self.called, last, None if age is None else age + now - answered, quiet, text)
            )
        return found
