"""The backend "fake": one rank of a world of any size, without the others; for dry runs.

    pg = await aiocoll.new_group("fake", rank=3, world_size=1024)

Calls check their arguments, take their sequence numbers and return a `Work` as always, and it has completed already:
nothing was sent, and arrays are unchanged (arrays that the call allocates have undefined contents). A rank knows only
its own objects:

    call                result
    broadcast_object    `obj` at the root, else None
    allgather_object    `obj` from every rank
    gather_object       `obj` from every rank at the root, else None
    scatter_object      its own of `objs` at the root, else None
    alltoall_object     from every rank what was meant for it
    recv_object         None
    recv, recv_anysource, recv_object    from the rank asked for, else from the lowest other one

`incoming` waits until the group is closed; `shrink` and `grow` succeed as if all ranks called them.

Cost: a group of 100,000 ranks takes about 0.05 s and 25 MB; a call takes the time of checking its arguments.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable, Sequence
from typing import Any

from aiocoll.algorithms.machine import Tuning
from aiocoll.engine.channels import Channels
from aiocoll.engine.communicator import Communicator
from aiocoll.engine.consensus.agreements import Agreements
from aiocoll.engine.consensus.parts import Parts
from aiocoll.engine.consensus.voter import Outcome, Voter
from aiocoll.engine.control.messages import ControlMessage
from aiocoll.engine.control.star import ControlPlane
from aiocoll.engine.endpoint import Endpoint
from aiocoll.engine.failure.failure_detector import FailureDetector
from aiocoll.engine.failure.roster import Roster
from aiocoll.engine.group_spec import GroupSpec
from aiocoll.engine.groups import Groups
from aiocoll.engine.job.context import Context
from aiocoll.engine.links.channel import Channel
from aiocoll.group.process_group import ProcessGroup
from aiocoll.meeting.growth import Assignment, Invitation
from aiocoll.options import GroupOptions
from aiocoll.runtime import Runtime
from aiocoll.store import HashStore, PrefixStore, Store
from aiocoll.transport.base import Card
from aiocoll.transport.memory import Hub, MemoryTransport
from aiocoll.transport.registry import AUTO, TCP, find_transport
from aiocoll.tuning import load

__all__ = ["World"]


class World:
    """What the groups of one dry run share; the origin of each of them (see `aiocoll.group.dispatch.origin.Origin`).

    Args:
        rank: this rank.
        world_size: number of ranks.
        options: of its groups, resolved. Times are estimated for all ranks on one host, which exchange messages over
            its `transport`, or TCP if that is "auto".
    """

    dry = True

    def __init__(self, rank: int, world_size: int, options: GroupOptions) -> None:
        self._endpoint = _Nowhere(Runtime.of(asyncio.get_running_loop()), rank, world_size)
        self._tuning = _tuning(options)
        self._members = 0
        self._store = HashStore()

    def store(self, identity: int) -> Store:
        """Return the keys of a group, of which this rank sets all."""
        return PrefixStore(f"group/{identity:x}", self._store)

    def group(self, spec: GroupSpec) -> ProcessGroup:
        """Make a group of all ranks."""
        name = "world:0" if spec.name is None else spec.name
        identity = self._endpoint.group_id(name)
        return self.derive(identity, range(self._endpoint.world_size), spec._replace(name=name))

    def derive(self, identity: int, ranks: Sequence[int], spec: GroupSpec) -> ProcessGroup:
        """Make a group of some of the ranks."""
        self._members += 1
        comm = Communicator(self._endpoint, identity, ranks, spec, 0, self._tuning)
        self._endpoint.add(comm)
        return ProcessGroup(comm, spec, self)

    async def invite(self, invitation: Invitation, timeout: float) -> Assignment:
        """Take in as many newcomers as are wanted."""
        return Assignment("", self._endpoint.rank, invitation.size + invitation.most, invitation.name)

    async def await_newcomer(self) -> None:
        """Do not wait: there are as many as are wanted."""

    async def meet_anew(
        self, assignment: Assignment, limit: float, spec: GroupSpec, store: Store | None = None
    ) -> ProcessGroup:
        """Make a group with others."""
        return World(assignment.rank, assignment.world_size, spec.options).group(spec)

    async def call_off(self, assignment: Assignment, reason: str, store: Store | None = None) -> None:
        """Do nothing: there are no newcomers."""

    async def release(self) -> None:
        """A group is closed."""
        self._members -= 1
        if not self._members:
            await self._endpoint.aclose()

    def drop(self, group: ProcessGroup) -> None:
        """Do nothing: a dry run has no sockets and no threads."""


def _tuning(options: GroupOptions) -> Tuning:
    tuning = load(options.tuning, os.environ) or Tuning()
    return tuning.over((TCP if options.transport == AUTO else find_transport(options.transport)).medium)


class _Nowhere(Endpoint):
    """An endpoint without peers, with one channel for all ranks."""

    def __init__(self, runtime: Runtime, rank: int, world_size: int) -> None:
        super().__init__(runtime, MemoryTransport(Hub(runtime), rank), rank, world_size, 0.0, False)
        self.set_cards(_Alike({"host": "", "loop": "", "process": (0, 0, 0), "piece": 0}))

    def _make_control(self, context: Context) -> ControlPlane:
        return _Silent(context)

    def _make_channels(self, groups: Groups, roster: Roster, detector: FailureDetector) -> Channels:
        return _One(self.context, groups, roster, detector, self.polling)

    def _make_agreements(self, parts: Parts) -> Agreements:
        return _Unanimous(parts, self.registry.record_name)

    def add(self, group: Communicator) -> None:
        self.groups[group.id] = group

    def leave(self, group: Communicator) -> None:
        self.groups.pop(group.id, None)
        group.close()

    async def aclose(self) -> None:
        self.context.closed = True
        self.watch.close()
        await self.context.stop_tasks()


class _One(Channels):
    """The same channel to every rank."""

    def to(self, rank: int) -> Channel:
        return super().to(-1)


class _Unanimous(Agreements):
    """Decisions in which all ranks agree with this rank."""

    def voter(self, identity: int, number: int, ranks: Sequence[int]) -> Voter:
        return self.voters.setdefault((identity, number, tuple(ranks)), _Willing(self.parts, identity, number, ranks))


class _Silent(ControlPlane):
    """A control plane without links: what it would send is dropped."""

    def tell(self, rank: int, message: ControlMessage) -> None:
        pass

    def flood(self, message: ControlMessage, ranks: Sequence[int]) -> None:
        pass


class _Willing(Voter):
    """A voter whose peers agree with this rank."""

    async def shrink(self, exclude: Iterable[int], assume_dead: Iterable[int], completed: dict[str, Any]) -> Outcome:
        self.set_taken()
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
