"""Messages between devices by NCCL, in which a send blocks its stream until the message is received.

So a message starts only after both ends have made their calls. NCCL carries only messages that wait for their receiver
anyway: those of more than `EAGER_WINDOW`. The host matches them like all messages, by source, tag and order:

    rank 1  send     READY, with the offer to send from device to device ->
    rank 2  receive                                         matched: reports to rank 0 ->
    rank 0           numbers it on both ends, in one order with collectives (`aiocoll.gpu.calls.matching`)
    ranks 1 and 2    start it when it is that number's turn

A receiver that cannot use NCCL answers with GRANT, like the receiver of any message, and the message is staged.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from operator import index
from typing import TYPE_CHECKING, Any

from aiocoll.elements.device import DeviceArray
from aiocoll.engine.control.messages import DEVICE
from aiocoll.engine.operations.plan import EAGER_WINDOW
from aiocoll.gpu.api import DeviceError
from aiocoll.gpu.calls.matching import BatchMatching, Match, MessageBatch
from aiocoll.gpu.calls.native import Tools, exchange
from aiocoll.gpu.calls.staged import put_back

if TYPE_CHECKING:
    from aiocoll.gpu.calls.device_state import DeviceState
    from aiocoll.gpu.calls.messages import DeviceRecv, DeviceSend

__all__ = ["NativeMessages"]

#: Maximum number of messages in a batch, because a READY frame has 16 bits for it. The messages of a larger batch are
#: sent as single messages.
LARGEST = 0xFFFF


class NativeMessages:
    """The messages of one group that NCCL carries.

    Args:
        state: the group's state on the device.

    Attributes:
        batch: number and size of the batch that takes the messages of the current block.
    """

    def __init__(self, state: DeviceState) -> None:
        self.batch = (0, 1)
        self._device_state = state
        self._batches = 0
        #: Matched receives that have no launch number yet, by source rank and message id.
        self._matched: dict[tuple[int, int], DeviceRecv] = {}
        self._matching = BatchMatching(
            lambda matches: state.place(partial(self._number, matches)), state.comm.call_later
        )

    @contextlib.contextmanager
    def together(self, arrays: Iterable[DeviceArray]) -> Iterator[None]:
        """In this ``with`` block, combine the messages of these arrays into one batch."""
        size = sum(self.carries(array.nbytes) for array in arrays)
        if 1 < size <= LARGEST:
            self._batches = self._batches + 1 & 0xFFFFFFFF
            self.batch = self._batches, size
        try:
            yield
        finally:
            self.batch = 0, 1

    def carries(self, nbytes: int) -> bool:
        """Return whether NCCL can carry a message of this size; False after a rank has left the group."""
        return (
            nbytes > EAGER_WINDOW and self._device_state.communicator is not None and not self._device_state.comm.left
        )

    def matched(self, receive: DeviceRecv, src: int, number: int, theirs: tuple[int, int]) -> None:
        """Report to rank 0 that `receive` matches a message that NCCL can carry; `theirs` is the sender's batch."""
        rank = self._device_state.comm.rank
        self._matched[src, number] = receive
        self._send(Match(src, rank, number), [MessageBatch(src, *theirs), MessageBatch(rank, *receive.batch)])

    def is_held(self, src: int, number: int) -> bool:
        """Return whether a message is matched, but rank 0 has not started the message yet."""
        return (src, number) in self._matched

    def on_departure(self, rank: int) -> None:
        """Handle a rank that closed the group; if it is rank 0, receive all waiting messages through the host."""
        if rank == 0:
            self._give_back([Match(src, self._device_state.comm.rank, number) for src, number in self._matched])

    def report_uncarried(self, batch: tuple[int, int]) -> None:
        """Report to rank 0 that one message of this rank's batch is staged, unless the group has failed."""
        comm = self._device_state.comm
        if batch[1] > 1 and not comm.left and comm.cause is None:
            self._send(None, [MessageBatch(comm.rank, *batch)])

    def end(self) -> None:
        """Forget all messages, because the group has ended."""
        self._matched.clear()
        self._matching.clear()

    def _send(self, match: Match | None, batches: Sequence[MessageBatch]) -> None:
        """Report to rank 0 a matched message, or a batch of which one message is staged."""
        comm = self._device_state.comm
        if comm.rank == 0:
            self._take(match, batches)
        else:
            comm.channels[0].send_control({"t": DEVICE, "g": comm.id, "match": match, "batches": batches})

    def handle(self, peer: int, message: dict[str, Any]) -> None:
        """Handle another rank's control message about messages that NCCL carries.

        Raises:
            ValueError: the message is invalid from that rank, or for this rank; also TypeError and KeyError.
        """
        if "begin" not in message:
            match = message["match"]
            self._take(
                None if match is None else self._read(match), [MessageBatch(*map(index, b)) for b in message["batches"]]
            )
            return
        if peer:
            raise ValueError("NCCL messages: only rank 0 may start messages")
        number, begin = index(message["number"]), [self._read(match) for match in message["begin"]]
        if number:
            receives = [self._matched.pop((src, own), None) for src, _, own in begin]
            pairs = list(zip(begin, receives, strict=True))
            self._device_state.hold(number, lambda staged: self._begin(pairs, staged), True)
        else:
            self._give_back(begin)

    def _read(self, given: Iterable[Any]) -> Match:
        match = Match(*map(index, given))
        if not all(0 <= rank < len(self._device_state.comm.ranks) for rank in match[:2]):
            raise ValueError(f"{match} names a rank outside the group")
        return match

    # -- as rank 0

    def _take(self, match: Match | None, batches: Sequence[MessageBatch]) -> None:
        if self._device_state.comm.rank:
            raise ValueError("NCCL messages: only rank 0 may receive this control message")
        if match is None:
            self._matching.record_uncarried(*batches)
        else:
            self._matching.matched(match, batches)

    def _number(self, matches: Sequence[Match], staged: bool) -> None:
        """Assign launch numbers to messages that form one NCCL group; if a rank has left, stage them instead."""
        state, comm = self._device_state, self._device_state.comm
        own: dict[int, list[Match]] = {}
        staged = staged or bool(comm.left)
        for match in matches:
            for rank in match[1:2] if staged else match[:2]:
                own.setdefault(rank, []).append(match)
        numbers = dict.fromkeys(own, 0) if staged else state.number(own, True)
        for rank, begin in own.items():
            message = {"t": DEVICE, "g": comm.id, "number": numbers[rank], "begin": begin}
            if rank == 0:
                self.handle(0, message)
            else:
                comm.channels[rank].send_control(message)

    # -- carrying them out

    def _give_back(self, matches: Sequence[Match]) -> None:
        """Receive these matched messages through the host, because NCCL will not carry them."""
        for src, _, number in matches:
            self._matched.pop((src, number)).stage()

    def _begin(self, pairs: Sequence[tuple[Match, DeviceRecv | None]], staged: bool) -> None:
        """Enqueue this rank's sends and receives of one NCCL group, or stage its receives."""
        state, comm = self._device_state, self._device_state.comm
        sends: list[DeviceSend] = []
        receives: list[DeviceRecv] = []
        for (src, dst, number), receive in pairs:
            if receive is not None and staged:
                receive.stage()  # the sender then also sends through the host
            elif receive is not None and not receive.done:
                receives.append(receive)
            elif src == comm.rank and not staged and (send := comm.matching.outgoing.get((dst, number))) is not None:
                sends.append(send)  # type: ignore[arg-type]
        if not sends and not receives:
            return
        operations: list[DeviceSend | DeviceRecv] = [*sends, *receives]
        outgoing = [(each.peer, each.array) for each in sends]
        incoming = [(each.source, each.array) for each in receives]
        marks = [mark for each in operations for mark in each.taken_marks()]

        def put(tools: Tools) -> None:
            exchange(outgoing, incoming, tools)
            put_back([array for _, array in incoming], tools.stream)

        def done(error: DeviceError | None) -> None:
            for each in operations:
                each.on_nccl_done(error)

        assert state.communicator is not None
        launched = state.communicator.launch(marks, put, operations, done)
        for each in operations:
            each.launched(launched)
