"""Fault injection into the failure detector: whatever its own system calls do, no living rank is reported dead.

Its thread does not run here: the test calls each round, on a clock of its own, so that a seed gives the same run.
"""

from __future__ import annotations

import errno
import heapq
import os
import random
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from aiocoll import process
from aiocoll.engine.failure.failure_detector import GRACE, LAST_WORDS, FailureDetector
from aiocoll.engine.failure.watchdog import BLOCKED_AFTER, ROUND
from aiocoll.errors import RendezvousError
from aiocoll.process import PidFd, ProcessId, this_process

from ..internals import replaced_call

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes can be observed on Linux only")

ERRNOS = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EACCES, errno.EIO, errno.EAGAIN, errno.EINTR)
#: Functions that the detector and its thread call, by where they look them up.
CALLS = {
    "open": "aiocoll.process",
    "os.stat": "aiocoll.process",
    "os.fstat": "aiocoll.process",
    "os.kill": "aiocoll.process",
    "os.pidfd_open": "aiocoll.process",
    "select.poll": "aiocoll.process",
    "signal.pidfd_send_signal": "aiocoll.process",
    "logger.log": "aiocoll.engine.failure.watchdog",
    "sys._current_frames": "aiocoll.engine.failure.watchdog",
}
#: Calls that fail inside of what stands in for a thread and for the stream of a heartbeat.
INSIDE = ("Thread.start", "send", "receive")
#: The other ranks: a process of this host that lives, one of another host, and one of this host that is killed.
LIVING, AWAY, KILLED = 0, 1, 2
SLEEP = ["sleep", "3600"]


class Fault:
    """A call that fails from its `first` time on, once or for ever."""

    def __init__(self, chance: random.Random) -> None:
        self.call = chance.choice((*CALLS, *INSIDE))
        self.number = chance.choice(ERRNOS)
        self.lasts = chance.random() < 0.5
        self._first = chance.randrange(1, 40) if chance.random() < 0.7 else 1
        self._calls = 0

    def strike(self, call: str) -> None:
        """Count a call, and raise if it is to fail."""
        if call != self.call:
            return
        self._calls += 1
        if self._calls == self._first or (self.lasts and self._calls > self._first):
            if call == "Thread.start":
                raise RuntimeError("can't start new thread")
            raise OSError(self.number, os.strerror(self.number))

    def around(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that fails when this fault strikes."""

        def call(*args: Any, **named: Any) -> Any:
            self.strike(self.call)
            return original(*args, **named)

        return call


class Clock:
    """The clock, timers and loop of this rank."""

    def __init__(self) -> None:
        self.now = 0.0
        self.is_blocked = False
        self._timers: list[tuple[float, int, Callable[[], object]]] = []
        self._soon: list[Callable[[], object]] = []
        self._count = 0

    def time(self) -> float:
        return self.now

    ticks = time

    def call_later(self, delay: float, callback: Callable[..., object], *args: Any) -> None:
        self._count += 1
        heapq.heappush(self._timers, (self.now + delay, self._count, lambda: callback(*args)))

    def call_soon_threadsafe(self, callback: Callable[..., object], *args: Any) -> None:
        self._soon.append(lambda: callback(*args))

    def is_running(self) -> bool:
        return True

    def is_closed(self) -> bool:
        return False

    def advance(self, seconds: float) -> None:
        """Let time pass; the loop turns unless it is blocked."""
        end = self.now + seconds
        while not self.is_blocked and self._timers and self._timers[0][0] <= end:
            self.now, _, timer = heapq.heappop(self._timers)
            timer()
        self.now = end
        while not self.is_blocked and self._soon:
            with suppress(OSError):  # of the log: a loop goes on after an exception in a callback
                self._soon.pop(0)()


@dataclass
class Heartbeat:
    """The stream of a heartbeat whose other end has always sent something."""

    clock: Clock
    fault: Fault
    sent: list[float] = field(default_factory=list)
    is_closed: bool = False

    def send(self, data: bytes) -> int:
        self.sent.append(self.clock.now)
        self.fault.strike("send")
        return len(data)

    def receive_into(self, space: memoryview) -> int:
        self.fault.strike("receive")
        return 1

    def close(self) -> None:
        self.is_closed = True


class Thread:
    """In place of a thread: that of a log line runs at once, that of the watchdog never."""

    ident = None

    def __init__(self, fault: Fault, target: Callable[[], object]) -> None:
        self._fault = fault
        self._target = target

    def start(self) -> None:
        self._fault.strike("Thread.start")
        if getattr(self._target, "__name__", "") != "_run":
            with suppress(OSError):
                self._target()

    def join(self, timeout: float) -> None:
        """Return at once: nothing runs."""


class Bed:
    """A failure detector with all that surrounds it, and a fault.

    Attributes:
        lost: how each rank was reported lost.
        refusal: why the detector did not start.
    """

    refusal = ""

    def __init__(self, seed: int, living: int) -> None:
        self.chance = random.Random(seed)
        self.fault = Fault(self.chance)
        self.lost: dict[int, set[str]] = {rank: set() for rank in range(3)}
        self.clock = Clock()
        self.heartbeat = Heartbeat(self.clock, self.fault)
        self.process = subprocess.Popen(SLEEP)
        self.is_killed = False
        self._pids = {LIVING: living, KILLED: self.process.pid}
        cards = {rank: {"host": "here", "process": _identity(pid)} for rank, pid in self._pids.items()}
        # A process of this host that cannot be seen, as of another container, has a heartbeat, too.
        self._me = self.chance.choice((-1, 3))
        cards[AWAY] = {"host": "away", "process": ProcessId(1, 1, 1)}
        cards[self._me] = {"host": "here", "process": this_process()}
        self.hub = self._me if self._me < 0 else self.chance.choice((LIVING, KILLED))
        roster: Any = SimpleNamespace(
            record_loss=self._died, on_connection_broken=self._cut_off, gone=set(), suspected_ranks={LIVING, KILLED}
        )
        links = [self._link(rank) for rank in self._pids if self.hub in (self._me, rank)]
        control: Any = SimpleNamespace(links=links, hub=self.hub, send=lambda *_: None)
        context: Any = SimpleNamespace(
            rank=self._me, cards=cards, loop=self.clock, runtime=self.clock, closed=False, spawn=self._spawn,
            connect_heartbeat=mock.Mock(),
        )  # fmt: skip
        self.detector = FailureDetector(context, control, roster)

    def start(self) -> bool:
        """Start monitoring; return whether that was possible."""
        self.detector.attach(AWAY, self.heartbeat)  # type: ignore[arg-type]
        try:
            self.detector.start()
        except RendezvousError as error:
            self.refusal = str(error)
        return not self.refusal

    def round(self) -> None:
        """Let half a second pass; the heartbeat must not miss its turn."""
        self.clock.advance(ROUND)
        watchdog = self.detector._watchdog
        assert watchdog is not None
        watchdog._do_round()
        if not self.heartbeat.is_closed:
            assert self.heartbeat.sent[-1] == self.clock.now

    def step(self) -> None:
        """Do something in which processes are looked at."""
        rank = self.chance.choice((LIVING, KILLED))
        detector = self.detector
        what = self.chance.randrange(8)
        if what == 0:
            detector.on_broken_link(rank, "its connection broke")
        elif what == 1:
            detector.confirm_death(rank)
        elif what == 2:
            detector.check_process(rank)
        elif what == 3:
            detector.is_known_alive(rank)
            detector.state(rank)
        elif what == 4:
            detector.linked(self._link(rank))
        elif what == 5 and not self.is_killed:
            self.is_killed = True
            self.process.kill()
            os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOWAIT)
            if self.chance.random() < 0.5:
                self.process.wait()
        elif what == 6:
            self.clock.is_blocked = not self.clock.is_blocked
        self.clock.advance(self.chance.choice((0.0, LAST_WORDS, GRACE)))

    def watch(self) -> None:
        """Let the loop turn, and wait for all ranks, long enough for anything to be noticed."""
        self.clock.is_blocked = False
        for _ in range(int(2 * BLOCKED_AFTER / ROUND) + 8):
            self.detector.check_awaited()
            self.round()
        self.clock.advance(1.0)

    def close(self) -> None:
        """End the detector and the process."""
        self.detector.stop()
        self.process.kill()
        self.process.wait()

    def _link(self, rank: int) -> Any:
        def peer_process() -> PidFd | None:
            try:
                return PidFd(process.os.pidfd_open(self._pids[rank]))
            except OSError:
                return None

        return SimpleNamespace(peer=rank, peer_process=peer_process)

    def _died(self, rank: int, detail: str, notify: bool = True, how: str = "killed") -> None:
        self.lost[rank].add(how)

    def _cut_off(self, rank: int) -> None:
        self.lost[rank].add("cut off")

    def _spawn(self, coro: Any, name: str) -> None:
        coro.close()


def _identity(pid: int) -> ProcessId:
    with open(f"/proc/{pid}/stat", encoding="ascii") as file:
        started = int(file.read().rpartition(")")[2].split()[19])
    return ProcessId(this_process().namespace, pid, started)


@pytest.fixture(scope="module")
def living() -> Iterator[int]:
    """Return the number of a process that lives."""
    with subprocess.Popen(SLEEP) as process:
        yield process.pid
        process.kill()


def run(seed: int, living: int) -> None:
    """Let one fault strike at some time in the life of a detector, and check its reports."""
    bed = Bed(seed, living)
    fault = bed.fault
    fakes = SimpleNamespace(
        Thread=lambda target, **_: Thread(fault, target), Event=threading.Event, get_ident=threading.get_ident
    )
    try:
        with ExitStack() as patches:
            patches.enter_context(mock.patch("aiocoll.engine.failure.watchdog.threading", fakes))
            if fault.call in CALLS:
                patches.enter_context(replaced_call(CALLS[fault.call], fault.call, fault.around))
            if not bed.start():
                assert fault.call == "Thread.start"
                assert "cannot start its watchdog thread (can't start new thread)" in bed.refusal
                return
            for _ in range(12):
                bed.step()
                bed.detector.check_awaited()
                bed.round()
            bed.watch()
        silent = fault.call == "receive" and fault.number == errno.EAGAIN and fault.lasts
        assert not bed.heartbeat.is_closed or silent
        seen = KILLED in bed.detector._processes
        watched = bed.hub in (KILLED, bed._me)
    finally:
        bed.close()
    assert not bed.lost[LIVING] & {"killed", "stopped"}
    assert bed.is_killed or not bed.lost[KILLED] & {"killed", "stopped"}
    assert bed.lost[AWAY] <= ({"unreachable"} if silent else set())
    blind = fault.lasts and fault.call in ("open", "os.stat", "os.fstat", "select.poll")
    if bed.is_killed and seen and watched and not blind:
        assert "killed" in bed.lost[KILLED]


def test_fault_in_a_system_call_makes_no_living_rank_dead(living: int) -> None:
    for seed in range(100):
        run(seed, living)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(100, 5100, 500))
def test_fault_in_a_system_call_makes_no_living_rank_dead_in_5000_seeds(living: int, first: int) -> None:
    for seed in range(first, first + 500):
        run(seed, living)
