"""Signals to the launcher while its main thread runs any kind of code."""

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

#: Seconds within which a signal must be received.
LIMIT = 10.0


@pytest.fixture
def _rare_thread_switches() -> Iterator[None]:
    """Make thread switches rare, so that each thread runs until it waits."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(2 * LIMIT)
    yield
    sys.setswitchinterval(before)


@contextmanager
def signal_handler(number: signal.Signals, handler: Any) -> Iterator[None]:
    """Install a handler during the block: under nohup, this process ignores SIGHUP."""
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, before)


@pytest.mark.usefixtures("_rare_thread_switches")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR2])
def test_launcher_receives_a_signal_that_arrives_just_before_its_main_thread_waits(number: signal.Signals) -> None:
    """Send the signal to another thread while the main thread waits, so that no system call is interrupted."""
    events: queue.SimpleQueue[signal.Signals] = queue.SimpleQueue()
    main_waits = threading.Lock()
    main_waits.acquire()

    def interrupt() -> None:
        with main_waits:
            signal.pthread_kill(threading.get_ident(), number)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with signal_handler(number, signal.SIG_DFL), signals_to(events.put):
        main_waits.release()
        assert events.get(timeout=LIMIT) == number
    thread.join()


def test_launcher_forwards_a_signal_once_that_arrives_twice_at_once(limits: Limits) -> None:
    """Send the signal twice, as `timeout` does: to the launcher and to its process group."""
    limits(run_repeated_signal_time=LIMIT)
    events: queue.SimpleQueue[signal.Signals] = queue.SimpleQueue()
    with (
        signal_handler(signal.SIGTERM, signal.SIG_DFL),
        signal_handler(signal.SIGUSR2, signal.SIG_DFL),
        signals_to(events.put),
    ):
        for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGUSR2, signal.SIGUSR2):
            signal.raise_signal(number)
        assert [events.get(timeout=LIMIT) for _ in range(3)] == [signal.SIGTERM, signal.SIGUSR2, signal.SIGUSR2]
    assert events.empty()


def test_launcher_keeps_an_ignored_signal_ignored() -> None:
    events: queue.SimpleQueue[signal.Signals] = queue.SimpleQueue()
    with (
        signal_handler(signal.SIGHUP, signal.SIG_IGN),
        signal_handler(signal.SIGTERM, signal.SIG_DFL),
        signals_to(events.put),
    ):
        signal.raise_signal(signal.SIGHUP)
        signal.raise_signal(signal.SIGTERM)
        assert events.get(timeout=LIMIT) == signal.SIGTERM
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    assert events.empty()


def test_launcher_keeps_the_handlers_of_other_signals() -> None:
    events: queue.SimpleQueue[signal.Signals] = queue.SimpleQueue()
    received = []
    with signal_handler(signal.SIGUSR1, lambda *_: received.append(len(received))), signals_to(events.put):
        signal.raise_signal(signal.SIGUSR1)
        signal.raise_signal(signal.SIGTERM)
        assert events.get(timeout=LIMIT) == signal.SIGTERM
        assert received == [0]
    assert events.empty()


def test_launcher_restores_the_signal_wakeup_descriptor() -> None:
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
