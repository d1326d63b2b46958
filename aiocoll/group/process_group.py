"""`ProcessGroup`: what a user holds. Its calls come from the modules beside this one; here is its life."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import inspect
from collections.abc import Iterator
from typing import Any, Self, TypeVar

from aiocoll.engine.communicator import Communicator
from aiocoll.engine.fusion.deferred_work import FlushWork
from aiocoll.errors import GroupError
from aiocoll.group.arrays import Arrays
from aiocoll.group.coalesce import Coalescing
from aiocoll.group.estimate import Estimates
from aiocoll.group.flight_recorder import Recorded
from aiocoll.group.point_to_point import PointToPoint
from aiocoll.group.recovery import Origin
from aiocoll.group.subgroups import Subgroups
from aiocoll.options import GroupOptions
from aiocoll.work import Work

__all__ = ["ProcessGroup", "current_process_group", "process_group"]

T = TypeVar("T")

_current: contextvars.ContextVar[ProcessGroup | None] = contextvars.ContextVar("aiocoll_group", default=None)


def _named_as_one(cls: type[T]) -> type[T]:
    """Let errors of Python and `help` name the calls of a class as its own, whatever its parts are called."""
    for part in cls.__mro__[1:-1]:
        for name, call in vars(part).items():
            if inspect.isfunction(call) and not name.startswith("_"):
                call.__qualname__ = f"{cls.__name__}.{name}"
    return cls


@_named_as_one
class ProcessGroup(Coalescing, PointToPoint, Arrays, Estimates, Subgroups, Recorded):
    """A group of ranks, seen by one of them; made by `aiocoll.new_group`.

    It belongs to the event loop that made it. A failed collective revokes it on all ranks: what is pending fails with
    the cause, and later calls raise `GroupRevokedError`.

    Attributes:
        group_name: the same on all ranks.
        group_desc: for people.
        timeout: seconds an operation may take by default.
        global_ranks: rank in the job of each rank of the group.
        recorder: what this rank did last, see `FlightRecorder`.
    """

    def __init__(self, member: Communicator, options: GroupOptions, desc: str, origin: Origin) -> None:
        super().__init__(member, options)
        self.group_name = member.name
        self.group_desc = desc
        self.timeout = member.timeout
        self.global_ranks = member.ranks
        self._origin = origin
        self._ending: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        state = "closed" if self._closed else "revoked" if self._member.cause is not None else "open"
        return f"<ProcessGroup {self.group_name!r} rank {self._rank} of {self._size}, {state}>"

    def rank(self) -> int:
        """This rank's number in the group."""
        return self._rank

    def size(self) -> int:
        """Number of ranks."""
        return self._size

    def backend_for(self, device: str) -> str:
        """Name what carries out collectives on arrays of `device`, a kind such as "cpu".

        Of CUDA arrays "aio" uses NCCL where all ranks can, "nccl" nothing else; see `aiocoll.backends`.
        """
        if device not in self._devices:
            served = ", ".join(map(repr, self._devices))
            raise ValueError(f"device={device!r} has no backend in group {self.group_name!r}; it has one for {served}")
        return self._devices[device]

    def pending(self) -> list[Work[Any]]:
        """The works that have not ended, oldest first."""
        works: list[Work[Any]] = []
        for operation in self._member.pending:
            work = operation.work
            if isinstance(work, FlushWork):
                works += work.stands_for()
            elif work.group is not None:  # those of no group are parts of others
                works.append(work)
        return works + self._recorded()

    async def drain(self) -> None:
        """Wait until all works pending now have ended; raise the error of the first that failed."""
        self._check_place()
        works = await self._settle()
        errors = [work.exception() for work in works]
        for error in errors:
            if error is not None and not isinstance(error, asyncio.CancelledError):
                raise error

    async def wait_revoked(self) -> GroupError:
        """Wait until the group is revoked; return the cause.

        Raises:
            GroupClosedError: this rank has closed the group, or does so before anybody revokes it.
        """
        self._check_place()
        member = self._member
        if member.cause is None and not self._closed:
            revoked = self._loop.create_future()

            def tell() -> None:
                if not revoked.done():
                    revoked.set_result(None)

            member.on_revoked.append(tell)
            try:
                await revoked
            finally:
                member.on_revoked.remove(tell)
        if member.cause is None:
            raise self._closed_error()
        return member.cause

    def abort(self, reason: object = "aborted by the program") -> None:
        """Revoke the group at once, on all ranks: every pending work fails."""
        self._check_place()
        if not self._closed and self._member.cause is None:
            cause = GroupError(
                f"group {self.group_name!r} was aborted by rank {self._rank}: {reason}",
                group=self.group_name,
                ranks=[self._rank],
            )
            self._failures.expect(cause)
            self._member.revoke(cause)

    async def shutdown(self) -> None:
        """Wait for started works (at most `timeout`), say goodbye, release everything. Idempotent.

        A peer whose operation needs this rank gets `PeerLostError` with ``how="left"``; nothing else is disturbed.
        Groups that were split off from this one and are open are closed first.
        """
        self._check_place()
        await asyncio.shield(self._begin_end())

    aclose = shutdown

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if error is not None:
            for group in self._open_groups():
                group.abort(f"{type(error).__name__}: {error}")
        await self.shutdown()

    async def _settle(self) -> list[Work[Any]]:
        """Wait until all works pending now have ended, however they do; return them."""
        works = self.pending()
        for work in works:
            await work._ended()
        return works

    def _begin_end(self) -> asyncio.Task[None]:
        if self._ending is None:
            self._ending = self._loop.create_task(self._end(), name=f"aiocoll shutdown of {self.group_name}")
        return self._ending

    async def _end(self) -> None:
        error = self._closed_error()
        try:
            if self._parts:
                await asyncio.wait([part._begin_end() for part in self._parts])
            if self._member.cause is None:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(None if self.timeout == float("inf") else self.timeout):
                        await self._settle()
                if self._device_state is not None:
                    await self._device_state.close()
        except asyncio.CancelledError:
            # The program is ending: no time to wait, but the peers shall hear a goodbye all the same.
            self._failures.expect(error)
            raise
        finally:
            self._closed = self._diverts = True
            self._leave_parent()
            for operation in list(self._member.pending):
                operation.fail(error)
            self._member.endpoint.leave(self._member)
            for tell in self._member.on_revoked:
                tell()
            if self._device_state is not None:
                await self._device_state.release()
            await self._origin.release()
            await self.recorder._settle()
            self._failures.tell()


def current_process_group() -> ProcessGroup | None:
    """Return the group of this context (task), or None."""
    return _current.get()


@contextlib.contextmanager
def process_group(pg: ProcessGroup | None) -> Iterator[ProcessGroup | None]:
    """Make `pg` the current group inside the block, for this task and those it starts."""
    token = _current.set(pg)
    try:
        yield pg
    finally:
        _current.reset(token)
