"""The executor over an arena: ranks show each other their blocks and each folds all of them.

One-shot allreduce: block k of every rank is published, and read and folded in rank order by everyone. Blocks are
pipelined as far as the arena has free slots. Cost: one step and (p - 1) reads of the data per rank; no message.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from aiocoll.buffers import byte_view
from aiocoll.engine.operation import Operation
from aiocoll.engine.plan import Plan
from aiocoll.runtime import BUDGET
from aiocoll.work import Work

if TYPE_CHECKING:
    from aiocoll.engine.membership import Membership

__all__ = ["Shared"]


class Shared(Operation):
    """One rank's part in one allreduce through an arena."""

    __slots__ = ("_array", "_block", "_plan", "_published", "_reduced", "_result", "_stages")

    def __init__(
        self,
        group: Membership,
        identity: int,
        plan: Plan,
        arrays: list[NDArray[Any]],
        shape: tuple[int, ...],
        result: Any,
        work: Work[Any],
        timeout: float,
    ) -> None:
        # By name: `super()` took a tenth of the time of a small call.
        Operation.__init__(self, group, identity, plan.fingerprint, plan.terms, shape, work, timeout)
        assert group.arena is not None
        self._plan = plan
        self._array = array = arrays[0]
        self._result = result
        self._block = group.arena.slot_nbytes // plan.itemsize // len(group.ranks)
        self._stages = -(-len(array) // self._block)
        self._published = 0
        self._reduced = 0

    def enter(self) -> None:
        """Publish the first blocks."""
        self.advance()

    def needs(self, peer: int) -> bool:
        """Whether a block of `peer` is still to come: what is published outlives the one who did."""
        assert self.group.arena is not None
        return self.group.arena.look(peer, self.id, self._stages - 1) is None

    def advance(self) -> None:
        """Publish while there are slots, fold what all ranks have published."""
        group = self.group
        ticks = group.endpoint.runtime.ticks
        deadline = ticks() + BUDGET
        moved = True
        while moved and not self.done:
            moved = self._publish()
            moved = self._fold() or moved
            if self._reduced == self._stages:
                self.succeed(self._result)
            elif moved and ticks() > deadline:
                self.put_off()
                return

    def _publish(self) -> bool:
        arena, stage = self.group.arena, self._published
        assert arena is not None
        if stage == self._stages:
            return False
        block = byte_view(self._part(stage))
        if not arena.publish(self.group.rank, self.id, stage, self.fingerprint, block):
            return False
        self._published += 1
        return True

    def _fold(self) -> bool:
        group, stage = self.group, self._reduced
        arena, kernel = group.arena, self._plan.kernel
        assert arena is not None
        assert kernel is not None
        if stage == self._published:
            return False
        place = self._part(stage)
        inputs = []
        for rank in range(len(group.ranks)):
            if rank == group.rank:
                inputs.append(place)
                continue
            shown = arena.look(rank, self.id, stage)
            if shown is None:
                return False
            fingerprint, block = shown
            if fingerprint != self.fingerprint:
                group.disputes.disagree(rank, self.id, self.describe())
                return False
            inputs.append(np.frombuffer(block, self._plan.storage))
        kernel.fold(inputs, place)
        for rank in range(len(group.ranks)):
            if rank != group.rank:
                arena.release(rank, group.rank, self.id, stage)
        self._reduced += 1
        return True

    def _part(self, stage: int) -> NDArray[Any]:
        return self._array[stage * self._block : (stage + 1) * self._block]
