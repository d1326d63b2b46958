"""Which NaN the arithmetic of this process makes, as a number that ranks compare.

The result of an operation on two NaNs has the sign and the payload of one of them, and that of ``inf - inf`` has a sign
of its own. IEEE 754 leaves open which. It depends on the processor, on the SIMD level that NumPy has chosen for it, and
on whether an element lies in a whole vector or in the rest of an array.
"""

from __future__ import annotations

from functools import cache
from hashlib import blake2b

import numpy as np

__all__ = ["nan_fingerprint"]

#: Elements of the arrays: above the lengths of vectors, and of unrolled loops of them.
COUNTS = (3, 5, 9, 17, 33, 131)
#: Operations of each type, and operands that make a NaN.
_CASES = (
    ((np.add, np.multiply, np.minimum, np.maximum), (np.nan, -np.nan), COUNTS),
    ((np.add,), (np.inf, -np.inf), COUNTS[:1]),
    ((np.multiply,), (np.inf, 0.0), COUNTS[:1]),
)


@cache
def nan_fingerprint() -> int:
    """Return a number that two processes share if their loops make the same NaNs. Cost: some 0.2 ms, once."""
    digest = blake2b(digest_size=7)
    with np.errstate(all="ignore"):
        for dtype in map(np.dtype, ("f4", "f8", "c8", "c16")):
            for ufuncs, (left, right), counts in _CASES:
                for count in counts:
                    a, b = (np.full(count, operand, dtype) for operand in (left, right))
                    for ufunc in ufuncs[:1] if dtype.kind == "c" else ufuncs:
                        digest.update(ufunc(a, b).tobytes())
    return int.from_bytes(digest.digest(), "big")
