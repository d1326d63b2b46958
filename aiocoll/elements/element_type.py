"""`DType`: an element type."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

__all__ = ["DType", "Kind"]

Kind = Literal["bool", "int", "uint", "float", "half", "complex", "record", "pair"]


@dataclass(frozen=True, slots=True, eq=False)
class DType:
    """An element type. There is one instance per type, so `is` and hashing by identity work.

    Attributes:
        name: NumPy's, or ml_dtypes' name, which is also torch's.
        code: its number on the wire, 1 to 255, fixed forever; 0 is for operations without data. That of a layout has
            the highest of 32 bits.
        itemsize: bytes per element.
        storage: dtype of the flat arrays that hold it.
        kind: the arithmetic that applies; ``"half"`` is every float of 16 bits or fewer: they accumulate in float32.
            There is none for a ``"record"``; see `aiocoll.elements.records`.
    """

    name: str
    code: int
    itemsize: int
    storage: np.dtype[Any]
    kind: Kind

    @property
    def is_narrow(self) -> bool:
        """Whether it is an integer of fewer than 8 bits."""
        return self.kind in ("int", "uint") and self.name != self.storage.name

    @property
    def unit(self) -> int:
        """How many elements of its storage an element takes."""
        return self.itemsize // self.storage.itemsize
