"""The public device contract tests of aiocoll on the fake CUDA device, with NCCL and staged."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from aiocoll.arrays.cuda_array import KIND
from aiocoll.testing.contracts import DeviceContract, ToDevice, ToHost

from .groups import WAYS, Gpus, gpus, host


class TestCuda(DeviceContract):
    @pytest.fixture(params=WAYS)
    def gpu(self, request: pytest.FixtureRequest) -> Iterator[Gpus]:
        with gpus(3, request.param) as gpu:
            yield gpu

    @pytest.fixture
    def kind(self, gpu: Gpus) -> str:
        return KIND

    @pytest.fixture
    def to_device(self, gpu: Gpus) -> ToDevice:
        return gpu.tensor

    @pytest.fixture
    def to_host(self) -> ToHost:
        return host
