"""Adapters of array libraries: interface, registry, and the search for an object's adapter."""

from __future__ import annotations

import sys
from collections.abc import Collection
from typing import TYPE_CHECKING, Any, Final

from aiocoll.registry import Registry, load_shipped

if TYPE_CHECKING:
    from aiocoll.elements.buffers import Buffer
    from aiocoll.elements.sparse import SparseArray

__all__ = [
    "ADAPTER_VERSION",
    "ArrayAdapter",
    "adapter_of",
    "adapter_of_attribute",
    "adapter_of_type",
    "adapters",
    "cannot_allocate",
    "dlpack_adapter",
    "dlpack_kind",
    "provided_adapter_of",
]

#: Version number of the interface `ArrayAdapter`.
ADAPTER_VERSION: Final = 1
#: Maximum number of types in the cache `_by_type`: a program may create any number of types.
_CACHED_TYPES: Final = 1024
#: The adapter for each type looked up so far; None for a type without an adapter.
_by_type: dict[type, ArrayAdapter | None] = {}
#: Top-level modules for which no entry point is searched.
_WITHOUT_ENTRY_POINTS: Final = sys.stdlib_module_names | {"numpy", "scipy"}


class ArrayAdapter:
    """The adapter of one array library or protocol: it makes flat views of arrays, and new arrays like them.

    Each method has a default implementation for arrays without that feature. A subclass overrides `view`, and the
    methods for the features of its library.

    Attributes:
        library: the top-level module that it is registered for; "" for a protocol.
        noun: name of its arrays in error messages, such as "a torch tensor"; "" for a protocol.
        label: the kind of device in error messages; "" for arrays on the host, or on a device that is not supported.
    """

    library = ""
    noun = ""
    label = ""

    def owns(self, kind: type) -> bool:
        """Return whether this adapter can view objects of the type `kind`."""
        return True

    def view(self, array: Any, name: str, writable: bool) -> Buffer:
        """Return a flat view of an array, without a copy where possible.

        Args:
            array: an array of the library.
            name: its name in error messages.
            writable: whether the operation writes to it.

        Raises:
            TypeError: the array cannot be exchanged.
            ValueError: the array is read-only, but the operation writes to it.
        """
        raise NotImplementedError

    def empty_like(self, array: Any) -> Any:
        """Return a new contiguous array with the device, shape and dtype of `array`.

        Raises:
            TypeError: the adapter cannot allocate arrays.
        """
        raise cannot_allocate(array)

    def overwrite(self, array: Any, values: Any) -> None:
        """Copy `values`, which `empty_like(array)` has made, to the device array `array` on the current stream."""
        raise NotImplementedError

    def spare(self, buffer: Buffer) -> Buffer:
        """Return a buffer of new device memory, whose `writeback` copies the data to `buffer`.

        Raises:
            TypeError: the adapter cannot allocate memory.
        """
        raise cannot_allocate(buffer.result)

    def is_sparse(self, array: Any) -> bool:
        """Return whether an array is sparse, in any format."""
        return False

    def sparse_array(self, array: Any, name: str) -> SparseArray:
        """Return the description of a sparse array, in constant time.

        Raises:
            TypeError: its format or dtype is not supported.
        """
        raise NotImplementedError

    def fresh_sparse(self, array: Any, sparse_dim: int, shape: tuple[int, ...]) -> Any:
        """Return a new sparse array without entries, with the format and dtype of `array`."""
        raise NotImplementedError

    def pack(self, array: Any) -> tuple[str, list[int], int] | None:
        """Return dtype, shape and size in bytes of an array inside an object to send; None if it cannot be sent there.

        Raises:
            RefusedError: the receiver would get a different array.
        """
        return None

    def content(self, array: Any) -> memoryview:
        """Return the bytes of an array that `pack` has accepted, in C order."""
        raise NotImplementedError

    def unpack(self, dtype: str, shape: list[Any], data: bytes) -> Any:
        """Return a new array made from received data. The caller has not checked the arguments.

        Raises:
            SerializationError: the arguments do not describe an array, or the library is not loaded.
        """
        raise NotImplementedError


class _Adapters(Registry[ArrayAdapter]):
    """The registry of adapters."""

    def __init__(self) -> None:
        super().__init__("adapter", ADAPTER_VERSION)
        self._attributes: tuple[str, ...] = ()

    @property
    def attributes(self) -> tuple[str, ...]:
        """The registered names that are protocol attributes, such as "__my_interface__"."""
        load_shipped()
        return self._attributes

    def register(self, name: str, target: ArrayAdapter | str, *, version: int) -> None:
        """Register an adapter, even for types that have been looked up before."""
        super().register(name, target, version=version)
        self._forget_types()

    def unregister(self, name: str) -> None:
        """Remove an adapter, even for types that have been looked up before."""
        super().unregister(name)
        self._forget_types()

    def _forget_types(self) -> None:
        self._attributes = tuple(each for each in self.names() if each.startswith("__"))
        _by_type.clear()


#: The registered adapters. A name is the top-level module of an array type, such as "mylib"; or a protocol attribute,
#: such as "__my_interface__"; or a DLPack device type, such as "dlpack:2".
adapters: Final = _Adapters()


def cannot_allocate(array: Any) -> TypeError:
    """Return the error for an array whose library has no adapter that can allocate memory."""
    return TypeError(
        f"cannot allocate an array like a {type(array).__name__}: pass outputs that share no memory with inputs"
    )


def adapter_of_type(kind: type) -> ArrayAdapter | None:
    """Return the adapter for a type or one of its base classes; None if none is registered.

    Cost: one lookup in a dict, except for the first object of a type.
    """
    try:
        return _by_type[kind]
    except KeyError:
        if len(_by_type) >= _CACHED_TYPES:
            _by_type.clear()
        found = _by_type[kind] = _find_adapter(kind, adapters.names())
        return found


def adapter_of(obj: Any) -> ArrayAdapter | None:
    """Return the adapter for an object, by its type or by a protocol attribute; None if none is registered."""
    return adapter_of_type(type(obj)) or adapter_of_attribute(obj)


def adapter_of_attribute(obj: Any) -> ArrayAdapter | None:
    """Return the adapter for an object by a protocol attribute; None if none is registered."""
    for name in adapters.attributes:
        if hasattr(obj, name):
            return adapters.get(name)
    return None


def provided_adapter_of(obj: Any) -> ArrayAdapter | None:
    """Return the adapter that another distribution's entry point registers for an object; None without one.

    Cost: 20 ms for the first object of each module.
    """
    tops = {top for base in type(obj).__mro__ if (top := _top_module(base)) not in _WITHOUT_ENTRY_POINTS}
    return _find_adapter(type(obj), [top for top in tops if top in adapters])


def dlpack_adapter(kind: int) -> ArrayAdapter | None:
    """Return the adapter for a DLPack device type; None if none is registered."""
    name = f"dlpack:{kind}"
    return adapters.get(name) if name in adapters.names() else None


def dlpack_kind(obj: Any) -> int | None:
    """Return the DLPack device type of an object; None if it does not support DLPack."""
    if not (hasattr(obj, "__dlpack__") and hasattr(obj, "__dlpack_device__")):
        return None
    return int(obj.__dlpack_device__()[0])


def _find_adapter(kind: type, names: Collection[str]) -> ArrayAdapter | None:
    for base in kind.__mro__:
        top = _top_module(base)
        if top in names and (found := adapters.get(top)).owns(kind):
            return found
    return None


def _top_module(kind: type) -> str:
    return str(kind.__module__).partition(".")[0].lower()
