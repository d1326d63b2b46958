"""Launchers: the environment variables from which a process reads its rank, world size and store address."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from hashlib import sha256
from typing import NamedTuple

from aiocoll.errors import RendezvousError
from aiocoll.numerals import parse_int
from aiocoll.options import GroupOptions
from aiocoll.rendezvous.pmi_store import PmiStore, PublishedStore
from aiocoll.rendezvous.private_folder import private_folder

__all__ = [
    "COMMANDS",
    "EXPLICIT",
    "KUBERNETES",
    "LAUNCHERS",
    "OPEN_MPI",
    "PMI",
    "SLURM",
    "TORCHRUN",
    "Address",
    "Launcher",
    "RequestAddress",
    "common_parent",
    "local_numbers",
    "recognise",
]

#: Function that requests the store's address from the launcher, and the job key if this process has none.
RequestAddress = Callable[[bytes | None, GroupOptions, str, float], Awaitable[PublishedStore]]

#: The default port of the store in a Kubernetes pod, as in torchrun. No other process of the pod listens on it.
_PORT = 29500
#: The range of ports derived from job names, above the ephemeral ports of the kernel.
_FIRST_PORT, _PORTS = 61440, 4096
#: Pattern of the first entry of a Slurm host list: `x1`, `node[01-03,07]`, `rack[0-1]node[1-4]-ib`.
_FIRST_HOST = re.compile(r"(?:[\w.-]|\[\d+(?:-\d+)?(?:,\d+(?:-\d+)?)*\])+(?=,|\Z)", re.ASCII)
_RANGES = re.compile(r"\[(\d+)[^]]*\]")
#: Patterns of Open MPI's variables: version 4 passes the addresses of mpiexec, version 5 its host name.
_ORTE_URI = re.compile(r"[^;]*;tcp(?:://([^,:]+)|6://\[([^,\]]+))")
_PRTE_JOB = re.compile(r"prterun-(.+)-\d+@\d+")


class Address(NamedTuple):
    """The store address from a launcher's environment variables, possibly incomplete.

    Attributes:
        host: its address, or a unix socket.
        port: its port.
        several_hosts: whether ranks on several hosts meet there; they need a job key.
        ask: requests the address from the launcher, if only the launcher has it.
    """

    host: str = ""
    port: int = 0
    several_hosts: bool = False
    ask: RequestAddress | None = None


class Launcher(NamedTuple):
    """The environment variables that one launcher sets.

    Attributes:
        name: its name in messages.
        marks: variables whose presence shows that this launcher has started the process.
        rank: the variable of the rank.
        world_size: the variable of the world size.
        address: returns the address of the store.
        local_rank: other variables than LOCAL_RANK that may hold the number of this process on its host.
        local_world_size: other variables than LOCAL_WORLD_SIZE that may hold the number of ranks on this host.
        remedy: the advice in the error for a missing variable.
        is_standard: whether it sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, which arguments of `new_group`
            override.
    """

    name: str
    marks: tuple[str, ...]
    rank: str
    world_size: str
    address: Callable[[Mapping[str, str]], Address]
    local_rank: tuple[str, ...] = ()
    local_world_size: tuple[str, ...] = ()
    remedy: str = "start all ranks in the same way, or set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT yourself"
    is_standard: bool = False

    def mark(self, env: Mapping[str, str]) -> str | None:
        """Return the name of a variable that shows that this launcher started the process; None if there is none."""
        return next((name for name in self.marks if name in env), None)

    def numbers(self, env: Mapping[str, str]) -> tuple[int, int]:
        """Return the rank and the world size of this process, from the launcher's variables.

        Raises:
            ValueError: a variable is missing or invalid; the message names it.
        """
        rank, size = (self.number(env, name) for name in (self.rank, self.world_size))
        if not 0 <= rank < size:
            raise ValueError(f"{self.rank}={rank}, {self.world_size}={size}: {self.name} set an invalid rank")
        return rank, size

    def number(self, env: Mapping[str, str], name: str) -> int:
        """Return the value of an environment variable of this launcher as an int."""
        text = self.text(env, name)
        try:
            return parse_int(text)
        except ValueError:
            raise ValueError(f"{name}={text!r} in the environment must be a number ({self.name} sets it)") from None

    def text(self, env: Mapping[str, str], name: str) -> str:
        """Return the value of an environment variable of this launcher; raise if it is missing or empty."""
        if not env.get(name):
            raise ValueError(
                f"{name} is missing in the environment, but {self.mark(env)} shows that {self.name} started this "
                f"process: {self.remedy}"
            )
        return env[name]


def recognise(env: Mapping[str, str]) -> Launcher | None:
    """Return the launcher that has started this process as a rank; None if no known launcher has."""
    return next((launcher for launcher in LAUNCHERS if launcher.mark(env) is not None), None)


def common_parent(env: Mapping[str, str]) -> int | None:
    """Return the pid of the launcher process on this host; None if no launcher has started this process."""
    launched = recognise(env) not in (None, EXPLICIT) or env.get("AIOCOLL_STORE") == "launcher"
    return os.getppid() if launched else None


def local_numbers(env: Mapping[str, str]) -> tuple[int | None, int | None]:
    """Return the local rank and the local world size of this process on its host; None for an unknown number.

    Raises:
        ValueError: a variable is not a number.
    """
    launcher = recognise(env)
    if launcher is KUBERNETES:
        return 0, 1
    ranks, sizes = ((), ()) if launcher is None else (launcher.local_rank, launcher.local_world_size)
    return _read_first(env, ("LOCAL_RANK", *ranks)), _read_first(env, ("LOCAL_WORLD_SIZE", *sizes))


def _read_first(env: Mapping[str, str], names: tuple[str, ...]) -> int | None:
    name = next((name for name in names if env.get(name)), None)
    if name is None:
        return None
    if name == "SLURM_GTIDS":
        return env[name].count(",") + 1
    try:
        return parse_int(env[name])
    except ValueError:
        raise ValueError(f"{name}={env[name]!r} in the environment must be a number") from None


# -- the address of the store


def _port_or(env: Mapping[str, str], default: int) -> int:
    """Return the port in ``AIOCOLL_PORT``, or `default`."""
    return default if "AIOCOLL_PORT" not in env else _read_port(env, "AIOCOLL_PORT")


def _read_port(env: Mapping[str, str], name: str) -> int:
    with suppress(ValueError):
        if 0 < (port := parse_int(env[name])) <= 65535:
            return port
    raise ValueError(f"{name}={env[name]!r} in the environment must be a port number from 1 to 65535")


def _digest(job: str) -> str:
    return sha256(job.encode()).hexdigest()


def _on_this_host(env: Mapping[str, str], job: str) -> Address:
    """Return a job's unix socket address in a folder of this user only. The path has at most 107 bytes."""
    return Address(f"unix:{private_folder(env)}/aiocoll-{_digest(job)[:16]}")


def _between_hosts(env: Mapping[str, str], host: str, job: str) -> Address:
    port = _port_or(env, _FIRST_PORT + int(_digest(job), 16) % _PORTS)
    return Address(host, port, several_hosts=True)


def _torchrun(env: Mapping[str, str]) -> Address:
    if env.get("TORCHELASTIC_USE_AGENT_STORE") != "True" or "AIOCOLL_PORT" in env:
        return _explicit(env)
    # The agent of torchrun listens at MASTER_PORT, and uses another protocol.
    if env.get("LOCAL_WORLD_SIZE") != env.get("WORLD_SIZE"):
        raise RendezvousError(
            "torchrun started ranks on several hosts: set AIOCOLL_PORT to a port that is free on the master"
        )
    run, restart = env.get("TORCHELASTIC_RUN_ID", ""), env.get("TORCHELASTIC_RESTART_COUNT", "0")
    return _on_this_host(env, f"{run}-{restart}-{env['MASTER_PORT']}")


def _explicit(env: Mapping[str, str]) -> Address:
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in env]
    if missing:
        raise ValueError(
            f"{' and '.join(missing)} missing in the environment: start the ranks with `aiocoll run`, set the "
            "variables, or pass init_method= or store="
        )
    if not env["MASTER_ADDR"]:
        raise ValueError("MASTER_ADDR='' in the environment must be the host name or address of rank 0")
    return Address(env["MASTER_ADDR"], _read_port(env, "AIOCOLL_PORT" if "AIOCOLL_PORT" in env else "MASTER_PORT"))


def _pmi(env: Mapping[str, str]) -> Address:
    rank, size = PMI.numbers(env)
    fd, port = PMI.text(env, "PMI_FD"), _port_or(env, 0)
    together = local_numbers(env)[1] == size

    def request(key: bytes | None, options: GroupOptions, job: str, timeout: float) -> Awaitable[PublishedStore]:
        # Connect only at the first request, because `aiocoll doctor` reads addresses without a request.
        with _pmi_lock:
            if fd not in _pmi_stores:
                _pmi_stores[fd] = PmiStore(fd, rank, size, together, port)
        return _pmi_stores[fd].find(key, options, job, timeout)

    return Address(ask=request)


#: The process's `PmiStore` by ``PMI_FD``, shared by all groups, so that the process requests the address only once.
_pmi_stores: dict[str, PmiStore] = {}
#: Guards `_pmi_stores`, since event loops may run in several threads.
_pmi_lock = threading.Lock()


def _open_mpi(env: Mapping[str, str]) -> Address:
    job = OPEN_MPI.text(env, "PMIX_NAMESPACE")
    _, size = OPEN_MPI.numbers(env)
    if local_numbers(env)[1] == size:
        return _on_this_host(env, f"openmpi-{job}")
    found = _ORTE_URI.match(env.get("OMPI_MCA_orte_hnp_uri", "")) or _PRTE_JOB.fullmatch(job)
    if found is None:
        raise RendezvousError(
            f"Open MPI started ranks on several hosts, but its variables name no host (PMIX_NAMESPACE={job!r}): set "
            "RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT for each rank, or start them with `aiocoll run` on each host"
        )
    host = next(filter(None, found.groups()))
    return _between_hosts(env, host, f"openmpi-{job}")


def _kubernetes(env: Mapping[str, str]) -> Address:
    name = KUBERNETES.text(env, "HOSTNAME").partition(".")[0]
    job = name.removesuffix(f"-{env['JOB_COMPLETION_INDEX']}")
    if job == name:
        raise ValueError(
            f"HOSTNAME={name!r} in the environment must end with -{env['JOB_COMPLETION_INDEX']}, the "
            "JOB_COMPLETION_INDEX of this pod: leave HOSTNAME as Kubernetes sets it"
        )
    return Address(f"{job}-0.{env.get('AIOCOLL_SERVICE') or job}", _port_or(env, _PORT), several_hosts=True)


def _slurm(env: Mapping[str, str]) -> Address:
    nodes, job = SLURM.text(env, "SLURM_STEP_NODELIST"), SLURM.text(env, "SLURM_JOB_ID")
    name = f"slurm-{job}.{SLURM.text(env, 'SLURM_STEP_ID')}"
    if SLURM.number(env, "SLURM_STEP_NUM_NODES") == 1:
        return _on_this_host(env, name)
    first = _FIRST_HOST.match(nodes)
    if first is None:
        raise ValueError(f"SLURM_STEP_NODELIST={nodes!r} in the environment must be a list of hosts, like n[01-04],x1")
    return _between_hosts(env, _RANGES.sub(r"\1", first[0]), name)


TORCHRUN = Launcher("torchrun", ("TORCHELASTIC_RUN_ID",), "RANK", "WORLD_SIZE", _torchrun, is_standard=True)
EXPLICIT = Launcher(
    "explicit variables",
    ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    "RANK",
    "WORLD_SIZE",
    _explicit,
    is_standard=True,
)
PMI = Launcher(
    "PMI-1",
    ("PMI_FD",),
    "PMI_RANK",
    "PMI_SIZE",
    _pmi,
    local_rank=("MPI_LOCALRANKID", "SLURM_LOCALID"),
    local_world_size=("MPI_LOCALNRANKS", "SLURM_GTIDS"),
)
OPEN_MPI = Launcher(
    "Open MPI",
    ("OMPI_COMM_WORLD_RANK",),
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    _open_mpi,
    local_rank=("OMPI_COMM_WORLD_LOCAL_RANK",),
    local_world_size=("OMPI_COMM_WORLD_LOCAL_SIZE",),
)
KUBERNETES = Launcher(
    "Kubernetes",
    ("JOB_COMPLETION_INDEX",),
    "JOB_COMPLETION_INDEX",
    "AIOCOLL_WORLD_SIZE",
    _kubernetes,
    remedy="give the container that variable, with the `completions` of the Job",
)
SLURM = Launcher(
    "Slurm",
    ("SLURM_STEP_ID",),
    "SLURM_PROCID",
    "SLURM_STEP_NUM_TASKS",
    _slurm,
    local_rank=("SLURM_LOCALID",),
    local_world_size=("SLURM_GTIDS",),
)
#: The commands that start ranks, for error messages.
COMMANDS = "`aiocoll run`, torchrun, mpiexec or srun"
#: The known launchers. If the environment has variables of several launchers, the first one takes precedence.
LAUNCHERS = (TORCHRUN, EXPLICIT, PMI, OPEN_MPI, KUBERNETES, SLURM)
