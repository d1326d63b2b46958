"""Lazy imports of GPU modules, and error messages for a missing CuPy."""

from __future__ import annotations

import ctypes
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from aiocoll.errors import BackendUnavailableError
from aiocoll.gpu.provider import driver_devices, install_command, missing_nccl_reason, provide, runtime
from aiocoll.group.dispatch.devices import devices

from ..fakes.cuda import FakeCuda
from .processes import run_code
from .stub_cupy import Log, import_cupy_api, stub, unload_cupy_api

#: Code that makes all imports of CuPy and torch fail.
BLOCK = """
import sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("cupy", "torch"):
            raise ImportError(f"{name} is not for this test")
sys.meta_path.insert(0, Finder())
"""


def test_import_of_aiocoll_loads_no_gpu_module() -> None:
    code = """
import sys, aiocoll, aiocoll.distributed
print(*(name for name in sys.modules if name.startswith(("cupy", "torch", "aiocoll.gpu", "aiocoll.elements.device_"))))
"""
    assert run_code(code) == ""


def test_missing_cupy_is_reported_at_its_first_use() -> None:
    code = f"""{BLOCK}
import aiocoll, aiocoll.gpu.provider as provider
try:
    provider.runtime()
except aiocoll.BackendUnavailableError as error:
    print(error)
"""
    output = run_code(code)
    assert output.startswith("CUDA arrays need CuPy: ")
    assert "pip install aiocoll[cuda1" in output
    assert "(CuPy: cupy is not for this test; ctypes: libcuda.so.1: " in output


def test_cuda_backend_counts_the_devices_of_its_provider() -> None:
    backend = devices.get("cuda")
    assert (backend.kind, backend.label, backend.library) == ("cuda", "CUDA", "nccl")
    with provide(FakeCuda(3)):
        assert backend.count() == 3


# -- packages to install


class Driver:
    """A fake libcuda that only returns a driver version."""

    def __init__(self, version: int, status: int = 0) -> None:
        self.version, self.status = version, status

    def cuDriverGetVersion(self, where: Any) -> int:
        where._obj.value = self.version
        return self.status


def fail_to_load(name: str) -> Any:
    raise OSError(f"{name}: cannot open shared object file")


@pytest.mark.parametrize(("status", "count"), [(0, 2), (100, 0)])
def test_driver_devices_returns_the_device_count_of_libcuda(
    status: int, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write_count(where: Any) -> int:
        where._obj.value = 2
        return 0

    driver = SimpleNamespace(cuInit=lambda flags: status, cuDeviceGetCount=write_count)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: driver)
    assert driver_devices() == count
    monkeypatch.setattr(ctypes, "CDLL", fail_to_load)
    assert driver_devices() == 0


@pytest.mark.parametrize(
    ("torch", "driver", "message"),
    [
        ("12.8", None, r"pip install aiocoll\[cuda12\]"),
        ("13.0", 12040, r"pip install aiocoll\[cuda13\]"),
        (None, 12040, r"pip install aiocoll\[cuda12\]"),
        (None, 13010, r"pip install aiocoll\[cuda13\]"),
        (None, 15000, r"pip install aiocoll\[cuda13\]"),
        (None, 11080, r"pip install aiocoll\[cuda12\], and a newer driver than that of CUDA 11, which is too old"),
        (
            None,
            None,
            r"pip install aiocoll\[cuda12\] \(or aiocoll\[cuda13\]; the CUDA version could not be determined\)",
        ),
    ],
)
def test_error_for_missing_cupy_names_the_package_to_install(
    torch: str | None, driver: int | None, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(version=SimpleNamespace(cuda=torch)))  # type: ignore[arg-type]
    monkeypatch.setattr(ctypes, "CDLL", fail_to_load if driver is None else lambda name: Driver(driver))
    monkeypatch.setitem(sys.modules, "cupy", None)  # type: ignore[arg-type]
    unload_cupy_api()
    with pytest.raises(BackendUnavailableError, match=rf"^CUDA arrays need CuPy: {message} \(.*cupy.*\)$"):
        runtime()


def test_error_for_missing_cupy_states_that_the_cuda_version_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: Driver(0, 3))
    assert "could not be determined" in install_command()


# -- providers


def test_runtime_returns_the_provided_cuda_and_nccl() -> None:
    cuda: Any = object()
    nccl: Any = object()
    with provide(cuda, nccl):
        assert runtime() == (cuda, nccl)
        assert missing_nccl_reason() is None
        with provide(cuda, missing="it rains"):
            assert runtime() == (cuda, None)
            assert missing_nccl_reason() == "it rains"
        assert runtime() == (cuda, nccl)
    with pytest.raises(ZeroDivisionError), provide(cuda):
        raise ZeroDivisionError
    with provide(cuda):
        assert missing_nccl_reason() == "NCCL was not provided"


@pytest.mark.parametrize("nccl", [True, False])
def test_runtime_returns_cuda_and_nccl_through_cupy(nccl: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    log = Log()
    for name, module in stub(log, nccl=nccl).items():
        monkeypatch.setitem(sys.modules, name, module)
    api = import_cupy_api(log)
    assert runtime() == (api.cuda(), api.nccl()[0])
    assert runtime()[0] is api.cuda()
    assert (missing_nccl_reason() is None) is nccl is (runtime()[1] is not None)
    unload_cupy_api()
