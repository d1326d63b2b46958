"""Time and randomness: every clock reading, timer and random byte of the library goes through a `Runtime`.

A group on a virtual clock is the same code with another `Runtime` (and a loop whose time is virtual),
so nothing else in the package may import `time`, `random` or `os.urandom`; a test checks that.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any
from weakref import WeakSet

__all__ = ["BUDGET", "Runtime", "random_bytes", "refuse_trio", "running_loop"]

#: Longest time one callback moves or reduces data before it puts the rest off, in seconds: with what a last piece
#: takes on top, no callback holds the loop for a millisecond.
BUDGET = 300e-6
#: Two readings of one clock may differ by so many seconds: a loop may return the time at which its iteration began.
_SAME_CLOCK = 1.0


_NO_LOOP = (
    "no asyncio event loop runs here: aiocoll is called from coroutines that asyncio.run(main()), or uvloop, runs"
)
_TRIO = (
    "trio runs here, and aiocoll runs on asyncio's loops only, uvloop's among them: run the ranks in a thread, by "
    "`await trio.to_thread.run_sync(asyncio.run, main())`; with anyio choose the backend asyncio, in tests by a "
    'fixture anyio_backend that returns "asyncio"'
)


def random_bytes(n: int) -> bytes:
    """Return random bytes where there is no loop whose `Runtime` would give them."""
    return os.urandom(n)


class Runtime:
    """Time and randomness of one event loop.

    Args:
        loop: the loop.
        ticks: real seconds, to bound the work done in one callback; never for a decision peers can see.
        latency: seconds a frame from one rank to another of this loop takes, asked per frame; None for the next turn.
    """

    __slots__ = ("__weakref__", "call_later", "call_soon", "due", "latency", "loop", "stamp", "thread", "ticks", "time")

    #: An await may poll before it suspends; off where time is virtual, since polling takes no virtual time.
    may_spin = True
    #: Ranks may be reached through sockets; off where time is virtual, since the kernel's clock does not wait for it.
    may_listen = True
    #: Long calculations run in a thread; off where time is virtual, since the virtual clock would not wait for them.
    may_thread = True

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        ticks: Callable[[], float] = time.perf_counter,
        latency: Callable[[int, int], float] | None = None,
    ) -> None:
        self.loop = loop
        self.ticks = ticks
        self.latency = latency
        self.thread = threading.get_ident()
        """The id of the thread that runs the loop; 0 in a forked child, which must not use the loop."""
        self.time: Callable[[], float] = loop.time
        """Seconds on the clock that timers, timeouts and error messages use."""
        self.stamp = self.time
        """Seconds on the clock of `time`, at full resolution: uvloop reads milliseconds, once an iteration."""
        if abs(time.monotonic() - loop.time()) < _SAME_CLOCK:
            self.stamp = time.monotonic
        self.call_soon: Callable[..., asyncio.Handle] = loop.call_soon
        self.call_later: Callable[..., asyncio.TimerHandle] = loop.call_later
        self.due: list[Callable[[], object]] = []
        """Callbacks to be called before this iteration of the loop ends, see `before_turn_ends`; one list, of which
        native code reads the length."""
        _runtimes.add(self)

    @property
    def is_real(self) -> bool:
        """Whether its clocks are those of the system, which code in C may read, too."""
        return self.may_spin and self.stamp is time.monotonic and self.ticks is time.perf_counter

    @staticmethod
    def of(loop: asyncio.AbstractEventLoop) -> Runtime:
        """Return the runtime of `loop`: its own if it brings one (a virtual clock does), else the real one."""
        made: Runtime = getattr(loop, "aiocoll_runtime", Runtime)(loop)
        return made

    def before_turn_ends(self, callback: Callable[[], object]) -> None:
        """Call `callback` at the end of this iteration of the loop, or earlier, by `settle`."""
        if not self.due:
            self.call_soon(self.settle)
        self.due.append(callback)

    def settle(self) -> None:
        """Call now the callbacks that are due before this iteration ends."""
        due = self.due[:]
        self.due.clear()
        for callback in due:
            callback()

    def wall(self) -> float:
        """Return the seconds since 1970, to align records of several hosts; virtual where time is virtual."""
        return time.time() if self.stamp is time.monotonic else self.time()

    def random_bytes(self, n: int) -> bytes:
        """Return `n` bytes fit for keys and nonces."""
        return random_bytes(n)

    def give_way(self) -> None:
        """Let other threads have the interpreter for a moment, 50 µs and what it takes to get it back.

        Python takes the interpreter from a thread that has it for 5 ms. A loop that always has a callback to run, none
        as long as that, lets go of it in between, but has it again before another thread has woken up.
        """
        time.sleep(50e-6)

    async def sleep(self, seconds: float) -> None:
        """Suspend for `seconds` of this runtime's time."""
        await asyncio.sleep(seconds)

    def create_task(self, coro: Any, name: str) -> asyncio.Task[Any]:
        """Start a background task; the caller keeps the reference.

        Its first step is in a later turn of the loop, also where the program's tasks are eager: the caller may be in
        the midst of something.
        """
        return asyncio.Task(coro, loop=self.loop, name=name)


def running_loop() -> asyncio.AbstractEventLoop:
    """Return the asyncio event loop that runs here.

    Raises:
        RuntimeError: there is none, or the loop that runs is another library's.
    """
    loop = asyncio._get_running_loop()
    if loop is None:
        refuse_trio()
        raise RuntimeError(_NO_LOOP)
    return loop


def refuse_trio() -> None:
    """Say what to do where trio runs, before anything else is found to be missing: `RuntimeError`."""
    if _in_trio():
        raise RuntimeError(_TRIO)


def _in_trio() -> bool:
    trio = sys.modules.get("trio")
    try:
        return trio is not None and trio.lowlevel.current_task() is not None
    except RuntimeError:
        return False


#: All runtimes of this process. Reading the pid at every call instead, a system call, took 6 % of a small collective.
_runtimes: WeakSet[Runtime] = WeakSet()


def _forked() -> None:
    for runtime in list(_runtimes):
        runtime.thread = 0


os.register_at_fork(after_in_child=_forked)
