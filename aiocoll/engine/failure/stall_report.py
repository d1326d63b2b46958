"""What a coordinator knows about one pending operation, and what it tells the ranks that wait for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

__all__ = ["DETAILED", "SLOW_AFTER", "Absence", "Finding", "StallReport"]

#: Ranks a finding describes in words: more than anybody reads, and few enough to send to a thousand ranks.
DETAILED = 16
#: Seconds a question may go unanswered before a rank is called slow: a responsive loop turns a thousand times
#: as often.
SLOW_AFTER = 1.0
#: Seconds in which an answer may still be in flight: many times the round trip between hosts.
DOUBT = 0.025

Description = dict[str, Any]


class Absence(NamedTuple):
    """What is known of one rank that others may wait for; times are relative to when the finding was received.

    Attributes:
        rank: in the group.
        entered: it has entered the operation.
        last: description of the operation it was last seen in; None if it has not answered.
        age: seconds since it entered that operation; None if there is none.
        silent: seconds since a question to it was asked that it has not answered; 0 if none.
        state: state of its process, as far as it is visible.
    """

    rank: int
    entered: bool
    last: str | None
    age: float | None
    silent: float
    state: str

    def describe(self, since: float) -> str:
        """Return a text, `since` seconds after the finding was received."""
        known = self.last
        if known is not None and self.age is not None:
            known += f", {self.age + since:.1f} s ago"
        silence = f"which has not answered for {self.silent + since:.2f} s" if self.silent else None
        if silence is not None and self.state:
            silence += f", {self.state}"
        words = "; ".join(filter(None, (known, silence)))
        return f"rank {self.rank} ({words})" if words else f"rank {self.rank}"


class Finding(NamedTuple):
    """An answer to a report: all ranks that have not entered, and details of some of them and of silent ranks."""

    missing: tuple[int, ...]
    known: tuple[Absence, ...]
    received: float

    def ranks(self, now: float) -> list[int]:
        """Return the ranks to blame: those that have not entered; if there are none, those that do not answer."""
        doubtful = {each.rank for each in self.known if each.last is None and each.silent + now - self.received < DOUBT}
        return [rank for rank in self.missing if rank not in doubtful] or [
            each.rank for each in self.known if each.entered
        ]

    def words(self, now: float) -> str:
        """Return a text about what the operation waits for."""
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
    """The coordinator's state for one operation.

    Attributes:
        called: the call of each rank that has entered.
        absent: for ranks that have not: the operation they were last seen in, its age, and when they said so.
        asked: ranks that have not answered a question about it.
        again: when the ranks may be asked about it again.
        due: an answer to the waiting ranks is scheduled.
    """

    __slots__ = ("absent", "again", "asked", "called", "due")

    def __init__(self) -> None:
        self.again = 0.0
        self.asked: set[int] = set()
        self.called: dict[int, Description] = {}
        self.absent: dict[int, tuple[str, float | None, float]] = {}
        self.due = False

    def missing(self, world_size: int) -> list[int]:
        """Return the ranks that are not known to have entered."""
        return [rank for rank in range(world_size) if rank not in self.called]

    def absences(
        self, missing: Sequence[int], silent: Mapping[int, float], state: Callable[[int], str], now: float
    ) -> list[Absence]:
        """Describe ranks that are missing, and those that have entered and gone silent; the first of each.

        Args:
            missing: ranks that have not entered.
            silent: since when questions to ranks have gone unanswered.
            state: says what the process of a rank does, asked of ranks that have been silent for long.
            now: the time.
        """
        slow = [rank for rank in silent if rank in self.called and now - silent[rank] >= SLOW_AFTER]
        found = []
        for rank in (*missing[:DETAILED], *sorted(slow)[:DETAILED]):
            last, age, told = self.absent.get(rank, (None, None, now))
            quiet = now - silent[rank] if rank in silent else 0.0
            words = state(rank) if quiet >= SLOW_AFTER else ""
            found.append(
                Absence(rank, rank in self.called, last, None if age is None else age + now - told, quiet, words)
            )
        return found
