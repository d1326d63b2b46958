"""Launchers that others have written: where they are, and a Slurm of two nodes that are both this machine."""

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
#: Seconds after which what has not ended has failed; nothing takes a third of it.
LIMIT = 60
#: Between two looks at what other programs do.
_LOOK = 0.05
#: In the environment of all that a test starts.
_MARK = "STARTED_BY_TEST"
#: Open MPI refuses to run as root otherwise; in a container there may be nobody else.
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


class Ended(NamedTuple):
    """What a launcher has left."""

    code: int
    out: list[str]
    err: str


def mpiexec(name: str) -> str | None:
    """Return the launcher of an MPI library, of the environment that `.ci/run` or the benchmark has made for it."""
    places = [ROOT / f".venv-{name}/bin/mpiexec", ROOT / f"bench/.venvs/{name}/bin/mpiexec"]
    return next((str(path) for path in places if path.exists()), None)


def why_no_slurm() -> str | None:
    """Say why there can be no Slurm here; None if there can."""
    if os.geteuid() != 0:
        return "needs root, as whom slurmd starts ranks"
    missing = [each for each in ("munged", "slurmctld", "slurmd", "srun") if shutil.which(each) is None]
    return f"needs {', '.join(missing)}: apt-get install slurm-wlm munge" if missing else None


def start(command: list[str], env: Mapping[str, str]) -> subprocess.Popen[str]:
    """Start a launcher, whose ranks are Python's of this test; `left_behind` finds what it leaves."""
    # Debug mode reports slow callbacks, and these tests expect silence.
    # What a rank prints is one piece, which no other's gets into.
    hidden = ("AIOCOLL_", "PYTHONASYNCIODEBUG", "PYTHONUNBUFFERED", "SLURM_", "PMI", "OMPI_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(hidden)}
    ours = {"PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "error", _MARK: str(os.getpid())}
    return subprocess.Popen(
        command,
        env=kept | AS_ROOT | ours | env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(command: list[str], env: Mapping[str, str]) -> Ended:
    """Run a launcher to its end; nothing that it has started is left then."""
    with start(command, env) as process:
        try:
            out, err = process.communicate(timeout=LIMIT)
        finally:
            process.kill()
    ended = Ended(process.returncode, sorted(out.splitlines()), err)
    deadline = time.monotonic() + LIMIT
    while left := left_behind():  # a launcher need not wait for those it has killed
        assert time.monotonic() < deadline, (left, ended)
        time.sleep(_LOOK)
    return ended


def left_behind() -> list[str]:
    """Return the commands of processes that a test has started, and that still run."""
    mark, found = f"{_MARK}={os.getpid()}".encode(), []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if mark in (folder / "environ").read_bytes().split(b"\0"):
                found.append((folder / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        except OSError:  # it has ended meanwhile, or is somebody else's
            continue
    return found


class Slurm:
    """A controller and the daemons of two nodes, on the loopback; a context manager.

    The first node has the name of this machine, which is known here; rank 0 runs there, since lists are sorted.

    Args:
        folder: where all of it keeps its files.
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

    def srun(self, *arguments: str, script: str, given: tuple[str, ...] = (), **env: str) -> Ended:
        """Run a Python program on both nodes."""
        command = ["srun", "--quiet", "--nodes=2", *arguments, sys.executable, script, *given]
        return run(command, self.env | env)

    def _daemon(self, *command: str) -> None:
        path = self._folder / f"{len(list(self._folder.iterdir()))}.log"
        log = self._stack.enter_context(path.open("wb"))
        process = subprocess.Popen(
            command, env=os.environ | self.env, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=self._folder
        )
        self._stack.callback(_end, process)

    def _wait(self) -> None:
        """Wait until both nodes can take work."""
        deadline = time.monotonic() + LIMIT
        idle = ["sinfo", "--noheader", "--states=idle", "--format=%D"]
        while True:
            told = subprocess.run(idle, env=os.environ | self.env, capture_output=True, text=True, check=False)
            if told.stdout.strip() == "2":
                return
            said = "".join(log.read_text(errors="replace")[-2000:] for log in self._folder.glob("*.log"))
            assert time.monotonic() < deadline, f"{told.stderr}{said}"
            time.sleep(_LOOK)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(LIMIT)
    finally:
        process.kill()
        process.wait()
