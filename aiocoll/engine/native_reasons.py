"""Log messages with the reasons why collectives run in Python instead of the C accelerator (`docs/native.md`)."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING

from aiocoll.engine.failure.deadlines import REPORT_AFTER
from aiocoll.log import logger

if TYPE_CHECKING:
    from aiocoll.engine.communicator import Communicator

__all__ = ["log_obstacle", "log_reasons", "obstacle"]


def obstacle(comm: Communicator, debug: str) -> str:
    """Return the reason why a group cannot use the C accelerator; an empty string if it can.

    Args:
        comm: this rank's part in the group.
        debug: the `debug` option.
    """
    if len(comm.ranks) == 1:
        return "the group has one rank"
    if not comm.runtime.is_real:
        return "time is virtual"
    if len(set(comm.hosts)) > 1:
        return "the ranks are on several hosts"
    if comm.slots.largest < 0:
        return "the ranks do not use shared memory"
    return "debug='detail' compares all calls" if debug == "detail" else ""


def log_obstacle(comm: Communicator, reason: str) -> None:
    """Log the reason why a group cannot use the C accelerator."""
    _log(logging.DEBUG, comm, reason)


def log_reasons(comm: Communicator) -> None:
    """Log why collectives run in Python although the group uses the C accelerator; each reason once."""
    if comm.in_flight.native is None:
        return
    for reason in _reasons(comm):
        if reason not in comm.python_reasons:
            comm.python_reasons.add(reason)
            _log(logging.INFO, comm, reason)


def _log(level: int, comm: Communicator, reason: str) -> None:
    text = "group %r, rank %d: collectives run in Python: %s"
    logger.log(level, text, comm.name, comm.rank, reason, extra=comm.log_extra)


def _reasons(comm: Communicator) -> Iterator[str]:
    for hook in comm.hooks.active:
        yield f"hook {type(hook).__name__} observes them, until it is removed"
    if comm.timeout < REPORT_AFTER:
        yield f"the timeout of the group is less than {REPORT_AFTER:g} s"
