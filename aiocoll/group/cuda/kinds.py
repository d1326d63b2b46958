"""What is the same in all calls of one plan on CUDA arrays: found out once, since most calls are like earlier ones."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

from aiocoll.engine.operations.comparison import SHAPED
from aiocoll.engine.operations.plan import Plan
from aiocoll.engine.operations.signature import Signature
from aiocoll.group.cuda.cards import Decision
from aiocoll.group.cuda.native import STAGED, Enqueue, enqueuing, way_of

__all__ = ["KEPT", "Kind", "hashed"]

#: Kinds of calls that are kept, shapes of each, and descriptions.
KEPT = 256


class Kind:
    """The calls of one plan in one group.

    Attributes:
        plan: what to do.
        signature: of the calls, marked: they are on CUDA arrays.
        is_private: only the two ends of its messages know their lengths.
        is_empty: no rank has any elements.
        enqueue: enqueues the calls that NCCL carries out; set when it is known that it does.
    """

    __slots__ = ("_terms", "_way", "enqueue", "is_empty", "is_private", "plan", "signature")

    enqueue: Enqueue

    def __init__(self, plan: Plan) -> None:
        signature = plan.signature
        self.plan = plan
        self.signature: Signature = signature._replace(debug="device", device="cuda")
        self.is_private = bool(signature.sends or signature.receives)
        self.is_empty = bool(signature.counts) and not any(signature.counts)
        self._way: int | None = None
        self._terms: dict[tuple[int, ...], bytes] = {}

    def way(self, decision: Decision | None) -> int:
        """Return how the calls are carried out in a group with this decision, which is made once."""
        if decision is None or not decision.native:
            return STAGED
        if self._way is None:
            self._way = way_of(self.plan, decision.float8)
            if self._way != STAGED:
                self.enqueue = enqueuing(self.plan, self._way)
        return self._way

    def terms(self, shape: tuple[int, ...]) -> bytes:
        """Return a hash of what all ranks have to call alike in a call whose main array has this shape."""
        found = self._terms.get(shape)
        if found is None:
            if len(self._terms) >= KEPT:
                self._terms.clear()
            signature = self.plan.signature
            found = self._terms[shape] = hashed([(*signature[:5], shape if signature.op in SHAPED else ())])
        return found


def hashed(terms: Sequence[object]) -> bytes:
    """Return a hash of plain data, the same on every machine."""
    return blake2b(repr(terms).encode(), digest_size=16).digest()
