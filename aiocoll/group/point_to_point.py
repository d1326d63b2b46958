"""Messages between two ranks: send, receive, and the stream of whatever comes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from aiocoll.codec import dumps, reading
from aiocoll.elements.buffers import Buffer, byte_view, clash, view
from aiocoll.elements.dtypes import array_dtype, by_code
from aiocoll.engine.communicator import Communicator
from aiocoll.engine.fusion.deferred_work import DeferredWork
from aiocoll.engine.matching.inbound import TAG_LIMIT, InboundMessage
from aiocoll.engine.matching.matching import PostedReceive
from aiocoll.engine.matching.outbound import OBJECT, Content, OutboundMessage
from aiocoll.engine.operations.incremental import Steps
from aiocoll.group.launch import Launcher, Timeout
from aiocoll.loading import loading
from aiocoll.options import seconds
from aiocoll.runtime import BUDGET
from aiocoll.work import Work

if TYPE_CHECKING:
    from aiocoll.group.cuda.messages import DeviceMessages

__all__ = ["PointToPoint", "Recv", "Send", "all_of"]

_ndarray = np.ndarray
#: Bytes of the longest message: its frames carry its length in 32 bits.
LONGEST = 2**32 - 1


@dataclass(frozen=True, slots=True)
class Send:
    """A send of a `batch`."""

    tensor: Any
    dst: int
    tag: int = 0


@dataclass(frozen=True, slots=True)
class Recv:
    """A receive of a `batch`; `src` None takes a message of any rank."""

    tensor: Any
    src: int | None
    tag: int = 0


class PointToPoint(Launcher):
    """Calls of a sender and a receiver. Messages of one sender with one tag are received in the order sent.

    A tag is a number from 0 to 2**30 - 1. Length and dtype of a message must be those of the receive. Arrays on a CUDA
    device go by NCCL if the group uses it and the message has more than 256 KiB, else through the host; the other end
    of a message may be an array of the host.
    """

    def send(self, tensor: Any, dst: int, tag: int = 0, *, timeout: Timeout = None) -> Work[Any]:
        """Send `tensor` to rank `dst`; done when the memory may be reused, not when it has been received."""
        dst = self._check_rank(dst, "dst", other=True)
        buffer = view(tensor, writable=False)
        array = buffer.array
        if type(array) is not _ndarray:
            return self._send_staged(dst, tag, buffer, timeout)
        return self._send("SEND", dst, tag, byte_view(array), buffer.dtype.code, buffer.result, timeout)

    def recv(self, tensor: Any, src: int, tag: int = 0, *, timeout: Timeout = None) -> Work[Any]:
        """Receive a message of rank `src` into `tensor`."""
        return self._recv(view(tensor), self._check_rank(src, "src", other=True), tag, timeout)

    def recv_anysource(self, tensor: Any, tag: int = 0, *, timeout: Timeout = None) -> Work[Any]:
        """Receive the next message of any rank into `tensor`; `work.source_rank()` tells whose it was."""
        return self._recv(view(tensor), None, tag, timeout)

    def batch(self, operations: Sequence[Send | Recv], *, timeout: Timeout = None) -> Work[list[Any]]:
        """Start several sends and receives together; the result is their tensors, in the order given.

        All arguments are checked before anything starts.
        """
        works = self._started(operations, timeout)
        return all_of(self._together("BATCH", works), works)

    def _started(self, operations: Sequence[Send | Recv], timeout: Timeout) -> list[Work[Any]]:
        """Check several sends and receives, then start them."""
        if not isinstance(operations, Iterable):
            raise TypeError(f"operations must be a list of Send and Recv, not {type(operations).__name__}")
        ready = [(each, self._checked(each, f"operations[{index}]")) for index, each in enumerate(operations)]
        _check_apart(ready)
        self._limit(0, timeout)
        self._check()
        on_device = [buffer.array for _, buffer in ready if type(buffer.array) is not _ndarray]
        for array in on_device:
            self._messages(array)
        with self._batched(on_device):
            return [
                self._send_viewed(each.dst, each.tag, buffer, timeout)
                if isinstance(each, Send)
                else self._recv(buffer, each.src, each.tag, timeout)
                for each, buffer in ready
            ]

    def send_object(self, obj: Any, dst: int, tag: int = 0, *, timeout: Timeout = None) -> Work[None]:
        """Send an object, by msgpack; see `aiocoll.codec` for what travels."""
        dst = self._check_rank(dst, "dst", other=True)
        data = dumps(obj, allow_pickle=self._options.allow_pickle)
        return self._send("SEND_OBJECT", dst, tag, memoryview(data), OBJECT, None, timeout)

    def recv_object(self, src: int | None = None, tag: int = 0, *, timeout: Timeout = None) -> Work[Any]:
        """Receive an object of rank `src`, or of any rank."""
        if src is not None:
            src = self._check_rank(src, "src", other=True)
        return self._recv_object(src, tag, self._limit(tag, timeout))

    def incoming(self, tag: int = 0) -> AsyncIterator[tuple[int, Any]]:
        """Yield `(source, message)` for every message with `tag` that no receive has asked for, in order of arrival.

        A message is a 1-D array, or the object that was sent. A message is taken only when it is yielded, so
        cancelling a step loses none, and the iterator can go on; several tasks may share it. It ends when the group is
        closed by this rank.
        """
        _check_tag(tag)
        self._check()
        return _Incoming(self._member, tag, self._options.allow_pickle)

    def _together(self, op: str, works: Sequence[Work[Any]]) -> Work[Any]:
        """Make the work of several, which a block may have recorded."""
        if not works or not isinstance(works[0], DeferredWork):
            return Work(self._member.endpoint, op, None, None, self, 3)
        whole = DeferredWork(works[0]._progress, op, None, None, self, 3)
        works[0]._progress.follow(whole)
        return whole

    def _checked(self, each: Any, name: str) -> Buffer:
        """Check one operation of a batch; return the view of its tensor."""
        if not isinstance(each, Send | Recv):
            raise TypeError(f"{name} must be a Send or a Recv, not {type(each).__name__}")
        _check_tag(each.tag, f"{name}.tag")
        buffer = view(each.tensor, name=f"{name}.tensor", writable=isinstance(each, Recv))
        if isinstance(each, Send):
            self._check_rank(each.dst, f"{name}.dst", other=True)
            _check_length(buffer.nbytes, f"{name}.tensor")
        elif each.src is not None:
            self._check_rank(each.src, f"{name}.src", other=True)
        return buffer

    def _send_viewed(self, dst: int, tag: int, buffer: Buffer, timeout: Timeout) -> Work[Any]:
        if type(buffer.array) is not _ndarray:
            return self._send_staged(dst, tag, buffer, timeout)
        return self._send("SEND", dst, tag, byte_view(buffer.array), buffer.dtype.code, buffer.result, timeout)

    def _send_staged(self, dst: int, tag: int, buffer: Buffer, timeout: Timeout) -> Work[Any]:
        _check_length(buffer.nbytes, "tensor")
        limit = self._limit(tag, timeout)
        make = self._messages(buffer.array).sending(dst, tag, buffer.dtype.code)
        work = self._begin("SEND", make, limit, result=buffer.result, nbytes=buffer.nbytes, arrays=[buffer.array])
        work._ends = "dst", dst, tag
        return work

    def _send(
        self, op: str, dst: int, tag: int, data: memoryview, code: int, result: Any, timeout: Timeout
    ) -> Work[Any]:
        _check_length(data.nbytes, "tensor")
        limit = self._limit(tag, timeout)

        def make(_: int, work: Work[Any]) -> OutboundMessage:
            return OutboundMessage(self._member, dst, tag, Content(code, data), work)

        work = self._begin(op, make, limit, result=result, nbytes=data.nbytes)
        work._ends = "dst", dst, tag
        return work

    def _recv(self, buffer: Buffer, src: int | None, tag: int, timeout: Timeout) -> Work[Any]:
        limit = self._limit(tag, timeout)
        array, code, shape, result = buffer.array, buffer.dtype.code, buffer.shape, buffer.result
        op = "RECV" if src is not None else "RECV_ANYSOURCE"
        if type(array) is not _ndarray:
            receiving = self._messages(array).receiving(src, tag, code)
            work = self._begin(
                op, receiving, limit, None, None, shape, result, buffer.writeback, buffer.nbytes, [array]
            )
        else:
            data = byte_view(array)

            def make(_: int, work: Work[Any]) -> PostedReceive:
                return PostedReceive(self._member, src, tag, Content(code, data), work)

            work = self._begin(op, make, limit, None, None, shape, result, buffer.writeback, data.nbytes)
        work._ends = "src", src, tag
        return work

    def _messages(self, array: Any) -> DeviceMessages:
        """Return what carries messages of CUDA arrays."""
        self._check()
        with loading("CUDA arrays"):
            from aiocoll.group.cuda.messages import messages_of  # with all that a GPU needs

        return messages_of(self, array)

    def _recv_object(self, src: int | None, tag: int, limit: float) -> Work[Any]:
        def read(data: memoryview) -> Steps:
            return reading(data, allow_pickle=self._options.allow_pickle)

        def make(_: int, work: Work[Any]) -> PostedReceive:
            return PostedReceive(self._member, src, tag, Content(OBJECT, None, read), work)

        work = self._begin("RECV_OBJECT", make, limit)
        work._ends = "src", src, tag
        return work

    def _limit(self, tag: int, timeout: Timeout) -> float:
        _check_tag(tag)
        return self._member.timeout if timeout is None else seconds(timeout, "timeout")


class _Incoming(AsyncIterator[tuple[int, Any]]):
    """No generator: the first cancellation would end that."""

    def __init__(self, member: Communicator, tag: int, allow_pickle: bool) -> None:
        self._member = member
        self._tag = tag
        self._allow_pickle = allow_pickle

    async def __anext__(self) -> tuple[int, Any]:
        arrival = await self._member.matching.next_message(self._tag)
        if arrival is None:
            raise StopAsyncIteration
        data = arrival.data()
        if arrival.code == OBJECT:
            return arrival.peer, await self._read(arrival, data)
        dtype = by_code(arrival.code)
        return arrival.peer, np.frombuffer(bytearray(data), dtype.storage).view(array_dtype(dtype))

    async def _read(self, arrival: InboundMessage, data: bytes) -> Any:
        """Read an object, leaving the loop its turns; who is cancelled meanwhile leaves the rest to the next one."""
        steps = arrival.steps or reading(data, allow_pickle=self._allow_pickle)
        ticks = self._member.endpoint.runtime.ticks
        deadline = ticks() + BUDGET
        try:
            while True:
                next(steps)
                if ticks() >= deadline:
                    await asyncio.sleep(0)
                    deadline = ticks() + BUDGET
        except StopIteration as end:
            return end.value
        except asyncio.CancelledError:
            self._member.matching.put_back(arrival, data, steps)
            raise


def _check_tag(tag: Any, name: str = "tag") -> None:
    if isinstance(tag, bool) or not isinstance(tag, int):
        raise TypeError(f"{name} must be an int, not {type(tag).__name__}")
    if not 0 <= tag < TAG_LIMIT:
        raise ValueError(f"{name}={tag} is out of range: tags are 0 to 2**30 - 1")


def _check_length(nbytes: int, name: str) -> None:
    if nbytes > LONGEST:
        raise ValueError(f"{name} has {nbytes} bytes; a message holds at most {LONGEST}: send it in parts")


def _check_apart(operations: Sequence[tuple[Send | Recv, Buffer]]) -> None:
    """Refuse a batch that receives into memory which it also sends, or receives into elsewhere."""
    order = sorted(range(len(operations)), key=lambda index: isinstance(operations[index][0], Send))
    received = sum(isinstance(each, Recv) for each, _ in operations)
    arrays = [operations[index][1].array for index in order]
    found = clash(arrays[:received], arrays[received:])
    if found is not None:
        first, second = sorted(order[position] for position in found)
        raise ValueError(
            f"operations[{first}].tensor and operations[{second}].tensor share memory, and at least one of them "
            "receives: give each receive memory of its own"
        )


def all_of(whole: Work[list[Any]], works: Sequence[Work[Any]]) -> Work[list[Any]]:
    """End `whole` after all `works`, with their results or their first error."""
    pending = [work for work in works if not work.done()]
    left = len(pending)

    def ended(_: Work[Any]) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            finish()

    def finish() -> None:
        failed = [error for work in works if (error := work.exception()) is not None]
        # A receive that was taken back is the smaller news.
        failed.sort(key=lambda error: isinstance(error, asyncio.CancelledError))
        whole._finish(None if failed else [work.result() for work in works], failed[0] if failed else None)

    def withdraw() -> None:
        for work in works:
            if work._withdraw is not None:
                work._withdraw()

    if pending:
        whole._withdraw = withdraw
        for work in pending:
            work.add_done_callback(ended)
    else:
        finish()
    return whole
