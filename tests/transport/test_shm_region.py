"""Anonymous shared memory (memfd): its reservation, its fixed size, and memory that is read-only for peers."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import gc
import mmap
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

from aiocoll.errors import ProtocolError
from aiocoll.transport.shm.region import (
    PAGE,
    OwnRegion,
    SharedRegion,
    create_mapped,
    open_readable,
    open_region,
)

from ..internals import make_calls_fail
from ..shared_memory import mapped

NBYTES = 3 * PAGE
#: A size in bytes that is reserved over several loop iterations, with a smaller last part.
LARGE = 1024 * 1024 + PAGE

Make = Callable[[int], tuple[int, mmap.mmap]]


def refuse_to_populate(patch: pytest.MonkeyPatch) -> None:
    """Make memory reservations fail as on kernels before 5.14, which lack MADV_POPULATE_WRITE."""
    make_calls_fail(patch, OSError(errno.EINVAL, os.strerror(errno.EINVAL)), "populate_memory")


@pytest.fixture
def old_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_to_populate(monkeypatch)


def make_on_old_kernel(nbytes: int) -> tuple[int, mmap.mmap]:
    """Make a region as on an old kernel, on which the region is reserved over several loop iterations."""
    with pytest.MonkeyPatch.context() as patch:
        refuse_to_populate(patch)
        fd, made = asyncio.run(SharedRegion.create(nbytes, [(0, PAGE)]))
    return fd, made.memory


def make_reserved(nbytes: int) -> tuple[int, mmap.mmap]:
    """Make a region whose memory is fully reserved."""
    fd, made = asyncio.run(SharedRegion.create(nbytes, [(0, nbytes)]))
    return fd, made.memory


def make_mapped(nbytes: int) -> tuple[int, mmap.mmap]:
    """Make memory whose pages are also mapped into this process."""
    return asyncio.run(create_mapped(nbytes))


@pytest.fixture(autouse=True)
def _collect_garbage() -> None:
    """Collect garbage before each test, to unmap memory that earlier tests have left."""
    gc.collect()


@pytest.mark.parametrize("make", [make_on_old_kernel, make_reserved, make_mapped])
@pytest.mark.parametrize("nbytes", [PAGE, NBYTES, LARGE])
def test_new_shared_memory_region_is_zeroed_and_has_its_full_size(make: Make, nbytes: int) -> None:
    fd, memory = make(nbytes)
    assert len(memory) == nbytes
    assert not any(memory[: 2 * PAGE])
    assert os.fstat(fd).st_size == nbytes
    # All blocks are reserved, which protects writers from SIGBUS when the host runs out of memory.
    assert os.fstat(fd).st_blocks * 512 >= nbytes
    assert not os.get_inheritable(fd)
    os.close(fd)


@pytest.mark.parametrize("make", [make_on_old_kernel, make_reserved, make_mapped])
def test_size_of_a_shared_memory_region_cannot_be_changed(make: Make) -> None:
    fd, memory = make(NBYTES)
    for nbytes in (0, NBYTES - 1, NBYTES + 1):
        with pytest.raises(PermissionError):
            os.ftruncate(fd, nbytes)
    with pytest.raises(PermissionError):
        fcntl.fcntl(fd, 1033, 0x0008)  # F_ADD_SEALS: F_SEAL_WRITE would end all writing
    memory[-1:] = b"x"
    os.close(fd)


def test_memory_pages_released_by_a_peer_read_as_zeros() -> None:
    """Punch a hole into the memory file, as a peer can; later accesses must not raise SIGBUS."""
    fd, memory = make_mapped(NBYTES)
    memory[:] = b"x" * NBYTES
    punched = subprocess.run(["fallocate", "-p", "-o", "0", "-l", str(NBYTES), f"/proc/self/fd/{fd}"], pass_fds=[fd])
    assert punched.returncode == 0
    assert not any(memory[:])
    memory[:] = b"y" * NBYTES
    assert memory[NBYTES - 1 :] == b"y"
    os.close(fd)


def test_second_mapping_of_a_region_has_the_same_contents() -> None:
    fd, memory = make_mapped(NBYTES)
    other = open_region(os.dup(fd), NBYTES)
    memory[:3] = b"abc"
    assert other[:3] == b"abc"
    other[NBYTES - 3 :] = b"xyz"
    assert memory[NBYTES - 3 :] == b"xyz"
    os.close(fd)
    memory.close()
    assert other[:3] == b"abc"


def make_unsealed() -> int:
    fd = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, NBYTES)
    return fd


def make_half_sealed() -> int:
    fd = make_unsealed()
    fcntl.fcntl(fd, 1033, 0x0001 | 0x0004)  # F_ADD_SEALS: the file can still shrink
    return fd


def make_unsealable() -> int:
    fd = os.memfd_create("test", 0)
    os.ftruncate(fd, NBYTES)
    return fd


def maker_of_size(nbytes: int) -> Callable[[], int]:
    return lambda: make_mapped(nbytes)[0]


STRANGE: dict[str, Callable[[], int]] = {
    "unsealed": make_unsealed,
    "sealed against growing only": make_half_sealed,
    "no seals at all": make_unsealable,
    "too small": maker_of_size(NBYTES - PAGE),
    "too large": maker_of_size(NBYTES + PAGE),
    "a device": lambda: os.open("/dev/zero", os.O_RDWR),
    "an eventfd": lambda: os.eventfd(0),
    "a pipe": lambda: os.close((ends := os.pipe())[1]) or ends[0],
}


@pytest.mark.parametrize("what", STRANGE)
def test_descriptor_of_other_memory_is_refused_and_closed(what: str) -> None:
    fd = STRANGE[what]()
    with pytest.raises(ProtocolError, match=f"a peer passed shared memory that does not have {NBYTES} sealed bytes"):
        open_region(fd, NBYTES)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


@pytest.mark.parametrize("make", [make_on_old_kernel, make_mapped])
@pytest.mark.parametrize(
    ("name", "code"),
    [("memfd_create", errno.EPERM), ("ftruncate", errno.EFBIG), ("posix_fallocate", errno.ENOSPC)],
)
def test_failed_creation_of_a_region_leaves_no_open_descriptors(
    make: Make, name: str, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, name, refuse)
    with pytest.raises(OSError, match=os.strerror(code)) as raised:
        make(NBYTES)
    assert mapped() == [], raised


def test_failed_reservation_of_a_region_leaves_no_mapping(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that neither end leaves a mapping, even while the test still references both errors with tracebacks."""
    fd, memory = make_mapped(NBYTES)
    memory.close()
    monkeypatch.setattr(SharedRegion, "reserve", lambda region, start, end: False)
    with pytest.raises(OSError, match="no memory left to share") as making:
        asyncio.run(SharedRegion.create(NBYTES, [(0, PAGE)]))
    with pytest.raises(OSError, match="no memory left to share") as opening:
        SharedRegion.open(fd, NBYTES, [(0, PAGE)])
    assert mapped() == [], (making, opening)


@pytest.mark.parametrize("make", [make_on_old_kernel, make_reserved, make_mapped])
def test_creation_of_a_region_without_memfd_raises_an_error(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")
    with pytest.raises(OSError, match="built without memfd_create"):
        make(NBYTES)


@pytest.mark.parametrize("make", [make_on_old_kernel, make_reserved, make_mapped])
def test_failed_mapping_of_a_region_leaves_no_open_descriptors(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    monkeypatch.setattr(mmap, "mmap", refuse)
    with pytest.raises(OSError, match="Cannot allocate memory") as raised:
        make(NBYTES)
    assert mapped() == [], raised


async def test_event_loop_runs_during_the_creation_of_a_region(old_kernel: None) -> None:
    making = asyncio.ensure_future(SharedRegion.create(LARGE, []))
    turns = 0
    while not making.done():
        await asyncio.sleep(0)
        turns += 1
    os.close(making.result()[0])
    assert turns > 4


@pytest.mark.parametrize("turns", range(1, 6))
async def test_cancelled_creation_of_a_region_leaves_no_open_descriptors(old_kernel: None, turns: int) -> None:
    making = asyncio.ensure_future(SharedRegion.create(LARGE, []))
    for _ in range(turns):
        await asyncio.sleep(0)
    making.cancel()
    with pytest.raises(asyncio.CancelledError) as raised:
        await making
    assert mapped() == [], raised


LIMITED = """
import resource, signal, sys
from aiocoll.transport.shm.region import OwnRegion
what, limit, nbytes = getattr(resource, sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
if what == resource.RLIMIT_AS:
    with open("/proc/self/statm") as sizes:
        limit += int(sizes.read().split()[0]) * resource.getpagesize()
resource.setrlimit(what, (limit, limit))
try:
    OwnRegion(nbytes, (0, nbytes))
except OSError as error:
    print(error.strerror)
"""


@pytest.mark.parametrize(
    ("limit", "value", "reason"),
    [("RLIMIT_FSIZE", PAGE, "File too large"), ("RLIMIT_AS", PAGE, "Cannot allocate memory")],
)
def test_memory_limit_raises_an_error_instead_of_a_signal(limit: str, value: int, reason: str) -> None:
    arguments = [sys.executable, "-c", LIMITED, limit, str(value), str(64 * LARGE)]
    ended = subprocess.run(arguments, capture_output=True, text=True, timeout=60)
    assert ended.returncode not in (-signal.SIGBUS, -signal.SIGXFSZ, -signal.SIGSEGV)
    assert (ended.returncode, ended.stdout.strip(), ended.stderr) == (0, reason, "")


# -- memory that only its owner can write

#: A program that tries to write the memory of a descriptor by many system calls, and prints which calls failed.
INTRUDER = """
import ctypes, fcntl, mmap, os, sys
fd, nbytes = int(sys.argv[1]), int(sys.argv[2])
whole = mmap.mmap(fd, nbytes, prot=mmap.PROT_READ)
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = pointer = ctypes.c_void_p
libc.mmap.argtypes = [pointer, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
address = libc.mmap(None, nbytes, 1, 1, fd, 0)
def protect():
    if libc.mprotect(pointer(address), ctypes.c_size_t(nbytes), 3):
        raise OSError(ctypes.get_errno(), "mprotect")
def reopen():
    again = os.open(f"/proc/self/fd/{fd}", os.O_RDWR)
    mmap.mmap(again, nbytes)
ways = {
    "mmap": lambda: mmap.mmap(fd, nbytes),
    "pwrite": lambda: os.pwrite(fd, b"intruder", 0),
    "write": lambda: os.write(fd, b"intruder"),
    "mprotect": protect,
    "reopen": reopen,
    "truncate": lambda: os.ftruncate(fd, 0),
    "grow": lambda: os.ftruncate(fd, 2 * nbytes),
    "seal": lambda: fcntl.fcntl(fd, 1033, 8),
}
for name, way in ways.items():
    try:
        way()
    except OSError:
        print(name, end=" ")
print(whole[:5].decode())
"""


def failed_intrusions(fd: int) -> list[str]:
    """Return the names of the write attempts that failed in another process, and the text that the process has read."""
    command = [sys.executable, "-c", INTRUDER, str(fd), str(NBYTES)]
    return subprocess.run(command, pass_fds=[fd], check=True, capture_output=True, text=True).stdout.split()


@pytest.fixture
def own_region() -> Iterator[OwnRegion]:
    region = OwnRegion(NBYTES, (0, PAGE))
    yield region
    region.close()


def test_peer_can_read_but_not_write_outbox_memory(own_region: OwnRegion) -> None:
    own_region.memory[:5] = b"hello"
    refused = ["mmap", "pwrite", "write", "mprotect", "reopen", "truncate", "grow", "seal"]
    assert failed_intrusions(own_region.fd) == [*refused, "hello"]
    seen = open_readable(os.dup(own_region.fd), NBYTES)
    own_region.memory[:5] = b"later"
    assert seen[:5] == b"later"
    assert own_region.reserve(PAGE, NBYTES)
    own_region.memory[PAGE:] = b"x" * (NBYTES - PAGE)
    assert seen[PAGE:] == b"x" * (NBYTES - PAGE)
    with pytest.raises(TypeError, match="readonly"):
        seen[:5] = b"never"
    seen.close()


def test_memory_is_shared_on_an_old_kernel_without_future_write_seals(monkeypatch: pytest.MonkeyPatch) -> None:
    call = fcntl.fcntl

    def refuse_future_seal(fd: int, command: int, seals: int = 0) -> int:
        if seals & 16:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return call(fd, command, seals)

    monkeypatch.setattr(fcntl, "fcntl", refuse_future_seal)
    region = OwnRegion(NBYTES, (0, PAGE))
    region.memory[:5] = b"hello"
    seen = open_readable(os.dup(region.fd), NBYTES)
    assert seen[:5] == b"hello"
    with pytest.raises(TypeError, match="readonly"):
        seen[:5] = b"never"
    seen.close()
    region.close()


def test_kernel_that_forbids_seals_leaves_no_open_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbid(*_: object) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(fcntl, "fcntl", forbid)
    with pytest.raises(PermissionError) as raised:
        OwnRegion(NBYTES, (0, PAGE))
    assert mapped() == [], raised


def test_outbox_memory_is_reserved_page_by_page_on_request(own_region: OwnRegion) -> None:
    assert os.fstat(own_region.fd).st_blocks * 512 == PAGE
    assert own_region.reserve(PAGE + 10, PAGE + 20)
    assert os.fstat(own_region.fd).st_blocks * 512 == 2 * PAGE


def test_old_kernel_reserves_outbox_memory_without_mapping_pages(old_kernel: None) -> None:
    region = OwnRegion(NBYTES, (0, PAGE))
    assert os.fstat(region.fd).st_blocks * 512 == PAGE
    assert region.reserve(PAGE + 10, PAGE + 20)
    assert os.fstat(region.fd).st_blocks * 512 == 2 * PAGE
    region.close()
