"""Launchers of other projects: MPI launchers, and a Slurm cluster of two simulated nodes on this machine."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple, Self

from tests.ports import free_ports

ROOT = Path(__file__).parents[2]
#: The timeout of each action in seconds; each action takes less than 33 % of this time.
LIMIT = 60
#: Seconds between two checks of whether another program has reached a state.
_POLL_SECONDS = 0.05
#: The name of an environment variable that marks all processes which a test starts.
_MARK = "STARTED_BY_TEST"
#: Variables that permit Open MPI to run as root. A container may have no other user.
AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
_CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock
CredType=cred/munge
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldPort={port}
FirstJobId={port}
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
ReturnToService=2
SlurmdParameters=config_overrides
NodeName={host} NodeHostname={host} NodeAddr=127.0.0.1 Port={first} CPUs=4
NodeName=zzzz1 NodeHostname={host} NodeAddr=127.0.0.1 Port={second} CPUs=4
PartitionName=test Nodes={host},zzzz1 Default=YES OverSubscribe=YES
"""


class LauncherResult(NamedTuple):
    """The result of a launcher: exit code, sorted lines of standard output, and standard error."""

    code: int
    out: list[str]
    err: str


def mpiexec(name: str) -> str | None:
    """Return the path of an MPI library's `mpiexec` in the environment that `.ci/run` or a benchmark has created."""
    places = [ROOT / f".venv-{name}/bin/mpiexec", ROOT / f"bench/.venvs/{name}/bin/mpiexec"]
    return next((str(path) for path in places if path.exists()), None)


def reason_without_slurm() -> str | None:
    """Return the reason why Slurm cannot run here, or None if Slurm can run."""
    if os.geteuid() != 0:
        return "needs root: slurmd starts ranks as root"
    missing = [each for each in ("munged", "slurmctld", "slurmd", "srun") if shutil.which(each) is None]
    return f"needs {', '.join(missing)}: apt-get install slurm-wlm munge" if missing else None


def start(command: list[str], env: Mapping[str, str]) -> subprocess.Popen[str]:
    """Start a launcher. An environment variable marks its processes, so that `running_processes` finds them."""
    # Disable asyncio's debug mode, which reports slow callbacks; these tests expect no error output.
    # Without PYTHONUNBUFFERED, a rank writes its output at once, so that lines of ranks do not mix.
    hidden = ("AIOCOLL_", "PYTHONASYNCIODEBUG", "PYTHONUNBUFFERED", "SLURM_", "PMI", "OMPI_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(hidden)}
    own_variables = {"PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "error", _MARK: str(os.getpid())}
    return subprocess.Popen(
        command,
        env=kept | AS_ROOT | own_variables | env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(command: list[str], env: Mapping[str, str]) -> LauncherResult:
    """Run a launcher until it ends, and wait until all processes that it has started have ended."""
    with start(command, env) as process:
        try:
            out, err = process.communicate(timeout=LIMIT)
        finally:
            process.kill()
    ended = LauncherResult(process.returncode, sorted(out.splitlines()), err)
    deadline = time.monotonic() + LIMIT
    while left := running_processes():  # wait here, since a launcher may not wait for processes that it has killed
        assert time.monotonic() < deadline, (left, ended)
        time.sleep(_POLL_SECONDS)
    return ended


def running_processes() -> list[str]:
    """Return the command lines of running processes that the tests of this process have started."""
    mark, found = f"{_MARK}={os.getpid()}".encode(), []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if mark in (folder / "environ").read_bytes().split(b"\0"):
                found.append((folder / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        except OSError:  # the process has ended, or belongs to another user
            continue
    return found


class Slurm:
    """A Slurm controller with the daemons of two nodes on loopback, as a context manager.

    The first node has the name of this machine, which resolves here. Node lists are sorted, so rank 0 runs there.

    Args:
        folder: The folder for all files.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._stack = ExitStack()
        self.env = {"SLURM_CONF": str(folder / "slurm.conf")}

    def __enter__(self) -> Self:
        folder, port, host = self._folder, free_ports(3), socket.gethostname().partition(".")[0]
        text = _CONFIGURATION.format(host=host, folder=folder, port=port, first=port + 1, second=port + 2)
        (folder / "slurm.conf").write_text(text)
        (folder / "munge.key").touch(mode=0o400)
        (folder / "munge.key").write_bytes(os.urandom(1024))
        for name in ("state", f"spool-{host}", "spool-zzzz1"):
            (folder / name).mkdir()
        munge = [f"--{name}={folder}/munge.{file}" for name, file in (
            ("key-file", "key"), ("socket", "sock"), ("pid-file", "pid"), ("log-file", "log"), ("seed-file", "seed")
        )]  # fmt: skip
        try:
            self._daemon("munged", "--foreground", "--force", *munge)
            self._daemon("slurmctld", "-D", "-f", self.env["SLURM_CONF"])
            for node in (host, "zzzz1"):
                self._daemon("slurmd", "-D", "-f", self.env["SLURM_CONF"], "-N", node)
            self._wait()
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def srun(self, *arguments: str, script: str, given: tuple[str, ...] = (), **env: str) -> LauncherResult:
        """Run a Python program on both nodes with `srun`."""
        command = ["srun", "--quiet", "--nodes=2", *arguments, sys.executable, script, *given]
        return run(command, self.env | env)

    def _daemon(self, *command: str) -> None:
        path = self._folder / f"{len(list(self._folder.iterdir()))}.log"
        log = self._stack.enter_context(path.open("wb"))
        process = subprocess.Popen(
            command, env=os.environ | self.env, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=self._folder
        )
        self._stack.callback(_terminate, process)

    def _wait(self) -> None:
        """Wait until both nodes are idle."""
        deadline = time.monotonic() + LIMIT
        idle = ["sinfo", "--noheader", "--states=idle", "--format=%D"]
        while True:
            listed = subprocess.run(idle, env=os.environ | self.env, capture_output=True, text=True, check=False)
            if listed.stdout.strip() == "2":
                return
            logs = "".join(log.read_text(errors="replace")[-2000:] for log in self._folder.glob("*.log"))
            assert time.monotonic() < deadline, f"{listed.stderr}{logs}"
            time.sleep(_POLL_SECONDS)


def _terminate(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(LIMIT)
    finally:
        process.kill()
        process.wait()
