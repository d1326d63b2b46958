"""Requirements for job keys: when a key is needed, and which keys are valid."""

from __future__ import annotations

import ipaddress

from aiocoll.errors import AuthenticationError

__all__ = ["KEY_SIZE", "MIN_KEY_SIZE", "is_loopback", "require_key"]

#: Minimum size of a job key in bytes: 128 bits cannot be guessed from a recorded handshake.
MIN_KEY_SIZE = 16
#: Size of a generated job key in bytes: 256 bits, the width of the handshake's hash.
KEY_SIZE = 32

_HOW_TO_GET_A_KEY = (
    "start the job with `aiocoll run`, which makes one, or pass the same job_key= (or AIOCOLL_JOB_KEY) to every rank; "
    'make a key with: python -c "import secrets; print(secrets.token_hex(32))"'
)


def is_loopback(host: str) -> bool:
    """Return whether `host` is a loopback address or "localhost". All other names count as remote."""
    if host == "localhost":
        return True
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback


def require_key(host: str, key: bytes | None) -> None:
    """Raise an error if a job key is too short, or missing although other machines can reach `host`.

    Raises:
        AuthenticationError: the message describes how to make a key.
    """
    if key is not None and len(key) < MIN_KEY_SIZE:
        raise AuthenticationError(
            f"job_key has {len(key)} bytes, but needs at least {MIN_KEY_SIZE}: {_HOW_TO_GET_A_KEY}"
        )
    if key is None and not is_loopback(host):
        raise AuthenticationError(
            f"{host} can be reached from other machines, and there is no job key: {_HOW_TO_GET_A_KEY}"
        )
