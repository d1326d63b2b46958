"""The log of the library, `logging.getLogger("aiocoll")`: each record names the group and the rank."""

from __future__ import annotations

import logging
from collections.abc import MutableMapping
from typing import Any

__all__ = ["logger"]


class _Logger(logging.LoggerAdapter[logging.Logger]):
    """Gives every record the attributes `group` and `rank` from `extra`; None if the record is about no group."""

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        """Complete the `extra` of a call."""
        kwargs["extra"] = {"group": None, "rank": None, **(kwargs.get("extra") or {})}
        return msg, kwargs


logger = _Logger(logging.getLogger("aiocoll"))
