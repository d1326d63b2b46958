"""Buffers of JAX arrays: of lookalikes, and of real JAX arrays if JAX is installed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from aiocoll import ReduceOp
from aiocoll.elements import buffers
from aiocoll.elements.buffers import view

from ..fake_libraries import JaxArray
from ..ranks import parametrize_transports

ml_dtypes = pytest.importorskip("ml_dtypes")

NARROW = ["bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"]
INTEGERS = ["int4", "uint4", "int2", "uint2"]
PLAIN = ["bool", "int8", "int32", "uint16", "float16", "float32", "complex64"]


def _memoryview(obj: Any) -> memoryview:
    """Return a memoryview of an object; emulate the support for `__buffer__` of Python 3.12."""
    return memoryview(obj.__buffer__(0) if isinstance(obj, JaxArray) else obj)


def _lookalike_maker(_: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], Any]:
    monkeypatch.setattr(buffers, "memoryview", _memoryview, raising=False)
    return JaxArray


def _jax_maker(_: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], Any]:
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    return pytest.importorskip("jax.numpy").asarray  # type: ignore[no-any-return]


@pytest.fixture(params=[_lookalike_maker, _jax_maker], ids=["look-alike", "real"])
def make_array(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], Any]:
    """Return a function that converts a NumPy array to a JAX array."""
    return request.param(request, monkeypatch)


@pytest.mark.parametrize("name", [*PLAIN, *NARROW, *INTEGERS])
def test_jax_result_is_a_new_array(name: str, make_array: Callable[[Any], Any]) -> None:
    x = make_array(np.arange(6).reshape(2, 3).astype(name))
    buffer = view(x)
    assert (buffer.dtype.name, buffer.shape, buffer.count) == (name, (2, 3), 6)
    buffer.array.view(name)[:] = np.ones(6, name)
    result = buffer.finish()
    assert type(result) is type(x)
    assert (result.dtype, result.shape) == (np.dtype(name), (2, 3))
    assert (np.asarray(result) == np.ones((2, 3), name)).all()
    assert (np.asarray(x) == np.arange(6).reshape(2, 3).astype(name)).all()


@pytest.mark.parametrize("name", [*PLAIN, *NARROW, *INTEGERS])
def test_jax_input_is_not_copied(name: str, make_array: Callable[[Any], Any]) -> None:
    x = make_array(np.arange(6).astype(name))
    assert np.shares_memory(view(x, writable=False).array, np.asarray(x))


@pytest.mark.parametrize("name", ["float8_e4m3b11fnuz", "float4_e2m1fn"])
def test_unsupported_jax_dtype_is_refused(name: str, make_array: Callable[[Any], Any]) -> None:
    with pytest.raises(TypeError, match=f"x: dtype {name} is not supported; use one of bool, int8, "):
        view(make_array(np.ones(3, name)), name="x")


@pytest.mark.ranks(3)
@parametrize_transports("memory", "shm")
async def test_collectives_and_messages_accept_jax_arrays(pg: Any, make_array: Callable[[Any], Any]) -> None:
    mine = make_array(np.full(3, 2.0 ** pg.rank(), "bfloat16"))
    total = await pg.allreduce(mine)
    assert type(total) is type(mine)
    assert np.asarray(total).tolist() == [7.0] * 3
    assert np.asarray(mine).tolist() == [2.0 ** pg.rank()] * 3
    assert np.asarray(await pg.allreduce(mine, ReduceOp.MAX)).tolist() == [4.0] * 3
    assert np.asarray(await pg.broadcast(mine, 1)).tolist() == [2.0] * 3
    gathered = await pg.allgather([make_array(np.zeros(3, "bfloat16")) for _ in range(3)], mine)
    assert [np.asarray(each).tolist() for each in gathered] == [[2.0**rank] * 3 for rank in range(3)]
    nibbles = make_array(np.array([3, -3, pg.rank()], "int4"))
    assert np.asarray(await pg.allreduce(nibbles)).astype(int).tolist() == [9 - 16, -9 + 16, 3]
    assert np.asarray(await pg.allreduce(nibbles, ReduceOp.MIN)).astype(int).tolist() == [3, -3, 0]
    if pg.rank() == 0:
        await pg.send(mine, 1)
    elif pg.rank() == 1:
        assert np.asarray(await pg.recv(mine, 0)).tolist() == [1.0] * 3


def test_jax_array_that_numpy_cannot_convert_is_refused() -> None:
    class Traced(JaxArray):
        def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
            raise TypeError("it was traced by jit")

    with pytest.raises(TypeError, match="x: NumPy cannot convert this Traced: it was traced by jit"):
        view(Traced(np.ones(3, "bfloat16")), name="x")
