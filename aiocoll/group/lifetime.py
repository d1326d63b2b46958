"""Lifetime of a group: pending works, revocation, shutdown."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
import warnings
from typing import TYPE_CHECKING, Any

from aiocoll.completion import Completion, watch_works
from aiocoll.engine.control.shapes import fit_text
from aiocoll.engine.fusion.deferred_completion import FlushCompletion
from aiocoll.errors import GroupError
from aiocoll.group import open_groups
from aiocoll.group.dispatch.dispatcher import Dispatcher
from aiocoll.group.dispatch.origin import Origin
from aiocoll.group.flight_recorder import FlightRecorder
from aiocoll.group.interceptors.coalesce import Coalescer
from aiocoll.group.parts import parts_of
from aiocoll.group.reconfigurer import Reconfigurer
from aiocoll.loading import loading
from aiocoll.options import GroupOptions
from aiocoll.user_code import describe
from aiocoll.work import Work, completion_of

if TYPE_CHECKING:
    from aiocoll.group.stats import GroupStats
    from aiocoll.group.top_view import GroupView

__all__ = ["Lifetime"]


class Lifetime:
    """The component that ends a group: waits, abort and shutdown. `ProcessGroup` documents the calls.

    Args:
        dispatcher: dispatcher of the group.
        blocks: the coalescing blocks, which may have recorded works.
        family: the reconfigurer, which has the groups that were split off.
        recorder: the flight recorder, which may be writing a dump at the end.
        origin: the origin, which is notified at the end.
        options: resolved options of the group.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        blocks: Coalescer,
        family: Reconfigurer,
        recorder: FlightRecorder,
        origin: Origin,
        options: GroupOptions,
    ) -> None:
        self._ending: asyncio.Task[None] | None = None
        self._dispatcher = dispatcher
        self._comm = dispatcher.comm
        self._blocks = blocks
        self._family = family
        self._recorder = recorder
        self._origin = origin
        self._top_view: GroupView | None = None
        if options.top_dir is not None and not origin.dry and self._comm.runtime.may_listen:
            with loading("top_dir"):
                from aiocoll.group.top_view import offer_to_top  # without a launcher, few programs set `top_dir`

            self._top_view = offer_to_top(self._comm, options.top_dir)
        if dispatcher.loop.get_debug():
            dispatcher.failures.watching = True
            watch_works()
            if dispatcher.native is not None:
                dispatcher.native.watches = True
        if not origin.dry:
            self._comm.endpoint.loop_end.add(self)

    @property
    def is_ending(self) -> bool:
        """Return whether this rank is closing the group, or has closed it."""
        return self._ending is not None

    def pending(self) -> list[Work[Any]]:
        """Return the works of the group that have not ended, oldest first."""
        calls: list[Completion] = []
        for operation in self._comm.in_flight.pending:
            completion = operation.completion
            if isinstance(completion, FlushCompletion):
                calls += completion.stands_for()
            else:
                calls.append(completion)
        calls += [*self._dispatcher.stepped_calls, *self._blocks.deferred()]
        return [call.handle for call in calls if call.handle is not None]  # child operations have no handle

    def stats(self) -> GroupStats:
        """Return a snapshot of the group's counters on this rank."""
        with loading("stats"):
            from aiocoll.group.stats import stats_of  # imported here, because few programs need it

        return stats_of(self._comm)

    async def drain(self) -> None:
        """Wait until all works that are pending now have ended."""
        self._dispatcher.check_caller()
        works = await self.settle()
        self._dispatcher.failures.forget_dropped_works()
        for error in [work.exception() for work in works]:
            if error is not None and not isinstance(error, asyncio.CancelledError):
                raise error

    async def wait_revoked(self) -> GroupError:
        """Wait until the group is revoked."""
        d, comm = self._dispatcher, self._comm
        d.check_caller()
        if comm.cause is None and not d.closed:
            revoked = d.loop.create_future()

            def notify() -> None:
                if not revoked.done():
                    revoked.set_result(None)

            comm.on_revoked.append(notify)
            try:
                await revoked
            finally:
                comm.on_revoked.remove(notify)
        if comm.cause is None:
            raise d.closed_error()
        return comm.cause

    def abort(self, reason: object) -> None:
        """Revoke the group on all ranks, with `reason` as the cause."""
        d, comm = self._dispatcher, self._comm
        d.check_caller()
        if not d.closed and comm.cause is None:
            cause = GroupError(
                f"group {comm.name!r} was aborted by rank {comm.rank}: {reason}",
                group=comm.name,
                ranks=[comm.rank],
            )
            d.failures.expect(cause)
            comm.revoke(cause)

    def report_death(self, rank: int, reason: str) -> None:
        """Report to all ranks that the process of `rank` has died, as the program has noticed."""
        d, comm = self._dispatcher, self._comm
        d.check_caller()
        rank = d.check_rank(rank, "rank")
        if rank == d.rank:
            raise ValueError(f"rank={d.rank} is this rank, which is alive: report another rank")
        if not isinstance(reason, str):
            raise TypeError(f"reason must be a str, not {type(reason).__name__}")
        d.endpoint.roster.report(comm.ranks[rank], fit_text(reason))

    async def leave(self, error: BaseException | None) -> None:
        """Close the group when its ``async with`` block ends. If an `error` ended the block, revoke the group."""
        if self._comm.runtime.thread == 0:
            return  # a forked child leaves the block of its parent process, which owns the group
        if error is not None:
            for group in self._family.open_groups():
                group.abort(describe(error))
        await self.shutdown()

    async def shutdown(self) -> None:
        """Close the group, and wait until it is closed."""
        self._dispatcher.check_caller()
        await asyncio.shield(self.start_shutdown())

    def start_shutdown(self) -> asyncio.Task[None]:
        """Start to close the group if that has not started yet; return the task that closes the group."""
        return self._ending or self._start_end(waits=True)

    def _start_end(self, *, waits: bool) -> asyncio.Task[None]:
        name = f"aiocoll shutdown of {self._comm.name}"
        self._ending = self._dispatcher.loop.create_task(self._end(waits=waits), name=name)
        return self._ending

    def begin_abandon(self) -> asyncio.Task[None]:
        """Start to close the group without waiting for its works, because the event loop is about to end."""
        ending = self._ending
        if ending is None or (ending.done() and not self._dispatcher.closed):
            # Start again: a closing task that was cancelled before its first step has closed nothing.
            return self._start_end(waits=False)
        if not self._dispatcher.closed:
            ending.cancel()
        return ending

    def __del__(self) -> None:
        # The program has dropped its last reference to the group. This code may run in any thread, at any point of the
        # program.
        d = self._dispatcher
        if self._ending is not None or self._origin.dry or d.runtime.thread == 0 or sys.is_finalizing():
            return
        if d.loop.is_running() or (not d.loop.is_closed() and d.runtime.thread != threading.get_ident()):
            with contextlib.suppress(RuntimeError):  # the loop has been closed meanwhile
                d.loop.call_soon_threadsafe(self._end_collected)
        elif not d.closed:
            d.close()
            self._origin.drop(d.group)
            if self._top_view is not None:
                self._top_view.close()
        self.warn()

    def _end_collected(self) -> None:
        self._comm.endpoint.loop_end.add(self)
        self.start_shutdown()

    def warn(self) -> None:
        """Warn that the program has not closed the group before its loop ended."""
        comm = self._comm
        if not comm.runtime.may_listen:
            return  # a simulated group has neither sockets nor threads
        warnings.warn(
            f"group {comm.name!r} was not shut down on rank {comm.rank}: await its shutdown(), or use async with",
            ResourceWarning,
            stacklevel=2,
            source=self._dispatcher.group,
        )

    async def settle(self) -> list[Work[Any]]:
        """Wait until all works pending now have ended, successfully or not; return these works."""
        works = self.pending()
        for work in works:
            await completion_of(work).wait_end()
        return works

    async def _end(self, *, waits: bool) -> None:
        d, comm = self._dispatcher, self._comm
        error = d.closed_error()
        try:
            if self._family.parts:
                await asyncio.wait([parts_of(part).lifetime.start_shutdown() for part in self._family.parts])
            if comm.cause is None and waits:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(None if comm.timeout == float("inf") else comm.timeout):
                        await self.settle()
                if d.device_calls is not None:
                    await d.device_calls.close()
        except asyncio.CancelledError:
            # The program is ending: do not wait any longer, but still send goodbyes to the peers.
            d.failures.expect(error)
            raise
        finally:
            d.close()
            if self._top_view is not None:
                self._top_view.close()
            self._family.leave_parent()
            for operation in list(comm.in_flight.pending):
                operation.fail(error)
            open_groups.discard(d.group)
            comm.endpoint.leave(comm)
            for notify in comm.on_revoked:
                notify()
            if d.device_calls is not None:
                await d.device_calls.release()
            await self._origin.release()
            await self._recorder._settle()
            d.failures.close()
