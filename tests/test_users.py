"""Checks that files and unix socket peers belong to the own user, also where several users share one user id."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from aiocoll import users
from aiocoll.users import owner_trouble, peer_trouble, peer_uid

linux_only = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs /proc and SO_PEERCRED")
root_only = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become other users")

#: Two user ids that exist outside of the tested user namespaces, but not inside.
OWN, FOREIGN = 12345, 23456

#: Code by which a process becomes another user, possibly in a user namespace without ids. Imports come first, since the
#: new user cannot read the files. NumPy is not imported: a process with threads cannot make a user namespace.
BECOME = f"""
import ctypes, encodings.idna, fcntl, os, runpy, signal, socket, sys
module = runpy.run_path({users.__file__!r})
owner_trouble, peer_trouble = module["owner_trouble"], module["peer_trouble"]
name, uid, inside, *paths = sys.argv[1:]
os.setgroups([])
os.setresgid(*[int(uid)] * 3)
os.setresuid(*[int(uid)] * 3)
CLONE_NEWUSER = 0x10000000
if inside == "True" and ctypes.CDLL(None).unshare(CLONE_NEWUSER):
    sys.exit("no user namespaces")
"""
#: A program of the user `OWN` in a user namespace. It checks the given files and two connecting processes, and prints
#: the results.
OBSERVER = f"""{BECOME}
listener = socket.socket(socket.AF_UNIX)
listener.bind(f"\\0{{name}}")
listener.listen()
print(os.geteuid(), flush=True)
for path in paths:
    fd = os.open(path, os.O_RDONLY)
    print(os.fstat(fd).st_uid, owner_trouble(fd), sep=";", flush=True)
    os.close(fd)
for _ in range(2):
    connection, _ = listener.accept()
    print(peer_trouble(connection), flush=True)
    connection.sendall(b"!")
own = socket.socket(socket.AF_UNIX)
own.connect(f"\\0{{name}}")
print(peer_trouble(own), flush=True)
"""
#: A program that connects to the observer, and stays alive until the observer has checked it.
PEER = f"""{BECOME}
peer = socket.socket(socket.AF_UNIX)
peer.connect(f"\\0{{name}}")
peer.recv(1)
"""


@pytest.fixture
def share_user_id(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., None]:
    """Return a function that simulates a user namespace in which other users share the current user's id."""

    def make(uid_map: str | None = "", overflow: str | None = f"{os.geteuid()}\n") -> None:
        for name, content in (("_UID_MAP", uid_map), ("_OVERFLOW_UID", overflow)):
            path = tmp_path / name
            if content is not None:
                path.write_text(content)
            monkeypatch.setattr(users, name, str(path))

    return make


@linux_only
def test_files_and_sockets_of_the_own_user_are_accepted(tmp_path: Path) -> None:
    near, far = socket.socketpair(socket.AF_UNIX)
    fd = os.open(tmp_path, os.O_RDONLY)
    with near, far:
        assert peer_uid(near) == os.geteuid()
        assert (peer_trouble(near), owner_trouble(fd)) == (None, None)
    os.close(fd)


def test_files_and_socket_peers_of_another_user_id_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Check also that root is refused, since root would not accept a process of this user either."""
    own = os.geteuid()
    for other in (0, 1, 65534, own + 1):
        if other == own:
            continue
        expected = f"belongs to user {other}, not to this user ({own})"
        monkeypatch.setattr(users, "peer_uid", lambda _, other=other: other)
        with socket.socket() as sock:
            assert peer_trouble(sock) == expected
    monkeypatch.setattr(users, "peer_uid", lambda _: None)
    with socket.socket() as sock:
        assert peer_trouble(sock) is None, (
            "a socket without peer credentials is refused, although its directory excludes other users"
        )
    monkeypatch.setattr(os, "geteuid", lambda: own + 1)
    fd = os.open(tmp_path, os.O_RDONLY)
    assert owner_trouble(fd) == f"belongs to user {own}, not to this user ({own + 1})"
    os.close(fd)


@linux_only
@pytest.mark.parametrize("uid_map", ["", "0 1000 1\n", "0 1000 1\n1 100000 65535\n", None])
@pytest.mark.parametrize("failing", [None, errno.EPERM, errno.EACCES, errno.ENOPROTOOPT, errno.ESRCH, errno.EMFILE])
def test_owner_with_a_shared_user_id_must_pass_a_permission_check(
    uid_map: str | None,
    failing: int | None,
    share_user_id: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """Check also that the owner is refused if the permission check fails for any reason."""
    share_user_id(uid_map)
    real = fcntl.fcntl

    def refuse(*_: object) -> None:
        raise OSError(failing, "refused")

    def set_flags(fd: int, command: int, argument: int = 0) -> int:
        if failing is not None and command == fcntl.F_SETFL:
            refuse()
        return real(fd, command, argument)

    if failing is not None:
        monkeypatch.setattr(signal, "pidfd_send_signal", refuse)
        monkeypatch.setattr(fcntl, "fcntl", set_flags)
    before = os.listdir("/proc/self/fd")
    fd = os.open(tmp_path, os.O_RDONLY)
    flags = real(fd, fcntl.F_GETFL)
    near, far = socket.socketpair(socket.AF_UNIX)
    with near, far:
        found = peer_trouble(near), owner_trouble(fd)
    assert real(fd, fcntl.F_GETFL) == flags
    os.close(fd)
    assert os.listdir("/proc/self/fd") == before
    if failing is None:
        assert found == (None, None)
        return
    reason = (
        f"belongs to user {os.geteuid()}, which may be any user without a number in this user namespace: run as a user "
        f"that {users._UID_MAP} lists"
    )
    assert found == (f"{reason}, or use a job key", reason)


@linux_only
@pytest.mark.parametrize(
    ("uid_map", "overflow"),
    [
        ("0 0 4294967295\n", f"{os.geteuid()}\n"),  # all users have ids in this namespace
        ("0 0 1000\n1000 1000 4294966295\n", f"{os.geteuid()}\n"),
        ("0 1000 1\n", f"{os.geteuid() + 1}\n"),  # this user has an id in this namespace
        ("", None),
    ],
)
def test_socket_peer_with_a_unique_user_id_needs_no_permission_check(
    uid_map: str, overflow: str | None, share_user_id: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    share_user_id(uid_map, overflow)
    monkeypatch.setattr(users, "_NOBODY", os.geteuid() + 1)
    monkeypatch.setattr(signal, "pidfd_send_signal", None)
    near, far = socket.socketpair(socket.AF_UNIX)
    with near, far:
        assert peer_trouble(near) is None


def may_unshare() -> bool:
    program = f"{BECOME}sys.exit(os.geteuid() != 65534)"
    return os.geteuid() == 0 and subprocess.run(python(program, "-", OWN, True), capture_output=True).returncode == 0


def python(program: str, *args: object) -> list[str]:
    return [sys.executable, "-c", program, *map(str, args)]


@linux_only
@root_only
@pytest.mark.parametrize("inside", [False, True], ids=["outside", "in another namespace"])
def test_users_that_a_namespace_shows_with_the_same_id_are_distinguished(inside: bool, tmp_path: Path) -> None:
    """Run an observer in a user namespace where all users, files and peers have the id 65534."""
    if not may_unshare():
        pytest.skip("needs permission to make user namespaces")
    tmp_path.chmod(0o755)
    for parent in tmp_path.parents:
        if parent.stat().st_mode & 0o001 == 0:
            parent.chmod(0o711)
    paths = [tmp_path / "own", tmp_path / "foreign", tmp_path / "root"]
    for path, uid in zip(paths, (OWN, FOREIGN, 0), strict=True):
        path.touch()
        path.chmod(0o666)
        os.chown(path, uid, uid)
    name = f"aiocoll-users-{os.getpid()}-{inside}"
    observer = subprocess.Popen(python(OBSERVER, name, OWN, True, *paths), stdout=subprocess.PIPE, text=True)
    try:
        assert observer.stdout is not None
        lines = [observer.stdout.readline().rstrip("\n") for _ in range(4)]
        assert lines[0] == "65534"
        assert lines[1] == "65534;None"
        refused = "belongs to user 65534, which may be any user without a number in this user namespace: run as a user"
        assert all(line.startswith(f"65534;{refused}") for line in lines[2:]), lines
        for uid, trouble in ((FOREIGN, refused), (OWN, "None")):
            # The second peer runs as the user of the observer, but in another user namespace.
            subprocess.run(python(PEER, name, uid, inside), timeout=60, check=True)
            assert observer.stdout.readline().startswith(trouble)
        assert observer.stdout.readline() == "None\n"
        assert observer.wait(60) == 0
    finally:
        observer.kill()
        observer.wait()
        observer.stdout.close()
