"""`run_ranks`: all ranks as tasks of one event loop."""

from __future__ import annotations

import asyncio
import inspect
import os
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from math import inf
from typing import Any, TypeVar, TypeVarTuple

from aiocoll.group.current import process_group
from aiocoll.group.process_group import ProcessGroup
from aiocoll.numerals import parse_float
from aiocoll.options import GroupOptions, seconds
from aiocoll.rendezvous.new_group import new_group
from aiocoll.runtime import running_loop
from aiocoll.store import HashStore, Store
from aiocoll.testing.report import first_failure, format_pending, format_ranks, task_stack, unretrieved
from aiocoll.unretrieved import Collector, collecting

__all__ = ["check_call", "check_world_size", "run_ranks", "run_within", "time_limit"]

R = TypeVar("R")
Ts = TypeVarTuple("Ts")

#: Seconds in which ranks may end by themselves after another rank has failed. The failed rank's abort releases ranks
#: that wait for it, and their errors belong in the report. Ranks that wait for other things are cancelled afterwards.
GRACE = 1.0


async def run_ranks(
    world_size: int,
    fn: Callable[[ProcessGroup, *Ts], Awaitable[R]],
    *args: *Ts,
    options: GroupOptions | None = None,
    timeout: float | timedelta | None = 60.0,
    store: Store | None = None,
    allow_unretrieved: bool = False,
) -> list[R]:
    """Run ``await fn(pg, *args)`` on `world_size` ranks in this process, one task each.

    Each task has its own context, in which `current_process_group()` is its group. The ranks share this event loop. A
    call that blocks the loop blocks all of them.

    Args:
        world_size: number of ranks.
        fn: async function that every rank runs.
        args: further arguments, the same objects for every rank.
        options: options of the groups; ``transport="unix"`` or ``"tcp"`` puts sockets between the ranks.
        timeout: seconds for everything, times `AIOCOLL_TEST_TIMEOUT_SCALE`; None waits forever.
        store: the store through which the ranks meet; a new `HashStore` by default.
        allow_unretrieved: a rank may return without having retrieved the failure of a call, for example of a call that
            it forgot to await.

    Returns:
        The results of `fn` in rank order.

    Raises:
        TimeoutError: some ranks did not end; the message has their stacks and pending operations.
        BaseException: the exception of the first rank that failed. Its notes name that rank and the failures of others,
            except plain `GroupError` exceptions. The other ranks are released: the group is aborted with the failure as
            its cause, then they are cancelled.
        AssertionError: `fn` returned on all ranks, but some failures of calls were never retrieved; the message has the
            ranks, the calls and their lines.
    """
    return await run_within(time_limit(timeout), world_size, fn, args, options, store, allow_unretrieved)


async def run_within(
    limit: float,
    world_size: int,
    fn: Callable[..., Awaitable[R]],
    args: tuple[Any, ...],
    options: GroupOptions | None,
    store: Store | None,
    allow_unretrieved: bool,
) -> list[R]:
    """Run `fn` as `run_ranks` does, but at most for `limit` seconds of the event loop's clock."""
    running_loop()
    check_call(world_size, fn)
    own = HashStore() if store is None else None
    try:
        return await _Run(world_size, fn, args, options, store or own, allow_unretrieved).results(limit)
    finally:
        if own is not None:
            await own.aclose()


def time_limit(timeout: float | timedelta | None) -> float:
    """Return a timeout in seconds, multiplied by the environment's AIOCOLL_TEST_TIMEOUT_SCALE.

    Raises:
        ValueError: AIOCOLL_TEST_TIMEOUT_SCALE is not a positive number.
    """
    limit = seconds(timeout, "timeout")
    text = os.environ.get("AIOCOLL_TEST_TIMEOUT_SCALE", "1")
    try:
        scale = parse_float(text)
    except ValueError:
        scale = 0.0
    if not 0 < scale < inf:
        raise ValueError(f"AIOCOLL_TEST_TIMEOUT_SCALE={text!r}: must be a number above 0")
    return limit * scale


def check_world_size(world_size: int) -> None:
    """Check that `world_size` is a positive int."""
    if isinstance(world_size, bool) or not isinstance(world_size, int):
        raise TypeError(f"world_size must be an int, not {type(world_size).__name__}")
    if world_size < 1:
        raise ValueError(f"world_size={world_size}: give the number of ranks, at least 1")


def check_call(world_size: int, fn: Callable[..., Any]) -> None:
    """Check that `world_size` is a positive int, and that `fn` can be called."""
    check_world_size(world_size)
    if not callable(fn):
        raise TypeError(f"fn must be an async function that takes a group, not {type(fn).__name__}")


class _Run:
    def __init__(
        self,
        world_size: int,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        options: GroupOptions | None,
        store: Any,
        allow_unretrieved: bool,
    ) -> None:
        self.world_size = world_size
        self.allow_unretrieved = allow_unretrieved
        self.fn = fn
        self.args = args
        self.options = options
        self.store = store
        self.groups: dict[int, ProcessGroup] = {}
        self.failures: dict[int, BaseException] = {}
        self.collectors: dict[int, Collector] = {}
        self.stopping = False
        self.tasks: list[asyncio.Task[Any]] = []

    async def results(self, limit: float) -> list[Any]:
        stopped: list[int] = []
        self.tasks = [asyncio.create_task(self._rank(rank), name=f"rank {rank}") for rank in range(self.world_size)]
        try:
            await asyncio.wait(
                self.tasks, timeout=None if limit == float("inf") else limit, return_when=asyncio.FIRST_EXCEPTION
            )
            if self.failures:
                await asyncio.wait(self.tasks, timeout=GRACE)
                stopped = self._find_late()
            elif not all(task.done() for task in self.tasks):
                raise TimeoutError(self._report(limit))
        finally:
            await self._stop()
        found = {} if self.allow_unretrieved else self._unretrieved()
        if self.failures:
            raise first_failure(self.failures, self.world_size, stopped, found)
        if found:
            raise unretrieved(found, self.world_size)
        return [task.result() for task in self.tasks]

    def _unretrieved(self) -> dict[int, list[str]]:
        """Return the unretrieved failures of the ranks that have returned."""
        returned = [rank for rank in self.collectors if rank not in self.failures and not self.tasks[rank].cancelled()]
        return {rank: texts for rank in returned if (texts := self.collectors[rank].finish())}

    async def _rank(self, rank: int) -> Any:
        with self._recording_failure(rank), collecting() as self.collectors[rank]:
            group = new_group(store=self.store, rank=rank, world_size=self.world_size, options=self.options)
            async with group as pg:
                self.groups[rank] = pg
                # Record the failure here, inside the group, before the group's abort makes other ranks fail.
                with process_group(pg), self._recording_failure(rank):
                    made = self.fn(pg, *self.args)
                    if not inspect.isawaitable(made):
                        raise TypeError(f"fn must be an async function: it returned {type(made).__name__}")
                    return await made

    @contextmanager
    def _recording_failure(self, rank: int) -> Iterator[None]:
        try:
            yield
        except asyncio.CancelledError as error:
            if self.stopping:
                raise
            # `asyncio.wait` does not count a cancelled task as failed, so raise an error instead.
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
                task.exception()  # retrieved, so that asyncio does not log it

    def _find_late(self) -> list[int]:
        return [rank for rank, task in enumerate(self.tasks) if not task.done()]

    def _report(self, limit: float) -> str:
        late = self._find_late()
        lines = [f"{format_ranks(late)} of {self.world_size} did not end within {limit:g} s\n"]
        for rank in late:
            lines += [f"rank {rank}\n", format_pending(self.groups.get(rank)), task_stack(self.tasks[rank])]
        return "".join(lines)
