"""Makes groups from others: `shrink`, `grow`, `split_group` and `merge_remote_group`."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from typing import Any, TypeVar

from aiocoll.completion import Completion
from aiocoll.engine.consensus.completed import Completed, report
from aiocoll.engine.control.causes import failure_by
from aiocoll.engine.group_spec import GroupSpec
from aiocoll.engine.split_history import Split
from aiocoll.errors import (
    AiocollError,
    GroupClosedError,
    GroupError,
    RendezvousError,
    StoreTimeoutError,
    StoreUnavailableError,
)
from aiocoll.group.dispatch.dispatcher import Dispatcher, Timeout
from aiocoll.group.dispatch.origin import Origin
from aiocoll.group.objects import Objects
from aiocoll.group.parts import parts_of
from aiocoll.meeting.growth import Assignment, Invitation
from aiocoll.meeting.merging import Party, find_assignment
from aiocoll.numerals import to_int
from aiocoll.store import Store
from aiocoll.store.commands import count_bytes
from aiocoll.work import Work, completion_of, finished_work

__all__ = ["ADOPTED", "Reconfigurer", "strip_generation"]

T = TypeVar("T")

#: The key of the first call in a group that has grown.
ADOPTED = "aiocoll/adopted"
#: Seconds in which the group detects a death that the store, or a new connection, noticed first
#: (contract: 1 s).
NEWS = 1.0


class Reconfigurer:
    """Makes groups from the ranks of one group; `ProcessGroup` documents the calls.

    Args:
        dispatcher: of the group.
        objects: the object collectives of the group.
        origin: the origin of the group.
        spec: the properties of the group.

    Attributes:
        parent: reconfigurer of the group that this one was split off from.
        parts: open groups split off from this one, with their reconfigurers.
    """

    def __init__(self, dispatcher: Dispatcher, objects: Objects, origin: Origin, spec: GroupSpec) -> None:
        self.parent: Reconfigurer | None = None
        self.parts: dict[Any, Reconfigurer] = {}
        # How often this rank has made a group of the same ranks by themselves.
        self._local: Counter[tuple[int, ...]] = Counter()
        self._dispatcher = dispatcher
        self._comm = dispatcher.comm
        self._objects = objects
        self._origin = origin
        self._spec = spec

    # -- shrinking

    async def shrink(self, exclude: Iterable[int] | None, assume_dead: Iterable[int] | None) -> Any:
        """Make a group of the ranks that are alive."""
        comm, d = self._comm, self._dispatcher
        excluded = self._others(exclude, "exclude")
        assumed = self._others(assume_dead, "assume_dead")
        d.check_owner()
        agreement = comm.endpoint.agreements.voter(comm.id, comm.growths, comm.ranks)
        if agreement.taken:
            raise GroupError(
                f"group {comm.name!r}, rank {d.rank}: shrink() was already called; use the group it returned",
                group=comm.name,
            )
        comm.revoke(
            GroupError(
                f"group {comm.name!r} was given up by rank {d.rank}, which called shrink()",
                group=comm.name,
                ranks=[d.rank],
            ),
            # The others may still be completing what is complete here; what is incomplete here will not complete there.
            tell=bool(len(comm.in_flight)),
        )
        outcome = await agreement.shrink(excluded, assumed, report(comm))
        members: list[int] = sorted(outcome["members"], key=comm.ranks.index)
        completed = Completed.of(outcome["everywhere"]), Completed.of(outcome["somewhere"])
        spec = self._spec._replace(name=_following(comm.name), timeout=comm.timeout, completed=completed)
        group = self._origin.derive(agreement.identity(outcome["members"]), members, spec)
        if self.parent is not None:
            self.parent._adopt(group)
        return group

    def _others(self, ranks: Iterable[int] | None, what: str) -> set[int]:
        """Check ranks to continue without; return them numbered as in the job."""
        comm, d = self._comm, self._dispatcher
        found = {comm.ranks[d.check_rank(rank, what)] for rank in ranks or ()}
        if comm.endpoint.rank in found:
            raise ValueError(f"{what} names rank {d.rank}, which is calling: a rank that is to go does not shrink")
        return found

    # -- growing

    async def grow(self, n: int, timeout: Timeout, at_least: int | None) -> Any:
        """Make a group of this one's ranks and newcomers."""
        least = n if at_least is None else at_least
        n, least = to_int(n, "n"), to_int(least, "at_least")
        if n < 1:
            raise ValueError(f"n={n}: give the number of newcomers, at least 1")
        if not 1 <= least <= n:
            raise ValueError(f"at_least={least}: must be from 1 to n={n}")
        limit = self._dispatcher.limit(timeout)
        return await self.take_in(n, least, limit, limit)

    async def take_in(self, most: int, least: int, come: float, meet: float) -> Any:
        """Make a group of this one's ranks and newcomers: `come` and `meet` are the seconds for each of it."""
        comm = self._comm
        self._dispatcher.check()
        invitation = Invitation(most, least, len(comm.ranks), _following(comm.name))
        assignment = await self._unless_revoked(self._assign(invitation, come, meet))
        async with self._calling_off(assignment):
            return await self._grown(assignment, meet)

    async def await_newcomer(self) -> None:
        """Wait until there is a newcomer that a group could take in."""
        await self._origin.await_newcomer()

    async def _assign(self, invitation: Invitation, come: float, meet: float) -> Assignment:
        comm = self._comm
        most, least = zip(*await self._objects.allgather(invitation[:2], meet, None), strict=True)
        for name, asked in (("n", most), ("at_least", least)):
            if len(set(asked)) > 1:
                raise ValueError(
                    f"the ranks of group {comm.name!r} called grow() with {name}={list(asked)}: give the same {name}"
                )
        if self._origin.dry:
            return (await self._origin.invite(invitation, come))._replace(rank=comm.rank)
        return await (self._invite(invitation, come) if comm.rank == 0 else self._invited())

    async def _grown(self, assignment: Assignment, limit: float) -> Any:
        """Meet the newcomers, and continue with them only if all ranks of this group do."""
        comm = self._comm
        agreement = comm.endpoint.agreements.voter(comm.id, comm.growths, comm.ranks)
        try:
            group = await self._unless_revoked(self._meet_anew(assignment, limit, comm.timeout))
        except BaseException as error:
            agreement.decline(assignment.prefix, str(error) or "a rank was cancelled")
            raise
        try:
            await agreement.grow(assignment.prefix)
        except BaseException:
            await group.shutdown()
            raise
        # Tell the newcomers that this group continues: one that is not told does not continue. If the group fails now,
        # the next call on it says so.
        with contextlib.suppress(GroupError):
            await group.broadcast_object(True, 0, key=ADOPTED)
        return group

    async def _invite(self, invitation: Invitation, limit: float) -> Assignment:
        """As rank 0, wait for the newcomers, and tell the other ranks the outcome."""
        comm = self._comm
        try:
            assignment = await self._origin.invite(invitation, limit)
        except StoreTimeoutError as error:
            text = (
                f"group {comm.name!r} cannot grow: the store where its ranks met has stopped ({error}), so newcomers "
                "do not find it. Continue the process that serves it, and call grow() again"
            )
            self._tell(text, gone=True)
            raise StoreUnavailableError(text) from error
        except StoreUnavailableError as error:
            await self._dispatcher.runtime.sleep(NEWS)
            text = (
                f"group {comm.name!r} cannot grow: the store where its ranks met is gone ({error}), so "
                "newcomers do not find it. Start all ranks again, and host the store outside of them: run a "
                "StoreServer in the process that starts them, and give them AIOCOLL_STORE=launcher and its address as "
                "MASTER_ADDR and MASTER_PORT"
            )
            self._tell(text, gone=True)
            raise StoreUnavailableError(text) from error
        except BaseException as error:
            self._tell(f"group {comm.name!r} did not grow: {str(error) or 'rank 0 was cancelled'}")
            raise
        return await self._pass_on(assignment)

    # -- splitting

    def split(
        self,
        ranks: Any,
        timeout: Timeout,
        group_name: str | None,
        is_ending: bool,
        local: bool = False,
        order: str = "group",
    ) -> Work[Any]:
        """Make a group of some of the ranks, or several disjoint groups."""
        comm, d = self._comm, self._dispatcher
        self._check_open(is_ending)
        limit = d.limit(timeout)
        _check_name(group_name)
        if order not in ("group", "given"):
            raise ValueError(f"order={order!r} must be 'group' or 'given'")
        mine = next((each for each in _disjoint(ranks, d.check_rank) if d.rank in each), [])
        if mine and any(group.name == group_name for group in d.endpoint.groups.values()):
            raise ValueError(f"group_name={group_name!r} is the name of an open group; give every group its own")
        members = mine if order == "given" else sorted(mine)
        if local:
            made = self._split_locally(members, limit, group_name) if members else None
            return finished_work(d.endpoint, "SPLIT_GROUP", d, made)
        completion = Completion(d.endpoint, "SPLIT_GROUP", None, None, d)
        # Counted first: ranks number their splits in the same way, whatever becomes of them.
        number = len(comm.splits)
        comm.splits.append(None)
        try:
            completion.finish(self._split_off(number, members, limit, group_name))
        except GroupError as error:
            completion.finish(None, error)
        return Work(completion)

    def _split_locally(self, ranks: Sequence[int], limit: float, name: str | None) -> Any:
        """Make a group without the other ranks: these ranks count such calls separately."""
        comm = self._comm
        members = tuple(comm.ranks[rank] for rank in ranks)
        identity = comm.endpoint.group_id(f"{comm.id}\0local\0{members}\0{self._local[members]}")
        self._local[members] += 1
        return self.derive(identity, members, f"{comm.name}/{identity:x}" if name is None else name, limit)

    async def split_by_color(self, color: Any, key: Any, is_ending: Callable[[], bool]) -> Any:
        """Make a group of the ranks that give the same colour, in the order of their keys."""
        comm = self._comm
        self._check_open(is_ending())
        if color is not None and not isinstance(color, str):
            color = to_int(_unless_bool(color), "color", "an int, a str or None")
        asked = [color, to_int(_unless_bool(key), "key")]
        self._objects.dump(asked)  # a colour that cannot be sent raises before a number is taken
        # Taken here, where all ranks make the same calls in the same order, and not when the colours are known.
        number = len(comm.splits)
        comm.splits.append(None)

        def make(rows: list[Any]) -> Any:
            if is_ending():
                return None
            mine = sorted((its, rank) for rank, (each, its) in enumerate(rows) if each == color and color is not None)
            return self._split_off(number, [rank for _, rank in mine], comm.timeout, None)

        # Made even if this task is cancelled before the colours are known: the other ranks count on this one.
        group = await self._objects.allgather(asked, None, None, make)
        self._check_open(is_ending())
        return group

    def _check_open(self, is_ending: bool) -> None:
        self._dispatcher.check()
        if is_ending:
            raise GroupClosedError(f"group {self._comm.name!r} is being closed by this rank", group=self._comm.name)

    def _split_off(self, number: int, mine: Sequence[int], limit: float, name: str | None) -> Any:
        """Make the group of the ranks `mine` by split `number` of this one; None if there are none."""
        comm = self._comm
        split = comm.splits[number] = Split(comm.id, number, name, tuple(comm.ranks[rank] for rank in mine))
        if not mine:
            return None
        # Each group of one call has its own lowest rank.
        name = f"{comm.name}/{number}.{min(mine)}" if name is None else name
        group = self.derive(split.identity(), split.ranks, name, limit)
        parts_of(group).comm.sender.split_off(comm.sender, split)
        return group

    def derive(self, identity: int, ranks: Sequence[int], name: str, timeout: float) -> Any:
        """Make a group of some ranks, numbered as in the job, that is closed together with this one."""
        spec = self._spec._replace(name=name, timeout=timeout, completed=(None, None))
        group = self._origin.derive(identity, ranks, spec)
        self._adopt(group)
        return group

    def open_groups(self) -> list[Any]:
        """Return this group and the open groups split off from it."""
        return [self._dispatcher.group, *(group for part in self.parts.values() for group in part.open_groups())]

    def leave_parent(self) -> None:
        """This group is closed."""
        if self.parent is not None:
            del self.parent.parts[self._dispatcher.group]

    def _adopt(self, group: Any) -> None:
        """Close `group` with this one."""
        family = parts_of(group).reconfigurer
        family.parent = self
        self.parts[group] = family

    # -- merging

    async def merge(self, store: Store, size: int, timeout: Timeout, group_name: str | None) -> Any:
        """Make a group of all ranks of this one and of others that it has never met."""
        comm, d = self._comm, self._dispatcher
        if not isinstance(store, Store):
            raise TypeError(f"store must be a Store, not {type(store).__name__}")
        size = to_int(size, "size")
        if size < d.size:
            raise ValueError(f"size={size}: the new group has all {d.size} ranks of this one, and more")
        _check_name(group_name)
        limit = d.limit(timeout)
        name = "merged" if group_name is None else group_name
        d.check()
        return await self._unless_revoked(
            self._merge(store, Party(min(comm.ranks), comm.name, 0, d.size, size), name, limit)
        )

    async def _merge(self, store: Store, party: Party, name: str, limit: float) -> Any:
        comm = self._comm
        asked = await self._objects.allgather([party.size, name], limit, None)
        if any(each != asked[0] for each in asked):
            raise ValueError(f"the ranks of group {comm.name!r} called merge_remote_group() with [size, name]={asked}")
        if self._origin.dry:
            assignment = Assignment("", comm.rank, party.size, name)
        elif comm.rank != 0:
            assignment = await self._invited()
        else:
            assignment = await self._find_assignment(store, party, name, limit)
        async with self._calling_off(assignment, store):
            return await self._meet_anew(assignment, limit, limit, store)

    async def _find_assignment(self, store: Store, party: Party, name: str, limit: float) -> Assignment:
        """As rank 0, find the other groups, and tell the ranks of this one the outcome."""
        try:
            assignment = await find_assignment(store, party, name, limit)
        except BaseException as error:
            gone = isinstance(error, StoreUnavailableError)
            if gone:
                await self._dispatcher.runtime.sleep(NEWS)
            self._tell(f"group {party.name!r} was not merged: {str(error) or 'rank 0 was cancelled'}", gone=gone)
            raise
        return await self._pass_on(assignment, store)

    # -- meeting other ranks

    async def _meet_anew(self, assignment: Assignment, limit: float, timeout: float, store: Store | None = None) -> Any:
        """Meet the newcomers."""
        self._dispatcher.check()
        spec = self._spec._replace(name=assignment.name, timeout=timeout, completed=(None, None))
        try:
            return await self._origin.meet_anew(assignment, limit, spec, store)
        except AiocollError as error:
            if not isinstance(error.__cause__, TimeoutError):
                await self._dispatcher.runtime.sleep(NEWS)
            raise

    async def _unless_revoked(self, doing: Coroutine[Any, Any, T]) -> T:
        """Return the result of `doing`; if this group fails or is closed meanwhile, cancel it and raise the reason."""
        comm, d = self._comm, self._dispatcher
        task = d.loop.create_task(doing, name=f"aiocoll growth of {comm.name}")

        def stop() -> None:
            if comm.cause is not None:
                d.failures.retrieved(comm.cause)  # it is raised below
            task.cancel()

        comm.on_revoked.append(stop)
        try:
            return await task
        except asyncio.CancelledError:
            current = asyncio.current_task()
            if current is None or current.cancelling() or not (d.closed or comm.cause):
                raise
        except GroupError:
            if comm.cause is None:
                raise
        finally:
            comm.on_revoked.remove(stop)
        if comm.cause is None:
            raise d.closed_error()
        raise failure_by(comm.cause)

    @contextlib.asynccontextmanager
    async def _calling_off(self, assignment: Assignment, store: Store | None = None) -> AsyncIterator[None]:
        """If the block fails, tell the newcomers that have an assignment not to wait for this group.

        A task that is cancelled before it has begun runs none of its code, so this is no part of what a task runs.
        """
        try:
            yield
        except BaseException as error:
            cause = self._comm.cause
            reason = f"does not: {str(error) or 'a rank was cancelled'}" if cause is None else f"has failed: {cause}"
            await self._origin.call_off(assignment, f"the group that was to meet them {reason}", store)
            raise

    async def _pass_on(self, assignment: Assignment, store: Store | None = None) -> Assignment:
        """As rank 0, send the others their assignments."""
        async with self._calling_off(assignment, store):
            await self._objects.broadcast({"seat": list(assignment)}, 0, None, None)
        return assignment

    def _tell(self, text: str, gone: bool = False) -> None:
        """Raise the error on the other ranks, too, unless the group has failed: then they know."""
        with contextlib.suppress(GroupError):
            # Rank 0 raises without waiting for the others; it may even be cancelled.
            work = self._objects.broadcast({"error": text, "gone": gone}, 0, None, None)
            completion_of(work).note_await()

    async def _invited(self) -> Assignment:
        # Rank 0 enforces the timeout; its death, or a failure of the group, ends this wait.
        told = await self._objects.broadcast(None, 0, float("inf"), None)
        if "error" in told:
            raise (StoreUnavailableError if told["gone"] else RendezvousError)(told["error"])
        assignment = Assignment(*told["seat"])
        return assignment._replace(rank=assignment.rank + self._comm.rank)


def _following(name: str) -> str:
    """Return the name of the group that comes after the one called `name`."""
    first, _, number = name.rpartition("~")
    return f"{first}~{int(number) + 1}" if first and number.isdecimal() else f"{name}~1"


def strip_generation(name: str) -> str:
    """Return a name without the numbers that `shrink` and `grow` append to it, or to the name before a `/`."""
    return re.sub(r"~\d+(?=/|$)", "", name) if "~" in name else name


def _unless_bool(value: Any) -> Any:
    """Return a bool, which may be a colour, as the integer that it is; else `value`."""
    return int(value) if isinstance(value, bool) else value


def _check_name(name: Any) -> None:
    if name is not None and not isinstance(name, str):
        raise TypeError(f"group_name must be a str or None, not {type(name).__name__}")
    if name is not None:
        count_bytes("group_name", name)


def _disjoint(ranks: Any, check_rank: Callable[[Any, str], int]) -> list[list[int]]:
    """Return the lists of ranks in `ranks`, checked."""
    if isinstance(ranks, (str, bytes)) or not hasattr(ranks, "__iter__"):
        raise TypeError(f"ranks must be a list of ranks, or a list of such lists, not {type(ranks).__name__}")
    given = list(ranks)
    # An array of no dimensions, which is a number, cannot be iterated over in spite of its method.
    nested = bool(given) and all(hasattr(each, "__iter__") and getattr(each, "shape", None) != () for each in given)
    lists = {f"ranks[{index}]": list(each) for index, each in enumerate(given)} if nested else {"ranks": given}
    owners: dict[int, str] = {}
    checked = []
    for name, each in lists.items():
        if not each:
            raise ValueError(f"{name} is empty: name at least one rank")
        checked.append([check_rank(rank, f"{name}[{index}]") for index, rank in enumerate(each)])
        for rank in checked[-1]:
            if (owner := owners.setdefault(rank, name)) != name:
                raise ValueError(f"{owner} and {name} both name rank {rank}: groups of one call share no rank")
        if len(set(checked[-1])) < len(each):
            twice = next(rank for rank in checked[-1] if checked[-1].count(rank) > 1)
            raise ValueError(f"{name} names rank {twice} more than once")
    return checked
