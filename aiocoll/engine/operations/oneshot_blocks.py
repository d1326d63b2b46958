"""The executor of small allgathers and reduce_scatters in shared memory: each rank posts blocks, and reads all others.

One step, as for `oneshot`: into a slot of each peer goes the block that this one needs, which is the same for all
(allgather) or not (reduce_scatter); the blocks of the others are copied, or reduced in rank order, from where they lie.
Cost: p-1 copies in and p-1 out, or one reduction of p inputs, per rank; no messages and no temporary memory.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from aiocoll.engine.operations.group import Group
from aiocoll.engine.operations.oneshot import OneShot
from aiocoll.engine.operations.plan import Plan
from aiocoll.work import Work

__all__ = ["OneShotBlocks"]


class OneShotBlocks(OneShot):
    """One rank's part in one allgather or reduce_scatter; arguments as for `ProgramExecutor`."""

    __slots__ = ("_blocks",)

    def __init__(
        self,
        comm: Group,
        identity: int,
        plan: Plan,
        arrays: list[NDArray[Any]],
        work: Work[Any],
    ) -> None:
        *blocks, own = arrays
        super().__init__(comm, identity, plan, [own], work)
        self._blocks = blocks
        outgoing = [own] * len(blocks) if plan.kernel is None else blocks
        incoming = [len(block) if plan.kernel is None else len(own) for block in blocks]
        self.be_in_blocks(outgoing, incoming, max([block.nbytes for block in blocks]))

    def _finish(self, inputs: list[NDArray[Any]]) -> None:
        kernel = self._plan.kernel
        if kernel is not None:
            inputs.insert(self.comm.rank, self._blocks[self.comm.rank])
            kernel.fold(inputs, self._array)
            return
        inputs.insert(self.comm.rank, self._array)
        for block, given in zip(self._blocks, inputs, strict=True):
            np.copyto(block, given)
