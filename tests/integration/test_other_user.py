"""Attacks by another user: they cannot join, read or stop a job that has a job key or uses unix sockets."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        os.geteuid() != 0 or not sys.platform.startswith("linux"), reason="only root can become another user"
    ),
]


@pytest.fixture
def folder() -> Iterator[str]:
    """Yield a sticky directory, in which every user may create files, and remove only their own files."""
    path = tempfile.mkdtemp(dir="/tmp")
    os.chmod(path, 0o1777)
    yield path
    shutil.rmtree(path)


def key_in(folder: str) -> str:
    file = Path(folder, "key")
    file.touch(mode=0o600)
    file.write_text("a key that no other user has")
    return str(file)


class Program:
    """A process that prints lines of JSON, and continues when the test sends a line."""

    def __init__(self, stack: ExitStack, name: str, env: dict[str, str], *prefix: str, **given: Any) -> None:
        command = [*prefix, sys.executable, str(HERE / f"{name}.py"), json.dumps(given)]
        env = {**os.environ, "PYTHONPATH": str(HERE.parents[1]), **env}
        pipe = subprocess.PIPE
        self._process = stack.enter_context(
            subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, env=env, text=True)
        )
        stack.callback(self._process.kill)
        self.pid = self._process.pid

    async def next_json(self) -> Any:
        assert self._process.stdout is not None
        async with asyncio.timeout(60):
            line = await asyncio.to_thread(self._process.stdout.readline)
        assert line, (await self.finish())[1]
        return json.loads(line)

    def resume(self) -> None:
        assert self._process.stdin is not None
        print(file=self._process.stdin, flush=True)

    async def finish(self) -> tuple[int, str]:
        _, errors = await asyncio.to_thread(self._process.communicate, timeout=60)
        return self._process.returncode, errors


@pytest.mark.parametrize("prefix", [[], ["unshare", "-U"]], ids=["", "users without numbers"])
@pytest.mark.parametrize(
    ("method", "transport"),
    [("unix:{}/store", "auto"), ("file://{}/store", "unix"), ("tcp", "tcp"), ("tcp", "shm")],
)
async def test_other_user_cannot_join_read_or_stop_a_job(
    method: str, transport: str, prefix: list[str], folder: str, port: int
) -> None:
    """Attack while the ranks work; then let the ranks meet again while the attacker keeps connections open.

    In a user namespace without mapped users, both users have the number 65534 for the ranks.
    """
    if prefix and await asyncio.to_thread(subprocess.call, [*prefix, "true"]):
        pytest.skip("no user namespaces")
    store = ["127.0.0.1", port] if method == "tcp" else None
    method = f"tcp://127.0.0.1:{port}" if store else method.format(folder)
    env = {"AIOCOLL_JOB_KEY_FILE": key_in(folder)} if store else {}
    with ExitStack() as stack:
        place = {"method": method, "transport": transport, "folder": folder}
        ranks = [Program(stack, "rank_attacked", env, *prefix, rank=rank, **place) for rank in range(2)]
        addresses = [await rank.next_json() for rank in ranks] + [store] * (store is not None)
        pids = [rank.pid for rank in ranks]
        attacker = Program(stack, "other_user", {}, pids=pids, folder=folder, addresses=addresses)
        found = await attacker.next_json()
        ranks[0].resume()
        assert [await rank.next_json() for rank in ranks] == [3.0, 3.0]
        assert [await rank.finish() for rank in ranks] == [(0, "")] * 2
        attacker.resume()
        assert await attacker.finish() == (0, "")
        assert not [name for name in os.listdir("/dev/shm") if "aiocoll" in name]
    for address in addresses:
        assert found.pop(f"bind {address}") == "EADDRINUSE"
        assert found.pop(f"hold {address}") == "got 'connections'"
        assert found.pop(f"join {address}") == "got 'set()'"
    assert len(found) >= 2 * 20 + 2 * 6
    assert set(found.values()) == {"EACCES", "EPERM"}, found
