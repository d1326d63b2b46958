"""The executor of a plan over links: a dataflow machine driven by arriving frames and leaving bytes."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from aiocoll.algorithms.schedule import Region, Verb
from aiocoll.buffers import byte_view
from aiocoll.engine.operation import Message, Operation
from aiocoll.engine.plan import Plan
from aiocoll.transport.frame import SEGMENT
from aiocoll.work import Work

if TYPE_CHECKING:
    from aiocoll.engine.membership import Membership

__all__ = ["Exchange"]

#: Longest time one callback reduces, in seconds (contract: 300 microseconds).
BUDGET = 300e-6
#: Fewest elements folded in one go, so that the calls do not cost more than the sums.
FOLD_FLOOR = 2048

Array = NDArray[Any]


class Exchange(Operation):
    """One rank's part in one collective.

    Args:
        arrays: the caller's flat arrays, numbered as the program's buffers; None where this rank has none.
        shape: shape of the caller's main array, for messages.
        result: what the work yields.
    """

    __slots__ = (
        "_again",
        "_arrays",
        "_channels",
        "_early",
        "_local",
        "_messages",
        "_moved",
        "_plan",
        "_remaining",
        "_result",
        "_shape",
        "_views",
        "_waits",
        "_working",
    )

    def __init__(
        self,
        group: Membership,
        identity: int,
        plan: Plan,
        arrays: list[Array | None],
        shape: tuple[int, ...],
        result: Any,
        work: Work[Any],
        timeout: float,
    ) -> None:
        super().__init__(group, identity, plan.fingerprint, work, timeout)
        self._plan = plan
        self._shape = shape
        self._result = result
        if plan.scratch:
            arrays += [np.empty(count, plan.storage) for count in plan.scratch]
        self._arrays = arrays
        self._views: list[memoryview | None] = [None] * len(arrays)
        self._waits = list(plan.after)
        self._moved = [0] * len(plan.verbs)
        self._remaining = len(plan.verbs)
        self._channels = group.channels
        self._messages: dict[int, Message] = {}
        self._early: dict[int, list[tuple[int, bytes]]] = {}
        self._local: deque[int] = deque()
        self._working = False
        self._again = False

    def enter(self) -> None:
        """Start every action that waits for nothing."""
        plan = self._plan
        for peer in plan.grants:
            self.promise(peer)
        for index in plan.start:
            self._start(index)
        if not self._remaining:
            self.succeed(self._result)

    def describe(self) -> dict[str, Any]:
        """Say what this rank called."""
        return self.group.description(self.id, self._plan.terms, self._shape)

    def needs(self, peer: int) -> bool:
        """Whether something to or from `peer` is missing."""
        plan = self._plan
        return any(
            action.peer == peer and (self._moved[index] < plan.totals[index] or not plan.totals[index])
            for index, action in enumerate(plan.program)
        )

    # -- arriving

    def place(self, peer: int, step: int, offset: int, total: int, length: int) -> memoryview | None:
        """Name the caller's memory for a payload that only has to be put there."""
        plan = self._plan
        index = plan.inbound.get(peer << 16 | step)
        if index is None or plan.verbs[index] is not Verb.RECV or self._waits[index]:
            return None
        region = plan.program[index].region
        moved = self._moved[index]
        if offset != moved & 0xFFFFFFFF or moved + length > plan.totals[index]:
            return None
        start = region.start * plan.itemsize + moved
        return self._view(region.buffer)[start : start + length]

    def take(self, peer: int, step: int, total: int, payload: memoryview | None, length: int) -> bool:
        """Take a segment: put it, reduce it, or keep it until it may be."""
        plan = self._plan
        index = plan.inbound.get(peer << 16 | step)
        if index is None or plan.totals[index] & 0xFFFFFFFF != total:
            return False
        if payload is not None and self._waits[index]:
            self._early.setdefault(index, []).append((length, bytes(payload)))
            return True
        if payload is not None and length:
            self._put(index, payload, length)
        self._progress(index, length)
        self.advance()
        return True

    def _put(self, index: int, payload: memoryview | bytes, length: int) -> None:
        plan = self._plan
        action = plan.program[index]
        first = self._moved[index] // plan.itemsize
        count = length // plan.itemsize
        place = self._slice(action.region, first, count)
        incoming = np.frombuffer(payload, plan.storage, count)
        if action.verb is Verb.RECV:
            place[:] = incoming
            return
        kernel = plan.kernel
        assert kernel is not None
        own = self._slice(plan.sources[index][0], first, count)
        with np.errstate(all="ignore"):
            if action.incoming_first:
                kernel.combine(incoming, own, place)
            else:
                kernel.combine(own, incoming, place)
            if action.final and kernel.finalize is not None:
                kernel.finalize(place)

    # -- the graph

    def _start(self, index: int) -> None:
        plan = self._plan
        verb = plan.verbs[index]
        if verb is Verb.SEND:
            action = plan.program[index]
            region = action.region
            start, total = region.start * plan.itemsize, plan.totals[index]
            view = self._view(region.buffer)[start : start + total] if total else _NOTHING
            follow = plan.follow[index]
            limit = min([self._moved[i] for i in follow]) if follow else total
            message = Message(self, index, action.step, view, limit)
            if follow:
                self._messages[index] = message
            if limit or not total:
                self._channels[action.peer].send(message)
        elif verb is Verb.RECV or verb is Verb.COMBINE:
            for length, payload in self._early.pop(index, ()):
                self._put(index, payload, length)
                self._progress(index, length)
        else:
            if index not in self._local:
                self._local.append(index)
            self.advance()

    def sent(self, message: Message, nbytes: int) -> None:
        """Bytes have left."""
        if not self.done:
            self._progress(message.index, nbytes)
            self.advance()

    def _progress(self, index: int, nbytes: int) -> None:
        plan = self._plan
        self._moved[index] = moved = self._moved[index] + nbytes
        for follower in plan.followers[index]:
            if not self._waits[follower]:
                self._follow(follower)
        if moved == plan.totals[index]:
            self._remaining -= 1
            for dependent in plan.dependents[index]:
                self._waits[dependent] -= 1
                if not self._waits[dependent]:
                    self._start(dependent)
            if not self._remaining and not self.done:
                self.succeed(self._result)

    def _follow(self, index: int) -> None:
        plan = self._plan
        if plan.verbs[index] is Verb.SEND:
            message = self._messages.get(index)
            if message is None:
                return  # not started yet: it will look itself
            message.limit = min([self._moved[i] for i in plan.follow[index]])
            channel = self._channels[plan.program[index].peer]
            if message.moved:
                channel.kick(message)
            elif message.limit:
                channel.send(message)
        elif index not in self._local:
            self._local.append(index)

    # -- local work

    def advance(self) -> None:
        """Fold and copy in pieces; what does not fit into this callback's time goes on in the next turn."""
        if not self._local or self._working:
            return
        self._working = True
        ticks = self.group.endpoint.runtime.ticks
        deadline = ticks() + BUDGET
        while self._local and not self.done:
            index = self._local[0]
            if not self._piece(index) and self._local and self._local[0] == index:
                self._local.popleft()
            if self._local and ticks() > deadline:
                self._later()
                break
        self._working = False

    def _piece(self, index: int) -> bool:
        """Do the next piece of a local action; True if there is more to do now."""
        plan = self._plan
        action = plan.program[index]
        total, moved = plan.totals[index], self._moved[index]
        follow = plan.follow[index]
        limit = min([self._moved[i] for i in follow]) if follow else total
        itemsize, sources = plan.itemsize, action.sources
        count = min((limit - moved) // itemsize, max(SEGMENT // itemsize // len(sources), FOLD_FLOOR))
        if count or not total:
            first = moved // itemsize
            place = self._slice(action.region, first, count)
            inputs = [self._slice(source, first, count) for source in sources]
            self._compute(action.verb, inputs, place)
            moved += count * itemsize
            if moved == total:
                self._local.popleft()
            self._progress(index, count * itemsize)
        return moved < min(limit, total)

    def _compute(self, verb: Verb, inputs: list[Array], place: Array) -> None:
        kernel = self._plan.kernel
        if verb is Verb.COPY:
            place[:] = inputs[0]
            return
        assert kernel is not None
        with np.errstate(all="ignore"):
            if verb is Verb.SCALE:
                assert kernel.prescale is not None
                kernel.prescale(inputs[0], place)
            else:
                kernel.fold(inputs, place)

    def _later(self) -> None:
        if not self._again:
            self._again = True
            self.group.endpoint.runtime.call_soon(self._resume)

    def _resume(self) -> None:
        self._again = False
        if not self.done:
            self.advance()

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


_NOTHING = memoryview(b"")
