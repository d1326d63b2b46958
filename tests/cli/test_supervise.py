"""Decisions of a host's launcher that depend on the state of another host."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from aiocoll.cli.program import Program, RankStart
from aiocoll.cli.restarts import HostState, News, OtherHosts, Phase, RestartGrant, Verdict
from aiocoll.cli.supervise import supervise
from aiocoll.cli.top.jobs import JobOutcome

#: A rank that dies as soon as it is in a group. The newcomer in its place exits with 0.
LOST = """
import os, signal
from aiocoll.launcher import report_elastic
if "AIOCOLL_JOIN" not in os.environ:
    report_elastic()
    os.kill(os.getpid(), signal.SIGKILL)
"""


class TwoHosts:
    """Restarts of a job on two hosts, as seen from one host; the other host reports no changes."""

    allowed = 2

    def __init__(self, other: HostState) -> None:
        self.taken: list[int] = []
        self._other = other

    def begin(self, notify: Callable[[News], object]) -> None:
        self._notify = notify
        notify(Verdict(0))
        notify(OtherHosts({1: self._other}))

    def take(self, rank: int) -> None:
        self.taken.append(rank)
        self._notify(RestartGrant(rank, len(self.taken)))

    def report(self, state: HostState) -> None:
        if state.over:
            self._notify(Verdict(None))

    def close(self) -> None:
        pass


@pytest.mark.parametrize(
    ("other", "replaced"),
    [
        (HostState(0, Phase.RUNS, elastic=True, members=2), [0]),
        (HostState(0, Phase.RUNS), [0]),  # the report of the other host is late
        (HostState(0, Phase.RUNS, elastic=True, members=0), []),
        (HostState(0, Phase.ENDED), []),
    ],
    ids=["members", "slow", "no members", "ended"],
)
def test_lost_ranks_are_replaced_only_if_other_ranks_may_still_be_in_the_group(
    other: HostState, replaced: list[int], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "script.py"
    script.write_text(LOST)

    def environment(start: RankStart) -> dict[str, str]:
        return {**os.environ, **({"AIOCOLL_JOIN": "1"} if start.joins else {})}

    restarts = TwoHosts(other)
    code = supervise(Program((str(script),), range(1), environment, b"k" * 32), restarts)
    assert (code == 0, sorted(restarts.taken)) == (bool(replaced), replaced)
    assert capfd.readouterr().err.count("a newcomer is started in its place") == len(replaced)


class EndedElsewhere(TwoHosts):
    """Restarts of a job that another host's rank ends."""

    allowed = 0

    def report(self, state: HostState) -> None:
        if state.over:
            self._notify(Verdict(None, "host 1: rank 2 was killed by SIGKILL"))


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("raise SystemExit(3)", ("host 1: rank 2 was killed by SIGKILL", "rank 0 exited with code 3")),
        ("pass", ("host 1: rank 2 was killed by SIGKILL",)),
    ],
    ids=["failed", "finished"],
)
def test_recorded_outcome_of_a_job_begins_with_the_cause(
    script: str, expected: tuple[str, ...], tmp_path: Path
) -> None:
    path = tmp_path / "script.py"
    path.write_text(script)
    recorded: list[JobOutcome] = []
    program = Program((str(path),), range(1), lambda _: os.environ, b"k" * 32, record_end=recorded.append)
    supervise(program, EndedElsewhere(HostState(0, Phase.RUNS)))
    assert [end.lines for end in recorded] == [expected]
