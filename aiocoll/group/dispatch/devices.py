"""Backends of devices: the interfaces of calls on device arrays, and the registry by kind of device."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Final, Protocol

from aiocoll.elements.device import DeviceArray
from aiocoll.registry import Registry

if TYPE_CHECKING:
    from aiocoll.engine.communicator import Communicator
    from aiocoll.engine.operations.composite import Make
    from aiocoll.group.prepared_call import PlannedCall, PreparedCall

__all__ = ["DEVICE_VERSION", "DeviceBackend", "DeviceCalls", "devices"]

#: Version of the interfaces `DeviceBackend` and `DeviceCalls`.
DEVICE_VERSION: Final = 1


class DeviceCalls(Protocol):
    """The calls of one group on the device of this rank, made at its first call on a device array.

    Attributes:
        kind: of the device.
    """

    @property
    def kind(self) -> str:
        """The kind of device."""

    def check(self, arrays: Sequence[DeviceArray | None]) -> bool:
        """Raise if the group cannot use these arrays; return whether they are on the thread's current device.

        Raises:
            ValueError: the arrays are on another device than the arrays of earlier calls.
            RuntimeError: the state of the caller's stream forbids calls.
        """

    def call(self, call: PlannedCall, at_once: bool) -> PreparedCall:
        """Return the call that carries out a planned call; `at_once`: it starts now, on the current device."""

    def batched(self, calls: Sequence[PreparedCall], ordered: bool) -> Make:
        """Return a factory of one operation for several collectives; `ordered`: it starts in program order."""

    def together(self, arrays: Iterable[DeviceArray]) -> contextlib.AbstractContextManager[None]:
        """Combine the messages of these arrays that start in the block into one library call."""

    def sending(self, array: DeviceArray, dst: int, tag: int, code: int) -> Make:
        """Return a factory of a send operation to rank `dst`; `code` is the code of the dtype."""

    def receiving(self, array: DeviceArray, src: int | None, tag: int, code: int) -> Make:
        """Return a factory of a receive operation from rank `src`, or any rank; `code` is the code of the dtype."""

    async def close(self) -> None:
        """Stop using the device in order, if the other ranks do so, too."""

    async def release(self) -> None:
        """Release the device resources of the group after its end."""


class DeviceBackend(Protocol):
    """A backend that carries out collectives and messages on arrays of one kind of device.

    Attributes:
        kind: kind of device, as programs name it: "kind" and "kind:0" are devices of this kind.
        label: the kind in error messages.
        library: the name of the backend that moves arrays between devices without the host.
    """

    @property
    def kind(self) -> str:
        """The kind of device."""

    @property
    def label(self) -> str:
        """The kind in error messages."""

    @property
    def library(self) -> str:
        """The backend that moves arrays between devices without the host."""

    def count(self) -> int:
        """Return how many devices of the kind this process may use."""

    def calls(
        self, comm: Communicator, arrays: Sequence[DeviceArray | None], *, forced: bool, ahead: bool
    ) -> DeviceCalls:
        """Return the device calls of a group, at its first call on arrays of this kind.

        Args:
            comm: this rank's communicator of the group.
            arrays: arrays of the call; None where this rank has no array.
            forced: whether the group must use `library`.
            ahead: whether to launch calls before they are compared, if all ranks do.

        Raises:
            BackendUnavailableError: the device cannot be used; the message names the package to install.
        """


#: Backends by kind of device.
devices: Registry[DeviceBackend] = Registry("device", DEVICE_VERSION)
