"""Logger of the library, `logging.getLogger("aiocoll")`. Records about a group contain its name and the rank.

If a handler or filter of the program raises, the logging code continues, and the traceback goes to stderr.
"""

from __future__ import annotations

import logging
import sys
import traceback
from collections.abc import Hashable, MutableMapping
from typing import Any, Final

from aiocoll.user_code import contain

__all__ = ["RepeatLimiter", "logger"]

#: Seconds between the first and the second logged warning of a kind. Each later interval is ten times longer.
_AGAIN: Final = 10.0
#: Maximum number of kinds of warnings that the limiter remembers. It forgets the oldest ones.
_MAX_KINDS: Final = 256


class _Logger(logging.LoggerAdapter[logging.Logger]):
    """A logger whose records have the attributes `group` and `rank`, taken from `extra`; None if they are missing."""

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        """Add `group` and `rank` to the `extra` of a log call that lacks them."""
        kwargs["extra"] = {"group": None, "rank": None, **(kwargs.get("extra") or {})}
        return msg, kwargs

    def log(self, level: int, msg: object, *args: object, **kwargs: Any) -> None:
        """Log a record, and suppress the exceptions that log handlers raise."""
        # Skip the frame of this method, so that the record has the file and line of the caller.
        kwargs["stacklevel"] = kwargs.get("stacklevel", 1) + 1
        try:
            super().log(level, msg, *args, **kwargs)
        except BaseException as error:
            contain(error)
            if logging.raiseExceptions and sys.stderr is not None:
                traceback.print_exception(error)


class RepeatLimiter:
    """A rate limit for repeated warnings: logs the first, then one each after 10 s, 100 s, 1000 s, ..."""

    def __init__(self) -> None:
        #: Maps each kind of warning, ending with the latest, to the time from which the next warning is logged, the
        #: interval before that time, and the number of warnings skipped since the last logged one.
        self._kinds: dict[Hashable, tuple[float, float, int]] = {}

    def admit(self, kind: Hashable, now: float) -> str | None:
        """Return the text to append to a warning, with the number of skipped repetitions; None to skip the warning.

        Args:
            kind: equal for warnings that repeat each other.
            now: the time, on one clock for all calls.
        """
        due, interval, left_out = self._kinds.pop(kind, (now, _AGAIN / 10, 0))
        is_due = now >= due
        self._kinds[kind] = (now + 10 * interval, 10 * interval, 0) if is_due else (due, interval, left_out + 1)
        if len(self._kinds) > _MAX_KINDS:
            del self._kinds[next(iter(self._kinds))]
        if not is_due:
            return None
        return f" ({left_out} repetitions were not logged)" if left_out else ""


logger = _Logger(logging.getLogger("aiocoll"))
