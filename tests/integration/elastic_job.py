"""An elastic program, and a supervisor that kills its processes at random moments and starts newcomers.

python -m tests.integration.elastic_job PLAN     the supervisor; prints its counts
python -m tests.integration.elastic_job          a process of the program; reads its ticket from standard input
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import pickle
import random
import signal
import sys
import tempfile
import time
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

import aiocoll
from aiocoll import GroupError, Meeting, ReduceOp, Ticket

#: Number of elements of the array that each step reduces, and of the array in the state.
COUNT = 50_000
#: The timeout of each action in seconds; each action takes less than 50 % of this time.
LIMIT = 60.0
_PR_SET_PDEATHSIG = 1


@dataclass
class Plan:
    """The parameters of a supervisor.

    Attributes:
        size: The number of ranks.
        kills: The number of processes to kill.
        seed: The seed of the moments and victims.
        host: The host of the meeting.
        hosts: For each host, the command prefix that runs a command there. The ranks take the hosts in turn.
    """

    size: int
    kills: int
    seed: int = 0
    host: str = "127.0.0.1"
    hosts: list[list[str]] = field(default_factory=lambda: [[]])


# -- the program


async def work(ticket: Ticket, stop: Path) -> None:
    """Take steps as an elastic program, with the step numbers summed up in the state, until the file `stop` exists."""
    state: dict[str, Any] = {"step": 0, "sum": 0, "array": np.zeros(COUNT)}
    async with aclosing(aiocoll.elastic(init_method=ticket, state=state, timeout=LIMIT)) as groups:
        async for pg in groups:
            check(state)
            print_json(size=pg.size(), rank=pg.rank())
            with suppress(GroupError):
                stopping = False
                while not stopping:
                    stopping = await step(pg, state, stop)
    check(state)
    print_json(steps=state["step"])


async def step(pg: aiocoll.ProcessGroup, state: dict[str, Any], stop: Path) -> bool:
    """Take one step with all ranks; return whether this step was the last one."""
    number, size = state["step"] + 1, pg.size()
    total = await pg.allreduce(number * (pg.rank() + 1))
    assert total == number * size * (size + 1) // 2
    array = np.full(COUNT, float(number))
    await pg.allreduce(array, ReduceOp.AVG)
    last = await pg.allreduce(exists_as_int(stop), ReduceOp.MAX)
    state["step"] = number
    state["sum"] += number
    state["array"] += array
    return bool(last)


def exists_as_int(path: Path) -> int:
    return int(path.exists())


def check(state: dict[str, Any]) -> None:
    total = state["step"] * (state["step"] + 1) // 2
    assert state["sum"] == total
    assert (state["array"] == total).all()


def print_json(**what: Any) -> None:
    print(json.dumps(what), flush=True)


# -- the supervisor


class Worker:
    """A process of the elastic program, as the supervisor sees it.

    Attributes:
        host: The index of its host.
        started: The time of its start.
        report: Its latest report.
        killed: Whether the supervisor has killed it.
    """

    def __init__(self, process: asyncio.subprocess.Process, host: int) -> None:
        self.host = host
        self.started = time.monotonic()
        self.report: dict[str, Any] = {}
        self.killed = False
        self._process = process

    def kill(self) -> None:
        """Kill the process."""
        self._process.kill()
        self.killed = True

    async def record_reports(self, changed: asyncio.Event) -> None:
        """Record the latest report of the process until the process ends; check how it ended."""
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        async for line in self._process.stdout:
            self.report = json.loads(line)
            changed.set()
        error = (await self._process.stderr.read()).decode()
        assert (await self._process.wait(), error) == (-signal.SIGKILL if self.killed else 0, ""), error


class Supervisor:
    """A supervisor that kills processes at random moments, and starts a newcomer for each killed process."""

    def __init__(self, plan: Plan, meeting: Meeting, stop: Path) -> None:
        self._plan = plan
        self._meeting = meeting
        self._stop = stop
        self._random = random.Random(plan.seed)
        self._changed = asyncio.Event()
        self._workers: list[Worker] = []
        self._recording: list[asyncio.Task[None]] = []
        self._recoveries: list[float] = []
        self._zero = self._double = 0

    async def run(self) -> dict[str, Any]:
        """Start the workers and kill as many as planned; return the numbers of kills and steps, and recovery times."""
        plan = self._plan
        for rank in range(plan.size):
            await self._start(self._meeting.ticket(rank), rank % len(plan.hosts))
        await self._wait_for_full_group()
        killed = 0
        while killed < plan.kills:
            killed += await self._kill(min(2 if killed % 5 == 3 else 1, plan.kills - killed), killed % 3 == 0)
            if killed % 4:  # wait for the recovery, except after every fourth kill
                began = self._workers[-1].started
                await self._wait_for_full_group()
                self._recoveries.append(time.monotonic() - began)
        await self._wait_for_full_group()
        self._stop.touch()
        await asyncio.gather(*self._recording)
        ended = [worker.report["steps"] for worker in self._workers if not worker.killed]
        assert len(ended) == plan.size
        assert len(set(ended)) == 1
        return {
            "kills": killed,
            "steps": ended[0],
            "of rank 0": self._zero,
            "two at once": self._double,
            "recovery": [round(float(np.percentile(self._recoveries, q)), 2) for q in (50, 100)],
        }

    async def _start(self, ticket: Ticket, host: int) -> None:
        process = await asyncio.create_subprocess_exec(
            *(*self._plan.hosts[host], sys.executable, "-m", "tests.integration.elastic_job"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        assert process.stdin is not None
        process.stdin.write(pickle.dumps((ticket, self._stop)))
        process.stdin.close()
        worker = Worker(process, host)
        self._workers.append(worker)
        self._recording.append(asyncio.create_task(worker.record_reports(self._changed)))

    def _live_workers(self) -> list[Worker]:
        return [worker for worker in self._workers if not worker.killed]

    async def _wait_for_full_group(self) -> None:
        """Wait until all processes are members of a group of the planned size."""
        async with asyncio.timeout(LIMIT):
            while any(worker.report.get("size") != self._plan.size for worker in self._live_workers()):
                for task in self._recording:
                    if task.done():
                        await task
                waiting = [asyncio.ensure_future(self._changed.wait()), *(t for t in self._recording if not t.done())]
                await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                waiting[0].cancel()
                self._changed.clear()

    async def _kill(self, count: int, zero: bool) -> int:
        """Kill `count` processes at a random moment, but keep one former group member alive on each host."""
        await asyncio.sleep(self._random.uniform(0, 0.3))
        live = self._live_workers()
        kept = {host: self._random.choice(self._members(host)) for host in {worker.host for worker in live}}
        first = [worker for worker in live if zero and worker.report.get("rank") == 0]
        if first and kept[first[0].host] is first[0]:
            others = [worker for worker in self._members(first[0].host) if worker is not first[0]]
            kept[first[0].host] = self._random.choice(others or first)
        candidates = [worker for worker in live if worker not in kept.values()]
        self._random.shuffle(candidates)
        victims = sorted(candidates, key=lambda worker: worker not in first)[:count]
        for victim in victims:
            self._zero += victim.report.get("rank") == 0
            victim.kill()
        self._double += len(victims) == 2
        for worker in self._live_workers():
            worker.report.pop("size", None)
        for victim in victims:
            await self._start(self._meeting.newcomer(), victim.host)
        return len(victims)

    def _members(self, host: int) -> list[Worker]:
        return [worker for worker in self._live_workers() if worker.host == host and "rank" in worker.report]

    async def close(self) -> None:
        """Kill all remaining processes."""
        for worker in self._live_workers():
            with suppress(ProcessLookupError):
                worker.kill()
        await asyncio.gather(*self._recording, return_exceptions=True)


async def supervise(plan: Plan) -> dict[str, Any]:
    """Run the elastic program under a `Supervisor`; return the counts and the recovery times."""
    with tempfile.TemporaryDirectory() as folder:
        async with Meeting(plan.size, host=plan.host) as meeting:
            supervisor = Supervisor(plan, meeting, Path(folder, "stop"))
            try:
                return await supervisor.run()
            finally:
                await supervisor.close()


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print_json(**asyncio.run(supervise(Plan(**json.loads(sys.argv[1])))))
    else:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # die together with the supervisor
        asyncio.run(work(*pickle.load(sys.stdin.buffer)))
