"""Memory without a name: made by one process, passed to others as a descriptor, gone with its last user.

Memory is reserved before it is touched: a host that has none left says so then, instead of killing whoever touches it.

What fails closes at once what it has made or mapped: its error's traceback would keep the memory as long as somebody,
or a cycle, keeps the error.
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

__all__ = ["PAGE", "OwnRegion", "SharedRegion", "create_mapped", "no_memory", "open_readable", "open_region"]

PAGE = mmap.PAGESIZE
#: Bytes reserved in one turn of the loop; takes about 60 microseconds.
_LOT = 256 * 1024

# Linux, <linux/fcntl.h>; `fcntl` has them too, but not where there is no memfd.
_SEALS = 0x0001 | 0x0002 | 0x0004
"""F_SEAL_SEAL, F_SEAL_SHRINK, F_SEAL_GROW: nobody can take pages away, which would be SIGBUS to all who map them."""
_FUTURE_WRITE = 0x0010
"""F_SEAL_FUTURE_WRITE, from Linux 5.1 on: nobody can write but through the mappings that exist."""
_WRITE_SEALS = 0x0008 | _FUTURE_WRITE
"""F_SEAL_WRITE, F_SEAL_FUTURE_WRITE."""
_ADD_SEALS, _GET_SEALS = 1033, 1034
# Linux, <linux/mman.h>, from 5.14 on.
_POPULATE_WRITE = 23


class SharedRegion:
    """Memory that two processes share, reserved bit by bit; `create` or `open` it.

    Whoever writes somewhere for the first time reserves it before. Nobody reads where nothing was written.

    Attributes:
        memory: all of it.
    """

    __slots__ = ("_whole", "memory")

    def __init__(self, memory: mmap.mmap, first: Iterable[tuple[int, int]], *, whole: bool) -> None:
        self.memory = memory
        self._whole = whole
        for start, end in first:
            if not self.reserve(start, end):
                raise no_memory()

    @classmethod
    async def create(cls, nbytes: int, first: Iterable[tuple[int, int]]) -> tuple[int, SharedRegion]:
        """Make `nbytes` of zeroed memory; return its descriptor, which the caller closes, and the region.

        On kernels before 5.14 all of it is reserved at once. That takes a quarter of a millisecond per MiB, and many
        turns of the loop.

        Args:
            nbytes: of the whole.
            first: start and end of what is reserved here.

        Raises:
            OSError: the kernel has no memfd or forbids it, or there is no memory or descriptor left.
        """
        with ExitStack() as undo:
            fd = _open(nbytes, undo)
            memory = _seal(fd, nbytes, undo)
            whole = not _can_populate(memory)
            if whole:
                for start in range(0, nbytes, _LOT):
                    os.posix_fallocate(fd, start, min(_LOT, nbytes - start))
                    await asyncio.sleep(0)
            region = cls(memory, first, whole=whole)
            undo.pop_all()
            return fd, region

    @classmethod
    def open(cls, fd: int, nbytes: int, first: Iterable[tuple[int, int]]) -> SharedRegion:
        """Map what another process has made, and close `fd`; reserve the parts of `first`, as `create` does.

        Raises:
            ProtocolError: it has another size, or its size could change under us.
            OSError: it cannot be mapped, or there is no memory left.
        """
        whole = os.fstat(fd).st_blocks * 512 >= nbytes
        memory = open_region(fd, nbytes)
        try:
            return cls(memory, first, whole=whole)
        except BaseException:
            memory.close()
            raise

    def reserve(self, start: int, end: int) -> bool:
        """Reserve the pages between two offsets; False if there is no memory left. What is reserved stays so.

        Takes about half a millisecond per MiB, of which the first write is spared some.
        """
        if self._whole:
            return True
        start -= start % PAGE
        try:
            _populate(self.memory, start, end - start)
        except OSError:
            return False
        return True

    def close(self) -> None:
        """Give the memory back, of which nobody has a view."""
        self.memory.close()


class OwnRegion:
    """Memory that only this process writes, reserved bit by bit; others map it by `open_readable`.

    Kernels before 5.1 do not keep others from writing: there, they map it read-only of their own accord.

    Args:
        nbytes: of the whole.
        first: start and end of what is reserved at once.

    Attributes:
        fd: its descriptor; -1 once it is closed.
        memory: all of it.

    Raises:
        OSError: the kernel has no memfd or forbids it, or there is no memory or descriptor left.
    """

    __slots__ = ("_is_old", "fd", "memory")

    def __init__(self, nbytes: int, first: tuple[int, int]) -> None:
        with ExitStack() as undo:
            self.fd = fd = _open(nbytes, undo)
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
                raise no_memory()
            undo.pop_all()

    def reserve(self, start: int, end: int) -> bool:
        """Reserve the pages between two offsets; False if there is no memory left. What is reserved stays so."""
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
        """Close the descriptor; the memory goes with the last view of it."""
        fd, self.fd = self.fd, -1
        os.close(fd)
        del self.memory


def no_memory() -> OSError:
    """Return the error of a region that cannot grow."""
    return OSError(errno.ENOMEM, "this host has no memory left to share")


def open_region(fd: int, nbytes: int) -> mmap.mmap:
    """Map what another process has made, and close `fd`.

    Raises:
        ProtocolError: it has another size, or its size could change under us.
        OSError: it cannot be mapped.
    """
    return _open_sealed(fd, nbytes, "shared memory", _is_sealed, mmap.PROT_READ | mmap.PROT_WRITE)


def open_readable(fd: int, nbytes: int) -> mmap.mmap:
    """Map for reading what another process has made as an `OwnRegion`, and close `fd`.

    Raises:
        ProtocolError: it has another size, or its size could change under us.
        OSError: it cannot be mapped.
    """
    return _open_sealed(fd, nbytes, "an outbox", _is_fixed, mmap.PROT_READ)


def _open_sealed(fd: int, nbytes: int, name: str, is_sealed: Callable[[int], bool], access: int) -> mmap.mmap:
    try:
        if not (0 < nbytes == os.fstat(fd).st_size and is_sealed(fd)):
            raise ProtocolError(f"a peer passed {name} that is not {nbytes} sealed bytes")
        return _map(fd, nbytes, access)
    finally:
        os.close(fd)


def _open(nbytes: int, undo: ExitStack) -> int:
    if not hasattr(os, "memfd_create"):
        raise OSError(errno.ENOSYS, "this Python was built without memfd_create")
    fd = os.memfd_create("aiocoll", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    undo.callback(os.close, fd)
    os.ftruncate(fd, nbytes)
    return fd


def _seal(fd: int, nbytes: int, undo: ExitStack) -> mmap.mmap:
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
    """Whether nobody can take pages away from memory that all may write."""
    if not _is_fixed(fd):
        return False
    seals = fcntl.fcntl(fd, _GET_SEALS)
    return not seals & _WRITE_SEALS and fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDWR


def _is_fixed(fd: int) -> bool:
    """Whether nobody can take pages away from memory, nor lacks the huge ones it was promised."""
    try:
        seals = fcntl.fcntl(fd, _GET_SEALS)
    except OSError:
        return False  # no memory at all
    return seals & _SEALS == _SEALS and os.fstatvfs(fd).f_bsize == PAGE


def _map(fd: int, nbytes: int, access: int = mmap.PROT_READ | mmap.PROT_WRITE) -> mmap.mmap:
    # Until Python 3.13 a mapping keeps a descriptor of its own.
    if sys.version_info >= (3, 13):
        return mmap.mmap(fd, nbytes, prot=access, trackfd=False)
    return mmap.mmap(fd, nbytes, prot=access)


async def create_mapped(nbytes: int) -> tuple[int, mmap.mmap]:
    """Make `nbytes` of zeroed memory that this process uses itself, in many turns of the loop.

    Takes about 0.3 milliseconds per MiB, of which the first use is spared as much: all pages are reserved and mapped.

    Returns:
        Its descriptor, which the caller closes, and the mapping.

    Raises:
        OSError: the kernel has no memfd or forbids it, or there is no memory or descriptor left.
    """
    with ExitStack() as undo:
        fd = _open(nbytes, undo)
        memory = _seal(fd, nbytes, undo)
        for start in range(0, nbytes, _LOT):
            lot = min(_LOT, nbytes - start)
            os.posix_fallocate(fd, start, lot)
            # An older kernel maps them when they are touched.
            with suppress(OSError):
                memory.madvise(_POPULATE_WRITE, start, lot)
            await asyncio.sleep(0)
        undo.pop_all()
        return fd, memory
