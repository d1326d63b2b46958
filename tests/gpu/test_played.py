"""A machine with torch alone, as fakes play it: what is found there, and how the tests of real devices use it."""

from __future__ import annotations

import ctypes
import sys

import numpy as np
import pytest

from aiocoll.gpu.ctypes_cuda import CtypesCuda
from aiocoll.gpu.ctypes_nccl import CtypesNccl
from aiocoll.gpu.provider import missing_nccl_reason, runtime

from .on_device import alone, real
from .on_device.worlds import missing, world
from .played import machine


def test_what_is_found_there() -> None:
    before, torch = ctypes.CDLL, sys.modules.get("torch")
    with machine(2):
        cuda, nccl = runtime()
        assert isinstance(cuda, CtypesCuda)
        assert isinstance(nccl, CtypesNccl)
        assert (cuda.device_count(), missing_nccl_reason()) == (2, None)
        assert missing("torch") is None
        assert str(missing("cupy")).startswith("needs cupy: ")
    assert ctypes.CDLL is before
    assert sys.modules.get("torch") is torch


@pytest.mark.parametrize("devices", [1, 2])
def test_what_tests_do_on_a_device(devices: int) -> None:
    with world("played", devices=devices) as made:
        assert made.devices == devices
        for device in range(devices):
            tensor = made.tensor(np.arange(5.0), device)
            gate = made.gate(device)
            made.add(tensor, 2.0)
            gate.open()
            assert made.host(tensor).tolist() == [2, 3, 4, 5, 6]
            assert made.host(made.part(tensor, 1, 3)).tolist() == [3, 4]
            assert made.host(made.tensor(np.zeros(0), device)).size == 0


def test_one_rank_reduces_tensors(capsys: pytest.CaptureFixture[str]) -> None:
    alone.main("played")
    assert capsys.readouterr().out.splitlines() == [f"played, {dtype}: reduced" for dtype in ("bfloat16", "float32")]


def test_a_gate_that_nobody_opens_does_not_hold_the_device_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    with world("played") as made:
        monkeypatch.setattr(real, "SHUT", 0.01)
        tensor = made.tensor(np.zeros(3))
        made.gate(0)
        made.add(tensor, 1.0)
        assert made.host(tensor).tolist() == [1] * 3
