"""The backend "fake": one rank of a world of any size, without the others; for dry runs.

    pg = await aiocoll.new_group("fake", rank=3, world_size=1024)

Calls check their arguments, take their numbers and return a `Work` as always, and it has ended well already: nothing
was sent, and arrays hold what they held before (those that the call allocates, anything). Of objects a rank knows only
its own:

    call                what comes of it
    broadcast_object    `obj` at the root, else None
    allgather_object    `obj` from every rank
    gather_object       `obj` from every rank at the root, else None
    scatter_object      its own of `objs` at the root, else None
    alltoall_object     from every rank what was meant for it
    recv_object         None
    recv, recv_anysource, recv_object    from the rank asked for, else from the lowest other one

`incoming` waits until the group is closed, `shrink` and `grow` find everybody willing.

Cost: a group of 100,000 ranks takes about 0.05 s and 25 MB; a call as long as its arguments take to check.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from aiocoll.algorithms.machine import Tuning
from aiocoll.algorithms.program import Program
from aiocoll.elements.buffers import Buffer
from aiocoll.elements.ops import Kernel
from aiocoll.engine.channels import Channels
from aiocoll.engine.communicator import Communicator
from aiocoll.engine.consensus.agreements import Agreements
from aiocoll.engine.consensus.voter import Outcome, Voter
from aiocoll.engine.control.messages import Note
from aiocoll.engine.control.star import ControlPlane
from aiocoll.engine.endpoint import Endpoint
from aiocoll.engine.groups import Group
from aiocoll.engine.links.channel import Channel
from aiocoll.engine.operations.base import P2P, Operation, Signature
from aiocoll.engine.operations.incremental import Steps, at_once
from aiocoll.engine.operations.plan import Executor, Plan
from aiocoll.group.calls import Call
from aiocoll.group.launch import Timeout
from aiocoll.group.objects import Parcel
from aiocoll.group.process_group import ProcessGroup
from aiocoll.group.recovery import following
from aiocoll.meeting.growth import Assignment
from aiocoll.options import GroupOptions, seconds
from aiocoll.runtime import Runtime
from aiocoll.store import Store
from aiocoll.transport.base import Card
from aiocoll.transport.memory import Hub, MemoryTransport
from aiocoll.tuning import load
from aiocoll.work import Work

if TYPE_CHECKING:
    from aiocoll.group.cuda.messages import DeviceMessages

__all__ = ["FakeGroup", "World"]


class World:
    """What the groups of one dry run share; the origin of each of them (see `aiocoll.group.recovery.Origin`).

    Args:
        rank: this rank.
        world_size: number of ranks.
        options: of its groups, resolved. Times are estimated for all ranks on one host, which exchange messages over
            its `transport`, or TCP if that is "auto".
    """

    def __init__(self, rank: int, world_size: int, options: GroupOptions) -> None:
        self._endpoint = _Nowhere(Runtime.of(asyncio.get_running_loop()), rank, world_size)
        self._options = options
        self._tuning = _tuning(options)
        self._members = 0

    def group(self, name: str | None, timeout: float) -> ProcessGroup:
        """Make a group of all ranks."""
        name = "world:0" if name is None else name
        identity = self._endpoint.hash62(name) & 0xFFFFFFFF
        return self.derive(identity, name, range(self._endpoint.world_size), timeout, self._options)

    def derive(
        self, identity: int, name: str, ranks: Sequence[int], timeout: float, options: GroupOptions
    ) -> ProcessGroup:
        """Make a group of some of the ranks."""
        self._members += 1
        member = Communicator(self._endpoint, identity, name, ranks, 0, timeout, options.warn_after, self._tuning)
        self._endpoint.add(member)
        return FakeGroup(member, options, f"{len(member.ranks)} ranks", self)

    async def invite(self, n: int, size: int, name: str, timeout: float) -> Assignment:
        """Take in `n` newcomers."""
        return Assignment("", self._endpoint.rank, size + n, name)

    async def meet_anew(
        self, seat: Assignment, limit: float, timeout: float, options: GroupOptions, store: Store | None = None
    ) -> ProcessGroup:
        """Make a group with others."""
        return World(seat.rank, seat.world_size, options).group(seat.name, timeout)

    async def call_off(self, seat: Assignment, reason: str, store: Store | None = None) -> None:
        """Nobody waits."""

    async def release(self) -> None:
        """A group is closed."""
        self._members -= 1
        if not self._members:
            await self._endpoint.aclose()


def _tuning(options: GroupOptions) -> Tuning:
    tuning = load(options.tuning, os.environ) or Tuning()
    return tuning.over(options.transport if options.transport != "auto" else "tcp")


class FakeGroup(ProcessGroup):
    """A group whose calls end well at once."""

    def __init__(self, member: Communicator, options: GroupOptions, desc: str, origin: World) -> None:
        super().__init__(member, options, desc, origin)
        self._interceptor = self
        self._diverts = True

    def take(self, call: Call) -> Work[Any]:
        """Take a call that no block takes: number it, as always, and end it."""
        member = self._member
        identity, seq = (P2P, None) if call.terms is None else self._numbered(call.key)
        work: Work[Any] = Work(self._endpoint, call.op, seq, call.key, self, 4)
        call.expect(work)
        terms = Signature(call.op, None, (), None, None) if call.terms is None else call.terms
        member.enter(_Instant(member, identity, terms, 0, work))
        return work

    def _may_differ(self, source: Buffer) -> bool:
        """Nobody else is there to differ."""
        return False

    def _on_device(self, plan: Plan, arrays: list[Any]) -> Executor:
        """Return what is never called: no device is needed."""
        return plan.executor

    def _messages(self, array: Any) -> DeviceMessages:
        """Return what makes operations that are never asked for."""
        from aiocoll.group.cuda.messages import DeviceMessages

        return DeviceMessages(None, array)

    def _program(
        self, kind: str, algorithm: str, sizes: tuple[Any, ...], root: int | None, made: Kernel | None
    ) -> Program:
        """Return no steps: with 100,000 ranks some algorithms have as many."""
        return Program((), (), algorithm)

    def _parcels(
        self,
        op: str,
        root: int | None,
        outgoing: Mapping[int, bytes],
        sources: set[int],
        unpack: Callable[[Parcel], Steps],
        timeout: Timeout,
        key: str | None,
    ) -> Work[Any]:
        """Begin an object collective: what this rank sends comes back, and what it does not know is None."""
        limit = self._member.timeout if timeout is None else seconds(timeout, "timeout")
        known = {rank: memoryview(data) for rank, data in outgoing.items()}
        if not known and root is not None:
            known[root] = memoryview(self._dump(None))
        nbytes = sum(map(len, outgoing.values()))
        terms = Signature(op, "object", (), root, None)
        return self._begin(op, _never, limit, terms, key, result=at_once(unpack(known)), nbytes=nbytes)

    def _list(self, got: Parcel, mine: Any) -> Steps:
        own = memoryview(self._dump(mine))
        return super()._list({rank: got.get(rank, own) for rank in range(self._size)}, mine)

    def _recv(self, buffer: Buffer, src: int | None, tag: int, timeout: Timeout) -> Work[Any]:
        return self._from(src, super()._recv(buffer, src, tag, timeout))

    def _recv_object(self, src: int | None, tag: int, limit: float) -> Work[Any]:
        return self._from(src, super()._recv_object(src, tag, limit))

    def _from(self, src: int | None, work: Work[Any]) -> Work[Any]:
        work._source = src if src is not None else int(self._rank == 0 < self._size - 1)
        return work

    async def _seat(self, n: int, limit: float) -> Assignment:
        seat = await self._origin.invite(n, self._size, following(self._member.name), limit)
        return seat._replace(rank=self._rank)

    async def _merged_seat(self, store: Store, size: int, name: str, limit: float) -> Assignment:
        return Assignment("", self._rank, size, name)


class _Instant(Operation):
    """An operation that ends well at once."""

    __slots__ = ()

    def enter(self) -> None:
        """End."""
        self.succeed(self.work._value)


class _Nowhere(Endpoint):
    """An endpoint that reaches nobody, and has one channel for all of them."""

    def __init__(self, runtime: Runtime, rank: int, world_size: int) -> None:
        super().__init__(runtime, MemoryTransport(Hub(runtime), rank), rank, world_size, 0.0, False)
        self.control = _Silent(self.context)
        self.cards = _Alike({"host": "", "loop": "", "process": (0, 0, 0), "piece": 0})
        self.channels = _One(self.context, self.registry, self.roster, self.failure_detector, self.polling)
        self.agreements = _Unanimous(self.agreements.parts, self.registry.named)

    def add(self, group: Group) -> None:
        self.groups[group.id] = group

    def leave(self, group: Group) -> None:
        self.groups.pop(group.id, None)
        group.close()

    def divert(self, operation: Operation) -> None:
        pass

    async def aclose(self) -> None:
        self.context.closed = True
        self.watch.close()
        await self.context.stop_tasks()


class _One(Channels):
    """The same channel to every rank."""

    def to(self, rank: int) -> Channel:
        return super().to(-1)


class _Unanimous(Agreements):
    """Decisions in which everybody agrees with this rank."""

    def voter(self, identity: int, number: int, ranks: Sequence[int]) -> Voter:
        return self.voters.setdefault((identity, number), _Willing(self.parts, identity, number, ranks))


class _Silent(ControlPlane):
    """A control plane without links: all it would say is lost."""

    def tell(self, rank: int, note: Note) -> None:
        pass

    def flood(self, note: Note, ranks: Sequence[int]) -> None:
        pass


class _Willing(Voter):
    """Everybody agrees with this rank."""

    async def shrink(self, exclude: Iterable[int], assume_dead: Iterable[int], completed: dict[str, Any]) -> Outcome:
        self.taken = True
        members = sorted(set(self.ranks).difference(exclude, assume_dead))
        return {"members": members, "everywhere": completed, "somewhere": completed}

    async def grow(self, successor: str) -> None:
        pass


class _Alike(dict[int, Card]):
    """The same card for every rank."""

    def __init__(self, card: Card) -> None:
        super().__init__()
        self._card = card

    def __missing__(self, rank: int) -> Card:
        return self._card


def _never(identity: int, work: Work[Any]) -> Operation:
    raise AssertionError("nothing is sent")
