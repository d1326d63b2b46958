"""The current group, kept in a context variable. A task inherits it from the task that starts it."""

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
    """Return the current group, which `process_group` has set.

    Returns:
        The group, or None.
    """
    return CURRENT.get()


@contextlib.contextmanager
def process_group(pg: G) -> Iterator[G]:
    """Make `pg` the current group inside the ``with`` block, for this task and for tasks started in the block.

    Args:
        pg: a group, or None for no current group.

    Returns:
        A context manager, which ``with`` binds to `pg`.
    """
    token = CURRENT.set(pg)
    try:
        yield pg
    finally:
        CURRENT.reset(token)
