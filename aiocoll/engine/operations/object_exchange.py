"""The executor of object collectives, which send byte strings (parcels) whose lengths only their senders know.

Every rank sends its parcels directly to their receivers, in one step. The first frame of a parcel contains its size. A
receiver then allocates the memory, or rejects a parcel above the limit.

A gather whose root does not know the lengths is received in the same way: the parcels are arrays. Their senders carry
out the plan of a gather, so small arrays may arrive in slots, and large ones through a chunk queue.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from aiocoll.codec.limits import MAX_BYTES
from aiocoll.completion import Completion
from aiocoll.engine.operations.base import Message, Operation
from aiocoll.engine.operations.incremental import Steps, carry_on
from aiocoll.engine.operations.plan import EAGER_WINDOW
from aiocoll.engine.operations.relay import take_chunk
from aiocoll.engine.operations.signature import Signature
from aiocoll.errors import ProtocolError, SerializationError
from aiocoll.runtime import BUDGET

if TYPE_CHECKING:
    from aiocoll.engine.communicator import Communicator
    from aiocoll.engine.interfaces import Looker

__all__ = ["ObjectExchange", "Parcels", "Post"]


class Post(Operation):
    """Base class of operations that send and receive parcels (byte strings). Subclasses process the parcels.

    Args:
        sources: ranks that send a parcel to this rank.

    Attributes:
        FINGERPRINT: fingerprint in the frames; 0 for the fingerprint of the signature.
        LIMIT: maximum size of an accepted parcel, in bytes.
    """

    FINGERPRINT = 0
    LIMIT = MAX_BYTES

    __slots__ = ("_incoming", "_limit", "_missing", "_received", "_refusal", "_unsent")

    def __init__(
        self,
        comm: Communicator,
        identity: int,
        signature: Signature,
        sources: Iterable[int],
        completion: Completion,
    ) -> None:
        super().__init__(comm, identity, signature, self.FINGERPRINT or signature.fingerprint(), completion)
        self._unsent: dict[int, int] = {}
        self._missing = set(sources)
        self._limit = self.LIMIT
        self._incoming: dict[int, memoryview] = {}
        self._received: dict[int, int] = {}
        self._refusal: SerializationError | None = None

    def _send(self, outgoing: Mapping[int, bytes]) -> None:
        """Send a parcel to each rank in `outgoing`."""
        self._unsent = {rank: len(parcel) for rank, parcel in outgoing.items()}
        for peer, parcel in outgoing.items():
            message = Message(self, peer, 0, memoryview(parcel), len(parcel))
            self.comm.channels[peer].enqueue(message)

    def needs(self, peer: int) -> bool:
        """Return whether a parcel to or from `peer` is incomplete."""
        return peer in self._missing or peer in self._unsent

    def awaited_ranks(self) -> list[int]:
        """Return the ranks whose parcel has not arrived completely."""
        return sorted(self._missing)

    def route(self, peer: int, step: int, offset: int, total: int, length: int) -> memoryview | None:
        """Return the memory for the next segment of a parcel; None if the parcel is too large."""
        room = self._room(peer, total)
        start = self._received.get(peer, 0)
        return None if room is None else room[start : start + length]

    def deliver(self, peer: int, step: int, total: int, payload: memoryview | None, length: int) -> bool:
        """Store a segment of a parcel; return whether this operation expected the parcel."""
        if peer not in self._missing:
            return False
        room = self._room(peer, total)
        start = self._received.get(peer, 0)
        if start + length > total:
            raise ProtocolError(f"rank {peer} sent more than the {total} bytes of its object")
        if room is not None and payload is not None:
            room[start : start + length] = payload
        self._arrived(peer, total, length)
        if start == 0 and length < total > EAGER_WINDOW:
            self.promise(peer)
        return True

    def _arrived(self, peer: int, total: int, length: int) -> None:
        """Record that `length` more bytes of a parcel of `total` bytes have arrived."""
        if peer not in self._incoming:
            # Receive the parcel without storing it, so that the sender can finish and the group stays usable.
            self._refusal = SerializationError(
                f"rank {peer} sent an object of {total} bytes; the limit is {self._limit} bytes"
            )
        self._received[peer] = received = self._received.get(peer, 0) + length
        if received == total:
            self._missing.discard(peer)
            self._settle()

    def sent(self, message: Message, nbytes: int) -> None:
        """Record that `nbytes` of a parcel have been sent."""
        peer = message.index
        self._unsent[peer] -= nbytes
        if not self._unsent[peer]:
            del self._unsent[peer]
            self._settle()

    def _room(self, peer: int, total: int) -> memoryview | None:
        room = self._incoming.get(peer)
        if room is None and total <= self._limit:
            # Use `np.empty`, because a large bytearray would be filled with zeros in one long step.
            room = self._incoming[peer] = np.empty(total, np.uint8).data
        return room

    def _settle(self) -> None:
        """Process the parcels, if all have been received and sent."""
        raise NotImplementedError


class Parcels(NamedTuple):
    """The parcels that one rank sends and receives in one object collective.

    Attributes:
        outgoing: the parcels that this rank sends, by receiver.
        sources: ranks that send a parcel to this rank.
        unpack: makes the result from the received parcels, by rank.
        are_arrays: the parcels are arrays of any size. Small ones may arrive in slots.
        may_be_chunked: large parcels may arrive through chunk queues.
    """

    outgoing: Mapping[int, bytes]
    sources: Collection[int]
    unpack: Callable[[Mapping[int, memoryview]], Steps]
    are_arrays: bool = False
    may_be_chunked: bool = False


class ObjectExchange(Post):
    """The operation of one rank in one object collective.

    Args:
        parcels: the parcels to send and to receive.
    """

    __slots__ = ("_last", "_parcels", "_steps")

    def __init__(
        self,
        comm: Communicator,
        identity: int,
        signature: Signature,
        parcels: Parcels,
        completion: Completion,
    ) -> None:
        super().__init__(comm, identity, signature, parcels.sources, completion)
        self._parcels = parcels
        self._steps: Steps | None = None
        # The rank whose parcel arrived last, or -1.
        self._last = -1
        if parcels.are_arrays:
            self._limit = 2**32 - 1  # a frame header holds the size modulo 2**32

    def enter(self) -> None:
        """Send all parcels, and receive those that are already in shared memory."""
        self._send(self._parcels.outgoing)
        self._settle()
        if self._parcels.are_arrays:
            self.look()
            if self._missing and not self.done:
                self._lookers[self] = None

    @property
    def _lookers(self) -> dict[Looker, None]:
        """The table of polled operations, to which this operation belongs while it waits for data in shared memory."""
        polling = self.comm.polling
        return polling.lookers if self._parcels.may_be_chunked else polling.readers

    def look(self) -> bool:
        """Receive new parcels from slots and chunk queues in shared memory; return whether any had arrived."""
        moved = False
        for peer in tuple(self._missing):
            if self.comm.slots.deliver(self, peer, 0) or (self._parcels.may_be_chunked and self._take_chunks(peer)):
                moved = True
        return moved

    def _take_chunks(self, peer: int) -> bool:
        """Receive the chunks that a peer has written to its chunk queue; return whether any had arrived."""
        ticks = self.comm.runtime.ticks
        deadline = ticks() + BUDGET
        moved = False
        while peer in self._missing and self._take_chunk(peer):
            moved = True
            if ticks() > deadline and peer in self._missing:
                self.schedule_advance()
                break
        return moved

    def _take_chunk(self, peer: int) -> bool:
        chunk = self.comm.chunk_nbytes
        start = self._received.get(peer, 0)
        total = size = 0

        def size_of(length: int) -> int:
            nonlocal total, size
            room = self._room(peer, length)
            total, size = length, min(chunk, length - start)
            return size if room is None or room.nbytes == length else -1

        def store(incoming: NDArray[np.uint8]) -> None:
            if (room := self._incoming.get(peer)) is not None:
                room[start : start + size] = incoming.data

        if not take_chunk(self, peer, chunk, size_of, store):
            return False
        self.set_waited_for(peer)
        self._arrived(peer, total, size)
        self.set_waited_for(-1)
        return True

    def needs(self, peer: int) -> bool:
        """Read the data in shared memory, then return whether a parcel to or from `peer` is incomplete."""
        while self._parcels.are_arrays and self.look():
            pass
        return not self.done and super().needs(peer)

    def fail(self, error: BaseException) -> None:
        """Fail the operation with `error`."""
        self._lookers.pop(self, None)
        super().fail(error)

    def advance(self) -> None:
        """Continue to receive chunks, or to compute the result."""
        if self._steps is None:
            self.look()
        else:
            self.set_waited_for(self._last)
            carry_on(self, self._steps)
            self.set_waited_for(-1)

    def _settle(self) -> None:
        if self.done or self._missing or self._unsent or self._steps is not None:
            return
        self._lookers.pop(self, None)
        if self._refusal is not None:
            self.fail(self._refusal)
            return
        self._last = self.waited_for
        self._steps = self._parcels.unpack(self._incoming)
        carry_on(self, self._steps)
