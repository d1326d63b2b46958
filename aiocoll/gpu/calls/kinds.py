"""Properties that all calls of one plan on CUDA arrays share, computed once per plan.

The plan holds them as long as `aiocoll.group.dispatch.call_cache` holds the plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

from aiocoll.engine.operations.comparison import SHAPED, packed
from aiocoll.engine.operations.plan import Plan
from aiocoll.engine.operations.signature import Signature, description
from aiocoll.gpu.calls.cards import Decision
from aiocoll.gpu.calls.native import STAGED, Enqueue, make_enqueue, way_of

__all__ = ["Kind", "described", "hash_data"]


class Kind:
    """The properties that all calls of one plan share in one group.

    Attributes:
        signature: signature of the calls, marked as calls on CUDA arrays.
        is_private: whether only the two ends of each message know its length.
        is_empty: whether no rank has any elements.
        enqueue: enqueues the calls on NCCL; set once NCCL is known to carry them out.
    """

    __slots__ = ("_described", "_shape", "_terms", "_way", "enqueue", "is_empty", "is_private", "signature")

    enqueue: Enqueue

    def __init__(self, signature: Signature) -> None:
        self.signature: Signature = signature._replace(debug="device", device="cuda")
        self.is_private = bool(signature.sends or signature.receives)
        self.is_empty = bool(signature.counts) and not any(signature.counts)
        self._way: int | None = None
        # Values for the shape of the last call, because nearly all calls of a plan have arrays of one shape.
        self._shape: tuple[int, ...] | None = None
        self._terms = self._described = b""

    @staticmethod
    def of(plan: Plan) -> Kind:
        """Return the shared properties of the calls of `plan`."""
        found: Kind | None = plan.on_device
        if found is None:
            found = plan.on_device = Kind(plan.signature)
        return found

    def choose_method(self, plan: Plan, decision: Decision | None) -> int:
        """Return how the group carries out the calls of `plan`, given its final decision on the backend."""
        if decision is None or not decision.native:
            return STAGED
        if self._way is None:
            self._way = way_of(plan, decision.float8)
            if self._way != STAGED:
                self.enqueue = make_enqueue(plan, self._way)
        return self._way

    def hash_terms(self, shape: tuple[int, ...]) -> bytes:
        """Return a hash of a call's properties that must be equal on all ranks, for a main array of this shape."""
        if shape != self._shape:
            self._describe(shape)
        return self._terms

    def described(self, shape: tuple[int, ...]) -> bytes:
        """Return the encoded description of a call with a main array of this shape."""
        if shape != self._shape:
            self._describe(shape)
        return self._described

    def _describe(self, shape: tuple[int, ...]) -> None:
        signature = self.signature
        self._terms = hash_data([(*signature[:5], shape if signature.op in SHAPED else ())])
        self._described = described(signature, shape)
        self._shape = shape


def described(signature: Signature, shape: tuple[int, ...]) -> bytes:
    """Return the encoded description of a call, without the rank that makes it."""
    return packed(description(0, signature, shape, None, None), None)


def hash_data(terms: Sequence[object]) -> bytes:
    """Return a hash of plain data, the same on every machine."""
    return blake2b(repr(terms).encode(), digest_size=16).digest()
