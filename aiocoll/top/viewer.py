"""The other end: asks all processes that listen in a folder, and knows what becomes of those that do not answer."""

from __future__ import annotations

import os
import select
import socket
import struct
from collections.abc import Callable
from contextlib import suppress
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

from aiocoll.errors import ProtocolError
from aiocoll.top import folder as folders
from aiocoll.top.words import ASK, Reader

__all__ = ["Process", "State", "Viewer"]

_CREDENTIALS: Final = struct.Struct("3i")
_CHUNK: Final = 1 << 16


class State(StrEnum):
    """What is known of a process."""

    ANSWERS = "answers"
    #: It is connected, and does not answer: it holds the GIL, or has no CPU.
    SILENT = "silent"
    #: It is stopped by a signal or a debugger.
    STOPPED = "stopped"
    #: It has ended without closing its groups.
    GONE = "gone"
    #: It has closed all of its groups.
    CLOSED = "closed"


class Process:
    """A process that listens, or has listened.

    Attributes:
        number: of the process, as it has said itself.
        state: what is known of it.
        answered: when it has answered last; -inf if never.
        groups: what it has answered then.
        left_out: how many groups did not fit into that.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.state = State.SILENT
        self.answered = float("-inf")
        self.groups: list[dict[str, Any]] = []
        self.left_out = 0
        self._seen = number
        self._connection: socket.socket | None = None
        self._reader = Reader()
        self._asked = False

    @property
    def waits(self) -> socket.socket | None:
        """The connection on which an answer is due."""
        return self._connection if self._asked else None

    def ask(self, folder: int) -> None:
        """Ask it, if it does not owe an answer."""
        if self.state in (State.GONE, State.CLOSED) or self._asked:
            return
        try:
            if self._connection is None:
                self._connection = folders.connect(folder, self.number)
                self._seen = _process_at(self._connection) or self._seen
            self._connection.send(ASK)
            self._asked = True
        except FileNotFoundError:  # it takes its name away before it hangs up
            self._end(State.CLOSED)
        except ConnectionRefusedError:
            self._end(State.GONE)
        except BlockingIOError:
            self.state = State.SILENT
        except OSError:
            self.close()

    def receive(self, now: float) -> None:
        """Take what it has sent."""
        assert self._connection is not None
        try:
            data = self._connection.recv(_CHUNK)
            if not data:
                raise ConnectionResetError
            answers = self._reader.feed(data)
        except BlockingIOError:
            return
        except (OSError, ProtocolError):
            self.close()  # the next question shows what has become of it
            return
        for answer in answers:
            self._asked = False
            self.state, self.answered = State.ANSWERS, now
            self.groups, self.left_out = answer["groups"], answer["left_out"]

    def overdue(self) -> None:
        """It has not answered in time."""
        letter = _letter(self._seen)
        if letter is None or letter in "ZX":
            self._end(State.GONE)
        else:
            self.state = State.STOPPED if letter in "Tt" else State.SILENT

    def close(self) -> None:
        """Hang up."""
        if self._connection is not None:
            self._connection.close()
        self._connection, self._asked, self._reader = None, False, Reader()

    def _end(self, state: State) -> None:
        self.close()
        self.state = state


class Viewer:
    """Asks all processes of a folder, again and again.

    Args:
        path: of the folder.
        clock: seconds.

    Attributes:
        processes: those that have been seen so far, by number.

    Raises:
        OSError: it is no folder of this user alone.
    """

    def __init__(self, path: str, clock: Callable[[], float]) -> None:
        self._folder = folders.open_folder(path)
        self._clock = clock
        self.processes: dict[int, Process] = {}

    def ask(self, patience: float) -> None:
        """Ask all of them, and wait for their answers for `patience` seconds at most."""
        for number in folders.processes(self._folder):
            known = self.processes.get(number)
            if known is None or known.state == State.CLOSED:  # it has made another group
                self.processes[number] = Process(number)
        for process in self.processes.values():
            process.ask(self._folder)
        end = self._clock() + patience
        while waiting := {each.waits.fileno(): each for each in self.processes.values() if each.waits is not None}:
            poll = select.poll()
            for fd in waiting:
                poll.register(fd, select.POLLIN)
            ready = poll.poll(max(0.0, end - self._clock()) * 1000)
            for fd, _ in ready:
                waiting[fd].receive(self._clock())
            if not ready:
                for process in waiting.values():
                    process.overdue()
                break

    @property
    def over(self) -> bool:
        """Whether the folder has been removed: the job has ended."""
        return os.fstat(self._folder).st_nlink == 0

    def close(self) -> None:
        """Hang up."""
        for process in self.processes.values():
            process.close()
        os.close(self._folder)


def _process_at(connection: socket.socket) -> int:
    """Return the process at the other end; 0 if it is in a namespace that cannot be seen from here."""
    found: tuple[int, int, int] = _CREDENTIALS.unpack(
        connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    )
    return found[0]


def _letter(process: int) -> str | None:
    """Return the letter of a process's state, as in proc(5); None if there is no such process."""
    with suppress(OSError):
        return Path(f"/proc/{process}/stat").read_text(errors="replace").rpartition(")")[2].split()[0]
    return None
