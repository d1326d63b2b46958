"""Per-plan cache of the properties that all calls of one plan on CUDA arrays share.

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
    """The cached properties that all calls of one plan on CUDA arrays share.

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
        # Cached results for the array shape of the last call, because nearly all calls of a plan have the same shape.
        self._shape: tuple[int, ...] | None = None
        self._terms = self._described = b""

    @staticmethod
    def of(plan: Plan) -> Kind:
        """Return the `Kind` of `plan`; the first call creates it and stores it in the plan."""
        found: Kind | None = plan.on_device
        if found is None:
            found = plan.on_device = Kind(plan.signature)
        return found

    def choose_method(self, plan: Plan, decision: Decision | None) -> int:
        """Return the method for the calls of `plan` (NCCL or staging) under the group's backend decision."""
        if decision is None or not decision.native:
            return STAGED
        if self._way is None:
            self._way = way_of(plan, decision.float8)
            if self._way != STAGED:
                self.enqueue = make_enqueue(plan, self._way)
        return self._way

    def hash_terms(self, shape: tuple[int, ...]) -> bytes:
        """Return a hash of the call properties that must be equal on all ranks; `shape` is the main array's shape."""
        if shape != self._shape:
            self._describe(shape)
        return self._terms

    def described(self, shape: tuple[int, ...]) -> bytes:
        """Return the encoded description of a call whose main array has shape `shape`."""
        if shape != self._shape:
            self._describe(shape)
        return self._described

    def _describe(self, shape: tuple[int, ...]) -> None:
        signature = self.signature
        self._terms = hash_data([(*signature[:5], shape if signature.op in SHAPED else ())])
        self._described = described(signature, shape)
        self._shape = shape


def described(signature: Signature, shape: tuple[int, ...]) -> bytes:
    """Return the encoded description of a call, which does not contain the calling rank."""
    return packed(description(0, signature, shape, None, None), None)


def hash_data(terms: Sequence[object]) -> bytes:
    """Return a hash of plain data that is equal on every machine and in every process."""
    return blake2b(repr(terms).encode(), digest_size=16).digest()
