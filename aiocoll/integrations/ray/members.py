"""Base classes of Ray actors that can be ranks."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from functools import partial
from typing import Any, Generic, TypeVar

from aiocoll.blocking import BlockingGroup, make_blocking_group
from aiocoll.errors import GroupRevokedError
from aiocoll.group.process_group import ProcessGroup
from aiocoll.integrations.membership import Membership, State
from aiocoll.loops import LoopThread
from aiocoll.rendezvous.tickets import Ticket

__all__ = ["BlockingMember", "Member"]

G = TypeVar("G", ProcessGroup, BlockingGroup)


class _Rank(Generic[G]):
    """The common base class of `Member` and `BlockingMember`.

    It has no coroutine functions, because a single one would make every derived actor async.
    """

    _aiocoll_membership: Membership | None = None

    @property
    def group(self) -> G:
        """The current group of all actors; a new one after each repair by the driver.

        Raises:
            GroupRevokedError: there is no group at present: the actor was restarted, or the group is being repaired.
        """
        group = None if self._aiocoll_membership is None else self._aiocoll_membership.group
        if group is None:
            raise GroupRevokedError(
                "this actor has no group now: it has not joined a group since its start, or the group is being repaired"
            )
        return self._aiocoll_wrap(group)

    def _aiocoll_wrap(self, group: ProcessGroup) -> G:
        raise NotImplementedError

    def aiocoll_state(self) -> State | None:
        """Return this actor's report about its group, for the driver; None if the actor is not a rank."""
        return None if self._aiocoll_membership is None else self._aiocoll_membership.state()


class Member(_Rank[ProcessGroup]):
    """Base class of actors with async methods that become ranks; see `aiocoll.integrations.ray.group`."""

    def _aiocoll_wrap(self, group: ProcessGroup) -> ProcessGroup:
        return group

    async def regrouped(self) -> None:
        """Prepare for a new group; called on every rank after the group was formed or repaired.

        Override this method as needed.

        Here old ranks can send newcomers the state that they need. Rank 0 is an old rank if there is one.
        """

    async def aiocoll_join(self, ticket: Ticket) -> None:
        """Leave the current group, if any, and start to join the group of `ticket`."""
        await self.aiocoll_leave()
        self._aiocoll_membership = Membership(ticket)

    def aiocoll_abort(self, reason: str) -> None:
        """Abort the group on all ranks."""
        if self._aiocoll_membership is not None:
            self._aiocoll_membership.abort(reason)

    async def aiocoll_leave(self) -> None:
        """Leave the group, if there is one."""
        left, self._aiocoll_membership = self._aiocoll_membership, None
        if left is not None:
            await left.leave()

    async def aiocoll_run(self, ticket: Ticket, program: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Run a program on this actor, as the rank that `ticket` stands for; return the program's result."""
        with ticket.as_default():
            made = program(*args)
            return await made if inspect.isawaitable(made) else made


class BlockingMember(_Rank[BlockingGroup]):
    """Base class of actors without async methods that become ranks; `group` is a `BlockingGroup`."""

    _aiocoll_loop: LoopThread | None = None

    def _aiocoll_wrap(self, group: ProcessGroup) -> BlockingGroup:
        assert self._aiocoll_loop is not None
        return make_blocking_group(self._aiocoll_loop, group)

    def regrouped(self) -> None:
        """Prepare for a new group; see `Member.regrouped`."""

    def aiocoll_join(self, ticket: Ticket) -> None:
        """Leave the current group, if any, and start to join the group of `ticket`."""
        self.aiocoll_leave()
        self._aiocoll_loop = LoopThread("aiocoll-blocking")
        self._aiocoll_membership = self._aiocoll_loop.start(partial(Membership, ticket)).result()

    def aiocoll_abort(self, reason: str) -> None:
        """Abort the group on all ranks."""
        if self._aiocoll_membership is not None and self._aiocoll_loop is not None:
            self._aiocoll_loop.start(partial(self._aiocoll_membership.abort, reason))

    def aiocoll_leave(self) -> None:
        """Leave the group, if there is one."""
        left, self._aiocoll_membership = self._aiocoll_membership, None
        if left is not None and self._aiocoll_loop is not None:
            self._aiocoll_loop.start(left.leave).result()
            self._aiocoll_loop.close()

    def aiocoll_run(self, ticket: Ticket, program: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Run a program on this actor, as the rank that `ticket` stands for; return the program's result."""
        with ticket.as_default():
            made = program(*args)
            return asyncio.run(made) if inspect.iscoroutine(made) else made
