"""The example service `examples/service.py`: cancelled requests of clients, and replacement of killed ranks."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import re
import signal
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from aiocoll import TCPStore

from .conftest import LIMIT, ROOT, Ranks

aiohttp = pytest.importorskip("aiohttp", reason="aiohttp is not installed")

LOCAL = "127.0.0.1"
SCRIPT = str(ROOT / "examples" / "service.py")
CLIENTS = 8
REQUESTS = 8  # requests per kind and client
#: Maximum seconds until an impatient client disconnects. A round of the service takes at least as long.
PATIENCE = 0.05


class Service:
    """The processes of a service with two ranks, and its clients. A `place` is the index of a process."""

    def __init__(self, ranks: Ranks, store: TCPStore, session: Any) -> None:
        self._ranks = ranks
        self._session = session
        # The test hosts the store, as launchers do, so that the service survives the death of any rank.
        self._environment = {"MASTER_ADDR": LOCAL, "MASTER_PORT": str(store.port), "AIOCOLL_STORE": "launcher"}
        self.processes = [self._start({"RANK": str(rank), "WORLD_SIZE": "2"}) for rank in range(2)]
        self._urls = ["", ""]
        self.sent = [0] * 8

    def _start(self, environment: dict[str, str], *more: str) -> subprocess.Popen[str]:
        return self._ranks.start(SCRIPT, "--port", "0", *more, env=self._environment | environment)

    def wait_until_up(self, place: int, rank: int) -> None:
        """Wait until the process at index `place` serves requests as `rank`."""
        process = self.processes[place]
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith(f"rank {rank} of 2 serves http://{LOCAL}:"), line or process.communicate()
        self._urls[place] = line.split()[-1]

    def kill(self, place: int) -> None:
        """Kill a process, and wait for its end."""
        self.processes[place].kill()
        self.processes[place].communicate(timeout=LIMIT)

    def replace(self, place: int) -> None:
        """Start a process in place of the killed process at index `place`; the new process gets the last rank."""
        self.processes[place] = self._start({}, "--join")
        self.wait_until_up(place, 1)

    async def count(self, place: int, bucket: int) -> None:
        async with self._session.post(f"{self._urls[place]}/count/{bucket}") as response:
            assert response.status == 204
        self.sent[bucket] += 1

    async def stats(self, place: int) -> dict[str, Any]:
        async with self._session.get(f"{self._urls[place]}/stats") as response:
            assert response.status == 200
            answer: dict[str, Any] = await response.json()
            return answer

    async def request_impatiently(self, place: int, patience: float) -> None:
        """Request the statistics, and disconnect after `patience` seconds."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(patience):
                await self.stats(place)

    async def send_requests(self, *places: int) -> None:
        """Let many clients send requests concurrently, and disconnect at random."""
        async with asyncio.TaskGroup() as tasks:
            for seed in range(CLIENTS):
                tasks.create_task(self._run_client(places, random.Random(seed)))

    async def _run_client(self, places: tuple[int, ...], chance: random.Random) -> None:
        for _ in range(REQUESTS):
            await self.count(chance.choice(places), chance.randrange(8))
            await self.stats(chance.choice(places))
            await self.request_impatiently(chance.choice(places), chance.random() * PATIENCE)

    async def wait_for_all_counts(self, place: int) -> dict[str, Any]:
        """Request the statistics until they contain every sent count; return the statistics."""
        async with asyncio.timeout(LIMIT):
            while (answer := await self.stats(place))["total"] != self.sent:
                pass
        return answer

    def stop(self) -> list[str]:
        """Stop the service with a signal to one rank; return the last output line of each rank."""
        self.processes[-1].send_signal(signal.SIGTERM)
        last = []
        for process in self.processes:
            out, err = process.communicate(timeout=LIMIT)
            assert err == ""
            assert process.returncode == 0
            last.append(out.splitlines()[-1])
        return last


@pytest.fixture
async def service(ranks: Ranks) -> AsyncIterator[Service]:
    key = b"of this test and no other"
    async with (
        TCPStore(LOCAL, 0, is_master=True, key=key) as store,
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=LIMIT)) as session,
    ):
        service = Service(ranks, store, session)
        for rank in range(2):
            service.wait_until_up(rank, rank)
        yield service


async def test_cancelled_requests_to_the_service_disturb_no_collective(service: Service) -> None:
    await service.send_requests(0, 1)
    # Rank 1 waits for rank 0 in an allreduce. The clients of rank 1 therefore disconnect during a collective.
    assert (await service.wait_for_all_counts(1))["gone"] > 0
    await service.wait_for_all_counts(0)
    assert [line.split(" in ")[0] for line in service.stop()] == [f"{CLIENTS * REQUESTS} counted"] * 2


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
async def test_killed_rank_of_the_service_is_replaced(victim: int, service: Service) -> None:
    """Check that the other rank replies to every request, and that no count is lost that all ranks knew."""
    other = 1 - victim
    await service.send_requests(0, 1)
    await service.wait_for_all_counts(other)
    service.kill(victim)
    await service.send_requests(other)
    assert (await service.wait_for_all_counts(other))["ranks"] == 1
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(service.send_requests(other))
        tasks.create_task(asyncio.to_thread(service.replace, victim))
    await service.send_requests(0, 1)
    for place in (victim, other):
        assert (await service.wait_for_all_counts(place))["ranks"] == 2
    assert [line.split(" in ")[0] for line in service.stop()] == [f"{4 * CLIENTS * REQUESTS} counted"] * 2


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
async def test_launcher_replaces_a_killed_rank_of_the_service(victim: int, ranks: Ranks) -> None:
    launcher = ranks.start("-m", "aiocoll", "run", "-n", "2", "--max-restarts", "1", SCRIPT, "--port", "0")
    serving_line = re.compile(r"\[(\d)\] rank \d of 2 serves (http://\S+)\n")

    def next_urls(count: int) -> dict[int, str]:
        """Wait until `count` processes serve; return their URLs by the number that the launcher prints."""
        assert launcher.stdout is not None
        found: dict[int, str] = {}
        for line in launcher.stdout:
            if (answer := serving_line.fullmatch(line)) is not None:
                found[int(answer[1])] = answer[2]
            if len(found) == count:
                break
        return found

    async def stats(url: str) -> Any:
        async with session.get(f"{url}/stats") as response:
            return await response.json()

    served = await asyncio.to_thread(next_urls, 2)
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=LIMIT)) as session:
        async with session.post(f"{served[victim]}/count/3") as response:
            assert response.status == 204
        async with asyncio.timeout(LIMIT):
            while sum((await stats(served[1 - victim]))["total"]) == 0:
                pass
        os.kill(rank_process(launcher.pid, victim), signal.SIGKILL)
        served |= await asyncio.to_thread(next_urls, 1)
        for url in served.values():
            answer = await stats(url)
            assert (answer["ranks"], answer["total"]) == (2, [0, 0, 0, 1, 0, 0, 0, 0])
    launcher.send_signal(signal.SIGTERM)
    out, err = await asyncio.to_thread(launcher.communicate, timeout=LIMIT)
    assert launcher.returncode == 0
    # Ignore the launcher's notice that it waits: on a busy machine, ranks may need more than a second to end.
    assert re.sub(r"aiocoll run: waiting for rank .* to end after SIGTERM;.*\n", "", err) == (
        f"aiocoll run: rank {victim} was killed by SIGKILL; a newcomer is started in its place (restart 1 of 1)\n"
    )
    assert sorted(re.findall(r"\[(\d)\] 1 counted in \d+ rounds", out)) == ["0", "1"]


def rank_process(launcher: int, local_rank: int) -> int:
    """Return the id of the launcher's child process with the given LOCAL_RANK."""
    children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    wanted = f"LOCAL_RANK={local_rank}"
    return next(int(pid) for pid in children if wanted in Path(f"/proc/{pid}/environ").read_text().split("\0"))
