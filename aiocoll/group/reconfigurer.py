"""Groups made from other groups: `shrink`, `grow`, `split_group`, `split` and `merge_remote_group`."""

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

#: Key of the first call in a grown group: a broadcast that confirms to the newcomers that the old ranks continue.
ADOPTED = "aiocoll/adopted"
#: Seconds within which the group detects a death (contract: 1 s). A store or a new connection may notice it earlier.
DETECTION_TIME = 1.0


class Reconfigurer:
    """The component that makes new groups from a group. `ProcessGroup` documents the calls.

    Args:
        dispatcher: dispatcher of the group.
        objects: the object collectives of the group.
        origin: the origin of the group.
        spec: name and options of the group.

    Attributes:
        parent: reconfigurer of the group that this group was split off from; None without one.
        parts: open groups split off from this group, with their reconfigurers.
    """

    def __init__(self, dispatcher: Dispatcher, objects: Objects, origin: Origin, spec: GroupSpec) -> None:
        self.parent: Reconfigurer | None = None
        self.parts: dict[Any, Reconfigurer] = {}
        # Maps each list of ranks to the number of local splits made of it so far.
        self._local: Counter[tuple[int, ...]] = Counter()
        self._dispatcher = dispatcher
        self._comm = dispatcher.comm
        self._objects = objects
        self._origin = origin
        self._spec = spec

    # -- shrinking

    async def shrink(self, exclude: Iterable[int] | None, assume_dead: Iterable[int] | None) -> Any:
        """Make a group of the ranks of this group that are alive."""
        comm, d = self._comm, self._dispatcher
        excluded = self._check_others(exclude, "exclude")
        assumed = self._check_others(assume_dead, "assume_dead")
        d.check_owner()
        agreement = comm.endpoint.agreements.voter(comm.id, comm.growths, comm.ranks)
        if agreement.taken:
            raise GroupError(
                f"group {comm.name!r}, rank {d.rank}: shrink() was already called; use the group it returned",
                group=comm.name,
            )
        comm.revoke(
            GroupError(
                f"group {comm.name!r} was replaced: rank {d.rank} called shrink()",
                group=comm.name,
                ranks=[d.rank],
            ),
            # Notify the other ranks only if operations are in flight here. Otherwise, let them complete the operations
            # that are already complete here.
            notify=bool(len(comm.in_flight)),
        )
        outcome = await agreement.shrink(excluded, assumed, report(comm))
        members: list[int] = sorted(outcome["members"], key=comm.ranks.index)
        completed = Completed.of(outcome["everywhere"]), Completed.of(outcome["somewhere"])
        spec = self._spec._replace(name=_successor_name(comm.name), timeout=comm.timeout, completed=completed)
        group = self._origin.derive(agreement.identity(outcome["members"]), members, spec)
        if self.parent is not None:
            self.parent._add_part(group)
        return group

    def _check_others(self, ranks: Iterable[int] | None, what: str) -> set[int]:
        """Check the ranks to exclude, which must not include this rank; return their ranks in the job."""
        comm, d = self._comm, self._dispatcher
        found = {comm.ranks[d.check_rank(rank, what)] for rank in ranks or ()}
        if comm.endpoint.rank in found:
            raise ValueError(f"{what} names this rank, {d.rank}: a rank that leaves must not call shrink()")
        return found

    # -- growing

    async def grow(self, n: int, timeout: Timeout, at_least: int | None) -> Any:
        """Make a group of this group's ranks and newcomers."""
        least = n if at_least is None else at_least
        n, least = to_int(n, "n"), to_int(least, "at_least")
        if n < 1:
            raise ValueError(f"n={n}: the number of newcomers must be at least 1")
        if not 1 <= least <= n:
            raise ValueError(f"at_least={least}: must be from 1 to n={n}")
        limit = self._dispatcher.limit(timeout)
        return await self.take_in(n, least, limit, limit)

    async def take_in(self, most: int, least: int, come: float, meet: float) -> Any:
        """Make a group of this group's ranks and `least` to `most` newcomers.

        Args:
            most: most newcomers to add.
            least: fewest newcomers to continue with at the timeout.
            come: seconds to wait for newcomers.
            meet: seconds for all ranks to meet.
        """
        comm = self._comm
        self._dispatcher.check()
        invitation = Invitation(most, least, len(comm.ranks), _successor_name(comm.name))
        assignment = await self._run_until_revoked(self._assign(invitation, come, meet))
        async with self._notify_newcomers_on_failure(assignment):
            return await self._meet_newcomers(assignment, meet)

    async def await_newcomer(self) -> None:
        """Wait until a newcomer has arrived."""
        await self._origin.await_newcomer()

    async def _assign(self, invitation: Invitation, come: float, meet: float) -> Assignment:
        comm = self._comm
        most, least = zip(*await self._objects.allgather(invitation[:2], meet, None), strict=True)
        for name, asked in (("n", most), ("at_least", least)):
            if len(set(asked)) > 1:
                raise ValueError(
                    f"the ranks of group {comm.name!r} called grow() with {name}={list(asked)}: pass the same {name}"
                )
        if self._origin.dry:
            return (await self._origin.invite(invitation, come))._replace(rank=comm.rank)
        return await (self._invite(invitation, come) if comm.rank == 0 else self._receive_assignment())

    async def _meet_newcomers(self, assignment: Assignment, limit: float) -> Any:
        """Meet the newcomers; agree with all ranks of this group to continue in the new group."""
        comm = self._comm
        agreement = comm.endpoint.agreements.voter(comm.id, comm.growths, comm.ranks)
        try:
            group = await self._run_until_revoked(self._meet(assignment, limit, comm.timeout))
        except BaseException as error:
            agreement.decline(assignment.prefix, str(error) or "a rank was cancelled")
            raise
        try:
            await agreement.grow(assignment.prefix)
        except BaseException:
            await group.shutdown()
            raise
        # Confirm to the newcomers that this group continues. Without the confirmation, they do not continue. If the new
        # group fails now, its next call raises the error.
        with contextlib.suppress(GroupError):
            await group.broadcast_object(True, 0, key=ADOPTED)
        return group

    async def _invite(self, invitation: Invitation, limit: float) -> Assignment:
        """Wait for the newcomers on rank 0, and broadcast the assignment of ranks."""
        comm = self._comm
        try:
            assignment = await self._origin.invite(invitation, limit)
        except StoreTimeoutError as error:
            text = (
                f"group {comm.name!r} cannot grow: the store where its ranks met does not answer ({error}), so "
                "newcomers cannot find the group. Continue the process that serves the store, and call grow() again"
            )
            self._broadcast_error(text, gone=True)
            raise StoreUnavailableError(text) from error
        except StoreUnavailableError as error:
            await self._dispatcher.runtime.sleep(DETECTION_TIME)
            text = (
                f"group {comm.name!r} cannot grow: the store where its ranks met is gone ({error}), so newcomers "
                "cannot find the group. Restart all ranks, with the store in another process: run a StoreServer in the "
                "process that starts the ranks, and set AIOCOLL_STORE=launcher, and MASTER_ADDR and MASTER_PORT to its "
                "address"
            )
            self._broadcast_error(text, gone=True)
            raise StoreUnavailableError(text) from error
        except BaseException as error:
            self._broadcast_error(f"group {comm.name!r} did not grow: {str(error) or 'rank 0 was cancelled'}")
            raise
        return await self._broadcast_assignment(assignment)

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
        """Make a group of some of the ranks, or several groups without common ranks."""
        comm, d = self._comm, self._dispatcher
        self._check_open(is_ending)
        limit = d.limit(timeout)
        _check_name(group_name)
        if order not in ("group", "given"):
            raise ValueError(f"order={order!r} must be 'group' or 'given'")
        mine = next((each for each in _check_disjoint(ranks, d.check_rank) if d.rank in each), [])
        if mine and any(group.name == group_name for group in d.endpoint.groups.values()):
            raise ValueError(f"group_name={group_name!r} is the name of an open group; give every group its own")
        members = mine if order == "given" else sorted(mine)
        if local:
            made = self._split_locally(members, limit, group_name) if members else None
            return finished_work(d.endpoint, "SPLIT_GROUP", d, made)
        completion = Completion(d.endpoint, "SPLIT_GROUP", None, None, d)
        # Take the split number first, so that all ranks number their splits equally even if one split fails.
        number = len(comm.splits)
        comm.splits.append(None)
        try:
            completion.finish(self._split_off(number, members, limit, group_name))
        except GroupError as error:
            completion.finish(None, error)
        return Work(completion)

    def _split_locally(self, ranks: Sequence[int], limit: float, name: str | None) -> Any:
        """Make a group without communication. The group's id includes the number of earlier groups of these ranks."""
        comm = self._comm
        members = tuple(comm.ranks[rank] for rank in ranks)
        identity = comm.endpoint.group_id(f"{comm.id}\0local\0{members}\0{self._local[members]}")
        self._local[members] += 1
        return self.derive(identity, members, f"{comm.name}/{identity:x}" if name is None else name, limit)

    async def split_by_color(self, color: Any, key: Any, is_ending: Callable[[], bool]) -> Any:
        """Make a group of the ranks that pass the same color, sorted by the keys that they pass."""
        comm = self._comm
        self._check_open(is_ending())
        if color is not None and not isinstance(color, str):
            color = to_int(_bool_to_int(color), "color", "an int, a str or None")
        asked = [color, to_int(_bool_to_int(key), "key")]
        self._objects.dump(asked)  # check before the call takes a number: a color that cannot be encoded must raise now
        # Take the split number here, in call order. After the exchange of colors, the order may differ between ranks.
        number = len(comm.splits)
        comm.splits.append(None)

        def make(rows: list[Any]) -> Any:
            if is_ending():
                return None
            mine = sorted((its, rank) for rank, (each, its) in enumerate(rows) if each == color and color is not None)
            return self._split_off(number, [rank for _, rank in mine], comm.timeout, None)

        # Make the group even if this task is cancelled, because the other ranks expect this rank in it.
        group = await self._objects.allgather(asked, None, None, make)
        self._check_open(is_ending())
        return group

    def _check_open(self, is_ending: bool) -> None:
        self._dispatcher.check()
        if is_ending:
            raise GroupClosedError(f"group {self._comm.name!r} is being closed by this rank", group=self._comm.name)

    def _split_off(self, number: int, mine: Sequence[int], limit: float, name: str | None) -> Any:
        """Make the group of the ranks `mine` for split `number` of this group; return None if `mine` is empty."""
        comm = self._comm
        split = comm.splits[number] = Split(comm.id, number, name, tuple(comm.ranks[rank] for rank in mine))
        if not mine:
            return None
        # Groups that one call makes differ in their lowest rank, which makes the default names unique.
        name = f"{comm.name}/{number}.{min(mine)}" if name is None else name
        group = self.derive(split.identity(), split.ranks, name, limit)
        parts_of(group).comm.sender.split_off(comm.sender, split)
        return group

    def derive(self, identity: int, ranks: Sequence[int], name: str, timeout: float) -> Any:
        """Make a group of these ranks of the job. Closing this group also closes the new group."""
        spec = self._spec._replace(name=name, timeout=timeout, completed=(None, None))
        group = self._origin.derive(identity, ranks, spec)
        self._add_part(group)
        return group

    def open_groups(self) -> list[Any]:
        """Return this group and the open groups that were split off from it."""
        return [self._dispatcher.group, *(group for part in self.parts.values() for group in part.open_groups())]

    def leave_parent(self) -> None:
        """Remove this closed group from the list of groups that its parent closes."""
        if self.parent is not None:
            del self.parent.parts[self._dispatcher.group]

    def _add_part(self, group: Any) -> None:
        """Add `group` to the groups that closing this group also closes."""
        family = parts_of(group).reconfigurer
        family.parent = self
        self.parts[group] = family

    # -- merging

    async def merge(self, store: Store, size: int, timeout: Timeout, group_name: str | None) -> Any:
        """Make a group of all ranks of this group and of groups of other jobs."""
        comm, d = self._comm, self._dispatcher
        if not isinstance(store, Store):
            raise TypeError(f"store must be a Store, not {type(store).__name__}")
        size = to_int(size, "size")
        if size < d.size:
            raise ValueError(f"size={size} must be at least {d.size}: the new group includes all ranks of this group")
        _check_name(group_name)
        limit = d.limit(timeout)
        name = "merged" if group_name is None else group_name
        d.check()
        return await self._run_until_revoked(
            self._merge(store, Party(min(comm.ranks), comm.name, 0, d.size, size), name, limit)
        )

    async def _merge(self, store: Store, party: Party, name: str, limit: float) -> Any:
        comm = self._comm
        asked = await self._objects.allgather([party.size, name], limit, None)
        if any(each != asked[0] for each in asked):
            raise ValueError(
                f"the ranks of group {comm.name!r} called merge_remote_group() with [size, name]={asked}: "
                "pass the same values"
            )
        if self._origin.dry:
            assignment = Assignment("", comm.rank, party.size, name)
        elif comm.rank != 0:
            assignment = await self._receive_assignment()
        else:
            assignment = await self._find_assignment(store, party, name, limit)
        async with self._notify_newcomers_on_failure(assignment, store):
            return await self._meet(assignment, limit, limit, store)

    async def _find_assignment(self, store: Store, party: Party, name: str, limit: float) -> Assignment:
        """Find the groups of the other jobs on rank 0, and broadcast the resulting assignment."""
        try:
            assignment = await find_assignment(store, party, name, limit)
        except BaseException as error:
            gone = isinstance(error, StoreUnavailableError)
            if gone:
                await self._dispatcher.runtime.sleep(DETECTION_TIME)
            self._broadcast_error(
                f"group {party.name!r} was not merged: {str(error) or 'rank 0 was cancelled'}", gone=gone
            )
            raise
        return await self._broadcast_assignment(assignment, store)

    # -- meeting other ranks

    async def _meet(self, assignment: Assignment, limit: float, timeout: float, store: Store | None = None) -> Any:
        """Meet the other ranks of the new group, and make it."""
        self._dispatcher.check()
        spec = self._spec._replace(name=assignment.name, timeout=timeout, completed=(None, None))
        try:
            return await self._origin.rendezvous_again(assignment, limit, spec, store)
        except AiocollError as error:
            if not isinstance(error.__context__, TimeoutError):
                await self._dispatcher.runtime.sleep(DETECTION_TIME)
            raise

    async def _run_until_revoked(self, doing: Coroutine[Any, Any, T]) -> T:
        """Await `doing`; if this group fails or is closed first, cancel `doing` and raise the cause."""
        comm, d = self._comm, self._dispatcher
        task = d.loop.create_task(doing, name=f"aiocoll growth of {comm.name}")

        def stop() -> None:
            if comm.cause is not None:
                d.failures.retrieved(comm.cause)  # the cause is raised below
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
    async def _notify_newcomers_on_failure(
        self, assignment: Assignment, store: Store | None = None
    ) -> AsyncIterator[None]:
        """Notify the assigned newcomers, if this block fails, that the ranks of this group will not meet them.

        This must enclose the task that does the work: a task cancelled before its first step runs none of its code.
        """
        try:
            yield
        except BaseException as error:
            cause = self._comm.cause
            reason = f"does not: {str(error) or 'a rank was cancelled'}" if cause is None else f"has failed: {cause}"
            await self._origin.call_off(assignment, f"the group that was to meet them {reason}", store)
            raise

    async def _broadcast_assignment(self, assignment: Assignment, store: Store | None = None) -> Assignment:
        """Broadcast the assignment of ranks from rank 0 to the other ranks."""
        async with self._notify_newcomers_on_failure(assignment, store):
            await self._objects.broadcast({"seat": list(assignment)}, 0, None, None)
        return assignment

    def _broadcast_error(self, text: str, gone: bool = False) -> None:
        """Raise rank 0's error on the other ranks, too, unless a failure of the group already reports it there."""
        with contextlib.suppress(GroupError):
            # Do not wait for this broadcast: rank 0 raises its error at once, and may have been cancelled.
            work = self._objects.broadcast({"error": text, "gone": gone}, 0, None, None)
            completion_of(work).note_await()

    async def _receive_assignment(self) -> Assignment:
        # No timeout here: rank 0 enforces it, and the death of rank 0 or a failure of the group ends this wait.
        outcome = await self._objects.broadcast(None, 0, float("inf"), None)
        if "error" in outcome:
            raise (StoreUnavailableError if outcome["gone"] else RendezvousError)(outcome["error"])
        assignment = Assignment(*outcome["seat"])
        return assignment._replace(rank=assignment.rank + self._comm.rank)


def _successor_name(name: str) -> str:
    """Return the name of the successor of the group `name`."""
    first, _, number = name.rpartition("~")
    return f"{first}~{int(number) + 1}" if first and number.isdecimal() else f"{name}~1"


def strip_generation(name: str) -> str:
    """Return a group name without the numbers that `shrink` and `grow` append to it or to its parent's name."""
    return re.sub(r"~\d+(?=/|$)", "", name) if "~" in name else name


def _bool_to_int(value: Any) -> Any:
    """Return a bool as an int, and any other value unchanged."""
    return int(value) if isinstance(value, bool) else value


def _check_name(name: Any) -> None:
    if name is not None and not isinstance(name, str):
        raise TypeError(f"group_name must be a str or None, not {type(name).__name__}")
    if name is not None:
        count_bytes("group_name", name)


def _check_disjoint(ranks: Any, check_rank: Callable[[Any, str], int]) -> list[list[int]]:
    """Return the lists in `ranks`; raise an error if one is invalid or two have a rank in common."""
    if isinstance(ranks, (str, bytes)) or not hasattr(ranks, "__iter__"):
        raise TypeError(f"ranks must be a list of ranks, or a list of such lists, not {type(ranks).__name__}")
    given = list(ranks)
    # A 0-dimensional array counts as a number: it has `__iter__`, but cannot be iterated over.
    nested = bool(given) and all(hasattr(each, "__iter__") and getattr(each, "shape", None) != () for each in given)
    lists = {f"ranks[{index}]": list(each) for index, each in enumerate(given)} if nested else {"ranks": given}
    owners: dict[int, str] = {}
    checked = []
    for name, each in lists.items():
        if not each:
            raise ValueError(f"{name} is empty: it must name at least one rank")
        checked.append([check_rank(rank, f"{name}[{index}]") for index, rank in enumerate(each)])
        for rank in checked[-1]:
            if (owner := owners.setdefault(rank, name)) != name:
                raise ValueError(f"{owner} and {name} both name rank {rank}: lists of one call must not share ranks")
        if len(set(checked[-1])) < len(each):
            twice = next(rank for rank in checked[-1] if checked[-1].count(rank) > 1)
            raise ValueError(f"{name} names rank {twice} more than once")
    return checked
