"""Processes that are killed or stopped during a rendezvous, and processes that start with the same rank."""

from __future__ import annotations

import asyncio
import base64
import os
import pickle
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from aiocoll import FileStore, Meeting, Store, TCPStore
from aiocoll.store import StoreServer

LIMIT = 60.0

PROGRAM = """
import asyncio, base64, pickle, sys
import aiocoll

async def main():
    kind, place, rank, size = sys.argv[1:]
    if kind == "ticket":
        made = pickle.loads(base64.b64decode(place)).join(timeout=60)
    elif kind == "file":
        made = aiocoll.new_group(init_method=place, rank=int(rank), world_size=int(size), timeout=60)
    else:
        made = aiocoll.new_group(timeout=60)
    async with made as pg:
        assert await pg.allreduce(1) == int(size)

asyncio.run(main())
"""


class Ranks:
    """The processes of one job, which meet by environment variables, in a file or with tickets."""

    def __init__(self, kind: str, size: int, folder: Path) -> None:
        self.kind = kind
        self.size = size
        self.running: list[subprocess.Popen[str]] = []
        self._folder = folder
        self._meeting = Meeting(size)
        self._server = StoreServer()

    def __enter__(self) -> Ranks:
        self._meeting.__enter__()
        self._server.start()
        return self

    def __exit__(self, *exc: object) -> None:
        for process in self.running:
            process.kill()
            process.communicate()
        self._meeting.__exit__()
        self._server.close()

    def start(self, rank: int) -> subprocess.Popen[str]:
        """Start a process with the rank `rank`."""
        place = f"file://{self._folder}/job"
        if self.kind == "ticket":
            place = base64.b64encode(pickle.dumps(self._meeting.ticket(rank))).decode()
        env = {
            **os.environ,
            "RANK": str(rank),
            "WORLD_SIZE": str(self.size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self._server.port),
            "AIOCOLL_STORE": "launcher",
            "PYTHONASYNCIODEBUG": "",  # asyncio's debug mode would report a stopped rank as a slow task
        }
        command = [sys.executable, "-c", PROGRAM, self.kind, place, str(rank), str(self.size)]
        process = subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True)
        self.running.append(process)
        return process

    def store(self) -> Store:
        """Open another handle on the store in which the ranks meet."""
        if self.kind == "file":
            return FileStore(self._folder / "job")
        if self.kind == "env":
            return TCPStore("127.0.0.1", self._server.port)
        ticket = self._meeting.ticket()
        return TCPStore(ticket.host, ticket.port, key=ticket.key, job=ticket.job)

    async def final_lines(self) -> list[tuple[int, str]]:
        """Wait for all processes to end; return the exit code and the last line of standard error of each process."""
        found = await asyncio.gather(*(asyncio.to_thread(each.communicate) for each in self.running))
        self.running, ended = [], self.running
        return [
            (each.returncode, (err.strip().splitlines() or [""])[-1])
            for each, (_, err) in zip(ended, found, strict=True)
        ]


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("kind", ["env", "file", "ticket"])
async def test_rank_killed_during_the_rendezvous_is_replaced(kind: str, victim: int, tmp_path: Path) -> None:
    with Ranks(kind, 3, tmp_path) as ranks:
        async with ranks.store() as store:
            started = [ranks.start(rank) for rank in range(2)]
            await store.wait(["aiocoll/1/card/0", "aiocoll/1/card/1"], timeout=LIMIT)
            started[victim].kill()
            started[victim].communicate()
            ranks.running.remove(started[victim])
            ranks.start(victim)
            await store.wait([f"aiocoll/2/card/{rank}" for rank in range(2)], timeout=LIMIT)
            ranks.start(2)
            assert await ranks.final_lines() == [(0, "")] * 3


@pytest.mark.parametrize("kind", ["env", "file"])
async def test_rank_stopped_during_the_rendezvous_is_not_replaced(kind: str, tmp_path: Path) -> None:
    """Stop a process: a second process with the same rank is refused, and the stopped process meets later."""
    with Ranks(kind, 2, tmp_path) as ranks:
        async with ranks.store() as store:
            stopped = ranks.start(0)
            await store.wait(["aiocoll/1/card/0"], timeout=LIMIT)
            stopped.send_signal(signal.SIGSTOP)
            ranks.running.remove(stopped)
            ranks.start(0)
            ((code, error),) = await ranks.final_lines()
            assert (code, "rank 0 is taken" in error) == (1, True)
            stopped.send_signal(signal.SIGCONT)
            ranks.running.append(stopped)
            ranks.start(1)
            assert await ranks.final_lines() == [(0, "")] * 2
