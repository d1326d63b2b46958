"""Point-to-point messages: send, receive, probes, and iteration over messages without a posted receive."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np

from aiocoll.completion import Completion
from aiocoll.elements.buffers import Buffer, byte_view, clash, view
from aiocoll.elements.dtypes import array_dtype, by_code, by_name
from aiocoll.elements.records import LAYOUT
from aiocoll.engine.communicator import Communicator
from aiocoll.engine.fusion.deferred_completion import DeferredCompletion
from aiocoll.engine.matching.inbound import TAG_LIMIT, InboundMessage
from aiocoll.engine.matching.outbound import OBJECT, Content, OutboundMessage
from aiocoll.engine.matching.posted import PostedReceive
from aiocoll.engine.matching.probe import Envelope, PostedProbe, envelope_of
from aiocoll.engine.matching.to_self import MessageToSelf
from aiocoll.engine.operations.base import Operation
from aiocoll.engine.operations.composite import Make
from aiocoll.group.collectives import check_sparse
from aiocoll.group.dispatch.devices import receive_in_memory
from aiocoll.group.dispatch.dispatcher import PROC_NULL, Dispatcher, Timeout
from aiocoll.group.objects import Objects
from aiocoll.group.prepared_call import MessageCall
from aiocoll.loading import loading
from aiocoll.numerals import to_int
from aiocoll.runtime import BUDGET
from aiocoll.typing import Array
from aiocoll.work import Work, completion_of

__all__ = ["Message", "Messages", "Recv", "Send", "combine_works"]

A_co = TypeVar("A_co", bound=Array, covariant=True)

_ndarray = np.ndarray
#: Maximum number of bytes in a message: frames carry its length in 32 bits.
LONGEST = 2**32 - 1
_BYTES = by_name("uint8")


class Message(Generic[A_co]):
    """Base class of the operations in `ProcessGroup.batch`: `Send` and `Recv`."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Send(Message[A_co]):
    """A send in `ProcessGroup.batch`; see `ProcessGroup.send`."""

    tensor: A_co
    dst: int
    tag: int = 0


@dataclass(frozen=True, slots=True)
class Recv(Message[A_co]):
    """A receive in `ProcessGroup.batch`; see `ProcessGroup.recv`. If `src` is None, it receives from any rank."""

    tensor: A_co
    src: int | None
    tag: int = 0


class Messages:
    """The point-to-point messages of one group. `ProcessGroup` documents the calls.

    Args:
        dispatcher: dispatcher of the group.
        objects: encodes and decodes objects.
    """

    def __init__(self, dispatcher: Dispatcher, objects: Objects) -> None:
        self._dispatcher = dispatcher
        self._objects = objects

    def send(self, tensor: Any, dst: int, tag: int, timeout: Timeout) -> Work[Any]:
        """Start to send an array to a rank."""
        dst, tag = self._dispatcher.check_rank(dst, "dst", null=True), _check_tag(tag)
        try:
            buffer = view(tensor, writable=False)
        except TypeError as error:
            return self._send_sparse(error, tensor, dst, tag, timeout)
        return self._send(dst, tag, buffer, timeout)

    def recv(self, tensor: Any, src: int | None, tag: int, timeout: Timeout) -> Work[Any]:
        """Start to receive an array from rank `src`, which has been checked, or from any rank if it is None."""
        tag = _check_tag(tag)
        try:
            buffer = view(tensor)
        except TypeError as error:
            return self._recv_sparse(error, tensor, src, tag, timeout)
        return self._recv(buffer, src, tag, timeout)

    def batch(self, operations: Sequence[Send[Any] | Recv[Any]], timeout: Timeout) -> Work[list[Any]]:
        """Start several sends and receives together."""
        works = self.start_all(operations, timeout)
        return combine_works(self.one_of("BATCH", works), works)

    def start_all(self, operations: Sequence[Send[Any] | Recv[Any]], timeout: Timeout) -> list[Work[Any]]:
        """Check several sends and receives, then start them."""
        d = self._dispatcher
        if not isinstance(operations, Iterable):
            raise TypeError(f"operations must be a list of Send and Recv, not {type(operations).__name__}")
        ready = [self._check_operation(each, f"operations[{index}]") for index, each in enumerate(operations)]
        _check_no_overlap(ready)
        d.limit(timeout)
        d.check()
        on_device = [
            buffer.array
            for each, buffer in ready
            if type(buffer.array) is not _ndarray and _other_end(each) != PROC_NULL
        ]
        if not d.dry:
            for array in on_device:
                d.on_device([array])
        works: list[Work[Any]] = []
        try:
            with d.batched(on_device):
                for each, buffer in ready:
                    if isinstance(each, Send):
                        works.append(self._send(each.dst, each.tag, buffer, timeout))
                    else:
                        works.append(self._recv(buffer, each.src, each.tag, timeout))
        except BaseException:
            for work in works:
                work.add_done_callback(_ignore_outcome)  # the caller gets the error, not these works
            raise
        return works

    def send_object(self, obj: Any, dst: int, tag: int, timeout: Timeout) -> Work[None]:
        """Start to send an object to a rank."""
        dst, tag = self._dispatcher.check_rank(dst, "dst", null=True), _check_tag(tag)
        content = Content(OBJECT, memoryview(self._objects.dump(obj)))
        if dst == PROC_NULL:
            return self._end_null_message("SEND_OBJECT", ("dst", dst, tag), None, timeout)
        return self._dispatcher.start(self._make_send_call("SEND_OBJECT", dst, tag, content, None, timeout))

    def recv_object(self, src: int | None, tag: int, timeout: Timeout) -> Work[Any]:
        """Start to receive an object from a rank."""
        d, tag = self._dispatcher, _check_tag(tag)
        if src is not None:
            src = d.check_rank(src, "src", null=True)
            if src == PROC_NULL:
                return self._end_null_message("RECV_OBJECT", ("src", src, tag), None, timeout)
        limit = d.limit(timeout)

        def make(_: int, completion: Completion) -> PostedReceive:
            return PostedReceive(d.comm.matching, src, tag, Content(OBJECT, None, self._objects.load), completion)

        return d.start(MessageCall("RECV_OBJECT", make, limit, ("src", src, tag)))

    def incoming(self, tag: int) -> AsyncIterator[tuple[int, Any]]:
        """Return an iterator over the messages that no posted receive matches."""
        tag = _check_tag(tag)
        self._dispatcher.check()
        return _Incoming(self._dispatcher.comm, tag, self._objects)

    def probe(self, source: int | None, tag: int, timeout: Timeout) -> Work[Envelope]:
        """Start a probe, which waits for a message without receiving it."""
        d = self._dispatcher
        envelope = self._check_probe(source, tag)
        tag = envelope.tag
        if envelope.source == PROC_NULL:
            return self._end_null_message("PROBE", ("src", PROC_NULL, tag), envelope, timeout)
        limit, src = d.limit(timeout), None if source is None else envelope.source

        def make(_: int, completion: Completion) -> PostedProbe:
            return PostedProbe(d.comm.matching, src, tag, completion)

        return d.start(MessageCall("PROBE", make, limit, ("src", src, tag), envelope))

    def iprobe(self, source: int | None, tag: int) -> Envelope | None:
        """Return the envelope of the next message; None if no message has arrived."""
        d = self._dispatcher
        envelope = self._check_probe(source, tag)
        tag = envelope.tag
        d.check()
        if envelope.source == PROC_NULL:
            return envelope
        src = None if source is None else envelope.source
        arrival = d.comm.matching.find(src, tag)
        if arrival is None:
            d.comm.polling.poll_once()
            d.check()
            arrival = d.comm.matching.find(src, tag)
        return None if arrival is None else envelope_of(arrival)

    def one_of(self, op: str, works: Sequence[Work[Any]]) -> Work[Any]:
        """Make one work that ends when all `works` have ended, including works that a block has only recorded."""
        completions = [completion_of(work) for work in works]
        for completion in completions:
            completion.note_await()  # the program awaits only the combined work
        recorded = next((each for each in completions if isinstance(each, DeferredCompletion)), None)
        if recorded is None:
            return Work(Completion(self._dispatcher.endpoint, op, None, None, self._dispatcher))
        whole = DeferredCompletion(recorded.progress, op, None, None, self._dispatcher)
        recorded.block.follow(whole)
        return Work(whole)

    def _check_operation(self, each: Any, name: str) -> tuple[Send[Any] | Recv[Any], Buffer]:
        """Check an operation of a batch; return a copy with ranks and tag as ints, and a flat view of its array."""
        if not isinstance(each, Send | Recv):
            raise TypeError(f"{name} must be a Send or a Recv, not {type(each).__name__}")
        tag = _check_tag(each.tag, f"{name}.tag")
        buffer = view(each.tensor, name=f"{name}.tensor", writable=isinstance(each, Recv))
        if isinstance(each, Send):
            _check_length(buffer.nbytes, f"{name}.tensor")
            dst = self._dispatcher.check_rank(each.dst, f"{name}.dst", null=True)
            return Send(each.tensor, dst, tag), buffer
        src = None if each.src is None else self._dispatcher.check_rank(each.src, f"{name}.src", null=True)
        return Recv(each.tensor, src, tag), buffer

    def send_call(self, dst: int, tag: int, buffer: Buffer, timeout: Timeout) -> MessageCall:
        """Return a prepared send to a rank."""
        array: Any = buffer.array
        code = buffer.dtype.code
        if type(array) is _ndarray:
            return self._make_send_call("SEND", dst, tag, Content(code, byte_view(array)), buffer.result, timeout)
        _check_length(buffer.nbytes, "tensor")
        d, ends = self._dispatcher, ("dst", dst, tag)
        limit = d.limit(timeout)
        if dst == d.rank:
            raise TypeError(f"tensor is a {array.label} array, and dst={dst} is this rank: copy it on the device")
        make = _make_no_operation if d.dry else d.on_device([array]).sending(array, dst, tag, code)
        call = MessageCall("SEND", make, limit, ends, buffer.result, nbytes=buffer.nbytes)
        call.arrays = [array]
        return call

    def recv_call(self, buffer: Buffer, src: int | None, tag: int, timeout: Timeout) -> MessageCall:
        """Return a prepared receive from a rank, or from any rank if it is None."""
        d = self._dispatcher
        limit = d.limit(timeout)
        array: Any = buffer.array
        code, arrays = buffer.dtype.code, None
        make: Make
        if type(array) is _ndarray:
            make = receive_in_memory(d.comm, byte_view(array), src, tag, code)
        else:
            arrays = [array]
            make = _make_no_operation if d.dry else d.on_device(arrays).receiving(array, src, tag, code)
        op = "RECV" if src is not None else "RECV_ANYSOURCE"
        call = MessageCall(op, make, limit, ("src", src, tag), buffer.result, buffer.shape, buffer.nbytes)
        call.arrays, call.unwrap = arrays, buffer.writeback
        return call

    def _make_send_call(
        self, op: str, dst: int, tag: int, content: Content, result: Any, timeout: Timeout
    ) -> MessageCall:
        assert content.data is not None
        nbytes = content.data.nbytes
        _check_length(nbytes, "tensor")
        limit, matching = self._dispatcher.limit(timeout), self._dispatcher.comm.matching
        to_self = dst == self._dispatcher.rank

        def make(_: int, completion: Completion) -> OutboundMessage:
            if to_self:
                return MessageToSelf(matching, dst, tag, content, completion)
            return OutboundMessage(matching, dst, tag, content, completion)

        return MessageCall(op, make, limit, ("dst", dst, tag), result, nbytes=nbytes)

    def _send(self, dst: int, tag: int, buffer: Buffer, timeout: Timeout) -> Work[Any]:
        if dst == PROC_NULL:
            _check_length(buffer.nbytes, "tensor")
            return self._end_null_message("SEND", ("dst", dst, tag), buffer.result, timeout)
        return self._dispatcher.start(self.send_call(dst, tag, buffer, timeout))

    def _recv(self, buffer: Buffer, src: int | None, tag: int, timeout: Timeout) -> Work[Any]:
        if src == PROC_NULL:
            return self._end_null_message("RECV", ("src", src, tag), buffer.result, timeout)
        return self._dispatcher.start(self.recv_call(buffer, src, tag, timeout))

    def _send_sparse(self, error: TypeError, tensor: Any, dst: int, tag: int, timeout: Timeout) -> Work[Any]:
        """Start a send of a sparse array; raise `error` if `tensor` is not a sparse array."""
        check_sparse(error, tensor)
        with loading("sparse arrays"):
            from aiocoll.group.sparse_messages import send_sparse

        call = send_sparse(self._dispatcher, tensor, dst, tag, self._dispatcher.limit(timeout), LONGEST)
        return self._start_unless_null(call, timeout)

    def _recv_sparse(self, error: TypeError, tensor: Any, src: int | None, tag: int, timeout: Timeout) -> Work[Any]:
        """Start a receive of a sparse array; raise `error` if `tensor` is not a sparse array."""
        check_sparse(error, tensor)
        with loading("sparse arrays"):
            from aiocoll.group.sparse_messages import recv_sparse

        limit = self._dispatcher.limit(timeout)
        return self._start_unless_null(recv_sparse(self._dispatcher, tensor, src, tag, limit), timeout)

    def _start_unless_null(self, call: MessageCall, timeout: Timeout) -> Work[Any]:
        """Start a message. If its source or destination is `PROC_NULL`, end the message immediately."""
        if call.ends[1] == PROC_NULL:
            return self._end_null_message(call.op, call.ends, call.result, timeout)
        return self._dispatcher.start(call)

    def _check_probe(self, source: int | None, tag: int) -> Envelope:
        """Check a probe's arguments; return an empty envelope, the probe's result for `PROC_NULL` and in a dry run."""
        tag = _check_tag(tag)
        number = self._dispatcher.check_rank(0 if source is None else source, "source", null=True)
        return Envelope(number, tag, 0, np.dtype(np.uint8))

    def _end_null_message(self, op: str, ends: tuple[str, int | None, int], result: Any, timeout: Timeout) -> Work[Any]:
        """Return the work of a message to or from `PROC_NULL`, which has already ended."""
        d = self._dispatcher
        limit = d.limit(timeout)
        d.check()
        completion = Completion(d.endpoint, op, None, None, d)
        MessageCall(op, _make_no_operation, limit, ends, result).expect(completion)
        if ends[0] == "src":
            completion.source = PROC_NULL
        completion.finish(result)
        return Work(completion)


class _Incoming(AsyncIterator[tuple[int, Any]]):
    """An iterator over messages without a posted receive. Unlike a generator, it continues after a cancellation."""

    def __init__(self, comm: Communicator, tag: int, objects: Objects) -> None:
        self._comm = comm
        self._tag = tag
        self._objects = objects

    async def __anext__(self) -> tuple[int, Any]:
        arrival = await self._comm.matching.next_message(self._tag)
        if arrival is None:
            raise StopAsyncIteration
        data = arrival.data()
        if arrival.code == OBJECT:
            return arrival.peer, await self._read(arrival, data)
        dtype = _BYTES if arrival.code & LAYOUT else by_code(arrival.code)
        return arrival.peer, np.frombuffer(bytearray(data), dtype.storage).view(array_dtype(dtype))

    async def _read(self, arrival: InboundMessage, data: bytes) -> Any:
        """Decode an object, with pauses for the event loop. A cancellation puts the message and its progress back."""
        steps = arrival.steps or self._objects.load(memoryview(data))
        ticks = self._comm.endpoint.runtime.ticks
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
            self._comm.matching.put_back(arrival, data, steps)
            raise


def _make_no_operation(identity: int, completion: Completion) -> Operation:
    raise AssertionError("a message to or from PROC_NULL has no operation")


def _other_end(each: Send[Any] | Recv[Any]) -> int | None:
    return each.dst if isinstance(each, Send) else each.src


def _check_tag(tag: Any, name: str = "tag") -> int:
    """Return `tag` as an int; raise an error if it is not a valid tag."""
    number = tag if type(tag) is int else to_int(tag, name)
    if not 0 <= number < TAG_LIMIT:
        raise ValueError(f"{name}={number} is out of range: tags are from 0 to 2**30 - 1")
    return number


def _check_length(nbytes: int, name: str) -> None:
    if nbytes > LONGEST:
        raise ValueError(f"{name} has {nbytes} bytes; a message holds at most {LONGEST}: send it in parts")


def _check_no_overlap(operations: Sequence[tuple[Send[Any] | Recv[Any], Buffer]]) -> None:
    """Raise an error if a batch receives into memory that another operation of the batch uses."""
    order = sorted(range(len(operations)), key=lambda index: isinstance(operations[index][0], Send))
    received = sum(isinstance(each, Recv) for each, _ in operations)
    arrays = [operations[index][1].array for index in order]
    found = clash(arrays[:received], arrays[received:])
    if found is not None:
        first, second = sorted(order[position] for position in found)
        raise ValueError(
            f"operations[{first}].tensor and operations[{second}].tensor share memory, and at least one of them "
            "receives: pass a separate array to each receive"
        )


def _ignore_outcome(_: Work[Any]) -> None:
    """Do nothing. A work that has this callback counts its outcome as retrieved."""


def combine_works(whole: Work[list[Any]], works: Sequence[Work[Any]]) -> Work[list[Any]]:
    """End the work `whole` when all `works` have ended, with their results as a list or their first error."""
    end, parts = completion_of(whole), [completion_of(work) for work in works]
    pending = [part for part in parts if not part.done]
    left = len(pending)

    def ended(_: Completion) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            finish()

    def finish() -> None:
        failed = [part.exception for part in parts if part.exception is not None]
        for part in parts:
            if part.exception is not None:
                part.note_retrieval()
        # Prefer any other error to the CancelledError of a withdrawn receive.
        failed.sort(key=lambda error: isinstance(error, asyncio.CancelledError))
        end.finish(None if failed else [part.result for part in parts], failed[0] if failed else None)

    def withdraw() -> None:
        for part in parts:
            if part.withdraw is not None:
                part.withdraw()

    if pending:
        end.withdraw = withdraw
        for part in pending:
            part.add_callback(ended, part, contextvars.copy_context())
    else:
        finish()
    return whole
