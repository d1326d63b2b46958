"""`AioBackend`: the torch backend of a group that `torch.distributed.shrink_group` returns."""

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

#: Base class of torch's backends; Python code can subclass it in torch 2.14 and later.
_TorchBackend: Any = getattr(distributed_c10d, "C10DBackend", object)

#: References that keep open backends alive, because torch's C++ code holds no reference to the Python objects.
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
        """Return "aio", the backend name."""
        return BACKEND

    def shrink(self, ranks_to_exclude: list[int], shrink_flags: int = 0, opts_override: Any = None) -> AioBackend:
        """Return the backend of a new group without `ranks_to_exclude`; torch's `shrink_group` calls this."""
        return shrunk(self, ranks_to_exclude, shrink_flags, opts_override)

    def shutdown(self) -> None:
        """Close the group; torch's `destroy_process_group` calls this."""
        super().shutdown()
        _open.discard(self)

    def _call(self, *args: Any, **kwargs: Any) -> TorchWork:
        if not self._is_custom:
            self._is_custom = True
            self._register_as_custom()
        return super()._call(*args, **kwargs)

    def _register_as_custom(self) -> None:
        """Set the backend type of the torch group to CUSTOM; done at the first call.

        `shrink_group` gives the type GLOO to every backend for the CPU, and `DistributedDataParallel` would use this
        backend as an object of Gloo's class.
        """
        cpu, custom = torch.device("cpu"), dist.ProcessGroup.BackendType.CUSTOM
        for group in distributed_c10d._world.pg_map:
            if type(group) is dist.ProcessGroup and cpu in group._device_types and group._get_backend(cpu) is self:
                group._register_backend(cpu, custom, self)
                group._set_default_backend(custom)


def can_shrink() -> bool:
    """Return whether this version of torch accepts backends written in Python, as `shrink_group` requires."""
    return _TorchBackend is not object


def shrunk(group: Lifetime, ranks_to_exclude: list[int], flags: int, options: Any) -> AioBackend:
    """Shrink an aiocoll group, and return the torch backend of the new group without `ranks_to_exclude`.

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
        raise TypeError("pg_options must be None: the new group has the options of the group that is shrunk")
    if not group.is_owner:
        raise RuntimeError(
            "a group from attach() cannot be shrunk: call shrink() of the wrapped aiocoll group, then attach the result"
        )

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
                f"rank(s) {names} are lost, too, but not in ranks_to_exclude; initialize a new group, because this one "
                "cannot be shrunk again"
            )
        return pg

    return AioBackend(group.thread.run(shrink()), group.thread)
