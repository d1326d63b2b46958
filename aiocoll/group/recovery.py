"""Going on with other ranks: fewer by `shrink`, more by `grow`."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Coroutine, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol, Self, TypeVar

from aiocoll.engine.consensus.completed import Completed, report
from aiocoll.engine.control.causes import failure_by
from aiocoll.errors import AiocollError, GroupError, RendezvousError, StoreUnavailableError
from aiocoll.group.launch import Timeout
from aiocoll.group.objects import Objects
from aiocoll.meeting.growth import Assignment
from aiocoll.options import GroupOptions, seconds
from aiocoll.store import Store

__all__ = ["ADOPTED", "Origin", "Recovery", "adopted", "following"]

T = TypeVar("T")

#: The key of the first call in a group that has grown.
ADOPTED = "aiocoll/adopted"
#: Seconds in which the group learns of a death that the store, or a connection to come, was the first to miss
#: (contract: 1 s).
NEWS = 1.0


class Origin(Protocol):
    """What has made a group and can make another of its ranks."""

    def derive(self, identity: int, name: str, ranks: Sequence[int], timeout: float, options: GroupOptions) -> Any:
        """Make a group of some of the ranks, which have agreed on it."""

    async def invite(self, n: int, size: int, name: str, timeout: float) -> Assignment:
        """Give `n` newcomers the ranks from `size` on; return this rank's seat among them."""

    async def meet_anew(
        self, seat: Assignment, limit: float, timeout: float, options: GroupOptions, store: Store | None = None
    ) -> Any:
        """Meet newcomers, within `limit` seconds, in a world of its own; in `store` if it is not where all met."""

    async def call_off(self, seat: Assignment, reason: str, store: Store | None = None) -> None:
        """Tell newcomers that have a seat beside this one why nobody will meet them."""

    async def release(self) -> None:
        """A group is closed."""


class Recovery(Objects):
    """The calls that make a new group out of what is left of one, or more of it.

    Attributes:
        completed_everywhere: for a group made by `shrink`, what the old one had completed on all ranks of this one.
        completed_somewhere: what it had completed on one of them at least.
        _devices: backend by device.
    """

    completed_everywhere: Completed | None = None
    completed_somewhere: Completed | None = None
    _origin: Origin
    _devices: Mapping[str, str] = MappingProxyType({"cpu": "aio", "cuda": "aio"})

    def _derive(self, identity: int, name: str, ranks: Sequence[int], timeout: float, options: GroupOptions) -> Self:
        """Make a group of some of the ranks, which have agreed on it, with the same backends."""
        group: Self = self._origin.derive(identity, name, ranks, timeout, options)
        group._devices = self._devices
        return group

    async def shrink(self, exclude: Iterable[int] | None = None, *, assume_dead: Iterable[int] | None = None) -> Self:
        """Make a new group of the ranks that are alive and call this, numbered anew in the same order.

        On a failed group it keeps everybody who lives; on a healthy one, which it revokes, all but `exclude`: what is
        pending on this rank fails, so await it before. The new group works at once, and its `completed_everywhere` and
        `completed_somewhere` tell where to resume. The old one is of no more use: close it at any time.

        Lost ranks that are not proven dead are tried again first, for 2.5 s at most: a connection that was reset costs
        nobody the place. A death is proven by a process of the same host that sees it, or by who started the process.

        Once all living ranks have called it, it takes a few messages. Those that do not call it within 6 s are left
        out, if the others are enough to be sure that no other part of the group goes on: all ranks that are not proven
        dead have to answer, or more than half of all ranks of the group, or half of them with the lowest.

        Cancelling it does not take this rank's word back: it may be counted as a member. Call it again, then, or close
        the group.

        Args:
            exclude: ranks of this group to go on without; give the same on all ranks. Where they differ, a rank is
                out if any that takes part excludes it.
            assume_dead: ranks of this group that are dead by the word of the program, where nobody can prove it: their
                host has lost power, say. **If one of them lives and goes on as well, there are two groups**, each of
                which takes itself for the only one: whatever they write, they write twice.

        Raises:
            PeerLostError: too few ranks could be reached to be sure that the others do not go on by themselves; its
                message and `ranks` name the others.
            GroupError: this rank is out, since it was excluded, was taken for dead, or called too late.
        """
        member = self._member
        excluded = self._others(exclude, "exclude")
        assumed = self._others(assume_dead, "assume_dead")
        self._check_owner()
        agreement = member.endpoint.agreements.voter(member.id, member.growths, member.ranks)
        if agreement.taken:
            raise GroupError(
                f"group {member.name!r} was shrunk before on rank {self._rank}: shrink the group that came of it",
                group=member.name,
            )
        member.revoke(
            GroupError(
                f"group {member.name!r} was given up by rank {self._rank}, which called shrink()",
                group=member.name,
                ranks=[self._rank],
            ),
            # The others may still be completing what is complete here; what is not will not be complete there.
            tell=bool(member.pending),
        )
        outcome = await agreement.shrink(excluded, assumed, report(member))
        members: list[int] = outcome["members"]
        group = self._derive(
            agreement.identity(members), following(member.name), members, member.timeout, self._options
        )
        group.completed_everywhere = Completed.of(outcome["everywhere"])
        group.completed_somewhere = Completed.of(outcome["somewhere"])
        return group

    def _others(self, ranks: Iterable[int] | None, what: str) -> set[int]:
        """Check ranks to go on without; return them numbered as in the job."""
        member = self._member
        found = {member.ranks[self._check_rank(rank, what)] for rank in ranks or ()}
        if member.endpoint.rank in found:
            raise ValueError(f"{what} names rank {self._rank}, which is calling: a rank that is to go does not shrink")
        return found

    async def grow(self, n: int, timeout: Timeout = None) -> Self:
        """Make a new group of the ranks of this one, which keep their numbers, and `n` newcomers after them.

        All ranks call it; newcomers call ``new_group(join=True)`` with the same ``init_method`` or store, before or
        after. The new group is a world of its own, with its own connections: nothing of an older one is heard in it.
        This one stays as it is: close it when it is no longer needed. A process that takes the place of a lost one
        comes in like this, too: `shrink`, then `grow`.

        Args:
            n: number of newcomers.
            timeout: seconds to wait for them, and then for all to meet; the group's by default.

        Raises:
            RendezvousError: too few came, or not all could meet; this group is as before. Newcomers that came keep
                waiting.
            StoreUnavailableError: the store where the ranks met is gone, so nobody can be found there.
            GroupError: this group has failed, before or meanwhile, as all ranks hear at once: `shrink` it, and let what
                comes of it grow. Newcomers that have a seat by then raise `RendezvousError`, the others keep waiting.
        """
        if isinstance(n, bool) or not isinstance(n, int):
            raise TypeError(f"n must be an int, not {type(n).__name__}")
        if n < 1:
            raise ValueError(f"n={n}: give the number of newcomers, at least 1")
        limit = self._member.timeout if timeout is None else seconds(timeout, "timeout")
        self._check()
        seat = await self._unless_revoked(self._seats(n, limit))
        return await self._grown(seat, limit)

    async def _seats(self, n: int, limit: float) -> Assignment:
        asked = await self.allgather_object(n, timeout=limit)
        if len(set(asked)) > 1:
            raise ValueError(f"the ranks of group {self._member.name!r} called grow() with n={asked}: give the same n")
        return await self._seat(n, limit)

    async def _grown(self, seat: Assignment, limit: float) -> Self:
        """Meet the newcomers, and go on with them only if all ranks of this group do."""
        member = self._member
        agreement = member.endpoint.agreements.voter(member.id, member.growths, member.ranks)
        try:
            group = await self._unless_revoked(self._meet_anew(seat, limit, member.timeout))
        except BaseException as error:
            agreement.decline(seat.prefix, str(error) or "a rank was cancelled")
            raise
        try:
            await agreement.grow(seat.prefix)
        except BaseException:
            made: Any = group
            await made.shutdown()
            raise
        await adopted(group)
        return group

    async def _seat(self, n: int, limit: float) -> Assignment:
        """Find the newcomers, or hear from rank 0 that it has; return this rank's seat among them."""
        return await (self._invite(n, limit) if self._rank == 0 else self._invited())

    async def _meet_anew(self, seat: Assignment, limit: float, timeout: float, store: Store | None = None) -> Self:
        """Meet the newcomers."""
        async with self._calling_off(seat, store):
            self._check()
            try:
                group: Self = await self._origin.meet_anew(seat, limit, timeout, self._options, store)
            except AiocollError as error:
                if not isinstance(error.__cause__, TimeoutError):
                    await self._runtime.sleep(NEWS)
                raise
        group._devices = self._devices
        return group

    async def _unless_revoked(self, doing: Coroutine[Any, Any, T]) -> T:
        """Return what `doing` does; should this group fail or be closed meanwhile, end that and raise why."""
        member = self._member
        task = self._loop.create_task(doing, name=f"aiocoll growth of {member.name}")

        def stop() -> None:
            if member.cause is not None:
                self._failures.looked(member.cause)  # it is raised below
            task.cancel()

        member.on_revoked.append(stop)
        try:
            return await task
        except asyncio.CancelledError:
            current = asyncio.current_task()
            if current is None or current.cancelling() or not (self._closed or member.cause):
                raise
        except GroupError:
            if member.cause is None:
                raise
        finally:
            member.on_revoked.remove(stop)
        if member.cause is None:
            raise self._closed_error()
        raise failure_by(member.cause)

    @contextlib.asynccontextmanager
    async def _calling_off(self, seat: Assignment, store: Store | None = None) -> AsyncIterator[None]:
        """If this group fails in the block, newcomers that have a seat shall not wait for it."""
        try:
            yield
        except BaseException:
            if (cause := self._member.cause) is not None:
                await self._origin.call_off(seat, f"the group that was to meet them has failed: {cause}", store)
            raise

    async def _invite(self, n: int, limit: float) -> Assignment:
        """As rank 0, wait for the newcomers, and tell the others what has come of it."""
        try:
            seat = await self._origin.invite(n, self._size, following(self._member.name), limit)
        except StoreUnavailableError as error:
            await self._runtime.sleep(NEWS)
            text = (
                f"group {self._member.name!r} cannot grow: the store where its ranks met is gone ({error}), so "
                "newcomers do not find it. Start all ranks again, and host the store outside of them: run a "
                "StoreServer in the process that starts them, and give them AIOCOLL_STORE=launcher and its address as "
                "MASTER_ADDR and MASTER_PORT"
            )
            self._tell(text, gone=True)
            raise StoreUnavailableError(text) from error
        except BaseException as error:
            self._tell(f"group {self._member.name!r} did not grow: {str(error) or 'rank 0 was cancelled'}")
            raise
        async with self._calling_off(seat):
            await self.broadcast_object({"seat": list(seat)}, 0)
        return seat

    def _tell(self, text: str, gone: bool = False) -> None:
        """Let the other ranks raise it, too, unless the group has failed: then they know."""
        with contextlib.suppress(GroupError):
            self.broadcast_object({"error": text, "gone": gone}, 0)

    async def _invited(self) -> Assignment:
        # Rank 0 keeps the time, and its death or a failure of the group ends this.
        told = await self.broadcast_object(None, 0, timeout=float("inf"))
        if "error" in told:
            raise (StoreUnavailableError if told["gone"] else RendezvousError)(told["error"])
        seat = Assignment(*told["seat"])
        return seat._replace(rank=seat.rank + self._rank)


async def adopted(group: Objects) -> None:
    """Let the newcomers know that `group` is what goes on: one that does not hear it goes nowhere.

    If the group fails now, the next call on it says so.
    """
    with contextlib.suppress(GroupError):
        await group.broadcast_object(True, 0, key=ADOPTED)


def following(name: str) -> str:
    """Return the name of the group that comes after the one called `name`."""
    first, _, number = name.rpartition("~")
    return f"{first}~{int(number) + 1}" if first and number.isdecimal() else f"{name}~1"
