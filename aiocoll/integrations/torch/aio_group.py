"""`AioGroup`: a torch process group whose calls aiocoll carries out."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from aiocoll.group.process_group import ProcessGroup
from aiocoll.integrations.torch.calls import Calls
from aiocoll.integrations.torch.carriers import BACKEND
from aiocoll.integrations.torch.process import process
from aiocoll.loops import LoopThread

__all__ = ["NAME", "AioGroup"]

#: The name of the backend.
NAME = BACKEND


class AioGroup(Calls, dist.ProcessGroup):  # type: ignore[misc]
    """A torch process group that wraps an aiocoll group.

    It is a `ProcessGroup` and not a `Backend`: torch wraps the works of a Python backend, and the wrapper forwards only
    `wait` and `get_future`.

    Args:
        pg: the group of aiocoll.
        thread: the thread with the event loop of `pg`.
        store: torch's store for this group.
        is_owner: whether the end of the torch group closes `pg`.
    """

    def __init__(self, pg: ProcessGroup, thread: LoopThread, store: Any, is_owner: bool = True) -> None:
        dist.ProcessGroup.__init__(self, pg.rank(), pg.size())
        self.setup_calls(pg, thread, NAME)
        self._store = store
        self._name = self._desc = ""
        self._closes = is_owner
        if is_owner:
            process.groups.add(self)

    # -- names, by the methods that C++ and Python call

    def getBackendName(self) -> str:
        """Return the name of the backend."""
        return NAME

    name = _get_backend_name = getBackendName

    def getGroupName(self) -> str:
        """Return the name of the group."""
        return self._name

    def setGroupName(self, name: str) -> None:
        """Set the name of the group."""
        self._name = name

    _set_group_name = setGroupName

    def getGroupDesc(self) -> str:
        """Return the description of the group."""
        return self._desc

    def setGroupDesc(self, desc: str) -> None:
        """Set the description of the group."""
        self._desc = desc

    _set_group_desc = setGroupDesc
    group_name = property(getGroupName)
    group_desc = property(getGroupDesc)

    # -- the backend interface of torch

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device(device) for device in self.carriers.devices(self)]

    supports_splitting = supports_coalescing = supports_time_estimate = supports_shrinking = False

    def _get_backend(self, device: torch.device) -> Any:
        carrier = self.carriers.find(self, torch.device(device).type)
        return self if carrier is None else carrier._get_backend(device)

    def get_group_store(self) -> Any:
        """Return the store of the group."""
        return self._store

    def _get_sequence_number_for_group(self) -> int:
        return self.count

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the default timeout of operations."""
        limit = timeout.total_seconds()

        def assign() -> None:
            self.pg.timeout = limit

        self.thread.start(assign).result()

    _set_default_timeout = set_timeout

    def shutdown(self) -> None:
        """Close the group; called by `destroy_process_group`."""
        if dist.GroupMember.WORLD is not self:  # torch destroys all other groups with the default one
            self.carriers.destroy()
        if self._closes:
            self._closes = False
            process.groups.discard(self)
            self.thread.start(self.pg.shutdown).result()

    def abort(self) -> None:
        """Revoke the group, so that its pending works fail on all ranks."""
        self.thread.post(self.pg.abort)
