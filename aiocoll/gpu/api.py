"""The functions of CUDA and NCCL that are used, and the kernels of the library: protocols of plain integers.

Devices are ordinals, streams, events and memory are addresses. `aiocoll.gpu.cupy_api` has both by CuPy; a fake device
can stand in. Whoever calls must know: no call but `event_synchronize`, `NcclCommunicator.abort` and those of NCCL may
take long, NCCL's may (so only a launcher thread makes them), and an event that has not been recorded counts as done.
Every call but `version`, `device_count`, `bus_id`, `capability`, `current`, `has_context`, `relax`, `device_of` and
`event_done` makes a context on the thread's device if there is none, of half a GiB: each thread has to `use` its device
before.
"""

from __future__ import annotations

from typing import Any, Protocol

from numpy.typing import NDArray

__all__ = ["LIBRARY", "Cuda", "DeviceError", "Kernels", "Nccl", "NcclCommunicator"]

#: The name of NCCL, as a backend and in statistics.
LIBRARY = "nccl"


class DeviceError(Exception):
    """CUDA or NCCL has failed.

    Attributes:
        call: the function that failed.
        fatal: the device, or the communicator, cannot be used any more; False for a refused argument.
        status: the number of the error, where it is known; else 0.
    """

    def __init__(self, call: str, message: str, *, fatal: bool = True, status: int = 0) -> None:
        super().__init__(f"{call}: {message}")
        self.call = call
        self.fatal = fatal
        self.status = status


class Kernels(Protocol):
    """Arithmetic on a device, for which the CUDA runtime has no function."""

    def scale(self, target: int, source: int, count: int, dtype: str, factor: complex, stream: int) -> None:
        """Write the products of `count` elements and `factor`, in the order of `stream`; source may be target.

        `dtype` is a float of 16 bits or more, or complex; of any other it raises a `DeviceError` that is not fatal.
        """


class Cuda(Protocol):
    """The CUDA runtime of this process; every call raises `DeviceError` when it fails.

    Attributes:
        kernels: launched on streams of this runtime.
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
        """Whether this process has a context on the device; if not, `use` makes one."""

    def relax(self) -> None:
        """Let calls of this thread not disturb what other threads capture into graphs."""

    def device_of(self, address: int) -> int:
        """Return the device whose memory lies at `address`."""

    def stream_create(self) -> int:
        """Return a new stream of the thread's device that does not wait for the default stream."""

    def stream_destroy(self, stream: int) -> None:
        """Destroy a stream; enqueued work still completes."""

    def is_capturing(self, stream: int) -> bool:
        """Whether work for `stream` is being captured into a graph."""

    def event_create(self, sleeps: bool = False) -> int:
        """Return a new event of the thread's device; waiting for it spins, or `sleeps`: of these few may be pending."""

    def event_destroy(self, event: int) -> None:
        """Destroy an event."""

    def event_record(self, event: int, stream: int) -> None:
        """Record `event` on `stream`: it is done when the work enqueued so far is."""

    def event_done(self, event: int) -> bool:
        """Whether the event is done; raises if work before it has failed."""

    def event_synchronize(self, event: int) -> None:
        """Block this thread, without the GIL, until the event is done; raises if work before it has failed."""

    def stream_wait(self, stream: int, event: int) -> None:
        """Make later work on `stream` wait for `event`."""

    def stream_write(self, stream: int, address: int, value: int) -> None:
        """Write an unsigned int of 32 bits to page-locked memory when the work enqueued so far is done."""

    def pinned(self, nbytes: int) -> NDArray[Any]:
        """Return `nbytes` of page-locked host memory as uint8, which is freed with the last reference."""

    def copy_to_host(self, target: int, source: int, nbytes: int, stream: int) -> None:
        """Copy from the device to pinned memory, in the order of `stream`."""

    def copy_to_device(self, target: int, source: int, nbytes: int, stream: int) -> None:
        """Copy from pinned memory to the device, in the order of `stream`."""

    def copy(self, target: int, source: int, nbytes: int, stream: int) -> None:
        """Copy on the device, in the order of `stream`."""

    def scratch(self, nbytes: int, stream: int) -> int:
        """Return the address of `nbytes` of new memory on the device of `stream`, for later work on it."""

    def scratch_free(self, address: int, stream: int) -> None:
        """Free what `scratch` has returned, behind the work that is on `stream` now."""


class NcclCommunicator(Protocol):
    """One rank's end of a communicator. Dtypes and ops are NCCL's numbers; `stream` as in `Cuda`."""

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
        """Send to `peer`, whose `recv` it waits for."""

    def recv(self, target: int, count: int, dtype: int, peer: int, stream: int) -> None:
        """Receive from `peer`."""

    def async_error(self) -> str | None:
        """Return the asynchronous error of the communicator, or None."""

    def abort(self) -> None:
        """Abort calls in flight: they count as done, with undefined results; from any thread."""

    def destroy(self) -> None:
        """Destroy the communicator; all ranks of a host have to call it, and no call may be in flight."""


class Nccl(Protocol):
    """The NCCL library of this process; every call raises `DeviceError` when it fails, and may block."""

    def version(self) -> int:
        """Return its version, such as 22809."""

    def unique_id(self) -> bytes:
        """Return the id of a new communicator, 128 bytes; one rank calls it and tells the others."""

    def init(self, world_size: int, unique_id: bytes, rank: int) -> NcclCommunicator:
        """Return this rank's end, on the thread's device; blocks until all ranks have called it."""

    def group_start(self) -> None:
        """Begin a group: calls of this thread up to `group_end` are launched together, none waits for another."""

    def group_end(self) -> None:
        """Launch the calls since `group_start`; raises what any of them raised."""
