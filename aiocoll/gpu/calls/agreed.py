"""Collectives on CUDA arrays, which the ranks compare before or after they launch them on their devices.

Calls without a key that NCCL carries out are launched at once, in program order, and compared later
(`aiocoll.gpu.calls.program_order`). All other calls, and all calls of groups that request it, are compared first, as in
`aiocoll.engine.operations.verify`. Each rank sends a description of its call to rank 0. The verdict of rank 0 refuses
the call on all ranks, or lets it start. The verdict numbers the calls in the order in which rank 0 received their last
description, and all ranks start them in that order. NCCL needs one order on all ranks. Calls with keys, or from several
tasks, have no other order.

    rank 0     <- call of rank 1         -> verdict: number 5, by NCCL      launch number 5
    rank 1     its call ->               <- verdict                         launch number 5

Then NCCL carries out the call, or it is staged: inputs are copied to page-locked memory, a host collective carries out
the same plan there, and outputs are copied back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import msgpack

from aiocoll.completion import Completion
from aiocoll.engine.communicator import Communicator
from aiocoll.engine.operations.base import Operation
from aiocoll.engine.operations.comparison import Difference
from aiocoll.engine.operations.signature import KEYED, Signature
from aiocoll.engine.operations.verify import VerifiedOperation
from aiocoll.errors import GroupError
from aiocoll.gpu.api import LIBRARY, DeviceError
from aiocoll.gpu.calls.call_order import CallOrder
from aiocoll.gpu.calls.device_state import DeviceState
from aiocoll.gpu.calls.enqueued import Enqueued
from aiocoll.gpu.calls.kinds import Kind
from aiocoll.gpu.calls.native import STAGED, Native, Tools, carry_out
from aiocoll.gpu.calls.staged import Staged, put_back
from aiocoll.gpu.launcher import Launched
from aiocoll.group.prepared_call import PlannedCall

__all__ = ["Agreed", "DeviceCall"]


class DeviceCall(PlannedCall):
    """A prepared collective on CUDA arrays.

    Args:
        state: the group's state on the device.
        call: the call, whose arrays are on the device.
        is_checked: whether the caller has just checked that no stream is being captured, and that the device is the
            current device of the thread.

    Attributes:
        state, is_checked: as given.
        kind: shared properties of all calls of its plan.
    """

    __slots__ = ("is_checked", "kind", "state")

    def __init__(self, state: DeviceState, call: PlannedCall, is_checked: bool = False) -> None:
        super().__init__(call.plan, call.arrays, call.shape, call.result, call.limit, call.key, call.unwrap)
        self.state = state
        self.kind = Kind.of(call.plan)
        self.is_checked = is_checked

    @property
    def signature(self) -> Signature:
        """The signature of the call, with device "cuda"."""
        return self.kind.signature

    @property
    def is_on_device(self) -> bool:
        """Return True: this is a collective on CUDA arrays."""
        return True

    def operation(self, comm: Communicator, identity: int, completion: Completion) -> Operation:
        """Create the operation that carries out this prepared call."""
        return Agreed(identity, self, completion)

    def choose_method(self) -> int:
        """Return the method for this call (NCCL or staging); `STAGED` before the group has decided on a backend."""
        return self.kind.choose_method(self.plan, self.state.decision)


class Agreed(VerifiedOperation):
    """The operation of one rank in a collective on CUDA arrays, compared with the other ranks' calls.

    Args:
        call: the call of this rank.
    """

    MARK = "device"
    FINGERPRINT = Signature("AGREED", None, (), None, None, device="cuda").fingerprint()

    __slots__ = (
        "_arrays",
        "_by_nccl",
        "_device_state",
        "_enqueued",
        "_is_checked",
        "_is_confirmed",
        "_is_on_device",
        "_kind",
        "_marks",
        "_order",
        "_plan",
        "_position",
        "_result",
        "_staged",
    )

    def __init__(self, identity: int, call: DeviceCall, completion: Completion) -> None:
        super().__init__(call.state.comm, identity, call.signature, None, completion)
        self._device_state = call.state
        self._kind = call.kind
        self._plan = call.plan
        self._arrays = call.arrays
        self._is_checked = call.is_checked
        self._marks: tuple[int, ...] = ()
        self._staged: Staged | None = None
        #: Whether work of the call has been enqueued on the device.
        self._is_on_device = False
        self._by_nccl = False
        #: Only for a call that is launched before it is compared: the `CallOrder`, the call's position in program
        #: order, whether all ranks have made the call, and the call's result while only that confirmation is missing.
        self._order: CallOrder | None = None
        self._position = 0
        self._is_confirmed = False
        self._result: tuple[Any] | None = None
        self._enqueued = Enqueued(completion, call.arrays)

    # -- the agreement

    def enter(self) -> None:
        """Record CUDA events on the caller's streams, and start to compare the call with the other ranks' calls."""
        try:
            self._marks = self._device_state.mark(self._arrays, is_checked=self._is_checked)
        except (DeviceError, RuntimeError) as error:  # a RuntimeError if a stream capture has begun within a block
            self._device_state.fail_group(error, self)
        else:
            self._device_state.enter(self)
        self._is_checked = False  # check again later: the thread's current device may change

    def request_comparison(self) -> None:
        """Send the description of this call to rank 0, which decides when the call starts."""
        super().enter()

    def is_ordered(self) -> bool:
        """Return whether the call has no key, so that it starts in program order on all ranks."""
        return self.id < KEYED

    def is_native(self) -> bool:
        """Return whether NCCL carries out the call."""
        return self._method() != STAGED

    def is_numbered(self) -> bool:
        """Return whether this call must be compared before it starts, even in a group that launches calls first."""
        return self._kind.is_private or self._method() == STAGED

    # -- in the order of the program

    def join_program_order(self, order: CallOrder, *, ahead: bool) -> None:
        """Add the call to the program order; if `ahead`, launch it in this order before it is compared."""
        if ahead:
            self._agree()
            self._order, self._position = order, order.program.called + 1
        seq = self.completion.seq
        assert seq is not None
        order.program.add(self, self.hash_terms(), seq, is_numbered=not ahead)

    def hash_terms(self) -> bytes:
        """Return a hash of the call's properties that must be equal on all ranks."""
        return self._kind.hash_terms(self.completion.shape)

    def on_confirmed(self) -> None:
        """Record that all ranks have made this call; finish the call if its device work is done."""
        self._is_confirmed = True
        if self._result is not None and not self.done:
            super().ended(*self._result, None)

    def ended(self, result: Any, error: BaseException | None) -> None:
        """Handle the end of the call's device work; a successful call may still wait for the comparison."""
        if error is None and self._order is not None and not self._is_confirmed:
            self._result = (result,)
        else:
            super().ended(result, error)

    def needs(self, peer: int) -> bool:
        """Return whether the call still needs `peer`, which is leaving the group."""
        if self._order is None:
            return super().needs(peer)
        return not self._is_confirmed and self._order.needs(peer, self._position)

    # -- compared by rank 0

    def _encode_call(self) -> bytes:
        """Return the encoded description of this rank's call."""
        completion = self.completion
        # Send the signature of this call, not that of the coalescing block that contains it.
        encoded: bytes = msgpack.packb((self._kind.described(completion.shape), completion.seq, completion.key))
        return encoded

    def carriers(self) -> str:
        """Return the media that carry the data: NCCL, or the media of the links if the call is staged."""
        return LIBRARY if self._by_nccl else super().carriers()

    def is_private(self) -> bool:
        """Return whether array lengths differ per pair of ranks, so that only sender and receiver know them."""
        return self._kind.is_private

    def _conclude(self) -> None:
        """Compare the calls of all ranks on rank 0; on other ranks, follow rank 0's verdict."""
        comm = self.comm
        if self._refusal is not None:
            comm.revoke(GroupError(f"{self.completion.op} was not compared: {self._refusal}", group=comm.name))
        elif comm.rank == 0:
            found = self._device_state.compare_calls(self, [self._incoming[rank] for rank in range(len(comm.ranks))])
            if found is not None:
                self._send(dict.fromkeys(comm.others, msgpack.packb([found])))
                self._refuse(found)
        else:
            verdict = msgpack.unpackb(self._incoming[0])
            if len(verdict) == 1:
                self._refuse(Difference(*verdict[0]))
            else:
                self._device_state.decided(self, *verdict)

    def broadcast_verdict(self, numbers: Mapping[int, int], staged: bool) -> None:
        """Send all ranks the verdict that the call may start, with its launch number; only rank 0 calls this."""
        verdicts = {number: msgpack.packb([number, staged]) for number in set(numbers.values())}
        self._send({rank: verdicts[numbers[rank]] for rank in self.comm.others})
        self._device_state.decided(self, numbers[0], staged)

    # -- carrying it out

    def taken_marks(self) -> tuple[int, ...]:
        """Return, and forget, the CUDA events on the caller's streams for which the call's device work waits."""
        marks, self._marks = self._marks, ()
        return marks

    def agreed(self, marks: tuple[int, ...]) -> None:
        """Skip the comparison: all ranks have agreed on the whole block. The call waits for the events `marks`."""
        self._marks = marks
        self._agree()

    def begin(self, staged: bool) -> None:
        """Start the call, in host memory if `staged`; the caller has started all earlier calls."""
        kind = self._kind
        method = STAGED if staged else self._method()
        if kind.is_empty:
            self.ended(self.completion.value, None)
        elif method == STAGED:
            self._stage()
        else:
            self._launch([Native(kind.enqueue, self._arrays)])

    def fail_on_all_ranks(self, error: Exception) -> None:
        """Fail this call; every rank fails the same call, so that the group stays usable."""
        self.refused()
        self.ended(None, error)

    def is_waiting_for_device(self) -> bool:
        """Return whether the call waits only for this rank's device, because all ranks have made the call."""
        return self._is_on_device and (self._order is None or self._is_confirmed)

    def expire(self) -> None:
        """Handle the expired timeout."""
        if self.is_waiting_for_device():
            self._device_state.fail_hung_device(self, "all ranks have made this call, but ")
        else:
            super().expire()

    def succeed(self, result: Any) -> None:
        """Finish the operation successfully."""
        self._release()
        super().succeed(result)

    def fail(self, error: BaseException) -> None:
        """Finish the operation with `error`."""
        self._release()
        super().fail(error)

    def _launch(self, calls: Sequence[Native], others: Sequence[int] = ()) -> None:
        """Enqueue NCCL calls on the communicator's stream; the streams `others` also wait for the caller's streams."""

        def put(tools: Tools) -> None:
            carry_out(calls, tools)
            for each in calls:
                put_back(each.arrays, tools.stream)

        communicator = self._device_state.communicator
        assert communicator is not None
        self._by_nccl = True
        kind = calls[0].enqueue if len(calls) == 1 else tuple([call.enqueue for call in calls])
        self._mark_enqueued(
            communicator.launch(self._marks, put, calls, self._ended, others, kind, self._is_checked), last=True
        )

    def _stage(self) -> None:
        """Copy the input arrays to the host."""
        state = self._device_state
        self._staged = Staged(state.device, state.stream, self._arrays, self._plan.storage)
        self._mark_enqueued(self._staged.copy_in(self._marks, self._input_output_positions()[0], self._copied))

    def _copied(self, error: DeviceError | None) -> None:
        """Start the host collective on the copied inputs, or fail with the error of the copy."""
        if self._finish_device_work(error):
            assert self._staged is not None
            arrays, plan, comm = self._staged.arrays, self._plan, self.comm

            def make(identity: int, completion: Completion) -> Operation:
                return plan.executor(comm, identity, plan, arrays, completion)

            self._start_child(str(self.id), make, self._copy_outputs)

    def _copy_outputs(self, _: Any, error: BaseException | None) -> None:
        """Copy the results of the host's collective back to the device."""
        if error is not None:
            self.ended(None, error)
            return
        assert self._staged is not None
        self._is_on_device = True
        self._staged.copy_out(
            (), self._input_output_positions()[1], partial(self._mark_enqueued, last=True), self._ended
        )

    def _ended(self, error: DeviceError | None) -> None:
        """Handle the end of the last device work of this call."""
        if self._finish_device_work(error):
            self.ended(self.completion.value, None)

    def _finish_device_work(self, error: DeviceError | None) -> bool:
        """Record that the device has finished its work; return whether the operation is still running."""
        self._is_on_device = False
        return self._device_state.continues(self, error, self._release)

    def _mark_enqueued(self, launched: Launched, last: bool = False) -> None:
        """Record that device work of this call is enqueued; `last` means that no more work follows."""
        self._is_on_device, self._marks = True, ()
        if last:
            self._enqueued.put(launched)

    def _method(self) -> int:
        """Return the method for this call: one of the NCCL methods, or `STAGED`."""
        return self._kind.choose_method(self._plan, self._device_state.decision)

    def _release(self) -> None:
        """Release the device resources of this call."""
        self._enqueued.over()
        self._device_state.unmark(self._marks)
        self._marks = ()
        if not self._is_on_device and self._staged is not None:
            self._staged.release_memory()
            self._staged = None

    def _input_output_positions(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the indices of the inputs and of the outputs in the list of arrays."""
        signature = self._plan.signature
        place = (self.comm.rank, len(self.comm.ranks), signature.root)
        spec = signature.spec
        return spec.inputs(*place), spec.outputs(*place)
