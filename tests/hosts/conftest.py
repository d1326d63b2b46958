"""Tests on several hosts: skipped with the reason where there can be none."""

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
#: Of all jobs of these tests.
KEY = b"of this test and no other"
#: Every network is new, so every port is free.
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
    """Make a network of so many hosts, one in a test; or of so many with ``pods=True``."""
    if reason := _obstacle():
        pytest.skip(reason)
    with ExitStack() as stack:
        yield lambda size, **how: stack.enter_context(Network(size, **how))


class Ranks:
    """Starts `program.py` on hosts; all of it has ended when the test has."""

    def __init__(self, path: Path) -> None:
        self._path = path
        kept = {name: value for name, value in os.environ.items() if not name.startswith("AIOCOLL_")}
        # Debug mode reports slow callbacks, and these tests expect silence.
        kept.pop("PYTHONASYNCIODEBUG", None)
        self.environment = kept | {
            "PYTHONPATH": str(ROOT),
            "PYTHONWARNINGS": "error",
        }
        self._processes: list[Process] = []

    async def start(
        self, host: Host, what: str, rank: int, world_size: int, method: str, user: int = 0, **env: str
    ) -> Process:
        """Start one rank, which meets the others by the init method `method`; as root, or a `user` by number."""
        place = {"RANK": str(rank), "WORLD_SIZE": str(world_size), "METHOD": method}
        return await self.program(host, PROGRAM, what, user=user, **place, **env)

    async def program(self, host: Host, *command: str, user: int = 0, **env: str) -> Process:
        """Start another Python program, which has the key."""
        key = {"AIOCOLL_JOB_KEY_FILE": str(self._key_of(user))}
        process = await Process.start(host, command, self.environment | key | env, user)
        self._processes.append(process)
        return process

    async def start_all(self, network: Network, what: str, method: str | None = None, **env: str) -> list[Process]:
        """Start one rank on each host; rank 0 has the store unless `method` says otherwise."""
        method = f"tcp://{network.hosts[0].ipv4}:{PORT}" if method is None else method
        size = len(network.hosts)
        return [await self.start(host, what, host.number, size, method, **env) for host in network.hosts]

    async def launch(self, network: Network, what: str, master: str, each: int = 1, **env: str) -> list[Process]:
        """Start ranks, `each` on a host, by `aiocoll run`; the launcher of host 0, which is `master`, has the store."""
        return [await self.launch_one(network, host, what, master, each, **env) for host in network.hosts]

    async def launch_one(
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

    async def examine(self, host: Host, nnodes: int, master: str, *more: str, key: bytes = KEY, **env: str) -> Process:
        """Start `aiocoll doctor` on one of several hosts, of which `master` is the first."""
        file = self._path / f"{key.hex()}.key"
        file.touch(mode=0o600)
        file.write_bytes(key)
        hosts = ["--nnodes", str(nnodes), "--node-rank", str(host.number), "--master-addr", master]
        command = ["-m", "aiocoll", "doctor", "-n", "1", *hosts, "--job-key-file", str(file), *more]
        self._processes.append(await Process.start(host, command, self.environment | env))
        return self._processes[-1]

    def _key_of(self, user: int) -> Path:
        """Return a file with the key that is this user's own."""
        file = self._path / f"{user}.key"
        if not file.exists():
            file.touch(mode=0o600)
            file.write_bytes(KEY)
            os.chown(file, user, -1)
        return file

    async def close(self) -> None:
        """End all that have not ended."""
        await asyncio.gather(*(process.kill() for process in self._processes))


@pytest.fixture
async def ranks(tmp_path: Path) -> AsyncIterator[Ranks]:
    ranks = Ranks(tmp_path)
    yield ranks
    await ranks.close()
