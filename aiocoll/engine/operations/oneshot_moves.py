"""The executor of small gathers, scatters and alltoalls in shared memory: ranks post blocks to those they are for.

One step, as for `oneshot`; the plan's program says which block goes to whom. Cost: at most p-1 copies in and p-1 out,
per rank; no messages and no temporary memory. Other ranks may have larger blocks for each other, and carry out a
program (`program_with_slots`): what goes between two ranks is the same then, as is what goes in frames.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from aiocoll.algorithms.program import Verb
from aiocoll.engine.operations.group import Group
from aiocoll.engine.operations.oneshot import OneShot
from aiocoll.engine.operations.pair_slots import slot_of
from aiocoll.engine.operations.plan import Plan
from aiocoll.work import Work

__all__ = ["OneShotMoves"]

_SEND: Final = Verb.SEND
_RECV: Final = Verb.RECV


class OneShotMoves(OneShot):
    """One rank's part in one gather, scatter or alltoall; arguments as for `ProgramExecutor`."""

    __slots__ = ("_into",)

    def __init__(
        self,
        comm: Group,
        identity: int,
        plan: Plan,
        arrays: list[NDArray[Any]],
        work: Work[Any],
    ) -> None:
        OneShot.__init__(self, comm, identity, plan, [], work)
        self.be_between(plan.targets, plan.origins)
        size = len(comm.ranks)
        outgoing, incoming = [self._array] * size, [0] * size
        # Where the blocks of other ranks belong, by rank.
        self._into: dict[int, NDArray[Any]] = {}
        for action in plan.program:
            # One that is only told that there is nothing for it may have no array.
            place = arrays[action.region.buffer] if action.region.count else np.empty(0, plan.storage)
            if action.verb is _SEND:
                outgoing[action.peer] = place
            elif action.verb is _RECV:
                self._into[action.peer] = place
                incoming[action.peer] = len(place)
            else:
                np.copyto(place, arrays[action.sources[0].buffer])
        self.be_in_blocks(outgoing, incoming, 0)

    def enter(self) -> None:
        """Post a block to each rank that gets one."""
        comm, identity = self.comm, self.id
        group, fingerprint = comm.id, self.fingerprint
        outgoing = self._outgoing
        assert outgoing is not None
        without: list[int] = []
        for peer in self._targets:
            channel, array = comm.channels[peer], outgoing[peer]
            link, nbytes = channel.shared, array.nbytes
            if (
                link is not None
                and link is channel.link
                and link.slot_writer.post(slot_of(comm, identity, nbytes), identity, group, fingerprint, array, nbytes)
            ):
                link.announce()
            else:
                without.append(peer)
        if without:
            self._send(without)
        if not self.done and not self.look():
            comm.polling.readers[self] = None

    def _slot_from(self, peer: int) -> int:
        return slot_of(self.comm, self.id, self._expected(peer))

    def _is_here(self, peer: int) -> bool:
        comm = self.comm
        if (link := comm.channels[peer].shared) is not None:
            nbytes = self._expected(peer)
            slot, slot_reader = slot_of(comm, self.id, nbytes), link.slot_reader
            found = slot_reader.look(slot, self.id, comm.id)
            if found == self.fingerprint and slot_reader.length(slot) == nbytes:
                return True
            if found >= 0:
                comm.mismatches.disagree(peer, self.id, self.describe())
                return False
        return self._has_framed(peer)

    def _fold(self) -> None:
        comm, storage, framed = self.comm, self._plan.storage, self._framed
        for peer, place in self._into.items():
            if framed is not None and peer in framed:
                place[:] = np.frombuffer(framed[peer], storage)
            else:
                slot_reader = comm.channels[peer].shared.slot_reader  # type: ignore[union-attr]  # it has been seen there
                slot = self._slot_from(peer)
                place[:] = slot_reader.view(slot, storage, len(place))
                slot_reader.free(slot)
        self._complete()
