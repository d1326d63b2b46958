"""Probes, which report the next message without receiving it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from aiocoll.completion import Completion
from aiocoll.elements.dtypes import array_dtype, by_code
from aiocoll.elements.records import record_by_code
from aiocoll.engine.matching.inbound import InboundMessage
from aiocoll.engine.matching.outbound import OBJECT, Content, is_opaque, is_sparse
from aiocoll.engine.matching.posted import PostedReceive
from aiocoll.errors import BackendUnavailableError

if TYPE_CHECKING:
    from aiocoll.engine.matching.matching import Matching

__all__ = ["Envelope", "PostedProbe", "envelope_of"]


@dataclass(frozen=True, slots=True)
class Envelope:
    """The properties of a message that has arrived, but has not been received.

    Attributes:
        source: rank of the sender.
        tag: its tag.
        nbytes: its length in bytes; for an object or a sparse array, the encoded length.
        dtype: NumPy dtype of its elements; None for an object or a sparse array. For a structured dtype (also dates,
            texts, plain bytes) that no array of this process has, uint8.
        sparse: True for a sparse array.
    """

    source: int
    tag: int
    nbytes: int
    dtype: np.dtype[Any] | None
    sparse: bool = False

    @property
    def count(self) -> int:
        """The number of elements in the message; 1 for an object or a sparse array."""
        return 1 if self.dtype is None else self.nbytes // self.dtype.itemsize


def envelope_of(arrival: InboundMessage) -> Envelope:
    """Return the properties of a message."""
    code, sparse = arrival.code, is_sparse(arrival.code)
    if code == OBJECT or sparse:
        dtype = None
    elif is_opaque(code) and record_by_code(code) is None:
        dtype = np.dtype(np.uint8)
    else:
        dtype = array_dtype(by_code(code))
    return Envelope(arrival.peer, arrival.tag, arrival.total, dtype, sparse)


class PostedProbe(PostedReceive):
    """An operation that waits for a message with a given source and tag, and leaves the message to a receive.

    Args:
        probes: the messages of the group.
        peer: rank of the sender; None for any rank.
        tag: tag of the message.
    """

    __slots__ = ("_probes",)

    OP = "PROBE"

    def __init__(self, probes: Matching, peer: int | None, tag: int, completion: Completion) -> None:
        super().__init__(probes, peer, tag, Content(OBJECT, None), completion)
        self._probes = probes

    def enter(self) -> None:
        """Look for a message that has arrived, or wait for one."""
        self._probes.watch(self)

    def on_found(self, arrival: InboundMessage) -> None:
        """Finish with the properties of the message that was found."""
        self.completion.source = arrival.peer
        self.set_waited_for(arrival.peer)
        try:
            envelope = envelope_of(arrival)
        except BackendUnavailableError as error:  # NumPy needs another package for this dtype
            self.fail(error)
        else:
            self.succeed(envelope)

    def fail(self, error: BaseException) -> None:
        """Finish the operation with `error`."""
        self._probes.unwatch(self)
        super().fail(error)
