"""Memory fences for shared memory, on each machine architecture."""

from __future__ import annotations

import ctypes
import platform
import sys
import threading

import pytest

from aiocoll.transport.shm.fence import fences, has_atomic_stores


@pytest.mark.parametrize("machine", ["x86_64", "AMD64"])
def test_x86_processor_needs_no_store_fence(machine: str) -> None:
    known = fences(machine)
    assert known is not None
    assert known.order is None
    known.full()


@pytest.mark.parametrize("machine", ["aarch64", "arm64", "ppc64le", "riscv64", "s390x"])
def test_machines_other_than_x86_use_fences_of_libatomic(machine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    orders: list[int] = []
    monkeypatch.setattr(ctypes, "PyDLL", lambda name: type("", (), {"atomic_thread_fence": Fence(name, orders)})())
    known = fences(machine)
    assert known is not None
    assert known.order is not None
    known.order()
    known.full()
    assert orders == [5, 5]


@pytest.mark.parametrize("machine", ["i386", "i686", "armv7l", "armv8l", "mips", "ppc", "riscv32", "unknown"])
def test_machine_without_atomic_64_bit_stores_is_refused(machine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "PyDLL", lambda name: type("", (), {"atomic_thread_fence": Fence(name, [])})())
    assert not has_atomic_stores(machine)
    assert fences(machine) is None


def test_32_bit_process_on_a_64_bit_machine_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert has_atomic_stores("x86_64")
    monkeypatch.setattr(sys, "maxsize", 2**31 - 1)
    assert not has_atomic_stores("x86_64")
    assert fences("x86_64") is None


class Fence:
    """A stand-in for a fence function of libatomic that ctypes has loaded."""

    argtypes: object = None
    restype: object = int

    def __init__(self, library: str, orders: list[int]) -> None:
        assert library == "libatomic.so.1"
        self.orders = orders

    def __call__(self, order: int) -> None:
        assert (self.argtypes, self.restype) == ([ctypes.c_int], None)
        self.orders.append(order)


def test_libatomic_fences_can_be_called() -> None:
    known = fences("aarch64")
    if known is None:
        pytest.skip("libatomic is not installed")
    assert known.order is not None
    known.order()
    known.full()


@pytest.mark.parametrize("error", [OSError("no such file"), AttributeError("no such function")])
def test_memory_fences_are_unavailable_without_libatomic(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail_to_load(name: str) -> None:
        raise error

    monkeypatch.setattr(ctypes, "PyDLL", fail_to_load)
    assert fences("aarch64") is None


def test_x86_needs_no_fence_function_to_order_stores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    known = fences()
    assert known is not None
    assert known.order is None


class Interrupted(BaseException):
    """A stand-in for `KeyboardInterrupt`."""


def test_interrupted_memory_fence_does_not_block_later_fences(monkeypatch: pytest.MonkeyPatch) -> None:
    """Interrupt a fence at each access of its lock, as a second Ctrl-C can; later fences must not block."""

    class Lock:
        def __init__(self) -> None:
            self.lock = real()
            self.interrupt = False

        def acquire(self, *args: bool) -> bool:
            taken = self.lock.acquire(*args, **({} if args else {"timeout": 5.0}))
            assert taken or args == (False,), "the lock was still held after the interrupt"
            if self.interrupt:
                self.interrupt = False
                raise Interrupted
            return taken

        def release(self) -> None:
            self.lock.release()

    real, made = threading.Lock, []
    monkeypatch.setattr(threading, "Lock", lambda: made.append(Lock()) or made[-1])
    known = fences("x86_64")
    assert known is not None
    (lock,) = made
    lock.interrupt = True
    with pytest.raises(Interrupted):
        known.full()
    known.full()
    known.full()
    assert not lock.lock.locked()
