"""What an actor needs to be a rank: the base classes of actors."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from functools import partial
from typing import Any, Generic, TypeVar

from aiocoll.blocking import BlockingGroup, blocking_on
from aiocoll.errors import GroupRevokedError
from aiocoll.group.process_group import ProcessGroup
from aiocoll.integrations.parts import Part, State
from aiocoll.loops import LoopThread
from aiocoll.rendezvous.tickets import Ticket

__all__ = ["BlockingMember", "Member"]

G = TypeVar("G", ProcessGroup, BlockingGroup)


class _Rank(Generic[G]):
    """What both kinds of actors have. None of it is a coroutine function: that would make any actor an async one."""

    _aiocoll_part: Part | None = None

    @property
    def group(self) -> G:
        """The group of all actors; another one whenever it has mended.

        Raises:
            GroupRevokedError: there is none: this actor was started anew, or the group mends.
        """
        group = None if self._aiocoll_part is None else self._aiocoll_part.group
        if group is None:
            raise GroupRevokedError("this actor has no group: it has not joined one since it was started, or one mends")
        return self._aiocoll_as_mine(group)

    def _aiocoll_as_mine(self, group: ProcessGroup) -> G:
        raise NotImplementedError

    def aiocoll_state(self) -> State | None:
        """Return what this actor has of the group; None: no part in it."""
        return None if self._aiocoll_part is None else self._aiocoll_part.state()


class Member(_Rank[ProcessGroup]):
    """Base of actors with async methods that become ranks; see `aiocoll.integrations.ray.group`."""

    def _aiocoll_as_mine(self, group: ProcessGroup) -> ProcessGroup:
        return group

    async def regrouped(self) -> None:
        """For subclasses: called on all ranks when they have a group, and when it has mended.

        Here the ranks can tell newcomers what these need: rank 0 is none, if any rank is not.
        """

    async def aiocoll_join(self, ticket: Ticket) -> None:
        """Begin to become a rank."""
        await self.aiocoll_leave()
        self._aiocoll_part = Part(ticket)

    def aiocoll_abort(self, reason: str) -> None:
        """End what the others do in the group."""
        if self._aiocoll_part is not None:
            self._aiocoll_part.abort(reason)

    async def aiocoll_leave(self) -> None:
        """Be no rank any more."""
        left, self._aiocoll_part = self._aiocoll_part, None
        if left is not None:
            await left.leave()

    async def aiocoll_run(self, ticket: Ticket, program: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Run a program as a rank."""
        with ticket.as_default():
            made = program(*args)
            return await made if inspect.isawaitable(made) else made


class BlockingMember(_Rank[BlockingGroup]):
    """Base of actors without async methods that become ranks: their group is a `BlockingGroup`."""

    _aiocoll_loop: LoopThread | None = None

    def _aiocoll_as_mine(self, group: ProcessGroup) -> BlockingGroup:
        assert self._aiocoll_loop is not None
        return blocking_on(self._aiocoll_loop, group)

    def regrouped(self) -> None:
        """For subclasses: see `Member.regrouped`."""

    def aiocoll_join(self, ticket: Ticket) -> None:
        """Begin to become a rank."""
        self.aiocoll_leave()
        self._aiocoll_loop = LoopThread("aiocoll-blocking")
        self._aiocoll_part = self._aiocoll_loop.start(partial(Part, ticket)).result()

    def aiocoll_abort(self, reason: str) -> None:
        """End what the others do in the group."""
        if self._aiocoll_part is not None and self._aiocoll_loop is not None:
            self._aiocoll_loop.start(partial(self._aiocoll_part.abort, reason))

    def aiocoll_leave(self) -> None:
        """Be no rank any more."""
        left, self._aiocoll_part = self._aiocoll_part, None
        if left is not None and self._aiocoll_loop is not None:
            self._aiocoll_loop.start(left.leave).result()
            self._aiocoll_loop.close()

    def aiocoll_run(self, ticket: Ticket, program: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Run a program as a rank."""
        with ticket.as_default():
            made = program(*args)
            return asyncio.run(made) if inspect.iscoroutine(made) else made
