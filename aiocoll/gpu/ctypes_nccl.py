"""NCCL by ctypes: bindings to libnccl from an NVIDIA package, as installed with torch, or from the system.

The communicators are non-blocking: a call that has to wait for other ranks returns at once. This module then polls
whether the call is done, in the end every millisecond. So no thread is inside NCCL while it waits, and the communicator
can be aborted, as NCCL requires. Signatures and numbers come from nccl.h.
"""

from __future__ import annotations

import ctypes
import importlib.util
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from aiocoll.gpu.api import DeviceError

__all__ = ["SIGNATURES", "Config", "CtypesCommunicator", "CtypesNccl", "UniqueId", "library", "load"]

UNIQUE_ID_BYTES = 128


class UniqueId(ctypes.Structure):
    """The C type `ncclUniqueId`, which NCCL functions take by value."""

    _fields_ = (("internal", ctypes.c_char * UNIQUE_ID_BYTES),)


class Config(ctypes.Structure):
    """The C type `ncclConfig_v21700`, the oldest NCCL configuration; later NCCL versions also accept it."""

    _fields_ = (
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        ("blocking", ctypes.c_int),
        ("cgaClusterSize", ctypes.c_int),
        ("minCTAs", ctypes.c_int),
        ("maxCTAs", ctypes.c_int),
        ("netName", ctypes.c_void_p),
    )


_INT, _SIZE, _POINTER = ctypes.c_int, ctypes.c_size_t, ctypes.c_void_p
SIGNATURES: dict[str, tuple[Any, ...]] = {
    "ncclGetVersion": (_POINTER,),
    "ncclGetUniqueId": (_POINTER,),
    "ncclCommInitRankConfig": (_POINTER, _INT, UniqueId, _INT, _POINTER),
    "ncclCommGetAsyncError": (_POINTER, _POINTER),
    "ncclCommFinalize": (_POINTER,),
    "ncclCommDestroy": (_POINTER,),
    "ncclCommAbort": (_POINTER,),
    "ncclAllReduce": (_POINTER, _POINTER, _SIZE, _INT, _INT, _POINTER, _POINTER),
    "ncclReduce": (_POINTER, _POINTER, _SIZE, _INT, _INT, _INT, _POINTER, _POINTER),
    "ncclBroadcast": (_POINTER, _POINTER, _SIZE, _INT, _INT, _POINTER, _POINTER),
    "ncclAllGather": (_POINTER, _POINTER, _SIZE, _INT, _POINTER, _POINTER),
    "ncclReduceScatter": (_POINTER, _POINTER, _SIZE, _INT, _INT, _POINTER, _POINTER),
    "ncclSend": (_POINTER, _SIZE, _INT, _INT, _POINTER, _POINTER),
    "ncclRecv": (_POINTER, _SIZE, _INT, _INT, _POINTER, _POINTER),
    "ncclGroupStart": (),
    "ncclGroupEnd": (),
}
_SUCCESS, _INVALID_ARGUMENT, _IN_PROGRESS = 0, 4, 7
_MAGIC, _CONFIG_VERSION = 0xCAFEBEEF, 21700
#: Value that marks a field of NCCL's configuration as not set (NCCL_CONFIG_UNDEF_INT).
_UNSET = -(1 << 31)
#: Number of polls for the end of an NCCL call before the first pause: enough for a kernel launch.
_AT_ONCE = 64
#: Seconds between later polls for the end of an NCCL call.
_POLL_EVERY = 0.001
_OLDEST = 21800


class CtypesNccl:
    """An implementation of `Nccl` that calls libnccl by ctypes.

    Args:
        library: libnccl, as returned by `ctypes.CDLL`.

    Raises:
        DeviceError: the library cannot be used.
    """

    def __init__(self, library: Any) -> None:
        self._library = library
        for name, types in SIGNATURES.items():
            call = getattr(library, name)
            call.argtypes, call.restype = types, _INT
        library.ncclGetErrorString.argtypes = (_INT,)
        library.ncclGetErrorString.restype = ctypes.c_char_p
        self._thread = threading.local()
        if self.version() < _OLDEST:
            raise DeviceError("ncclGetVersion", f"NCCL {self.version()} is too old; install version {_OLDEST} or later")

    def version(self) -> int:
        """Return the version of NCCL, such as 22809."""
        number = ctypes.c_int()
        self.check("ncclGetVersion", self.call("ncclGetVersion", ctypes.byref(number)))
        return number.value

    def unique_id(self) -> bytes:
        """Return the id of a new NCCL communicator."""
        made = UniqueId()
        self.check("ncclGetUniqueId", self.call("ncclGetUniqueId", ctypes.byref(made)))
        return bytes(memoryview(made))

    def init(self, world_size: int, unique_id: bytes, rank: int) -> CtypesCommunicator:
        """Create this rank's communicator on the thread's current device; return when all ranks have called this."""
        if len(unique_id) != UNIQUE_ID_BYTES:
            raise DeviceError(
                "ncclCommInitRankConfig", f"the communicator id must have {UNIQUE_ID_BYTES} bytes", fatal=False
            )
        config = Config(
            ctypes.sizeof(Config), _MAGIC, _CONFIG_VERSION, 0, _UNSET, _UNSET, _UNSET, None
        )  # fmt: skip
        handle = ctypes.c_void_p()
        name = "ncclCommInitRankConfig"
        status = self.call(
            name, ctypes.byref(handle), world_size, UniqueId.from_buffer_copy(unique_id), rank, ctypes.byref(config)
        )
        if status not in (_SUCCESS, _IN_PROGRESS):
            raise self.error(name, status)  # NCCL may keep a part of the communicator, which is never freed
        made = CtypesCommunicator(self, handle.value or 0)
        made.finish(name, status)
        return made

    def group_start(self) -> None:
        """Start an NCCL group, whose calls are launched together."""
        self.check("ncclGroupStart", self.call("ncclGroupStart"))
        self._thread.group = set()

    def group_end(self) -> None:
        """Launch all calls since `group_start`."""
        group, self._thread.group = self._thread.group, None
        status = self.call("ncclGroupEnd")
        if status not in (_SUCCESS, _IN_PROGRESS):
            raise self.error("ncclGroupEnd", status)
        for each in group:
            each.finish("ncclGroupEnd", status)

    # -- for communicators

    def call(self, name: str, *args: Any) -> int:
        """Call the NCCL function `name`, and return the status code."""
        return int(getattr(self._library, name)(*args))

    def check(self, name: str, status: int) -> None:
        """Raise an error unless a status code means success."""
        if status != _SUCCESS:
            raise self.error(name, status)

    def error(self, name: str, status: int) -> DeviceError:
        """Return the `DeviceError` for a status code."""
        return DeviceError(name, self.text(status), fatal=status != _INVALID_ARGUMENT)

    def text(self, status: int) -> str:
        """Return NCCL's text for a status code."""
        return (self._library.ncclGetErrorString(status) or b"").decode() or f"status {status}"

    def joins(self, communicator: CtypesCommunicator) -> bool:
        """Add `communicator` to this thread's open NCCL group; return False if no group is open."""
        group = getattr(self._thread, "group", None)
        if group is not None:
            group.add(communicator)
        return group is not None


class CtypesCommunicator:
    """An implementation of `NcclCommunicator` by libnccl; only one thread at a time calls NCCL."""

    def __init__(self, nccl: CtypesNccl, handle: int) -> None:
        self._nccl = nccl
        self._handle = handle
        #: Held by the thread that is calling an NCCL function on this communicator.
        self._inside = threading.Lock()
        self._over = threading.Event()

    def all_reduce(self, source: int, target: int, count: int, dtype: int, op: int, stream: int) -> None:
        """Reduce `source` over all ranks into every rank's `target`."""
        self._start("ncclAllReduce", source, target, count, dtype, op, stream=stream)

    def reduce(self, source: int, target: int, count: int, dtype: int, op: int, root: int, stream: int) -> None:
        """Reduce `source` over all ranks into the root's `target`."""
        self._start("ncclReduce", source, target, count, dtype, op, root, stream=stream)

    def broadcast(self, source: int, target: int, count: int, dtype: int, root: int, stream: int) -> None:
        """Copy the root's `source` to every rank's `target`."""
        self._start("ncclBroadcast", source, target, count, dtype, root, stream=stream)

    def all_gather(self, source: int, target: int, count: int, dtype: int, stream: int) -> None:
        """Concatenate `count` elements of every rank in every rank's `target`."""
        self._start("ncclAllGather", source, target, count, dtype, stream=stream)

    def reduce_scatter(self, source: int, target: int, count: int, dtype: int, op: int, stream: int) -> None:
        """Reduce over all ranks, and store the r-th block of the result in rank r's `target`."""
        self._start("ncclReduceScatter", source, target, count, dtype, op, stream=stream)

    def send(self, source: int, count: int, dtype: int, peer: int, stream: int) -> None:
        """Send device memory to `peer`."""
        self._start("ncclSend", source, count, dtype, peer, stream=stream)

    def recv(self, target: int, count: int, dtype: int, peer: int, stream: int) -> None:
        """Receive from `peer` into device memory."""
        self._start("ncclRecv", target, count, dtype, peer, stream=stream)

    def async_error(self) -> str | None:
        """Return the asynchronous error of the communicator, or None."""
        status = self._status("ncclCommGetAsyncError")
        return None if status in (_SUCCESS, _IN_PROGRESS) else self._nccl.text(status)

    def abort(self) -> None:
        """Abort the NCCL calls in flight, once no thread is calling an NCCL function."""
        self._end("ncclCommAbort")

    def destroy(self) -> None:
        """Destroy the communicator; all ranks must call this."""
        with self._inside:
            self._check_open("ncclCommFinalize")
            status = self._nccl.call("ncclCommFinalize", self._handle)
        self.finish("ncclCommFinalize", status)
        self._end("ncclCommDestroy")

    def finish(self, name: str, status: int) -> None:
        """Wait until an NCCL call is done; another thread may abort the communicator during this wait.

        Raises:
            DeviceError: the call has failed, or was aborted.
        """
        polled = 0
        while status == _IN_PROGRESS:
            status = self._status(name)
            polled += 1
            if status == _IN_PROGRESS and polled > _AT_ONCE:
                self._over.wait(_POLL_EVERY)
        self._nccl.check(name, status)

    def _start(self, name: str, *args: int, stream: int) -> None:
        with self._inside:
            self._check_open(name)
            status = self._nccl.call(name, *args, self._handle, stream)
        if status not in (_SUCCESS, _IN_PROGRESS) or not self._nccl.joins(self):
            self.finish(name, status)

    def _status(self, name: str) -> int:
        status = ctypes.c_int()
        with self._inside:
            self._check_open(name)
            self._nccl.check(name, self._nccl.call("ncclCommGetAsyncError", self._handle, ctypes.byref(status)))
        return status.value

    def _check_open(self, name: str) -> None:
        if self._over.is_set():
            raise DeviceError(name, "the communicator was aborted or destroyed")

    def _end(self, name: str) -> None:
        with self._inside:
            if self._over.is_set():
                return
            self._over.set()
            self._nccl.check(name, self._nccl.call(name, self._handle))


def load() -> CtypesNccl:
    """Return a `CtypesNccl` for the libnccl of this machine.

    Raises:
        OSError: there is no library.
        AttributeError: the library lacks a function.
        DeviceError: the library cannot be used.
    """
    return CtypesNccl(library())


def library() -> ctypes.CDLL:
    """Load libnccl from an NVIDIA package, as torch does, or from the system.

    Raises:
        OSError: there is no library.
    """
    for name in _names():
        try:
            return ctypes.CDLL(name)
        except OSError as error:
            last = error
    raise last


def _names() -> Iterator[str]:
    """Yield possible paths of libnccl. The first is the path from which torch loads it."""
    try:
        package = importlib.util.find_spec("nvidia.nccl")
    except ModuleNotFoundError:
        package = None
    for folder in (package.submodule_search_locations or ()) if package is not None else ():
        yield str(Path(folder) / "lib" / "libnccl.so.2")
    yield "libnccl.so.2"
