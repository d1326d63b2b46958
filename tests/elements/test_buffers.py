"""Buffers that `view` makes from arrays: with shared memory, with a staging copy, or refused."""

from __future__ import annotations

import array
import ctypes
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.lib.stride_tricks import as_strided

from aiocoll.elements.buffers import Buffer, byte_view, is_scalar, overlaps, scalar, view
from aiocoll.elements.strides import check_disjoint

from ..each import each


class Interface:
    """An array of an unknown library that exports its memory by `__array_interface__`."""

    def __init__(self, source: np.ndarray) -> None:
        self.source = source
        self.__array_interface__ = source.__array_interface__


class Capsule:
    """An array of an unknown library that exports its memory by DLPack."""

    def __init__(self, source: np.ndarray, device: int = 1) -> None:
        self.source = source
        self.device = device

    def __dlpack_device__(self) -> tuple[int, int]:
        return (self.device, 0)

    def __dlpack__(self, **options: Any) -> object:
        return self.source.__dlpack__(**options)


class Immutable(Interface):
    """A read-only array, like a JAX array: its library returns results as new arrays."""

    def __init__(self, source: np.ndarray) -> None:
        source.flags.writeable = False
        super().__init__(source)

    def __array_namespace__(self) -> SimpleNamespace:
        return SimpleNamespace(asarray=Immutable)


def address(x: np.ndarray) -> int:
    return x.__array_interface__["data"][0]


@pytest.mark.parametrize("shape", [(), (0,), (5,), (2, 3), (4, 0, 2), (1, 1, 1)])
@pytest.mark.parametrize("dtype", ["bool", "int16", "uint64", "float16", "float32", "complex128"])
def test_buffers_of_numpy_arrays_share_their_memory(shape: tuple[int, ...], dtype: str) -> None:
    x = np.ones(shape, dtype)
    buffer = view(x)
    assert buffer.array.shape == (x.size,)
    assert buffer.array.dtype == dtype == buffer.dtype.name
    assert address(buffer.array) == address(x)
    assert (buffer.shape, buffer.count, buffer.nbytes) == (shape, x.size, x.nbytes)
    assert buffer.writeback is None
    assert buffer.finish() is x
    buffer.array[:] = 0
    assert not x.any()


@pytest.mark.parametrize("name", ["bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"])
def test_buffers_of_ml_dtypes_arrays_share_their_memory(name: str) -> None:
    x = np.ones((2, 2), getattr(pytest.importorskip("ml_dtypes"), name))
    buffer = view(x)
    assert buffer.dtype.name == name
    assert buffer.array.dtype == f"uint{x.itemsize * 8}"
    assert buffer.finish() is x
    buffer.array[:] = 0
    assert (x == 0).all()


@pytest.mark.parametrize(
    "layout",
    [
        lambda x: x[:, ::2],
        lambda x: x.T,
        lambda x: np.asfortranarray(x),
        lambda x: x[::-1, ::-1],
        lambda x: x[0, ::3],
    ],
    ids=["columns", "transposed", "fortran", "reversed", "row"],
)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bool"])
def test_arrays_that_are_not_c_contiguous_are_staged_in_c_order(layout: Any, dtype: str) -> None:
    x = layout(np.arange(24).reshape(4, 6).astype(dtype))
    want = x.flatten()
    buffer = view(x)
    assert np.array_equal(buffer.array, want)
    assert not overlaps(buffer.array, x)
    assert buffer.shape == x.shape
    buffer.array[:] = want == 0
    assert np.array_equal(x.flatten(), want)
    assert buffer.finish() is x
    assert np.array_equal(x.flatten(), want == 0)


def test_staged_ml_dtypes_arrays_are_written_back() -> None:
    x = np.ones((3, 4), pytest.importorskip("ml_dtypes").bfloat16)[:, ::2]
    buffer = view(x)
    buffer.array[:] = 0x4000
    buffer.finish()
    assert (x == 2).all()


def test_staged_input_array_is_not_written_back() -> None:
    x = np.arange(6)[::2]
    buffer = view(x, writable=False)
    assert buffer.array.tolist() == [0, 2, 4]
    assert buffer.writeback is None
    assert buffer.finish() is x


def test_misaligned_arrays_are_staged() -> None:
    x = np.zeros(17, np.uint8)[1:].view(np.float64)
    assert not x.flags.aligned
    buffer = view(x)
    assert buffer.array.flags.aligned
    buffer.array[:] = [1, 2]
    buffer.finish()
    assert x.tolist() == [1, 2]


def test_buffers_of_numpy_subclasses_share_memory_or_are_refused() -> None:
    matrix = np.ones((2, 2)).view(type("Mine", (np.ndarray,), {}))
    buffer = view(matrix)
    assert type(buffer.array) is np.ndarray
    assert buffer.array.shape == (4,)
    assert overlaps(buffer.array, matrix)
    assert buffer.finish() is matrix
    with pytest.raises(TypeError, match=r"output is a masked array; pass output.filled\(...\) or its .data"):
        view(np.ma.array([1, 2], mask=[0, 1]), name="output")


@pytest.mark.parametrize(
    ("obj", "dtype", "shape"),
    [
        (bytearray(b"\1\1\1"), "uint8", (3,)),
        (memoryview(bytearray(4)), "uint8", (4,)),
        (memoryview(np.ones((2, 3), np.float32)), "float32", (2, 3)),
        (array.array("d", [1.0, 2.0]), "float64", (2,)),
        (array.array("h"), "int16", (0,)),
        ((ctypes.c_int32 * 5)(), "int32", (5,)),
        (Interface(np.ones((3, 1))), "float64", (3, 1)),
        (Capsule(np.ones((2, 2), np.int8)), "int8", (2, 2)),
        (Capsule(np.ones(2, np.complex64), device=3), "complex64", (2,)),
    ],
    ids=["bytearray", "bytes view", "array view", "array", "empty array", "ctypes", "interface", "dlpack", "pinned"],
)
def test_buffers_of_arrays_from_other_libraries_share_their_memory(
    obj: Any, dtype: str, shape: tuple[int, ...]
) -> None:
    if isinstance(obj, Capsule) and np.lib.NumpyVersion(np.__version__) < "2.1.0":
        pytest.skip("NumPy before 2.1 shows every DLPack array as read-only")
    buffer = view(obj)
    assert (buffer.dtype.name, buffer.shape, buffer.array.ndim) == (dtype, shape, 1)
    assert buffer.finish() is obj
    buffer.array[:] = 7
    again = view(obj, writable=False).array
    assert again.tolist() == [7] * buffer.count
    if buffer.count:
        assert overlaps(again, buffer.array)


def test_strided_memoryview_is_staged() -> None:
    memory = bytearray(range(6))
    buffer = view(memoryview(memory)[::2])
    buffer.array[:] = 9
    buffer.finish()
    assert list(memory) == [9, 1, 9, 3, 9, 5]


def read_only_array() -> np.ndarray:
    x = np.ones(3)
    x.flags.writeable = False
    return x


@pytest.mark.parametrize(
    "obj",
    [read_only_array(), b"abc", memoryview(b"abc"), Interface(read_only_array()), np.broadcast_to(1.0, (2, 2))],
    ids=["array", "bytes", "memoryview", "interface", "broadcast"],
)
def test_read_only_memory_is_accepted_only_as_input(obj: Any) -> None:
    with pytest.raises(
        ValueError, match=r"outputs\[2\] is read-only, but the result is written to it; pass a writable"
    ):
        view(obj, name="outputs[2]")
    assert view(obj, writable=False).count > 0


def test_result_for_an_immutable_array_is_a_new_array() -> None:
    x = Immutable(np.array([1.0, 2.0, 3.0]))
    buffer = view(x)
    buffer.array *= 2
    result = buffer.finish()
    assert isinstance(result, Immutable)
    assert result.source.tolist() == [2.0, 4.0, 6.0]
    assert x.source.tolist() == [1.0, 2.0, 3.0]
    assert overlaps(view(x, writable=False).array, x.source)


@pytest.mark.parametrize("obj", [None, [1, 2], (1, 2), "text", {1: 2}, {1}, 3, 2.5, np.float32(1), object()])
def test_buffer_of_an_object_that_is_not_an_array_is_refused(obj: Any) -> None:
    with pytest.raises(
        TypeError, match=rf"^inputs must be a NumPy array, a torch tensor, .*, not {type(obj).__name__}$"
    ):
        view(obj, name="inputs")


@pytest.mark.parametrize(
    ("obj", "message"),
    [
        (np.array([None]), "x: dtype object contains Python objects"),
        (np.zeros(2, ">i4"), "x: dtype '>i4' is int32 in foreign byte order"),
        (np.zeros(2, np.longdouble), "x: dtype (longdouble|float128|float96) is not supported"),
    ],
    ids=["object", "big-endian", "long double"],
)
def test_buffer_of_an_array_with_an_unsupported_dtype_is_refused(obj: Any, message: str) -> None:
    if isinstance(obj, np.ndarray) and obj.dtype == np.float64:
        pytest.skip("long double is float64 on this platform")
    with pytest.raises(TypeError, match=message):
        view(obj, name="x")


def test_dlpack_export_unknown_to_numpy_is_refused() -> None:
    class Odd(Capsule):
        def __dlpack__(self, **options: Any) -> object:
            raise BufferError("bfloat16 is not for you")

    with pytest.raises(TypeError, match="x: NumPy cannot import this Odd by DLPack: bfloat16 is not for you"):
        view(Odd(np.ones(1)), name="x")


@pytest.mark.parametrize(
    ("value", "dtype"),
    [
        (True, "bool"),
        (False, "bool"),
        (3, "int64"),
        (-(2**63), "int64"),
        (3.5, "float64"),
        (1 + 2j, "complex128"),
        (np.float32(1.5), "float32"),
        (np.float16(1.5), "float16"),
        (np.int8(-3), "int8"),
        (np.True_, "bool"),
        (np.float64(2.5), "float64"),
    ],
)
def test_scalar_result_has_the_type_of_the_input_scalar(value: Any, dtype: str) -> None:
    assert is_scalar(value)
    buffer = scalar(value)
    assert (buffer.dtype.name, buffer.shape, buffer.count, buffer.array.shape) == (dtype, (), 1, (1,))
    assert buffer.finish() == value
    assert type(buffer.finish()) is type(value)
    buffer.array[:] = 1
    assert buffer.finish() == 1
    assert type(buffer.finish()) is type(value)


def test_bfloat16_scalar_is_returned_as_bfloat16() -> None:
    value = pytest.importorskip("ml_dtypes").bfloat16(1.0)
    buffer = scalar(value)
    assert buffer.array.tolist() == [0x3F80]
    buffer.array[:] = 0x4000
    assert buffer.finish() == 2
    assert type(buffer.finish()) is type(value)


@pytest.mark.parametrize("value", [2**63, -(2**63) - 1, 10**30])
def test_python_int_beyond_64_bits_is_refused(value: int) -> None:
    with pytest.raises(OverflowError, match=f"the int {value} does not fit in int64; pass an array of another dtype"):
        scalar(value)


@pytest.mark.parametrize("value", [None, "3", [3], np.ones(1)])
def test_object_that_is_not_a_number_is_refused_as_a_scalar(value: Any) -> None:
    assert not is_scalar(value)
    with pytest.raises(TypeError, match=f"expected a number, not {type(value).__name__}"):
        scalar(value)


def test_datetime_scalar_is_accepted_and_longdouble_scalar_is_refused() -> None:
    buffer = scalar(np.datetime64("2020-01-01"))
    assert (buffer.dtype.name, buffer.count, buffer.nbytes, buffer.shape) == ("<M8[D]", 1, 8, ())
    buffer.array.view("M8[D]")[:] = np.datetime64("2021-02-03")
    assert buffer.finish() == np.datetime64("2021-02-03")
    with pytest.raises(TypeError, match=r"dtype longdouble|float128|float96 is not supported"):
        scalar(np.longdouble(1))


def test_buffers_with_overlapping_memory_are_detected() -> None:
    x = np.zeros(10)
    assert overlaps(x, x)
    assert overlaps(x[:6], x[5:])
    assert not overlaps(x[:5], x[5:])
    assert not overlaps(x, x.copy())
    assert not overlaps(x[3:3], x)


@pytest.mark.parametrize("dtype", ["bool", "int8", "uint64", "float16", "float64", "complex64", "complex128"])
@pytest.mark.parametrize("count", [0, 3])
def test_byte_view_of_a_buffer_shares_its_memory(dtype: str, count: int) -> None:
    x = np.zeros(count, dtype)
    memory = byte_view(x)
    assert (memory.format, memory.ndim, memory.nbytes, len(memory)) == ("B", 1, x.nbytes, x.nbytes)
    assert not memory.readonly
    if count:
        memory[0] = 1
        assert x.any()


def test_buffer_keeps_a_reference_to_the_callers_array() -> None:
    buffer = view(bytearray(b"\5"))
    assert isinstance(buffer, Buffer)
    assert buffer.array.tolist() == [5]


def windows(array: np.ndarray, length: int, step: int = 1) -> np.ndarray:
    """Return the sliding windows of an array as a view; windows overlap if `step` is less than `length`."""
    count = (len(array) - length) // step + 1
    return as_strided(array, (count, length), (step * array.itemsize, array.itemsize))


OVERLAPPING: dict[str, Callable[[], np.ndarray]] = {
    "one element, repeated": lambda: as_strided(np.zeros(1), (4,), (0,)),
    "rows, repeated": lambda: as_strided(np.zeros((1, 3)), (2, 3), (0, 8)),
    "columns, repeated": lambda: as_strided(np.zeros((3, 1)), (3, 2), (8, 0)),
    "windows": lambda: windows(np.zeros(10), 3),
    "windows, backwards": lambda: windows(np.zeros(10), 3)[::-1, ::-1],
    "windows of small elements": lambda: windows(np.zeros(9, np.int8), 4, 3),
    "halves of elements": lambda: as_strided(np.zeros(4), (3,), (4,)),
    "overlapping axes": lambda: as_strided(np.zeros(20), (3, 4), (3 * 8, 8)),
    "overlapping axes, interleaved": lambda: as_strided(np.zeros(30), (4, 3), (2 * 8, 3 * 8)),
    "writable broadcast": lambda: as_strided(np.zeros((2, 1, 3)), (2, 5, 3), (24, 0, 8)),
}


@each("kind", OVERLAPPING)
def test_outputs_whose_elements_share_memory_are_refused(kind: str) -> None:
    array = OVERLAPPING[kind]()
    assert array.flags.writeable
    with pytest.raises(ValueError, match=r"^x has elements that share memory, .*; pass x.copy\(\)$"):
        view(array, name="x")
    assert view(array, writable=False).array.tolist() == array.reshape(-1).tolist()


SEPARATE: dict[str, Callable[[], np.ndarray]] = {
    "every second": lambda: np.zeros(10)[::2],
    "backwards": lambda: np.zeros(10)[::-1],
    "transposed": lambda: np.zeros((3, 4, 5)).transpose(2, 0, 1),
    "columns": lambda: np.zeros((4, 6))[:, 1:3],
    "Fortran order": lambda: np.zeros((3, 4), order="F"),
    "a field": lambda: np.zeros(4, [("a", "f8"), ("b", "i4")])["b"],
    "adjacent windows": lambda: windows(np.zeros(12), 3, 3)[:, ::-1],
    "one row": lambda: as_strided(np.zeros((1, 3)), (1, 3), (0, 16))[:, :1],
    "interleaved axes": lambda: as_strided(np.zeros(10), (3, 2), (2 * 8, 3 * 8)),
    "no elements, repeated": lambda: as_strided(np.zeros(3), (0, 3, 2), (0, 0, 0)),
    "not aligned": lambda: np.frombuffer(bytearray(33), np.uint8)[1:].view(np.float64),
}


@each("kind", SEPARATE)
def test_noncontiguous_outputs_without_shared_elements_receive_the_results(kind: str) -> None:
    array = SEPARATE[kind]()
    buffer = view(array)
    buffer.array[:] = np.arange(buffer.count)
    buffer.finish()
    assert array.reshape(-1).tolist() == list(range(array.size))


@given(st.lists(st.tuples(st.integers(1, 4), st.integers(-6, 6)), max_size=3), st.sampled_from([1, 2, 4]))
def test_array_whose_elements_share_memory_is_detected_for_any_strides(
    axes: list[tuple[int, int]], itemsize: int
) -> None:
    shape, strides = [length for length, _ in axes], [stride for _, stride in axes]
    starts = [0]
    for length, stride in axes:
        starts = [start + stride * index for start in starts for index in range(length)]
    touched = [start + byte for start in starts for byte in range(itemsize)]
    if len(set(touched)) == len(touched):
        check_disjoint(strides, shape, itemsize, "x", "x.copy()")
    else:
        with pytest.raises(ValueError, match="x has elements that share memory"):
            check_disjoint(strides, shape, itemsize, "x", "x.copy()")
