"""Links between hosts, measured by the ranks while they meet."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

from tests.hosts.network import Network

if TYPE_CHECKING:
    from tests.hosts.conftest import Ranks


@pytest.mark.parametrize(
    ("size", "encryption"),
    [(3, "auto"), (2, "none"), *(pytest.param(*each, marks=pytest.mark.soak) for each in ((2, "auto"), (3, "none")))],
)
async def test_all_ranks_know_the_measurements_of_the_slowest_link(
    network: Callable[[int], Network], ranks: Ranks, size: int, encryption: str
) -> None:
    """Use a link so slow that the load of this machine matters little: each packet takes a millisecond."""
    net = network(size)
    net.shape(rate=10e6, delay=10e-3, hosts=[1])
    started = await ranks.start_all(net, "links", AIOCOLL_ENCRYPTION=encryption)
    first, *others = [await process.result() for process in started]
    assert all(found == first for found in others)
    rtt, rate = first
    assert 20e-3 < rtt < 40e-3
    assert 0.5e6 / size < rate < 10e6 / 8


async def test_hosts_that_connect_in_one_direction_only_do_not_delay_the_link_measurement(
    network: Callable[[int], Network], ranks: Ranks
) -> None:
    """Prevent connections from host 1 to host 2, so that the ranks can measure only two of the three links."""
    net = network(3)
    net.shape(delay=10e-3, hosts=[2])
    net.refuse_connections(1, 2)
    started = await ranks.start_all(net, "links", TIMEOUT="20")
    found = [await process.result() for process in started]
    assert found[0] == found[1] == found[2]
    assert found[0][0] > 20e-3
