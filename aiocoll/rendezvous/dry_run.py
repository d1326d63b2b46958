"""Dry runs with the backend "fake": one rank of a world of any size, whose other ranks do not exist.

    pg = await aiocoll.new_group("fake", rank=3, world_size=1024)

Calls check their arguments, take their sequence numbers and return a `Work`, as in a real group. The work has already
completed. No data was sent, and arrays are unchanged. Arrays that the call allocates have undefined contents. Calls
with objects return only objects of this rank:

    call                result
    broadcast_object    `obj` at the root, else None
    allgather_object    `obj` of this rank, once per rank
    gather_object       `obj` of this rank, once per rank, at the root, else None
    scatter_object      the entry of `objs` for this rank at the root, else None
    alltoall_object     the entry of `objs` for this rank, once per rank
    recv_object         None

`recv`, `recv_anysource` and `recv_object` report the requested source, or the lowest other rank if any was accepted.
`incoming` waits until the group is closed. `shrink` and `grow` succeed as if all ranks called them.

Cost: a group of 100,000 ranks takes about 0.05 s and 25 MB. A call takes the time of checking its arguments.
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
    """The endpoint, store and tuning that all groups of one dry run share.

    Args:
        rank: this rank.
        world_size: number of ranks.
        options: resolved options of its groups. Estimates of times assume that all ranks run on one host, and use its
            `transport`, or TCP if that is "auto".
    """

    dry = True

    def __init__(self, rank: int, world_size: int, options: GroupOptions) -> None:
        self._endpoint = _PeerlessEndpoint(Runtime.of(asyncio.get_running_loop()), rank, world_size)
        self._tuning = _load_tuning(options)
        self._members = 0
        self._store = HashStore()

    def store(self, identity: int) -> Store:
        """Return a store for the keys of a group, in which only this rank sets keys."""
        return PrefixStore(f"group/{identity:x}", self._store)

    def group(self, spec: GroupSpec) -> ProcessGroup:
        """Make a group of all ranks."""
        name = "world:0" if spec.name is None else spec.name
        identity = self._endpoint.group_id(name)
        return self.derive(identity, range(self._endpoint.world_size), spec._replace(name=name))

    def derive(self, identity: int, ranks: Sequence[int], spec: GroupSpec) -> ProcessGroup:
        """Make a group of the given ranks."""
        self._members += 1
        comm = Communicator(self._endpoint, identity, ranks, spec, 0, self._tuning)
        self._endpoint.add(comm)
        return ProcessGroup(comm, spec, self)

    async def invite(self, invitation: Invitation, timeout: float) -> Assignment:
        """Pretend that the highest number of newcomers that the invitation permits has arrived."""
        return Assignment("", self._endpoint.rank, invitation.size + invitation.most, invitation.name)

    async def await_newcomer(self) -> None:
        """Return at once, as if all wanted newcomers had arrived."""

    async def rendezvous_again(
        self, assignment: Assignment, limit: float, spec: GroupSpec, store: Store | None = None
    ) -> ProcessGroup:
        """Make a group that includes the simulated newcomers."""
        return World(assignment.rank, assignment.world_size, spec.options).group(spec)

    async def call_off(self, assignment: Assignment, reason: str, store: Store | None = None) -> None:
        """Do nothing, since a dry run has no newcomers."""

    async def release(self) -> None:
        """Release a closed group; the last group closes the endpoint."""
        self._members -= 1
        if not self._members:
            await self._endpoint.aclose()

    def drop(self, group: ProcessGroup) -> None:
        """Do nothing, since a dry run has no sockets and no threads."""


def _load_tuning(options: GroupOptions) -> Tuning:
    tuning = load(options.tuning, os.environ) or Tuning()
    return tuning.over((TCP if options.transport == AUTO else find_transport(options.transport)).medium)


class _PeerlessEndpoint(Endpoint):
    """An endpoint without peers, whose only channel stands for the channels to all ranks."""

    def __init__(self, runtime: Runtime, rank: int, world_size: int) -> None:
        super().__init__(runtime, MemoryTransport(Hub(runtime), rank), rank, world_size, 0.0, False)
        self.set_cards(_SameCards({"host": "", "loop": "", "process": (0, 0, 0), "piece": 0}))

    def _make_control(self, context: Context) -> ControlPlane:
        return _DiscardingControlPlane(context)

    def _make_channels(self, groups: Groups, roster: Roster, detector: FailureDetector) -> Channels:
        return _SingleChannel(self.context, groups, roster, detector, self.polling)

    def _make_agreements(self, parts: Parts) -> Agreements:
        return _UnanimousAgreements(parts, self.registry.record_name)

    def add(self, group: Communicator) -> None:
        self.groups[group.id] = group

    def leave(self, group: Communicator) -> None:
        self.groups.pop(group.id, None)
        group.close()

    async def aclose(self) -> None:
        self.context.closed = True
        self.watch.close()
        await self.context.stop_tasks()


class _SingleChannel(Channels):
    """A table of channels with the same channel for all ranks."""

    def to(self, rank: int) -> Channel:
        return super().to(-1)


class _UnanimousAgreements(Agreements):
    """Agreements in which all ranks vote as this rank does."""

    def voter(self, identity: int, number: int, ranks: Sequence[int]) -> Voter:
        return self.voters.setdefault(
            (identity, number, tuple(ranks)), _UnopposedVoter(self.parts, identity, number, ranks)
        )


class _DiscardingControlPlane(ControlPlane):
    """A control plane without links that discards all messages."""

    def send(self, rank: int, message: ControlMessage) -> None:
        pass

    def send_to_others(self, message: ControlMessage, ranks: Sequence[int]) -> None:
        pass


class _UnopposedVoter(Voter):
    """A voter whose peers agree with this rank."""

    async def shrink(self, exclude: Iterable[int], assume_dead: Iterable[int], completed: dict[str, Any]) -> Outcome:
        self.set_taken()
        members = sorted(set(self.ranks).difference(exclude, assume_dead))
        return {"members": members, "everywhere": completed, "somewhere": completed}

    async def grow(self, successor: str) -> None:
        pass


class _SameCards(dict[int, Card]):
    """A mapping of every rank to the same card."""

    def __init__(self, card: Card) -> None:
        super().__init__()
        self._card = card

    def __missing__(self, rank: int) -> Card:
        return self._card
