"""Flat views of device memory. A view has the memory address as an integer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from aiocoll.elements.dtypes import DType

__all__ = ["UNKNOWN", "CopyBack", "DeviceArray", "place_of"]

#: The device number of an array whose library does not report it. The device backend then finds the number by the
#: address.
UNKNOWN = -1


class CopyBack:
    """A callable that copies a contiguous staging copy back to the caller's array, at most once.

    Args:
        copy: enqueues the copy on the stream that it gets as its argument.
        stream: the caller's stream.
        result: the caller's object.
    """

    __slots__ = ("_copy", "_result", "_stream")

    def __init__(self, copy: Callable[[int], None], stream: int, result: Any) -> None:
        self._copy: Callable[[int], None] | None = copy
        self._stream = stream
        self._result = result

    def on(self, stream: int) -> None:
        """Enqueue the copy on `stream`, from any thread. Do nothing when called again."""
        copy, self._copy = self._copy, None
        if copy is not None:
            copy(stream)

    def __call__(self) -> Any:
        """Enqueue the copy on the caller's stream unless it has been enqueued; return the caller's object."""
        self.on(self._stream)
        return self._result


class DeviceArray:
    """Contiguous elements in device memory. Subclasses for kinds of devices set `kind` and `label`.

    Attributes:
        kind: the kind of device, as programs name it, such as "cpu".
        label: the kind of device in error messages.
        ptr: address; 0 if there are no elements.
        size: number of elements.
        nbytes: number of bytes.
        dtype: element type.
        device: number of the device, or `UNKNOWN`.
        stream: the caller's current stream on the device at the time of the call. The elements are valid after the work
            on it. 0 and 1 mean the default stream, 2 means the default stream of the caller's thread.
        keep: an object that must live until the device no longer uses the memory.
        back: copies the elements back to the caller's array after the call; None if they are the caller's elements.
    """

    __slots__ = ("back", "device", "dtype", "keep", "nbytes", "ptr", "size", "stream")

    kind: ClassVar[str]
    label: ClassVar[str]

    def __init__(
        self, ptr: int, size: int, dtype: DType, device: int, stream: int, keep: Any, back: CopyBack | None = None
    ) -> None:
        self.ptr = ptr if size else 0  # CuPy gives empty slices arbitrary addresses
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
        """Return a slice of consecutive elements that shares the memory."""
        start, stop, step = part.indices(self.size)
        if step != 1:
            raise ValueError("a slice of a device array must have step 1")
        size = max(stop - start, 0)
        ptr = self.ptr + start * self.dtype.itemsize
        return type(self)(ptr, size, self.dtype, self.device, self.stream, self.keep, self.back)

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        """Raise TypeError instead of a conversion by NumPy, because the host cannot read the memory."""
        raise TypeError(f"the memory of a {self.label} device cannot be read as a NumPy array")

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.size} of {self.dtype.name} at {self.ptr:#x} of device {self.device})"

    def overlaps(self, other: Any) -> bool:
        """Return whether this array shares memory with `other`, an array of any kind."""
        if not isinstance(other, DeviceArray) or not self.size or not other.size:
            return False  # an address of host memory is never one of device memory
        return self.ptr < other.ptr + other.nbytes and other.ptr < self.ptr + self.nbytes


def place_of(array: Any) -> str:
    """Return a text for error messages that names the place of a flat array, such as "on the host"."""
    if not isinstance(array, DeviceArray):
        return "on the host"
    return f"on a {array.label} device" if array.device == UNKNOWN else f"on {array.label} device {array.device}"
