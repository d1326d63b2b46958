"""Starts of torch.distributed programs, ported as docs/porting.md shows; the programs are in heads/.

Each head runs under `aiocoll run`, under torchrun, and with variables or arguments set by hand. A head that cannot run
fails at once, and names the cause.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from ..ports import free_port

HEADS = Path(__file__).with_name("heads")
#: The timeout of a job in seconds, shorter than the 300 s for which ranks wait for each other.
LIMIT = 100
#: The programs of heads/ that start their own ranks.
PARENTS = ("processes", "spawns")
#: The line that each rank prints.
DONE = re.compile(r"rank (\d) of 2: 3")
VARIABLES = {"MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"}

needs_torch = [
    pytest.mark.torch,
    pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed"),
]
names = [
    pytest.param(path.stem, marks=needs_torch if path.stem == "spawns" else []) for path in sorted(HEADS.glob("*.py"))
]
every_head = pytest.mark.parametrize("name", names)


def head_command(name: str) -> list[str]:
    """Return the path of a program in heads/ and its argument, a free port for the rendezvous."""
    return [str(HEADS / f"{name}.py"), *([] if name == "local_rank_argument" else [str(free_port())])]


@contextmanager
def running_program(command: list[str], folder: Path, **variables: str) -> Iterator[subprocess.Popen[str]]:
    inherited = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    own = {"PYTHONPATH": str(HEADS.parents[2]), "XDG_RUNTIME_DIR": str(folder), "TMPDIR": str(folder)}
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [sys.executable, *command],
        env={**inherited, **own, "OMP_NUM_THREADS": "1", **variables},
        stdout=pipe,
        stderr=pipe,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def run(command: list[str], folder: Path, **variables: str) -> tuple[str, str, int]:
    with running_program(command, folder, **variables) as process:
        out, err = process.communicate(timeout=LIMIT)
    return out, err, process.returncode


def printed_ranks(out: str) -> list[str]:
    return sorted(DONE.findall(out))


@every_head
def test_ported_torch_program_starts_under_aiocoll_run(name: str, tmp_path: Path) -> None:
    if name in PARENTS:
        _, err, code = run(["-m", "aiocoll", "run", "-n", "1", *head_command(name)], tmp_path)
        assert "multiprocessing started this process, and only the process that `aiocoll run` started can read" in err
        assert "If the program starts its ranks itself, start the program with python instead of `aiocoll run`" in err
        assert code != 0
    else:
        out, err, code = run(["-m", "aiocoll", "run", "-n", "2", *head_command(name)], tmp_path)
        assert (printed_ranks(out), err, code) == (["0", "1"], "", 0)


@pytest.mark.torch
@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")
@every_head
def test_ported_torch_program_starts_under_torchrun(name: str, tmp_path: Path) -> None:
    # Only torch.distributed.launch, torch's older launcher, passes --local-rank.
    module = "torch.distributed.launch" if name == "local_rank_argument" else "torch.distributed.run"
    processes = 1 if name in PARENTS else 2
    options = [f"--nproc-per-node={processes}", "--master-port=0", "--local-addr=127.0.0.1"]
    out, err, code = run(["-m", module, *options, *head_command(name)], tmp_path)
    assert (printed_ranks(out), code) == (["0", "1"], 0), err


@every_head
def test_ported_torch_program_starts_without_a_launcher(name: str, tmp_path: Path) -> None:
    command = head_command(name)
    if name in PARENTS:
        out, err, code = run(command, tmp_path)
        assert (printed_ranks(out), code) == (["0", "1"], 0), err
        return
    shared = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    with ExitStack() as stack:
        jobs = []
        for rank in ("0", "1"):
            own = [f"--local-rank={rank}"] if name == "local_rank_argument" else []
            job = running_program([*command, *own], tmp_path, RANK=rank, LOCAL_RANK=rank, **shared)
            jobs.append(stack.enter_context(job))
        for rank, process in enumerate(jobs):
            out, err = process.communicate(timeout=LIMIT)
            assert (printed_ranks(out), process.returncode) == ([str(rank)], 0), err


@pytest.mark.parametrize("name", ["env_url", "sets_address", "local_rank_argument"])
def test_ported_program_that_needs_a_launcher_fails_at_once_without_a_launcher(name: str, tmp_path: Path) -> None:
    out, err, code = run(head_command(name), tmp_path)
    assert "ValueError: world_size is missing: " in err
    assert "start the ranks with `aiocoll run`, torchrun, mpiexec or srun" in err
    assert (out, code) == ("", 1)
