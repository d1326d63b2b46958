"""Signals to the launcher as events of its queue.

The interpreter runs a handler between two instructions of the main thread. A signal that comes when that thread is just
about to wait, below the last instruction, would be handled after the next event, which may never come. So the handlers
do nothing: the interpreter also writes the number of each signal to a pipe at once, and a thread reads it there.

A wrapper such as `timeout` sends the signal that ends a job to this process and to its process group: one that comes
twice at once counts once.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager

__all__ = ["signals_to"]

#: Seconds in which a signal that ends the job and comes again is the same one; people take longer.
TWICE = 0.25


@contextmanager
def signals_to(put: Callable[[signal.Signals], object]) -> Iterator[None]:
    """Pass on the signals that end programs, and SIGUSR2; one that is ignored (as nohup asks for) stays ignored.

    Args:
        put: called with each, from another thread.
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
