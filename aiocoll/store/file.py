"""`FileStore`: a store in a file, for processes of one machine.

The file is a log of the commands that changed something; every process replays it into its own `StoreCore`, so all see
the same history. Commands run under the file's lock, hence one at a time across all processes. The lock is taken
without blocking the loop, and held for microseconds and never across an await. A file cannot notify: waiting polls.
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
from aiocoll.store.base import Store, count_of_clients, timed_out
from aiocoll.store.commands import COMMANDS, check_arguments, keys_of
from aiocoll.store.core import StoreCore
from aiocoll.store.polling import Poll
from aiocoll.store.registry import StoreRequest

if TYPE_CHECKING:
    from aiocoll.store.log import LogFile

__all__ = ["FILE_OPENER", "FileStore"]

_SCHEME = "file://"

#: Bytes of history replayed at once without the lock, about 1 ms; then the loop runs other callbacks.
_SLICE = 1 << 13

#: Record that a member has closed; not a command, so `list_keys` never sees it.
_LEAVE = "leave"
#: Seconds in which closing takes the lock; without it the file stays, as after a crash.
_LEAVE_TIMEOUT = 0.25


class FileStore(Store):
    """A store that processes of one machine (or of a file system with working `flock`) reach by a path.

    Args:
        file_name: the file; the first member creates it with mode 0600. A symlink, a file of another user or one that
            others may open is refused.
        world_size: how many members will call `aclose`; the last one removes the file. None or -1: it is never removed.
        timeout: seconds that calls wait when they are given no timeout.
        job: name of the job; a file left behind by another job is refused instead of joined.
        runtime: clock to use; None is the running loop's.
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
        self._world_size = count_of_clients(world_size)
        self._job_id = job_id(job)
        self._runtime = runtime
        self._log: LogFile | None = None
        self._core = StoreCore()
        self._left = 0
        self._closing = False
        self._closed = False

    def __str__(self) -> str:
        return f"FileStore {self.path}"

    async def aclose(self) -> None:
        """Close the file; the last of `world_size` members removes it."""
        if self._closing:
            return
        self._closing = True
        try:
            if self._world_size is not None:
                with suppress(StoreUnavailableError, StoreTimeoutError):
                    await self._locked(self._leave, min(self._timeout, _LEAVE_TIMEOUT))
        finally:
            self._closed = True
            if self._log is not None:
                self._log.close()
                self._log = None

    async def _call(self, command: str, arguments: tuple[Any, ...]) -> Any:
        return await self._locked(lambda log: self._apply(log, command, arguments), self._timeout)

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
                raise timed_out(f"FileStore {self.path}", command, missing, timeout)

    async def _locked(self, action: Callable[[LogFile], Any], timeout: float) -> Any:
        """Run `action`, which must not await, under the lock, on an up-to-date core."""
        poll = Poll(self._clock(), timeout)
        await self._replay()
        while not self._opened().try_lock():
            if not await poll.pause():
                raise StoreTimeoutError(f"another process held the lock of {self.path} for {timeout:g} s")
        log = self._opened()
        try:
            self._catch_up(log)
            return action(log)
        finally:
            log.unlock()

    def _clock(self) -> Runtime:
        return self._runtime or Runtime(running_loop())

    async def _replay(self) -> None:
        """Catch up without the lock, in steps between which the loop runs."""
        while self._catch_up(self._opened(), _SLICE):  # noqa: ASYNC110, this polls nothing: it shares the loop
            await asyncio.sleep(0)

    def _opened(self) -> LogFile:
        if self._closed:
            raise StoreUnavailableError(f"the FileStore on {self.path} is closed: make a new one")
        if sys.platform == "win32":
            raise BackendUnavailableError("FileStore needs flock, which Windows does not have: use a TCPStore")
        if self._log is None:
            from aiocoll.store.log import LogFile

            self._log = LogFile(self.path, self._job_id)
        return self._log

    def _catch_up(self, log: LogFile, *nbytes: int) -> bool:
        """Apply commands of other members, at least `nbytes` of them; return whether there may be more."""
        try:
            return log.read(self._carry_out, *nbytes)
        except BaseException:
            self._start_over(log)
            raise

    def _carry_out(self, message: list[Any]) -> None:
        command, *arguments = message
        if command == _LEAVE and not arguments:
            self._left += 1
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
                self._start_over(log)
                raise
        return result

    def _start_over(self, log: LogFile) -> None:
        """Discard the state, which may be ahead of the file or contain half a record, and replay the file."""
        self._core = StoreCore()
        self._left = 0
        log.rewind()

    def _leave(self, log: LogFile) -> None:
        log.append([_LEAVE])
        self._left += 1
        if self._world_size is not None and self._left >= self._world_size:
            log.remove()


class _FileOpener:
    """See `aiocoll.store.registry.StoreOpener`."""

    served_by_rank_0 = False
    has_secrets = False

    def check(self, url: str, world_size: int) -> None:
        """Check that the path is absolute."""
        if not url.removeprefix(_SCHEME).startswith("/"):
            raise ValueError("the path of a file must be absolute, like file:///shared/job")

    def open(self, request: StoreRequest) -> Store:
        """Return the store in that file."""
        return FileStore(request.url.removeprefix(_SCHEME), request.world_size, timeout=request.timeout)


#: Opens ``file:///path``.
FILE_OPENER = _FileOpener()
