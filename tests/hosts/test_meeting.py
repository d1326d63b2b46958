"""Rendezvous of ranks on several hosts: addresses that work, and errors that explain a failure."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.hosts.network import Network, Process
from tests.pages import code, is_shown
from tests.redis_server import redis_server

if TYPE_CHECKING:
    from tests.hosts.conftest import Ranks


async def meeting_error(process: Process) -> tuple[str, str]:
    """Wait for a rank whose rendezvous fails; return the last line of its standard error, and all of it."""
    code, complaints = await process.end()
    assert code == 1
    return complaints.splitlines()[-1], complaints


async def test_firewall_in_front_of_a_rank_is_reported(network: Callable[[int], Network], ranks: Ranks) -> None:
    """Let the firewall pass only the store's port: both ranks first warn about the missing connection, then fail.

    Before that, rank 0 fails to measure the link to rank 1, which excludes no rank.
    """
    net = network(2)
    net.drop(1, 0, "tcp dport != 29500")
    net.drop(0, 1, "tcp sport != 29500")
    method = f"store:{net.hosts[0].ipv4}"
    started = await ranks.start_all(net, "report_failed_meeting", method, TIMEOUT="5", AIOCOLL_WARN_AFTER="4")
    assert [await process.next_line() for process in started] == ["ready"] * 2
    for process in started:
        process.send_line()
    errors = [await process.next_line() for process in started]
    for process in started:
        process.send_line()
    shown = [
        code("docs/several-hosts.md", "When they do not meet", 1, "text"),
        code("docs/several-hosts.md", "When they do not meet", 2, "text"),
    ]
    expected = [
        r"rank\(s\) 1 \(at 10\.77\.0\.2 port \d+\) have not connected to rank 0 at 10\.77\.0\.1 port \d+; "
        r"check that they run and that firewalls permit the connection",
        r"rank 0 cannot be reached at 10\.77\.0\.1 port \d+: it does not answer \(tried for \d\.\d s\)",
    ]
    for rank, (process, error, text) in enumerate(zip(started, errors, expected, strict=True)):
        assert re.fullmatch(rf"rank {rank} of 2 did not meet the others within 5 s: {text}", error)
        assert is_shown(shown[rank], error)
        _, complaints = await process.end()
        warning = rf"^rank {rank} of 2 did not meet the others within 4 s: {text}; still waiting$"
        assert re.search(warning, complaints, re.MULTILINE)


@pytest.mark.parametrize("version", [4, 6])
async def test_ranks_on_several_hosts_meet_in_a_store_of_the_caller(
    network: Callable[[int], Network], ranks: Ranks, version: int
) -> None:
    """Check that ranks publish an address in the network of the store, not the loopback address."""
    net = network(3)
    host = net.hosts[0].ipv4 if version == 4 else net.hosts[0].ipv6
    started = await ranks.start_all(net, "total", f"store:{host}")
    assert [await process.result() for process in started] == [[6.0, 6.0]] * 3


async def test_ranks_meet_in_a_store_that_one_rank_reaches_by_loopback(
    network: Callable[[int], Network], ranks: Ranks
) -> None:
    """Let rank 0 reach the store by the loopback; the other ranks connect to the address of the store's host."""
    net = network(2)
    started = [
        await ranks.start(net.hosts[0], "total", 0, 2, "store:0.0.0.0"),
        await ranks.start(net.hosts[1], "total", 1, 2, f"store:{net.hosts[0].ipv4}"),
    ]
    assert [await process.result() for process in started] == [[3.0, 3.0]] * 2


async def test_ranks_meet_on_a_redis_server(network: Callable[[int], Network], ranks: Ranks, tmp_path: Path) -> None:
    """Check that all ranks publish an address in the network of the server, also the rank on the server's host."""
    net = network(3)
    everywhere = ("--bind", "0.0.0.0", "--protected-mode", "no")
    with redis_server(tmp_path, None, *everywhere, command=net.hosts[0].command) as server:
        started = await ranks.start_all(net, "total", f"redis://{net.hosts[0].ipv4}:{server.port}/0")
        assert [await process.result() for process in started] == [[6.0, 6.0]] * 3


async def test_ranks_meet_in_a_shared_file(network: Callable[[int], Network], ranks: Ranks, tmp_path: Path) -> None:
    started = await ranks.start_all(network(3), "total", f"file://{tmp_path}/store")
    assert [await process.result() for process in started] == [[6.0, 6.0]] * 3


async def test_rendezvous_in_a_shared_file_reports_ambiguous_network_interfaces(
    network: Callable[[int], Network], ranks: Ranks, tmp_path: Path
) -> None:
    """Check that the errors of all ranks name the missing option, and that the ranks meet with this option."""
    net = network(2)
    net.hosts[1].run("ip", "link", "add", "eth1", "type", "veth", "peer", "name", "eth2")
    net.hosts[1].run("ip", "addr", "add", "10.78.0.2/24", "dev", "eth1")
    net.hosts[1].run("ip", "link", "set", "eth1", "up")
    started = await ranks.start_all(net, "total", f"file://{tmp_path}/one")
    text = (
        "rank 1 could not join: the ranks are on several hosts, but the address by which others reach this host is not "
        "known; set the option interface= or bind= (AIOCOLL_INTERFACE, AIOCOLL_BIND); available: "
        "eth0 (10.77.0.2), eth1 (10.78.0.2)"
    )
    error, _ = await meeting_error(started[0])
    assert error == f"aiocoll.errors.RendezvousError: {text}"
    error, _ = await meeting_error(started[1])
    assert text.endswith(error.removeprefix("aiocoll.errors.RendezvousError: "))
    started = await ranks.start_all(net, "total", f"file://{tmp_path}/two", AIOCOLL_INTERFACE="eth0")
    assert [await process.result() for process in started] == [[3.0, 3.0]] * 2


async def test_default_route_selects_the_network_interface(
    network: Callable[[int], Network], ranks: Ranks, tmp_path: Path
) -> None:
    net = network(2)
    for host in net.hosts:
        host.run("ip", "link", "add", "eth1", "type", "veth", "peer", "name", "eth2")
        host.run("ip", "addr", "add", f"10.78.{host.number}.2/24", "dev", "eth1")
        host.run("ip", "link", "set", "eth1", "up")
        host.run("ip", "route", "add", "default", "dev", "eth0")
    started = await ranks.start_all(net, "total", f"file://{tmp_path}/store")
    assert [await process.result() for process in started] == [[3.0, 3.0]] * 2


# -- the name of the master


async def test_ranks_meet_by_a_master_name_that_resolves_to_loopback_on_its_own_host(
    network: Callable[[int], Network], ranks: Ranks
) -> None:
    """Use the /etc/hosts entry that Debian writes, which maps the host's own name to a loopback address."""
    net = network(3)
    net.hosts[0].file("hosts", "127.0.0.1 localhost\n127.0.1.1 master\n")
    for host in net.hosts[1:]:
        host.file("hosts", f"{net.hosts[0].ipv4} master\n")
    started = await ranks.start_all(net, "total", "tcp://master:29500")
    assert [await process.result() for process in started] == [[6.0, 6.0]] * 3


async def test_ranks_meet_by_a_master_name_that_resolves_to_loopback_on_the_launchers_host(
    network: Callable[[int], Network], ranks: Ranks
) -> None:
    net = network(2)
    net.hosts[0].file("hosts", "127.0.0.1 localhost\n127.0.1.1 master\n")
    net.hosts[1].file("hosts", f"{net.hosts[0].ipv4} master\n")
    started = await ranks.start_launchers(net, "total", "master")
    assert [await process.result() for process in started] == [[3.0, 3.0]] * 2


async def test_ranks_meet_by_a_service_address_that_leads_to_the_launcher(
    network: Callable[[int], Network], ranks: Ranks
) -> None:
    net = network(2)
    service = "10.96.0.9"
    translate(net, service)
    started = await ranks.start_launchers(net, "total", service, AIOCOLL_BIND="any")
    assert [await process.result() for process in started] == [[3.0, 3.0]] * 2


@pytest.mark.parametrize("bind", ["any", "10.77.0.1"])
async def test_ranks_meet_by_a_service_address_that_leads_to_the_master(
    network: Callable[[int], Network], ranks: Ranks, bind: str
) -> None:
    """Use an address that no host has; address translation on the host of rank 1 leads to the real address."""
    net = network(2)
    service = "10.96.0.9"
    translate(net, service)
    method = f"tcp://{service}:29500"
    started = [
        await ranks.start(net.hosts[0], "total", 0, 2, method, AIOCOLL_BIND=bind),
        await ranks.start(net.hosts[1], "total", 1, 2, method),
    ]
    assert [await process.result() for process in started] == [[3.0, 3.0]] * 2


def translate(net: Network, service: str) -> None:
    """Translate the address `service`, which no host has, into the address of host 0 on host 1."""
    net.hosts[1].run("ip", "route", "add", service, "via", net.hosts[0].ipv4)
    rule = f"add rule ip nat out ip daddr {service} dnat to {net.hosts[0].ipv4}"
    chain = "add chain ip nat out { type nat hook output priority -100; }"
    net.hosts[1].run("nft", f"add table ip nat; {chain}; {rule}")


async def test_error_explains_a_service_address_without_a_listener(
    network: Callable[[int], Network], ranks: Ranks
) -> None:
    net = network(1)
    error, _ = await meeting_error(await ranks.start(net.hosts[0], "total", 0, 1, "tcp://10.96.0.9:29500"))
    assert error == (
        "aiocoll.errors.StoreUnavailableError: the store cannot listen on 10.96.0.9: it is not an address of this "
        "machine, where rank 0 hosts the store; if it belongs to a service or a router in front of it, set bind='any' "
        "(AIOCOLL_BIND=any), or an address of this machine"
    )
