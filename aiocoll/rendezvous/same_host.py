"""Which ranks share a host, tried out: two that say so may still not reach each other's unix sockets.

They may run as different users, or on virtual machines copied from one snapshot, which believe to be one. Then they are
on two hosts for all that follows: they reach each other by TCP, and prove the job key there.
"""

from __future__ import annotations

from itertools import count

from aiocoll.errors import AuthenticationError
from aiocoll.store import Store
from aiocoll.transport.base import Card
from aiocoll.transport.stream.transport import StreamTransport

__all__ = ["tell_hosts_apart"]


async def tell_hosts_apart(place: Store, stream: StreamTransport, *, trusted: bool) -> Card:
    """Find the ranks of this host; return what this rank's card says of it.

    The first rank of a host puts its unix socket into the store, and the others try it. Those that cannot reach it have
    a first rank of their own, and so on, so that ranks which do reach each other stay together.

    Args:
        place: where the ranks meet.
        stream: listens; its card names the host it believes to be on.
        trusted: there is a job key, so that TCP may connect what the kernel keeps apart.

    Raises:
        AuthenticationError: without a key, another user's ranks stay out.
    """
    claimed, own = stream.card["host"], stream.card["unix"]
    troubles: list[str] = []
    for number in count() if own else ():
        first = (await place.compare_set(f"unix/{claimed}/{number}", b"", own.encode())).decode(errors="replace")
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
