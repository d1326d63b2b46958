"""The CUDA driver adapter: its libcuda calls, its errors, and queries that do not block other threads."""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Callable
from typing import Any

import pytest

from aiocoll.gpu import driver as module
from aiocoll.gpu.api import DeviceError
from aiocoll.gpu.driver import Driver, load

from .processes import run_code
from .stub_driver import CONTEXT, MODES, Log
from .stub_driver import driver as stub

#: An event handle that needs as many bits as an address.
EVENT = 0x7F00_1234_5678_9AB0


def test_driver_relax_sets_the_stream_capture_mode_of_the_thread() -> None:
    log = Log()
    MODES.clear()
    Driver(stub(log)).relax()
    assert log.calls[-1] == ("cuThreadExchangeStreamCaptureMode", ())
    assert MODES == [2]


@pytest.fixture
def log() -> Log:
    return Log()


@pytest.mark.parametrize(
    ("call", "returned", "logged"),
    [
        (lambda d: d.event_done(EVENT), True, [("cuEventQuery", (EVENT,))]),
        (
            lambda d: d.stream_write(0x7700_0000_0000, EVENT, 0xFFFF_FFFF),
            None,
            [("cuStreamWriteValue32_v2", (0x7700_0000_0000, EVENT, 0xFFFF_FFFF, 0))],
        ),
        (lambda d: d.has_context(3), True, [("cuDeviceGet", (3,)), ("cuDevicePrimaryCtxGetState", (3,))]),
        (
            lambda d: (d.use(3), d.use(3)),
            (None, None),
            [
                ("cuDeviceGet", (3,)),
                ("cuDevicePrimaryCtxRetain", (3,)),
                ("cuCtxSetCurrent", (CONTEXT + 3,)),
                ("cuCtxSetCurrent", (CONTEXT + 3,)),
            ],
        ),
        (lambda d: d.device_of(EVENT), 1, [("cuPointerGetAttribute", (9, EVENT))]),
    ],
)
def test_each_driver_method_calls_its_libcuda_function(
    log: Log, call: Callable[[Driver], Any], returned: Any, logged: Any
) -> None:
    made = Driver(stub(log))
    assert log.calls == [("cuInit", (0,))]
    log.calls.clear()
    assert call(made) == returned
    assert log.calls == logged


@pytest.mark.parametrize(("status", "fatal"), [(1, False), (2, False), (400, False), (906, False), (700, True)])
def test_libcuda_error_statuses_are_raised_as_device_errors(log: Log, status: int, fatal: bool) -> None:
    made = Driver(stub(log))
    for name, call in (("cuEventQuery", made.event_done), ("cuPointerGetAttribute", made.device_of)):
        log.status[name] = status
        with pytest.raises(DeviceError, match=f"^{name}: CUDA_ERROR_OF_A_STUB$") as error:
            call(EVENT)
        assert error.value.fatal is fatal
    log.status["cuGetErrorName"] = 1
    with pytest.raises(DeviceError, match=f"^cuEventQuery: status {status}$"):
        made.event_done(EVENT)


def test_driver_event_of_unfinished_work_is_not_done(log: Log) -> None:
    log.status["cuEventQuery"] = 600
    assert Driver(stub(log)).event_done(EVENT) is False


def test_driver_load_opens_libcuda(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[str] = []
    monkeypatch.setattr(module.ctypes, "CDLL", lambda name: (loaded.append(name), stub(log))[1])
    assert load().event_done(EVENT)
    assert loaded == ["libcuda.so.1"]
    log.status["cuInit"] = 100
    with pytest.raises(DeviceError, match=r"^cuInit: CUDA_ERROR_OF_A_STUB$"):
        load()


#: Code in which a thread's event query blocks on a C semaphore in place of the driver, until another thread posts the
#: semaphore. The upper half of the semaphore's first word counts the waiting threads (glibc, 64 bits).
STALL = """
import ctypes, threading, time
from tests.gpu.stub_driver import driver
from aiocoll.gpu.driver import Driver
library = driver(lambda name, args: 0)
library.cuEventQuery = ctypes.CDLL(None).sem_wait
query = Driver(library).event_done
libc = ctypes.CDLL(None)
semaphore = ctypes.create_string_buffer(32)
libc.sem_init(semaphore, 0, 0)
results = []
querying = threading.Thread(target=lambda: results.append(query(ctypes.addressof(semaphore))))
querying.start()
while not any(semaphore.raw[4:8]):
    time.sleep(0)
libc.sem_post(semaphore)
querying.join()
print(results)
"""


@pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc" or ctypes.sizeof(ctypes.c_void_p) != 8, reason="reads a semaphore of 64-bit glibc"
)
def test_stalled_driver_event_query_blocks_no_other_thread() -> None:
    assert run_code(STALL) == "[True]"
