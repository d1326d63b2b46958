"""What an actor needs to be a rank: the base classes of actors."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

from aiocoll.blocking import BlockingGroup
from aiocoll.errors import GroupError, GroupRevokedError
from aiocoll.group.process_group import ProcessGroup
from aiocoll.rendezvous.tickets import Ticket

__all__ = ["BlockingMember", "Member"]

G = TypeVar("G", ProcessGroup, BlockingGroup)


class _Rank(Generic[G]):
    """What both kinds of actors have. None of it is a coroutine function: that would make any actor an async one."""

    _aiocoll_group: G | None = None
    _aiocoll_holder = ""

    @property
    def group(self) -> G:
        """The group of all actors; another one whenever it has mended.

        Raises:
            GroupRevokedError: this actor was started anew, and is no rank yet.
        """
        if self._aiocoll_group is None:
            raise GroupRevokedError("this actor is no rank of a group: it has not joined one since it was started")
        return self._aiocoll_group

    def aiocoll_holder(self) -> str:
        """Return whose ticket this actor has."""
        return self._aiocoll_holder

    def aiocoll_abort(self, reason: str) -> None:
        """End what the others do in the group."""
        if self._aiocoll_group is not None:
            self._aiocoll_group.abort(reason)


class Member(_Rank[ProcessGroup]):
    """Base of actors with async methods that become ranks; see `aiocoll.integrations.ray.group`."""

    async def regrouped(self) -> None:
        """For subclasses: called on all ranks when they have a group, and when it has mended.

        Here the ranks can tell newcomers what these need: rank 0 is none, if any rank is not.
        """

    async def aiocoll_join(self, ticket: Ticket) -> None:
        """Become a rank."""
        await self.aiocoll_leave()
        self._aiocoll_group = await ticket.join()
        self._aiocoll_holder = ticket.holder
        await self.regrouped()

    async def aiocoll_mend(self, newcomers: int, timeout: float) -> None:
        """Go on with those that live, and newcomers."""
        try:
            self._aiocoll_group = await _shrink(self.group)
        except GroupError:
            await self.aiocoll_leave()
            raise
        if newcomers:
            self._aiocoll_group = await _grow(self.group, newcomers, timeout)
        await self.regrouped()

    async def aiocoll_leave(self) -> None:
        """Be no rank any more."""
        left, self._aiocoll_group, self._aiocoll_holder = self._aiocoll_group, None, ""
        if left is not None:
            await left.shutdown()

    async def aiocoll_run(self, ticket: Ticket, program: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Run a program as a rank."""
        with ticket.as_default():
            made = program(*args)
            return await made if inspect.isawaitable(made) else made


class BlockingMember(_Rank[BlockingGroup]):
    """Base of actors without async methods that become ranks: their group is a `BlockingGroup`."""

    _aiocoll_first: BlockingGroup | None = None

    def regrouped(self) -> None:
        """For subclasses: see `Member.regrouped`."""

    def aiocoll_join(self, ticket: Ticket) -> None:
        """Become a rank."""
        self.aiocoll_leave()
        self._aiocoll_first = self._aiocoll_group = BlockingGroup(init_method=ticket)
        self._aiocoll_holder = ticket.holder
        self.regrouped()

    def aiocoll_mend(self, newcomers: int, timeout: float) -> None:
        """Go on with those that live, and newcomers."""
        try:
            self._change(_shrink)
        except GroupError:
            self.aiocoll_leave()
            raise
        if newcomers:
            self._change(_grow, newcomers, timeout)
        self.regrouped()

    def _change(self, change: Any, *args: Any) -> None:
        changed: Future[ProcessGroup] = self.group.submit(change, *args)
        self._aiocoll_group = self.group._with(changed.result())

    def aiocoll_leave(self) -> None:
        """Be no rank any more."""
        left, first = self._aiocoll_group, self._aiocoll_first
        self._aiocoll_group, self._aiocoll_first, self._aiocoll_holder = None, None, ""
        if left is not None and first is not None:
            left.shutdown()
            first.shutdown()  # it owns the thread

    def aiocoll_run(self, ticket: Ticket, program: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Run a program as a rank."""
        with ticket.as_default():
            made = program(*args)
            return asyncio.run(made) if inspect.iscoroutine(made) else made


async def _shrink(old: ProcessGroup) -> ProcessGroup:
    new = await old.shrink()
    await old.shutdown()
    return new


async def _grow(old: ProcessGroup, newcomers: int, timeout: float) -> ProcessGroup:
    new = await old.grow(newcomers, timeout)
    await old.shutdown()
    return new
