"""The log of the library, `logging.getLogger("aiocoll")`: each record names the group and the rank.

A handler or filter of the program that raises does not disturb the code that logs: its traceback goes to stderr.
"""

from __future__ import annotations

import logging
import sys
import traceback
from collections.abc import MutableMapping
from typing import Any

from aiocoll.user_code import contain

__all__ = ["logger"]


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


logger = _Logger(logging.getLogger("aiocoll"))
