"""The README's program, and a program that loses a rank, under launchers of other projects."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.pages import code

from .launchers import LauncherResult, Slurm, mpiexec, reason_without_slurm, run

pytestmark = pytest.mark.slow

LOST = str(Path(__file__).with_name("lost_rank.py"))
SUM = "[6. 6. 6.] ['rank 0', 'rank 1', 'rank 2']"
#: The output lines of the surviving ranks 0 and 2: rank, kind of the loss, lost rank.
SURVIVOR_LINES = ["0 killed 1", "2 killed 1"]
Launch = Callable[..., LauncherResult]


@pytest.fixture
def hello(tmp_path: Path) -> str:
    """Return the path of a file with the README's program."""
    (tmp_path / "hello.py").write_text(code("README.md", "Twelve lines"))
    return str(tmp_path / "hello.py")


def launcher(name: str, *options: str) -> Launch:
    program = mpiexec(name)
    if program is None:
        pytest.skip(f"needs {name}: python3 -m venv .venv-{name} && .venv-{name}/bin/pip install {name}")

    def launch(*command: str, more: tuple[str, ...] = (), **env: str) -> LauncherResult:
        return run([program, *options, *more, "-n", "3", sys.executable, *command], env)

    return launch


@pytest.fixture
def mpich() -> Launch:
    return launcher("mpich")


@pytest.fixture
def openmpi() -> Launch:
    return launcher("openmpi", "--oversubscribe")


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    if reason := reason_without_slurm():
        pytest.skip(reason)
    with Slurm(tmp_path_factory.mktemp("slurm")) as cluster:
        yield cluster


@pytest.fixture
def key(tmp_path: Path) -> str:
    (tmp_path / "job.key").touch(mode=0o600)
    (tmp_path / "job.key").write_bytes(b"of this test and no other")
    return str(tmp_path / "job.key")


# -- rendezvous


@pytest.mark.torch
@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")
def test_torchrun_starts_the_readme_program(hello: str, tmp_path: Path) -> None:
    """Use `--local-addr` to meet on loopback instead of the host name, and `--no-python` to print in one piece."""
    options = ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1", "--no-python"]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=3", *options, sys.executable, hello]
    # Show warnings without failing, since torch itself emits warnings.
    env = {"PYTHONWARNINGS": "default", "OMP_NUM_THREADS": "1", "XDG_RUNTIME_DIR": str(tmp_path)}
    done = run(command, env)
    assert (done.code, done.out) == (0, [SUM] * 3), done.err
    assert [path.name for path in tmp_path.iterdir()] == ["hello.py"]  # no socket is left


def test_mpich_starts_the_readme_program(mpich: Launch, hello: str) -> None:
    assert mpich(hello) == LauncherResult(0, [SUM] * 3, "")


def test_openmpi_starts_the_readme_program(openmpi: Launch, hello: str, tmp_path: Path) -> None:
    assert openmpi(hello, XDG_RUNTIME_DIR=str(tmp_path)) == LauncherResult(0, [SUM] * 3, "")
    assert [path.name for path in tmp_path.iterdir()] == ["hello.py"]  # no socket is left


def test_slurm_with_pmi_starts_the_readme_program(slurm: Slurm, hello: str) -> None:
    """Use two nodes without a job key: the ranks exchange the store address and a key through PMI."""
    assert slurm.srun("--mpi=pmi2", "-n3", script=hello, AIOCOLL_BIND="127.0.0.1") == LauncherResult(0, [SUM] * 3, "")


def test_slurm_without_pmi_starts_the_readme_program(slurm: Slurm, hello: str, key: str) -> None:
    assert slurm.srun("--mpi=none", "-n3", script=hello, AIOCOLL_JOB_KEY_FILE=key) == LauncherResult(0, [SUM] * 3, "")


def test_slurm_job_on_one_node_needs_no_job_key(slurm: Slurm, hello: str, tmp_path: Path) -> None:
    done = slurm.srun("--nodes=1", "-n3", script=hello, XDG_RUNTIME_DIR=str(tmp_path))
    assert done == LauncherResult(0, [SUM] * 3, "")
    assert [path.name for path in tmp_path.iterdir()] == ["hello.py"]


def test_slurm_job_on_two_nodes_without_a_job_key_is_reported(slurm: Slurm, hello: str) -> None:
    done = slurm.srun("--mpi=none", "-n3", script=hello)
    assert (done.code, done.out) == (1, [])
    wanted = r"^aiocoll\.errors\.AuthenticationError: Slurm started ranks on several hosts.*AIOCOLL_JOB_KEY_FILE"
    assert len(re.findall(wanted, done.err, re.MULTILINE)) == 3


def test_slurm_host_lists_are_expanded_as_by_scontrol(slurm: Slurm) -> None:
    from aiocoll.rendezvous.launchers import SLURM

    variables = {"SLURM_JOB_ID": "1", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_NODES": "9"}
    for nodes in ("x1", "node[01-03,07],x1", "b,a", "rack[0-1]node[3-4]", "n[08,10-11],n[1-2]", "a-b.c[7]"):
        command = ["scontrol", "show", "hostnames", nodes]
        first = subprocess.run(command, env=slurm.env, capture_output=True, text=True, check=True).stdout.split()[0]
        assert SLURM.address(variables | {"SLURM_STEP_NODELIST": nodes}).host == first


# -- lost ranks


def test_mpich_reports_a_failed_rank(mpich: Launch) -> None:
    done = mpich(LOST, "failed")
    assert (done.code, done.out) == (3, SURVIVOR_LINES), done.err


def test_mpich_ends_all_ranks_if_one_is_killed(mpich: Launch) -> None:
    """Check that MPICH's mpiexec ends all other ranks, and that no process is left."""
    assert mpich(LOST, "killed").code == 9


def test_openmpi_reports_a_killed_rank(openmpi: Launch, tmp_path: Path) -> None:
    """Check the survivors with `--enable-recovery`, without which Open MPI's mpiexec ends all ranks."""
    assert openmpi(LOST, "killed", XDG_RUNTIME_DIR=str(tmp_path)).code == 137
    done = openmpi(LOST, "killed", more=("--enable-recovery",), XDG_RUNTIME_DIR=str(tmp_path))
    assert done.out == SURVIVOR_LINES, done.err


@pytest.mark.parametrize("pmi", ["pmi2", "none"])
def test_slurm_reports_a_killed_rank(slurm: Slurm, key: str, pmi: str) -> None:
    done = slurm.srun(
        f"--mpi={pmi}", "-n3", script=LOST, given=("killed",), AIOCOLL_JOB_KEY_FILE=key, AIOCOLL_BIND="127.0.0.1"
    )
    assert (done.code, done.out) == (137, SURVIVOR_LINES), done.err


@pytest.mark.parametrize("launcher_name", ["mpich", "slurm"])
def test_rendezvous_waits_for_a_missing_rank_until_the_timeout(
    launcher_name: str, request: pytest.FixtureRequest
) -> None:
    if launcher_name == "mpich":
        done = request.getfixturevalue("mpich")(LOST, "absent")
    else:
        done = request.getfixturevalue("slurm").srun("--mpi=pmi2", "-n3", script=LOST, given=("absent",))
    assert done.code != 0
    assert re.search(r"RendezvousError: rank [02] waited 3 s at the launcher's barrier \(PMI\): all 3 proc", done.err)
