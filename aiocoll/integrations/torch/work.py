"""`TorchWork`: the work of a torch call that runs on the event loop of a `LoopThread`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.futures import Future

from aiocoll.integrations.torch.errors import to_torch
from aiocoll.integrations.torch.process import process
from aiocoll.loops import LoopThread, Started
from aiocoll.work import Work

__all__ = ["TorchWork"]


class TorchWork(dist.Work):  # type: ignore[misc]
    """The work of one call of a torch group.

    Args:
        thread: the thread whose event loop carries out the call.
        rank: the rank of this process in the group.
        name: the name of the call.
        outputs: the tensors that the future of the call returns.
        call: starts the operation; runs on the event loop.
        profiled: the handle of the profiler's event, which ends with the work.
    """

    def __init__(
        self,
        thread: LoopThread,
        rank: int,
        name: str,
        outputs: Sequence[torch.Tensor],
        call: Callable[[], Any],
        profiled: Any = None,
    ) -> None:
        super().__init__()
        self._thread, self._rank, self._name, self._outputs = thread, rank, name, list(outputs)
        self._call: Callable[[], Any] | None = call
        self._profiled = profiled
        self._error: BaseException | None = None
        self._operation: Work[Any] | None = None
        self._source: dist.Future[None] | None = None
        self._future: dist.Future[list[torch.Tensor]] | None = None
        self._started: Started[Any] = thread.start(self._begin)

    def _begin(self) -> Any:
        call, self._call = self._call, None
        assert call is not None
        if self._profiled is not None:
            return self._run_profiled(call)
        made = call()
        if isinstance(made, Work):
            self._operation = made
        return made

    async def _run_profiled(self, call: Callable[[], Any]) -> None:
        """Run the call, then end its profiler event.

        The event ends on the loop's thread, so that the profiler shows it as asynchronous.

        The event ends before the work, so that it is complete when the program reads the profile.
        """
        try:
            made = call()
            if isinstance(made, Work):
                self._operation = made
            await made
        finally:
            torch.autograd._record_function_with_args_exit(self._profiled)

    def add_done_callback(self, fn: Callable[[Started[Any]], object]) -> None:
        """Call `fn` on the event loop when the call has ended."""
        self._started.add_done_callback(fn)

    @property
    def started(self) -> Started[Any]:
        """The handle of the call on the event loop, from `LoopThread.start`."""
        return self._started

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until the call has ended; Ctrl-C interrupts the wait.

        torch's C++ code calls this while it holds the GIL.
        """
        left = timeout.total_seconds() if timeout is not None else 0.0
        if not self._started.wait(left if left > 0 else None):
            raise dist.DistBackendError(
                f"[Rank {self._rank}] Timed out waiting: Operation timed out! {self._name} has not ended within "
                f"{left:g} s; the operation continues"
            )
        if (error := self.exception()) is not None:
            raise error
        return True

    synchronize = wait

    def exception(self) -> BaseException | None:
        """Return the error of the call; None if it has not ended, or has ended without an error."""
        if self._error is None and self._started.done() and (error := self._started.exception()) is not None:
            self._error = to_torch(error, self._name, self._rank)
        return self._error

    def result(self) -> list[torch.Tensor]:
        """Wait until the call has ended, and return its output tensors."""
        self.wait()
        return self._outputs

    def get_future(self) -> dist.Future[list[torch.Tensor]]:
        """Return a future of the output tensors.

        Its callbacks run in a thread pool, because they may wait for works.
        """
        if self._future is None:
            source = self._source = Future()
            # Raise errors in a chained callback: torch's C++ code receives such an error, but no error from
            # `set_exception`.
            self._future = source.then(self._value)
            self._started.add_done_callback(self._complete)
        return self._future

    def _complete(self, _: Started[Any]) -> None:
        source, self._source = self._source, None
        with contextlib.suppress(RuntimeError):  # the interpreter is ending
            process.pool().submit(source.set_result, None)  # type: ignore[union-attr]

    def _value(self, _: dist.Future[None]) -> list[torch.Tensor]:
        if (error := self.exception()) is not None:
            raise error
        return self._outputs

    def is_completed(self) -> bool:
        """Return whether the call has ended."""
        return self._started.done()

    def is_success(self) -> bool:
        """Return whether the call has ended without an error."""
        return self._started.done() and self.exception() is None

    def source_rank(self) -> int:
        """Return the rank that sent the received message."""
        self.wait()
        assert self._operation is not None
        return self._operation.source_rank()

    _source_rank = source_rank

    def abort(self) -> None:
        """Revoke the group, so that its pending works fail on all ranks."""
        if self._operation is not None:
            self._thread.post(self._operation.abort)
