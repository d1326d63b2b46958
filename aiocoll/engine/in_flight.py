"""Operations of one rank that are in flight in one group, and ids of ended operations."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from aiocoll.engine.journal import HISTORY
from aiocoll.engine.operations.base import Operation

if TYPE_CHECKING:
    from aiocoll.native import core

__all__ = ["InFlight"]


class InFlight:
    """The operations in flight of one group, with native calls, which the C accelerator hands over on request.

    Args:
        pending: the operations, in call order. The communicator adds and removes them.
        operations: the collectives among them, by id.

    Attributes:
        native: the native calls of the accelerator; None without it.
    """

    __slots__ = ("_ended", "_operations", "_pending", "native")

    def __init__(self, pending: dict[Operation, None], operations: dict[int, Operation]) -> None:
        self._pending = pending
        self._operations = operations
        # The ids of ended keyed and child operations, each with the id of the user's call. Ordered operations need no
        # entry: their ids are in ascending order.
        self._ended: dict[int, int] = {}
        self.native: core.Calls | None = None

    def __len__(self) -> int:
        return len(self._pending) if self.native is None else len(self._pending) + self.native.count

    @property
    def pending(self) -> dict[Operation, None]:
        """Return all operations in flight, in call order."""
        self._take_over()
        return self._pending

    def snapshot(self) -> list[Operation]:
        """Return all operations in call order, from any thread, and leave native calls to the C accelerator.

        Native calls are represented by copies, which are never carried out.
        """
        pending = list(self._pending)  # a single C call copies the dict, so the loop cannot change it meanwhile
        if self.native is not None and self.native.count:
            pending = sorted([*pending, *self.native.copies()], key=lambda each: each.entered)
        return pending

    def collectives(self) -> Iterable[Operation]:
        """Return the collectives in flight, in call order."""
        self._take_over()
        return self._operations.values()

    def _take_over(self) -> None:
        if self.native is not None and self.native.count:
            self.native.hand_over()

    def find(self, op: int) -> Operation | None:
        """Return the collective in flight with this id; None if there is none."""
        operation = self._operations.get(op)
        if operation is None and self.native is not None and self.native.count:
            self.native.hand_over(op)
            operation = self._operations.get(op)
        return operation

    def adopt(self, operation: Operation) -> None:
        """Insert a collective that the C accelerator has started, in call order."""
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

    # -- ids of ended operations

    def remember(self, identity: int, root: int) -> None:
        """Record the id of an ended keyed or child operation, with the id of the user's call (`root`)."""
        if len(self._ended) >= HISTORY:
            del self._ended[next(iter(self._ended))]
        self._ended[identity] = root

    def forget(self, op: int) -> None:
        """Forget the id of an ended operation, so that another operation may use it."""
        self._ended.pop(op, None)

    def has_ended(self, op: int) -> bool:
        """Return whether a keyed operation or a child with this id has ended."""
        return op in self._ended

    def root_of(self, op: int) -> int:
        """Return the id of the user's call that an ended operation belonged to."""
        return self._ended.get(op, op)

    def close(self) -> None:
        """Take over all native calls and release the C accelerator."""
        if self.native is not None:
            self.native.hand_over()
            self.native.close()
            self.native = None
