"""Handler of SIGUSR2: it calls all listeners, then the previous handler of the program.

The handler belongs to the interpreter, not to an event loop. It runs between two instructions of the main thread, also
while that thread blocks its loop, which the user may want to diagnose. Only the main thread may install it. In other
threads, and on systems without the signal, nothing is installed. The last listener removes it.

The first listener installs the handler if the signal would otherwise end the process. If the program has set a handler,
or ignores the signal, only a listener that the user requested installs it. The program's handler is called afterwards.
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

#: Attribute that marks the launcher's placeholder handler, which aiocoll's handler may replace.
STAND_IN = "stands_in_for_aiocoll"

#: SIGUSR2; None on Windows, which lacks this signal.
NUMBER: signal.Signals | None = getattr(signal, "SIGUSR2", None)
#: Linux lists in this file which signals of this process have a handler, including handlers in C.
_STATUS = "/proc/self/status"


class Listener(Protocol):
    """An object whose method `signalled` is called at each SIGUSR2."""

    def signalled(self) -> str:
        """Write a dump file, or return lines for standard error. Runs in the main thread, between two instructions."""


_listeners: WeakSet[Listener] = WeakSet()
#: The SIGUSR2 handler that was installed before aiocoll's handler.
_before: Any = None
_installed = False
#: Number of dumps still to write, including the current one; 0 outside the handler.
_due = 0


def listen(listener: Listener, *, asked: bool) -> None:
    """Register `listener`, to be called at each SIGUSR2, and install the signal handler if that is possible.

    Args:
        listener: the listener.
        asked: whether the user requested it. The handler then also replaces a handler of the program.
    """
    global _before, _installed
    if NUMBER is None:
        return
    before = signal.getsignal(NUMBER)
    if not _listeners:  # the last listener may have been garbage-collected without `unlisten`
        _installed = before is _handle
    _listeners.add(listener)
    # Install the handler only once: a handler that the program has installed since then may call aiocoll's handler.
    if _installed and not _would_end_process(before):
        return
    # `getsignal` returns None for a handler that Python did not install. Python can neither call nor restore it.
    if before is None or not (asked or _would_end_process(before)):
        return
    with suppress(ValueError):  # raised outside of the main thread
        signal.signal(NUMBER, _handle)
        _before, _installed = before, True


def unlisten(listener: Listener) -> None:
    """Remove a listener; with the last listener, restore the previous handler, unless the program has set another."""
    global _installed
    _listeners.discard(listener)
    if NUMBER is not None and _installed and not _listeners and signal.getsignal(NUMBER) is _handle:
        with suppress(ValueError):  # raised outside of the main thread; then a later group restores it
            signal.signal(NUMBER, _before)
            _installed = False


def listening() -> bool:
    """Return whether SIGUSR2 has a listener."""
    return len(_listeners) > 0


def _would_end_process(handler: Any) -> bool:
    """Return whether `handler` lets SIGUSR2 end the process, or is only the launcher's placeholder."""
    if handler is not signal.SIG_DFL:
        return getattr(handler, STAND_IN, False)
    assert NUMBER is not None
    try:
        with open(_STATUS) as file:
            status = file.read()
    except OSError:
        return True
    # Python reports a handler in C, such as that of `faulthandler.register`, as SIG_DFL. The kernel lists it.
    caught = next(int(line.split()[1], 16) for line in status.splitlines() if line.startswith("SigCgt"))
    return not caught >> (NUMBER - 1) & 1


def _handle(number: int, frame: FrameType | None) -> None:
    """Write a dump. If more signals arrive during the write, write one more. The handler never nests or blocks."""
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
    _due = 0  # Python handles no signal between the loop's check and this line, so no request for a dump is lost


def _dump(number: int, frame: FrameType | None) -> None:
    lines = "".join(listener.signalled() for listener in list(_listeners))
    if lines:
        stack = "".join(traceback.format_stack(frame)) if frame is not None else ""
        _write(f"SIGUSR2:\n{lines}main thread, innermost call last:\n{stack}")
    if callable(_before):
        _before(number, frame)


def _write(text: str) -> None:
    """Write `text` to standard error, unbuffered: the signal may have interrupted a buffered write by Python."""
    data = memoryview(text.encode(errors="replace"))
    with suppress(OSError):
        while data:
            data = data[os.write(2, data) :]
