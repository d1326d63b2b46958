"""Signatures of the CuPy 14.2 functions that aiocoll calls, copied from CuPy's docstrings, and CuPy's constants."""

#: Signatures of CuPy functions and classes written in Cython.
SIGNATURES = {
    "cuda.runtime.runtimeGetVersion": "runtimeGetVersion() -> int",
    "cuda.runtime.getDeviceCount": "getDeviceCount() -> int",
    "cuda.runtime.deviceGetPCIBusId": "deviceGetPCIBusId(int device) -> str",
    "cuda.runtime.deviceGetAttribute": "deviceGetAttribute(int attrib, int device) -> int",
    "cuda.runtime.getDevice": "getDevice() -> int",
    "cuda.runtime.streamCreateWithFlags": "streamCreateWithFlags(unsigned int flags) -> intptr_t",
    "cuda.runtime.streamDestroy": "streamDestroy(intptr_t stream)",
    "cuda.runtime.streamIsCapturing": "streamIsCapturing(intptr_t stream) -> bool",
    "cuda.runtime.streamWaitEvent": "streamWaitEvent(intptr_t stream, intptr_t event, unsigned int flags=0)",
    "cuda.runtime.eventCreateWithFlags": "eventCreateWithFlags(unsigned int flags) -> intptr_t",
    "cuda.runtime.eventDestroy": "eventDestroy(intptr_t event)",
    "cuda.runtime.eventRecord": "eventRecord(intptr_t event, intptr_t stream)",
    "cuda.runtime.eventSynchronize": "eventSynchronize(intptr_t event)",
    "cuda.runtime.memcpyAsync": "memcpyAsync(intptr_t dst, intptr_t src, size_t size, int kind, intptr_t stream)",
    "cuda.nccl.get_version": "get_version()",
    "cuda.nccl.get_unique_id": "get_unique_id()",
    "cuda.nccl.groupStart": "groupStart()",
    "cuda.nccl.groupEnd": "groupEnd()",
    "cuda.nccl.NcclCommunicator": "NcclCommunicator(int ndev, bytes commId, int rank, NcclConfig config=None)",
    "cuda.nccl.NcclCommunicator.allReduce": (
        "NcclCommunicator.allReduce(self, intptr_t sendbuf, intptr_t recvbuf, size_t count, int datatype, int op, "
        "intptr_t stream)"
    ),
    "cuda.nccl.NcclCommunicator.reduce": (
        "NcclCommunicator.reduce(self, intptr_t sendbuf, intptr_t recvbuf, size_t count, int datatype, int op, "
        "int root, intptr_t stream)"
    ),
    "cuda.nccl.NcclCommunicator.broadcast": (
        "NcclCommunicator.broadcast(self, intptr_t sendbuff, intptr_t recvbuff, size_t count, int datatype, "
        "int root, intptr_t stream)"
    ),
    "cuda.nccl.NcclCommunicator.allGather": (
        "NcclCommunicator.allGather(self, intptr_t sendbuf, intptr_t recvbuf, size_t count, int datatype, "
        "intptr_t stream)"
    ),
    "cuda.nccl.NcclCommunicator.reduceScatter": (
        "NcclCommunicator.reduceScatter(self, intptr_t sendbuf, intptr_t recvbuf, size_t recvcount, int datatype, "
        "int op, intptr_t stream)"
    ),
    "cuda.nccl.NcclCommunicator.send": (
        "NcclCommunicator.send(self, intptr_t sendbuf, size_t count, int datatype, int peer, intptr_t stream)"
    ),
    "cuda.nccl.NcclCommunicator.recv": (
        "NcclCommunicator.recv(self, intptr_t recvbuf, size_t count, int datatype, int peer, intptr_t stream)"
    ),
    "cuda.nccl.NcclCommunicator.check_async_error": "NcclCommunicator.check_async_error(self)",
    "cuda.nccl.NcclCommunicator.abort": "NcclCommunicator.abort(self)",
    "cuda.nccl.NcclCommunicator.destroy": "NcclCommunicator.destroy(self)",
    "cuda.PinnedMemoryPointer": "PinnedMemoryPointer(mem, ptrdiff_t offset)",
    "cuda.UnownedMemory": "UnownedMemory(intptr_t ptr, size_t size, owner, int device_id=-1)",
    "cuda.MemoryPointer": "MemoryPointer(BaseMemory mem, ptrdiff_t offset)",
    "cuda.Device": "Device(device=None)",
    "cuda.Stream.from_external": "Stream.from_external(cls, obj)",
    "cuda.get_current_stream": "get_current_stream(int device_id=-1)",
    "ndarray": "__init__(shape, dtype=float, memptr=None, strides=None, order='C')",
    "ElementwiseKernel": (
        "ElementwiseKernel(in_params, out_params, operation, name='kernel', reduce_dims=True, preamble='', "
        "no_return=False, return_tuple=False, **kwargs)"
    ),
    "from_dlpack": "from_dlpack(array, *, device=None, copy=None)",
}

#: CuPy functions and classes written in Python, with the parameters that `inspect` reports.
INSPECTED = {
    "cuda.PinnedMemory": ["size", "flags"],
    "ascontiguousarray": ["a", "dtype"],
    "empty": ["shape", "dtype", "order"],
}

CONSTANTS = {
    "cuda.runtime.streamNonBlocking": 1,
    "cuda.runtime.eventBlockingSync": 1,
    "cuda.runtime.eventDisableTiming": 2,
    "cuda.runtime.memcpyHostToDevice": 1,
    "cuda.runtime.memcpyDeviceToHost": 2,
    "cuda.runtime.memcpyDeviceToDevice": 3,
}

#: NCCL's dtype and op numbers, which CuPy also uses.
NCCL_NUMBERS = {
    "NCCL_INT8": 0,
    "NCCL_UINT8": 1,
    "NCCL_INT32": 2,
    "NCCL_UINT32": 3,
    "NCCL_INT64": 4,
    "NCCL_UINT64": 5,
    "NCCL_FLOAT16": 6,
    "NCCL_FLOAT32": 7,
    "NCCL_FLOAT64": 8,
    "NCCL_BFLOAT16": 9,
    "NCCL_SUM": 0,
    "NCCL_PROD": 1,
    "NCCL_MAX": 2,
    "NCCL_MIN": 3,
    "NCCL_AVG": 4,
}
