"""Types of array arguments, for type checkers. Nothing here is needed at run time.

    A = TypeVar("A", bound=aiocoll.typing.Array)


    async def mean(pg: aiocoll.ProcessGroup, x: A) -> A:
        return await pg.allreduce(x, aiocoll.ReduceOp.AVG)

An `Array` gives access to its memory by one of four protocols. Examples are NumPy and CuPy arrays, torch tensors, JAX
arrays, `bytearray`, `memoryview` and `array.array`. A type checker rejects `str` and `bytes`, which are immutable.
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
    """The buffer protocol, with `__setitem__` to exclude immutable objects such as `bytes`."""

    def __buffer__(self, flags: int, /) -> memoryview:
        """Return a view of the memory."""

    def __setitem__(self, key: Any, value: Any, /) -> None:
        """Write elements."""


class SupportsArrayInterface(Protocol):
    """NumPy's array interface protocol, ``__array_interface__``."""

    @property
    def __array_interface__(self) -> dict[str, Any]:
        """Return address, shape and element type of the memory."""


class SupportsCudaArrayInterface(Protocol):
    """The CUDA array interface protocol, ``__cuda_array_interface__``: memory of a CUDA device."""

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """Return address, shape and element type of the memory."""


class SupportsDLPack(Protocol):
    """The DLPack protocol. ``__dlpack_device__``, also required at run time, is omitted: JAX's type stubs lack it."""

    def __dlpack__(self) -> Any:
        """Return a capsule with the memory."""


class Sparse(Protocol):
    """A sparse array or matrix of scipy.sparse. A sparse tensor of torch is an `Array` to type checkers."""

    def tocoo(self) -> Any:
        """Return the array in COO format: indices and values."""


#: A dense array.
Array: TypeAlias = SupportsArrayInterface | SupportsBuffer | SupportsDLPack | SupportsCudaArrayInterface
#: A Python number that a reduction accepts and returns instead of an array. Type checkers see NumPy scalars as arrays.
Number: TypeAlias = int | float | complex
