"""The members of a flush that are on CUDA arrays: one agreement, and one group of NCCL calls, for all of them.

Members that NCCL cannot carry out are staged, each separately. All members end when the last one has ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgpack

from aiocoll.completion import Completion
from aiocoll.gpu.calls.agreed import Agreed, DeviceCall
from aiocoll.gpu.calls.kinds import described, hashed
from aiocoll.gpu.calls.native import STAGED, Native
from aiocoll.group.prepared_call import PlannedCall

__all__ = ["BatchedCalls"]


class BatchedCalls(Agreed):
    """One rank's part in several collectives on CUDA arrays that share no memory which is written.

    Args:
        members: in the order common to all ranks.
        ordered: it starts in the order of the program.
    """

    __slots__ = ("_is_ordered", "_left", "_members")

    def __init__(self, identity: int, members: Sequence[DeviceCall], ordered: bool, completion: Completion) -> None:
        first = members[0]
        arrays = [array for member in members for array in member.arrays]
        whole = PlannedCall(first.plan, arrays, (), None, first.limit, first.key)
        super().__init__(identity, DeviceCall(first.state, whole), completion)
        completion.value = [member.result for member in members]
        self._members = members
        self._is_ordered = ordered
        #: Number of parts that have not ended.
        self._left = 1

    def is_private(self) -> bool:
        """Whether only the two ends of its messages know their lengths."""
        return any(member.kind.is_private for member in self._members)

    def is_ordered(self) -> bool:
        """Whether the order of the program is its order on all ranks."""
        return self._is_ordered

    def is_native(self) -> bool:
        """Whether NCCL carries out any of it."""
        return any(member.way() != STAGED for member in self._members)

    def is_numbered(self) -> bool:
        """Whether it has to be compared before it starts, in any group."""
        return self.is_private() or any(member.way() == STAGED for member in self._members)

    def terms(self) -> bytes:
        """Return a hash of what all ranks have to call alike."""
        return hashed([member.plan.signature[:5] for member in self._members])

    def begin(self, staged: bool) -> None:
        """Launch what NCCL can carry out, and stage the rest."""
        native, others = [], []
        for member in self._members:
            kind, arrays = member.kind, member.arrays
            if kind.is_empty:
                continue
            way = STAGED if staged else member.way()
            if way == STAGED:
                others.append(member)
            else:
                native.append(Native(kind.enqueue, arrays))
        self._left = len(others) + bool(native)
        if not self._left:
            super().ended(self.completion.value, None)
        if native:
            self._launch(native, [self._device_state.stream] if others else ())
        for number, member in enumerate(others):
            self._begin_part(number, member)

    def ended(self, result: Any, error: BaseException | None) -> None:
        """One part has ended, or there is nothing to do."""
        self._left -= 1
        if error is not None:
            super().ended(None, error)
        elif not self._left:
            super().ended(self.completion.value, None)

    def hangs_here(self) -> bool:
        """Whether the device has work of it enqueued: then all ranks have called it."""
        children = self._children
        return super().hangs_here() or (children is not None and children.hanging() is not None)

    def _says(self) -> bytes:
        """Describe this rank's calls."""
        completion = self.completion
        told: bytes = msgpack.packb((described(self.signature, ()), completion.seq, completion.key))
        return told

    def _ended(self, error: Any) -> None:
        """The device has finished what NCCL carries out."""
        if self._continues(error):
            self.ended(None, None)

    def _begin_part(self, number: int, member: DeviceCall) -> None:
        """Stage a call; the first makes the stream of all of them wait for the caller's."""
        marks = self.taken_marks()

        def make(identity: int, completion: Completion) -> _Part:
            completion.op, completion.shape = member.op, member.shape
            return _Part(identity, member, marks, completion)

        self._start_child(f"member {number} of {self.id}", make, self.ended)


class _Part(Agreed):
    """A staged member; all ranks have agreed on it."""

    __slots__ = ()

    def __init__(self, identity: int, call: DeviceCall, marks: tuple[int, ...], completion: Completion) -> None:
        super().__init__(identity, call, completion)
        self.agreed(marks)

    def enter(self) -> None:
        """Begin."""
        self.begin(True)
