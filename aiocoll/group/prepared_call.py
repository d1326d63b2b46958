"""Prepared calls: their arguments are checked, but they have not started.

Once its arguments are checked, every call on a group becomes one record, a `PreparedCall`. The dispatcher starts such
records, interceptors and blocks take them, and `ProcessGroup.plan` keeps them.
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
    """A checked call on a group, ready to start.

    Attributes:
        shape: shape of the caller's main array.
        result: result of the work.
        limit: timeout in seconds.
        key: key of a keyed collective; any value until it is checked.
        unwrap: function that makes the result at the end; None if the result is `result`.
    """

    __slots__ = ("key", "limit", "result", "shape", "unwrap")

    shape: tuple[int, ...]
    result: Any
    limit: float
    key: Any
    unwrap: Callable[[], Any] | None

    @property
    def op(self) -> str:
        """The operation's name, as in `Work.op`."""
        raise NotImplementedError

    @property
    def signature(self) -> Signature | None:
        """The signature of a collective; None for a point-to-point message, which takes no sequence number."""
        raise NotImplementedError

    @property
    def is_on_device(self) -> bool:
        """Return whether this call is a collective on device arrays."""
        return False

    def operation(self, comm: Communicator, identity: int, completion: Completion) -> Operation:
        """Make the operation, with the id `identity`, that carries out the call."""
        raise NotImplementedError

    def prepare_again(self) -> PreparedCall:
        """Return a prepared call for another start with the same arguments, possibly this object."""
        return self

    def expect(self, completion: Completion) -> None:
        """Store the result and timeout of the call in `completion`."""
        completion.expect(self.shape, self.limit, self.result)
        completion.unwrap = self.unwrap


class PlannedCall(PreparedCall):
    """A prepared collective on arrays that has a plan.

    Attributes:
        plan: plan of the call.
        arrays: flat arrays, numbered as the plan's buffers; None where this rank has no array.
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
        """The operation's name, as in `Work.op`."""
        return self.plan.signature.op

    @property
    def signature(self) -> Signature:
        """The signature of the collective, which must be equal on all ranks."""
        return self.plan.signature

    def operation(self, comm: Communicator, identity: int, completion: Completion) -> Operation:
        """Make the operation that carries out the plan."""
        return self.plan.executor(comm, identity, self.plan, self.arrays, completion)

    def prepare_again(self) -> PlannedCall:
        """Return a copy of this call, with its own list of arrays, for another start."""
        return PlannedCall(self.plan, [*self.arrays], self.shape, self.result, self.limit, self.key, self.unwrap)


class FactoryCall(PreparedCall):
    """A prepared collective whose operation is made by a function.

    Args:
        make: makes the operation from its id and the completion.

    Attributes:
        signature: the signature, which must be equal on all ranks.
        nbytes: bytes that this rank sends to other ranks, if known.
        arrays: host arrays that the call reads; None if only its operation has them.
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
        """The operation's name, as in `Work.op`."""
        return self._signature.op

    @property
    def signature(self) -> Signature:
        """The signature of the collective, which must be equal on all ranks."""
        return self._signature

    def operation(self, comm: Communicator, identity: int, completion: Completion) -> Operation:
        """Make the operation that carries out the collective."""
        return self._make(identity, completion)


class MessageCall(PreparedCall):
    """A prepared point-to-point message.

    Args:
        make: makes the operation from an unused id and the completion.

    Attributes:
        ends: "src" or "dst", the other rank (None: any), and the tag.
        nbytes: size of the message.
        arrays: a list of its device array; None for other messages.
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
        """The operation's name, as in `Work.op`."""
        return self._op

    @property
    def signature(self) -> None:
        """The signature: None, because a message concerns only two ranks."""
        return None

    def operation(self, comm: Communicator, identity: int, completion: Completion) -> Operation:
        """Make the operation that sends or receives the message."""
        return self._make(identity, completion)

    def expect(self, completion: Completion) -> None:
        """Store the result, timeout, source and destination of the message in `completion`."""
        super().expect(completion)
        completion.ends = self.ends
