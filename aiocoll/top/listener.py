"""A thread that answers `aiocoll top`, for all groups of a process. It sleeps until somebody asks.

It is a thread, not a part of the loop, since a rank whose loop is blocked is what somebody looks for. It never waits
for a viewer: what does not fit into the connection is sent when there is room, and until then that viewer is not heard,
so updates are dropped, not queued. A viewer is heard four times a second at most, whatever it asks for.
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
from aiocoll.top import words
from aiocoll.users import peer_trouble

__all__ = ["Source", "join", "leave"]

#: Viewers that are connected; if there is one more, that goes which has not asked for longest.
MOST: Final = 8
#: Seconds after an answer in which a viewer is not heard.
REST: Final = 0.25
#: Seconds for which an answer serves other viewers, too.
FRESH: Final = 0.1
#: Seconds to wait for the end of the thread: an answer takes a thousandth of it.
FAREWELL: Final = 1.0


class Source(Protocol):
    """A group that is shown."""

    def shown(self) -> dict[str, Any]:
        """Return its state as plain data; called in the thread."""


class _Viewer:
    """A connection of a viewer.

    Attributes:
        connection: does not block.
        left: what is to be sent.
        until: when it is heard again.
        asked: when it has asked last.
    """

    __slots__ = ("asked", "connection", "left", "until")

    def __init__(self, connection: socket.socket, now: float) -> None:
        self.connection = connection
        self.left = memoryview(b"")
        self.until = self.asked = now


class _Listener:
    """The thread of one folder.

    Args:
        path: of the folder.
        clock: seconds, for any thread.

    Raises:
        OSError: nobody can listen there.
    """

    def __init__(self, path: str, clock: Callable[[], float]) -> None:
        self.pid = os.getpid()
        self._clock = clock
        #: Replaced, never changed: the thread may be reading it.
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
        """Return the groups that are shown."""
        return [source for each in self._sources if (source := each()) is not None]

    def show(self, sources: list[Source]) -> None:
        """Show these groups from now on."""
        self._sources = tuple(map(ref, sources))

    def close(self) -> None:
        """End the thread, and remove the socket."""
        folders.remove(self._folder)
        self._ending.set()
        self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._thread.join(FAREWELL)

    def abandon(self) -> None:
        """Close what a forked child has inherited, and leave the rest to its parent."""
        self._socket.close()
        os.close(self._folder)
        for viewer in self._viewers.values():
            viewer.connection.close()

    # -- in the thread

    def _run(self) -> None:
        while not self._ending.is_set():
            try:
                self._turn()
            except Exception as error:  # no file descriptor is left, for example
                logger.debug("aiocoll top: %s: %s", type(error).__name__, error)
                self._ending.wait(REST)
        self.abandon()

    def _turn(self) -> None:
        now = self._clock()
        resting = [each for each in self._viewers.values() if each.until > now and not each.left]
        due = min((each.until for each in resting), default=None)
        for fd, _ in self._poll.poll(None if due is None else (due - now) * 1000 + 1):
            if fd == self._socket.fileno():
                self._accept()
                continue
            viewer = self._viewers.get(fd)
            if viewer is None:
                continue  # it has just made room for another
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
            return  # it has gone again
        except OSError:
            if self._ending.is_set():
                return
            raise
        if peer_trouble(connection) is not None:
            connection.close()
            return
        connection.setblocking(False)
        if len(self._viewers) == MOST:
            self._drop(min(self._viewers.values(), key=lambda each: each.asked))
        self._viewers[connection.fileno()] = _Viewer(connection, self._clock())
        self._poll.register(connection, select.POLLIN)

    def _serve(self, viewer: _Viewer) -> None:
        """Hear a viewer, or go on sending; OSError if its connection has ended."""
        connection = viewer.connection
        if not viewer.left:
            if not connection.recv(len(words.ASK) * 64):
                raise ConnectionResetError
            viewer.asked = self._clock()
            viewer.left = memoryview(self._newest())
        with suppress(BlockingIOError):
            viewer.left = viewer.left[connection.send(viewer.left) :]
        if viewer.left:
            self._poll.modify(connection, select.POLLOUT)
        else:
            self._poll.unregister(connection)
            viewer.until = self._clock() + REST

    def _newest(self) -> bytes:
        now = self._clock()
        if now - self._made >= FRESH:
            self._answer = words.answer(self.pid, map(_shown, self.sources()))
            self._made = self._clock()
        return self._answer

    def _drop(self, viewer: _Viewer) -> None:
        del self._viewers[viewer.connection.fileno()]
        with suppress(KeyError):
            self._poll.unregister(viewer.connection)
        viewer.connection.close()


#: By the path of the folder: usually one.
_listeners: dict[str, _Listener] = {}
_lock = threading.Lock()


def join(source: Source, path: str, clock: Callable[[], float]) -> None:
    """Show a group in a folder, which is made if it is not there.

    Args:
        source: the group; it is kept by who shows it.
        path: of the folder.
        clock: seconds, for any thread.

    Raises:
        OSError: it cannot be shown there.
        RuntimeError: no thread can be started.
    """
    with _lock:
        listener = _listeners.get(path)
        if listener is not None and listener.pid != os.getpid():  # this process is a fork of another
            listener.abandon()
            listener = None
        if listener is None:
            os.makedirs(path, mode=0o700, exist_ok=True)
            listener = _listeners[path] = _Listener(path, clock)
        listener.show([*listener.sources(), source])


def leave(source: Source, path: str) -> None:
    """Show a group no more; it need not be shown."""
    with _lock:
        listener = _listeners.get(path)
        if listener is None or listener.pid != os.getpid():
            return
        left = [each for each in listener.sources() if each is not source]
        listener.show(left)
        if not left:
            del _listeners[path]
            listener.close()


def _shown(source: Source) -> dict[str, Any]:
    try:
        return source.shown()
    except Exception as error:  # of a group that is ending, for example
        return {"error": f"{type(error).__name__}: {error}"}
