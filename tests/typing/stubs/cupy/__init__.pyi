"""The part of CuPy's types by which an array is one; CuPy itself has no types."""

from typing import Any

class ndarray:
    @property
    def __cuda_array_interface__(self) -> dict[str, Any]: ...

def zeros(shape: int) -> ndarray: ...
