"""Probes: what the next message is, which stays where it is."""

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
    """What a message is, before it is received.

    Attributes:
        source: rank that sent it.
        tag: its tag.
        nbytes: its length in bytes; of an object or a sparse array, when it is written.
        dtype: of its elements, as NumPy has it; None of an object or a sparse array. Of a structured dtype (and dates,
            texts, plain bytes) that no array of this process has, uint8.
        sparse: it is a sparse array.
    """

    source: int
    tag: int
    nbytes: int
    dtype: np.dtype[Any] | None
    sparse: bool = False

    @property
    def count(self) -> int:
        """The number of elements; 1 of an object or a sparse array."""
        return 1 if self.dtype is None else self.nbytes // self.dtype.itemsize


def envelope_of(arrival: InboundMessage) -> Envelope:
    """Return what a message is."""
    code, sparse = arrival.code, is_sparse(arrival.code)
    if code == OBJECT or sparse:
        dtype = None
    elif is_opaque(code) and record_by_code(code) is None:
        dtype = np.dtype(np.uint8)
    else:
        dtype = array_dtype(by_code(code))
    return Envelope(arrival.peer, arrival.tag, arrival.total, dtype, sparse)


class PostedProbe(PostedReceive):
    """Waits for a message that fits it and that no receive has matched, and takes nothing of it.

    Args:
        probes: those of the group.
        peer: rank of the sender; None for any rank.
        tag: of the message.
    """

    __slots__ = ("_probes",)

    OP = "PROBE"

    def __init__(self, probes: Matching, peer: int | None, tag: int, completion: Completion) -> None:
        super().__init__(probes, peer, tag, Content(OBJECT, None), completion)
        self._probes = probes

    def enter(self) -> None:
        """Look at the messages that wait, or wait for one."""
        self._probes.watch(self)

    def found(self, arrival: InboundMessage) -> None:
        """This is the message."""
        self.completion.source = arrival.peer
        self.set_waited_for(arrival.peer)
        try:
            envelope = envelope_of(arrival)
        except BackendUnavailableError as error:  # NumPy alone lacks the dtype
            self.fail(error)
        else:
            self.succeed(envelope)

    def fail(self, error: BaseException) -> None:
        """End with `error`."""
        self._probes.unwatch(self)
        super().fail(error)
