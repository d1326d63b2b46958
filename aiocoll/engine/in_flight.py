"""The operations of one rank in one group that have not ended, and the ids of those that may come up again."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from aiocoll.engine.journal import HISTORY
from aiocoll.engine.operations.base import Operation

if TYPE_CHECKING:
    from aiocoll.native import core

__all__ = ["InFlight"]


class InFlight:
    """What is in flight: operations, and the calls of the accelerator, which it hands over when they are asked for.

    Args:
        pending: the operations, in the order of their calls; the communicator enters and removes them.
        operations: the collectives among them, by id.

    Attributes:
        native: the calls of the accelerator; None without it.
    """

    __slots__ = ("_ended", "_operations", "_pending", "native")

    def __init__(self, pending: dict[Operation, None], operations: dict[int, Operation]) -> None:
        self._pending = pending
        self._operations = operations
        # Keyed operations and children that have ended, with the call each belonged to; ordered ones need no entry.
        self._ended: dict[int, int] = {}
        self.native: core.Calls | None = None

    def __len__(self) -> int:
        return len(self._pending) if self.native is None else len(self._pending) + self.native.count

    @property
    def pending(self) -> dict[Operation, None]:
        """All operations, in the order of their calls."""
        self._take_over()
        return self._pending

    def snapshot(self) -> list[Operation]:
        """Return all operations, in the order of their calls, for readers in any thread: nothing is handed over.

        Those of the accelerator are copies, which are not carried out.
        """
        pending = list(self._pending)  # by one call into C: the loop may go on meanwhile
        if self.native is not None and self.native.count:
            pending = sorted([*pending, *self.native.copies()], key=lambda each: each.entered)
        return pending

    def collectives(self) -> Iterable[Operation]:
        """Return the collectives, in the order of their calls."""
        self._take_over()
        return self._operations.values()

    def _take_over(self) -> None:
        if self.native is not None and self.native.count:
            self.native.hand_over()

    def find(self, op: int) -> Operation | None:
        """Return the collective with this id."""
        operation = self._operations.get(op)
        if operation is None and self.native is not None and self.native.count:
            self.native.hand_over(op)
            operation = self._operations.get(op)
        return operation

    def adopt(self, operation: Operation) -> None:
        """Take over a collective that the accelerator has begun, in its place among the others."""
        later = []
        for each in reversed(self._pending):
            if each.entered <= operation.entered:
                break
            later.append(each)
        self._pending[operation] = None
        for each in reversed(later):
            del self._pending[each]
            self._pending[each] = None
        self._operations[operation.id] = operation

    # -- ids of what has ended

    def remember(self, identity: int, root: int) -> None:
        """Keep the id of a keyed operation or a child that has ended, and that of its call."""
        if len(self._ended) >= HISTORY:
            del self._ended[next(iter(self._ended))]
        self._ended[identity] = root

    def forget(self, op: int) -> None:
        """Allow another operation to use the id of an operation that has ended."""
        self._ended.pop(op, None)

    def has_ended(self, op: int) -> bool:
        """Return whether a keyed operation or a child with this id has ended."""
        return op in self._ended

    def root_of(self, op: int) -> int:
        """Return the id of the call that an operation which has ended belonged to."""
        return self._ended.get(op, op)

    def close(self) -> None:
        """Let the accelerator hand over what it has, and go."""
        if self.native is not None:
            self.native.hand_over()
            self.native.close()
            self.native = None
