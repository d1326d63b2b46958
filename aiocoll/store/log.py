r"""`LogFile`: an append-only file of store commands that several processes share.

Only the holder of the `flock` appends, with one write per record. The kernel releases the lock of a process that dies.
Such a death may leave an incomplete last record, a *torn tail*. Readers stop before it, and the next writer cuts it
off. Any other invalid record is damage and raises an error, since a process that cut it off would have another history
than other processes. Damage is a wrong checksum, a file that has become shorter, or a tail of zeros. A crash of the
host leaves such a tail in place of records that processes have read.

Readers need no lock, since bytes before the tail never change. But while a writer replaces a torn tail, a reader may
see a mixture of old and new bytes. So apparent damage is read again under the lock before it is reported. The log is
never synced to disk: it survives the end of processes, but not a crash of the host.
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

#: Maximum bytes of the file. The log is never compacted, and to replay a longer one would take seconds.
_MAX_FILE = 1 << 30
#: Bytes per read. A longer record is read as a whole.
_READ_SIZE = 1 << 14
#: Default limit in `LogFile.read`: a number of bytes larger than any log.
_EVERYTHING = 1 << 62


class LogFile:
    """An open log file. The constructor checks the file's owner and mode, and that it belongs to this job.

    Attributes:
        position: number of bytes read, up to the end of a record; 0 before the header.
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
        """Close the file, which also releases the lock."""
        os.close(self._fd)

    def try_lock(self) -> bool:
        """Lock the file if no process holds the lock; return whether this succeeded."""
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as exc:
            if exc.errno in (errno.EWOULDBLOCK, errno.EACCES):
                return False
            raise StoreError(f"cannot lock {self.path} ({exc.strerror}): put the file on a local file system") from exc
        self._locked = True
        return True

    def unlock(self) -> None:
        """Unlock the file."""
        self._locked = False
        fcntl.flock(self._fd, fcntl.LOCK_UN)

    def rewind(self) -> None:
        """Let the next `read` begin at the start of the file."""
        self.position = 0

    def read(self, apply: Callable[[list[Any]], None], nbytes: int = _EVERYTHING) -> bool:
        """Apply the complete records appended since the last call, but stop after at least `nbytes` bytes.

        Args:
            apply: carries out one record. Its errors DamagedError, StoreError, TypeError and ValueError mean damage.
            nbytes: number of bytes after which to stop.

        Returns:
            Whether there may be more records.

        Raises:
            StoreError: the file is not a store, belongs to another job, or is damaged; it is not changed.
            StoreUnavailableError: the file was removed.
        """
        try:
            return self._read(apply, self.position + nbytes)
        except DamagedError as exc:
            if self._locked:
                raise self._damage_error(str(exc)) from exc
        # A concurrent write may look like damage. Read again under the lock; if another process holds it, leave that to
        # the next call.
        if self.try_lock():
            try:
                return self.read(apply, nbytes)
            finally:
                self.unlock()
        return False

    def append(self, message: list[Any]) -> None:
        """Append a record after the last complete record, and overwrite a partial record. The caller holds the lock.

        Raises:
            StoreError: the disk or the file is full, or the record is too long; the file is unchanged.
        """
        payload = msgpack.packb(message)
        if len(payload) > MAX_RECORD:
            raise StoreError(f"{len(payload)} bytes in one command, the limit of {self.path} is {MAX_RECORD}: split it")
        if self.position + len(payload) > _MAX_FILE:
            raise StoreError(f"{self.path} has reached the limit of {_MAX_FILE} bytes for its history: use a TCPStore")
        if self.position == 0:
            self._write(self._header)
            self._chain = zlib.crc32(self._header)
        record, chain = seal(payload, self._chain)
        self._write(record)
        self._chain = chain

    def remove(self) -> None:
        """Delete the file, unless its path now names another file. The caller holds the lock."""
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
            with suppress(OSError):  # if this fails, a partial record remains, which readers ignore
                os.ftruncate(self._fd, self.position)
            raise StoreError(f"cannot write {self.path}: {exc.strerror}; nothing was changed") from exc
        self.position += len(data)

    def _read(self, apply: Callable[[list[Any]], None], stop: int) -> bool:
        status = self._system_call(os.fstat)
        if status.st_nlink == 0:
            raise StoreUnavailableError(f"{self.path} was removed while the store was in use")
        if status.st_size < self.position:
            raise DamagedError(f"the file has {status.st_size} bytes, fewer than have been read")
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
        """Read and check the header; return whether it is complete. A killed process may have written only a part."""
        header = self._system_call(os.pread, len(self._header), 0)
        if header == self._header:
            self.position, self._chain = len(header), zlib.crc32(header)
            return True
        if self._header.startswith(header):
            return False
        if header[: len(MAGIC)] == MAGIC:
            raise StoreError(
                f"{self.path} belongs to job {header[len(MAGIC) :].hex()}, this is job "
                f"{self._header[len(MAGIC) :].hex()}: remove the file if that job has ended, or use another path"
            )
        kind = "a store of this version of aiocoll" if header.startswith(MAGIC[:14]) else "a store"
        raise StoreError(
            f"{self.path} is not {kind} (it begins with {header[:16]!r}): choose another path for the store"
        )

    def _system_call(self, call: Callable[..., _T], *args: int) -> _T:
        try:
            return call(self._fd, *args)
        except OSError as exc:
            raise StoreError(f"cannot read {self.path}: {exc.strerror}") from exc

    def _damage_error(self, what: str) -> StoreError:
        return StoreError(
            f"{self.path} is damaged at byte {self.position} ({what}), and the later history is lost: "
            f"end the job, remove the file, and start again"
        )


def _carry_out(apply: Callable[[list[Any]], None], payload: bytes) -> None:
    message = decode(payload)
    try:
        apply(message)
    except (StoreError, TypeError, ValueError) as exc:
        raise DamagedError(f"record {message[0]:.40}: {exc}") from exc


def _open(path: str) -> int:
    """Open or create the log file; raise an error if another user may have created it or can read it."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as exc:
        if exc.errno == errno.ELOOP:
            raise StoreError(
                f"{path} is a symbolic link, which could point anywhere: pass the path of its target"
            ) from exc
        raise StoreError(f"cannot open the store file {path}: {exc.strerror}") from exc
    status = os.fstat(fd)
    problem = None
    if not stat.S_ISREG(status.st_mode):
        problem = "is not a regular file: choose another path for the store"
    elif (foreign := owner_trouble(fd)) is not None:
        problem = f"{foreign}: use another path"
    elif status.st_mode & 0o077:
        problem = (
            f"can be opened by other users (mode {status.st_mode & 0o777:04o}): run chmod 600, or remove an old file"
        )
    if problem is not None:
        os.close(fd)
        raise StoreError(f"{path} {problem}")
    return fd
