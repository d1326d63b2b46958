"""The recovery recipes of the docs, with two deaths: the second rank dies while the others recover from the first."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from aiocoll.store import StoreServer
from tests.integration.conftest import KEY, LIMIT

if TYPE_CHECKING:
    from tests.integration.conftest import Ranks

PROGRAM = str(Path(__file__).with_name("recovery_recipe.py"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("death", "second"),
    [
        ("shrinking", 1),
        ("growing", 0),
        ("grown", 1),
        *(pytest.param(*each, marks=pytest.mark.soak) for each in (("shrink", 0), ("growing", 1))),
    ],
)
async def test_documented_recovery_recipe_survives_a_second_death_during_recovery(
    ranks: Ranks, death: str, second: int
) -> None:
    server = StoreServer(key=KEY)
    host, port = server.start()
    env = {"MASTER_ADDR": host, "MASTER_PORT": str(port), "AIOCOLL_STORE": "launcher", "WORLD_SIZE": "4"}
    deaths = {3: "step", second: death}
    try:
        processes = [
            ranks.start(PROGRAM, "meets", deaths.get(rank, "never"), env={**env, "RANK": str(rank)})
            for rank in range(4)
        ]
        newcomers = []
        if death == "grown":  # here, the second rank dies after the first newcomer has joined
            newcomers.append(ranks.start(PROGRAM, "joins", "never", env=env))
        for rank in (3, second):
            processes[rank].wait(LIMIT)
        newcomers += [ranks.start(PROGRAM, "joins", "never", env=env) for _ in range(2 - len(newcomers))]
        for rank, process in enumerate([*processes, *newcomers]):
            out, err = process.communicate(timeout=LIMIT)
            assert err == ""
            assert process.returncode == (-9 if rank in deaths else 0)
            if rank not in deaths:
                # Each of the 40 steps counted 4 ranks, so a complete group has made every step exactly once.
                assert json.loads(out) == {"step": 40, "total": 160}
    finally:
        await server.aclose()


@pytest.mark.slow
@pytest.mark.parametrize("death", ["shrink", "shrinking"])
async def test_recovery_recipe_of_the_guide_survives_a_second_death_during_shrink(ranks: Ranks, death: str) -> None:
    server = StoreServer(key=KEY)
    host, port = server.start()
    env = {"MASTER_ADDR": host, "MASTER_PORT": str(port), "AIOCOLL_STORE": "launcher", "WORLD_SIZE": "4"}
    deaths = {3: "step", 0: death}
    processes = [
        ranks.start(PROGRAM, "shrinks", deaths.get(rank, "never"), env={**env, "RANK": str(rank)}) for rank in range(4)
    ]
    try:
        for rank, process in enumerate(processes):
            out, err = process.communicate(timeout=LIMIT)
            assert err == ""
            assert process.returncode == (-9 if rank in deaths else 0)
            if rank not in deaths:
                assert json.loads(out) == {"step": 40, "size": 2, "last": 2 * 39}
    finally:
        await server.aclose()
