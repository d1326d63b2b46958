"""Point-to-point messages of CUDA arrays: by NCCL, or staged through the host, with the semantics of host messages.

For those that NCCL carries, see `aiocoll.gpu.calls.native_messages`. Any other send is copied to the host first
(`aiocoll.gpu.calls.staged`). It is announced to its receiver at once, so that a later message does not overtake it. A
receive arrives on the host, and is then copied to the device. The launcher allocates the memory for that, which may
take long: the receive keeps its place in the order of receives, and data that arrives for it meanwhile waits as for an
unmatched message.
"""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from typing import Any, NamedTuple

import numpy as np

from aiocoll.completion import Completion
from aiocoll.elements.device import DeviceArray
from aiocoll.engine.matching.inbound import InboundMessage
from aiocoll.engine.matching.outbound import Content, OutboundMessage
from aiocoll.engine.matching.posted import PostedReceive
from aiocoll.engine.operations.base import Announced, Operation
from aiocoll.errors import GroupClosedError, PeerLostError
from aiocoll.gpu.api import DeviceError
from aiocoll.gpu.calls.device_state import DeviceState
from aiocoll.gpu.calls.enqueued import Enqueued
from aiocoll.gpu.calls.staged import Staged
from aiocoll.gpu.launcher import Launched

__all__ = ["DeviceContent", "DeviceRecv", "DeviceSend"]

_BYTES = np.dtype(np.uint8)


class DeviceContent(NamedTuple):
    """The content of a message of a CUDA array: the code of its dtype, and the array at this end."""

    code: int
    array: DeviceArray


class _OneEnd(Operation):
    """What both ends of a message have in common: its work on the device, as a copy to or from the host, or by NCCL.

    Attributes:
        array: what is sent, or received into.
        batch: number and size of the batch it is part of.
    """

    array: DeviceArray
    batch: tuple[int, int]
    _enqueued: Enqueued
    #: The device has work of it enqueued; NCCL carries it.
    _flying: bool
    _by_nccl: bool
    #: NCCL may carry it, and rank 0 has not been told of this end.
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
        self._enqueued = Enqueued(self.completion, [array])

    def _mark(self) -> bool:
        """Choose its way, and record the position of the caller's stream; return whether that is possible."""
        self._open = self._device_state.messages.carries(self.array.nbytes)
        try:
            self._marks = self._device_state.mark([self.array])
        except DeviceError as error:
            self._device_state.broken(error, self)
        except RuntimeError as error:  # after the call, which was in a block, a stream capture has begun
            self.fail(error)
            self._close()
        return not self.done

    def taken_marks(self) -> tuple[int, ...]:
        """Return the positions of the caller's streams at the call, which it has to wait for."""
        marks, self._marks = self._marks, ()
        return marks

    def launched(self, launched: Launched) -> None:
        """NCCL carries it."""
        self._open, self._by_nccl = False, True
        self._flies(launched)

    @abstractmethod
    def complete(self) -> None:
        """End successfully: all of it has been sent or received."""

    def landed(self, error: DeviceError | None) -> None:
        """NCCL has finished it."""
        if self._continues(error):
            self.complete()

    def hangs_here(self) -> bool:
        """Whether the device has work of it enqueued."""
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
            # Everything later on the stream would wait for it.
            self.comm.revoke(error)

    def _close(self) -> None:
        """NCCL does not carry it, though rank 0 may wait for it."""
        if self._open:
            self._open = False
            self._device_state.messages.without(self.batch)

    def _flies(self, launched: Launched) -> None:
        self._flying = True
        self._enqueued.put(launched)

    def _continues(self, error: DeviceError | None) -> bool:
        """Record that the device has finished; return whether the operation continues."""
        self._flying = False
        return self._device_state.continues(self, error, self._leave)

    def _leave(self) -> None:
        """Release the resources of this message, once the device has finished."""
        self._enqueued.over()
        self._device_state.unmark(self.taken_marks())
        if not self._flying:
            self._staged.give_back()


class DeviceSend(OutboundMessage, _OneEnd):
    """A send: done when its bytes have been read from the array."""

    def __init__(
        self,
        state: DeviceState,
        peer: int,
        tag: int,
        content: DeviceContent,
        completion: Completion,
    ) -> None:
        code, array = content
        super().__init__(state.comm.matching, peer, tag, Content(code, _to_come(array.nbytes)), completion)
        self._prepare(state, array)

    def enter(self) -> None:
        """Announce it, and copy it to the host unless NCCL may carry it."""
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
        self.succeed(self.completion.value)

    def asked(self) -> None:
        """Its receiver takes it through the host."""
        super().asked()
        if self._open:
            self._close()
            self._stage()

    def succeed(self, result: Any) -> None:
        """End successfully."""
        super().succeed(result)
        # It may have been sent before the receiver has answered its announcement.
        self.comm.channels[self.peer].drop(self)
        if self._view.nbytes:
            del self._message  # which has this send
        self._leave()

    def _stage(self) -> None:
        self._flies(self._staged.copy_in(self.taken_marks(), (0,), self._copied))

    def _copied(self, error: DeviceError | None) -> None:
        if self._continues(error):
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
        completion: Completion,
    ) -> None:
        code, array = content
        super().__init__(state.comm.matching, peer, tag, Content(code, _to_come(array.nbytes)), completion)
        self._prepare(state, array)
        #: There is memory for its bytes on the host.
        self._is_there = False

    @property
    def source(self) -> int:
        """The rank whose message it has matched."""
        assert self.arrival is not None
        return self.arrival.peer

    def enter(self) -> None:
        """Match a waiting message, or wait for one; receive its bytes as soon as there is memory for them."""
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
        """Return a text about what it waits for."""
        arrival = self.arrival
        if arrival is not None and self._device_state.messages.is_held(arrival.peer, arrival.op):
            return "rank 0 has not let it begin"
        return super().standing()

    def needs(self, peer: int) -> bool:
        """Whether only `peer` could complete it: no rank once the message is here."""
        is_here = self.arrival is not None and self.arrival.complete
        return not is_here and super().needs(peer)

    def succeed(self, result: Any) -> None:
        """All bytes have arrived: copy them to the device, unless NCCL has put them there."""
        if self._by_nccl:
            self._end()
        else:
            self._flying = True
            self._staged.copy_out(self.taken_marks(), (0,), self._flies, self._copied)

    def fail(self, error: BaseException) -> None:
        """End with `error`; if the group ends on this rank, nothing starts because of it."""
        super().fail(error)
        if not isinstance(error, GroupClosedError):
            self._close()

    def stage(self) -> None:
        """Receive it through the host."""
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
        if self._continues(error):
            self._end()

    def _end(self) -> None:
        super().succeed(self.completion.value)
        self._leave()


def _to_come(nbytes: int) -> memoryview:
    """Return a view of `nbytes` bytes, all of them the same byte, in place of memory that is not allocated yet."""
    return np.broadcast_to(np.uint8(0), nbytes).data
