"""Host and device arrays in the same call: an error names both arrays, and nothing is sent."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from aiocoll import ProcessGroup

from ..fake_libraries import Cupy
from ..ranks import run_ranks


def host_array() -> np.ndarray:
    return np.zeros(2)


def on_device(device: int) -> Callable[[], Any]:
    return lambda: sys.modules["cupy"].ndarray(np.zeros(2), device)  # type: ignore[attr-defined]


def doubled(make: Callable[[], Any]) -> Any:
    """Return a new array with twice as many elements as `make()`, on the same device."""
    x = make()
    return np.zeros(4) if isinstance(x, np.ndarray) else type(x)(np.zeros(4), x.device.id)


CALLS: dict[str, tuple[Callable[[ProcessGroup, Any, Any], Any], str, str]] = {
    "allgather": (lambda pg, a, b: pg.allgather([a(), b()], a()), r"outputs\[1\]", "tensor"),
    "allgather_into_tensor": (lambda pg, a, b: pg.allgather_into_tensor(doubled(b), a()), "output", "tensor"),
    "gather": (lambda pg, a, b: pg.gather([a(), b()], a(), 0), r"outputs\[1\]", "tensor"),
    "scatter": (lambda pg, a, b: pg.scatter(a(), [a(), b()], 0), r"inputs\[1\]", "output"),
    "reduce_scatter": (lambda pg, a, b: pg.reduce_scatter(a(), [a(), b()]), r"inputs\[1\]", "output"),
    "reduce_scatter_tensor": (lambda pg, a, b: pg.reduce_scatter_tensor(a(), doubled(b)), "input", "output"),
    "alltoall in": (lambda pg, a, b: pg.alltoall([a(), a()], [a(), b()]), r"inputs\[1\]", r"inputs\[0\]"),
    "alltoall out": (lambda pg, a, b: pg.alltoall([b(), a()], [a(), a()]), r"outputs\[0\]", r"inputs\[0\]"),
    "alltoall_base": (lambda pg, a, b: pg.alltoall_base(b(), a()), "output", "input"),
}
PLACES: list[tuple[Callable[[], Any], str, Callable[[], Any], str]] = [
    (host_array, "on the host", on_device(1), "on CUDA device 1"),
    (on_device(0), "on CUDA device 0", host_array, "on the host"),
    (on_device(0), "on CUDA device 0", on_device(1), "on CUDA device 1"),
]


@pytest.mark.parametrize("call", CALLS)
async def test_mix_of_host_and_device_arrays_in_one_call_is_refused(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", Cupy())  # type: ignore[arg-type]
    make, second, first = CALLS[call]

    async def rank(pg: ProcessGroup) -> None:
        for a, a_place, b, b_place in PLACES:
            message = f"^{second} is {b_place}, {first} is {a_place}: all arrays of a call must be on one device$"
            if pg.rank() == 0:
                with pytest.raises(TypeError, match=message):
                    make(pg, a, b)
        assert await pg.allreduce(1.0) == 2.0

    await run_ranks(2, rank)
