r"""`LogFile`: an append-only file of messages that several processes share.

    header   16 bytes "aiocoll store 1\\n", 16 bytes job id
    record   length u32, crc32 of the payload u32 (little endian), payload in msgpack; length is never 0

Only the holder of the `flock` appends, each record with one write; the kernel drops the lock of a process that dies. A
record cut short by that death is the file's tail: readers stop before it, and the next writer cuts it off. Readers need
no lock, since bytes before the tail never change. Nothing is synced to disk: the file outlives processes, not the host.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import struct
import zlib
from collections.abc import Iterator
from typing import Any

import msgpack

from aiocoll.errors import StoreError, StoreUnavailableError

__all__ = ["LogFile"]

_MAGIC = b"aiocoll store 1\n"
_PREFIX = struct.Struct("<II")
#: Bytes of a payload; a multi_set of a few of the largest values.
_MAX_RECORD = 32 << 20
#: Bytes of the file; the history is never compacted, and replaying more than this would take seconds.
_MAX_FILE = 1 << 30
#: Bytes read at once when catching up; a longer record is read whole.
_READ_SIZE = 1 << 14


class LogFile:
    """One open log. Opening is what checks that the file is ours to trust, and a store of this job.

    Attributes:
        position: bytes read so far, up to the end of a record; 0 before the header.
    """

    def __init__(self, path: str, job_id: bytes) -> None:
        self.path = path
        self._header = _MAGIC + job_id
        self.position = 0
        self._fd = _open(path)
        try:
            self._read_header()
        except StoreError:
            self.close()
            raise

    def close(self) -> None:
        """Close the file; the lock goes with it."""
        os.close(self._fd)

    def try_lock(self) -> bool:
        """Take the lock if it is free."""
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as exc:
            if exc.errno in (errno.EWOULDBLOCK, errno.EACCES):
                return False
            raise StoreError(f"cannot lock {self.path} ({exc.strerror}): put the file on a local file system") from exc
        return True

    def unlock(self) -> None:
        """Give the lock back."""
        fcntl.flock(self._fd, fcntl.LOCK_UN)

    def rewind(self) -> None:
        """Start reading from the beginning again."""
        self.position = 0

    def read(self) -> Iterator[list[Any]]:
        """Yield the complete records that were appended since the last call.

        Raises:
            StoreError: the file is no store, belongs to another job, or is damaged.
            StoreUnavailableError: it was removed.
        """
        status = os.fstat(self._fd)
        if status.st_nlink == 0:
            raise StoreUnavailableError(f"{self.path} was removed while the store was in use")
        if self.position == 0 and not self._read_header():
            return
        data, start = b"", 0
        while status.st_size - self.position >= _PREFIX.size:
            if len(data) - start < _PREFIX.size:
                data, start = os.pread(self._fd, _READ_SIZE, self.position), 0
            if len(data) < _PREFIX.size:
                return
            nbytes, crc = _PREFIX.unpack_from(data, start)
            if not 0 < nbytes <= _MAX_RECORD:
                return
            end = start + _PREFIX.size + nbytes
            if len(data) < end:
                data, start, end = os.pread(self._fd, max(end - start, _READ_SIZE), self.position), 0, end - start
            payload = data[start + _PREFIX.size : end]
            if len(payload) < nbytes or zlib.crc32(payload) != crc:
                return
            start = end
            self.position += _PREFIX.size + nbytes
            yield self._decode(payload)

    def append(self, message: list[Any]) -> None:
        """Append one record after the last that `read` yielded, over a torn tail; the caller holds the lock.

        Raises:
            StoreError: the disk or the file is full, or the record is too long; the file is as it was before.
        """
        payload = msgpack.packb(message)
        if len(payload) > _MAX_RECORD:
            raise StoreError(
                f"{len(payload)} bytes in one command, the limit of {self.path} is {_MAX_RECORD}: split it"
            )
        if self.position + len(payload) > _MAX_FILE:
            raise StoreError(f"{self.path} has reached {_MAX_FILE} bytes, it keeps its history: use a TCPStore")
        record = _PREFIX.pack(len(payload), zlib.crc32(payload)) + payload
        if self.position == 0:
            self._write(self._header)
        self._write(record)

    def remove(self) -> None:
        """Remove the file, unless another has taken its name; the caller holds the lock."""
        try:
            if os.path.samestat(os.stat(self.path, follow_symlinks=False), os.fstat(self._fd)):
                os.unlink(self.path)
        except FileNotFoundError:
            return

    def _write(self, data: bytes) -> None:
        try:
            os.ftruncate(self._fd, self.position)
            written = os.pwrite(self._fd, data, self.position)
            if written < len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as exc:
            os.ftruncate(self._fd, self.position)
            raise StoreError(f"cannot write {self.path}: {exc.strerror}; nothing was changed") from exc
        self.position += len(data)

    def _read_header(self) -> bool:
        """Say whether the header is there; one cut short is a torn tail too."""
        header = os.pread(self._fd, len(self._header), 0)
        if header == self._header:
            self.position = len(header)
            return True
        if not self._header.startswith(header[: len(_MAGIC)]):
            raise StoreError(
                f"{self.path} is not a store (it begins with {header[:16]!r}): give the store a path of its own"
            )
        if len(header) == len(self._header):
            raise StoreError(
                f"{self.path} belongs to job {header[len(_MAGIC) :].hex()}, this is job "
                f"{self._header[len(_MAGIC) :].hex()}: remove the file if that job is over, or use another path"
            )
        return False

    def _decode(self, payload: bytes) -> list[Any]:
        try:
            message = msgpack.unpackb(payload)
        except ValueError as exc:
            raise StoreError(f"{self.path} is damaged before byte {self.position}: remove it and start again") from exc
        if not isinstance(message, list) or not message:
            raise StoreError(f"{self.path} holds a record that is no command before byte {self.position}: remove it")
        return message


def _open(path: str) -> int:
    """Open or create the file, and refuse one that somebody else could have prepared or could read."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as exc:
        if exc.errno == errno.ELOOP:
            raise StoreError(
                f"{path} is a symbolic link, which could point anywhere: give the path it stands for"
            ) from exc
        raise StoreError(f"cannot open the store file {path}: {exc.strerror}") from exc
    status = os.fstat(fd)
    problem = None
    if not stat.S_ISREG(status.st_mode):
        problem = "is not a regular file: give the store a path of its own"
    elif status.st_uid != os.geteuid():
        problem = f"belongs to uid {status.st_uid}, not to this process's uid {os.geteuid()}: use another path"
    elif status.st_mode & 0o077:
        problem = (
            f"can be opened by others (mode {status.st_mode & 0o777:04o}): chmod 600 it, or remove it if it is old"
        )
    if problem is not None:
        os.close(fd)
        raise StoreError(f"{path} {problem}")
    return fd
