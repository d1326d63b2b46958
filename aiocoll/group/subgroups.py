"""Groups made of others: split off from one, or merged from several that have never met."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import Any, Self

from aiocoll.engine.communicator import Communicator
from aiocoll.engine.split_history import Split
from aiocoll.errors import GroupClosedError, StoreUnavailableError
from aiocoll.group.launch import Timeout
from aiocoll.group.recovery import NEWS, Recovery
from aiocoll.meeting.growth import Assignment
from aiocoll.meeting.merging import Party, find_seats
from aiocoll.options import GroupOptions, seconds
from aiocoll.store import Store
from aiocoll.work import Work

__all__ = ["Subgroups"]


class Subgroups(Recovery):
    """The calls that make a group of some ranks of this one, or of this one and others."""

    _ending: asyncio.Task[None] | None

    def __init__(self, member: Communicator, options: GroupOptions) -> None:
        super().__init__(member, options)
        # The group this one was split off from, and what was split off from this one and is open.
        self._parent: Self | None = None
        self._parts: dict[Any, None] = {}

    def split_group(
        self,
        ranks: Sequence[int] | Sequence[Sequence[int]],
        timeout: Timeout = None,
        group_name: str | None = None,
    ) -> Work[Self | None]:
        """Make a group of some of the ranks, or several that have no rank in common.

        Every rank of this group calls it, in the same order and with the same lists; it is local and sends nothing.
        Whatever order they are named in, the ranks of the new group are numbered as they follow each other in this
        one. It shares all connections with this group, can be split again, and is closed by itself or with this one.
        It fails on its own: a failure of this group, other than the death of a common rank, does not concern it.

        Ranks that have named different lists cannot talk to each other in the groups that come of it. The first
        collective there tells them so within half a second.

        Args:
            ranks: of this group; or a list of such lists.
            timeout: seconds an operation of the new group may take by default; this group's by default.
            group_name: of the new group, or of each of them, not that of another open one.

        Returns:
            A completed work. Its result is the group this rank is in, or None.

        Raises:
            TypeError, ValueError: the lists are empty, name a rank twice, or one that is none; or the name is taken.
        """
        self._check()
        if self._ending is not None:
            raise GroupClosedError(f"group {self._member.name!r} is being closed by this rank", group=self._member.name)
        member = self._member
        limit = member.timeout if timeout is None else seconds(timeout, "timeout")
        if group_name is not None and not isinstance(group_name, str):
            raise TypeError(f"group_name must be a str or None, not {type(group_name).__name__}")
        mine = next((each for each in self._disjoint(ranks) if self._rank in each), [])
        if mine and any(group.name == group_name for group in self._endpoint.groups.values()):
            raise ValueError(f"group_name={group_name!r} is the name of an open group; give every group its own")
        number = len(member.splits)
        split = Split(member.id, number, group_name, tuple(member.ranks[rank] for rank in sorted(mine)))
        group: Self | None = None
        if mine:
            # Of the groups of one call each has its own lowest rank.
            name = f"{member.name}/{number}.{min(mine)}" if group_name is None else group_name
            group = self._derive(split.identity(), name, split.ranks, limit, self._options)
            group._member.lineage = (*member.lineage, split)
            self._adopt(group)
        member.splits.append(split)
        work: Work[Self | None] = Work(self._endpoint, "SPLIT_GROUP", None, None, self)
        work._finish(group)
        return work

    async def merge_remote_group(
        self, store: Store, size: int, timeout: Timeout = None, group_name: str | None = None
    ) -> Self:
        """Make a group of all ranks of this one and of others that it has never met.

        All ranks of all these groups call it. The new group is a world of its own, with its own connections; the old
        ones stay as they are. Ranks are numbered group by group, and in a group in their order. Groups follow each
        other by their lowest rank in their job, then by their names, then as they have come.

        Groups with a job key need the same one.

        Args:
            store: that all these ranks share; it stays open.
            size: number of ranks of the new group.
            timeout: seconds the others have to come, and then all to meet; and that an operation of the new group may
                take by default. This group's by default.
            group_name: of the new group, the same on all ranks; several mergers at once in one store need different
                ones. "merged" by default.

        Raises:
            RendezvousError: too few ranks came, or too many, or they want different sizes, or could not meet; this
                group is as before.
            StoreUnavailableError: the store is gone.
            GroupError: this group has failed.
        """
        if not isinstance(store, Store):
            raise TypeError(f"store must be a Store, not {type(store).__name__}")
        if isinstance(size, bool) or not isinstance(size, int):
            raise TypeError(f"size must be an int, not {type(size).__name__}")
        if size < self._size:
            raise ValueError(f"size={size}: the new group has all {self._size} ranks of this one, and more")
        if group_name is not None and not isinstance(group_name, str):
            raise TypeError(f"group_name must be a str or None, not {type(group_name).__name__}")
        member = self._member
        limit = member.timeout if timeout is None else seconds(timeout, "timeout")
        name = "merged" if group_name is None else group_name
        self._check()
        return await self._unless_revoked(self._merge(store, size, name, limit))

    async def _merge(self, store: Store, size: int, name: str, limit: float) -> Self:
        asked = await self.allgather_object([size, name], timeout=limit)
        if any(each != asked[0] for each in asked):
            raise ValueError(
                f"the ranks of group {self._member.name!r} called merge_remote_group() with [size, name]={asked}"
            )
        return await self._meet_anew(await self._merged_seat(store, size, name, limit), limit, limit, store)

    async def _merged_seat(self, store: Store, size: int, name: str, limit: float) -> Assignment:
        """Find the other groups, or hear from rank 0 that it has; return this rank's seat among all."""
        if self._rank != 0:
            return await self._invited()
        member = self._member
        try:
            seat = await find_seats(store, Party(min(member.ranks), member.name, 0, self._size, size), name, limit)
        except BaseException as error:
            if isinstance(error, StoreUnavailableError):
                await self._runtime.sleep(NEWS)
            self._tell(
                f"group {member.name!r} was not merged: {str(error) or 'rank 0 was cancelled'}",
                gone=isinstance(error, StoreUnavailableError),
            )
            raise
        async with self._calling_off(seat, store):
            await self.broadcast_object({"seat": list(seat)}, 0)
        return seat

    async def shrink(self, exclude: Iterable[int] | None = None, *, assume_dead: Iterable[int] | None = None) -> Self:
        """See `Recovery.shrink`. What goes on of a sub-group is closed with the same group as the sub-group."""
        group = await super().shrink(exclude, assume_dead=assume_dead)
        if self._parent is not None:
            self._parent._adopt(group)
        return group

    def _open_groups(self) -> list[Self]:
        """Return this group and what was split off from it and is open."""
        return [self, *(group for part in self._parts for group in part._open_groups())]

    def _adopt(self, group: Self) -> None:
        """Close `group` with this one."""
        group._parent = self
        self._parts[group] = None

    def _leave_parent(self) -> None:
        """This group is closed."""
        if self._parent is not None:
            del self._parent._parts[self]

    def _disjoint(self, ranks: Any) -> list[list[int]]:
        """Return the lists of ranks in `ranks`, checked."""
        if isinstance(ranks, (str, bytes)) or not hasattr(ranks, "__iter__"):
            raise TypeError(f"ranks must be a list of ranks, or a list of such lists, not {type(ranks).__name__}")
        given = list(ranks)
        nested = bool(given) and all(hasattr(each, "__iter__") for each in given)
        lists = {f"ranks[{index}]": list(each) for index, each in enumerate(given)} if nested else {"ranks": given}
        owners: dict[int, str] = {}
        checked = []
        for name, each in lists.items():
            if not each:
                raise ValueError(f"{name} is empty: name at least one rank")
            checked.append([self._check_rank(rank, f"{name}[{index}]") for index, rank in enumerate(each)])
            for rank in checked[-1]:
                if (owner := owners.setdefault(rank, name)) != name:
                    raise ValueError(f"{owner} and {name} both name rank {rank}: groups of one call share no rank")
            if len(set(checked[-1])) < len(each):
                twice = next(rank for rank in checked[-1] if checked[-1].count(rank) > 1)
                raise ValueError(f"{name} names rank {twice} more than once")
        return checked
