"""`aiocoll doctor` on this host, and on hosts with simulated defects."""

from __future__ import annotations

import errno
import json
import os
import re
import resource
import socket
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError
from math import inf
from pathlib import Path
from typing import Any

import pytest

import aiocoll
from aiocoll import users
from aiocoll.cli import checks, doctor
from aiocoll.cli.checks import CheckResult, check_load, look
from aiocoll.cli.main import main
from aiocoll.machine_load import MachineLoad
from aiocoll.native import describe_implementation
from aiocoll.transport.stream import addresses as address
from aiocoll.transport.stream.link import LOOPBACK_BUFFER

from ..certificates import Authority, as_variables
from ..internals import Limits
from ..redirected_files import redirect_files
from ..rendezvous.test_launchers import SLURM as OF_SLURM

LIMIT = 120
VERSION = f"{aiocoll.__version__}, {describe_implementation()}"
#: Prefixes of variables to remove: they may be set where the tests run, and would change the outcome or output.
OURS = ("AIOCOLL_", "MASTER_", "RANK", "WORLD_SIZE", "PYTHONASYNCIODEBUG")


@pytest.fixture(autouse=True)
def _no_variables_of_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(OURS)]:
        monkeypatch.delenv(name)


def run(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "aiocoll", "doctor", *arguments],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), **env},
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )


def report(*arguments: str, **env: str) -> tuple[int, dict[str, Any], dict[str, CheckResult]]:
    """Run `aiocoll doctor --json`; return the exit code, the rank pairs by ranks, and the findings by name."""
    done = run("--json", *arguments, **env)
    assert done.stderr == ""
    output = json.loads(done.stdout)
    findings = [CheckResult(**each) for each in output["findings"]]
    assert output["fine"] == all(finding.fine for finding in findings)
    assert done.returncode == (0 if output["fine"] else 1)
    pairs = {tuple(pair["ranks"]): (pair["transport"], pair["why"]) for pair in output["pairs"]}
    return done.returncode, pairs, {finding.name: finding for finding in findings}


def finding_of(name: str, ranks: int = 1) -> CheckResult:
    """Check this host; return the only finding with the given name."""
    (finding,) = [finding for finding in look(ranks) if finding.name == name]
    return finding


def failing_call(code: int) -> Callable[..., Any]:
    """Return a stand-in for a system call that fails with an errno."""

    def call(*_: object, **__: object) -> Any:
        raise OSError(code, os.strerror(code))

    return call


# -- this host


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_doctor_ranks_meet_and_report_their_connections(ranks: int) -> None:
    _, pairs, findings = report("-n", str(ranks))
    assert pairs == {(a, b): ("shm", "both are on this host") for b in range(ranks) for a in range(b)}
    assert findings["meeting"].value == f"{ranks} met, all pairs exchanged data"
    assert findings["aiocoll"].value == VERSION
    assert findings["identity"].value == address.host_identity()
    assert findings["interface lo"].value.startswith("127.0.0.1")
    assert findings["address for peers"].value.startswith("127.0.0.1 (MASTER_ADDR is not set")
    for name in ("shared memory", "wake-ups", "unix sockets"):
        assert findings[name].fine


@pytest.mark.slow
def test_doctor_prints_every_topic() -> None:
    done = run()
    assert done.stderr == ""
    lines = done.stdout.splitlines()
    assert [line for line in lines[:-1] if not line.startswith("  ")] == [
        "versions",
        "host",
        "launcher",
        "limits",
        "means",
        "network",
        "load",
        "ranks",
    ]
    assert "  0-1: shm, both are on this host" in lines
    assert (lines[-1] == "all fine") == (done.returncode == 0)


SLURM = OF_SLURM | {"AIOCOLL_PORT": "31000"}


@pytest.mark.parametrize(
    ("env", "value", "advice", "fine"),
    [
        (
            {},
            "nothing that env:// recognises",
            "it recognises, in this order: torchrun (TORCHELASTIC_RUN_ID), explicit variables (RANK or WORLD_SIZE or "
            "MASTER_ADDR or MASTER_PORT), PMI-1 (PMI_FD), Open MPI (OMPI_COMM_WORLD_RANK), Kubernetes "
            "(JOB_COMPLETION_INDEX), Slurm (SLURM_STEP_ID)",
            True,
        ),
        (
            SLURM,
            "Slurm (SLURM_STEP_ID): rank 1 of 3, 1 of 2 on this host; the store is at n01:31000; no job key is set",
            "ranks on several hosts need a job key: set AIOCOLL_JOB_KEY_FILE to the path of a file that only you can "
            "read",
            False,
        ),
        (
            SLURM | {"AIOCOLL_JOB_KEY": "a key that is not shown"},
            "Slurm (SLURM_STEP_ID): rank 1 of 3, 1 of 2 on this host; the store is at n01:31000; the job key comes "
            "from AIOCOLL_JOB_KEY",
            "",
            True,
        ),
        (
            {"PMI_FD": "1", "PMI_RANK": "0", "PMI_SIZE": "2"},
            "PMI-1 (PMI_FD): rank 0 of 2; the store is where rank 0 reports it to the launcher; the job key "
            "comes from the launcher",
            "",
            True,
        ),
        (
            {"JOB_COMPLETION_INDEX": "0"},
            "Kubernetes (JOB_COMPLETION_INDEX)",
            "AIOCOLL_WORLD_SIZE is missing in the environment, but JOB_COMPLETION_INDEX shows that Kubernetes started "
            "this process: give the container that variable, with the `completions` of the Job",
            False,
        ),
        (
            {"MASTER_ADDR": "127.0.0.1"},
            "explicit variables (MASTER_ADDR)",
            "world_size is missing: give world_size= with init_method='env://', or set WORLD_SIZE in the environment; "
            "start the ranks with `aiocoll run`, torchrun, mpiexec or srun, or set AIOCOLL_SINGLETON=1 to run the "
            "program alone, as a group of one rank",
            True,
        ),
    ],
    ids=["nothing", "Slurm", "key", "PMI", "half", "half by hand"],
)
def test_doctor_names_the_launcher(
    env: dict[str, str], value: str, advice: str, fine: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in env:
        monkeypatch.setenv(name, env[name])
    assert finding_of("started by") == CheckResult("launcher", "started by", value, advice, fine)


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["tcp", "unix"])
def test_doctor_explains_the_chosen_transport(transport: str) -> None:
    _, pairs, findings = report(AIOCOLL_TRANSPORT=transport)
    used, why = pairs[0, 1]
    assert used == transport
    assert "the options request another transport" in why
    assert findings["meeting"].fine, "a chosen transport is no problem"


@pytest.mark.slow
def test_doctor_checks_the_options_in_the_environment() -> None:
    code, pairs, findings = report(AIOCOLL_TRANSPORT="pigeon")
    assert (code, pairs) == (1, {})
    assert "AIOCOLL_TRANSPORT='pigeon': must be one of 'auto'" in findings["environment"].advice
    assert "AIOCOLL_TRANSPORT='pigeon'" in findings["meeting"].advice
    assert not findings["environment"].fine
    assert not findings["meeting"].fine


def test_doctor_refuses_zero_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["doctor", "-n", "0"])
    assert ended.value.code == 2
    assert "argument -n/--nproc: 0 is not a positive number" in capsys.readouterr().err


# -- hosts with defects


@pytest.mark.parametrize("code", [errno.EPERM, errno.ENOSYS])
@pytest.mark.parametrize(
    ("name", "module", "call", "instead"),
    [
        ("shared memory", os, "memfd_create", "cannot share memory"),
        ("shared memory", os, "posix_fallocate", "cannot share memory"),
        ("wake-ups", os, "eventfd", "cannot share memory"),
        ("unix sockets", address, "open_unix", "AIOCOLL_TRANSPORT=tcp"),
    ],
)
def test_doctor_reports_a_forbidden_system_call_with_advice(
    monkeypatch: pytest.MonkeyPatch, name: str, module: Any, call: str, instead: str, code: int
) -> None:
    assert finding_of(name).fine
    monkeypatch.setattr(module, call, failing_call(code))
    finding = finding_of(name)
    assert not finding.fine
    assert os.strerror(code) in finding.value
    assert instead in finding.advice


def test_doctor_reports_a_system_call_that_python_lacks_as_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")
    assert not finding_of("shared memory").fine


def test_doctor_reports_unix_sockets_of_another_user_as_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(users, "peer_uid", lambda sock: os.geteuid() + 1)
    finding = finding_of("unix sockets")
    assert not finding.fine
    assert f"a unix socket of this process belongs to user {os.geteuid() + 1}, not to this user" in finding.value


def test_doctor_checks_leave_no_open_files(monkeypatch: pytest.MonkeyPatch) -> None:
    list(look(2))
    before = os.listdir("/proc/self/fd")
    list(look(2))
    monkeypatch.setattr(os, "posix_fallocate", failing_call(errno.ENOSPC))
    monkeypatch.setattr(users, "peer_uid", failing_call(errno.ENOPROTOOPT))
    list(look(2))
    assert os.listdir("/proc/self/fd") == before


@pytest.mark.parametrize(
    ("files", "fine", "value"),
    [(256, False, "256"), (1024, True, "1024"), (resource.RLIM_INFINITY, True, "no limit"), (10, False, "10")],
)
def test_doctor_shows_how_many_peers_the_limit_of_open_files_allows(
    monkeypatch: pytest.MonkeyPatch, files: int, fine: bool, value: str
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (files, files))
    finding = finding_of("open files")
    assert (finding.fine, finding.value) == (fine, value)
    if not fine:
        assert f"about {max(0, files - 64) // 3} peers" in finding.advice
        assert "ulimit -n" in finding.advice


@pytest.mark.parametrize(("free", "fine"), [(0, False), ((64 << 20) - 4096, False), (64 << 20, True)])
def test_doctor_reports_a_small_dev_shm_as_a_problem(monkeypatch: pytest.MonkeyPatch, free: int, fine: bool) -> None:
    real = os.statvfs("/")
    shm = os.statvfs_result((4096, 4096, (1 << 30) // 4096, 0, free // 4096, *real[5:]))
    monkeypatch.setattr(os, "statvfs", lambda path: shm)
    finding = finding_of("/dev/shm")
    assert finding.fine is fine
    assert finding.value.endswith(" free of 1 GiB")
    assert ("--shm-size" in finding.advice) is not fine


@pytest.mark.parametrize(
    ("path", "text", "value"),
    [
        ("job/memory.max", "max", "no limit"),
        ("job/memory.max", str(3 << 29), "1.5 GiB"),
        ("memory.max", str(256 << 20), "256 MiB"),
        ("memory/memory.limit_in_bytes", "9223372036854771712", "no limit"),
        ("memory/memory.limit_in_bytes", str(512 << 10), "512 KiB"),
    ],
)
def test_doctor_reads_the_memory_limit_of_the_cgroup(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, path: str, text: str, value: str
) -> None:
    (tmp_path / "self").mkdir()
    (tmp_path / "self" / "cgroup").write_text("8:pids:/\n0::/job\n")
    (tmp_path / path).parent.mkdir(exist_ok=True)
    (tmp_path / path).write_text(f"{text}\n")
    redirect_files(monkeypatch, {"/proc/self": tmp_path / "self", "/sys/fs/cgroup": tmp_path})
    assert finding_of("memory of the cgroup").value == value


@pytest.mark.parametrize("nbytes", [212_992, LOOPBACK_BUFFER])
def test_doctor_reports_small_socket_buffers_as_a_hint(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, nbytes: int
) -> None:
    for name in ("rmem_max", "wmem_max"):
        (tmp_path / name).write_text(f"{nbytes}\n")
    redirect_files(monkeypatch, {"/proc/sys/net/core": tmp_path})
    for name in ("rmem_max", "wmem_max"):
        finding = finding_of(f"net.core.{name}")
        assert finding.fine, "the default of most systems is reported as a problem"
        assert (f"sysctl -w net.core.{name}={LOOPBACK_BUFFER}" in finding.advice) == (nbytes < LOOPBACK_BUFFER)


def test_doctor_omits_facts_from_unreadable_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    redirect_files(monkeypatch, dict.fromkeys(("/proc/self", "/proc/sys", "/sys/fs/cgroup"), tmp_path))
    monkeypatch.setattr(os, "statvfs", failing_call(errno.ENOENT))
    names = {finding.name for finding in look(1)}
    assert "open files" in names
    assert not {"memory of the cgroup", "net.core.rmem_max", "/dev/shm"} & names


def test_doctor_prints_no_limits_on_a_system_without_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "resource", None)
    topics = {finding.topic for finding in look(1)}
    assert topics == {"versions", "host", "launcher", "means", "network"}


def test_doctor_reports_more_ranks_than_cores_as_a_hint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 3}, raising=False)
    assert finding_of("cores usable", ranks=2).advice == ""
    finding = finding_of("cores usable", ranks=3)
    assert finding.fine
    assert finding.advice.startswith("3 ranks take turns on 2")


@pytest.mark.parametrize(
    ("load", "values", "warned"),
    [
        (MachineLoad(0.1, 0.0, 0.25, inf), ["0.10 cores", "0.00 cores", "25 %", "none"], []),
        (MachineLoad(0.31, 0.0, 0.25, 2.0), ["0.31 cores", "0.00 cores", "25 %", "2.00 cores"], ["other processes"]),
        (MachineLoad(0.2, 0.2, 0.0, inf), ["0.20 cores", "0.20 cores", "0 %", "none"], ["other processes"]),
        (MachineLoad(0.0, 0.0, 0.0, 1.5), ["0.00 cores", "0.00 cores", "0 %", "1.50 cores"], ["CPU quota"]),
        (MachineLoad(None, None, None, None), ["unknown"] * 4, ["other processes"]),
    ],
)
def test_doctor_reports_a_load_that_distorts_timings_as_a_hint(
    load: MachineLoad, values: list[str], warned: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 3}, raising=False)
    findings = list(check_load(load))
    assert [finding.name for finding in findings] == ["other processes", "steal", "CPU pressure", "CPU quota"]
    assert [finding.value for finding in findings] == values
    assert [finding.name for finding in findings if finding.advice] == warned
    assert all(finding.fine and finding.topic == "load" for finding in findings)


def test_doctor_names_a_missing_package_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = {"numpy": "2.1", "msgpack": "1.2", "torch": "2.13"}

    def version(name: str) -> str:
        if name not in installed:
            raise PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(checks, "version", version)
    versions = {finding.name: finding for finding in look(1) if finding.topic == "versions"}
    assert versions.keys() == {"python", "aiocoll", *installed, "uvloop"}
    assert all(versions[name].value == value for name, value in installed.items())
    assert versions["aiocoll"].value == VERSION
    assert not versions["uvloop"].fine
    assert "pip install uvloop" in versions["uvloop"].advice


def test_doctor_reports_an_unresolvable_master_address_as_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    assert finding_of("address for peers").value == "127.0.0.1 (the route to MASTER_ADDR=127.0.0.1)"
    monkeypatch.setattr(socket, "getaddrinfo", failing_call(errno.ENOENT))
    monkeypatch.setenv("MASTER_ADDR", "nowhere.invalid")
    finding = finding_of("address for peers")
    assert not finding.fine
    assert "'nowhere.invalid' does not resolve" in finding.advice


def test_doctor_reports_a_missing_network_interface_as_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIOCOLL_INTERFACE", "lo")
    assert finding_of("address for peers").value == "127.0.0.1 (interface=lo)"
    monkeypatch.setenv("AIOCOLL_INTERFACE", "nope0")
    finding = finding_of("address for peers")
    assert not finding.fine
    assert "interface='nope0'" in finding.advice


def test_doctor_shows_ports_and_the_advertised_address(monkeypatch: pytest.MonkeyPatch, port: int) -> None:
    monkeypatch.setenv("AIOCOLL_PORT_RANGE", f"{port}")
    assert finding_of("ports for peers").value == f"{port} to {port}, 1 of them free"
    with socket.create_server(("127.0.0.1", port)):
        finding = finding_of("ports for peers")
    assert finding.value == f"{port} to {port}, 0 of them free"
    assert not finding.fine
    assert "AIOCOLL_PORT_RANGE" in finding.advice
    monkeypatch.setenv("AIOCOLL_ADVERTISE", "203.0.113.5")
    assert finding_of("address for other hosts").value == "203.0.113.5"
    monkeypatch.setenv("AIOCOLL_CONNECTIONS", "1")
    assert finding_of("connections for data").value == "at most 1 to a rank on another host"


def test_doctor_checks_the_encryption_between_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    assert finding_of("between hosts").value.startswith("TLS 1.3 (cryptography ")
    monkeypatch.setenv("AIOCOLL_ENCRYPTION", "none")
    assert finding_of("between hosts").value == "nothing is encrypted"
    monkeypatch.delenv("AIOCOLL_ENCRYPTION")
    real = checks.version

    def version_without_cryptography(name: str) -> str:
        if name == "cryptography":
            raise PackageNotFoundError
        return real(name)

    monkeypatch.setattr(checks, "version", version_without_cryptography)
    assert "pip install aiocoll[tls]" in finding_of("between hosts").advice


def test_doctor_checks_the_certificate_of_the_users_ca(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    authority = Authority(tmp_path)
    files = authority.make("aiocoll://train/rank/*", days=(-1, 12))
    for name, value in as_variables(files).items():
        monkeypatch.setenv(name, value)
    finding = finding_of("between hosts")
    assert re.fullmatch(
        r"TLS 1.3, certificate .*own.pem for aiocoll://train/rank/\*, valid for (12.0|11.9) days more", finding.value
    )
    assert (finding.fine, finding.advice) == (True, "")
    monkeypatch.setenv("AIOCOLL_JOB_ID", "train")
    assert finding_of("between hosts").fine
    monkeypatch.setenv("AIOCOLL_JOB_ID", "other")
    assert (
        "the certificate has no name for this job: expected aiocoll://other/..." in finding_of("between hosts").advice
    )
    authority.make("aiocoll://other/rank/*", days=(-1, 1.5))
    finding = finding_of("between hosts")
    assert (finding.fine, finding.advice[:29]) == (True, "a group keeps its certificate")
    authority.make("aiocoll://other/rank/*", days=(-2, -1))
    finding = finding_of("between hosts")
    assert not finding.fine
    assert "own.pem' has expired: it is valid from" in finding.advice


def test_doctor_reports_a_failed_rendezvous_as_a_problem(limits: Limits, capsys: pytest.CaptureFixture[str]) -> None:
    limits(doctor_max_wait=1e-3)
    assert main(["doctor"]) == 1
    output = capsys.readouterr().out
    assert "failed (TimeoutError)" in output
    assert "PROBLEM: no group can be formed here: " in output
    assert output.endswith("see above\n")


def test_doctor_reports_ranks_without_shared_memory_as_a_problem(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def fake_meeting(*_: object, **__: object) -> list[list[tuple[int, str, str]]]:
        return [[(1, "unix", "it is forbidden"), (2, "shm", "same host")], [(2, "unix", "it is forbidden")], []]

    monkeypatch.setattr(doctor, "run_processes", fake_meeting)
    assert main(["doctor", "-n", "3"]) == 1
    output = capsys.readouterr().out
    assert "could share memory, which is faster" in output
    assert "  0-1 1-2: unix, it is forbidden\n  0-2: shm, same host\n" in output
    monkeypatch.setenv("AIOCOLL_TRANSPORT", "unix")
    main(["doctor", "-n", "3"])
    assert "could share memory" not in capsys.readouterr().out


SCOPES = {
    "0": ("process_vm_readv works", ""),
    "1": ("process_vm_readv works among ranks that one launcher has started", "ptrace_scope=0"),
    "2": ("Yama forbids it (ptrace_scope is 2)", "ptrace_scope=1"),
}


@pytest.mark.parametrize("user", [0, 1000])
@pytest.mark.parametrize("scope", SCOPES)
def test_doctor_derives_single_copy_from_the_ptrace_scope_of_yama(
    scope: str, user: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "ptrace_scope").write_text(f"{scope}\n")
    redirect_files(monkeypatch, {"/proc/sys/kernel/yama": tmp_path})
    monkeypatch.setattr(os, "geteuid", lambda: user)
    finding = finding_of("single copy")
    value, remedy = SCOPES["0" if user == 0 else scope]
    assert finding.value == value
    assert remedy in finding.advice
    assert bool(finding.advice) == bool(remedy)
    assert finding.fine == (user == 0 or scope != "2")


def test_doctor_reports_single_copy_refused_by_the_kernel_as_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "can_read", lambda: "it refuses")
    finding = finding_of("single copy")
    assert (finding.value, finding.fine) == ("it refuses", False)
    assert "--cap-add SYS_PTRACE" in finding.advice


@pytest.mark.parametrize(
    ("variable", "advice"),
    [
        ("AIOCOLL_TRANSPORT=tcp", "slower than in C; the accelerator needs shared memory"),
        ("AIOCOLL_TRANSPORT=unix", "slower than in C; the accelerator needs shared memory"),
        ("AIOCOLL_DEBUG=detail", "slower than in C; this debug level compares all calls"),
        ("AIOCOLL_TRANSPORT=shm", ""),
        ("PYTHONASYNCIODEBUG=1", ""),
    ],
)
def test_doctor_shows_the_reason_why_small_collectives_run_in_python(
    variable: str, advice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "core", checks)
    monkeypatch.setenv(*variable.split("="))
    finding = finding_of("small collectives")
    assert (finding.advice, finding.fine) == (advice, True)
    assert finding.value == (f"in Python: {variable}" if advice else "in C where the call allows it (docs/native.md)")


def test_doctor_reports_a_missing_accelerator_as_a_hint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "core", None)
    finding = finding_of("small collectives")
    assert (finding.value, finding.fine) == ("in Python: the accelerator does not run", True)
    assert "docs/native.md" in finding.advice


def test_doctor_omits_network_interfaces_without_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.if_nameindex", lambda: [(1, "lo"), (99, "absent0")])
    names = [finding.name for finding in look(1) if finding.name.startswith("interface ")]
    assert names == ["interface lo"]
