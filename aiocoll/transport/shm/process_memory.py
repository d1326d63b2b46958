"""Reading the memory of another process on this host, if the kernel permits it: one copy instead of two.

The kernel permits these reads (`process_vm_readv`) where it permits debugging: among processes of one user, unless
Yama, a seccomp filter or missing capabilities forbid it. Two ranks test it when they open their link: each reads a
secret word of the other. Every later read includes the word, because another process may reuse the number of an ended
one.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import os
import socket
import struct
from collections.abc import Callable
from typing import Any

import numpy as np

__all__ = ["OwnMemory", "PeerMemory", "address_of", "can_read", "peer_memory", "permit_reading", "yama_scope"]

_WORD = 8
_PR_SET_PTRACER = 0x59616D61
_YAMA_SCOPE = "/proc/sys/kernel/yama/ptrace_scope"


class _IoVec(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("nbytes", ctypes.c_size_t))


class OwnMemory:
    """The address and value of a secret word of this process. A peer must know both to read this process.

    Args:
        random_bytes: makes the word.

    Attributes:
        address, word: address and value of the secret word.
    """

    __slots__ = ("_kept", "_self", "address", "word")

    def __init__(self, random_bytes: Callable[[int], bytes]) -> None:
        self._kept = ctypes.c_uint64.from_buffer_copy(random_bytes(_WORD))
        self.word = self._kept.value
        self.address = ctypes.addressof(self._kept)
        self._self = PeerMemory(os.getpid(), self.address, self.word)

    def can_show(self, address: int) -> bool:
        """Return whether a process that is permitted to read this process can read the byte at `address`.

        It cannot read mapped device memory.
        """
        try:
            self._self.read(address, memoryview(bytearray(1)))
        except OSError:
            return False
        return True


class PeerMemory:
    """The memory of a peer's process, for reading.

    Args:
        pid: number of the process.
        address, word: address and value of its secret word.
    """

    __slots__ = ("_found", "_local", "_pid", "_readv", "_remote", "_word")

    def __init__(self, pid: int, address: int, word: int) -> None:
        self._readv = _process_vm_readv()
        self._pid = pid
        self._word = word
        self._found = ctypes.c_uint64()
        self._local = (_IoVec * 2)(_IoVec(ctypes.addressof(self._found), _WORD))
        self._remote = (_IoVec * 2)(_IoVec(address, _WORD))

    def read(self, address: int, into: memoryview) -> None:
        """Copy memory of the peer's process, starting at `address`, into the writable view `into`.

        Raises:
            ProcessLookupError: the process has ended.
            PermissionError: the kernel does not permit it.
            OSError: no memory is mapped there.
        """
        local, remote = self._local[1], self._remote[1]
        nbytes = local.nbytes = remote.nbytes = into.nbytes
        local.base = address_of(into)
        remote.base = address
        self._found.value = ~self._word & 0xFFFFFFFFFFFFFFFF
        got = self._readv(self._pid, self._local, 2, self._remote, 2, 0)
        if got < 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
        if self._found.value != self._word:
            raise ProcessLookupError(errno.ESRCH, "the process has ended, and another process has its number")
        if got != nbytes + _WORD:
            raise OSError(errno.EFAULT, os.strerror(errno.EFAULT))


def peer_memory(sock: socket.socket, address: int, word: int) -> PeerMemory | None:
    """Return the memory of the process at the other end of a unix socket; None if this process cannot read it.

    Args:
        sock: connected; the peer is authenticated.
        address: address of the peer's secret word, as the peer reports it.
        word: value of that word.
    """
    pid, _, _ = struct.unpack("iII", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    if pid <= 0:  # the peer is in a PID namespace that is not visible to this process
        return None
    try:
        memory = PeerMemory(pid, address, word)
        memory.read(address, memoryview(bytearray(_WORD)))
    except OSError:
        return None
    return memory


def address_of(view: memoryview) -> int:
    """Return the memory address of the first byte of a contiguous, non-empty view."""
    if not view.readonly:
        return ctypes.addressof(ctypes.c_char.from_buffer(view))
    return int(np.frombuffer(view, np.uint8).__array_interface__["data"][0])


def permit_reading(pid: int) -> None:
    """Permit process `pid` and its descendants to read this process, even if Yama otherwise permits only parents.

    See prctl(2), PR_SET_PTRACER. Without Yama the call has no effect.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PTRACER, ctypes.c_ulong(pid), 0, 0, 0)


def yama_scope() -> int:
    """Return the level at which Yama restricts reading the memory of other processes. Root is exempt.

    0, also without Yama: all processes of the same user; 1: parents and permitted processes; 2 and above: none.
    """
    try:
        with open(_YAMA_SCOPE) as file:
            return int(file.read())
    except (OSError, ValueError):
        return 0


def can_read() -> str | None:
    """Return why this process cannot read other processes' memory; None if a test read of its own memory succeeds."""
    try:
        own = OwnMemory(bytes)
    except OSError as error:
        return str(error)
    return None if own.can_show(own.address) else "the kernel refuses process_vm_readv even on this process itself"


@functools.cache
def _process_vm_readv() -> Any:
    try:
        call = ctypes.CDLL(None, use_errno=True).process_vm_readv
    except (OSError, AttributeError):
        raise OSError(errno.ENOSYS, "this system has no process_vm_readv") from None
    call.restype = ctypes.c_ssize_t
    # Do not set `argtypes`: without them, ctypes also passes arrays as pointers, and is faster.
    return call
