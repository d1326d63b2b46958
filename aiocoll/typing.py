"""What calls take as arrays, for type checkers; nothing here is needed at run time.

    A = TypeVar("A", bound=aiocoll.typing.Array)


    async def mean(pg: aiocoll.ProcessGroup, x: A) -> A:
        return await pg.allreduce(x, aiocoll.ReduceOp.AVG)

An `Array` shows its memory by one of four protocols: NumPy and CuPy arrays, torch tensors, JAX arrays, `bytearray`,
`memoryview`, `array.array` and others. A type checker refuses `str` and `bytes`, which cannot be written to.
"""

from __future__ import annotations

from typing import Any, Protocol, TypeAlias

__all__ = [
    "Array",
    "Number",
    "Sparse",
    "SupportsArrayInterface",
    "SupportsBuffer",
    "SupportsCudaArrayInterface",
    "SupportsDLPack",
]


class SupportsBuffer(Protocol):
    """The buffer protocol; `__setitem__` is what sets writable memory apart from `bytes`."""

    def __buffer__(self, flags: int, /) -> memoryview:
        """Show the memory."""

    def __setitem__(self, key: Any, value: Any, /) -> None:
        """Write elements."""


class SupportsArrayInterface(Protocol):
    """NumPy's ``__array_interface__``."""

    @property
    def __array_interface__(self) -> dict[str, Any]:
        """Say where the memory is and what is in it."""


class SupportsCudaArrayInterface(Protocol):
    """``__cuda_array_interface__``: memory of a CUDA device."""

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """Say where the memory is and what is in it."""


class SupportsDLPack(Protocol):
    """DLPack; at run time ``__dlpack_device__`` has to be there, too, which JAX's types do not have."""

    def __dlpack__(self) -> Any:
        """Show the memory."""


class Sparse(Protocol):
    """A sparse array or matrix of scipy.sparse. A sparse tensor of torch is an `Array` to type checkers."""

    def tocoo(self) -> Any:
        """Return it as places and values."""


#: A dense array.
Array: TypeAlias = SupportsArrayInterface | SupportsBuffer | SupportsDLPack | SupportsCudaArrayInterface
#: What reductions take besides arrays, and then return; NumPy's scalars are arrays to type checkers.
Number: TypeAlias = int | float | complex
