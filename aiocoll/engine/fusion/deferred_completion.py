"""Completions of calls that a coalescing block has recorded, and of operations that carry out several calls."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, cast

from numpy.typing import NDArray

from aiocoll.completion import Completion, Progress
from aiocoll.engine.interfaces import Progressive
from aiocoll.engine.operations.plan import Plan
from aiocoll.work import completion_of

__all__ = ["DeferredCompletion", "FlushCompletion", "Member", "MemberCompletion", "completion_of_member"]


class DeferredCompletion(Completion):
    """The completion of a recorded call, which starts together with all other calls of its block.

    Attributes:
        plan: the plan of a collective on arrays that may be fused; None for other calls.
        call: the recorded call, if it has no plan.
        arrays: arguments of the plan.
        retrieved: True if the program has retrieved the outcome.
    """

    __slots__ = ("arrays", "call", "plan", "retrieved")

    arrays: list[NDArray[Any]]
    call: Any
    plan: Plan | None
    retrieved: bool

    @property
    def block(self) -> Progressive:
        """The block that has recorded the call."""
        return cast(Progressive, self.progress)

    @property
    def is_unkeyed_collective(self) -> bool:
        """Return whether the recorded call is a single collective without a key."""
        return hasattr(self, "plan")

    def visible(self) -> Completion:
        """Return the completion to which the user's work object refers."""
        return self

    def start_if_held(self) -> None:
        """Start the recorded calls of the block, if they have not started."""
        self.block.start_if_held()

    def note_retrieval(self) -> None:
        """Record that the program has retrieved the outcome."""
        self.retrieved = True
        super().note_retrieval()

    def report_failure(self, error: BaseException) -> None:
        """Report a failure of this call to the block, too."""
        self.block.failed(self)
        super().report_failure(error)


class MemberCompletion(DeferredCompletion):
    """The completion of one call in a list of calls. Failures are reported by the completion of the whole list.

    Attributes:
        whole: the completion of the list.
    """

    __slots__ = ("whole",)

    whole: Completion

    def visible(self) -> Completion:
        """Return the completion to which the user's work refers: the completion of the list."""
        return self.whole

    def report_failure(self, error: BaseException) -> None:
        """Do nothing, because the completion of the list reports the failure."""


#: A recorded call of a coalescing block: its completion or, if the C accelerator has recorded the call, its `Work`.
#: Such a `Work` makes a completion only on request.
Member = Any


def completion_of_member(member: Member) -> DeferredCompletion:
    """Return the completion of a recorded call. Take the call over if the C accelerator carries it out."""
    return member if isinstance(member, DeferredCompletion) else cast(DeferredCompletion, completion_of(member))


class FlushCompletion(Completion):
    """The completion of a flush, which starts the recorded calls of a block. Each call reports its own failure.

    Args:
        stands_for: returns the pending completions of user calls in the flush.
        ended: called at the end with the error, or None.
    """

    __slots__ = ("stands_for",)

    def __init__(
        self,
        progress: Progress,
        op: str,
        stands_for: Callable[[], Iterable[Completion]],
        ended: Callable[[BaseException | None], None],
    ) -> None:
        super().__init__(progress, op, None, None, None)
        self.stands_for = stands_for
        self.call_at_end(lambda flush: ended(flush.exception))
