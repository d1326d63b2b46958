"""The signature of an operation: what the ranks must agree on, and its form as plain data."""

from __future__ import annotations

import zlib
from math import prod
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from aiocoll.algorithms.spec import Spec, spec_of
from aiocoll.elements.dtypes import by_name

if TYPE_CHECKING:
    from aiocoll.engine.operations.manifest import Manifest

__all__ = ["KEYED", "P2P", "Signature", "description"]

#: The two top bits of an operation id say how it was numbered; the id of an ordered operation is its number.
KEYED: Final = 1 << 62
P2P: Final = 2 << 62


class Signature(NamedTuple):
    """What the ranks must agree on in one operation.

    `op` to `reduce` are the same on all of them. `sends` and `receives` belong to collectives in which only the two
    ends of a message know its length: how many elements go to each rank and come from each; () otherwise. `debug` is
    "detail" for an operation that is verified before data moves, and "device" for every one on CUDA arrays. `members`
    are those of a flush, which consists of many calls. `device` is where the arrays are: "cpu" or "cuda".
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
        """The row of its collective in the table."""
        return spec_of(self.op.lower())

    def nbytes(self, shape: tuple[int, ...]) -> int | None:
        """Return the size of the caller's main array, of this shape, in bytes; None if only the other end knows it.

        Of a flush, that of all members.
        """
        if self.dtype is None:
            return 0 if self.members is None else self.members.nbytes()
        try:
            itemsize = by_name(self.dtype).itemsize
        except TypeError:
            return None
        return itemsize * (prod(shape) if shape else sum(self.counts))

    def fingerprint(self) -> int:
        """Hash the fields that are equal on all ranks to 32 bits, the same on every machine."""
        agreed: tuple[object, ...] = self[:5]
        return zlib.crc32(repr(agreed if self.device == "cpu" else (*agreed, self.device)).encode())


def description(
    rank: int, signature: Signature, shape: tuple[int, ...], key: str | None, seq: int | None
) -> dict[str, Any]:
    """Return the call of `rank` as plain data."""
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
