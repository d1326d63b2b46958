"""Messages of CUDA arrays: staged, so that tags, receives from any rank, and ranks that do not use NCCL are possible.

A send copies to page-locked memory first. Its receiver is told of it at once, so that a later message does not overtake
it. A receive takes its message there, and then copies it to the device. The launcher gets the memory, which may take
long: a receive has its place among all receives before, and what comes for it meanwhile waits as if nobody had asked.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from aiocoll.elements.device import DeviceArray
from aiocoll.engine.arrival import Arrival
from aiocoll.engine.mailbox import Outgoing, Posted
from aiocoll.engine.membership import Membership
from aiocoll.engine.operation import Announced, Operation
from aiocoll.gpu.api import DeviceError
from aiocoll.group.device_side import DeviceSide
from aiocoll.group.on_device import side_of
from aiocoll.group.staged import Staged
from aiocoll.work import Work

if TYPE_CHECKING:
    from aiocoll.group.launch import Launcher

__all__ = ["DeviceMessages", "messages_of"]

Make = Callable[[int, Work[Any]], Operation]
_BYTES = np.dtype(np.uint8)


class DeviceMessages:
    """Makes the operations of one array.

    Args:
        side: what the group has on the device; None if nothing will be made.
        array: what is sent, or received into.
    """

    def __init__(self, side: DeviceSide | None, array: DeviceArray) -> None:
        self._side = side
        self._array = array

    def sending(self, dst: int, tag: int, code: int, result: Any, limit: float) -> Make:
        """Return what makes a send; the arguments are those of `aiocoll.engine.mailbox.Outgoing`."""

        def make(_: int, work: Work[Any]) -> _StagedSend:
            assert self._side is not None
            member = self._side.member
            identity = member.mailbox.next_id(tag)
            return _StagedSend(self._side, self._array, member, identity, code, dst, result, work, limit)

        return make

    def receiving(
        self, src: int | None, tag: int, code: int, shape: tuple[int, ...], result: Any, limit: float
    ) -> Make:
        """Return what makes a receive; the arguments are those of `aiocoll.engine.mailbox.Posted`."""

        def make(_: int, work: Work[Any]) -> _StagedRecv:
            assert self._side is not None
            member = self._side.member
            return _StagedRecv(self._side, self._array, member, src, tag, code, shape, result, work, limit)

        return make


def messages_of(group: Launcher, array: DeviceArray) -> DeviceMessages:
    """Return what carries messages of `array`; raises as `aiocoll.group.on_device.on_device` does."""
    return DeviceMessages(side_of(group, [array]), array)


class _StagedSend(Outgoing):
    """A send: done when its bytes have left."""

    __slots__ = ("_flying", "_marks", "_message", "_side", "_staged")

    def __init__(
        self,
        side: DeviceSide,
        array: DeviceArray,
        group: Membership,
        identity: int,
        code: int,
        peer: int,
        result: Any,
        work: Work[Any],
        timeout: float,
    ) -> None:
        self._side = side
        self._staged = Staged(side.device, side.stream, [array], _BYTES)
        super().__init__(group, identity, code, peer, _to_come(array.nbytes), result, work, timeout)
        self._marks = side.mark([array])
        self._flying = False

    def enter(self) -> None:
        """Announce it, and copy."""
        if not self._view.nbytes:
            super().enter()
            return
        self._staged.copy_in(self._marks, (0,), self._copied)
        self._flying, self._marks = True, ()
        self.group.mailbox.outgoing[self.peer, self.id] = self
        self._message = Announced(self, 0, 0, self._view, 0)
        self.group.channels[self.peer].kick(self._message)

    def succeed(self, result: Any) -> None:
        """End well."""
        super().succeed(result)
        # It may have left before the receiver has answered that it was announced.
        self.group.channels[self.peer].drop(self)
        self._leave()

    def fail(self, error: BaseException) -> None:
        """End with `error`."""
        super().fail(error)
        self._leave()

    def _copied(self, error: DeviceError | None) -> None:
        self._flying = False
        if self.done:
            self._leave()
        elif error is not None:
            self._side.broke(self, error)
        else:
            self._message.view = self._staged.bytes_of(0)
            self._message.limit = self._message.total
            self.group.channels[self.peer].kick(self._message)

    def _leave(self) -> None:
        self._side.unmark(self._marks)
        self._marks = ()
        if not self._flying:
            self._staged.give_back()


class _StagedRecv(Posted):
    """A receive: done when the message is on the device."""

    __slots__ = ("_flying", "_is_there", "_marks", "_side", "_staged")

    def __init__(
        self,
        side: DeviceSide,
        array: DeviceArray,
        group: Membership,
        peer: int | None,
        tag: int,
        code: int,
        shape: tuple[int, ...],
        result: Any,
        work: Work[Any],
        timeout: float,
    ) -> None:
        self._side = side
        self._staged = Staged(side.device, side.stream, [array], _BYTES)
        super().__init__(group, peer, tag, _to_come(array.nbytes), code, shape, 0, result, work, timeout)
        self._marks = side.mark([array])
        self._flying = False
        #: The page-locked memory.
        self._is_there = False

    def enter(self) -> None:
        """Take a message that is waiting, or wait for one; its bytes as soon as there is memory for them."""
        self._side.device.run(self._staged.allocate).add_done_callback(self._allocated)
        super().enter()

    def match(self, arrival: Arrival) -> None:
        """Become the receiver of `arrival`."""
        if self._is_there:
            super().match(arrival)
        else:
            self.work._withdraw = None
            self.arrival = arrival

    def needs(self, peer: int) -> bool:
        """Whether only `peer` could complete it: nobody once the message is here."""
        is_here = self.arrival is not None and self.arrival.complete
        return not is_here and super().needs(peer)

    def succeed(self, result: Any) -> None:
        """All bytes are here: copy them to the device."""
        self._staged.copy_out(self._marks, (0,), self._copied)
        self._flying, self._marks = True, ()

    def fail(self, error: BaseException) -> None:
        """End with `error`."""
        super().fail(error)
        self._leave()

    def _allocated(self, allocated: asyncio.Future[None]) -> None:
        self._is_there = True
        error = allocated.exception()
        if self.done:
            self._leave()
        elif error is not None:
            self._side.broken(error, self)
        else:
            self.view = self._staged.bytes_of(0)
            if self.arrival is not None:
                super().match(self.arrival)

    def _copied(self, error: DeviceError | None) -> None:
        self._flying = False
        if self.done:
            self._leave()
        elif error is not None:
            self._side.broke(self, error)
        else:
            super().succeed(self._result)
            self._leave()

    def _leave(self) -> None:
        self._side.unmark(self._marks)
        self._marks = ()
        if self._is_there and not self._flying:
            self._staged.give_back()


def _to_come(nbytes: int) -> memoryview:
    """Return a view of so many bytes, all of them one, in place of memory that is not there yet."""
    return np.broadcast_to(np.uint8(0), nbytes).data
