"""Pytest fixtures: a fake CUDA, and one of its devices."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from aiocoll.gpu.device import Device

from ..fakes.cuda import FakeCuda
from .devices import fake_cuda


@pytest.fixture
def cuda() -> Iterator[FakeCuda]:
    with fake_cuda() as made:
        yield made


@pytest.fixture
def device(cuda: FakeCuda) -> Device:
    return Device.of(cuda, 0)
