"""SIGUSR2: whoever wants to write something on it does, and then the handler that was there before.

It is a handler of the interpreter's, not of an event loop: it is called between two instructions of the main thread,
also when that blocks its loop, which is what somebody who sends the signal may want to know. Only the main thread may
install it; in others, and where there is no such signal, nothing happens. With the last listener it goes.
"""

from __future__ import annotations

import signal
from contextlib import suppress
from types import FrameType
from typing import Any, Protocol
from weakref import WeakSet

__all__ = ["Listener", "listen", "unlisten"]

#: None on Windows.
NUMBER: signal.Signals | None = getattr(signal, "SIGUSR2", None)


class Listener(Protocol):
    """Who is told of the signal."""

    def signalled(self) -> None:
        """Write; called in the main thread, at any point of the program."""


_listeners: WeakSet[Listener] = WeakSet()
#: The handler that was there.
_before: Any = None
_installed = False


def listen(listener: Listener) -> None:
    """Tell `listener` of the signal from now on, if it can be done here."""
    global _before, _installed
    if NUMBER is None:
        return
    _listeners.add(listener)
    # Once: a handler that somebody has put since then may call this one.
    if _installed:
        return
    _before = signal.getsignal(NUMBER)
    # None: one that is not Python's, which could neither be called nor put back. ValueError: not the main thread.
    if _before is not None:
        with suppress(ValueError):
            signal.signal(NUMBER, _handle)
            _installed = True


def unlisten(listener: Listener) -> None:
    """Tell it no more; after the last one, put the handler back that was there, unless somebody has put another."""
    global _installed
    _listeners.discard(listener)
    if NUMBER is not None and _installed and not _listeners and signal.getsignal(NUMBER) is _handle:
        with suppress(ValueError):  # not the main thread, which does it after a later group
            signal.signal(NUMBER, _before)
            _installed = False


def _handle(number: int, frame: FrameType | None) -> None:
    for listener in list(_listeners):
        listener.signalled()
    if callable(_before):
        _before(number, frame)
