"""Backends: names, the devices of each backend, and groups that registered backend factories make."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import aiocoll.distributed as dist
from aiocoll import Backend, BackendConfig, GroupOptions, HashStore, backends, new_group
from aiocoll import register_backend as register
from aiocoll.gpu.provider import provide
from aiocoll.testing import run_ranks

from .fakes.cuda import FakeCuda


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let the test register backends, and unregister these backends afterwards."""
    monkeypatch.setattr(backends, "_factories", dict(backends._factories))
    for name in ("backend_list", "default_device_backend_map", "backend_capability"):
        monkeypatch.setattr(Backend, name, getattr(Backend, name).copy())
    before = set(vars(Backend))
    yield
    for name in set(vars(Backend)) - before:
        delattr(Backend, name)


# -- names


@pytest.mark.parametrize("name", ["aio", "AIO", "Aio"])
def test_backend_name_is_converted_to_lower_case(name: str) -> None:
    assert Backend(name) == "aio" == Backend.AIO
    assert isinstance(Backend(name), str)


@pytest.mark.parametrize("name", ["gloo", "", "aio ", "cpu:aio"])
def test_unknown_backend_name_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=rf"backend='{name}' is not known; use aio, nccl"):
        Backend(name)


@pytest.mark.parametrize("name", ["GLOO", "MPI", "UCC", "XCCL"])
async def test_backend_name_that_only_torch_has_is_refused_with_a_remedy(name: str) -> None:
    assert getattr(Backend, name) == name.lower()
    assert name.lower() not in Backend.backend_list
    with pytest.raises(ValueError, match=rf"backend='{name.lower()}' is not known; .* leave out backend=: only torch"):
        await dist.init_process_group(getattr(Backend, name), store=HashStore(), rank=0, world_size=1)


def test_torch_threaded_backend_is_refused_with_a_remedy() -> None:
    with pytest.raises(ValueError, match=r"backend='threaded' is not known; .* leave out backend=: only torch has"):
        new_group("threaded", store=HashStore(), rank=0, world_size=1)


@pytest.mark.parametrize("make", [Backend, BackendConfig])
def test_backend_name_that_is_not_a_string_is_refused(make: Any) -> None:
    with pytest.raises(TypeError, match=r"backend must be a str.*, not int"):
        make(3)


# -- devices


@pytest.mark.parametrize(
    ("given", "devices"),
    [
        (None, {"cpu": "aio", "cuda": "aio"}),
        ("undefined", {"cpu": "aio", "cuda": "aio"}),
        ("AIO", {"cpu": "aio", "cuda": "aio"}),
        ("nccl", {"cuda": "nccl"}),
        ("cpu:aio", {"cpu": "aio"}),
        ("cpu:aio,cuda:nccl", {"cpu": "aio", "cuda": "nccl"}),
        ("CUDA:NCCL, CPU:AIO", {"cuda": "nccl", "cpu": "aio"}),
    ],
)
def test_backend_config_maps_devices_to_backends(given: str | None, devices: dict[str, str]) -> None:
    config = BackendConfig(given)
    assert config.get_device_backend_map() == config.device_backend_map == devices
    assert list(config.device_backend_map) == list(devices)
    assert repr(config) == ",".join(f"{device}:{backend}" for device, backend in devices.items())
    assert BackendConfig(repr(config)).device_backend_map == devices


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("cpu:aio,cpu:aio", "names device 'cpu' twice"),
        ("cpu:aio,", "'' is not a pair of device and backend; write pairs"),
        (":aio", "':aio' is not a pair"),
        ("cpu:", "'cpu:' is not a pair"),
        ("cpu:aio:aio", "'cpu:aio:aio' is not a pair"),
        ("cpu:aio;cuda:nccl", "is not a pair"),
        ("aio,cuda:nccl", "'aio' is not a pair"),
        ("aio,nccl", "backend='aio,nccl' is not known"),
        ("cpu:gloo", "backend='gloo' is not known"),
        ("cpu:nccl", "'nccl' does not serve device 'cpu'; it serves cuda"),
        ("tpu:aio", "'aio' does not serve device 'tpu'; it serves cpu, cuda"),
        ("cpu:undefined", "'undefined' does not serve device 'cpu'"),
    ],
)
def test_invalid_backend_config_is_refused(given: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BackendConfig(given)
    with pytest.raises(ValueError, match=message):
        new_group(given, store=HashStore(), rank=0, world_size=1)


# -- groups


async def test_group_reports_its_backend_for_each_device() -> None:
    store = HashStore()
    async with (
        new_group("cpu:aio,cuda:nccl", store=store, rank=0, world_size=1) as both,
        new_group("aio", store=store, rank=0, world_size=1) as one,
        new_group("nccl", store=store, rank=0, world_size=1) as device,
        new_group("cpu:aio", store=store, rank=0, world_size=1) as host,
    ):
        assert (both.backend_for("cpu"), both.backend_for("cuda"), one.backend_for("cpu")) == ("aio", "nccl", "aio")
        with pytest.raises(ValueError, match=r"device='tpu' has no backend in .*; available: 'cpu', 'cuda'"):
            both.backend_for("tpu")
        assert (one.backend_for("cuda"), device.backend_for("cuda")) == ("aio", "nccl")
        with pytest.raises(ValueError, match=r"device='cuda' has no backend in .*; available: 'cpu'"):
            host.backend_for("cuda")
        assert await both.allreduce(2.5) == 2.5
    await store.aclose()


async def test_split_and_shrunk_groups_inherit_the_backends_of_their_parent() -> None:
    store = HashStore()
    async with (
        new_group("cpu:aio,cuda:nccl", store=store, rank=0, world_size=1) as pg,
        await pg.split_group([0]) as part,
        await pg.shrink() as smaller,
    ):
        assert part.backend_for("cuda") == smaller.backend_for("cuda") == "nccl"
    await store.aclose()


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        (
            {"backend": "cpu:aio", "device": "cuda:1"},
            ValueError,
            "device='cuda:1' has no backend; this group has backends for",
        ),
        (
            {"device": "tpu"},
            ValueError,
            r"device='tpu' has no backend; this group has backends for 'cpu' \(aio\), 'cuda' \(aio\)",
        ),
        ({"device": 0}, TypeError, "device must be a str or None, not int"),
        ({"device": "cuda:-1"}, ValueError, "device='cuda:-1': the index '-1' must be a number from 0, as in"),
        ({"device": "cuda:"}, ValueError, "device='cuda:': the index '' must be a number from 0"),
        ({"device": "cuda:2"}, ValueError, "device='cuda:2' not found: this process may use 2 CUDA devices"),
        ({"backend": "nccl", "device": "cuda:99"}, ValueError, "device='cuda:99' not found"),
    ],
)
def test_unsupported_device_name_is_refused(given: dict[str, Any], error: type[Exception], message: str) -> None:
    with provide(FakeCuda(2)), pytest.raises(error, match=message):
        new_group(**given, store=HashStore(), rank=0, world_size=1)


def test_device_that_exists_is_accepted() -> None:
    with provide(FakeCuda(2)):
        for device in ("cpu", "cpu:0", "cuda", "cuda:0", "cuda:1"):
            new_group(store=HashStore(), rank=0, world_size=1, device=device)
    with provide(FakeCuda(0)), pytest.raises(ValueError, match=r"device='cuda' not found: .* may use 0 CUDA devices"):
        new_group(store=HashStore(), rank=0, world_size=1, device="cuda")
    new_group("fake", rank=0, world_size=1, device="cuda:7")


# -- other backends


@pytest.mark.usefixtures("registry")
async def test_registered_backend_creates_the_group() -> None:
    asked: list[tuple[Any, ...]] = []
    store = HashStore()

    def plain(*args: Any, **options: Any) -> str:
        asked.append(args)
        return "a group"

    async def later(*args: Any, **options: Any) -> str:
        assert isinstance(options["options"], GroupOptions)
        return "another"

    register("Plain", plain, devices=["cpu", "tpu"])
    register("later", later)
    assert await new_group("plain", store=store, rank=0, world_size=2, timeout=5, device="tpu") == "a group"
    assert asked == [(store, 0, 2, 5.0, "tpu")]
    assert await new_group("tpu:plain,cpu:plain", store=store, rank=0, world_size=2) == "a group"
    assert await new_group("later", store=store, rank=0, world_size=2) == "another"
    with pytest.raises(ValueError, match=r"backend='x' is not known; use aio, nccl, .*plain, later"):
        new_group("x", store=store, rank=0, world_size=2)
    with pytest.raises(ValueError, match=r"device='tpu' has no backend; this group has backends for 'cpu' .later."):
        new_group("later", store=store, rank=0, world_size=2, device="tpu")
    await store.aclose()


@pytest.mark.usefixtures("registry")
def test_registered_backend_is_listed_with_its_devices_and_factory() -> None:
    register("mine", print, devices="tpu")
    assert Backend("MINE") == "mine" == Backend.MINE  # type: ignore[attr-defined]
    assert BackendConfig("mine").device_backend_map == {"tpu": "mine"}
    assert BackendConfig("cpu:aio,tpu:mine").device_backend_map == {"cpu": "aio", "tpu": "mine"}
    assert Backend.default_device_backend_map == {"cpu": "aio", "cuda": "nccl", "tpu": "mine"}
    Backend.register_backend("mine", repr, ["cpu"])
    assert backends.factory_of("mine") is repr
    assert Backend.backend_list.count("mine") == 1
    assert BackendConfig("mine").device_backend_map == {"cpu": "mine"}


@pytest.mark.usefixtures("registry")
@pytest.mark.parametrize("given", ["cpu:aio,cuda:mine", "cpu:mine,cuda:nccl"])
def test_several_backends_for_one_group_are_refused(given: str) -> None:
    register("mine", print, ["cpu", "cuda"])
    with pytest.raises(ValueError, match=f"backend='{given}': a group has one backend for all its devices"):
        new_group(given, store=HashStore(), rank=0, world_size=1)


async def test_error_of_a_backend_factory_is_raised_to_the_caller(registry: None) -> None:
    def fails(*args: Any, **options: Any) -> None:
        raise OSError("no such device")

    register("fails", fails)
    store = HashStore()
    with pytest.raises(OSError, match="no such device"):
        await new_group("fails", store=store, rank=0, world_size=1)
    await store.aclose()


async def test_backend_factory_can_use_the_default_group(registry: None) -> None:
    async def wrapped(store: Any, rank: int, world_size: int, timeout: float, device: Any, *, options: Any) -> Any:
        return await new_group(store=store, rank=rank, world_size=world_size, timeout=timeout, options=options)

    register("wrapped", wrapped)
    store = HashStore()

    async def rank(pg: Any) -> float:
        async with new_group("wrapped", store=store, rank=pg.rank(), world_size=pg.size()) as mine:
            return float(await mine.allreduce(1.0))

    assert await run_ranks(3, rank) == [3.0, 3.0, 3.0]
    await store.aclose()


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (("aio", print), ValueError, "name='aio' cannot be registered"),
        (("NCCL", print), ValueError, "name='NCCL' cannot be registered"),
        (("undefined", print), ValueError, "name='undefined' cannot be registered"),
        (("", print), ValueError, "name='' cannot be registered"),
        (("cpu:mine", print), ValueError, "name='cpu:mine' cannot be registered; choose another name, of letters"),
        ((None, print), TypeError, "name must be a str, not NoneType"),
        (("x", "factory"), TypeError, "factory must be callable, not str"),
        (("x", print, ()), ValueError, r"devices=\(\): must be kinds of device"),
        (("x", print, ["cuda:0"]), ValueError, r"devices=\['cuda:0'\]: must be kinds of device"),
        (("x", print, [1]), ValueError, r"devices=\[1\]: must be kinds of device"),
    ],
)
def test_invalid_backend_registration_is_refused(
    arguments: tuple[Any, ...], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        register(*arguments)
    assert "x" not in Backend.backend_list
