"""Adapters of array libraries: the interface, the registry, and the adapter of an object."""

from __future__ import annotations

import sys
from collections.abc import Collection
from typing import TYPE_CHECKING, Any, Final

from aiocoll.registry import Registry

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

#: Version of the interface `ArrayAdapter`.
ADAPTER_VERSION: Final = 1
#: Types whose adapter is remembered; a program may make types without end.
_KNOWN: Final = 1024
#: Adapters by type, of types without one, too.
_by_type: dict[type, ArrayAdapter | None] = {}
#: Modules for which no entry point is searched.
_HOST: Final = sys.stdlib_module_names | {"numpy", "scipy"}


class ArrayAdapter:
    """The arrays of one library, or of one protocol, as flat views, and new ones like them.

    Each method has an implementation for arrays that do not support it; a subclass overrides `view`, and the methods of
    what its library can do.

    Attributes:
        library: the top-level module that it is registered for; "" for a protocol.
        noun: its arrays in error messages, such as "a torch tensor"; "" for a protocol.
        label: the kind of device in error messages; "" for arrays on the host, or on a device that is not supported.
    """

    library = ""
    noun = ""
    label = ""

    def owns(self, kind: type) -> bool:
        """Return whether objects of a type from the library are arrays that this adapter can view."""
        return True

    def view(self, array: Any, name: str, writable: bool) -> Buffer:
        """Return a flat view of an array, without copying where that is possible.

        Args:
            array: an array of the library.
            name: its name in error messages.
            writable: whether the operation writes to it.

        Raises:
            TypeError: it cannot be exchanged.
            ValueError: it cannot be written to, but the operation does.
        """
        raise NotImplementedError

    def empty_like(self, array: Any) -> Any:
        """Return a new contiguous array on the device of `array`, of its shape and dtype.

        Raises:
            TypeError: the library cannot be asked for one.
        """
        raise cannot_allocate(array)

    def overwrite(self, array: Any, values: Any) -> None:
        """Copy `values`, made by `empty_like` for the device array `array`, to it, on the current stream."""
        raise NotImplementedError

    def spare(self, buffer: Buffer) -> Buffer:
        """Return a buffer of new device memory to use instead of `buffer`; its `writeback` copies it to `buffer`.

        Raises:
            TypeError: the library cannot be asked for memory.
        """
        raise cannot_allocate(buffer.result)

    def is_sparse(self, array: Any) -> bool:
        """Return whether an array is sparse, in any format."""
        return False

    def sparse_array(self, array: Any, name: str) -> SparseArray:
        """Describe a sparse array, in constant time.

        Raises:
            TypeError: its format or dtype is not supported.
        """
        raise NotImplementedError

    def fresh_sparse(self, array: Any, sparse_dim: int, shape: tuple[int, ...]) -> Any:
        """Return a sparse array without entries, of the format and dtype of `array`."""
        raise NotImplementedError

    def pack(self, array: Any) -> tuple[str, list[int], int] | None:
        """Return dtype, shape and number of bytes of an array in a sent object; None if it cannot be in one.

        Raises:
            RefusedError: it would not arrive as it is.
        """
        return None

    def content(self, array: Any) -> memoryview:
        """Return the bytes of an array that `pack` accepted, in C order."""
        raise NotImplementedError

    def unpack(self, dtype: str, shape: list[Any], data: bytes) -> Any:
        """Return a new array of received values, none of which has been checked.

        Raises:
            SerializationError: they are not those of an array, or the library is not loaded.
        """
        raise NotImplementedError


class _Adapters(Registry[ArrayAdapter]):
    """The registry of adapters.

    Attributes:
        attributes: the names that are those of protocol attributes.
    """

    def __init__(self) -> None:
        super().__init__("adapter", ADAPTER_VERSION)
        self.attributes: tuple[str, ...] = ()

    def register(self, name: str, target: ArrayAdapter | str, *, version: int) -> None:
        """Register an adapter; types that are known already get it, too."""
        super().register(name, target, version=version)
        self._forget_types()

    def unregister(self, name: str) -> None:
        """Forget an adapter, also for types that are known already."""
        super().unregister(name)
        self._forget_types()

    def _forget_types(self) -> None:
        self.attributes = tuple(each for each in self.names() if each.startswith("__"))
        _by_type.clear()


#: Adapters by what their arrays are recognized by: the top-level module of the type, such as "mylib"; the name of a
#: protocol attribute, such as "__my_interface__"; or a DLPack device type, such as "dlpack:2".
adapters: Final = _Adapters()


def cannot_allocate(array: Any) -> TypeError:
    """Return the error of an array on a device whose library is not known."""
    return TypeError(
        f"cannot allocate an array like a {type(array).__name__}: pass outputs that share no memory with inputs"
    )


def adapter_of_type(kind: type) -> ArrayAdapter | None:
    """Return the adapter of a type, or of one it is derived from; None if no library is registered for it.

    Cost: one lookup in a dict, except for the first object of a type.
    """
    try:
        return _by_type[kind]
    except KeyError:
        if len(_by_type) >= _KNOWN:
            _by_type.clear()
        found = _by_type[kind] = _find_adapter(kind, adapters.names())
        return found


def adapter_of(obj: Any) -> ArrayAdapter | None:
    """Return the adapter of an object by its type or by a protocol attribute; None if none is registered for it."""
    return adapter_of_type(type(obj)) or adapter_of_attribute(obj)


def adapter_of_attribute(obj: Any) -> ArrayAdapter | None:
    """Return the adapter of an object by a protocol attribute; None if none is registered for it."""
    for name in adapters.attributes:
        if hasattr(obj, name):
            return adapters.get(name)
    return None


def provided_adapter_of(obj: Any) -> ArrayAdapter | None:
    """Return the adapter of an object that another distribution provides by an entry point.

    Cost: 20 ms for the first object of each module.
    """
    tops = {top for base in type(obj).__mro__ if (top := _top_module(base)) not in _HOST}
    return _find_adapter(type(obj), [top for top in tops if top in adapters])


def dlpack_adapter(kind: int) -> ArrayAdapter | None:
    """Return the adapter of memory of a DLPack device type; None if none is registered for it."""
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
