"""Detection of ranks on the same host, by connections to their unix sockets.

Ranks with the same host name may be unable to reach each other's unix sockets. They may run as different users, or on
virtual machines copied from one snapshot, which have the same host identity. Such ranks count as being on two hosts:
they connect by TCP and prove the job key there. With `transport="tcp"` there are no unix sockets, and only the loopback
is certain to stay on the host.
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
from aiocoll.transport.shm.process_memory import permit_reading, yama_scope
from aiocoll.transport.stream.route import find_route
from aiocoll.transport.stream.transport import StreamTransport

__all__ = ["encryption_at", "single_copy", "split_hosts"]


def encryption_at(rank: int, store: str, options: GroupOptions) -> str:
    """Return the `encryption` option that this rank uses if all ranks report the same host.

    It is the option `encryption`, except that "auto" becomes "tls" if this rank would listen outside the loopback.

    Args:
        rank: this rank.
        store: the address at which it has found the store, "" if the store has no address.
        options: its options.
    """
    try:
        host, _ = find_route(rank, {rank: store}, options.interface, options.bind, together=True)
    except (RendezvousError, ValueError):  # raised again when this rank listens
        host = ""
    return "tls" if is_encrypted(options.encryption, host) else options.encryption


def single_copy(options: GroupOptions, env: Mapping[str, str]) -> bool:
    """Return whether ranks on this host may read each other's memory (single copy).

    If a launcher started this process, permit the launcher and its other children to read the memory of this process.
    """
    if not options.single_copy:
        return False
    if (launcher := common_parent(env)) is not None:
        permit_reading(launcher)
    return yama_scope() < (1 if launcher is None else 2) or os.geteuid() == 0


async def split_hosts(store: Store, stream: StreamTransport, *, trusted: bool) -> Card:
    """Find the ranks that this rank can reach on its host, and return the card fields that describe the host.

    The first rank of a host publishes its unix socket in the store, and the others connect to it. Ranks that cannot
    reach it repeat this with another first rank. In the end ranks that can reach each other count as one host.

    Args:
        store: the store in which the ranks meet.
        stream: the listening transport; its card has the host name.
        trusted: whether there is a job key, so that TCP may connect ranks that unix sockets cannot connect.

    Raises:
        AuthenticationError: a rank runs as another user, and there is no job key.
    """
    name, own = stream.card["host"], stream.card["unix"]
    reasons: list[str] = []
    for number in count() if own else ():
        first = (await store.compare_set(f"unix/{name}/{number}", b"", own.encode())).decode(errors="replace")
        try:
            reason = None if first == own else await stream.try_unix(first)
        except AuthenticationError as error:
            if not trusted:
                raise AuthenticationError(
                    f"rank {stream.rank} runs as another user than other ranks of this host, {error}: run all ranks as "
                    "one user, or pass the same job_key= (AIOCOLL_JOB_KEY) to every rank, so that TCP can connect them"
                ) from None
            reason = str(error)
        if reason is None or not trusted:  # without a key only unix sockets can connect, so joining tries again
            break
        reasons.append(reason)
        stream.treat_as_remote(f"{name}/{number + 1}", reason)
    return {"host": stream.card["host"], "apart": "; ".join(reasons)}
