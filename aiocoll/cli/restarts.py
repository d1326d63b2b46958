"""Which restarts a job may have: what a host tells the others, and what comes of it.

Each host tells its state. When nothing runs on any host and not all ended well, all start anew, if there is a restart
left. In a job that mends itself (`aiocoll.launcher`), a host takes a restart for each rank that it replaces.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import NamedTuple, Protocol

from aiocoll.store import StoreServer

__all__ = ["Alone", "Elsewhere", "Granted", "HostState", "News", "Notice", "Phase", "Restarts", "Verdict"]


class Phase(StrEnum):
    """What a host is about."""

    RUNS = "runs"
    #: A rank has failed and is not replaced: all are to end.
    FAILS = "fails"
    #: All ranks have ended, well, or not all of them well.
    ENDED = "ended"
    FAILED = "failed"
    #: The user stops it.
    QUITS = "quits"


class HostState(NamedTuple):
    """The state of the ranks of one host.

    Attributes:
        restarts: number of the restart in which all of them were started.
        phase: see `Phase`.
        elastic: whether a rank has said that its group mends itself.
        members: living ranks that are in such a group.
        well: whether a rank has ended well.
        why: the failure that ended them, if one of these ranks is to blame.
    """

    restarts: int
    phase: Phase
    elastic: bool = False
    members: int = 0
    well: bool = False
    why: str = ""

    @property
    def over(self) -> bool:
        """Whether nothing runs."""
        return self.phase in (Phase.ENDED, Phase.FAILED)


class Verdict(NamedTuple):
    """What comes next, once nothing runs: all start anew, or the job is over.

    Attributes:
        restarts: number of the restart in which all start; None: the job is over.
        why: of what elsewhere it comes, if it does.
    """

    restarts: int | None
    why: str = ""


class Granted(NamedTuple):
    """The answer to `Restarts.take`; `number` is that of the restart, 0 if none is left."""

    rank: int
    number: int


class Elsewhere(NamedTuple):
    """The states of the other hosts."""

    states: Mapping[int, HostState]


class Notice(NamedTuple):
    """Something that the user is to know."""

    text: str


News = Verdict | Granted | Elsewhere | Notice


class Restarts(Protocol):
    """The restarts of a job.

    Attributes:
        allowed: how many there may be.
    """

    allowed: int

    def begin(self, tell: Callable[[News], object]) -> None:
        """Tell a `Verdict` as soon as ranks may start, and all further news, from any thread."""

    def take(self, rank: int) -> None:
        """Ask for a restart, to replace `rank`: `Granted` answers."""

    def say(self, state: HostState) -> None:
        """Take note of the state of this host; once nothing runs, a `Verdict` follows."""

    def close(self) -> None:
        """Leave the job."""


class Alone:
    """The restarts of a job on one host.

    Args:
        allowed: how many there may be.
        server: of the store, which is emptied before all ranks start anew; None if there are no restarts.
    """

    def __init__(self, allowed: int, server: StoreServer | None) -> None:
        self.allowed = allowed
        self._server = server
        self._used = 0

    def begin(self, tell: Callable[[News], object]) -> None:
        """See `Restarts`."""
        self._tell = tell
        tell(Verdict(0))

    def take(self, rank: int) -> None:
        """See `Restarts`."""
        self._tell(Granted(rank, self._next()))

    def say(self, state: HostState) -> None:
        """See `Restarts`."""
        if not state.over:
            return
        number = self._next() if state.phase == Phase.FAILED else 0
        if number and self._server is not None:
            self._server.forget()
        self._tell(Verdict(number or None))

    def close(self) -> None:
        """See `Restarts`."""

    def _next(self) -> int:
        if self._used == self.allowed:
            return 0
        self._used += 1
        return self._used
