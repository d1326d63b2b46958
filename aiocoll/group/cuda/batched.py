"""The members of a flush that are on CUDA arrays: one agreement, and one group of NCCL calls, for all of them.

Members that NCCL cannot carry out are staged, each separately. All members end when the last one has ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgpack

from aiocoll.group.cuda.agreed import Agreed, DeviceCall, is_empty
from aiocoll.group.cuda.device_state import DeviceState
from aiocoll.group.cuda.native import STAGED, Native, way_of
from aiocoll.work import Work

__all__ = ["BatchedCalls", "Member"]


class Member(NamedTuple):
    """One of the collectives.

    Attributes:
        op: name of its work.
        shape: of its main array.
        result: result of its work.
        call: the call.
    """

    op: str
    shape: tuple[int, ...]
    result: Any
    call: DeviceCall

    def way(self, rank: int, float8: bool) -> int:
        """Return the best way in which this rank can carry it out; see `way_of`."""
        return way_of(self.call.plan, self.call.arrays, rank, float8)


class BatchedCalls(Agreed):
    """One rank's part in several collectives on CUDA arrays that share no memory which is written.

    Args:
        state: the group's state on the device.
        members: in the order common to all ranks.
    """

    __slots__ = ("_left", "_members")

    def __init__(self, state: DeviceState, identity: int, members: Sequence[Member], work: Work[Any]) -> None:
        first = members[0].call
        arrays = [array for member in members for array in member.call.arrays]
        super().__init__(state, identity, first._replace(arrays=arrays), work)
        work._value = [member.result for member in members]
        self._members = members
        #: Number of parts that have not ended.
        self._left = 1

    def is_private(self) -> bool:
        """Whether only the two ends of its messages know their lengths."""
        return any(member.call.plan.signature.sends or member.call.plan.signature.receives for member in self._members)

    def begin(self, ways: Sequence[int]) -> None:
        """Launch what NCCL can carry out, and stage the rest."""
        native, staged = [], []
        for member, way in zip(self._members, ways, strict=True):
            if is_empty(member.call.plan):
                continue
            if way == STAGED:
                staged.append(member)
            else:
                native.append(Native(member.call.plan, member.call.arrays, way))
        self._left = len(staged) + bool(native)
        if not self._left:
            super().ended(self.work._value, None)
        if native:
            self._launch(native, [self._device_state.stream] if staged else ())
        for number, member in enumerate(staged):
            self._begin_part(number, member)

    def ended(self, result: Any, error: BaseException | None) -> None:
        """One part has ended, or there is nothing to do."""
        self._left -= 1
        if error is not None:
            super().ended(None, error)
        elif not self._left:
            super().ended(self.work._value, None)

    def hangs_here(self) -> bool:
        """Whether the device has work of it enqueued: then all ranks have called it."""
        return self._flying or self._children.hanging() is not None

    def _says(self) -> bytes:
        """Describe this rank's calls, and the ways in which each can be carried out here."""
        state, work = self._device_state, self.work
        ways = [member.way(self.comm.rank, state.float8) for member in self._members]
        described = state.described(self.signature, self.signature, ())
        told: bytes = msgpack.packb((described, work.seq, work.key, ways))
        return told

    def _ended(self, error: Any) -> None:
        """The device has finished what NCCL carries out."""
        if self._is_sound(error):
            self.ended(None, None)

    def _begin_part(self, number: int, member: Member) -> None:
        """Stage a call; the first makes the stream of all of them wait for the caller's."""
        marks = self.taken_marks()

        def make(identity: int, work: Work[Any]) -> _Part:
            work.op, work._shape = member.op, member.shape
            return _Part(self._device_state, identity, member.call, marks, work)

        self._children.start(f"member {number} of {self.id}", make, self.ended)


class _Part(Agreed):
    """A staged member; all ranks have agreed on it."""

    __slots__ = ()

    def __init__(
        self, state: DeviceState, identity: int, call: DeviceCall, marks: tuple[int, ...], work: Work[Any]
    ) -> None:
        super().__init__(state, identity, call, work)
        self.agreed(marks)

    def enter(self) -> None:
        """Begin."""
        self.begin([STAGED])
