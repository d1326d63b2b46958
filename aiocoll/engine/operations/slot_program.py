"""Executor of small collectives in shared memory: ranks post contributions to slots, and peers read them in place.

It carries out any program of one round (`round`). Each rank posts its data, reads at most one contribution per peer,
folds or copies them, and may post the result (`central`). If a program receives a contribution into scratch memory,
this executor folds it directly from its slot. Cost: one copy in, however many ranks read it, and one reduction or copy
out, without messages or temporary memory. If rank 0 posts the result to all ranks, the program is a centralized
barrier with data (Mellor-Crummey and Scott, Algorithms for scalable synchronization on shared-memory multiprocessors,
1991).

If the slot of a peer is not available, because the link is being opened or the slot is in use, the peer receives a
frame instead.
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
    """The operation of one rank in a small collective in shared memory.

    The arguments are those of `ProgramExecutor`.
    """

    __slots__ = ("_arrays", "_framed", "_has_folded", "_inputs", "_missing", "_plan", "_round", "_seen", "_unsent")

    def __init__(
        self,
        comm: Communicator,
        identity: int,
        plan: Plan,
        arrays: list[NDArray[Any]],
        completion: Completion,
    ) -> None:
        # hot path: called by the class name, because `super()` takes 70 ns more.
        Operation.__init__(self, comm, identity, plan.signature, plan.fingerprint, completion)
        assert plan.round is not None
        self._plan = plan
        self._round: Round = plan.round
        self._arrays = arrays
        # The contributions that have arrived, in order: views of slots, and placeholders for contributions in frames.
        # `_missing` is the rank whose contribution was awaited last.
        self._inputs: list[NDArray[Any]] = []
        self._missing = -1
        # Slots to free when the contributions have been reduced or copied.
        self._seen: list[tuple[SlotReader, int]] = []
        self._has_folded = False
        # Ranks to which a contribution in a frame has not been sent completely.
        self._unsent: Collection[int] = ()
        # Contributions that arrived in frames, by rank.
        self._framed: dict[int, memoryview | bytes | bytearray] | None = None

    def enter(self) -> None:
        """Post this rank's contributions to slots in shared memory."""
        if self._round.first:
            self._post(self._round.first)
        if not self.done and not self.look():
            self.comm.polling.readers[self] = None

    def adopt(self, missing: int, has_posted: bool) -> None:
        """Continue an operation that the C accelerator has begun; called instead of `enter`.

        Args:
            missing: the rank that the operation last waited for.
            has_posted: True if the accelerator has posted this rank's contributions. It has not folded any.
        """
        self._missing = missing
        self.comm.in_flight.adopt(self)
        if self.timeout != self.comm.default_timeout:
            self.comm.endpoint.watch.entered(self.comm, self)
        self.comm.polling.readers[self] = None
        if not has_posted:
            # Post in the next loop iteration: posting now could end the operation while the caller iterates over the
            # operations in flight.
            self._unsent = {rank for each in self._round.first for rank in each.readers}
            self.comm.call_soon(self._post_late)
        else:
            # Look in the next loop iteration, even without a notification: the C accelerator may already have consumed
            # the notification of available data.
            self.comm.call_soon(self.look)

    def _post_late(self) -> None:
        """Post the contributions of a call that the C accelerator has begun without posting them."""
        if not self.done:
            self._unsent = ()
            self._post(self._round.first)
            self.look()

    def _post(self, contributions: Sequence[Contribution]) -> None:
        left = self.comm.slots.post(self.id, self.fingerprint, contributions, self._arrays)
        if left is None:
            return
        # Set before sending, because a frame that leaves immediately calls `sent`.
        self._unsent = {peer for peer, _ in left}
        for peer, array in left:
            view = byte_view(array)
            self.comm.channels[peer].enqueue(Message(self, peer, 0, view, view.nbytes))

    def look(self) -> bool:
        """Look for missing contributions, and reduce all when none is missing. Return whether the operation ended."""
        if self.done:
            return True  # another operation that was run before has failed this one
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
            # Copy only now, because a failed call must leave its output arrays unchanged.
            for target, source in step.copies:
                self._arrays[target][...] = self._arrays[source]
            if (count or step.fold is not None) and not self._fold():
                return True
            if step.last:
                self._post(step.last)
                if self._unsent or self.done:  # if a frame has left immediately, `sent` has ended the operation
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
        """Reduce or copy all contributions from their slots, free the slots, and return whether that succeeded."""
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
            except Exception as error:  # a user's reduce function may raise any exception
                self.comm.revoke_after_error(self, error, "its reduce function raised ")
                return False
        self.comm.slots.free(self._seen)
        return True

    def deliver(self, peer: int, step: int, total: int, payload: memoryview | None, length: int) -> bool:
        """Store a contribution that arrives in frames."""
        take = next((take for take in self._round.takes if take.peer == peer), None)
        if step or take is None or total != take.nbytes or payload is None:
            return False
        if self._framed is None:
            self._framed = {}
        self.comm.slots.reclaim(take, self.id)  # unread data in the slot may have forced the peer to use a frame
        framed = self._framed.get(peer)
        if framed is None and length == total:
            # If this is the last missing contribution, use the payload without a copy.
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
        """Record that `nbytes` more bytes of `message` have been sent."""
        if message.moved == message.total and not self.done:
            self._unsent = [peer for peer in self._unsent if peer != message.index]
            self.look()

    def algorithm(self) -> str:
        """Return the algorithm of the plan."""
        return self._plan.algorithm

    def needs(self, peer: int) -> bool:
        """Return whether a message to or from `peer` is incomplete.

        Messages that `peer` has posted stay readable after it has left.
        """
        self.look()
        return not self.done and (peer in self._unsent or peer in self.awaited_ranks())

    def awaited_ranks(self) -> list[int]:
        """Return the ranks whose contributions have not arrived."""
        slots, identity, fingerprint = self.comm.slots, self.id, self.fingerprint
        return sorted(
            take.peer
            for take in self._round.takes[len(self._inputs) :]
            if not self._has_framed(take) and not slots.look(take, identity, fingerprint)
        )

    def fail(self, error: BaseException) -> None:
        """Finish the operation with `error`."""
        self.comm.polling.readers.pop(self, None)
        # Drop the inputs: they keep peers' memory mapped, and the error may keep this operation alive.
        self._inputs = []
        super().fail(error)
