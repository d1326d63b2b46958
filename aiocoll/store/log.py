r"""`LogFile`: an append-only file of messages that several processes share.

Only the holder of the `flock` appends, each record with one write; the kernel drops the lock of a process that dies.
Such a death leaves a last record with fewer bytes than its length says, a *torn tail*: readers stop before it, and the
next writer cuts it off. Any other invalid record is damage, and an error: cutting it off would give this process
another history than the others have. Damage is a wrong checksum, a tail of zeros (which a crash of the host leaves, in
place of records that others had read), or a file that has become shorter.

Readers need no lock, since bytes before the tail never change. But while a writer replaces a torn tail a reader may see
some of the old bytes and some of the new: apparent damage is read again under the lock before it is reported.
Nothing is synced to disk: the file outlives processes, not the host.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import zlib
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

import msgpack

from aiocoll.errors import StoreError, StoreUnavailableError
from aiocoll.store.records import (
    MAGIC,
    MAX_RECORD,
    PREFIX_SIZE,
    DamagedError,
    check_payload,
    decode,
    parse_prefix,
    seal,
)
from aiocoll.users import owner_trouble

__all__ = ["LogFile"]

_T = TypeVar("_T")

#: Bytes of the file; the history is never compacted, and replaying more than this would take seconds.
_MAX_FILE = 1 << 30
#: Bytes read at once when catching up; a longer record is read whole.
_READ_SIZE = 1 << 14
#: More than any log holds.
_EVERYTHING = 1 << 62


class LogFile:
    """One open log. Opening checks that the file can be trusted and is a store of this job.

    Attributes:
        position: bytes read so far, up to the end of a record; 0 before the header.
    """

    def __init__(self, path: str, job_id: bytes) -> None:
        self.path = path
        self._header = MAGIC + job_id
        self.position = 0
        self._chain = 0
        self._locked = False
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
        self._locked = True
        return True

    def unlock(self) -> None:
        """Release the lock."""
        self._locked = False
        fcntl.flock(self._fd, fcntl.LOCK_UN)

    def rewind(self) -> None:
        """Start reading from the beginning again."""
        self.position = 0

    def read(self, apply: Callable[[list[Any]], None], nbytes: int = _EVERYTHING) -> bool:
        """Apply the complete records that were appended since the last call, `nbytes` of them at least.

        Args:
            apply: carries out one; an error that it raises (DamagedError, StoreError, TypeError, ValueError) is damage.
            nbytes: stop after that many.

        Returns:
            Whether there may be more.

        Raises:
            StoreError: the file is not a store, belongs to another job, or is damaged; it is not changed.
            StoreUnavailableError: it was removed.
        """
        try:
            return self._read(apply, self.position + nbytes)
        except DamagedError as exc:
            if self._locked:
                raise self._damaged(str(exc)) from exc
        # A writer may have been active; under the lock there is none, and without it the next read tells.
        if self.try_lock():
            try:
                return self.read(apply, nbytes)
            finally:
                self.unlock()
        return False

    def append(self, message: list[Any]) -> None:
        """Append one record after the last that was read, over a torn tail; the caller holds the lock.

        Raises:
            StoreError: the disk or the file is full, or the record is too long; the file is as it was before.
        """
        payload = msgpack.packb(message)
        if len(payload) > MAX_RECORD:
            raise StoreError(f"{len(payload)} bytes in one command, the limit of {self.path} is {MAX_RECORD}: split it")
        if self.position + len(payload) > _MAX_FILE:
            raise StoreError(f"{self.path} has reached {_MAX_FILE} bytes, it keeps its history: use a TCPStore")
        if self.position == 0:
            self._write(self._header)
            self._chain = zlib.crc32(self._header)
        record, chain = seal(payload, self._chain)
        self._write(record)
        self._chain = chain

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
            with suppress(OSError):  # a torn tail stays then
                os.ftruncate(self._fd, self.position)
            raise StoreError(f"cannot write {self.path}: {exc.strerror}; nothing was changed") from exc
        self.position += len(data)

    def _read(self, apply: Callable[[list[Any]], None], stop: int) -> bool:
        status = self._system_call(os.fstat)
        if status.st_nlink == 0:
            raise StoreUnavailableError(f"{self.path} was removed while the store was in use")
        if status.st_size < self.position:
            raise DamagedError(f"the file has {status.st_size} bytes, less than were read")
        if self.position == 0 and not self._read_header():
            return False
        data, start = b"", 0
        while status.st_size - self.position >= PREFIX_SIZE:
            if len(data) - start < PREFIX_SIZE:
                data, start = self._system_call(os.pread, _READ_SIZE, self.position), 0
            if len(data) < PREFIX_SIZE:
                return False
            nbytes = PREFIX_SIZE + parse_prefix(data, start, self._chain)
            if len(data) - start < nbytes:
                data, start = self._system_call(os.pread, max(nbytes, _READ_SIZE), self.position), 0
            payload = data[start + PREFIX_SIZE : start + nbytes]
            if len(payload) < nbytes - PREFIX_SIZE:
                return False
            chain = check_payload(data, start, payload)
            _carry_out(apply, payload)
            start += nbytes
            self.position, self._chain = self.position + nbytes, chain
            if self.position >= stop:
                return True
        return False

    def _read_header(self) -> bool:
        """Return whether the header is complete; a partial one is a torn tail too."""
        header = self._system_call(os.pread, len(self._header), 0)
        if header == self._header:
            self.position, self._chain = len(header), zlib.crc32(header)
            return True
        if self._header.startswith(header):
            return False
        if header[: len(MAGIC)] == MAGIC:
            raise StoreError(
                f"{self.path} belongs to job {header[len(MAGIC) :].hex()}, this is job "
                f"{self._header[len(MAGIC) :].hex()}: remove the file if that job is over, or use another path"
            )
        kind = "a store of this version of aiocoll" if header.startswith(MAGIC[:14]) else "a store"
        raise StoreError(
            f"{self.path} is not {kind} (it begins with {header[:16]!r}): give the store a path of its own"
        )

    def _system_call(self, call: Callable[..., _T], *args: int) -> _T:
        try:
            return call(self._fd, *args)
        except OSError as exc:
            raise StoreError(f"cannot read {self.path}: {exc.strerror}") from exc

    def _damaged(self, what: str) -> StoreError:
        return StoreError(
            f"{self.path} is damaged at byte {self.position} ({what}), so its history is lost from there on: "
            f"end the job, remove the file, and start again"
        )


def _carry_out(apply: Callable[[list[Any]], None], payload: bytes) -> None:
    message = decode(payload)
    try:
        apply(message)
    except (StoreError, TypeError, ValueError) as exc:
        raise DamagedError(f"record {message[0]:.40}: {exc}") from exc


def _open(path: str) -> int:
    """Open or create the file, and refuse one that another user could have prepared or could read."""
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
    elif (foreign := owner_trouble(fd)) is not None:
        problem = f"{foreign}: use another path"
    elif status.st_mode & 0o077:
        problem = (
            f"can be opened by others (mode {status.st_mode & 0o777:04o}): chmod 600 it, or remove it if it is old"
        )
    if problem is not None:
        os.close(fd)
        raise StoreError(f"{path} {problem}")
    return fd
