"""What is the same in all calls of one plan on CUDA arrays: found out once, since most calls are like earlier ones.

It is kept with the plan, as long as `aiocoll.group.dispatch.call_cache` keeps that.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

from aiocoll.engine.operations.comparison import SHAPED, packed
from aiocoll.engine.operations.plan import Plan
from aiocoll.engine.operations.signature import Signature, description
from aiocoll.gpu.calls.cards import Decision
from aiocoll.gpu.calls.native import STAGED, Enqueue, enqueuing, way_of

__all__ = ["Kind", "described", "hashed"]


class Kind:
    """The calls of one plan in one group.

    Attributes:
        signature: of the calls, marked: they are on CUDA arrays.
        is_private: only the two ends of its messages know their lengths.
        is_empty: no rank has any elements.
        enqueue: enqueues the calls that NCCL carries out; set when it is known that it does.
    """

    __slots__ = ("_described", "_shape", "_terms", "_way", "enqueue", "is_empty", "is_private", "signature")

    enqueue: Enqueue

    def __init__(self, signature: Signature) -> None:
        self.signature: Signature = signature._replace(debug="device", device="cuda")
        self.is_private = bool(signature.sends or signature.receives)
        self.is_empty = bool(signature.counts) and not any(signature.counts)
        self._way: int | None = None
        # Of the last call: nearly all calls of a plan have arrays of one shape.
        self._shape: tuple[int, ...] | None = None
        self._terms = self._described = b""

    @staticmethod
    def of(plan: Plan) -> Kind:
        """Return what is the same in all calls of `plan`."""
        found: Kind | None = plan.on_device
        if found is None:
            found = plan.on_device = Kind(plan.signature)
        return found

    def way(self, plan: Plan, decision: Decision | None) -> int:
        """Return how the calls of `plan`, its own, are carried out in a group with this decision, made once."""
        if decision is None or not decision.native:
            return STAGED
        if self._way is None:
            self._way = way_of(plan, decision.float8)
            if self._way != STAGED:
                self.enqueue = enqueuing(plan, self._way)
        return self._way

    def terms(self, shape: tuple[int, ...]) -> bytes:
        """Return a hash of what all ranks have to call alike in a call whose main array has this shape."""
        if shape != self._shape:
            self._look_at(shape)
        return self._terms

    def described(self, shape: tuple[int, ...]) -> bytes:
        """Return the encoded description of a call whose main array has this shape."""
        if shape != self._shape:
            self._look_at(shape)
        return self._described

    def _look_at(self, shape: tuple[int, ...]) -> None:
        signature = self.signature
        self._terms = hashed([(*signature[:5], shape if signature.op in SHAPED else ())])
        self._described = described(signature, shape)
        self._shape = shape


def described(signature: Signature, shape: tuple[int, ...]) -> bytes:
    """Return the encoded description of a call, which names no rank."""
    return packed(description(0, signature, shape, None, None), None)


def hashed(terms: Sequence[object]) -> bytes:
    """Return a hash of plain data, the same on every machine."""
    return blake2b(repr(terms).encode(), digest_size=16).digest()
