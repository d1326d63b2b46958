"""Torch programs on several hosts: the job key travels through torch's store."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

from tests.hosts.network import Network, Process

if TYPE_CHECKING:
    from tests.hosts.conftest import Ranks

pytest.importorskip("torch", reason="needs torch")
pytest.importorskip("cryptography", reason="needs cryptography")

pytestmark = pytest.mark.torch

#: The number of hexadecimal digits of a key of 32 bytes.
KEY_LENGTH = 64


async def run_ranks(network: Network, ranks: Ranks, **environment: str) -> list[dict[str, Any]]:
    """Run one rank on each host, with only the given job key; return the printed results."""
    address = network.hosts[0].ipv4
    started = [
        await Process.start(
            host,
            ["-W", "ignore", "-m", "tests.integrations.torch.two_hosts", str(host.number), address],
            ranks.environment | environment,
        )
        for host in network.hosts
    ]
    try:
        return [await process.next_line() for process in started]
    finally:
        for process in started:
            await process.kill()


async def test_job_key_of_rank_0_is_sent_to_the_other_host_through_the_torch_store(
    network: Callable[[int], Network], ranks: Ranks
) -> None:
    """Leave the key out of the environment: the ranks can meet only if rank 0 sends a key."""
    for found in await run_ranks(network(2), ranks):
        assert found == {"total": 3.0, "key length": KEY_LENGTH}


async def test_job_key_from_the_environment_is_not_put_into_the_torch_store(
    network: Callable[[int], Network], ranks: Ranks
) -> None:
    for found in await run_ranks(network(2), ranks, AIOCOLL_JOB_KEY="of this test and no other"):
        assert found == {"total": 3.0, "key length": 0}
