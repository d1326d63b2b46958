"""Flight recorder: the last operations of a rank in a group, as plain data, files and traces.

Recording is always on and costs about 250 ns per call; see `aiocoll.engine.journal` for the recorded data.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import threading
from collections.abc import Iterable
from types import CodeType
from typing import Any

from aiocoll.dump import signals as dump_signal
from aiocoll.dump.files import FORMAT, KEYS, VERSION, file_name, write_json
from aiocoll.dump.formatting import format_dump
from aiocoll.dump.timeline import chrome_trace
from aiocoll.engine.communicator import Communicator
from aiocoll.engine.control.causes import cause_of
from aiocoll.engine.journal import Record
from aiocoll.engine.operations.signature import P2P
from aiocoll.log import logger
from aiocoll.unretrieved import line_of

__all__ = ["FlightRecorder"]

#: Maximum seconds for which closing a group waits until its dump is written.
WRITE_TIMEOUT = 5.0
#: Number of low bits in a message's id that hold its number. The bits above hold the tag and the message flag.
TAG = 32

Places = dict[tuple[CodeType, int], str]


class FlightRecorder:
    """The last operations of this rank in one group: 1,024 collectives and 256 messages.

    Any thread may call its methods, at any time, also after the group was closed or revoked.
    """

    def __init__(self, comm: Communicator, directory: str | None) -> None:
        self._comm = comm
        self._directory = directory
        self._pid = os.getpid()
        self._writer: threading.Thread | None = None
        self._written: asyncio.Future[None] | None = None
        self._saved = False
        dump_signal.listen(self, asked=directory is not None)
        if directory is None:
            return
        self._path = os.path.join(directory, file_name(comm.name, comm.rank))
        comm.journal.hint = f"the last calls are written to {self._path}"
        comm.on_revoked.append(self._on_revoked)
        if comm.cause is not None:
            self._on_revoked()

    def dump(self) -> dict[str, Any]:
        """Return all records as plain data that can be written as JSON.

        Returns:
            A dict; for its fields see ``docs/recorder.md``. Times are seconds on the clock of the group; ``clock`` has
            the current times of that clock and of the wall clock.

        Cost: some milliseconds.
        """
        comm = self._comm
        endpoint = comm.endpoint
        runtime = endpoint.runtime
        now, wall = comm.stamp(), runtime.wall()
        closed = endpoint.groups.get(comm.id) is not comm
        return {
            "format": FORMAT,
            "version": VERSION,
            "group": comm.name,
            "id": comm.id,
            "rank": comm.rank,
            "world_size": len(comm.ranks),
            "global_ranks": list(comm.ranks),
            "host": socket.gethostname(),
            "pid": self._pid,
            "clock": {"host": endpoint.cards[endpoint.rank]["host"], "monotonic": now, "wall": wall},
            "state": "revoked" if comm.cause is not None else "closed" if closed else "open",
            "cause": None if comm.cause is None else cause_of(comm.cause),
            "blocked": endpoint.failure_detector.blocked(),
            "longest_blocks": [
                {"began": now - ago, "seconds": seconds, "line": line}
                for ago, seconds, line in endpoint.failure_detector.longest_blocks()
            ],
            "entered": comm.entered,
            "keys": comm.counts(KEYS),
            "entries": _entries(comm, comm.journal.snapshot()),
        }

    def dump_json(self, path: str | os.PathLike[str]) -> None:
        """Write the result of `dump` to a file, for ``aiocoll trace``.

        Args:
            path: path of the file.

        Raises:
            OSError: the file cannot be written.

        Cost: some milliseconds, and a write.
        """
        write_json(path, self.dump())

    def dump_trace(self, path: str | os.PathLike[str]) -> None:
        """Write a trace for Perfetto or chrome://tracing to a file.

        Args:
            path: path of the file.

        Raises:
            OSError: the file cannot be written.

        Cost: some milliseconds, and a write.
        """
        write_json(path, chrome_trace([self.dump()]))

    # -- automatic dumps

    def signalled(self) -> str:
        """Handle SIGUSR2: write the dump to a file, or return it as text if no directory is set.

        Returns:
            The text; "" if a file was written.
        """
        if self._pid != os.getpid():
            return ""  # a forked child is not a member of the group
        if self._directory is None:
            return format_dump(self.dump())
        self._save()
        return ""

    def _on_revoked(self) -> None:
        """Write the dump of a revoked group, in a thread because disks may be slow. Simulations use no thread."""
        if self._comm.cause is None or self._saved:
            return  # closed without a failure, or already written
        self._saved = True
        endpoint = self._comm.endpoint
        if not endpoint.runtime.may_listen:
            self._save()
            return
        self._written = endpoint.loop.create_future()
        # Not a daemon thread, so that a program which exits because of the failure waits for the file.
        self._writer = threading.Thread(target=self._save_and_notify, name=f"aiocoll dump of {self._comm.name}")
        try:
            self._writer.start()
        except RuntimeError as error:  # the process has too many threads
            self._writer = None
            self._log_failure(error)

    def _save_and_notify(self) -> None:
        self._save()
        loop, written = self._comm.endpoint.loop, self._written
        assert written is not None
        with contextlib.suppress(RuntimeError):  # the loop is closed, so no task waits for the file
            loop.call_soon_threadsafe(_set, written)

    def _save(self) -> None:
        """Write the dump to its file. A failure is only logged."""
        if self._pid != os.getpid():
            return  # a forked child is not a member of the group
        try:
            os.makedirs(os.path.dirname(self._path), exist_ok=True)
            self.dump_json(self._path)
        except Exception as error:
            self._log_failure(error)

    def _log_failure(self, error: Exception) -> None:
        comm = self._comm
        logger.warning(
            "group %r, rank %d: cannot write the dump %s: %s: %s",
            comm.name,
            comm.rank,
            self._path,
            type(error).__name__,
            error,
            extra=comm.log_extra,
        )

    async def _settle(self) -> None:
        """Stop handling signals, and wait until the file is written. Called when the group is closed."""
        dump_signal.unlisten(self)
        if self._writer is not None and self._written is not None:
            await asyncio.wait([self._written], timeout=WRITE_TIMEOUT)
            if self._written.done():
                self._writer.join()  # the thread is about to end


def _set(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _entries(comm: Communicator, records: Iterable[Record]) -> list[dict[str, Any]]:
    """Return records of operations as plain data."""
    places: Places = {}
    return [_entry(comm, record, places) for record in records]


def _entry(comm: Communicator, record: Record, places: Places) -> dict[str, Any]:
    call = record.code, record.instruction
    site = places.get(call)
    if site is None:
        site = places[call] = f"{record.code.co_filename}:{line_of(*call)}"
    message = record.op & P2P == P2P
    pending = record.ended is None
    started = record.started or record.entered
    if message:
        whole = None if pending or record.error is not None else record.ended
        started = whole if record.started is None else record.started  # type: ignore[assignment]
    finding = None if message or not pending else comm.stalls.finding(record.op)
    return {
        **record.describe(comm.rank),
        "kind": "message" if message else "collective",
        "peer": record.peer,
        "tag": (record.op ^ P2P) >> TAG if message else None,
        "bytes": record.signature.nbytes(record.shape),
        "entered": record.entered,
        "started": started,
        "finished": record.ended,
        "state": "pending" if pending else "finished" if record.error is None else "failed",
        "error": record.error,
        "missing": None if finding is None else finding.ranks(comm.stamp()),
        "site": site,
        "function": record.code.co_qualname,
    }
