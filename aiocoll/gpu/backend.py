"""Device backend for CUDA, by which the core uses this package. The first call loads the rest of the package."""

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
    """The device backend for CUDA arrays: NCCL carries out the calls, or the host does."""

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
        """Make the `CudaCalls` of a group, at its first call on CUDA arrays."""
        with loading("CUDA arrays"):
            from aiocoll.gpu.calls.device_calls import CudaCalls  # imports all modules for GPUs

        return CudaCalls.first(comm, arrays, forced=forced, ahead=ahead)


CUDA: Final = _CudaBackend()
