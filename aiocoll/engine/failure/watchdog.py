"""Watchdog thread, which runs even if the event loop is blocked: it sends heartbeats and checks other processes.

Twice a second it

- sends a byte on every heartbeat and receives one. A heartbeat is a connection to a rank whose process is not visible
  from here. It falls silent if the other process is stopped, its host is dead or the cable is cut, but not if only its
  loop is blocked;
- checks the processes of this host that the loop waits for;
- requests a sign of life from the loop. Without one, it logs the position of the blocked loop: for each source line
  the first time, then at growing intervals.

Only time in which this thread itself was running counts: a process that was stopped must not call other ranks silent.
Heartbeats come first in a round. The thread survives every other failure: of a log handler, of a thread that cannot be
started, of a file that cannot be opened.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import ssl
import sys
import threading
from collections import deque
from collections.abc import Callable, Collection
from functools import partial

from aiocoll.engine.failure.blocked import line, place, skip_package
from aiocoll.errors import RendezvousError
from aiocoll.log import RepeatLimiter, logger
from aiocoll.process import GONE, STOPPED, UNKNOWN
from aiocoll.transport.byte_stream import ByteStream

__all__ = ["Watchdog"]

#: Seconds between two rounds of checks: precise enough for deadlines of seconds. The two wake-ups per second of an idle
#: rank use 0.05 % of a core.
ROUND = 0.5
#: Seconds without a heartbeat after which a rank is unreachable (documented limit: 6 s). A loaded host, or a call that
#: holds the GIL, delays heartbeats by less.
UNREACHABLE_AFTER = 5.0
#: Seconds after which a stopped process is reported: 1.5 s before the documented limit of 6 s, to notify all ranks in
#: time.
STOPPED_AFTER = 4.5
#: Seconds after which a warning is logged that the loop has not responded, or that this thread could not run.
BLOCKED_AFTER = 1.0
#: Number of the longest blocked times that are kept for dumps.
BLOCKS = 4
#: Seconds for which processes are checked after a request of the event loop. While operations wait, the loop sends such
#: a request once a second.
ATTENTION = 2.5
#: Maximum bytes per read of a heartbeat connection: more than an hour of unread heartbeats.
READ_NBYTES = 8192
#: Maximum seconds to wait for the end of the watchdog thread. The thread ends immediately unless the host hangs.
JOIN_TIMEOUT = 1.0

#: Error numbers of problems in this process or its host, which do not show that a connection has ended.
_OWN_ERRORS = frozenset(
    {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS, errno.EACCES, errno.EPERM, errno.EIO, errno.EINTR}
)

STOOD_STILL = (
    "rank %d: for about %.1f s no other thread of this process could run (it used %.1f s of CPU time): it was stopped, "
    "or one call held the GIL%s"
)


class _Heartbeat:
    """A connection over which two ranks prove to each other that they are alive."""

    __slots__ = ("silence", "stream")

    def __init__(self, stream: ByteStream) -> None:
        self.stream = stream
        self.silence = 0.0

    def exchange(self, counted: float, received: memoryview) -> bool:
        """Send a heartbeat, and receive heartbeats into the buffer `received`. Return False if the connection ended."""
        try:
            self.stream.send(b"\0")
        except OSError as error:  # BlockingIOError: the peer has not read its heartbeats for hours
            if _has_ended(error):
                return False
        try:
            if not self.stream.receive_into(received):
                return False
            self.silence = 0.0
        except BlockingIOError:
            self.silence += counted
        except OSError as error:
            # If this process caused the error, the connection has not ended.
            return not _has_ended(error)
        return True


def _has_ended(error: OSError) -> bool:
    """Return whether a socket error shows that the connection has ended."""
    if isinstance(error, ssl.SSLError):
        return True
    return not isinstance(error, BlockingIOError | InterruptedError) and error.errno not in _OWN_ERRORS


class Watchdog:
    """The watchdog thread of one endpoint. It reports to the event loop through `call_soon_threadsafe`.

    Args:
        rank: this rank in the job.
        loop: the monitored loop, which runs in the thread that makes the watchdog.
        clock: real seconds, read from any thread.
        state: returns the state of a rank's process, as `aiocoll.process.state` does; called in the watchdog thread.
        lost: loop callback for a lost rank, with the way it was lost and the seconds of silence.
        ended: loop callback for the rank of a heartbeat whose connection has ended.
    """

    def __init__(
        self,
        rank: int,
        loop: asyncio.AbstractEventLoop,
        clock: Callable[[], float],
        state: Callable[[int], str],
        lost: Callable[[int, str, float], None],
        ended: Callable[[int], None],
    ) -> None:
        self._rank = rank
        self._loop = loop
        self._clock = clock
        self._state = state
        self._lost = lost
        self._ended = ended
        self._watched_thread = threading.get_ident()
        self._wake = threading.Event()
        self._ending = False
        self._arriving: deque[tuple[int, ByteStream]] = deque()
        self._heartbeats: dict[int, _Heartbeat] = {}
        self._received = memoryview(bytearray(READ_NBYTES))
        self._observed: Collection[int] = ()
        self._attentive_until = 0.0
        self._stopped: dict[int, float] = {}
        self._has_sign = True
        self._silent_seconds = 0.0
        self._asked_at = 0.0
        self._blocked = False
        self._block_place = ""
        self._longest_blocks: tuple[tuple[float, float, str], ...] = ()
        self._is_block_logged = False
        self._repeats = RepeatLimiter()
        self._round_at = clock()
        self._cpu = _cpu_time()
        self._trouble = ""
        self._log_thread: threading.Thread | None = None
        self._thread = threading.Thread(target=self._run, name=f"aiocoll watchdog {rank}", daemon=True)

    def start(self) -> None:
        """Start the thread.

        Raises:
            RendezvousError: this process may start no more threads.
        """
        try:
            self._thread.start()
        except RuntimeError as error:
            self._ending = True
            self._close()
            raise RendezvousError(
                f"rank {self._rank} cannot start its watchdog thread ({error}); allow this user or container more "
                "threads (ulimit -u, pids.max)"
            ) from error

    def stop(self) -> None:
        """End the thread, which closes the heartbeat connections."""
        self._ending = True
        self._wake.set()
        if self._thread.ident is not None:
            self._thread.join(JOIN_TIMEOUT)
        if self._log_thread is not None:
            self._log_thread.join(JOIN_TIMEOUT)

    def add_heartbeat(self, rank: int, stream: ByteStream) -> None:
        """Exchange heartbeats with `rank` on `stream`, which belongs to the thread from now on."""
        if self._ending:
            stream.close()
        self._arriving.append((rank, stream))
        self._wake.set()

    def observe(self, ranks: Collection[int]) -> None:
        """Check for `ATTENTION` seconds whether the processes of these ranks still exist."""
        late = self._clock() > self._attentive_until
        self._observed = ranks
        self._attentive_until = self._clock() + ATTENTION
        if late:
            self._wake.set()

    def silence(self, rank: int) -> float | None:
        """Return the seconds since the last heartbeat of `rank`; None if there is no heartbeat connection."""
        heartbeat = self._heartbeats.get(rank)
        return None if heartbeat is None else heartbeat.silence

    def blocked(self) -> tuple[float, str] | None:
        """Return the seconds since the loop's last response, and its source line; None if the loop is not blocked.

        Any thread may call this.
        """
        if self._has_sign or self._silent_seconds < BLOCKED_AFTER:
            return None
        frame = sys._current_frames().get(self._watched_thread)
        if self._watched_thread == threading.get_ident():  # called from a signal handler: skip the handler's own frames
            frame = skip_package(frame)
        return self._clock() - self._asked_at, place(frame)

    def longest_blocks(self) -> list[tuple[float, float, str]]:
        """Return the longest times that the loop was blocked and has run again since, at most `BLOCKS`.

        Any thread may call this.

        Returns:
            For each time: how many seconds ago it began, its duration in seconds, and the source line.
        """
        now = self._clock()
        # The watchdog thread may not have recorded yet that the loop runs again.
        blocks = self._with_block(now) if self._blocked and self._has_sign else self._longest_blocks
        return [(now - began, seconds, where) for began, seconds, where in blocks]

    def _with_block(self, now: float) -> tuple[tuple[float, float, str], ...]:
        """Return the longest blocked times, with the one that has just ended."""
        ended = (self._asked_at, now - self._asked_at, self._block_place)
        return tuple(sorted((*self._longest_blocks, ended), key=lambda block: block[1])[-BLOCKS:])

    # -- in the watchdog thread

    def _run(self) -> None:
        self._round_at, self._cpu = self._clock(), _cpu_time()
        try:
            while not self._ending and not self._loop.is_closed():
                self._wake.wait(ROUND)
                self._wake.clear()
                self._do_round()
        finally:
            self._close()

    def _do_round(self) -> None:
        """Run all checks of one round. If a check fails, run the others nevertheless."""
        before, now = self._round_at, self._clock()
        self._round_at = now
        counted = min(now - before, ROUND)
        self._exchange_heartbeats(counted)
        self._attempt(self._check_processes, now, counted)
        self._attempt(self._check_loop, now, counted)
        self._attempt(self._check_itself, now - before)

    def _attempt(self, part: Callable[..., None], *args: float) -> None:
        try:
            part(*args)
        except Exception as error:
            trouble, self._trouble = self._trouble, repr(error)
            if trouble != self._trouble:  # log an error only once, although it may repeat in every round
                self._log(logging.WARNING, "rank %d: its watchdog continues after an error: %r", self._rank, error)

    def _close(self) -> None:
        for rank in list(self._heartbeats):
            self._drop(rank)
        while self._arriving:
            self._arriving.popleft()[1].close()

    def _exchange_heartbeats(self, counted: float) -> None:
        while self._arriving:
            rank, stream = self._arriving.popleft()
            self._drop(rank)
            self._heartbeats[rank] = _Heartbeat(stream)
        for rank, heartbeat in list(self._heartbeats.items()):
            self._attempt(partial(self._exchange_heartbeat, rank, heartbeat), counted)

    def _exchange_heartbeat(self, rank: int, heartbeat: _Heartbeat, counted: float) -> None:
        if not heartbeat.exchange(counted, self._received):
            self._drop(rank)
            self._call_in_loop(self._ended, rank)
        elif heartbeat.silence >= UNREACHABLE_AFTER:
            self._drop(rank)
            self._call_in_loop(self._lost, rank, "unreachable", heartbeat.silence)

    def _drop(self, rank: int) -> None:
        heartbeat = self._heartbeats.pop(rank, None)
        if heartbeat is not None:
            heartbeat.stream.close()

    def _check_processes(self, now: float, counted: float) -> None:
        if now > self._attentive_until:
            self._stopped.clear()
            return
        for rank in self._observed:
            found = self._state(rank)
            if found == STOPPED:
                since = self._stopped[rank] = self._stopped.get(rank, -counted) + counted
                if since >= STOPPED_AFTER:
                    self._call_in_loop(self._lost, rank, "stopped", since)
            elif found != UNKNOWN:
                self._stopped.pop(rank, None)
                if found == GONE:
                    self._call_in_loop(self._lost, rank, "killed", 0.0)

    def _check_loop(self, now: float, counted: float) -> None:
        """Request a response from the loop, and log once if there is none."""
        if self._has_sign or not self._loop.is_running():
            if self._blocked:
                self._longest_blocks = self._with_block(now)
            blocked, asked_at, self._blocked = self._blocked, self._asked_at, False
            self._has_sign, self._silent_seconds, self._asked_at = False, 0.0, now
            self._call_in_loop(self._on_sign_of_life)
            if blocked and self._is_block_logged:
                self._log(logging.INFO, "rank %d: the event loop runs again, after %.1f s", self._rank, now - asked_at)
            return
        self._silent_seconds += counted
        if self._silent_seconds >= BLOCKED_AFTER and not self._blocked:
            self._blocked = True
            frame = sys._current_frames().get(self._watched_thread)
            self._block_place = place(frame)
            repeated = self._repeats.admit(line(frame), now)
            self._is_block_logged = repeated is not None
            if self._is_block_logged:
                self._log(
                    logging.WARNING,
                    "rank %d: the event loop has been blocked for %.1f s, at %s: other ranks may wait for it; "
                    "run such work with asyncio.to_thread%s",
                    self._rank,
                    now - self._asked_at,
                    self._block_place,
                    repeated,
                )

    def _check_itself(self, elapsed: float) -> None:
        """Log if the watchdog thread itself could not run for a while."""
        before, self._cpu = self._cpu, _cpu_time()
        if elapsed >= ROUND + BLOCKED_AFTER:
            repeated = self._repeats.admit(STOOD_STILL, self._round_at)
            if repeated is not None:
                self._log(logging.WARNING, STOOD_STILL, self._rank, elapsed, self._cpu - before, repeated)

    def _on_sign_of_life(self) -> None:
        self._has_sign = True

    def _log(self, level: int, text: str, *args: object) -> None:
        """Log from another thread, because a log handler may wait for the blocked loop and must not delay heartbeats.

        If no thread can be started, the loop logs the text when it runs again.
        """
        log = partial(logger.log, level, text, *args, extra={"rank": self._rank})
        try:
            speaker = threading.Thread(target=log, name=f"aiocoll warning {self._rank}", daemon=True)
            speaker.start()
        except (MemoryError, RuntimeError):
            self._call_in_loop(log)
        else:
            self._log_thread = speaker

    def _call_in_loop(self, callback: Callable[..., object], *args: object) -> None:
        try:
            self._loop.call_soon_threadsafe(callback, *args)
        except RuntimeError:
            self._ending = True  # the loop has been closed, so this thread ends


def _cpu_time() -> float:
    times = os.times()
    return times.user + times.system
