"""`CudaCalls`: creates the operations of one group's calls on CUDA arrays, for the dispatcher."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence

from aiocoll.arrays.cuda_array import KIND
from aiocoll.elements.device import UNKNOWN, DeviceArray
from aiocoll.engine.communicator import Communicator
from aiocoll.engine.operations.composite import Make
from aiocoll.gpu.api import Cuda
from aiocoll.gpu.calls.agreed import DeviceCall
from aiocoll.gpu.calls.batched import BatchedCalls
from aiocoll.gpu.calls.device_state import DeviceState
from aiocoll.gpu.calls.messages import DeviceContent, DeviceRecv, DeviceSend
from aiocoll.gpu.device import Device
from aiocoll.gpu.provider import runtime
from aiocoll.group.prepared_call import PlannedCall, PreparedCall

__all__ = ["CudaCalls"]


class CudaCalls:
    """A factory of one group's operations on CUDA arrays; created by `CudaCalls.first`.

    Args:
        state: the group's state on the device.
    """

    kind = KIND

    def __init__(self, state: DeviceState) -> None:
        self.state = state

    @staticmethod
    def first(comm: Communicator, arrays: Sequence[DeviceArray | None], *, forced: bool, ahead: bool) -> CudaCalls:
        """Create the `CudaCalls` of a group, when the group first makes a call on CUDA arrays.

        Args:
            comm: this rank's part in the group.
            arrays: arrays of the call; None where this rank has none.
            forced: whether the group must use NCCL.
            ahead: whether to launch calls before they are compared, if all ranks do.

        Raises:
            BackendUnavailableError: there is no GPU support; the message names the package to install.
            RuntimeError: the caller's stream is being captured into a graph.
        """
        cuda, nccl = runtime()
        device = Device.of(cuda, _ordinal(cuda, arrays, 0))
        for stream in {each.stream for each in arrays if each is not None}:
            device.check_capture(stream)
        return CudaCalls(DeviceState(comm, device, nccl, forced, ahead))

    def check(self, arrays: Sequence[DeviceArray | None]) -> bool:
        """Check the arrays of a call; return whether they are on the thread's current device.

        Raises:
            ValueError: the arrays are on another device than those of earlier calls.
            RuntimeError: the caller's stream is being captured into a graph.
        """
        device, checked, is_current = self.state.device, None, True
        for each in arrays:
            if each is not None and each.device != device.ordinal:
                self._check_device(arrays)
                break
        for each in arrays:
            if each is not None and each.stream != checked:
                checked = each.stream
                is_current = device.check_capture(checked)
        return is_current

    def call(self, call: PlannedCall, at_once: bool) -> DeviceCall:
        """Return the prepared call for a collective whose arrays `check` has accepted; see `DeviceCalls.call`."""
        return DeviceCall(self.state, call, at_once)

    def batched(self, calls: Sequence[PreparedCall], ordered: bool) -> Make:
        """Return a function that creates one operation for several collectives; see `DeviceCalls.batched`."""
        members = [call for call in calls if isinstance(call, DeviceCall)]
        return lambda identity, completion: BatchedCalls(identity, members, ordered, completion)

    def together(self, arrays: Iterable[DeviceArray]) -> contextlib.AbstractContextManager[None]:
        """In this ``with`` block, combine the messages of these arrays into one group of NCCL calls."""
        return self.state.messages.together(arrays)

    def sending(self, array: DeviceArray, dst: int, tag: int, code: int) -> Make:
        """Return a function that creates an operation that sends `array` to rank `dst`; `code` encodes the dtype."""
        return lambda _, completion: DeviceSend(self.state, dst, tag, DeviceContent(code, array), completion)

    def receiving(self, array: DeviceArray, src: int | None, tag: int, code: int) -> Make:
        """Return a function that creates a receive operation from rank `src`, or from any rank if None.

        `code` encodes the dtype.
        """
        return lambda _, completion: DeviceRecv(self.state, src, tag, DeviceContent(code, array), completion)

    async def close(self) -> None:
        """Destroy the NCCL communicator together with the other ranks."""
        await self.state.close()

    async def release(self) -> None:
        """Release the device resources of a group that has ended."""
        await self.state.release()

    def _check_device(self, arrays: Sequence[DeviceArray | None]) -> None:
        """Reject arrays on another CUDA device; look up the device by memory address if the library hides it."""
        device = self.state.device
        if (ordinal := _ordinal(device.cuda, arrays, device.ordinal)) != device.ordinal:
            raise ValueError(
                f"group {self.state.comm.name!r} works on CUDA device {device.ordinal}, where the arrays of its first "
                f"call were; these are on device {ordinal}: make a group for each device"
            )


def _ordinal(cuda: Cuda, arrays: Sequence[DeviceArray | None], empty: int) -> int:
    """Return the number of the CUDA device of `arrays`; return `empty` if no array has elements."""
    found = {
        cuda.device_of(each.ptr) if each.device == UNKNOWN else each.device
        for each in arrays
        if each is not None and (each.device != UNKNOWN or each.size)
    }
    if len(found) > 1:
        raise TypeError(f"the arrays of a call must be on one CUDA device, not on devices {sorted(found)}")
    return found.pop() if found else empty
