"""Fixtures for tests on several hosts, which skip these tests on machines without network namespaces."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack
from functools import cache
from pathlib import Path

import pytest

from tests.hosts.network import ROOT, Host, Network, Process, obstacle

PROGRAM = str(Path(__file__).with_name("program.py"))
#: The job key of all jobs in these tests.
KEY = b"of this test and no other"
#: The port of the store. This port is always free, since each test has a new network.
PORT = 29500

_obstacle = cache(obstacle)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if item.path.parent == here:
            item.add_marker(pytest.mark.hosts)
            item.add_marker(pytest.mark.slow)


@pytest.fixture
def network() -> Iterator[Callable[..., Network]]:
    """Return a function that makes a network of hosts, or of pods with ``pods=True``; a test may call it once."""
    if reason := _obstacle():
        pytest.skip(reason)
    with ExitStack() as stack:
        yield lambda size, **how: stack.enter_context(Network(size, **how))


class Ranks:
    """The processes of a test, which run programs such as `program.py` on the hosts, and end with the test."""

    def __init__(self, path: Path) -> None:
        self._path = path
        kept = {name: value for name, value in os.environ.items() if not name.startswith("AIOCOLL_")}
        # Disable asyncio's debug mode, which reports slow callbacks; these tests expect no error output.
        kept.pop("PYTHONASYNCIODEBUG", None)
        self.environment = kept | {
            "PYTHONPATH": str(ROOT),
            "PYTHONWARNINGS": "error",
        }
        self._processes: list[Process] = []

    async def start(
        self, host: Host, what: str, rank: int, world_size: int, method: str, user: int = 0, **env: str
    ) -> Process:
        """Start one rank with the init method `method`, as root or as the user with the id `user`."""
        place = {"RANK": str(rank), "WORLD_SIZE": str(world_size), "METHOD": method}
        return await self.start_program(host, PROGRAM, what, user=user, **place, **env)

    async def start_program(self, host: Host, *command: str, user: int = 0, **env: str) -> Process:
        """Start another Python program that has the job key."""
        key = {"AIOCOLL_JOB_KEY_FILE": str(self._key_of(user))}
        process = await Process.start(host, command, self.environment | key | env, user)
        self._processes.append(process)
        return process

    async def start_all(self, network: Network, what: str, method: str | None = None, **env: str) -> list[Process]:
        """Start one rank on each host; rank 0 hosts the store unless `method` names another store."""
        method = f"tcp://{network.hosts[0].ipv4}:{PORT}" if method is None else method
        size = len(network.hosts)
        return [await self.start(host, what, host.number, size, method, **env) for host in network.hosts]

    async def start_launchers(
        self, network: Network, what: str, master: str, each: int = 1, **env: str
    ) -> list[Process]:
        """Start `each` ranks per host with `aiocoll run`; the launcher of host 0 hosts the store at `master`."""
        return [await self.start_launcher(network, host, what, master, each, **env) for host in network.hosts]

    async def start_launcher(
        self, network: Network, host: Host, what: str, master: str, each: int = 1, **env: str
    ) -> Process:
        """Start the launcher of one host."""
        environment = self.environment | {"METHOD": "env://"} | env
        hosts = ["--nnodes", str(len(network.hosts)), "--node-rank", str(host.number), "--master-addr", master]
        key = ["--job-key-file", str(self._key_of(0))]
        command = ["-m", "aiocoll", "run", "-n", str(each), *hosts, *key, PROGRAM, what]
        process = await Process.start(host, command, environment)
        self._processes.append(process)
        return process

    async def start_doctor(
        self, host: Host, nnodes: int, master: str, *more: str, key: bytes = KEY, **env: str
    ) -> Process:
        """Start `aiocoll doctor` on one of several hosts; `master` is the address of the first host."""
        file = self._path / f"{key.hex()}.key"
        file.touch(mode=0o600)
        file.write_bytes(key)
        hosts = ["--nnodes", str(nnodes), "--node-rank", str(host.number), "--master-addr", master]
        command = ["-m", "aiocoll", "doctor", "-n", "1", *hosts, "--job-key-file", str(file), *more]
        self._processes.append(await Process.start(host, command, self.environment | env))
        return self._processes[-1]

    def _key_of(self, user: int) -> Path:
        """Return the path of a file that has the job key and is owned by the user with this id."""
        file = self._path / f"{user}.key"
        if not file.exists():
            file.touch(mode=0o600)
            file.write_bytes(KEY)
            os.chown(file, user, -1)
        return file

    async def close(self) -> None:
        """Kill all processes that still run."""
        await asyncio.gather(*(process.kill() for process in self._processes))


@pytest.fixture
async def ranks(tmp_path: Path) -> AsyncIterator[Ranks]:
    ranks = Ranks(tmp_path)
    yield ranks
    await ranks.close()
