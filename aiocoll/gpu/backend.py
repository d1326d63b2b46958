"""Device backend for CUDA: the entry point to this package, whose other modules it imports lazily."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from aiocoll.arrays.cuda_array import KIND, LABEL
from aiocoll.elements.device import DeviceArray
from aiocoll.gpu.api import LIBRARY
from aiocoll.loading import loading

if TYPE_CHECKING:
    from aiocoll.engine.communicator import Communicator
    from aiocoll.gpu.calls.device_calls import CudaCalls

__all__ = ["CUDA"]


class _CudaBackend:
    """The device backend for CUDA arrays: calls run in NCCL, or on copies of the arrays in host memory."""

    kind = KIND
    label = LABEL
    library = LIBRARY

    def count(self) -> int:
        """Return the number of CUDA devices that this process may use."""
        from aiocoll.gpu.provider import device_count  # imported here: few groups have a device

        return device_count()

    def calls(
        self, comm: Communicator, arrays: Sequence[DeviceArray | None], *, forced: bool, ahead: bool
    ) -> CudaCalls:
        """Create the `CudaCalls` of a group, when the group first makes a call on CUDA arrays."""
        with loading("CUDA arrays"):
            from aiocoll.gpu.calls.device_calls import CudaCalls  # imports all modules for GPUs

        return CudaCalls.first(comm, arrays, forced=forced, ahead=ahead)


CUDA: Final = _CudaBackend()
