"""The works of calls that a coalescing block has recorded, and of operations that stand for several of them."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any, cast

from numpy.typing import NDArray

from aiocoll.engine.interfaces import Progressive
from aiocoll.engine.operations.plan import Plan
from aiocoll.unretrieved import CallSite
from aiocoll.work import AT_ONCE, Progress, Work, is_wait

__all__ = ["DeferredWork", "FlushWork", "MemberWork"]


class DeferredWork(Work[Any]):
    """A work whose call starts together with all others of its block.

    Attributes:
        plan: of a collective on arrays that may be fused; None of any other call.
        call: any other call.
        arrays: arguments of the plan.
        looked: somebody has retrieved the outcome.
    """

    __slots__ = ("arrays", "call", "looked", "plan")

    arrays: list[NDArray[Any]]
    call: Any
    looked: bool
    plan: Plan | None

    def add_done_callback(self, fn: Callable[[Any], object], *, context: contextvars.Context | None = None) -> None:
        """Call `fn(work)` after the end; see `Work.add_done_callback`."""
        if is_wait(fn):
            self._block.want()
        super().add_done_callback(fn, context=context)

    def get_future(self) -> asyncio.Future[Any]:
        """Return a future with the same outcome; see `Work.get_future`."""
        self._block.want()
        return super().get_future()

    def wait(self, timeout: float | timedelta | None = None) -> Any:
        """Block another thread until the end; see `Work.wait`."""
        self._progress.loop.call_soon_threadsafe(self._block.want)
        return super().wait(timeout)

    @property
    def _block(self) -> Progressive:
        """The block that has recorded the call."""
        return cast(Progressive, self._progress)

    @property
    def has_started(self) -> bool:
        """True once the block has started its calls."""
        return self._block.flushed

    @property
    def is_unkeyed_collective(self) -> bool:
        """True for a single collective without a key."""
        return hasattr(self, "plan")

    def is_in_block_of(self, other: Work[Any]) -> bool:
        """Return whether one block has recorded both calls, to start them together."""
        return self._progress is other._progress

    def follow(self, work: Work[Any]) -> None:
        """Let the block also wait for `work`."""
        self._block.follow(work)

    def visible(self) -> Work[Any]:
        """Return the work that the user holds."""
        return self

    def _look(self) -> None:
        self.looked = True
        super()._look()

    def _failed(self, error: BaseException) -> None:
        self._block.failed(self)
        super()._failed(error)


class MemberWork(DeferredWork):
    """A work that is part of another one; the other one reports a failure.

    Attributes:
        whole: the work of the list that it is part of.
    """

    __slots__ = ("whole",)

    whole: Work[Any]

    def visible(self) -> Work[Any]:
        """Return the work that the user holds."""
        return self.whole

    def _watch(self, call: CallSite) -> None:
        pass

    def _failed(self, error: BaseException) -> None:
        pass


class FlushWork(Work[Any]):
    """The handle of a flush, which no single user call has started.

    Args:
        stands_for: returns the pending user works of the flush.
        ended: called with the error at the end, or None.
    """

    __slots__ = ("stands_for",)

    def __init__(
        self,
        progress: Progress,
        op: str,
        group: Any,
        stands_for: Callable[[], Iterable[Work[Any]]],
        ended: Callable[[BaseException | None], None],
    ) -> None:
        super().__init__(progress, op, None, None, group, 0)
        self.stands_for = stands_for
        self._call_back(lambda work: ended(work._exception), AT_ONCE)

    def _watch(self, call: CallSite) -> None:
        """The works of the members are watched."""

    def _failed(self, error: BaseException) -> None:
        """The works of the members report it."""
