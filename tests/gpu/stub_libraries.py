"""Stubs of libcuda and libnccl with C functions that record their calls.

The functions have the parameters that the headers declare: cuda.h of CUDA 12.8, nccl.h of NCCL 2.28.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from .stub_driver import Pointer, write_number
from .stub_driver import driver as driver_stub

#: Example handles and addresses that need more than 32 bits.
STREAM, EVENT, MEMORY, COMMUNICATOR = (0x7F00_0000_0000 + number * 0x1000 for number in range(4))
ID = bytes(range(128))

#: Parameters of functions in cuda.h, by name, except those in `stub_driver`.
CUDA_H = {
    "cuDriverGetVersion": "int *driverVersion",
    "cuDeviceGetCount": "int *count",
    "cuDeviceGetPCIBusId": "char *pciBusId, int len, CUdevice dev",
    "cuDeviceGetAttribute": "int *pi, CUdevice_attribute attrib, CUdevice dev",
    "cuCtxGetDevice": "CUdevice *device",
    "cuStreamCreate": "CUstream *phStream, unsigned int Flags",
    "cuStreamDestroy_v2": "CUstream hStream",
    "cuStreamIsCapturing": "CUstream hStream, CUstreamCaptureStatus *captureStatus",
    "cuStreamWaitEvent": "CUstream hStream, CUevent hEvent, unsigned int Flags",
    "cuEventCreate": "CUevent *phEvent, unsigned int Flags",
    "cuEventDestroy_v2": "CUevent hEvent",
    "cuEventRecord": "CUevent hEvent, CUstream hStream",
    "cuEventSynchronize": "CUevent hEvent",
    "cuMemHostAlloc": "void **pp, size_t bytesize, unsigned int Flags",
    "cuMemFreeHost": "void *p",
    "cuMemcpyDtoHAsync_v2": "void *dstHost, CUdeviceptr srcDevice, size_t ByteCount, CUstream hStream",
    "cuMemcpyHtoDAsync_v2": "CUdeviceptr dstDevice, const void *srcHost, size_t ByteCount, CUstream hStream",
    "cuMemcpyDtoDAsync_v2": "CUdeviceptr dstDevice, CUdeviceptr srcDevice, size_t ByteCount, CUstream hStream",
    "cuMemAllocAsync": "CUdeviceptr *dptr, size_t bytesize, CUstream hStream",
    "cuMemFreeAsync": "CUdeviceptr dptr, CUstream hStream",
}
#: Parameters of functions in cuda.h that only tests call; see `on_device/direct.py`.
LAUNCH_H = {
    "cuStreamBeginCapture_v2": "CUstream hStream, CUstreamCaptureMode mode",
    "cuStreamEndCapture": "CUstream hStream, CUgraph *phGraph",
    "cuGraphDestroy": "CUgraph hGraph",
    "cuModuleLoadData": "CUmodule *module, const void *image",
    "cuModuleGetFunction": "CUfunction *hfunc, CUmodule hmod, const char *name",
    "cuLaunchKernel": (
        "CUfunction f, unsigned int gridDimX, unsigned int gridDimY, unsigned int gridDimZ, unsigned int blockDimX, "
        "unsigned int blockDimY, unsigned int blockDimZ, unsigned int sharedMemBytes, CUstream hStream, "
        "void **kernelParams, void **extra"
    ),
}
_TAIL = "ncclComm_t comm, cudaStream_t stream"
_BUFFERS = "const void* sendbuff, void* recvbuff, size_t count, ncclDataType_t datatype"
NCCL_H = {
    "ncclGetVersion": "int *version",
    "ncclGetUniqueId": "ncclUniqueId* uniqueId",
    "ncclCommInitRankConfig": "ncclComm_t* comm, int nranks, ncclUniqueId commId, int rank, ncclConfig_t* config",
    "ncclCommGetAsyncError": "ncclComm_t comm, ncclResult_t *asyncError",
    "ncclCommFinalize": "ncclComm_t comm",
    "ncclCommDestroy": "ncclComm_t comm",
    "ncclCommAbort": "ncclComm_t comm",
    "ncclAllReduce": f"{_BUFFERS}, ncclRedOp_t op, {_TAIL}",
    "ncclReduce": f"{_BUFFERS}, ncclRedOp_t op, int root, {_TAIL}",
    "ncclBroadcast": f"{_BUFFERS}, int root, {_TAIL}",
    "ncclAllGather": f"{_BUFFERS}, {_TAIL}",
    "ncclReduceScatter": f"{_BUFFERS}, ncclRedOp_t op, {_TAIL}",
    "ncclSend": f"const void* sendbuff, size_t count, ncclDataType_t datatype, int peer, {_TAIL}",
    "ncclRecv": f"void* recvbuff, size_t count, ncclDataType_t datatype, int peer, {_TAIL}",
    "ncclGroupStart": "",
    "ncclGroupEnd": "",
}
#: Parameters of the function in nccl.h that only tests call; see `on_device/raw.py`.
RAW_H = {"ncclCommInitRank": "ncclComm_t* comm, int nranks, ncclUniqueId commId, int rank"}


class UniqueId(ctypes.Structure):
    """The `ncclUniqueId` of nccl.h, passed by value."""

    _fields_ = (("internal", ctypes.c_char * 128),)


_KINDS = {
    "int": ctypes.c_int,
    "unsigned int": ctypes.c_uint,
    "cuuint32_t": ctypes.c_uint32,
    "size_t": ctypes.c_size_t,
    "CUdevice": ctypes.c_int,
    "CUdevice_attribute": ctypes.c_int,
    "CUdeviceptr": ctypes.c_uint64,
    "CUcontext": ctypes.c_uint64,
    "CUstream": ctypes.c_uint64,
    "CUstreamCaptureMode": ctypes.c_int,
    "CUgraph": ctypes.c_uint64,
    "CUevent": ctypes.c_uint64,
    "CUmodule": ctypes.c_uint64,
    "CUfunction": ctypes.c_uint64,
    "cudaStream_t": ctypes.c_uint64,
    "ncclComm_t": ctypes.c_uint64,
    "ncclDataType_t": ctypes.c_int,
    "ncclRedOp_t": ctypes.c_int,
    "ncclUniqueId": UniqueId,
}
#: Names of pointer parameters that pass an address. Functions write results through all other pointers.
_ADDRESSES = ("sendbuff", "recvbuff", "srcHost", "dstHost", "p")

Call = Callable[[str, tuple[Any, ...]], int]


def ctypes_of(declaration: str) -> list[Any]:
    """Return the ctypes types of the parameters in a C declaration."""
    found = []
    for parameter in filter(None, declaration.split(", ")):
        words = parameter.replace("*", " * ").split()
        if "*" in words:
            found.append(ctypes.c_uint64 if words[-1] in _ADDRESSES and words.count("*") == 1 else Pointer)
        else:
            found.append(_KINDS[" ".join(words[:-1])])
    return found


def cuda(call: Call, **gives: int) -> Any:
    """Return a stub of libcuda whose functions return the values in `gives`."""
    library = driver_stub(call)
    wide = ("cuStreamCreate", "cuEventCreate", "cuMemHostAlloc", "cuMemAllocAsync")
    known = {
        "cuDriverGetVersion": 12080, "cuDeviceGetCount": 2, "cuDeviceGetAttribute": 9, "cuCtxGetDevice": 1,
        "cuStreamIsCapturing": 0, "cuStreamCreate": STREAM, "cuEventCreate": EVENT, "cuMemAllocAsync": MEMORY, **gives,
    }  # fmt: skip
    for name, declaration in CUDA_H.items():
        setattr(library, name, _function(name, declaration, call, known.get(name), wide=name in wide))
    return library


def nccl(call: Call, version: int = 22809, asked: Callable[[], int] = lambda: 0) -> Any:
    """Return a stub of libnccl; `asked` gives the status of asynchronous error queries."""

    def error(status: int) -> bytes:
        return b"" if status == 99 else b"error %d" % status

    library = SimpleNamespace(ncclGetErrorString=SimpleNamespace())
    known: dict[str, Any] = {"ncclGetVersion": version, "ncclCommInitRankConfig": COMMUNICATOR}
    known["ncclCommGetAsyncError"] = asked
    for name, declaration in NCCL_H.items():
        wide = name == "ncclCommInitRankConfig"
        setattr(library, name, _function(name, declaration, call, known.get(name), wide=wide))
    library.ncclGetErrorString = _Text(error)
    return library


class _Text:
    """A C function that returns the text of an NCCL error status."""

    def __init__(self, error: Callable[[int], bytes]) -> None:
        self._error = error

    def __call__(self, status: int) -> bytes:
        return self._error(status)


def _function(name: str, declaration: str, call: Call, gives: Any, *, wide: bool) -> Any:
    types = ctypes_of(declaration)

    def called(*args: Any) -> int:
        given = tuple(_plain(arg) for arg, kind in zip(args, types, strict=True) if kind is not Pointer)
        status = call(name, given)
        if not status or (name == "ncclCommInitRankConfig" and status == 7):
            for arg, kind in zip(args, types, strict=True):
                if kind is Pointer and name == "ncclGetUniqueId":
                    ctypes.memmove(arg.value, ID, len(ID))
                elif kind is Pointer and name == "cuDeviceGetPCIBusId":
                    ctypes.memmove(arg.value, b"0000:01:00.0\0", 13)
                elif kind is Pointer and gives is not None:
                    write_number(arg, gives() if callable(gives) else gives, ctypes.c_uint64 if wide else ctypes.c_int)
                    break
        return int(status)

    return ctypes.CFUNCTYPE(ctypes.c_int, *types)(called)


def _plain(arg: Any) -> Any:
    return bytes(memoryview(arg)) if isinstance(arg, UniqueId) else arg
