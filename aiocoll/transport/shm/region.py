"""Anonymous shared memory, passed between processes as a descriptor; the kernel frees it after its last user.

Memory is reserved before the first write. On a host without free memory the reservation fails with an error; without a
reservation, the kernel would kill the process that writes.

A function that fails closes at once everything that it has opened or mapped. The traceback of its error would otherwise
keep the memory for as long as anything, or a reference cycle, keeps the error.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import mmap
import os
import sys
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress

from aiocoll.errors import ProtocolError

__all__ = ["PAGE", "OwnRegion", "SharedRegion", "create_mapped", "no_memory_error", "open_readable", "open_region"]

PAGE = mmap.PAGESIZE
#: Bytes allocated per loop iteration, in about 60 microseconds.
_BATCH = 256 * 1024

# Seal constants of Linux' <linux/fcntl.h>. The module `fcntl` defines them only on systems with memfd.
_SEALS = 0x0001 | 0x0002 | 0x0004
"""F_SEAL_SEAL, F_SEAL_SHRINK, F_SEAL_GROW: no process can remove pages, which would raise SIGBUS wherever mapped."""
_FUTURE_WRITE = 0x0010
"""F_SEAL_FUTURE_WRITE, since Linux 5.1: only mappings that already exist can write."""
_WRITE_SEALS = 0x0008 | _FUTURE_WRITE
"""F_SEAL_WRITE, F_SEAL_FUTURE_WRITE."""
_ADD_SEALS, _GET_SEALS = 1033, 1034
# MADV_POPULATE_WRITE of Linux' <linux/mman.h>, available since Linux 5.14.
_POPULATE_WRITE = 23


class SharedRegion:
    """Memory that two processes share, with pages allocated as needed; made by `create` or `open`.

    A writer reserves a part before its first write there. A reader reads only where a writer has written.

    Attributes:
        memory: the reserved mapping.
    """

    __slots__ = ("_reserved", "memory")

    def __init__(self, memory: mmap.mmap, first: Iterable[tuple[int, int]], *, reserved: bool) -> None:
        self.memory = memory
        self._reserved = reserved
        for start, end in first:
            if not self.reserve(start, end):
                raise no_memory_error()

    @classmethod
    async def create(cls, nbytes: int, first: Iterable[tuple[int, int]]) -> tuple[int, SharedRegion]:
        """Make `nbytes` of zeroed memory; return its descriptor, which the caller closes, and the region.

        Kernels before 5.14 reserve all of it at once, in many turns of the loop. That takes 0.25 ms per MiB.

        Args:
            nbytes: size of the whole region.
            first: (start, end) of the parts to reserve now.

        Raises:
            OSError: the kernel has no memfd or forbids it, or no memory or descriptor is left.
        """
        with ExitStack() as undo:
            fd = _create_memfd(nbytes, undo)
            memory = _seal_and_map(fd, nbytes, undo)
            reserved = not _can_populate(memory)
            if reserved:
                for start in range(0, nbytes, _BATCH):
                    os.posix_fallocate(fd, start, min(_BATCH, nbytes - start))
                    await asyncio.sleep(0)
            region = cls(memory, first, reserved=reserved)
            undo.pop_all()
            return fd, region

    @classmethod
    def open(cls, fd: int, nbytes: int, first: Iterable[tuple[int, int]]) -> SharedRegion:
        """Map the region of another process, close `fd`, and allocate the pages in `first`; see `create`.

        Raises:
            ProtocolError: the memory has another size, or the other process could still change its size.
            OSError: the memory cannot be mapped, or none is left.
        """
        reserved = os.fstat(fd).st_blocks * 512 >= nbytes
        memory = open_region(fd, nbytes)
        try:
            return cls(memory, first, reserved=reserved)
        except BaseException:
            memory.close()
            raise

    def reserve(self, start: int, end: int) -> bool:
        """Allocate the pages between two offsets; return False if no memory is left.

        Takes about half a millisecond per MiB, part of which the first write saves.
        """
        if self._reserved:
            return True
        start -= start % PAGE
        try:
            _populate(self.memory, start, end - start)
        except OSError:
            return False
        return True

    def close(self) -> None:
        """Unmap the memory. No view of it may exist."""
        self.memory.close()


class OwnRegion:
    """Memory that only this process writes, with pages allocated as needed. Peers map it with `open_readable`.

    Kernels before 5.1 cannot prevent peers from writing. There, peers map the memory read-only voluntarily.

    Args:
        nbytes: size of the whole region.
        first: (start, end) of the part to reserve now.

    Attributes:
        fd: the descriptor; -1 once it is closed.
        memory: the reserved mapping.

    Raises:
        OSError: the kernel has no memfd or forbids it, or no memory or descriptor is left.
    """

    __slots__ = ("_is_old", "fd", "memory")

    def __init__(self, nbytes: int, first: tuple[int, int]) -> None:
        with ExitStack() as undo:
            self.fd = fd = _create_memfd(nbytes, undo)
            self.memory = _map(fd, nbytes)
            undo.callback(self.memory.close)
            try:
                fcntl.fcntl(fd, _ADD_SEALS, _SEALS | _FUTURE_WRITE)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                fcntl.fcntl(fd, _ADD_SEALS, _SEALS)
            self._is_old = not _can_populate(self.memory)
            if not self.reserve(*first):
                raise no_memory_error()
            undo.pop_all()

    def reserve(self, start: int, end: int) -> bool:
        """Allocate the pages between two offsets; return False if no memory is left."""
        start -= start % PAGE
        try:
            if self._is_old:
                os.posix_fallocate(self.fd, start, end - start)
            else:
                _populate(self.memory, start, end - start)
        except OSError:
            return False
        return True

    def close(self) -> None:
        """Close the descriptor. The memory is unmapped with its last view."""
        fd, self.fd = self.fd, -1
        os.close(fd)
        del self.memory


def no_memory_error() -> OSError:
    """Return the error to raise when no more pages of a region can be allocated."""
    return OSError(errno.ENOMEM, "this host has no memory left to share")


def open_region(fd: int, nbytes: int) -> mmap.mmap:
    """Map the region that another process has made, and close `fd`.

    Raises:
        ProtocolError: the memory has another size, or the other process could still change its size.
        OSError: the memory cannot be mapped.
    """
    return _open_sealed(fd, nbytes, "shared memory", _is_sealed, mmap.PROT_READ | mmap.PROT_WRITE)


def open_readable(fd: int, nbytes: int) -> mmap.mmap:
    """Map another process's `OwnRegion` read-only, and close `fd`.

    Raises:
        ProtocolError: the memory has another size, or the other process could still change its size.
        OSError: the memory cannot be mapped.
    """
    return _open_sealed(fd, nbytes, "an outbox", _is_fixed, mmap.PROT_READ)


def _open_sealed(fd: int, nbytes: int, name: str, is_sealed: Callable[[int], bool], access: int) -> mmap.mmap:
    try:
        if not (0 < nbytes == os.fstat(fd).st_size and is_sealed(fd)):
            raise ProtocolError(f"a peer passed {name} that does not have {nbytes} sealed bytes")
        return _map(fd, nbytes, access)
    finally:
        os.close(fd)


def _create_memfd(nbytes: int, undo: ExitStack) -> int:
    if not hasattr(os, "memfd_create"):
        raise OSError(errno.ENOSYS, "this Python was built without memfd_create")
    fd = os.memfd_create("aiocoll", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    undo.callback(os.close, fd)
    os.ftruncate(fd, nbytes)
    return fd


def _seal_and_map(fd: int, nbytes: int, undo: ExitStack) -> mmap.mmap:
    fcntl.fcntl(fd, _ADD_SEALS, _SEALS)
    memory = _map(fd, nbytes)
    undo.callback(memory.close)
    return memory


def _can_populate(memory: mmap.mmap) -> bool:
    try:
        _populate(memory, 0, PAGE)
    except OSError as error:
        return error.errno != errno.EINVAL
    return True


def _populate(memory: mmap.mmap, start: int, nbytes: int) -> None:
    memory.madvise(_POPULATE_WRITE, start, nbytes)


def _is_sealed(fd: int) -> bool:
    """Return whether memory that both processes write has seals, so that neither process can remove its pages."""
    if not _is_fixed(fd):
        return False
    seals = fcntl.fcntl(fd, _GET_SEALS)
    return not seals & _WRITE_SEALS and fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDWR


def _is_fixed(fd: int) -> bool:
    """Return whether seals forbid the removal of pages, and the memory has no huge pages, which could run out."""
    try:
        seals = fcntl.fcntl(fd, _GET_SEALS)
    except OSError:
        return False  # the descriptor is not a memfd
    return seals & _SEALS == _SEALS and os.fstatvfs(fd).f_bsize == PAGE


def _map(fd: int, nbytes: int, access: int = mmap.PROT_READ | mmap.PROT_WRITE) -> mmap.mmap:
    # Before Python 3.13, a mapping always keeps a duplicate of the descriptor open.
    if sys.version_info >= (3, 13):
        return mmap.mmap(fd, nbytes, prot=access, trackfd=False)
    return mmap.mmap(fd, nbytes, prot=access)


async def create_mapped(nbytes: int) -> tuple[int, mmap.mmap]:
    """Make `nbytes` of zeroed memory for this process, in short steps that let the event loop run.

    Reserves and maps all pages, in about 0.3 milliseconds per MiB. The first use is faster by the same time.

    Returns:
        The descriptor, which the caller closes, and the mapping.

    Raises:
        OSError: the kernel has no memfd or forbids it, or no memory or descriptor is left.
    """
    with ExitStack() as undo:
        fd = _create_memfd(nbytes, undo)
        memory = _seal_and_map(fd, nbytes, undo)
        for start in range(0, nbytes, _BATCH):
            batch = min(_BATCH, nbytes - start)
            os.posix_fallocate(fd, start, batch)
            # Older kernels lack `_POPULATE_WRITE`, and map pages on first access.
            with suppress(OSError):
                memory.madvise(_POPULATE_WRITE, start, batch)
            await asyncio.sleep(0)
        undo.pop_all()
        return fd, memory
