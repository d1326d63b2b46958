"""The log of the library, `logging.getLogger("aiocoll")`: each record names the group and the rank.

A handler or filter of the program that raises does not disturb the code that logs: its traceback goes to stderr.
"""

from __future__ import annotations

import logging
import sys
import traceback
from collections.abc import Hashable, MutableMapping
from typing import Any, Final

from aiocoll.user_code import contain

__all__ = ["Repeats", "logger"]

#: Seconds from a warning to the next one of its kind that is logged; then ten times as long, and so on.
_AGAIN: Final = 10.0
#: Kinds of warnings that are remembered, the last ones.
_KEPT: Final = 256


class _Logger(logging.LoggerAdapter[logging.Logger]):
    """Gives every record the attributes `group` and `rank` from `extra`; None if the record is about no group."""

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        """Complete the `extra` of a call."""
        kwargs["extra"] = {"group": None, "rank": None, **(kwargs.get("extra") or {})}
        return msg, kwargs

    def log(self, level: int, msg: object, *args: object, **kwargs: Any) -> None:
        """Log a record; an exception of a handler ends here."""
        # The record names the first frame outside of `logging`; this one is in between.
        kwargs["stacklevel"] = kwargs.get("stacklevel", 1) + 1
        try:
            super().log(level, msg, *args, **kwargs)
        except BaseException as error:
            contain(error)
            if logging.raiseExceptions and sys.stderr is not None:
                traceback.print_exception(error)


class Repeats:
    """Decides which repetitions of a warning to log: the first, then the next ones after 10 s, 100 s, 1000 s, ..."""

    def __init__(self) -> None:
        #: Of each kind, the latest last: when the next warning is due, the interval before it, and how many were not
        #: logged since the last.
        self._kinds: dict[Hashable, tuple[float, float, int]] = {}

    def admit(self, kind: Hashable, now: float) -> str | None:
        """Return the end of the text of a warning, which counts those that were not logged; None to not log this one.

        Args:
            kind: equal for warnings that repeat each other.
            now: the time, on one clock for all calls.
        """
        due, interval, left_out = self._kinds.pop(kind, (now, _AGAIN / 10, 0))
        is_due = now >= due
        self._kinds[kind] = (now + 10 * interval, 10 * interval, 0) if is_due else (due, interval, left_out + 1)
        if len(self._kinds) > _KEPT:
            del self._kinds[next(iter(self._kinds))]
        if not is_due:
            return None
        return f" ({left_out} more since the last such warning)" if left_out else ""


logger = _Logger(logging.getLogger("aiocoll"))
