"""Checks of this host for `aiocoll doctor`: versions, cores, limits, shared memory, sockets, addresses."""

from __future__ import annotations

import asyncio
import errno
import mmap
import os
import platform
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import aiocoll
from aiocoll.credentials import TlsFiles, tls_files
from aiocoll.errors import AiocollError, RendezvousError
from aiocoll.machine_load import MAX_LOAD, MachineLoad, show_cores, show_quota, show_share, usable_cores
from aiocoll.native import core, describe_implementation
from aiocoll.options import GroupOptions
from aiocoll.rendezvous.launchers import EXPLICIT, LAUNCHERS, local_numbers, recognise
from aiocoll.rendezvous.parameters import find_parameters
from aiocoll.security.names import format_names, part_name
from aiocoll.security.tls_trouble import clock
from aiocoll.security.user_ca import read
from aiocoll.transport.registry import AUTO, find_transport, transports
from aiocoll.transport.shm.process_memory import can_read, yama_scope
from aiocoll.transport.stream import addresses as address
from aiocoll.transport.stream import route
from aiocoll.transport.stream.link import LOOPBACK_BUFFER
from aiocoll.users import peer_trouble

__all__ = ["CheckResult", "check_load", "look"]

_PROC = Path("/proc")
_CGROUP = Path("/sys/fs/cgroup")
_SHM = Path("/dev/shm")
#: Distributions whose versions are shown. Versions are read from metadata: importing some packages takes seconds.
_NEEDED = ("numpy", "msgpack", "uvloop")
_USED_IF_THERE = ("ml_dtypes", "torch", "cupy", "cupy-cuda12x", "cupy-cuda13x")
#: File descriptors per peer (control link, data link, and eventfd or heartbeat), and descriptors of the program itself.
_FILES_PER_PEER = 3
_FILES_OF_PROGRAM = 64
#: The usual soft limit of open files. On a host with a smaller limit, an administrator has reduced it.
_USUAL_FILES = 1024
#: The default size of /dev/shm in containers, in bytes.
_USUAL_SHM = 64 << 20
_DAY = 86400
#: Doctor warns of certificates that expire within this number of days, because a job may run longer.
_SOON = 2
#: Smallest memory limit of a cgroup that means "no limit", in bytes.
_NO_LIMIT = 1 << 60


@dataclass(frozen=True, slots=True)
class CheckResult:
    """The result of one check of this host.

    Attributes:
        topic: the heading under which it is shown.
        name: the name of the check.
        value: the value that was found.
        advice: the consequence and the remedy; "" if there is none.
        fine: False if something fails or is slower because of this result. True makes the advice a mere hint.
    """

    topic: str
    name: str
    value: str
    advice: str = ""
    fine: bool = True


def look(ranks: int, master: str | None = None) -> Iterator[CheckResult]:
    """Check this host for `ranks` ranks, and yield the results. No check imports a large package or leaves a file.

    Args:
        ranks: number of ranks on this host.
        master: name or address of the master; None takes it from the environment.
    """
    yield from _versions()
    yield from _host(ranks)
    yield _started_by(os.environ)
    yield from _limits()
    unshared = "ranks of one host cannot share memory and use sockets, which is slower"
    yield _try("shared memory", _use_memfd, unshared)
    yield _try("wake-ups", _use_eventfd, unshared)
    yield _single_copy()
    yield _accelerator(os.environ)
    yield _try("unix sockets", _use_unix, "ranks of one host can only meet over TCP: set AIOCOLL_TRANSPORT=tcp")
    yield from _addresses(master)


def check_load(load: MachineLoad) -> Iterator[CheckResult]:
    """Yield check results for the CPU load of this machine, with a warning if timings cannot be trusted."""
    advice = ""
    if load.total is None:
        advice = "timings cannot be checked for load: make /proc/stat and /proc/<pid>/stat readable"
    elif load.is_high:
        advice = f"timings cannot be trusted: more than {MAX_LOAD:g} cores are not available; end other work first"
    yield CheckResult("load", "other processes", show_cores(load.others), advice)
    yield CheckResult("load", "steal", show_cores(load.steal))
    yield CheckResult("load", "CPU pressure", show_share(load.pressure))
    low = load.quota is not None and load.quota < len(usable_cores())
    advice = f"ranks are paused when they use more: allow {len(usable_cores())} cores (docker: --cpus)" if low else ""
    yield CheckResult("load", "CPU quota", show_quota(load.quota), advice)


def _versions() -> Iterator[CheckResult]:
    yield CheckResult("versions", "python", f"{platform.python_version()} ({platform.python_implementation()})")
    yield CheckResult("versions", "aiocoll", f"{aiocoll.__version__}, {describe_implementation()}")
    for name in (*_NEEDED, *_USED_IF_THERE):
        try:
            yield CheckResult("versions", name, version(name))
        except PackageNotFoundError:
            if name in _NEEDED:
                advice = f"aiocoll depends on it: pip install {name}"
                yield CheckResult("versions", name, "not installed", advice, fine=False)


def _host(ranks: int) -> Iterator[CheckResult]:
    linux = sys.platform.startswith("linux")
    advice = "" if linux else "the promised speeds hold on Linux only; on this system, ranks use sockets"
    yield CheckResult("host", "platform", platform.platform(), advice)
    cores = len(usable_cores())
    advice = (
        "" if ranks <= cores else f"{ranks} ranks take turns on {cores}: each operation takes several times as long"
    )
    yield CheckResult("host", "cores usable", str(cores), advice)
    loop = asyncio.new_event_loop()
    loop.close()
    kind = f"{type(loop).__module__}.{type(loop).__qualname__}"
    advice = "" if kind.startswith("uvloop") else "uvloop.run(main()) in place of asyncio.run(main()) is faster"
    yield CheckResult("host", "event loop", kind, advice)
    yield CheckResult("host", "identity", address.host_identity(os.environ.get("AIOCOLL_HOST_ID")))


def _started_by(env: Mapping[str, str]) -> CheckResult:
    """Check which launcher started this process, and which parameters `env://` reads from environment variables."""
    topic, name = "launcher", "started by"
    launcher = recognise(env)
    if launcher is None:
        looked = ", ".join(f"{each.name} ({' or '.join(each.marks)})" for each in LAUNCHERS)
        return CheckResult(topic, name, "nothing that env:// recognises", f"it recognises, in this order: {looked}")
    value = f"{launcher.name} ({launcher.mark(env)})"
    try:
        where = find_parameters(None, None, None, None, env, "")
        local = local_numbers(env)
    except (ValueError, AiocollError) as error:
        return CheckResult(topic, name, value, str(error), fine=launcher is EXPLICIT)  # doctor itself is no rank
    value += f": {'a free rank' if where.rank is None else f'rank {where.rank}'} of {where.world_size}"
    if None not in local:
        value += f", {local[0]} of {local[1]} on this host"
    place = "where rank 0 reports it to the launcher" if where.ask else where.url.partition("://")[2]
    value += f"; the store is {'' if where.ask else 'at '}{place}"
    keys = [key for key in ("AIOCOLL_JOB_KEY_FILE", "AIOCOLL_JOB_KEY", "AIOCOLL_JOB_KEY_FD") if key in env]
    value += (
        f"; the job key comes from {keys[0] if keys else 'the launcher'}"
        if keys or where.ask
        else "; no job key is set"
    )
    needed = where.several_hosts and not keys
    advice = (
        "ranks on several hosts need a job key: set AIOCOLL_JOB_KEY_FILE to the path of a file that only you can read"
    )
    return CheckResult(topic, name, value, advice if needed else "", fine=not needed)


def _limits() -> Iterator[CheckResult]:
    try:
        import resource
    except ImportError:  # Windows has none of these limits
        return

    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    peers = max(0, files - _FILES_OF_PROGRAM) // _FILES_PER_PEER
    few = 0 <= files < _USUAL_FILES
    advice = f"enough for about {peers} peers; raise it with ulimit -n {_USUAL_FILES} or more" if few else ""
    value = "no limit" if files < 0 else str(files)
    yield CheckResult("limits", "open files", value, advice, fine=not few)
    yield CheckResult("limits", "locked memory", _size(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]))
    with suppress(OSError):
        shm = os.statvfs(_SHM)
        free = shm.f_bavail * shm.f_frsize
        advice = (
            "" if free >= _USUAL_SHM else f"memory may run out: empty {_SHM}, or enlarge it (docker: --shm-size=1g)"
        )
        value = f"{_size(free)} free of {_size(shm.f_blocks * shm.f_frsize)}"
        yield CheckResult("limits", str(_SHM), value, advice, fine=not advice)
    # The file of the memory limit differs between cgroup version 2 on a host, version 2 in a container, and version 1.
    group = next((line[3:].lstrip("/") for line in _read(_PROC / "self/cgroup").splitlines() if line[:3] == "0::"), "")
    for path in (_CGROUP / group / "memory.max", _CGROUP / "memory.max", _CGROUP / "memory/memory.limit_in_bytes"):
        if limit := _read(path):
            nbytes = -1 if limit == "max" or int(limit) >= _NO_LIMIT else int(limit)
            yield CheckResult("limits", "memory of the cgroup", _size(nbytes))
            break
    for name in ("rmem_max", "wmem_max"):
        if most := _read(_PROC / "sys/net/core" / name):
            advice = f"large messages take longer; sysctl -w net.core.{name}={LOOPBACK_BUFFER} allows full-size buffers"
            yield CheckResult(
                "limits", f"net.core.{name}", _size(int(most)), advice if int(most) < LOOPBACK_BUFFER else ""
            )


def _try(name: str, use: Callable[[], str], otherwise: str) -> CheckResult:
    """Check a system feature by calling `use`; `otherwise` describes how ranks work without the feature."""
    try:
        return CheckResult("means", name, use())
    except (OSError, AttributeError) as error:
        advice = f"{otherwise}; check whether a sandbox (seccomp, systemd) forbids it"
        return CheckResult("means", name, f"failed: {error}", advice, fine=False)


def _use_memfd() -> str:
    fd = os.memfd_create("aiocoll-doctor", os.MFD_CLOEXEC)
    try:
        os.posix_fallocate(fd, 0, mmap.PAGESIZE)
        with mmap.mmap(fd, mmap.PAGESIZE) as memory:
            memory[:1] = b"x"
        return "memfd_create works"
    finally:
        os.close(fd)


def _use_eventfd() -> str:
    os.close(os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK))
    return "eventfd works"


def _single_copy() -> CheckResult:
    """Check whether a rank can read the memory of other ranks on this host."""
    topic, name = "means", "single copy"
    why, remedy = can_read(), "large arrays of ranks of this host are copied twice; in a container: "
    if why is not None:
        return CheckResult(topic, name, why, f"{remedy}docker run --cap-add SYS_PTRACE", fine=False)
    scope = yama_scope()
    if scope == 0 or os.geteuid() == 0:
        return CheckResult(topic, name, "process_vm_readv works")
    if scope == 1:
        advice = "ranks that no launcher has started copy large arrays twice: sysctl -w kernel.yama.ptrace_scope=0"
        return CheckResult(topic, name, "process_vm_readv works among ranks that one launcher has started", advice)
    advice = "large arrays of ranks of this host are copied twice: sysctl -w kernel.yama.ptrace_scope=1"
    return CheckResult(topic, name, f"Yama forbids it (ptrace_scope is {scope})", advice, fine=False)


def _accelerator(env: Mapping[str, str]) -> CheckResult:
    """Check whether the accelerator in C can carry out small collectives with this installation and environment."""
    reason, remedy = "", ""
    if core is None:
        reason, remedy = "the accelerator does not run", "docs/native.md describes how to install it"
    elif (name := env.get("AIOCOLL_TRANSPORT", AUTO).lower()) != AUTO and not (
        name in transports and find_transport(name).shares_memory
    ):
        reason, remedy = f"AIOCOLL_TRANSPORT={name}", "the accelerator needs shared memory"
    elif env.get("AIOCOLL_DEBUG") == "detail":
        reason, remedy = "AIOCOLL_DEBUG=detail", "this debug level compares all calls"
    value = f"in Python: {reason}" if reason else "in C where the call allows it (docs/native.md)"
    return CheckResult("means", "small collectives", value, f"slower than in C; {remedy}" if reason else "")


def _use_unix() -> str:
    listener, name = address.open_unix(os.urandom)
    try:
        with listener, socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
            client.connect(address.unix_address(name))
            if (foreign := peer_trouble(client)) is not None:
                raise OSError(errno.EPERM, f"a unix socket of this process {foreign}")
        return f"{'abstract' if name.startswith('@') else 'on disk'}, peers are checked by their user"
    finally:
        address.remove_unix(name)


def _addresses(master: str | None) -> Iterator[CheckResult]:
    """Yield the network interfaces, and the address that a job on several hosts would use."""
    try:
        options = GroupOptions.resolve(None, os.environ)
    except (ValueError, AiocollError) as error:
        yield CheckResult("network", "environment", "not usable", str(error), fine=False)
        options = GroupOptions.resolve(None, {})
    for _, name in socket.if_nameindex():
        found: dict[str, None] = {}
        for family in (socket.AF_INET, socket.AF_INET6):
            with suppress(ValueError):
                found[route.interface_address(name, family)] = None
        if found:  # ranks cannot use an interface without an address
            yield CheckResult("network", f"interface {name}", ", ".join(found))
    master = master or os.environ.get("MASTER_ADDR")
    try:
        chosen = route.routable_address(master, options.interface, options.bind)
    except (ValueError, AiocollError) as error:
        yield CheckResult("network", "address for peers", "none", str(error), fine=False)
    else:
        why = f"the route to MASTER_ADDR={master}" if master else "MASTER_ADDR is not set, so for ranks of this host"
        why = f"bind={options.bind}" if options.bind else f"interface={options.interface}" if options.interface else why
        yield CheckResult("network", "address for peers", f"{chosen} ({why})")
        if options.port_range is not None:
            yield _ports(chosen, *options.port_range)
    if options.advertise is not None:
        yield CheckResult("network", "address for other hosts", options.advertise)
    if options.connections is not None:
        yield CheckResult("network", "connections for data", f"at most {options.connections} to a rank on another host")
    yield _encryption(options)


def _encryption(options: GroupOptions) -> CheckResult:
    name = "between hosts"
    if options.encryption == "none":
        return CheckResult("network", name, "nothing is encrypted", "use this only on a network that you trust")
    if (files := tls_files(options.tls_ca, options.tls_certificate, options.tls_key)) is not None:
        return _certificate(name, files, options.job_id)
    try:
        return CheckResult("network", name, f"TLS 1.3 (cryptography {version('cryptography')})")
    except PackageNotFoundError:
        advice = "ranks on several hosts need it: pip install aiocoll[tls], or set encryption='none' on every rank"
        return CheckResult("network", name, "cryptography is not installed", advice)


def _certificate(name: str, files: TlsFiles, job: str | None) -> CheckResult:
    """Check the names and the remaining days of the certificate that the user's CA has signed."""
    try:
        own = read(files).own
    except ValueError as error:
        return CheckResult("network", name, "TLS 1.3 with your own CA is not possible", str(error), fine=False)
    assert own is not None
    days = (own.ends - clock()) / _DAY
    value = f"TLS 1.3, certificate {own.path} for {format_names(own.names)}, valid for {days:.1f} days more"
    if job is not None and not any(each.startswith(part_name(job)) for each in own.names):
        advice = f"the certificate has no name for this job: expected {part_name(job)}... (AIOCOLL_JOB_ID)"
        return CheckResult("network", name, value, advice, fine=False)
    advice = "a group keeps its certificate: renew it before a long job" if days < _SOON else ""
    return CheckResult("network", name, value, advice)


def _ports(host: str, first: int, last: int) -> CheckResult:
    """Count the ports of a range on which this process can listen."""
    free = 0
    for port in range(first, last + 1):
        with suppress(RendezvousError), address.open_tcp(host, (port, port)):
            free += 1
    advice = "" if free else "no rank can listen there: give another port_range= (AIOCOLL_PORT_RANGE)"
    return CheckResult("network", "ports for peers", f"{first} to {last}, {free} of them free", advice, fine=free > 0)


def _size(nbytes: float) -> str:
    """Return a number of bytes as text; a negative number means no limit."""
    if nbytes < 0:
        return "no limit"
    for unit in ("B", "KiB", "MiB"):
        if nbytes < 1024:
            return f"{nbytes:.4g} {unit}"
        nbytes /= 1024
    return f"{nbytes:.4g} GiB"


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
