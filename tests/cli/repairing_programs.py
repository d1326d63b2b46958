"""Programs for restart tests: groups that repair themselves after a loss, and the output of their ranks."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.cli.conftest import Job

__all__ = ["ELASTIC", "REPAIRING", "Ranks", "enough", "states"]

#: Ranks repeat allreduces with the sum 2 ** 0 + ... + 2 ** (WORLD_SIZE - 1), until the file named by the first argument
#: exists. Each process creates a file in the same directory, named by its rank, or "new", and its pid.
REPAIRING = """
    import asyncio, json, os, sys, time
    from pathlib import Path
    import aiocoll
    from aiocoll.launcher import report_elastic

    SIZE, ENOUGH = int(os.environ["WORLD_SIZE"]), Path(sys.argv[1])

    async def become_a_rank():
        while True:
            try:
                return await aiocoll.new_group(timeout=30)
            except aiocoll.RendezvousError:
                if "AIOCOLL_JOIN" not in os.environ:
                    raise

    async def whole(pg, state):
        while True:
            try:
                if missing := SIZE - pg.size():
                    old, pg = pg, await pg.grow(missing, timeout=30)
                    await old.shutdown()
                return pg, await pg.broadcast_object(state, 0)
            except (aiocoll.GroupError, aiocoll.RendezvousError):
                old, pg = pg, await pg.shrink()
                await old.shutdown()

    async def main():
        pg = await become_a_rank()
        report_elastic()
        pg, state = await whole(pg, {"steps": 0, "sum": 0, "enough": False})
        lost = None
        print("member of", pg.size())
        (ENOUGH.parent / f"member {os.environ.get('RANK', 'new')} {os.getpid()}").touch()
        while not state["enough"]:
            try:
                total = await pg.allreduce(2 ** pg.rank())
                enough = await pg.broadcast_object(ENOUGH.exists(), 0)
                state = {"steps": state["steps"] + 1, "sum": state["sum"] + total, "enough": enough}
                if lost is not None:
                    print("whole after", time.monotonic() - lost)
                    lost = None
            except aiocoll.GroupError:
                lost = lost or time.monotonic()
                pg, state = await whole(pg, state)
        await pg.shutdown()
        print("done", json.dumps(state))

    names = ("RANK", "LOCAL_RANK", "AIOCOLL_JOIN", "AIOCOLL_RESTART_COUNT")
    print("started", json.dumps([os.getpid(), *map(os.environ.get, names)]))
    asyncio.run(main())
"""

#: The program `REPAIRING`, written with `aiocoll.elastic`.
ELASTIC = """
    import asyncio, json, os, sys, time
    from pathlib import Path
    import aiocoll

    ENOUGH = Path(sys.argv[1])

    async def main():
        state, lost, number = {"steps": 0, "sum": 0, "enough": False}, None, 0
        async for pg in aiocoll.elastic(state=state, timeout=30):
            number += 1
            if number == 1:
                print("member of", pg.size())
                (ENOUGH.parent / f"member {os.environ.get('RANK', 'new')} {os.getpid()}").touch()
            try:
                while not state["enough"]:
                    total = await pg.allreduce(2 ** pg.rank())
                    enough = await pg.broadcast_object(ENOUGH.exists(), 0)
                    state.update(steps=state["steps"] + 1, sum=state["sum"] + total, enough=enough)
                    if lost is not None:
                        print("whole after", time.monotonic() - lost)
                        lost = None
            except aiocoll.GroupError:
                lost = lost or time.monotonic()
        print("done", json.dumps(state))

    names = ("RANK", "LOCAL_RANK", "AIOCOLL_JOIN", "AIOCOLL_RESTART_COUNT")
    print("started", json.dumps([os.getpid(), *map(os.environ.get, names)]))
    asyncio.run(main())
"""


def enough(folder: Path) -> Path:
    """Return the file whose creation ends the allreduces of the ranks."""
    return folder / "enough"


class Ranks:
    """The output of a launcher's ranks, by rank.

    Attributes:
        pids: the latest process of each rank.
        started: the environment of each start, in order.
    """

    def __init__(self, job: Job) -> None:
        self.job = job
        self.pids: dict[int, int] = {}
        self.started: list[tuple[int, list[str | None]]] = []
        self.lines: list[tuple[int, str]] = []

    def read(self, pattern: str, times: int) -> list[str]:
        """Read the output until `times` lines match the pattern; return the first group of each match."""
        found: list[str] = []
        while len(found) < times:
            line = self.job.process.stdout.readline()
            assert line, (self.lines, self.job.process.stderr.read())
            rank, text = self._parse_line(line.rstrip("\n"))
            self.lines.append((rank, text))
            if match := re.fullmatch(pattern, text):
                found.append(match[1])
        return found

    def kill(self, *ranks: int) -> None:
        for rank in ranks:
            os.kill(self.pids[rank], signal.SIGKILL)

    def _parse_line(self, line: str) -> tuple[int, str]:
        match = re.fullmatch(r"\[(\d+)\] (.*)", line)
        assert match, line
        rank, text = int(match[1]), match[2]
        if text.startswith("started "):
            pid, *environment = json.loads(text.removeprefix("started "))
            self.pids[rank] = pid
            self.started.append((rank, environment))
        return rank, text


def states(text: str) -> list[Any]:
    """Return the final states that the ranks have printed."""
    return [json.loads(each) for each in re.findall(r"^\[\d+\] done (.*)$", text, re.MULTILINE)]
