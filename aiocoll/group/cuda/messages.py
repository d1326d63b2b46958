"""Messages of CUDA arrays: by NCCL, or staged, so that all that messages of the host promise is possible.

Those that go by NCCL: see `aiocoll.group.cuda.native_messages`. Any other send copies to page-locked memory first. Its
receiver is told of it at once, so that a later message does not overtake it. A receive takes its message there, and
then copies it to the device. The launcher gets the memory, which may take long: a receive has its place among all
receives before, and what comes for it meanwhile waits as if nobody had asked.
"""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from typing import Any, NamedTuple

import numpy as np

from aiocoll.elements.device import DeviceArray
from aiocoll.engine.matching.inbound import InboundMessage
from aiocoll.engine.matching.outbound import Content, OutboundMessage
from aiocoll.engine.matching.posted import PostedReceive
from aiocoll.engine.operations.base import Announced, Operation
from aiocoll.errors import GroupClosedError, PeerLostError
from aiocoll.gpu.api import DeviceError
from aiocoll.gpu.launcher import Launched
from aiocoll.group.cuda.device_state import DeviceState
from aiocoll.group.cuda.enqueued import Enqueued
from aiocoll.group.cuda.staged import Staged
from aiocoll.work import Work

__all__ = ["DeviceContent", "DeviceRecv", "DeviceSend"]

_BYTES = np.dtype(np.uint8)


class DeviceContent(NamedTuple):
    """What a message of a CUDA array consists of: the code of its dtype, and the array at this end."""

    code: int
    array: DeviceArray


class _OneEnd(Operation):
    """What both ends of a message have: it is on the device as a copy to or from the host, or by NCCL.

    Attributes:
        array: what is sent, or received into.
        batch: number and size of the batch it is part of.
    """

    array: DeviceArray
    batch: tuple[int, int]
    _enqueued: Enqueued
    #: The device has something of it; NCCL has it.
    _flying: bool
    _by_nccl: bool
    #: It may go by NCCL, and rank 0 does not know of this end.
    _open: bool
    _marks: tuple[int, ...]
    _device_state: DeviceState
    _staged: Staged

    def _prepare(self, state: DeviceState, array: DeviceArray) -> None:
        self.array = array
        self.batch = state.messages.batch
        self._device_state = state
        self._staged = Staged(state.device, state.stream, [array], _BYTES)
        self._flying = self._by_nccl = self._open = False
        self._marks = ()
        self._enqueued = Enqueued(self.work, [array])

    def _mark(self) -> bool:
        """See which way it may go, and mark where the caller's stream is; whether that is possible."""
        self._open = self._device_state.messages.carries(self.array.nbytes)
        try:
            self._marks = self._device_state.mark([self.array])
        except DeviceError as error:
            self._device_state.broken(error, self)
        except RuntimeError as error:  # after the call, which was in a block, a capture of the stream has begun
            self.fail(error)
            self._close()
        return not self.done

    def taken_marks(self) -> tuple[int, ...]:
        """Return where the caller's streams were at the call, for what begins after that."""
        marks, self._marks = self._marks, ()
        return marks

    def launched(self, launched: Launched) -> None:
        """NCCL has it."""
        self._open, self._by_nccl = False, True
        self._flies(launched)

    @abstractmethod
    def complete(self) -> None:
        """End well: all of it has left, or is here."""

    def landed(self, error: DeviceError | None) -> None:
        """NCCL is done with it."""
        if self._is_sound(error):
            self.complete()

    def hangs_here(self) -> bool:
        """Whether the device has something of it."""
        return self._flying

    def expire(self) -> None:
        """The timeout has passed."""
        if not self._flying:
            super().expire()
        elif self._by_nccl:
            self._device_state.hung(self, "both of its ranks have called it, but ")
        else:
            self._device_state.hung(self)

    def fail(self, error: BaseException) -> None:
        """End with `error`."""
        super().fail(error)
        self._leave()
        if self._flying and self._by_nccl and isinstance(error, PeerLostError):
            # All that comes on the stream after it would wait for it.
            self.comm.revoke(error)

    def _close(self) -> None:
        """It does not go by NCCL, though rank 0 may wait for it."""
        if self._open:
            self._open = False
            self._device_state.messages.without(self.batch)

    def _flies(self, launched: Launched) -> None:
        self._flying = True
        self._enqueued.put(launched)

    def _is_sound(self, error: DeviceError | None) -> bool:
        """Take note that the device is done; whether to go on."""
        self._flying = False
        if self.done:
            self._leave()
        elif error is not None:
            self._device_state.broken(error, self)
        return not self.done

    def _leave(self) -> None:
        """Give back what was only for this message, once the device is done with it."""
        self._enqueued.over()
        self._device_state.unmark(self.taken_marks())
        if not self._flying:
            self._staged.give_back()


class DeviceSend(OutboundMessage, _OneEnd):
    """A send: done when its bytes have left the array."""

    def __init__(
        self,
        state: DeviceState,
        peer: int,
        tag: int,
        content: DeviceContent,
        work: Work[Any],
    ) -> None:
        code, array = content
        super().__init__(state.comm.matching, peer, tag, Content(code, _to_come(array.nbytes)), work)
        self._prepare(state, array)

    def enter(self) -> None:
        """Announce it, and copy it to the host unless it may go by NCCL."""
        if not self._mark():
            return
        if not self._view.nbytes:
            super().enter()
            return
        number, size = self.batch if self._open else (0, 0)
        if not self._open:
            self._stage()
        self._sends.outgoing[self.peer, self.id] = self
        self._message = Announced(self, size, self._view, number)
        self.comm.channels[self.peer].kick(self._message)

    def complete(self) -> None:
        """NCCL has sent it."""
        self._sends.outgoing.pop((self.peer, self.id), None)
        self.succeed(self.work._value)

    def asked(self) -> None:
        """Its receiver takes it from the host."""
        super().asked()
        if self._open:
            self._close()
            self._stage()

    def succeed(self, result: Any) -> None:
        """End well."""
        super().succeed(result)
        # It may have left before the receiver has answered that it was announced.
        self.comm.channels[self.peer].drop(self)
        self._leave()

    def _stage(self) -> None:
        self._flies(self._staged.copy_in(self.taken_marks(), (0,), self._copied))

    def _copied(self, error: DeviceError | None) -> None:
        if self._is_sound(error):
            self._message.view = self._staged.bytes_of(0)
            self._message.limit = self._message.total
            self.comm.channels[self.peer].kick(self._message)


class DeviceRecv(PostedReceive, _OneEnd):
    """A receive: done when the message is on the device."""

    def __init__(
        self,
        state: DeviceState,
        peer: int | None,
        tag: int,
        content: DeviceContent,
        work: Work[Any],
    ) -> None:
        code, array = content
        super().__init__(state.comm.matching, peer, tag, Content(code, _to_come(array.nbytes)), work)
        self._prepare(state, array)
        #: The page-locked memory.
        self._is_there = False

    @property
    def source(self) -> int:
        """The rank whose message it has met."""
        assert self.arrival is not None
        return self.arrival.peer

    def enter(self) -> None:
        """Take a message that is waiting, or wait for one; its bytes as soon as there is memory for them."""
        if not self._mark():
            return
        if not self._open:
            self.stage()
        super().enter()

    def match(self, arrival: InboundMessage) -> None:
        """Become the receiver of `arrival`."""
        offer = arrival.offer if arrival.code == self.code and arrival.total == self.array.nbytes else None
        if self._open and offer is not None and self._device_state.messages.carries(arrival.total):
            self.claim(arrival)
            arrival.posted = self
            self._open = False
            self._device_state.messages.matched(self, arrival.peer, arrival.op, offer)
        elif self._is_there:
            super().match(arrival)
        else:
            self.claim(arrival)
            if self._open:
                self._close()
                self.stage()

    def standing(self) -> str:
        """Say what it waits for."""
        arrival = self.arrival
        if arrival is not None and self._device_state.messages.is_held(arrival.peer, arrival.op):
            return "rank 0 has not let it begin"
        return super().standing()

    def needs(self, peer: int) -> bool:
        """Whether only `peer` could complete it: nobody once the message is here."""
        is_here = self.arrival is not None and self.arrival.complete
        return not is_here and super().needs(peer)

    def succeed(self, result: Any) -> None:
        """All bytes are here: copy them to the device, unless NCCL has brought them there."""
        if self._by_nccl:
            self._end()
        else:
            self._flies(self._staged.copy_out(self.taken_marks(), (0,), self._copied))

    def fail(self, error: BaseException) -> None:
        """End with `error`; if this rank ends its part in the group, nothing begins because of it."""
        super().fail(error)
        if not isinstance(error, GroupClosedError):
            self._close()

    def stage(self) -> None:
        """Receive it from the host."""
        self._device_state.device.run(self._staged.allocate).add_done_callback(self._allocated)

    def _allocated(self, allocated: asyncio.Future[None]) -> None:
        self._is_there = True
        error = allocated.exception()
        if self.done:
            self._leave()
        elif error is not None:
            self._device_state.broken(error, self)
        else:
            self.put_in(self._staged.bytes_of(0))
            if self.arrival is not None:
                super().match(self.arrival)

    def _copied(self, error: DeviceError | None) -> None:
        if self._is_sound(error):
            self._end()

    def _end(self) -> None:
        super().succeed(self.work._value)
        self._leave()


def _to_come(nbytes: int) -> memoryview:
    """Return a view of so many bytes, all of them one, in place of memory that is not there yet."""
    return np.broadcast_to(np.uint8(0), nbytes).data
