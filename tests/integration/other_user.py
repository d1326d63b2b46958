"""A process of an unprivileged user that attacks the ranks of a job, for `test_other_user`. Argument: the ranks.

It prints a line of JSON with the outcome of each attempt. Then it holds its connections until it reads a line.
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
#: The number of connections to each listener: more than a listener accepts from clients that prove no key.
MANY = 300
#: Seconds within which a listener closes a refused connection.
SOON = 10.0
#: Constants of <asm/unistd.h> and <sys/ptrace.h>.
PIDFD_GETFD, PTRACE_ATTACH = 438, 16

held_connections: list[socket.socket] = []
libc = ctypes.CDLL(None, use_errno=True)


def outcome(attempt: Callable[[], object]) -> str:
    """Make one attack; return the name of the error that stopped the attack, or what the attack got."""
    try:
        return f"got {attempt()!r}"
    except OSError as error:
        return errno.errorcode[error.errno or 0]


def checked_result(result: int) -> int:
    """Return the result of a C library call; raise OSError if the call failed."""
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result


def process_attempts(pid: int) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield the names and functions of attacks on a rank's process: read memory, stop the process, change limits."""
    for name in ("environ", "mem", "maps", "auxv", "syscall"):
        yield name, lambda name=name: Path(f"/proc/{pid}/{name}").read_bytes()[:50]
    for name in ("fd", "map_files"):
        yield name, lambda name=name: os.listdir(f"/proc/{pid}/{name}")
    yield "descriptors", lambda: [os.stat(f"/proc/{pid}/fd/{fd}") for fd in range(3, 40)]
    yield "pidfd_getfd", lambda: checked_result(libc.syscall(PIDFD_GETFD, os.pidfd_open(pid), 3, 0))
    yield "ptrace", lambda: checked_result(libc.ptrace(PTRACE_ATTACH, pid, 0, 0))
    yield (
        "process_vm_readv",
        lambda: checked_result(libc.process_vm_readv(pid, ctypes.byref(iovec()), 1, iovec(), 1, 0)),
    )
    for number in (signal.SIGKILL, signal.SIGSTOP, signal.SIGUSR2, signal.SIGINT):
        yield number.name, lambda number=number: os.kill(pid, number)
    yield "pidfd", lambda: signal.pidfd_send_signal(os.pidfd_open(pid), signal.SIGKILL)
    yield "limits", lambda: resource.prlimit(pid, resource.RLIMIT_NOFILE, (3, 3))
    yield "affinity", lambda: os.sched_setaffinity(pid, {0})
    yield "priority", lambda: os.setpriority(os.PRIO_PROCESS, pid, 19)
    yield "oom", lambda: Path(f"/proc/{pid}/oom_score_adj").write_text("1000")


def iovec() -> Any:
    """Return a struct iovec."""
    return (ctypes.c_size_t * 2)(ctypes.addressof(ctypes.create_string_buffer(8)), 8)


def file_attempts(folder: str) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield the names and functions of attacks on files in a directory that all users may write, such as /tmp."""
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


def listener_attempts(addresses: list[Any]) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield the names and functions of attacks on listeners: bind their addresses, or connect to them."""
    for address in addresses:
        yield f"bind {address}", lambda address=address: bind(address)
        yield f"hold {address}", lambda address=address: hold(address)
        yield f"join {address}", lambda address=address: join(address)


def new_socket(address: Any) -> socket.socket:
    sock = socket.socket(socket.AF_INET if isinstance(address, list) else socket.AF_UNIX)
    sock.settimeout(SOON)
    return sock


def socket_address(address: Any) -> Any:
    return tuple(address) if isinstance(address, list) else "\0" + address[1:]


def bind(address: Any) -> None:
    with new_socket(address) as sock:
        if isinstance(address, list):
            for option in (socket.SO_REUSEADDR, socket.SO_REUSEPORT):
                sock.setsockopt(socket.SOL_SOCKET, option, 1)
        sock.bind(socket_address(address))
        sock.listen()


def hold(address: Any) -> str:
    """Fill the backlog and the connection limit of a listener with silent connections."""
    for _ in range(MANY):
        held_connections.append(new_socket(address))
        held_connections[-1].connect(socket_address(address))
    return "connections"


def join(address: Any) -> str:
    """Attempt a handshake without the job key for each connection purpose; return the received replies."""
    replies = set()
    for kind in ConnKind:
        with new_socket(address) as sock:
            try:
                sock.connect(socket_address(address))
                client = ClientHandshake(Identity(job_id(""), 0, 1, 2, kind), None, os.urandom)
                sock.send(client.hello())
                challenge = sock.recv(CHALLENGE_SIZE, socket.MSG_WAITALL)
                if challenge:
                    sock.send(client.prove(challenge))
                    replies.add(sock.recv(1 << 16).strip(b"\0"))
            except (ConnectionResetError, BrokenPipeError):  # the listener dropped or refused this client
                pass
    return repr(replies - {b""})


def main(pids: list[int], folder: str, addresses: list[Any]) -> None:
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)
    found = {f"{pid} {name}": outcome(attempt) for pid in pids for name, attempt in process_attempts(pid)}
    found |= {name: outcome(attempt) for name, attempt in file_attempts(folder)}
    found |= {name: outcome(attempt) for name, attempt in listener_attempts(addresses)}
    print(json.dumps(found), flush=True)
    sys.stdin.readline()


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
