"""SIGUSR2: whoever wants to tell something on it does, and then the handler that was there before.

It is a handler of the interpreter's, not of an event loop: it is called between two instructions of the main thread,
also when that blocks its loop, which is what somebody who sends the signal may want to know. Only the main thread may
install it; in others, and where there is no such signal, nothing happens. With the last listener it goes.

The first listener installs it where the signal would end the process. A handler that the program has set, and a signal
that it ignores, are left as they are, unless a listener was asked for by name: then that handler is called after ours.
"""

from __future__ import annotations

import os
import signal
import traceback
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any, Protocol
from weakref import WeakSet

__all__ = ["STAND_IN", "Listener", "listen", "listening", "unlisten"]

#: Attribute of a handler that only stands in for ours, as long as there is no listener.
STAND_IN = "stands_in_for_aiocoll"

#: None on Windows.
NUMBER: signal.Signals | None = getattr(signal, "SIGUSR2", None)
#: Of this process: which signals have a handler, also such as Python does not know of.
_STATUS = Path("/proc/self/status")


class Listener(Protocol):
    """Who is told of the signal."""

    def signalled(self) -> str:
        """Write a file, or return lines for standard error; called in the main thread, at any point of the program."""


_listeners: WeakSet[Listener] = WeakSet()
#: The handler that was there.
_before: Any = None
_installed = False


def listen(listener: Listener, *, asked: bool) -> None:
    """Tell `listener` of the signal from now on, if it can be done here.

    Args:
        listener: who is told.
        asked: whether the user has asked for it, so that a handler of the program makes no difference.
    """
    global _before, _installed
    if NUMBER is None:
        return
    before = signal.getsignal(NUMBER)
    if not _listeners:  # the last one may have been collected without a word
        _installed = before is _handle
    _listeners.add(listener)
    # Once: a handler that somebody has put since then may call this one.
    if _installed and not _would_end_us(before):
        return
    # None: one that is not Python's, which could neither be called nor put back.
    if before is None or not (asked or _would_end_us(before)):
        return
    with suppress(ValueError):  # not the main thread
        signal.signal(NUMBER, _handle)
        _before, _installed = before, True


def unlisten(listener: Listener) -> None:
    """Tell it no more; after the last one, put the handler back that was there, unless somebody has put another."""
    global _installed
    _listeners.discard(listener)
    if NUMBER is not None and _installed and not _listeners and signal.getsignal(NUMBER) is _handle:
        with suppress(ValueError):  # not the main thread, which does it after a later group
            signal.signal(NUMBER, _before)
            _installed = False


def listening() -> bool:
    """Whether there is anybody who would tell something."""
    return len(_listeners) > 0


def _would_end_us(handler: Any) -> bool:
    """Whether the signal ends the process, or only comes to what the launcher has put there for us."""
    if handler is not signal.SIG_DFL:
        return getattr(handler, STAND_IN, False)
    assert NUMBER is not None
    try:
        status = _STATUS.read_text()
    except OSError:
        return True
    # A handler in C, as `faulthandler.register` puts there, is the default one to Python.
    caught = next(int(line.split()[1], 16) for line in status.splitlines() if line.startswith("SigCgt"))
    return not caught >> (NUMBER - 1) & 1


def _handle(number: int, frame: FrameType | None) -> None:
    told = "".join(listener.signalled() for listener in list(_listeners))
    if told:
        stack = "".join(traceback.format_stack(frame)) if frame is not None else ""
        _write(f"SIGUSR2:\n{told}main thread, innermost call last:\n{stack}")
    if callable(_before):
        _before(number, frame)


def _write(text: str) -> None:
    """Write it at once, past the buffer of `sys.stderr`, in which the signal may have come in the middle of a write."""
    data = memoryview(text.encode(errors="replace"))
    with suppress(OSError):
        while data:
            data = data[os.write(2, data) :]
