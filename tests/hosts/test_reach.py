"""Ranks that meet through firewalls, by translated addresses, or as different users."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

from tests.hosts.network import Network

if TYPE_CHECKING:
    from tests.hosts.conftest import Ranks


@pytest.mark.parametrize("what", ["total", "one_way"])
async def test_ranks_meet_through_a_one_way_firewall(
    network: Callable[[int], Network], ranks: Ranks, what: str
) -> None:
    """Let the lower rank of each pair send data, although a firewall drops the connections that this rank opens."""
    net = network(3)
    for lower, higher in (0, 1), (0, 2), (1, 2):
        net.refuse_connections(lower, higher)
    started = await ranks.start_all(net, what)
    expected = {"total": [[6.0, 6.0]] * 3, "one_way": [0.0, 1.0, 1.0]}[what]
    assert [await process.result() for process in started] == expected


async def test_ranks_meet_through_a_firewall_that_allows_a_port_range(
    network: Callable[[int], Network], ranks: Ranks
) -> None:
    net = network(3)
    for host, other in itertools.permutations(range(3), 2):
        net.refuse_connections(other, host, "tcp dport != { 29500, 31000-31001 }")
    started = await ranks.start_all(net, "total", AIOCOLL_PORT_RANGE="31000-31001")
    assert [await process.result() for process in started] == [[6.0, 6.0]] * 3


async def test_ranks_meet_through_address_translation(network: Callable[[int], Network], ranks: Ranks) -> None:
    """Let both ranks listen on a private address behind address translation; one rank also has a translated port."""
    net = network(2)
    method = f"tcp://{net.hosts[0].ipv4}:29500"
    started = []
    for host, port in zip(net.hosts, (31000, 40000), strict=True):
        host.run("ip", "addr", "add", "192.168.7.1/32", "dev", "lo")
        host.run("nft", "add table ip nat; add chain ip nat in { type nat hook prerouting priority -100; }")
        host.run("nft", f"add rule ip nat in ip daddr {host.ipv4} tcp dport {port} dnat to 192.168.7.1:31000")
        options = {
            "AIOCOLL_BIND": "192.168.7.1",
            "AIOCOLL_PORT_RANGE": "31000-31000",
            "AIOCOLL_ADVERTISE": host.ipv4 if port == 31000 else f"{host.ipv4}:{port}",
        }
        started.append(await ranks.start(host, "total", host.number, 2, method, **options))
    assert [await process.result() for process in started] == [[3.0, 3.0]] * 2


async def test_ranks_meet_on_copies_of_one_machine(network: Callable[[int], Network], ranks: Ranks) -> None:
    """Give all hosts the same host id, although their ranks cannot connect by unix sockets."""
    started = await ranks.start_all(network(3), "total", AIOCOLL_HOST_ID="copied")
    assert [await process.result() for process in started] == [[6.0, 6.0]] * 3


async def test_ranks_of_two_users_of_one_host_meet_by_tcp(network: Callable[[int], Network], ranks: Ranks) -> None:
    """Run the ranks as users that can reach each other only by TCP, like a rootless container and its host."""
    (host,) = network(1).hosts
    method = f"tcp://{host.ipv4}:29500"
    started = [await ranks.start(host, "total", rank, 3, method, user=user) for rank, user in enumerate([7, 8, 8])]
    assert [await process.result() for process in started] == [[6.0, 6.0]] * 3
