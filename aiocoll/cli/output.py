"""Relays the output of ranks: whole lines with the rank as prefix, each traceback in one piece."""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Callable
from typing import IO

from aiocoll.cli.logs import LogFile

__all__ = ["Output", "OutputRelay"]

#: Bytes of one read, and of the longest line that is kept whole; longer ones are cut, so that memory stays bounded.
_CHUNK = 1 << 16
#: How a traceback begins; those of an exception group are indented.
_BEGINNING = b"Traceback (most recent call last):"
#: Seconds without output after which a traceback has ended. Python writes it line by line, and lines after it may
#: belong to it: a cause, notes, the rest of a message.
_QUIET = 0.2
#: Limits of output held back for a traceback, in seconds and bytes: a rank that continues to write is not blocked.
_LONGEST, _LARGEST = 1.0, 1 << 20


class Output:
    """Our standard output and error, written by many threads.

    Args:
        on_closed: called, from any thread, when the reader of our output has gone away.
    """

    def __init__(self, on_closed: Callable[[], object]) -> None:
        self._lock = threading.Lock()
        self._on_closed = on_closed

    def write(self, sink: IO[str], lines: bytes) -> None:
        """Write whole lines."""
        try:
            with self._lock:
                sink.buffer.write(lines)  # type: ignore[attr-defined]
                sink.flush()
        except BrokenPipeError:
            # Further output is dropped, and the flush at exit does not fail.
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, sink.fileno())
            os.close(nowhere)
            self._on_closed()


class OutputRelay(threading.Thread):
    """Passes on the output from a pipe until its end.

    Args:
        prefix: written before every line.
        pipe: the output of a rank, unbuffered.
        sink: receives the output.
        output: writes it.
        log: gets a copy without prefixes, as it comes.
    """

    def __init__(
        self, prefix: bytes, pipe: IO[bytes], sink: IO[str], output: Output, log: LogFile | None = None
    ) -> None:
        super().__init__(name=f"output {prefix.decode()}", daemon=True)
        self._prefix = prefix
        self._pipe = pipe
        self._sink = sink
        self._output = output
        self._log = log
        self._lines: list[bytes] = []
        self._held_since: float | None = None
        self.start()

    def run(self) -> None:
        """Read and write."""
        rest = b""
        poll = select.poll()
        poll.register(self._pipe, select.POLLIN)
        with self._pipe:
            while True:
                if self._held_since is not None and not poll.poll(_QUIET * 1000):
                    self._pass_on()
                    continue
                if not (chunk := self._pipe.read(_CHUNK)):
                    break
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
            self._output.write(self._sink, b"".join(self._prefix + line + b"\n" for line in self._lines))
        self._lines = []
        self._held_since = None
