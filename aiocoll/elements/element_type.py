"""`DType`: the class of element types."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

__all__ = ["DType", "Kind"]

Kind = Literal["bool", "int", "uint", "float", "half", "complex", "record", "pair"]


@dataclass(frozen=True, slots=True, eq=False)
class DType:
    """An element type. There is one instance per type, so types are compared with `is`.

    Attributes:
        name: the name in NumPy, or in ml_dtypes and torch.
        code: number on the wire, from 1 to 255; it never changes. 0 means an operation without data. The code of a
            layout has the highest of 32 bits set.
        itemsize: bytes per element.
        storage: dtype of the flat arrays that hold it.
        kind: the arithmetic of the type. ``"half"`` is every float of at most 16 bits: these accumulate in float32. A
            ``"record"`` has no arithmetic; see `aiocoll.elements.records`.
    """

    name: str
    code: int
    itemsize: int
    storage: np.dtype[Any]
    kind: Kind

    @property
    def is_narrow(self) -> bool:
        """Return whether this is an integer type with fewer than 8 bits."""
        return self.kind in ("int", "uint") and self.name != self.storage.name

    @property
    def unit(self) -> int:
        """The number of stored NumPy items per element."""
        return self.itemsize // self.storage.itemsize
