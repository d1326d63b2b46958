"""Environment variables that a launcher sets for its ranks, such as AIOCOLL_JOIN for newcomers."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from aiocoll import HashStore, ProcessGroup, new_group
from aiocoll.launcher import report_elastic
from aiocoll.store import StoreServer


@pytest.fixture
def _launcher_environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Set the environment variables of a launcher without RANK, and run the launcher's store server."""
    server = StoreServer()
    host, port = server.start()
    for name, value in {"MASTER_ADDR": host, "MASTER_PORT": str(port), "AIOCOLL_STORE": "launcher"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("RANK", raising=False)
    yield
    server.close()


@pytest.mark.usefixtures("_launcher_environment")
async def test_aiocoll_join_in_the_environment_makes_a_process_a_newcomer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make two newcomers in one process, both without rank and world size."""
    first = new_group(rank=0, world_size=1)
    monkeypatch.setenv("AIOCOLL_JOIN", "1")
    monkeypatch.setenv("AIOCOLL_RESTART_COUNT", "1")
    newcomers = [new_group(), new_group(init_method="env://")]

    async def grow() -> ProcessGroup:
        async with first as pg:
            return await pg.grow(2)

    groups = await asyncio.gather(grow(), *newcomers)
    try:
        assert {pg.rank() for pg in groups} == {0, 1, 2}
        assert groups[0].rank() == 0
        assert await asyncio.gather(*(pg.allreduce(2 ** pg.rank()) for pg in groups)) == [7, 7, 7]
    finally:
        await asyncio.gather(*(pg.shutdown() for pg in groups))


@pytest.mark.usefixtures("_launcher_environment")
async def test_aiocoll_join_applies_only_to_a_rendezvous_by_environment_variables(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("AIOCOLL_JOIN", "1")
    async with new_group(store=HashStore(), rank=0, world_size=1) as pg:
        assert pg.size() == 1
    async with new_group("fake", rank=3, world_size=8) as pg:
        assert pg.rank() == 3
    with pytest.raises(ValueError, match="rank is missing: give rank= with init_method='tcp://"):
        new_group(init_method="tcp://127.0.0.1:1", world_size=2)
    for given in ({"rank": 1}, {"world_size": 2}, {"name": "mine"}):
        with pytest.raises(ValueError, match="AIOCOLL_JOIN=1 in the environment: leave out rank, world_size, name"):
            new_group(**given)  # type: ignore[arg-type]


@pytest.mark.usefixtures("_launcher_environment")
@pytest.mark.parametrize("value", ["yes", "", "2"])
async def test_invalid_value_of_aiocoll_join_is_refused(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIOCOLL_JOIN", value)
    with pytest.raises(ValueError, match=rf"AIOCOLL_JOIN='{value}': must be 1 \(join an existing group\) or 0"):
        new_group(rank=0, world_size=1)


@pytest.mark.usefixtures("_launcher_environment")
async def test_aiocoll_join_0_creates_a_group_as_without_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIOCOLL_JOIN", "0")
    async with new_group(rank=0, world_size=1) as pg:
        assert pg.size() == 1


def test_report_of_an_elastic_program_without_a_launcher_does_nothing() -> None:
    report_elastic()
