"""Processes that meet on a Redis server, with given or assigned ranks, and shrink and grow their group."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.certificates import Authority
from tests.integration.conftest import LIMIT, PROGRAM
from tests.redis_server import RedisServer, redis_server

if TYPE_CHECKING:
    from tests.integration.conftest import Ranks

#: The result of the action "every" of `program.py`: the number of element counts with which it makes its calls.
COUNTS = 4

#: A rank with its own store object. Arguments: server URL, world size, and the rank unless the store assigns ranks.
OWN_STORE = """
import asyncio, sys, aiocoll

async def main(url, world_size, *rank):
    numbers = dict(zip(["world_size", "rank"], map(int, [world_size, *rank])))
    async with aiocoll.RedisStore(url, job="own", timeout=30) as store:
        async with aiocoll.new_group(store=store, **numbers) as pg:
            print(await pg.allgather_object(pg.rank()))
        try:
            await store.get("goes on", timeout=30)
        except aiocoll.StoreUnavailableError as error:
            print(error)

asyncio.run(main(*sys.argv[1:]))
"""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    folder = tmp_path / "redis"
    folder.mkdir()
    with redis_server(folder) as server:
        yield server


@pytest.mark.slow
def test_ranks_with_given_numbers_meet_on_redis(ranks: Ranks, server: RedisServer) -> None:
    assert ranks("every", server.url, 3) == [COUNTS] * 3


@pytest.mark.slow
def test_ranks_meet_repeatedly_on_redis(ranks: Ranks, server: RedisServer) -> None:
    assert ranks("meet", server.url, 3, env={"AIOCOLL_TRANSPORT": "tcp"}) == [3] * 3


@pytest.mark.slow
def test_ranks_meet_on_redis_over_tls_with_a_password(ranks: Ranks, tmp_path: Path) -> None:
    files = Authority(tmp_path).make("DNS:localhost")
    with redis_server(tmp_path, files, "--requirepass", "hunter2") as server:
        url = server.tls_url.replace("//", "//:hunter2@")
        assert ranks("meet", url, 2, env={"SSL_CERT_FILE": files.ca}) == [2] * 2


@pytest.mark.slow
def test_ranks_without_given_numbers_are_assigned_on_redis(ranks: Ranks, server: RedisServer) -> None:
    """Check that each process gets a rank, and that reads of its store fail after the server has lost its data."""
    processes = [ranks.start("-c", OWN_STORE, server.url, "4") for _ in range(4)]
    assert sorted(next_line(process) for process in processes) == ["[0, 1, 2, 3]"] * 4
    server.execute("FLUSHALL")
    for process in processes:
        assert "has lost the entries of this job" in next_line(process)
        out, err = process.communicate(timeout=LIMIT)
        assert (out, err, process.returncode) == ("", "", 0)


@pytest.mark.slow
def test_ranks_wait_for_a_late_redis_server(ranks: Ranks, server: RedisServer) -> None:
    server.kill()
    processes = [ranks.start("-c", OWN_STORE, server.url, "2", str(rank)) for rank in range(2)]
    server.start()
    for process in processes:
        assert next_line(process) == "[0, 1]"
    server.execute("FLUSHALL")
    for process in processes:
        assert process.communicate(timeout=LIMIT)[1] == ""


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 2])
def test_lost_rank_of_a_group_on_redis_is_replaced(ranks: Ranks, server: RedisServer, victim: int) -> None:
    env = {"VICTIM": str(victim), "AIOCOLL_JOB_ID": "elastic"}
    processes = [ranks.start(PROGRAM, "recover", server.url, str(rank), "3", env=env) for rank in range(3)]
    processes.append(ranks.start(PROGRAM, "join", server.url, env=env))
    outcomes = [result(process, -signal.SIGKILL if number == victim else 0) for number, process in enumerate(processes)]
    assert outcomes.pop() == {"rank": 2, "size": 3, "result": 3}
    assert [outcomes[rank]["result"][1] for rank in range(3) if rank != victim] == [3, 3]
    assert server.execute("EXISTS", "aiocoll:elastic") == "1"


def next_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def result(process: subprocess.Popen[str], code: int) -> Any:
    """Wait for a rank to end with the exit code `code`; return its printed result."""
    out, err = process.communicate(timeout=LIMIT)
    assert (err, process.returncode) == ("", code)
    return json.loads(out) if out else None
