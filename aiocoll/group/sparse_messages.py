"""Sends and receives of sparse arrays, which transfer only entries: indices and values.

The dtype code of such a message is a hash of the dtype and shape. The payload is the number of entries, then the
entries, then padding with zeros.

A thread reads a large array. The message is announced before that, so that no later message overtakes it. The announced
length is the largest possible one. Reading adds up entries at the same position, so fewer may be left: hence the
padding. The receiver also builds a large array in a thread.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from aiocoll.completion import Completion
from aiocoll.elements.entries import Entries, pack
from aiocoll.elements.sparse import SparseArray, empty_entries, entries_of, sparse_array
from aiocoll.engine.matching.inbound import InboundMessage
from aiocoll.engine.matching.outbound import SPARSE, Content, OutboundMessage
from aiocoll.engine.matching.posted import PostedReceive
from aiocoll.engine.matching.to_self import MessageToSelf
from aiocoll.engine.operations.base import Announced
from aiocoll.engine.operations.offload import run_in_thread
from aiocoll.engine.operations.signature import Signature
from aiocoll.errors import ProtocolError
from aiocoll.group import sparse_reduce
from aiocoll.group.dispatch.dispatcher import Dispatcher
from aiocoll.group.prepared_call import MessageCall
from aiocoll.transport.frame import EAGER, FrameKind

__all__ = ["recv_sparse", "send_sparse"]

_COUNT = np.dtype(np.int64)


def send_sparse(dispatcher: Dispatcher, tensor: Any, dst: int, tag: int, limit: float, longest: int) -> MessageCall:
    """Return a prepared send of a sparse array to rank `dst`; see `ProcessGroup.send`."""
    array = sparse_array(tensor)
    total = _message_nbytes(array, min(array.stored, array.size))
    if total > longest:
        raise ValueError(f"tensor has {total} bytes; a message holds at most {longest}: send it in parts")
    signature, matching = _signature("SEND_SPARSE", array), dispatcher.comm.matching
    code, to_self = _code(signature), dst == dispatcher.rank
    packed = _pack(array.read()) if array.effort <= sparse_reduce.INLINE else None

    def make(_: int, completion: Completion) -> OutboundMessage:
        view = _placeholder(total) if packed is None else packed.data
        message: OutboundMessage
        if packed is not None:
            kind = MessageToSelf if to_self else OutboundMessage
            message = kind(matching, dst, tag, Content(code, view), completion)
        else:
            announced = _AnnouncedSendToSelf if to_self else _AnnouncedSend
            message = announced(matching, dst, tag, Content(code, view), completion)
            message.task = lambda: _pack(array.read(), total)
        message.signature = signature
        completion.shape = array.shape
        return message

    return MessageCall("SEND_SPARSE", make, limit, ("dst", dst, tag), tensor, array.shape, total)


def recv_sparse(dispatcher: Dispatcher, tensor: Any, src: int | None, tag: int, limit: float) -> MessageCall:
    """Return a prepared receive of a sparse array from rank `src`, or from any rank; see `ProcessGroup.recv`."""
    array, matching = sparse_array(tensor), dispatcher.comm.matching
    signature = _signature("RECV_SPARSE", array)

    def make(_: int, completion: Completion) -> PostedReceive:
        receive = _SparseReceive(matching, src, tag, Content(_code(signature), None), completion)
        receive.signature, receive.array = signature, array
        return receive

    op = "RECV_SPARSE" if src is not None else "RECV_ANYSOURCE_SPARSE"
    return MessageCall(op, make, limit, ("src", src, tag), tensor, array.shape)


def _signature(op: str, array: SparseArray) -> Signature:
    dense = len(array.shape) - array.sparse_dim
    dims = f"none over {array.sparse_dim} sparse and {dense} dense dimensions"
    return Signature(op, array.dtype.name, array.shape, None, dims)


def _code(signature: Signature) -> int:
    return SPARSE | crc32(repr(signature[1:5]).encode()) % SPARSE


def _message_nbytes(array: SparseArray, count: int) -> int:
    """Return the number of bytes in a message with `count` entries."""
    like = empty_entries(array)
    return _COUNT.itemsize + count * (like.places.itemsize + like.values.itemsize * math.prod(like.values.shape[1:]))


def _pack(entries: Entries, total: int | None = None) -> NDArray[np.uint8]:
    """Return entries as the payload of a message, padded to `total` bytes."""
    body = pack(entries)
    used = _COUNT.itemsize + len(body)
    payload = np.empty(used if total is None else total, np.uint8)
    payload[: _COUNT.itemsize].view(_COUNT)[0] = len(entries.places)
    payload[_COUNT.itemsize : used] = body
    payload[used:] = 0
    return payload


def _placeholder(nbytes: int) -> memoryview:
    """Return a view of `nbytes` zero bytes that takes no memory: a placeholder for a payload that is not ready yet."""
    return np.broadcast_to(np.uint8(0), nbytes).data


class _AnnouncedSend(OutboundMessage):
    """A send of a large sparse array: it is announced first, then read in a thread.

    Attributes:
        task: reads the array, and returns the payload.
    """

    task: Callable[[], NDArray[np.uint8]]

    def enter(self) -> None:
        """Announce the message to the receiver, and start to read the array."""
        self._sends.outgoing[self.peer, self.id] = self
        self._message = Announced(self, 0, self._view, 0)
        self.comm.channels[self.peer].enqueue(self._message)
        run_in_thread(self, self.task, self._on_payload)

    def succeed(self, result: Any) -> None:
        """Complete the send, and withdraw its announcement."""
        super().succeed(result)
        # Drop the announcement: the payload may have been sent before the receiver has answered the announcement.
        self.comm.channels[self.peer].drop(self)
        del self._message  # break a reference cycle

    def _on_payload(self, payload: NDArray[np.uint8]) -> None:
        self._message.view = payload.data
        self._message.limit = self._message.total
        self.comm.channels[self.peer].enqueue(self._message)


class _AnnouncedSendToSelf(MessageToSelf):
    """A send of a large sparse array to this rank itself: it is announced first, then read in a thread.

    Attributes:
        task: reads the array, and returns the payload.
    """

    task: Callable[[], NDArray[np.uint8]]

    def enter(self) -> None:
        """Announce the message to this rank, and start to read the array."""
        self._sends.outgoing[self.peer, self.id] = self
        self._is_requested = self._is_ready = False
        self._deliver(FrameKind.READY, EAGER, 0)
        run_in_thread(self, self.task, self._on_payload)

    def on_grant(self) -> None:
        """Handle a matching receive. The payload is delivered when the array has been read."""
        self._is_requested = True
        if self._is_ready:
            super().on_grant()

    def _on_payload(self, payload: NDArray[np.uint8]) -> None:
        self.read_from(payload.data)
        self._is_ready = True
        if self._is_requested:
            super().on_grant()


class _SparseReceive(PostedReceive):
    """A receive of a sparse array, which replaces the array's entries.

    Attributes:
        array: the sparse array.
    """

    array: SparseArray

    def match(self, arrival: InboundMessage) -> None:
        """Match this receive with the message `arrival`, as soon as memory for the payload is allocated."""
        total, most = arrival.total, _message_nbytes(self.array, self.array.size)
        if arrival.code != self.code:
            super().match(arrival)
        elif not _COUNT.itemsize <= total <= most:
            self.comm.revoke_after_error(
                self,
                ProtocolError(f"rank {arrival.peer} sent a sparse array of {total} bytes, expected at most {most}"),
            )
        elif total <= 8 * sparse_reduce.INLINE:
            self.set_buffer(memoryview(bytearray(total)))
            super().match(arrival)
        else:
            self.claim(arrival)
            run_in_thread(self, lambda: self._allocate(total), lambda _: super(_SparseReceive, self).match(arrival))

    def needs(self, peer: int) -> bool:
        """Return whether only `peer` can complete this receive; False when the whole message has arrived."""
        is_here = self.arrival is not None and self.arrival.complete
        return not is_here and super().needs(peer)

    def finish(self) -> None:
        """Build the array from the received entries, in a thread if there are many of them."""
        assert self.view is not None
        if len(self.view) <= 8 * sparse_reduce.INLINE:
            try:
                store = self._build()
            except ValueError as error:
                self.comm.revoke_after_error(self, error)
            else:
                self._store(store)
        else:
            run_in_thread(self, self._build, self._store)

    def _allocate(self, total: int) -> None:
        (room,) = sparse_reduce.allocate_blocks([total])
        self.set_buffer(room.data)

    def _build(self) -> Callable[[], Any]:
        packed = np.frombuffer(self.view or b"", np.uint8)
        count = int(packed[: _COUNT.itemsize].view(_COUNT)[0])
        end = _message_nbytes(self.array, count)
        if count < 0 or end > len(packed):
            raise ValueError(
                f"received a sparse array of {count} entries in {len(packed)} bytes, which is inconsistent"
            )
        return self.array.build(entries_of(self.array, packed[_COUNT.itemsize : end]))

    def _store(self, store: Callable[[], Any]) -> None:
        self.succeed(store())
