"""What calls take as arrays, for type checkers; nothing here is needed at run time.

    async def mean(pg: aiocoll.ProcessGroup, x: A) -> A:  # A = TypeVar("A", bound=aiocoll.typing.Array)
        return await pg.allreduce(x, ReduceOp.AVG)

An array is anything with writable memory that one of four protocols shows: NumPy and CuPy arrays, torch tensors, JAX
arrays, `bytearray`, `memoryview`, `array.array`. A type checker refuses `str` and `bytes`, which nobody can write to.
"""

from __future__ import annotations

from typing import Any, Protocol, TypeAlias, Union

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
    """DLPack."""

    def __dlpack__(self) -> Any:
        """Show the memory."""

    def __dlpack_device__(self) -> tuple[Any, int]:
        """Return the kind and the number of the device."""


class Sparse(Protocol):
    """A sparse array or matrix of scipy.sparse. A sparse tensor of torch is an `Array` to type checkers."""

    def tocoo(self) -> Any:
        """Return it as places and values."""


#: A dense array.
Array: TypeAlias = Union[SupportsArrayInterface, SupportsBuffer, SupportsDLPack, SupportsCudaArrayInterface]  # noqa: UP007
#: What reductions take besides arrays, and then return; NumPy's scalars are arrays to type checkers.
Number: TypeAlias = Union[int, float, complex]  # noqa: UP007
