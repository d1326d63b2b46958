"""Buffers of real CuPy arrays without a GPU: host memory stands in for device memory."""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from aiocoll.arrays.cupy_arrays import _ForeignStream
from aiocoll.elements.buffers import clash, overlaps, view
from aiocoll.elements.device import DeviceArray
from aiocoll.elements.dtypes import by_code

pytestmark = pytest.mark.skipif(importlib.util.find_spec("cupy") is None, reason="CuPy is not installed")
NAMES = [by_code(code).name for code in range(1, 20)]


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> Any:
    cupy = pytest.importorskip("cupy")
    monkeypatch.setattr(cupy.cuda, "get_current_stream", lambda device: SimpleNamespace(ptr=0x70 + device))
    return cupy


def device_array(cupy: Any, host: np.ndarray, device: int = 0) -> Any:
    memory = cupy.cuda.UnownedMemory(host.ctypes.data, host.nbytes, host, device)
    return cupy.ndarray(host.shape, host.dtype, cupy.cuda.MemoryPointer(memory, 0))


@pytest.mark.parametrize("name", NAMES)
def test_buffers_of_real_cupy_arrays_share_their_memory(cupy: Any, name: str) -> None:
    dtype = getattr(pytest.importorskip("ml_dtypes"), name) if name.startswith(("bf", "float8")) else name
    host = np.ones((2, 3), dtype)
    x = device_array(cupy, host, 1)
    buffer = view(x)
    assert isinstance(buffer.array, DeviceArray)
    assert (buffer.array.ptr, buffer.array.device, buffer.array.stream) == (host.ctypes.data, 1, 0x71)
    assert (buffer.dtype.name, buffer.shape, buffer.count, buffer.nbytes) == (name, (2, 3), 6, host.nbytes)
    assert buffer.finish() is x


def test_buffers_of_cupy_slices_share_their_memory(cupy: Any) -> None:
    host = np.zeros((4, 6), "int16")
    x = device_array(cupy, host)
    upper, lower = view(x[:2]), view(x[2:])
    assert lower.array.ptr == host[2:].ctypes.data
    assert not overlaps(upper.array, lower.array)
    assert clash([upper.array, lower.array, view(x[1:3]).array]) == (0, 2)
    assert view(x[3, 5]).shape == ()
    assert view(x[4:]).array.ptr == 0


def test_cupy_accepts_the_stream_objects_of_aiocoll(cupy: Any) -> None:
    assert cupy.cuda.Stream.from_external(_ForeignStream(0x70)).ptr == 0x70
