"""Parsers of addresses and ports, for listening and dialling."""

from __future__ import annotations

import ipaddress
from contextlib import suppress

from aiocoll.numerals import parse_int

__all__ = ["check_ports", "parse_advertised", "parse_endpoint", "parse_ports"]

_MAX_PORT = 65535


def parse_endpoint(text: str) -> tuple[str, int]:
    """Split `"host:port"` or `"[::1]:port"` into host and port.

    Raises:
        ValueError: `text` has another form, or the port is not in 0 to 65535.
    """
    host, colon, port = text.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise ValueError(f"endpoint {text!r}: put an IPv6 address in brackets, like [::1]:29500")
    if not colon or not host:
        raise ValueError(f"endpoint {text!r}: must be host:port, like 10.0.0.1:29500 or [::1]:29500")
    if not (port.isascii() and port.isdigit() and int(port) <= _MAX_PORT):
        raise ValueError(f"endpoint {text!r}: the port {port!r} must be a number from 0 to {_MAX_PORT}")
    return host, int(port)


def parse_ports(text: str) -> tuple[int, int]:
    """Split a range like `"31000-31099"` into its first and last port. A single port is the first and the last port.

    Raises:
        ValueError: `text` has another form, or the ports are out of range.
    """
    first, dash, last = text.partition("-")
    try:
        ports = parse_int(first), parse_int(last if dash else first)
    except ValueError:
        ports = 0, 0
    check_ports(*ports)
    return ports


def check_ports(first: int, last: int) -> None:
    """Raise an error for an invalid range of ports.

    Raises:
        ValueError: the range is invalid. The message describes valid ranges.
    """
    if not 1 <= first <= last <= _MAX_PORT:
        raise ValueError(f"must be two ports from 1 to {_MAX_PORT}, the first and the last, like 31000-31099")


def parse_advertised(text: str) -> tuple[str, int | None]:
    """Split a numeric address with an optional port: `"10.0.0.1"`, `"10.0.0.1:31000"`, `"::1"` or `"[::1]:31000"`.

    Raises:
        ValueError: `text` has another form, or is an address that other hosts cannot dial.
    """
    host: str = text
    port: int | None = None
    if not _is_numeric(text):
        with suppress(ValueError):
            host, port = parse_endpoint(text)
    if not _is_numeric(host) or ipaddress.ip_address(host).is_unspecified or port == 0:
        raise ValueError(
            "must be an IPv4 or IPv6 address by which other hosts reach this one, with a port or without, like "
            "203.0.113.5, 203.0.113.5:31000 or [2001:db8::5]:31000"
        )
    return host, port


def _is_numeric(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
