"""The thread of a process that answers the requests of `aiocoll top` about all groups of the process.

It is a thread, not a task, because users run `aiocoll top` to find ranks whose event loop is blocked. The thread never
waits for a viewer. If an answer does not fit into the connection, the rest is sent once there is room. Until then the
thread reads no request from that viewer, so updates are dropped instead of queued. It answers each viewer at most four
times per second.
"""

from __future__ import annotations

import os
import select
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final, Protocol
from weakref import ref

from aiocoll.log import logger
from aiocoll.top import folder as folders
from aiocoll.top import messages
from aiocoll.users import peer_trouble

__all__ = ["Source", "join", "leave"]

#: Maximum number of connected viewers. A further viewer replaces the one whose last request is oldest.
MOST: Final = 8
#: Seconds after an answer to a viewer during which the thread reads no request from this viewer.
REST: Final = 0.25
#: Seconds for which the thread reuses an answer for further requests.
FRESH: Final = 0.1
#: Maximum seconds to wait until the thread has ended; an answer takes about 1 ms.
JOIN_TIMEOUT: Final = 1.0


class Source(Protocol):
    """The interface of a group whose state `aiocoll top` shows."""

    def to_data(self) -> dict[str, Any]:
        """Return the state of the group as plain data; called in the listener's thread."""


class _Viewer:
    """The listener's connection to one viewer, a running `aiocoll top`.

    Attributes:
        connection: the non-blocking socket.
        unsent: the part of the answer that is not sent yet.
        until: time at which its next request is read.
        last_request: time of its last request.
    """

    __slots__ = ("connection", "last_request", "unsent", "until")

    def __init__(self, connection: socket.socket, now: float) -> None:
        self.connection = connection
        self.unsent = memoryview(b"")
        self.until = self.last_request = now


class _Listener:
    """A thread that listens in one folder, and answers the viewers that connect.

    Args:
        path: path of the folder.
        clock: returns seconds; may be called in any thread.

    Raises:
        OSError: this process cannot listen there.
    """

    def __init__(self, path: str, clock: Callable[[], float]) -> None:
        self.pid = os.getpid()
        self._clock = clock
        #: The groups to report. The tuple is replaced, never modified, because the thread may be reading it.
        self._sources: tuple[ref[Source], ...] = ()
        self._folder = folders.open_folder(path)
        try:
            self._socket = folders.listen(self._folder)
        except BaseException:
            os.close(self._folder)
            raise
        self._poll = select.poll()
        self._poll.register(self._socket, select.POLLIN)
        self._viewers: dict[int, _Viewer] = {}
        self._answer, self._made = b"", -FRESH
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="aiocoll top", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:  # there are too many threads
            folders.remove(self._folder)
            self.abandon()
            raise

    def sources(self) -> list[Source]:
        """Return the groups that the thread reports to viewers."""
        return [source for each in self._sources if (source := each()) is not None]

    def show(self, sources: list[Source]) -> None:
        """Replace the list of groups that the thread reports to viewers."""
        self._sources = tuple(map(ref, sources))

    def close(self) -> None:
        """Stop the thread and remove the socket."""
        folders.remove(self._folder)
        self._ending.set()
        self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._thread.join(JOIN_TIMEOUT)

    def abandon(self) -> None:
        """Close the descriptors that a forked child has inherited; its parent keeps the thread."""
        self._socket.close()
        os.close(self._folder)
        for viewer in self._viewers.values():
            viewer.connection.close()

    # -- the thread

    def _run(self) -> None:
        while not self._ending.is_set():
            try:
                self._handle_events()
            except Exception as error:  # no file descriptor is left, for example
                logger.debug("aiocoll top: %s: %s", type(error).__name__, error)
                self._ending.wait(REST)
        self.abandon()

    def _handle_events(self) -> None:
        now = self._clock()
        resting = [each for each in self._viewers.values() if each.until > now and not each.unsent]
        due = min((each.until for each in resting), default=None)
        for fd, _ in self._poll.poll(None if due is None else (due - now) * 1000 + 1):
            if fd == self._socket.fileno():
                self._accept()
                continue
            viewer = self._viewers.get(fd)
            if viewer is None:
                continue  # dropped in this turn to make room for another viewer
            try:
                self._serve(viewer)
            except OSError:
                self._drop(viewer)
        now = self._clock()
        for viewer in resting:
            if viewer.until <= now and viewer.connection.fileno() >= 0:
                self._poll.register(viewer.connection, select.POLLIN)

    def _accept(self) -> None:
        try:
            connection, _ = self._socket.accept()
        except BlockingIOError:
            return  # the viewer has closed the connection again
        except OSError:
            if self._ending.is_set():
                return
            raise
        if peer_trouble(connection) is not None:
            connection.close()
            return
        connection.setblocking(False)
        if len(self._viewers) == MOST:
            self._drop(min(self._viewers.values(), key=lambda each: each.last_request))
        self._viewers[connection.fileno()] = _Viewer(connection, self._clock())
        self._poll.register(connection, select.POLLIN)

    def _serve(self, viewer: _Viewer) -> None:
        """Read a viewer's request, or send more of an answer; raise OSError if the connection has ended."""
        connection = viewer.connection
        if not viewer.unsent:
            if not connection.recv(len(messages.ASK) * 64):
                raise ConnectionResetError
            viewer.last_request = self._clock()
            viewer.unsent = memoryview(self._get_answer())
        with suppress(BlockingIOError):
            viewer.unsent = viewer.unsent[connection.send(viewer.unsent) :]
        if viewer.unsent:
            self._poll.modify(connection, select.POLLOUT)
        else:
            self._poll.unregister(connection)
            viewer.until = self._clock() + REST

    def _get_answer(self) -> bytes:
        now = self._clock()
        if now - self._made >= FRESH:
            self._answer = messages.answer(self.pid, map(_get_state, self.sources()))
            self._made = self._clock()
        return self._answer

    def _drop(self, viewer: _Viewer) -> None:
        del self._viewers[viewer.connection.fileno()]
        with suppress(KeyError):
            self._poll.unregister(viewer.connection)
        viewer.connection.close()


#: Listener of each folder in use, by path; usually there is only one.
_listeners: dict[str, _Listener] = {}
_lock = threading.Lock()


def join(source: Source, path: str, clock: Callable[[], float]) -> None:
    """Report a group to all viewers that connect in a folder; create the folder if it does not exist.

    Args:
        source: the group; the listener holds only a weak reference.
        path: path of the folder.
        clock: returns seconds; may be called in any thread.

    Raises:
        OSError: the group cannot be shown there.
        RuntimeError: no thread can be started.
    """
    with _lock:
        listener = _listeners.get(path)
        if listener is not None and listener.pid != os.getpid():  # inherited from the parent of a fork
            listener.abandon()
            listener = None
        if listener is None:
            os.makedirs(path, mode=0o700, exist_ok=True)
            listener = _listeners[path] = _Listener(path, clock)
        listener.show([*listener.sources(), source])


def leave(source: Source, path: str) -> None:
    """Stop reporting a group to viewers; do nothing if the group is not reported."""
    with _lock:
        listener = _listeners.get(path)
        if listener is None or listener.pid != os.getpid():
            return
        remaining = [each for each in listener.sources() if each is not source]
        listener.show(remaining)
        if not remaining:
            del _listeners[path]
            listener.close()


def _get_state(source: Source) -> dict[str, Any]:
    try:
        return source.to_data()
    except Exception as error:  # for example of a group that is closing
        return {"error": f"{type(error).__name__}: {error}"}
