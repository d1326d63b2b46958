"""Signal forwarding: each signal that the launcher receives is put into its event queue.

The interpreter runs handlers between two instructions of the main thread. If that thread has just begun to wait for an
event, a handler would run only after the next event, which may never arrive. So the handlers do nothing. The
interpreter also writes each signal number to a pipe at once, and a thread reads the pipe.

Wrappers such as `timeout` send a signal to this process and to its process group. Two signals of one kind within a
quarter of a second therefore count once.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager

__all__ = ["signals_to"]

#: Seconds within which a repeated signal counts as the same signal. Users take longer to press Ctrl-C again.
TWICE = 0.25


@contextmanager
def signals_to(put: Callable[[signal.Signals], object]) -> Iterator[None]:
    """Call `put` for SIGUSR2 and for signals that end programs; ignored signals (as under nohup) stay ignored.

    Args:
        put: called with each signal, from another thread.
    """
    before = {
        number: signal.getsignal(number)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR2)
        if signal.getsignal(number) is not signal.SIG_IGN
    }
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    listener = threading.Thread(target=_listen, args=(reading, before, put), name="signals", daemon=True)
    listener.start()
    pipe_before = signal.set_wakeup_fd(writing)
    for number in before:
        signal.signal(number, lambda *_: None)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(pipe_before)
        os.close(writing)
        listener.join()


def _listen(reading: int, wanted: Container[int], put: Callable[[signal.Signals], object]) -> None:
    came: dict[int, float] = {}
    try:
        while numbers := os.read(reading, 256):
            now = time.monotonic()
            for number in numbers:
                is_repeated = number != signal.SIGUSR2 and now - came.get(number, -TWICE) < TWICE
                if number in wanted and not is_repeated:
                    came[number] = now
                    put(signal.Signals(number))
    finally:
        os.close(reading)
