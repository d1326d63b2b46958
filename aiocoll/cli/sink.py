"""`Sink`: complete writes to standard output, standard error and log files, with a count of lost bytes."""

from __future__ import annotations

import errno
import io
import os
import select
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from math import inf
from typing import Self, TextIO

__all__ = ["CommandOutput", "OutputLostError", "Sink", "limit_waits", "on_loss"]

#: Bytes that a pipe accepts without blocking when `poll` reports that it is writable (PIPE_BUF).
_PIECE = 4096
#: Seconds between two checks of `Sink.max_wait` while a descriptor accepts no bytes.
_TICK = 0.1


class OutputLostError(Exception):
    """A failed write to standard output, after which the command has no purpose any more.

    It is not an `OSError`, so that a handler for the failures of a command does not catch it.
    """


class Sink(io.RawIOBase):
    """A file object that writes every byte to a descriptor, waiting if needed; after an error it only counts bytes.

    Args:
        fd: an open descriptor, or -1 if there is none.
        name: name of the output in messages.
        on_error: called once, in the writing thread, after the first error.
        lock: held while bytes are written, so that blocks of different threads do not mix.
        closefd: whether `close` closes the descriptor.

    Attributes:
        name: as given.
        error: the first error; None if there was none.
        lost: number of dropped bytes.
        max_wait: seconds without progress after which a write fails.
    """

    def __init__(
        self,
        fd: int,
        name: str,
        on_error: Callable[[Sink], object],
        lock: threading.Lock | None = None,
        *,
        closefd: bool = False,
    ) -> None:
        self._fd = fd
        self.name = name
        self.on_error = on_error
        self._lock = lock or threading.Lock()
        self._closefd = closefd
        self._state = threading.Lock()
        self.error: OSError | None = None
        self.lost = 0
        self.max_wait = inf

    def write(self, data: bytes | bytearray | memoryview, /) -> int:  # type: ignore[override]
        """Write all of `data`, or count the bytes that cannot be written. Do nothing if the sink is closed."""
        rest = memoryview(data).cast("B")
        failure = self.error
        if rest and failure is None and not self.closed:
            try:
                self._wait(lambda: self._lock.acquire(timeout=_TICK))
                try:
                    is_writable = self._poller()
                    while rest and self.error is None and not self.closed:
                        self._wait(is_writable)
                        with suppress(BlockingIOError):
                            rest = rest[os.write(self._fd, rest[:_PIECE]) :]
                finally:
                    self._lock.release()
            except OSError as error:
                failure = error
        if rest:
            with self._state:
                self.lost += len(rest)
        if failure is not None:
            self.fail(failure)
        return memoryview(data).nbytes

    def fail(self, error: OSError) -> None:
        """Record `error`, and drop all further bytes."""
        with self._state:
            if self.error is not None:
                return
            self.error = error
        self.on_error(self)

    @property
    def has_no_reader(self) -> bool:
        """Return whether the other end of the pipe or socket is closed."""
        return isinstance(self.error, ConnectionError)

    @property
    def trouble(self) -> str:
        """Return a text for messages: the name of the output, and why it cannot be written."""
        assert self.error is not None
        reason = "it is closed" if self.error.errno == errno.EBADF else self.error.strerror
        return f"{self.name} cannot be written ({reason})"

    def close(self) -> None:
        """Close the sink. Idempotent."""
        if self._closefd and not self.closed:
            with self._lock:
                os.close(self._fd)
                super().close()
        else:  # do not take the lock: a thread that waits for a reader of standard output may hold it
            super().close()

    def flush(self) -> None:
        """Do nothing: a sink has no buffer."""

    def fileno(self) -> int:
        """Return the descriptor.

        Raises:
            OSError: there is none.
        """
        return super().fileno() if self._fd < 0 else self._fd

    def isatty(self) -> bool:
        """Return whether the descriptor is a terminal."""
        return self._fd >= 0 and os.isatty(self._fd)

    def writable(self) -> bool:
        """Return True: a sink can be written."""
        return True

    def _wait(self, is_ready: Callable[[], object]) -> None:
        began = time.monotonic()
        while not is_ready():
            if time.monotonic() - began > self.max_wait:
                raise TimeoutError(errno.ETIMEDOUT, "the reader of the output has stopped reading")

    def _poller(self) -> Callable[[], object]:
        if self._fd < 0:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        poll = select.poll()
        poll.register(self._fd, select.POLLOUT)
        return lambda: poll.poll(_TICK * 1000)


class CommandOutput:
    """A context manager that replaces `sys.stdout` and `sys.stderr` by files that write to sinks.

    `print`, `argparse`, `rich` and the launcher then write in the same way. A stream without a descriptor, as in a test
    or a notebook, is left as it is. Closed descriptors from 0 to 2 are opened on /dev/null. Otherwise a pipe of the
    launcher could get such a number, and a child process would replace it with its own standard stream.
    """

    def __init__(self) -> None:
        self._before = sys.stdout, sys.stderr
        self._filled: list[int] = []
        self._sinks: list[Sink] = []

    def __enter__(self) -> Self:
        self._filled = _fill_closed()
        locks: dict[object, threading.Lock] = {}
        sys.stdout = self._replace(self._before[0], "standard output", _quit, locks)
        # Ignore failed writes to standard error: the code that writes there already ends the command with an error.
        sys.stderr = self._replace(self._before[1], "standard error", _ignore, locks)
        return self

    def __exit__(self, *_: object) -> None:
        self._flush()
        sys.stdout, sys.stderr = self._before
        for fd in self._filled:
            os.close(fd)

    @property
    def has_no_reader(self) -> bool:
        """Return whether the reader of standard output or standard error has closed its end."""
        return any(sink.has_no_reader for sink in self._sinks)

    def exit_code(self, code: int) -> int:
        """Report lost output; return the exit code of the command: `code`, or 1 if `code` is 0 and output was lost.

        A reader that has closed its end, as in ``aiocoll bench | head``, is not a failure.
        """
        self._flush()
        lost = [sink for sink in self._sinks if sink.error is not None and not sink.has_no_reader]
        for sink in lost:
            print(f"aiocoll: {sink.trouble}: {sink.lost} bytes lost", file=sys.stderr, flush=True)
        return code or int(bool(lost))

    def _flush(self) -> None:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OutputLostError):
                stream.flush()

    def _replace(
        self, stream: TextIO | None, name: str, on_error: Callable[[Sink], object], locks: dict[object, threading.Lock]
    ) -> TextIO:
        fd = -1
        if stream is not None:
            try:
                fd = stream.fileno()
                stream.flush()
            except (OSError, ValueError):
                return stream
        # Two descriptors of one file share a lock, so that lines stay whole if both write to one pipe.
        file = _identity(fd)
        sink = Sink(fd, name, on_error, locks.setdefault(file, threading.Lock()))
        self._sinks.append(sink)
        encoding, errors = ("utf-8", "replace") if stream is None else (stream.encoding, stream.errors)
        lines = stream is self._before[1] or sink.isatty()
        return io.TextIOWrapper(sink, encoding, errors, line_buffering=lines)


def on_loss(call: Callable[[Sink], object]) -> None:
    """Set the error handler of standard output and standard error: call `call(sink)` in the writing thread."""
    for sink in _sinks():
        sink.on_error = call


def limit_waits(seconds: float) -> None:
    """From now on, fail writes to standard output and standard error that make no progress for `seconds`."""
    for sink in _sinks():
        sink.max_wait = seconds


def _sinks() -> list[Sink]:
    buffers = [getattr(stream, "buffer", None) for stream in (sys.stdout, sys.stderr)]
    return [buffer for buffer in buffers if isinstance(buffer, Sink)]


def _quit(sink: Sink) -> None:
    raise OutputLostError(sink.trouble)


def _ignore(sink: Sink) -> None:
    pass


def _fill_closed() -> list[int]:
    filled = []
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(fd, True)
        filled.append(fd)
    os.close(fd)
    return filled


def _identity(fd: int) -> object:
    if fd < 0:
        return None
    found = os.fstat(fd)
    return found.st_dev, found.st_ino
