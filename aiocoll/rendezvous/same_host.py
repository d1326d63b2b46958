"""Which ranks share a host, tested by connecting: two with the same host name may not reach each other's unix sockets.

They may run as different users, or on virtual machines copied from one snapshot, which have the same identity. Then
they count as two hosts: they connect by TCP, and prove the job key there. With `transport="tcp"` there are no unix
sockets, and only the loopback is sure not to leave the host.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from itertools import count

from aiocoll.errors import AuthenticationError, RendezvousError
from aiocoll.options import GroupOptions
from aiocoll.rendezvous.launchers import common_parent
from aiocoll.security.tls import is_encrypted
from aiocoll.store import Store
from aiocoll.transport.base import Card
from aiocoll.transport.shm.process_memory import permit, yama_scope
from aiocoll.transport.stream.route import find_route
from aiocoll.transport.stream.transport import StreamTransport

__all__ = ["encryption_at", "single_copy", "tell_hosts_apart"]


def encryption_at(rank: int, store: str, options: GroupOptions) -> str:
    """Return the option `encryption`, "tls" where "auto" means that although all ranks say to be on one host.

    Args:
        rank: this rank.
        store: the address at which it has found the store, "" if it is at none.
        options: its options.
    """
    try:
        host, _ = find_route(rank, {rank: store}, options.interface, options.bind, together=True)
    except (RendezvousError, ValueError):  # raised again if this rank is to listen
        host = ""
    return "tls" if is_encrypted(options.encryption, host) else options.encryption


def single_copy(options: GroupOptions, env: Mapping[str, str]) -> bool:
    """Return whether the ranks of this host may read each other's memory; let those do it that the launcher started."""
    if not options.single_copy:
        return False
    if (launcher := common_parent(env)) is not None:
        permit(launcher)
    return yama_scope() < (1 if launcher is None else 2) or os.geteuid() == 0


async def tell_hosts_apart(store: Store, stream: StreamTransport, *, trusted: bool) -> Card:
    """Find the ranks of this host; return the fields of this rank's card that describe the host.

    The first rank of a host publishes its unix socket in the store, and the others connect to it. Those that cannot
    reach it repeat this with another first rank, and so on, so that ranks that reach each other stay on one host.

    Args:
        store: where the ranks meet.
        stream: the listening transport; its card has the host name.
        trusted: there is a job key, so that TCP may connect ranks whose unix sockets cannot.

    Raises:
        AuthenticationError: ranks of another user, and there is no key.
    """
    claimed, own = stream.card["host"], stream.card["unix"]
    troubles: list[str] = []
    for number in count() if own else ():
        first = (await store.compare_set(f"unix/{claimed}/{number}", b"", own.encode())).decode(errors="replace")
        try:
            trouble = None if first == own else await stream.try_unix(first)
        except AuthenticationError as error:
            if not trusted:
                raise AuthenticationError(
                    f"rank {stream.rank} runs as another user than other ranks of this host, {error}: run all as one "
                    "user, or pass the same job_key= (AIOCOLL_JOB_KEY) to every rank, so that TCP can connect them"
                ) from None
            trouble = str(error)
        if trouble is None or not trusted:  # without a key there is no other way, so this one is tried again
            break
        troubles.append(trouble)
        stream.stand_apart(f"{claimed}/{number + 1}", trouble)
    return {"host": stream.card["host"], "apart": "; ".join(troubles)}
