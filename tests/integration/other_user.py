"""A user without rights who attacks the ranks of a job, for `test_other_user`. The argument says where they are.

A line of JSON tells what came of each attempt; then new connections are held, until there is a line of input.
"""

from __future__ import annotations

import ctypes
import encodings.idna  # noqa: F401 - nothing can be loaded any more once the user is another one
import errno
import json
import os
import resource
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from aiocoll.security.handshake import CHALLENGE_SIZE, ClientHandshake, ConnKind, Identity, job_id

NOBODY = 65534
#: Connections to each listener: more than there are places for those who have not proven the key.
MANY = 300
#: Seconds in which a listener that closes a connection has done so.
SOON = 10.0
#: Numbers of <asm/unistd.h> and <sys/ptrace.h>.
PIDFD_GETFD, PTRACE_ATTACH = 438, 16

held: list[socket.socket] = []
libc = ctypes.CDLL(None, use_errno=True)


def came_of(attempt: Callable[[], object]) -> str:
    """Try; return the name of the error, or what there was to be had."""
    try:
        return f"got {attempt()!r}"
    except OSError as error:
        return errno.errorcode[error.errno or 0]


def checked(result: int) -> int:
    """Return what a call of the C library returned, unless it failed."""
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result


def processes(pid: int) -> Iterator[tuple[str, Callable[[], object]]]:
    """Read from a rank, and stop it."""
    for name in ("environ", "mem", "maps", "auxv", "syscall"):
        yield name, lambda name=name: Path(f"/proc/{pid}/{name}").read_bytes()[:50]
    for name in ("fd", "map_files"):
        yield name, lambda name=name: os.listdir(f"/proc/{pid}/{name}")
    yield "descriptors", lambda: [os.stat(f"/proc/{pid}/fd/{fd}") for fd in range(3, 40)]
    yield "pidfd_getfd", lambda: checked(libc.syscall(PIDFD_GETFD, os.pidfd_open(pid), 3, 0))
    yield "ptrace", lambda: checked(libc.ptrace(PTRACE_ATTACH, pid, 0, 0))
    yield "process_vm_readv", lambda: checked(libc.process_vm_readv(pid, ctypes.byref(space()), 1, space(), 1, 0))
    for number in (signal.SIGKILL, signal.SIGSTOP, signal.SIGUSR2, signal.SIGINT):
        yield number.name, lambda number=number: os.kill(pid, number)
    yield "pidfd", lambda: signal.pidfd_send_signal(os.pidfd_open(pid), signal.SIGKILL)
    yield "limits", lambda: resource.prlimit(pid, resource.RLIMIT_NOFILE, (3, 3))
    yield "affinity", lambda: os.sched_setaffinity(pid, {0})
    yield "priority", lambda: os.setpriority(os.PRIO_PROCESS, pid, 19)
    yield "oom", lambda: Path(f"/proc/{pid}/oom_score_adj").write_text("1000")


def space() -> Any:
    """Return a struct iovec."""
    return (ctypes.c_size_t * 2)(ctypes.addressof(ctypes.create_string_buffer(8)), 8)


def files(folder: str) -> Iterator[tuple[str, Callable[[], object]]]:
    """Read and replace what lies in a folder in which everybody may make files, such as /tmp."""
    for name in os.listdir(folder):
        path = Path(folder, name)
        yield f"{name} read", path.read_bytes
        yield f"{name} write", lambda path=path: path.open("ab")
        yield f"{name} remove", path.unlink
        yield f"{name} rename", lambda path=path: path.rename(f"{path}.mine")
        yield f"{name} replace", lambda path=path: replace(path)
        yield f"{name} connect", lambda path=path: socket.socket(socket.AF_UNIX).connect(str(path))


def replace(path: Path) -> None:
    own = Path(f"{path}.{os.getpid()}")
    own.touch()
    try:
        own.replace(path)
    finally:
        own.unlink()


def listeners(addresses: list[Any]) -> Iterator[tuple[str, Callable[[], object]]]:
    """Bind the addresses of ranks, and talk to them."""
    for address in addresses:
        yield f"bind {address}", lambda address=address: bind(address)
        yield f"hold {address}", lambda address=address: hold(address)
        yield f"join {address}", lambda address=address: join(address)


def opened(address: Any) -> socket.socket:
    sock = socket.socket(socket.AF_INET if isinstance(address, list) else socket.AF_UNIX)
    sock.settimeout(SOON)
    return sock


def target(address: Any) -> Any:
    return tuple(address) if isinstance(address, list) else "\0" + address[1:]


def bind(address: Any) -> None:
    with opened(address) as sock:
        if isinstance(address, list):
            for option in (socket.SO_REUSEADDR, socket.SO_REUSEPORT):
                sock.setsockopt(socket.SOL_SOCKET, option, 1)
        sock.bind(target(address))
        sock.listen()


def hold(address: Any) -> str:
    """Fill the queue and all places, with connections that say nothing."""
    for _ in range(MANY):
        held.append(opened(address))
        held[-1].connect(target(address))
    return "connections"


def join(address: Any) -> str:
    """Do a handshake without the key, for each purpose; return all that was heard."""
    heard = set()
    for kind in ConnKind:
        with opened(address) as sock:
            try:
                sock.connect(target(address))
                client = ClientHandshake(Identity(job_id(""), 0, 1, 2, kind), None, os.urandom)
                sock.send(client.hello())
                challenge = sock.recv(CHALLENGE_SIZE, socket.MSG_WAITALL)
                if challenge:
                    sock.send(client.prove(challenge))
                    heard.add(sock.recv(1 << 16).strip(b"\0"))
            except (ConnectionResetError, BrokenPipeError):  # others came after it, or it is not let in at all
                pass
    return repr(heard - {b""})


def main(pids: list[int], folder: str, addresses: list[Any]) -> None:
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)
    found = {f"{pid} {name}": came_of(attempt) for pid in pids for name, attempt in processes(pid)}
    found |= {name: came_of(attempt) for name, attempt in files(folder)}
    found |= {name: came_of(attempt) for name, attempt in listeners(addresses)}
    print(json.dumps(found), flush=True)
    sys.stdin.readline()


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
