"""The executor of small allreduces and of barriers in shared memory: each rank posts its tensor and reduces all.

One step: each rank copies its tensor into a slot of each peer, and reduces the tensors of all, in rank order, in
place. Cost: p-1 copies and one reduction of p inputs per rank; no messages and no temporary memory. Subclasses are for
collectives in which ranks post different things, or not all of them post to all others.

Peers whose slot is not available, since the link is still being opened or the slot is in use, get a frame instead.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from aiocoll.elements.buffers import byte_view
from aiocoll.engine.operations.base import Message, Operation
from aiocoll.engine.operations.group import Group
from aiocoll.engine.operations.plan import Plan
from aiocoll.errors import ProtocolError
from aiocoll.transport.shared_memory import MIDDLE_SLOTS, SMALL_SLOTS
from aiocoll.work import Work

__all__ = ["OneShot"]

_NOTHING: Final = np.empty(0, np.uint8)


class OneShot(Operation):
    """One rank's part in one allreduce or barrier; arguments as for `ProgramExecutor`."""

    __slots__ = (
        "_array",
        "_block",
        "_framed",
        "_incoming",
        "_longest",
        "_missing",
        "_outgoing",
        "_plan",
        "_seen",
        "_sources",
        "_targets",
        "_unsent",
    )

    def __init__(
        self,
        comm: Group,
        identity: int,
        plan: Plan,
        arrays: list[NDArray[Any]],
        work: Work[Any],
    ) -> None:
        # Not through super(), which costs 70 ns more.
        Operation.__init__(self, comm, identity, plan.signature, plan.fingerprint, work)
        self._plan = plan
        self._array = arrays[0] if arrays else _NOTHING  # a barrier has none
        # What is posted to each rank, and elements that each posts to this one; None if that is the tensor of all. And
        # the bytes that decide which slots all ranks take.
        self._outgoing: Sequence[NDArray[Any]] | None = None
        self._incoming: Sequence[int] | None = None
        self._longest = plan.nbytes
        # The ranks that this one posts to, and those that post to it, in order; how many of these have.
        self._targets: Sequence[int] = comm.others
        self._sources: Sequence[int] = comm.others
        self._seen = 0
        # The first of the others that had not, when it was last looked for; -1 if it has never been missing.
        self._missing = -1
        # Peers to which a frame is not sent completely.
        self._unsent: Collection[int] = ()
        # Tensors received in frames, by rank.
        self._framed: dict[int, memoryview | bytes | bytearray] | None = None

    def be_in_blocks(self, outgoing: Sequence[NDArray[Any]], incoming: Sequence[int], longest: int) -> None:
        """Have each rank post a block to each, by rank: what, how many elements, and bytes of the longest of all."""
        self._outgoing, self._incoming, self._longest = outgoing, incoming, longest

    def be_between(self, targets: Sequence[int], sources: Sequence[int]) -> None:
        """Set which ranks this one posts to, and which post to it, in ascending order; none of these has been seen."""
        self._targets, self._sources, self._seen = targets, sources, 0

    def enter(self) -> None:
        """Post the tensor to all that need it."""
        comm, identity = self.comm, self.id
        small = self._longest <= comm.small_nbytes
        self._block = identity % SMALL_SLOTS if small else SMALL_SLOTS + identity % MIDDLE_SLOTS
        self._post()
        if not self.done and not self.look():
            comm.polling.readers[self] = None

    def _post(self) -> None:
        comm, identity, block = self.comm, self.id, self._block
        group, fingerprint = comm.id, self.fingerprint
        array, blocks = self._array, self._outgoing
        without: list[int] | None = None
        for peer in self._targets:
            channel = comm.channels[peer]
            link = channel.shared
            if blocks is not None:
                array = blocks[peer]
            if (
                link is not None
                and link is channel.link
                and link.slot_writer.post(block, identity, group, fingerprint, array)
            ):
                link.announce()
            elif without is None:
                without = [peer]
            else:
                without.append(peer)
        if without is not None:
            self._send(without)

    def _send(self, peers: list[int]) -> None:
        self._unsent = set(peers)
        for peer in peers:
            view = byte_view(self._array if self._outgoing is None else self._outgoing[peer])
            self.comm.channels[peer].kick(Message(self, peer, 0, view, view.nbytes))

    def _finish(self, inputs: list[NDArray[Any]]) -> None:
        """Everything has been posted that this rank needs, in the order of the ranks it comes from."""
        if self._plan.kernel is not None:
            inputs.insert(self.comm.rank, self._array)
            self._plan.kernel.fold(inputs, self._array)

    def look(self) -> bool:
        """Look for missing tensors; reduce when none is missing. Return whether the operation has ended."""
        if self.done:
            return True  # it failed together with an operation that was looked at before
        sources, seen = self._sources, self._seen
        while seen < len(sources):
            if not self._is_here(sources[seen]):
                self._missing = sources[seen]
                return self.done
            self._seen = seen = seen + 1
        if self._unsent:
            return False
        self._fold()
        return True

    def _is_here(self, peer: int) -> bool:
        comm = self.comm
        link = comm.channels[peer].shared
        found = -1 if link is None else link.slot_reader.look(self._block, self.id, comm.id)
        if found == self.fingerprint:
            return True
        if found >= 0:
            comm.mismatches.disagree(peer, self.id, self.describe())
            return False
        return self._has_framed(peer)

    def _fold(self) -> None:
        plan, comm, block = self._plan, self.comm, self._block
        storage, counts, framed = plan.storage, self._incoming, self._framed
        inputs, slot_readers = [], []
        for peer in self._sources:
            if framed is not None and peer in framed:
                inputs.append(np.frombuffer(framed[peer], storage))
            else:
                slot_reader = comm.channels[peer].shared.slot_reader  # type: ignore[union-attr]  # it has been seen there
                slot_readers.append(slot_reader)
                inputs.append(slot_reader.view(block, storage, plan.count if counts is None else counts[peer]))
        try:
            self._finish(inputs)
        except Exception as error:  # of a function of the user's
            comm.broke(self, error, "its reduce function raised ")
            return
        for slot_reader in slot_readers:
            slot_reader.free(block)
        self._complete()

    def _complete(self) -> None:
        """All is there and used."""
        comm = self.comm
        comm.polling.readers.pop(self, None)
        if self._missing < 0:
            self.succeed(self.work._value)
        else:
            comm.context.heard = comm.ranks[self._missing]
            self.succeed(self.work._value)
            comm.context.heard = -1

    def _slot_from(self, peer: int) -> int:
        """Return the slot in which a peer posts."""
        return self._block

    def _has_framed(self, peer: int) -> bool:
        framed = None if self._framed is None else self._framed.get(peer)
        return framed is not None and len(framed) == self._expected(peer)

    def _expected(self, peer: int) -> int:
        """Return the bytes that come from a peer."""
        counts = self._incoming
        return self._plan.nbytes if counts is None else counts[peer] * self._plan.itemsize

    def deliver(self, peer: int, step: int, total: int, payload: memoryview | None, length: int) -> bool:
        """Store a tensor that comes in frames."""
        if step or peer not in self._sources or total != self._expected(peer) or payload is None:
            return False
        if self._framed is None:
            self._framed = {}
        if (link := self.comm.channels[peer].shared) is not None:
            link.slot_reader.reclaim(self._slot_from(peer))  # its unread content may have been the reason for the frame
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
        """Whether the tensor of `peer` is missing: a posted one stays readable after the peer has left."""
        self.look()
        return not self.done and (peer in self._unsent or (peer in self._sources and not self._is_here(peer)))

    def awaited(self) -> list[int]:
        """Return the ranks whose tensors have not been seen."""
        return [peer for peer in self._sources[self._seen :] if not self._is_here(peer)]

    def fail(self, error: BaseException) -> None:
        """End with `error`."""
        self.comm.polling.readers.pop(self, None)
        super().fail(error)
