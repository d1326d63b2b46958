"""Point-to-point messages of CUDA arrays, by NCCL or staged through the host, with the semantics of host messages.

`aiocoll.gpu.calls.native_messages` has the messages that NCCL carries. The sender of any other message copies it to the
host first (`aiocoll.gpu.calls.staged`). It announces the message to the receiver at once, so that no later message
overtakes it. The receiver gets the message on the host, and copies it to the device. The launcher allocates the host
memory, which may take long. Meanwhile the receive keeps its place in the order of receives, and its data waits like
that of an unmatched message.
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
    """The content of a message of a CUDA array: the code of its dtype, and this rank's array."""

    code: int
    array: DeviceArray


class _MessageEnd(Operation):
    """A send or a receive of a CUDA array, with its device work: copies to or from the host, or NCCL calls.

    Attributes:
        array: array to send, or to receive in.
        batch: number and size of the message's batch.
    """

    array: DeviceArray
    batch: tuple[int, int]
    _enqueued: Enqueued
    #: Two flags: device work of this message is enqueued; NCCL carries this message.
    _is_on_device: bool
    _by_nccl: bool
    #: Whether NCCL may still carry this message. Rank 0 may then be waiting for this rank's report about it.
    _open: bool
    _marks: tuple[int, ...]
    _device_state: DeviceState
    _staged: Staged

    def _prepare(self, state: DeviceState, array: DeviceArray) -> None:
        self.array = array
        self.batch = state.messages.batch
        self._device_state = state
        self._staged = Staged(state.device, state.stream, [array], _BYTES)
        self._is_on_device = self._by_nccl = self._open = False
        self._marks = ()
        self._enqueued = Enqueued(self.completion, [array])

    def _mark(self) -> bool:
        """Choose NCCL or staging, and record a CUDA event on the caller's stream; return False on failure."""
        self._open = self._device_state.messages.carries(self.array.nbytes)
        try:
            self._marks = self._device_state.mark([self.array])
        except DeviceError as error:
            self._device_state.fail_group(error, self)
        except RuntimeError as error:  # a stream capture began after the call that the block recorded
            self.fail(error)
            self._report_not_carried()
        return not self.done

    def taken_marks(self) -> tuple[int, ...]:
        """Return, and forget, the CUDA events on the caller's stream for which the message's device work waits."""
        marks, self._marks = self._marks, ()
        return marks

    def launched(self, launched: Launched) -> None:
        """Record that the NCCL calls that carry this message are launched."""
        self._open, self._by_nccl = False, True
        self._mark_enqueued(launched)

    @abstractmethod
    def complete(self) -> None:
        """Finish the operation, because NCCL has sent or received the message."""

    def on_nccl_done(self, error: DeviceError | None) -> None:
        """Handle the end of the message's NCCL calls."""
        if self._finish_device_work(error):
            self.complete()

    def is_waiting_for_device(self) -> bool:
        """Return whether this operation waits for work on this rank's device."""
        return self._is_on_device

    def expire(self) -> None:
        """Handle the expired timeout."""
        if not self._is_on_device:
            super().expire()
        elif self._by_nccl:
            self._device_state.fail_hung_device(self, "both of its ranks have made this call, but ")
        else:
            self._device_state.fail_hung_device(self)

    def fail(self, error: BaseException) -> None:
        """Finish the operation with `error`."""
        super().fail(error)
        self._release()
        if self._is_on_device and self._by_nccl and isinstance(error, PeerLostError):
            # Revoke the group: all later work on the stream would wait for the lost rank.
            self.comm.revoke(error)

    def _report_not_carried(self) -> None:
        """Report to rank 0 that this message is staged, because rank 0 may hold the rest of its batch."""
        if self._open:
            self._open = False
            self._device_state.messages.report_uncarried(self.batch)

    def _mark_enqueued(self, launched: Launched) -> None:
        self._is_on_device = True
        self._enqueued.put(launched)

    def _finish_device_work(self, error: DeviceError | None) -> bool:
        """Record that the device has finished its work; return whether the operation is still running."""
        self._is_on_device = False
        return self._device_state.continues(self, error, self._release)

    def _release(self) -> None:
        """Release the CUDA events of this message, and its host memory once the device does not use it."""
        self._enqueued.over()
        self._device_state.unmark(self.taken_marks())
        if not self._is_on_device:
            self._staged.release_memory()


class DeviceSend(OutboundMessage, _MessageEnd):
    """A send of a CUDA array, which ends when the array has been read and may be reused."""

    def __init__(
        self,
        state: DeviceState,
        peer: int,
        tag: int,
        content: DeviceContent,
        completion: Completion,
    ) -> None:
        code, array = content
        super().__init__(state.comm.matching, peer, tag, Content(code, _placeholder(array.nbytes)), completion)
        self._prepare(state, array)

    def enter(self) -> None:
        """Announce the message to the receiver; copy the array to the host, unless NCCL may carry the message."""
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
        self.comm.channels[self.peer].enqueue(self._message)

    def complete(self) -> None:
        """Finish the send, because NCCL has sent the message."""
        self._sends.outgoing.pop((self.peer, self.id), None)
        self.succeed(self.completion.value)

    def on_grant(self) -> None:
        """Handle the receiver's permission to send the message through the host."""
        super().on_grant()
        if self._open:
            self._report_not_carried()
            self._stage()

    def succeed(self, result: Any) -> None:
        """Finish the send successfully."""
        super().succeed(result)
        # Remove the announcement from the channel, because the send may end before the receiver replies to it.
        self.comm.channels[self.peer].drop(self)
        if self._view.nbytes:
            del self._message  # break a reference cycle
        self._release()

    def _stage(self) -> None:
        self._mark_enqueued(self._staged.copy_in(self.taken_marks(), (0,), self._copied))

    def _copied(self, error: DeviceError | None) -> None:
        if self._finish_device_work(error):
            self._message.view = self._staged.bytes_of(0)
            self._message.limit = self._message.total
            self.comm.channels[self.peer].enqueue(self._message)


class DeviceRecv(PostedReceive, _MessageEnd):
    """A receive into a CUDA array, which ends when the message is in the array."""

    def __init__(
        self,
        state: DeviceState,
        peer: int | None,
        tag: int,
        content: DeviceContent,
        completion: Completion,
    ) -> None:
        code, array = content
        super().__init__(state.comm.matching, peer, tag, Content(code, _placeholder(array.nbytes)), completion)
        self._prepare(state, array)
        #: Whether the host memory for the staged message is allocated.
        self._is_there = False

    @property
    def source(self) -> int:
        """The rank that sent the matched message."""
        assert self.arrival is not None
        return self.arrival.peer

    def enter(self) -> None:
        """Match an announced message, or wait for one; data is received once host memory is allocated."""
        if not self._mark():
            return
        if not self._open:
            self.stage()
        super().enter()

    def match(self, arrival: InboundMessage) -> None:
        """Match this receive with the announced message `arrival`, and choose NCCL or staging."""
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
                self._report_not_carried()
                self.stage()

    def describe_wait(self) -> str:
        """Describe, for a stall report, what this receive waits for."""
        arrival = self.arrival
        if arrival is not None and self._device_state.messages.is_held(arrival.peer, arrival.op):
            return "rank 0 has not started it"
        return super().describe_wait()

    def needs(self, peer: int) -> bool:
        """Return whether the receive still needs the leaving rank `peer`; False once all data has arrived."""
        is_here = self.arrival is not None and self.arrival.complete
        return not is_here and super().needs(peer)

    def succeed(self, result: Any) -> None:
        """Finish after NCCL has written the array; copy a staged message to the device first."""
        if self._by_nccl:
            self._end()
        else:
            self._is_on_device = True
            self._staged.copy_out(self.taken_marks(), (0,), self._mark_enqueued, self._copied)

    def fail(self, error: BaseException) -> None:
        """Fail with `error`; report to rank 0 that NCCL does not carry the message, unless the group is closed."""
        super().fail(error)
        if not isinstance(error, GroupClosedError):
            self._report_not_carried()

    def stage(self) -> None:
        """Receive the message through the host instead of NCCL."""
        self._device_state.device.run(self._staged.allocate).add_done_callback(self._allocated)

    def _allocated(self, allocated: asyncio.Future[None]) -> None:
        self._is_there = True
        error = allocated.exception()
        if self.done:
            self._release()
        elif error is not None:
            self._device_state.fail_group(error, self)
        else:
            self.set_buffer(self._staged.bytes_of(0))
            if self.arrival is not None:
                super().match(self.arrival)

    def _copied(self, error: DeviceError | None) -> None:
        if self._finish_device_work(error):
            self._end()

    def _end(self) -> None:
        super().succeed(self.completion.value)
        self._release()


def _placeholder(nbytes: int) -> memoryview:
    """Return a read-only view of `nbytes` zero bytes, as a stand-in until host memory is allocated."""
    return np.broadcast_to(np.uint8(0), nbytes).data
