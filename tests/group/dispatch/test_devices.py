"""Device backends of plugins: a new kind of device works in groups without changes to aiocoll."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from aiocoll import Backend, BackendConfig, BackendUnavailableError, HashStore, ProcessGroup, Recv, Send, new_group
from aiocoll import backends as names
from aiocoll.elements import adapters as adapter_module
from aiocoll.elements.adapters import ADAPTER_VERSION, adapters
from aiocoll.elements.buffers import Buffer
from aiocoll.elements.device import DeviceArray
from aiocoll.group.dispatch.devices import DEVICE_VERSION, devices

from ...distributions.abacus import aiocoll_abacus
from ...ranks import run_ranks

LINES: list[str] = []


class Beads(aiocoll_abacus.Beads):
    """An array of beadlib, the array library that the plugin supports."""

    __module__ = "beadlib"


class AbacusCalls(aiocoll_abacus.AbacusCalls):
    """The device calls of one group; its methods record their names in `LINES`."""

    def check(self, arrays: Sequence[DeviceArray | None]) -> bool:
        return all(each is None or each.device == 0 for each in arrays)

    @contextlib.contextmanager
    def together(self, arrays: Iterable[DeviceArray]) -> Iterator[None]:
        LINES.append(f"{len([*arrays])} messages together")
        yield

    async def close(self) -> None:
        LINES.append("closed")

    async def release(self) -> None:
        LINES.append("released")


class AbacusBackend(aiocoll_abacus.AbacusBackend):
    def calls(self, comm: Any, arrays: Sequence[DeviceArray | None], *, forced: bool, ahead: bool) -> AbacusCalls:
        LINES.append(f"first call, forced={forced}")
        return AbacusCalls(comm)


@pytest.fixture(autouse=True)
def abacus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Register the plugin's adapter and device backend; restore the registries after the test."""
    LINES.clear()
    for registry in (adapters, devices):
        for name in ("_targets", "_has_read"):
            monkeypatch.setattr(registry, name, getattr(registry, name).copy())
    monkeypatch.setattr(adapter_module, "_by_type", {})
    for name in ("backend_list", "default_device_backend_map", "backend_capability"):
        monkeypatch.setattr(Backend, name, getattr(Backend, name).copy())
    monkeypatch.setattr(names, "_libraries", names._libraries.copy())
    monkeypatch.setattr(Backend, "BEADS", "beads", raising=False)
    adapters.register("beadlib", aiocoll_abacus.BeadsAdapter(), version=ADAPTER_VERSION)
    devices.register("abacus", AbacusBackend(), version=DEVICE_VERSION)
    names.serve_device("abacus", "beads")


def test_device_backend_of_a_plugin_carries_out_calls_on_its_arrays() -> None:
    async def body(pg: ProcessGroup) -> None:
        beads = Beads(np.full(3, pg.rank() + 1.0))
        assert await pg.allreduce(beads) is beads
        assert beads.memory.tolist() == [3, 3, 3]
        other = Beads(np.zeros(3))
        await pg.batch([Send(beads, 1 - pg.rank()), Recv(other, 1 - pg.rank())])
        assert other.memory.tolist() == [3, 3, 3]

    asyncio.run(run_ranks(2, body))
    assert sorted(LINES) == sorted(2 * ["first call, forced=False", "2 messages together", "closed", "released"])


def test_group_refuses_arrays_of_a_second_kind_of_device() -> None:
    class Pebbles(Beads):
        pass

    class PebbleArray(aiocoll_abacus.AbacusArray):
        __slots__ = ()
        kind = "pebble"
        label = "Pebble"

    class PebblesAdapter(aiocoll_abacus.BeadsAdapter):
        def view(self, array: Any, name: str, writable: bool) -> Buffer:
            buffer: Any = super().view(array, name, writable)
            if isinstance(array, Pebbles):
                old = buffer.array
                buffer.array = PebbleArray(old.ptr, old.size, old.dtype, old.device, 0, old.keep)
            return buffer

    adapters.register("beadlib", PebblesAdapter(), version=ADAPTER_VERSION)

    async def body(pg: ProcessGroup) -> None:
        beads, pebbles = Beads(np.ones(3)), Pebbles(np.ones(3))
        with pytest.raises(TypeError, match=r"on Pebble device 0, .* on Abacus device 0: all arrays of a call"):
            pg.allgather([pebbles], beads)
        await pg.allreduce(beads)
        with pytest.raises(
            ValueError,
            match=r"works on Abacus devices, .*, but the arrays of this call are on Pebble devices: make a group",
        ):
            pg.allreduce(pebbles)
        with pytest.raises(TypeError, match=r"Abacus array, and dst=\d is this rank"):
            pg.send(beads, pg.rank())

    asyncio.run(run_ranks(1, body))


def test_backend_name_of_a_registered_device_is_listed() -> None:
    assert BackendConfig("beads").device_backend_map == {"abacus": "beads"}
    assert BackendConfig().device_backend_map == {"cpu": "aio", "cuda": "aio", "abacus": "aio"}
    assert names.sole_backend({"cpu": "aio", "abacus": "beads"}) == "aio"
    with pytest.raises(ValueError, match="such as 'cpu:aio,cuda:nccl,abacus:beads'"):
        BackendConfig("abacus:")
    with pytest.raises(ValueError, match=r"\(only 'aio' and 'nccl' and 'beads' can be combined\)"):
        names.sole_backend({"cpu": "fake", "abacus": "beads"})


def test_device_that_is_registered_twice_is_listed_once() -> None:
    names.serve_device("abacus", "beads")
    assert Backend.backend_list.count("beads") == 1
    assert BackendConfig().device_backend_map == {"cpu": "aio", "cuda": "aio", "abacus": "aio"}
    for other in ("aio", "nccl"):
        with pytest.raises(ValueError, match=f"library='{other}' is another backend; use the name .* 'abacus' dev"):
            names.serve_device("abacus", other)
    assert Backend.default_device_backend_map["abacus"] == "beads"


async def test_backend_of_a_registered_device_can_be_required_by_name() -> None:
    async with new_group("cpu:aio,abacus:beads", store=HashStore(), rank=0, world_size=1) as pg:
        await pg.allreduce(Beads(np.ones(3)))
    assert LINES[0] == "first call, forced=True"


@pytest.mark.parametrize(
    ("device", "message"),
    [("abacus:2", "device='abacus:2' not found: this process may use 2 Abacus devices"), ("tpu", "has no backend")],
)
def test_backend_of_a_missing_device_is_refused(device: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        new_group(device=device, store=HashStore(), rank=0, world_size=1)


async def test_error_names_a_device_backend_that_cannot_be_imported() -> None:
    devices.register("abacus", "no_such_module:BACKEND", version=DEVICE_VERSION)
    async with new_group(store=HashStore(), rank=0, world_size=1) as pg:
        with pytest.raises(BackendUnavailableError, match="device 'abacus' need: No module named 'no_such_module'"):
            pg.allreduce(Beads(np.ones(3)))
        assert await pg.allreduce(2.5) == 2.5
