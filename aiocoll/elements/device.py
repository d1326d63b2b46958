"""Flat memory of a device, as plain integers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from aiocoll.elements.dtypes import DType

__all__ = ["UNKNOWN", "DeviceArray", "PutBack", "place_of"]

#: The device of an array whose library does not tell it; the backend of the device finds it by the address.
UNKNOWN = -1


class PutBack:
    """Copies a contiguous copy back to the caller's elements, once.

    Args:
        copy: enqueues the copy on the stream it is given.
        stream: the caller's stream.
        result: the caller's object.
    """

    __slots__ = ("_copy", "_result", "_stream")

    def __init__(self, copy: Callable[[int], None], stream: int, result: Any) -> None:
        self._copy: Callable[[int], None] | None = copy
        self._stream = stream
        self._result = result

    def on(self, stream: int) -> None:
        """Enqueue the copy on `stream`, from any thread; does nothing the second time."""
        copy, self._copy = self._copy, None
        if copy is not None:
            copy(stream)

    def __call__(self) -> Any:
        """Enqueue the copy on the caller's stream unless it was enqueued before; return the caller's object."""
        self.on(self._stream)
        return self._result


class DeviceArray:
    """Contiguous elements on a device; each kind of device has a subclass, which sets `kind` and `label`.

    Attributes:
        kind: of the device, as programs name it, such as "cpu".
        label: the kind in error messages.
        ptr: address; 0 if there are no elements.
        size: number of elements.
        nbytes: number of bytes.
        dtype: of the elements.
        device: ordinal, or `UNKNOWN`.
        stream: the caller's current stream of that device at the call; the elements are valid after the work on it. 0
            and 1 are the default stream, 2 is that of the caller's thread.
        keep: object that must live until the device is done with the memory.
        back: copies the elements back to the caller's after the call; None where these are the caller's.
    """

    __slots__ = ("back", "device", "dtype", "keep", "nbytes", "ptr", "size", "stream")

    kind: ClassVar[str]
    label: ClassVar[str]

    def __init__(
        self, ptr: int, size: int, dtype: DType, device: int, stream: int, keep: Any, back: PutBack | None = None
    ) -> None:
        self.ptr = ptr if size else 0  # the pointers of CuPy's empty slices are arbitrary
        self.size = size
        self.nbytes = size * dtype.itemsize
        self.dtype = dtype
        self.device = device
        self.stream = stream
        self.keep = keep
        self.back = back

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, part: slice) -> DeviceArray:
        """Return consecutive elements, which share the memory."""
        start, stop, step = part.indices(self.size)
        if step != 1:
            raise ValueError("a slice of a device array must have step 1")
        size = max(stop - start, 0)
        ptr = self.ptr + start * self.dtype.itemsize
        return type(self)(ptr, size, self.dtype, self.device, self.stream, self.keep, self.back)

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse NumPy's implicit conversion: the memory cannot be read from the host."""
        raise TypeError(f"the memory of a {self.label} device cannot be read as a NumPy array")

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.size} of {self.dtype.name} at {self.ptr:#x} of device {self.device})"

    def overlaps(self, other: Any) -> bool:
        """Whether any memory is shared with `other`, an array of any kind."""
        if not isinstance(other, DeviceArray) or not self.size or not other.size:
            return False  # device addresses are not used by host memory
        return self.ptr < other.ptr + other.nbytes and other.ptr < self.ptr + self.nbytes


def place_of(array: Any) -> str:
    """Return the place of a flat array in words, for messages."""
    if not isinstance(array, DeviceArray):
        return "on the host"
    return f"on a {array.label} device" if array.device == UNKNOWN else f"on {array.label} device {array.device}"
