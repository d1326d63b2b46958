"""Reads of other processes' memory (`process_vm_readv`): results, refusals and reused process ids."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from aiocoll.transport.shm.process_memory import (
    OwnMemory,
    PeerMemory,
    address_of,
    can_read,
    peer_memory,
    permit_reading,
)

pytestmark = pytest.mark.skipif(can_read() is not None, reason=f"cannot read memory of processes: {can_read()}")

root_only = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
NOBODY = 65534
PAGE = mmap.PAGESIZE
IMPORTS = (
    "import ctypes, os, sys\n"
    "from aiocoll.transport.shm.process_memory import OwnMemory, PeerMemory, address_of, can_read, permit_reading"
)


class ReadableChild:
    """A child process that runs the statements `before`, and then prints the address of a text in its memory."""

    def __init__(self, before: str = "") -> None:
        code = (
            f"{IMPORTS}\n{before}\n"
            "own = OwnMemory(os.urandom)\n"
            "text = bytearray(b'what it has')\n"
            "print(own.address, own.word, address_of(memoryview(text)), flush=True)\n"
            "sys.stdin.read()\n"
        )
        pipe = subprocess.PIPE
        self.process = subprocess.Popen([sys.executable, "-c", code], stdin=pipe, stdout=pipe, text=True)
        assert self.process.stdout is not None
        self.address, self.word, self.text = map(int, self.process.stdout.readline().split())

    def memory(self) -> PeerMemory:
        return PeerMemory(self.process.pid, self.address, self.word)

    def end(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.communicate()


@contextmanager
def readable_child(before: str = "") -> Iterator[ReadableChild]:
    child = ReadableChild(before)
    try:
        yield child
    finally:
        child.end()


def read(memory: PeerMemory, address: int, nbytes: int) -> bytes:
    into = bytearray(nbytes)
    memory.read(address, memoryview(into))
    return bytes(into)


def test_memory_of_another_process_is_read() -> None:
    with readable_child() as child:
        memory = child.memory()
        assert read(memory, child.text, 11) == b"what it has"
        assert read(memory, child.text + 5, 2) == b"it"


def test_memory_of_an_ended_process_raises_lookup_error() -> None:
    with readable_child() as child:
        memory = child.memory()
        child.end()
        with pytest.raises(ProcessLookupError):
            read(memory, child.text, 11)


def test_process_with_a_reused_pid_is_not_read() -> None:
    """Read a process that does not have the expected secret word in its memory; the read must return no data."""
    with readable_child() as child:
        memory = PeerMemory(child.process.pid, child.address, child.word ^ 1)
        with pytest.raises(ProcessLookupError, match="another process has its number"):
            read(memory, child.text, 11)
        memory = PeerMemory(child.process.pid, 8, child.word)
        with pytest.raises(OSError, match=os.strerror(errno.EFAULT)):
            read(memory, child.text, 11)


def test_change_of_the_secret_word_is_detected_for_any_value() -> None:
    """Check that secret words of all zeros and of all ones are as valid as other values."""
    for word in (0, (1 << 64) - 1):
        held = ctypes.c_uint64(word)
        memory = PeerMemory(os.getpid(), ctypes.addressof(held), word)
        assert read(memory, ctypes.addressof(held), 8) == word.to_bytes(8, sys.byteorder)
        held.value ^= 1
        with pytest.raises(ProcessLookupError):
            read(memory, ctypes.addressof(held), 8)


def test_read_of_unmapped_process_memory_raises_efault() -> None:
    own = OwnMemory(os.urandom)
    memory = PeerMemory(os.getpid(), own.address, own.word)
    pages = mmap.mmap(-1, 2 * PAGE)
    start = ctypes.addressof(ctypes.c_char.from_buffer(pages))
    protect = ctypes.CDLL(None).mprotect
    protect.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    assert protect(start + PAGE, PAGE, 0) == 0
    assert own.can_show(start)
    assert not own.can_show(start + PAGE)
    assert read(memory, start, PAGE) == bytes(PAGE)
    with pytest.raises(OSError, match=os.strerror(errno.EFAULT)):
        read(memory, start + 1, PAGE)  # this range begins in mapped memory and ends beyond it
    assert protect(start + PAGE, PAGE, 3) == 0


@pytest.mark.parametrize("readonly", [False, True])
def test_address_of_an_array_is_the_address_of_its_first_element(readonly: bool) -> None:
    array = np.arange(10.0)
    view = memoryview(array).cast("B")
    expected = array.__array_interface__["data"][0]
    given = view.toreadonly() if readonly else view
    assert address_of(given) == expected
    assert address_of(given[24:]) == expected + 24


def test_peer_process_is_identified_by_its_socket() -> None:
    """Use a socket with both ends in this process, since a process may always read its own memory."""
    own = OwnMemory(os.urandom)
    near, far = socket.socketpair()
    with near, far:
        found = peer_memory(near, own.address, own.word)
        assert found is not None
        assert read(found, own.address, 8) == own.word.to_bytes(8, sys.byteorder)
        assert peer_memory(near, own.address, own.word ^ 1) is None
        assert peer_memory(near, 8, own.word) is None


DROP = f"os.setgid({NOBODY}); os.setuid({NOBODY})"
#: Statements that change the user and then set PR_SET_DUMPABLE, without which no process could read the memory.
SHOW = f"{DROP}; ctypes.CDLL(None).prctl(4, 1)  # PR_SET_DUMPABLE"


def read_by_other_process(child: ReadableChild, before: str) -> str:
    """Run a process that executes `before` and then reads the child's memory; return the output of this process."""
    code = (
        f"{IMPORTS}\n{before}\n"
        "into = bytearray(11)\n"
        "try:\n"
        f"    PeerMemory({child.process.pid}, {child.address}, {child.word}).read({child.text}, memoryview(into))\n"
        "    print(into.decode())\n"
        "except OSError as error:\n"
        "    print(type(error).__name__)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, timeout=60, check=True)
    return done.stdout


@pytest.mark.slow
@root_only
def test_unprivileged_process_reads_only_its_own_user() -> None:
    with readable_child() as of_root, readable_child(SHOW) as of_nobody, readable_child(DROP) as hidden:
        assert read_by_other_process(of_root, DROP) == "PermissionError\n"
        assert read_by_other_process(of_nobody, DROP) == "what it has\n"
        assert read_by_other_process(hidden, DROP) == "PermissionError\n"
        assert read_by_other_process(hidden, "") == "what it has\n", "root was refused"


#: Statements that install a seccomp filter, with constants of <linux/seccomp.h> and <linux/filter.h>. With this filter,
#: process_vm_readv fails with EPERM.
FILTER = """
import struct
from platform import machine
number = {"x86_64": 310, "aarch64": 270}[machine()]  # process_vm_readv
lines = [(0x20, 0, 0, 0), (0x15, 0, 1, number), (0x06, 0, 0, 0x50001), (0x06, 0, 0, 0x7FFF0000)]
program = b"".join(struct.pack("HBBI", *line) for line in lines)
held = ctypes.create_string_buffer(program)
filter_ = struct.pack("HxxxxxxP", len(lines), ctypes.addressof(held))
prctl = ctypes.CDLL(None).prctl
assert prctl(38, 1, 0, 0, 0) == 0  # PR_SET_NO_NEW_PRIVS
assert prctl(22, 2, ctypes.create_string_buffer(filter_), 0, 0) == 0  # PR_SET_SECCOMP
"""


def test_seccomp_filter_is_reported_as_a_refusal() -> None:
    """Use a seccomp filter, as containers do; `can_read` must detect the filter without a peer."""
    with readable_child() as child:
        assert read_by_other_process(child, FILTER) == "PermissionError\n"
        assert read_by_other_process(child, f"{FILTER}\nprint(can_read())").startswith(
            "the kernel refuses process_vm_readv"
        )


YAMA = Path("/proc/sys/kernel/yama/ptrace_scope")


@root_only
@pytest.mark.skipif(not YAMA.exists(), reason="this kernel has no Yama")
@pytest.mark.skipif(YAMA.exists() and YAMA.read_text() != "1\n", reason="kernel.yama.ptrace_scope is not 1")
def test_yama_allows_children_of_a_permitted_parent() -> None:
    with readable_child(SHOW) as silent, readable_child(f"permit_reading(os.getppid())\n{SHOW}") as permitting:
        assert read_by_other_process(silent, DROP) == "PermissionError\n"
        assert read_by_other_process(permitting, DROP) == "what it has\n"


def test_yama_permission_to_read_is_set_for_the_given_process(monkeypatch: pytest.MonkeyPatch) -> None:
    class Library:
        def __init__(self) -> None:
            self.calls: list[tuple[object, ...]] = []

        def prctl(self, option: int, pid: ctypes.c_ulong, *rest: int) -> int:
            self.calls.append((option, pid.value, *rest))
            return -1  # prctl returns this on a kernel without Yama

    library = Library()
    monkeypatch.setattr(ctypes, "CDLL", lambda name: library)
    permit_reading(1234)
    assert library.calls == [(0x59616D61, 1234, 0, 0, 0)]  # PR_SET_PTRACER


def test_system_without_process_vm_readv_reads_no_memory() -> None:
    """Use a new process, since a process looks for the function `process_vm_readv` only once."""
    code = """
import ctypes, socket
from aiocoll.transport.shm.process_memory import can_read, peer_memory, permit_reading
ctypes.CDLL = lambda name, use_errno=False: object()
permit_reading(1234)
print(can_read())
near, far = socket.socketpair()
print(peer_memory(near, 8, 8))
"""
    reason, memory = subprocess.check_output([sys.executable, "-c", code], text=True, timeout=60).splitlines()
    assert "no process_vm_readv" in reason
    assert memory == "None"
