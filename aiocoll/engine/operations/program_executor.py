"""Executor of plans over links: each sent or received segment starts the actions that depend on it.

Between processes of one host, a message can arrive in a slot if its sender has only small ones (`slot_program`). The
receiver reads a large message in place (`aiocoll.transport.shm.references`). All other messages arrive in frames.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from aiocoll.algorithms.program import ActionKind, Region
from aiocoll.completion import Completion
from aiocoll.elements.buffers import byte_view
from aiocoll.engine.operations.base import Message, Operation
from aiocoll.engine.operations.plan import Plan
from aiocoll.errors import ProtocolError
from aiocoll.runtime import BUDGET
from aiocoll.transport.frame import SEGMENT

if TYPE_CHECKING:
    from aiocoll.engine.communicator import Communicator

__all__ = ["ProgramExecutor"]

#: Minimum number of elements per call of a reduction kernel, so that the call overhead stays below the arithmetic.
FOLD_FLOOR = 2048

#: Number of bytes per copy. It may exceed the cache, because a copy reads each byte only once.
COPIED = 4 * SEGMENT

# Plain values, because looking up an enum member takes longer than the comparison.
_SEND, _RECV, _COMBINE, _COPY, _SCALE = (
    ActionKind.SEND,
    ActionKind.RECV,
    ActionKind.COMBINE,
    ActionKind.COPY,
    ActionKind.SCALE,
)
_EMPTY = memoryview(b"")
# Value in `_waits` that marks a complete action. A number of bytes cannot mark it, because a message may be empty.
_COMPLETE = -1

Array = NDArray[Any]


class ProgramExecutor(Operation):
    """The operation of one rank in one collective that runs a plan over links.

    Args:
        arrays: the caller's flat arrays, numbered like the program's buffers; None where this rank has none.
    """

    __slots__ = (
        "_arrays",
        "_early",
        "_from_slots",
        "_local",
        "_messages",
        "_moved",
        "_plan",
        "_remaining",
        "_views",
        "_waits",
        "_working",
    )

    def __init__(
        self,
        comm: Communicator,
        identity: int,
        plan: Plan,
        arrays: list[Array | None],
        completion: Completion,
    ) -> None:
        # Called by class name, because `super()` takes 70 ns more, 3 % of a small call (Python 3.11).
        Operation.__init__(self, comm, identity, plan.signature, plan.fingerprint, completion)
        self._plan = plan
        if plan.scratch:
            scratch = comm.scratch
            arrays += [scratch.take(count, plan.storage) for count in plan.scratch]
        self._arrays = arrays
        self._views: list[memoryview | None] = [None] * len(arrays)
        self._waits = list(plan.after)
        self._moved = [0] * len(plan.verbs)
        self._remaining = len(plan.verbs)
        # These containers are created on first use, because most operations are small and defer nothing. Early segments
        # are stored with their end position in the message.
        self._messages: dict[int, Message] | None = None
        self._early: dict[int, list[tuple[int, bytes]]] | None = None
        self._local: deque[int] | None = None
        self._working = False
        # Receiving actions whose message may arrive in a slot, and has not arrived yet.
        self._from_slots = list(plan.from_slots) if plan.from_slots else None

    @property
    def reduces(self) -> bool:
        """Return whether the plan has a reduce op."""
        return self._plan.kernel is not None

    @property
    def single_copy_from(self) -> float:
        """The minimum size in bytes from which the peer reads a message directly in this process's memory."""
        sizes, limit = self.comm.tuning.single_copy, self._plan.single_copy_from
        if limit is not None:
            return limit
        return sizes.reduced if self.reduces else sizes.moved

    def enter(self) -> None:
        """Start every action that depends on no other action."""
        plan = self._plan
        for peer in plan.grants:
            self.promise(peer)
        for index in plan.start:
            self._start(index)
        if not self._remaining and not self.done:
            self._complete()
        if self._from_slots is not None and not self.done and not self.look():
            self.comm.polling.readers[self] = None

    def look(self) -> bool:
        """Read messages that peers have posted to slots; return whether the operation has ended."""
        for index in tuple(self._from_slots or ()):
            if self.done:
                break
            if self._has_all_bytes(index) or self._take_from_slot(index):
                assert self._from_slots is not None
                self._from_slots.remove(index)
        if self.done:
            self.comm.polling.readers.pop(self, None)
        return self.done

    def _take_from_slot(self, index: int) -> bool:
        action = self._plan.program[index]
        found: bool = self.comm.slots.deliver(self, action.peer, action.step, self._plan.totals[index])
        return found

    def _complete(self) -> None:
        """Finish the operation after its last action."""
        if self._plan.scratch:
            self._give_back_scratch()
        self.succeed(self.completion.value)

    def _give_back_scratch(self) -> None:
        """Return the scratch memory to the pool, unless the operation has failed: a link may still send from it."""
        for _ in self._plan.scratch:  # the scratch arrays are at the end of the list
            array = self._arrays.pop()
            assert array is not None
            self.comm.scratch.give(array)

    def algorithm(self) -> str:
        """Return the algorithm of the plan."""
        return self._plan.algorithm

    def needs(self, peer: int) -> bool:
        """Return whether a message to or from `peer` is incomplete.

        Messages that `peer` has posted stay readable after it has left.
        """
        if self._from_slots is not None and self.look():
            return False
        return any(
            action.peer == peer and not self._has_all_bytes(index) for index, action in enumerate(self._plan.program)
        )

    def awaited_ranks(self) -> list[int]:
        """Return the ranks whose data has not arrived, and those that have not accepted data of this rank."""
        missing = set()
        for index, action in enumerate(self._plan.program):
            if action.verb is _SEND:
                follow = self._plan.follow[index]
                limit = min([self._moved[i] for i in follow]) if follow else self._plan.totals[index]
                waits = not self._waits[index] and self._moved[index] < limit
            else:
                waits = action.verb is _RECV and not self._has_all_bytes(index)
            if waits:
                missing.add(action.peer)
        return sorted(missing)

    def fail(self, error: BaseException) -> None:
        """Finish the operation with `error`."""
        if self._from_slots is not None:
            self.comm.polling.readers.pop(self, None)
        Operation.fail(self, error)

    def _has_all_bytes(self, index: int) -> bool:
        """Return whether all bytes of a message have been sent or received, even if not all are processed."""
        if self._waits[index] == _COMPLETE:
            return True
        early = None if self._early is None else self._early.get(index)
        return early is not None and bool(early) and early[-1][0] == self._plan.totals[index]

    # -- receiving

    def route(self, peer: int, step: int, offset: int, total: int, length: int) -> memoryview | None:
        """Return the caller's memory for a payload that needs no reduction."""
        plan = self._plan
        index = plan.inbound.get(peer << 16 | step)
        if index is None or plan.verbs[index] is not _RECV or self._waits[index]:
            return None
        region = plan.program[index].region
        moved = self._moved[index]
        expected = plan.totals[index]
        if total != expected & 0xFFFFFFFF or offset != moved & 0xFFFFFFFF or moved + length > expected:
            return None
        start = region.start * plan.itemsize + moved
        return self._view(region.buffer)[start : start + length]

    def deliver(self, peer: int, step: int, total: int, payload: memoryview | None, length: int) -> bool:
        """Process a segment: copy it, reduce it, or store it until the action that uses it has started."""
        plan = self._plan
        index = plan.inbound.get(peer << 16 | step)
        if index is None or plan.totals[index] & 0xFFFFFFFF != total:
            return False
        if self._moved[index] + length > plan.totals[index]:
            raise ProtocolError(f"rank {peer} sent more than the {total} bytes of its message")
        if not length and (total or self._has_all_bytes(index)):
            raise ProtocolError(f"rank {peer} sent an empty frame for a message of {total} bytes, or a message twice")
        if payload is not None:
            if self._waits[index]:
                self._store_early(peer, index, payload, length)
                return True
            if length:
                self._process_payload(index, payload, length)
        self._progress(index, length)
        if self._local:
            self.advance()
        return True

    def _store_early(self, peer: int, index: int, payload: memoryview, length: int) -> None:
        if self._early is None:
            self._early = {}
        early = self._early.setdefault(index, [])
        end, total = length + (early[-1][0] if early else 0), self._plan.totals[index]
        if end > total:
            raise ProtocolError(f"rank {peer} sent more than the {total} bytes of its message")
        early.append((end, bytes(payload)))

    def _process_payload(self, index: int, payload: memoryview | bytes, length: int) -> None:
        plan = self._plan
        action = plan.program[index]
        first = self._moved[index] // plan.itemsize
        count = length // plan.itemsize
        place = self._slice(action.region, first, count)
        incoming = np.frombuffer(payload, plan.storage)  # raises an error if the payload ends within an element
        if action.verb is _RECV:
            place[:] = incoming
            return
        kernel = plan.kernel
        assert kernel is not None
        own = self._slice(plan.sources[index][0], first, count)
        # If both inputs are NaN, NumPy's in-place code path for a single element returns the other NaN. So write a
        # single element to a temporary array.
        out = place if count > 1 else np.empty_like(place)
        try:
            if action.incoming_first:
                kernel.combine(incoming, own, out)
            else:
                kernel.combine(own, incoming, out)
            if action.final and kernel.finalize is not None:
                kernel.finalize(out)
        except Exception as error:  # a user's reduce function may raise any exception
            self.comm.revoke_after_error(self, error, "its reduce function raised ")
        if out is not place:
            place[:] = out

    # -- the graph

    def _start(self, index: int) -> None:
        plan = self._plan
        verb = plan.verbs[index]
        if verb is _SEND:
            self._start_send(index)
        elif verb is _RECV or verb is _COMBINE:
            if self._early is not None:
                for _, payload in self._early.pop(index, ()):
                    self._process_payload(index, payload, len(payload))
                    self._progress(index, len(payload))
        else:
            self._queue(index)
            self.advance()

    def _start_send(self, index: int) -> None:
        plan = self._plan
        action = plan.program[index]
        region = action.region
        start, total = region.start * plan.itemsize, plan.totals[index]
        view = self._view(region.buffer)[start : start + total] if total else _EMPTY
        channel = self.comm.channels[action.peer]
        follow = plan.follow[index]
        if not follow and (left := channel.pass_on(self, index, action.step, view, total)) is not None:
            if left:
                self._progress(index, total)
            return
        limit = min([self._moved[i] for i in follow]) if follow else total
        message = Message(self, index, action.step, view, limit)
        if follow:
            if self._messages is None:
                self._messages = {}
            self._messages[index] = message
        if limit or not total:
            channel.enqueue(message)

    def sent(self, message: Message, nbytes: int) -> None:
        """Record that `nbytes` more bytes of `message` have been sent."""
        if not self.done:
            self._progress(message.index, nbytes)
            if self._local:
                self.advance()

    def _progress(self, index: int, nbytes: int) -> None:
        if self.done:
            return  # the operation has failed: run no further action
        plan = self._plan
        self._moved[index] = moved = self._moved[index] + nbytes
        for follower in plan.followers[index]:
            if not self._waits[follower]:
                self._follow(follower)
        if moved == plan.totals[index]:
            self._waits[index] = _COMPLETE
            self._remaining -= 1
            if self._messages is not None:
                self._messages.pop(index, None)  # break the reference cycle between message and operation
            for dependent in plan.dependents[index]:
                self._waits[dependent] -= 1
                if not self._waits[dependent]:
                    self._start(dependent)
            if not self._remaining and not self.done:
                self._complete()

    def _follow(self, index: int) -> None:
        plan = self._plan
        if plan.verbs[index] is not _SEND:
            self._queue(index)
        elif self._messages is not None and (message := self._messages.get(index)) is not None:
            message.limit = min([self._moved[i] for i in plan.follow[index]])
            if message.limit > message.moved:
                self.comm.channels[plan.program[index].peer].enqueue(message)

    # -- local work

    def advance(self) -> None:
        """Reduce and copy in chunks. When the time of this callback is used up, continue in the next loop iteration."""
        local = self._local
        if not local or self._working:
            return
        self._working = True
        ticks = self.comm.runtime.ticks
        deadline = ticks() + BUDGET
        while local and not self.done:
            index = local.popleft()
            if self._run_chunk(index):
                local.appendleft(index)
            if local and ticks() > deadline:
                self.schedule_advance()
                break
        self._working = False

    def _queue(self, index: int) -> None:
        if self._local is None:
            self._local = deque()
        if index not in self._local:
            self._local.append(index)

    def _run_chunk(self, index: int) -> bool:
        """Process the next chunk of a local copy or reduction; return whether another chunk is ready now."""
        plan = self._plan
        action = plan.program[index]
        total, moved = plan.totals[index], self._moved[index]
        follow = plan.follow[index]
        limit = min([self._moved[i] for i in follow]) if follow else total
        itemsize, sources = plan.itemsize, action.sources
        most = COPIED if action.verb is _COPY else SEGMENT // len(sources)
        count = min((limit - moved) // itemsize, max(most // itemsize, FOLD_FLOOR))
        if not count and total:
            return False
        first = moved // itemsize
        inputs = [self._slice(source, first, count) for source in sources]
        self._compute(action.verb, inputs, self._slice(action.region, first, count))
        nbytes = count * itemsize
        self._progress(index, nbytes)
        return moved + nbytes < limit

    def _compute(self, verb: ActionKind, inputs: list[Array], place: Array) -> None:
        kernel = self._plan.kernel
        if verb is _COPY:
            place[:] = inputs[0]
            return
        assert kernel is not None
        try:
            if verb is _SCALE:
                assert kernel.prescale is not None
                kernel.prescale(inputs[0], place)
            else:
                kernel.fold(inputs, place)
        except Exception as error:  # a user's reduce function may raise any exception
            self.comm.revoke_after_error(self, error, "its reduce function raised ")

    # -- memory

    def _slice(self, region: Region, first: int, count: int) -> Array:
        array = self._arrays[region.buffer]
        assert array is not None
        start = region.start + first
        return array[start : start + count]

    def _view(self, buffer: int) -> memoryview:
        view = self._views[buffer]
        if view is None:
            array = self._arrays[buffer]
            assert array is not None
            view = self._views[buffer] = byte_view(array)
        return view
