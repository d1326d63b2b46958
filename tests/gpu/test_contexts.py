"""CUDA contexts: all threads of a rank create them only on the device of the rank's arrays."""

from __future__ import annotations

import os
import threading
from typing import Any

import numpy as np
import pytest

from aiocoll import ProcessGroup
from aiocoll.gpu.calls.cards import Decision
from aiocoll.gpu.device import Device
from aiocoll.gpu.events import Events

from ..fakes.arrays import FakeArray
from ..fakes.cuda import FakeCuda
from ..fakes.nccl import FakeNccl
from ..internals import Limits, dispatcher_of
from ..ranks import run_ranks, wait_until
from .devices import fake_cuda, launch_call
from .groups import WAYS, Gpus, gpus

CONNECT = "NCCL_RUNTIME_CONNECT"
#: The devices that hold arrays. Device 0, the default device of new threads, holds none.
USED = (1, 2)


async def make_all_calls(pg: ProcessGroup, gpu: Gpus) -> None:
    """Make device calls of all kinds: launched, staged and messages."""
    device = USED[pg.rank()]
    tensor = gpu.tensor(np.ones(3), device)
    await pg.allreduce(tensor)
    await pg.allreduce(tensor).on_stream()
    await pg.allreduce(gpu.tensor(np.ones(3, np.int16), device))  # int16 arrays are always staged
    large, into = (gpu.tensor(np.ones(100_000), device) for _ in range(2))
    sent = pg.send(large, 1 - pg.rank())
    await pg.recv(into, 1 - pg.rank())
    await sent
    # An array without a known device, which aiocoll must find from the address.
    array = FakeArray(gpu.cuda, np.ones(3), device)
    await pg.allreduce(array)
    assert array.numpy().tolist() == [2] * 3


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("end", ["shutdown", "abort"])
async def test_calls_create_cuda_contexts_only_on_the_devices_of_their_arrays(way: str, end: str) -> None:
    async def body(pg: ProcessGroup, gpu: Gpus) -> None:
        await make_all_calls(pg, gpu)
        if end == "abort":
            await pg.barrier()
            pg.abort("enough")
        await pg.shutdown()

    with gpus(3, way) as gpu:
        await run_ranks(2, body, gpu)
    assert sorted(gpu.cuda.contexts) == [*USED], gpu.cuda.contexts


async def test_late_communicator_is_created_on_the_correct_device_and_aborted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use ranks whose group has failed while other ranks started to create the communicator."""
    settings: list[str | None] = []

    async def body(pg: ProcessGroup, gpu: Gpus) -> None:
        await pg.allreduce(gpu.tensor(np.ones(3), USED[pg.rank()]))
        side = dispatcher_of(pg).device_calls.state
        assert side is not None
        name = await side.device.run(gpu.nccl.unique_id) if pg.rank() == 0 else None
        monkeypatch.delenv(CONNECT, raising=False)  # start as in a process without an earlier communicator
        name = await pg.broadcast_object(name, 0)
        side._agreement.handle_late({"decision": Decision(True, "all have it", name)})
        await wait_until(lambda: called.count("abort") == 2)

    with gpus(3) as gpu:
        called = gpu.calls()
        gpu.nccl.hooks.append(lambda call: settings.append(os.environ.get(CONNECT)) if call == "init" else None)
        await run_ranks(2, body, gpu)
    assert settings == ["0"] * 4
    assert sorted(gpu.cuda.contexts) == [*USED], gpu.cuda.contexts


async def test_device_functions_in_other_threads_run_with_their_device_selected() -> None:
    with fake_cuda(2) as cuda:
        device = Device.of(cuda, 1)
        nccl = FakeNccl(cuda)
        assert await device.run_in_thread(cuda.current) == 1
        end = await device.run(lambda: nccl.init(1, nccl.unique_id(), 0))
        await device.run_in_thread(end.abort)
        undone: list[int] = []
        busy = threading.Event()
        late = device.run(lambda: busy.wait(10), lambda result: undone.append(cuda.current()))
        late.cancel()
        busy.set()
        await wait_until(lambda: undone)
        assert undone == [1]
    assert sorted(cuda.contexts) == [1]


async def test_device_function_in_a_thread_runs_although_the_device_selection_fails() -> None:
    with fake_cuda(1) as cuda:
        device = Device.of(cuda, 0)
        cuda.fail_next("use", "invalid device ordinal 7")
        assert await device.run_in_thread(lambda: 5) == 5


def result_in_thread(cuda: FakeCuda, call: Any) -> Any:
    """Return the result of `call` in a new thread."""
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(call()))
    thread.start()
    thread.join(10)
    return found[0]


def test_device_functions_restore_the_device_that_their_thread_has_selected() -> None:
    with FakeCuda(3) as cuda:
        events = Events(cuda, 2)

        def devices_seen() -> tuple[int, int]:
            return events.on_device(cuda.current), cuda.current()

        assert result_in_thread(cuda, devices_seen) == (2, 2)
        assert sorted(cuda.contexts) == [2]

        def devices_seen_after_use() -> tuple[int, int]:
            cuda.use(1)
            return devices_seen()

        assert result_in_thread(cuda, devices_seen_after_use) == (2, 1)
        assert sorted(cuda.contexts) == [1, 2]


async def test_communicator_is_ended_by_a_thread_with_its_device(limits: Limits) -> None:
    """Include a rank that closes the communicator before the other rank."""
    limits(device_departure_timeout=0.01)

    async def body(pg: ProcessGroup, gpu: Gpus) -> None:
        tensor = gpu.tensor(np.ones(3), USED[pg.rank()])
        await pg.allreduce(tensor)
        await pg.barrier()
        if pg.rank() == 1:
            await dispatcher_of(pg).device_calls.state.close()  # type: ignore[union-attr]

    with gpus(3) as gpu:
        await run_ranks(2, body, gpu)
    assert sorted(gpu.cuda.contexts) == [*USED], gpu.cuda.contexts


async def test_device_call_uses_the_device_of_its_arrays_instead_of_the_current_device() -> None:
    with fake_cuda(2) as cuda:
        device = Device.of(cuda, 1)
        stream = device.stream()
        launched, ended = launch_call(device, stream)
        await launched.on_stream(0)
        await ended
        device.check_capture(0)
        assert await device.close_stream(stream, 10)
    assert sorted(cuda.contexts) == [1]
