"""The executor of small collectives in shared memory: contributions are posted to slots and read where they lie.

It carries out any program of one round (`round`): each rank posts what it has, reads at most one contribution of each
peer, folds or copies them, and may post the result (`central`). A contribution that the program would receive into
scratch is folded from its slot. Cost: one copy in, however many ranks read it, one reduction or copy out; no messages
and no temporary memory. With a result that rank 0 posts to all it is the centralized barrier of Mellor-Crummey and
Scott (Algorithms for scalable synchronization on shared-memory multiprocessors, 1991), with data.

Peers whose slot is not available, since the link is still being opened or the slot is in use, get a frame instead.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from aiocoll.completion import Completion
from aiocoll.elements.buffers import byte_view
from aiocoll.engine.operations.base import Message, Operation
from aiocoll.engine.operations.plan import Plan
from aiocoll.engine.operations.round import Contribution, Round, Take
from aiocoll.engine.operations.slots import EMPTY
from aiocoll.errors import ProtocolError

if TYPE_CHECKING:
    from aiocoll.engine.communicator import Communicator
    from aiocoll.transport.base import SlotReader

__all__ = ["SlotProgram"]


class SlotProgram(Operation):
    """One rank's part in one collective; arguments as for `ProgramExecutor`."""

    __slots__ = ("_arrays", "_framed", "_has_folded", "_inputs", "_missing", "_plan", "_round", "_seen", "_unsent")

    def __init__(
        self,
        comm: Communicator,
        identity: int,
        plan: Plan,
        arrays: list[NDArray[Any]],
        completion: Completion,
    ) -> None:
        # Not through super(), which costs 70 ns more.
        Operation.__init__(self, comm, identity, plan.signature, plan.fingerprint, completion)
        assert plan.round is not None
        self._plan = plan
        self._round: Round = plan.round
        self._arrays = arrays
        # Contributions that are here, in their order: those in slots where they lie; whatever stands for those that
        # came in frames. And the peer of the one that was missing last.
        self._inputs: list[NDArray[Any]] = []
        self._missing = -1
        # Slots that are to be freed.
        self._seen: list[tuple[SlotReader, int]] = []
        self._has_folded = False
        # Peers to which a frame is not sent completely.
        self._unsent: Collection[int] = ()
        # Contributions received in frames, by rank.
        self._framed: dict[int, memoryview | bytes | bytearray] | None = None

    def enter(self) -> None:
        """Post what this rank has."""
        if self._round.first:
            self._post(self._round.first)
        if not self.done and not self.look():
            self.comm.polling.readers[self] = None

    def adopt(self, missing: int, has_posted: bool) -> None:
        """Be in flight, in place of `enter`: this rank has not folded, and last missed the rank `missing`."""
        self._missing = missing
        self.comm.in_flight.adopt(self)
        if self.timeout != self.comm.default_timeout:
            self.comm.endpoint.watch.entered(self.comm, self)
        self.comm.polling.readers[self] = None
        if not has_posted:
            # Not at once: it may end then, and the caller looks for what is in flight.
            self._unsent = {rank for each in self._round.first for rank in each.readers}
            self.comm.call_soon(self._post_late)
        else:
            # The news of what is there may have been taken.
            self.comm.call_soon(self.look)

    def _post_late(self) -> None:
        """Post what a call that was taken over had not posted."""
        if not self.done:
            self._unsent = ()
            self._post(self._round.first)
            self.look()

    def _post(self, contributions: Sequence[Contribution]) -> None:
        left = self.comm.slots.post(self.id, self.fingerprint, contributions, self._arrays)
        if left is None:
            return
        # Known first: a frame that leaves at once calls `sent`.
        self._unsent = {peer for peer, _ in left}
        for peer, array in left:
            view = byte_view(array)
            self.comm.channels[peer].kick(Message(self, peer, 0, view, view.nbytes))

    def look(self) -> bool:
        """Look for missing contributions; fold when none is missing. Return whether the operation has ended."""
        if self.done:
            return True  # it failed together with an operation that was looked at before
        step, inputs = self._round, self._inputs
        count = len(step.takes)
        while len(inputs) < count:
            differs = self.comm.slots.look_at(step, self.id, self.fingerprint, self._plan.storage, inputs, self._seen)
            if len(inputs) == count:
                break
            take = step.takes[len(inputs)]
            if differs:
                self.comm.mismatches.disagree(take.peer, self.id, self.describe())
            if differs or not self._has_framed(take):
                self._missing = take.peer
                return self.done
            inputs.append(EMPTY)
        if self._unsent:
            return False
        if not self._has_folded:
            self._has_folded = True
            # Only now: what a call that fails has written nobody could take back.
            for target, source in step.copies:
                self._arrays[target][...] = self._arrays[source]
            if (count or step.fold is not None) and not self._fold():
                return True
            if step.last:
                self._post(step.last)
                if self._unsent or self.done:  # a frame that left at once has brought this to its end
                    return self.done
        self.comm.polling.readers.pop(self, None)
        if self._missing >= 0:
            self.set_waited_for(self._missing)
        self.succeed(self.completion.value)
        return True

    def _has_framed(self, take: Take) -> bool:
        framed = None if self._framed is None else self._framed.get(take.peer)
        return framed is not None and len(framed) == take.nbytes

    def _fold(self) -> bool:
        """Use all contributions where they lie, and free their slots; return whether that went well."""
        step, arrays, inputs, framed = self._round, self._arrays, self._inputs, self._framed
        if framed is not None:
            inputs = [
                np.frombuffer(framed[take.peer], self._plan.storage) if take.peer in framed else given
                for take, given in zip(step.takes, inputs, strict=True)
            ]
        for number, target in step.moves:
            arrays[target][...] = inputs[number]
        if step.fold is not None:
            kernel = self._plan.kernel
            assert kernel is not None
            for number, source in step.own:
                inputs.insert(number, arrays[source])
            try:
                kernel.fold(inputs, arrays[step.fold])
            except Exception as error:  # of a function of the user's
                self.comm.broke(self, error, "its reduce function raised ")
                return False
        self.comm.slots.free(self._seen)
        return True

    def deliver(self, peer: int, step: int, total: int, payload: memoryview | None, length: int) -> bool:
        """Store a contribution that comes in frames."""
        take = next((take for take in self._round.takes if take.peer == peer), None)
        if step or take is None or total != take.nbytes or payload is None:
            return False
        if self._framed is None:
            self._framed = {}
        self.comm.slots.reclaim(take, self.id)  # its unread content may have been the reason for the frame
        framed = self._framed.get(peer)
        if framed is None and length == total:
            # If nothing else is missing, it is used where it lies.
            self._framed[peer] = payload
            if not self.look():
                self._framed[peer] = bytes(payload)
            return True
        if framed is None:
            framed = self._framed[peer] = bytearray()
        if not isinstance(framed, bytearray) or len(framed) + length > total:
            raise ProtocolError(f"rank {peer} sent more than the {total} bytes of its message")
        framed.extend(payload)
        self.look()
        return True

    def sent(self, message: Message, nbytes: int) -> None:
        """Bytes have been sent."""
        if message.moved == message.total and not self.done:
            self._unsent = [peer for peer in self._unsent if peer != message.index]
            self.look()

    def algorithm(self) -> str:
        """Return the algorithm of the plan."""
        return self._plan.algorithm

    def needs(self, peer: int) -> bool:
        """Whether something to or from `peer` is missing: what it has posted stays readable after it has left."""
        self.look()
        return not self.done and (peer in self._unsent or peer in self.awaited())

    def awaited(self) -> list[int]:
        """Return the ranks whose contributions have not been seen."""
        slots, identity, fingerprint = self.comm.slots, self.id, self.fingerprint
        return sorted(
            take.peer
            for take in self._round.takes[len(self._inputs) :]
            if not self._has_framed(take) and not slots.look(take, identity, fingerprint)
        )

    def fail(self, error: BaseException) -> None:
        """End with `error`."""
        self.comm.polling.readers.pop(self, None)
        # They keep the memory of peers, and the error may keep this operation.
        self._inputs = []
        super().fail(error)
