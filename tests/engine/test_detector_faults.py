"""Fault injection into the failure detector: a failing system call never makes a living rank look dead.

The watchdog thread does not run here. The test calls each round on its own clock, so that a seed repeats its run.
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

from ..internals import replace_call

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes can be observed on Linux only")

ERRNOS = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EACCES, errno.EIO, errno.EAGAIN, errno.EINTR)
#: Functions that the failure detector and its watchdog thread call, with the module that calls each function.
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
#: Calls that fail inside the stand-ins `Thread` and `Heartbeat`.
INSIDE = ("Thread.start", "send", "receive")
#: The other ranks: a living process on this host, a process on another host, and a killed process on this host.
LIVING, AWAY, KILLED = 0, 1, 2
SLEEP = ["sleep", "3600"]


class Fault:
    """A function call that fails once, or at every use from its first failure on."""

    def __init__(self, chance: random.Random) -> None:
        self.call = chance.choice((*CALLS, *INSIDE))
        self.number = chance.choice(ERRNOS)
        self.lasts = chance.random() < 0.5
        self._first = chance.randrange(1, 40) if chance.random() < 0.7 else 1
        self._calls = 0

    def fail_if_due(self, call: str) -> None:
        """Count a call, and raise an error if this call must fail."""
        if call != self.call:
            return
        self._calls += 1
        if self._calls == self._first or (self.lasts and self._calls > self._first):
            if call == "Thread.start":
                raise RuntimeError("can't start new thread")
            raise OSError(self.number, os.strerror(self.number))

    def around(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that calls `original`, or raises the error if this fault is due."""

        def call(*args: Any, **named: Any) -> Any:
            self.fail_if_due(self.call)
            return original(*args, **named)

        return call


class Clock:
    """A stand-in for the clock, the timers and the event loop of this rank."""

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
        """Move the clock forward; timers and callbacks run unless the loop is blocked."""
        end = self.now + seconds
        while not self.is_blocked and self._timers and self._timers[0][0] <= end:
            self.now, _, timer = heapq.heappop(self._timers)
            timer()
        self.now = end
        while not self.is_blocked and self._soon:
            with suppress(OSError):  # a failing log raises; a real loop continues after an exception in a callback
                self._soon.pop(0)()


@dataclass
class Heartbeat:
    """A heartbeat stream that always has received bytes."""

    clock: Clock
    fault: Fault
    sent: list[float] = field(default_factory=list)
    is_closed: bool = False

    def send(self, data: bytes) -> int:
        self.sent.append(self.clock.now)
        self.fault.fail_if_due("send")
        return len(data)

    def receive_into(self, space: memoryview) -> int:
        self.fault.fail_if_due("receive")
        return 1

    def close(self) -> None:
        self.is_closed = True


class Thread:
    """A stand-in for `threading.Thread` that runs the log thread at once, and never runs the watchdog thread."""

    ident = None

    def __init__(self, fault: Fault, target: Callable[[], object]) -> None:
        self._fault = fault
        self._target = target

    def start(self) -> None:
        self._fault.fail_if_due("Thread.start")
        if getattr(self._target, "__name__", "") != "_run":
            with suppress(OSError):
                self._target()

    def join(self, timeout: float) -> None:
        """Return at once, since no thread runs."""


class DetectorSetup:
    """A failure detector with stand-ins for its surroundings, and one fault.

    Attributes:
        lost: the kinds of loss reported for each rank.
        refusal: the reason why the detector did not start.
    """

    refusal = ""

    def __init__(self, seed: int, living_pid: int) -> None:
        self.chance = random.Random(seed)
        self.fault = Fault(self.chance)
        self.lost: dict[int, set[str]] = {rank: set() for rank in range(3)}
        self.clock = Clock()
        self.heartbeat = Heartbeat(self.clock, self.fault)
        self.process = subprocess.Popen(SLEEP)
        self.is_killed = False
        self._pids = {LIVING: living_pid, KILLED: self.process.pid}
        cards = {rank: {"host": "here", "process": _identity(pid)} for rank, pid in self._pids.items()}
        self._me = self.chance.choice((-1, 3))
        # Processes that this rank cannot see have a heartbeat: on other hosts, or in other containers of this host.
        cards[AWAY] = {"host": "away", "process": ProcessId(1, 1, 1)}
        cards[self._me] = {"host": "here", "process": this_process()}
        self.hub = self._me if self._me < 0 else self.chance.choice((LIVING, KILLED))
        roster: Any = SimpleNamespace(
            record_loss=self._on_death, on_connection_broken=self._cut_off, gone=set(), suspected_ranks={LIVING, KILLED}
        )
        links = [self._link(rank) for rank in self._pids if self.hub in (self._me, rank)]
        control: Any = SimpleNamespace(links=links, hub=self.hub, send=lambda *_: None)
        context: Any = SimpleNamespace(
            rank=self._me, cards=cards, loop=self.clock, runtime=self.clock, closed=False, spawn=self._spawn,
            connect_heartbeat=mock.Mock(),
        )  # fmt: skip
        self.detector = FailureDetector(context, control, roster)

    def start(self) -> bool:
        """Start the detector; return whether it has started."""
        self.detector.attach(AWAY, self.heartbeat)  # type: ignore[arg-type]
        try:
            self.detector.start()
        except RendezvousError as error:
            self.refusal = str(error)
        return not self.refusal

    def round(self) -> None:
        """Do one watchdog round of half a second, and check that it sends the heartbeat."""
        self.clock.advance(ROUND)
        watchdog = self.detector._watchdog
        assert watchdog is not None
        watchdog._do_round()
        if not self.heartbeat.is_closed:
            assert self.heartbeat.sent[-1] == self.clock.now

    def step(self) -> None:
        """Cause a random event that makes the detector check a process."""
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

    def finish_detection(self) -> None:
        """Unblock the loop, and do enough rounds for the detector to notice every loss."""
        self.clock.is_blocked = False
        for _ in range(int(2 * BLOCKED_AFTER / ROUND) + 8):
            self.detector.check_awaited()
            self.round()
        self.clock.advance(1.0)

    def close(self) -> None:
        """Stop the detector and kill the process."""
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

    def _on_death(self, rank: int, detail: str, notify: bool = True, how: str = "killed") -> None:
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
def living_pid() -> Iterator[int]:
    """Yield the pid of a living process."""
    with subprocess.Popen(SLEEP) as process:
        yield process.pid
        process.kill()


def run(seed: int, living_pid: int) -> None:
    """Inject one fault at a random time in the life of a detector, and check its reports."""
    setup = DetectorSetup(seed, living_pid)
    fault = setup.fault
    fakes = SimpleNamespace(
        Thread=lambda target, **_: Thread(fault, target), Event=threading.Event, get_ident=threading.get_ident
    )
    try:
        with ExitStack() as patches:
            patches.enter_context(mock.patch("aiocoll.engine.failure.watchdog.threading", fakes))
            if fault.call in CALLS:
                patches.enter_context(replace_call(CALLS[fault.call], fault.call, fault.around))
            if not setup.start():
                assert fault.call == "Thread.start"
                assert "cannot start its watchdog thread (can't start new thread)" in setup.refusal
                return
            for _ in range(12):
                setup.step()
                setup.detector.check_awaited()
                setup.round()
            setup.finish_detection()
        silent = fault.call == "receive" and fault.number == errno.EAGAIN and fault.lasts
        assert not setup.heartbeat.is_closed or silent
        seen = KILLED in setup.detector._processes
        watched = setup.hub in (KILLED, setup._me)
    finally:
        setup.close()
    assert not setup.lost[LIVING] & {"killed", "stopped"}
    assert setup.is_killed or not setup.lost[KILLED] & {"killed", "stopped"}
    assert setup.lost[AWAY] <= ({"unreachable"} if silent else set())
    blind = fault.lasts and fault.call in ("open", "os.stat", "os.fstat", "select.poll")
    if setup.is_killed and seen and watched and not blind:
        assert "killed" in setup.lost[KILLED]


def test_failing_system_call_of_the_detector_never_makes_a_living_rank_dead(living_pid: int) -> None:
    for seed in range(100):
        run(seed, living_pid)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(100, 5100, 500))
def test_failing_system_call_of_the_detector_never_makes_a_living_rank_dead_in_5000_seeds(
    living_pid: int, first: int
) -> None:
    for seed in range(first, first + 500):
        run(seed, living_pid)
