"""A thread that runs even if the event loop is blocked: it proves that this process lives, and checks other processes.

Twice a second it

- sends a byte on every heartbeat, a connection to a rank whose process is not visible from here, and receives: a
  heartbeat falls silent if the other process is stopped, its host is dead or the cable is cut, but not if only its
  loop is blocked;
- checks the processes of this host that the loop waits for;
- asks the loop for a sign of life, and logs where the loop is blocked if none comes.

Only time in which this thread itself was running counts: a process that was stopped must not call others silent.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping

from aiocoll.engine.failure.blocked import place
from aiocoll.log import logger
from aiocoll.process import GONE, STOPPED, ProcessId, state
from aiocoll.transport.byte_stream import ByteStream

__all__ = ["Watchdog"]

#: Seconds between two rounds: precise enough for deadlines of seconds. An idle rank, with two wake-ups of its loop,
#: takes 0.05 % of a core.
ROUND = 0.5
#: Seconds a heartbeat may be silent: a loaded host, or a call that holds the GIL, delays it by less (contract: 6 s).
UNREACHABLE_AFTER = 5.0
#: Seconds a process may be stopped: leaves 1.5 s of the contract's 6 to notice the stop and to tell all ranks.
STOPPED_AFTER = 4.5
#: Seconds without a sign of life from the loop, or of this thread, that are reported.
BLOCKED_AFTER = 1.0
#: Seconds for which processes are checked after the loop has asked for it, which it does once a second.
ATTENTION = 2.5
#: Bytes taken from a heartbeat at once: all that gather in an hour of not listening.
GULP = 8192
#: Seconds to wait for the end of the thread; it takes none, unless the host hangs.
FAREWELL = 1.0

STOOD_STILL = (
    "rank %d: for about %.1f s no other thread of this process could run (it used %.1f s of CPU time): it was stopped, "
    "or one call held the GIL"
)


class _Heartbeat:
    """A connection over which two ranks prove to each other that they are alive."""

    __slots__ = ("silence", "stream")

    def __init__(self, stream: ByteStream) -> None:
        self.stream = stream
        self.silence = 0.0

    def exchange(self, counted: float, received: memoryview) -> bool:
        """Send, and receive into `received`, whose content is ignored; False if the connection has ended."""
        self.silence += counted
        try:
            self.stream.send(b"\0")
        except BlockingIOError:
            pass  # it has not been read for hours
        except OSError:
            return False
        try:
            if not self.stream.receive_into(received):
                return False
            self.silence = 0.0
        except BlockingIOError:
            pass
        except OSError:
            return False
        return True


class Watchdog:
    """The thread of one endpoint. It reports through `call_soon_threadsafe`.

    Args:
        rank: this rank in the job.
        loop: the loop it monitors; running in the thread that makes the watchdog.
        clock: real seconds, read from any thread.
        lost: called in the loop with a rank, how it is lost and for how many seconds.
        ended: called in the loop with the rank of a heartbeat whose connection has ended.
    """

    def __init__(
        self,
        rank: int,
        loop: asyncio.AbstractEventLoop,
        clock: Callable[[], float],
        lost: Callable[[int, str, float], None],
        ended: Callable[[int], None],
    ) -> None:
        self._rank = rank
        self._loop = loop
        self._clock = clock
        self._lost = lost
        self._ended = ended
        self._watched_thread = threading.get_ident()
        self._wake = threading.Event()
        self._ending = False
        self._arriving: deque[tuple[int, ByteStream]] = deque()
        self._heartbeats: dict[int, _Heartbeat] = {}
        self._received = memoryview(bytearray(GULP))
        self._observed: Mapping[int, ProcessId] = {}
        self._attentive_until = 0.0
        self._stopped: dict[int, float] = {}
        self._sign = True
        self._signless = 0.0
        self._asked_at = 0.0
        self._blocked = False
        self._speaker: threading.Thread | None = None
        self._thread = threading.Thread(target=self._run, name=f"aiocoll watchdog {rank}", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread, close the heartbeats."""
        self._ending = True
        self._wake.set()
        self._thread.join(FAREWELL)
        if self._speaker is not None:
            self._speaker.join(FAREWELL)

    def add_heartbeat(self, rank: int, stream: ByteStream) -> None:
        """Exchange heartbeats with `rank` on `stream`, which belongs to the thread from now on."""
        if self._ending:
            stream.close()
        self._arriving.append((rank, stream))
        self._wake.set()

    def observe(self, processes: Mapping[int, ProcessId]) -> None:
        """Check these `processes`, by rank, for a while."""
        late = self._clock() > self._attentive_until
        self._observed = processes
        self._attentive_until = self._clock() + ATTENTION
        if late:
            self._wake.set()

    def silence(self, rank: int) -> float | None:
        """Return for how many seconds the heartbeat of `rank` has been silent; None if there is none."""
        heartbeat = self._heartbeats.get(rank)
        return None if heartbeat is None else heartbeat.silence

    def blocked(self) -> tuple[float, str] | None:
        """Return for how many seconds the loop has given no sign of life, and where it is; None if it has.

        Any thread may ask.
        """
        if self._sign or self._signless < BLOCKED_AFTER:
            return None
        return self._clock() - self._asked_at, place(sys._current_frames().get(self._watched_thread))

    # -- in the thread

    def _run(self) -> None:
        before, cpu = self._clock(), _cpu_time()
        while not self._ending and not self._loop.is_closed():
            self._wake.wait(ROUND)
            self._wake.clear()
            now, used = self._clock(), _cpu_time()
            counted = min(now - before, ROUND)
            if now - before >= ROUND + BLOCKED_AFTER:
                self._say(STOOD_STILL, self._rank, now - before, used - cpu)
            before, cpu = now, used
            while self._arriving:
                rank, stream = self._arriving.popleft()
                self._drop(rank)
                self._heartbeats[rank] = _Heartbeat(stream)
            self._exchange_heartbeats(counted)
            self._look_at_processes(now, counted)
            self._watch_loop(now, counted)
        for rank in list(self._heartbeats):
            self._drop(rank)
        for _, stream in self._arriving:
            stream.close()

    def _exchange_heartbeats(self, counted: float) -> None:
        for rank, heartbeat in list(self._heartbeats.items()):
            if not heartbeat.exchange(counted, self._received):
                self._drop(rank)
                self._tell(self._ended, rank)
            elif heartbeat.silence >= UNREACHABLE_AFTER:
                self._drop(rank)
                self._tell(self._lost, rank, "unreachable", heartbeat.silence)

    def _drop(self, rank: int) -> None:
        heartbeat = self._heartbeats.pop(rank, None)
        if heartbeat is not None:
            heartbeat.stream.close()

    def _look_at_processes(self, now: float, counted: float) -> None:
        if now > self._attentive_until:
            self._stopped.clear()
            return
        for rank, process in self._observed.items():
            found = state(process)
            if found == STOPPED:
                since = self._stopped[rank] = self._stopped.get(rank, -counted) + counted
                if since >= STOPPED_AFTER:
                    self._tell(self._lost, rank, "stopped", since)
            else:
                self._stopped.pop(rank, None)
                if found == GONE:
                    self._tell(self._lost, rank, "killed", 0.0)

    def _watch_loop(self, now: float, counted: float) -> None:
        """Ask the loop for a sign of life; log once if none comes."""
        if self._sign or not self._loop.is_running():
            if self._blocked:
                blocked = now - self._asked_at
                logger.info(
                    "rank %d: the event loop turns again, after %.1f s", self._rank, blocked, extra={"rank": self._rank}
                )
            self._sign = self._blocked = False
            self._signless = 0.0
            self._asked_at = now
            self._tell(self._give_sign)
            return
        self._signless += counted
        if self._signless >= BLOCKED_AFTER and not self._blocked:
            self._blocked = True
            self._say(
                "rank %d: the event loop has been blocked for %.1f s, at %s: other ranks may wait for it; "
                "asyncio.to_thread keeps such work off the loop",
                self._rank,
                now - self._asked_at,
                place(sys._current_frames().get(self._watched_thread)),
            )

    def _give_sign(self) -> None:
        self._sign = True

    def _say(self, text: str, *args: object) -> None:
        """Log a warning from a separate thread: a handler may wait for what blocks the loop; heartbeats must not."""
        self._speaker = threading.Thread(
            target=logger.warning,
            args=(text, *args),
            kwargs={"extra": {"rank": self._rank}},
            name=f"aiocoll warning {self._rank}",
            daemon=True,
        )
        self._speaker.start()

    def _tell(self, callback: Callable[..., None], *args: object) -> None:
        try:
            self._loop.call_soon_threadsafe(callback, *args)
        except RuntimeError:
            self._ending = True  # the loop has been closed


def _cpu_time() -> float:
    times = os.times()
    return times.user + times.system
