"""The executor of gathers, scatters and alltoalls of which this rank has both small and large blocks, in shared memory.

It carries out a program over links, as `ProgramExecutor`. But a rank that has only small blocks posts them to slots
(`slot_program`), and so this one looks for them there, too.
"""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray

from aiocoll.algorithms.program import Verb
from aiocoll.elements.buffers import byte_view
from aiocoll.engine.operations.group import Group
from aiocoll.engine.operations.plan import Plan
from aiocoll.engine.operations.program_executor import ProgramExecutor
from aiocoll.engine.operations.round import Take
from aiocoll.engine.operations.slots import DIFFERENT, HERE
from aiocoll.work import Work

__all__ = ["ProgramWithSlots"]


class ProgramWithSlots(ProgramExecutor):
    """One rank's part in one collective; arguments as for `ProgramExecutor`."""

    __slots__ = ("_missing",)

    def __init__(
        self, comm: Group, identity: int, plan: Plan, arrays: list[NDArray[Any] | None], work: Work[Any]
    ) -> None:
        ProgramExecutor.__init__(self, comm, identity, plan, arrays, work)
        # Actions that receive what may be in a slot.
        self._missing = [
            index
            for index, action in enumerate(plan.program)
            if action.verb is Verb.RECV and plan.totals[index] <= comm.slots.largest
        ]

    def enter(self) -> None:
        """Start every action that waits for nothing, and take what has been posted."""
        ProgramExecutor.enter(self)
        if not self.done and not self.look():
            self.comm.polling.readers[self] = None

    def look(self) -> bool:
        """Take what has been posted since; return whether the operation has ended."""
        for index in list(self._missing):
            if self.done:
                break
            if self._is_here(index) or self._take(index):
                self._missing.remove(index)
        if self.done:
            self.comm.polling.readers.pop(self, None)
        return self.done

    def _take(self, index: int) -> bool:
        comm, plan = self.comm, self._plan
        peer, nbytes = plan.program[index].peer, plan.totals[index]
        found = comm.slots.look(peer, self.id, self.fingerprint, nbytes)
        if found == DIFFERENT:
            comm.mismatches.disagree(peer, self.id, self.describe())
        if found != HERE:
            return False
        takes = [Take(peer, nbytes, plan.program[index].region)]
        view = byte_view(comm.slots.views(takes, self.id, plan.storage)[0])
        comm.context.heard = comm.ranks[peer]
        self.deliver(peer, plan.program[index].step, nbytes, view, nbytes)
        comm.context.heard = -1
        comm.slots.free(takes, self.id)
        return True

    def needs(self, peer: int) -> bool:
        """Whether something to or from `peer` is missing: what it has posted stays readable after it has left."""
        return not self.look() and ProgramExecutor.needs(self, peer)

    def fail(self, error: BaseException) -> None:
        """End with `error`."""
        self.comm.polling.readers.pop(self, None)
        ProgramExecutor.fail(self, error)
