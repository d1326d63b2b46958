"""Registration of the implementations that ship with the package; none of them is imported here."""

from __future__ import annotations

from aiocoll.store.registry import STORE_VERSION, stores
from aiocoll.transport.registry import TRANSPORT_VERSION, transports

__all__: list[str] = []

stores.register_all(
    {
        "tcp": "aiocoll.store.tcp:TCP_OPENER",
        "file": "aiocoll.store.file:FILE_OPENER",
        "redis": "aiocoll.redis.store:REDIS_OPENER",
        "rediss": "aiocoll.redis.store:REDIS_OPENER",
    },
    version=STORE_VERSION,
)
transports.register_all(
    {
        "tcp": "aiocoll.transport.registry:TCP",
        "unix": "aiocoll.transport.registry:UNIX",
        "shm": "aiocoll.transport.registry:SHM",
    },
    version=TRANSPORT_VERSION,
)
