"""Detection of failures that the program never retrieves, and of works that it never awaits.

Works that fail with the same cause, such as a revocation, share one `Unretrieved`. One log line counts them, and
retrieving the failure of one counts for all. The line is logged when the failures can no longer be retrieved. A test on
ranks also collects these failures, and fails.

On an event loop in debug mode, a work that was dropped without being awaited causes a `RuntimeWarning`.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import islice
from types import CodeType
from typing import NamedTuple
from weakref import WeakSet, WeakValueDictionary

from aiocoll.log import logger
from aiocoll.user_code import describe

__all__ = ["CallSite", "Collector", "Unawaited", "Unretrieved", "UnretrievedFailures", "collecting", "line_of"]

#: Maximum number of calls that a log line names. The others are only counted.
NAMED = 3


class CallSite(NamedTuple):
    """A call site in the user's program: the operation, the code object, and the index of the calling instruction."""

    op: str
    name: str | int | None
    code: CodeType
    instruction: int

    def __str__(self) -> str:
        number = "" if self.name is None else f" (sequence {self.name!r})"
        return f"{self.op}{number} called at {self.code.co_filename}:{line_of(self.code, self.instruction)}"


def line_of(code: CodeType, instruction: int) -> int | None:
    """Return the source line of an instruction; None if the code object has no line for it."""
    # `co_positions` has one entry per instruction of two bytes.
    return next(islice(code.co_positions(), instruction // 2, None), (None,))[0]


class Collector:
    """A collector of the unretrieved failures of all groups that are created in its block."""

    def __init__(self) -> None:
        # Maps the `id()` of a cause to the cause and its log text. Keep the cause alive, because a failure may be
        # retrieved even after its group was closed.
        self._found: dict[int, tuple[BaseException, str]] = {}
        self._groups: WeakSet[UnretrievedFailures] = WeakSet()

    def watch(self, failures: UnretrievedFailures) -> None:
        """Also collect the failures of a group."""
        self._groups.add(failures)

    def add(self, cause: BaseException, text: str) -> None:
        """Record the text that was logged about failures with the cause `cause`."""
        self._found[id(cause)] = cause, text

    def retrieved(self, cause: BaseException) -> None:
        """Remove the failures with the cause `cause`, because the program has retrieved one of them."""
        self._found.pop(id(cause), None)

    def finish(self) -> list[str]:
        """Return one log line per cause of the failures that stayed unretrieved since the last `finish`."""
        for failures in list(self._groups):
            failures.log()
        found, self._found = self._found, {}
        return [text for _, text in found.values()]


_collector: ContextVar[Collector | None] = ContextVar("collector of unretrieved failures", default=None)


@contextmanager
def collecting() -> Iterator[Collector]:
    """Collect the unretrieved failures of groups that are created in this block. They are still logged."""
    collector = Collector()
    token = _collector.set(collector)
    try:
        yield collector
    finally:
        _collector.reset(token)


class Unretrieved:
    """The calls of one group that failed with the same cause.

    It lives as long as one of their works. When the last work is collected, it logs the failures, unless one was
    retrieved.
    """

    __slots__ = ("__weakref__", "_calls", "_cause", "_collector", "_group", "_rank", "_text")

    def __init__(
        self, group: str, rank: int, cause: BaseException, text: str, collector: Collector | None = None
    ) -> None:
        self._group = group
        self._rank = rank
        self._cause = cause  # keeps the object alive, so that its id stays unique
        self._text = text
        self._collector = collector
        # The failed calls; None after the program has retrieved one of the failures, or after they were logged.
        self._calls: list[CallSite] | None = []

    def add(self, call: CallSite) -> None:
        """Record a failed call."""
        if self._calls is not None:
            self._calls.append(call)

    def mark_awaited(self) -> None:
        """Do nothing: the start of an await retrieves no failure, only its end does."""

    def retrieved(self) -> None:
        """Record that the program has retrieved one of the failures."""
        self._calls = None
        if self._collector is not None:
            self._collector.retrieved(self._cause)

    def log(self) -> None:
        """Log the failures once, if the program has retrieved none of them."""
        calls, self._calls = self._calls, None
        if not calls:
            return
        named = ", ".join(map(str, calls[:NAMED]))
        if len(calls) > NAMED:
            named += f" and {len(calls) - NAMED} more"
        text = f"exception of {named} was never retrieved: {self._text}"
        if self._collector is not None:
            self._collector.add(self._cause, f"group {self._group!r}: {text}")
        extra = {"group": self._group, "rank": self._rank}
        logger.error("group %r, rank %d: %s", self._group, self._rank, text, extra=extra)

    __del__ = log


class Unawaited(Unretrieved):
    """A marker, in debug mode, of a work that was not awaited. It warns when the work is garbage-collected."""

    __slots__ = ("_call", "_failures")

    def __init__(self, failures: UnretrievedFailures, call: CallSite) -> None:
        self._call = call
        self._failures: UnretrievedFailures | None = failures

    def mark_awaited(self) -> None:
        """Suppress the warning, because the program has awaited the work or the work has failed."""
        self._failures = None

    retrieved = mark_awaited

    def __del__(self) -> None:
        if self._failures is not None and not sys.is_finalizing():
            self._failures.drop(self._call)


class UnretrievedFailures:
    """The failures of one group that the program can still retrieve.

    Args:
        group: name of the group.
        rank: this rank in the group.

    Attributes:
        watching: True if works that are never awaited cause a warning, because the event loop is in debug mode.
    """

    def __init__(self, group: str, rank: int) -> None:
        self.watching = False
        self._group = group
        self._rank = rank
        self._collector = _collector.get()
        if self._collector is not None:
            self._collector.watch(self)
        self._dropped: dict[tuple[CodeType, int], _Dropped] = {}
        self._closed = False
        # Maps the `id()` of a cause to its `Unretrieved`, which keeps the cause alive.
        self._open: WeakValueDictionary[int, Unretrieved] = WeakValueDictionary()
        self._known: BaseException | None = None

    def guard(self, op: str, name: str | int, code: CodeType, instruction: int) -> Unawaited:
        """Return a guard that warns if the work of a call is garbage-collected without being awaited."""
        return Unawaited(self, CallSite(op, name, code, instruction))

    def expect(self, cause: BaseException) -> None:
        """Suppress the log of failures with the cause `cause`, because this rank's program already knows the cause."""
        self._known = cause

    def retrieved(self, error: BaseException) -> None:
        """Record that a call raises `error`, so that other failures with the same cause count as retrieved."""
        cause = error.__cause__ or error
        if (found := self._open.get(id(cause))) is not None:
            found.retrieved()
        if self._collector is not None:
            self._collector.retrieved(cause)

    def of(self, error: BaseException) -> Unretrieved | None:
        """Return the `Unretrieved` for failures with the same cause as `error`; None if their log is suppressed."""
        cause = error.__cause__ or error
        if cause is self._known:
            return None
        found = self._open.get(id(cause))
        if found is None:
            # Stored as text, since a raised exception keeps its frames alive.
            found = Unretrieved(self._group, self._rank, cause, describe(error), self._collector)
            self._open[id(cause)] = found
        return found

    def log(self) -> None:
        """Log all failures that the program has not retrieved."""
        for unretrieved in list(self._open.values()):
            unretrieved.log()

    def drop(self, call: CallSite) -> None:
        """Record that a work was dropped without being awaited.

        Until the group is closed, `forget_dropped_works` may follow.
        """
        dropped = self._dropped.setdefault(call[2:], _Dropped(self._group, self._rank, call))
        dropped.count += 1
        if self._closed:
            self._dropped.clear()

    def forget_dropped_works(self) -> None:
        """Forget the dropped works, because the program has waited for all works."""
        for dropped in self._dropped.values():
            dropped.count = 0
        self._dropped.clear()

    def close(self) -> None:
        """Log unretrieved failures, and warn about works that were not awaited, because the group is closed."""
        self.log()
        self._closed = True
        self._dropped.clear()


class _Dropped:
    """The number of works started at one line and dropped without an await. Deleting this object warns."""

    def __init__(self, group: str, rank: int, call: CallSite) -> None:
        self._group = group
        self._rank = rank
        self._call = call
        self.count = 0

    def __del__(self) -> None:
        # If warnings are errors, an error raised here is reported as unraisable and does not disturb other code.
        if self.count and not sys.is_finalizing():
            code, instruction = self._call[2:]
            times = "" if self.count == 1 else f", {self.count} times"
            warnings.warn_explicit(
                f"group {self._group!r}, rank {self._rank}: {self._call} was never awaited{times}",
                RuntimeWarning,
                code.co_filename,
                line_of(code, instruction) or code.co_firstlineno,
            )
