"""What the ranks of this host run, and the start of one of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from aiocoll.cli.logs import Logs
from aiocoll.cli.rank import Exit, RankProcess, Report, SaidElastic

__all__ = ["Program", "Start"]


class Start(NamedTuple):
    """The start of one rank.

    Attributes:
        rank: its number for the launcher. A newcomer has that of the rank that it replaces.
        restarts: how many restarts of the job there have been, this one included.
        joins: whether it joins a group that is there; the group assigns its rank.
    """

    rank: int
    restarts: int
    joins: bool


@dataclass(frozen=True, slots=True)
class Program:
    """What the ranks of this host run.

    Attributes:
        command: what follows the name of the Python interpreter.
        ranks: those of this host.
        environment: returns the environment of a rank.
        key: the job key.
        top_dir: where the ranks answer `aiocoll top`, if they do.
        logs: gets copies of the output, if it is there.
    """

    command: Sequence[str]
    ranks: range
    environment: Callable[[Start], Mapping[str, str]]
    key: bytes = field(repr=False)
    top_dir: str | None = None
    logs: Logs | None = None

    def start(self, start: Start, tell: Callable[[Report | SaidElastic | Exit], object]) -> RankProcess:
        """Start a rank; its output goes to that of this process, and news of it to `tell`."""
        logs = self.logs.open(start.restarts, start.rank) if self.logs is not None else None
        return RankProcess(start.rank, self.command, self.environment(start), self.key, logs, tell)
