"""Calls on CUDA arrays: what the group does with them in place of its own way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from aiocoll.elements.device import UNKNOWN, DeviceArray
from aiocoll.engine.communicator import Communicator
from aiocoll.engine.operations.base import Signature
from aiocoll.engine.operations.plan import Plan
from aiocoll.gpu.api import Cuda
from aiocoll.gpu.device import Device
from aiocoll.gpu.provider import runtime
from aiocoll.group.cuda.agreed import Agreed, DeviceCall
from aiocoll.group.cuda.device_state import DeviceState
from aiocoll.work import Work

if TYPE_CHECKING:
    from aiocoll.group.launch import Launcher

__all__ = ["OnDevice", "device_state_of", "on_device"]


class OnDevice:
    """The executor of a plan on CUDA arrays.

    Attributes:
        terms: those of the call.
    """

    __slots__ = ("_device_state", "terms")

    def __init__(self, side: DeviceState, terms: Signature) -> None:
        self._device_state = side
        self.terms = terms

    def __call__(
        self, comm: Communicator, identity: int, plan: Plan, arrays: list[DeviceArray | None], work: Work[Any]
    ) -> Agreed:
        """Make the operation; for the arguments, see `aiocoll.engine.operations.plan.Executor`."""
        return Agreed(self._device_state, identity, DeviceCall(self.terms, plan, arrays), work)


def on_device(group: Launcher, plan: Plan, arrays: Sequence[DeviceArray | None]) -> OnDevice:
    """Return what carries out a call on CUDA arrays.

    Raises:
        BackendUnavailableError: there is no GPU support; the message says what to install.
        ValueError: the arrays are on another device than those of earlier calls.
        RuntimeError: the caller's stream is being captured into a graph.
    """
    side = device_state_of(group, arrays)
    return OnDevice(side, side.terms(plan))


def device_state_of(group: Launcher, arrays: Sequence[DeviceArray | None]) -> DeviceState:
    """Return what the group has on the device of these arrays; raises as `on_device` does."""
    side = group._device_state
    if side is None:
        cuda, nccl = runtime()
        forced = group._devices.get("cuda") == "nccl"
        device = Device.of(cuda, _ordinal(cuda, arrays, 0))
        side = group._device_state = DeviceState(group._member, device, nccl, forced)
    elif (ordinal := _ordinal(side.device.cuda, arrays, side.device.ordinal)) != side.device.ordinal:
        raise ValueError(
            f"group {group._member.name!r} works on CUDA device {side.device.ordinal}, where the arrays of its first "
            f"call were; these are on device {ordinal}: make a group for each device"
        )
    for stream in {each.stream for each in arrays if each is not None}:
        side.device.check_capture(stream)
    return side


def _ordinal(cuda: Cuda, arrays: Sequence[DeviceArray | None], empty: int) -> int:
    """Return the device of the arrays; `empty` if they have no elements, and nothing says where."""
    found = {
        cuda.device_of(each.ptr) if each.device == UNKNOWN else each.device
        for each in arrays
        if each is not None and (each.device != UNKNOWN or each.size)
    }
    if len(found) > 1:
        raise TypeError(f"the arrays of a call must be on one CUDA device, not on devices {sorted(found)}")
    return found.pop() if found else empty
