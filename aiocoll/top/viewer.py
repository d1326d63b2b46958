"""The other end: asks all processes that listen in a folder, and knows what becomes of those that do not answer."""

from __future__ import annotations

import os
import select
import socket
from collections.abc import Callable
from enum import StrEnum
from typing import Any, Final

from aiocoll import process
from aiocoll.errors import ProtocolError
from aiocoll.top import folder as folders
from aiocoll.top.words import ASK, Reader

__all__ = ["Process", "State", "Viewer"]

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
        self._identity: process.ProcessId | None = None
        self._pidfd: process.PidFd | None = None
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
                self._identity = process.peer_id(self._connection)
                self._pidfd = process.peer_process(self._connection)
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
        found = process.state(self._identity, self._pidfd)
        if found == process.GONE:
            self._end(State.GONE)
        else:
            self.state = State.STOPPED if found == process.STOPPED else State.SILENT

    def close(self) -> None:
        """Hang up."""
        if self._connection is not None:
            self._connection.close()
        if self._pidfd is not None:
            self._pidfd.close()
        self._connection, self._pidfd, self._asked, self._reader = None, None, False, Reader()

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
        for each in self.processes.values():
            each.ask(self._folder)
        end = self._clock() + patience
        while waiting := {each.waits.fileno(): each for each in self.processes.values() if each.waits is not None}:
            poll = select.poll()
            for fd in waiting:
                poll.register(fd, select.POLLIN)
            ready = poll.poll(max(0.0, end - self._clock()) * 1000)
            for fd, _ in ready:
                waiting[fd].receive(self._clock())
            if not ready:
                for each in waiting.values():
                    each.overdue()
                break

    @property
    def over(self) -> bool:
        """Whether the folder has been removed: the job has ended."""
        return os.fstat(self._folder).st_nlink == 0

    def close(self) -> None:
        """Hang up."""
        for each in self.processes.values():
            each.close()
        os.close(self._folder)
