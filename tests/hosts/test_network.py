"""The simulated hosts that these tests use: faults, cables, isolation, and removal after a test."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.hosts.network import Host, Network

if TYPE_CHECKING:
    from tests.hosts.conftest import Ranks

#: A program that sends datagrams to a port without a listener, until the host answers with an error.
PROBE = """
import socket, sys, time
family = socket.AF_INET6 if ":" in sys.argv[1] else socket.AF_INET
end = time.monotonic() + float(sys.argv[2])
with socket.socket(family, socket.SOCK_DGRAM) as probe:
    probe.settimeout(0.5)
    probe.connect((sys.argv[1], 9))
    while time.monotonic() < end:
        try:
            probe.send(b"?")
            probe.recv(1)
        except ConnectionRefusedError:
            sys.exit(0)
        except OSError:
            pass
sys.exit(1)
"""
#: Seconds within which a host replies even on a busy machine, and the timeout after which a reply counts as missing.
LIMIT, SOON = 20, 0.5


def is_reachable(host: Host, address: str, seconds: float = LIMIT) -> bool:
    return subprocess.run(host.command(sys.executable, "-c", PROBE, address, str(seconds))).returncode == 0


@pytest.mark.parametrize(
    ("version", "size"), [(4, 3), (6, 2), *(pytest.param(*each, marks=pytest.mark.soak) for each in ((4, 2), (6, 3)))]
)
async def test_ranks_on_several_hosts_meet(
    network: Callable[[int], Network], ranks: Ranks, size: int, version: int
) -> None:
    net = network(size)
    method = None if version == 4 else f"tcp://[{net.hosts[0].ipv6}]:29500"
    started = await ranks.start_all(net, "total", method)
    expected = [size * (size + 1) / 2] * 2
    assert [await process.result() for process in started] == [expected] * size


async def test_simulated_pods_count_as_separate_hosts(network: Callable[..., Network], ranks: Ranks) -> None:
    net = network(2, pods=True)
    started = await ranks.start_launchers(net, "carriers", net.hosts[0].ipv4, each=2)
    for process, expected in zip(started, ("shm tcp tcp", "tcp tcp shm"), strict=True):
        found = [await process.next_line(), await process.next_line()]
        assert (await process.end()) == (0, "")
        assert sorted(" ".join(filter(None, each)) for each in found) == [expected] * 2


async def test_simulated_pods_that_share_a_network_share_memory(network: Callable[..., Network], ranks: Ranks) -> None:
    """Start pods that share a network and therefore unix sockets, like containers with the network of their host."""
    (host,) = network(1, pods=True).hosts
    started = [await ranks.start(host, "carriers", rank, 2, f"tcp://{host.ipv4}:29500") for rank in range(2)]
    assert [await process.result() for process in started] == [[None, "shm"], ["shm", None]]


def test_simulated_pod_is_isolated_from_other_pods(network: Callable[..., Network]) -> None:
    (host,) = network(1, pods=True).hosts
    assert host.run("sh", "-c", "echo $$; hostname; ls /dev/shm") == "1\npod\n"
    assert socket.gethostname() != "pod"


def test_simulated_cables_and_firewalls_can_block_traffic(network: Callable[[int], Network]) -> None:
    net = network(3)
    one, two, three = net.hosts
    assert is_reachable(one, two.ipv4)
    assert is_reachable(one, two.ipv6)
    net.separate(0, 1)
    assert not is_reachable(one, two.ipv4, SOON)
    assert not is_reachable(two, one.ipv6, SOON)
    assert is_reachable(one, three.ipv4)
    net.heal()
    assert is_reachable(one, two.ipv4)
    net.unplug(1)
    assert not is_reachable(one, two.ipv4, SOON)
    net.plug(1)
    assert is_reachable(one, two.ipv4)


#: A server program that discards data, but sends a single received byte back.
ECHO = """
import socket
with socket.create_server(("", 9000)) as listening:
    print("ready", flush=True)
    connection, _ = listening.accept()
with connection:
    while data := connection.recv(1 << 20):
        if len(data) == 1:
            connection.sendall(data)
"""
#: A program that prints the shortest round-trip time of a byte, and the seconds that a megabyte takes.
MEASURE = """
import socket, sys, time
with socket.create_connection((sys.argv[1], 9000)) as connection:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    times = []
    for _ in range(5):
        began = time.perf_counter()
        connection.sendall(b"x")
        assert connection.recv(1) == b"x"
        times.append(time.perf_counter() - began)
    began = time.perf_counter()
    connection.sendall(bytes(1_000_000))
    connection.shutdown(socket.SHUT_WR)
    assert connection.recv(1) == b""
    print(min(times), time.perf_counter() - began)
"""


def latency_and_time(net: Network, one: int, other: int) -> tuple[float, float]:
    server = net.hosts[other].command(sys.executable, "-c", ECHO)
    with subprocess.Popen(server, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        latency, time = net.hosts[one].run(sys.executable, "-c", MEASURE, net.hosts[other].ipv4).split()
    return float(latency), float(time)


def test_simulated_cable_has_the_given_delay(network: Callable[..., Network]) -> None:
    net = network(3)
    net.shape(rate=20e6, delay=0.003)
    net.shape(hosts=[2])
    latency, time = latency_and_time(net, 0, 1)
    assert latency >= 4 * 0.003
    assert time >= 1e6 * 8 / 20e6
    latency, _ = latency_and_time(net, 1, 2)
    assert latency >= 2 * 0.003
    net.shape()
    latency, time = latency_and_time(net, 0, 1)
    assert latency < 2 * 0.003
    assert time < 1e6 * 8 / 20e6


#: A program that sends 200 datagrams of 1,000 bytes at once.
BURST = "import socket, sys\nfor _ in range(200): socket.socket(2, 2).sendto(bytes(1000), (sys.argv[1], 9000))"


def test_simulated_cable_loses_the_given_share_of_packets(network: Callable[..., Network]) -> None:
    net = network(2)
    net.shape()
    assert is_reachable(net.hosts[0], net.hosts[1].ipv4)
    net.shape(loss=0.5)
    net.hosts[0].run(sys.executable, "-c", BURST, net.hosts[1].ipv4)
    lost, _ = net.shape(loss=1.0)
    assert 50 < lost < 150  # expect 100 ± 7
    # Test from the second host: the first one has just sent many datagrams, and the kernel limits the error replies.
    assert not is_reachable(net.hosts[1], net.hosts[0].ipv4, SOON)
    assert sum(net.shape()) > 0
    assert is_reachable(net.hosts[1], net.hosts[0].ipv4)
    assert net.shape() == [0, 0]


def test_packets_beyond_the_queue_of_a_simulated_cable_are_lost(network: Callable[..., Network]) -> None:
    net = network(2)
    net.shape()
    assert is_reachable(net.hosts[0], net.hosts[1].ipv4)
    net.shape(rate=1e5, queue=20_000)
    net.hosts[0].run(sys.executable, "-c", BURST, net.hosts[1].ipv4)
    lost, _ = net.shape()
    # A datagram takes 1,066 bytes on the cable, which needs 85 ms for a datagram.
    assert 100 < lost <= 200 - 20_000 // 1066


def test_simulated_host_has_separate_files_in_etc(network: Callable[[int], Network]) -> None:
    one, two = network(2).hosts
    one.file("hosts", "10.77.0.2 two\n")
    assert one.run("cat", "/etc/hosts") == "10.77.0.2 two\n"
    assert two.run("cat", "/etc/hosts") == Path("/etc/hosts").read_text()


def test_closed_simulated_network_leaves_no_namespaces_and_files(network: Callable[[int], Network]) -> None:
    seen = []

    def fail() -> None:
        with Network(1) as failing:
            failing.hosts[0].file("hosts", "")
            seen.append(failing.hosts[0].name)
            assert name_and_folder(seen[0]) == (True, True)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert name_and_folder(seen[0]) == (False, False)


def test_network_namespaces_of_a_killed_test_run_are_removed(network: Callable[[int], Network]) -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    name = f"aiocoll-test-{ended.pid}-0"
    subprocess.run(["ip", "netns", "add", name], check=True)
    network(1)
    assert name_and_folder(name) == (False, False)


def name_and_folder(name: str) -> tuple[bool, bool]:
    """Return whether a network namespace of this name exists, and whether a directory with its files exists."""
    return Path("/run/netns", name).exists(), Path("/etc/netns", name).exists()
