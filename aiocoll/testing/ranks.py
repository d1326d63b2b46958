"""`run_ranks`: all ranks as tasks of one event loop."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar, TypeVarTuple

from aiocoll.group.current import process_group
from aiocoll.group.process_group import ProcessGroup
from aiocoll.options import GroupOptions, seconds
from aiocoll.rendezvous.new_group import new_group
from aiocoll.runtime import running_loop
from aiocoll.store import HashStore, Store
from aiocoll.testing.report import listed, pending, stack, verdict

__all__ = ["check_call", "loop_factory", "run_ranks"]

R = TypeVar("R")
Ts = TypeVarTuple("Ts")

#: Seconds that ranks get to end by themselves when another has failed: its abort releases the ranks that wait for it,
#: and their errors belong in the report. Ranks that wait for something else are cancelled afterwards.
GRACE = 1.0


async def run_ranks(
    world_size: int,
    fn: Callable[[ProcessGroup, *Ts], Awaitable[R]],
    *args: *Ts,
    options: GroupOptions | None = None,
    timeout: float | timedelta | None = 60.0,
    store: Store | None = None,
) -> list[R]:
    """Run ``await fn(pg, *args)`` on `world_size` ranks in this process, one task each.

    Each task has a context of its own in which `current_process_group()` is its group. The ranks share this event
    loop: a call that blocks it blocks them all.

    Args:
        world_size: number of ranks.
        fn: what every rank runs.
        args: further arguments, the same objects for every rank.
        options: of the groups; ``transport="unix"`` or ``"tcp"`` puts sockets between the ranks.
        timeout: seconds for everything; None waits for ever.
        store: where the ranks meet; a new `HashStore` by default.

    Returns:
        What `fn` returned, in rank order.

    Raises:
        TimeoutError: some ranks did not end; the message has their stacks and pending operations.
        BaseException: what `fn` raised on the first rank that failed; its notes name that rank and the failures of
            others, unless these are only `GroupError`. The other ranks were released: the group is aborted with the
            failure as its cause, then they are cancelled.
    """
    running_loop()
    check_call(world_size, fn)
    limit = seconds(timeout, "timeout")
    own = HashStore() if store is None else None
    try:
        return await _Run(world_size, fn, args, options, store or own).results(limit)
    finally:
        if own is not None:
            await own.aclose()


def check_call(world_size: int, fn: Callable[..., Any]) -> None:
    """Check the arguments of a run."""
    if isinstance(world_size, bool) or not isinstance(world_size, int):
        raise TypeError(f"world_size must be an int, not {type(world_size).__name__}")
    if world_size < 1:
        raise ValueError(f"world_size={world_size}: give the number of ranks, at least 1")
    if not callable(fn):
        raise TypeError(f"fn must be an async function that takes a group, not {type(fn).__name__}")


def loop_factory(name: str) -> Callable[[], asyncio.AbstractEventLoop]:
    """Return the factory of an event loop: "asyncio" or "uvloop"."""
    if name == "asyncio":
        return asyncio.new_event_loop
    import uvloop

    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory


class _Run:
    def __init__(
        self, world_size: int, fn: Callable[..., Any], args: tuple[Any, ...], options: GroupOptions | None, store: Any
    ) -> None:
        self.world_size = world_size
        self.fn = fn
        self.args = args
        self.options = options
        self.store = store
        self.groups: dict[int, ProcessGroup] = {}
        self.failures: dict[int, BaseException] = {}
        self.stopping = False
        self.tasks: list[asyncio.Task[Any]] = []

    async def results(self, limit: float) -> list[Any]:
        cut_off: list[int] = []
        self.tasks = [asyncio.create_task(self._rank(rank), name=f"rank {rank}") for rank in range(self.world_size)]
        try:
            await asyncio.wait(
                self.tasks, timeout=None if limit == float("inf") else limit, return_when=asyncio.FIRST_EXCEPTION
            )
            if self.failures:
                await asyncio.wait(self.tasks, timeout=GRACE)
                cut_off = self._late()
            elif not all(task.done() for task in self.tasks):
                raise TimeoutError(self._report(limit))
        finally:
            await self._stop()
        if self.failures:
            raise verdict(self.failures, self.world_size, cut_off)
        return [task.result() for task in self.tasks]

    async def _rank(self, rank: int) -> Any:
        with self._watched(rank):
            group = new_group(store=self.store, rank=rank, world_size=self.world_size, options=self.options)
            async with group as pg:
                self.groups[rank] = pg
                # Watched inside the group too: a failure is recorded before its abort makes others fail.
                with process_group(pg), self._watched(rank):
                    made = self.fn(pg, *self.args)
                    if not inspect.isawaitable(made):
                        raise TypeError(f"fn must be an async function: it returned {type(made).__name__}")
                    return await made

    @contextmanager
    def _watched(self, rank: int) -> Iterator[None]:
        try:
            yield
        except asyncio.CancelledError as error:
            if self.stopping:
                raise
            # `asyncio.wait` does not report the cancellation of a task.
            failure = RuntimeError(f"fn was cancelled on rank {rank}, by itself")
            self.failures.setdefault(rank, failure)
            raise failure from error
        except BaseException as error:
            self.failures.setdefault(rank, error)
            raise

    async def _stop(self) -> None:
        self.stopping = True
        for task in self.tasks:
            task.cancel()
        await asyncio.wait(self.tasks)
        for task in self.tasks:
            if not task.cancelled():
                task.exception()  # retrieved, so that it is not logged

    def _late(self) -> list[int]:
        return [rank for rank, task in enumerate(self.tasks) if not task.done()]

    def _report(self, limit: float) -> str:
        late = self._late()
        lines = [f"{listed(late)} of {self.world_size} did not end within {limit:g} s\n"]
        for rank in late:
            lines += [f"rank {rank}\n", pending(self.groups.get(rank)), stack(self.tasks[rank])]
        return "".join(lines)
