"""What `aiocoll run` and a rank that it has started tell each other, besides where the ranks meet.

With ``--max-restarts``, a rank that has said `say_elastic` is in a group that goes on without lost ranks. The launcher
starts newcomers in their place, with ``AIOCOLL_JOIN=1`` in their environment.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping

__all__ = ["is_newcomer", "say_elastic"]

#: The first code of a rank enters itself there: nothing of it is inherited by other programs.
_START = "aiocoll.cli.start"


def say_elastic() -> None:
    """Tell the launcher, if there is one, that this rank is in a group that mends itself, and takes in newcomers.

    To be called whenever such a group is there: before that, a newcomer would wait for it in vain. Repeating it is
    harmless.
    """
    if (start := sys.modules.get(_START)) is not None:
        start.say_elastic()


def is_newcomer(env: Mapping[str, str]) -> bool:
    """Whether a launcher has started this process to join a group that is there.

    Raises:
        ValueError: the variable has another value.
    """
    asked = env.get("AIOCOLL_JOIN", "0")
    if asked not in ("0", "1"):
        raise ValueError(f"AIOCOLL_JOIN={asked!r}: must be 1, for a process that joins a group that grows, or 0")
    return asked == "1"
