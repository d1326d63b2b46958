"""The current group: that of a context, which tasks take over from the task that starts them."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator
from typing import TypeVar

from aiocoll.group.process_group import ProcessGroup

__all__ = ["CURRENT", "current_process_group", "process_group"]

G = TypeVar("G", bound=ProcessGroup | None)

CURRENT: contextvars.ContextVar[ProcessGroup | None] = contextvars.ContextVar("aiocoll_group", default=None)


def current_process_group() -> ProcessGroup | None:
    """Return the group of this context, as `process_group` has set it.

    Returns:
        The group, or None.
    """
    return CURRENT.get()


@contextlib.contextmanager
def process_group(pg: G) -> Iterator[G]:
    """Make `pg` the current group inside the block, for this task and those it starts.

    Args:
        pg: a group; None for none.

    Returns:
        What ``with`` enters; it gives `pg`.
    """
    token = CURRENT.set(pg)
    try:
        yield pg
    finally:
        CURRENT.reset(token)
