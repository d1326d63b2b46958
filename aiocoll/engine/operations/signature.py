"""Signatures of operations: the properties on which all ranks must agree, and their form as plain data."""

from __future__ import annotations

import zlib
from math import prod
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from aiocoll.algorithms.spec import Spec, spec_of
from aiocoll.elements.dtypes import by_name

if TYPE_CHECKING:
    from aiocoll.engine.operations.manifest import Manifest

__all__ = ["KEYED", "P2P", "Signature", "description"]

#: Flags in the two top bits of an operation id show its kind. Without a flag, the id is the sequence number.
KEYED: Final = 1 << 62
P2P: Final = 2 << 62


class Signature(NamedTuple):
    """The properties of one operation on which all ranks must agree.

    Attributes:
        op, dtype, counts, root, reduce: equal on all ranks.
        sends, receives: elements sent to and received from each rank, in collectives where only the two ends of a
            message know its length; () otherwise.
        debug: "detail" for an operation that is verified before data moves, "device" for operations on CUDA arrays.
        members: the members of a flush; None for other operations.
        device: location of the arrays, "cpu" or "cuda".
    """

    op: str
    dtype: str | None
    counts: tuple[int, ...]
    root: int | None
    reduce: str | None
    sends: tuple[int, ...] = ()
    receives: tuple[int, ...] = ()
    debug: str | None = None
    members: Manifest | None = None
    device: str = "cpu"

    @property
    def spec(self) -> Spec:
        """The collective's entry in the table of specifications."""
        return spec_of(self.op.lower())

    def nbytes(self, shape: tuple[int, ...]) -> int | None:
        """Return the bytes of the caller's main array, whose shape is `shape`; None if only the peer knows the size.

        For a flush, return the size of all members.
        """
        if self.dtype is None:
            return 0 if self.members is None else self.members.nbytes()
        try:
            itemsize = by_name(self.dtype).itemsize
        except TypeError:
            return None
        return itemsize * (prod(shape) if shape else sum(self.counts))

    def fingerprint(self) -> int:
        """Return a 32-bit hash of the fields that are equal on all ranks. The hash is the same on every machine."""
        agreed: tuple[object, ...] = self[:5]
        return zlib.crc32(repr(agreed if self.device == "cpu" else (*agreed, self.device)).encode())


def description(
    rank: int, signature: Signature, shape: tuple[int, ...], key: str | None, seq: int | None
) -> dict[str, Any]:
    """Return the call of `rank` as plain data, for messages and error texts."""
    return {
        "rank": rank,
        "op": signature.op,
        "shape": list(shape),
        "dtype": signature.dtype,
        "device": signature.device,
        "counts": list(signature.counts),
        "sends": list(signature.sends) or None,
        "receives": list(signature.receives) or None,
        "members": None if signature.members is None else signature.members.as_data(),
        "root": signature.root,
        "reduce": signature.reduce,
        "seq": seq,
        "key": key,
        "debug": signature.debug,
    }
