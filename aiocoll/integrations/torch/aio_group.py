"""`AioGroup`: a torch process group whose calls aiocoll carries out."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from aiocoll.group.process_group import ProcessGroup
from aiocoll.integrations.torch.aio_backend import AioBackend, can_shrink, shrunk
from aiocoll.integrations.torch.carriers import BACKEND
from aiocoll.integrations.torch.lifetime import Lifetime
from aiocoll.loops import LoopThread

__all__ = ["AioGroup"]


class AioGroup(Lifetime, dist.ProcessGroup):  # type: ignore[misc]
    """A torch process group that wraps an aiocoll group.

    It is its own backend, because torch wraps the works of an `AioBackend`.

    Args:
        pg: the group of aiocoll.
        thread: the thread with the event loop of `pg`.
        store: torch's store for this group.
        is_owner: whether the end of the torch group closes `pg`.
    """

    def __init__(self, pg: ProcessGroup, thread: LoopThread, store: Any, is_owner: bool = True) -> None:
        dist.ProcessGroup.__init__(self, pg.rank(), pg.size())
        self.setup(pg, thread, is_owner)
        self._store = store
        self._name = self._desc = ""

    # -- names, by the methods that C++ and Python call

    def getBackendName(self) -> str:
        """Return "aio", the backend name."""
        return BACKEND

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

    @property
    def supports_shrinking(self) -> bool:
        """Return whether `shrink_group` can shrink this group: it needs torch 2.14 and only the backend "aio"."""
        return can_shrink() and self.carriers.devices(self) == ["cpu"]

    def shrink(self, ranks_to_exclude: list[int], shrink_flags: int = 0, opts_override: Any = None) -> AioBackend:
        """Return the backend of a new group without `ranks_to_exclude`; torch's `shrink_group` calls this."""
        return shrunk(self, ranks_to_exclude, shrink_flags, opts_override)

    def _get_backend(self, device: torch.device) -> Any:
        kind = torch.device(device).type
        if kind not in self.carriers.devices(self):
            raise RuntimeError(f"the group has no backend for device type {kind}")  # torch catches this class
        carrier = self.carriers.find(self, kind)
        return self if carrier is None else carrier._get_backend(device)

    def get_group_store(self) -> Any:
        """Return torch's store for this group."""
        return self._store

    def shutdown(self) -> None:
        """Close the group; torch's `destroy_process_group` calls this."""
        if dist.GroupMember.WORLD is not self:  # torch destroys all other groups with the default one
            self.carriers.destroy()
        super().shutdown()
