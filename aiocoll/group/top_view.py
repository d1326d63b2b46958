"""The state of one rank in one group for `aiocoll top`, collected in a thread when a viewer requests it."""

from __future__ import annotations

import socket
from typing import Any, Final

from aiocoll.engine.communicator import Communicator
from aiocoll.engine.control.causes import cause_of
from aiocoll.engine.failure.stall_report import SLOW_AFTER
from aiocoll.engine.operations.base import Operation
from aiocoll.log import logger
from aiocoll.top.listener import join, leave
from aiocoll.unretrieved import line_of

__all__ = ["GroupView", "offer_to_top"]

#: Maximum number of rows for kinds of operations, for awaited ranks, and for pending operations. Further rows are left
#: out.
ROWS: Final = 64
PEERS: Final = 256
PENDING: Final = 8
#: Maximum number of characters in a text.
LONGEST: Final = 500


class GroupView:
    """The state of one rank in one group, as `aiocoll top` shows it.

    Args:
        comm: communicator of the rank.
        directory: directory where viewers find the rank.
    """

    def __init__(self, comm: Communicator, directory: str) -> None:
        self._comm = comm
        self._directory = directory

    def to_data(self) -> dict[str, Any]:
        """Return the current state of the rank as plain data."""
        comm = self._comm
        endpoint = comm.endpoint
        now = comm.stamp()
        pending = [each for each in comm.in_flight.snapshot() if each.parent is None]
        blocked = endpoint.failure_detector.blocked()
        cards = endpoint.cards
        mine = cards[endpoint.rank]["host"]
        dead = [(comm.position.get(rank), how, detail) for rank, (how, detail) in list(endpoint.roster.dead.items())]
        return {
            "name": comm.name,
            "id": comm.id,
            "rank": comm.rank,
            "size": len(comm.ranks),
            "host": socket.gethostname(),
            # Viewers find the rank of a stopped process, which does not answer, by these process ids.
            "processes": [cards[rank]["process"][1] if cards[rank]["host"] == mine else None for rank in comm.ranks],
            "state": "open" if comm.cause is None else "revoked",
            "cause": None if comm.cause is None else str(cause_of(comm.cause)["text"])[:LONGEST],
            "time": now,
            "blocked": None if blocked is None else (blocked[0], blocked[1][:LONGEST]),
            "lost": [(rank, how, detail[:LONGEST]) for rank, how, detail in dead if rank is not None][:PEERS],
            "left": sorted(comm.position[rank] for rank in list(comm.left))[:PEERS],
            "pending": len(pending),
            "oldest": now - pending[0].entered if pending else 0.0,
            "in_flight": [_in_flight(comm, each, now) for each in pending[:PENDING]],
            "slow": _slow(comm, pending, now),
            **_describe_counters(comm),
        }

    def close(self) -> None:
        """Stop answering the requests of viewers."""
        leave(self, self._directory)


def offer_to_top(comm: Communicator, directory: str) -> GroupView | None:
    """Make a group visible to `aiocoll top`. If that is not possible, log a warning and return None."""
    view = GroupView(comm, directory)
    try:
        join(view, directory, comm.runtime.ticks)
    except (OSError, RuntimeError) as error:
        logger.warning(
            "group %r, rank %d: aiocoll top cannot show this group: top_dir=%r: %s",
            comm.name,
            comm.rank,
            directory,
            error,
            extra=comm.log_extra,
        )
        return None
    return view


def _in_flight(comm: Communicator, operation: Operation, now: float) -> dict[str, Any]:
    completion = operation.completion
    code = completion.code
    finding = comm.stalls.finding(operation.id) if operation.peer is None else None
    return {
        "op": operation.title()[:LONGEST],
        "peer": operation.peer,
        "seconds": now - operation.entered,
        "missing": [] if finding is None else finding.ranks(now)[:PEERS],
        "site": f"{code.co_filename}:{line_of(code, completion.instruction)} in {code.co_qualname}",
    }


def _slow(comm: Communicator, pending: list[Operation], now: float) -> list[tuple[int, float, str]]:
    """Return the ranks that do not answer, with the seconds since their last answer and their process states."""
    found: dict[int, tuple[float, str]] = {}
    for operation in pending[:PENDING]:
        finding = comm.stalls.finding(operation.id) if operation.peer is None else None
        for each in () if finding is None else finding.known:
            if each.silent >= SLOW_AFTER:
                found[each.rank] = each.silent + now - finding.received, each.state  # type: ignore[union-attr]
    return [(rank, seconds, state) for rank, (seconds, state) in sorted(found.items())]


def _describe_counters(comm: Communicator) -> dict[str, Any]:
    from aiocoll.group.stats import stats_of  # imported here, because few ranks are watched

    if not comm.journal.counts:
        return {"counted": False, "operations": [], "peers": []}
    stats = stats_of(comm)
    operations = sorted(stats.operations, key=lambda each: -each.seconds)[:ROWS]
    peers = sorted(stats.peers, key=lambda each: (-each.missing, -each.recent_seconds, -each.seconds))[:PEERS]
    return {
        "counted": True,
        "operations": [
            (
                *(each.op, each.algorithm, each.transport, each.calls, each.failures, each.nbytes, each.seconds),
                each.histogram,
            )
            for each in operations
        ],
        "peers": [(each.rank, each.times, each.seconds, each.missing) for each in peers],
    }
