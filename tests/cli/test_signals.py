"""Signals to the launcher, whatever its main thread is doing."""

from __future__ import annotations

import queue
import signal
import sys
import threading
from collections.abc import Iterator

import pytest

from aiocoll.cli.signals import signals_to

#: Seconds after which a signal has not been heard.
LIMIT = 10.0


@pytest.fixture
def turns() -> Iterator[None]:
    """Let a thread run only when the one that runs waits."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(2 * LIMIT)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("turns")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR2])
def test_a_signal_is_heard_by_a_main_thread_that_is_about_to_wait(number: signal.Signals) -> None:
    """It comes once the main thread has executed its last instruction, and does not interrupt it: another has it."""
    events: queue.SimpleQueue[signal.Signals] = queue.SimpleQueue()
    main_waits = threading.Lock()
    main_waits.acquire()

    def interrupt() -> None:
        with main_waits:
            signal.pthread_kill(threading.get_ident(), number)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with signals_to(events.put):
        main_waits.release()
        assert events.get(timeout=LIMIT) == number
    thread.join()


def test_other_signals_have_the_handlers_that_they_had() -> None:
    events: queue.SimpleQueue[signal.Signals] = queue.SimpleQueue()
    heard = []
    before = signal.signal(signal.SIGUSR1, lambda *_: heard.append(len(heard)))
    try:
        with signals_to(events.put):
            signal.raise_signal(signal.SIGUSR1)
            signal.raise_signal(signal.SIGTERM)
            assert events.get(timeout=LIMIT) == signal.SIGTERM
            assert heard == [0]
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert events.empty()
