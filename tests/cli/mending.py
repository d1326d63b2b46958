"""Programs for tests of restarts: one that mends its group by itself, as elastic ones do, and what it says."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.cli.conftest import Job

__all__ = ["ELASTIC", "MENDS", "Ranks", "enough", "states"]

#: Ranks add up, each time 2 ** 0 + ... + 2 ** (WORLD_SIZE - 1), until there is the file of the first argument. They
#: leave others beside it, with their rank, or "new", and their process.
MENDS = """
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

#: The same by `aiocoll.elastic`.
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
    """Return the file with which ranks that add up have done so often enough."""
    return folder / "enough"


class Ranks:
    """What the ranks of a launcher's job say, by their numbers there.

    Attributes:
        pids: the latest process of each.
        started: the environment of each start, in order.
    """

    def __init__(self, job: Job) -> None:
        self.job = job
        self.pids: dict[int, int] = {}
        self.started: list[tuple[int, list[str | None]]] = []
        self.lines: list[tuple[int, str]] = []

    def read(self, pattern: str, times: int) -> list[str]:
        """Read their output until lines that match have come so many times; return the first group of each."""
        found: list[str] = []
        while len(found) < times:
            line = self.job.process.stdout.readline()
            assert line, (self.lines, self.job.process.stderr.read())
            rank, said = self._heard(line.rstrip("\n"))
            self.lines.append((rank, said))
            if match := re.fullmatch(pattern, said):
                found.append(match[1])
        return found

    def kill(self, *ranks: int) -> None:
        for rank in ranks:
            os.kill(self.pids[rank], signal.SIGKILL)

    def _heard(self, line: str) -> tuple[int, str]:
        match = re.fullmatch(r"\[(\d+)\] (.*)", line)
        assert match, line
        rank, said = int(match[1]), match[2]
        if said.startswith("started "):
            pid, *environment = json.loads(said.removeprefix("started "))
            self.pids[rank] = pid
            self.started.append((rank, environment))
        return rank, said


def states(text: str) -> list[Any]:
    """Return the states with which ranks were done."""
    return [json.loads(each) for each in re.findall(r"^\[\d+\] done (.*)$", text, re.MULTILINE)]
