"""`Lifetime`: base class of torch objects backed by an aiocoll group; adds timeout, shutdown and abort."""

from __future__ import annotations

from datetime import timedelta

from aiocoll.group.process_group import ProcessGroup
from aiocoll.integrations.torch.calls import Calls
from aiocoll.integrations.torch.carriers import BACKEND
from aiocoll.integrations.torch.process import process
from aiocoll.loops import LoopThread

__all__ = ["Lifetime"]


class Lifetime(Calls):
    """A mixin for torch objects backed by an aiocoll group: calls, timeout, shutdown, abort.

    Attributes:
        is_owner: whether the end of the torch object closes `pg`.
    """

    supports_splitting = supports_coalescing = supports_time_estimate = False

    def setup(self, pg: ProcessGroup, thread: LoopThread, is_owner: bool) -> None:
        """Initialize this mixin; a separate method, because torch's classes do not call `super().__init__`."""
        self.setup_calls(pg, thread, BACKEND)
        self.is_owner = is_owner
        if is_owner:
            process.groups.add(self)

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the default timeout of operations."""
        limit = timeout.total_seconds()

        def assign() -> None:
            self.pg.timeout = limit

        self.thread.start(assign).result()

    _set_default_timeout = set_timeout

    def shutdown(self) -> None:
        """Close the group; torch's `destroy_process_group` calls this."""
        if self.is_owner:
            self.is_owner = False
            process.groups.discard(self)
            self.thread.start(self.pg.shutdown).result()

    def abort(self) -> None:
        """Revoke the group, so that its pending works fail on all ranks."""
        self.thread.post(self.pg.abort)

    def _get_sequence_number_for_group(self) -> int:
        return self.count
