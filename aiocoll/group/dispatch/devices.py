"""Device backends: interfaces for calls on device arrays, and the registry by kind of device."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Final, Protocol

from aiocoll.elements.device import DeviceArray
from aiocoll.engine.matching.outbound import Content, OutboundMessage
from aiocoll.engine.matching.posted import PostedReceive
from aiocoll.registry import Registry

if TYPE_CHECKING:
    from aiocoll.engine.communicator import Communicator
    from aiocoll.engine.operations.composite import Make
    from aiocoll.group.prepared_call import PlannedCall, PreparedCall

__all__ = ["DEVICE_VERSION", "DeviceBackend", "DeviceCalls", "devices", "receive_in_memory", "send_from_memory"]

#: Version number of the interfaces `DeviceBackend` and `DeviceCalls`.
DEVICE_VERSION: Final = 1


class DeviceCalls(Protocol):
    """The interface that prepares one group's calls on device arrays. The first such call creates the object.

    Attributes:
        kind: of the device.
    """

    @property
    def kind(self) -> str:
        """The kind of device, such as ``"cuda"``."""

    def check(self, arrays: Sequence[DeviceArray | None]) -> bool:
        """Check the arrays of a call; return whether they are on the thread's current device.

        Raises:
            ValueError: the arrays are on another device than those of earlier calls.
            RuntimeError: the state of the caller's stream forbids calls.
        """

    def call(self, call: PlannedCall, at_once: bool) -> PreparedCall:
        """Return the prepared call on arrays that `check` has accepted.

        A backend whose memory the host can access returns `call` with NumPy arrays in `call.arrays`. The host then
        carries out the call, alone or in a block.

        Args:
            call: the call, on arrays of the device.
            at_once: whether the call starts now, on the current device.
        """

    def batched(self, calls: Sequence[PreparedCall], ordered: bool) -> Make:
        """Return a function that makes one operation of several collectives on device arrays.

        Args:
            calls: results of the method `call`, without those on NumPy arrays.
            ordered: whether the operation starts in program order.
        """

    def together(self, arrays: Iterable[DeviceArray]) -> contextlib.AbstractContextManager[None]:
        """Return a context that combines the messages of these arrays into one call of the device's library."""

    def sending(self, array: DeviceArray, dst: int, tag: int, code: int) -> Make:
        """Return a function that makes a send operation to rank `dst`; `code` is the dtype code."""

    def receiving(self, array: DeviceArray, src: int | None, tag: int, code: int) -> Make:
        """Return a function that makes a receive operation from rank `src`, or any rank; `code` is the dtype code."""

    async def close(self) -> None:
        """Close the device resources together with the other ranks, before the group is closed."""

    async def release(self) -> None:
        """Release the device resources of a group that has been closed."""


class DeviceBackend(Protocol):
    """A backend that carries out collectives and messages on the arrays of one kind of device.

    Attributes:
        kind: kind of device, as programs name it: "kind" and "kind:0" are devices of it.
        label: the kind in error messages.
        library: name of the backend that moves arrays between devices without the host.
    """

    @property
    def kind(self) -> str:
        """The kind of device, as used in the registry."""

    @property
    def label(self) -> str:
        """The kind of device, as named in error messages."""

    @property
    def library(self) -> str:
        """The library that moves arrays between devices without the host."""

    def count(self) -> int:
        """Return the number of devices of this kind that this process may use."""

    def calls(
        self, comm: Communicator, arrays: Sequence[DeviceArray | None], *, forced: bool, ahead: bool
    ) -> DeviceCalls:
        """Make the `DeviceCalls` of a group, at its first call on arrays of this kind.

        Args:
            comm: this rank's part in the group.
            arrays: arrays of the call; None where this rank has none.
            forced: whether the group must use `library`.
            ahead: whether to launch calls before they are compared, if all ranks do.

        Raises:
            BackendUnavailableError: the device cannot be used; the message names the package to install.
        """


#: The registry of device backends, by kind of device.
devices: Registry[DeviceBackend] = Registry("device", DEVICE_VERSION)


def send_from_memory(comm: Communicator, data: memoryview, dst: int, tag: int, code: int) -> Make:
    """Return a function that makes a send operation from host memory, to implement `DeviceCalls.sending`.

    Args:
        comm: this rank's part in the group.
        data: contiguous bytes, unchanged until the send ends.
        dst: rank of the receiver.
        tag: of the message.
        code: of the dtype.
    """
    return lambda _, completion: OutboundMessage(comm.matching, dst, tag, Content(code, data), completion)


def receive_in_memory(comm: Communicator, data: memoryview, src: int | None, tag: int, code: int) -> Make:
    """Return a function that makes a receive operation into host memory, to implement `DeviceCalls.receiving`.

    Args:
        comm: this rank's part in the group.
        data: contiguous writable bytes, as many as the message has.
        src: rank of the sender; None accepts any.
        tag: of the message.
        code: of the dtype.
    """
    return lambda _, completion: PostedReceive(comm.matching, src, tag, Content(code, data), completion)
