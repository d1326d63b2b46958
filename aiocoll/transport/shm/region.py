"""Memory without a name: made by one process, passed to others as a descriptor, gone with its last user."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import mmap
import os
import sys

from aiocoll.errors import ProtocolError

__all__ = ["PAGE", "create", "create_in_turns", "open_region"]

PAGE = mmap.PAGESIZE
#: Bytes reserved in one turn of the loop; takes about 60 microseconds.
_LOT = 256 * 1024

# Linux, <linux/fcntl.h>; `fcntl` has them too, but not where there is no memfd.
_SEALS = 0x0001 | 0x0002 | 0x0004
"""F_SEAL_SEAL, F_SEAL_SHRINK, F_SEAL_GROW: nobody can take pages away, which would be SIGBUS to all who map them."""
_ADD_SEALS, _GET_SEALS = 1033, 1034


def create(nbytes: int) -> tuple[int, mmap.mmap]:
    """Make `nbytes` of zeroed memory; return its descriptor, which the caller closes, and the mapping.

    All pages are reserved here: a host without memory refuses now, instead of killing whoever touches them later.

    Raises:
        OSError: the kernel has no memfd or forbids it, or there is no memory or descriptor left.
    """
    fd = _open(nbytes)
    try:
        os.posix_fallocate(fd, 0, nbytes)
        return fd, _seal(fd, nbytes)
    except BaseException:
        os.close(fd)
        raise


async def create_in_turns(nbytes: int) -> tuple[int, mmap.mmap]:
    """As `create`, which takes a quarter of a millisecond per MiB, in many turns of the loop."""
    fd = _open(nbytes)
    try:
        for start in range(0, nbytes, _LOT):
            os.posix_fallocate(fd, start, min(_LOT, nbytes - start))
            await asyncio.sleep(0)
        return fd, _seal(fd, nbytes)
    except BaseException:
        os.close(fd)
        raise


def open_region(fd: int, nbytes: int) -> mmap.mmap:
    """Map what another process has made, and close `fd`.

    Raises:
        ProtocolError: it has another size, or its size could change under us.
        OSError: it cannot be mapped.
    """
    try:
        if _seals(fd) & _SEALS != _SEALS or os.fstat(fd).st_size != nbytes:
            raise ProtocolError(f"a peer passed shared memory that is not {nbytes} sealed bytes")
        return _map(fd, nbytes)
    finally:
        os.close(fd)


def _open(nbytes: int) -> int:
    if not hasattr(os, "memfd_create"):
        raise OSError(errno.ENOSYS, "this Python was built without memfd_create")
    fd = os.memfd_create("aiocoll", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, nbytes)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _seal(fd: int, nbytes: int) -> mmap.mmap:
    fcntl.fcntl(fd, _ADD_SEALS, _SEALS)
    return _map(fd, nbytes)


def _seals(fd: int) -> int:
    try:
        return fcntl.fcntl(fd, _GET_SEALS)
    except OSError:
        return 0  # no memory at all


def _map(fd: int, nbytes: int) -> mmap.mmap:
    # Until Python 3.13 a mapping keeps a descriptor of its own.
    if sys.version_info >= (3, 13):
        return mmap.mmap(fd, nbytes, trackfd=False)
    return mmap.mmap(fd, nbytes)
