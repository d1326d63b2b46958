"""An elastic program on two hosts. A supervisor kills processes at random moments, but keeps one per host alive."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING

import pytest

from tests.hosts.network import Network
from tests.integration.elastic_job import Plan

if TYPE_CHECKING:
    from tests.hosts.conftest import Ranks


async def run_with_kills(kills: int, net: Network, ranks: Ranks) -> None:
    plan = Plan(4, kills, host=net.hosts[0].ipv4, hosts=[host.command() for host in net.hosts])
    supervisor = await ranks.start_program(
        net.hosts[0], "-m", "tests.integration.elastic_job", json.dumps(asdict(plan))
    )
    seen = await supervisor.next_line(limit=60 + 5 * kills)
    assert (seen["kills"], seen["of rank 0"] > 0, seen["two at once"] > 0) == (kills, True, True)
    assert await supervisor.end() == (0, "")


async def test_elastic_job_on_two_hosts_survives_killed_processes(
    network: Callable[[int], Network], ranks: Ranks
) -> None:
    await run_with_kills(6, network(2), ranks)


@pytest.mark.soak
async def test_elastic_job_on_two_hosts_survives_200_killed_processes(
    network: Callable[[int], Network], ranks: Ranks
) -> None:
    await run_with_kills(200, network(2), ranks)
