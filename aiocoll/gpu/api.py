"""Interfaces to CUDA and NCCL, and to the kernels of this library: protocols of plain integers.

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

#: Name of NCCL as a backend and in statistics.
LIBRARY = "nccl"


class DeviceError(Exception):
    """An error of CUDA or NCCL.

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
    """Arithmetic on a device that the CUDA runtime has no function for."""

    def scale(self, target: int, source: int, count: int, dtype: str, factor: complex, stream: int) -> None:
        """Multiply `count` elements of `source` by `factor` into `target`, in stream order; both may be the same.

        `dtype` is a float of 16 bits or more, or complex. Other dtypes raise a `DeviceError` that is not fatal.
        """


class Cuda(Protocol):
    """CUDA runtime of this process; every call raises `DeviceError` when it fails.

    Attributes:
        kernels: kernels on streams of this runtime.
    """

    kernels: Kernels

    def version(self) -> int:
        """Return the version of the runtime, such as 12080."""

    def device_count(self) -> int:
        """Return how many devices this process may use; 0 without a driver."""

    def bus_id(self, device: int) -> str:
        """Return the PCI bus id, unique among the devices of this host."""

    def capability(self, device: int) -> tuple[int, int]:
        """Return the compute capability of the device, such as (9, 0)."""

    def use(self, device: int) -> None:
        """Make `device` the current device of this thread."""

    def current(self) -> int:
        """Return the current device of this thread; the streams 0, 1 and 2 are those of this device."""

    def has_context(self, device: int) -> bool:
        """Return whether this process has a context on the device; if not, `use` makes one."""

    def relax(self) -> None:
        """Keep calls of this thread from invalidating graph captures of other threads."""

    def device_of(self, address: int) -> int:
        """Return the device whose memory lies at `address`."""

    def stream_create(self) -> int:
        """Return a new stream of the thread's device that does not wait for the default stream."""

    def stream_destroy(self, stream: int) -> None:
        """Destroy a stream; enqueued work still completes."""

    def is_capturing(self, stream: int) -> bool:
        """Return whether work for `stream` is being captured into a graph."""

    def event_create(self, sleeps: bool = False) -> int:
        """Return a new event of the thread's device; waiting threads spin, or sleep if `sleeps`.

        Few sleeping events may be pending on a stream, see `aiocoll.gpu.events`.
        """

    def event_destroy(self, event: int) -> None:
        """Destroy an event."""

    def event_record(self, event: int, stream: int) -> None:
        """Record `event` on `stream`; it is done once the work enqueued so far is done."""

    def event_done(self, event: int) -> bool:
        """Return whether the event is done; raise if earlier work has failed."""

    def event_synchronize(self, event: int) -> None:
        """Block this thread, without the GIL, until the event is done; raise if earlier work has failed."""

    def stream_wait(self, stream: int, event: int) -> None:
        """Make later work on `stream` wait for `event`."""

    def stream_write(self, stream: int, address: int, value: int) -> None:
        """Write an unsigned 32-bit integer to page-locked memory once the work enqueued so far is done."""

    def pinned(self, nbytes: int) -> NDArray[Any]:
        """Return `nbytes` of page-locked host memory as uint8; the last reference frees it."""

    def copy_to_host(self, target: int, source: int, nbytes: int, stream: int) -> None:
        """Copy from the device to pinned memory, in the order of `stream`."""

    def copy_to_device(self, target: int, source: int, nbytes: int, stream: int) -> None:
        """Copy from pinned memory to the device, in the order of `stream`."""

    def copy(self, target: int, source: int, nbytes: int, stream: int) -> None:
        """Copy on the device, in the order of `stream`."""

    def scratch(self, nbytes: int, stream: int) -> int:
        """Return the address of `nbytes` of new device memory, for later work on `stream`."""

    def scratch_free(self, address: int, stream: int) -> None:
        """Free the memory from `scratch` after the work that is on `stream` now."""


class NcclCommunicator(Protocol):
    """End of a communicator on one rank. Dtypes and ops are NCCL's numbers; `stream` as in `Cuda`."""

    def all_reduce(self, source: int, target: int, count: int, dtype: int, op: int, stream: int) -> None:
        """Reduce over all ranks into every rank's `target`; source may be target."""

    def reduce(self, source: int, target: int, count: int, dtype: int, op: int, root: int, stream: int) -> None:
        """Reduce over all ranks into the root's `target`."""

    def broadcast(self, source: int, target: int, count: int, dtype: int, root: int, stream: int) -> None:
        """Copy the root's `source` to every rank's `target`."""

    def all_gather(self, source: int, target: int, count: int, dtype: int, stream: int) -> None:
        """Concatenate every rank's `count` elements in every rank's `target`."""

    def reduce_scatter(self, source: int, target: int, count: int, dtype: int, op: int, stream: int) -> None:
        """Reduce over all ranks; part r, of `count` elements, goes to rank r's `target`."""

    def send(self, source: int, count: int, dtype: int, peer: int, stream: int) -> None:
        """Send to `peer`; blocks the stream until `peer` calls `recv`."""

    def recv(self, target: int, count: int, dtype: int, peer: int, stream: int) -> None:
        """Receive from `peer`."""

    def async_error(self) -> str | None:
        """Return the asynchronous error of the communicator, or None."""

    def abort(self) -> None:
        """Abort the calls in flight, from any thread; they count as done, with undefined results."""

    def destroy(self) -> None:
        """Destroy the communicator; all ranks of a host must call this, with no call in flight."""


class Nccl(Protocol):
    """NCCL library of this process; every call raises `DeviceError` when it fails, and may block."""

    def version(self) -> int:
        """Return the version of NCCL, such as 22809."""

    def unique_id(self) -> bytes:
        """Return the id of a new communicator, 128 bytes; one rank calls this and sends the id to the others."""

    def init(self, world_size: int, unique_id: bytes, rank: int) -> NcclCommunicator:
        """Create this rank's end on the thread's device; blocks until all ranks have called this."""

    def group_start(self) -> None:
        """Start a group: calls of this thread up to `group_end` are launched together, so none waits for another."""

    def group_end(self) -> None:
        """Launch the calls since `group_start`; raise the first of their errors."""
