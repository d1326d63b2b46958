"""Rendezvous of processes with every init method. The ranks make every call, and leave no temporary files."""

from __future__ import annotations

import importlib.util
import json
import socket
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.integration.conftest import LIMIT, PROGRAM
from tests.ports import free_port

if TYPE_CHECKING:
    from tests.integration.conftest import Ranks

#: The result of the action "every" of `program.py`: the number of element counts with which it makes its calls.
COUNTS = 4


@pytest.mark.slow
def test_ranks_meet_by_environment_variables_in_processes(ranks: Ranks, port: int) -> None:
    env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    assert ranks("every", "env://", 3, numbers=False, env=env) == [COUNTS] * 3


def test_ranks_in_processes_meet_by_a_tcp_address(ranks: Ranks, port: int) -> None:
    env = {"AIOCOLL_TRANSPORT": "tcp"}
    assert ranks("every", f"tcp://127.0.0.1:{port}", 3, env=env) == [COUNTS] * 3


@pytest.mark.slow
def test_ranks_in_processes_meet_by_an_ipv6_address(ranks: Ranks) -> None:
    try:
        port = free_port("::1")
    except OSError:
        pytest.skip("this machine has no IPv6 loopback")
    env = {"AIOCOLL_TRANSPORT": "tcp"}
    assert ranks("every", f"tcp://[::1]:{port}", 2, env=env) == [COUNTS] * 2


@pytest.mark.slow
def test_ranks_with_different_host_names_on_one_machine_meet(ranks: Ranks, port: int) -> None:
    processes = [
        ranks.start(
            PROGRAM, "every", f"tcp://127.0.0.1:{port}", str(rank), "2", env={"AIOCOLL_HOST_ID": f"host {rank}"}
        )
        for rank in range(2)
    ]
    for process in processes:
        out, err = process.communicate(timeout=LIMIT)
        assert (err, process.returncode) == ("", 0)
        assert json.loads(out)["result"] == COUNTS


def test_ranks_in_processes_meet_in_a_file(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks("every", f"file://{tmp_path}/meet", 3) == [COUNTS] * 3


@pytest.mark.slow
def test_rendezvous_does_not_use_the_port_of_the_torchrun_agent(ranks: Ranks, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as agent:
        port = agent.getsockname()[1]
        env = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "LOCAL_WORLD_SIZE": "3",
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RUN_ID": f"test-{port}",
            "TORCHELASTIC_RESTART_COUNT": "0",
            "XDG_RUNTIME_DIR": str(tmp_path),  # without this, the ranks create a folder that remains
        }
        assert ranks("every", "env://", 3, numbers=False, env=env) == [COUNTS] * 3
        agent.setblocking(False)
        with pytest.raises(BlockingIOError):
            agent.accept()


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")
def test_ranks_meet_under_torchrun(ranks: Ranks, tmp_path: Path) -> None:
    process = ranks.start(
        "-m", "torch.distributed.run", "--nproc-per-node=2", "--master-port=0", PROGRAM, "every", "env://",
        env={"PYTHONWARNINGS": "default", "OMP_NUM_THREADS": "1", "XDG_RUNTIME_DIR": str(tmp_path)},
    )  # fmt: skip
    out, err = process.communicate(timeout=LIMIT)
    assert process.returncode == 0, err
    results = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    assert sorted((each["rank"], each["size"], each["result"]) for each in results) == [(0, 2, COUNTS), (1, 2, COUNTS)]


def test_ranks_meet_under_aiocoll_run(ranks: Ranks) -> None:
    ranks.environment.pop("AIOCOLL_JOB_KEY_FILE")
    process = ranks.start("-m", "aiocoll", "run", "-n", "4", PROGRAM, "every", "env://")
    out, err = process.communicate(timeout=LIMIT)
    assert (err, process.returncode) == ("", 0)
    results = [json.loads(line.partition("] ")[2]) for line in sorted(out.splitlines())]
    assert results == [{"rank": rank, "size": 4, "result": COUNTS} for rank in range(4)]


@pytest.mark.parametrize(
    "method", [pytest.param("tcp://127.0.0.1:{port}", marks=pytest.mark.slow), "file://{path}/meet"]
)
def test_ranks_meet_repeatedly(ranks: Ranks, port: int, tmp_path: Path, method: str) -> None:
    assert ranks("meet", method.format(port=port, path=tmp_path), 3) == [3] * 3


@pytest.mark.slow
def test_ranks_meet_repeatedly_under_aiocoll_run(ranks: Ranks) -> None:
    ranks.environment.pop("AIOCOLL_JOB_KEY_FILE")
    process = ranks.start("-m", "aiocoll", "run", "-n", "3", PROGRAM, "meet", "env://")
    out, err = process.communicate(timeout=LIMIT)
    assert (err, process.returncode) == ("", 0)
    assert len(out.splitlines()) == 3
