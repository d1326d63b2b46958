"""`Program`: the program of this host's ranks, and the environment in which a rank starts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from aiocoll.cli.logs import Logs
from aiocoll.cli.rank import ElasticReport, Exit, RankProcess, Report
from aiocoll.cli.top.jobs import JobOutcome

__all__ = ["Program", "RankStart"]


class RankStart(NamedTuple):
    """The parameters with which one rank is started.

    Attributes:
        rank: its number for the launcher. A newcomer has the number of the rank that it replaces.
        restarts: number of restarts of the job so far, including this one.
        joins: whether it joins an existing group, which assigns its rank.
    """

    rank: int
    restarts: int
    joins: bool


@dataclass(frozen=True, slots=True)
class Program:
    """The program that this host's ranks run, with everything needed to start them.

    Attributes:
        command: the arguments of the Python interpreter.
        ranks: the ranks of this host.
        environment: returns the environment of a rank.
        key: the job key.
        top_dir: the folder in which the ranks answer `aiocoll top`; None if they do not.
        logs: receives copies of the output; None without `--log-dir`.
        record_end: records the outcome of the job for `aiocoll top`; None without such a folder.
    """

    command: Sequence[str]
    ranks: range
    environment: Callable[[RankStart], Mapping[str, str]]
    key: bytes = field(repr=False)
    top_dir: str | None = None
    logs: Logs | None = None
    record_end: Callable[[JobOutcome], None] | None = None

    def start(self, start: RankStart, notify: Callable[[Report | ElasticReport | Exit], object]) -> RankProcess:
        """Start a rank. This process relays the rank's output, and calls `notify` with its reports and its exit."""
        logs = self.logs.open(start.restarts, start.rank) if self.logs is not None else None
        return RankProcess(start.rank, self.command, self.environment(start), self.key, logs, notify)
