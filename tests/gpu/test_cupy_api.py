"""The CuPy adapter for CUDA and NCCL: calls of a CuPy stub, errors, and the signatures of the real CuPy."""

from __future__ import annotations

import gc
import importlib.util
import inspect
import re
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from functools import reduce
from typing import Any

import numpy as np
import pytest

from aiocoll.errors import BackendUnavailableError
from aiocoll.gpu.api import Cuda, DeviceError, NcclCommunicator

from .cupy_signatures import CONSTANTS, INSPECTED, NCCL_NUMBERS, SIGNATURES
from .processes import run_code
from .stub_cupy import CUDARuntimeError, Log, NcclError, import_cupy_api, stub, unload_cupy_api
from .stub_driver import CONTEXT

real = pytest.mark.skipif(importlib.util.find_spec("cupy") is None, reason="CuPy is not installed")


@pytest.fixture
def log() -> Log:
    return Log()


@pytest.fixture
def api(log: Log, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Yield the module `aiocoll.gpu.cupy_api`, imported with a stub of CuPy."""
    for name, module in stub(log).items():
        monkeypatch.setitem(sys.modules, name, module)
    yield import_cupy_api(log)
    unload_cupy_api()


@pytest.fixture
def cuda(api: Any, log: Log) -> Cuda:
    made: Cuda = api.cuda()
    log.calls.clear()
    return made


@pytest.fixture
def communicator(api: Any, log: Log) -> NcclCommunicator:
    made: NcclCommunicator = api.nccl()[0].init(2, bytes(128), 1)
    log.calls.clear()
    return made


# -- CUDA


@pytest.mark.parametrize(
    ("call", "logged", "returned"),
    [
        (lambda c: c.version(), ("runtimeGetVersion", ()), 12090),
        (lambda c: c.device_count(), ("getDeviceCount", ()), 2),
        (lambda c: c.bus_id(1), ("deviceGetPCIBusId", (1,)), "0000:01:00.0"),
        (lambda c: c.use(1), ("cuCtxSetCurrent", (CONTEXT + 1,)), None),
        (lambda c: c.current(), ("getDevice", ()), 1),
        (lambda c: c.has_context(1), ("cuDevicePrimaryCtxGetState", (1,)), True),
        (lambda c: c.device_of(0x99), ("cuPointerGetAttribute", (9, 0x99)), 1),
        (lambda c: c.stream_create(), ("streamCreateWithFlags", (1,)), 0x70),
        (lambda c: c.stream_destroy(0x70), ("streamDestroy", (0x70,)), None),
        (lambda c: c.is_capturing(0x70), ("streamIsCapturing", (0x70,)), False),
        (lambda c: c.event_create(), ("eventCreateWithFlags", (2,)), 0xE0),
        (lambda c: c.event_create(sleeps=True), ("eventCreateWithFlags", (3,)), 0xE0),
        (lambda c: c.event_destroy(0xE0), ("eventDestroy", (0xE0,)), None),
        (lambda c: c.event_record(0xE0, 0x70), ("eventRecord", (0xE0, 0x70)), None),
        (lambda c: c.event_done(0xE0), ("cuEventQuery", (0xE0,)), True),
        (lambda c: c.event_synchronize(0xE0), ("eventSynchronize", (0xE0,)), None),
        (lambda c: c.stream_wait(0x70, 0xE0), ("streamWaitEvent", (0x70, 0xE0)), None),
        (lambda c: c.stream_write(0x70, 0x99, 5), ("cuStreamWriteValue32_v2", (0x70, 0x99, 5, 0)), None),
        (lambda c: c.copy_to_host(1, 2, 3, 4), ("memcpyAsync", (1, 2, 3, 2, 4)), None),
        (lambda c: c.copy_to_device(1, 2, 3, 4), ("memcpyAsync", (1, 2, 3, 1, 4)), None),
        (lambda c: c.copy(1, 2, 3, 4), ("memcpyAsync", (1, 2, 3, 3, 4)), None),
    ],
)
def test_each_cuda_adapter_method_calls_its_cupy_function(
    cuda: Cuda, log: Log, call: Callable[[Cuda], Any], logged: Any, returned: Any
) -> None:
    assert call(cuda) == returned
    assert log.calls[-1:] == [logged]
    assert {name for name, _ in log.calls[:-1]} <= {"cuDeviceGet", "cuDevicePrimaryCtxRetain"}
    assert inspect.isfunction(getattr(Cuda, call.__code__.co_names[0]))


def test_cupy_adapter_returns_the_compute_capability_of_a_device(cuda: Cuda, log: Log) -> None:
    assert cuda.capability(1) == (9, 9)
    assert log.calls == [("deviceGetAttribute", (75, 1)), ("deviceGetAttribute", (76, 1))]
    log.errors["deviceGetAttribute"] = lambda: CUDARuntimeError(101)
    with pytest.raises(DeviceError, match="cudaDeviceGetAttribute: cudaError101"):
        cuda.capability(7)


def test_cuda_event_of_unfinished_work_is_not_done(cuda: Cuda, log: Log) -> None:
    log.returns["cuEventQuery"] = 600
    assert cuda.event_done(0xE0) is False
    log.returns["cuEventQuery"] = 700
    with pytest.raises(DeviceError, match="cuEventQuery: CUDA_ERROR_OF_A_STUB") as error:
        cuda.event_done(0xE0)
    assert (error.value.call, error.value.fatal) == ("cuEventQuery", True)


@pytest.mark.parametrize(("status", "fatal"), [(1, False), (2, False), (400, False), (906, False), (700, True)])
def test_cuda_errors_of_cupy_are_raised_as_device_errors(cuda: Cuda, log: Log, status: int, fatal: bool) -> None:
    log.errors["eventSynchronize"] = lambda: CUDARuntimeError(status)
    with pytest.raises(DeviceError, match=f"cudaEventSynchronize: cudaError{status}") as error:
        cuda.event_synchronize(0xE0)
    assert error.value.fatal is fatal
    log.errors["eventSynchronize"] = lambda: ZeroDivisionError("a bug")
    with pytest.raises(ZeroDivisionError):
        cuda.event_synchronize(0xE0)


def test_page_locked_memory_of_cupy_is_freed_with_its_last_view(cuda: Cuda, log: Log) -> None:
    memory = cuda.pinned(100)
    assert (memory.dtype, memory.shape) == (np.uint8, (100,))
    part = memory[10:20].view("uint16")
    part[...] = 3
    del memory
    gc.collect()
    assert log.calls == [("PinnedMemory", (100,))]
    assert part.tolist() == [3] * 5
    del part
    gc.collect()
    assert log.calls[1:] == [("freeHost", ())]
    assert cuda.pinned(0).shape == (0,)


@pytest.mark.parametrize(
    ("dtype", "factor", "shown"),
    [
        ("float32", 2.5, "float32"),
        ("float64", 2, "float64"),
        ("complex64", 1 + 2j, "complex64"),
        ("float16", 2.5, "float16"),
        ("bfloat16", 2.5, "uint16"),
    ],
)
def test_scale_kernel_of_the_cupy_adapter_uses_a_custom_kernel_or_cupy_multiply(
    cuda: Cuda, log: Log, dtype: str, factor: complex, shown: str
) -> None:
    cuda.kernels.scale(0x200, 0x100, 5, dtype, factor, 0x70)
    assert log.calls[0] == ("from_external", ((0, 0x70),))
    name, args = log.calls[-1]
    assert name == ("multiply" if shown == dtype != "float16" else "kernel")
    source, number, target = args
    assert number == factor
    for array, address in ((source, 0x100), (target, 0x200)):
        shape, kind, ((ptr, nbytes, _, device), offset) = array
        assert (shape, kind, ptr, nbytes, device, offset) == ((5,), shown, address, 5 * kind.itemsize, 1, 0)


def test_scale_kernel_refuses_unsupported_dtypes(cuda: Cuda, log: Log) -> None:
    for dtype in ("float8_e4m3fn", "int32"):
        with pytest.raises(DeviceError, match=f"scale: {dtype} cannot be multiplied on a device") as error:
            cuda.kernels.scale(1, 2, 3, dtype, 2.0, 0)
        assert not error.value.fatal
    log.errors["multiply"] = lambda: ImportError("no NVRTC")
    with pytest.raises(DeviceError, match="scale: no NVRTC") as error:
        cuda.kernels.scale(1, 2, 3, "float32", 2.0, 0)
    assert not error.value.fatal


def test_error_reports_a_machine_with_cupy_and_without_devices(api: Any, log: Log) -> None:
    cuda = api.cuda()
    log.errors["getDeviceCount"] = lambda: CUDARuntimeError(35)
    assert cuda.device_count() == 0
    api.cuda.cache_clear()
    with pytest.raises(BackendUnavailableError, match=r"CuPy 14.2.0 finds no CUDA device: cudaError35"):
        api.cuda()
    del log.errors["getDeviceCount"]
    log.returns["cuInit"] = 999
    with pytest.raises(BackendUnavailableError, match=r"CuPy 14.2.0 finds no CUDA device: cuInit: CUDA_ERROR_OF_A_STU"):
        api.cuda()


def test_old_cupy_is_refused(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, module in stub(log, version="13.6.0").items():
        monkeypatch.setitem(sys.modules, name, module)
    with pytest.raises(ImportError, match=r"CuPy 13.6.0 is too old; install version 14 or later"):
        import_cupy_api(log)
    unload_cupy_api()


# -- NCCL


@pytest.mark.parametrize(
    ("call", "logged"),
    [
        (lambda c: c.all_reduce(1, 2, 3, 7, 0, 0x70), ("allReduce", (1, 2, 3, 7, 0, 0x70))),
        (lambda c: c.reduce(1, 2, 3, 7, 0, 1, 0x70), ("reduce", (1, 2, 3, 7, 0, 1, 0x70))),
        (lambda c: c.broadcast(1, 2, 3, 7, 1, 0x70), ("broadcast", (1, 2, 3, 7, 1, 0x70))),
        (lambda c: c.all_gather(1, 2, 3, 7, 0x70), ("allGather", (1, 2, 3, 7, 0x70))),
        (lambda c: c.reduce_scatter(1, 2, 3, 7, 0, 0x70), ("reduceScatter", (1, 2, 3, 7, 0, 0x70))),
        (lambda c: c.send(1, 3, 7, 1, 0x70), ("send", (1, 3, 7, 1, 0x70))),
        (lambda c: c.recv(2, 3, 7, 1, 0x70), ("recv", (2, 3, 7, 1, 0x70))),
        (lambda c: c.async_error(), ("check_async_error", ())),
        (lambda c: c.abort(), ("abort", ())),
        (lambda c: c.destroy(), ("destroy", ())),
    ],
)
def test_each_communicator_method_calls_its_cupy_function(
    communicator: NcclCommunicator, log: Log, call: Callable[[NcclCommunicator], Any], logged: Any
) -> None:
    assert call(communicator) is None
    assert log.calls == [logged]


def test_each_nccl_adapter_method_calls_its_cupy_function(api: Any, log: Log) -> None:
    nccl, why = api.nccl()
    assert why is None
    assert api.nccl()[0] is nccl
    assert nccl.version() == 22809
    assert nccl.unique_id() == bytes(128)
    nccl.group_start()
    nccl.group_end()
    nccl.init(2, bytes(128), 1)
    names = ["get_version", "get_unique_id", "groupStart", "groupEnd", "NcclCommunicator"]
    assert [name for name, _ in log.calls] == names
    assert log.calls[-1][1] == (2, bytes(128), 1)


@pytest.mark.parametrize(
    ("status", "fatal", "message"),
    [
        (4, False, "ncclAllReduce: NCCL_ERROR_4"),
        (3, True, "ncclAllReduce: NCCL_ERROR_3"),
        (7, True, "ncclAllReduce: in progress: CuPy does not support NCCL_COMM_BLOCKING=0"),
        (8, True, "ncclAllReduce: it took too long"),
        (9, True, "ncclAllReduce: status 9"),
    ],
)
def test_nccl_errors_of_cupy_are_raised_as_device_errors(
    communicator: NcclCommunicator, log: Log, status: int, fatal: bool, message: str
) -> None:
    log.errors["allReduce"] = log.errors["check_async_error"] = lambda: NcclError(status)
    with pytest.raises(DeviceError, match=f"^{message}$") as error:
        communicator.all_reduce(1, 2, 3, 7, 0, 0)
    assert error.value.fatal is fatal
    assert communicator.async_error() == (None if status == 7 else message.removeprefix("ncclAllReduce: "))


def test_failed_nccl_group_end_or_init_raises_a_fatal_error(api: Any, log: Log) -> None:
    nccl = api.nccl()[0]
    log.errors["groupEnd"] = log.errors["NcclCommunicator"] = lambda: NcclError(4)
    with pytest.raises(DeviceError, match="ncclGroupEnd: NCCL_ERROR_4") as error:
        nccl.group_end()
    assert error.value.fatal
    with pytest.raises(DeviceError, match="ncclCommInitRank: NCCL_ERROR_4") as error:
        nccl.init(2, bytes(128), 0)
    assert error.value.fatal


@pytest.mark.parametrize("end", ["abort", "destroy"])
def test_cupy_communicator_is_ended_only_once(communicator: NcclCommunicator, log: Log, end: str) -> None:
    for name in (end, "abort", "destroy"):
        getattr(communicator, name)()
    assert log.calls == [(end, ())]
    del communicator


def test_cupy_communicator_is_not_freed_before_it_has_ended(api: Any, log: Log) -> None:
    nccl = api.nccl()[0]
    nccl.init(2, bytes(128), 0)
    gc.collect()
    assert "freed" not in [name for name, _ in log.calls]
    nccl.init(2, bytes(128), 0).abort()
    gc.collect()
    assert [name for name, _ in log.calls][-2:] == ["abort", "freed"]


def test_cupy_communicator_that_could_not_be_created_is_not_freed(api: Any, log: Log) -> None:
    """Check that the failed communicator stays referenced, because CuPy's finalizer would destroy it and may hang."""
    log.errors["NcclCommunicator"] = lambda: NcclError(2)
    freed: list[str] = []
    finished, stop = threading.Event(), threading.Event()

    def hang() -> None:
        freed.append(threading.current_thread().name)
        finished.set()
        stop.wait(10)

    def init() -> None:
        with pytest.raises(DeviceError, match="ncclCommInitRank: NCCL_ERROR_2"):
            api.nccl()[0].init(2, bytes(128), 1)
        gc.collect()
        finished.set()

    log.freed = hang
    launcher = threading.Thread(target=init)
    launcher.start()
    assert finished.wait(10)
    stop.set()
    launcher.join(10)
    assert freed == []


def test_cupy_adapter_refuses_nonblocking_nccl_communicators(api: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_COMM_BLOCKING", "0")
    with pytest.raises(
        DeviceError, match="CuPy does not support NCCL_COMM_BLOCKING=0; unset this environment variable"
    ):
        api.nccl()[0].init(1, bytes(128), 0)


def test_cupy_adapter_without_nccl_returns_the_reason(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    modules = stub(log, nccl=False)
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    api = import_cupy_api(log)
    assert api.nccl() == (None, "NCCL is not available")

    def missing(name: str) -> Any:
        if name != "nccl":
            raise AttributeError(name)
        # The real CuPy warns like this during its import.
        warnings.warn("\nnccl library could not be loaded.\n  pip install it", stacklevel=1)
        return modules["cupy.cuda.nccl"]

    modules["cupy.cuda"].__getattr__ = missing  # type: ignore[method-assign]
    api.nccl.cache_clear()
    assert api.nccl() == (None, "nccl library could not be loaded. pip install it")

    def broken(name: str) -> Any:
        raise ImportError("no symbol")

    modules["cupy.cuda"].__getattr__ = broken  # type: ignore[method-assign]
    api.nccl.cache_clear()
    assert api.nccl() == (None, "CuPy 14.2.0 has no NCCL: no symbol")
    unload_cupy_api()


# -- the real CuPy


def resolve(path: str) -> Any:
    import cupy

    if path.startswith("cuda.nccl"):
        from cupy.cuda import nccl

        if not nccl.available:
            pytest.skip("libnccl is not installed")
    return reduce(getattr, path.split("."), cupy)


@real
@pytest.mark.filterwarnings("ignore:\nnccl library could not be loaded")
@pytest.mark.parametrize("path", SIGNATURES)
def test_recorded_signature_equals_the_signature_of_the_real_cupy(path: str) -> None:
    assert (resolve(path).__doc__ or "").strip().split("\n")[0] == SIGNATURES[path]


@real
@pytest.mark.filterwarnings("ignore:\nnccl library could not be loaded")
def test_recorded_constants_equal_the_constants_of_the_real_cupy() -> None:
    assert {path: resolve(path) for path in CONSTANTS} == CONSTANTS
    assert {path: list(inspect.signature(resolve(path)).parameters) for path in INSPECTED} == INSPECTED
    nccl = resolve("cuda.nccl")
    assert {name: getattr(nccl, name) for name in NCCL_NUMBERS} == NCCL_NUMBERS


@real
@pytest.mark.filterwarnings("ignore:\nnccl library could not be loaded")
def test_real_cupy_behaves_as_the_adapter_assumes() -> None:
    nccl, runtime = resolve("cuda.nccl"), resolve("cuda.runtime")
    assert nccl.NcclError(4).status == 4
    for status in (7, 8):
        with pytest.raises(KeyError):
            nccl.NcclError(status)
    assert issubclass(runtime.CUDARuntimeError, RuntimeError)
    # Use a separate process: creating this error text loads CUDA, which never closes its files.
    assert run_code("from cupy.cuda import runtime; print(runtime.CUDARuntimeError(600).status)") == "600"
    # The adapter's `init` relies on `__new__` alone to make an empty communicator.
    made = nccl.NcclCommunicator.__new__(nccl.NcclCommunicator)
    assert made.comm == 0


@real
def test_real_cupy_calls_nccl() -> None:
    resolve("cuda.nccl")
    # Use a separate process, because NCCL never closes the socket that it opens for an id.
    code = "from aiocoll.gpu.cupy_api import nccl; print(nccl()[0].version(), len(nccl()[0].unique_id()))"
    version, length = run_code(code).split()
    assert int(version) >= 21800
    assert length == "128"


#: Code that uses a device, or prints an error if there is none.
USE = """
from aiocoll.errors import BackendUnavailableError
from aiocoll.gpu import cupy_api
try:
    cuda = cupy_api.cuda()
except BackendUnavailableError as error:
    print(error)
else:
    assert cuda.version() >= 12000 and cuda.bus_id(0)
    cuda.use(0)
    assert cuda.current() == 0 and cuda.has_context(0)
    event = cuda.event_create()
    assert cuda.event_done(event)
    array = cupy_api.cupy.ndarray(5)
    assert cuda.device_of(array.data.ptr) == 0
    print("used")
"""


@real
def test_real_cupy_uses_a_device_or_reports_that_no_device_exists() -> None:
    # Use a separate process, because CUDA never closes its files.
    assert re.search("^used$|finds no CUDA device", run_code(USE))
