"""A CUDA without devices, for tests: host memory plays device memory, and threads play streams.

It is strict: what real CUDA refuses, or takes and then goes wrong without a word, is an error here. Copies need
page-locked memory; addresses must belong to the device; handles must be of the right device and not given back; work
that touches memory which is gone takes the device with it. As in the real one, an event that was never recorded counts
as done, a device that has failed stays so, and nearly every call makes a context on the device of its thread, which is
number 0 in a thread that has not chosen.
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

#: Streams that nobody makes: the default one of the thread's device, by both its names, and the one of each thread.
LEGACY = (0, 1)
PER_THREAD = 2
#: What CUDA says of what it refuses.
INVALID_HANDLE = "invalid resource handle"
INVALID_VALUE = "invalid argument"
#: Seconds after which a stalled query comes back all the same, so that a test in which nothing ends it fails.
STALLED = 60.0
#: Seconds that a query takes.
MOMENT = 1e-6


class _Thread(threading.local):
    """What CUDA knows of a thread."""

    device = 0
    relaxed = False


class _Event:
    def __init__(self, device: FakeDevice, sleeps: bool) -> None:
        self.device = device
        self.sleeps = sleeps
        self.mark: Mark | None = None


class FakeCuda:
    """A CUDA runtime, as `aiocoll.gpu.api.Cuda` wants it, and the hands to play with it.

    Use it in a ``with`` block, or `close` it: its threads end there.

    Args:
        devices: how many there are.

    Attributes:
        bus_ids: of the devices; change one to play another GPU.
        capabilities: of the devices; change one to play an older GPU.
        latency: seconds that every kernel and copy takes.
        memory: of the devices and the page-locked one of the host.
        kernels: of these devices.
        calls: how often each function of the runtime was called.
        hooks: what is told each call by its name as it begins; it may wait or raise.
        contexts: of each device that has a context, the call that has made it, and the thread it was made in.
        stalls: a query of what is not done does not come back before it is: the kernel holds the driver up.
        stalled: the threads whose queries were held up.
        overdue: those of them whose queries nothing has ended.
        full: the threads that had to wait for room in a stream, or until fewer events were pending.
        held_up: the threads that have locked or freed memory while kernels of NCCL ran, whose end that waits for.
        blocked: where threads wait, for the end to let them go.
        disturbed: the calls, and their threads, by which captures of other threads were made invalid.
        rooms: what NCCL's kernels wait for on each device.
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
        #: Streams that are captured, and whether the default stream is drawn into that.
        self._captures: dict[FakeStream, bool] = {}

    def __enter__(self) -> FakeCuda:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # -- the hands

    def close(self) -> None:
        """End all that runs, and the threads."""
        self.blocked.end()
        streams = [*self._streams.values(), *self._implicit.values(), *self._ending]
        for stream in streams:
            stream.close()
        for stream in streams:
            stream.join(10.0)

    def live(self) -> dict[str, int]:
        """Return how many events and streams, and how many bytes page-locked and of all devices, are in use."""
        return {
            "events": len(self._events),
            "streams": len(self._streams),
            "pinned": self.memory.live(HOST),
            "memory": sum(self.memory.live(device) for device in range(len(self._devices))),
        }

    def fail(self, message: str = "unspecified launch failure", device: int = 0) -> None:
        """Let `device` fail; all that waits for it learns of it at once."""
        self._devices[device].fail(message)

    def fail_next(self, call: str, message: str = INVALID_VALUE, *, fatal: bool = False) -> None:
        """Let the next call of one function fail."""
        self._next.setdefault(call, []).append(DeviceError(call, message, fatal=fatal))

    def allocate(self, nbytes: int, device: int = 0) -> NDArray[Any]:
        """Return memory of `device`, as bytes, which is in use as long as they live."""
        where = self._device(device, "malloc").ordinal
        self.enter("malloc", where)
        return self.memory.new(nbytes, where)

    def kernel(self, stream: int, work: Callable[[], None], device: int | None = None, seconds: float = 0.0) -> None:
        """Do `work` in the order of `stream`; `device` is the one of stream 0, by default the thread's."""
        self._stream(stream, "launch", device).kernel(work, seconds)

    def gate(self, stream: int, device: int | None = None) -> Gate:
        """Put a kernel on `stream` that runs until it is opened."""
        gate = Gate()
        self.kernel(stream, lambda: gate.run(self.blocked), device)
        return gate

    def step(self, stream: int, steps: int | None, device: int | None = None) -> None:
        """Let `stream` do `steps` things more and then stop (0: stop at once); None lets it go on."""
        self._stream(stream, "step", device).step(steps)

    def capture(self, stream: int, on: bool, device: int | None = None, *, blocking: bool = False) -> None:
        """Begin to capture what comes on `stream` into a graph, or end it; in the mode that CUDA has by default.

        As of a `blocking` stream, the default stream of its device would then be drawn into it.
        """
        found = self._stream(stream, "capture", device)
        found.capturing = on
        self._captures.pop(found, None)
        if on:
            self._captures[found] = blocking

    def stream_synchronize(self, stream: int, device: int | None = None) -> None:
        """Block this thread until all that is on `stream` now is done."""
        mark = self._stream(stream, "streamSynchronize", device).mark()
        self.blocked.wait(mark.passed)
        mark.done("streamSynchronize")

    def enter(self, call: str, device: int) -> None:
        """Make a context on a device, if there is none, as `call` does."""
        self.contexts.setdefault(device, f"{call} in {threading.current_thread().name}")

    # -- the runtime

    def version(self) -> int:
        """Return the version of the runtime, such as 12080."""
        return 12080

    def device_count(self) -> int:
        """Return how many devices this process may use; 0 without a driver."""
        return len(self._devices)

    def bus_id(self, device: int) -> str:
        """Return what tells the device from all others of this host."""
        self._count("bus_id")
        return self.bus_ids[self._device(device, "bus_id").ordinal]

    def capability(self, device: int) -> tuple[int, int]:
        """Return the compute capability of the device, such as (9, 0): what its generation can do."""
        self._count("capability")
        return self.capabilities[self._device(device, "capability").ordinal]

    def has_context(self, device: int) -> bool:
        """Whether anything has been done on the device in this process: to `use` it makes a context there, if not."""
        return self._device(device, "has_context").ordinal in self.contexts

    def relax(self) -> None:
        """Let calls of this thread not disturb what other threads capture."""
        self._count("relax")
        self._thread.relaxed = True

    def device_of(self, address: int) -> int:
        """Return the device whose memory lies at `address`."""
        self._count("device_of")
        try:
            found = self.memory.where(address)
        except BadAddressError as exc:
            raise DeviceError("device_of", f"{INVALID_VALUE}: {exc}", fatal=False) from None
        if found == HOST:
            raise DeviceError("device_of", f"{INVALID_VALUE}: {address:#x} is memory of the host", fatal=False)
        return found

    def use(self, device: int) -> None:
        """Make `device` the one that calls of this thread are for."""
        self._count("use")
        self._thread.device = self._device(device, "use").ordinal
        self.enter("use", device)

    def current(self) -> int:
        """Return the device that calls of this thread are for; the streams 0, 1 and 2 are those of this device."""
        return self._thread.device

    def stream_create(self) -> int:
        """Return a new stream of the thread's device that does not wait for the default stream."""
        device = self._begin("stream_create")
        stream = FakeStream(device, self.blocked, self.full)
        with self._lock:
            handle = next(self._handles)
            self._streams[handle] = stream
        return handle

    def stream_destroy(self, stream: int) -> None:
        """Give a stream back; what is on it still ends."""
        self._begin("stream_destroy", check=False)
        with self._lock:
            found = self._streams.pop(stream, None)
        if found is None:
            raise DeviceError("stream_destroy", INVALID_HANDLE, fatal=False)
        self._ending.append(found)
        found.close()

    def is_capturing(self, stream: int) -> bool:
        """Whether work for `stream` is being captured into a graph."""
        self._begin("is_capturing", check=False)
        found = self._stream(stream, "is_capturing")
        if stream in LEGACY and any(
            blocking and each.device is found.device for each, blocking in list(self._captures.items())
        ):
            raise DeviceError("is_capturing", "operation would make the legacy stream depend on a capturing "
                              "blocking stream", fatal=False, status=906)  # fmt: skip
        return found.capturing

    def event_create(self, sleeps: bool = False) -> int:
        """Return a new event of the thread's device; who waits for it `sleeps`, in the fake in any case."""
        device = self._begin("event_create")
        with self._lock:
            handle = next(self._handles)
            self._events[handle] = _Event(device, sleeps)
        return handle

    def event_destroy(self, event: int) -> None:
        """Give an event back."""
        self._begin("event_destroy", check=False)
        with self._lock:
            if self._events.pop(event, None) is None:
                raise DeviceError("event_destroy", INVALID_HANDLE, fatal=False)

    def event_record(self, event: int, stream: int) -> None:
        """Let `event` be done when all that is on `stream` now is done."""
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
        """Whether what was before the event is done; raises if it has failed."""
        self._count("event_done")
        self._unsafe("event_done")
        mark = self._event(event, "event_done").mark
        if mark is None:
            return True
        if not mark.passed.is_set():
            if self.stalls:
                self.stalled.append(threading.current_thread().name)
            # As the real one it lets go of the GIL, which here the kernel needs to go on.
            self.blocked.wait(mark.passed, STALLED if self.stalls else MOMENT)
            if self.stalls and not (mark.passed.is_set() or self.blocked.over):
                self.overdue.append(threading.current_thread().name)
        return mark.done("event_done")

    def event_synchronize(self, event: int) -> None:
        """Block this thread, without the GIL, until the event is done; raises if what was before it has failed."""
        self._begin("event_synchronize", check=False)
        self._unsafe("event_synchronize")
        mark = self._event(event, "event_synchronize").mark
        if mark is not None:
            self.blocked.wait(mark.passed)
            mark.done("event_synchronize")

    def stream_wait(self, stream: int, event: int) -> None:
        """Let what comes on `stream` wait for `event`."""
        self._begin("stream_wait", check=False)
        mark = self._event(event, "stream_wait").mark
        on = self._open(stream, "stream_wait")
        if mark is not None:
            on.wait(mark)

    def stream_write(self, stream: int, address: int, value: int) -> None:
        """Write 32 bits to page-locked memory when all that is on `stream` now is done."""
        self._begin("stream_write", check=False)
        self.check("stream_write", address, 4, HOST)
        written = np.frombuffer(np.uint32(value).tobytes(), np.uint8)

        def work() -> None:
            self.memory.at(address, 4, HOST)[:] = written

        self._open(stream, "stream_write").kernel(work, 0.0)

    def pinned(self, nbytes: int) -> NDArray[Any]:
        """Return `nbytes` of page-locked host memory as uint8, which is freed with the last reference."""
        self._begin("pinned")
        self._unsafe("pinned")
        if self.rooms[self._thread.device].wait_until_free(self.blocked):
            self.held_up.append(threading.current_thread().name)
        made = self.memory.new(nbytes, HOST)
        weakref.finalize(made, self._freed, self._thread.device).atexit = False
        return made

    def copy_to_host(self, target: int, source: int, nbytes: int, stream: int) -> None:
        """Copy from the device to pinned memory, in the order of `stream`."""
        device = self._open(stream, "copy_to_host").device.ordinal
        self._copy("copy_to_host", (target, HOST), (source, device), nbytes, stream)

    def copy_to_device(self, target: int, source: int, nbytes: int, stream: int) -> None:
        """Copy from pinned memory to the device, in the order of `stream`."""
        device = self._open(stream, "copy_to_device").device.ordinal
        self._copy("copy_to_device", (target, device), (source, HOST), nbytes, stream)

    def copy(self, target: int, source: int, nbytes: int, stream: int) -> None:
        """Copy on the device, in the order of `stream`."""
        device = self._open(stream, "copy").device.ordinal
        self._copy("copy", (target, device), (source, device), nbytes, stream)

    def scratch(self, nbytes: int, stream: int) -> int:
        """Return the address of new memory on the device of `stream`, for later work on it."""
        self._begin("scratch", check=False)
        made = self.memory.new(nbytes, self._open(stream, "scratch").device.ordinal)
        address = made.ctypes.data
        self._scratch[address] = made
        return address

    def scratch_free(self, address: int, stream: int) -> None:
        """Free what `scratch` has returned, behind the work that is on `stream` now."""
        self._begin("scratch_free", check=False)
        on = self._open(stream, "scratch_free")
        if address not in self._scratch:
            raise DeviceError("scratch_free", f"{INVALID_VALUE}: {address:#x} is not in use", fatal=False)
        on.kernel(lambda: self._scratch.pop(address).fill(0xDD), 0.0)

    # -- what is looked at in every call

    def check(self, call: str, address: int, nbytes: int, where: int) -> None:
        """Refuse an address that is not in live memory of device `where`, or, if it is `HOST`, page-locked memory."""
        try:
            self.memory.at(address, nbytes, where)
        except BadAddressError as exc:
            raise DeviceError(call, f"{INVALID_VALUE}: {exc}", fatal=False) from None

    def stream_of(self, stream: int, call: str, device: int) -> FakeStream:
        """Return the stream to put something on, which must be of `device`."""
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
        """Make captures of other threads invalid, as each call does that is not safe while they last."""
        if not self._thread.relaxed and self._captures:
            self.disturbed.append(f"{call} in {threading.current_thread().name}")
            raise DeviceError(call, "operation not permitted when stream is capturing", fatal=False, status=900)

    def _begin(self, call: str, *, check: bool = True) -> FakeDevice:
        """Do as each call does that makes a context; return the thread's device."""
        self._count(call)
        self.enter(call, self._thread.device)
        device = self._devices[self._thread.device]
        if check:
            device.check(call)
        return device

    def _count(self, call: str) -> None:
        """Count the call, and let it fail if it has to."""
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
        """Wait until few of these are pending."""
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
        """Return a stream to put something on, which the runtime does."""
        found = self._stream(stream, call, device)
        found.device.check(call)
        if found.capturing:
            raise DeviceError(call, "operation not permitted when stream is capturing", fatal=False)
        return found


class FakeKernels:
    """The kernels of a `FakeCuda`, as `aiocoll.gpu.api.Kernels` wants them."""

    def __init__(self, cuda: FakeCuda) -> None:
        self._cuda = cuda

    def scale(self, target: int, source: int, count: int, dtype: str, factor: complex, stream: int) -> None:
        """Write the products of `count` elements and `factor`, in the order of `stream`.

        `dtype` is a float of 16 bits or more, or complex; of any other it raises a `DeviceError` that is not fatal.
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
