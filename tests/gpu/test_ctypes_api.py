"""The ctypes adapter for CUDA and NCCL: library calls, errors, and the search for the libraries."""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from aiocoll.errors import BackendUnavailableError
from aiocoll.gpu import ctypes_cuda, ctypes_nccl, provider
from aiocoll.gpu.api import Cuda, DeviceError, Nccl
from aiocoll.gpu.ctypes_cuda import CtypesCuda
from aiocoll.gpu.ctypes_nccl import CtypesNccl

from . import stub_libraries as stub
from .on_device import direct
from .stub_driver import Log
from .stub_libraries import COMMUNICATOR, EVENT, MEMORY, STREAM


@pytest.fixture
def log() -> Log:
    return Log()


def cuda_of(log: Log, **gives: int) -> CtypesCuda:
    made = CtypesCuda(stub.cuda(log, **gives))
    log.calls.clear()
    return made


def nccl_of(log: Log, **more: Any) -> CtypesNccl:
    made = CtypesNccl(stub.nccl(log, **more))
    log.calls.clear()
    return made


# -- signatures


def test_ctypes_signatures_equal_the_signatures_in_the_c_headers() -> None:
    wide = (ctypes.c_void_p, ctypes.c_uint64, ctypes.c_size_t)
    tables = (
        (ctypes_cuda.SIGNATURES, stub.CUDA_H),
        (ctypes_nccl.SIGNATURES, stub.NCCL_H),
        (direct.SIGNATURES, stub.LAUNCH_H),
    )
    for table, headers in tables:
        assert table.keys() == headers.keys()
        for name, types in table.items():
            declared = stub.ctypes_of(headers[name])
            assert len(types) == len(declared), name
            for used, kind in zip(types, declared, strict=True):
                if kind is stub.UniqueId:
                    assert ctypes.sizeof(used) == 128
                elif kind in (stub.Pointer, ctypes.c_uint64):
                    assert used in wide, name
                else:
                    assert used is kind, name


@pytest.mark.parametrize(
    ("find", "table"),
    [
        (lambda: ctypes.CDLL("libcuda.so.1"), {**ctypes_cuda.SIGNATURES, **direct.SIGNATURES}),
        (ctypes_nccl.library, ctypes_nccl.SIGNATURES),
    ],
    ids=["cuda", "nccl"],
)
def test_installed_cuda_and_nccl_libraries_have_all_needed_functions(
    find: Callable[[], Any], table: dict[str, Any]
) -> None:
    try:
        library = find()
    except OSError as error:
        pytest.skip(str(error))
    assert [name for name in table if not hasattr(library, name)] == []


def test_nccl_config_layout_equals_the_layout_in_the_c_header() -> None:
    config = ctypes_nccl.Config
    assert ctypes.sizeof(config) == 40
    offsets = {name: getattr(config, name).offset for name, _ in config._fields_}  # type: ignore[misc]
    assert offsets == {
        "size": 0, "magic": 8, "version": 12, "blocking": 16, "cgaClusterSize": 20, "minCTAs": 24, "maxCTAs": 28,
        "netName": 32,
    }  # fmt: skip


def test_ctypes_adapters_have_all_methods_of_the_protocols() -> None:
    for protocol, made in ((Cuda, CtypesCuda), (Nccl, CtypesNccl)):
        wanted = {name for name in vars(protocol) if not name.startswith("_")}
        assert wanted <= {name for name in dir(made) if not name.startswith("_")}


# -- CUDA


@pytest.mark.parametrize(
    ("call", "logged", "returned"),
    [
        (lambda c: c.version(), ("cuDriverGetVersion", ()), 12080),
        (lambda c: c.device_count(), ("cuDeviceGetCount", ()), 2),
        (lambda c: c.bus_id(1), ("cuDeviceGetPCIBusId", (64, 1)), "0000:01:00.0"),
        (lambda c: c.capability(1), ("cuDeviceGetAttribute", (76, 1)), (9, 9)),
        (lambda c: c.current(), ("cuCtxGetDevice", ()), 1),
        (lambda c: c.stream_create(), ("cuStreamCreate", (1,)), STREAM),
        (lambda c: c.stream_destroy(STREAM), ("cuStreamDestroy_v2", (STREAM,)), None),
        (lambda c: c.is_capturing(STREAM), ("cuStreamIsCapturing", (STREAM,)), False),
        (lambda c: c.event_create(), ("cuEventCreate", (2,)), EVENT),
        (lambda c: c.event_create(sleeps=True), ("cuEventCreate", (3,)), EVENT),
        (lambda c: c.event_destroy(EVENT), ("cuEventDestroy_v2", (EVENT,)), None),
        (lambda c: c.event_record(EVENT, STREAM), ("cuEventRecord", (EVENT, STREAM)), None),
        (lambda c: c.event_done(EVENT), ("cuEventQuery", (EVENT,)), True),
        (lambda c: c.event_synchronize(EVENT), ("cuEventSynchronize", (EVENT,)), None),
        (lambda c: c.stream_wait(STREAM, EVENT), ("cuStreamWaitEvent", (STREAM, EVENT, 0)), None),
        (lambda c: c.stream_write(STREAM, MEMORY, 5), ("cuStreamWriteValue32_v2", (STREAM, MEMORY, 5, 0)), None),
        (lambda c: c.copy_to_host(1, MEMORY, 3, STREAM), ("cuMemcpyDtoHAsync_v2", (1, MEMORY, 3, STREAM)), None),
        (lambda c: c.copy_to_device(MEMORY, 2, 3, STREAM), ("cuMemcpyHtoDAsync_v2", (MEMORY, 2, 3, STREAM)), None),
        (lambda c: c.copy(MEMORY, MEMORY, 3, 4), ("cuMemcpyDtoDAsync_v2", (MEMORY, MEMORY, 3, 4)), None),
        (lambda c: c.scratch(5, STREAM), ("cuMemAllocAsync", (5, STREAM)), MEMORY),
        (lambda c: c.scratch_free(MEMORY, STREAM), ("cuMemFreeAsync", (MEMORY, STREAM)), None),
        (lambda c: c.has_context(-1), ("", ()), False),
        (lambda c: c.has_context(1), ("cuDevicePrimaryCtxGetState", (1,)), True),
    ],
)
def test_each_cuda_adapter_method_calls_its_libcuda_function(
    log: Log, call: Callable[[CtypesCuda], Any], logged: Any, returned: Any
) -> None:
    cuda = cuda_of(log)
    assert call(cuda) == returned
    assert (log.calls[-1:] or [("", ())]) == [logged]
    for name in {*log.names()} - {"cuDeviceGet"}:
        log.status[name] = 700
        with pytest.raises(DeviceError, match=name) as caught:
            call(cuda)
        assert (caught.value.fatal, caught.value.status) == (True, 700)


def test_current_device_of_a_thread_without_a_device_is_minus_one(log: Log) -> None:
    log.status["cuCtxGetDevice"] = 201
    assert cuda_of(log).current() == -1


def test_page_locked_memory_is_freed_with_its_last_view(log: Log) -> None:
    memory = np.zeros(64, np.uint8)
    cuda = cuda_of(log, cuMemHostAlloc=memory.ctypes.data)
    block = cuda.pinned(64)
    block[:] = 7
    assert memory.tolist() == [7] * 64
    view = block[8:16]
    del block
    assert log.names() == ["cuMemHostAlloc"]
    del view
    assert log.calls == [("cuMemHostAlloc", (64, 0)), ("cuMemFreeHost", (memory.ctypes.data,))]
    assert cuda.pinned(0).size == 0


class Torch(ModuleType):
    """A torch lookalike that multiplies arrays in host memory."""

    def __init__(self) -> None:
        super().__init__("torch")
        self.float32, self.complex64 = np.dtype(np.float32), np.dtype(np.complex64)
        self.streams: list[int] = []
        self.cuda = SimpleNamespace(ExternalStream=lambda stream: stream, stream=self)
        self.mul = lambda given, number, out: np.multiply(given, number, out=out)

    def __call__(self, stream: int) -> Torch:
        self.streams.append(stream)
        return self

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass

    def as_tensor(self, memory: Any, device: str) -> Any:
        assert device == "cuda"
        shown = memory.__cuda_array_interface__
        return np.asarray(SimpleNamespace(__array_interface__=shown))


def test_scale_kernel_of_the_ctypes_adapter_uses_torch(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = cuda_of(log)
    torch = Torch()
    monkeypatch.setitem(sys.modules, "torch", torch)
    for dtype, factor, expected in (("float32", 2.0, [2, 4]), ("complex64", 2j, [2j, 4j])):
        values = np.array([1, 2], dtype)
        cuda.kernels.scale(values.ctypes.data, values.ctypes.data, 2, dtype, factor, STREAM)
        assert values.tolist() == expected
    assert torch.streams == [STREAM, STREAM]
    with pytest.raises(DeviceError, match="int32 cannot be multiplied") as caught:
        cuda.kernels.scale(1, 1, 1, "int32", 2, STREAM)
    assert not caught.value.fatal
    del torch.float32
    with pytest.raises(DeviceError, match="float32"):
        cuda.kernels.scale(1, 1, 1, "float32", 2, STREAM)
    monkeypatch.delitem(sys.modules, "torch")
    with pytest.raises(DeviceError, match="scaling needs CuPy or torch"):
        cuda.kernels.scale(1, 1, 1, "float32", 2, STREAM)


# -- NCCL


def test_nccl_adapter_returns_id_and_version_and_refuses_an_old_nccl(log: Log) -> None:
    nccl = nccl_of(log)
    assert (nccl.version(), nccl.unique_id()) == (22809, stub.ID)
    with pytest.raises(DeviceError, match="NCCL 21702 is too old"):
        nccl_of(log, version=21702)


@pytest.mark.parametrize(
    ("call", "logged"),
    [
        (lambda c: c.all_reduce(1, MEMORY, 3, 7, 0, STREAM), ("ncclAllReduce", (1, MEMORY, 3, 7, 0))),
        (lambda c: c.reduce(1, 2, 3, 7, 0, 5, STREAM), ("ncclReduce", (1, 2, 3, 7, 0, 5))),
        (lambda c: c.broadcast(1, 2, 3, 7, 5, STREAM), ("ncclBroadcast", (1, 2, 3, 7, 5))),
        (lambda c: c.all_gather(1, 2, 3, 7, STREAM), ("ncclAllGather", (1, 2, 3, 7))),
        (lambda c: c.reduce_scatter(1, 2, 3, 7, 0, STREAM), ("ncclReduceScatter", (1, 2, 3, 7, 0))),
        (lambda c: c.send(MEMORY, 3, 7, 1, STREAM), ("ncclSend", (MEMORY, 3, 7, 1))),
        (lambda c: c.recv(MEMORY, 3, 7, 1, STREAM), ("ncclRecv", (MEMORY, 3, 7, 1))),
    ],
)
def test_each_nccl_adapter_method_calls_its_libnccl_function_and_waits_for_its_status(
    log: Log, call: Callable[[Any], None], logged: Any
) -> None:
    statuses = iter([7, 0, 7, 7, 0, 7, 0])
    nccl = nccl_of(log, asked=lambda: next(statuses))
    log.status["ncclCommInitRankConfig"] = 7
    made = nccl.init(2, stub.ID, 1)
    assert log.calls[0] == ("ncclCommInitRankConfig", (2, stub.ID, 1))
    log.calls.clear()
    name, args = logged
    log.status[name] = 7
    call(made)
    assert log.calls[0] == (name, (*args, COMMUNICATOR, STREAM))
    assert log.names() == [name] + ["ncclCommGetAsyncError"] * 3
    nccl.group_start()
    log.status["ncclGroupEnd"] = 7
    call(made)
    log.calls.clear()
    nccl.group_end()
    assert log.names() == ["ncclGroupEnd"] + ["ncclCommGetAsyncError"] * 2
    log.status[name] = 4
    with pytest.raises(DeviceError, match=f"{name}: error 4") as caught:
        call(made)
    assert not caught.value.fatal


def test_nccl_error_statuses_are_raised_as_device_errors(log: Log) -> None:
    status = [5]
    nccl = nccl_of(log, asked=lambda: status[0])
    made = nccl.init(1, stub.ID, 0)
    assert made.async_error() == "error 5"
    status[0] = 7
    assert made.async_error() is None
    with pytest.raises(DeviceError, match="the communicator id must have 128 bytes"):
        nccl.init(1, b"", 0)
    for name, call in (
        ("ncclCommInitRankConfig", lambda: nccl.init(1, stub.ID, 0)),
        ("ncclGroupEnd", lambda: (nccl.group_start(), nccl.group_end())),
        ("ncclGroupStart", nccl.group_start),
        ("ncclGetUniqueId", nccl.unique_id),
    ):
        log.status[name] = 99
        with pytest.raises(DeviceError, match=f"{name}: status 99") as caught:
            call()
        assert caught.value.fatal


def test_nccl_communicator_is_ended_only_once(log: Log) -> None:
    nccl = nccl_of(log)
    made = nccl.init(1, stub.ID, 0)
    log.calls.clear()
    made.destroy()
    made.abort()
    assert log.calls == [("ncclCommFinalize", (COMMUNICATOR,)), ("ncclCommDestroy", (COMMUNICATOR,))]
    with pytest.raises(DeviceError, match="ncclSend: the communicator was aborted or destroyed"):
        made.send(1, 1, 1, 0, 0)


def test_nccl_communicator_is_destroyed_only_after_its_finalize_has_finished(log: Log) -> None:
    statuses = iter([7, 7, 0])
    made = nccl_of(log, asked=lambda: next(statuses)).init(1, stub.ID, 0)
    log.calls.clear()
    log.status["ncclCommFinalize"] = 7
    made.destroy()
    assert log.names() == ["ncclCommFinalize", *["ncclCommGetAsyncError"] * 3, "ncclCommDestroy"]


def test_abort_of_a_waiting_nccl_call_happens_between_two_status_queries(log: Log) -> None:
    """Abort a call that never finishes; no other NCCL call of the communicator may run meanwhile."""
    inside: list[str] = []
    nccl = nccl_of(log, asked=lambda: 7)
    made = nccl.init(1, stub.ID, 0)
    waits, errors = threading.Event(), []

    def check_single_caller(name: str) -> None:
        inside.append(name)
        assert len(inside) == 1, inside
        if name == "ncclCommGetAsyncError":
            waits.set()
        inside.pop()

    def call() -> None:
        try:
            made.all_reduce(1, 2, 3, 7, 0, STREAM)
        except DeviceError as error:
            errors.append(error)

    log.hook = check_single_caller
    log.status["ncclAllReduce"] = 7
    thread = threading.Thread(target=call)
    thread.start()
    assert waits.wait(10)
    made.abort()
    thread.join(10)
    assert log.names().count("ncclCommAbort") == 1
    assert log.names()[-1] == "ncclCommAbort"
    assert "the communicator was aborted or destroyed" in str(errors[0])


# -- the search for the libraries


def test_nccl_library_is_searched_in_python_packages_and_in_the_system(
    log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[str] = []

    def load(name: str) -> Any:
        tried.append(name)
        if name == "libnccl.so.2":
            return stub.nccl(log)
        raise OSError(name)

    monkeypatch.setattr(ctypes_nccl.ctypes, "CDLL", load)
    monkeypatch.setattr(
        ctypes_nccl.importlib.util, "find_spec", lambda name: SimpleNamespace(submodule_search_locations=["/there"])
    )
    assert ctypes_nccl.load().version() == 22809
    assert tried == ["/there/lib/libnccl.so.2", "libnccl.so.2"]
    monkeypatch.setattr(ctypes_nccl.importlib.util, "find_spec", lambda name: None)
    assert ctypes_nccl.load().version() == 22809

    def missing(name: str) -> Any:
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(ctypes_nccl.importlib.util, "find_spec", missing)
    monkeypatch.setattr(ctypes_nccl.ctypes, "CDLL", fail_to_load)
    with pytest.raises(OSError, match=r"libnccl\.so\.2"):
        ctypes_nccl.load()


def fail_to_load(name: str) -> Any:
    raise OSError(name)


def test_cuda_and_nccl_are_used_through_ctypes_if_cupy_is_missing(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "aiocoll.gpu.cupy_api", None)  # type: ignore[arg-type]
    libraries: dict[str, Any] = {}

    def load(name: str) -> Any:
        if name not in libraries:
            raise OSError(f"{name} is not there")
        return libraries[name]

    monkeypatch.setattr(ctypes, "CDLL", load)
    provider.by_ctypes.cache_clear()
    with pytest.raises(BackendUnavailableError, match=r"CUDA arrays need CuPy: .*libcuda.so.1 is not there"):
        provider.runtime()
    libraries["libcuda.so.1"] = stub.cuda(log)
    cuda, nccl = provider.runtime()
    assert isinstance(cuda, CtypesCuda)
    assert nccl is None
    assert provider.missing_nccl_reason() == "libnccl.so.2 is not there"
    assert provider.runtime() == (cuda, nccl)
    provider.by_ctypes.cache_clear()
    libraries["libnccl.so.2"] = stub.nccl(log)
    assert isinstance(provider.runtime()[1], CtypesNccl)
    assert provider.missing_nccl_reason() is None
    provider.by_ctypes.cache_clear()
    log.status["cuInit"] = 100
    with pytest.raises(BackendUnavailableError, match="cuInit: CUDA_ERROR_OF_A_STUB"):
        provider.runtime()


def test_cupy_is_preferred_to_ctypes(monkeypatch: pytest.MonkeyPatch) -> None:
    there = ModuleType("aiocoll.gpu.cupy_api")
    there.cuda, there.nccl = (lambda: "cuda"), (lambda: (None, "it rains"))  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "aiocoll.gpu.cupy_api", there)
    assert provider.runtime() == ("cuda", None)
    assert provider.missing_nccl_reason() == "it rains"
