"""Parsing of addresses and ports from text."""

from __future__ import annotations

import pytest

from aiocoll.endpoints import parse_advertised, parse_endpoint, parse_ports


@pytest.mark.parametrize(
    ("text", "endpoint"),
    [
        ("10.0.0.1:29500", ("10.0.0.1", 29500)),
        ("[::1]:0", ("::1", 0)),
        ("[fe80::1%eth0]:65535", ("fe80::1%eth0", 65535)),
        ("node-1.example:80", ("node-1.example", 80)),
    ],
)
def test_parse_endpoint_returns_host_and_port(text: str, endpoint: tuple[str, int]) -> None:
    assert parse_endpoint(text) == endpoint


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "must be host:port"),
        ("host", "must be host:port"),
        (":80", "must be host:port"),
        ("[]:80", "must be host:port"),
        ("host:", "the port '' must be a number"),
        ("host:http", "the port 'http' must be a number"),
        ("host:65536", "the port '65536' must be a number from 0 to 65535"),
        ("host:-1", "the port '-1' must be a number"),
        ("host:\u0661", "must be a number"),
        ("::1:80", "put an IPv6 address in brackets"),
    ],
)
def test_parse_endpoint_refuses_invalid_text(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        parse_endpoint(text)
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize(
    ("text", "ports"), [("31000-31099", (31000, 31099)), ("80", (80, 80)), ("1-65535", (1, 65535))]
)
def test_parse_ports_returns_a_range(text: str, ports: tuple[int, int]) -> None:
    assert parse_ports(text) == ports


@pytest.mark.parametrize(
    "text", ["", "-", "80-", "-80", "a-b", "1-2-3", "1:2", "\u0661-2", "1 - 2", "0", "0-9", "9-8", "9-65536"]
)
def test_parse_ports_refuses_invalid_text(text: str) -> None:
    with pytest.raises(ValueError, match="must be two ports from 1 to 65535, the first and the last"):
        parse_ports(text)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("203.0.113.5", ("203.0.113.5", None)),
        ("203.0.113.5:40000", ("203.0.113.5", 40000)),
        ("::1", ("::1", None)),
        ("2001:db8::5", ("2001:db8::5", None)),
        ("[2001:db8::5]:40000", ("2001:db8::5", 40000)),
        ("fe80::1%eth0", ("fe80::1%eth0", None)),
    ],
)
def test_parse_advertised_returns_host_and_port(text: str, found: tuple[str, int | None]) -> None:
    assert parse_advertised(text) == found


@pytest.mark.parametrize(
    "text",
    ["", "node-1", "node-1:80", "0.0.0.0", "[::]:80", "10.0.0.1:0", "10.0.0.1:65536", "10.0.0", "[::1]"],
)
def test_parse_advertised_refuses_invalid_text(text: str) -> None:
    with pytest.raises(ValueError, match="must be an IPv4 or IPv6 address by which other hosts reach this one"):
        parse_advertised(text)
