"""A stub of CuPy that records calls and checks them against the signatures of the real CuPy."""

from __future__ import annotations

import ctypes
import operator
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np

from aiocoll.gpu.driver import Driver

from .cupy_signatures import CONSTANTS, SIGNATURES
from .stub_driver import driver

#: The return values of stub functions, by name.
RETURNS: dict[str, Any] = {
    "runtimeGetVersion": 12090,
    "getDeviceCount": 2,
    "deviceGetPCIBusId": "0000:01:00.0",
    "deviceGetAttribute": 9,
    "getDevice": 1,
    "streamCreateWithFlags": 0x70,
    "streamIsCapturing": False,
    "eventCreateWithFlags": 0xE0,
    "cuEventQuery": 0,
    "get_version": 22809,
    "get_unique_id": bytes(128),
}


class CUDARuntimeError(RuntimeError):
    def __init__(self, status: int) -> None:
        super().__init__(f"cudaError{status}")
        self.status = status


class NcclError(RuntimeError):
    """An NCCL error that, like CuPy's, raises KeyError for a status above 6."""

    def __init__(self, status: int) -> None:
        self.status = status
        super().__init__({number: f"NCCL_ERROR_{number}" for number in range(7)}[status])


class Log:
    """A record of CuPy calls that also provides their results and errors.

    Attributes:
        calls: name and arguments of every call.
        errors: by function, a factory of the error that it raises.
        returns: by function, its result.
        freed: called whenever a communicator is freed.
    """

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.errors: dict[str, Callable[[], Exception]] = {}
        self.returns = dict(RETURNS)
        self.freed: Callable[[], None] = lambda: None

    def call(self, name: str, args: tuple[Any, ...]) -> Any:
        self.calls.append((name, args))
        if name in self.errors:
            raise self.errors[name]()  # creating the error raises KeyError for a status unknown to CuPy
        return self.returns.get(name)


def check_arguments(signature: str, args: tuple[Any, ...]) -> None:
    """Check arguments against a signature: their number, and the types of C integers and bytes."""
    inside = signature[signature.index("(") + 1 : signature.rindex(")")]
    params = [each for each in inside.split(", ") if each and each not in ("self", "cls")]
    positional = params[: params.index("*")] if "*" in params else [each for each in params if "**" not in each]
    required = [each for each in positional if "=" not in each]
    assert len(required) <= len(args) <= len(positional), f"{signature} was called with {args}"
    for param, arg in zip(positional, args, strict=False):
        kind = param.rpartition(" ")[0]
        if kind in ("int", "unsigned int", "intptr_t", "size_t", "ptrdiff_t"):
            operator.index(arg)
            assert kind not in ("unsigned int", "size_t") or arg >= 0
        elif kind == "bytes":
            assert isinstance(arg, bytes)


def stub(log: Log, *, nccl: bool = True, version: str = "14.2.0") -> dict[str, ModuleType]:
    """Return the modules of the CuPy stub by name, for `sys.modules`."""
    cupy = ModuleType("cupy")
    cupy.__version__ = version  # type: ignore[attr-defined]
    modules = {"cupy": cupy}
    for name in ("cuda", "cuda.runtime", "cuda.nccl"):
        modules[f"cupy.{name}"] = ModuleType(f"cupy.{name}")

    def function(path: str) -> Callable[..., Any]:
        signature, name = SIGNATURES[path], path.rpartition(".")[2]

        def called(*args: Any) -> Any:
            check_arguments(signature, args)
            return log.call(name, args)

        return called

    for path in SIGNATURES:
        where, _, name = path.rpartition(".")
        if where in ("cuda.runtime", "cuda.nccl") and name != "NcclCommunicator" and (nccl or where != "cuda.nccl"):
            setattr(modules[f"cupy.{where}"], name, function(path))
    for path, value in CONSTANTS.items():
        setattr(modules["cupy.cuda.runtime"], path.rpartition(".")[2], value)
    modules["cupy.cuda.runtime"].CUDARuntimeError = CUDARuntimeError  # type: ignore[attr-defined]
    modules["cupy.cuda.nccl"].available = nccl  # type: ignore[attr-defined]
    if nccl:
        modules["cupy.cuda.nccl"].NcclCommunicator = _communicator(log, function)  # type: ignore[attr-defined]
    cuda = modules["cupy.cuda"]
    cuda.runtime = modules["cupy.cuda.runtime"]  # type: ignore[attr-defined]
    cupy.cuda = cuda  # type: ignore[attr-defined]
    _add_memory(log, cupy, cuda, function)
    return modules


def _communicator(log: Log, function: Callable[[str], Callable[..., Any]]) -> type:
    path = "cuda.nccl.NcclCommunicator"
    made = function(path)

    class NcclCommunicator:
        def __init__(self, *args: Any) -> None:
            made(*args)

        def __del__(self) -> None:
            log.calls.append(("freed", ()))
            log.freed()

    for each in SIGNATURES:
        if each.startswith(f"{path}."):
            call = function(each)
            setattr(NcclCommunicator, each.rpartition(".")[2], lambda self, *args, call=call: call(*args))
    return NcclCommunicator


def _add_memory(log: Log, cupy: Any, cuda: Any, function: Callable[[str], Callable[..., Any]]) -> None:
    """Add CuPy's classes for arrays, streams and memory to the stub modules."""

    class Stream:
        @staticmethod
        def from_external(obj: Any) -> Stream:
            log.call("from_external", (obj.__cuda_stream__(),))
            return Stream()

        def __enter__(self) -> None:
            pass

        def __exit__(self, *exc: object) -> None:
            pass

    class PinnedMemory:
        def __init__(self, size: int, flags: int = 0) -> None:
            assert size > 0
            self.size, self.host = size, np.full(size, 7, np.uint8)
            log.call("PinnedMemory", (size,))

        def __del__(self) -> None:
            log.calls.append(("freeHost", ()))

    def pointer(memory: PinnedMemory, offset: int) -> Any:
        owned = (ctypes.c_uint8 * memory.size).from_address(memory.host.ctypes.data + offset)
        owned.memory = memory  # type: ignore[attr-defined]
        return owned

    class ElementwiseKernel:
        def __init__(self, *args: Any) -> None:
            check_arguments(SIGNATURES["ElementwiseKernel"], args)
            log.call("ElementwiseKernel", args)
            self.arity = len(f"{args[0]}, {args[1]}".split(", "))

        def __call__(self, *args: Any) -> None:
            assert len(args) == self.arity
            log.call("kernel", args)

    cuda.Stream, cuda.PinnedMemory, cuda.PinnedMemoryPointer = Stream, PinnedMemory, pointer
    for name in ("UnownedMemory", "MemoryPointer"):
        check_call = function(f"cuda.{name}")
        setattr(cuda, name, lambda *args, check_call=check_call: (check_call(*args), args)[1])
    array = function("ndarray")
    cupy.ndarray = lambda *args: (array(*args), args)[1]
    cupy.ElementwiseKernel = ElementwiseKernel
    cupy.multiply = lambda a, b, out: log.call("multiply", (a, b, out))


def import_cupy_api(log: Log) -> Any:
    """Import a fresh `aiocoll.gpu.cupy_api`, with the CuPy stub in `sys.modules` and a driver stub."""
    unload_cupy_api()
    from aiocoll.gpu import cupy_api

    cupy_api.load = lambda: Driver(driver(log.call))  # type: ignore[attr-defined]
    return cupy_api


def unload_cupy_api() -> None:
    """Remove `aiocoll.gpu.cupy_api` from the loaded modules, so that the next import executes it again."""
    import aiocoll.gpu

    sys.modules.pop("aiocoll.gpu.cupy_api", None)
    if hasattr(aiocoll.gpu, "cupy_api"):
        del aiocoll.gpu.cupy_api
