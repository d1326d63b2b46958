"""Routes: the choice of the address of this host to which other ranks connect."""

import errno
import io
import os
import socket
import struct
import sys
from typing import Any

import pytest

from aiocoll.errors import RendezvousError
from aiocoll.security.keys import is_loopback
from aiocoll.transport.stream import addresses as address
from aiocoll.transport.stream import route

linux_only = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs Linux")


def has_ipv6() -> bool:
    with socket.socket(socket.AF_INET6) as probe:
        return probe.connect_ex(("::1", 9)) != errno.EADDRNOTAVAIL


ipv6 = pytest.mark.skipif(not socket.has_ipv6 or not has_ipv6(), reason="this host has no IPv6 loopback")


def test_route_to_a_loopback_master_is_loopback() -> None:
    assert route.routable_address(None) == "127.0.0.1"
    assert route.routable_address("127.0.0.1") == "127.0.0.1"
    assert route.routable_address("localhost") in ("127.0.0.1", "::1")


@ipv6
def test_route_to_an_ipv6_loopback_master_is_ipv6_loopback() -> None:
    assert route.routable_address("::1") == "::1"
    assert route.routable_address("::1", bind="any") == "::"


def test_wildcard_bind_address_is_refused_but_the_value_any_is_accepted() -> None:
    assert route.routable_address(None, bind="any") == "0.0.0.0"
    assert route.routable_address("127.0.0.1", bind="any") == "0.0.0.0"
    for wildcard in ("0.0.0.0", "::"):
        assert address.is_wildcard(wildcard)
        with pytest.raises(ValueError, match=f"bind='{wildcard}': .*to listen on all addresses, set bind='any'"):
            route.routable_address(None, bind=wildcard)
    assert not address.is_wildcard("127.0.0.1")


def test_bind_must_be_an_address_of_this_host() -> None:
    assert route.routable_address("10.0.0.1", bind="127.0.0.1") == "127.0.0.1"
    with pytest.raises(ValueError, match=r"bind='192\.0\.2\.254': is not an address of this host"):
        route.routable_address(None, bind="192.0.2.254")
    with pytest.raises(ValueError, match="bind='myhost': must be an IPv4 or IPv6 address of this host, or 'any'"):
        route.routable_address(None, bind="myhost")


@linux_only
def test_interface_option_selects_its_address() -> None:
    assert route.routable_address(None, "lo") == "127.0.0.1"
    assert route.routable_address("127.0.0.1", "lo") == "127.0.0.1"
    with pytest.raises(ValueError, match=r"interface='wlan7' not found; available: .*\blo\b"):
        route.routable_address(None, "wlan7")


@linux_only
@ipv6
def test_interface_option_gives_an_ipv6_address_for_an_ipv6_master() -> None:
    assert route.routable_address("::1", "lo") == "::1"


IF_INET6 = """\
fe8000000000000000fc00fffe000001 04 40 20 80     eth0
fd000000000000000000000000000002 04 40 00 82     eth0
fe800000000000000000000000000007 05 40 20 80     eth1
"""


@linux_only
@pytest.mark.parametrize(
    ("name", "family", "expected"),
    [
        ("eth0", socket.AF_INET6, "fd00::2"),
        ("eth1", socket.AF_INET6, "fe80::7%eth1"),
        ("eth0", socket.AF_INET, "10.1.2.3"),
        ("eth2", socket.AF_INET6, "10.1.2.3"),
    ],
)
def test_interface_address_has_the_requested_family(
    monkeypatch: pytest.MonkeyPatch, name: str, family: int, expected: str
) -> None:
    answer = struct.pack("16sHH4s16x", name.encode(), socket.AF_INET, 0, bytes((10, 1, 2, 3)))
    monkeypatch.setattr("fcntl.ioctl", lambda *_: answer)
    monkeypatch.setattr("builtins.open", lambda _: io.StringIO(IF_INET6))
    monkeypatch.setattr("socket.if_nameindex", lambda: [(1, "lo"), (2, "eth0"), (3, "eth1"), (4, "eth2")])
    assert route.interface_address(name, family) == expected


@linux_only
def test_interface_without_an_address_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("builtins.open", lambda _: io.StringIO(IF_INET6))
    monkeypatch.setattr("socket.if_nameindex", lambda: [(1, "lo"), (9, "ghost0")])
    with pytest.raises(ValueError, match="interface='ghost0' has no address; available: lo, ghost0"):
        route.interface_address("ghost0")


def test_unresolvable_master_address_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr("socket.getaddrinfo", fail)
    with pytest.raises(RendezvousError, match=r"master address 'nowhere\.invalid' does not resolve: Name or service"):
        route.routable_address("nowhere.invalid")


def test_master_address_without_a_route_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [
        (socket.AF_INET, socket.SOCK_DGRAM, 17, "", ("255.255.255.255", 9))
    ]  # `connect` refuses a broadcast address
    monkeypatch.setattr("socket.getaddrinfo", lambda *_, **__: found)
    with pytest.raises(RendezvousError, match=r"no route from this host to the master at 'far' .*interface= or bind="):
        route.routable_address("far")


# -- on several hosts

#: Addresses reserved for documentation, which no host has.
FOREIGN = ("192.0.2.7", "192.0.2.8")


@pytest.fixture
def no_default_route(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate a host without a default route, which can reach only loopback addresses."""

    def connect(sock: socket.socket, address: tuple[Any, ...]) -> None:
        if not is_loopback(address[0]):
            raise OSError(errno.ENETUNREACH, os.strerror(errno.ENETUNREACH))
        original(sock, address)

    original = socket.socket.connect
    monkeypatch.setattr(socket.socket, "connect", connect)


@pytest.fixture
def interfaces(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Simulate the network interfaces of this host; return their table, which the test may change."""
    table = {"lo": "127.0.0.1"}

    def ioctl(_: int, request: int, given: bytes) -> bytes:
        address = socket.inet_aton(table[given.rstrip(b"\0").decode()])
        return struct.pack("16sHH4s16x", given, socket.AF_INET, 0, address)

    monkeypatch.setattr("socket.if_nameindex", lambda: list(enumerate(table)))
    monkeypatch.setattr("fcntl.ioctl", ioctl)
    return table


def find_route(stores: list[str], interface: str | None = None, bind: str | None = None, together: bool = False) -> Any:
    return route.find_route(0, dict(enumerate(stores)), interface, bind, together=together)


def test_ranks_on_one_loopback_publish_the_loopback_address() -> None:
    assert find_route(["127.0.0.1"] * 3) == ("127.0.0.1", "127.0.0.1")
    assert find_route([""] * 3, together=True) == ("127.0.0.1", "127.0.0.1")


def test_bind_and_interface_options_take_precedence_over_the_master_address() -> None:
    assert find_route(["", FOREIGN[0]], bind="127.0.0.1") == ("127.0.0.1", "127.0.0.1")


@linux_only
def test_interface_option_is_used_without_other_information() -> None:
    assert find_route(["", ""], interface="lo") == ("127.0.0.1", "127.0.0.1")


@linux_only
def test_bind_any_listens_on_all_addresses_and_publishes_one_address() -> None:
    assert find_route(["127.0.0.1"] * 2, bind="any") == ("0.0.0.0", "127.0.0.1")
    assert find_route(["", ""], interface="lo", bind="any") == ("0.0.0.0", "127.0.0.1")


def test_store_host_publishes_the_address_by_which_other_ranks_reached_the_store(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Check that the host publishes the one of these addresses that is its own address and not loopback."""
    monkeypatch.setattr(route, "is_own", lambda host: host == FOREIGN[1])
    monkeypatch.setattr(route, "routable_address", lambda master, *_: master)
    assert find_route(["127.0.0.1", *FOREIGN, "127.0.0.1"]) == (FOREIGN[1], FOREIGN[1])


@linux_only
@pytest.mark.usefixtures("no_default_route")
def test_host_with_one_address_publishes_this_address(
    interfaces: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(route, "routable_address", lambda master, *_: master)
    interfaces["eth0"] = FOREIGN[0]
    assert find_route(["", ""]) == (FOREIGN[0], FOREIGN[0])
    assert find_route(["127.0.0.1", "10.96.0.1"]) == (FOREIGN[0], FOREIGN[0])  # no host has this service address


@linux_only
@pytest.mark.usefixtures("no_default_route")
def test_ambiguous_address_raises_an_error_that_lists_interfaces(interfaces: dict[str, str]) -> None:
    with pytest.raises(RendezvousError, match=r"AIOCOLL_INTERFACE, AIOCOLL_BIND\); available: only the loopback$"):
        find_route(["", ""])
    interfaces.update(eth1=FOREIGN[1], eth0=FOREIGN[0])
    with pytest.raises(RendezvousError, match=r"available: eth0 \(192\.0\.2\.7\), eth1 \(192\.0\.2\.8\)$"):
        find_route(["", ""])


def test_addresses_of_this_host_are_recognized() -> None:
    assert route.is_own("127.0.0.1")
    assert not any(map(route.is_own, (*FOREIGN, "localhost", "nonsense")))
