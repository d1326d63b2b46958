"""Messages between `aiocoll run` and the ranks that it has started.

With ``--max-restarts``, a rank calls `report_elastic` when it is in a group that continues without lost ranks. The
launcher then starts newcomers as replacements, with ``AIOCOLL_JOIN=1`` in their environment.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping

__all__ = ["is_newcomer", "report_elastic"]

#: Name in `sys.modules` of a rank's start code. Programs that a rank starts do not inherit this entry.
_START = "aiocoll.cli.start"


def report_elastic() -> None:
    """Notify the launcher, if any, that this rank is in an elastic group, which accepts newcomers.

    Call this whenever such a group exists, since a newcomer that starts earlier would wait in vain. Repeated calls are
    harmless.
    """
    if (start := sys.modules.get(_START)) is not None:
        start.report_elastic()


def is_newcomer(env: Mapping[str, str]) -> bool:
    """Return whether a launcher has started this process to join an existing group.

    Raises:
        ValueError: the variable has an invalid value.
    """
    asked = env.get("AIOCOLL_JOIN", "0")
    if asked not in ("0", "1"):
        raise ValueError(f"AIOCOLL_JOIN={asked!r}: must be 1 (join an existing group) or 0")
    return asked == "1"
