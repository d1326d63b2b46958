"""Client side of `aiocoll top`: requests the state of all processes that listen in a job's folder."""

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
from aiocoll.top.messages import ASK, Reader

__all__ = ["Process", "State", "Viewer"]

_CHUNK: Final = 1 << 16


class State(StrEnum):
    """The state of a process, as the viewer has determined it."""

    ANSWERS = "answers"
    #: Does not answer although connected: the process holds the GIL, or gets no CPU time.
    SILENT = "silent"
    #: The process is stopped by a signal or a debugger.
    STOPPED = "stopped"
    #: The process has ended without closing its groups.
    GONE = "gone"
    #: The process has closed all of its groups.
    CLOSED = "closed"


class Process:
    """A process that listens, or has listened, in the job's folder.

    Attributes:
        number: process id, as reported by the process itself.
        state: its state.
        answered: time of its last answer; -inf if there was none.
        groups: the groups in that answer.
        left_out: number of groups that did not fit into that answer.
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
        self._has_asked = False

    @property
    def due_connection(self) -> socket.socket | None:
        """Return the connection if the process still has to answer a request, else None."""
        return self._connection if self._has_asked else None

    def request(self, folder: int) -> None:
        """Send a request to the process, unless it still has to answer the last one."""
        if self.state in (State.GONE, State.CLOSED) or self._has_asked:
            return
        try:
            if self._connection is None:
                self._connection = folders.connect(folder, self.number)
                self._identity = process.peer_id(self._connection)
                self._pidfd = process.peer_process(self._connection)
            self._connection.send(ASK)
            self._has_asked = True
        except FileNotFoundError:  # a closing process removes its socket's name before it closes connections
            self._end(State.CLOSED)
        except ConnectionRefusedError:
            self._end(State.GONE)
        except BlockingIOError:
            self.state = State.SILENT
        except OSError:
            self.close()

    def receive(self, now: float) -> None:
        """Receive bytes from the process; if they complete an answer, record the answer."""
        assert self._connection is not None
        try:
            data = self._connection.recv(_CHUNK)
            if not data:
                raise ConnectionResetError
            answers = self._reader.feed(data)
        except BlockingIOError:
            return
        except (OSError, ProtocolError):
            self.close()  # the next request finds out the state of the process
            return
        for answer in answers:
            self._has_asked = False
            self.state, self.answered = State.ANSWERS, now
            self.groups, self.left_out = answer["groups"], answer["left_out"]

    def on_timeout(self) -> None:
        """Determine the state of a process that has not answered in time."""
        found = process.state(self._identity, self._pidfd)
        if found == process.GONE:
            self._end(State.GONE)
        else:
            self.state = State.STOPPED if found == process.STOPPED else State.SILENT

    def close(self) -> None:
        """Close the connection to the process."""
        if self._connection is not None:
            self._connection.close()
        if self._pidfd is not None:
            self._pidfd.close()
        self._connection, self._pidfd, self._has_asked, self._reader = None, None, False, Reader()

    def _end(self, state: State) -> None:
        self.close()
        self.state = state


class Viewer:
    """A viewer of all processes that listen in a folder; `request_answers` updates their states.

    Args:
        path: path of the folder.
        clock: returns seconds.

    Attributes:
        processes: all processes seen so far, by number.

    Raises:
        OSError: the path is not a folder, or other users may enter it.
    """

    def __init__(self, path: str, clock: Callable[[], float]) -> None:
        self._folder = folders.open_folder(path)
        self._clock = clock
        self.processes: dict[int, Process] = {}

    def request_answers(self, timeout: float) -> None:
        """Send a request to all processes, and wait at most `timeout` seconds for their answers."""
        for number in folders.processes(self._folder):
            known = self.processes.get(number)
            if known is None or known.state == State.CLOSED:  # the process has made another group
                self.processes[number] = Process(number)
        for each in self.processes.values():
            each.request(self._folder)
        end = self._clock() + timeout
        while waiting := {
            each.due_connection.fileno(): each for each in self.processes.values() if each.due_connection is not None
        }:
            poll = select.poll()
            for fd in waiting:
                poll.register(fd, select.POLLIN)
            ready = poll.poll(max(0.0, end - self._clock()) * 1000)
            for fd, _ in ready:
                waiting[fd].receive(self._clock())
            if not ready:
                for each in waiting.values():
                    each.on_timeout()
                break

    @property
    def over(self) -> bool:
        """Return whether the folder has been removed, which marks the end of the job."""
        return os.fstat(self._folder).st_nlink == 0

    def close(self) -> None:
        """Close all connections."""
        for each in self.processes.values():
            each.close()
        os.close(self._folder)
