"""Restarts of a job: the states that hosts report, and the decisions based on them.

Each host reports its state. If no rank runs on any host and a rank has failed, all ranks restart, as long as a restart
is left. In an elastic job (`aiocoll.launcher`), a host takes a restart for each rank that it replaces.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import NamedTuple, Protocol

from aiocoll.store import StoreServer

__all__ = [
    "HostState",
    "News",
    "Notice",
    "OtherHosts",
    "Phase",
    "RestartGrant",
    "Restarts",
    "SingleHostRestarts",
    "Verdict",
]


class Phase(StrEnum):
    """The phase of the ranks on one host."""

    RUNS = "runs"
    #: A rank has failed and is not replaced, so all ranks are being ended.
    FAILS = "fails"
    #: All ranks have ended: all with exit code 0 (ENDED), or some with a failure (FAILED).
    ENDED = "ended"
    FAILED = "failed"
    #: The user has stopped the job.
    QUITS = "quits"


class HostState(NamedTuple):
    """The state of the ranks of one host.

    Attributes:
        restarts: number of the restart in which these ranks were started.
        phase: see `Phase`.
        elastic: whether a rank has reported an elastic group.
        members: number of living ranks in such a group.
        well: whether a rank has ended with 0.
        why: the failure that ended them, if one of these ranks is at fault.
    """

    restarts: int
    phase: Phase
    elastic: bool = False
    members: int = 0
    well: bool = False
    why: str = ""

    @property
    def over(self) -> bool:
        """Return whether all ranks of this host have ended."""
        return self.phase in (Phase.ENDED, Phase.FAILED)


class Verdict(NamedTuple):
    """The decision, when no rank runs any more, whether all ranks restart or the job ends.

    Attributes:
        restarts: number of the next restart; None if the job ends.
        why: the reason, if it lies on another host.
    """

    restarts: int | None
    why: str = ""


class RestartGrant(NamedTuple):
    """The reply to `Restarts.take`: the number of the granted restart, or 0 if no restart is left."""

    rank: int
    number: int


class OtherHosts(NamedTuple):
    """A report of the states of all other hosts."""

    states: Mapping[int, HostState]


class Notice(NamedTuple):
    """A message for the launcher to print."""

    text: str


News = Verdict | RestartGrant | OtherHosts | Notice


class Restarts(Protocol):
    """The interface that grants restarts of a job, and decides whether all ranks restart.

    Attributes:
        allowed: the largest number of restarts.
    """

    allowed: int

    def begin(self, notify: Callable[[News], object]) -> None:
        """Call `notify` with a `Verdict` when ranks may start, and later with all news. Any thread may call it."""

    def take(self, rank: int) -> None:
        """Request a restart to replace `rank`; `RestartGrant` is the reply."""

    def report(self, state: HostState) -> None:
        """Record the state of this host. When no rank runs on any host, a `Verdict` follows."""

    def close(self) -> None:
        """Stop taking part in the restarts of the job."""


class SingleHostRestarts:
    """The restarts of a job on one host.

    Args:
        allowed: the largest number of restarts.
        server: the store's server, which is emptied before all ranks restart; None without restarts.
    """

    def __init__(self, allowed: int, server: StoreServer | None) -> None:
        self.allowed = allowed
        self._server = server
        self._used = 0

    def begin(self, notify: Callable[[News], object]) -> None:
        """Let the ranks start at once; see `Restarts.begin`."""
        self._notify = notify
        notify(Verdict(0))

    def take(self, rank: int) -> None:
        """Grant a restart if one is left; see `Restarts.take`."""
        self._notify(RestartGrant(rank, self._next()))

    def report(self, state: HostState) -> None:
        """Decide on a restart of all ranks when no rank of this host runs; see `Restarts.report`."""
        if not state.over:
            return
        number = self._next() if state.phase == Phase.FAILED else 0
        if number and self._server is not None:
            self._server.forget()
        self._notify(Verdict(number or None))

    def close(self) -> None:
        """Do nothing: a job on one host has no exchange with other hosts to end."""

    def _next(self) -> int:
        if self._used == self.allowed:
            return 0
        self._used += 1
        return self._used
