"""SIGUSR2: calls all listeners, then the handler that was installed before.

It is a handler of the interpreter, not of an event loop: it runs between two instructions of the main thread, also
while that thread blocks its loop, which is what the sender may want to find out. Only the main thread may install it;
in others, and where the signal does not exist, nothing happens. It is removed with the last listener.

The first listener installs it if the signal would end the process. If the program has set a handler, or ignores the
signal, it is only installed for a listener that the user asked for: then the program's handler is called after ours.
"""

from __future__ import annotations

import os
import signal
import traceback
from contextlib import suppress
from types import FrameType
from typing import Any, Protocol
from weakref import WeakSet

__all__ = ["STAND_IN", "Listener", "listen", "listening", "unlisten"]

#: Attribute of a handler that only replaces ours while there is no listener.
STAND_IN = "stands_in_for_aiocoll"

#: None on Windows.
NUMBER: signal.Signals | None = getattr(signal, "SIGUSR2", None)
#: Lists the signals of this process that have a handler, also handlers that Python does not know.
_STATUS = "/proc/self/status"


class Listener(Protocol):
    """Is called at the signal."""

    def signalled(self) -> str:
        """Write a file, or return lines for standard error; runs in the main thread, at any point of the program."""


_listeners: WeakSet[Listener] = WeakSet()
#: The handler that was installed before.
_before: Any = None
_installed = False
#: How many dumps there are to write, this one included; 0 outside the handler.
_due = 0


def listen(listener: Listener, *, asked: bool) -> None:
    """Call `listener` at the signal from now on, if the handler can be installed here.

    Args:
        listener: the listener.
        asked: whether the user has asked for it: then it is installed in spite of a handler of the program.
    """
    global _before, _installed
    if NUMBER is None:
        return
    before = signal.getsignal(NUMBER)
    if not _listeners:  # the last one may have been garbage-collected without `unlisten`
        _installed = before is _handle
    _listeners.add(listener)
    # Only once: a handler that was installed since then may call this one.
    if _installed and not _would_end_us(before):
        return
    # None: one that is not Python's, which could neither be called nor put back.
    if before is None or not (asked or _would_end_us(before)):
        return
    with suppress(ValueError):  # not the main thread
        signal.signal(NUMBER, _handle)
        _before, _installed = before, True


def unlisten(listener: Listener) -> None:
    """Remove a listener; after the last one, restore the previous handler, unless another was installed since."""
    global _installed
    _listeners.discard(listener)
    if NUMBER is not None and _installed and not _listeners and signal.getsignal(NUMBER) is _handle:
        with suppress(ValueError):  # not the main thread, which does it after a later group
            signal.signal(NUMBER, _before)
            _installed = False


def listening() -> bool:
    """Whether there is a listener."""
    return len(_listeners) > 0


def _would_end_us(handler: Any) -> bool:
    """Whether the signal would end the process, or has only the launcher's placeholder as handler."""
    if handler is not signal.SIG_DFL:
        return getattr(handler, STAND_IN, False)
    assert NUMBER is not None
    try:
        with open(_STATUS) as file:
            status = file.read()
    except OSError:
        return True
    # Python reports a handler in C, such as that of `faulthandler.register`, as the default one.
    caught = next(int(line.split()[1], 16) for line in status.splitlines() if line.startswith("SigCgt"))
    return not caught >> (NUMBER - 1) & 1


def _handle(number: int, frame: FrameType | None) -> None:
    """Dump, and once more if the signal came again meanwhile: a storm of signals neither nests nor blocks."""
    global _due
    if _due:
        _due = 2
        return
    for _ in range(2):
        _due = 1
        try:
            _dump(number, frame)
        except BaseException:
            _due = 0
            raise
        if _due == 1:
            break
    _due = 0  # no signal is handled between the comparison and this, so none is lost


def _dump(number: int, frame: FrameType | None) -> None:
    told = "".join(listener.signalled() for listener in list(_listeners))
    if told:
        stack = "".join(traceback.format_stack(frame)) if frame is not None else ""
        _write(f"SIGUSR2:\n{told}main thread, innermost call last:\n{stack}")
    if callable(_before):
        _before(number, frame)


def _write(text: str) -> None:
    """Write unbuffered: the signal may have interrupted a write to the buffer of `sys.stderr`."""
    data = memoryview(text.encode(errors="replace"))
    with suppress(OSError):
        while data:
            data = data[os.write(2, data) :]
