"""The executor of small allreduces and barriers of many ranks in shared memory: rank 0 reduces for all.

Two steps: each rank posts its tensor to rank 0, which reduces them in rank order and posts the result to each. Cost:
2 (p-1) posts in all and one reduction, where `oneshot` has p (p-1) posts and p reductions, but one step. What all ranks
do together decides where they share cores. It is the centralized barrier of Mellor-Crummey and Scott (Algorithms for
scalable synchronization on shared-memory multiprocessors, 1991), with data.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from aiocoll.engine.operations.group import Group
from aiocoll.engine.operations.oneshot import OneShot
from aiocoll.engine.operations.plan import Plan
from aiocoll.work import Work

__all__ = ["OneShotCentral"]

_CENTRE: Final = 0


class OneShotCentral(OneShot):
    """One rank's part in one allreduce or barrier; arguments as for `ProgramExecutor`."""

    __slots__ = ("_has_posted_result",)

    def __init__(
        self,
        comm: Group,
        identity: int,
        plan: Plan,
        arrays: list[NDArray[Any]],
        work: Work[Any],
    ) -> None:
        OneShot.__init__(self, comm, identity, plan, arrays, work)
        self._has_posted_result = False
        if comm.rank == _CENTRE:
            self.be_between((), comm.others)
        else:
            self.be_between((_CENTRE,), (_CENTRE,))

    def _finish(self, inputs: list[NDArray[Any]]) -> None:
        if self.comm.rank == _CENTRE:
            OneShot._finish(self, inputs)
        elif inputs:
            np.copyto(self._array, inputs[0])

    def _fold(self) -> None:
        if self._has_posted_result:
            self._complete()
        else:
            OneShot._fold(self)

    def _complete(self) -> None:
        """All is there and used: rank 0 has yet to tell the others."""
        if self.comm.rank == _CENTRE and not self._has_posted_result:
            self._has_posted_result = True
            self.be_between(self.comm.others, ())
            self._post()
            if self._unsent or self.done:  # a frame that left at once has brought this to its end
                return
        OneShot._complete(self)
