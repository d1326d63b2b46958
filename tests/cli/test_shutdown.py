"""The end of `aiocoll run` after a signal: ranks that do not end are named and killed."""

from __future__ import annotations

import os
import re
import signal
from typing import TYPE_CHECKING

import pytest

from aiocoll.cli import main
from aiocoll.cli.program import Program, RankStart
from aiocoll.cli.restarts import HostState, Phase, Verdict
from aiocoll.cli.supervise import supervise

from ..internals import Limits
from .test_supervise import TwoHosts

if TYPE_CHECKING:
    from tests.cli.conftest import Launch

#: Rank 1 sends the launcher a signal and ignores that signal itself; other ranks end by it.
IGNORES = """
    import os, signal, sys
    if os.environ["RANK"] == "1":
        number = signal.Signals[sys.argv[1]]
        signal.signal(number, signal.SIG_IGN)
        os.kill(os.getppid(), number)
    while True:
        signal.pause()
"""
#: The rank sends the signal to the launcher, and sends the signal again when the launcher forwards it.
SENDS_AGAIN = """
    import os, signal, sys, time
    number = signal.Signals[sys.argv[1]]
    signal.signal(number, lambda *_: os.kill(os.getppid(), number))
    os.kill(os.getppid(), number)
    while True:
        time.sleep(0.05)
"""
#: Rank 1 takes half a second to save its work; other ranks end at once.
SAVES = """
    import os, signal, sys, time

    def save(*_):
        time.sleep(0.5)
        print("saved", flush=True)
        os._exit(0)

    if os.environ["RANK"] == "1":
        signal.signal(signal.SIGTERM, save)
        os.kill(os.getppid(), signal.SIGTERM)
    while True:
        time.sleep(0.05)
"""


@pytest.mark.parametrize(
    ("name", "again", "options"),
    [("SIGTERM", "SIGTERM", ()), ("SIGINT", "Ctrl-C", ()), ("SIGTERM", "SIGTERM", ("--max-restarts", "3"))],
)
def test_ranks_that_ignore_a_signal_are_named_and_killed_after_the_time_limit(
    launch: Launch, capfd: pytest.CaptureFixture[str], name: str, again: str, options: tuple[str, ...]
) -> None:
    script = launch.write(IGNORES)
    code = main.main(["run", "-n", "2", "--kill-after", "2", *options, script, name])
    assert code == 128 + signal.Signals[name]
    lines = capfd.readouterr().err.splitlines()
    # The line at which Ctrl-C interrupts rank 0 depends on the progress of its interpreter.
    assert [line for line in lines if line.startswith("aiocoll run:") and "was interrupted" not in line] == [
        f"aiocoll run: waiting for rank 1 to end after {name}; SIGKILL follows in 1 s, or at once after a second "
        f"{again}",
        f"aiocoll run: sent SIGKILL to rank 1, 2 s after {name}",
        f"aiocoll run: stopped by {name}",
    ]


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP", "SIGINT"])
def test_second_signal_to_the_launcher_kills_the_ranks_at_once(
    launch: Launch, limits: Limits, capfd: pytest.CaptureFixture[str], name: str
) -> None:
    limits(run_repeated_signal_time=0)
    assert main.main(["run", "-n", "1", launch.write(SENDS_AGAIN), name]) == 128 + signal.Signals[name]
    assert capfd.readouterr().err.splitlines() == [
        f"aiocoll run: sent SIGKILL to rank 0, after a second {name}",
        f"aiocoll run: stopped by {name}",
    ]


def test_rank_keeps_the_full_time_limit_when_another_rank_ends_at_once(
    launch: Launch, limits: Limits, capfd: pytest.CaptureFixture[str]
) -> None:
    limits(run_release_timeout=0.05, run_grace_period=0.05)
    assert main.main(["run", "-n", "2", launch.write(SAVES)]) == 143
    output = capfd.readouterr()
    assert output.out == "[1] saved\n"
    assert output.err.splitlines() == ["aiocoll run: stopped by SIGTERM"]


class StoppedElsewhere(TwoHosts):
    """Restarts of a job on two hosts; when this host stops, the other host has already ended by the same signal."""

    def report(self, state: HostState) -> None:
        if state.phase == Phase.QUITS:
            self._notify(Verdict(None, "host 1 was stopped by SIGTERM"))


def test_rank_keeps_the_full_time_limit_when_another_host_ends_at_once(
    launch: Launch, limits: Limits, capfd: pytest.CaptureFixture[str]
) -> None:
    limits(run_release_timeout=0.05, run_grace_period=0.05)

    def environment(start: RankStart) -> dict[str, str]:
        return {**os.environ, "RANK": str(start.rank)}

    program = Program((launch.write(SAVES),), range(1, 2), environment, b"k" * 32)
    supervise(program, StoppedElsewhere(HostState(0, Phase.RUNS)))
    assert capfd.readouterr().out == "[1] saved\n"


@pytest.mark.slow
def test_stuck_rank_is_named_with_its_line_while_the_launcher_waits(
    launch: Launch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Handle SIGTERM in the event loops of the ranks, as servers do, while the loop of rank 1 is blocked."""
    script = launch.write("""
        import asyncio, os, signal, threading, time
        import aiocoll

        async def main():
            stop = asyncio.Event()
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
            async with aiocoll.new_group() as pg:
                await pg.barrier()
                if pg.rank() == 1:
                    threading.Timer(1, os.kill, (os.getppid(), signal.SIGTERM)).start()
                    time.sleep(600)
                await stop.wait()

        asyncio.run(main())
    """)
    assert main.main(["run", "-n", "2", "--kill-after", "3", script]) == 143
    lines = [line for line in capfd.readouterr().err.splitlines() if "is stuck" in line]
    place = re.escape(f"{script}:12 in main")
    assert len(lines) == 1
    assert re.match(rf"aiocoll run: rank 1 is stuck: event loop blocked for [12]\.\d s, at {place}", lines[0])
