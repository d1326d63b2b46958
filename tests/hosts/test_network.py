"""The hosts of these tests: what can be done to them, and that nothing of them is left."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.hosts.network import Host, Network

if TYPE_CHECKING:
    from tests.hosts.conftest import Ranks

#: Sends a datagram that is sure to be answered, by an error: nobody listens. Ends with 0 if the answer came.
PROBE = """
import socket, sys
family = socket.AF_INET6 if ":" in sys.argv[1] else socket.AF_INET
with socket.socket(family, socket.SOCK_DGRAM) as probe:
    probe.settimeout(0.5)
    probe.connect((sys.argv[1], 9))
    try:
        probe.send(b"?")
        probe.recv(1)
    except ConnectionRefusedError:
        sys.exit(0)
    except OSError:
        sys.exit(1)
"""


def answers(host: Host, address: str) -> bool:
    return subprocess.run(host.command(sys.executable, "-c", PROBE, address)).returncode == 0


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("version", [4, 6])
async def test_ranks_on_several_hosts_meet(
    network: Callable[[int], Network], ranks: Ranks, size: int, version: int
) -> None:
    net = network(size)
    method = None if version == 4 else f"tcp://[{net.hosts[0].ipv6}]:29500"
    started = await ranks.start_all(net, "total", method)
    expected = [size * (size + 1) / 2] * 2
    assert [await process.result() for process in started] == [expected] * size


def test_cables_and_firewalls(network: Callable[[int], Network]) -> None:
    net = network(3)
    one, two, three = net.hosts
    assert answers(one, two.ipv4)
    assert answers(one, two.ipv6)
    net.separate(0, 1)
    assert not answers(one, two.ipv4)
    assert not answers(two, one.ipv6)
    assert answers(one, three.ipv4)
    net.heal()
    assert answers(one, two.ipv4)
    net.unplug(1)
    assert not answers(one, two.ipv4)
    net.plug(1)
    assert answers(one, two.ipv4)


def test_a_host_has_files_of_its_own(network: Callable[[int], Network]) -> None:
    one, two = network(2).hosts
    one.file("hosts", "10.77.0.2 two\n")
    assert one.run("cat", "/etc/hosts") == "10.77.0.2 two\n"
    assert two.run("cat", "/etc/hosts") == Path("/etc/hosts").read_text()


def test_nothing_is_left_of_a_network(network: Callable[[int], Network]) -> None:
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


def test_what_a_killed_run_has_left_is_removed(network: Callable[[int], Network]) -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    name = f"aiocoll-test-{ended.pid}-0"
    subprocess.run(["ip", "netns", "add", name], check=True)
    network(1)
    assert name_and_folder(name) == (False, False)


def name_and_folder(name: str) -> tuple[bool, bool]:
    """Say whether there is a namespace of that name, and files of its own."""
    return Path("/run/netns", name).exists(), Path("/etc/netns", name).exists()
