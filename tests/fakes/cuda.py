"""A simulated CUDA for tests: host memory stands in for device memory, and each stream is a thread.

It is strict: it raises an error for everything that real CUDA refuses, and for mistakes that real CUDA does not report.
Copies need page-locked memory. Addresses must belong to the device. Handles must belong to the right device and must
not be destroyed. Work on freed memory makes the device fail.

Some behaviour copies real CUDA. An event that was never recorded counts as done. A failed device stays failed. Nearly
every call creates a context on the device of its thread, which is device 0 until the thread selects another one.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aiocoll.elements.dtypes import by_name
from aiocoll.elements.ops import ReduceOp, kernel
from aiocoll.gpu.api import DeviceError, Kernels

from .memory import HOST, BadAddressError, FakeMemory
from .occupancy import Room
from .streams import SLEEPING, Blocked, FakeDevice, FakeStream, Gate, Mark

#: Handles of implicit streams: 0 and 1 both mean the default stream of the thread's device; 2 is a stream per thread.
LEGACY = (0, 1)
PER_THREAD = 2
#: CUDA's texts for errors that the fake raises.
INVALID_HANDLE = "invalid resource handle"
INVALID_VALUE = "invalid argument"
#: The maximum blocking time of a stalled query in seconds, so that a test fails instead of hanging.
STALLED = 60.0
#: The duration of a normal query in seconds.
MOMENT = 1e-6


class _Thread(threading.local):
    """The CUDA state of a thread: its current device and its capture mode."""

    device = 0
    relaxed = False


class _Event:
    def __init__(self, device: FakeDevice, sleeps: bool) -> None:
        self.device = device
        self.sleeps = sleeps
        self.mark: Mark | None = None


class FakeCuda:
    """A simulated CUDA runtime with the interface `aiocoll.gpu.api.Cuda`, which tests can control.

    Use it in a ``with`` block or call `close`, which ends its threads.

    Args:
        devices: the number of devices.

    Attributes:
        bus_ids: by device; change one to simulate another GPU.
        capabilities: compute capability by device; change one to simulate an older GPU.
        latency: seconds that every kernel and copy takes.
        memory: memory of the devices, and page-locked memory of the host.
        kernels: the kernels of these devices.
        calls: the number of calls of each runtime function.
        hooks: called with the name of each function at its start; a hook may wait or raise.
        contexts: for each device with a context, the call and the thread that created it.
        stalls: whether a query of unfinished work blocks until the work is done, as if a kernel blocked the driver.
        stalled: the threads whose queries blocked.
        overdue: the threads whose queries blocked until the time limit.
        full: the threads that waited because a stream was full or had too many pending events.
        held_up: the threads that locked or freed memory while NCCL kernels ran, which waits for their end.
        blocked: all waiting threads, so that `close` can release them.
        disturbed: the calls that made a capture of another thread invalid, with their threads.
        rooms: by device, the place for which NCCL kernels wait.
    """

    def __init__(self, devices: int = 1) -> None:
        self.bus_ids = [f"00000000:{device:02X}:00.0" for device in range(devices)]
        self.capabilities = [(9, 0)] * devices
        self.latency = 0.0
        self.memory = FakeMemory()
        self.kernels: Kernels = FakeKernels(self)
        self.calls: defaultdict[str, int] = defaultdict(int)
        self.hooks: list[Callable[[str], object]] = []
        self.contexts: dict[int, str] = {}
        self.stalls = False
        self.stalled: list[str] = []
        self.overdue: list[str] = []
        self.full: list[str] = []
        self.held_up: list[str] = []
        self.blocked = Blocked()
        self.rooms = [Room() for _ in range(devices)]
        self._devices = [FakeDevice(device) for device in range(devices)]
        self._lock = threading.Lock()
        self._thread = _Thread()
        self._handles = itertools.count(0x5500_0000, 16)
        self._streams: dict[int, FakeStream] = {}
        self._implicit: dict[tuple[int, int], FakeStream] = {}
        self._ending: list[FakeStream] = []
        self._events: dict[int, _Event] = {}
        self._next: dict[str, list[DeviceError]] = {}
        self._scratch: dict[int, NDArray[Any]] = {}
        self.disturbed: list[str] = []
        #: The streams in capture. The value is whether the capture is blocking: work on the default stream would join
        #: it.
        self._captures: dict[FakeStream, bool] = {}

    def __enter__(self) -> FakeCuda:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # -- control by tests

    def close(self) -> None:
        """Release all waiting threads, and end the streams and their threads."""
        self.blocked.end()
        streams = [*self._streams.values(), *self._implicit.values(), *self._ending]
        for stream in streams:
            stream.close()
        for stream in streams:
            stream.join(10.0)

    def live(self) -> dict[str, int]:
        """Return counts of existing events and streams, and the allocated bytes of page-locked and device memory."""
        return {
            "events": len(self._events),
            "streams": len(self._streams),
            "pinned": self.memory.live(HOST),
            "memory": sum(self.memory.live(device) for device in range(len(self._devices))),
        }

    def fail(self, message: str = "unspecified launch failure", device: int = 0) -> None:
        """Make `device` fail permanently; all pending waits for the device end with the error."""
        self._devices[device].fail(message)

    def fail_next(self, call: str, message: str = INVALID_VALUE, *, fatal: bool = False) -> None:
        """Make the next call of the named function raise a `DeviceError`."""
        self._next.setdefault(call, []).append(DeviceError(call, message, fatal=fatal))

    def allocate(self, nbytes: int, device: int = 0) -> NDArray[Any]:
        """Allocate device memory; return it as a byte array, whose deletion frees the memory."""
        where = self._device(device, "malloc").ordinal
        self.enter("malloc", where)
        return self.memory.new(nbytes, where)

    def kernel(self, stream: int, work: Callable[[], None], device: int | None = None, seconds: float = 0.0) -> None:
        """Enqueue a kernel on a stream. The kernel calls `work`.

        Args:
            stream: handle of the stream.
            work: called by the thread of the stream.
            device: the device of a default stream; None for the thread's device.
            seconds: the time that the kernel takes before `work`.
        """
        self._stream(stream, "launch", device).kernel(work, seconds)

    def gate(self, stream: int, device: int | None = None) -> Gate:
        """Enqueue a kernel that runs until the test opens the returned gate."""
        gate = Gate()
        self.kernel(stream, lambda: gate.run(self.blocked), device)
        return gate

    def step(self, stream: int, steps: int | None, device: int | None = None) -> None:
        """Let a stream execute `steps` more entries and then pause; None removes the limit."""
        self._stream(stream, "step", device).step(steps)

    def capture(self, stream: int, on: bool, device: int | None = None, *, blocking: bool = False) -> None:
        """Start or end the capture of a stream into a graph, in the default capture mode of CUDA.

        Work on the default stream would join the capture of a `blocking` stream.
        """
        found = self._stream(stream, "capture", device)
        found.capturing = on
        self._captures.pop(found, None)
        if on:
            self._captures[found] = blocking

    def stream_synchronize(self, stream: int, device: int | None = None) -> None:
        """Block this thread until all work already enqueued on `stream` is done."""
        mark = self._stream(stream, "streamSynchronize", device).mark()
        self.blocked.wait(mark.passed)
        mark.is_done("streamSynchronize")

    def enter(self, call: str, device: int) -> None:
        """Record `call` as the creator of the device's CUDA context, if the device has no context yet."""
        self.contexts.setdefault(device, f"{call} in {threading.current_thread().name}")

    # -- the runtime

    def version(self) -> int:
        """Return the version of the CUDA runtime, such as 12080."""
        return 12080

    def device_count(self) -> int:
        """Return the number of devices that this process may use; 0 without a driver."""
        return len(self._devices)

    def bus_id(self, device: int) -> str:
        """Return the PCI bus id of a device, which is unique on the host."""
        self._count("bus_id")
        return self.bus_ids[self._device(device, "bus_id").ordinal]

    def capability(self, device: int) -> tuple[int, int]:
        """Return the compute capability of a device, such as (9, 0)."""
        self._count("capability")
        return self.capabilities[self._device(device, "capability").ordinal]

    def has_context(self, device: int) -> bool:
        """Return whether this process has a CUDA context on the device, without creating one."""
        return self._device(device, "has_context").ordinal in self.contexts

    def relax(self) -> None:
        """Select the capture mode in which CUDA calls of this thread do not invalidate other threads' captures."""
        self._count("relax")
        self._thread.relaxed = True

    def device_of(self, address: int) -> int:
        """Return the device that owns the memory at `address`."""
        self._count("device_of")
        try:
            found = self.memory.where(address)
        except BadAddressError as exc:
            raise DeviceError("device_of", f"{INVALID_VALUE}: {exc}", fatal=False) from None
        if found == HOST:
            raise DeviceError("device_of", f"{INVALID_VALUE}: {address:#x} is memory of the host", fatal=False)
        return found

    def use(self, device: int) -> None:
        """Make `device` the current device of this thread."""
        self._count("use")
        self._thread.device = self._device(device, "use").ordinal
        self.enter("use", device)

    def current(self) -> int:
        """Return this thread's current device, to which stream handles 0, 1 and 2 refer."""
        return self._thread.device

    def stream_create(self) -> int:
        """Create a non-blocking stream on the thread's device, which does not wait for the default stream."""
        device = self._begin("stream_create")
        stream = FakeStream(device, self.blocked, self.full)
        with self._lock:
            handle = next(self._handles)
            self._streams[handle] = stream
        return handle

    def stream_destroy(self, stream: int) -> None:
        """Destroy a stream; work already enqueued on the stream still completes."""
        self._begin("stream_destroy", check=False)
        with self._lock:
            found = self._streams.pop(stream, None)
        if found is None:
            raise DeviceError("stream_destroy", INVALID_HANDLE, fatal=False)
        self._ending.append(found)
        found.close()

    def is_capturing(self, stream: int) -> bool:
        """Return whether `stream` is being captured into a graph."""
        self._begin("is_capturing", check=False)
        found = self._stream(stream, "is_capturing")
        if stream in LEGACY and any(
            blocking and each.device is found.device for each, blocking in list(self._captures.items())
        ):
            raise DeviceError("is_capturing", "operation would make the legacy stream depend on a capturing "
                              "blocking stream", fatal=False, status=906)  # fmt: skip
        return found.capturing

    def event_create(self, sleeps: bool = False) -> int:
        """Create an event on the thread's device; with `sleeps`, waiting threads sleep instead of spinning.

        In this fake, waiting threads always sleep.
        """
        device = self._begin("event_create")
        with self._lock:
            handle = next(self._handles)
            self._events[handle] = _Event(device, sleeps)
        return handle

    def event_destroy(self, event: int) -> None:
        """Destroy an event."""
        self._begin("event_destroy", check=False)
        with self._lock:
            if self._events.pop(event, None) is None:
                raise DeviceError("event_destroy", INVALID_HANDLE, fatal=False)

    def event_record(self, event: int, stream: int) -> None:
        """Record `event` after all work already enqueued on `stream`."""
        self._begin("event_record", check=False)
        found, on = self._event(event, "event_record"), self._open(stream, "event_record")
        if found.device is not on.device:
            message = f"{INVALID_HANDLE}: event of device {found.device.ordinal}, stream of {on.device.ordinal}"
            raise DeviceError("event_record", message, fatal=False)
        if found.sleeps:
            self._wait_for_room(on.sleeping)
        found.mark = on.mark()
        if found.sleeps:
            on.sleeping.append(found.mark)

    def event_done(self, event: int) -> bool:
        """Return whether the work before an event is done; raise a `DeviceError` if the device failed."""
        self._count("event_done")
        self._unsafe("event_done")
        mark = self._event(event, "event_done").mark
        if mark is None:
            return True
        if not mark.passed.is_set():
            if self.stalls:
                self.stalled.append(threading.current_thread().name)
            # Wait briefly, because the real query releases the GIL, and the fake kernel's thread needs the GIL.
            self.blocked.wait(mark.passed, STALLED if self.stalls else MOMENT)
            if self.stalls and not (mark.passed.is_set() or self.blocked.is_closed):
                self.overdue.append(threading.current_thread().name)
        return mark.is_done("event_done")

    def event_synchronize(self, event: int) -> None:
        """Block this thread until the event is done; raise a `DeviceError` if the device failed."""
        self._begin("event_synchronize", check=False)
        self._unsafe("event_synchronize")
        mark = self._event(event, "event_synchronize").mark
        if mark is not None:
            self.blocked.wait(mark.passed)
            mark.is_done("event_synchronize")

    def stream_wait(self, stream: int, event: int) -> None:
        """Make work enqueued later on `stream` wait for `event`."""
        self._begin("stream_wait", check=False)
        mark = self._event(event, "stream_wait").mark
        on = self._open(stream, "stream_wait")
        if mark is not None:
            on.wait(mark)

    def stream_write(self, stream: int, address: int, value: int) -> None:
        """Enqueue a write of 32 bits to page-locked memory on `stream`."""
        self._begin("stream_write", check=False)
        self.check("stream_write", address, 4, HOST)
        written = np.frombuffer(np.uint32(value).tobytes(), np.uint8)

        def work() -> None:
            self.memory.at(address, 4, HOST)[:] = written

        self._open(stream, "stream_write").kernel(work, 0.0)

    def pinned(self, nbytes: int) -> NDArray[Any]:
        """Allocate page-locked host memory as a uint8 array; deleting the last reference frees the memory."""
        self._begin("pinned")
        self._unsafe("pinned")
        if self.rooms[self._thread.device].wait_until_free(self.blocked):
            self.held_up.append(threading.current_thread().name)
        made = self.memory.new(nbytes, HOST)
        weakref.finalize(made, self._freed, self._thread.device).atexit = False
        return made

    def copy_to_host(self, target: int, source: int, nbytes: int, stream: int) -> None:
        """Enqueue a copy from device memory to page-locked memory on `stream`."""
        device = self._open(stream, "copy_to_host").device.ordinal
        self._copy("copy_to_host", (target, HOST), (source, device), nbytes, stream)

    def copy_to_device(self, target: int, source: int, nbytes: int, stream: int) -> None:
        """Enqueue a copy from page-locked memory to device memory on `stream`."""
        device = self._open(stream, "copy_to_device").device.ordinal
        self._copy("copy_to_device", (target, device), (source, HOST), nbytes, stream)

    def copy(self, target: int, source: int, nbytes: int, stream: int) -> None:
        """Enqueue a copy within device memory on `stream`."""
        device = self._open(stream, "copy").device.ordinal
        self._copy("copy", (target, device), (source, device), nbytes, stream)

    def scratch(self, nbytes: int, stream: int) -> int:
        """Allocate memory on the device of `stream`, for later work on that stream; return its address."""
        self._begin("scratch", check=False)
        made = self.memory.new(nbytes, self._open(stream, "scratch").device.ordinal)
        address = made.ctypes.data
        self._scratch[address] = made
        return address

    def scratch_free(self, address: int, stream: int) -> None:
        """Enqueue the release of memory from `scratch` on `stream`."""
        self._begin("scratch_free", check=False)
        on = self._open(stream, "scratch_free")
        if address not in self._scratch:
            raise DeviceError("scratch_free", f"{INVALID_VALUE}: {address:#x} is not in use", fatal=False)
        on.kernel(lambda: self._scratch.pop(address).fill(0xDD), 0.0)

    # -- checks in every call

    def check(self, call: str, address: int, nbytes: int, where: int) -> None:
        """Raise a `DeviceError` unless the address range is live memory of the device (or `HOST`) `where`."""
        try:
            self.memory.at(address, nbytes, where)
        except BadAddressError as exc:
            raise DeviceError(call, f"{INVALID_VALUE}: {exc}", fatal=False) from None

    def stream_of(self, stream: int, call: str, device: int) -> FakeStream:
        """Return the stream with this handle for new work; raise an error unless the stream belongs to `device`."""
        found = self._open(stream, call, device)
        if found.device.ordinal != device:
            raise DeviceError(call, f"{INVALID_HANDLE}: a stream of device {found.device.ordinal}", fatal=False)
        return found

    def _copy(self, call: str, target: tuple[int, int], source: tuple[int, int], nbytes: int, stream: int) -> None:
        self._begin(call, check=False)
        for address, where in (target, source):
            self.check(call, address, nbytes, where)

        def work() -> None:
            self.memory.at(target[0], nbytes, target[1])[:] = self.memory.at(source[0], nbytes, source[1])

        self._open(stream, call).kernel(work, self.latency)

    def _freed(self, device: int) -> None:
        if self.rooms[device].owner is not None:
            self.held_up.append(threading.current_thread().name)

    def _unsafe(self, call: str) -> None:
        """Raise an error and record the call if it would invalidate another thread's stream capture."""
        if not self._thread.relaxed and self._captures:
            self.disturbed.append(f"{call} in {threading.current_thread().name}")
            raise DeviceError(call, "operation not permitted when stream is capturing", fatal=False, status=900)

    def _begin(self, call: str, *, check: bool = True) -> FakeDevice:
        """Begin a call that creates a CUDA context on the thread's device; return this device."""
        self._count(call)
        self.enter(call, self._thread.device)
        device = self._devices[self._thread.device]
        if check:
            device.check(call)
        return device

    def _count(self, call: str) -> None:
        """Run the hooks and count the call; raise the error that `fail_next` has prepared for this function."""
        for hook in self.hooks:
            hook(call)
        self.calls[call] += 1
        if waiting := self._next.get(call):
            error = waiting.pop(0)
            if error.fatal:
                self.fail(str(error), self.current())
            raise error

    def _device(self, device: int, call: str) -> FakeDevice:
        if not 0 <= device < len(self._devices):
            raise DeviceError(call, f"invalid device ordinal {device}", fatal=False)
        return self._devices[device]

    def _wait_for_room(self, pending: deque[Mark]) -> None:
        """Wait until fewer than `SLEEPING` of the marks in `pending` are unfinished."""
        while pending and (pending[0].passed.is_set() or len(pending) >= SLEEPING):
            if not pending[0].passed.is_set():
                self.full.append(threading.current_thread().name)
                self.blocked.wait(pending[0].passed)
            pending.popleft()

    def _event(self, event: int, call: str) -> _Event:
        found = self._events.get(event)
        if found is None:
            raise DeviceError(call, f"{INVALID_HANDLE}: no event {event:#x}", fatal=False)
        return found

    def _stream(self, stream: int, call: str, device: int | None = None) -> FakeStream:
        if stream in LEGACY or stream == PER_THREAD:
            found = self._device(self.current() if device is None else device, call)
            key = (found.ordinal, threading.get_ident() if stream == PER_THREAD else 0)
            with self._lock:
                if key not in self._implicit:
                    self._implicit[key] = FakeStream(found, self.blocked, self.full)
                return self._implicit[key]
        made = self._streams.get(stream)
        if made is None:
            raise DeviceError(call, f"{INVALID_HANDLE}: no stream {stream:#x}", fatal=False)
        return made

    def _open(self, stream: int, call: str, device: int | None = None) -> FakeStream:
        """Return the stream with this handle for new work; raise an error if it is in capture or its device failed."""
        found = self._stream(stream, call, device)
        found.device.check(call)
        if found.capturing:
            raise DeviceError(call, "operation not permitted when stream is capturing", fatal=False)
        return found


class FakeKernels:
    """A set of simulated kernels for a `FakeCuda`, with the interface `aiocoll.gpu.api.Kernels`."""

    def __init__(self, cuda: FakeCuda) -> None:
        self._cuda = cuda

    def scale(self, target: int, source: int, count: int, dtype: str, factor: complex, stream: int) -> None:
        """Enqueue a kernel on `stream` that multiplies `count` elements by `factor`.

        `dtype` must be complex or a float of at least 16 bits; others raise a `DeviceError` that is not fatal.
        """
        on = self._cuda._open(stream, "scale")
        if self._cuda._begin("scale") is not on.device:
            raise DeviceError("scale", f"{INVALID_HANDLE}: the stream is not of the thread's device", fatal=False)
        kind, where = by_name(dtype), on.device.ordinal
        if kind.kind not in ("half", "float", "complex") or kind.itemsize == 1:
            raise DeviceError("scale", f"{INVALID_VALUE}: dtype {dtype}", fatal=False)
        nbytes = count * kind.itemsize
        for address in (target, source):
            self._cuda.check("scale", address, nbytes, where)

        def work() -> None:
            given = self._cuda.memory.at(source, nbytes, where).view(kind.storage)
            made = self._cuda.memory.at(target, nbytes, where).view(kind.storage)
            prescale = kernel(ReduceOp.PREMUL_SUM(factor), kind, 1).prescale
            assert prescale is not None
            with np.errstate(all="ignore"):
                prescale(given, made)

        on.kernel(work, self._cuda.latency)
