"""The address on which the process that serves a store listens, given the address that its clients use."""

from __future__ import annotations

import errno
import socket
from collections.abc import Callable

from aiocoll.errors import StoreUnavailableError
from aiocoll.runtime import Runtime
from aiocoll.security.keys import is_loopback
from aiocoll.store.address import StoreEndpoint, is_unix, literal, means_loopback, resolve

__all__ = ["find_address", "local_address"]

#: Seconds between two look-ups of an unknown name: name servers cache that they do not know it.
_RETRY = 0.5
#: All addresses; the IPv6 wildcard includes IPv4.
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
    """Return the address to listen on, that of `host` if it is one of this machine; and why ranks may not reach it.

    A name may become resolvable only while this waits. The machine's own name may resolve to loopback here (Debian
    writes 127.0.1.1 into /etc/hosts) and to another address elsewhere: then it listens on all addresses, given a key.

    Args:
        host: name or address that clients use.
        bind: an address of this machine to listen on where `host` is none or only its loopback; or "any".
        key: the job key; without one, the store does not listen where other machines can reach it.
        runtime: clock.
        timeout: seconds in which the name must become resolvable.
        trouble: called with the reason why this waits.

    Raises:
        StoreUnavailableError: `host` cannot be resolved, or is not of this machine.
        AuthenticationError: other machines can reach it and there is no key.
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
    if outside is not None or (own and (not named or means_loopback(host))):
        return outside or own[0], None
    if bind is not None:
        return bind, None
    if key is not None:
        return _wildcard(), None
    return own[0], (
        f"the store listens on {own[0]} only, since {host!r} resolves to it here (/etc/hosts?), so ranks on other "
        "hosts cannot reach it: give its real address, and a job key"
    )


def local_address(host: str) -> str:
    """Return the address by which this process reaches its own store on `host`."""
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
        trouble(f"the store cannot listen on {why} as yet")
        await runtime.sleep(min(_RETRY, left))


def _wildcard() -> str:
    return next(host for host in _ANY if (endpoint := literal(host, 0)) is not None and _is_own(endpoint))


def _is_own(endpoint: StoreEndpoint) -> bool:
    """Whether this machine has the address, even if another program uses the port."""
    try:
        with socket.socket(endpoint.family, socket.SOCK_DGRAM) as probe:
            probe.bind((endpoint.sockaddr[0], 0, *endpoint.sockaddr[2:]))
    except OSError as error:
        return error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)
    return True
