"""State of a group on this rank's device: the backend, the order of calls, device failures."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import msgpack

from aiocoll.elements.device import DeviceArray
from aiocoll.engine.communicator import Communicator
from aiocoll.engine.control.unmade_groups import keep_message
from aiocoll.engine.operations.base import Operation
from aiocoll.engine.operations.comparison import Difference, compare
from aiocoll.engine.operations.differences import called
from aiocoll.errors import BackendUnavailableError, CollectiveTimeoutError, GroupError
from aiocoll.gpu.api import DeviceError, Nccl
from aiocoll.gpu.calls.backend_agreement import BackendAgreement
from aiocoll.gpu.calls.call_order import CallOrder
from aiocoll.gpu.calls.cards import Decision
from aiocoll.gpu.calls.communicator import DeviceCommunicator
from aiocoll.gpu.calls.native_messages import NativeMessages
from aiocoll.gpu.calls.slots import Slots
from aiocoll.gpu.device import Device
from aiocoll.log import logger

if TYPE_CHECKING:
    from aiocoll.gpu.calls.agreed import Agreed

__all__ = ["DeviceState"]

#: Environment variable for the network interfaces that NCCL may use between hosts.
INTERFACE = "NCCL_SOCKET_IFNAME"
#: Maximum seconds for which the end of a group waits until enqueued device work is done.
RELEASE = 5.0


class DeviceState:
    """The state of one group on this rank's device, from its first call on CUDA arrays.

    Args:
        comm: this rank's part in the group.
        device: device of the arrays.
        nccl: the NCCL library; None if there is none.
        forced: whether calls fail where NCCL cannot be used, instead of being staged.
        ahead: whether to launch calls before they are compared, if all ranks do.

    Attributes:
        device: as given.
        stream: stream of copies to the host and back.
        decision: backend decision; None until all ranks have made a call on CUDA arrays.
        communicator: this rank's end of the NCCL communicator, if NCCL is used.
        order: order of calls that are launched before they are compared; None if they are compared first.
        slots: slots of NCCL calls among the calls of other groups; None without NCCL.
        messages: messages between two ranks that NCCL carries.
    """

    def __init__(self, comm: Communicator, device: Device, nccl: Nccl | None, forced: bool, ahead: bool) -> None:
        self.comm = comm
        self.device = device
        self.nccl = nccl
        self._agreement = BackendAgreement(comm, device, nccl, ahead, self._number_all, self._on_backend_decision)
        # This CUDA call may run in the event loop, because it is fast: the arrays are on the device, so its CUDA
        # context exists. It is the last step that may fail, so that no failure leaks the stream.
        self.stream = device.stream()
        self.decision: Decision | None = None
        self.communicator: DeviceCommunicator | None = None
        self.order: CallOrder | None = None
        self.slots: Slots | None = None
        self._forced = forced
        self._ahead = ahead
        #: Calls, verdicts and call-order messages that wait until rank 0 has decided on the backend.
        self._undecided: list[Agreed] = []
        self._verdicts: list[tuple[Agreed, int, bool]] = []
        self._early: list[tuple[int, dict[str, Any]]] = []
        self.messages = NativeMessages(self)
        #: Used on rank 0: calls that all ranks have made, but that have no launch number yet.
        self._complete: list[Agreed] = []
        #: Used on rank 0: the last launch number assigned on each rank.
        self._numbered = [0] * len(comm.ranks)
        #: Operations that wait for all lower launch numbers, by launch number: the function that starts the operation,
        #: and whether NCCL carries it out.
        self._held: dict[int, tuple[Callable[[bool], None], bool]] = {}
        #: Launch number of the operation that starts next.
        self._next = 1
        comm.on_revoked.append(self.end)
        comm.on_departed.append(self._on_rank_departed)
        self._is_over = False
        self._agreement.start()
        comm.devices.connect(self._handle_message)

    def mark(self, arrays: Sequence[DeviceArray | None], is_checked: bool = False) -> tuple[int, ...]:
        """Record CUDA events on the caller's streams, and return them; the call's device work waits for them.

        Args:
            arrays: arrays of the call; None where this rank has none.
            is_checked: whether the caller has just checked that no stream is being captured, and that the device is the
                current device of the thread.
        """
        if len(arrays) == 1 and (only := arrays[0]) is not None:
            return (self.device.mark(only.stream, is_checked),)
        marks: dict[int, int] = {}
        for each in arrays:
            if each is not None and each.stream not in marks:
                marks[each.stream] = self.device.mark(each.stream, is_checked)
        return tuple(marks.values())

    def unmark(self, marks: Iterable[int]) -> None:
        """Release CUDA events from `mark` for which no device work will wait."""
        for mark in marks:
            self.device.unmark(mark)

    # -- the agreement

    def enter(self, call: Agreed) -> None:
        """Compare a call before its launch, or launch it before the comparison, as the group has decided."""
        if self.decision is None and self._ahead:
            self._undecided.append(call)
        elif self.order is None or not call.is_ordered():
            call.request_comparison()
        elif call.is_numbered():
            call.request_comparison()
            call.join_program_order(self.order, ahead=False)
        else:
            call.join_program_order(self.order, ahead=True)

    def compare_calls(self, operation: Agreed, encoded: Sequence[memoryview]) -> Difference | None:
        """Compare the calls of all ranks on rank 0; if they agree, number the call, else return the difference."""
        # Fast path: usually all ranks send equal bytes, which need no decoding.
        all_equal = all(each == encoded[0] for each in encoded)
        calls = (
            [msgpack.unpackb(encoded[0])] * len(encoded) if all_equal else [msgpack.unpackb(each) for each in encoded]
        )
        found = None
        if not all_equal or operation.is_private():
            found = compare(self.comm.name, [_describe_numbered_call(*each[:3]) for each in calls])
        if found is None:
            self._complete.append(operation)
            self._begin_complete()
        return found

    def _begin_complete(self) -> None:
        """Assign launch numbers to the calls that all ranks have made, once the backend is decided.

        Only rank 0 has such calls.
        """
        if self.decision is None:
            return
        complete, self._complete = self._complete, []
        for operation in complete:
            if operation.is_native():
                self.place(partial(self._broadcast_verdict, operation))
            else:
                self._broadcast_verdict(operation, False)

    def _broadcast_verdict(self, operation: Agreed, staged: bool) -> None:
        operation.broadcast_verdict(self._number_all(not staged and operation.is_native()), staged)

    def place(self, begin: Callable[[bool], None]) -> None:
        """Start an NCCL operation at the same position among all calls on every rank; only rank 0 calls this.

        See `Pacing.place`.
        """
        if self.order is None:
            begin(False)
        else:
            self.order.place(begin)

    def _number_all(self, native: bool = False) -> dict[int, int]:
        return self.number(range(len(self.comm.ranks)), native)

    def number(self, ranks: Iterable[int], native: bool) -> dict[int, int]:
        """Assign the next launch number on each of `ranks`; only rank 0 calls this.

        A `native` operation may also need a slot among the calls of other groups.
        """
        for rank in ranks:
            self._numbered[rank] += 1
        numbers = {rank: self._numbered[rank] for rank in ranks}
        if native and self.slots is not None and self.slots.is_given:
            self.slots.open(numbers)
        return numbers

    def decided(self, operation: Agreed, number: int, staged: bool) -> None:
        """Record rank 0's verdict, and start the call after all operations with lower launch numbers."""
        if self.decision is None:  # the decision takes other links, so it may arrive later
            self._verdicts.append((operation, number, staged))
            return
        native = not staged and operation.is_native()
        self.hold(number, lambda instead: self._begin(operation, staged or instead), native)

    def hold(self, number: int, begin: Callable[[bool], None], native: bool) -> None:
        """Start an operation when all operations with lower launch numbers have started.

        Args:
            number: number of the operation on this rank.
            begin: starts the operation; takes whether a native operation must be staged instead.
            native: whether NCCL carries it out. It then also waits for earlier calls in program order, and for its slot
                among the calls of other groups on the device.
        """
        self._held[number] = begin, native
        self._start_held()

    def _start_held(self) -> None:
        while (turn := self._held.get(self._next)) is not None:
            begin, native = turn
            if native and self.order is not None and not self.order.program.is_caught_up:
                return
            in_slot = native and self.slots is not None and self.slots.is_shared
            staged = self.slots.turn(self._next) if in_slot and self.slots is not None else False
            if staged is None:
                return
            del self._held[self._next]
            self._next += 1
            begin(staged)

    def _begin(self, operation: Agreed, staged: bool) -> None:
        decision = self.decision
        assert decision is not None
        if (refusal := decision.refusal(self.comm.name, self._forced)) is not None:
            operation.fail_on_all_ranks(BackendUnavailableError(refusal))
        else:
            operation.begin(staged or not decision.native)

    def _handle_message(self, peer: int, message: dict[str, Any]) -> None:
        """Handle another rank's control message about CUDA devices, and pass it to the object in charge."""
        if self._is_over:
            self._agreement.handle_late(message)
        elif "match" in message or "begin" in message:
            self.messages.handle(peer, message)
        elif CallOrder.is_own_message(message) or Slots.is_own_message(message):
            if self.decision is None:
                keep_message(self._early, peer, message)
            elif self.slots is None:
                raise ValueError("unexpected NCCL message: this group does not use NCCL")
            elif Slots.is_own_message(message):
                self.slots.handle(peer, message)
            elif self.order is None:
                raise ValueError("unexpected call-order message: this group compares its calls before it launches them")
            else:
                self.order.handle(peer, message)
        else:
            self._agreement.handle(peer, message)

    def _on_rank_departed(self, rank: int) -> None:
        """Handle a rank that has closed the group."""
        self._agreement.on_departure(rank)
        self.messages.on_departure(rank)
        if self.order is not None:
            self.order.on_departure()
        if self.slots is not None:
            self.slots.on_departure(rank)

    # -- the decision

    def _on_backend_decision(self, number: int, decision: Decision) -> None:
        """Apply the backend decision when its launch number is due, which is the first one."""
        self.hold(number, lambda _: self._follow(decision), False)

    def _follow(self, decision: Decision) -> None:
        """Use the backend that rank 0 has chosen, and start the calls that waited for this decision."""
        self.decision = decision
        logger.info(
            "group %r, rank %d: CUDA arrays %s: %s",
            self.comm.name,
            self.comm.rank,
            decision.description,
            decision.why,
            extra=self.comm.log_extra,
        )
        if decision.native:
            self._use_nccl(decision)
        verdicts, self._verdicts = self._verdicts, []
        for verdict in verdicts:
            self.decided(*verdict)
        early, self._early = self._early, []
        for peer, message in early:
            self.comm.endpoint.attempt(self.comm.ranks[peer], self._handle_message, peer, message)
        undecided, self._undecided = self._undecided, []
        for call in undecided:
            self.enter(call)
        self._begin_complete()

    def _use_nccl(self, decision: Decision) -> None:
        can_stage = not self._forced
        if decision.ahead:
            self.order = CallOrder(
                self.comm,
                self._number_all,
                self.hold,
                self._start_held,
                can_stage=can_stage,
                is_shared=decision.shared,
            )
        self.slots = Slots(
            self.comm,
            self.device.order,
            self._number_all,
            self.hold,
            self._gather,
            self._start_held,
            can_stage=can_stage,
        )
        if decision.shared:
            self.slots.share()
            self.slots.make(partial(self._make, decision))
        else:
            self._make(decision)

    def _gather(self, then: Callable[[], None]) -> None:
        """Call `then` once every call launched before its comparison is sure to start on all ranks.

        Only rank 0 calls this.
        """
        if self.order is None:
            then()
        else:
            self.order.share(then)

    def _make(self, decision: Decision) -> None:
        """Create the group's NCCL communicator."""
        assert self.nccl is not None
        try:
            self.communicator = DeviceCommunicator(
                self.comm, self.device, self.nccl, decision.unique_id, self._agreement.end_turn, self.fail_group
            )
        except DeviceError as error:
            self.fail_group(error)

    # -- failing

    def fail_hung_device(self, operation: Operation, others: str = "") -> None:
        """Fail the group, because this rank's device did not finish `operation` in time.

        `others` is the part of the error text about the other ranks.
        """
        comm, completion = self.comm, operation.completion
        comm.revoke(
            CollectiveTimeoutError(
                f"{operation.title()} of group {comm.name!r} did not complete within {operation.timeout:g} s on rank "
                f"{comm.rank}, which called {called(operation.describe())}: {others}{self._describe_hang()}",
                op=completion.op,
                seq=completion.key or completion.seq,
                group=comm.name,
            )
        )

    def _describe_hang(self) -> str:
        if self.communicator is not None and not self.communicator.is_begun:
            why = self._explain_missing_communicator()
            return f"NCCL has not created the communicator on device {self.device.ordinal}: {why}"
        return f"device {self.device.ordinal} has not finished it, or earlier work on the caller's stream"

    def _explain_missing_communicator(self) -> str:
        hosts = len(set(self.comm.hosts))
        if hosts == 1:
            return "restart the process"
        chosen = os.environ.get(INTERFACE)
        return (
            f"the ranks are on {hosts} hosts, and NCCL may have chosen a network interface that does not reach the "
            f"other hosts; set {INTERFACE} ({repr(chosen) if chosen else 'not set'} on this rank) to an interface that "
            "does, on all ranks, and restart the processes"
        )

    def fail_group(self, error: BaseException, operation: Operation | None = None) -> None:
        """Fail the group with the `error` of the device or communicator; `operation` is the failed one, if known."""
        comm = self.comm
        completion = None if operation is None else operation.completion
        name = None if completion is None else completion.key or completion.seq
        what = "" if operation is None else f"{operation.title()} of "
        cause = GroupError(
            f"{what}group {comm.name!r} failed on rank {comm.rank}, device {self.device.ordinal}: {error}",
            op=None if completion is None else completion.op,
            seq=name,
            group=comm.name,
            ranks=[comm.rank],
        )
        cause.__cause__ = error
        comm.revoke(cause)

    def continues(self, operation: Operation, error: DeviceError | None, leave: Callable[[], None]) -> bool:
        """Handle the end of an operation's device work; return whether the operation is still running.

        Args:
            operation: the operation, which may have ended before.
            error: of the device.
            leave: releases the resources of an operation that has ended.
        """
        if operation.done:
            leave()
        elif error is not None:
            self.fail_group(error, operation)
        return not operation.done

    def end(self) -> None:
        """Abort the communicator and forget all calls, because the group has failed or was closed."""
        self._is_over = True
        self._agreement.end()
        self._held.clear()
        self._complete.clear()
        self._undecided.clear()
        self._verdicts.clear()
        self.messages.end()
        if self.order is not None:
            self.order.end()
        if self.slots is not None:
            self.slots.end()
        if self.communicator is not None:
            self.communicator.abort()

    async def close(self) -> None:
        """Destroy the NCCL communicator together with the other ranks; otherwise the end of the group aborts it."""
        await self._agreement.settle()
        if self.communicator is not None:
            await self.communicator.close()

    async def release(self) -> None:
        """Release the device resources of a group that has ended."""
        ends: list[Awaitable[object]] = [self.device.close_stream(self.stream, RELEASE)]
        if self.communicator is not None:
            ends += [self.device.leave_common_stream(RELEASE), self.communicator.release(RELEASE)]
        await asyncio.gather(*ends)


def _describe_numbered_call(described: bytes, seq: int | None, key: str | None) -> bytes:
    """Add the sequence number and the key of a call to its encoded description."""
    whole: bytes = msgpack.packb({**msgpack.unpackb(described), "seq": seq, "key": key})
    return whole
