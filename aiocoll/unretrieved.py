"""Failures that nobody looks at: said once in the log, when nobody can look at them any more.

Works that one cause fails, as a revocation does, share one `Unretrieved`: one line counts them, and who looks at one of
them knows of all.
"""

from __future__ import annotations

from itertools import islice
from types import CodeType
from typing import NamedTuple
from weakref import WeakValueDictionary

from aiocoll.log import logger

__all__ = ["CallSite", "Unretrieved", "UnretrievedFailures", "line_of"]


#: Calls that a line names; of more it tells the number.
NAMED = 3


class CallSite(NamedTuple):
    """A call of the user's: what it was, and the instruction of `code` that made it."""

    op: str
    name: str | int | None
    code: CodeType
    instruction: int

    def __str__(self) -> str:
        number = "" if self.name is None else f" (sequence {self.name!r})"
        return f"{self.op}{number} called at {self.code.co_filename}:{line_of(self.code, self.instruction)}"


def line_of(code: CodeType, instruction: int) -> int | None:
    """Return the line of an instruction; None if the code does not tell."""
    # An instruction has two bytes and one entry.
    return next(islice(code.co_positions(), instruction // 2, None), (None,))[0]


class Unretrieved:
    """The failed calls of one cause.

    It lives as long as one of their works; with the last one it tells, unless somebody has looked.
    """

    __slots__ = ("__weakref__", "_calls", "_cause", "_group", "_rank", "_words")

    def __init__(self, group: str, rank: int, cause: BaseException, words: str) -> None:
        self._group = group
        self._rank = rank
        self._cause = cause  # kept, for its identity to stay its own
        self._words = words
        # None once somebody knows.
        self._calls: list[CallSite] | None = []

    def add(self, call: CallSite) -> None:
        """Note a failed call."""
        if self._calls is not None:
            self._calls.append(call)

    def looked(self) -> None:
        """Somebody has looked at one of the failures."""
        self._calls = None

    def tell(self) -> None:
        """Log what nobody has looked at, once."""
        calls, self._calls = self._calls, None
        if not calls:
            return
        named = ", ".join(map(str, calls[:NAMED]))
        more = len(calls) - NAMED
        logger.error(
            "group %r, rank %d: nobody looked at the failure of %s%s: %s",
            self._group,
            self._rank,
            named,
            f" and {more} more" if more > 0 else "",
            self._words,
            extra={"group": self._group, "rank": self._rank},
        )

    __del__ = tell


class UnretrievedFailures:
    """The failures of one group that somebody may still look at.

    Args:
        group: name of the group.
        rank: this rank in it.
    """

    def __init__(self, group: str, rank: int) -> None:
        self._group = group
        self._rank = rank
        # By the identity of the cause, which an entry keeps alive.
        self._open: WeakValueDictionary[int, Unretrieved] = WeakValueDictionary()
        self._known: BaseException | None = None

    def expect(self, cause: BaseException) -> None:
        """The program of this rank has caused it itself: nothing to tell."""
        self._known = cause

    def looked(self, error: BaseException) -> None:
        """Somebody hears of its cause from another call."""
        if (found := self._open.get(id(error.__cause__ or error))) is not None:
            found.looked()

    def of(self, error: BaseException) -> Unretrieved | None:
        """Return where a failure by `error` belongs; None if it is no news."""
        cause = error.__cause__ or error
        if cause is self._known:
            return None
        found = self._open.get(id(cause))
        if found is None:
            # In words: an error that is raised holds on to frames.
            found = Unretrieved(self._group, self._rank, cause, f"{type(error).__name__}: {error}")
            self._open[id(cause)] = found
        return found

    def tell(self) -> None:
        """The group is over: log now what nobody has looked at."""
        for unseen in list(self._open.values()):
            unseen.tell()
