"""Time and randomness: every clock reading, timer and random byte of the library comes from a `Runtime`.

A group on a virtual clock is the same code with another `Runtime`, and a loop with virtual time. So no other module of
the package may import `time`, `random` or `os.urandom`; a test checks that.
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

#: Seconds after which a callback that moves or reduces data defers the rest to a later loop iteration. Even with the
#: piece in progress at that time, the callback blocks the loop for less than a millisecond.
BUDGET = 300e-6
#: Seconds by which two readings of one clock may differ, since a loop may return the time when its iteration began.
_SAME_CLOCK = 1.0


_NO_LOOP = "no asyncio event loop is running; call aiocoll from a coroutine that asyncio.run(main()) or uvloop runs"
_TRIO = (
    "trio is running, but aiocoll needs an event loop of asyncio or uvloop; run the ranks in a thread with "
    "`await trio.to_thread.run_sync(asyncio.run, main())`; with anyio, choose the asyncio backend, in tests with a "
    'fixture anyio_backend that returns "asyncio"'
)


def random_bytes(n: int) -> bytes:
    """Return random bytes for code that runs without an event loop, and so without a `Runtime`."""
    return os.urandom(n)


class Runtime:
    """Clocks, timers and random bytes for one event loop.

    Args:
        loop: the event loop.
        ticks: real seconds, to limit the work of one callback. Must not affect decisions that peers can observe.
        latency: returns the seconds that a frame takes between two ranks of this loop, called per frame; None to
            deliver frames in the next iteration.
    """

    __slots__ = ("__weakref__", "call_later", "call_soon", "due", "latency", "loop", "stamp", "thread", "ticks", "time")

    #: True if an await may poll before it suspends. False for virtual time, since polling takes no virtual time.
    may_spin = True
    #: True if ranks may use sockets. False for virtual time, since the kernel's clock does not wait for it.
    may_listen = True
    #: True if long calculations run in a thread. False for virtual time, since the virtual clock does not wait for
    #: threads.
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
        """Id of the thread that runs the loop; 0 in a forked child, which must not use the loop."""
        self.time: Callable[[], float] = loop.time
        """Seconds on the clock that timers, timeouts and error messages use."""
        self.stamp = self.time
        """Seconds on the clock of `time`, at full resolution.

        The time of uvloop has milliseconds, read once per iteration.
        """
        if abs(time.monotonic() - loop.time()) < _SAME_CLOCK:
            self.stamp = time.monotonic
        self.call_soon: Callable[..., asyncio.Handle] = loop.call_soon
        self.call_later: Callable[..., asyncio.TimerHandle] = loop.call_later
        self.due: list[Callable[[], object]] = []
        """Callbacks to be called before this loop iteration ends, see `before_turn_ends`.

        Native code reads the length of this list object.
        """
        _runtimes.add(self)

    @property
    def is_real(self) -> bool:
        """True if this runtime uses the system's clocks, so that C code may read them as well."""
        return self.may_spin and self.stamp is time.monotonic and self.ticks is time.perf_counter

    @staticmethod
    def of(loop: asyncio.AbstractEventLoop) -> Runtime:
        """Return the runtime of `loop`: the virtual runtime that it provides, else one with the system's clocks."""
        made: Runtime = getattr(loop, "aiocoll_runtime", Runtime)(loop)
        return made

    def before_turn_ends(self, callback: Callable[[], object]) -> None:
        """Schedule `callback` for the end of this loop iteration, or for `settle` if that is called earlier."""
        if not self.due:
            self.call_soon(self.settle)
        self.due.append(callback)

    def settle(self) -> None:
        """Call the callbacks of `before_turn_ends` now."""
        due = self.due[:]
        self.due.clear()
        for callback in due:
            callback()

    def wall(self) -> float:
        """Return the wall-clock time in seconds since 1970, to align the records of several hosts."""
        return time.time() if self.stamp is time.monotonic else self.time()

    def random_bytes(self, n: int) -> bytes:
        """Return `n` random bytes that are secure enough for keys and nonces."""
        return random_bytes(n)

    def yield_gil(self) -> None:
        """Release the interpreter lock for 50 µs, so that other threads can run.

        Python takes the lock from a thread that has held it for 5 ms. A loop with a constant stream of shorter
        callbacks releases it in between, but takes it back before another thread has woken up.
        """
        time.sleep(50e-6)

    async def sleep(self, seconds: float) -> None:
        """Suspend the task for `seconds` on this runtime's clock."""
        await asyncio.sleep(seconds)

    def create_task(self, coro: Any, name: str) -> asyncio.Task[Any]:
        """Start a background task. The caller must keep the reference.

        The first step of the task runs in a later loop iteration, even if the program's tasks are eager, because the
        caller may be in an inconsistent state.
        """
        return asyncio.Task(coro, loop=self.loop, name=name)


def running_loop() -> asyncio.AbstractEventLoop:
    """Return the running asyncio event loop.

    Raises:
        RuntimeError: no loop is running, or the running loop belongs to another library.
    """
    loop = asyncio._get_running_loop()
    if loop is None:
        refuse_trio()
        raise RuntimeError(_NO_LOOP)
    return loop


def refuse_trio() -> None:
    """Raise `RuntimeError` with a remedy if trio runs this task; later checks would fail with less helpful errors."""
    if _in_trio():
        raise RuntimeError(_TRIO)


def _in_trio() -> bool:
    trio = sys.modules.get("trio")
    try:
        return trio is not None and trio.lowlevel.current_task() is not None
    except RuntimeError:
        return False


#: All runtimes of this process, to update them after a fork. Calling `os.getpid` at every use instead took 6 % of the
#: time of a small collective.
_runtimes: WeakSet[Runtime] = WeakSet()


def _forked() -> None:
    for runtime in list(_runtimes):
        runtime.thread = 0


os.register_at_fork(after_in_child=_forked)
