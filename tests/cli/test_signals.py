"""Signals to the launcher, whatever its main thread is doing."""

from __future__ import annotations

import os
import queue
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from aiocoll.cli.signals import signals_to

from ..internals import Limits

#: Seconds after which a signal has not been heard.
LIMIT = 10.0


@pytest.fixture
def turns() -> Iterator[None]:
    """Let a thread run only when the one that runs waits."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(2 * LIMIT)
    yield
    sys.setswitchinterval(before)


@contextmanager
def handled(number: signal.Signals, handler: Any) -> Iterator[None]:
    """Have a handler, whatever this process was started with: nohup lets it ignore SIGHUP."""
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, before)


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
    with handled(number, signal.SIG_DFL), signals_to(events.put):
        main_waits.release()
        assert events.get(timeout=LIMIT) == number
    thread.join()


def test_signal_that_comes_twice_at_once_is_passed_on_once(limits: Limits) -> None:
    """As from `timeout`, which sends it to the launcher and to its process group."""
    limits(run_signal_twice=LIMIT)
    events: queue.SimpleQueue[signal.Signals] = queue.SimpleQueue()
    with handled(signal.SIGTERM, signal.SIG_DFL), handled(signal.SIGUSR2, signal.SIG_DFL), signals_to(events.put):
        for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGUSR2, signal.SIGUSR2):
            signal.raise_signal(number)
        assert [events.get(timeout=LIMIT) for _ in range(3)] == [signal.SIGTERM, signal.SIGUSR2, signal.SIGUSR2]
    assert events.empty()


def test_what_is_ignored_stays_ignored() -> None:
    events: queue.SimpleQueue[signal.Signals] = queue.SimpleQueue()
    with handled(signal.SIGHUP, signal.SIG_IGN), handled(signal.SIGTERM, signal.SIG_DFL), signals_to(events.put):
        signal.raise_signal(signal.SIGHUP)
        signal.raise_signal(signal.SIGTERM)
        assert events.get(timeout=LIMIT) == signal.SIGTERM
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    assert events.empty()


def test_other_signals_have_the_handlers_that_they_had() -> None:
    events: queue.SimpleQueue[signal.Signals] = queue.SimpleQueue()
    heard = []
    with handled(signal.SIGUSR1, lambda *_: heard.append(len(heard))), signals_to(events.put):
        signal.raise_signal(signal.SIGUSR1)
        signal.raise_signal(signal.SIGTERM)
        assert events.get(timeout=LIMIT) == signal.SIGTERM
        assert heard == [0]
    assert events.empty()


def test_who_was_woken_by_signals_is_woken_again() -> None:
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    before = signal.set_wakeup_fd(writing)
    try:
        with signals_to(lambda _: None):
            pass
        assert signal.set_wakeup_fd(before) == writing
    finally:
        signal.set_wakeup_fd(before)
        os.close(reading)
        os.close(writing)
