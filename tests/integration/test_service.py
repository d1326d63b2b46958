"""The service of the examples: it answers while its ranks count together, whatever its clients and ranks do."""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
import socket
import subprocess
from collections.abc import AsyncIterator
from typing import Any

import pytest

from .conftest import LIMIT, ROOT, Ranks, free_port

aiohttp = pytest.importorskip("aiohttp", reason="aiohttp is not installed")

SCRIPT = str(ROOT / "examples" / "service.py")
CLIENTS = 8
REQUESTS = 8  # of each kind, of each client
#: Seconds within which impatient clients go away; a round takes 0.05 at least.
PATIENCE = 0.05


class Service:
    """Two ranks and a client."""

    def __init__(self, ranks: Ranks, port: int, session: Any) -> None:
        self._ranks = ranks
        self._session = session
        self._http = free_port("127.0.0.1", socket.AF_INET)
        self._environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
        self.processes: list[subprocess.Popen[str]] = []
        self.sent = [0] * 8

    def start(self, rank: int) -> subprocess.Popen[str]:
        environment = self._environment | {"RANK": str(rank)}
        return self._ranks.start(SCRIPT, "--port", str(self._http), env=environment)

    async def count(self, rank: int, bucket: int) -> None:
        async with self._session.post(f"http://127.0.0.1:{self._http + rank}/count/{bucket}") as response:
            assert response.status == 204
        self.sent[bucket] += 1

    async def stats(self, rank: int) -> dict[str, Any]:
        async with self._session.get(f"http://127.0.0.1:{self._http + rank}/stats") as response:
            assert response.status == 200
            told: dict[str, Any] = await response.json()
            return told

    async def impatient(self, rank: int, patience: float) -> None:
        """Ask, and go away before the answer comes, perhaps."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(patience):
                await self.stats(rank)

    async def busy(self, ranks: list[int]) -> None:
        """Let many clients ask at once, who go away at random."""
        async with asyncio.TaskGroup() as tasks:
            for seed in range(CLIENTS):
                tasks.create_task(self._client(ranks, random.Random(seed)))

    async def _client(self, ranks: list[int], chance: random.Random) -> None:
        for _ in range(REQUESTS):
            await self.count(chance.choice(ranks), chance.randrange(8))
            await self.stats(chance.choice(ranks))
            await self.impatient(chance.choice(ranks), chance.random() * PATIENCE)

    async def settled(self, rank: int) -> dict[str, Any]:
        """Ask until the answer has everything that was sent."""
        async with asyncio.timeout(LIMIT):
            while (told := await self.stats(rank))["total"] != self.sent:
                pass
        return told

    def end(self) -> list[str]:
        """Stop the service through one of its ranks; return the last words of all."""
        self.processes[-1].send_signal(signal.SIGTERM)
        last = []
        for process in self.processes:
            out, err = process.communicate(timeout=LIMIT)
            assert err == ""
            assert process.returncode == 0
            last.append(out.splitlines()[-1])
        return last


@contextlib.asynccontextmanager
async def serving(ranks: Ranks, port: int) -> AsyncIterator[Service]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=LIMIT)) as session:
        service = Service(ranks, port, session)
        service.processes = [service.start(rank) for rank in range(2)]
        for rank, process in enumerate(service.processes):
            assert process.stdout is not None
            assert process.stdout.readline().startswith(f"rank {rank} of 2 serves http://127.0.0.1:")
        yield service


async def test_requests_that_are_cancelled_disturb_no_collective(ranks: Ranks, port: int) -> None:
    async with serving(ranks, port) as service:
        await service.busy([0, 1])
        # Rank 1 waits in its allreduce for rank 0, so that is where its clients leave it.
        assert (await service.settled(1))["gone"] > 0
        await service.settled(0)
        assert sum(service.sent) == CLIENTS * REQUESTS
        told = service.end()
    assert [line.split(" in ")[0] for line in told] == [
        f"rank {rank}: {CLIENTS * REQUESTS} counted" for rank in range(2)
    ]
