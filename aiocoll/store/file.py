"""`FileStore`: a store in a file, for processes of one machine.

The file is a log of the commands that changed keys or queues. Every process replays it into its own `StoreCore`, so all
processes see the same history. Commands run under the file's lock, one at a time across all processes. Taking the lock
does not block the event loop. A process holds it for microseconds, and never across an await. Waits poll the file.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from aiocoll.errors import BackendUnavailableError, StoreError, StoreTimeoutError, StoreUnavailableError
from aiocoll.runtime import Runtime, running_loop
from aiocoll.security.handshake import job_id
from aiocoll.store.base import Store, check_world_size, timeout_error
from aiocoll.store.commands import COMMANDS, check_arguments, keys_of
from aiocoll.store.core import StoreCore
from aiocoll.store.polling import Poll
from aiocoll.store.registry import StoreRequest

if TYPE_CHECKING:
    from aiocoll.store.log import LogFile

__all__ = ["FILE_OPENER", "FileStore"]

_SCHEME = "file://"

#: Bytes of history to replay in one step, which takes about 1 ms. Other callbacks of the loop run between steps.
_SLICE = 1 << 13

#: Name of the log record that a process appends when it closes the store. The record is not a command.
_DEPARTURE = "leave"
#: Seconds that `aclose` waits for the file lock. Without the lock, the file is not removed, as after a crash.
_DEPARTURE_TIMEOUT = 0.25


class FileStore(Store):
    """A store in a file, for processes of one machine, or of several on a file system with working `flock`.

    Args:
        file_name: the file; the first member creates it with mode 0600. Symbolic links, files of other users and files
            that other users may open are refused.
        world_size: number of members that will call `aclose`; the last one removes the file. With None or -1 the file
            is never removed.
        timeout: default timeout of calls in seconds.
        job: name of the job; the file of another job is refused.
        runtime: clock to use; None is the clock of the running loop.
    """

    def __init__(
        self,
        file_name: str | os.PathLike[str],
        world_size: int | None = None,
        *,
        timeout: float | timedelta = 300.0,
        job: str = "",
        runtime: Runtime | None = None,
    ) -> None:
        super().__init__(timeout)
        self.path = os.fspath(file_name)
        self._world_size = check_world_size(world_size)
        self._job_id = job_id(job)
        self._runtime = runtime
        self._log: LogFile | None = None
        self._core = StoreCore()
        self._departed = 0
        self._closing = False
        self._closed = False

    def __str__(self) -> str:
        return f"FileStore {self.path}"

    async def aclose(self) -> None:
        """Close the file. The last of the `world_size` processes to close it also removes it."""
        if self._closing:
            return
        self._closing = True
        try:
            if self._world_size is not None:
                with suppress(StoreUnavailableError, StoreTimeoutError):
                    await self._run_locked(self._record_departure, min(self._timeout, _DEPARTURE_TIMEOUT))
        finally:
            self._closed = True
            if self._log is not None:
                self._log.close()
                self._log = None

    async def _call(self, command: str, arguments: tuple[Any, ...]) -> Any:
        return await self._run_locked(lambda log: self._apply(log, command, arguments), self._timeout)

    async def _wait(self, command: str, arguments: tuple[Any, ...], timeout: float) -> Any:
        keys = keys_of(arguments)
        poll = Poll(self._clock(), timeout)
        while True:
            await self._replay()
            if not self._core.missing(command, arguments):
                if command != "queue_pop":
                    return self._core.read(command, keys)
                item = await self._call("queue_take", arguments)
                if item is not None:
                    return item
            if not await poll.pause():
                missing = self._core.missing(command, arguments) or keys
                raise timeout_error(f"FileStore {self.path}", command, missing, timeout)

    async def _run_locked(self, action: Callable[[LogFile], Any], timeout: float) -> Any:
        """Lock the file, apply all new records, and call `action` while holding the lock."""
        poll = Poll(self._clock(), timeout)
        await self._replay()
        while not self._open_log().try_lock():
            if not await poll.pause():
                raise StoreTimeoutError(
                    f"another process held the lock of {self.path} for {timeout:g} s; check that it is not stopped"
                )
        log = self._open_log()
        try:
            self._catch_up(log)
            return action(log)
        finally:
            log.unlock()

    def _clock(self) -> Runtime:
        return self._runtime or Runtime(running_loop())

    async def _replay(self) -> None:
        """Apply new records to the core without the lock, in steps between which the event loop runs."""
        while self._catch_up(self._open_log(), _SLICE):  # noqa: ASYNC110, this polls nothing: it shares the loop
            await asyncio.sleep(0)

    def _open_log(self) -> LogFile:
        if self._closed:
            raise StoreUnavailableError(f"the FileStore on {self.path} is closed: make a new one")
        if sys.platform == "win32":
            raise BackendUnavailableError("FileStore needs flock, which is not available on Windows: use a TCPStore")
        if self._log is None:
            from aiocoll.store.log import LogFile

            self._log = LogFile(self.path, self._job_id)
        return self._log

    def _catch_up(self, log: LogFile, *nbytes: int) -> bool:
        """Apply all new records, but stop after at least `nbytes` bytes; return whether there may be more records."""
        try:
            return log.read(self._carry_out, *nbytes)
        except BaseException:
            self._reset(log)
            raise

    def _carry_out(self, message: list[Any]) -> None:
        command, *arguments = message
        if command == _DEPARTURE and not arguments:
            self._departed += 1
            return
        if command not in COMMANDS:
            raise StoreError("not a command of this version of aiocoll")
        check_arguments(command, tuple(arguments))
        self._core.apply(command, tuple(arguments))

    def _apply(self, log: LogFile, command: str, arguments: tuple[Any, ...]) -> Any:
        before = self._core.changes
        result = self._core.apply(command, arguments)
        if self._core.changes != before:
            try:
                log.append([command, *arguments])
            except BaseException:
                self._reset(log)
                raise
        return result

    def _reset(self, log: LogFile) -> None:
        """Discard the core, which may differ from the file after an error, so that the file is replayed."""
        self._core = StoreCore()
        self._departed = 0
        log.rewind()

    def _record_departure(self, log: LogFile) -> None:
        log.append([_DEPARTURE])
        self._departed += 1
        if self._world_size is not None and self._departed >= self._world_size:
            log.remove()


class _FileOpener:
    """The `aiocoll.store.registry.StoreOpener` of ``file:///path`` URLs."""

    served_by_rank_0 = False
    has_secrets = False

    def check(self, url: str, world_size: int) -> None:
        """Check that the path is absolute."""
        if not url.removeprefix(_SCHEME).startswith("/"):
            raise ValueError("the path of a file must be absolute, like file:///shared/job")

    def open(self, request: StoreRequest) -> Store:
        """Return the store in the file that the URL names."""
        return FileStore(request.url.removeprefix(_SCHEME), request.world_size, timeout=request.timeout)


#: The store opener of ``file:///path`` URLs.
FILE_OPENER = _FileOpener()
