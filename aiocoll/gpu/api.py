"""Interfaces to CUDA, NCCL and arithmetic on devices: `typing.Protocol` classes, with integers as handles.

Devices are ordinals. Streams, events and memory are addresses. `aiocoll.gpu.cupy_api` implements the protocols by CuPy;
tests use fakes. Rules for callers:

- Only `event_synchronize`, `NcclCommunicator.abort` and NCCL calls may block for long. So only a launcher thread makes
  NCCL calls.
- An event that has not been recorded counts as done.
- Every call but `version`, `device_count`, `bus_id`, `capability`, `current`, `has_context`, `relax`, `device_of` and
  `event_done` makes a context of half a GiB on the thread's device if there is none. So each thread calls `use` first.
"""

from __future__ import annotations

from typing import Any, Protocol

from numpy.typing import NDArray

__all__ = ["LIBRARY", "Cuda", "DeviceError", "Kernels", "Nccl", "NcclCommunicator"]

#: Name of the NCCL backend in group options and in statistics.
LIBRARY = "nccl"


class DeviceError(Exception):
    """Raised when a CUDA or NCCL call reports an error.

    Attributes:
        call: the function that failed.
        fatal: whether the device or the communicator is unusable from now on; False for a refused argument.
        status: number of the error, 0 if unknown.
    """

    def __init__(self, call: str, message: str, *, fatal: bool = True, status: int = 0) -> None:
        super().__init__(f"{call}: {message}")
        self.call = call
        self.fatal = fatal
        self.status = status


class Kernels(Protocol):
    """Arithmetic on device arrays, which the CUDA runtime itself does not provide."""

    def scale(self, target: int, source: int, count: int, dtype: str, factor: complex, stream: int) -> None:
        """Multiply `count` elements of `source` by `factor` into `target`, which may be `source`, in stream order.

        `dtype` is a float of 16 bits or more, or complex. Other dtypes raise a `DeviceError` that is not fatal.
        """


class Cuda(Protocol):
    """The CUDA runtime of this process. Every method raises `DeviceError` when the CUDA call fails.

    Attributes:
        kernels: kernels on streams of this runtime.
    """

    kernels: Kernels

    def version(self) -> int:
        """Return the version of the CUDA runtime, such as 12080."""

    def device_count(self) -> int:
        """Return the number of devices that this process may use; 0 without a driver."""

    def bus_id(self, device: int) -> str:
        """Return the device's PCI bus id, which is unique on this host."""

    def capability(self, device: int) -> tuple[int, int]:
        """Return the device's compute capability, such as (9, 0)."""

    def use(self, device: int) -> None:
        """Make `device` the current device of this thread."""

    def current(self) -> int:
        """Return the number of this thread's current CUDA device.

        Streams 0, 1 and 2 are streams of that device.
        """

    def has_context(self, device: int) -> bool:
        """Return whether this process has a CUDA context on `device`; `use` creates a missing context."""

    def relax(self) -> None:
        """Prevent CUDA calls of this thread from invalidating the CUDA graph captures of other threads."""

    def device_of(self, address: int) -> int:
        """Return the number of the device that owns the memory at `address`."""

    def stream_create(self) -> int:
        """Return a new stream on the thread's current device that does not wait for the default stream."""

    def stream_destroy(self, stream: int) -> None:
        """Destroy a stream. Work that is enqueued on it still completes."""

    def is_capturing(self, stream: int) -> bool:
        """Return whether work on `stream` is being captured into a CUDA graph."""

    def event_create(self, sleeps: bool = False) -> int:
        """Return a new CUDA event on the current device; threads that wait for it sleep if `sleeps`, else spin.

        Few sleeping events may be pending on a stream, see `aiocoll.gpu.events`.
        """

    def event_destroy(self, event: int) -> None:
        """Destroy a CUDA event."""

    def event_record(self, event: int, stream: int) -> None:
        """Record `event` on `stream`; the event is done when all work enqueued on the stream so far is done."""

    def event_done(self, event: int) -> bool:
        """Return whether the event is done; raise `DeviceError` if work before the event has failed."""

    def event_synchronize(self, event: int) -> None:
        """Block this thread, without holding the GIL, until the event is done; raise if work before it has failed."""

    def stream_wait(self, stream: int, event: int) -> None:
        """Make work that is enqueued on `stream` after this call wait for `event`."""

    def stream_write(self, stream: int, address: int, value: int) -> None:
        """Enqueue a write of a 32-bit unsigned integer to page-locked host memory, in stream order."""

    def pinned(self, nbytes: int) -> NDArray[Any]:
        """Return `nbytes` of page-locked host memory as a uint8 array, freed with the last reference to the array."""

    def copy_to_host(self, target: int, source: int, nbytes: int, stream: int) -> None:
        """Copy from device memory to page-locked host memory, in stream order."""

    def copy_to_device(self, target: int, source: int, nbytes: int, stream: int) -> None:
        """Copy from page-locked host memory to device memory, in stream order."""

    def copy(self, target: int, source: int, nbytes: int, stream: int) -> None:
        """Copy within device memory, in stream order."""

    def scratch(self, nbytes: int, stream: int) -> int:
        """Allocate `nbytes` of device memory in stream order, and return the address."""

    def scratch_free(self, address: int, stream: int) -> None:
        """Free memory from `scratch` in stream order: after the work that is enqueued on `stream` now."""


class NcclCommunicator(Protocol):
    """An NCCL communicator on one rank. Dtypes and ops are NCCL's numbers; `stream` is the same as in `Cuda`."""

    def all_reduce(self, source: int, target: int, count: int, dtype: int, op: int, stream: int) -> None:
        """Reduce `source` over all ranks into every rank's `target`, which may be the same memory."""

    def reduce(self, source: int, target: int, count: int, dtype: int, op: int, root: int, stream: int) -> None:
        """Reduce `source` over all ranks into the root's `target`."""

    def broadcast(self, source: int, target: int, count: int, dtype: int, root: int, stream: int) -> None:
        """Copy the root's `source` to every rank's `target`."""

    def all_gather(self, source: int, target: int, count: int, dtype: int, stream: int) -> None:
        """Concatenate `count` elements of every rank in every rank's `target`."""

    def reduce_scatter(self, source: int, target: int, count: int, dtype: int, op: int, stream: int) -> None:
        """Reduce over all ranks, and store the r-th block of `count` elements in rank r's `target`."""

    def send(self, source: int, count: int, dtype: int, peer: int, stream: int) -> None:
        """Send device memory to `peer`; the stream is blocked until `peer` calls `recv`."""

    def recv(self, target: int, count: int, dtype: int, peer: int, stream: int) -> None:
        """Receive from `peer` into device memory."""

    def async_error(self) -> str | None:
        """Return the asynchronous error of the communicator, or None."""

    def abort(self) -> None:
        """Abort the NCCL calls in flight; any thread may call this.

        The aborted calls count as done, with undefined results.
        """

    def destroy(self) -> None:
        """Destroy the communicator; all ranks of a host must call this, while no NCCL call is in flight."""


class Nccl(Protocol):
    """The NCCL library of this process; each method may block, and raises `DeviceError` if its NCCL call fails."""

    def version(self) -> int:
        """Return the version of NCCL, such as 22809."""

    def unique_id(self) -> bytes:
        """Return the 128-byte id of a new communicator. One rank calls this, and sends the id to the others."""

    def init(self, world_size: int, unique_id: bytes, rank: int) -> NcclCommunicator:
        """Create this rank's communicator on the thread's current device; block until all ranks have called this."""

    def group_start(self) -> None:
        """Start an NCCL group: `group_end` launches all calls made until then, so that none waits for another."""

    def group_end(self) -> None:
        """Launch all calls since `group_start`; raise the first error of these calls."""
