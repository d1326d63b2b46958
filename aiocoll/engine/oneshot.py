"""The executor of small reductions in shared memory: everybody shows what it has, and reduces what all show.

One step: each rank copies its tensor to the board of each peer, and folds the tensors of all, in rank order, from
where they lie. Cost: p-1 copies and one reduction of p inputs per rank; no message, and no memory of its own.

Peers whose board is not to be had, since the link is only being made or the block is in use, get a frame instead.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from aiocoll.buffers import byte_view
from aiocoll.engine.operation import Message, Operation
from aiocoll.engine.plan import Plan
from aiocoll.work import Work

if TYPE_CHECKING:
    from aiocoll.engine.membership import Membership

__all__ = ["OneShot"]


class OneShot(Operation):
    """One rank's part in one allreduce; for what it takes, see `aiocoll.engine.exchange.Exchange`."""

    __slots__ = ("_array", "_framed", "_missing", "_plan", "_result", "_tag", "_unsent")

    def __init__(
        self,
        group: Membership,
        identity: int,
        plan: Plan,
        arrays: list[NDArray[Any]],
        shape: tuple[int, ...],
        result: Any,
        work: Work[Any],
        timeout: float,
    ) -> None:
        super().__init__(group, identity, plan.fingerprint, plan.terms, shape, work, timeout)
        self._plan = plan
        self._array = arrays[0]
        self._result = result
        self._tag = group.id << 32 | plan.fingerprint
        self._missing = group.others.copy()
        # Peers that are still to be shown the tensor, which must not be reduced before.
        self._unsent = set(group.others)
        # What has come in frames, by rank.
        self._framed: dict[int, bytearray] | None = None

    def enter(self) -> None:
        """Show the tensor to everybody."""
        group, array = self.group, self._array
        nbytes = self._plan.nbytes
        for peer in group.others:
            channel = group.channels[peer]
            link = channel.shared
            if link is not None and link is channel.link and link.poster.post(self.id, self._tag, array, nbytes):
                link.announce()
                self._unsent.discard(peer)
            else:
                channel.kick(Message(self, peer, 0, byte_view(array), nbytes))
        self.look()
        if not self.done:
            group.endpoint.polling.lookers[self] = None

    def look(self) -> bool:
        """Find out who is still missing; fold when nobody is. Whether the operation has ended."""
        missing = self._missing
        while missing:
            if not self._is_here(missing[-1]):
                return False
            missing.pop()
        if self._unsent:
            return False
        self._fold()
        return True

    def _is_here(self, peer: int) -> bool:
        group = self.group
        link = group.channels[peer].shared
        tag = -1 if link is None else link.board.look(self.id, self._plan.nbytes)
        if tag == self._tag:
            return True
        if tag >> 32 == group.id:
            group.disputes.disagree(peer, self.id, self.describe())
            return False
        return self._has_framed(peer)

    def _fold(self) -> None:
        plan, group, array = self._plan, self.group, self._array
        kernel = plan.kernel
        assert kernel is not None
        inputs, boards = [], []
        for peer, channel in enumerate(group.channels):
            if peer == group.rank:
                inputs.append(array)
            elif self._has_framed(peer):
                assert self._framed is not None
                inputs.append(np.frombuffer(self._framed[peer], plan.storage))
            else:
                assert channel.shared is not None
                board = channel.shared.board
                boards.append(board)
                inputs.append(board.read(self.id, plan.storage, plan.count, plan.nbytes))
        try:
            kernel.fold(inputs, array)
        except Exception as error:  # of a function of the user's
            group.broke(self, error)
            return
        for board in boards:
            board.free(self.id, plan.nbytes)
        group.endpoint.polling.lookers.pop(self, None)
        self.succeed(self._result)

    def _has_framed(self, peer: int) -> bool:
        return self._framed is not None and len(self._framed.get(peer, b"")) == self._plan.nbytes

    def take(self, peer: int, step: int, total: int, payload: memoryview | None, length: int) -> bool:
        """Keep what comes in frames."""
        if step or total != self._plan.nbytes or payload is None:
            return False
        if self._framed is None:
            self._framed = {}
        self._framed.setdefault(peer, bytearray()).extend(payload)
        self.look()
        return True

    def sent(self, message: Message, nbytes: int) -> None:
        """Bytes have left."""
        if message.moved == message.total and not self.done:
            self._unsent.discard(message.index)
            self.look()

    def needs(self, peer: int) -> bool:
        """Whether the tensor of `peer` is still to come: what is on the board outlives the one who put it there."""
        self.look()
        return not self.done and (peer in self._unsent or (peer in self._missing and not self._is_here(peer)))

    def awaited(self) -> list[int]:
        """Return the ranks whose tensors have not been seen."""
        return sorted(self._missing)

    def fail(self, error: BaseException) -> None:
        """End with `error`."""
        self.group.endpoint.polling.lookers.pop(self, None)
        super().fail(error)
