"""Relay of a rank's output to the launcher's output: whole lines, prefixed with the rank, and whole tracebacks."""

from __future__ import annotations

import select
import threading
import time
from typing import IO, BinaryIO

from aiocoll.cli.sink import Sink

__all__ = ["OutputRelay"]

#: Bytes per read, and maximum length of a line. Longer lines are split, so that memory stays bounded.
_CHUNK = 1 << 16
#: The first line of a traceback. Inside an exception group, this line is indented.
_BEGINNING = b"Traceback (most recent call last):"
#: Seconds without output after which a traceback counts as complete. Python writes it line by line, and further lines
#: may belong to it: a cause, notes, the rest of a message.
_QUIET = 0.2
#: Limits in seconds and bytes for holding back a traceback, so that a rank that continues to write is not blocked.
_LONGEST, _LARGEST = 1.0, 1 << 20
#: Seconds without data after which a pipe counts as drained. The most bytes that a pipe can hold after its last write.
_EMPTY, _HELD = 0.1, (1 << 20) + _CHUNK


class OutputRelay(threading.Thread):
    """A thread that copies a rank's output from a pipe to the launcher's output, until the end of the pipe.

    Args:
        prefix: written before every line.
        pipe: the output of a rank, unbuffered.
        output: receives whole lines with the prefix.
        log: receives a copy without prefixes, as it arrives.
    """

    def __init__(self, prefix: bytes, pipe: IO[bytes], output: BinaryIO, log: Sink | None = None) -> None:
        super().__init__(name=f"output {prefix.decode()}", daemon=True)
        self._prefix = prefix
        self._pipe = pipe
        self._output = output
        self._log = log
        self._lines: list[bytes] = []
        self._held_since: float | None = None
        self._count = 0
        #: Time at which this thread began to wait for data from the pipe; None if it does not wait.
        self._reading: float | None = None
        self.start()

    def drain(self) -> None:
        """Wait until the present content of the pipe has been copied, even if the launcher's output is read slowly.

        A process that the rank has left behind may keep the pipe open and write more. This does not wait for that.
        """
        enough = self._count + _HELD
        while self.is_alive() and self._count < enough:
            since = self._reading
            if since is not None and time.monotonic() - since > _EMPTY:
                return
            self.join(_EMPTY)

    def run(self) -> None:
        """Copy lines until the end of the pipe; runs in the thread."""
        rest = b""
        poll = select.poll()
        poll.register(self._pipe, select.POLLIN)
        with self._pipe:
            while True:
                if self._held_since is not None and not poll.poll(_QUIET * 1000):
                    self._pass_on()
                    continue
                self._reading = time.monotonic()
                chunk = self._pipe.read(_CHUNK)
                self._reading = None
                if not chunk:
                    break
                self._count += len(chunk)
                if self._log is not None:
                    self._log.write(chunk)
                *lines, rest = (rest + chunk).split(b"\n")
                while len(rest) >= _CHUNK:
                    lines.append(rest[:_CHUNK])
                    rest = rest[_CHUNK:]
                self._take(lines)
        self._take([rest] if rest else [])
        self._pass_on()

    def _take(self, lines: list[bytes]) -> None:
        for line in lines:
            if self._held_since is None and line.endswith(_BEGINNING):
                self._pass_on()
                self._held_since = time.monotonic()
            self._lines.append(line)
        if (
            self._held_since is None
            or time.monotonic() - self._held_since > _LONGEST
            or sum(map(len, self._lines)) > _LARGEST
        ):
            self._pass_on()

    def _pass_on(self) -> None:
        if self._lines:
            self._output.write(b"".join(self._prefix + line + b"\n" for line in self._lines))
            self._output.flush()
        self._lines = []
        self._held_since = None
