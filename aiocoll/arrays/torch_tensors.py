"""The adapter for torch tensors. It never imports torch: with a tensor, the program has imported it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from typing import Any

from aiocoll.arrays.cuda_array import KIND, CudaArray, spare_buffer
from aiocoll.elements.adapters import ArrayAdapter
from aiocoll.elements.buffers import Buffer
from aiocoll.elements.device import CopyBack
from aiocoll.elements.dtypes import DType, by_name
from aiocoll.elements.sparse import SparseArray
from aiocoll.elements.strides import check_disjoint
from aiocoll.loading import loading

__all__ = ["TORCH", "cuda_view"]


class _TorchTensors(ArrayAdapter):
    """The adapter for torch tensors; autograd does not record the operations of aiocoll."""

    library = "torch"
    noun = "a torch tensor"

    def owns(self, kind: type) -> bool:
        """Return whether the type `kind` is a torch tensor type."""
        return issubclass(kind, getattr(sys.modules.get("torch"), "Tensor", ()))

    def view(self, tensor: Any, name: str, writable: bool) -> Buffer:
        """Return a flat view of a dense tensor."""
        torch: Any = sys.modules["torch"]
        if not tensor.is_cpu or tensor.layout is not torch.strided:
            return _view_elsewhere(torch, tensor, name, writable)
        dtype, carrier = _checked_dtype(tensor, name)
        try:
            # Convert only if necessary, because each of these conversions takes 0.5 µs and few tensors need one.
            plain = tensor.detach() if tensor.requires_grad else tensor
            resolved = plain.resolve_conj().resolve_neg() if plain.is_conj() or plain.is_neg() else plain
            resolved = resolved.contiguous()
            array = (resolved if carrier is None else resolved.view(getattr(torch, carrier))).numpy()
            shape = tuple(tensor.shape)
        except RuntimeError as exc:  # nested and fake tensors, and other subclasses that have no memory
            raise _no_memory_error(tensor, name, exc) from exc
        if array.ndim != 1:
            array = array.reshape(-1)
        if array.dtype is not dtype.storage:
            array = array.view(dtype.storage)
        buffer = Buffer(array, dtype, shape, tensor)
        if writable and resolved.data_ptr() != plain.data_ptr() and buffer.count:
            check_disjoint(plain.stride(), tuple(plain.shape), 1, name, f"{name}.clone()")

            def writeback() -> Any:
                plain.copy_(resolved)
                return tensor

            buffer.writeback = writeback
        return buffer

    def empty_like(self, tensor: Any) -> Any:
        """Return a new contiguous tensor on the device of `tensor`."""
        return sys.modules["torch"].empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)

    def overwrite(self, tensor: Any, values: Any) -> None:
        """Copy `values` into `tensor`; for a CUDA tensor, on torch's current stream."""
        tensor.detach().copy_(values)

    def spare(self, buffer: Buffer) -> Buffer:
        """Return a temporary buffer that replaces `buffer` during an operation; see `spare_buffer`."""
        tensor = buffer.result
        fresh = self.empty_like(tensor)
        copy = _copy_into(sys.modules["torch"], tensor.detach(), fresh)
        return spare_buffer(buffer, fresh.data_ptr(), fresh, copy)

    def is_sparse(self, tensor: Any) -> bool:
        """Return whether a tensor is on the CPU and has a sparse layout."""
        torch: Any = sys.modules["torch"]
        return bool(tensor.is_cpu) and tensor.layout is not torch.strided and "sparse" in str(tensor.layout)

    def sparse_array(self, tensor: Any, name: str) -> SparseArray:
        """Return a `SparseArray` that describes a sparse tensor, in constant time."""
        with loading("sparse arrays"):
            from aiocoll.arrays.torch_sparse import describe  # imported here: few programs need it

        return describe(sys.modules["torch"], tensor, name)

    def fresh_sparse(self, tensor: Any, sparse_dim: int, shape: tuple[int, ...]) -> Any:
        """Return a sparse tensor without entries, with the layout and dtype of `tensor`."""
        with loading("sparse arrays"):
            from aiocoll.arrays.torch_sparse import fresh_like

        return fresh_like(sys.modules["torch"], tensor, sparse_dim, shape)

    def pack(self, tensor: Any) -> tuple[str, list[int], int] | None:
        """Return the dtype, shape and number of bytes of a tensor to send inside an object."""
        with loading("objects with tensors"):
            from aiocoll.arrays.torch_objects import pack  # imported here: it imports the codec

        return pack(sys.modules["torch"], tensor)

    def content(self, tensor: Any) -> memoryview:
        """Return the bytes of a tensor, in C order."""
        from aiocoll.arrays.torch_objects import content

        return content(sys.modules["torch"], tensor)

    def unpack(self, dtype: str, shape: list[Any], data: bytes) -> Any:
        """Return a new tensor with a received dtype, shape and content."""
        with loading("objects with tensors"):
            from aiocoll.arrays.torch_objects import unpack

        return unpack(sys.modules.get("torch"), dtype, shape, data)


TORCH = _TorchTensors()


def _view_elsewhere(torch: Any, tensor: Any, name: str, writable: bool) -> Buffer:
    """Return a flat view of a CUDA tensor; raise TypeError for any tensor that is not supported."""
    device = tensor.device.type
    if device != KIND:
        raise _dense_tensor_error(tensor, name, f"{tensor.layout} on {device}")
    if getattr(torch.version, "hip", None):  # torch for ROCm also names its devices "cuda"
        raise TypeError(f"{name} is a torch tensor on a ROCm device, and ROCm is not supported; pass {name}.cpu()")
    array = cuda_view(torch, tensor, _checked_dtype(tensor, name)[0], name, writable)
    flat: Any = array
    return Buffer(flat, array.dtype, tuple(tensor.shape), tensor, array.back)


def cuda_view(torch: Any, tensor: Any, dtype: DType, name: str, writable: bool) -> CudaArray:
    """Return a flat view of a CUDA tensor whose element type is `dtype`.

    Raises:
        TypeError: the tensor is sparse.
        ValueError: the tensor is expanded, but the operation writes to it.
    """
    if tensor.layout is not torch.strided:
        raise TypeError(f"{name} is {tensor.layout} on a CUDA device: sparse tensors must be on the CPU")
    device = tensor.get_device()
    stream = torch.cuda.current_stream(device).cuda_stream
    plain = tensor.detach() if tensor.requires_grad else tensor
    dense = plain.resolve_conj().resolve_neg().contiguous()
    ptr, back = dense.data_ptr(), None
    if writable and dense is not plain and ptr != plain.data_ptr():
        check_disjoint(plain.stride(), tuple(plain.shape), 1, name, f"{name}.clone()")
        back = CopyBack(_copy_into(torch, plain, dense), stream, tensor)
    return CudaArray(ptr, dense.numel(), dtype, device, stream, (tensor, dense), back)


def _copy_into(torch: Any, plain: Any, dense: Any) -> Callable[[int], None]:
    def copy(stream: int) -> None:
        # torch's `ExternalStream` does not accept the handles of the default stream (0 and 1).
        on = torch.cuda.ExternalStream(stream, plain.device) if stream > 1 else torch.cuda.default_stream(plain.device)
        with torch.cuda.stream(on):
            plain.copy_(dense)

    return copy


def _no_memory_error(tensor: Any, name: str, error: RuntimeError) -> TypeError:
    if tensor.is_nested:
        return _dense_tensor_error(tensor, name, "")
    why = str(error).partition("\n")[0]
    return TypeError(
        f"{name} must be a dense tensor on the CPU or on CUDA; torch gives no access to the memory of this "
        f"{type(tensor).__name__}: {why}"
    )


def _dense_tensor_error(tensor: Any, name: str, found: str) -> TypeError:
    found = "a nested tensor; pass its component tensors" if tensor.is_nested else found
    return TypeError(f"{name} must be a dense tensor on the CPU or on CUDA, not {found}")


@cache  # NumPy computes the name of a dtype at every access, which takes more than 1 µs
def _torch_dtype(dtype: Any) -> tuple[DType, str | None]:
    """Return the element type of a torch dtype.

    If NumPy lacks the type, also return the integer dtype as which torch passes the memory to NumPy; else None.
    """
    found = by_name(str(dtype).removeprefix("torch."))
    if found.is_narrow:  # torch has no arithmetic for narrow integers either, and does not define their memory layout
        raise TypeError(f"dtype {dtype} is not supported; use torch.int8 or torch.uint8")
    storage = found.storage.name
    return found, None if found.name == storage else {"uint16": "int16", "uint8": "uint8"}[storage]


def _checked_dtype(tensor: Any, name: str) -> tuple[DType, str | None]:
    try:
        return _torch_dtype(tensor.dtype)
    except TypeError as exc:
        raise TypeError(f"{name}: {exc}") from None
