"""One rank as a process: how it is started, where its output goes, how it is ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

__all__ = ["Output", "RankProcess"]

#: Bytes of one read, and of the longest line that is kept whole; what is longer is cut, so that memory stays bounded.
_CHUNK = 1 << 16

_TIED = str(Path(__file__).with_name("tied.py"))


class Output:
    """Our standard output and error, written by many threads one line at a time.

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
            # What is still to come goes nowhere, and the flush at exit has nothing to complain about.
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, sink.fileno())
            os.close(nowhere)
            self._on_closed()


class RankProcess:
    """A started rank. It leads a process group of its own.

    So Ctrl-C in a terminal reaches the launcher alone, each rank gets it once, from there, and what a rank has
    started gets it too. On Linux the rank dies with the launcher, however that ends.

    Args:
        rank: its number.
        command: what follows the name of the Python interpreter.
        environment: all of its environment but the number of the key's pipe.
        key: what it finds in that pipe.
        output: gets its output.

    Raises:
        OSError: the process cannot be started.
    """

    def __init__(
        self, rank: int, command: Sequence[str], environment: Mapping[str, str], key: bytes, output: Output
    ) -> None:
        self.rank = rank
        tied = (sys.executable, "-I", "-S", _TIED, str(os.getpid())) if sys.platform == "linux" else ()
        fd = _pipe_with(key)
        try:
            self._process = subprocess.Popen(
                [*tied, sys.executable, *command],
                env={**environment, "AIOCOLL_JOB_KEY_FD": str(fd)},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                pass_fds=(fd,),
                process_group=0,
            )
        finally:
            os.close(fd)
        self._readers = [
            threading.Thread(target=self._relay, args=(pipe, sink, output), name=f"rank-{rank}-output", daemon=True)
            for pipe, sink in ((self._process.stdout, sys.stdout), (self._process.stderr, sys.stderr))
        ]
        for reader in self._readers:
            reader.start()

    def wait(self) -> int:
        """Block until the process has ended; return its exit code, -n for signal n."""
        return self._process.wait()

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the rank and what it has started."""
        with suppress(ProcessLookupError):
            if self._process.returncode is None:
                os.killpg(self._process.pid, number)

    def kill(self) -> None:
        """End the rank and what it has started at once, if it is still there."""
        self.send(signal.SIGKILL)

    def drain(self, deadline: float) -> None:
        """Wait for its end and for all of its output; what keeps the output open after `deadline` is killed."""
        self._process.wait()
        for reader in self._readers:
            reader.join(max(0.0, deadline - time.monotonic()))
        if any(reader.is_alive() for reader in self._readers):
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
            for reader in self._readers:
                reader.join(0.1)  # a daemon that left the group keeps its pipe, and we our promise to end

    def _relay(self, pipe: IO[bytes], sink: IO[str], output: Output) -> None:
        prefix = b"[%d] " % self.rank
        rest = b""
        with pipe:
            while chunk := pipe.read(_CHUNK):
                *lines, rest = (rest + chunk).split(b"\n")
                while len(rest) >= _CHUNK:
                    lines.append(rest[:_CHUNK])
                    rest = rest[_CHUNK:]
                if lines:
                    output.write(sink, b"".join(prefix + line + b"\n" for line in lines))
        if rest:
            output.write(sink, prefix + rest + b"\n")


def _pipe_with(key: bytes) -> int:
    """Return the reading end of a pipe that holds `key` and then ends."""
    reading, writing = os.pipe()
    with open(writing, "wb") as pipe:
        pipe.write(key)
    return reading
