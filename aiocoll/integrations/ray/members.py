"""What an actor needs to be a rank: the base classes of actors."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from contextlib import aclosing
from functools import partial
from math import inf
from typing import Any, Generic, NamedTuple, TypeVar

from aiocoll.blocking import BlockingGroup, LoopThread
from aiocoll.elastic import elastic
from aiocoll.errors import GroupError, GroupRevokedError, RendezvousError, StoreError
from aiocoll.group.process_group import ProcessGroup
from aiocoll.rendezvous.tickets import Ticket

__all__ = ["BlockingMember", "Member", "State"]

G = TypeVar("G", ProcessGroup, BlockingGroup)


class State(NamedTuple):
    """What an actor says of its part in the group.

    Attributes:
        begun: it has been a rank.
        name: of its group; empty while there is none.
        size: of its group.
    """

    begun: bool
    name: str
    size: int


class _Part:
    """The program that makes an actor a rank: an elastic one, which only keeps the group."""

    def __init__(self, ticket: Ticket) -> None:
        self.group: ProcessGroup | None = None
        self._begun = False
        self._task = asyncio.create_task(self._keep(ticket), name="aiocoll rank")

    async def _keep(self, ticket: Ticket) -> None:
        async with aclosing(elastic(init_method=ticket, wait=0.0, mend_timeout=inf)) as groups:
            async for group in groups:
                self.group, self._begun = group, True
                await group.wait_revoked()
                self.group = None

    def state(self) -> State | None:
        """Return what to say of it; None if this can be a rank no more."""
        if self._task.done():
            error = self._task.exception()
            if error is not None and not isinstance(error, (GroupError, RendezvousError, StoreError)):
                raise error
            return None
        group = self.group
        return State(self._begun, "", 0) if group is None else State(True, group.group_name, group.size())

    def abort(self, reason: str) -> None:
        """End what the others do in the group."""
        aborted, self.group = self.group, None
        if aborted is not None:
            aborted.abort(reason)

    async def leave(self) -> None:
        """Leave the group, or stop joining it."""
        self._task.cancel()
        await asyncio.wait([self._task])


class _Rank(Generic[G]):
    """What both kinds of actors have. None of it is a coroutine function: that would make any actor an async one."""

    _aiocoll_part: _Part | None = None

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
        self._aiocoll_part = _Part(ticket)

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
        return BlockingGroup.on(self._aiocoll_loop, group)

    def regrouped(self) -> None:
        """For subclasses: see `Member.regrouped`."""

    def aiocoll_join(self, ticket: Ticket) -> None:
        """Begin to become a rank."""
        self.aiocoll_leave()
        self._aiocoll_loop = LoopThread()
        self._aiocoll_part = self._aiocoll_loop.call(partial(_Part, ticket)).result()

    def aiocoll_abort(self, reason: str) -> None:
        """End what the others do in the group."""
        if self._aiocoll_part is not None and self._aiocoll_loop is not None:
            self._aiocoll_loop.call(partial(self._aiocoll_part.abort, reason))

    def aiocoll_leave(self) -> None:
        """Be no rank any more."""
        left, self._aiocoll_part = self._aiocoll_part, None
        if left is not None and self._aiocoll_loop is not None:
            self._aiocoll_loop.call(left.leave).result()
            self._aiocoll_loop.close()

    def aiocoll_run(self, ticket: Ticket, program: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Run a program as a rank."""
        with ticket.as_default():
            made = program(*args)
            return asyncio.run(made) if inspect.iscoroutine(made) else made
