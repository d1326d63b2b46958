"""Plugins in three small distributions that entry points announce: a store with a command, a transport, a device."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import numpy as np
import pytest

from aiocoll import Backend, GroupOptions, PeerLostError, ProcessGroup, RendezvousError, new_group
from aiocoll.cli.main import main
from aiocoll.plugins import StoreRequest, adapters, commands, devices, stores, transports
from aiocoll.store import Store
from aiocoll.testing import run_processes, run_ranks
from aiocoll.testing.contracts import DeviceContract, OpenStore, StoreContract, ToDevice, ToHost, TransportContract

from .installed import NAMES, install

ROOT = Path(__file__).parents[2]
#: A test module that runs aiocoll's contract tests on the plugins, as the tests of another distribution would.
CHECK = """
import contextlib

import pytest
from aiocoll_abacus import Beads

from aiocoll import GroupOptions
from aiocoll.plugins import StoreRequest, stores
from aiocoll.testing.contracts import DeviceContract, StoreContract, TransportContract


class TestAbacus(DeviceContract):
    @pytest.fixture
    def kind(self):
        return "abacus"

    @pytest.fixture
    def to_device(self):
        return lambda values, rank: Beads(values.copy(), rank % 2)

    @pytest.fixture
    def to_host(self):
        return lambda beads: beads.memory


class TestRail(TransportContract):
    @pytest.fixture
    def transport(self):
        return "rail"


class TestShelf(StoreContract):
    @pytest.fixture
    async def open_store(self, tmp_path):
        async with contextlib.AsyncExitStack() as stack:
            def open_one():
                request = StoreRequest(f"shelf://{tmp_path}", "", 2, False, 300.0, None, GroupOptions())
                store = stores.get("shelf").open(request)
                stack.push_async_callback(store.aclose)
                return store

            yield open_one
"""


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Yield a folder on the import path in which the distributions are installed."""
    folder = tmp_path / "site"
    folder.mkdir()
    for name in NAMES:
        install(name, folder)
    monkeypatch.syspath_prepend(str(folder))
    for name in ("backend_list", "default_device_backend_map", "backend_capability"):
        monkeypatch.setattr(Backend, name, getattr(Backend, name).copy())
    monkeypatch.setattr(Backend, "BEADS", "beads", raising=False)
    unregister_all()
    yield folder
    unregister_all()
    for name in NAMES:
        sys.modules.pop(f"aiocoll_{name}", None)


def unregister_all() -> None:
    """Unregister all plugins that the distributions provide."""
    for registry in (stores, transports, commands, adapters, devices):
        for name in NAMES:
            registry.unregister(name)
            registry.unregister(f"aiocoll_{name}")


@pytest.mark.usefixtures("site")
class TestShelf(StoreContract):
    @pytest.fixture
    async def open_store(self, site: Path, tmp_path: Path) -> AsyncIterator[OpenStore]:
        async with contextlib.AsyncExitStack() as stack:

            def open_one() -> Store:
                request = StoreRequest(f"shelf://{tmp_path}/store", "", 2, False, 300.0, None, GroupOptions())
                store = stores.get("shelf").open(request)
                stack.push_async_callback(store.aclose)
                return store

            yield open_one


class TestAbacus(DeviceContract):
    @pytest.fixture
    def kind(self, site: Path) -> str:
        return "abacus"

    @pytest.fixture
    def to_device(self, site: Path) -> ToDevice:
        beads = importlib.import_module("aiocoll_abacus").Beads
        return lambda values, rank: beads(values.copy(), rank % 2)

    @pytest.fixture
    def to_host(self) -> ToHost:
        return lambda array: array.memory


class TestRail(TransportContract):
    @pytest.fixture
    def transport(self, site: Path) -> str:
        return "rail"


@pytest.mark.usefixtures("site")
async def test_ranks_meet_at_the_url_of_a_store_plugin(tmp_path: Path) -> None:
    async def rank() -> int:
        async with new_group(init_method=f"shelf://{tmp_path}/jobs", world_size=2, timeout=20) as pg:
            return int(await pg.allreduce(pg.rank() + 1))

    assert await asyncio.gather(rank(), rank()) == [3, 3]


@pytest.mark.usefixtures("site")
async def test_url_that_a_store_plugin_refuses_raises_an_error() -> None:
    with pytest.raises(ValueError, match="init_method='shelf://here': the path must be absolute"):
        new_group(init_method="shelf://here", world_size=2)


@pytest.mark.usefixtures("site")
def test_transport_option_accepts_the_name_of_a_plugin() -> None:
    assert GroupOptions.resolve(None, {"AIOCOLL_TRANSPORT": "rail"}).transport == "rail"


def test_transport_option_refuses_the_name_of_an_uninstalled_plugin() -> None:
    with pytest.raises(ValueError, match="transport='rail': must be one of 'auto', 'tcp', 'unix', 'shm', or a trans"):
        GroupOptions(transport="rail")
    transports.packages["rail"] = "aiocoll-rail"
    try:
        with pytest.raises(ValueError, match="install aiocoll-rail"):
            GroupOptions(transport="rail")
    finally:
        del transports.packages["rail"]
        transports.unregister("rail")


@pytest.mark.usefixtures("site")
async def test_ranks_with_different_transport_plugins_refuse_each_other(tmp_path: Path) -> None:
    async def rank(number: int) -> None:
        options = GroupOptions(transport="rail" if number else "unix")
        async with new_group(
            init_method=f"shelf://{tmp_path}/jobs", rank=number, world_size=3, timeout=20, options=options
        ):
            pass

    found = await asyncio.gather(*map(rank, range(3)), return_exceptions=True)
    for error in found:
        assert isinstance(error, RendezvousError)
        assert "transport='rail' on some ranks, but not on rank 0: set the same transport on every rank" in str(error)


class TransportHook:
    """A hook that records the transports of the operations of a group."""

    def __init__(self) -> None:
        self.found: set[str] = set()

    def on_end(self, info: object) -> None:
        self.found.add(info.transport)  # type: ignore[attr-defined]


async def carrying_transports(pg: ProcessGroup) -> set[str]:
    """Run an allreduce; return the transports that carried its data."""
    pg.add_hook(carriers := TransportHook())
    assert ((await pg.allreduce(np.ones(100_000))) == pg.size()).all()
    return carriers.found


@pytest.mark.parametrize(("hosts", "carrier"), [("ab", "rail"), ("aa", "shm")])
@pytest.mark.usefixtures("site")
async def test_auto_transport_uses_a_registered_transport_only_between_hosts(
    hosts: str, carrier: str, tmp_path: Path
) -> None:
    async def rank(number: int) -> set[str]:
        options = GroupOptions(host_id=hosts[number], job_key=b"k" * 32, bind="127.0.0.1")
        where = f"shelf://{tmp_path}/jobs"
        async with new_group(init_method=where, rank=number, world_size=2, timeout=20, options=options) as pg:
            return await carrying_transports(pg)

    assert "rail" in transports
    # Run each rank in its own event loop, because ranks of the same loop exchange data in memory.
    found = await asyncio.gather(*(asyncio.to_thread(asyncio.run, rank(number)) for number in range(2)))
    assert found == [{carrier}] * 2


@pytest.mark.usefixtures("site")
async def test_dry_run_works_with_the_transport_of_a_plugin() -> None:
    async with new_group("fake", rank=0, world_size=4, options=GroupOptions(transport="rail")) as pg:
        await pg.allreduce(np.ones(1000))


@pytest.mark.usefixtures("site")
async def test_group_over_a_plugin_transport_can_be_split(tmp_path: Path) -> None:
    async def main(pg: ProcessGroup) -> int:
        smaller = await pg.split(pg.rank() % 2)
        return int(await smaller.allreduce(1))

    assert await run_ranks(4, main, options=GroupOptions(transport="rail")) == [2, 2, 2, 2]


async def sum_until_killed(pg: ProcessGroup) -> list[int]:
    """Kill rank 1 between two allreduces; return the ranks that the error of the second allreduce names."""
    first, *second = [pg.allreduce(np.ones(100_000), timeout=20) for _ in range(1 if pg.rank() == 1 else 2)]
    with contextlib.suppress(PeerLostError):  # rank 1 may end before the others receive its part
        assert (await first == pg.size()).all()
    if pg.rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(PeerLostError) as raised:
        await second[0]
    return sorted(raised.value.ranks)


async def test_error_over_a_transport_plugin_names_the_killed_rank(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{site}{os.pathsep}{ROOT}")
    options = GroupOptions(transport="rail")
    found = await run_processes(3, sum_until_killed, options=options, expect_death={1: signal.SIGKILL})
    assert (found[0], found[2]) == ([1], [1])


@pytest.mark.usefixtures("site")
def test_command_of_a_plugin_is_listed_and_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    assert "shelf     list the keys of a shelf" in capsys.readouterr().out
    folder = tmp_path / "keys"

    async def fill() -> None:
        request = StoreRequest(f"shelf://{folder}", "job", 1, False, 20.0, None, GroupOptions())
        async with stores.get("shelf").open(request) as store:
            await store.multi_set(["a", "b"], [b"", b""])

    asyncio.run(fill())
    assert main(["shelf", str(folder)]) == 0
    assert sorted(capsys.readouterr().out.split()) == ["a", "b"]


def test_help_names_a_plugin_command_that_cannot_be_loaded(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (site / "aiocoll_shelf.py").unlink()
    with pytest.raises(SystemExit):
        main(["--help"])
    shown = capsys.readouterr()
    assert "run       start the ranks of a program" in shown.out
    assert "of aiocoll-shelf did not register command 'shelf'" in shown.err


@pytest.mark.slow
def test_plugin_contract_tests_pass_in_a_process_that_finds_plugins_by_entry_points(site: Path, tmp_path: Path) -> None:
    (tmp_path / "check").mkdir()
    (tmp_path / "check" / "test_check.py").write_text(CHECK)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-o",
        "asyncio_mode=auto",
        "test_check.py",
    ]
    environment = {**os.environ, "PYTHONPATH": f"{site}{os.pathsep}{ROOT}"}
    done = subprocess.run(command, cwd=tmp_path / "check", env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
