"""Choice of the address on which a store server listens, by the address that its clients use."""

from __future__ import annotations

import errno
import socket
from collections.abc import Callable

from aiocoll.errors import StoreUnavailableError
from aiocoll.runtime import Runtime
from aiocoll.security.keys import is_loopback
from aiocoll.store.address import StoreEndpoint, is_loopback_name, is_unix, literal, resolve

__all__ = ["find_address", "local_address"]

#: Seconds between two lookups of an unknown host name. Faster ones do not help: name servers cache negative answers.
_RETRY = 0.5
#: Wildcard addresses: the socket listens on all addresses. The IPv6 wildcard includes IPv4.
_ANY = ("::", "0.0.0.0")


async def find_address(
    host: str,
    bind: str | None,
    *,
    key: bytes | None,
    runtime: Runtime,
    timeout: float,
    trouble: Callable[[str], None],
) -> tuple[str, str | None]:
    """Return the address to listen on, and the reason why other hosts may not reach it, or None.

    The address is that of `host` if `host` belongs to this machine. A name may become resolvable only during this call.
    The machine's own name may resolve to the loopback here (Debian writes 127.0.1.1 into /etc/hosts) and to another
    address on other hosts. Then the store listens on all addresses, if there is a job key.

    Args:
        host: name or address that clients use.
        bind: the address to listen on if `host` does not belong to this machine or resolves to its loopback; or "any".
        key: the job key; without one, the store does not listen at addresses that other machines can reach.
        runtime: clock.
        timeout: seconds in which the name must become resolvable.
        trouble: called with the reason while the name cannot be resolved.

    Raises:
        StoreUnavailableError: `host` cannot be resolved, or does not belong to this machine.
        AuthenticationError: other machines can reach the address, and `key` is None.
    """
    if is_unix(host):
        return host, None
    if bind == "any":
        return _wildcard(), None
    named = literal(host, 0) is None
    found = await _look_up(host, runtime, timeout, trouble)
    own = [endpoint.sockaddr[0] for endpoint in found if _is_own(endpoint)]
    if not own and bind is None:
        found[0].require_key(key)
        means = f", which means {', '.join(endpoint.sockaddr[0] for endpoint in found)} here" if named else ""
        raise StoreUnavailableError(
            f"the store cannot listen on {host}{means}: it is not an address of this machine, where rank 0 hosts the "
            "store; if it belongs to a service or a router in front of it, set bind='any' (AIOCOLL_BIND=any), or an "
            "address of this machine"
        )
    outside = next((address for address in own if not is_loopback(address)), None)
    if outside is not None or (own and (not named or is_loopback_name(host))):
        return outside or own[0], None
    if bind is not None:
        return bind, None
    if key is not None:
        return _wildcard(), None
    return own[0], (
        f"the store listens on {own[0]} only, since {host!r} resolves to it here (see /etc/hosts), so ranks on other "
        "hosts cannot reach it: pass its real address, and a job key"
    )


def local_address(host: str) -> str:
    """Return the address at which this process reaches its own store on `host`."""
    return "127.0.0.1" if host in _ANY else host


async def _look_up(host: str, runtime: Runtime, timeout: float, trouble: Callable[[str], None]) -> list[StoreEndpoint]:
    began = runtime.time()
    while True:
        try:
            return await resolve(host, 0)
        except (OSError, UnicodeError) as error:
            why = f"{host!r}, which cannot be resolved ({getattr(error, 'strerror', None) or error})"
            left = began + timeout - runtime.time()
            if left <= 0 or isinstance(error, UnicodeError):
                raise StoreUnavailableError(
                    f"the store cannot listen on {why}; tried for {runtime.time() - began:.1f} s: it must be a name or "
                    "an address of this machine, where rank 0 hosts the store"
                ) from error
        trouble(f"the store cannot listen yet on {why}")
        await runtime.sleep(min(_RETRY, left))


def _wildcard() -> str:
    return next(host for host in _ANY if (endpoint := literal(host, 0)) is not None and _is_own(endpoint))


def _is_own(endpoint: StoreEndpoint) -> bool:
    """Return whether the address belongs to this machine, even if another program uses its port."""
    try:
        with socket.socket(endpoint.family, socket.SOCK_DGRAM) as probe:
            probe.bind((endpoint.sockaddr[0], 0, *endpoint.sockaddr[2:]))
    except OSError as error:
        return error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)
    return True
