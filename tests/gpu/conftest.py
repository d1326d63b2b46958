"""A fake CUDA, and a device of it, for the tests that want them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from aiocoll.gpu.device import Device

from ..fakes.cuda import FakeCuda
from .devices import faked


@pytest.fixture
def cuda() -> Iterator[FakeCuda]:
    with faked() as made:
        yield made


@pytest.fixture
def device(cuda: FakeCuda) -> Device:
    return Device.of(cuda, 0)
