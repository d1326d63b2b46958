"""Staging: copies of device arrays in host memory, on which a host collective carries out the call.

The copies are in page-locked memory if that is available at once. Otherwise they are in ordinary memory, which is
copied piece by piece.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aiocoll.elements.buffers import byte_view
from aiocoll.elements.device import DeviceArray
from aiocoll.gpu.api import DeviceError
from aiocoll.gpu.device import Device
from aiocoll.gpu.launcher import Launched

__all__ = ["Staged", "put_back"]

#: Alignment of the host copies in bytes: devices copy fastest with it, and it suffices for the widest vector
#: instructions.
_ALIGN = 64

Done = Callable[[DeviceError | None], None]


class Staged:
    """The host copies of one call's device arrays.

    Args:
        device: device of the arrays.
        stream: stream of the copies.
        originals: the arrays; None where this rank has none.
        storage: dtype of the copies.

    Attributes:
        arrays: the copies, in the same order; empty before `allocate`.
    """

    def __init__(
        self, device: Device, stream: int, originals: Sequence[DeviceArray | None], storage: np.dtype[Any]
    ) -> None:
        self.arrays: list[NDArray[Any] | None] = []
        self._device = device
        self._stream = stream
        self._originals = originals
        self._storage = storage
        self._block: NDArray[Any] | None = None
        self._is_locked = True

    def allocate(self) -> None:
        """Allocate host memory; runs in the launcher thread, because page-locking may take milliseconds.

        Raises:
            DeviceError: no memory could be page-locked.
        """
        starts, nbytes = [], 0
        for each in self._originals:
            starts.append(nbytes)
            nbytes += 0 if each is None else -(-each.nbytes // _ALIGN) * _ALIGN
        block = self._block = self._device.page_locked(nbytes)
        if block is None:
            self._is_locked, block = False, np.empty(nbytes, np.uint8)
        self.arrays = [
            None if each is None else block[start : start + each.nbytes].view(self._storage)
            for start, each in zip(starts, self._originals, strict=True)
        ]

    def copy_in(self, marks: Sequence[int], positions: Collection[int], done: Done) -> Launched:
        """Allocate host memory, and copy the arrays at `positions` to it after the CUDA events `marks`."""
        device, stream = self._device, self._stream

        def call() -> None:
            device.make_streams_wait(marks, stream)
            self.allocate()
            for copy, original in self._pairs(positions) if self._is_locked else ():
                device.cuda.copy_to_host(copy.ctypes.data, original.ptr, original.nbytes, stream)

        def ended(error: DeviceError | None) -> None:
            if error is not None or self._is_locked:
                done(error)
            else:
                self._copy(positions, True, done)

        return device.launch(stream, call, self, ended)

    def copy_out(
        self, marks: Sequence[int], positions: Collection[int], on_launched: Callable[[Launched], None], done: Done
    ) -> None:
        """Copy the results from the host copies to the device, and then into the caller's arrays.

        Args:
            marks: positions of the caller's streams.
            positions: positions of the arrays.
            on_launched: called with the last device call once it is launched.
            done: called at the end of that call, or when an earlier one has failed.
        """
        device, stream = self._device, self._stream
        pairs = self._pairs(positions)

        def last(marks: Sequence[int] = ()) -> None:
            def call() -> None:
                device.make_streams_wait(marks, stream)
                for copy, original in pairs if self._is_locked else ():
                    device.cuda.copy_to_device(original.ptr, copy.ctypes.data, original.nbytes, stream)
                put_back([original for _, original in pairs], stream)

            on_launched(device.launch(stream, call, self, done))

        def copy() -> None:
            self._copy(positions, False, _next(last, done))

        if self._is_locked:
            last(marks)
        elif marks:
            device.launch(stream, lambda: device.make_streams_wait(marks, stream), self, _next(copy, done))
        else:
            copy()

    def _copy(self, positions: Collection[int], to_host: bool, done: Done) -> None:
        """Copy between pageable host memory and the device, in a new thread."""

        def copied(copying: asyncio.Future[None]) -> None:
            done(copying.exception())  # type: ignore[arg-type]

        pairs = [(copy, original.ptr) for copy, original in self._pairs(positions)]
        self._device.copy(pairs, to_host=to_host).add_done_callback(copied)

    def bytes_of(self, position: int) -> memoryview:
        """Return the bytes of the host copy at `position`."""
        copy = self.arrays[position]
        assert copy is not None
        return byte_view(copy)

    def release_memory(self) -> None:
        """Return the host memory to the pool; neither device nor host may use it any more."""
        block, self._block = self._block, None
        self.arrays = []
        if block is not None:
            self._device.staging.give(block)

    def _pairs(self, positions: Collection[int]) -> list[tuple[NDArray[Any], DeviceArray]]:
        """Return the nonempty host copies at `positions`, each with its device array."""
        pairs = [(self.arrays[each], self._originals[each]) for each in positions]
        return [
            (copy, original) for copy, original in pairs if copy is not None and original is not None and original.size
        ]


def _next(step: Callable[[], None], done: Done) -> Done:
    """Return a callback that calls `step` after success, or passes the error to `done`."""

    def ended(error: DeviceError | None) -> None:
        if error is None:
            step()
        else:
            done(error)

    return ended


def put_back(arrays: Sequence[DeviceArray | None], stream: int) -> None:
    """Enqueue copies from contiguous temporary arrays back to the caller's noncontiguous arrays."""
    for each in arrays:
        if each is not None and each.back is not None:
            each.back.on(stream)
