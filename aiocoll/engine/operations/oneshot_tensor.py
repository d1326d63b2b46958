"""The executor of small broadcasts, reduces and scans in shared memory: ranks post their tensor to those that need it.

One step, as for `oneshot`, but not from all to all: the plan's program says who sends to whom. The root of a broadcast
posts, and the others copy from there; the root of a reduce folds in rank order what the others have posted; in a scan
each rank posts to the higher ones, and folds what the lower ones have posted. A rank to which nobody posts is done when
it has posted. Cost: at most p-1 copies in, and one copy or one reduction out, per rank; no messages and no temporary
memory.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from aiocoll.engine.operations.group import Group
from aiocoll.engine.operations.oneshot import OneShot
from aiocoll.engine.operations.plan import Plan
from aiocoll.work import Work

__all__ = ["OneShotTensor"]


class OneShotTensor(OneShot):
    """One rank's part in one broadcast, reduce, scan or exscan; arguments as for `ProgramExecutor`."""

    __slots__ = ()

    def __init__(
        self,
        comm: Group,
        identity: int,
        plan: Plan,
        arrays: list[NDArray[Any]],
        work: Work[Any],
    ) -> None:
        OneShot.__init__(self, comm, identity, plan, arrays, work)
        self.be_between(plan.targets, plan.origins)

    def _finish(self, inputs: list[NDArray[Any]]) -> None:
        plan, array = self._plan, self._array
        if plan.kernel is None:
            if inputs:
                np.copyto(array, inputs[0])
        elif plan.folds:
            if plan.folds_own:
                inputs.insert(self.comm.rank, array)
            plan.kernel.fold(inputs, array)
