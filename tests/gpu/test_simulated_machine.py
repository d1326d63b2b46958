"""The simulated machine without CuPy: detection of its libraries, and array operations on its devices."""

from __future__ import annotations

import ctypes
import sys

import numpy as np
import pytest

from aiocoll.gpu.ctypes_cuda import CtypesCuda
from aiocoll.gpu.ctypes_nccl import CtypesNccl
from aiocoll.gpu.provider import missing_nccl_reason, runtime

from .on_device import real, single_rank
from .on_device.worlds import missing, world
from .simulated_machine import torch_machine


def test_simulated_machine_has_torch_without_cupy() -> None:
    before, torch = ctypes.CDLL, sys.modules.get("torch")
    with torch_machine(2):
        cuda, nccl = runtime()
        assert isinstance(cuda, CtypesCuda)
        assert isinstance(nccl, CtypesNccl)
        assert (cuda.device_count(), missing_nccl_reason()) == (2, None)
        assert missing("torch") is None
        assert str(missing("cupy")).startswith("needs cupy: ")
    assert ctypes.CDLL is before
    assert sys.modules.get("torch") is torch


@pytest.mark.parametrize("devices", [1, 2])
def test_array_operations_of_on_device_tests_work_on_simulated_devices(devices: int) -> None:
    with world("simulated", devices=devices) as made:
        assert made.devices == devices
        for device in range(devices):
            tensor = made.tensor(np.arange(5.0), device)
            gate = made.gate(device)
            made.add(tensor, 2.0)
            gate.open()
            assert made.host(tensor).tolist() == [2, 3, 4, 5, 6]
            assert made.host(made.part(tensor, 1, 3)).tolist() == [3, 4]
            assert made.host(made.tensor(np.zeros(0), device)).size == 0


def test_single_rank_reduces_tensors_on_the_simulated_machine(capsys: pytest.CaptureFixture[str]) -> None:
    single_rank.main("simulated")
    assert capsys.readouterr().out.splitlines() == [f"simulated, {dtype}: reduced" for dtype in ("bfloat16", "float32")]


def test_kernel_whose_gate_is_never_opened_ends_after_its_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    with world("simulated") as made:
        monkeypatch.setattr(real, "SHUT", 0.01)
        tensor = made.tensor(np.zeros(3))
        made.gate(0)
        made.add(tensor, 1.0)
        assert made.host(tensor).tolist() == [1] * 3
