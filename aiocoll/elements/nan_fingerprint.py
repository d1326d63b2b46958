"""A hash of the NaN bit patterns that arithmetic produces in this process, for comparison between ranks.

An operation on two NaNs gives the sign and the payload of one of them. ``inf - inf`` gives a NaN of either sign. IEEE
754 does not define these choices. They depend on the processor, on the SIMD level that NumPy uses, and on the position
of an element: inside a full vector, or in the remainder of an array.
"""

from __future__ import annotations

from functools import cache
from hashlib import blake2b

import numpy as np

__all__ = ["nan_fingerprint"]

#: Lengths of the test arrays, each just above the length of a SIMD vector or of an unrolled loop of vectors.
COUNTS = (3, 5, 9, 17, 33, 131)
#: Test cases: operations, operands that give a NaN, and array lengths.
_CASES = (
    ((np.add, np.multiply, np.minimum, np.maximum), (np.nan, -np.nan), COUNTS),
    ((np.add,), (np.inf, -np.inf), COUNTS[:1]),
    ((np.multiply,), (np.inf, 0.0), COUNTS[:1]),
)


@cache
def nan_fingerprint() -> int:
    """Return a number that is equal in two processes if NumPy produces the same NaN bit patterns in both.

    Cost: about 0.2 ms, once.
    """
    digest = blake2b(digest_size=7)
    with np.errstate(all="ignore"):
        for dtype in map(np.dtype, ("f4", "f8", "c8", "c16")):
            for ufuncs, (left, right), counts in _CASES:
                for count in counts:
                    a, b = (np.full(count, operand, dtype) for operand in (left, right))
                    for ufunc in ufuncs[:1] if dtype.kind == "c" else ufuncs:
                        digest.update(ufunc(a, b).tobytes())
    return int.from_bytes(digest.digest(), "big")
