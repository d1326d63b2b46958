"""Array adapters: their registration, and the lookup for an array's type, protocol attribute or DLPack device type."""

from __future__ import annotations

import asyncio
import importlib.util
import sys
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from aiocoll import ProcessGroup, ReduceOp
from aiocoll.codec import dumps, loads
from aiocoll.elements import adapters as module
from aiocoll.elements.adapters import ADAPTER_VERSION, ArrayAdapter, adapter_of, adapters
from aiocoll.elements.buffers import Buffer, operand, share, view
from aiocoll.elements.sparse import is_sparse
from aiocoll.errors import SerializationError
from aiocoll.group.halo import check_array

from ..ranks import run_ranks


class Grid:
    """An array of gridlib, a library invented for these tests."""

    __module__ = "gridlib.core"

    def __init__(self, host: np.ndarray) -> None:
        self.host = host


class GridAdapter(ArrayAdapter):
    library = "gridlib"
    noun = "a gridlib grid"

    def owns(self, kind: type) -> bool:
        return issubclass(kind, Grid)

    def view(self, array: Any, name: str, writable: bool) -> Buffer:
        host = getattr(array, "host", array)
        return share(host, array, name)

    def pack(self, array: Any) -> tuple[str, list[int], int]:
        return str(array.host.dtype), list(array.host.shape), array.host.nbytes

    def content(self, array: Any) -> memoryview:
        return array.host.data.cast("B")

    def unpack(self, dtype: str, shape: list[Any], data: bytes) -> Grid:
        return Grid(np.frombuffer(bytearray(data), dtype).reshape(shape))


@pytest.fixture(autouse=True)
def registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restore the original adapter registrations after each test."""
    monkeypatch.setattr(adapters, "_attributes", adapters.attributes)
    for name in ("_targets", "_has_read"):
        monkeypatch.setattr(adapters, name, getattr(adapters, name).copy())
    monkeypatch.setattr(module, "_by_type", {})


@pytest.fixture
def gridlib() -> None:
    adapters.register("gridlib", GridAdapter(), version=ADAPTER_VERSION)


def test_array_without_an_adapter_is_refused_until_one_is_registered() -> None:
    grid = Grid(np.ones(3))
    with pytest.raises(TypeError, match=r"tensor must be a NumPy array, a torch tensor, .*, not Grid"):
        view(grid)
    adapters.register("gridlib", GridAdapter(), version=ADAPTER_VERSION)
    assert view(grid).array is grid.host
    with pytest.raises(TypeError, match="a CuPy array, a gridlib grid, or an object with"):
        view("grid")


def test_later_registration_replaces_the_adapter_of_cached_types() -> None:
    grid = Grid(np.ones(3))
    for _ in range(2):
        new = GridAdapter()
        adapters.register("gridlib", new, version=ADAPTER_VERSION)
        assert adapter_of(grid) is new


def test_unregistered_adapter_is_not_used_for_cached_types() -> None:
    grid, tile = Grid(np.ones(3)), SimpleNamespace(__grid_memory__=True, host=np.ones(3), shape=(3,))
    for name, array in (("gridlib", grid), ("__grid_memory__", tile)):
        adapters.register(name, GridAdapter(), version=ADAPTER_VERSION)
        assert adapter_of(array) is not None
        adapters.unregister(name)
        assert adapter_of(array) is None


@pytest.mark.usefixtures("gridlib")
def test_subclass_in_another_module_has_the_adapter_of_its_base() -> None:
    class Mine(Grid):
        __module__ = "my_program"

    mine = Mine(np.ones(3))
    assert view(mine).result is mine
    assert operand(mine, writable=True).array is mine.host


@pytest.mark.usefixtures("gridlib")
def test_objects_of_an_array_library_that_are_not_arrays_are_refused() -> None:
    other = type("Settings", (), {"__module__": "gridlib.core"})()
    with pytest.raises(TypeError, match="not Settings"):
        view(other)


@pytest.mark.usefixtures("gridlib")
def test_adapter_lookup_caches_a_limited_number_of_types(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_CACHED_TYPES", 3)
    for number in range(5):
        assert view(type(f"Grid{number}", (Grid,), {})(np.ones(3))).count == 3
    assert len(module._by_type) <= 3


def test_adapter_is_found_by_a_protocol_attribute_of_the_array() -> None:
    adapters.register("__grid_memory__", GridAdapter(), version=ADAPTER_VERSION)
    tile = SimpleNamespace(__grid_memory__=True, host=np.ones((3, 3)), shape=(3, 3))
    assert view(tile).array.base is tile.host
    assert adapter_of(tile) is adapters.get("__grid_memory__")
    with pytest.raises(TypeError, match=r"__cuda_array_interface__, __grid_memory__ or DLPack, not str"):
        view("grid")
    with pytest.raises(ValueError, match="the 3 axes of the grid"):  # the tile itself is accepted as an array
        check_array(tile, [], 3)


def test_adapter_is_found_by_the_dlpack_device_type_of_the_array() -> None:
    adapters.register("dlpack:7", GridAdapter(), version=ADAPTER_VERSION)
    tile = SimpleNamespace(__dlpack__=None, __dlpack_device__=lambda: (7, 0), host=np.ones(3))
    assert view(tile).array is tile.host


def test_adapter_is_found_by_an_entry_point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    info = tmp_path / "gridlib_aiocoll-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: gridlib-aiocoll\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[aiocoll.adapters]\ngridlib = gridlib_aiocoll:register\n")
    (tmp_path / "gridlib_aiocoll.py").write_text(
        "from tests.elements.test_adapters import ADAPTER_VERSION, GridAdapter\n\n\n"
        "def register(registry):\n    registry.register('gridlib', GridAdapter(), version=ADAPTER_VERSION)\n"
    )
    grid = Grid(np.ones(3))
    try:
        assert view(grid).array is grid.host
        assert "gridlib" in adapters.names()
    finally:
        sys.modules.pop("gridlib_aiocoll", None)


def test_adapter_lookup_for_host_arrays_reads_no_entry_points(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapters, "_read_entry_point", lambda name: pytest.fail(f"{name} was searched"))
    for array in (np.ones(3), bytearray(8), memoryview(bytearray(8))):
        assert view(array).nbytes in (8, 24)
    for other in (None, "text", [1], object()):
        with pytest.raises(TypeError, match="must be a NumPy array"):
            view(other)


@pytest.mark.usefixtures("gridlib")
def test_default_methods_of_the_adapter_class_raise_or_return_none() -> None:
    grid = Grid(np.ones(3))
    bare = ArrayAdapter()
    assert bare.owns(Grid)
    assert not is_sparse(grid)
    assert bare.pack(grid) is None
    with pytest.raises(TypeError, match="cannot allocate an array like a Grid"):
        bare.empty_like(grid)
    with pytest.raises(TypeError, match="cannot allocate an array like a Grid"):
        bare.spare(view(grid))
    for call in (
        lambda: bare.view(grid, "x", True),
        lambda: bare.overwrite(grid, grid),
        lambda: bare.sparse_array(grid, "x"),
        lambda: bare.fresh_sparse(grid, 1, (3,)),
        lambda: bare.content(grid),
        lambda: bare.unpack("f8", [3], b""),
    ):
        with pytest.raises(NotImplementedError):
            call()


@pytest.mark.usefixtures("gridlib")
def test_arrays_of_an_adapter_can_be_sent_inside_objects() -> None:
    back = loads(dumps({"grid": Grid(np.arange(6.0).reshape(2, 3)), "empty": Grid(np.ones(0))}))
    assert back["grid"].host.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert back["empty"].host.shape == (0,)


@pytest.mark.usefixtures("gridlib")
def test_received_array_of_an_unknown_library_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    data = dumps(Grid(np.ones(3)))
    del adapters._targets["gridlib"]
    monkeypatch.setattr(adapters, "_read_entry_point", lambda name: pytest.fail(f"{name} was searched"))
    with pytest.raises(SerializationError, match="received an array of 'gridlib': no adapter is registered for it"):
        loads(data)


@pytest.mark.usefixtures("gridlib")
def test_collectives_accept_arrays_of_an_adapter() -> None:
    async def body(pg: ProcessGroup) -> None:
        grid = Grid(np.full(3, pg.rank() + 1.0))
        assert await pg.allreduce(grid) is grid
        assert grid.host.tolist() == [6, 6, 6]

    asyncio.run(run_ranks(3, body))


@pytest.mark.torch
@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")
def test_allreduce_of_a_torch_tensor_makes_one_call_to_the_elements_package() -> None:
    import torch

    entered: list[str] = []

    def watch(frame: FrameType, event: str, arg: object) -> None:
        caller = frame.f_back
        if event != "call" or caller is None:
            return
        name, outer = (str(each.f_globals.get("__name__")) for each in (frame, caller))
        if name.startswith("aiocoll.elements.") and outer.startswith("aiocoll.group."):
            entered.append(f"{name}.{frame.f_code.co_name}")

    async def body(pg: ProcessGroup) -> None:
        tensor = torch.ones(16)
        await pg.allreduce(tensor, ReduceOp.MAX)
        await pg.barrier()
        if pg.rank() == 0:
            sys.setprofile(watch)
        try:
            work = pg.allreduce(tensor, ReduceOp.MAX)
        finally:
            sys.setprofile(None)
        await work

    asyncio.run(run_ranks(2, body))
    assert entered == ["aiocoll.elements.buffers.operand"]
