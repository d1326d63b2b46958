"""What tests of devices share: calls on a device of a fake, and what they keep."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from aiocoll.gpu.api import DeviceError
from aiocoll.gpu.device import Device, close_devices
from aiocoll.gpu.launcher import Launched

from ..fakes.cuda import FakeCuda, Gate
from ..internals import waiter_of
from ..ranks import until


@contextmanager
def faked(devices: int = 2) -> Iterator[FakeCuda]:
    """Give a fake CUDA; at the end let go all that waits there, and end the devices that used it."""
    with FakeCuda(devices) as cuda:
        yield cuda
    assert cuda.full == []
    assert close_devices()
    for thread in threading.enumerate():
        if thread.name.startswith("aiocoll-"):  # of devices that a test has closed before they could end
            thread.join(10)


def nothing() -> None:
    """Put nothing on the stream."""


class Kept:
    """What a call keeps.

    Attributes:
        gone: the thread in which each ended.
    """

    gone: list[int]

    def __init__(self) -> None:
        self.gone = []

    def new(self) -> object:
        made = type("Array", (), {})()
        weakref.finalize(made, lambda: self.gone.append(threading.get_ident()))
        return made


def begin(
    device: Device,
    stream: int,
    call: Callable[[], None] = nothing,
    keep: object = None,
    before: int | None = 0,
) -> tuple[Launched, asyncio.Future[None]]:
    """Launch a call, behind what is on another stream now; return it and the future of its end."""
    mark = None if before is None else device.mark(before)
    ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def done(error: DeviceError | None) -> None:
        if ended.done():  # cancelled
            return
        if error is None:
            ended.set_result(None)
        else:
            ended.set_exception(error)

    def ordered() -> None:
        if mark is not None:
            device.make_streams_wait((mark,), stream)
        call()

    return device.launch(stream, ordered, keep, done), ended


def hold_up(device: Device) -> None:
    """Hold the loop up until all that was put into the launcher is launched."""
    through = threading.Event()
    device._launcher.put(through.set)
    assert through.wait(10)


class Gated:
    """A call that puts a gate on a stream."""

    def __init__(self, cuda: FakeCuda, stream: int) -> None:
        self._cuda, self._stream = cuda, stream
        self.gate: Gate

    def __call__(self) -> None:
        self.gate = self._cuda.gate(self._stream)

    def open(self) -> None:
        self.gate.open()


class Batch(Gated):
    """The first of some calls, which the thread that waits sees only when all of them have ended."""

    def __init__(self, cuda: FakeCuda, device: Device, stream: int) -> None:
        super().__init__(cuda, stream)
        self._waiter = waiter_of(device, stream)
        self._waits, self._seen = threading.Event(), threading.Event()
        cuda.hooks.append(self._called)

    async def waited_for(self, calls: int) -> None:
        """Wait until so many are on the stream, and the thread waits for the first."""
        await until(lambda: self._waits.is_set() and len(self._waiter._calls) == calls)

    def _called(self, call: str) -> None:
        if call == "event_synchronize":
            self._waits.set()
            self._seen.wait(10)

    def open(self) -> None:
        super().open()
        self._cuda.stream_synchronize(self._stream)
        self._seen.set()
