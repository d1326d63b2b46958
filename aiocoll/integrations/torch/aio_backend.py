"""`AioBackend`: the torch backend of a group that `torch.distributed.shrink_group` makes."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from aiocoll.group.parts import parts_of
from aiocoll.group.process_group import ProcessGroup
from aiocoll.integrations.torch.carriers import BACKEND
from aiocoll.integrations.torch.lifetime import Lifetime
from aiocoll.integrations.torch.work import TorchWork
from aiocoll.loops import LoopThread

__all__ = ["AioBackend", "can_shrink", "shrunk"]

#: The class of torch's backends, of which Python code can make subclasses from torch 2.14 on.
_TorchBackend: Any = getattr(distributed_c10d, "C10DBackend", object)

#: References to the open backends, because C++ keeps none to the Python objects.
_open: set[AioBackend] = set()


class AioBackend(Lifetime, _TorchBackend):  # type: ignore[misc]
    """A torch backend that wraps an aiocoll group.

    torch wraps the works of the backend, and the wrapper forwards only `wait` and `get_future`. So the backend of other
    groups is the group itself, an `AioGroup`.

    Args:
        pg: the group of aiocoll, which the end of the backend closes.
        thread: the thread with the event loop of `pg`.
    """

    supports_shrinking = True

    def __init__(self, pg: ProcessGroup, thread: LoopThread) -> None:
        _TorchBackend.__init__(self, pg.rank(), pg.size())
        self.setup(pg, thread, is_owner=True)
        self._is_custom = False
        _open.add(self)

    def getBackendName(self) -> str:
        """Return the name of the backend."""
        return BACKEND

    def shrink(self, ranks_to_exclude: list[int], shrink_flags: int = 0, opts_override: Any = None) -> AioBackend:
        """Return the backend of a group of the other ranks; called by `shrink_group`."""
        return shrunk(self, ranks_to_exclude, shrink_flags, opts_override)

    def shutdown(self) -> None:
        """Close the group; called by `destroy_process_group`."""
        super().shutdown()
        _open.discard(self)

    def _call(self, *args: Any, **kwargs: Any) -> TorchWork:
        if not self._is_custom:
            self._is_custom = True
            self._register_as_custom()
        return super()._call(*args, **kwargs)

    def _register_as_custom(self) -> None:
        """Give the torch group of this backend the type CUSTOM, at the first call.

        `shrink_group` gives the type GLOO to every backend for the CPU, and `DistributedDataParallel` would use this
        backend as an object of Gloo's class.
        """
        cpu, custom = torch.device("cpu"), dist.ProcessGroup.BackendType.CUSTOM
        for group in distributed_c10d._world.pg_map:
            if type(group) is dist.ProcessGroup and cpu in group._device_types and group._get_backend(cpu) is self:
                group._register_backend(cpu, custom, self)
                group._set_default_backend(custom)


def can_shrink() -> bool:
    """Return whether this version of torch accepts a backend in Python, which `shrink_group` needs."""
    return _TorchBackend is not object


def shrunk(group: Lifetime, ranks_to_exclude: list[int], flags: int, options: Any) -> AioBackend:
    """Return the backend of a group without `ranks_to_exclude`.

    Args:
        group: the torch object to shrink.
        ranks_to_exclude: ranks of `group`.
        flags: `SHRINK_DEFAULT` waits for pending calls; `SHRINK_ABORT` lets them fail.
        options: must be None: the new group has the options of `group`.

    Raises:
        TypeError: `options` is not None.
        RuntimeError: `attach` made `group`; or other ranks are lost, too, which torch would count as members.
        Exception: see `ProcessGroup.shrink`.
    """
    if options is not None:
        raise TypeError("pg_options must be None: the new group has the options of the old one")
    if not group.is_owner:
        raise RuntimeError("the torch group wraps a group of the program: call its shrink(), and attach the new group")

    async def shrink() -> ProcessGroup:
        if flags != distributed_c10d.SHRINK_ABORT:
            await parts_of(group.pg).lifetime.settle()
        pg = await group.pg.shrink(ranks_to_exclude)
        before = group.pg.global_ranks
        lost = [
            rank for rank, each in enumerate(before) if each not in pg.global_ranks and rank not in ranks_to_exclude
        ]
        if lost:
            await pg.shutdown()
            names = ", ".join(map(str, lost))
            raise RuntimeError(
                f"rank(s) {names} are lost, too, but not in ranks_to_exclude; initialize another group, since this one "
                "cannot be shrunk again"
            )
        return pg

    return AioBackend(group.thread.run(shrink()), group.thread)
