"""Buffers of arrays on CUDA devices: shared by address, staged by a copy on the device, or refused."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from aiocoll.arrays.cuda_array import CudaArray
from aiocoll.elements.allocate import empty_like, overwrite, same_place, spare
from aiocoll.elements.buffers import clash, overlaps, view
from aiocoll.elements.device import UNKNOWN, CopyBack, DeviceArray
from aiocoll.elements.dtypes import by_code, by_name

from ..fake_libraries import Cupy, JaxArray, Torch

FLOAT32 = by_name("float32")
#: The unsigned NumPy dtypes that store the bits of dtypes that NumPy lacks, by dtype name.
CARRIERS = {"bfloat16": "uint16"} | {by_code(code).name: "uint8" for code in range(16, 20)}
NAMES = [by_code(code).name for code in range(1, 20)]


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> Cupy:
    made = Cupy()
    monkeypatch.setitem(sys.modules, "cupy", made)  # type: ignore[arg-type]
    return made


@pytest.fixture
def torch(monkeypatch: pytest.MonkeyPatch) -> Torch:
    made = Torch()
    monkeypatch.setitem(sys.modules, "torch", made)  # type: ignore[arg-type]
    return made


def address(host: np.ndarray) -> int:
    return int(host.__array_interface__["data"][0])


class Interface:
    """An array with a `__cuda_array_interface__`, whose valid entries `changes` replaces."""

    def __init__(self, host: np.ndarray, device: int | None = 0, **changes: Any) -> None:
        self.host = host
        about = {"shape": host.shape, "typestr": host.dtype.str, "data": (address(host), False), "version": 3}
        self.__cuda_array_interface__ = {k: v for k, v in (about | changes).items() if v != "left out"}
        if device is not None:
            self.__dlpack_device__ = lambda: (2, device)


# -- CuPy


@pytest.mark.parametrize("shape", [(), (5,), (2, 3), (1, 4, 1)])
@pytest.mark.parametrize("name", [name for name in NAMES if name not in CARRIERS])
def test_buffers_of_cupy_arrays_share_their_memory(cupy: Cupy, name: str, shape: tuple[int, ...]) -> None:
    host = np.ones(shape, name)
    x = cupy.ndarray(host, 1)
    with cupy.on_stream(0x70, 1), cupy.on_stream(0x60, 0):
        buffer = view(x)
    assert isinstance(buffer.array, DeviceArray)
    assert (buffer.array.ptr, buffer.array.device, buffer.array.stream) == (address(host), 1, 0x70)
    assert (buffer.dtype.name, buffer.shape, buffer.count, buffer.nbytes) == (name, shape, host.size, host.nbytes)
    assert buffer.array.dtype is buffer.dtype
    assert buffer.array.keep is x
    assert buffer.writeback is None
    assert buffer.finish() is x
    assert cupy.enqueued == []


@pytest.mark.parametrize("name", CARRIERS)
def test_buffers_of_cupy_narrow_floats_share_their_memory(cupy: Cupy, name: str) -> None:
    host = np.ones(3, getattr(pytest.importorskip("ml_dtypes"), name))
    buffer = view(cupy.ndarray(host))
    assert (buffer.dtype.name, buffer.array.ptr, buffer.nbytes) == (name, address(host), host.nbytes)


@pytest.mark.parametrize("layout", [lambda x: x[:, ::2], lambda x: x.T, lambda x: x[::-1]])
def test_noncontiguous_cupy_arrays_are_copied_on_the_callers_stream(cupy: Cupy, layout: Any) -> None:
    host = layout(np.arange(24, dtype="int16").reshape(4, 6))
    want = host.flatten()
    x = cupy.ndarray(host, 1)
    with cupy.on_stream(0x70, 1):
        buffer = view(x)
    assert cupy.enqueued == [("dense", 1, 0x70)]
    assert buffer.array.keep[0] is x
    dense = buffer.array.keep[1].host
    assert buffer.array.ptr == address(dense) != address(host)
    assert np.array_equal(dense.ravel(), want)
    assert buffer.shape == host.shape
    dense += 1
    assert buffer.finish() is x
    assert cupy.enqueued[1:] == [("copy", 1, 0x70)]
    assert np.array_equal(host.flatten(), want + 1)


def test_staged_device_copy_is_written_back_once_on_its_stream(cupy: Cupy) -> None:
    host = np.zeros((3, 2), "float32").T
    buffer = view(cupy.ndarray(host))
    buffer.array.keep[1].host[...] = 1
    back = buffer.array[2:4].back
    assert back is buffer.array.back is buffer.writeback
    back.on(0x90)
    assert host.all()
    host[...] = 5  # this later write by the caller must not be overwritten
    assert buffer.finish() is buffer.result
    assert (host == 5).all()
    assert cupy.enqueued == [("dense", 0, 0), ("copy", 0, 0x90)]


def test_staged_device_input_is_not_written_back(cupy: Cupy) -> None:
    x = cupy.ndarray(np.arange(6)[::2])
    buffer = view(x, writable=False)
    assert buffer.writeback is None
    assert buffer.finish() is x
    assert cupy.enqueued == [("dense", 0, 0)]


def test_broadcast_cupy_arrays_are_accepted_only_as_input(cupy: Cupy) -> None:
    x = cupy.ndarray(np.broadcast_to(np.float32(3), (2, 3)))
    assert view(x, writable=False).array.keep[1].host.tolist() == [[3, 3, 3]] * 2
    with pytest.raises(ValueError, match=r"^grad has elements that share memory, and .*; pass grad.copy\(\)$"):
        view(x, name="grad")


@pytest.mark.parametrize("shape", [(0,), (2, 0)])
def test_empty_cupy_array_is_accepted(cupy: Cupy, shape: tuple[int, ...]) -> None:
    buffer = view(cupy.ndarray(np.empty(shape, "float32")))
    assert (buffer.array.ptr, buffer.count, buffer.nbytes, buffer.shape) == (0, 0, 0, shape)


def test_unsupported_device_dtype_is_refused(cupy: Cupy, torch: Torch) -> None:
    for x in (
        cupy.ndarray(np.zeros(2, "longdouble")),
        torch.Tensor(np.zeros(2), "complex32"),
        Interface(np.zeros(2), typestr="<V2"),
    ):
        with pytest.raises(
            TypeError, match=r"^x: dtype .* is (not supported; use one of bool, int8|supported on the host only)"
        ):
            view(x, name="x")


# -- torch


@pytest.mark.parametrize("shape", [(), (5,), (2, 3)])
@pytest.mark.parametrize("name", NAMES)
def test_buffers_of_cuda_tensors_share_their_memory(torch: Torch, name: str, shape: tuple[int, ...]) -> None:
    host = np.ones(shape, CARRIERS.get(name, name))
    tensor = torch.Tensor(host, name, 1, requires_grad=True)
    with torch.on_stream(0x70, 1):
        buffer = view(tensor)
    assert isinstance(buffer.array, DeviceArray)
    assert (buffer.array.ptr, buffer.array.device, buffer.array.stream) == (address(host), 1, 0x70)
    assert (buffer.dtype.name, buffer.shape, buffer.count, buffer.nbytes) == (name, shape, host.size, host.nbytes)
    assert buffer.array.keep[0] is tensor
    assert buffer.writeback is None
    assert buffer.finish() is tensor
    assert torch.enqueued == []


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("to", [0, 1, 0x90])
def test_noncontiguous_cuda_tensors_are_copied_on_the_device(torch: Torch, requires_grad: bool, to: int) -> None:
    host = np.arange(6, dtype="uint16").reshape(2, 3).T
    want = host.flatten()
    tensor = torch.Tensor(host, "bfloat16", 1, requires_grad=requires_grad)
    with torch.on_stream(0x70, 1):
        buffer = view(tensor)
    dense = buffer.array.keep[1].host
    assert buffer.array.ptr == address(dense) != address(host)
    assert np.array_equal(dense.ravel(), want)
    dense += 1
    assert buffer.array.back is not None
    buffer.array.back.on(to)
    assert torch.enqueued == [("dense", 1, 0x70), ("copy", 1, to if to > 1 else 0)]
    assert buffer.finish() is tensor
    assert np.array_equal(host.flatten(), want + 1)


def test_conjugated_cuda_tensors_are_resolved(torch: Torch) -> None:
    host = np.array([1 + 2j, 3 - 4j], "complex64")
    tensor = torch.Tensor(host, "complex64", conj=True)
    buffer = view(tensor)
    dense = buffer.array.keep[1].host
    assert dense.tolist() == [1 - 2j, 3 + 4j]
    dense *= 2
    buffer.finish()
    assert host.tolist() == [2 + 4j, 6 - 8j]


def test_staged_cuda_input_tensor_is_not_written_back(torch: Torch) -> None:
    tensor = torch.Tensor(np.broadcast_to(np.float32(3), (2, 3)), "float32")
    assert view(tensor, writable=False).writeback is None
    with pytest.raises(ValueError, match=r"^x has elements that share memory, and .*; pass x.clone\(\)$"):
        view(tensor, name="x")


def test_empty_cuda_tensor_is_accepted(torch: Torch) -> None:
    buffer = view(torch.Tensor(np.empty((3, 0), "float32").T, "float32"))
    assert (buffer.array.ptr, buffer.count, buffer.writeback) == (0, 0, None)


def test_sparse_cuda_tensor_is_refused(torch: Torch) -> None:
    with pytest.raises(TypeError, match=r"x is torch.sparse_coo on a CUDA device: sparse tensors must be on") as got:
        view(torch.Tensor(np.ones(2), "float64", layout=torch.sparse_coo), name="x")
    assert type(got.value) is TypeError


# -- other libraries


@pytest.mark.parametrize(("entry", "stream"), [("left out", 0), (None, 0), (1, 1), (2, 2), (0x70, 0x70)])
@pytest.mark.parametrize("version", [2, 3])
def test_buffer_of_an_array_with_a_cuda_interface_shares_its_memory(version: int, entry: Any, stream: int) -> None:
    host = np.ones((2, 3), "float16")
    x = Interface(host, 1, stream=entry, version=version, strides=None)
    buffer = view(x)
    assert isinstance(buffer.array, DeviceArray)
    assert (buffer.array.ptr, buffer.array.device, buffer.array.stream) == (address(host), 1, stream)
    assert (buffer.dtype.name, buffer.shape, buffer.count) == ("float16", (2, 3), 6)
    assert buffer.array.keep is x
    assert buffer.finish() is x


@pytest.mark.parametrize("name", CARRIERS)
def test_cuda_interface_that_declares_only_an_item_size_is_accepted(name: str) -> None:
    host = np.ones(3, CARRIERS[name])
    x = Interface(host, typestr=f"<V{host.itemsize}")
    x.dtype = SimpleNamespace(name=name)
    buffer = view(x)
    assert (buffer.dtype.name, buffer.array.ptr, buffer.nbytes) == (name, address(host), host.nbytes)
    for wrong in ("float64", "complex32", None):
        x.dtype = SimpleNamespace(name=wrong)
        with pytest.raises(TypeError, match=r"x: dtype .*V\d.* is supported on the host only"):
            view(x, name="x")


def test_cuda_interface_that_names_no_device_is_accepted() -> None:
    assert view(Interface(np.ones(2), None)).array.device == UNKNOWN
    x = Interface(np.ones(2))
    x.__dlpack_device__ = lambda: (13, 0)  # 13 is the DLPack device type of managed memory
    assert view(x).array.device == UNKNOWN


@pytest.mark.parametrize(
    ("shape", "strides", "fits"),
    [
        ((2, 3), (24, 8), True),
        ((1, 3), (999, 8), True),
        ((3, 1), (8, 999), True),
        ((), (), True),
        ((0, 3), (8, 64), True),
        ((2, 3), (8, 16), False),
        ((3,), (16,), False),
        ((3,), (0,), False),
    ],
)
def test_cuda_interface_with_noncontiguous_strides_is_refused(
    shape: tuple[int, ...], strides: tuple[int, ...], fits: bool
) -> None:
    x = Interface(np.ones(6), shape=shape, strides=strides)
    if fits:
        buffer = view(x)
        assert (buffer.count, buffer.array.ptr) == (np.prod(shape), address(x.host) if np.prod(shape) else 0)
    else:
        with pytest.raises(
            TypeError, match="x is not contiguous, and its library is not known: pass a contiguous copy"
        ):
            view(x, name="x")


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"data": (64, True)}, ValueError, "x is read-only, but the result is written to it; pass a writable copy"),
        ({"mask": 1}, TypeError, "x is a masked array; pass its data alone"),
        ({"version": 1}, TypeError, "x: its __cuda_array_interface__ has version 1, but must have version 2 or later"),
        ({"stream": 0}, TypeError, "x: its __cuda_array_interface__ names stream 0, which the protocol forbids"),
        ({"data": "left out"}, TypeError, "x: its __cuda_array_interface__ is not complete: KeyError"),
        ({"typestr": "what"}, TypeError, "x: its __cuda_array_interface__ is not complete: TypeError"),
        ({"data": (1, 2, 3)}, TypeError, "x: its __cuda_array_interface__ is not complete: ValueError"),
    ],
)
def test_invalid_cuda_interface_is_refused(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^{message}"):
        view(Interface(np.ones(2), **changes), name="x")


def test_read_only_device_array_is_accepted_only_as_input() -> None:
    assert view(Interface(np.ones(2), data=(64, True)), writable=False).array.ptr == 64


class Capsule:
    """An array of an unknown library that exports its CUDA memory by DLPack."""

    def __init__(self, host: np.ndarray, device: int = 2, fail: bool = False) -> None:
        self.host, self.device, self.fail = host, device, fail
        self.device_queries = 0

    def __dlpack_device__(self) -> tuple[int, int]:
        self.device_queries += 1
        # After the first query, return the CPU: the fake CuPy and torch import the object through NumPy.
        return (1, 0) if self.device_queries > 1 else (self.device, 0)

    def __dlpack__(self, **options: Any) -> object:
        if self.fail:
            raise BufferError("not today")
        return self.host.__dlpack__(**options)


@pytest.mark.parametrize("library", ["cupy", "torch"])
def test_dlpack_object_is_imported_through_a_loaded_array_library(
    library: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "cupy", raising=False)
    request.getfixturevalue(library)
    x = Capsule(np.ones((2, 2), "float32"))
    buffer = view(x)
    assert (buffer.array.ptr, buffer.shape, buffer.dtype) == (address(x.host), (2, 2), FLOAT32)
    assert buffer.finish() is x
    with pytest.raises(TypeError, match="x: this Capsule cannot be imported by DLPack: not today"):
        view(Capsule(np.ones(2), fail=True), name="x")


def test_dlpack_object_without_a_loaded_array_library_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "cupy", raising=False)
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    with pytest.raises(
        TypeError, match=r"x exports its CUDA memory by DLPack only: pass cupy.from_dlpack\(x\) or torch"
    ):
        view(Capsule(np.ones(2)), name="x")
    with pytest.raises(TypeError, match="x is on a device of DLPack type 7: it must be on the CPU or on CUDA"):
        view(SimpleNamespace(__dlpack__=None, __dlpack_device__=lambda: (7, 0)), name="x")


def test_error_for_a_rocm_array_names_rocm(torch: Torch) -> None:
    torch.version.hip = "6.3"
    with pytest.raises(TypeError, match=r"x is a torch tensor on a ROCm device, and ROCm is not supported; .*x.cpu"):
        view(torch.Tensor(np.ones(2), "float64"), name="x")
    with pytest.raises(TypeError, match="x is on a ROCm device, and ROCm is not supported"):
        view(SimpleNamespace(__dlpack__=None, __dlpack_device__=lambda: (10, 0)), name="x")


@pytest.mark.parametrize("make", [Interface, Capsule])
def test_jax_device_arrays_are_accepted_only_as_input(make: Any, cupy: Cupy) -> None:
    kind = type("ArrayImpl", (make,), {"__module__": "jaxlib._jax"})
    assert view(kind(np.ones(2)), writable=False).count == 2
    with pytest.raises(ValueError, match="x is read-only, but the result is written to it; pass a writable copy"):
        view(kind(np.ones(2)), name="x")


# -- slices, devices and new arrays


def array(ptr: int, size: int, device: int = 0) -> DeviceArray:
    return CudaArray(ptr, size, FLOAT32, device, 0, None)


def test_slices_of_a_device_array_share_its_memory() -> None:
    whole = CudaArray(0x100, 10, FLOAT32, 1, 0x70, "kept")
    part = whole[3:7]
    assert (part.ptr, part.size, part.nbytes, len(part)) == (0x10C, 4, 16, 4)
    assert (part.dtype, part.device, part.stream, part.keep) == (FLOAT32, 1, 0x70, "kept")
    assert (whole[4:4].ptr, whole[4:4].nbytes) == (0, 0)
    assert len(whole[7:3]) == 0
    assert repr(part) == "CudaArray(4 of float32 at 0x10c of device 1)"
    with pytest.raises(ValueError, match="must have step 1"):
        whole[::2]


def test_device_array_cannot_be_read_by_numpy() -> None:
    for read in (np.asarray, np.copy, lambda x: np.add(x, 1)):
        with pytest.raises(TypeError, match="the memory of a CUDA device cannot be read as a NumPy array"):
            read(array(0x100, 4))


def test_overlapping_device_arrays_are_detected() -> None:
    x = array(0x100, 8)
    assert overlaps(x, x)
    assert overlaps(x[:5], x[4:])
    assert not overlaps(x[:4], x[4:])
    assert not overlaps(x[2:2], x)
    assert not overlaps(x, np.ones(2))
    assert clash([x[:4], x[4:]]) is None
    assert clash([x[:5], x[4:]]) == (0, 1)
    many = [x[i : i + 1] for i in range(8)]
    assert clash(many) is None
    assert clash([*many, x[3:4]]) == (3, 8)


def test_arrays_of_one_call_on_different_devices_are_refused(cupy: Cupy) -> None:
    host, first = view(np.ones(2)), view(cupy.ndarray(np.ones(2)))
    second, somewhere = view(cupy.ndarray(np.ones(2), 1)), view(Interface(np.ones(2), None))
    same_place(host, "a", host, "b")
    same_place(second, "a", second, "b", 3)
    same_place(second, "a", somewhere, "b")  # an array without a known device may be on the same device
    same_place(somewhere, "a", second, "b")
    for a, b, rank, message in (
        (host, first, None, "a is on the host, b is on CUDA device 0"),
        (first, host, 2, r"a\[2\] is on CUDA device 0, b is on the host"),
        (first, second, None, "a is on CUDA device 0, b is on CUDA device 1"),
        (somewhere, host, None, "a is on a CUDA device, b is on the host"),
    ):
        with pytest.raises(TypeError, match=f"^{message}: all arrays of a call must be on one device$"):
            same_place(a, "a", b, "b", rank)


def test_empty_like_a_device_array_has_its_shape_dtype_and_device(cupy: Cupy, torch: Torch) -> None:
    made = empty_like(view(np.ones((2, 3), "float16")))
    assert (made.shape, made.dtype) == ((2, 3), "float16")
    made = empty_like(view(cupy.ndarray(np.ones((2, 3), "float16"), 1)))
    assert (made.shape, made.dtype, made.device.id) == ((2, 3), "float16", 1)
    made = empty_like(view(torch.Tensor(np.ones((2, 3), "uint16"), "bfloat16", 1)))
    assert (made.shape, made.dtype, made.device.index) == ((2, 3), "torch.bfloat16", 1)
    with pytest.raises(
        TypeError, match=r"cannot allocate an array like a Interface: pass outputs that share no memory"
    ):
        empty_like(view(Interface(np.ones(2))))
    with pytest.raises(TypeError, match=r"cannot allocate an array like a Capsule: pass outputs that share no memory"):
        empty_like(view(Capsule(np.ones(2))))


@pytest.mark.parametrize("layout", ["dense", "strided"])
@pytest.mark.parametrize("kind", ["numpy", "cupy", "torch", "immutable"])
def test_overwrite_copies_values_into_arrays_of_every_library(kind: str, layout: str, cupy: Cupy, torch: Torch) -> None:
    host = np.zeros((2, 3), "float32") if layout == "dense" else np.zeros((3, 2), "float32").T
    array: Any = {
        "numpy": lambda: host,
        "cupy": lambda: cupy.ndarray(host, 1),
        "torch": lambda: torch.Tensor(host, "float32", 1, requires_grad=True),
        "immutable": lambda: JaxArray(host),
    }[kind]()
    values = empty_like(view(array))
    filled = getattr(values, "host", values)
    filled[...] = [[1, 2, 3], [4, 5, 6]]
    result = overwrite(array, values)
    assert (result is array) == (kind != "immutable")
    assert np.array_equal(host if result is array else result.host, filled)


@pytest.mark.parametrize("kind", ["numpy", "cupy", "torch"])
def test_spare_buffer_has_separate_memory_of_the_same_shape(kind: str, cupy: Cupy, torch: Torch) -> None:
    host = np.zeros((3, 2), "float32").T
    x = {"numpy": host, "cupy": cupy.ndarray(host), "torch": torch.Tensor(host, "float32", requires_grad=True)}[kind]
    given = view(x)
    buffer = spare(given)
    assert (buffer.dtype, buffer.shape, buffer.count) == (FLOAT32, (2, 3), 6)
    assert not overlaps(buffer.array, given.array)
    fresh = buffer.array if kind == "numpy" else buffer.array.keep[1].host
    fresh[...] = np.arange(6).reshape(fresh.shape)
    assert buffer.finish() is x
    assert host.flatten().tolist() == [0, 1, 2, 3, 4, 5]


def test_finished_copy_back_runs_once_and_returns_its_result() -> None:
    done: list[int] = []
    back = CopyBack(done.append, 3, "result")
    assert back() == "result"
    back.on(4)
    assert done == [3]
