"""Failures that were never retrieved: logged once, when they can no longer be retrieved.

Works that fail by one cause, such as a revocation, share one `Unretrieved`: one log line counts them, and retrieving
the failure of one counts for all.
"""

from __future__ import annotations

from itertools import islice
from types import CodeType
from typing import NamedTuple
from weakref import WeakValueDictionary

from aiocoll.log import logger
from aiocoll.user_code import describe

__all__ = ["CallSite", "Unretrieved", "UnretrievedFailures", "line_of"]


#: Calls that a log line names; the rest are only counted.
NAMED = 3


class CallSite(NamedTuple):
    """A call in the user's program: the operation, and the instruction of `code` that made the call."""

    op: str
    name: str | int | None
    code: CodeType
    instruction: int

    def __str__(self) -> str:
        number = "" if self.name is None else f" (sequence {self.name!r})"
        return f"{self.op}{number} called at {self.code.co_filename}:{line_of(self.code, self.instruction)}"


def line_of(code: CodeType, instruction: int) -> int | None:
    """Return the line of an instruction; None if the code has no line for it."""
    # An instruction has two bytes and one entry.
    return next(islice(code.co_positions(), instruction // 2, None), (None,))[0]


class Unretrieved:
    """The calls that failed by one cause.

    It lives as long as one of their works; when the last one is collected it logs, unless one failure was retrieved.
    """

    __slots__ = ("__weakref__", "_calls", "_cause", "_group", "_rank", "_text")

    def __init__(self, group: str, rank: int, cause: BaseException, text: str) -> None:
        self._group = group
        self._rank = rank
        self._cause = cause  # keeps the object alive, so that its id stays unique
        self._text = text
        # None once one of the failures was retrieved or logged.
        self._calls: list[CallSite] | None = []

    def add(self, call: CallSite) -> None:
        """Note a failed call."""
        if self._calls is not None:
            self._calls.append(call)

    def retrieved(self) -> None:
        """One of the failures was retrieved."""
        self._calls = None

    def log(self) -> None:
        """Log the failures if none of them was retrieved, once."""
        calls, self._calls = self._calls, None
        if not calls:
            return
        named = ", ".join(map(str, calls[:NAMED]))
        more = len(calls) - NAMED
        logger.error(
            "group %r, rank %d: exception of %s%s was never retrieved: %s",
            self._group,
            self._rank,
            named,
            f" and {more} more" if more > 0 else "",
            self._text,
            extra={"group": self._group, "rank": self._rank},
        )

    __del__ = log


class UnretrievedFailures:
    """The failures of one group that can still be retrieved.

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
        """The program of this rank has made `cause` itself: its failures are not logged."""
        self._known = cause

    def retrieved(self, error: BaseException) -> None:
        """Another call raises an error of the same cause."""
        if (found := self._open.get(id(error.__cause__ or error))) is not None:
            found.retrieved()

    def of(self, error: BaseException) -> Unretrieved | None:
        """Return the `Unretrieved` that a failure by `error` belongs to; None if it need not be logged."""
        cause = error.__cause__ or error
        if cause is self._known:
            return None
        found = self._open.get(id(cause))
        if found is None:
            # As text: an exception that was raised keeps its frames alive.
            found = Unretrieved(self._group, self._rank, cause, describe(error))
            self._open[id(cause)] = found
        return found

    def log(self) -> None:
        """Log all failures that were not retrieved; the group is closed."""
        for unretrieved in list(self._open.values()):
            unretrieved.log()
