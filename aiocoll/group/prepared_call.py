"""Checked calls that have not started.

Every call on a group is made into one record, a `PreparedCall`, once its arguments are checked. The record is what the
dispatcher starts, what interceptors and blocks take, and what `ProcessGroup.plan` keeps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from aiocoll.completion import Completion
from aiocoll.engine.communicator import Communicator
from aiocoll.engine.operations.base import Operation
from aiocoll.engine.operations.composite import Make
from aiocoll.engine.operations.plan import Plan
from aiocoll.engine.operations.signature import Signature

__all__ = ["FactoryCall", "MessageCall", "PlannedCall", "PreparedCall"]


class PreparedCall:
    """A call on a group, with its arguments.

    Attributes:
        shape: of the caller's main array.
        result: result of the work.
        limit: seconds the operation may take.
        key: of a keyed collective; as the user gave it, so it may have any type until it is checked.
        unwrap: makes the result at the end, if it is not `result`.
    """

    __slots__ = ("key", "limit", "result", "shape", "unwrap")

    shape: tuple[int, ...]
    result: Any
    limit: float
    key: Any
    unwrap: Callable[[], Any] | None

    @property
    def op(self) -> str:
        """Name of the work."""
        raise NotImplementedError

    @property
    def signature(self) -> Signature | None:
        """What the ranks must agree on; None for a message between two ranks, which is not numbered either."""
        raise NotImplementedError

    @property
    def is_on_device(self) -> bool:
        """Whether it is a collective on CUDA arrays."""
        return False

    def operation(self, comm: Communicator, identity: int, completion: Completion) -> Operation:
        """Make the operation that carries it out, with this id."""
        raise NotImplementedError

    def again(self) -> PreparedCall:
        """Return the same call, to be started once more."""
        return self

    def expect(self, completion: Completion) -> None:
        """Give `completion` the result and timeout of the call."""
        completion.expect(self.shape, self.limit, self.result)
        completion.unwrap = self.unwrap


class PlannedCall(PreparedCall):
    """A collective on arrays, of which a plan says what to do.

    Attributes:
        plan: what to do.
        arrays: flat, numbered as the plan's buffers; None where this rank has none.
    """

    __slots__ = ("arrays", "plan")

    def __init__(
        self,
        plan: Plan,
        arrays: list[Any],
        shape: tuple[int, ...],
        result: Any,
        limit: float,
        key: Any,
        unwrap: Callable[[], Any] | None = None,
    ) -> None:
        self.plan = plan
        self.arrays = arrays
        self.shape = shape
        self.result = result
        self.limit = limit
        self.key = key
        self.unwrap = unwrap

    @property
    def op(self) -> str:
        """Name of the work."""
        return self.plan.signature.op

    @property
    def signature(self) -> Signature:
        """What the ranks must agree on."""
        return self.plan.signature

    def operation(self, comm: Communicator, identity: int, completion: Completion) -> Operation:
        """Make the operation that the executor of the plan is."""
        return self.plan.executor(comm, identity, self.plan, self.arrays, completion)

    def again(self) -> PlannedCall:
        """Return the same call, to be started once more."""
        return PlannedCall(self.plan, [*self.arrays], self.shape, self.result, self.limit, self.key, self.unwrap)


class FactoryCall(PreparedCall):
    """A collective whose operation a function makes.

    Args:
        make: makes the operation from its id and the completion.

    Attributes:
        signature: what the ranks must agree on.
        nbytes: that this rank sends to others, if that is known.
        arrays: on the host, which it reads; None of a call whose operation keeps them to itself.
    """

    __slots__ = ("_make", "_signature", "arrays", "nbytes")

    def __init__(
        self,
        signature: Signature,
        make: Make,
        limit: float,
        key: Any = None,
        shape: tuple[int, ...] = (),
        result: Any = None,
        nbytes: int = 0,
    ) -> None:
        self._signature = signature
        self._make = make
        self.limit = limit
        self.key = key
        self.shape = shape
        self.result = result
        self.nbytes = nbytes
        self.arrays: list[Any] | None = None
        self.unwrap = None

    @property
    def op(self) -> str:
        """Name of the work."""
        return self._signature.op

    @property
    def signature(self) -> Signature:
        """What the ranks must agree on."""
        return self._signature

    def operation(self, comm: Communicator, identity: int, completion: Completion) -> Operation:
        """Make the operation."""
        return self._make(identity, completion)


class MessageCall(PreparedCall):
    """A message between two ranks.

    Args:
        make: makes the operation from the completion; the id that it is also given is of no use.

    Attributes:
        ends: "src" or "dst", the other rank (None: any), and the tag.
        nbytes: size of the message.
        arrays: its CUDA array; None of any other message.
    """

    __slots__ = ("_make", "_op", "arrays", "ends", "nbytes")

    def __init__(
        self,
        op: str,
        make: Make,
        limit: float,
        ends: tuple[str, int | None, int],
        result: Any = None,
        shape: tuple[int, ...] = (),
        nbytes: int = 0,
    ) -> None:
        self._op = op
        self._make = make
        self.limit = limit
        self.ends = ends
        self.result = result
        self.shape = shape
        self.nbytes = nbytes
        self.arrays: list[Any] | None = None
        self.key = self.unwrap = None

    @property
    def op(self) -> str:
        """Name of the work."""
        return self._op

    @property
    def signature(self) -> None:
        """None: only its two ranks know of it."""
        return None

    def operation(self, comm: Communicator, identity: int, completion: Completion) -> Operation:
        """Make the operation."""
        return self._make(identity, completion)

    def expect(self, completion: Completion) -> None:
        """Give `completion` the result, timeout and ends of the message."""
        super().expect(completion)
        completion.ends = self.ends
