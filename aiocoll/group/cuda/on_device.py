"""Makes the operations of calls on CUDA arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from aiocoll.elements.device import UNKNOWN, DeviceArray
from aiocoll.engine.communicator import Communicator
from aiocoll.engine.operations.base import Operation
from aiocoll.engine.operations.composite import Make
from aiocoll.engine.operations.plan import Plan
from aiocoll.engine.operations.signature import Signature
from aiocoll.gpu.api import Cuda
from aiocoll.gpu.device import Device
from aiocoll.gpu.provider import runtime
from aiocoll.group.cuda.agreed import Agreed, DeviceCall
from aiocoll.group.cuda.batched import BatchedCalls, Member
from aiocoll.group.cuda.device_state import DeviceState
from aiocoll.group.cuda.messages import DeviceContent, DeviceRecv, DeviceSend
from aiocoll.work import Work

__all__ = ["DeviceCalls", "DeviceExecutor", "device_state_of"]


class DeviceCalls:
    """Makes the operations of one group.

    Args:
        state: the group's state on the device.
    """

    def __init__(self, state: DeviceState) -> None:
        self._state = state

    def executor(self, plan: Plan) -> DeviceExecutor:
        """Return what carries out a collective."""
        return DeviceExecutor(self._state, plan)

    def batched(self, members: Sequence[Member], ordered: bool) -> Make:
        """Return what makes the operation of several collectives; `ordered`: it starts in the order of the program."""
        return lambda identity, work: BatchedCalls(self._state, identity, members, ordered, work)

    def sending(self, array: DeviceArray, dst: int, tag: int, code: int) -> Make:
        """Return what makes a send to rank `dst`; `code` is that of the dtype."""
        return lambda _, work: DeviceSend(self._state, dst, tag, DeviceContent(code, array), work)

    def receiving(self, array: DeviceArray, src: int | None, tag: int, code: int) -> Make:
        """Return what makes a receive from rank `src`, or from any; `code` is that of the dtype."""
        return lambda _, work: DeviceRecv(self._state, src, tag, DeviceContent(code, array), work)


class DeviceExecutor:
    """The executor of a plan on CUDA arrays.

    Attributes:
        signature: that of the call.
    """

    __slots__ = ("_state", "signature")

    def __init__(self, state: DeviceState, plan: Plan) -> None:
        self._state = state
        self.signature: Signature = state.signature(plan)

    def __call__(self, comm: Communicator, identity: int, plan: Plan, arrays: list[Any], work: Work[Any]) -> Operation:
        """Make the operation; for the arguments, see `aiocoll.engine.operations.plan.Executor`."""
        return Agreed(self._state, identity, DeviceCall(self.signature, plan, arrays), work)


def device_state_of(
    comm: Communicator, state: DeviceState | None, arrays: Sequence[DeviceArray | None], *, forced: bool, ahead: bool
) -> DeviceState:
    """Return the group's state on the device of these arrays.

    Args:
        comm: this rank's part in the group.
        state: the existing state, if there is one.
        arrays: of a call; None where this rank has none.
        forced: the group must use NCCL.
        ahead: launch calls before they are compared, if all ranks do.

    Raises:
        BackendUnavailableError: there is no GPU support; the message says what to install.
        ValueError: the arrays are on another device than those of earlier calls.
        RuntimeError: the caller's stream is being captured into a graph.
    """
    if state is None:
        cuda, nccl = runtime()
        state = DeviceState(comm, Device.of(cuda, _ordinal(cuda, arrays, 0)), nccl, forced, ahead)
    elif (ordinal := _ordinal(state.device.cuda, arrays, state.device.ordinal)) != state.device.ordinal:
        raise ValueError(
            f"group {comm.name!r} works on CUDA device {state.device.ordinal}, where the arrays of its first "
            f"call were; these are on device {ordinal}: make a group for each device"
        )
    for stream in {each.stream for each in arrays if each is not None}:
        state.device.check_capture(stream)
    return state


def _ordinal(cuda: Cuda, arrays: Sequence[DeviceArray | None], empty: int) -> int:
    """Return the device of the arrays; `empty` if they have no elements, and so no device."""
    found = {
        cuda.device_of(each.ptr) if each.device == UNKNOWN else each.device
        for each in arrays
        if each is not None and (each.device != UNKNOWN or each.size)
    }
    if len(found) > 1:
        raise TypeError(f"the arrays of a call must be on one CUDA device, not on devices {sorted(found)}")
    return found.pop() if found else empty
