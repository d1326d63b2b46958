"""Collectives of a coalescing block on CUDA arrays, compared together and launched as one NCCL group.

Calls that NCCL cannot carry out are staged, each separately. All calls end when the last one has ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgpack

from aiocoll.completion import Completion
from aiocoll.gpu.calls.agreed import Agreed, DeviceCall
from aiocoll.gpu.calls.kinds import described, hash_data
from aiocoll.gpu.calls.native import STAGED, Native
from aiocoll.group.prepared_call import PlannedCall

__all__ = ["BatchedCalls"]


class BatchedCalls(Agreed):
    """The operation of one rank that carries out several collectives on CUDA arrays.

    No collective writes to memory that another one uses.

    Args:
        members: the calls, in the order common to all ranks.
        ordered: whether the operation starts in program order.
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
        #: Number of unfinished units of work: one for all NCCL calls together, and one for each staged call.
        self._left = 1

    def is_private(self) -> bool:
        """Return whether any collective has array lengths that only sender and receiver know."""
        return any(member.kind.is_private for member in self._members)

    def is_ordered(self) -> bool:
        """Return whether the operation starts in program order on all ranks."""
        return self._is_ordered

    def is_native(self) -> bool:
        """Return whether NCCL carries out any of the collectives."""
        return any(member.choose_method() != STAGED for member in self._members)

    def is_numbered(self) -> bool:
        """Return whether the collectives must be compared before they start, whatever the group's setting."""
        return self.is_private() or any(member.choose_method() == STAGED for member in self._members)

    def hash_terms(self) -> bytes:
        """Return a hash of the properties of all collectives that must be equal on all ranks."""
        return hash_data([member.plan.signature[:5] for member in self._members])

    def begin(self, staged: bool) -> None:
        """Launch the collectives that NCCL can carry out, and stage all others through the host."""
        native, others = [], []
        for member in self._members:
            kind, arrays = member.kind, member.arrays
            if kind.is_empty:
                continue
            method = STAGED if staged else member.choose_method()
            if method == STAGED:
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
        """Handle the end of the NCCL calls or of one staged call; the last end finishes the operation."""
        self._left -= 1
        if error is not None:
            super().ended(None, error)
        elif not self._left:
            super().ended(self.completion.value, None)

    def is_waiting_for_device(self) -> bool:
        """Return whether the operation waits only for this rank's device, because all ranks have made the calls."""
        children = self._children
        return super().is_waiting_for_device() or (
            children is not None and children.find_waiting_for_device() is not None
        )

    def _encode_call(self) -> bytes:
        """Return the encoded description of this rank's calls."""
        completion = self.completion
        encoded: bytes = msgpack.packb((described(self.signature, ()), completion.seq, completion.key))
        return encoded

    def _ended(self, error: Any) -> None:
        """Handle the end of the NCCL calls."""
        if self._finish_device_work(error):
            self.ended(None, None)

    def _begin_part(self, number: int, member: DeviceCall) -> None:
        """Start one staged call; the first one makes the staging stream wait for the caller's streams."""
        marks = self.taken_marks()

        def make(identity: int, completion: Completion) -> _Part:
            completion.op, completion.shape = member.op, member.shape
            return _Part(identity, member, marks, completion)

        self._start_child(f"member {number} of {self.id}", make, self.ended)


class _Part(Agreed):
    """A staged call of a coalescing block; the ranks have already compared the block as a whole."""

    __slots__ = ()

    def __init__(self, identity: int, call: DeviceCall, marks: tuple[int, ...], completion: Completion) -> None:
        super().__init__(identity, call, completion)
        self.agreed(marks)

    def enter(self) -> None:
        """Stage the call through the host."""
        self.begin(True)
