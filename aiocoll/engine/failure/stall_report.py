"""What a coordinator has learnt about one operation that waits, and what it tells those who wait for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

__all__ = ["DETAILED", "SLOW_AFTER", "Absence", "Finding", "StallReport"]

#: Ranks a finding describes in words: more than anybody reads, and few enough that a thousand ranks can be told.
DETAILED = 16
#: Seconds a question to a rank goes unanswered before it is called slow: a loop that answers turns a thousand times
#: as often.
SLOW_AFTER = 1.0
#: Seconds in which an answer may still be on its way: many times what a question takes between hosts.
DOUBT = 0.025

Description = dict[str, Any]


class Absence(NamedTuple):
    """What is known of one rank that others may be waiting for; times are as of the moment it was told.

    Attributes:
        rank: in the group.
        entered: it has entered the operation.
        last: what it was last seen in, in words; None if it has not answered.
        age: seconds since it entered that one; None if there is none.
        silent: seconds since a question to it has gone unanswered; 0 for none.
        state: what its process does, as far as that can be seen.
    """

    rank: int
    entered: bool
    last: str | None
    age: float | None
    silent: float
    state: str

    def describe(self, since: float) -> str:
        """Say it in words, `since` seconds after it was told."""
        known = self.last
        if known is not None and self.age is not None:
            known += f", {self.age + since:.1f} s ago"
        silence = f"which has not answered for {self.silent + since:.2f} s" if self.silent else None
        if silence is not None and self.state:
            silence += f", {self.state}"
        words = "; ".join(filter(None, (known, silence)))
        return f"rank {self.rank} ({words})" if words else f"rank {self.rank}"


class Finding(NamedTuple):
    """An answer to a report: all ranks that have not entered, and what is known of some of them and of silent ones."""

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
        """Say what the operation waits for."""
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
    """What the coordinator knows of one operation.

    Attributes:
        called: what each rank that has entered has called.
        absent: of ranks that have not, what they were last seen in, how long ago, and when they said so.
        asked: ranks that have not answered a question about it.
        again: when the others may be asked about it again.
        due: an answer to all who wait is on its way.
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
