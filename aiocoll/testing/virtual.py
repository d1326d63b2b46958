"""`VirtualLoop`: an event loop with a virtual clock, which advances only when no task can run.

Timeouts of minutes pass in milliseconds. A run is a function of its seed: the same seed gives the same order of events,
down to each frame. Another seed gives other latencies, another order of tasks that are ready at the same time, and
another order of timers with the same deadline. Only ranks that are tasks with links in memory can be simulated. Threads
are refused, since the clock would not wait for them.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import random
import selectors
from collections.abc import Awaitable, Callable, Mapping
from datetime import timedelta
from typing import Any, NoReturn, TypeVar, TypeVarTuple

from aiocoll.group.process_group import ProcessGroup
from aiocoll.options import GroupOptions, seconds
from aiocoll.runtime import Runtime
from aiocoll.testing.ranks import run_within

__all__ = ["VirtualLoop", "VirtualRuntime", "run_virtual"]

R = TypeVar("R")
Ts = TypeVarTuple("Ts")

#: Seconds that pass with each reading of `Runtime.ticks`. Long work thus uses up its time budget after some dozens of
#: readings, so that its pauses and yields occur in the simulation.
TICK = 10e-6


def run_virtual(
    world_size: int,
    fn: Callable[[ProcessGroup, *Ts], Awaitable[R]],
    *args: *Ts,
    seed: int = 0,
    latency: tuple[float, float] | None = None,
    options: GroupOptions | None = None,
    timeout: float | timedelta | None = 3600.0,
    allow_unretrieved: bool = False,
) -> list[R]:
    """Run ``await fn(pg, *args)`` on `world_size` ranks on a new virtual loop, until all have ended; see `run_ranks`.

    Args:
        world_size: number of ranks.
        fn: async function that every rank runs.
        args: further arguments, the same objects for every rank.
        seed: seed of all randomness: the latencies, the order of tasks that are ready in the same loop iteration (of
            ranks and yours), and the order of timers with the same deadline. Callbacks of ``call_soon`` run in the
            order in which they were scheduled, as on any loop.
        latency: shortest and longest time in seconds that a frame may take. Links are still first in, first out.
            None: frames arrive in the next loop iteration, and the ranks read each other's memory.
        options: options of the groups.
        timeout: virtual seconds for everything. If all ranks wait for each other, it expires at once.
        allow_unretrieved: as for `run_ranks`.
    """
    if latency is not None and not 0 <= latency[0] <= latency[1]:
        raise ValueError(f"latency={latency}: give (shortest, longest) in seconds, with 0 <= shortest <= longest")
    with asyncio.Runner(loop_factory=lambda: VirtualLoop(seed, latency)) as runner:
        limit = seconds(timeout, "timeout")
        return runner.run(run_within(limit, world_size, fn, args, options, None, allow_unretrieved))


class VirtualRuntime(Runtime):
    """The clock and the seeded randomness of a `VirtualLoop`, which all ranks on the loop share."""

    may_spin = False
    may_listen = False
    may_thread = False

    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__(loop, loop.tick, loop.latency)
        self._random = loop.random

    def random_bytes(self, n: int) -> bytes:
        """Return `n` bytes that depend on the seed: for simulations only."""
        return self._random.randbytes(n)


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop on a virtual clock that starts at 0.

    Args:
        seed: seed of `random`.
        latency: shortest and longest time of a frame in seconds, or None.

    Attributes:
        random: the source of randomness for everything on this loop.
    """

    aiocoll_runtime = VirtualRuntime

    def __init__(self, seed: int = 0, latency: tuple[float, float] | None = None) -> None:
        self.random = random.Random(seed)
        # The order of tasks has a separate random generator, so that draws from `self.random` do not change the order.
        self._order = random.Random(f"order {seed}")
        self._now = 0.0
        self._ticks = 0
        self._range = latency
        super().__init__(_JumpingSelector(self))

    def time(self) -> float:
        """Return the virtual time in seconds."""
        return self._now

    def tick(self) -> float:
        """Return a clock reading that is larger than the one before, by `TICK` seconds."""
        self._ticks += 1
        return self._ticks * TICK

    @property
    def latency(self) -> Callable[[int, int], float] | None:
        """Return a function that draws the latency in seconds of the next frame; None if frames have no latency."""
        if self._range is None:
            return None
        shortest, longest = self._range
        return lambda source, target: self.random.uniform(shortest, longest)

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> NoReturn:  # type: ignore[override]
        """Raise RuntimeError, because a virtual clock does not wait for threads."""
        raise RuntimeError(f"{func!r} cannot run in a thread on a virtual clock; use run_ranks instead")

    def jump(self, seconds: float | None) -> None:
        """Advance the virtual time by `seconds`, to the next timer; raise RuntimeError if no timer is set."""
        if seconds is None:
            raise RuntimeError("deadlock: every task on the virtual clock waits, and no timer is set")
        self._now += seconds

    def _shuffle(self) -> None:
        """Shuffle the callbacks of a loop iteration whose order asyncio does not define.

        Timers with the same deadline and adjacent steps of tasks change places. A callback of `call_soon` keeps
        its place among all others, as asyncio promises.
        """
        loop: Any = self  # asyncio's private attributes: the ready callbacks, and the heap of timers
        ready, scheduled, due = loop._ready, loop._scheduled, []
        while scheduled and scheduled[0]._when <= self._now:
            due.append(handle := heapq.heappop(scheduled))
            handle._scheduled = False
        for _, timers in itertools.groupby(due, key=lambda handle: handle._when):
            ready.extend(self._shuffled(list(timers)))
        handles = list(ready)
        ready.clear()
        for are_steps, run in itertools.groupby(handles, key=_is_step):
            adjacent = list(run)
            ready.extend(self._shuffled(adjacent) if are_steps else adjacent)

    def _shuffled(self, handles: list[Any]) -> list[Any]:
        self._order.shuffle(handles)
        return handles


#: Names of the callbacks with which asyncio runs the next step of a task: those of its C code and of its Python code.
_STEPS = {"TaskStepMethWrapper", "task_wakeup", "__step", "__wakeup"}


def _is_step(handle: Any) -> bool:
    callback = handle._callback
    return (
        isinstance(getattr(callback, "__self__", None), asyncio.Task)
        and getattr(callback, "__name__", type(callback).__name__) in _STEPS
    )


class _JumpingSelector(selectors.BaseSelector):
    """A selector that never waits: it advances the clock of `loop` instead."""

    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop
        self._selector = selectors.DefaultSelector()

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        return self._selector.register(fileobj, events, data)

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return self._selector.unregister(fileobj)

    def modify(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        return self._selector.modify(fileobj, events, data)

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = self._selector.select(0)
        if not ready and timeout != 0:
            self._loop.jump(timeout)
        self._loop._shuffle()
        return ready

    def close(self) -> None:
        self._selector.close()

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        return self._selector.get_map()
