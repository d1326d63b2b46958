"""CuPy and torch arrays in groups: NCCL works directly in the caller's memory, without an unnecessary copy.

The tests include tensors that require gradients, and default streams.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest

from aiocoll import ProcessGroup
from aiocoll.elements.dtypes import by_name

from ..fake_libraries import Cupy, Torch
from ..fakes.cuda import Gate
from ..fakes.nccl import FakeCommunicator
from ..ranks import run_ranks
from .groups import WAYS, Gpus, gpus

CASES = [
    ("cupy", "float32"), ("cupy", "float16"), ("cupy", "bfloat16"), ("cupy", "complex64"), ("cupy", "bool"),
    ("torch", "float32"), ("torch", "bfloat16"), ("torch", "float8_e4m3fn"), ("torch", "int16"), ("torch", "complex64"),
]  # fmt: skip
#: Dtypes that NCCL does not support.
STAGED = ("int16",)
both = pytest.mark.parametrize("libraries", WAYS, indirect=True)


class Libraries:
    """Lookalikes of CuPy and torch on the fake devices."""

    def __init__(self, gpu: Gpus) -> None:
        self.gpu = gpu
        self.enqueue = lambda stream, device, work: gpu.cuda.kernel(stream, work, device)
        self.cupy, self.torch = Cupy(self.enqueue, gpu.cuda.allocate), Torch(self.enqueue, gpu.cuda.allocate)
        #: The source and target addresses of all NCCL allreduces, by device.
        self.reduced: dict[int, list[tuple[int, int]]] = {}

    def host(self, shape: tuple[int, ...], name: str, device: int) -> np.ndarray:
        """Allocate device memory; return it as a NumPy array."""
        dtype = np.dtype(getattr(pytest.importorskip("ml_dtypes"), name, name))
        return self.gpu.cuda.allocate(int(np.prod(shape)) * dtype.itemsize, device).view(dtype).reshape(shape)

    def array(self, library: str, host: np.ndarray, name: str, device: int, **more: Any) -> Any:
        if library == "cupy":
            return self.cupy.ndarray(host, device)
        return self.torch.Tensor(host.view(by_name(name).storage), name, device, **more)


@pytest.fixture
def libraries(request: pytest.FixtureRequest) -> Iterator[Libraries]:
    with gpus(2, getattr(request, "param", "nccl")) as gpu, pytest.MonkeyPatch.context() as monkeypatch:
        made = Libraries(gpu)
        monkeypatch.setitem(sys.modules, "cupy", made.cupy)  # type: ignore[arg-type]
        monkeypatch.setitem(sys.modules, "torch", made.torch)  # type: ignore[arg-type]
        reduce = FakeCommunicator.all_reduce

        def record_call(self: FakeCommunicator, source: int, target: int, *args: Any) -> None:
            made.reduced.setdefault(gpu.cuda.current(), []).append((source, target))
            reduce(self, source, target, *args)

        monkeypatch.setattr(FakeCommunicator, "all_reduce", record_call)
        yield made


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize(("library", "name"), CASES)
async def test_nccl_reduces_in_the_callers_memory_without_a_copy(
    libraries: Libraries, library: str, name: str, requires_grad: bool
) -> None:
    async def rank(pg: ProcessGroup) -> None:
        device = pg.rank()
        host = libraries.host((2, 3), name, device)
        host[...] = 1
        more = {"requires_grad": requires_grad} if library == "torch" else {}
        x = libraries.array(library, host, name, device, **more)
        assert await pg.allreduce(x) is x
        assert (host.astype("complex64") == (1 if name == "bool" else 2)).all()
        address = host.__array_interface__["data"][0]
        assert libraries.reduced.get(device, []) == ([] if name in STAGED else [(address, address)])

    await run_ranks(2, rank)
    assert libraries.cupy.enqueued == libraries.torch.enqueued == []


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize(("library", "name"), CASES)
async def test_noncontiguous_array_is_copied_on_its_device(
    libraries: Libraries, library: str, name: str, requires_grad: bool
) -> None:
    module: Any = getattr(libraries, library)

    async def rank(pg: ProcessGroup) -> None:
        device = pg.rank()
        whole = libraries.host((4, 6), name, device)
        whole[...] = 1
        part = whole[:, ::2]
        more = {"requires_grad": requires_grad} if library == "torch" else {}
        x = libraries.array(library, part, name, device, **more)
        stream = libraries.gpu.stream(device)
        with module.on_stream(stream, device):
            work = pg.allreduce(x)
        assert await work is x
        assert (part.astype("complex64") == (1 if name == "bool" else 2)).all()
        assert (whole[:, 1::2].astype("complex64") == 1).all()
        own_operations = [each for each in module.enqueued if each[1] == device]
        assert own_operations[0] == ("dense", device, stream)
        # The result is copied back after the reduction, and before the work is done.
        assert [what for what, *_ in own_operations] == ["dense", "copy"]
        assert own_operations[1][2] not in (0, stream)

    await run_ranks(2, rank)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("library", ["cupy", "torch"])
async def test_gathered_arrays_have_the_type_of_the_input_array(
    pg: ProcessGroup, libraries: Libraries, library: str
) -> None:
    device = pg.rank()
    host = libraries.host((2,), "float32", device)
    host[...] = device + 1
    made = await pg.allgather(None, libraries.array(library, host, "float32", device))
    assert [type(each) for each in made] == [type(libraries.array(library, host, "float32", device))] * 2
    assert [each.host.tolist() for each in made] == [[1, 1], [2, 2]]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("library", ["cupy", "torch"])
async def test_reduce_scatter_output_can_be_part_of_its_input(
    pg: ProcessGroup, libraries: Libraries, library: str
) -> None:
    device = pg.rank()
    host = libraries.host((4,), "float32", device)
    host[...] = [1, 2, 3, 4]
    whole = libraries.array(library, host, "float32", device)
    # The output is the second half of the input, which on rank 0 is the block for rank 1.
    part = libraries.array(library, host[2:], "float32", device)
    assert await pg.reduce_scatter_tensor(part, whole) is part
    assert host.tolist() == ([1, 2, 2, 4] if device == 0 else [1, 2, 6, 8])


# -- gradients


async def check_gradient_tensors(
    pg: ProcessGroup, leaf: Callable[..., Any], values: Callable[[Any], list[float]]
) -> None:
    """Make calls that write to tensors with `requires_grad`, and check the values."""
    rank, other = pg.rank(), 1 - pg.rank()
    x, outputs, part, into = leaf(rank, 1), [leaf(0, 0), leaf(0, 0)], leaf(0), leaf(0, 0)
    assert await pg.broadcast(x, 1) is x
    assert await pg.allgather(outputs, leaf(rank, 2)) == outputs
    assert await pg.reduce_scatter(part, [leaf(1), leaf(2)]) is part
    sent, received = pg.send(x, other), pg.recv(into, other)
    assert await received is into
    assert await sent is x
    for each, expected in (
        (x, [1, 1]),
        (into, [1, 1]),
        (outputs[0], [0, 2]),
        (outputs[1], [1, 2]),
        (part, [2 + 2 * rank]),
    ):
        assert values(each) == expected
        assert each.requires_grad
    # If no outputs are passed, aiocoll allocates them: NumPy arrays for host tensors, which have no gradients.
    assert not any(getattr(each, "requires_grad", False) for each in await pg.allgather(None, x))


@both
async def test_tensors_that_require_gradients_are_written_in_place(libraries: Libraries) -> None:
    """Use the torch lookalike, which refuses operations that autograd would record."""

    async def rank(pg: ProcessGroup) -> None:
        def leaf(*values: float) -> Any:
            host = libraries.host((len(values),), "float32", pg.rank())
            host[...] = values
            return libraries.array("torch", host, "float32", pg.rank(), requires_grad=True)

        await check_gradient_tensors(pg, leaf, lambda tensor: tensor.host.tolist())

    await run_ranks(2, rank)


async def test_host_tensors_that_require_gradients_are_written_in_place() -> None:
    torch: Any = pytest.importorskip("torch")

    async def rank(pg: ProcessGroup) -> None:
        def leaf(*values: float) -> Any:
            return torch.tensor(values, dtype=torch.float32, requires_grad=True)

        await check_gradient_tensors(pg, leaf, lambda tensor: tensor.tolist() if tensor.is_leaf else [])

    await run_ranks(2, rank)


# -- default streams


class Interface:
    """An array that has no other interface than ``__cuda_array_interface__``."""

    def __init__(self, host: np.ndarray, device: int, stream: int) -> None:
        self.__cuda_array_interface__ = host.__array_interface__ | {"version": 3, "stream": stream or None}
        self._device = device

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, self._device


def array_and_context(
    library: str, libraries: Libraries, host: np.ndarray, device: int, stream: int
) -> tuple[Any, Any]:
    """Return an array of a library in device memory, and a context in which a stream is current."""
    if library == "interface":
        return Interface(host, device, stream), contextlib.nullcontext
    module: Any = getattr(libraries, library)
    return libraries.array(library, host, host.dtype.name, device), partial(module.on_stream, stream, device)


@both
@pytest.mark.parametrize("stream", [0, 1, 2], ids=["null", "legacy", "per_thread"])
@pytest.mark.parametrize("library", ["cupy", "torch", "interface"])
async def test_device_calls_keep_their_order_with_work_on_default_streams_of_each_library(
    libraries: Libraries, library: str, stream: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda, me = libraries.gpu.cuda, threading.get_ident()
    used: list[tuple[str, int]] = []

    #: Gates in front of copies, by device: without them, `on_stream` would find the copy already done.
    held: dict[int, list[Gate]] = {}

    def add_gate_to(where: Any, name: str) -> None:
        real = getattr(where, name)

        def call_behind_gate(*args: Any) -> None:
            if (device := cuda.current()) in held:
                held[device].append(cuda.gate(args[-1]))
            real(*args)

        monkeypatch.setattr(where, name, call_behind_gate)

    def record_calls_of(name: str) -> None:
        real = getattr(cuda, name)

        def record_call(*args: int) -> None:
            if threading.get_ident() == me:
                used.append((name, args[name == "event_record"]))
            real(*args)

        monkeypatch.setattr(cuda, name, record_call)

    async def rank(pg: ProcessGroup) -> None:
        device = pg.rank()
        host = libraries.host((3,), "float32", device)
        host[...] = 0
        x, on_stream = array_and_context(library, libraries, host, device, stream)
        # Stream handle 2 means a different stream in each thread.
        other_gate = await asyncio.to_thread(cuda.gate, 2, device)
        gate = cuda.gate(stream, device)
        cuda.kernel(stream, lambda: host.fill(device + 1), device)
        with on_stream():
            work = pg.allreduce(x)
        await pg.barrier()
        assert not work.done()
        gate.open()
        assert await work is x
        assert host.tolist() == [3] * 3
        held[device] = []
        with on_stream():
            work = pg.allreduce(x)
        await work.on_stream()
        (gate,) = held.pop(device)
        gate.open()
        await pg.barrier()  # let the other rank pass its gate first, since the next wait blocks the loop
        seen: list[Any] = []
        cuda.kernel(stream, lambda: seen.append(host.tolist()), device)
        cuda.stream_synchronize(stream, device)
        assert seen == [[6] * 3]
        await work
        other_gate.open()

    record_calls_of("event_record")
    record_calls_of("stream_wait")
    add_gate_to(FakeCommunicator, "all_reduce")
    add_gate_to(cuda, "copy_to_device")
    await run_ranks(2, rank)
    assert {each for each in used if each[1] in (0, 1, 2)} == {("event_record", stream), ("stream_wait", stream)}
