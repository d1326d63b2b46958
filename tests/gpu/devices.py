"""Helpers for device tests: a fake CUDA, device calls that wait for a gate, and objects with recorded release."""

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
from ..ranks import wait_until


@contextmanager
def fake_cuda(devices: int = 2) -> Iterator[FakeCuda]:
    """Yield a fake CUDA; at the end, release all waiting threads and close its devices."""
    with FakeCuda(devices) as cuda:
        yield cuda
    assert cuda.full == []
    assert close_devices()
    for thread in threading.enumerate():
        if thread.name.startswith("aiocoll-"):  # threads of devices that a test closed while calls were stuck
            thread.join(10)


def do_nothing() -> None:
    """Do nothing: a device call that leaves its stream empty."""


class TrackedObjects:
    """A factory of objects that records the thread which releases each object.

    Attributes:
        freed_in: for each released object, the id of the thread that released it.
    """

    freed_in: list[int]

    def __init__(self) -> None:
        self.freed_in = []

    def new(self) -> object:
        made = type("Array", (), {})()
        weakref.finalize(made, lambda: self.freed_in.append(threading.get_ident()))
        return made


def launch_call(
    device: Device,
    stream: int,
    call: Callable[[], None] = do_nothing,
    keep: object = None,
    before: int | None = 0,
) -> tuple[Launched, asyncio.Future[None]]:
    """Launch a device call on a stream; return the call and a future that finishes with the call.

    Args:
        device: the device of the stream.
        stream: handle of the stream.
        call: a function that enqueues the work.
        keep: object that must live until the call ends.
        before: a stream whose current work runs before the call; None for no such stream.
    """
    mark = None if before is None else device.mark(before)
    ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def finish(error: DeviceError | None) -> None:
        if ended.done():  # the test has cancelled the future
            return
        if error is None:
            ended.set_result(None)
        else:
            ended.set_exception(error)

    def run_in_order() -> None:
        if mark is not None:
            device.make_streams_wait((mark,), stream)
        call()

    return device.launch(stream, run_in_order, keep, finish), ended


def block_until_launched(device: Device) -> None:
    """Block the event loop until the launcher thread has launched all queued calls."""
    launched = threading.Event()
    device._launcher.put(launched.set)
    assert launched.wait(10)


class GatedCall:
    """A device call that enqueues a kernel which runs until `open` is called."""

    def __init__(self, cuda: FakeCuda, stream: int) -> None:
        self._cuda, self._stream = cuda, stream
        self.gate: Gate

    def __call__(self) -> None:
        self.gate = self._cuda.gate(self._stream)

    def open(self) -> None:
        self.gate.open()


class Batch(GatedCall):
    """A first device call that hides all call ends from the completion thread until the whole batch has ended."""

    def __init__(self, cuda: FakeCuda, device: Device, stream: int) -> None:
        super().__init__(cuda, stream)
        self._waiter = waiter_of(device, stream)
        self._waits, self._seen = threading.Event(), threading.Event()
        cuda.hooks.append(self._called)

    async def wait_until_queued(self, calls: int) -> None:
        """Wait until the stream has `calls` device calls and the completion thread waits for the first one."""
        await wait_until(lambda: self._waits.is_set() and len(self._waiter._calls) == calls)

    def _called(self, call: str) -> None:
        if call == "event_synchronize":
            self._waits.set()
            self._seen.wait(10)

    def open(self) -> None:
        super().open()
        self._cuda.stream_synchronize(self._stream)
        self._seen.set()
